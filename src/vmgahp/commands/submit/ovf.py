"""OVF descriptors as a job, with the extensions of VirtualBox, VMware and oVirt."""

import argparse
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

from lxml import etree

from vmgahp.commands.files import open_regular
from vmgahp.commands.submit.machine import BOOT_CLASSES, Guest, GuestDisk, GuestNic, name_devices, simple_name
from vmgahp.commands.submit.ovf_envelope import Item, PackageDrive, amount, choose, digits, drives, is_section, items
from vmgahp.commands.submit.ovf_environment import environment
from vmgahp.commands.submit.package import Package
from vmgahp.commands.submit.summary import SubmitError, Summary
from vmgahp.commands.submit.xml_input import Account, child, children, get, local, read, text
from vmgahp.images.formats import HEADER, looks_like, named_format

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
