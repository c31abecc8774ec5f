"""Domain XML read by the rows of `vmgahp.domain.model`: which device is which, and who says what."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from xml.etree import ElementTree as etree

from vmgahp.domain.model import ADDED_BY, DEVICES, OTHER
from vmgahp.domain.rows import Element, Side


def row_of(device: etree.Element) -> Element:
    """The row of a device, which is that of any other one where there is none."""
    return DEVICES.get(device.tag, OTHER)


def value(element: etree.Element, path: str, name: str, default: str = "") -> str:
    """An attribute of the first element at a place, of the element itself where the place is empty."""
    found = element.find(path) if path else element
    return default if found is None else found.get(name, default)


def elements(row: Element, path: str = "") -> Iterator[tuple[str, Element]]:
    """Paths and rows of an element and of all in it, but for its place in the guest."""
    for tag, below in row.children.items():
        if tag != "address":
            yield from elements(below, f"{path}/{tag}".lstrip("/"))
    yield path, row


def known_by(device: etree.Element) -> tuple[str, ...]:
    """By what a device is known: its kind, and what tells it from others of its kind."""
    known = [
        value(device, path, name, attribute.default)
        for path, row in elements(row_of(device))
        for name, attribute in row.attributes.items()
        if Side.IDENTITY in attribute.side
    ]
    return (device.tag, *known)


def is_same(known: tuple[str, ...], ours: tuple[str, ...]) -> bool:
    """Whether a device known by `known` may be that one of ours: where ours says nothing, libvirt has chosen."""
    return len(known) == len(ours) and all(our in ("", its) for its, our in zip(known, ours, strict=True))


def is_new(device: etree.Element) -> bool:
    """Whether VMs get such a device that an earlier release gave to none."""
    forms, known = row_of(device).new, known_by(device)[1:]
    return forms is not None and all(re.fullmatch(form, its) for form, its in zip(forms, known, strict=True))


def is_added(device: etree.Element, domain_type: str) -> bool:
    """Whether libvirt adds such a device to any VM, and it reaches nothing of the host."""
    forms = row_of(device).added, ADDED_BY.get(domain_type, {}).get(device.tag)
    return any(form is not None and all_fit(device, form) for form in forms)


def all_fit(element: etree.Element, forms: Mapping[str, str]) -> bool:
    """Whether the attributes of an element have these forms."""
    return all(re.fullmatch(form, element.get(name, ""), re.ASCII) for name, form in forms.items())


def equal(now: str, then: str) -> bool:
    """Whether values are one; libvirt writes numbers, MAC addresses and paths in a form of its own."""
    if now.lower() == then.lower():
        return not (now.startswith("/") and now != then)
    if now.startswith("/"):
        return os.path.normpath(now) == os.path.normpath(then)
    try:
        return int(now, 0) == int(then, 0)
    except ValueError:
        return False


def says(now: etree.Element, then: etree.Element, same: Callable[[str, str], bool] = equal) -> bool:
    """Whether an element says all that the other one says; as whom a file is opened is looked at elsewhere."""
    text = (then.text or "").strip()
    return (
        now.tag == then.tag
        and (not text or same((now.text or "").strip(), text))
        and all(same(now.get(name, ""), value) for name, value in then.items() if value)
        and all(any(says(below, part, same) for below in now) for part in then if part.tag != "seclabel")
    )


def is_libvirts_own(path: str) -> bool:
    """Whether a path is of libvirt's own making: a terminal of its own, or a socket in its own directories."""
    return bool(re.fullmatch(r"/dev/pts/[0-9]+|/(?:.*/)?libvirt/(?:qemu|lxc|ch)/.*", path)) and "/../" not in path


def is_kept(now: etree.Element, then: etree.Element, *, own: bool) -> bool:
    """Whether what an element reaches is what another one asked for, where that says anything.

    libvirt leaves out what is void, says what a network of its own is at present, and names the first unit of an
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
    """Bytes, in any of libvirt's units (``virScaleInteger``); none where there is no element.

    Raises `ValueError` for what is no amount.
    """
    if element is None:
        return 0
    number, unit = (element.text or "").strip(), element.get("unit") or "KiB"
    scale = re.fullmatch(r"(?i)(?:b|bytes?)|([kmgtpe])(|ib|b)", unit, re.ASCII)
    if not scale or not re.fullmatch(r"[0-9]{1,18}", number, re.ASCII):
        raise ValueError(f"{number[:40]!a} is no amount of memory, in the unit {unit[:40]!a}")
    power = "kmgtpe".index(scale[1].lower()) + 1 if scale[1] else 0
    return int(number) * int((1000 if (scale[2] or "").lower() == "b" else 1024) ** power)
