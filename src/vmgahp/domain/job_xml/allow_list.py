"""What the libvirt XML of a job may say: the whole list, as data. What is not in it is refused.

Each row is an element with the attributes, the text and the elements that it may have, all by their form. What
names anything of the host is not here: no path but those that `vmgahp.domain.job_xml` looks at (disks, a kernel and
its initrd), no device, no program, no network but those that this machine offers to every job. What elements
mean is libvirt's business: https://libvirt.org/formatdomain.html.
"""

from collections.abc import Mapping

NUMBER = r"[0-9]{1,9}"
AMOUNT = r"[0-9]{1,15}"
WORD = r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}"
YES = r"yes|no"
ON = r"on|off"
KIB = r"[0-9]{1,5}"
"""Of video memory, which is the host's beside that of the guest: 98 MiB at most."""
_COUNT = r"[0-9]{1,3}"
_HEX = r"0x[0-9a-fA-F]{1,8}|[0-9]{1,9}"
_PORTS = r"[0-9]{1,5}(?:\.[0-9]{1,5}){0,3}"
MACHINE = r"pc|q35|virt|(?:pc-i440fx|pc-q35|virt|pseries|s390-ccw-virtio)-[A-Za-z0-9.-]{1,40}"
_ANY = r"(?s).{0,4000}"
UNIT = r"b|bytes|[KMGT]B|[kKMGT](?:iB)?"


class Allowed:
    """One element: `attributes` by name and form, the form of its `text` (None: it has none), the `children`
    by name, and how often it may come within its parent (`most`)."""

    __slots__ = ("attributes", "children", "most", "text")

    def __init__(
        self,
        attributes: Mapping[str, str] | None = None,
        children: "Mapping[str, Allowed] | None" = None,
        text: str | None = None,
        most: int = 1,
    ) -> None:
        self.attributes = attributes or {}
        self.children = children or {}
        self.text = text
        self.most = most


def _switch(*names: str, **attributes: str) -> dict[str, Allowed]:
    """Elements that are there or not, or say so in an attribute."""
    return {name: Allowed({"state": ON, **attributes}) for name in names}


def _text(form: str, most: int = 1, **attributes: str) -> Allowed:
    return Allowed(attributes, text=form, most=most)


_ADDRESS = Allowed(
    {"type": r"pci|drive|usb|virtio-serial|ccid|isa|ccw|spapr-vio|virtio-mmio", "multifunction": ON}
    | dict.fromkeys(
        (
            *("domain", "bus", "slot", "function", "controller", "target", "unit"),
            *("iobase", "irq", "reg", "cssid", "ssid", "devno"),
        ),
        _HEX,
    )
    | {"port": _PORTS}
)
"""Where a device is in the guest; of host addresses it has none."""
_BOOT = Allowed({"order": NUMBER})
_PLACE = {"address": _ADDRESS}

_TIMER = Allowed(
    {
        "name": r"rtc|pit|hpet|kvmclock|hypervclock|tsc|armvtimer",
        "present": YES,
        "tickpolicy": r"delay|catchup|merge|discard",
        "track": r"guest|wall",
        "frequency": NUMBER,
        "mode": r"auto|native|emulate|paravirt|smpsafe",
    },
    most=8,
)

_OS = Allowed(
    {"firmware": r"bios|efi"},
    {
        "type": _text(r"hvm", arch=r"x86_64|aarch64", machine=MACHINE),
        "boot": Allowed({"dev": r"hd|cdrom|fd|network"}, most=4),
        "bootmenu": Allowed({"enable": YES, "timeout": NUMBER}),
        "bios": Allowed({"useserial": YES, "rebootTimeout": r"-1|[0-9]{1,5}"}),
        "firmware": Allowed({}, {"feature": Allowed({"enabled": YES, "name": r"enrolled-keys|secure-boot"}, most=2)}),
        "kernel": _text(_ANY),
        "initrd": _text(_ANY),
        "cmdline": _text(_ANY),
    },
)

_HYPERV = Allowed(
    {"mode": r"custom"},
    _switch("relaxed", "vapic", "vpindex", "runtime", "synic", "reset", "frequencies")
    | _switch("reenlightenment", "tlbflush", "ipi", "evmcs", "avic", "emsr_bitmap", "xmm_input")
    | _switch("spinlocks", retries=NUMBER)
    | _switch("vendor_id", value=r"[A-Za-z0-9 ._-]{1,12}")
    | {"stimer": Allowed({"state": ON}, _switch("direct"))},
)

_FEATURES = Allowed(
    {},
    _switch("acpi", "pae", "viridian", "hap", "vmport", "smm", "pmu", "vmcoreinfo", "htm")
    | {
        "apic": Allowed({"eoi": ON}),
        "ioapic": Allowed({"driver": r"kvm|qemu"}),
        "gic": Allowed({"version": r"2|3|host"}),
        "hyperv": _HYPERV,
        "kvm": Allowed({}, _switch("hidden", "hint-dedicated", "poll-control", "pv-ipi")),
    },
)

_CPU = Allowed(
    {
        "mode": r"custom|host-model|host-passthrough|maximum",
        "match": r"exact|minimum|strict",
        "check": r"none|partial|full",
        "migratable": ON,
    },
    {
        "model": _text(WORD, fallback=r"allow|forbid"),
        "vendor": _text(WORD),
        "topology": Allowed(dict.fromkeys(("sockets", "dies", "clusters", "cores", "threads"), NUMBER)),
        "cache": Allowed({"level": r"[1-3]", "mode": r"emulate|passthrough|disable"}),
        "maxphysaddr": Allowed({"mode": r"emulate|passthrough", "bits": NUMBER, "limit": NUMBER}),
        "feature": Allowed({"policy": r"force|require|optional|disable|forbid", "name": WORD}, most=200),
    },
)

_DISK = Allowed(
    {"type": r"file", "device": r"disk|cdrom|floppy"},
    {
        "driver": Allowed(
            {
                "name": r"qemu",
                "type": WORD,
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
        "source": Allowed({"file": _ANY}),
        "target": Allowed({"dev": WORD, "bus": r"virtio|sata|ide|scsi|fdc|usb", "rotation_rate": NUMBER}),
        "readonly": Allowed(),
        "shareable": Allowed(),
        "boot": _BOOT,
        "serial": _text(r"[A-Za-z0-9_.+-]{1,36}"),
        "wwn": _text(r"[0-9a-fA-F]{16}"),
        "vendor": _text(r"[A-Za-z0-9 ._-]{1,8}"),
        "product": _text(r"[A-Za-z0-9 ._-]{1,16}"),
        "blockio": Allowed({"logical_block_size": NUMBER, "physical_block_size": NUMBER}),
        **_PLACE,
    },
    most=64,
)

_INTERFACE = Allowed(
    {"type": r"network|bridge|user"},
    {
        "mac": Allowed({"address": r"[0-9A-Fa-f:-]{11,17}"}),
        "source": Allowed({"network": r"[^/]{1,100}", "bridge": WORD}),
        "model": Allowed({"type": r"virtio|e1000e?|rtl8139"}),
        "link": Allowed({"state": r"up|down"}),
        "boot": _BOOT,
        **_PLACE,
    },
    most=16,
)

_CONTROLLER = Allowed(
    {
        "type": r"usb|scsi|sata|ide|fdc|virtio-serial|pci|ccid|isa",
        "index": NUMBER,
        "model": WORD,
        "ports": _COUNT,
        "vectors": _COUNT,
    },
    {
        "master": Allowed({"startport": NUMBER}),
        "model": Allowed({"name": WORD}),
        "target": Allowed(dict.fromkeys(("chassisNr", "chassis", "port", "busNr", "index"), _HEX) | {"hotplug": ON}),
        "driver": Allowed({"max_sectors": NUMBER} | dict.fromkeys(("queues", "iothread", "cmd_per_lun"), _COUNT)),
        **_PLACE,
    },
    most=64,
)

_PORT = {"type": WORD, "port": NUMBER, "name": WORD}
_SERIAL = Allowed({"type": r"pty"}, {"target": Allowed(_PORT, {"model": Allowed({"name": WORD})}), **_PLACE})

_GRAPHICS = Allowed(
    {"type": r"vnc", "port": r"-1", "autoport": r"yes", "listen": r"127\.0\.0\.1|localhost"},
    {"listen": Allowed({"type": r"address", "address": r"127\.0\.0\.1|localhost"})},
)

_VIDEO = Allowed(
    {},
    {
        "model": Allowed(
            {"type": r"vga|cirrus|qxl|virtio|bochs|ramfb|none", "primary": YES}
            | dict.fromkeys(("ram", "vram", "vram64", "vgamem"), KIB)
            | {"heads": r"[1-9]|1[0-6]"},
            {"resolution": Allowed({"x": NUMBER, "y": NUMBER})},
        ),
        **_PLACE,
    },
    most=4,
)

_RNG = Allowed(
    {"model": r"virtio(?:-(?:non-)?transitional)?"},
    {
        "rate": Allowed({"bytes": NUMBER, "period": NUMBER}),
        "backend": Allowed({"model": r"random|builtin"}, text=r"|/dev/u?random"),
        **_PLACE,
    },
    most=2,
)

_CHANNEL = Allowed({"type": r"unix"}, {"target": Allowed({"type": r"virtio", "name": WORD}), **_PLACE}, most=8)

_DEVICES = Allowed(
    {},
    {
        "disk": _DISK,
        "interface": _INTERFACE,
        "controller": _CONTROLLER,
        "input": Allowed({"type": r"mouse|keyboard|tablet", "bus": r"usb|ps2|virtio", "model": WORD}, _PLACE, most=8),
        "serial": _SERIAL,
        "console": _SERIAL,
        "channel": _CHANNEL,
        "graphics": _GRAPHICS,
        "video": _VIDEO,
        "audio": Allowed({"id": NUMBER, "type": r"none"}),
        "rng": _RNG,
        "watchdog": Allowed(
            {"model": r"i6300esb|ib700|itco", "action": r"reset|shutdown|poweroff|none|inject-nmi"}, _PLACE, most=2
        ),
        "memballoon": Allowed(
            {"model": r"virtio(?:-(?:non-)?transitional)?|none", "autodeflate": ON, "freePageReporting": ON},
            {"stats": Allowed({"period": NUMBER}), **_PLACE},
        ),
        "tpm": Allowed(
            {"model": r"tpm-tis|tpm-crb"}, {"backend": Allowed({"type": r"emulator", "version": r"2\.0"}), **_PLACE}
        ),
        "panic": Allowed({"model": r"isa|pvpanic|hyperv|pseries"}, _PLACE, most=2),
    },
)

DOMAIN = Allowed(
    {"type": r"kvm|qemu|test|xen"},
    {
        "name": _text(_ANY),
        "uuid": _text(_ANY),
        "title": _text(_ANY),
        "description": _text(_ANY),
        "memory": _text(AMOUNT, unit=UNIT),
        "currentMemory": _text(AMOUNT, unit=UNIT),
        "vcpu": _text(r"[1-9][0-9]{0,3}", placement=r"static"),
        "iothreads": _text(r"[0-9]|1[0-6]"),
        "os": _OS,
        "features": _FEATURES,
        "cpu": _CPU,
        "clock": Allowed({"offset": r"utc|localtime"}, {"timer": _TIMER}),
        "on_poweroff": _text(r"destroy"),
        "on_reboot": _text(r"destroy|restart"),
        "on_crash": _text(r"destroy|restart"),
        "pm": Allowed({}, {name: Allowed({"enabled": YES}) for name in ("suspend-to-mem", "suspend-to-disk")}),
        "devices": _DEVICES,
    },
)

OURS = ("name", "uuid", "title", "description", "memory", "vcpu")
"""Elements of the domain that are read, if at all, and written anew by this package; so is its type."""

OUR_DEVICES = ("disk", "interface", "serial", "console", "graphics", "audio", "tpm")
"""Devices that this package makes itself: of a job's own disks and interfaces the guest's side is taken over."""

WHOLE = ("features", "cpu", "clock", "pm", "on_poweroff", "on_reboot", "on_crash", "iothreads", "currentMemory")
"""Elements of the domain that are the job's where it has them; of ours stays what `KEPT` says."""

KEPT = ("topology", "smm")
"""Parts of our CPU and features that the ad asks for: the topology of VMPARAM_vm_Topology, what secure boot needs."""

NEVER = {
    "hostdev": "devices of the host belong to no job",
    "filesystem": "directories of the host belong to no job",
    "shmem": "memory of the host belongs to no job",
    "emulator": "which program runs the VM is the machine's to say",
    "commandline": "options of the hypervisor's own command line are not for jobs",
    "override": "options of the hypervisor's own command line are not for jobs",
    "seclabel": "the machine decides as which user the VM runs",
    "loader": "firmware is chosen by <os firmware='efi'>, without a path",
    "nvram": "firmware is chosen by <os firmware='efi'>, without a path",
    "backingStore": "the backing file of an image is found in the image",
    "encryption": "secrets of this machine's libvirt are not for jobs",
    "auth": "secrets of this machine's libvirt are not for jobs",
    "filterref": "the machine's networks are the administrator's",
    "virtualport": "the machine's networks are the administrator's",
    "script": "scripts run on the host",
    "metadata": "it is for programs that keep VMs",
    "resource": "the machine's partitions are the administrator's",
    "numatune": "the machine's memory nodes are the administrator's",
    "cputune": "the machine's CPUs are the administrator's",
    "memoryBacking": "how memory is backed is the administrator's to say",
}
"""Why some things that are not in the list are not; for the rest there is a general word."""

__all__ = ["AMOUNT", "DOMAIN", "KEPT", "NEVER", "NUMBER", "OURS", "OUR_DEVICES", "UNIT", "WHOLE", "WORD", "Allowed"]
