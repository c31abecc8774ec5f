"""The domain XML of a job, built from its checked spec with ElementTree.

The meaning of each element is defined by libvirt: https://libvirt.org/formatdomain.html.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from xml.etree import ElementTree as etree

from vmgahp import errors
from vmgahp.domain.model import AGENT, memory
from vmgahp.errors import JobFault
from vmgahp.host import proc
from vmgahp.images.formats import BackingFile
from vmgahp.job.attributes import ARM, BIOS, UEFI, UEFI_SECURE, VIRTIOFS, X86, Share
from vmgahp.job.exit_code import PORT
from vmgahp.job.spec import Disk, JobSpec, Nic
from vmgahp.job.xen import XenBoot
from vmgahp.text import not_for_xml

LEAST_TB_CACHE_MIB = 4
"""The minimum size of TCG's cache for each CPU, in MiB; TCG divides the cache into parts of 2 MiB."""

_FIRMWARE_FEATURES = ("enrolled-keys", "secure-boot")
"""The features by which libvirt selects a firmware (``/usr/share/qemu/firmware``). By itself it may select one that
boots signed systems only, such as Debian's first for aarch64, with which a guest shows only "Security Violation"; and
without a variable store libvirt 12 selects one that is only for guests of AMD's SEV."""

PC, Q35, VIRT = "pc", "q35", "virt"
"""The machine types of guests: QEMU's classic PC, the PC for UEFI, and that of aarch64."""

_BUS_OF_DEVICE = (("vd", "virtio"), ("sd", "sata"), ("hd", "ide"), ("xvd", "virtio"), ("fd", "fdc"))
"""The bus for the prefix of a device name. `sd` is SATA, which every guest of the last fifteen years can boot from and
read; libvirt's own guess is an LSI SCSI controller for which current guests have no driver."""

_LACKS = {PC: (), Q35: ("ide",), VIRT: ("ide", "fdc")}

NETWORKS = {"nat": "network", "bridge": "bridge", "user": "user"}


class Host(NamedTuple):
    """The contribution of the machine and its settings to a domain."""

    uuid: str
    domain_type: str
    """The type of the domain: ``kvm``, or ``qemu`` for TCG."""
    cpu_mode: str
    """The value of libvirt's ``<cpu mode>``, or empty for QEMU's default CPU."""
    dac_label: str = ""
    """The user of QEMU as ``+uid:+gid``, or empty for libvirt's own choice."""
    console_socket: str = ""
    """The Unix socket that listens for the serial console, or empty for a pseudo terminal."""
    vnc_password: str = ""
    nat_network: str = "default"
    bridge: str = ""
    passt: bool = False
    """True if user networking is done by passt; otherwise by QEMU's own slirp."""
    arch: str = ""
    """The architecture of the guest, ``x86_64`` or ``aarch64``; empty for x86_64 on itself."""
    tpm_socket: str = ""
    exit_socket: str = ""
    run_sockets: tuple[tuple[str, str], ...] = ()
    """The ports of a guest that runs a program: the name of each, and the Unix socket that listens to it."""
    ssh_address: str = ""
    ssh_ports: tuple[tuple[int, int], ...] = ()
    """The guest's ports that passt forwards, each with the port of the machine at `ssh_address`."""
    panic: str = ""
    """The model of the device through which a guest's kernel reports a panic; empty for none."""
    devices: tuple[str, ...] = ()
    """The machine's devices for the guest: PCI addresses as sysfs writes them, and UUIDs of mediated devices."""
    agent: bool = False
    share_sockets: tuple[str, ...] = ()
    """The Unix socket of virtiofsd for each shared directory, empty for one that QEMU shares itself."""
    tb_cache_mib: int = 0
    """The size to which TCG's cache of translated code may grow, in MiB; 0 for QEMU's own choice."""


def build(spec: JobSpec, host: Host) -> str:
    """Make the domain XML for `spec` on `host`. Raises `JobFault` for a character or a device that is impossible."""
    firmware = firmware_of(spec, host.arch)
    machine = VIRT if host.arch == ARM else PC if firmware == BIOS else Q35
    domain = begin(spec, host.domain_type, host.uuid)
    if any(share.kind == VIRTIOFS for share in spec.devices.shares):  # it reads and writes the guest's memory
        backing = etree.SubElement(domain, "memoryBacking")
        etree.SubElement(backing, "source", type="memfd")
        etree.SubElement(backing, "access", mode="shared")
    _os(domain, host.arch, machine, firmware)
    features = etree.SubElement(domain, "features")
    for feature in ("acpi",) if machine == VIRT else ("acpi", "apic", "pae"):
        etree.SubElement(features, feature)
    if firmware == UEFI_SECURE and machine == Q35:
        etree.SubElement(features, "smm", state="on")
    if host.tb_cache_mib and host.domain_type == "qemu":
        cache = max(host.tb_cache_mib, LEAST_TB_CACHE_MIB * spec.vm.vcpus)
        add_text(etree.SubElement(features, "tcg"), "tb-cache", str(cache), unit="MiB")
    _cpu(domain, spec, host)
    if spec.devices.clock:
        etree.SubElement(domain, "clock", offset=spec.devices.clock)
    if spec.devices.run and host.arch in ("", X86):
        # libvirt replaces it at a restore, by which the guest's kernel notices that it may be a copy.
        add_text(domain, "genid", host.uuid)
    # The domain of a panicked guest with a display is preserved until the next STATUS has seen it.
    add_ends(domain, "preserve" if spec.vnc else "destroy", "destroy" if spec.devices.run else "restart")
    add_devices(domain, spec, host, machine)
    if host.dac_label:
        label = etree.SubElement(domain, "seclabel", type="static", model="dac", relabel="yes")
        add_text(label, "label", host.dac_label)
    return finished(domain, errors.INVALID_DISK_PARAM, "use names of printable UTF-8 characters in vm_disk.")


def begin(spec: JobSpec, domain_type: str, uuid: str) -> etree.Element:
    """Make a domain with the elements that every job has."""
    domain = etree.Element("domain", type=domain_type)
    add_text(domain, "name", spec.vm.name)
    add_text(domain, "uuid", uuid)
    # For VM types that HTCondor does not know, the kill mode finds VMs by the job's scratch directory.
    add_text(domain, "description", spec.vm.working_dir)
    add_text(domain, "memory", str(spec.vm.memory_mib), unit="MiB")
    add_text(domain, "vcpu", str(spec.vm.vcpus))
    return domain


def add_ends(domain: etree.Element, on_crash: str = "destroy", on_reboot: str = "restart") -> None:
    """Add the actions for the guest's end: a guest that powers off or panics has ended its job.

    A reboot does not end the job, unless the guest has a program to run, of which nothing would be left.
    """
    add_text(domain, "on_poweroff", "destroy")
    add_text(domain, "on_reboot", on_reboot)
    add_text(domain, "on_crash", on_crash)


def finished(domain: etree.Element, code: str, hint: str) -> str:
    """Format a domain as text. Raises `errors.JobFault` for a character that XML does not allow."""
    etree.indent(domain)
    text = etree.tostring(domain, encoding="unicode")
    if found := not_for_xml(text):
        raise errors.JobFault(code, f"The job cannot be described to libvirt: {found!a} is no character of XML.", hint)
    return text


def firmware_of(spec: JobSpec, arch: str) -> str:
    """Return the firmware of the job's guest: its option, or the default of its architecture."""
    return spec.devices.firmware or (UEFI if arch == ARM else BIOS)


def _os(domain: etree.Element, arch: str, machine: str, firmware: str) -> None:
    element = etree.SubElement(domain, "os")
    kind = etree.SubElement(element, "type")
    kind.text = "hvm"
    if arch:
        kind.set("arch", arch)
    if machine != PC:
        kind.set("machine", machine)
    if firmware != BIOS:
        element.set("firmware", "efi")
        features = etree.SubElement(element, "firmware")
        for name in _FIRMWARE_FEATURES:
            etree.SubElement(features, "feature", enabled="yes" if firmware == UEFI_SECURE else "no", name=name)
        etree.SubElement(element, "nvram")


def _cpu(domain: etree.Element, spec: JobSpec, host: Host) -> None:
    topology = spec.devices.topology
    if not host.cpu_mode and topology is None:
        return
    cpu = etree.SubElement(domain, "cpu")
    if host.cpu_mode:
        cpu.set("mode", host.cpu_mode)
    if topology is not None:
        numbers = {name: str(number) for name, number in topology._asdict().items()}
        etree.SubElement(cpu, "topology", {"sockets": numbers["sockets"], "dies": "1"} | numbers)


# Devices


def add_devices(domain: etree.Element, spec: JobSpec, host: Host, machine: str) -> None:
    """Add all devices of the job. Raises `errors.JobFault` for one that the machine cannot have."""
    devices = etree.SubElement(domain, "devices")
    if any(_bus(disk, machine) == "scsi" for disk in spec.disks):
        etree.SubElement(devices, "controller", type="scsi", index="0", model="virtio-scsi")
    for order, disk in enumerate(spec.disks, start=1):
        _disk(devices, disk, order, machine)
    for number, nic in enumerate(spec.vm.nics):
        _network(devices, nic, host, host.ssh_ports if number == 0 else ())
    _console(devices, host)
    if spec.devices.exit_port:
        _captured_port(devices, PORT, host.exit_socket)
    for name, path in host.run_sockets:
        _captured_port(devices, name, path)
    if host.agent:
        devices.append(agent_port())
    if spec.vnc:
        _vnc(devices, host, machine)
    if spec.devices.tpm:
        # Its swtpm runs as the job's user beside QEMU; only libvirt's user could connect to libvirt's own.
        tpm = etree.SubElement(devices, "tpm", model="tpm-tis" if machine == VIRT else "tpm-crb")
        backend = etree.SubElement(tpm, "backend", type="external")
        etree.SubElement(backend, "source", type="unix", mode="connect", path=host.tpm_socket)
    if host.panic:
        etree.SubElement(devices, "panic", model=host.panic)
    for address in host.devices:
        _machine_device(devices, address)
    for number, share in enumerate(spec.devices.shares):
        _share(devices, share, host.share_sockets[number] if host.share_sockets else "")


def add_text(parent: etree.Element, tag: str, text: str, **attributes: str) -> None:
    etree.SubElement(parent, tag, attributes).text = text


# Disks


def _bus(disk: Disk, machine: str) -> str:
    """Choose a disk's bus: read-only ones by SCSI, which IDE and SATA cannot be; the guest sees the same name sda."""
    bus = next(bus for prefix, bus in _BUS_OF_DEVICE if disk.device.startswith(prefix))
    read_only = disk.kind == "disk" and not disk.writable
    problem, hint = "", "give the disk a device name such as vdb or sdb."
    if bus in _LACKS[machine]:
        whose = f"the machine {machine}, which the firmware or the architecture of this job takes,"
        problem = f"attaches {disk.path} as {disk.device}, and {whose} has no such drive"
        hint = "give it a device name such as vda or sda."
    elif bus == "sata" and (machine == VIRT or disk.shared or read_only):
        return "scsi"  # QEMU's SATA disks cannot be shared, and aarch64's firmware has none
    elif bus == "ide" and read_only:
        problem = f"attaches {disk.path} read-only as {disk.device}, and an IDE disk can be written"
        hint = "give the disk a device name such as vdb or sdb, or the permission w."
    elif disk.shared and disk.writable and bus not in ("virtio", "scsi"):
        others = "with other writers, which QEMU does with virtio and SCSI disks only"
        problem = f"shares {disk.path} as {disk.device} {others}"
    if problem:
        raise errors.JobFault(errors.INVALID_DISK_PARAM, f"VMPARAM_vm_Disk {problem}.", hint)
    return bus


def _disk(devices: etree.Element, disk: Disk, order: int, machine: str) -> None:
    bus = _bus(disk, machine)
    if disk.partition:
        problem = f"VMPARAM_vm_Disk names the partition {disk.device}{disk.partition}, and only Xen has such disks."
        raise errors.JobFault(errors.INVALID_DISK_PARAM, problem, f"name the whole disk, {disk.device}, in vm_disk.")
    # virtio has no CD-ROM drives; a guest can mount a read-only disk instead.
    cdrom = disk.kind == "cdrom" and bus in ("sata", "ide", "scsi")
    kind = "disk" if disk.kind == "cdrom" and not cdrom else disk.kind
    element = etree.SubElement(devices, "disk", type="file", device=kind)
    driver = etree.SubElement(element, "driver", name="qemu", type=disk.format)
    if disk.shared and disk.writable:
        # Another machine's writes are not in this machine's page cache.
        driver.set("cache", "none")
    etree.SubElement(element, "source", file=disk.path)
    add_chain(element, disk.backing)
    etree.SubElement(element, "target", dev=disk.device, bus=bus)
    if not disk.writable or disk.kind == "cdrom":
        etree.SubElement(element, "readonly")
    if disk.shared:
        etree.SubElement(element, "shareable")
    etree.SubElement(element, "boot", order=str(order))


def add_chain(disk: etree.Element, chain: Iterable[BackingFile]) -> None:
    """Add the backing files of a disk; an empty element ends the list and keeps libvirt from searching the image."""
    store = disk
    for layer in chain:
        store = etree.SubElement(store, "backingStore", type="file")
        etree.SubElement(store, "format", type=layer.format)
        etree.SubElement(store, "source", file=layer.path)
    etree.SubElement(store, "backingStore")


def add_interface(devices: etree.Element, nic: Nic, nat_network: str, bridge: str) -> etree.Element:
    """Add a NIC with the part of its host side that is the same for all hypervisors."""
    kind = NETWORKS[nic.networking_type]
    interface = etree.SubElement(devices, "interface", type=kind)
    if nic.mac:
        etree.SubElement(interface, "mac", address=nic.mac)
    if kind == "network":
        etree.SubElement(interface, "source", network=nat_network)
    elif kind == "bridge":
        etree.SubElement(interface, "source", bridge=bridge)
    return interface


def _network(devices: etree.Element, nic: Nic, host: Host, ports: Iterable[tuple[int, int]]) -> None:
    interface = add_interface(devices, nic, host.nat_network, host.bridge)
    etree.SubElement(interface, "model", type=nic.model)
    if not nic.link_up:
        etree.SubElement(interface, "link", state="down")
    if nic.networking_type == "user" and host.passt:
        etree.SubElement(interface, "backend", type="passt")
        for guests, ours in ports:
            forward = etree.SubElement(interface, "portForward", proto="tcp", address=host.ssh_address)
            etree.SubElement(forward, "range", start=str(ours), to=str(guests))


def _console(devices: etree.Element, host: Host) -> None:
    serial = etree.SubElement(devices, "serial", type="unix" if host.console_socket else "pty")
    if host.console_socket:
        etree.SubElement(serial, "source", mode="connect", path=host.console_socket)
    etree.SubElement(serial, "target", port="0")


def _captured_port(devices: etree.Element, name: str, path: str) -> None:
    channel = etree.SubElement(devices, "channel", type="unix")
    etree.SubElement(channel, "source", mode="connect", path=path)
    etree.SubElement(channel, "target", type="virtio", name=name)


def agent_port() -> etree.Element:
    """Make the port of QEMU's guest agent, which is connected to libvirt itself."""
    channel = etree.Element("channel", type="unix")
    etree.SubElement(channel, "target", type="virtio", name=AGENT)
    return channel


def _vnc(devices: etree.Element, host: Host, machine: str) -> None:
    vnc = etree.SubElement(devices, "graphics", type="vnc", port="-1", autoport="yes", listen="127.0.0.1")
    if host.vnc_password:
        vnc.set("passwd", host.vnc_password)
    etree.SubElement(vnc, "listen", type="address", address="127.0.0.1")
    if machine == VIRT:
        # The only display that its firmware and its guests support; libvirt adds neither keyboard nor USB there.
        etree.SubElement(etree.SubElement(devices, "video"), "model", type="virtio")
        etree.SubElement(devices, "controller", type="usb", index="0", model="qemu-xhci")
        etree.SubElement(devices, "input", type="keyboard", bus="usb")
        etree.SubElement(devices, "input", type="tablet", bus="usb")


def _share(devices: etree.Element, share: Share, socket: str) -> None:
    if share.kind == VIRTIOFS:
        # This package starts virtiofsd and the socket exists already; libvirt would run it as root.
        element = etree.SubElement(devices, "filesystem", type="mount")
        etree.SubElement(element, "driver", type="virtiofs", queue="1024")
        etree.SubElement(element, "source", socket=socket)
    else:
        # Mapped: owners and modes that the guest sets are notes beside the files, and a link that it makes is a
        # plain file here. The guest's root works as the job's user. In a read-only directory the guest sees the
        # links that are there.
        mode = "mapped" if share.writable else "squash"
        element = etree.SubElement(devices, "filesystem", type="mount", accessmode=mode)
        etree.SubElement(element, "driver", type="path")
        etree.SubElement(element, "source", dir=share.directory)
    etree.SubElement(element, "target", dir=share.tag)
    if not share.writable and share.kind != VIRTIOFS:
        etree.SubElement(element, "readonly")


# The domain XML of a Xen job, as libvirt's libxl driver takes it
#
# A paravirtual guest has no emulated machine: its kernel is told of its memory, its CPUs, its disks, its NICs and one
# console. A job with hardware virtualization gets a PC that has the same disks and NICs.


XEN_DOMAIN_TYPE = "xen"

XEN_NETWORKS = ("nat", "bridge")
"""The networking types. User networking is QEMU's; a Xen guest's NICs have their other end in dom0's kernel."""

_XEN_BUSES = {"xvd": "xen", "sd": "scsi", "hd": "ide"}
"""The bus for the prefix of a device name. For a paravirtual guest it is only a part of the name."""


class XenHost(NamedTuple):
    """The contribution of the machine and its settings to a Xen domain."""

    uuid: str
    devices: Mapping[str, str]
    """The block device of each disk of the job, such as ``/dev/loop0``, by the disk's name in the guest."""
    kernel: str = ""
    """The path at which libxl finds the job's kernel and initrd."""
    initrd: str = ""
    nat_network: str = "default"
    bridge: str = ""


def require_xen(spec: JobSpec, boot: XenBoot) -> None:
    """Make sure that Xen has the devices that the job requests. Raises `JobFault`."""
    for disk in spec.disks:
        problem = hint = ""
        if disk.kind == "floppy" or _xen_bus(disk) is None:
            problem = f"attaches {disk.path} as {disk.device}, and Xen's guests have no such disks"
            hint = "give it a device name such as xvda or sda."
        elif disk.format != "raw":
            problem = f"gives {disk.path} the format {disk.format}, and Xen jobs have raw images only here"
            hint = "convert it with qemu-img convert -O raw, and leave the format out of vm_disk."
        if problem:
            raise JobFault(errors.INVALID_DISK_PARAM, f"VMPARAM_vm_Disk {problem}.", hint)
    for nic in spec.vm.nics:
        if nic.model != "virtio" or not nic.link_up:
            asked = f"the model {nic.model}{'' if nic.link_up else ' without its cable'}"
            problem = f"The job asks for a NIC of {asked}, and Xen's guests have Xen's own NICs only."
            raise JobFault(errors.MISMATCHED, problem, "leave model and cable out of VMPARAM_vm_NICs.")
    if spec.vnc:
        problem = "JobVMVNCConsole = true, and a Xen guest's display would be a QEMU that runs as root."
        hint = "set vm_vnc = false; what the guest prints on its console is returned as vm_console.log."
        raise JobFault(errors.MISMATCHED, problem, hint)


def build_xen(spec: JobSpec, boot: XenBoot, host: XenHost) -> str:
    """Make the domain XML for `spec` on `host`, booting as `boot` says. Raises `JobFault`."""
    domain = begin(spec, XEN_DOMAIN_TYPE, host.uuid)
    if boot.bootloader:
        add_text(domain, "bootloader", boot.bootloader)
    system = etree.SubElement(domain, "os")
    if boot.hardware:
        add_text(system, "type", "hvm", arch="x86_64", machine="xenfv")
        etree.SubElement(system, "boot", dev="hd")
        features = etree.SubElement(domain, "features")
        for feature in ("acpi", "apic", "pae"):
            etree.SubElement(features, feature)
    else:
        add_text(system, "type", "linux", arch="x86_64", machine="xenpv")
    if boot.kernel is not None:
        add_text(system, "kernel", host.kernel)
        if boot.initrd is not None:
            add_text(system, "initrd", host.initrd)
        add_text(system, "cmdline", boot.command_line)
    add_ends(domain)
    devices = etree.SubElement(domain, "devices")
    for disk in spec.disks:
        _xen_disk(devices, disk, host)
    for nic in spec.vm.nics:
        add_interface(devices, nic, host.nat_network, host.bridge)
    if boot.hardware:
        etree.SubElement(etree.SubElement(devices, "serial", type="pty"), "target", port="0")
    else:
        etree.SubElement(etree.SubElement(devices, "console", type="pty"), "target", type="xen", port="0")
    return finished(domain, errors.MISMATCHED, "use printable characters in xen_root and xen_kernel_params.")


def _xen_bus(disk: Disk) -> str | None:
    return next((bus for prefix, bus in _XEN_BUSES.items() if disk.device.startswith(prefix)), None)


def _xen_disk(devices: etree.Element, disk: Disk, host: XenHost) -> None:
    element = etree.SubElement(devices, "disk", type="block", device="disk")
    # The kernel of dom0 serves it; the alternatives all need a QEMU that runs as root.
    etree.SubElement(element, "driver", name="phy", type="raw")
    etree.SubElement(element, "source", dev=host.devices[disk.device])
    etree.SubElement(element, "target", dev=disk.device, bus=_xen_bus(disk) or "xen")
    if not disk.writable:
        etree.SubElement(element, "readonly")
    if disk.shared:
        etree.SubElement(element, "shareable")


def _machine_device(devices: etree.Element, address: str) -> None:
    """Pass a device of the machine through, which libvirt takes from its driver and gives back at the end."""
    if "." not in address:
        element = etree.SubElement(devices, "hostdev", mode="subsystem", type="mdev", model="vfio-pci")
        etree.SubElement(etree.SubElement(element, "source"), "address", uuid=address)
        return
    element = etree.SubElement(devices, "hostdev", mode="subsystem", type="pci", managed="yes")
    etree.SubElement(element, "driver", name="vfio")
    numbers = zip(("domain", "bus", "slot", "function"), re.split("[:.]", address), strict=True)
    etree.SubElement(etree.SubElement(element, "source"), "address", {name: f"0x{digits}" for name, digits in numbers})


# The limit of its memory: what QEMU needs beside the guest's was measured (docs/explanation/memory.md); the limit is
# higher, as a VM that reaches its limit is killed.

_LARGEST_TB_CACHE_MIB = 1024
"""The default size of QEMU's cache for code that TCG has translated; an eighth of the memory if that is less."""
_QEMU, _TCG, _A_CPU = 128, 64, 8
"""The MiB for QEMU itself, for TCG beside its cache, and for each CPU."""
_DEVICES = {"graphics": 32, "disk": 40, "interface": 48, "tpm": 16, "hostdev": 64}
"""The MiB for each device; a disk has a cache of 32, and an interface may have passt, which is in the VM's cgroup."""


def usual_need_mib(domain_type: str, cache_mib: int) -> int:
    """Return the MiB that QEMU may need beside its guest's memory, for one CPU, 1 GiB, a display and a disk."""
    return _need_mib(domain_type, 1024, 1, _DEVICES["graphics"] + _DEVICES["disk"], cache_mib or _usual_cache_mib())


def _need_mib(domain_type: str, guest: int, cpus: int, devices: int, cache: int) -> int:
    """Return the MiB that QEMU may need; the guest's memory, the need of its devices and TCG's cache are in MiB."""
    need = _QEMU + cpus * _A_CPU + devices + guest // 256  # its page tables
    return need + _TCG + cache * 5 // 4 if domain_type == "qemu" else need


def _usual_cache_mib() -> int:
    return min(_LARGEST_TB_CACHE_MIB, proc.physical_memory_mib() // 8)


def need_mib(domain: etree.Element) -> int:
    """Return the MiB that the QEMU of a live domain may need beside its guest's memory."""
    devices = sum(len(domain.findall(f"devices/{tag}")) * each for tag, each in _DEVICES.items())
    if domain.find("os/loader") is not None:
        devices += 64  # MiB for the firmware
    cpus = int(domain.findtext("vcpu") or 1)
    return _need_mib(domain.get("type", ""), _mib(domain, "memory"), cpus, devices, tb_cache_mib(domain))


def tb_cache_mib(domain: etree.Element) -> int:
    """Return the MiB to which TCG's cache may grow."""
    return _mib(domain, "features/tcg/tb-cache") or _usual_cache_mib()


def limit_mib(domain: etree.Element) -> int:
    """Return the limit for QEMU and its guest together, in MiB; 0 for a domain whose devices were not measured."""
    if any(domain.find(f"devices/{path}") is not None for path in ("hostdev[@type='usb']", "memory", "shmem")):
        return 0
    return _mib(domain, "memory") + need_mib(domain)


def _mib(domain: etree.Element, path: str) -> int:
    return memory(domain.find(path)) >> 20
