"""OVF descriptors as a job, with the extensions of VirtualBox, VMware and oVirt.

The settings of the software in a package go to a CD-ROM, as the standard defines it.

DMTF's DSP0243 defines the elements, CIM's resource types (DSP1041) the numbers of items. Names are looked up without
their namespaces, because two versions of the standard, oVirt's variant and items of three kinds use the same ones.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from lxml import etree

from vmgahp.commands.files import open_regular, write_anew
from vmgahp.commands.submit.images import free
from vmgahp.commands.submit.machine import (
    BOOT_CLASSES,
    Guest,
    GuestDisk,
    GuestNic,
    SubmitError,
    Summary,
    name_devices,
    simple_name,
)
from vmgahp.commands.submit.package import Package, Reference
from vmgahp.commands.submit.xml_input import Account, child, children, get, local, read, text
from vmgahp.images.formats import HEADER, looks_like, named_format
from vmgahp.job.options import DATA_FILES

_KINDS = "Item", "StorageItem", "EthernetPortItem"
_UNITS = {"byte": 1, "bytes": 1} | {
    unit: 1 << power
    for letter, word, power in (("k", "kilo", 10), ("m", "mega", 20), ("g", "giga", 30), ("t", "tera", 40))
    for unit in (f"{letter}b", f"{letter}ib", f"{word}byte", f"{word}bytes")
}
_LARGEST = 1 << 60

_FORMATS = (("vmdk", "vmdk"), ("qcow2", "qcow2"), ("vdi", "vdi"), ("vhdx", "vhdx"), ("vhd", "vpc"), ("vpc", "vpc"))

_PLAIN = "ResourceType", "InstanceID", "InstanceId", "Caption", "Description", "ElementName", "Type", "Device"
"""The elements that every item has."""


class Item:
    """One item, with its elements by local names."""

    def __init__(self, element: etree._Element, account: Account) -> None:
        self.element = element
        self._account = account
        self._values: dict[str, str] = {}
        for part in element:
            self._values.setdefault(local(part.tag).lower(), text(part))
        self.place = account.place(element)
        self.type = self.number("ResourceType")
        self.instance = self.first("InstanceID")
        self.device = self.first("Type").lower()
        self.subtype = self.first("ResourceSubType").lower()
        account.take(element)
        self.use(*_PLAIN)

    @property
    def summary(self) -> str:
        """The item's description of itself."""
        words = [self.first(name) for name in ("ElementName", "Caption", "ResourceSubType", "Description")]
        kind = next(filter(None, words), "an item")
        return f"{kind} (resource type {self.first('ResourceType')})"

    def first(self, name: str) -> str:
        """Return the first value of that name, empty for none."""
        return self._values.get(name.lower(), "")

    def number(self, name: str) -> int:
        """Return an element as a plausible whole number, 0 for none."""
        return digits(self.first(name).partition(".")[0])

    def use(self, *names: str) -> None:
        """Mark elements as handled."""
        for part in children(self.element, *names):
            self._account.take_all(part)

    def done(self) -> None:
        """Mark the whole item as handled."""
        self._account.take_all(self.element)


class PackageDrive(NamedTuple):
    """One disk of the package, or the medium of a drive."""

    file: Reference | None
    """The file; None for an empty disk."""
    format: str
    """The format according to the package; empty for none."""
    capacity: int
    """The capacity in bytes, 0 if unknown."""
    element: etree._Element


def drives(root: etree._Element, account: Account) -> dict[str, PackageDrive]:
    """Read the package's disks and files by the names that items use: diskId, file id, path. Raises `SubmitError`."""
    files: dict[str, Reference] = {}
    found: dict[str, PackageDrive] = {}
    properties = [element for element in root.iter() if local(element.tag) == "Property"]
    values = {f"${{{get(element, 'key')}}}": get(element, "value") for element in reversed(properties)}
    references = child(root, "References")
    for element in () if references is None else children(account.take(references), "File"):
        account.take(element, "id", "href", "size", "compression", "chunkSize", "description")
        compression, size = get(element, "compression").lower(), digits(get(element, "size"))
        file = Reference(get(element, "href"), compression, bool(get(element, "chunkSize")), size)
        files[get(element, "id")] = files[file.href] = file
        found["file:" + get(element, "id")] = PackageDrive(file, "", 0, element)
    for section in root.iter():
        if is_section(section, "DiskSection"):
            account.take(section, "type")
            for element in children(section, "Disk"):
                account.take_all(element)
                reference = get(element, "fileRef")
                unit = amount(get(element, "capacityAllocationUnits") or "byte")
                said = get(element, "capacity")
                capacity = digits(values.get(said, said)) * unit
                drive = PackageDrive(files.get(reference), _format(element), capacity, element)
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


def is_section(element: etree._Element, name: str) -> bool:
    """Return True for a section of that name, which is a type in older versions."""
    return local(element.tag) == name or (local(element.tag) == "Section" and name in get(element, "type"))


def items(hardware: etree._Element, account: Account, configuration: str) -> list[Item]:
    """List the items of a section that belong to one configuration (see `choose`), in the section's order."""
    found = []
    for element in children(hardware, *_KINDS):
        belongs = get(element, "configuration").split()
        # Items with limits for choices are not devices.
        if (belongs and configuration not in belongs) or get(element, "bound").lower() in ("min", "max"):
            account.take_all(element)
        else:
            account.take(element, "configuration", "bound")
            found.append(Item(element, account))
    return found


def choose(root: etree._Element, account: Account, wanted: str, summary: Summary) -> str:
    """Choose the configuration to run, of those that the package offers; empty for none.

    Raises `SubmitError` for a missing one.
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
    summary.carry("", "the package's configuration", f"{chosen}, of {', '.join(names)} (--configuration)")
    return chosen


def amount(unit: str) -> int:
    """Parse a unit such as ``byte * 2^20`` or ``MegaBytes`` to bytes; 0 for an invalid one."""
    base, *factors = unit.lower().replace(" ", "").split("*")
    product = _UNITS.get(base, 0)
    for factor in factors:
        number, power, exponent = factor.partition("^")
        # An exponent of nine digits in an untrusted file would take hours to compute.
        if base not in ("byte", "bytes") or len(exponent) > 2 or (power and not digits(exponent)):
            return 0
        product *= digits(number) ** (digits(exponent) if power else 1)
        if not 0 < product <= _LARGEST:
            return 0
    return product


def digits(value: str) -> int:
    """Parse a plausible whole number, 0 for any other text."""
    return int(value) if value.isascii() and value.isdigit() and len(value) < 17 else 0


ENVIRONMENT_FILE = "ovf-env.xml"
"""The name of the file that programs in the guest read in the root of a CD-ROM (DSP0243, 9.5 and 10.2)."""
_NAMESPACE = "http://schemas.dmtf.org/ovf/environment/1"


def environment(
    system: etree._Element,
    hardware: etree._Element,
    account: Account,
    made: Guest,
    summary: Summary,
    options: argparse.Namespace,
) -> None:
    """Write the settings into a file that goes with the job, if the package requires them on a CD-ROM.

    Raises `SubmitError`.
    """
    ways = get(hardware, "transport").split()
    account.take(hardware, "transport")
    sections = [each for each in system if is_section(each, "ProductSection") and child(each, "Property") is not None]
    values: dict[str, str] = {}
    for section in sections if ways else ():
        account.take_all(section)
        if "iso" in ways:
            values |= _values(section, options.configuration)
        else:
            what, why = f"settings that the guest gets by {' '.join(ways)}", "jobs have them on a CD-ROM only (iso)"
            summary.lose(account.place(section), what, why)
    for said in options.property:
        key, equals, value = said.partition("=")
        if not equals or key not in values:
            raise SubmitError(
                f"--property {said!a} is no KEY=VALUE with a setting of the package.",
                f"its settings are: {', '.join(sorted(values)) or 'none'}.",
            )
        values[key] = value
    if not values:
        return
    target = os.path.join(options.dir, ENVIRONMENT_FILE)
    free(target, summary, force=options.force)
    try:
        write_anew(target, _document(get(system, "id"), values))
    except (OSError, ValueError) as error:  # a control character, which XML does not allow
        raise SubmitError(f"{target} cannot be written ({error}).") from error
    summary.made.append(target)
    made.files.append(target)
    made.options[DATA_FILES] = ENVIRONMENT_FILE
    made.places[DATA_FILES] = account.place(sections[0])
    if unset := [key for key, value in values.items() if not value]:
        summary.advise(f"Settings of the package without a value: {', '.join(unset)}; --property {unset[0]}=VALUE.")


def _values(section: etree._Element, configuration: str) -> dict[str, str]:
    """Return the settings of one section by their full names, with their values in a configuration."""
    found = {}
    for each in children(section, "Property"):
        key = ".".join(filter(None, (get(section, "class"), get(each, "key"), get(section, "instance"))))
        value = get(each, "value")
        for other in children(each, "Value"):
            if configuration and get(other, "configuration") == configuration:
                value = get(other, "value")
        found[key] = value
    return found


def _document(name: str, values: dict[str, str]) -> bytes:
    def own(word: str) -> str:
        return f"{{{_NAMESPACE}}}{word}"

    spaces: Any = {None: _NAMESPACE, "oe": _NAMESPACE}  # the usual prefixes, for guests that search it with grep
    root = etree.Element(own("Environment"), {own("id"): name}, spaces)
    etree.SubElement(etree.SubElement(root, own("PlatformSection")), own("Kind")).text = "HTCondor"
    settings = etree.SubElement(root, own("PropertySection"))
    for key, value in values.items():
        etree.SubElement(settings, own("Property"), {own("key"): key, own("value"): value})
    return etree.tostring(root, xml_declaration=True, encoding="UTF-8")


CPU, MEMORY, IDE, SCSI, NIC, FLOPPY, CD, DVD, STORAGE = 3, 4, 5, 6, 10, 14, 15, 16, 20
_DISKS = 17, 19, 31
"""The types of a disk, an extent of storage (by XenServer) or a logical disk (by version 2 of the standard)."""
_CONTROLLERS = {IDE: "ide", SCSI: "sata", STORAGE: "sata"}
"""The bus of the disks behind a controller; SCSI becomes SATA, which guests with SCSI drivers support."""
_DRIVES = {FLOPPY: "raw", CD: "iso", DVD: "iso"}
"""Type of a drive -> format of its medium."""
_INTERFACES = {"virtio": "virtio", "ide": "ide", "sata": "sata", "virtio_scsi": "sata"}
"""The bus of the disks with an interface of oVirt's."""

_MODELS = {
    "e1000": "e1000",
    "e1000e": "e1000e",
    "virtio": "virtio",
    "virtio-net": "virtio",
    "rtl8139": "rtl8139",
    "3": "virtio",
    "2": "e1000",
    "1": "rtl8139",
}
"""NIC models by ResourceSubType; the numbers are oVirt's."""

_OVIRT_FIRMWARE = {"3": "uefi", "4": "uefi-secure"}
_OVIRT_BOOT = ("C", "DC", "N", "CDN", "CND", "DCN", "DNC", "NCD", "NDC", "CD", "D", "CN", "DN", "NC", "ND")
_BOOT_NAMES = {"harddisk": "hd", "disk": "hd", "c": "hd", "dvd": "cdrom", "cdrom": "cdrom", "d": "cdrom"}
_BOOT_NAMES |= {"floppy": "fd", "network": "network", "net": "network", "n": "network"}
"""The words of the three exporters for boot devices -> ours."""

_ADAPTER_MODELS = {"82540em": "e1000", "82543gc": "e1000", "82545em": "e1000", "82583v": "e1000e", "virtio": "virtio"}

_LARGEST_MIB = 1 << 24
"""The largest memory of a VM in MiB; a larger number without a unit is in bytes."""


def machine(options: argparse.Namespace, summary: Summary) -> Guest:
    """Read a descriptor or an archive. Raises `SubmitError`."""
    return of_package(Package(options.file, summary), options, summary)


def of_package(package: Package, options: argparse.Namespace, summary: Summary) -> Guest:
    """Read the descriptor of a package. Raises `SubmitError`."""
    descriptor, data = package.descriptor(".ovf")
    root = read(data, descriptor)
    if local(root.tag) != "Envelope":
        raise SubmitError(f"{descriptor} describes {local(root.tag)[:40]!a}, no OVF Envelope.")
    for heading in [element for element in root.iter() if local(element.tag) == "Info"]:
        above = heading.getparent()
        if above is not None:
            above.remove(heading)  # the heading of items that are reported separately
    account = Account(root)
    account.take(root, "version", "lang", "buildId", "schemaLocation")
    system = _system(root, account, options.system, summary)
    hardware = _hardware(system, account, summary)
    stem = os.path.splitext(descriptor)[0]
    name = text(child(system, "Name")) or get(system, "id")
    for tag in ("Name", "Info"):
        if (element := child(system, tag)) is not None:
            account.take_all(element)
    made = Guest(name=simple_name(options.name or name, simple_name(stem, "vm")), vcpus=0)
    options.configuration = choose(root, account, options.configuration, summary)
    found = items(hardware, account, options.configuration)
    storage = _Storage(package, drives(root, account), found, summary, options)
    for item in found:
        if item.type == CPU:
            _cpus(item, made)
        elif item.type == MEMORY:
            _memory(item, made, options)
        elif item.type == NIC:
            _nic(item, made, options)
            if item.number("BootOrder"):
                summary.skip(item.place, "boot from the network", "jobs boot from disks first")
        elif storage.is_one(item):
            storage.add(item)
        else:
            _other(item, made, summary)
    _Exporter(system, account, made, summary).read(hardware, storage.disks)
    environment(system, hardware, account, made, summary, options)
    for nic in made.nics:
        nic.model = nic.model or "e1000"
    storage.finish(made, account)
    if any(is_section(element, "EulaSection") for element in root.iter()):
        summary.advise("The package has a license agreement (EulaSection): read it.")
    account.tell(summary)
    return made


def _system(root: etree._Element, account: Account, wanted: str, summary: Summary) -> etree._Element:
    """Find the virtual system that is to be converted."""
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
            summary.skip(account.place(element), f"the VM {get(element, 'id')}", "another one was chosen (--system)")
    return account.take(chosen[0], "id", "type")


def _hardware(system: etree._Element, account: Account, summary: Summary) -> etree._Element:
    sections = [element for element in system if is_section(element, "VirtualHardwareSection")]
    if not sections:
        raise SubmitError("The virtual system has no VirtualHardwareSection.", "export it again.")
    for section in sections[1:]:
        account.take_all(section)
        summary.skip(account.place(section), "another choice of hardware", "the first one is taken")
    return account.take(sections[0], "type")


class _Storage:
    """The disks of the VM, its drives with an image in them, and their controllers."""

    def __init__(
        self,
        package: Package,
        named: dict[str, PackageDrive],
        found: list[Item],
        summary: Summary,
        options: argparse.Namespace,
    ) -> None:
        self._package, self._named, self._summary, self._options = package, named, summary, options
        self._controllers = {item.instance: item for item in found if item.type in _CONTROLLERS}
        self._used = {item.first("Parent") for item in found}
        self.disks: dict[str, GuestDisk] = {}
        """The disks by the instances of their items, in the order of the controllers' first disks."""
        self._order: list[tuple[str, int, GuestDisk]] = []
        """The controller and the place on it for each disk."""
        self._empty: list[tuple[GuestDisk, int]] = []
        self._paths: dict[str, str] = {}
        """The paths of the files that have been extracted from the package."""

    @staticmethod
    def is_one(item: Item) -> bool:
        """Return True for a disk, a drive or their controller; oVirt uses the same numbers for other devices too."""
        if item.type in _CONTROLLERS:
            return item.device in ("", "controller")
        return item.type in _DISKS or item.type in _DRIVES

    def add(self, item: Item) -> None:
        """Add a disk, a drive or a controller. Raises `SubmitError`."""
        if item.type in _CONTROLLERS:
            self._controller(item)
            return
        item.use("HostResource", "Parent", "AddressOnParent", "ResourceSubType", "Address", "AutomaticAllocation")
        item.use("VirtualQuantity", "VirtualQuantityUnits", "AllocationUnits", "StorageGroup")
        resource = item.first("HostResource").removeprefix("ovf:").lstrip("/")
        kind, _, identity = resource.partition("/")
        drive = self._named.get(f"{kind}:{identity}") if kind in ("disk", "file") else None
        drive = drive or self._named.get(resource)
        host = child(item.element, "HostResource")
        # The file that it names, vCloud's attribute, or the item itself.
        capacity = drive.capacity if drive else amount(f"byte*{get(host, 'capacity')}*2^20") if host is not None else 0
        capacity = capacity or item.number("VirtualQuantity") * amount(item.first("AllocationUnits") or "byte")
        if drive is not None and drive.file is not None:
            disk = self._with_file(item, drive)
        elif item.type in _DRIVES:
            item.done()
            if resource:
                self._summary.lose(item.place, item.summary, "it names no file of the package")
            else:
                self._summary.skip(item.place, item.summary, "it is empty")
            return
        elif capacity:
            disk = GuestDisk("", "qcow2", place=item.place, what=item.summary)
            self._empty.append((disk, capacity))
        else:
            item.done()
            self._summary.lose(item.place, item.summary, "it names no file of the package")
            return
        controller = self._controllers.get(item.first("Parent"))
        disk.bus = _CONTROLLERS.get(controller.type, "") if controller else ""
        if controller and (kind := _lacking(controller)):
            disk.changed.append(f"jobs have no {kind} controller, the disk is on SATA")
        if drive is not None:
            disk.bus = _INTERFACES.get(get(drive.element, "disk-interface").lower(), disk.bus)
            disk.boot = 1 if get(drive.element, "boot").lower() == "true" else 0
        item.use("BootOrder")
        disk.boot = item.number("BootOrder") or disk.boot
        if item.type in (CD, DVD):
            disk.bus, disk.writable = disk.bus or "sata", False
        elif item.type == FLOPPY:
            disk.bus = "floppy"
        self._order.append((item.first("Parent"), item.number("AddressOnParent"), disk))
        self.disks[item.instance] = disk

    def _controller(self, item: Item) -> None:
        item.done()
        if item.instance in self._used and (kind := _lacking(item)):
            self._summary.change(item.place, item.summary, "SATA", f"jobs have no {kind} controller")
        else:
            self._summary.skip(item.place, item.summary)

    def _kind(self, parent: str) -> int:
        controller = self._controllers.get(parent)
        return controller.type if controller else 0

    def _with_file(self, item: Item, drive: PackageDrive) -> GuestDisk:
        assert drive.file is not None
        href = drive.file.href
        if get(drive.element, "parentRef"):
            raise SubmitError(f"{item.place}: the disk is an overlay of another.", "export it without snapshots.")
        if href in self._paths and item.type not in _DRIVES:
            problem = f"{item.place}: {href!a} is the image of two disks."
            raise SubmitError(problem, "give each a file of its own in the package.")
        if href not in self._paths:
            self._paths[href] = self._package.file(drive.file, self._options.dir, force=self._options.force)
        path = self._paths[href]
        form = _DRIVES.get(item.type) or drive.format or named_format(path) or _content(path)
        if not form:
            raise SubmitError(
                f"{item.place}: nobody says what format {href!a} has.", "rename it, to *.vmdk for example."
            )
        return GuestDisk(path, form, place=item.place, what=f"{item.summary}, {href}", hostile=True)

    def finish(self, made: Guest, account: Account) -> None:
        """Add to the VM its disks: those with an image, and those that must be made."""
        parents = [parent for parent, _, _ in self._order]
        kinds = [self._kind(parent) for parent in parents]

        def rank(each: tuple[str, int, GuestDisk]) -> tuple[int, ...]:
            parent, place, _ = each
            if not parent:
                return (0,)
            controller = self._controllers.get(parent)  # the two channels of IDE are two controllers
            number = controller.number("Address") if controller else 0
            return kinds.index(self._kind(parent)), number, parents.index(parent), place

        self._order.sort(key=rank)
        made.disks = [disk for _, _, disk in self._order]
        if self._empty:
            name_devices(made.disks)
            sizes = {id(disk): -(-capacity // (1 << 20)) for disk, capacity in self._empty}
            made.disks = [disk for disk in made.disks if id(disk) not in sizes]
            entries = [f"{disk.device}:{sizes[id(disk)]}M" for disk, _ in self._empty]
            made.options["Data_Disk"] = ", ".join(entries)
            made.places["Data_Disk"] = self._empty[0][0].place
            for disk, _ in self._empty:
                self._summary.carry(disk.place, disk.what, f"{disk.device}, an empty disk of {sizes[id(disk)]} MiB")
            self._summary.advise("The empty disks are made where the job runs: say --append 'request_disk = …'.")
        for drive in self._named.values():
            if drive.file is not None and drive.file.href not in self._paths:
                self._paths[drive.file.href] = ""
                self._summary.skip(account.place(drive.element), f"file {drive.file.href}")


def _content(path: str) -> str:
    """Return the format that an image's first bytes suggest; alone that is no proof."""
    with suppress(OSError), open_regular(path) as file:
        return looks_like(file.read(HEADER))
    return ""


def _lacking(controller: Item) -> str:
    """Return the kind of a controller that jobs cannot have; empty for any other."""
    if _CONTROLLERS[controller.type] == "ide" or "ahci" in controller.subtype:
        return ""
    if "nvm" in controller.subtype:
        return "NVMe"
    return "SCSI" if controller.type == SCSI or "scsi" in controller.subtype else "such"


def _other(item: Item, made: Guest, summary: Summary) -> None:
    """Read a device of any other kind."""
    item.done()
    if item.subtype == "vmware.vtpm" or item.device == "tpm":
        made.options["TPM"], made.places["TPM"] = True, item.place
    else:
        summary.skip(item.place, item.summary)


def _cpus(item: Item, made: Guest) -> None:
    item.use("VirtualQuantity", "num_of_sockets", "cpu_per_socket", "threads_per_cpu", "CoresPerSocket")
    item.use("AllocationUnits", "num_cpu", "smp_arch", "max_num_of_vcpus")
    made.places["vcpus"] = item.place
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
        made.places["Topology"] = item.place


def _memory(item: Item, made: Guest, options: argparse.Namespace) -> None:
    item.use("VirtualQuantity", "AllocationUnits")
    made.places["memory"] = item.place
    unit, quantity = item.first("AllocationUnits"), item.number("VirtualQuantity")
    factor = amount(unit)
    if not unit and quantity:
        factor = 1 << 20 if quantity <= _LARGEST_MIB else 1
        taken = "MiB, as VirtualBox and VMware do" if factor > 1 else "bytes, for so many MiB no VM has"
        made.changed["memory"] = f"the number {quantity} has no unit, and is taken for {taken}"
    elif not factor and not options.memory:
        raise SubmitError(f"{item.place}: {unit[:40]!a} is no unit of memory.", "give --memory.")
    made.memory_mib = -(-quantity * factor // (1 << 20))


def _nic(item: Item, made: Guest, options: argparse.Namespace) -> None:
    item.use("Connection", "ResourceSubType", "Address", "MACAddress", "AddressOnParent")
    item.use("AutomaticAllocation", "Name", "Linked", "BootOrder")
    # Some list several, separated by blanks or commas; the guest must support each.
    model = next((_MODELS[word] for word in item.subtype.replace(",", " ").split() if word in _MODELS), "")
    changed = []
    if item.subtype and not model:
        changed.append(f"jobs have no {item.subtype}")
        model = "e1000"
    connection = item.first("Connection")
    kind = {"nat": "nat", "bridged": "bridge"}.get(connection.lower(), "")
    if not kind and connection and not options.network:
        changed.append(f"the network {connection} is the execute machine's own")
    address = (item.first("MACAddress") or item.first("Address")).lower()
    address = address if address.count(":") == 5 else ""
    link_up = "false" not in (item.first("AutomaticAllocation").lower(), item.first("Linked").lower())
    made.nics.append(GuestNic(kind, address, model, link_up, place=item.place, what=item.summary, changed=changed))


class _Exporter:
    """The extensions of one VM's exporter, added to the guest that its items made."""

    def __init__(self, system: etree._Element, account: Account, made: Guest, summary: Summary) -> None:
        self._system, self._account, self._made, self._summary = system, account, made, summary

    def read(self, hardware: etree._Element, drives: Mapping[str, GuestDisk]) -> None:
        """Read all extensions. `drives` has the disks by the instances of their items."""
        machine = next((element for element in self._system.iter() if local(element.tag) == "Machine"), None)
        if machine is not None:
            self._virtualbox(machine)
        self._vmware(hardware, drives)
        for element in self._system.iter():
            self._ovirt(element)
            kind = (get(element, "osType") + text(element)).lower()
            if local(element.tag) in ("OperatingSystemSection", "OSType") and (kind[:4] == "arm-" or "arm64" in kind):
                self._set("Arch", "aarch64", element)

    def _set(self, option: str, value: str | bool, element: etree._Element) -> None:
        self._made.options[option] = value
        self._made.places[option] = self._account.place(element)

    def _boot(self, element: etree._Element, words: Sequence[str], *, after: bool = False) -> list[str]:
        """Convert a boot order of device kinds to classes of disks; `after` is True if a disk comes before them."""
        names = [_BOOT_NAMES.get(word.lower(), "") for word in words]
        place = self._account.place(element)
        if names[:1] == ["network"] and not after:
            self._summary.lose(place, "boot from the network first", "jobs boot from disks")
        elif "network" in names:
            self._summary.skip(place, "boot from the network", "jobs boot from disks first")
        return [name for name in dict.fromkeys(names) if name in BOOT_CLASSES]

    def _vmware(self, hardware: etree._Element, drives: Mapping[str, GuestDisk]) -> None:
        """Read UEFI, with Secure Boot or without, and the boot order: a section for each drive."""
        configs = {get(element, "key"): element for element in children(hardware, "Config")}
        firmware, secure = configs.get("firmware"), configs.get("bootOptions.efiSecureBootEnabled")
        for element in filter(lambda each: each is not None, (firmware, secure)):
            assert element is not None
            self._account.take(element, "key", "value", "required")
        if firmware is not None and get(firmware, "value").lower() == "efi":
            is_secure = secure is not None and get(secure, "value").lower() == "true"
            self._set("Firmware", "uefi-secure" if is_secure else "uefi", firmware)
        for number, section in enumerate(children(self._system, "BootOrderSection"), start=1):
            self._account.take_all(section)
            drive = drives.get(get(section, "instanceId"))
            if drive is not None:
                drive.boot = drive.boot or number
            if drive is None:
                classes = self._boot(section, [get(section, "type")], after=number > 1)
                self._made.boot = [*self._made.boot, *classes] if number > 1 else classes

    def _ovirt(self, element: etree._Element) -> None:
        tag, value = local(element.tag), text(element)
        if tag == "BiosType":
            self._account.take(element)
            if value in _OVIRT_FIRMWARE:
                self._set("Firmware", _OVIRT_FIRMWARE[value], element)
        elif tag == "DefaultBootSequence" and value and digits(value) < len(_OVIRT_BOOT):
            self._account.take(element)
            self._made.boot = self._boot(element, list(_OVIRT_BOOT[digits(value)]))

    def _virtualbox(self, machine: etree._Element) -> None:
        """Read VirtualBox's own description, most of which is in the items too."""
        self._account.take(machine, *map(local, machine.keys()))
        self._made.boot = ("fd", "cdrom", "hd")  # its default, which it does not write
        adapters = []
        for element in machine.iter():
            tag, kind = local(element.tag), get(element, "type")
            if tag == "Boot":
                order = sorted(children(element, "Order"), key=lambda each: digits(get(each, "position")))
                words = [device for each in order if (device := get(each, "device")) != "None"]
                self._made.boot = self._boot(element, words)
            elif tag == "Firmware" and kind.upper().startswith("EFI"):
                self._set("Firmware", "uefi", element)
            elif tag == "TrustedPlatformModule" and kind.lower() in ("v2_0", "swtpm"):
                self._set("TPM", True, element)
                self._made.changed["TPM"] = "it is a new one, without what the old one keeps"
            elif tag == "TrustedPlatformModule" and kind.lower() not in ("", "none"):
                self._summary.lose(self._account.place(element), f"a TPM {kind}", "jobs have a TPM 2.0")
            elif tag == "SharedFolder":
                what = f"the shared folder {get(element, 'name')}"
                self._summary.lose(self._account.place(element), what, "it is in the machine that it was made on")
            elif tag == "Adapter" and get(element, "enabled") == "true":
                adapters.append(element)
            elif (tag == "Platform" and get(element, "architecture").upper() == "ARM") or (
                element is machine and get(element, "OSType").lower().endswith("arm64")
            ):
                self._set("Arch", "aarch64", element)
                continue
            else:
                continue
            self._account.take_all(element)
        adapters.sort(key=lambda each: digits(get(each, "slot")))
        if len(adapters) == len(self._made.nics):
            for adapter, nic in zip(adapters, self._made.nics, strict=True):
                nic.link_up = nic.link_up and get(adapter, "cable") != "false"
                nic.model = nic.model or _ADAPTER_MODELS.get(get(adapter, "type").lower(), "")
