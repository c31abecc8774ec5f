"""The domain XML of a job, built from its checked spec with ElementTree.

The meaning of each element is defined by libvirt: https://libvirt.org/formatdomain.html. The devices are in
`vmgahp.domain.devices`.
"""

from xml.etree import ElementTree as etree

from vmgahp import errors
from vmgahp.domain.devices import PC, Q35, VIRT, Host, add_devices, add_text
from vmgahp.job.kinds import ARM, BIOS, UEFI, UEFI_SECURE, VIRTIOFS
from vmgahp.job.spec import JobSpec
from vmgahp.text import not_for_xml

__all__ = ["Host", "build", "firmware_of"]

LEAST_TB_CACHE_MIB = 4
"""The minimum size of TCG's cache for each CPU, in MiB; TCG divides the cache into parts of 2 MiB."""

_FIRMWARE_FEATURES = {
    UEFI: (("enrolled-keys", "no"), ("secure-boot", "no")),
    UEFI_SECURE: (("enrolled-keys", "yes"), ("secure-boot", "yes")),
}
"""The features by which libvirt selects a firmware (``/usr/share/qemu/firmware``). By itself it may select one that
boots signed systems only, such as Debian's first for aarch64, with which a guest shows only "Security Violation"; and
without a variable store libvirt 12 selects one that is only for guests of AMD's SEV."""


def build(spec: JobSpec, host: Host) -> str:
    """Make the domain XML for `spec` on `host`.

    Raises `errors.JobFault` if a value of the job has a character that XML does not allow, or requests a device for
    which its machine has no place.
    """
    firmware = firmware_of(spec, host.arch)
    machine = VIRT if host.arch == ARM else PC if firmware == BIOS else Q35
    domain = begin(spec, host.domain_type, host.uuid)
    _memory_backing(domain, spec)
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


def _memory_backing(domain: etree.Element, spec: JobSpec) -> None:
    """Share the guest's memory with virtiofsd, which reads and writes it, if there are shared directories."""
    if any(share.kind == VIRTIOFS for share in spec.devices.shares):
        backing = etree.SubElement(domain, "memoryBacking")
        etree.SubElement(backing, "source", type="memfd")
        etree.SubElement(backing, "access", mode="shared")


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
