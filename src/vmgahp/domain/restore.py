"""The domain XML with which a saved memory image is restored.

A memory image carries the XML of the VM that was saved, and a restore takes the VM from there. But the
image was in the hands of the job: it came back with the job's files, and whoever edits that XML could add
any device of the host. So what is restored is *our* XML, made anew from the job and the settings, and from
the saved one come only the facts that the guest's hardware depends on and that libvirt had chosen by
itself: on which bus and slot a device is, the machine type, the CPU, the UUID. Each is checked for its form
and written anew; nothing is copied as it is. libvirt compares the result with the saved XML once more
(``virDomainDefCheckABIStability``) and refuses what the guest would notice.

Every device of the saved VM must be one of ours, or one that libvirt adds to any VM; and every one of ours
must be there. Otherwise there is a `SavedMismatch`, which names the device.
"""

import os
import re
from collections.abc import Mapping
from copy import deepcopy

from lxml import etree

LARGEST = 1 << 20
"""Bytes of XML; libvirt writes a few thousand."""
MOST_DEVICES = 1024

_WORD = r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}"
_NUMBER = r"[0-9]{1,10}"
_SWITCH = r"on|off|yes|no"
_UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_ADDRESS_PART = r"0x[0-9a-fA-F]{1,16}|[0-9]{1,10}(?:\.[0-9]{1,3}){0,3}"
_MAC = r"(?!00:00:00:00:00:00)[0-9a-f][02468ace](?::[0-9a-f]{2}){5}"
"""Of one interface, not of a group of them, and not zero: as `vmgahp.job.spec` demands it of vm_macaddr."""

_MACHINE = re.compile(r"(?:pc|q35|virt)|(?:pc-i440fx|pc-q35|virt|pseries|s390-ccw-virtio)-[A-Za-z0-9.-]{1,40}")
_FAMILIES = {"pc": "pc-i440fx-", "q35": "pc-q35-"}
"""What libvirt makes of the names that mean "the newest"; virt becomes virt-, and so on."""

_ADDRESSES = {
    "pci": ("domain", "bus", "slot", "function", "multifunction"),
    "drive": ("controller", "bus", "target", "unit"),
    "isa": ("iobase", "irq"),
    "usb": ("bus", "port"),
    "ccid": ("controller", "slot"),
    "virtio-serial": ("controller", "bus", "port"),
    "ccw": ("cssid", "ssid", "devno"),
    "spapr-vio": ("reg",),
    "virtio-mmio": (),
}

_CPU_MODES = ("custom", "host-model", "host-passthrough", "maximum")
_CPU = {"match": r"exact|minimum|strict", "check": r"none|partial|full", "migratable": _SWITCH}
_CPU_PARTS = {
    "model": {"fallback": r"allow|forbid"},
    "vendor": {},
    "topology": dict.fromkeys(("sockets", "dies", "clusters", "cores", "threads"), _NUMBER),
    "cache": {"level": r"[1-3]", "mode": r"emulate|passthrough|disable"},
    "maxphysaddr": {"mode": r"emulate|passthrough", "bits": _NUMBER, "limit": _NUMBER},
    "feature": {"policy": r"force|require|optional|disable|forbid", "name": _WORD},
}

_FACTS: Mapping[str, tuple[tuple[str, Mapping[str, str]], ...]] = {
    "disk": (
        ("", {"device": r"disk|cdrom|floppy", "model": r"virtio(?:-non)?-transitional|virtio"}),
        ("target", {"bus": r"virtio|sata|ide|scsi|fdc|usb|sd"}),
    ),
    "interface": (("mac", {"address": _MAC}), ("model", {"type": _WORD}), ("link", {"state": r"up|down"})),
    "serial": (("target", {"type": _WORD, "port": _NUMBER}), ("target/model", {"name": _WORD})),
    "controller": (
        ("", {"model": _WORD, "ports": _NUMBER, "vectors": _NUMBER}),
        ("master", {"startport": _NUMBER}),
        ("model", {"name": _WORD}),
        (
            "target",
            dict.fromkeys(("chassisNr", "chassis", "port", "busNr", "index"), _ADDRESS_PART) | {"hotplug": _SWITCH},
        ),
    ),
    "memballoon": (("", {"model": _WORD, "autodeflate": _SWITCH, "freePageReporting": _SWITCH}),),
    "video": (
        (
            "model",
            {"type": r"cirrus|vga|qxl|virtio|bochs|none", "primary": _SWITCH, "blob": _SWITCH}
            | dict.fromkeys(("ram", "vram", "vram64", "vgamem", "heads"), _NUMBER),
        ),
    ),
    "watchdog": (("", {"action": r"reset|none"}),),
}
"""What the guest sees of a device and libvirt chooses where our XML says nothing: element below the
device, attribute, its form. All of these pass; a source, a path or an address of the host is none of them."""

_ADDED: Mapping[str, Mapping[str, str]] = {
    "controller": {"type": r"usb|pci|ide|sata|scsi|virtio-serial|fdc|ccid", "index": _NUMBER},
    "memballoon": {"model": r"virtio(?:-non)?(?:-transitional)?|none"},
    "input": {"type": r"mouse|keyboard", "bus": r"ps2"},
    "watchdog": {"model": r"itco"},
    "video": {},
}
"""Devices that libvirt adds by itself and that have nothing to do with the host: by which attributes they
are known. A display adapter is added to a VM with graphics only, the iTCO watchdog to those of type q35."""


class SavedMismatch(Exception):
    """The saved VM is not the one that the job and this machine's settings make; the text says why."""


def reconcile(saved: str, ours: str) -> str:
    """Our domain XML with the hardware of the saved one.

    `saved` is not trusted, `ours` is what `vmgahp.domain.build` or the administrator's script made for this
    start. Raises `SavedMismatch`.
    """
    theirs, domain = _parse(saved), etree.fromstring(ours)
    _same("domain type", theirs.get("type"), domain.get("type"))
    _same("name", _text(theirs, "name"), _text(domain, "name"))
    _same("memory (MiB)", _mebibytes(theirs), _mebibytes(domain))
    _same("number of CPUs", _text(theirs, "vcpu") or "1", _text(domain, "vcpu") or "1")
    _take_uuid(theirs, domain)
    _take_machine(theirs, domain)
    _take_cpu(theirs, domain)
    _take_devices(theirs, domain)
    etree.indent(domain)
    return etree.tostring(domain, encoding="unicode")


def reconcile_xen(saved: str, ours: str) -> str:
    """As `reconcile`, for Xen, whose guests have no hardware to be chosen: UUID and MAC addresses are all they keep."""
    theirs, domain = _parse(saved), etree.fromstring(ours)
    _same("domain type", theirs.get("type"), domain.get("type"))
    _same("name", _text(theirs, "name"), _text(domain, "name"))
    _same("memory (MiB)", _mebibytes(theirs), _mebibytes(domain))
    _same("number of CPUs", _text(theirs, "vcpu") or "1", _text(domain, "vcpu") or "1")
    _same("machine type", *(_attribute(each, "os/type", "machine") for each in (theirs, domain)))
    _take_uuid(theirs, domain)
    for tag in ("disk", "interface"):
        saved_ones, current = theirs.findall(f"devices/{tag}"), domain.findall(f"devices/{tag}")
        _same(f"{tag}s", *([_key(device) for device in each] for each in (saved_ones, current)))
        for device, our in zip(saved_ones, current, strict=True):
            if tag == "interface":
                _merge(device, our)
            else:
                _same_device(our, "read-only", *(each.find("readonly") is not None for each in (device, our)))
    return etree.tostring(domain, encoding="unicode")


def macs(saved: str) -> list[str]:
    """The MAC addresses of a saved VM's interfaces in order, empty for one that is missing or invalid."""
    try:
        interfaces = _parse(saved).findall("devices/interface")
    except SavedMismatch:
        return []
    addresses = [_attribute(interface, "mac", "address").lower() for interface in interfaces]
    return [address if re.fullmatch(_MAC, address, re.ASCII) else "" for address in addresses]


# The domain as a whole


def _parse(text: str) -> etree._Element:
    # A document type is the way to entities; no XML of libvirt has one.
    if len(text) > LARGEST or "<!DOCTYPE" in text:
        raise SavedMismatch("the saved XML is too long, or it has a document type.")
    parser = etree.XMLParser(
        encoding="utf-8", resolve_entities=False, no_network=True, remove_comments=True, remove_pis=True
    )
    try:
        domain = etree.fromstring(text.encode(), parser)
    except (etree.XMLSyntaxError, ValueError) as error:
        raise SavedMismatch(f"the saved XML cannot be read: {_shown(str(error))}.") from error
    if domain.tag != "domain":
        raise SavedMismatch("the saved XML is not that of a domain.")
    return domain


def _same(what: str, saved: object, ours: object) -> None:
    if saved != ours:
        raise SavedMismatch(f"the saved VM's {what} is {_shown(saved)}, and the job's is {_shown(ours)} now.")


def _text(element: etree._Element, path: str) -> str:
    return (element.findtext(path) or "").strip()


def _mebibytes(domain: etree._Element) -> int:
    """The memory, rounded up as libvirt does it."""
    element = domain.find("memory")
    unit = "KiB" if element is None else element.get("unit", "KiB")
    scale = 1000 if len(unit) == 2 and unit[1] == "B" else 1024
    power = " KMGT".find(unit[:1].upper()) if unit not in ("b", "bytes") else 0
    amount = _checked("memory", _text(domain, "memory"), _NUMBER + r"[0-9]{0,6}")
    if power < 0:
        raise SavedMismatch(f"the saved VM's memory is in the unknown unit {_shown(unit)}.")
    return -(-int(amount) * int(scale**power) // (1 << 20))


def _take_uuid(theirs: etree._Element, domain: etree._Element) -> None:
    """libvirt wants the saved UUID; where the caller has settled on one already, it must be that."""
    uuid = _checked("UUID", _text(theirs, "uuid"), _UUID).lower()
    _same("UUID", uuid, _text(domain, "uuid") or uuid)
    element = domain.find("uuid")
    if element is None:
        element = etree.SubElement(domain, "uuid")
    element.text = uuid


def _take_machine(theirs: etree._Element, domain: etree._Element) -> None:
    saved, our = theirs.find("os/type"), domain.find("os/type")
    if saved is None or our is None:
        raise SavedMismatch("the saved VM has no operating system type.")
    _same("operating system type", saved.text, our.text)
    _same("architecture", saved.get("arch"), our.get("arch") or os.uname().machine)
    # Which firmware it is libvirt chooses anew, and what the guest has written into it is in the image.
    uefi = domain.find("os[@firmware='efi']") is not None
    for path in ("os/loader", "os/nvram", "os/kernel", "os/initrd"):
        ours = domain.find(path) is not None or (uefi and path in ("os/loader", "os/nvram"))
        _same(f"{path[3:]} (present)", theirs.find(path) is not None, ours)
    machine, wanted = saved.get("machine", ""), our.get("machine", "")
    if not _MACHINE.fullmatch(machine):
        raise SavedMismatch(f"the saved VM's machine type is {_shown(machine)}.")
    if wanted and machine != wanted and not machine.startswith(_FAMILIES.get(wanted, f"{wanted}-")):
        _same("machine type", machine, wanted)
    our.set("arch", saved.get("arch", ""))
    our.set("machine", machine)


def _take_cpu(theirs: etree._Element, domain: etree._Element) -> None:
    """The CPU as libvirt had resolved it.

    host-model and no CPU at all have become the model and the features of the machine that saved; the
    other modes stay what they are, and only a list of features that libvirt adds is taken over.
    """
    saved, our = theirs.find("cpu"), domain.find("cpu")
    if saved is None:
        if our is not None and our.get("mode", "custom") != "custom":
            raise SavedMismatch(f"the saved VM has QEMU's default CPU, and the job's is {our.get('mode')} now.")
        return
    mode = saved.get("mode", "custom")
    wanted = mode if our is None else our.get("mode", "custom")
    if mode not in _CPU_MODES or (mode != wanted and (mode, wanted) != ("custom", "host-model")):
        _same("CPU mode", mode, wanted)
    if our is None and mode != "custom":
        raise SavedMismatch(f"the saved VM's CPU is {mode}, and the job's is QEMU's default now.")
    if our is not None and wanted == "custom":
        _same("CPU model", _text(saved, "model"), _text(our, "model"))
    made = etree.Element("cpu", {"mode": mode} | _facts(saved, _CPU, "CPU"))
    for part in saved:
        if part.tag in _CPU_PARTS:
            taken = etree.SubElement(made, part.tag, _facts(part, _CPU_PARTS[part.tag], "CPU"))
            text = (part.text or "").strip()
            taken.text = _checked(f"CPU {part.tag}", text, _WORD) if text else None
    if our is None:
        domain.append(made)
        return
    for part in our:
        if part.tag not in _CPU_PARTS:
            made.append(deepcopy(part))
        elif not any(_says(taken, part) for taken in made):
            named = f"{part.tag} {part.get('name', _text(part, '.'))}".strip()
            raise SavedMismatch(f"the saved VM's CPU lacks the {named} that the job's has now.")
    domain.replace(our, made)


def _says(element: etree._Element, other: etree._Element) -> bool:
    """Whether `element` says all that `other` says."""
    return (
        element.tag == other.tag
        and (element.text or "").strip() == (other.text or "").strip()
        and all(element.get(name) == value for name, value in other.items())
    )


# The devices


def _take_devices(theirs: etree._Element, domain: etree._Element) -> None:
    ours = domain.find("devices")
    if ours is None:
        ours = etree.SubElement(domain, "devices")
    saved = [device for device in theirs.iterfind("devices/*") if device.tag != "emulator"]
    if len(saved) > MOST_DEVICES:
        raise SavedMismatch(f"the saved VM has {len(saved)} devices.")
    left = [device for device in ours if isinstance(device.tag, str)]
    has = {device.tag for device in left}
    made, added = [], set()
    for device in saved:
        key = _key(device)
        pair = next((our for our in left if _is_pair(key, _key(our))), None)
        if pair is not None:
            left.remove(pair)
            made.append(_merge(device, deepcopy(pair)))
        elif not _is_derived(device, has):
            if key in added:
                raise SavedMismatch(f"the saved VM has a second {_name(device)}.")
            added.add(key)
            made.append(_merge(device, _added(device, has)))
    for our in left:
        if our.tag not in ("emulator", "console", "panic"):
            raise SavedMismatch(f"the saved VM has no {_name(our)}, and the job gives it one now.")
    # Releases before this one gave a VM no panic device, and it goes on without.
    ours[:] = [*(our for our in left if our.tag != "panic"), *made]


def _is_pair(saved: tuple[str, ...], our: tuple[str, ...]) -> bool:
    """Whether the keys of two devices agree; where ours says nothing, libvirt has chosen."""
    return len(saved) == len(our) and all(mine in ("", its) for its, mine in zip(saved, our, strict=True))


def _key(device: etree._Element) -> tuple[str, ...]:
    """By what a device of the saved VM is known as one of ours: never by what is on the host's side of it."""

    def of(path: str, name: str, default: str = "") -> str:
        element = device.find(path) if path else device
        return default if element is None else element.get(name, default)

    tag = str(device.tag)
    if tag == "disk":
        return tag, of("target", "dev"), of("", "device", "disk")
    if tag == "interface":
        return tag, of("", "type")
    if tag in ("serial", "parallel"):
        return tag, of("target", "port", "0")
    if tag in ("console", "channel"):
        return tag, of("target", "type", "serial"), of("target", "name")
    if tag == "controller":
        return tag, of("", "type"), of("", "index")
    if tag in ("graphics", "audio"):
        return tag, of("", "type")
    if tag in ("memballoon", "video"):
        return (tag,)
    return tag, *(of("", name) for name in ("type", "bus", "model", "mode"))


def _is_derived(device: etree._Element, has: set[str]) -> bool:
    """Whether libvirt makes this device anew out of another one of ours, so that it can be left out."""
    if device.tag == "audio":
        return device.get("type") == "none"
    if device.tag == "console":  # the first serial port is the console as well
        return _key(device)[1] == "serial" and "serial" in has
    # and the other way: of a console without a serial port libvirt makes one
    return device.tag == "serial" and "serial" not in has and "console" in has


def _added(device: etree._Element, has: set[str]) -> etree._Element:
    """A device that libvirt adds to any VM, with no more than what it is known by."""
    forms = _ADDED.get(device.tag, {})
    known = device.tag in _ADDED and (device.tag != "video" or "graphics" in has)
    if not known or not all(re.fullmatch(form, device.get(name, "")) for name, form in forms.items()):
        raise SavedMismatch(f"the saved VM has a device {_name(device)}, and the job gives it none.")
    return etree.Element(device.tag, {name: device.get(name, "") for name in forms})


def _merge(saved: etree._Element, our: etree._Element) -> etree._Element:
    """`our` device with the address of the saved one and the facts on which it says nothing."""
    if our.tag == "disk":
        _same_device(our, "read-only", *(element.find("readonly") is not None for element in (saved, our)))
        formats = [_attribute(element, "driver", "type") for element in (saved, our)]
        if formats[1]:
            _same_device(our, "format", *formats)
    for path, forms in _FACTS.get(our.tag, ()):
        source = saved.find(path) if path else saved
        facts = {} if source is None else _facts(source, forms, _name(our))
        if facts:
            element = our
            for step in path.split("/") if path else ():
                below = element.find(step)
                element = etree.SubElement(element, step) if below is None else below
            for name, value in facts.items():
                said = element.get(name, value)  # a MAC address in either case; libvirt's is in lower
                _same_device(our, name, value.lower(), said.lower())
                element.set(name, value)
    address = saved.find("address")
    if address is not None and our.find("address") is None:
        our.append(_address(address, saved))
    return our


def _facts(saved: etree._Element, forms: Mapping[str, str], whose: str) -> dict[str, str]:
    """The attributes of an element that are facts, each of its form."""
    return {
        name: _checked(f"{name} of {whose}", saved.get(name, ""), form)
        for name, form in forms.items()
        if name in saved.attrib
    }


def _address(saved: etree._Element, device: etree._Element) -> etree._Element:
    kind = saved.get("type", "")
    if kind not in _ADDRESSES:
        raise SavedMismatch(f"the saved VM's {_name(device)} is at an address of the type {_shown(kind)}.")
    forms = {name: _SWITCH if name == "multifunction" else _ADDRESS_PART for name in _ADDRESSES[kind]}
    return etree.Element("address", {"type": kind} | _facts(saved, forms, f"the address of {_name(device)}"))


# Words for people


def _same_device(device: etree._Element, what: str, saved: object, ours: object) -> None:
    if saved != ours:
        raise SavedMismatch(
            f"of the saved VM's {_name(device)}, {what} is {_shown(saved)}, and the job's is {_shown(ours)} now."
        )


def _checked(what: str, value: str, form: str) -> str:
    if not re.fullmatch(form, value, re.ASCII):
        raise SavedMismatch(f"the saved VM's {what} is {_shown(value)}.")
    return value


def _attribute(element: etree._Element, path: str, name: str) -> str:
    found = element.find(path)
    return "" if found is None else found.get(name, "")


def _name(device: etree._Element) -> str:
    """A device as people know it: ``disk vda``, ``interface user``, ``controller usb 0``."""
    return " ".join(_shown(word)[1:-1] for word in _key(device) if word)


def _shown(value: object) -> str:
    if isinstance(value, str):
        return ascii(value[:80])
    words = {"True": "yes", "False": "no", "None": "missing"}
    return words.get(str(value), str(value))
