"""Huge pages for a guest's memory, if the administrator has reserved some (VM_HUGEPAGES).

A guest that finds too few free pages starts without them: that is no fault, and VMs do not wait for them.
"""

from xml.etree import ElementTree as etree

from vmgahp.domain import compare
from vmgahp.drivers.libvirt import qemu_process

_MEMINFO = "/proc/meminfo"
_LONGEST = 1 << 14


def given(xml: str) -> str:
    """Return the description with huge pages; unchanged if too few are free, or if it has a setting for them itself."""
    domain = etree.fromstring(xml)
    is_said = domain.find("memoryBacking/hugepages") is not None
    if is_said or not qemu_process.is_qemu(domain.get("type", "")) or not _has_room(domain):
        return xml
    backing = domain.find("memoryBacking")
    if backing is None:
        backing = etree.Element("memoryBacking")
        domain.insert(list(domain).index(domain.find("memory")) + 1, backing)  # type: ignore[arg-type]
    backing.insert(0, etree.Element("hugepages"))
    return etree.tostring(domain, encoding="unicode")


def as_there_are(xml: str) -> str:
    """Return the description of a saved VM, without huge pages if others have taken them meanwhile."""
    domain = etree.fromstring(xml)
    backing = domain.find("memoryBacking")
    huge = backing.find("hugepages") if backing is not None else None
    if backing is None or huge is None or _has_room(domain):
        return xml
    backing.remove(huge)
    return etree.tostring(domain, encoding="unicode")


def _has_room(domain: etree.Element) -> bool:
    """Return True if enough pages are free for the guest's memory, which must be a multiple of a page."""
    with open(_MEMINFO, "rb") as file:
        rows = dict(line.split(b":", 1) for line in file.read(_LONGEST).splitlines() if b":" in line)
    names = b"HugePages_Free", b"HugePages_Rsvd", b"Hugepagesize"
    free, promised, kib = (int(rows.get(name, b"0").split()[0]) for name in names)
    memory = compare.memory(domain.find("memory")) >> 10
    return kib > 0 and memory % kib == 0 and 0 < memory <= (free - promised) * kib
