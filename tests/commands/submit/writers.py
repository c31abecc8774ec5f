"""Machines by chance, and writers of them in the dialects that people have: libvirt's XML, .vmx, VMware's OVF.

Each device stands on a line of its own, so that a report that gives the line has named the device.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from hypothesis import strategies as st

from tests.commands.submit.oracle import Card, Drive, Seen

CLASSES = {"disk": "hd", "cdrom": "cdrom", "floppy": "fd"}
"""libvirt's words for what boots."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Unit(NamedTuple):
    """A drive in its place: `number` on the bus, `boot` its turn, 0 where nobody gives it one."""

    drive: Drive
    number: int
    boot: int = 0


class Machine(NamedTuple):
    """What a writer is given."""

    seen: Seen
    """Its drives are those of `units`, and come in no order."""
    units: tuple[Unit, ...]
    classes: tuple[str, ...] = ()
    """The kinds of drives in the order in which they boot, where somebody gives one."""


class Written(NamedTuple):
    """A file of a machine."""

    text: str
    suffix: str
    kind: str
    """The word of the command line."""
    places: dict[str, str]
    """Image, ``nic0`` and so on, or name of a field of `Seen`: a regular expression for its place in the file."""
    options: tuple[str, ...] = ()
    """More words of the command line."""


class Dialect(NamedTuple):
    """What can be said in a format, beside what all can."""

    buses: tuple[str, ...]
    cd_buses: tuple[str, ...]
    forms: tuple[str, ...]
    """The formats of its hard disks, in QEMU's words; a floppy's and CD's is raw."""
    models: tuple[str, ...]
    networks: tuple[str, ...]
    firmwares: tuple[str, ...]
    archs: tuple[str, ...] = ("x86_64",)
    orders: tuple[str, ...] = ("none", "classes")
    """How it says what boots: not at all, by kinds of drives, or drive by drive (``explicit``)."""
    displays: bool = False
    read_only: bool = False
    """Whether a disk can be."""
    down: bool = True


LIBVIRT = Dialect(
    ("virtio", "sata", "ide", "scsi"),
    ("sata", "ide", "scsi"),
    ("qcow2", "raw"),
    ("virtio", "virtio-transitional", "e1000", "e1000e", "rtl8139", "pcnet"),
    ("nat", "bridge", "user"),
    ("bios", "uefi", "uefi-secure"),
    ("x86_64", "aarch64"),
    orders=("none", "classes", "explicit"),
    displays=True,
    read_only=True,
)
VMX = Dialect(
    ("scsi", "sata", "nvme", "ide"),
    ("sata", "ide"),
    ("vmdk",),
    ("e1000", "e1000e", "vmxnet3"),
    ("nat", "bridge"),
    ("bios", "uefi", "uefi-secure"),
)
OVF_VMWARE = Dialect(
    ("scsi", "sata", "ide"),
    ("sata", "ide"),
    ("vmdk",),
    ("e1000", "e1000e"),
    ("nat",),
    ("bios", "uefi"),
    orders=("none",),
    down=False,
)

_ROOM = {"ide": 3, "floppy": 1}
"""The highest number on a bus, else 20; a SCSI controller has 16 of them, of which one is its own."""


@st.composite
def machines(draw: st.DrawFn, dialect: Dialect) -> Machine:
    """A machine that the dialect has words for."""
    units: list[Unit] = []
    taken: set[tuple[str, int]] = set()

    def add(kind: str, buses: tuple[str, ...], form: str) -> None:
        bus = draw(st.sampled_from(buses))
        free = [number for number in range(_ROOM.get(bus, 20) + 1) if (bus, number) not in taken]
        free = [number for number in free if not (bus == "scsi" and number % 16 == 7)]
        if free:
            number = draw(st.sampled_from(free))
            taken.add((bus, number))
            file = f"{kind}{len(units)}.{'iso' if kind == 'cdrom' else 'img' if form == 'raw' else form}"
            read_only = kind == "cdrom"
            if kind == "disk" and dialect.read_only and bus in ("virtio", "scsi"):  # libvirt refuses it elsewhere
                read_only = draw(st.integers(0, 5)) == 0
            units.append(Unit(Drive(file, kind, bus, form, read_only), number))

    one_bus = (draw(st.sampled_from(dialect.buses)),)
    for _ in range(draw(st.integers(1, 3))):
        add("disk", one_bus, draw(st.sampled_from(dialect.forms)))
    for _ in range(draw(st.integers(0, 2))):
        add("cdrom", dialect.cd_buses, "raw")
    arch = draw(st.sampled_from(dialect.archs))
    firmware = draw(st.sampled_from(dialect.firmwares)) if arch == "x86_64" else "uefi"
    if arch == "x86_64" and draw(st.booleans()):
        add("floppy", ("floppy",), "raw")
    classes: tuple[str, ...] = ()
    how = draw(st.sampled_from(dialect.orders))
    if how == "classes":
        kinds = sorted({unit.drive.kind for unit in units})
        classes = tuple(draw(st.permutations(kinds)))[: draw(st.integers(1, len(kinds)))]
    elif how == "explicit":
        chosen = draw(st.permutations(range(len(units))))[: draw(st.integers(1, len(units)))]
        units = [unit._replace(boot=chosen.index(at) + 1 if at in chosen else 0) for at, unit in enumerate(units)]
    units = draw(st.permutations(units))
    cards = tuple(
        Card(
            draw(st.sampled_from(dialect.networks)),
            draw(st.sampled_from(dialect.models)),
            f"5a:54:00:{draw(st.integers(0, 255)):02x}:{draw(st.integers(0, 255)):02x}:{number:02x}",
            not dialect.down or draw(st.booleans()),
        )
        for number in range(draw(st.integers(0, 2)))
    )
    shape = draw(st.sampled_from(((1, 1, 1), (1, 2, 1), (2, 2, 1))))
    return Machine(
        Seen(
            draw(st.sampled_from((16, 256, 1024, 1536, 2048))),
            shape[0] * shape[1] * shape[2],
            shape if shape != (1, 1, 1) and draw(st.booleans()) else (),
            arch,
            firmware,
            tuple(unit.drive for unit in units),
            cards,
            dialect.displays and arch == "x86_64" and draw(st.booleans()),
            dialect.displays and draw(st.booleans()),
        ),
        tuple(units),
        classes,
    )


def _line(text: str, mark: str) -> str:
    """The line on which a mark stands, as an expression for a report's place."""
    number = text[: text.index(mark)].count("\n") + 1
    return rf"\bline {number}\b"


# ---- libvirt

_PREFIXES = {"virtio": "vd", "sata": "sd", "scsi": "sd", "ide": "hd", "floppy": "fd"}
_SOURCES = {"nat": "<source network='default'/>", "bridge": "<source bridge='br0'/>", "user": ""}
_TYPES = {"nat": "network", "bridge": "bridge", "user": "user"}


def libvirt(machine: Machine) -> Written:
    """The XML that ``virsh dumpxml`` would print of it, in essence."""
    seen = machine.seen
    boots = "".join(f"<boot dev='{CLASSES[kind]}'/>" for kind in machine.classes)
    loader = ""
    if seen.firmware != "bios":
        secure = "yes" if seen.firmware == "uefi-secure" else "no"
        loader = f"<firmware><feature enabled='{secure}' name='secure-boot'/></firmware>"
    lines = [
        "<domain type='kvm'>",
        "<name>machine</name>",
        f"<memory unit='GiB'>{seen.memory_mib >> 10}</memory>"
        if seen.memory_mib % 1024 == 0
        else f"<memory>{(seen.memory_mib << 10) - 1}</memory>",  # a part of a MiB is one
        f"<vcpu placement='static'>{seen.vcpus}</vcpu>",
        f"<os{' firmware=' + repr('efi') if loader else ''}><type arch='{seen.arch}'>hvm</type>{loader}{boots}</os>",
    ]
    if seen.topology:
        numbers = "sockets='{}' dies='1' cores='{}' threads='{}'".format(*seen.topology)
        lines.append(f"<cpu mode='host-passthrough'><topology {numbers}/></cpu>")
    lines.append("<devices>")
    names = _device_names(machine)
    for unit in machine.units:
        drive = unit.drive
        bus = "fdc" if drive.bus == "floppy" else drive.bus
        parts = f"<driver name='qemu' type='{drive.form}'/><source file='{drive.file}'/>"
        parts += f"<target dev='{names[drive.file]}' bus='{bus}'/>" + "<readonly/>" * drive.read_only
        parts += f"<boot order='{unit.boot}'/>" * bool(unit.boot)
        lines.append(f"<disk type='file' device='{drive.kind}'>{parts}</disk>")
    for card in seen.cards:
        parts = f"<mac address='{card.mac}'/>{_SOURCES[card.network]}"
        parts += f"<model type='{card.model}'/>" + "<link state='down'/>" * (not card.up)
        lines.append(f"<interface type='{_TYPES[card.network]}'>{parts}</interface>")
    if seen.tpm:
        lines.append("<tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm>")
    if seen.display:
        lines.append("<graphics type='vnc' port='-1' autoport='yes'/>")
    text = "\n".join([*lines, "</devices>", "</domain>", ""])
    places = {unit.drive.file: _line(text, f"'{unit.drive.file}'") for unit in machine.units}
    places |= {f"nic{number}": _line(text, card.mac) for number, card in enumerate(seen.cards)}
    marks = {"memory_mib": "<memory", "vcpus": "<vcpu", "firmware": "<os", "arch": "<os", "topology": "<topology"}
    marks |= {"tpm": "<tpm", "display": "<graphics", "boot": "<boot dev"}
    places |= {name: _line(text, mark) for name, mark in marks.items() if mark in text}
    return Written(text, "xml", "libvirt-xml", places)


def _device_names(machine: Machine) -> dict[str, str]:
    """The name of each drive's device, in the order of their numbers on each bus."""
    found: dict[str, str] = {}
    counts: dict[str, int] = {}
    for unit in sorted(machine.units, key=lambda unit: (unit.drive.bus, unit.number)):
        prefix = _PREFIXES[unit.drive.bus]
        found[unit.drive.file] = prefix + LETTERS[counts.setdefault(prefix, 0)]
        counts[prefix] += 1
    return found


# ---- VMware's .vmx

_VMX_KINDS = {"nat": "nat", "bridge": "bridged"}
_VMX_TYPES = {"disk": "disk", "cdrom": "cdrom-image"}
_VMX_BOOTS = {"disk": "hdd", "cdrom": "cdrom", "floppy": "floppy"}


def vmx(machine: Machine) -> Written:
    """A .vmx of VMware Workstation's; its entries come in the order of the machine's drives."""
    seen = machine.seen
    lines = ['.encoding = "UTF-8"', 'config.version = "8"', 'virtualHW.version = "19"', 'displayName = "machine"']
    lines += [f'memsize = "{seen.memory_mib}"', f'numvcpus = "{seen.vcpus}"', 'guestOS = "debian11-64"']
    if seen.topology:
        lines.append(f'cpuid.coresPerSocket = "{seen.topology[1] * seen.topology[2]}"')
    if seen.firmware != "bios":
        lines.append('firmware = "efi"')
    if seen.firmware == "uefi-secure":
        lines.append('uefi.secureBoot.enabled = "TRUE"')
    if machine.classes:
        lines.append(f'bios.bootOrder = "{",".join(_VMX_BOOTS[kind] for kind in machine.classes)}"')
    for bus in dict.fromkeys(unit.drive.bus for unit in machine.units if unit.drive.bus != "floppy"):
        lines += [f'{bus}{number}.present = "TRUE"' for number in (0, 1)]
    places: dict[str, str] = {}
    for unit in machine.units:
        drive = unit.drive
        if drive.bus == "floppy":
            name = f"floppy{unit.number}"
        elif drive.bus == "ide":
            name = f"ide{unit.number // 2}:{unit.number % 2}"
        else:
            name = "{}{}:{}".format(drive.bus, *divmod(unit.number, 16))
        places[drive.file] = rf"(?i)\b{name}(?!\d)"
        lines += [f'{name}.present = "TRUE"', f'{name}.fileName = "{drive.file}"']
        if drive.bus == "floppy":
            lines.append(f'{name}.fileType = "file"')
        else:
            lines.append(f'{name}.deviceType = "{_VMX_TYPES[drive.kind]}"')
    for number, card in enumerate(seen.cards):
        name = f"ethernet{number}"
        places[f"nic{number}"] = rf"(?i)\b{name}\b"
        lines += [f'{name}.present = "TRUE"', f'{name}.connectionType = "{_VMX_KINDS[card.network]}"']
        lines += [f'{name}.virtualDev = "{card.model}"', f'{name}.addressType = "static"']
        lines += [f'{name}.address = "{card.mac}"', f'{name}.startConnected = "{str(card.up).upper()}"']
    places |= {"memory_mib": "(?i)memsize", "vcpus": "(?i)numvcpus", "firmware": "(?i)firmware|uefi"}
    places |= {"topology": "(?i)cpuid.corespersocket", "boot": "(?i)bios.bootorder"}
    return Written("\n".join([*lines, ""]), "vmx", "vmx", places)


# ---- OVF

_ENVELOPE = """\
<?xml version="1.0" encoding="UTF-8"?>
<Envelope xmlns="http://schemas.dmtf.org/ovf/envelope/1" xmlns:ovf="http://schemas.dmtf.org/ovf/envelope/1"
 xmlns:rasd="http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_ResourceAllocationSettingData"
 xmlns:vssd="http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_VirtualSystemSettingData"
 xmlns:vmw="http://www.vmware.com/schema/ovf" xmlns:vbox="http://www.virtualbox.org/ovf/machine">
<References>{files}</References>
<DiskSection><Info>Disks</Info>{disks}</DiskSection>
<NetworkSection><Info>Networks</Info><Network ovf:name="NAT"/></NetworkSection>
<VirtualSystem ovf:id="machine"><Info>A machine</Info><Name>machine</Name>
<VirtualHardwareSection><Info>Hardware</Info>
<System><vssd:ElementName>Hardware</vssd:ElementName><vssd:InstanceID>0</vssd:InstanceID>\
<vssd:VirtualSystemType>vmx-19</vssd:VirtualSystemType></System>
{items}
</VirtualHardwareSection>
</VirtualSystem>
</Envelope>
"""
_CONTROLLERS = {"ide": ("5", ""), "scsi": ("6", "lsilogic"), "sata": ("20", "vmware.sata.ahci")}
_TYPES_OF = {"disk": "17", "cdrom": "15", "floppy": "14"}


def _item(**values: object) -> str:
    parts = (f"<rasd:{name}>{value}</rasd:{name}>" for name, value in sorted(values.items()) if value)
    return f"<Item>{''.join(parts)}</Item>"


def ovf_vmware(machine: Machine) -> Written:
    """As vSphere and ovftool export it."""
    seen = machine.seen
    cpu = firmware = ""
    if seen.topology:
        cpu = f'<vmw:CoresPerSocket ovf:required="false">{seen.topology[1]}</vmw:CoresPerSocket>'
    if seen.firmware != "bios":
        firmware = '<vmw:Config ovf:required="false" vmw:key="firmware" vmw:value="efi"/>'
    items = [
        _item(InstanceID=1, ResourceType=3, VirtualQuantity=seen.vcpus).replace("</Item>", f"{cpu}</Item>"),
        _item(InstanceID=2, ResourceType=4, VirtualQuantity=seen.memory_mib, AllocationUnits="byte * 2^20"),
    ]
    files, disks = [], []
    buses = sorted({_channel(unit)[0] for unit in machine.units if unit.drive.bus != "floppy"})
    controllers = {bus: number for number, bus in enumerate(buses, start=3)}
    for bus, number in controllers.items():
        kind, subtype = _CONTROLLERS[bus.rstrip("01")]
        values = {"InstanceID": number, "ResourceType": kind, "ResourceSubType": subtype}
        items.append(_item(Address=bus[-1], **values))
    for unit in machine.units:
        drive, (bus, address) = unit.drive, _channel(unit)
        stem = drive.file.partition(".")[0]
        files.append(f'<File ovf:id="file-{stem}" ovf:href="{drive.file}"/>')
        resource = f"ovf:/file/file-{stem}"
        if drive.kind == "disk":
            disks.append(
                f'<Disk ovf:diskId="{stem}" ovf:fileRef="file-{stem}" ovf:capacity="1048576" '
                'ovf:format="http://www.vmware.com/interfaces/specifications/vmdk.html#sparse"/>'
            )
            resource = f"ovf:/disk/{stem}"
        values = {"InstanceID": 100 + len(files), "ElementName": stem, "ResourceType": _TYPES_OF[drive.kind]}
        made = _item(HostResource=resource, Parent=controllers.get(bus, 0), **values)
        items.append(made.replace("<Item>", f"<Item><rasd:AddressOnParent>{address}</rasd:AddressOnParent>"))
    for number, card in enumerate(seen.cards):
        values = {"Connection": "NAT", "ResourceSubType": card.model.capitalize(), "Address": card.mac}
        items.append(_item(InstanceID=200 + number, ResourceType=10, AutomaticAllocation="true", **values))
    text = _ENVELOPE.format(files="".join(files), disks="".join(disks), items="\n".join([*items, firmware]))
    places = {one.drive.file: _line(text, f"ElementName>{one.drive.file.partition('.')[0]}<") for one in machine.units}
    places |= {f"nic{number}": _line(text, card.mac) for number, card in enumerate(seen.cards)}
    places |= {"memory_mib": _line(text, "ResourceType>4<"), "vcpus": _line(text, "ResourceType>3<")}
    places["topology"] = places["vcpus"]
    return Written(text, "ovf", "ovf", places)


def _channel(unit: Unit) -> tuple[str, int]:
    """The controller and the place behind it: an IDE one has two."""
    number, place = divmod(unit.number, 2 if unit.drive.bus == "ide" else 16)
    return f"{unit.drive.bus}{number}", place


WRITERS = {
    "libvirt": (LIBVIRT, libvirt), "as-is": (LIBVIRT, lambda machine: libvirt(machine)._replace(options=("--as-is",))),
    "vmx": (VMX, vmx), "vmware": (OVF_VMWARE, ovf_vmware),
}  # fmt: skip


def named(places: dict[str, str], what: str, place: str) -> bool:
    """Whether a report's place is that of a part of the machine."""
    return what in places and re.search(places[what], place) is not None
