"""OVF descriptors as a job, with the extensions of VirtualBox, VMware and oVirt.

The settings of the software in a package go to a CD-ROM, as the standard defines it.

DMTF's DSP0243 defines the elements, CIM's resource types (DSP1041) the numbers of items. Names are looked up without
their namespaces, because two versions of the standard, oVirt's variant and items of three kinds use the same ones.
"""

import argparse
import os
from typing import Any, NamedTuple

from lxml import etree

from vmgahp.commands.files import write_anew
from vmgahp.commands.submit import vocabulary
from vmgahp.commands.submit.images import find_format, free
from vmgahp.commands.submit.machine import (
    Guest,
    GuestDisk,
    GuestNic,
    SubmitError,
    Summary,
    name_devices,
    os_errors_as,
    simple_name,
)
from vmgahp.commands.submit.package import Package, Reference
from vmgahp.commands.submit.vocabulary import number
from vmgahp.commands.submit.xml_input import Account, child, children, get, in_words, local, read, text
from vmgahp.job.options import DATA_FILES

_UNITS = {"byte": 1, "bytes": 1} | {
    unit: 1 << power
    for letter, word, power in (("k", "kilo", 10), ("m", "mega", 20), ("g", "giga", 30), ("t", "tera", 40))
    for unit in (f"{letter}b", f"{letter}ib", f"{word}byte", f"{word}bytes")
}
_LARGEST = 1 << 60

_FORMATS = (("vmdk", "vmdk"), ("qcow2", "qcow2"), ("vdi", "vdi"), ("vhdx", "vhdx"), ("vhd", "vpc"), ("vpc", "vpc"))
_VOLUMES = {"COW": "qcow2", "RAW": "raw"}
"""The formats of disks by their addresses, and oVirt's."""


class Item:
    """One item, with its elements by local names; those that are read are marked as handled."""

    def __init__(self, element: etree._Element, account: Account) -> None:
        self.element = element
        self._account = account
        self.place = account.place(element)
        account.take(element, "configuration", "bound")
        self.type, self.instance = self.number("ResourceType"), self.first("InstanceID")
        self.device, self.subtype = self.first("Type").lower(), self.first("ResourceSubType").lower()
        words = [self.first(name) for name in ("ElementName", "Caption", "ResourceSubType", "Description")]
        self.summary = f"{next(filter(None, words), 'an item')} (resource type {self.first('ResourceType')})"
        self.use("Device")

    def first(self, name: str) -> str:
        """Return the first value of that name, empty for none."""
        return next(map(text, self.use(name)), "")

    def number(self, name: str) -> int:
        """Return an element as a plausible whole number, 0 for none."""
        return number(self.first(name).partition(".")[0])

    def use(self, *names: str) -> list[etree._Element]:
        """Mark elements as handled, and return them."""
        found = list(children(self.element, *names))
        for part in found:
            self._account.take_all(part)
        return found

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


def is_section(element: etree._Element, name: str) -> bool:
    """Return True for a section of that name, which is a type in older versions."""
    return local(element.tag) == name or (local(element.tag) == "Section" and name in get(element, "type"))


def amount(unit: str) -> int:
    """Parse a unit such as ``byte * 2^20`` or ``MegaBytes`` to bytes; 0 for an invalid one."""
    base, *factors = unit.lower().replace(" ", "").split("*")
    product = _UNITS.get(base, 0)
    for factor in factors:
        base_number, power, exponent = factor.partition("^")
        # An exponent of nine digits in an untrusted file would take hours to compute.
        if base not in ("byte", "bytes") or len(exponent) > 2 or (power and not number(exponent)):
            return 0
        product *= number(base_number) ** (number(exponent) if power else 1)
        if not 0 < product <= _LARGEST:
            return 0
    return product


ENVIRONMENT_FILE = "ovf-env.xml"
"""The name of the file that programs in the guest read in the root of a CD-ROM (DSP0243, 9.5 and 10.2)."""
_NAMESPACE = "http://schemas.dmtf.org/ovf/environment/1"


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
_CONTROLLERS = {IDE: "ide", SCSI: "scsi", STORAGE: "sata"}
"""Type of a controller -> its kind, unless its subtype says more."""
_DRIVES = {FLOPPY: "raw", CD: "iso", DVD: "iso"}
"""Type of a drive -> format of its medium."""

_OVIRT_FIRMWARE = {"3": False, "4": True}
"""Types of oVirt's UEFI: True if it has Secure Boot."""
_OVIRT_BOOT = ("C", "DC", "N", "CDN", "CND", "DCN", "DNC", "NCD", "NDC", "CD", "D", "CN", "DN", "NC", "ND")
_VIRTUALBOX_SLOTS = (3, 8, 9, 10, 16, 17, 18, 19)
"""The PCI slots of VirtualBox's NICs."""

_LARGEST_MIB = 1 << 24
"""The largest memory of a VM in MiB; a larger number without a unit is in bytes."""


def machine(options: argparse.Namespace, summary: Summary) -> Guest:
    """Read a descriptor or an archive. Raises `SubmitError`."""
    return of_package(Package(options.file, summary), options, summary)


def of_package(package: Package, options: argparse.Namespace, summary: Summary) -> Guest:
    """Read the descriptor of a package. Raises `SubmitError`."""
    return _PackageReader(package, options, summary).read()


class _PackageReader:
    """A package on its way to a `Guest`."""

    def __init__(self, package: Package, options: argparse.Namespace, summary: Summary) -> None:
        self._package, self._options, self._summary = package, options, summary
        descriptor, data = package.descriptor(".ovf")
        self._root = root = read(data, descriptor)
        if local(root.tag) != "Envelope":
            raise SubmitError(f"{descriptor} describes {local(root.tag)[:40]!a}, no OVF Envelope.")
        for heading in [element for element in root.iter() if local(element.tag) == "Info"]:
            above = heading.getparent()
            if above is not None:
                above.remove(heading)  # the heading of items that are reported separately
        self._account = account = Account(root)
        account.take(root, "version", "lang", "buildId", "schemaLocation")
        self._system = self._chosen_system()
        self._hardware = self._chosen_hardware()
        name = account.text(child(self._system, "Name")) or get(self._system, "id")
        stem = simple_name(os.path.splitext(descriptor)[0], "vm")
        self._made = Guest(name=simple_name(options.name or name, stem), vcpus=0)
        self._configuration = self._chosen_configuration()
        self._named = self._drives()
        self._items = self._chosen_items()
        self._controllers = {item.instance: item for item in self._items if item.type in _CONTROLLERS}
        self._disks: dict[str, GuestDisk] = {}
        """The disks by the instances of their items."""
        self._order: list[tuple[str, int, GuestDisk]] = []
        """The controller and the place on it for each disk."""
        self._empty: list[tuple[GuestDisk, int]] = []
        """The disks that must be made, with their capacities."""
        self._paths: dict[str, str] = {}
        """The paths of the files that have been extracted from the package."""

    def read(self) -> Guest:
        """Read everything, and report it. Raises `SubmitError`."""
        made = self._made
        readers = {CPU: self._cpus, MEMORY: self._memory, NIC: self._nic}
        readers |= dict.fromkeys((*_DISKS, *_DRIVES), self._disk)
        for item in self._items:
            # oVirt uses the numbers of controllers for other devices too.
            if item.type in readers:
                readers[item.type](item)
            elif item.subtype == "vmware.vtpm" or item.device == "tpm":
                item.done()
                vocabulary.set_tpm(item.place, made)
            else:
                item.done()
                self._summary.skip(item.place, item.summary)
        self._virtualbox()
        self._vmware()
        for element in self._system.iter():
            self._ovirt(element)
        self._environment()
        vocabulary.add_usual_models(made)
        self._add_disks()
        if any(is_section(element, "EulaSection") for element in self._root.iter()):
            self._summary.advise("The package has a license agreement (EulaSection): read it.")
        self._account.tell(self._summary)
        return made

    def _chosen_system(self) -> etree._Element:
        """Find the virtual system that is to be converted."""
        wanted, account = self._options.system, self._account
        systems = [
            element
            for element in self._root.iter()
            if local(element.tag) == "VirtualSystem"
            or (local(element.tag) == "Content" and "VirtualSystem" in get(element, "type"))
        ]
        chosen = [element for element in systems if not wanted or get(element, "id") == wanted]
        if len(chosen) != 1:
            names = ", ".join(get(element, "id")[:60] for element in systems[:20])
            problem = f"The package describes {len(systems)} VMs"
            more = f", none or several with the id {wanted}" if wanted else ""
            raise SubmitError(f"{problem}{more}.", f"choose one with --system: {names or 'there is none'}.")
        for element in systems:
            if element is not chosen[0]:
                account.take_all(element)
                why = "another one was chosen (--system)"
                self._summary.skip(account.place(element), f"the VM {get(element, 'id')}", why)
        account.take(chosen[0], "id", "type")
        return chosen[0]

    def _chosen_hardware(self) -> etree._Element:
        """Return the section with the hardware; others are alternatives for another kind of hypervisor."""
        sections = [element for element in self._system if is_section(element, "VirtualHardwareSection")]
        if not sections:
            raise SubmitError("The virtual system has no VirtualHardwareSection.", "export it again.")
        for section in sections[1:]:
            self._account.take_all(section)
            self._summary.skip(self._account.place(section), "another choice of hardware", "the first one is taken")
        self._account.take(sections[0], "type")
        return sections[0]

    def _chosen_configuration(self) -> str:
        """Choose the configuration to run, of those that the package offers; empty for none."""
        offered = [
            element
            for section in self._root.iter()
            if local(section.tag) == "DeploymentOptionSection" or "DeploymentOption" in get(section, "type")
            for element in children(section, "Configuration")
        ]
        wanted, names = self._options.configuration, [get(element, "id") for element in offered]
        if wanted and wanted not in names:
            hint = f"choose one of: {', '.join(names) or 'none'}."
            raise SubmitError(f"The package has no configuration {wanted!a}.", hint)
        if not offered:
            return ""
        defaults = [get(element, "id") for element in offered if get(element, "default") in ("true", "1")]
        chosen: str = wanted or [*defaults, *names][0]
        for element in offered:
            self._account.take_all(element)
        of = f"{chosen}, of {', '.join(names)} (--configuration)"
        self._summary.carry("", "the package's configuration", of)
        return chosen

    def _chosen_items(self) -> list[Item]:
        """List the items of the hardware that belong to the configuration."""
        found = []
        for element in children(self._hardware, "Item", "StorageItem", "EthernetPortItem"):
            belongs = get(element, "configuration").split()
            # Items with limits for choices are not devices.
            if (belongs and self._configuration not in belongs) or get(element, "bound").lower() in ("min", "max"):
                self._account.take_all(element)
            else:
                found.append(Item(element, self._account))
        return found

    def _drives(self) -> dict[str, PackageDrive]:
        """Read the package's disks and files by the names that items use: diskId, file id, path."""
        account, files = self._account, dict[str, Reference]()
        found: dict[str, PackageDrive] = {}
        properties = [element for element in self._root.iter() if local(element.tag) == "Property"]
        values = {f"${{{get(element, 'key')}}}": get(element, "value") for element in reversed(properties)}
        for element in children(account.child(self._root, "References"), "File"):
            account.take(element, "description")
            compression, size = account.get(element, "compression").lower(), number(account.get(element, "size"))
            pieces = bool(account.get(element, "chunkSize"))
            file = Reference(account.get(element, "href"), compression, pieces, size)
            files[account.get(element, "id")] = files[file.href] = file
            found["file:" + get(element, "id")] = PackageDrive(file, "", 0, element)
        sections = [section for section in self._root.iter() if is_section(section, "DiskSection")]
        for element in (disk for section in sections for disk in children(section, "Disk")):
            account.take_all(element)
            reference, said = get(element, "fileRef"), get(element, "capacity")
            unit = amount(get(element, "capacityAllocationUnits") or "byte")
            url = get(element, "format").lower()
            form = _VOLUMES.get(get(element, "volume-format").upper()) or next(
                (form for word, form in _FORMATS if word in url), ""
            )
            drive = PackageDrive(files.get(reference), form, number(values.get(said, said)) * unit, element)
            found["disk:" + get(element, "diskId")] = drive
            if reference:
                found[reference] = drive
        for section in sections:
            account.take(section, "type")
        return found

    def _environment(self) -> None:
        """Write the settings into a file that goes with the job, if the package requires them on a CD-ROM."""
        account, options, made = self._account, self._options, self._made
        ways = account.get(self._hardware, "transport").split()
        sections = [
            section
            for section in (self._system if ways else ())
            if is_section(section, "ProductSection") and child(section, "Property") is not None
        ]
        values: dict[str, str] = {}
        for section in sections:
            account.take_all(section)
            if "iso" in ways:
                values |= self._settings(section)
            else:
                what, why = f"settings that the guest gets by {' '.join(ways)}", "jobs have them on a CD-ROM only (iso)"
                self._summary.lose(account.place(section), what, why)
        for said in options.property:
            key, equals, value = said.partition("=")
            if not equals or key not in values:
                problem = f"--property {said!a} is no KEY=VALUE with a setting of the package."
                raise SubmitError(problem, f"its settings are: {', '.join(sorted(values)) or 'none'}.")
            values[key] = value
        if not values:
            return
        target = os.path.join(options.dir, ENVIRONMENT_FILE)
        free(target, self._summary, force=options.force)
        try:
            document = _document(get(self._system, "id"), values)
        except ValueError as error:  # a control character, which XML does not allow
            raise SubmitError(f"{target} cannot be written ({error}).") from error
        with os_errors_as(f"{target} cannot be written"):
            write_anew(target, document)
        self._summary.made.append(target)
        made.files.append(target)
        made.options[DATA_FILES], made.places[DATA_FILES] = ENVIRONMENT_FILE, account.place(sections[0])
        if unset := [key for key, value in values.items() if not value]:
            advice = f"Settings of the package without a value: {', '.join(unset)}; --property {unset[0]}=VALUE."
            self._summary.advise(advice)

    def _settings(self, section: etree._Element) -> dict[str, str]:
        """Return the settings of one section by their full names, with their values in the configuration."""
        found = {}
        for each in children(section, "Property"):
            key = ".".join(filter(None, (get(section, "class"), get(each, "key"), get(section, "instance"))))
            found[key] = get(each, "value")
            for other in children(each, "Value"):
                if self._configuration and get(other, "configuration") == self._configuration:
                    found[key] = get(other, "value")
        return found

    def _cpus(self, item: Item) -> None:
        item.use("AllocationUnits", "num_cpu", "smp_arch", "max_num_of_vcpus")
        made, said = self._made, item.number("VirtualQuantity") or 1
        cores, threads = item.number("CoresPerSocket"), 1
        if sockets := item.number("num_of_sockets"):  # oVirt's words
            cores, threads = item.number("cpu_per_socket") or 1, item.number("threads_per_cpu") or 1
            said = sockets * cores * threads
        made.vcpus = said
        made.places["vcpus"] = made.places["Topology"] = item.place
        if said > 1 and cores and said % (cores * threads) == 0:
            made.options["Topology"] = f"sockets={said // (cores * threads)},cores={cores},threads={threads}"

    def _memory(self, item: Item) -> None:
        made, unit, quantity = self._made, item.first("AllocationUnits"), item.number("VirtualQuantity")
        made.places["memory"] = item.place
        factor = amount(unit)
        if not unit and quantity:
            factor = 1 << 20 if quantity <= _LARGEST_MIB else 1
            taken = "MiB, as VirtualBox and VMware do" if factor > 1 else "bytes, for so many MiB no VM has"
            made.changed["memory"] = f"the number {quantity} has no unit, and is taken for {taken}"
        elif not factor and not self._options.memory:
            raise SubmitError(f"{item.place}: {unit[:40]!a} is no unit of memory.", "give --memory.")
        made.memory_mib = -(-quantity * factor // (1 << 20))

    def _nic(self, item: Item) -> None:
        item.use("AddressOnParent", "Name")
        nic = GuestNic("", place=item.place, what=item.summary)
        addresses = [item.first(name).lower() for name in ("MACAddress", "Address")]
        nic.mac = next((address for address in addresses if address.count(":") == 5), "")
        nic.link_up = "false" not in (item.first("AutomaticAllocation").lower(), item.first("Linked").lower())
        vocabulary.add_nic(self._made, nic, item.first("Connection"), item.subtype, asked=self._options.network)

    def _disk(self, item: Item) -> None:
        """Read a disk, or a drive with its medium."""
        resource = item.first("HostResource").removeprefix("ovf:").lstrip("/")
        kind, _, identity = resource.partition("/")
        drive = self._named.get(f"{kind}:{identity}") if kind in ("disk", "file") else None
        drive = drive or self._named.get(resource)
        # The file that it names, vCloud's attribute, or the item itself.
        said = f"byte*{get(child(item.element, 'HostResource'), 'capacity')}*2^20"
        capacity = drive.capacity if drive else amount(said)
        capacity = capacity or item.number("VirtualQuantity") * amount(item.first("AllocationUnits") or "byte")
        if drive is not None and drive.file is not None:
            disk = self._with_file(item, drive)
        elif capacity and item.type not in _DRIVES:
            disk = GuestDisk("", "qcow2", place=item.place, what=item.summary)
            self._empty.append((disk, capacity))
        else:
            item.done()
            if item.type in _DRIVES and not resource:
                self._summary.skip(item.place, item.summary, "it is empty")
            else:
                self._summary.lose(item.place, item.summary, "it names no file of the package")
            return
        item.use("Address", "AutomaticAllocation", "VirtualQuantityUnits", "StorageGroup")
        parent = item.first("Parent")
        vocabulary.put_on(disk, (get(drive.element, "disk-interface") if drive else "") or self._controller(parent))
        if item.type in (CD, DVD):
            disk.bus, disk.writable = disk.bus or "sata", False
        elif item.type == FLOPPY:
            disk.bus = "floppy"
        disk.boot = item.number("BootOrder") or (drive is not None and get(drive.element, "boot").lower() == "true")
        self._order.append((parent, item.number("AddressOnParent"), disk))
        self._disks[item.instance] = disk

    def _controller(self, instance: str) -> str:
        """Return the word for a controller, empty for none."""
        item = self._controllers.get(instance)
        if item is None or item.type == IDE:
            return "" if item is None else "ide"
        is_plain = not item.subtype or (item.type == SCSI and item.subtype in vocabulary.BUSES)
        return _CONTROLLERS[item.type] if is_plain else item.first("ResourceSubType")

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
        form = _DRIVES.get(item.type) or drive.format
        disk = GuestDisk(path, form, place=item.place, what=f"{item.summary}, {href}", hostile=True)
        if not form:
            find_format(disk)
        return disk

    def _add_disks(self) -> None:
        """Add to the VM its disks: those with an image, and those that must be made."""
        made, summary = self._made, self._summary
        parents = [parent for parent, _, _ in self._order]
        kinds = [self._controllers[parent].type if parent in self._controllers else 0 for parent in parents]

        def rank(each: tuple[str, int, GuestDisk]) -> tuple[int, ...]:
            parent, place, _ = each
            first = parents.index(parent)
            controller = self._controllers.get(parent)  # the two channels of IDE are two controllers
            address = controller.number("Address") if controller else 0
            return (kinds.index(kinds[first]), address, first, place) if parent else (0,)

        made.disks = [disk for _, _, disk in sorted(self._order, key=rank)]
        if self._empty:
            name_devices(made.disks)
            sizes = [(disk, -(-capacity // (1 << 20))) for disk, capacity in self._empty]
            made.disks = [disk for disk in made.disks if disk.path]
            made.options["Data_Disk"] = ", ".join(f"{disk.device}:{size}M" for disk, size in sizes)
            made.places["Data_Disk"] = sizes[0][0].place
            for disk, size in sizes:
                summary.carry(disk.place, disk.what, f"{disk.device}, an empty disk of {size} MiB")
            summary.advise("The empty disks are made where the job runs: say --append 'request_disk = …'.")
        for drive in self._named.values():
            if drive.file is not None and drive.file.href not in self._paths:
                self._paths[drive.file.href] = ""
                summary.skip(self._account.place(drive.element), f"file {drive.file.href}")

    def _vmware(self) -> None:
        """Read UEFI, with Secure Boot or without, and the boot order: a section for each drive."""
        account, made = self._account, self._made
        configs = {get(element, "key"): element for element in children(self._hardware, "Config")}
        firmware, secure = configs.get("firmware"), configs.get("bootOptions.efiSecureBootEnabled")
        for element in (firmware, secure):
            account.take(element, "key", "value", "required")
        if get(firmware, "value").lower() == "efi":
            vocabulary.set_firmware(account.place(firmware), made, secure=get(secure, "value").lower() == "true")
        order = []
        for place, section in enumerate(children(self._system, "BootOrderSection"), start=1):
            account.take_all(section)
            drive = self._disks.get(get(section, "instanceId"))
            if drive is not None:
                drive.boot = drive.boot or place
            order.append((account.place(section), drive.boot_class if drive else get(section, "type")))
        if order:
            made.boot = vocabulary.boot_order(order, self._summary)

    def _ovirt(self, element: etree._Element) -> None:
        """Read an element of oVirt's, or the type of the operating system, which others have too."""
        tag, value, account, made = local(element.tag), text(element), self._account, self._made
        if tag == "BiosType" and value in _OVIRT_FIRMWARE:
            account.take(element)
            vocabulary.set_firmware(account.place(element), made, secure=_OVIRT_FIRMWARE[value])
        elif tag == "DefaultBootSequence" and value and number(value) < len(_OVIRT_BOOT):
            account.take(element)
            place = account.place(element)
            made.boot = vocabulary.boot_order(((place, letter) for letter in _OVIRT_BOOT[number(value)]), self._summary)
        elif tag == "TimeZone" and value:
            account.take(element)
            vocabulary.set_clock(value, account.place(element), in_words(element), made, self._summary)
        elif tag in ("OperatingSystemSection", "OSType"):
            kind = (get(element, "osType") + value).lower()
            if kind[:4] == "arm-" or "arm64" in kind:
                vocabulary.set_architecture("arm64", account.place(element), made, self._summary)

    def _virtualbox(self) -> None:
        """Read VirtualBox's own description, most of which is in the items too."""
        account, made, summary = self._account, self._made, self._summary
        machine = next((element for element in self._system.iter() if local(element.tag) == "Machine"), None)
        if machine is None:
            return
        account.take(machine, *map(local, machine.keys()))
        made.boot = ("fd", "cdrom", "hd")  # its default, which it does not write
        if get(machine, "OSType").lower().endswith("arm64"):
            vocabulary.set_architecture("arm64", account.place(machine), made, summary)
        adapters = []
        for element in machine.iter():
            tag, kind, place = local(element.tag), get(element, "type"), account.place(element)
            if tag == "Boot":
                order = sorted(children(element, "Order"), key=lambda each: number(get(each, "position")))
                words = [device for each in order if (device := get(each, "device")) != "None"]
                made.boot = vocabulary.boot_order(((place, word) for word in words), summary)
            elif tag == "Firmware" and kind.upper().startswith("EFI"):
                vocabulary.set_firmware(place, made, secure=False)
            elif tag == "TrustedPlatformModule" and kind.lower() in ("v2_0", "swtpm"):
                vocabulary.set_tpm(place, made)
            elif tag == "TrustedPlatformModule" and kind.lower() not in ("", "none"):
                summary.lose(place, f"a TPM {kind}", "jobs have a TPM 2.0")
            elif tag == "RTC":
                vocabulary.set_clock(get(element, "localOrUTC"), place, in_words(element), made, summary)
            elif tag == "SharedFolder":
                summary.lose(place, f"the shared folder {get(element, 'name')}", vocabulary.DIRECTORY)
            elif tag == "Adapter" and get(element, "enabled") == "true":
                adapters.append(element)
            elif tag == "Platform" and get(element, "architecture").upper() == "ARM":
                vocabulary.set_architecture("arm64", place, made, summary)
                continue  # it has other elements in it
            else:
                continue
            account.take_all(element)
        adapters.sort(key=lambda each: number(get(each, "slot")))
        if len(adapters) == len(made.nics):
            for adapter, nic in zip(adapters, made.nics, strict=True):
                slot = number(get(adapter, "slot"))
                nic.link_up = nic.link_up and get(adapter, "cable") != "false"
                nic.model = nic.model or vocabulary.MODELS.get(get(adapter, "type").lower(), "")
                nic.card = f"enp0s{_VIRTUALBOX_SLOTS[slot]}" if slot < len(_VIRTUALBOX_SLOTS) else ""
