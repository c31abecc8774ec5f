"""libvirt's domain XML as this package knows it: a row an element, and whose each attribute is.

A row says of an element which attributes, text and elements it may have; of an attribute by which form, and on which
side it is: the guest sees it, it reaches the host, or it tells devices of a kind apart. Everybody who reads domain
XML reads it by these rows. `vmgahp.domain.verify` compares what is the host's and what tells devices apart,
`vmgahp.domain.restore` takes over of a saved VM what the guest sees and libvirt had filled in, and
`vmgahp.domain.job_xml` lets a job say what has a form for jobs. What elements mean is libvirt's business:
https://libvirt.org/formatdomain.html.
"""

from collections.abc import Mapping
from enum import Flag, auto

from vmgahp.host.light import NamedTuple
from vmgahp.text import MAC

NUMBER = r"[0-9]{1,9}"
WORD = r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}"
MACHINE = r"pc|q35|virt|(?:pc-i440fx|pc-q35|virt|pseries|s390-ccw-virtio)-[A-Za-z0-9.-]{1,40}"
_AMOUNT = r"[0-9]{1,15}"
_UNIT = r"b|bytes|[KMGT]B|[kKMGT](?:iB)?"
_YES = r"yes|no"
_ON = r"on|off"
_KIB = r"[0-9]{1,5}"
"""Of video memory, which is the host's beside that of the guest: 98 MiB at most."""
_COUNT = r"[0-9]{1,3}"
_INDEX = r"1?[0-9]{1,2}|2[0-4][0-9]|25[0-5]"
"""Of a controller or a bus: libvirt makes all those below it, and 999,999,999 of them end libvirtd."""
_HEX = r"0x[0-9a-fA-F]{1,8}|[0-9]{1,9}"
_PORTS = r"[0-9]{1,5}(?:\.[0-9]{1,5}){0,3}"
_ANY = r"(?s).{0,4000}"


class Side(Flag):
    """Whose an attribute or an element is."""

    GUEST = auto()
    """What the guest sees, and how the hypervisor serves it."""
    HOST = auto()
    """What of the host it reaches, or what the host sees of it: it must be there as it was asked for."""
    IDENTITY = auto()
    """What tells it from another of its kind."""


class Attribute(NamedTuple):
    """An attribute of an element."""

    job: str = ""
    """The form in which a job's own XML may have it; empty: in none."""
    side: Side = Side.GUEST
    filled: str = ""
    """The form in which libvirt fills it in where a description leaves it open; empty: it does not."""
    default: str = ""
    """What it is where nothing is said, of what tells devices apart."""


class Element(NamedTuple):
    """A row: an element, and what may be in it."""

    attributes: Mapping[str, Attribute]
    children: "Mapping[str, Element]"
    text: str | None = None
    """The form of its text in a job's own XML, and in what libvirt fills in; None: it has none."""
    most: int = 1
    """How often it may come within its parent in a job's own XML."""
    side: Side = Side.GUEST
    job: bool = True
    """Whether a job's own XML may have it."""
    added: Mapping[str, str] | None = None
    """By which attributes a device is known that libvirt adds to any VM by itself; None: it adds none."""
    saved: tuple[str, ...] | None = None
    """The attributes, filled in, by which such a device is taken over of a saved VM; None: it is not."""
    new: bool = False
    """Whether this package gives it to VMs that had none when they were saved by an earlier release."""

    def filled(self) -> dict[str, str]:
        """What libvirt fills in of a device that is known already, by form."""
        attributes = self.attributes.items()
        return {name: each.filled for name, each in attributes if each.filled and Side.IDENTITY not in each.side}


def row(
    attributes: Mapping[str, Attribute | str] | None = None,
    children: Mapping[str, Element] | None = None,
    **more: object,
) -> Element:
    """A row; an attribute that is no more than a form is the guest's, and a job may say it so."""
    made = {name: Attribute(each) if isinstance(each, str) else each for name, each in (attributes or {}).items()}
    return Element(made, children or {}, **more)  # type: ignore[arg-type]


def _text(form: str, most: int = 1, **attributes: str) -> Element:
    return row(attributes, text=form, most=most)


def _filled(form: str, job: str | None = None) -> Attribute:
    """What the guest sees and libvirt fills in; a job may say it in the same form, or in another."""
    return Attribute(form if job is None else job, filled=form)


def _both(form: str, job: str | None = None) -> Attribute:
    """The same, of what the host has to do with too: it must be as it was asked for."""
    return Attribute(form if job is None else job, Side.GUEST | Side.HOST, form)


def _host(job: str = "") -> Attribute:
    return Attribute(job, Side.HOST)


def _known(job: str = "", filled: str = "", default: str = "") -> Attribute:
    return Attribute(job, Side.IDENTITY, filled, default)


def _switch(*names: str, **attributes: str) -> dict[str, Element]:
    """Elements that are there or not, or say so in an attribute."""
    return {name: row({"state": _ON, **attributes}) for name in names}


def _end(attributes: Mapping[str, Attribute | str] | None = None, text: str | None = None, job: bool = True) -> Element:
    """The end of a device that is on the host."""
    return row(attributes, text=text, side=Side.HOST, job=job)


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
"""Where a device is in the guest, by the kinds of places, none of which is the host's."""

ADDRESS = row(
    {name: _filled(_HEX) for names in ADDRESSES.values() for name in names}
    | dict.fromkeys(("controller", "bus", "slot"), _filled(rf"0x[0-9a-fA-F]{{1,2}}|{_INDEX}"))
    | {"type": "|".join(ADDRESSES), "multifunction": _filled(_ON), "port": _filled(_PORTS)}
)
_PLACE = {"address": ADDRESS}
_BOOT = row({"order": NUMBER})

_DISK = row(
    {
        "device": _known(r"disk|cdrom|floppy", default="disk"),
        "type": _host(r"file"),
        "model": _both(r"virtio(?:-non)?-transitional|virtio", job=""),
    },
    {
        "target": _end({"dev": _known(WORD), "bus": _filled(r"virtio|sata|ide|scsi|fdc|usb"), "rotation_rate": NUMBER}),
        "driver": row(
            {
                "name": _host(r"qemu"),
                "type": _host(WORD),
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
        "source": _end({"file": _host(_ANY), "fdgroup": _host()}),
        "readonly": _end(),
        "shareable": _end(),
        "boot": _BOOT,
        "serial": _text(r"[A-Za-z0-9_.+-]{1,36}"),
        "wwn": _text(r"[0-9a-fA-F]{16}"),
        "vendor": _text(r"[A-Za-z0-9 ._-]{1,8}"),
        "product": _text(r"[A-Za-z0-9 ._-]{1,16}"),
        "blockio": row({"logical_block_size": NUMBER, "physical_block_size": NUMBER}),
        **_PLACE,
    },
    most=64,
)

_INTERFACE = row(
    {"type": _known(r"network|bridge|user")},
    {
        "mac": _end({"address": _both(MAC, job=r"[0-9A-Fa-f:-]{11,17}")}),
        "source": _end({"network": _host(r"[^/]{1,100}"), "bridge": _host(WORD)}),
        "model": row({"type": _filled(WORD, job=r"virtio|e1000e?|rtl8139")}),
        "link": row({"state": _filled(r"up|down")}),
        "boot": _BOOT,
        **_PLACE,
    },
    most=16,
)

_CONTROLLERS = r"usb|scsi|sata|ide|fdc|virtio-serial|pci|ccid"
_CONTROLLER = row(
    {
        "type": _known(_CONTROLLERS + r"|isa", filled=_CONTROLLERS),
        "index": _known(_INDEX, filled=_INDEX),
        "model": _both(WORD),
        "ports": _filled(_COUNT),
        "vectors": _filled(_COUNT),
    },
    {
        "master": row({"startport": _filled(NUMBER)}),
        "model": row({"name": _filled(WORD)}),
        "target": row(
            dict.fromkeys(("chassisNr", "chassis", "port", "busNr", "index"), _filled(_HEX)) | {"hotplug": _filled(_ON)}
        ),
        "driver": row({"max_sectors": NUMBER} | dict.fromkeys(("queues", "iothread", "cmd_per_lun"), _COUNT)),
        **_PLACE,
    },
    most=64,
    added={"type": _CONTROLLERS + r"|isa"},
    saved=("type", "index"),
)

_INPUT = row(
    {
        "type": _known(r"mouse|keyboard|tablet", filled=r"mouse|keyboard"),
        "bus": _known(r"usb|ps2|virtio", filled=r"ps2"),
        "model": _known(WORD),
    },
    _PLACE,
    most=8,
    added={"type": r"mouse|keyboard", "bus": r"ps2|usb"},
    saved=("type", "bus"),
)


def _port(target: Mapping[str, Attribute | str], model: Attribute) -> Element:
    """A serial port or a console: what it is in the guest, and whereto it writes."""
    inside = row(target, {"model": row({"name": model})})
    return row({"type": _host(r"pty")}, {"target": inside, "source": _end(job=False), **_PLACE})


_SERIAL = _port({"port": _known(NUMBER, default="0"), "type": _filled(WORD), "name": WORD}, _filled(WORD))
_CONSOLE = _port({"type": _known(WORD, default="serial"), "name": _known(WORD), "port": NUMBER}, Attribute(WORD))

_CHANNEL = row(
    {"type": _host(r"unix")},
    {"target": _end({"type": _known(r"virtio"), "name": _known(WORD)}), "source": _end(job=False), **_PLACE},
    most=8,
)

_GRAPHICS = row(
    {"type": _known(r"vnc"), "port": r"-1", "autoport": r"yes", "listen": _host(r"127\.0\.0\.1|localhost")},
    {"listen": _end({"type": _host(r"address"), "address": _host(r"127\.0\.0\.1|localhost")})},
)

_VIDEO = row(
    {},
    {
        "model": row(
            {
                "type": _filled(r"cirrus|vga|qxl|virtio|bochs|none", job=r"vga|cirrus|qxl|virtio|bochs|ramfb|none"),
                "primary": _filled(_YES),
                "blob": _filled(_ON, job=""),
                "heads": _filled(r"[1-9]|1[0-6]"),
            }
            | dict.fromkeys(("ram", "vram", "vram64", "vgamem"), _filled(_KIB)),
            {"resolution": row({"x": NUMBER, "y": NUMBER})},
        ),
        **_PLACE,
    },
    most=4,
    added={},
    saved=(),
)

_BALLOONS = r"virtio(?:-(?:non-)?transitional)?|none"
_MEMBALLOON = row(
    {"model": _both(_BALLOONS), "autodeflate": _filled(_ON), "freePageReporting": _filled(_ON)},
    {"stats": row({"period": NUMBER}), **_PLACE},
    added={"model": _BALLOONS},
    saved=("model",),
)

_WATCHDOG = row(
    {
        "model": _known(r"i6300esb|ib700|itco", filled=r"itco"),
        "action": _filled(r"reset|none", job=r"reset|shutdown|poweroff|none|inject-nmi"),
    },
    _PLACE,
    most=2,
    added={"model": r"itco", "action": r"reset|none|poweroff|shutdown"},
    saved=("model",),
)

_RNG = row(
    {"model": _known(r"virtio(?:-(?:non-)?transitional)?")},
    {
        "rate": row({"bytes": NUMBER, "period": NUMBER}),
        "backend": _end({"model": _host(r"random|builtin")}, text=r"|/dev/u?random"),
        **_PLACE,
    },
    most=2,
)

_TPM = row(
    {"model": Attribute(r"tpm-tis|tpm-crb", Side.IDENTITY | Side.GUEST)},
    {"backend": _end({"type": _host(r"emulator"), "version": _host(r"2\.0")}), **_PLACE},
)

_SOME = {name: _known() for name in ("type", "bus", "model", "mode")}
OTHER = row(_SOME | {name: _host() for name in ("device", "index", "name", "listen", "accessmode")}, job=False)
"""Any device of which this package knows no more."""
_WITH_SOURCE = OTHER._replace(children={"source": _end()})

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
    "audio": row({"id": NUMBER, "type": _known(r"none")}, added={"type": r"none"}),
    "rng": _RNG,
    "watchdog": _WATCHDOG,
    "memballoon": _MEMBALLOON,
    "tpm": _TPM,
    "panic": row(
        {"model": _known(r"isa|pvpanic|hyperv|pseries")}, _PLACE, most=2, added={"model": r"pseries|s390"}, new=True
    ),
    "parallel": _SERIAL._replace(job=False),
    "hostdev": _WITH_SOURCE,
    "redirdev": _WITH_SOURCE,
    "filesystem": OTHER._replace(children={"source": _end(), "target": _end()}),
    "shmem": OTHER._replace(children={"server": _end()}),
    "emulator": OTHER._replace(added={}),
    "nvram": OTHER._replace(added={}),
    "hub": OTHER._replace(added={"type": r"usb"}),
}
"""The devices. What libvirt adds by itself (``virDomainDefAddImplicitDevices`` and ``qemuDomainDefAddDefaultDevices``)
is the chip set's controllers, mouse and keyboard, the balloon, silence; the watchdog of q35; a hub where USB ports
run out; on other architectures a panic notifier and the firmware's memory. A display adapter is added to a VM with
graphics only."""

ADDED_BY = {"xen": {"controller": {"type": r"xenbus"}, "input": {"bus": r"xen"}, "memballoon": {"model": r"xen"}}}
"""What libvirt's driver adds to any guest of another hypervisor, by the type of the domain."""


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
        "type": _text(r"hvm", arch=r"x86_64|aarch64", machine=MACHINE),
        "boot": row({"dev": r"hd|cdrom|fd|network"}, most=4),
        "bootmenu": row({"enable": _YES, "timeout": NUMBER}),
        "bios": row({"useserial": _YES, "rebootTimeout": r"-1|[0-9]{1,5}"}),
        "firmware": row({}, {"feature": row({"enabled": _YES, "name": r"enrolled-keys|secure-boot"}, most=2)}),
        "kernel": _text(_ANY),
        "initrd": _text(_ANY),
        "cmdline": _text(_ANY),
    },
)

_HYPERV = row(
    {"mode": r"custom"},
    _switch("relaxed", "vapic", "vpindex", "runtime", "synic", "reset", "frequencies")
    | _switch("reenlightenment", "tlbflush", "ipi", "evmcs", "avic", "emsr_bitmap", "xmm_input")
    | _switch("spinlocks", retries=NUMBER)
    | _switch("vendor_id", value=r"[A-Za-z0-9 ._-]{1,12}")
    | {"stimer": row({"state": _ON}, _switch("direct"))},
)

_FEATURES = row(
    {},
    _switch("acpi", "pae", "viridian", "hap", "vmport", "smm", "pmu", "vmcoreinfo", "htm")
    | {
        "apic": row({"eoi": _ON}),
        "ioapic": row({"driver": r"kvm|qemu"}),
        "gic": row({"version": r"2|3|host"}),
        "hyperv": _HYPERV,
        "kvm": row({}, _switch("hidden", "hint-dedicated", "poll-control", "pv-ipi")),
    },
)

CPU = row(
    {
        "mode": _filled(r"custom|host-model|host-passthrough|maximum"),
        "match": _filled(r"exact|minimum|strict"),
        "check": _filled(r"none|partial|full"),
        "migratable": _filled(_ON),
    },
    {
        "model": row({"fallback": _filled(r"allow|forbid")}, text=WORD),
        "vendor": _text(WORD),
        "topology": row(dict.fromkeys(("sockets", "dies", "clusters", "cores", "threads"), _filled(NUMBER))),
        "cache": row({"level": _filled(r"[1-3]"), "mode": _filled(r"emulate|passthrough|disable")}),
        "maxphysaddr": row(
            {"mode": _filled(r"emulate|passthrough"), "bits": _filled(NUMBER), "limit": _filled(NUMBER)}
        ),
        "feature": row({"policy": _filled(r"force|require|optional|disable|forbid"), "name": _filled(WORD)}, most=200),
    },
)

DOMAIN = row(
    {"type": r"kvm|qemu|test|xen"},
    {
        "name": _text(_ANY),
        "uuid": _text(_ANY),
        "title": _text(_ANY),
        "description": _text(_ANY),
        "memory": _text(_AMOUNT, unit=_UNIT),
        "currentMemory": _text(_AMOUNT, unit=_UNIT),
        "vcpu": _text(r"[1-9][0-9]{0,3}", placement=r"static"),
        "iothreads": _text(r"[0-9]|1[0-6]"),
        "os": _OS,
        "features": _FEATURES,
        "cpu": CPU,
        "clock": row({"offset": r"utc|localtime"}, {"timer": _TIMER}),
        "on_poweroff": _text(r"destroy"),
        "on_reboot": _text(r"destroy|restart"),
        "on_crash": _text(r"destroy|restart"),
        "pm": row({}, {name: row({"enabled": _YES}) for name in ("suspend-to-mem", "suspend-to-disk")}),
        "devices": row({}, DEVICES),
    },
)
