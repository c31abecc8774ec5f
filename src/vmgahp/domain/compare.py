"""Comparison of domain XML by the rows of `vmgahp.domain.model`: identity and attributes of devices."""

import os
import re
from collections.abc import Callable, Iterator
from xml.etree import ElementTree as etree

from vmgahp.domain.model import ADDED_BY, DEVICES, OTHER, Element, Side


def row_of(device: etree.Element) -> Element:
    """Return the row of a device, or that of an unknown device if it has none."""
    return DEVICES.get(device.tag, OTHER)


def value(element: etree.Element, path: str, name: str, default: str = "") -> str:
    """Return an attribute of the first element at a path; with an empty path, of the element itself."""
    found = element.find(path) if path else element
    return default if found is None else found.get(name, default)


def elements(row: Element, path: str = "") -> Iterator[tuple[str, Element]]:
    """Yield the paths and rows of an element and all its descendants, except for its address in the guest."""
    for tag, below in row.children.items():
        if tag != "address":
            yield from elements(below, f"{path}/{tag}".lstrip("/"))
    yield path, row


def known_by(device: etree.Element) -> tuple[str, ...]:
    """Return the identity of a device: its kind, and the attributes that distinguish it from others of its kind."""
    known = [
        value(device, path, name, attribute.default)
        for path, row in elements(row_of(device))
        for name, attribute in row.attributes.items()
        if Side.IDENTITY in attribute.side
    ]
    return (device.tag, *known)


def is_same(known: tuple[str, ...], ours: tuple[str, ...]) -> bool:
    """Return True if the device `known` may be our `ours`: libvirt chooses the values that ours leaves open."""
    return len(known) == len(ours) and all(our in ("", its) for its, our in zip(known, ours, strict=True))


def is_added(device: etree.Element, domain_type: str) -> bool:
    """Return True if libvirt adds such a device to any VM, and it gives no access to the host."""
    by_driver = ADDED_BY.get(domain_type, {}).get(device.tag)
    if by_driver is not None and all(device.get(name) == value for name, value in by_driver.items()):
        return True
    row = row_of(device)
    return row.added and all(
        re.fullmatch(attribute.filled, device.get(name, ""), re.ASCII)
        for name, attribute in row.attributes.items()
        if attribute.filled and (name in device.attrib or Side.IDENTITY in attribute.side)
    )


def equal(now: str, then: str) -> bool:
    """Return True if two values are equal; libvirt normalizes numbers, MAC addresses and paths."""
    if now.lower() == then.lower():
        return not (now.startswith("/") and now != then)
    if now.startswith("/"):
        return os.path.normpath(now) == os.path.normpath(then)
    try:
        return int(now, 0) == int(then, 0)
    except ValueError:
        return False


def says(now: etree.Element, then: etree.Element, same: Callable[[str, str], bool] = equal) -> bool:
    """Return True if an element has everything that the other has; seclabel elements are compared elsewhere."""
    text = (then.text or "").strip()
    return (
        now.tag == then.tag
        and (not text or same((now.text or "").strip(), text))
        and all(same(now.get(name, ""), value) for name, value in then.items() if value)
        and all(any(says(below, part, same) for below in now) for part in then if part.tag != "seclabel")
    )


def is_libvirts_own(path: str) -> bool:
    """Return True if libvirt has made a path: a terminal of its own, or a socket in its own directories."""
    return bool(re.fullmatch(r"/dev/pts/[0-9]+|/(?:.*/)?libvirt/(?:qemu|lxc|ch)/.*", path)) and "/../" not in path


def is_kept(now: etree.Element, then: etree.Element, *, own: bool) -> bool:
    """Return True if the host resources of an element are those that the other requested, where that has a value.

    libvirt leaves out empty elements, shows how it has resolved a network of its own, and names the first unit of an
    iSCSI target; where it may choose its `own`, it does (`is_libvirts_own`).
    """
    text = (then.text or "").strip()
    if text and not equal((now.text or "").strip(), text):
        return False
    resolved = ("portid", "bridge", "dev", "mode") if then.get("network") else ()
    for name, value in now.items():
        said = "" if name in resolved else then.get(name)
        if said and not equal(value, said) and value != f"{said}/0" and not (own and is_libvirts_own(value)):
            return False
    parts = [part for part in now if part.tag != "seclabel" and then.find(part.tag) is not None]
    return all(any(is_kept(part, below, own=own) for below in then.findall(part.tag)) for part in parts)


def memory(element: etree.Element | None) -> int:
    """Return a size in bytes, from any of libvirt's units; 0 if there is no element. Raises ValueError."""
    if element is None:
        return 0
    number, unit = (element.text or "").strip(), element.get("unit") or "KiB"
    scale = re.fullmatch(r"(?i)(?:b|bytes?)|([kmgtpe])(|ib|b)", unit, re.ASCII)
    if not scale or not re.fullmatch(r"[0-9]{1,18}", number, re.ASCII):
        raise ValueError(f"{number[:40]!a} is no amount of memory, in the unit {unit[:40]!a}")
    power = "kmgtpe".index(scale[1].lower()) + 1 if scale[1] else 0
    return int(number) * int((1000 if (scale[2] or "").lower() == "b" else 1024) ** power)
