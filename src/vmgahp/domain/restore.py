"""The domain XML with which a saved memory image is restored.

A memory image carries the XML of the VM that was saved, and a restore takes the VM from there. But the image was in the
hands of the job: it came back with the job's files, and an edited XML could add any device of the host. So the restore
uses *our* XML, made anew from the job and the settings. From the saved one it takes only the facts that the guest's
hardware depends on and that libvirt had chosen by itself: the bus and slot of each device, the machine type, the CPU,
the UUID. Each is checked for its form and written anew; nothing is copied as it is. QEMU refuses a memory that does not
fit the result.

Every device of the saved VM must be one of ours, or one that libvirt adds to any VM; and each of ours must be in the
saved VM. Otherwise a `SavedMismatch` names the device.
"""

import operator
import os
import re
from collections.abc import Container, Mapping
from copy import deepcopy
from xml.etree import ElementTree as etree

from vmgahp.domain import build, model
from vmgahp.domain.model import Element, Side, value
from vmgahp.text import MAC

LARGEST = 1 << 20
"""The maximum number of bytes of XML; libvirt writes a few thousand."""
MOST_DEVICES = 1024
"""The maximum number of devices, and of parts of the CPU: each is compared with all of ours."""

_FAMILIES = {"pc": "pc-i440fx-", "q35": "pc-q35-"}
"""The prefixes by which libvirt resolves the names that mean "the newest"; virt becomes virt-, and so on."""


class SavedMismatch(Exception):
    """A saved VM other than the one that the job and this machine's settings make; the text says why."""


def reconcile(saved: str, ours: str) -> str:
    """Combine our domain XML with the hardware of the `saved` one, which is not trusted. Raises `SavedMismatch`."""
    theirs, domain = _begin(saved, ours)
    _take_machine(theirs, domain)
    _take_cpu(theirs, domain)
    _take_devices(theirs, domain)
    etree.indent(domain)
    return etree.tostring(domain, encoding="unicode")


def reconcile_xen(saved: str, ours: str) -> str:
    """Combine as `reconcile` does, for Xen, whose guests keep only UUID and MAC addresses: no hardware is chosen."""
    theirs, domain = _begin(saved, ours)
    _same("machine type", *(value(each, "os/type", "machine") for each in (theirs, domain)))
    for tag in ("disk", "interface"):
        saved_ones, current = theirs.findall(f"devices/{tag}"), domain.findall(f"devices/{tag}")
        _same(f"{tag}s", *([model.known_by(device) for device in each] for each in (saved_ones, current)))
        for device, our in zip(saved_ones, current, strict=True):
            if tag == "interface":
                _merge(device, our)
            else:
                _same("read-only", *(each.find("readonly") is not None for each in (device, our)), of=our)
    return etree.tostring(domain, encoding="unicode")


def macs(saved: str) -> list[str]:
    """Return the MAC addresses of a saved VM's interfaces in order, empty for one that is missing or invalid."""
    try:
        interfaces = _parse(saved).findall("devices/interface")
    except SavedMismatch:
        return []
    addresses = [value(interface, "mac", "address").lower() for interface in interfaces]
    return [address if re.fullmatch(MAC, address, re.ASCII) else "" for address in addresses]


# The domain as a whole


def _begin(saved: str, ours: str) -> tuple[etree.Element, etree.Element]:
    """Parse the saved domain and ours, and take over the UUID; both must have the same type, name and size."""
    theirs, domain = _parse(saved), etree.fromstring(ours)
    for path, what in (("devices/*", "devices"), ("cpu/*", "parts of a CPU")):
        if (number := len(theirs.findall(path))) > MOST_DEVICES:
            raise SavedMismatch(f"the saved VM has {number} {what}.")
    _same("domain type", theirs.get("type"), domain.get("type"))
    _same("name", _text(theirs, "name"), _text(domain, "name"))
    _same("memory (MiB)", _mebibytes(theirs), _mebibytes(domain))
    _same("number of CPUs", _text(theirs, "vcpu") or "1", _text(domain, "vcpu") or "1")
    # libvirt requires the saved UUID; if the caller has one already, both must be the same.
    uuid = _checked("UUID", _text(theirs, "uuid"), r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}").lower()
    _same("UUID", uuid, _text(domain, "uuid") or uuid)
    _at(domain, "uuid").text = uuid
    return theirs, domain


def _parse(text: str) -> etree.Element:
    # A document type can declare entities; libvirt's XML never has one.
    if len(text) > LARGEST or "<!DOCTYPE" in text:
        raise SavedMismatch("the saved XML is too long, or it has a document type.")
    try:
        domain = etree.fromstring(text)
    except (etree.ParseError, ValueError, RecursionError) as error:
        raise SavedMismatch(f"the saved XML cannot be read: {_shown(str(error))}.") from error
    if domain.tag != "domain":
        raise SavedMismatch("the saved XML is not that of a domain.")
    return domain


def _same(what: str, saved: object, ours: object, *, of: etree.Element | None = None) -> None:
    if saved != ours:
        whose = "the saved VM's" if of is None else f"of the saved VM's {_name(of)},"
        raise SavedMismatch(f"{whose} {what} is {_shown(saved)}, and the job's is {_shown(ours)} now.")


def _text(element: etree.Element, path: str) -> str:
    return (element.findtext(path) or "").strip()


def _mebibytes(domain: etree.Element) -> int:
    try:
        return -(-model.memory(domain.find("memory")) // (1 << 20))
    except ValueError as error:
        raise SavedMismatch(f"the saved VM's memory cannot be read: {error}.") from error


def _take_machine(theirs: etree.Element, domain: etree.Element) -> None:
    saved, our = theirs.find("os/type"), domain.find("os/type")
    if saved is None or our is None:
        raise SavedMismatch("the saved VM has no operating system type.")
    _same("operating system type", saved.text, our.text)
    _same("architecture", saved.get("arch"), our.get("arch") or os.uname().machine)
    # libvirt chooses the firmware anew, and the variables that the guest has written are in the image.
    uefi = domain.find("os[@firmware='efi']") is not None
    for path in ("os/loader", "os/nvram", "os/kernel", "os/initrd"):
        ours = domain.find(path) is not None or (uefi and path in ("os/loader", "os/nvram"))
        _same(f"{path[3:]} (present)", theirs.find(path) is not None, ours)
    machine, wanted = saved.get("machine", ""), our.get("machine", "")
    _checked("machine type", machine, model.MACHINE)
    if wanted and machine != wanted and not machine.startswith(_FAMILIES.get(wanted, f"{wanted}-")):
        _same("machine type", machine, wanted)
    our.set("arch", saved.get("arch", ""))
    our.set("machine", machine)


def _take_cpu(theirs: etree.Element, domain: etree.Element) -> None:
    """Take over the CPU as libvirt had resolved it.

    host-model and no CPU at all have become the model and the features of the machine that saved; the other modes stay
    the same, and only the features that libvirt adds are taken over.
    """
    saved, our = theirs.find("cpu"), domain.find("cpu")
    if saved is None:
        if our is not None and our.get("mode", "custom") != "custom":
            raise SavedMismatch(f"the saved VM has QEMU's default CPU, and the job's is {our.get('mode')} now.")
        return
    mode = saved.get("mode", "custom")
    wanted = mode if our is None else our.get("mode", "custom")
    if mode != wanted and (mode, wanted) != ("custom", "host-model"):
        _same("CPU mode", mode, wanted)
    if our is None and mode != "custom":
        raise SavedMismatch(f"the saved VM's CPU is {mode}, and the job's is QEMU's default now.")
    if our is not None and wanted == "custom":
        _same("CPU model", _text(saved, "model"), _text(our, "model"))
    made = etree.Element("cpu", {"mode": mode} | _facts(saved, model.CPU, "CPU"))
    for part in saved:
        row = model.CPU.children.get(part.tag)
        if row is not None:
            taken = etree.SubElement(made, part.tag, _facts(part, row, "CPU"))
            text = (part.text or "").strip()
            taken.text = _checked(f"CPU {part.tag}", text, row.text or "") if text else None
    if our is None:
        domain.append(made)
        return
    for part in our:
        settled = _settled(part)
        if part.tag not in model.CPU.children:
            made.append(deepcopy(part))
        elif not any(model.says(taken, settled, operator.eq) for taken in made):
            named = f"{part.tag} {part.get('name', _text(part, '.'))}".strip()
            raise SavedMismatch(f"the saved VM's CPU lacks the {named} that the job's has now.")
    domain[list(domain).index(our)] = made


def _settled(part: etree.Element) -> etree.Element:
    """Copy a part of a CPU without what libvirt decides at a start: fallback, and the policy of optional features."""
    made = deepcopy(part)
    if part.tag == "model":
        made.attrib.pop("fallback", None)
    elif part.get("policy") == "optional":
        made.attrib.pop("policy")
    return made


# The devices

_UNSAID: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("controller", "pci", "0"): ("pci-root",),
    ("controller", "usb", "0"): ("", "piix3-uhci"),
    ("input", "mouse", "ps2", ""): ("",),
    ("input", "keyboard", "ps2", ""): ("",),
    ("watchdog", "itco"): ("itco",),
}
"""The models of devices that all releases of libvirt make, and that it leaves out when it saves
(``VIR_DOMAIN_XML_MIGRATABLE``), by their identity."""


def _take_devices(theirs: etree.Element, domain: etree.Element) -> None:
    ours = _at(domain, "devices")
    saved = [device for device in theirs.iterfind("devices/*") if device.tag != "emulator"]
    left = [(model.known_by(our), our) for our in ours]
    has = {our.tag for our in ours}
    made, added = [], set()
    for device in saved:
        known = model.known_by(device)
        # The companions of a USB 2 controller share its index, and libvirt orders them in its own way.
        pairs = (each for each in left if model.is_same(known, each[0]))
        pair = min(pairs, key=lambda each: each[1].get("model") != device.get("model"), default=None)
        if pair is not None:
            left.remove(pair)
            made.append(_merge(device, deepcopy(pair[1])))
        elif not _is_derived(device, has):
            if known in added:
                raise SavedMismatch(f"the saved VM has a second {_name(device)}.")
            added.add(known)
            made.append(_merge(device, _added(device, has)))
    # VMs get a port for the guest agent and a panic device on some machines only.
    agent = model.known_by(build.agent_port())
    kept = [(known, our) for known, our in left if our.tag != "panic" and known != agent]
    for known, our in kept:
        if our.tag not in ("emulator", "console") and our.get("model", "") not in _UNSAID.get(known, ()):
            raise SavedMismatch(f"the saved VM has no {_name(our)}, and the job gives it one now.")
    ours[:] = [*(our for _, our in kept), *made]


def _is_derived(device: etree.Element, has: set[str]) -> bool:
    """Return True if libvirt derives this device from another one of ours, so that it can be left out."""
    if device.tag == "audio":
        return device.get("type") == "none"
    if device.tag == "console":  # the first serial port is the console as well
        return value(device, "target", "type", "serial") == "serial" and "serial" in has
    # and the reverse: from a console without a serial port libvirt makes one
    return device.tag == "serial" and "serial" not in has and "console" in has


def _added(device: etree.Element, has: set[str]) -> etree.Element:
    """Make a device that libvirt adds to any VM, with only the attributes that identify it."""
    if model.known_by(device) == model.known_by(agent := build.agent_port()):
        return agent  # from a machine where guests get an agent
    row = model.row_of(device)
    forms = {name: each.filled for name, each in row.attributes.items() if each.filled and Side.IDENTITY in each.side}
    fits = all(re.fullmatch(form, device.get(name, ""), re.ASCII) for name, form in forms.items())
    if not row.restored or not fits or (device.tag == "video" and "graphics" not in has):
        raise SavedMismatch(f"the saved VM has a device {_name(device)}, and the job gives it none.")
    return etree.Element(device.tag, {name: device.get(name, "") for name in forms})


def _merge(saved: etree.Element, our: etree.Element) -> etree.Element:
    """Return `our` device with the address of the saved one and the facts that ours leaves open."""
    if our.tag == "disk":
        _same("read-only", *(element.find("readonly") is not None for element in (saved, our)), of=our)
        formats = [value(element, "driver", "type") for element in (saved, our)]
        if formats[1]:
            _same("format", *formats, of=our)
    for path, row in model.elements(model.row_of(our)):
        source = saved.find(path) if path else saved
        if source is None:
            continue
        element = our.find(path) if path else our
        said = {} if element is None else element.attrib
        for name in row.filled():
            if name in said and name in source.attrib:  # a MAC address, whose case does not matter
                _same(name, source.get(name, "").lower(), said[name].lower(), of=our)
        facts = _facts(source, row, _name(our), said)
        if facts:
            _at(our, path).attrib.update(facts)
    address = saved.find("address")
    if address is not None and our.find("address") is None:
        our.append(_address(address, saved))
    return our


def _at(element: etree.Element, path: str) -> etree.Element:
    """Return the element at a path below, and make it if it is missing."""
    for step in path.split("/") if path else ():
        below = element.find(step)
        element = etree.SubElement(element, step) if below is None else below
    return element


def _facts(saved: etree.Element, row: Element, whose: str, said: Container[str] = ()) -> dict[str, str]:
    """Return the attributes that libvirt fills in, each checked for its form, except for those in `said`."""
    return {
        name: _checked(f"{name} of {whose}", saved.get(name, ""), form)
        for name, form in row.filled().items()
        if name in saved.attrib and name not in said
    }


def _address(saved: etree.Element, device: etree.Element) -> etree.Element:
    kind = saved.get("type", "")
    if kind not in model.ADDRESSES:
        raise SavedMismatch(f"the saved VM's {_name(device)} is at an address of the type {_shown(kind)}.")
    facts = _facts(saved, model.ADDRESS, f"the address of {_name(device)}")
    kept = {name: facts[name] for name in model.ADDRESSES[kind] if name in facts}
    return etree.Element("address", {"type": kind} | kept)


# Words for people


def _checked(what: str, value: str, form: str) -> str:
    if not re.fullmatch(form, value, re.ASCII):
        raise SavedMismatch(f"the saved VM's {what} is {_shown(value)}.")
    return value


def _name(device: etree.Element) -> str:
    """Describe a device for people: ``disk vda``, ``interface user``, ``controller usb 0``."""
    return " ".join(_shown(word)[1:-1] for word in model.known_by(device) if word)


def _shown(value: object) -> str:
    if isinstance(value, str):
        return ascii(value[:80])
    words = {"True": "yes", "False": "no", "None": "missing"}
    return words.get(str(value), str(value)[:200])
