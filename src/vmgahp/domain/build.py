"""The domain XML of a job, built from its checked spec with ElementTree.

The meaning of each element is defined by libvirt: https://libvirt.org/formatdomain.html. The devices are in
`vmgahp.domain.devices`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple
from xml.etree import ElementTree as etree

from vmgahp import errors
from vmgahp.domain.devices import PC, Q35, VIRT, Host, add_devices, add_interface, add_text
from vmgahp.errors import JobFault
from vmgahp.job.attributes import ARM, BIOS, UEFI, UEFI_SECURE, VIRTIOFS
from vmgahp.job.spec import Disk, JobSpec
from vmgahp.job.xen import XenBoot
from vmgahp.text import not_for_xml

LEAST_TB_CACHE_MIB = 4
"""The minimum size of TCG's cache for each CPU, in MiB; TCG divides the cache into parts of 2 MiB."""

_FIRMWARE_FEATURES = ("enrolled-keys", "secure-boot")
"""The features by which libvirt selects a firmware (``/usr/share/qemu/firmware``). By itself it may select one that
boots signed systems only, such as Debian's first for aarch64, with which a guest shows only "Security Violation"; and
without a variable store libvirt 12 selects one that is only for guests of AMD's SEV."""


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
        cache = max(host.tb_cache_mib, LEAST_TB_CACHE_MIB * spec.vcpus)
        add_text(etree.SubElement(features, "tcg"), "tb-cache", str(cache), unit="MiB")
    _cpu(domain, spec, host)
    if spec.devices.clock:
        etree.SubElement(domain, "clock", offset=spec.devices.clock)
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
    add_text(domain, "name", spec.name)
    add_text(domain, "uuid", uuid)
    # For VM types that HTCondor does not know, the kill mode finds VMs by the job's scratch directory.
    add_text(domain, "description", spec.working_dir)
    add_text(domain, "memory", str(spec.memory_mib), unit="MiB")
    add_text(domain, "vcpu", str(spec.vcpus))
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


# Domains of Xen
#
# The domain XML of a Xen job, as libvirt's libxl driver takes it.
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
    for nic in spec.nics:
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
    for nic in spec.nics:
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


# The memory that a VM's QEMU needs beside that of its guest
#
# The need was measured (docs/explanation/memory.md); the limit here is higher, because a VM that reaches its limit is
# killed.


LARGEST_TB_CACHE_MIB = 1024
"""The default size of QEMU's cache for code that TCG has translated; an eighth of the memory if that is less."""

_QEMU, _TCG, _A_CPU, _A_FIRMWARE = 128, 64, 8, 64
"""The MiB for QEMU itself, for TCG beside its cache, for each CPU, and for a firmware."""
_DEVICES = {"graphics": 32, "disk": 40, "interface": 48, "tpm": 16}
"""The MiB for each device; a disk has a cache of 32, and passt, which libvirt starts for an interface, is in the VM's
cgroup."""


def usual_need_mib(domain_type: str, cache_mib: int) -> int:
    """Return the MiB that QEMU may need beside its guest's memory, for one CPU, 1 GiB, a display and a disk."""
    return _need(domain_type, 1024, 1, _DEVICES["graphics"] + _DEVICES["disk"], cache_mib or _tcgs_own_mib())


def need_mib(domain: etree.Element) -> int:
    """Return the MiB that the QEMU of a live domain may need beside its guest's memory."""
    devices = sum(len(domain.findall(f"devices/{tag}")) * each for tag, each in _DEVICES.items())
    if domain.find("os/loader") is not None:
        devices += _A_FIRMWARE
    cpus = int(domain.findtext("vcpu") or 1)
    return _need(domain.get("type", ""), _mib(domain, "memory"), cpus, devices, tb_cache_mib(domain))


def tb_cache_mib(domain: etree.Element) -> int:
    """Return the MiB to which TCG's cache may grow."""
    return _mib(domain, "features/tcg/tb-cache") or _tcgs_own_mib()


def limit_mib(domain: etree.Element) -> int:
    """Return the limit for QEMU and its guest together, in MiB; 0 for a domain whose devices were not measured."""
    if any(domain.find(f"devices/{tag}") is not None for tag in ("hostdev", "memory", "shmem")):
        return 0
    return _mib(domain, "memory") + need_mib(domain)


def _need(domain_type: str, guest: int, cpus: int, devices: int, cache: int) -> int:
    need = _QEMU + cpus * _A_CPU + devices + guest // 256  # its page tables
    return need + _TCG + cache * 5 // 4 if domain_type == "qemu" else need


def _tcgs_own_mib() -> int:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    return min(LARGEST_TB_CACHE_MIB, whole // 8)


def _mib(domain: etree.Element, path: str) -> int:
    from vmgahp.domain import compare  # of no use to a probe

    return compare.memory(domain.find(path)) >> 20


__all__ = ["Host", "build", "firmware_of"]
