"""The domain XML of a job, built from its checked spec with ElementTree.

What an element means is libvirt's business: https://libvirt.org/formatdomain.html. The devices are in
`domain_devices`.
"""

import re
from xml.etree import ElementTree as etree

from vmgahp import errors
from vmgahp.domain.devices import PC, Q35, VIRT, Host, add_devices, add_text
from vmgahp.job.devices import ARM, BIOS, UEFI, UEFI_SECURE
from vmgahp.job.spec import JobSpec

__all__ = ["Host", "build", "firmware_of"]

_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What ElementTree would write all the same."""

_FIRMWARE_FEATURES = {
    UEFI: (("enrolled-keys", "no"), ("secure-boot", "no")),
    UEFI_SECURE: (("enrolled-keys", "yes"), ("secure-boot", "yes")),
}
"""What libvirt chooses a firmware by (``/usr/share/qemu/firmware``). Left to itself it may take one that boots
signed systems only, such as Debian's first for aarch64, of which a guest would see no more than "Security
Violation"."""


def build(spec: JobSpec, host: Host) -> str:
    """The domain XML for `spec` on `host`.

    Raises `errors.JobFault` when a value of the job cannot stand in XML at all, or asks for a device that its
    machine has no place for.
    """
    firmware = firmware_of(spec, host.arch)
    machine = VIRT if host.arch == ARM else PC if firmware == BIOS else Q35
    domain = etree.Element("domain", type=host.domain_type)
    add_text(domain, "name", spec.name)
    add_text(domain, "uuid", host.uuid)
    # The kill mode finds VMs of types that HTCondor does not know by the job's scratch directory.
    add_text(domain, "description", spec.working_dir)
    add_text(domain, "memory", str(spec.memory_mib), unit="MiB")
    add_text(domain, "vcpu", str(spec.vcpus))
    _os(domain, host.arch, machine, firmware)
    features = etree.SubElement(domain, "features")
    for feature in ("acpi",) if machine == VIRT else ("acpi", "apic", "pae"):
        etree.SubElement(features, feature)
    if firmware == UEFI_SECURE:
        etree.SubElement(features, "smm", state="on")
    _cpu(domain, spec, host)
    # A guest that powers off or panics has ended its job; one that reboots has not. What a panic shows is kept until
    # the next STATUS has seen it.
    add_text(domain, "on_poweroff", "destroy")
    add_text(domain, "on_reboot", "restart")
    add_text(domain, "on_crash", "preserve" if spec.vnc else "destroy")
    add_devices(domain, spec, host, machine)
    if host.dac_label:
        label = etree.SubElement(domain, "seclabel", type="static", model="dac", relabel="yes")
        add_text(label, "label", host.dac_label)
    etree.indent(domain)
    text = etree.tostring(domain, encoding="unicode")
    if found := _NO_XML.search(text):
        raise errors.JobFault(
            errors.INVALID_DISK_PARAM,
            f"The job cannot be described to libvirt: {found[0]!r} is no character of XML",
            "use names of printable UTF-8 characters in vm_disk.",
        )
    return text


def firmware_of(spec: JobSpec, arch: str) -> str:
    """The firmware that the job's guest boots by: its option, or what its architecture has."""
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
        for name, enabled in _FIRMWARE_FEATURES[firmware]:
            etree.SubElement(features, "feature", enabled=enabled, name=name)


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
