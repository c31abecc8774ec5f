"""The domain XML of a Xen job, as libvirt's libxl driver takes it.

A paravirtual guest has no emulated machine: its kernel is told of its memory, its CPUs, its disks, its NICs and one
console. A job with hardware virtualization gets a PC that has the same disks and NICs.
"""

from collections.abc import Mapping
from typing import NamedTuple
from xml.etree import ElementTree as etree

from vmgahp import errors
from vmgahp.domain.build import add_ends, begin, finished
from vmgahp.domain.devices import add_interface, add_text
from vmgahp.errors import JobFault
from vmgahp.job.spec import Disk, JobSpec
from vmgahp.job.xen import XenBoot

DOMAIN_TYPE = "xen"

NETWORKS = ("nat", "bridge")
"""The networking types. User networking is QEMU's; a Xen guest's NICs have their other end in dom0's kernel."""

_BUSES = {"xvd": "xen", "sd": "scsi", "hd": "ide"}
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


def require(spec: JobSpec, boot: XenBoot) -> None:
    """Make sure that Xen has the devices that the job requests. Raises `JobFault`."""
    for disk in spec.disks:
        _require_disk(disk)
    for nic in spec.nics:
        if nic.model != "virtio" or not nic.link_up:
            raise JobFault(
                errors.MISMATCHED,
                f"The job asks for a NIC of the model {nic.model}"
                f"{'' if nic.link_up else ' without its cable'}, and Xen's guests have Xen's own NICs only.",
                "leave model and cable out of VMPARAM_vm_NICs.",
            )
    if spec.vnc:
        raise JobFault(
            errors.MISMATCHED,
            "JobVMVNCConsole = true, and a Xen guest's display would be a QEMU that runs as root.",
            "set vm_vnc = false; what the guest prints on its console is returned as vm_console.log.",
        )


def build(spec: JobSpec, boot: XenBoot, host: XenHost) -> str:
    """Make the domain XML for `spec` on `host`, booting as `boot` says.

    Raises `errors.JobFault` if a value of the job has a character that XML does not allow.
    """
    domain = begin(spec, DOMAIN_TYPE, host.uuid)
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
        _disk(devices, disk, host)
    for nic in spec.nics:
        add_interface(devices, nic, host.nat_network, host.bridge)
    if boot.hardware:
        etree.SubElement(etree.SubElement(devices, "serial", type="pty"), "target", port="0")
    else:
        etree.SubElement(etree.SubElement(devices, "console", type="pty"), "target", type="xen", port="0")
    return finished(domain, errors.MISMATCHED, "use printable characters in xen_root and xen_kernel_params.")


def _require_disk(disk: Disk) -> None:
    problem = hint = ""
    if disk.kind == "floppy" or _bus(disk) is None:
        problem = f"attaches {disk.path} as {disk.device}, and Xen's guests have no such disks"
        hint = "give it a device name such as xvda or sda."
    elif disk.format != "raw":
        problem = f"gives {disk.path} the format {disk.format}, and Xen jobs have raw images only here"
        hint = "convert it with qemu-img convert -O raw, and leave the format out of vm_disk."
    if problem:
        raise JobFault(errors.INVALID_DISK_PARAM, f"VMPARAM_vm_Disk {problem}.", hint)


def _bus(disk: Disk) -> str | None:
    return next((bus for prefix, bus in _BUSES.items() if disk.device.startswith(prefix)), None)


def _disk(devices: etree.Element, disk: Disk, host: XenHost) -> None:
    element = etree.SubElement(devices, "disk", type="block", device="disk")
    # The kernel of dom0 serves it; the alternatives all need a QEMU that runs as root.
    etree.SubElement(element, "driver", name="phy", type="raw")
    etree.SubElement(element, "source", dev=host.devices[disk.device])
    etree.SubElement(element, "target", dev=disk.device, bus=_bus(disk) or "xen")
    if not disk.writable:
        etree.SubElement(element, "readonly")
    if disk.shared:
        etree.SubElement(element, "shareable")
