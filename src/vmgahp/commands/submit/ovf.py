"""OVF descriptors as a job: exports of VirtualBox, VMware and oVirt.

DMTF's DSP0243 says what elements mean, CIM's resource types (DSP1041) what the numbers of items do. Names are looked
up without their namespaces: two versions of the standard, oVirt's variant and items of three kinds have the same ones.
"""

import argparse
import os

from lxml import etree

from vmgahp.commands.submit.machine import Guest, GuestDisk, GuestNic, simple_name
from vmgahp.commands.submit.package import Package
from vmgahp.commands.submit.summary import SubmitError, Summary
from vmgahp.commands.submit.xml_input import Account, child, children, get, local, read, text

CPU, MEMORY, IDE, SCSI, NIC, FLOPPY, CD, DVD, DISK, STORAGE = 3, 4, 5, 6, 10, 14, 15, 16, 17, 20
_CONTROLLERS = {IDE: "ide", SCSI: "sata", STORAGE: "sata"}
"""Bus of the disks behind a controller; SCSI has none here, and a guest that knows its controllers knows SATA."""

_MODELS = {
    "e1000": "e1000",
    "e1000e": "e1000e",
    "virtio": "virtio",
    "rtl8139": "rtl8139",
    "3": "virtio",
    "2": "e1000",
    "1": "rtl8139",
}
"""NIC models by ResourceSubType; the numbers are oVirt's."""

_FORMATS = (("vmdk", "vmdk"), ("qcow2", "qcow2"), ("vdi", "vdi"), ("vhd", "vpc"), ("vpc", "vpc"))

_OVIRT_FIRMWARE = {"3": "uefi", "4": "uefi-secure"}
_SETTLED_ITEMS = {24: "the console's", 23: "no USB device is in the VM"}
_WITH_REMARKS = (
    *("File", "Disk", "VirtualSystem", "Content", "VirtualHardwareSection", "Section"),
    *("Item", "StorageItem", "EthernetPortItem"),
)
"""Elements whose other attributes say nothing of the VM."""
_REMARKS = "Caption", "Description", "ElementName", "InstanceID", "InstanceId", "AutomaticAllocation"
_SETTLED_TAGS = {
    "Reservation": "its own tuning",
    "Limit": "its own tuning",
    "Weight": "its own tuning",
    "OperatingSystemSection": "a remark about the guest",
    "NetworkSection": "its own networks",
    "AnnotationSection": "a remark",
    "System": "the family of hardware that it was made for",
    "Strings": "translations",
    "CreationDate": "of its export",
    "ExportDate": "of its export",
    "Description": "a remark",
    "Origin": "of its export",
}


_KINDS = "Item", "StorageItem", "EthernetPortItem"
_UNITS = {"byte": 1, "bytes": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}
_UNITS |= {"kilobytes": 1 << 10, "megabytes": 1 << 20, "gigabytes": 1 << 30, "kilobyte": 1 << 10}
_UNITS |= {"megabyte": 1 << 20, "gigabyte": 1 << 30}

_PLAIN = "ResourceType", "InstanceID", "InstanceId", "Caption", "Description", "ElementName", "Type", "Device"
"""What every item has, and nothing is lost with."""


class Item:
    """One item, with what it says by local names."""

    def __init__(self, element: etree._Element, account: Account) -> None:
        self._element = element
        self._account = account
        self._values: dict[str, str] = {}
        for part in element:
            self._values.setdefault(local(part.tag).lower(), text(part))
        self.place = account.place(element)
        self.type = self.number("ResourceType")
        self.instance = self.first("InstanceID")
        self.device = self.first("Type").lower()
        account.take(element)
        self.use(*_PLAIN)

    @property
    def summary(self) -> str:
        """What it calls itself."""
        words = [self.first(name) for name in ("ElementName", "Caption", "ResourceSubType", "Description")]
        kind = next(filter(None, words), "an item")
        return f"{kind} (resource type {self.first('ResourceType')})"

    def first(self, name: str) -> str:
        """The first value of that name, empty for none."""
        return self._values.get(name.lower(), "")

    def number(self, name: str) -> int:
        """The same as a whole number that makes sense, 0 for none."""
        value = self.first(name).partition(".")[0]
        return int(value) if value.isascii() and value.isdigit() and len(value) < 16 else 0

    def use(self, *names: str) -> None:
        """Say that these have been dealt with."""
        wanted = [name.lower() for name in names]
        for part in self._element:
            if local(part.tag).lower() in wanted:
                self._account.take(part)

    def done(self) -> None:
        """Say that all of it has been dealt with."""
        self._account.take_all(self._element)


def machine(options: argparse.Namespace, summary: Summary) -> Guest:
    """Read a descriptor or an archive. Raises `SubmitError`."""
    package = Package(options.file, summary)
    root = read(package.descriptor(), package.descriptor_name)
    if local(root.tag) != "Envelope":
        raise SubmitError(f"{package.descriptor_name} describes {local(root.tag)[:40]!a}, no OVF Envelope.")
    for heading in [element for element in root.iter() if local(element.tag) == "Info"]:
        above = heading.getparent()
        if above is not None:
            above.remove(heading)  # the heading of what is told by itself
    account = Account(root)
    account.take(root, "version", "lang", "buildId", "schemaLocation")
    system = _system(root, account, options.system)
    hardware = _hardware(system, account)
    stem = os.path.splitext(package.descriptor_name)[0]
    name = text(child(system, "Name")) or get(system, "id")
    for tag in ("Name", "Info"):
        if (element := child(system, tag)) is not None:
            account.take_all(element)
    made = Guest(name=simple_name(options.name or name, simple_name(stem, "vm")))
    found = items(hardware, account, choose(root, account, options.configuration, summary))
    controllers = {item.instance: item for item in found if item.type in _CONTROLLERS}
    drives = _drives(root, account)
    for item in found:
        if item.type == CPU:
            _cpus(item, made)
        elif item.type == MEMORY:
            _memory(item, made)
        elif item.type == DISK or (item.type in (CD, DVD, FLOPPY) and item.first("HostResource")):
            disk = _disk(item, drives, controllers, package, options)
            if disk is None:
                summary.lose(item.place, f"{item.summary}: it names no file of the package")
            else:
                made.disks.append(disk)
        elif item.type == NIC:
            _nic(item, made, summary, options)
        elif item.type in _CONTROLLERS and item.first("Type") != "video":
            item.done()
            if item.type == SCSI and any(other.first("Parent") == item.instance for other in found):
                summary.lose(item.place, f"{item.summary}: its disks are on SATA")
        elif item.device in ("rng", "balloon", "memballoon", "video", "console") or item.type in _SETTLED_ITEMS:
            item.done()
            summary.settle(item.place, f"{item.summary} ({_SETTLED_ITEMS.get(item.type, 'every VM has its own')})")
        elif item.type in (CD, DVD, FLOPPY):
            item.done()
            summary.lose(item.place, f"{item.summary}: a drive without an image")
        else:
            item.done()
            summary.lose(item.place, item.summary)
    _firmware(system, hardware, account, made)
    account.tell(summary, _settled)
    return made


def _settled(path: str, element: etree._Element) -> str:
    tag = local(element.tag)
    kind = get(element, "type").rpartition(":")[2].removesuffix("_Type") if tag == "Section" else tag
    if path.endswith("/@required") or ("/@" in path and tag in _WITH_REMARKS):
        return "a remark of the exporter"
    if "Item/" in path and tag in _REMARKS and "/@" not in path:
        return "a remark of the exporter"
    if tag == "Config" and get(element, "required").lower() == "false":
        return "the exporter says that it is not required"
    return _SETTLED_TAGS.get(kind, "")


def _system(root: etree._Element, account: Account, wanted: str) -> etree._Element:
    """The one virtual system that is meant."""
    systems = [
        element
        for element in root.iter()
        if local(element.tag) in ("VirtualSystem", "Content")
        and (local(element.tag) != "Content" or "VirtualSystem" in get(element, "type"))
    ]
    chosen = [element for element in systems if not wanted or get(element, "id") == wanted]
    if len(chosen) != 1:
        names = ", ".join(get(element, "id")[:60] for element in systems[:20])
        raise SubmitError(
            f"The package describes {len(systems)} VMs{f', none or several with the id {wanted}' if wanted else ''}.",
            f"choose one with --system: {names or 'there is none'}.",
        )
    for element in systems:
        if element is not chosen[0]:
            account.take_all(element)
    return account.take(chosen[0], "id", "type")


def _hardware(system: etree._Element, account: Account) -> etree._Element:
    sections = [
        element
        for element in system
        if local(element.tag) == "VirtualHardwareSection" or "VirtualHardwareSection" in get(element, "type")
    ]
    if not sections:
        raise SubmitError("The virtual system has no VirtualHardwareSection.", "export it again.")
    return account.take(sections[0], "type")


def _drives(root: etree._Element, account: Account) -> dict[str, tuple[str, str, etree._Element]]:
    """The package's disks and files: diskId, or file id or oVirt's path -> href, format, element."""
    files: dict[str, tuple[str, str]] = {}
    found: dict[str, tuple[str, str, etree._Element]] = {}
    references = child(root, "References")
    for element in () if references is None else children(references, "File"):
        account.take(element, "id", "href", "size")
        assert references is not None
        account.take(references)
        if get(element, "chunkSize"):
            raise SubmitError(f"{account.place(element)}: the file is in pieces.", "join them, with cat.")
        if get(element, "compression") not in ("", "identity"):
            raise SubmitError(
                f"{account.place(element)}: the file is compressed ({get(element, 'compression')[:20]}).",
                "unpack it, and take the attribute away.",
            )
        files[get(element, "id")] = files[get(element, "href")] = get(element, "href"), ""
        found["file:" + get(element, "id")] = get(element, "href"), "", element
    for section in root.iter():
        if local(section.tag) == "DiskSection" or "DiskSection" in get(section, "type"):
            account.take(section, "type")
            for element in children(section, "Disk"):
                account.take(element, "diskId", "fileRef", "format", "capacity", "capacityAllocationUnits")
                account.take(element, "populatedSize", "size", "volume-format", "parentRef")
                reference = get(element, "fileRef")
                href = files.get(reference, ("", ""))[0]
                if get(element, "parentRef"):
                    raise SubmitError(
                        f"{account.place(element)}: the disk is an overlay of another.", "export it without snapshots."
                    )
                drive = href, _format(element), element
                found["disk:" + get(element, "diskId")] = drive
                if reference:
                    found[reference] = drive
    return found


def _format(disk: etree._Element) -> str:
    volume = get(disk, "volume-format").upper()
    if volume in ("COW", "RAW"):
        return {"COW": "qcow2", "RAW": "raw"}[volume]
    url = get(disk, "format").lower()
    return next((form for word, form in _FORMATS if word in url), "")


def _disk(
    item: Item,
    drives: dict[str, tuple[str, str, etree._Element]],
    controllers: dict[str, Item],
    package: Package,
    options: argparse.Namespace,
) -> GuestDisk | None:
    item.use("HostResource", "Parent", "AddressOnParent", "ResourceSubType", "Address")
    resource = item.first("HostResource").removeprefix("ovf:").lstrip("/")
    kind, _, identity = resource.partition("/")
    drive = drives.get(f"{kind}:{identity}") if kind in ("disk", "file") else None
    href, form, _element = drive or drives.get(resource) or ("", "", None)
    if not href:
        return None
    from vmgahp.images.formats import BY_ENDING

    if item.type in (CD, DVD):
        form = "iso"
    elif item.type == FLOPPY:
        form = "raw"
    form = form or BY_ENDING.get(os.path.splitext(href)[1].lower(), "")
    if not form:
        raise SubmitError(f"{item.place}: nobody says what format {href!a} has.", "rename it, to *.vmdk for example.")
    path = package.file(href, options.dir, force=options.force)
    disk = GuestDisk(path, form, place=item.place, hostile=True)
    controller = controllers.get(item.first("Parent"))
    disk.bus = _CONTROLLERS.get(controller.type, "") if controller else ""
    if item.type in (CD, DVD):
        disk.bus, disk.writable = disk.bus or "sata", False
    elif item.type == FLOPPY:
        disk.bus, disk.writable = "floppy", False
    return disk


def _cpus(item: Item, made: Guest) -> None:
    item.use("VirtualQuantity", "num_of_sockets", "cpu_per_socket", "threads_per_cpu", "CoresPerSocket")
    item.use("AllocationUnits", "num_cpu", "smp_arch", "max_num_of_vcpus")
    sockets = [item.number(name) for name in ("num_of_sockets", "cpu_per_socket", "threads_per_cpu")]
    if sockets[0]:
        parts = [number or 1 for number in sockets]
        made.vcpus = parts[0] * parts[1] * parts[2]
    else:
        made.vcpus = item.number("VirtualQuantity") or 1
        cores = item.number("CoresPerSocket") or made.vcpus
        if made.vcpus % cores:
            cores = made.vcpus
        parts = [made.vcpus // cores, cores, 1]
    if made.vcpus > 1 and (sockets[0] or item.first("CoresPerSocket")):
        made.options["Topology"] = "sockets={},cores={},threads={}".format(*parts)


def _memory(item: Item, made: Guest) -> None:
    item.use("VirtualQuantity", "AllocationUnits")
    unit = item.first("AllocationUnits")
    factor = amount(unit)
    if not factor:
        raise SubmitError(f"{item.place}: {unit[:40]!a} is no unit of memory.", "give --memory.")
    made.memory_mib = -(-item.number("VirtualQuantity") * factor // (1 << 20))


def _nic(item: Item, made: Guest, summary: Summary, options: argparse.Namespace) -> None:
    item.use("Connection", "ResourceSubType", "Address", "MACAddress", "AddressOnParent")
    item.use("AutomaticAllocation", "Name")
    subtype = item.first("ResourceSubType").lower()
    # Some list several, by blanks or commas; the guest is to know each.
    model = next((_MODELS[word] for word in subtype.replace(",", " ").split() if word in _MODELS), "")
    if subtype and not model:
        summary.lose(item.place, f"a NIC {subtype}: it is an e1000")
    model = model or "e1000"
    connection = item.first("Connection")
    kind = {"nat": "nat", "bridged": "bridge"}.get(connection.lower(), "")
    if not kind and connection and not options.network:
        summary.lose(item.place, f"the network {connection}: the execute machine's own")
    address = (item.first("MACAddress") or item.first("Address")).lower()
    made.nics.append(GuestNic(kind, address if address.count(":") == 5 else "", model))


def _firmware(system: etree._Element, hardware: etree._Element, account: Account, made: Guest) -> None:
    """Where the three exporters say that the VM boots by UEFI."""
    said: dict[str, str] = {}
    for config in children(hardware, "Config"):
        if get(config, "key") in ("firmware", "bootOptions.efiSecureBootEnabled"):
            account.take(config, "key", "value", "required")
            said[get(config, "key")] = get(config, "value").lower()
    firmware = "uefi" if said.get("firmware") == "efi" else ""
    if firmware and said.get("bootOptions.efiSecureBootEnabled") == "true":
        firmware = "uefi-secure"
    for element in system.iter():
        if local(element.tag) == "Firmware" and get(element, "type").upper().startswith("EFI"):
            firmware = "uefi"  # VirtualBox's own section, of which no more is read
        elif local(element.tag) == "BiosType":
            account.take(element)
            firmware = _OVIRT_FIRMWARE.get(text(element), firmware)
    if firmware:
        made.options["Firmware"] = firmware


def items(hardware: etree._Element, account: Account, configuration: str) -> list[Item]:
    """The items of a section that belong to one configuration (see `choose`), in the section's order."""
    found = []
    for element in hardware:
        if local(element.tag) in _KINDS:
            belongs = get(element, "configuration").split()
            if not belongs or configuration in belongs:
                account.take(element, "configuration")
                found.append(Item(element, account))
            else:
                account.take_all(element)
    return found


def choose(root: etree._Element, account: Account, wanted: str, summary: Summary) -> str:
    """The configuration that is to be run, of those that the package offers; empty for none.

    Raises `SubmitError` for one that is not there.
    """
    offered = [
        element
        for section in root.iter()
        if local(section.tag) == "DeploymentOptionSection" or "DeploymentOption" in get(section, "type")
        for element in children(section, "Configuration")
    ]
    default = next((element for element in offered if get(element, "default") in ("true", "1")), None)
    names = [get(element, "id") for element in offered]
    if wanted and wanted not in names:
        raise SubmitError(
            f"The package has no configuration {wanted!a}.", f"choose one of: {', '.join(names) or 'none'}."
        )
    if not offered:
        return ""
    chosen = wanted or get(offered[0] if default is None else default, "id")
    for element in offered:
        account.take_all(element)
    summary.carry(f"the package's configuration {chosen}, of {', '.join(names)} (--configuration)")
    return chosen


def amount(unit: str) -> int:
    """Bytes of a unit such as ``byte * 2^20`` or ``MegaBytes``; 0 for an invalid one."""
    words = unit.lower().replace(" ", "")
    base, star, power = words.partition("*")
    if not star:
        return _UNITS.get(base, 0)
    number, _, exponent = power.partition("^")
    if base not in ("byte", "bytes") or number not in ("2", "10"):
        return 0
    if not (exponent.isdecimal() and len(exponent) < 3 and int(exponent) <= 60):
        return 0
    return int(int(number) ** int(exponent))
