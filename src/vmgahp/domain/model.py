"""libvirt's domain XML as this package knows it: one row for each element, with its attributes.

The row of an element lists the attributes, text and elements that it may have, and for each attribute its form and its
side: the guest sees it, it gives access to the host, or it distinguishes devices of a kind. All modules that read
domain XML use these rows. `vmgahp.domain.verify` compares the host's side and the distinguishing attributes,
`vmgahp.domain.restore` takes the attributes that the guest sees and libvirt had filled in from a saved VM, and
`vmgahp.domain.job_xml` lets a job's XML have what has a form for jobs. The meaning of the elements is defined by
libvirt: https://libvirt.org/formatdomain.html.
"""

from collections.abc import Mapping

from vmgahp.domain.rows import ON, Attribute, Element, Side, both, end, filled, host, known, row, switch, text
from vmgahp.text import MAC

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


AGENT = "org.qemu.guest_agent.0"
"""The name of the port of QEMU's guest agent."""

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
"""The ports of the machine that are forwarded to those of a guest."""

_INTERFACE = row(
    {"type": known(r"network|bridge|user")},
    {
        "mac": end({"address": both(MAC, job=r"[0-9A-Fa-f:-]{11,17}")}),
        "source": end({"network": host(r"[^/]{1,100}"), "bridge": host(WORD)}),
        "portForward": _FORWARD,
        "model": row({"type": filled(WORD, job=r"virtio|e1000e?|rtl8139")}),
        "link": row({"state": filled(r"up|down")}),
        "boot": _BOOT,
        **_PLACE,
    },
    most=16,
)

_CONTROLLERS = r"usb|scsi|sata|ide|fdc|virtio-serial|pci|ccid"
_CONTROLLER = row(
    {
        "type": known(_CONTROLLERS + r"|isa", filled=_CONTROLLERS),
        "index": known(_INDEX, filled=_INDEX),
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
    added={"type": _CONTROLLERS + r"|isa"},
    saved=("type", "index"),
)

_INPUT = row(
    {
        "type": known(r"mouse|keyboard|tablet", filled=r"mouse|keyboard"),
        "bus": known(r"usb|ps2|virtio", filled=r"ps2"),
        "model": known(WORD),
    },
    _PLACE,
    most=8,
    added={"type": r"mouse|keyboard", "bus": r"ps2|usb"},
    saved=("type", "bus"),
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
    added={},
    saved=(),
)

_BALLOONS = r"virtio(?:-(?:non-)?transitional)?|none"
_MEMBALLOON = row(
    {"model": both(_BALLOONS), "autodeflate": filled(ON), "freePageReporting": filled(ON)},
    {"stats": row({"period": NUMBER}), **_PLACE},
    added={"model": _BALLOONS},
    saved=("model",),
)

_WATCHDOG = row(
    {
        "model": known(r"i6300esb|ib700|itco", filled=r"itco"),
        "action": filled(r"reset|none", job=r"reset|shutdown|poweroff|none|inject-nmi"),
    },
    _PLACE,
    most=2,
    added={"model": r"itco", "action": r"reset|none|poweroff|shutdown"},
    saved=("model",),
)

_RNG = row(
    {"model": known(r"virtio(?:-(?:non-)?transitional)?")},
    {
        "rate": row({"bytes": NUMBER, "period": NUMBER}),
        "backend": end({"model": host(r"random|builtin")}, text=r"|/dev/u?random"),
        **_PLACE,
    },
    most=2,
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
    "audio": row({"id": NUMBER, "type": known(r"none")}, added={"type": r"none"}),
    "rng": _RNG,
    "watchdog": _WATCHDOG,
    "memballoon": _MEMBALLOON,
    "tpm": _TPM,
    "panic": row({"model": known(r"isa|pvpanic|hyperv")}, _PLACE, most=2, added={"model": r"pseries|s390"}),
    "parallel": _SERIAL._replace(job=False),
    "hostdev": _WITH_SOURCE,
    "redirdev": _WITH_SOURCE,
    "filesystem": OTHER._replace(children={name: end() for name in ("driver", "source", "target", "readonly")}),
    "shmem": OTHER._replace(children={"server": end()}),
    "emulator": OTHER._replace(added={}),
    "nvram": OTHER._replace(added={}),
    "hub": row({"type": known(r"usb")}, _PLACE, most=8, added={"type": r"usb"}),
}
"""The devices. libvirt adds by itself (``virDomainDefAddImplicitDevices`` and ``qemuDomainDefAddDefaultDevices``)
the chip set's controllers, mouse and keyboard, the balloon, and a silent audio device; the watchdog of q35; a hub if
USB ports run out; on other architectures a panic notifier and the firmware's memory. It adds a display adapter only to
a VM with graphics."""

ADDED_BY = {"xen": {"controller": {"type": r"xenbus"}, "input": {"bus": r"xen"}, "memballoon": {"model": r"xen"}}}
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
        "cmdline": text(_ANY),
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
)

DOMAIN = row(
    {"type": r"kvm|qemu|hvf|test|xen"},
    {
        "name": text(_ANY),
        "uuid": text(_ANY),
        "title": text(_ANY),
        "description": text(_ANY),
        "memory": text(_AMOUNT, unit=_UNIT),
        "currentMemory": text(_AMOUNT, unit=_UNIT),
        "vcpu": text(r"[1-9][0-9]{0,3}", placement=r"static"),
        "iothreads": text(r"[0-9]|1[0-6]"),
        "os": _OS,
        "features": _FEATURES,
        "cpu": CPU,
        "clock": row(
            {"offset": r"utc|localtime|variable", "basis": r"utc|localtime", "adjustment": r"-?[0-9]{1,9}"},
            {"timer": _TIMER},
        ),
        "on_poweroff": text(r"destroy"),
        "on_reboot": text(r"destroy|restart"),
        "on_crash": text(r"destroy|restart"),
        "pm": row({}, {name: row({"enabled": _YES}) for name in ("suspend-to-mem", "suspend-to-disk")}),
        "devices": row({}, DEVICES),
    },
)
