"""The devices of a domain, from disks and interfaces to the shared directory, as libvirt's XML."""

from collections.abc import Iterable
from typing import NamedTuple
from xml.etree import ElementTree as etree

from vmgahp import errors
from vmgahp.domain.model import AGENT
from vmgahp.images.formats import BackingFile
from vmgahp.job.attributes import VIRTIOFS
from vmgahp.job.devices import Share
from vmgahp.job.exit_code import PORT
from vmgahp.job.spec import Disk, JobSpec, Nic

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
    agent: bool = False
    share_sockets: tuple[str, ...] = ()
    """The Unix socket of virtiofsd for each shared directory, empty for one that QEMU shares itself."""
    tb_cache_mib: int = 0
    """The size to which TCG's cache of translated code may grow, in MiB; 0 for QEMU's own choice."""


def add_devices(domain: etree.Element, spec: JobSpec, host: Host, machine: str) -> None:
    """Add all devices of the job. Raises `errors.JobFault` for one that the machine cannot have."""
    devices = etree.SubElement(domain, "devices")
    if any(_bus(disk, machine) == "scsi" for disk in spec.disks):
        etree.SubElement(devices, "controller", type="scsi", index="0", model="virtio-scsi")
    for order, disk in enumerate(spec.disks, start=1):
        _disk(devices, disk, order, machine)
    for number, nic in enumerate(spec.nics):
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
    for number, share in enumerate(spec.devices.shares):
        _share(devices, share, host.share_sockets[number] if host.share_sockets else "")


def bus_of(device: str) -> str:
    """Return the bus for a device name such as vda."""
    for prefix, bus in _BUS_OF_DEVICE:
        if device.startswith(prefix):
            return bus
    raise ValueError(f"device name {device!r} names no bus")


def add_text(parent: etree.Element, tag: str, text: str, **attributes: str) -> None:
    """Add an element with text."""
    etree.SubElement(parent, tag, attributes).text = text


# Disks


def _bus(disk: Disk, machine: str) -> str:
    """Choose a disk's bus: read-only ones by SCSI, which IDE and SATA cannot be; the guest sees the same name sda."""
    bus, read_only = bus_of(disk.device), disk.kind == "disk" and not disk.writable
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


# Everything else


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
    if host.console_socket:
        serial = etree.SubElement(devices, "serial", type="unix")
        etree.SubElement(serial, "source", mode="connect", path=host.console_socket)
    else:
        serial = etree.SubElement(devices, "serial", type="pty")
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
