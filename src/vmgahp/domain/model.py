"""libvirt's domain XML as this package knows it, a row for each element, and comparison by the rows.

The row of an element lists the attributes, text and elements that it may have, and says of each who writes it (the job,
this daemon, libvirt) and whether it is restored from a saved VM. All modules that read domain XML use these rows:

- `vmgahp.domain.job_xml` lets a job's XML have what has a form for jobs, and merges it into ours by the `Author`;
- `vmgahp.domain.verify` compares the host's side and the distinguishing attributes of what libvirt made with ours;
- `vmgahp.domain.restore` takes from a saved VM the attributes that the guest sees and libvirt had filled in.

The meaning of the elements is defined by libvirt: https://libvirt.org/formatdomain.html.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, Flag, auto
from typing import NamedTuple
from xml.etree import ElementTree as etree

from vmgahp.text import MAC

# The columns

ON = r"on|off"


class Side(Flag):
    """The side to which an attribute or an element belongs."""

    GUEST = auto()
    """The guest's side: what the guest sees, and how the hypervisor serves it."""
    HOST = auto()
    """The host's side: the host resources that it uses, or its view from the host; it must be exactly as requested."""
    IDENTITY = auto()
    """An attribute that distinguishes the element from others of its kind."""


class Author(Enum):
    """The author of a device, or of an element of the domain, where the job brings XML of its own."""

    DAEMON = auto()
    """This daemon; the job's XML changes the guest's side of ours."""
    EITHER = auto()
    """The job if its XML has the element, else this daemon."""
    BOTH = auto()
    """Both: the job's elements are added to ours."""


class Attribute(NamedTuple):
    """An attribute of an element."""

    job: str = ""
    """The form in which a job's own XML may have it; empty if it may not."""
    side: Side = Side.GUEST
    filled: str = ""
    """The form in which libvirt fills it in if a description leaves it open; empty if libvirt does not."""
    default: str = ""
    """The value of a distinguishing attribute that is absent."""


class Element(NamedTuple):
    """A row: an element, and its permitted content."""

    attributes: Mapping[str, Attribute]
    children: Mapping[str, Element]
    text: str | None = None
    """The form of its text in a job's own XML, and in what libvirt fills in; None if it has no text."""
    most: int = 1
    """The maximum number within its parent in a job's own XML."""
    side: Side = Side.GUEST
    job: bool = True
    """True if a job's own XML may have it."""
    author: Author = Author.DAEMON
    added: bool = False
    """True if libvirt adds such a device to any VM by itself, with attributes in their `filled` form."""
    restored: bool = False
    """True if such a device is taken over from a saved VM."""

    def filled(self) -> dict[str, str]:
        """Return the forms of the attributes that libvirt fills in, without those that identify the device."""
        attributes = self.attributes.items()
        return {name: each.filled for name, each in attributes if each.filled and Side.IDENTITY not in each.side}

    def form(self, name: str) -> str:
        """Return the form in which a job's own XML may have an attribute; empty if it may not."""
        return self.attributes[name].job if name in self.attributes else ""

    def child(self, tag: str) -> Element | None:
        """Return the row of an element that a job's own XML may have in this one."""
        found = self.children.get(tag)
        return found if found is not None and found.job else None


def row(
    attributes: Mapping[str, Attribute | str] | None = None,
    children: Mapping[str, Element] | None = None,
    **more: object,
) -> Element:
    """Make a row; an attribute given as a form is on the guest's side, and a job's XML may have it in that form."""
    made = {name: Attribute(each) if isinstance(each, str) else each for name, each in (attributes or {}).items()}
    return Element(made, children or {}, **more)  # type: ignore[arg-type]


def text(form: str, author: Author = Author.DAEMON, **attributes: str) -> Element:
    return row(attributes, text=form, author=author)


def filled(form: str, job: str | None = None) -> Attribute:
    """Make an attribute that the guest sees and libvirt fills in; a job may use the same form, or another."""
    return Attribute(form if job is None else job, filled=form)


def both(form: str, job: str | None = None) -> Attribute:
    """Make such an attribute that is on the host's side as well: it must be as requested."""
    return Attribute(form if job is None else job, Side.GUEST | Side.HOST, form)


def host(job: str = "") -> Attribute:
    return Attribute(job, Side.HOST)


def known(job: str = "", filled: str = "", default: str = "") -> Attribute:
    return Attribute(job, Side.IDENTITY, filled, default)


def switch(*names: str, **attributes: str) -> dict[str, Element]:
    """Make elements that are a switch by their presence, or by an attribute."""
    return {name: row({"state": ON, **attributes}) for name in names}


def end(attributes: Mapping[str, Attribute | str] | None = None, text: str | None = None, job: bool = True) -> Element:
    """Make the row of the host's end of a device."""
    return row(attributes, text=text, side=Side.HOST, job=job)


# The forms

NUMBER = r"[0-9]{1,9}"
WORD = r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}"
MACHINE = r"pc|q35|virt|(?:pc-i440fx|pc-q35|virt|pseries|s390-ccw-virtio)-[A-Za-z0-9.-]{1,40}"
"""The machine types that a saved VM may have, by libvirt's names on any architecture."""
_MACHINE = r"pc|q35|virt|(?:pc-i440fx|pc-q35|virt)-[A-Za-z0-9.-]{1,40}"
_AMOUNT = r"[0-9]{1,15}"
_UNIT = r"b|bytes|[KMGT]B|[kKMGT](?:iB)?"
_YES = r"yes|no"
_KIB = r"[0-9]{1,5}"
"""The amount of video memory, which the host uses in addition to that of the guest: 98 MiB at most."""
_COUNT = r"[0-9]{1,3}"
_INDEX = r"1?[0-9]{1,2}|2[0-4][0-9]|25[0-5]"
"""The index of a controller or a bus: libvirt makes all lower ones too, and 999,999,999 of them crash libvirtd."""
_HEX = r"0x[0-9a-fA-F]{1,8}|[0-9]{1,9}"
_PORTS = r"[0-9]{1,5}(?:\.[0-9]{1,5}){0,3}"
_ANY = r"(?s).{0,4000}"
_LINE = r"[^\x00-\x1f\x7f]{0,4000}"


AGENT = "org.qemu.guest_agent.0"

# Devices

ADDRESSES: Mapping[str, tuple[str, ...]] = {
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
"""The attributes of each type of address of a device in the guest; none of them is about the host."""

_ELSEWHERE = "ccw", "spapr-vio"
"""The types of addresses on architectures that jobs do not have."""

ADDRESS = row(
    {name: filled(_HEX, job="" if kind in _ELSEWHERE else None) for kind, names in ADDRESSES.items() for name in names}
    | dict.fromkeys(("controller", "bus", "slot"), filled(rf"0x[0-9a-fA-F]{{1,2}}|{_INDEX}"))
    | {
        "type": "|".join(kind for kind in ADDRESSES if kind not in _ELSEWHERE),
        "multifunction": filled(ON),
        "port": filled(_PORTS),
    }
)
_PLACE = {"address": ADDRESS}
_BOOT = row({"order": NUMBER})

_DISK = row(
    {
        "device": known(r"disk|cdrom|floppy", default="disk"),
        "type": host(r"file"),
        "model": both(r"virtio(?:-non)?-transitional|virtio", job=""),
    },
    {
        "target": end({"dev": known(WORD), "bus": filled(r"virtio|sata|ide|scsi|fdc|usb"), "rotation_rate": NUMBER}),
        "driver": row(
            {
                "name": host(r"qemu"),
                "type": host(WORD),
                "cache": r"default|none|writethrough|writeback|directsync|unsafe",
                "error_policy": r"stop|report|enospace",
                "rerror_policy": r"stop|report",
                "io": r"threads|native|io_uring",
                "discard": r"ignore|unmap",
                "detect_zeroes": r"off|on|unmap",
                "iothread": NUMBER,
                "queues": _COUNT,
            }
        ),
        "source": end({"file": host(_ANY), "fdgroup": host()}),
        "readonly": end(),
        "shareable": end(),
        "boot": _BOOT,
        "serial": text(r"[A-Za-z0-9_.+-]{1,36}"),
        "wwn": text(r"(?:0x)?[0-9a-fA-F]{16}"),
        "vendor": text(r"[A-Za-z0-9 ._-]{1,8}"),
        "product": text(r"[A-Za-z0-9 ._-]{1,16}"),
        "blockio": row({"logical_block_size": NUMBER, "physical_block_size": NUMBER}),
        **_PLACE,
    },
    most=64,
)

_FORWARD = end({"proto": host(), "address": host(), "dev": host()}, job=False)._replace(
    children={"range": row({name: host() for name in ("start", "end", "to", "exclude")}, job=False)}
)

_INTERFACE = row(
    {"type": known(r"network|bridge|user")},
    {
        "mac": end({"address": both(MAC, job=r"(?:[0-9A-Fa-f]{1,2}[:-]){5}[0-9A-Fa-f]{1,2}")}),
        "source": end({"network": host(r"[^/]{1,100}"), "bridge": host(WORD)}),
        "portForward": _FORWARD,
        "model": row({"type": filled(WORD, job=r"virtio|e1000e?|rtl8139")}),
        "link": row({"state": filled(r"up|down")}),
        "boot": _BOOT,
        **_PLACE,
    },
    most=16,
)

_CONTROLLERS = r"usb|scsi|sata|ide|fdc|virtio-serial|pci|ccid|isa"
_CONTROLLER = row(
    {
        "type": known(_CONTROLLERS, _CONTROLLERS),
        "index": known(_INDEX, _INDEX),
        "model": both(WORD),
        "ports": filled(_COUNT),
        "vectors": filled(_COUNT),
    },
    {
        "master": row({"startport": filled(NUMBER)}),
        "model": row({"name": filled(WORD)}),
        "target": row(
            dict.fromkeys(("chassisNr", "chassis", "port", "busNr", "index"), filled(_HEX)) | {"hotplug": filled(ON)}
        ),
        "driver": row({"max_sectors": NUMBER} | dict.fromkeys(("queues", "iothread", "cmd_per_lun"), _COUNT)),
        **_PLACE,
    },
    most=64,
    author=Author.BOTH,
    added=True,
    restored=True,
)

_INPUT = row(
    {
        "type": known(r"mouse|keyboard|tablet", r"mouse|keyboard"),
        "bus": known(r"usb|ps2|virtio", r"ps2|usb"),
        "model": known(WORD),
    },
    _PLACE,
    most=8,
    author=Author.EITHER,
    added=True,
    restored=True,
)


def _port(target: Mapping[str, Attribute | str], model: Attribute) -> Element:
    """Make the row of a serial port or a console: its side in the guest, and the place where its output goes."""
    inside = row(target, {"model": row({"name": model})})
    return row({"type": host(r"pty")}, {"target": inside, "source": end(job=False), **_PLACE})


_SERIAL = _port({"port": known(NUMBER, default="0"), "type": filled(WORD), "name": WORD}, filled(WORD))
_CONSOLE = _port({"type": known(WORD, default="serial"), "name": known(WORD), "port": NUMBER}, Attribute(WORD))

_CHANNEL = row(
    {"type": host(r"unix")},
    {"target": end({"type": known(r"virtio"), "name": known(WORD)}), "source": end(job=False), **_PLACE},
    most=8,
    author=Author.BOTH,
)

_GRAPHICS = row(
    {"type": known(r"vnc"), "port": r"-1", "autoport": r"yes", "listen": host(r"127\.0\.0\.1|localhost")},
    {"listen": end({"type": host(r"address"), "address": host(r"127\.0\.0\.1|localhost")})},
)

_VIDEO = row(
    {},
    {
        "model": row(
            {
                "type": filled(r"cirrus|vga|qxl|virtio|bochs|none", job=r"vga|cirrus|qxl|virtio|bochs|ramfb|none"),
                "primary": filled(_YES),
                "blob": filled(ON, job=""),
                "device": filled(r"[a-z0-9-]{1,40}", job=""),
                "heads": filled(r"[1-9]|1[0-6]"),
            }
            | dict.fromkeys(("ram", "vram", "vram64", "vgamem"), filled(_KIB)),
            {"resolution": row({"x": NUMBER, "y": NUMBER})},
        ),
        **_PLACE,
    },
    most=4,
    author=Author.EITHER,
    added=True,
    restored=True,
)

_MEMBALLOON = row(
    {
        "model": both(r"virtio(?:-(?:non-)?transitional)?|none"),
        "autodeflate": filled(ON),
        "freePageReporting": filled(ON),
    },
    {"stats": row({"period": NUMBER}), **_PLACE},
    author=Author.BOTH,
    added=True,
    restored=True,
)

_WATCHDOG = row(
    {
        "model": known(r"i6300esb|ib700|itco", r"itco"),
        "action": filled(r"reset|none", job=r"reset|shutdown|poweroff|none|inject-nmi"),
    },
    _PLACE,
    most=2,
    author=Author.BOTH,
    added=True,
    restored=True,
)

_RNG = row(
    {"model": known(r"virtio(?:-(?:non-)?transitional)?")},
    {
        "rate": row({"bytes": NUMBER, "period": NUMBER}),
        "backend": end({"model": host(r"random|builtin")}, text=r"|/dev/u?random"),
        **_PLACE,
    },
    most=2,
    author=Author.BOTH,
)

_TPM = row(
    {"model": Attribute(r"tpm-tis|tpm-crb", Side.IDENTITY | Side.GUEST)},
    {"backend": end({"type": host(r"emulator"), "version": host(r"2\.0")}), **_PLACE},
)

_SOME = {name: known() for name in ("type", "bus", "model", "mode")}
OTHER = row(_SOME | {name: host() for name in ("device", "index", "name", "listen", "accessmode")}, job=False)
"""The row of any device that this package does not know."""
_WITH_SOURCE = OTHER._replace(children={"source": end()})

DEVICES: Mapping[str, Element] = {
    "disk": _DISK,
    "interface": _INTERFACE,
    "controller": _CONTROLLER,
    "input": _INPUT,
    "serial": _SERIAL,
    "console": _CONSOLE,
    "channel": _CHANNEL,
    "graphics": _GRAPHICS,
    "video": _VIDEO,
    "audio": row({"id": NUMBER, "type": known(r"none", r"none")}, added=True),
    "rng": _RNG,
    "watchdog": _WATCHDOG,
    "memballoon": _MEMBALLOON,
    "tpm": _TPM,
    "panic": row(
        {"model": known(r"isa|pvpanic|hyperv", r"pseries|s390")}, _PLACE, most=2, author=Author.EITHER, added=True
    ),
    "parallel": _SERIAL._replace(job=False),
    "hostdev": _WITH_SOURCE,
    "redirdev": _WITH_SOURCE,
    "filesystem": OTHER._replace(children={name: end() for name in ("driver", "source", "target", "readonly")}),
    "shmem": OTHER._replace(children={"server": end()}),
    "emulator": OTHER._replace(added=True),
    "nvram": OTHER._replace(added=True),
    "hub": row({"type": known(r"usb", r"usb")}, _PLACE, most=8, author=Author.BOTH, added=True),
}
"""The devices. libvirt adds by itself (``virDomainDefAddImplicitDevices`` and ``qemuDomainDefAddDefaultDevices``)
the chip set's controllers, mouse and keyboard, the balloon, and a silent audio device; the watchdog of q35; a hub if
USB ports run out; on other architectures a panic notifier and the firmware's memory; only with graphics a display."""

ADDED_BY = {"xen": {"controller": {"type": "xenbus"}, "input": {"bus": "xen"}, "memballoon": {"model": "xen"}}}
"""The devices that libvirt's driver for another hypervisor adds to any guest, by the type of the domain."""


# The domain

_TIMER = row(
    {
        "name": r"rtc|pit|hpet|kvmclock|hypervclock|tsc|armvtimer",
        "present": _YES,
        "tickpolicy": r"delay|catchup|merge|discard",
        "track": r"guest|wall",
        "frequency": NUMBER,
        "mode": r"auto|native|emulate|paravirt|smpsafe",
    },
    most=8,
)

_OS = row(
    {"firmware": r"bios|efi"},
    {
        "type": text(r"hvm", arch=r"x86_64|aarch64", machine=_MACHINE),
        "boot": row({"dev": r"hd|cdrom|fd|network"}, most=4),
        "bootmenu": row({"enable": _YES, "timeout": NUMBER}),
        "bios": row({"useserial": _YES, "rebootTimeout": r"-1|[0-9]{1,5}"}),
        "firmware": row({}, {"feature": row({"enabled": _YES, "name": r"enrolled-keys|secure-boot"}, most=2)}),
        "kernel": text(_ANY),
        "initrd": text(_ANY),
        "cmdline": text(_LINE),  # in QEMU's log it would look like QEMU's own words
    },
)

_HYPERV = row(
    {"mode": r"custom"},
    switch("relaxed", "vapic", "vpindex", "runtime", "synic", "reset", "frequencies")
    | switch("reenlightenment", "ipi", "evmcs", "avic", "emsr_bitmap", "xmm_input")
    | switch("spinlocks", retries=NUMBER)
    | switch("vendor_id", value=r"[A-Za-z0-9 ._-]{1,12}")
    | {"stimer": row({"state": ON}, switch("direct"))}
    | {"tlbflush": row({"state": ON}, switch("direct", "extended"))},
)

_FEATURES = row(
    {},
    switch("acpi", "pae", "viridian", "hap", "vmport", "smm", "pmu", "vmcoreinfo", "pvspinlock", "ps2")
    | {
        "apic": row({"eoi": ON}),
        "ioapic": row({"driver": r"kvm|qemu"}),
        "gic": row({"version": r"2|3|host"}),
        "hyperv": _HYPERV,
        "kvm": row({}, switch("hidden", "hint-dedicated", "poll-control", "pv-ipi")),
    },
    author=Author.EITHER,
)

CPU = row(
    {
        "mode": filled(r"custom|host-model|host-passthrough|maximum"),
        "match": filled(r"exact|minimum|strict"),
        "check": filled(r"none|partial|full"),
        "migratable": filled(ON),
    },
    {
        "model": row({"fallback": filled(r"allow|forbid")}, text=WORD),
        "vendor": text(WORD),
        "topology": row(dict.fromkeys(("sockets", "dies", "clusters", "cores", "threads"), filled(NUMBER))),
        "cache": row({"level": filled(r"[1-3]"), "mode": filled(r"emulate|passthrough|disable")}),
        "maxphysaddr": row({"mode": filled(r"emulate|passthrough"), "bits": filled(NUMBER), "limit": filled(NUMBER)}),
        "feature": row({"policy": filled(r"force|require|optional|disable|forbid"), "name": filled(WORD)}, most=200),
    },
    author=Author.EITHER,
)

DOMAIN = row(
    {"type": r"kvm|qemu|hvf|test|xen"},
    {
        "name": text(_ANY),
        "uuid": text(_ANY),
        "title": text(_ANY),
        "description": text(_ANY),
        "memory": text(_AMOUNT, unit=_UNIT),
        "currentMemory": text(_AMOUNT, Author.EITHER, unit=_UNIT),
        "vcpu": text(r"[1-9][0-9]{0,3}", placement=r"static"),
        "iothreads": text(r"[0-9]|1[0-6]", Author.EITHER),
        "os": _OS,
        "features": _FEATURES,
        "cpu": CPU,
        "clock": row(
            {"offset": r"utc|localtime|variable", "basis": r"utc|localtime", "adjustment": r"-?[0-9]{1,9}"},
            {"timer": _TIMER},
            author=Author.EITHER,
        ),
        "on_poweroff": text(r"destroy", Author.EITHER),
        "on_reboot": text(r"destroy|restart", Author.EITHER),
        "on_crash": text(r"destroy|restart", Author.EITHER),
        "pm": row(
            {}, {name: row({"enabled": _YES}) for name in ("suspend-to-mem", "suspend-to-disk")}, author=Author.EITHER
        ),
        "devices": row({}, DEVICES),
    },
)


# Comparison


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
