"""Verification that the domain that libvirt made is the one that was requested.

libvirt fills in what a description leaves open and may change other parts, and the author of the description, this
package or LIBVIRT_XML_SCRIPT, may err. So before a guest runs its first instruction the live XML is compared with the
job and with the requested XML: memory, CPUs, disks with their backing files, interfaces, the user that QEMU runs as;
and every device must have been requested, or be one of the few that libvirt adds to any VM and that give no access to
the host.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple
from xml.etree import ElementTree as etree

from vmgahp.domain.build import NETWORKS
from vmgahp.domain.model import OTHER, Side, equal, is_added, is_kept, is_libvirts_own, memory, row_of, says, value
from vmgahp.job.spec import JobSpec

MEMORY_GRAIN_KIB = {"ppc64": 256 << 10, "ppc64le": 256 << 10}
"""The KiB to which libvirt rounds the memory up on some architectures; on others it rounds to a MiB."""

_OF_A_NETWORK = ("network", "bridge", "direct", "hostdev")
"""The types that an interface on a libvirt network may have: libvirt resolves some kinds of network."""

_IMAGES = frozenset(("disk", "filesystem", "hostdev", "memory", "interface"))
"""The devices whose host side libvirt never chooses by itself."""


class Mismatch(Exception):
    """A domain that differs from the request; `differences` are sentences without their full stop."""

    def __init__(self, differences: Sequence[str]) -> None:
        super().__init__("; ".join(differences))
        self.differences = tuple(differences)


class _Disk(NamedTuple):
    file: str
    format: str
    read_only: bool
    backing: tuple[tuple[str, str], ...]
    shared: bool


def against_job(live: str, asked: str, spec: JobSpec) -> None:
    """Compare a live domain with the job and with the XML that this package wrote for it. Raises `Mismatch`."""
    domain, wanted = etree.fromstring(live), etree.fromstring(asked)
    more, less = _amounts(domain, spec)
    disks = {
        disk.device: _Disk(
            disk.path,
            disk.format,
            not disk.writable or disk.kind == "cdrom",
            tuple((image.path, image.format) for image in disk.backing),
            disk.shared,
        )
        for disk in spec.disks
    }
    found = [*more, *less, *_compare_disks(domain, disks), *_compare_interfaces(domain, spec)]
    found += _compare_cpu_and_firmware(domain, wanted)
    if (cache := memory(wanted.find("features/tcg/tb-cache"))) != memory(domain.find("features/tcg/tb-cache")):
        found.append(f"TCG's cache is not the {cache >> 20} MiB that were asked for")
    _finish(found + _compare_rest(domain, wanted, "disk", ours=True))


def against_script(live: str, asked: str, spec: JobSpec) -> str:
    """Compare a live domain with XML in which LIBVIRT_XML_SCRIPT or VM_POLICY had a part.

    These may give the job less than it requested, and everything that they request must be there. Returns the
    reduction, as a sentence without its full stop, usually empty. Raises `Mismatch`.
    """
    domain, wanted = etree.fromstring(live), etree.fromstring(asked)
    found, less = _amounts(domain, spec)
    # NUMA cells and DIMMs change the sum, and this package never writes them.
    whole = wanted.find("cpu/numa") is None and wanted.find("devices/memory") is None
    if whole and _memory(domain) not in (_memory(wanted), _rounded(_memory(wanted))):
        found.append(f"its memory (KiB) is {_memory(domain)}, and {_memory(wanted)} was asked for")
    if _vcpus(domain) != _vcpus(wanted):
        found.append(f"its number of CPUs is {_vcpus(domain)}, and {_vcpus(wanted)} was asked for")
    _finish(found + _compare_rest(domain, wanted, ours=False))
    return "; ".join(less)


def against_xen(live: str, asked: str, spec: JobSpec) -> None:
    """Compare a live domain of Xen with the XML that this package wrote for the job. Raises `Mismatch`."""
    domain, wanted = etree.fromstring(live), etree.fromstring(asked)
    more, less = _amounts(domain, spec)
    found = [*more, *less]
    for path in ("bootloader", "os/type", "os/kernel", "os/initrd", "os/cmdline"):
        actual, expected = domain.findtext(path) or "", wanted.findtext(path) or ""
        if actual != expected and {actual, expected} != {"linux", "xen"}:
            found.append(f"its {path} is {actual!r}, and {expected!r} was asked for")
    _finish(found + _compare_rest(domain, wanted, ours=True))


def before_libvirt(asked: str) -> None:
    """Check the numbers of others' descriptions: a negative number of CPUs crashes libvirtd. Raises `Mismatch`."""
    domain = etree.fromstring(asked)
    found = []
    for path in ("vcpu", "memory", "currentMemory", "maxMemory"):
        for element in domain.iterfind(path):
            for what, text in ((path, element.text), (f"{path}'s current", element.get("current"))):
                if text is not None and not re.fullmatch(r"\s*[0-9]{1,18}\s*", text, re.ASCII):
                    found.append(f"its {what} is {text.strip()[:40]!a}, which is no number")
    _finish(found)


def _finish(found: Sequence[str]) -> None:
    if found:
        raise Mismatch(found)


# Numbers


def _memory(domain: etree.Element) -> int:
    try:
        return -(-memory(domain.find("memory")) // 1024)
    except ValueError as error:
        raise Mismatch([str(error)]) from error


def _vcpus(domain: etree.Element) -> int:
    return int(domain.findtext("vcpu") or 1)


def _amounts(domain: etree.Element, spec: JobSpec) -> tuple[list[str], list[str]]:
    """Return in what a domain has more than the job, and in what it has less."""
    more: list[str] = []
    less: list[str] = []
    for what, actual, expected in (
        ("memory (KiB)", _memory(domain), _rounded(spec.vm.memory_mib << 10)),
        ("number of CPUs", _vcpus(domain), spec.vm.vcpus),
    ):
        if actual != expected:
            found = more if actual > expected else less
            found.append(f"its {what} is {actual}, and the job asks for {expected}")
    return more, less


def _rounded(kib: int) -> int:
    grain = MEMORY_GRAIN_KIB.get(os.uname().machine, 1 << 10)
    return -(-kib // grain) * grain


# Disks


def _compare_disks(domain: etree.Element, wanted: Mapping[str, _Disk]) -> list[str]:
    found = []
    seen = set()
    for element in domain.iterfind("devices/disk"):
        device = value(element, "target", "dev")
        if device in seen or device not in wanted:
            found.append(f"it has a disk {device} ({value(element, 'source', 'file')}) that the job does not ask for")
        else:
            actual, expected = _disk(element), wanted[device]
            for what, now, then in zip(_Disk._fields, actual, expected, strict=True):
                if now != then:
                    found.append(f"{what.replace('_', '-')} of its disk {device} is {now!r}, and the job's is {then!r}")
        seen.add(device)
    found += [f"it has no disk {device} ({disk.file})" for device, disk in wanted.items() if device not in seen]
    return found


def _disk(element: etree.Element) -> _Disk:
    backing = []
    store = element.find("backingStore")
    while store is not None and store.find("source") is not None:
        backing.append((value(store, "source", "file"), value(store, "format", "type")))
        store = store.find("backingStore")
    read_only = element.find("readonly") is not None or element.get("device") == "cdrom"
    return _Disk(
        value(element, "source", "file"),
        value(element, "driver", "type"),
        read_only,
        tuple(backing),
        element.find("shareable") is not None,
    )


def _handed_over(domain: etree.Element) -> set[tuple[str, str]]:
    """Return the files of the disks that libvirt gets as open descriptors, each with its group."""
    sources = domain.iterfind("devices/disk//source[@fdgroup]")
    return {(source.get("file", ""), source.get("fdgroup", "")) for source in sources}


# Interfaces, CPU and firmware


def _compare_interfaces(domain: etree.Element, spec: JobSpec) -> list[str]:
    """Compare the interfaces, whose order libvirt keeps, with those of the job."""
    found = []
    interfaces = domain.findall("devices/interface")
    if len(interfaces) != len(spec.vm.nics):
        return [f"it has {len(interfaces)} interfaces, and the job asks for {len(spec.vm.nics)}"]
    for interface, nic in zip(interfaces, spec.vm.nics, strict=True):
        kinds = _kinds(NETWORKS[nic.networking_type])
        if interface.get("type") not in kinds:
            found.append(f"its interface is of the type {interface.get('type')}, and not {' or '.join(kinds)}")
        if nic.mac and value(interface, "mac", "address").lower() != nic.mac:
            found.append(f"its MAC address is {value(interface, 'mac', 'address')}, and the job's is {nic.mac}")
        if value(interface, "model", "type") != nic.model:
            found.append(f"its interface is of the model {value(interface, 'model', 'type')}, and not {nic.model}")
        if (value(interface, "link", "state") != "down") != nic.link_up:
            found.append(f"the cable of its interface is {'out' if nic.link_up else 'in'}, and should not be")
    return found


def _compare_cpu_and_firmware(domain: etree.Element, wanted: etree.Element) -> list[str]:
    found = []
    for what, path, names in (
        ("CPU topology", "cpu/topology", ("sockets", "cores", "threads")),
        ("architecture", "os/type", ("arch",)),
    ):
        actual, expected = ([value(each, path, name) for name in names] for each in (domain, wanted))
        if any(then and now != then for now, then in zip(actual, expected, strict=True)):
            found.append(f"its {what} is {' '.join(actual)}, and {' '.join(expected)} was asked for")
    uefi = wanted.find("os[@firmware='efi']") is not None or wanted.find("os/loader") is not None
    loader = domain.find("os/loader")
    if uefi != (loader is not None):
        found.append(f"it boots by {'BIOS' if loader is None else 'a firmware'}, and the job asks for the other")
    return found


# Everything else


def _compare_rest(domain: etree.Element, wanted: etree.Element, *but: str, ours: bool) -> list[str]:
    """Compare everything but numbers; devices of the kinds `but` were compared already.

    What is wanted is `ours`, or has other authors: libvirt may then rewrite some of it and add what reaches nothing.
    """
    found = []
    if domain.get("type") != wanted.get("type"):
        found.append(f"it is of the type {domain.get('type')}, and {wanted.get('type')} was asked for")
    for label in wanted.iterfind("seclabel[@model='dac']/label"):
        now = [other.text for other in domain.iterfind("seclabel[@model='dac']/label")]
        if now != [label.text]:
            found.append(f"QEMU runs as {', '.join(map(str, now)) or 'it likes'}, and not as {label.text}")
    by_name = _handed_over(wanted) - _handed_over(domain)
    found += [f"QEMU is to open {file} by its name" for file, _ in sorted(by_name)]
    tags = {child.tag for child in wanted}
    added = [child.tag for child in domain if child.tag.startswith("{") and child.tag not in tags]
    found += [f"it has an element {tag} of QEMU's own, which was not asked for" for tag in added]
    live, left = (
        [device for device in each.iterfind("devices/*") if device.tag not in but] for each in (domain, wanted)
    )
    return found + _compare_devices(live, left, domain.get("type", ""), ours=ours)


def _compare_devices(
    live: Sequence[etree.Element], left: list[etree.Element], domain_type: str, *, ours: bool
) -> list[str]:
    """Match every live device with one requested device, or with the devices that libvirt adds."""
    found = []
    asked_for = {device.tag for device in left}
    ports = [device for device in left if device.tag in ("serial", "console")]
    derived = {"serial", "console"} - {port.tag for port in ports if _is_serial(port)} if ports else set()
    for device in live:
        pair = next((asked for asked in left if _is_pair(device, asked, ours=ours)), None)
        if pair is not None:
            left.remove(pair)
        elif device.tag in derived and _is_serial(device) and any(_same_end(device, port) for port in ports):
            derived.discard(device.tag)
        elif not _may_be_added(device, asked_for, domain_type, ours=ours):
            found.append(f"it has a device that was not asked for, {_name(device)}")
    return found + [f"{_name(asked)} was asked for, and it is not there" for asked in left if _ends(asked)]


def _may_be_added(device: etree.Element, asked_for: Container[str], domain_type: str, *, ours: bool) -> bool:
    """Return True if libvirt may have added a device that gives no access to the host.

    It adds a display adapter to graphics, and an emulator if none was named. To a VM that others describe it may add
    any model of a device that jobs may have, too, except for types that name something of the host.
    """
    row = row_of(device)
    if not ours and row.added and row.job:
        return device.get("type", "") not in ("file", "evdev", "passthrough")
    needed = {"video": "graphics" in asked_for, "emulator": "emulator" not in asked_for}
    return needed.get(device.tag, True) and is_added(device, domain_type)


def _is_pair(device: etree.Element, asked: etree.Element, *, ours: bool) -> bool:
    """Return True if a live device is the requested one, with the requested host side.

    libvirt rewrites some parts of a description that is not ours, and leaves out others. So the host resources of the
    live device must come from it, but it need not be found again in full.
    """
    if not _is_alike(device, asked):
        return False
    if ours:
        return all(
            any(says(now, then) for now in device.findall(tag)) for tag in _ends(asked) for then in asked.findall(tag)
        )
    return all(_comes_from(now, device, asked) for tag in _ends(device) for now in device.findall(tag))


def _comes_from(now: etree.Element, device: etree.Element, asked: etree.Element) -> bool:
    if now.tag == "source" and device.get("type") in ("pty", "ram"):
        return not now.get("path") or is_libvirts_own(now.get("path", ""))
    if now.tag == "listen" and now.get("type") == "socket" and now.get("socket"):
        path = now.get("socket", "")
        return is_libvirts_own(path) or any(equal(path, each.get("socket", "")) for each in asked.iter())
    described = asked.findall(now.tag)
    if not described:  # libvirt chooses a socket, but no image; libvirt 12 numbers an empty source
        return device.tag not in _IMAGES or now.tag != "source" or now.attrib.keys() <= {"index"}
    return any(is_kept(now, then, own=device.tag not in _IMAGES) for then in described)


def _is_alike(device: etree.Element, asked: etree.Element) -> bool:
    """Return True if a live device may be the requested one, whatever their host sides are."""
    if device.tag != asked.tag:
        return False
    if device.tag == "emulator":
        return (device.text or "").strip() == (asked.text or "").strip()
    if device.tag == "interface" and device.get("type") not in _kinds(asked.get("type", "")):
        return False
    kind = value(asked, "target", "type")
    if device.tag == "console" and kind and (kind == "serial") != _is_serial(device):
        return False
    rows = {**OTHER.attributes, **row_of(asked).attributes}
    for name, said in asked.items():
        matters = name in rows and rows[name].side & (Side.IDENTITY | Side.HOST)
        if name == "type" and device.tag == "disk" and device.find("source") is None:
            continue  # a drive without a medium
        if name == "listen" and name not in device.attrib and device.find("listen") is not None:
            continue  # it repeats the first listen element, if that is an address
        if matters and device.tag != "interface" and not equal(device.get(name, ""), said):
            return False
    if device.tag == "disk":
        now, then = _disk(device), _disk(asked)
        if then.format not in ("", now.format) or (then.read_only and not now.read_only):
            return False
        if asked.find("backingStore") is not None and now.backing != then.backing:
            return False
    return True


def _ends(device: etree.Element) -> list[str]:
    return [tag for tag, below in row_of(device).children.items() if below.side & Side.HOST]


def _kinds(kind: str) -> tuple[str, ...]:
    return _OF_A_NETWORK if kind == "network" else (kind,)


def _same_end(device: etree.Element, port: etree.Element) -> bool:
    """Return True if a port has the requested host end: the first serial port is a console too, and vice versa."""
    ends = device.findall("source")
    return device.get("type") == port.get("type") and (
        device.get("type") == "pty"  # each gets one of its own
        or all(any(says(now, then) for now in ends) for then in port.findall("source"))
    )


def _is_serial(port: etree.Element) -> bool:
    """Return True if a serial port or a console is the guest's first serial port."""
    return port.tag == "serial" or value(port, "target", "type", "serial") == "serial"


def _name(device: etree.Element) -> str:
    """Describe a device for people: ``disk vda /scratch/disk.img``, ``hostdev subsystem usb``."""
    words = [device.tag, *(device.get(name, "") for name in ("mode", "type", "model", "name"))]
    for path in ("target", "source"):
        words += [value(device, path, name) for name in ("dev", "name", "file", "path", "network", "bridge", "dir")]
    return " ".join(word for word in words if word)
