"""The domain XML of a job: built from the job's checked wishes with ElementTree, never pasted together.

What an element means is libvirt's business: https://libvirt.org/formatdomain.html.
"""

import re
from typing import NamedTuple
from xml.etree import ElementTree as etree

from vmgahp import errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vmgahp.images import Layer
    from vmgahp.job import Disk, JobSpec

_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What ElementTree would write all the same."""

_BUS_OF_DEVICE = (("vd", "virtio"), ("sd", "sata"), ("hd", "ide"), ("xvd", "virtio"), ("fd", "fdc"))
"""The bus that a device name stands for. `sd` is SATA, which every guest of the last fifteen years can boot
from and read; libvirt's own guess is an LSI SCSI controller that current guests have no driver for."""


class Host(NamedTuple):
    """What the machine and its settings contribute to a domain."""

    uuid: str
    domain_type: str
    """``kvm``, or ``qemu`` for TCG."""
    cpu_mode: str
    """libvirt's ``<cpu mode>``, or empty for QEMU's default CPU."""
    dac_label: str = ""
    """``+uid:+gid`` that QEMU runs as, or empty for libvirt's own choice."""
    console_socket: str = ""
    """Unix socket that listens for the serial console, or empty for a pseudo terminal."""
    vnc_password: str = ""
    nat_network: str = "default"
    bridge: str = ""
    backing: "Mapping[str, Sequence[Layer]]" = {}
    """The backing files of each image, by its path (`vmgahp.images.backing_chain`)."""
    passt: bool = False
    """User networking by passt; otherwise by QEMU's own slirp."""


def build(spec: "JobSpec", host: Host) -> str:
    """The domain XML for `spec` on `host`.

    Raises `errors.JobFault` when a value of the job cannot stand in XML at all.
    """
    domain = etree.Element("domain", type=host.domain_type)
    _text(domain, "name", spec.name)
    _text(domain, "uuid", host.uuid)
    # The kill mode finds VMs of types that HTCondor does not know by the job's scratch directory.
    _text(domain, "description", spec.working_dir)
    _text(domain, "memory", str(spec.memory_mib), unit="MiB")
    _text(domain, "vcpu", str(spec.vcpus))
    _text(etree.SubElement(domain, "os"), "type", "hvm")
    features = etree.SubElement(domain, "features")
    for feature in ("acpi", "apic", "pae"):
        etree.SubElement(features, feature)
    if host.cpu_mode:
        etree.SubElement(domain, "cpu", mode=host.cpu_mode)
    # A guest that powers off or panics has ended its job; one that reboots has not.
    _text(domain, "on_poweroff", "destroy")
    _text(domain, "on_reboot", "restart")
    _text(domain, "on_crash", "destroy")
    devices = etree.SubElement(domain, "devices")
    if any(_bus(disk) == "scsi" for disk in spec.disks):
        etree.SubElement(devices, "controller", type="scsi", index="0", model="virtio-scsi")
    for order, disk in enumerate(spec.disks, start=1):
        _disk(devices, disk, order, host)
    _network(devices, spec, host)
    _console(devices, host)
    if spec.vnc:
        _vnc(devices, host)
    if host.dac_label:
        label = etree.SubElement(domain, "seclabel", type="static", model="dac", relabel="yes")
        _text(label, "label", host.dac_label)
    etree.indent(domain)
    text = etree.tostring(domain, encoding="unicode")
    if found := _NO_XML.search(text):
        raise errors.JobFault(
            errors.INVALID_DISK_PARAM,
            f"The job cannot be described to libvirt: {found[0]!r} is no character of XML",
            "use names of printable UTF-8 characters in vm_disk.",
        )
    return text


def bus_of(device: str) -> str:
    """The bus for a device name such as vda."""
    for prefix, bus in _BUS_OF_DEVICE:
        if device.startswith(prefix):
            return bus
    raise ValueError(f"device name {device!r} names no bus")


def _text(parent: etree.Element, tag: str, text: str, **attributes: str) -> None:
    etree.SubElement(parent, tag, attributes).text = text


def _bus(disk: "Disk") -> str:
    """The bus of a disk. QEMU's IDE and SATA disks cannot be read-only; of a SATA disk the guest knows no
    more than the name sda, which a SCSI disk has too."""
    bus = bus_of(disk.device)
    if disk.kind == "disk" and not disk.writable:
        if bus == "sata":
            return "scsi"
        if bus == "ide":
            raise errors.JobFault(
                errors.INVALID_DISK_PARAM,
                f"VMPARAM_vm_Disk attaches {disk.path} read-only as {disk.device}, and an IDE disk can be written.",
                "give the disk a device name such as vdb or sdb, or the permission w.",
            )
    return bus


def _disk(devices: etree.Element, disk: "Disk", order: int, host: Host) -> None:
    bus = _bus(disk)
    if disk.partition:
        raise errors.JobFault(
            errors.INVALID_DISK_PARAM,
            f"VMPARAM_vm_Disk names the partition {disk.device}{disk.partition}, and only Xen has such disks.",
            f"name the whole disk, {disk.device}, in vm_disk.",
        )
    # virtio has no CD-ROM drives; a read-only disk is what the guest can mount just as well.
    cdrom = disk.kind == "cdrom" and bus in ("sata", "ide")
    kind = "disk" if disk.kind == "cdrom" and not cdrom else disk.kind
    element = etree.SubElement(devices, "disk", type="file", device=kind)
    etree.SubElement(element, "driver", name="qemu", type=disk.format)
    source = etree.SubElement(element, "source", file=disk.path)
    if host.dac_label or not disk.transferred:
        # QEMU has the rights of the job's user, or must have its own: libvirt may make a file QEMU's by
        # changing its owner, and that is for the job's own files alone, never for what it merely names.
        _keep_owner(source)
    store = element
    for layer in host.backing.get(disk.path, ()):
        store = etree.SubElement(store, "backingStore", type="file")
        etree.SubElement(store, "format", type=layer.format)
        _keep_owner(etree.SubElement(store, "source", file=layer.path))
    # An empty one ends the chain: libvirt is not to look into the image for more.
    etree.SubElement(store, "backingStore")
    etree.SubElement(element, "target", dev=disk.device, bus=bus)
    if not disk.writable or disk.kind == "cdrom":
        etree.SubElement(element, "readonly")
    etree.SubElement(element, "boot", order=str(order))


def _keep_owner(source: etree.Element) -> None:
    etree.SubElement(source, "seclabel", model="dac", relabel="no")


def _network(devices: etree.Element, spec: "JobSpec", host: Host) -> None:
    if not spec.networking:
        return
    kind = {"nat": "network", "bridge": "bridge", "user": "user"}[spec.networking_type]
    interface = etree.SubElement(devices, "interface", type=kind)
    if spec.mac:
        etree.SubElement(interface, "mac", address=spec.mac)
    if kind == "network":
        etree.SubElement(interface, "source", network=host.nat_network)
    elif kind == "bridge":
        etree.SubElement(interface, "source", bridge=host.bridge)
    etree.SubElement(interface, "model", type="virtio")
    if kind == "user" and host.passt:
        etree.SubElement(interface, "backend", type="passt")


def _console(devices: etree.Element, host: Host) -> None:
    if host.console_socket:
        serial = etree.SubElement(devices, "serial", type="unix")
        etree.SubElement(serial, "source", mode="connect", path=host.console_socket)
    else:
        serial = etree.SubElement(devices, "serial", type="pty")
    etree.SubElement(serial, "target", port="0")


def _vnc(devices: etree.Element, host: Host) -> None:
    vnc = etree.SubElement(devices, "graphics", type="vnc", port="-1", autoport="yes", listen="127.0.0.1")
    if host.vnc_password:
        vnc.set("passwd", host.vnc_password)
    etree.SubElement(vnc, "listen", type="address", address="127.0.0.1")
