"""OVF packages as a job, with the extensions of VirtualBox and VMware.

A package is a directory or one tar file, which is never unpacked as a whole: only its headers are read, and only files
that the description names are written, under names of our own. Links, devices and paths are never followed.

DMTF's DSP0243 defines the elements, CIM's resource types (DSP1041) the numbers of items. Names are looked up without
their namespaces, because two versions of the standard and items of three kinds use the same ones.
"""

import argparse
import hashlib
import io
import os
import re
import shlex
import tarfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any
from urllib.parse import unquote

from lxml import etree

from vmgahp.commands.files import open_regular
from vmgahp.commands.submit.images import CHUNK, compression_of, find_format, require_beside, write_unpacked
from vmgahp.commands.submit.machine import GUEST_INFO, Guest, GuestDisk, GuestNic, Why, name_devices, vmware_card_name
from vmgahp.commands.submit.report import SubmitError, Summary, number, os_errors_as, simple_name
from vmgahp.commands.submit.xml_input import LARGEST, Account, child, children, get, in_words, local, read, remove, text
from vmgahp.job.attributes import LOCAL_TIME

MOST_MEMBERS = 1000
_MOST_EXTRA = 8 << 10
"""The maximum bytes of an extra header of a member (a long name, attributes), for which older versions of tarfile need
quadratic time."""
_MOST_HEADERS = MOST_MEMBERS * (3 << 10)
"""The maximum bytes of all headers of a tar file."""
_DIGEST = re.compile(
    r"^[^\S\n]*+(SHA1|SHA256|SHA512)[^\S\n]*+\(([^)\n]*)\)[^\S\n]*+=[^\S\n]*+([0-9a-fA-F]++)[^\S\n]*+$", re.MULTILINE
)


class Package:
    """The files of a package (OVF, OVA, a Vagrant box), by their names in it."""

    def __init__(self, path: str, summary: Summary, *, called: str = "") -> None:
        """Open a tar file, a directory, or that of a descriptor, `called` so by the user. Raises `SubmitError`."""
        self.path = os.path.abspath(path)
        self.called = called or path
        self._summary = summary
        self.is_archive = False
        """True for a tar file."""
        self._members: dict[str, tarfile.TarInfo] = {}
        """The files of a tar file, by their plain names."""
        self._descriptor = ""
        self._digests: dict[str, tuple[str, str]] = {}
        """Name -> algorithm and digest, from the manifest."""
        if os.path.isdir(self.path):
            self._directory = self.path
            return
        self._directory = os.path.dirname(self.path)
        with os_errors_as(f"{self.called} cannot be read"), open_regular(self.path) as file:
            head = file.read(tarfile.BLOCKSIZE)
            if kind := compression_of(head):
                raise SubmitError(f"{self.called} is compressed with {kind}.", "unpack it first.")
            if head[257:262] == b"ustar":
                self._members, self.is_archive = _members(file.fileno(), os.path.basename(self.called)), True
            else:
                self._descriptor = os.path.basename(self.path)
        summary.sources.add(os.path.realpath(self.path))

    def names(self) -> list[str]:
        """List the files of the archive, or of the directory. Raises `SubmitError`."""
        if self.is_archive:
            return list(self._members)
        with os_errors_as(f"{self._directory} cannot be read"):
            return sorted(os.listdir(self._directory))

    def one(self, ending: str) -> str:
        """Return the name of the only file with this ending. Raises `SubmitError`."""
        names = [name for name in self.names() if name.lower().endswith(ending)]
        if len(names) != 1:
            hint = "see what tar -t shows of it." if self.is_archive else "name one of them."
            raise SubmitError(f"{self.called} has {len(names)} files {ending}.", hint)
        return names[0]

    def descriptor(self) -> tuple[str, bytes]:
        """Return the name and the content of the file that describes the package. Raises `SubmitError`.

        The digests of its manifest are checked for all files that are read from now on.
        """
        name = self._descriptor or self.one(".ovf")
        stem = os.path.splitext(name)[0]
        if f"{stem}.mf" in self.names():
            found = _DIGEST.findall(self.text(f"{stem}.mf").decode("utf-8", "replace"))
            self._digests = {member: (algorithm.lower(), digest.lower()) for algorithm, member, digest in found}
        data = self.text(name)
        if name in self._digests:
            self._compare(name, hashlib.new(self._digests[name][0], data, usedforsecurity=False).hexdigest())
        return name, data

    def text(self, name: str) -> bytes:
        """Return a small file's content, at most one byte more than is allowed. Raises `SubmitError`."""
        with self._opened(name) as file:
            return file.read(LARGEST + 1)

    def file(self, name: str, directory: str, *, force: bool) -> str:
        """Return the full path of a file here, extracted to `directory` from a tar file. Raises `SubmitError`."""
        if not self.is_archive:
            if name in self._digests:
                deque(self._content(name), maxlen=0)
            return self._path(name)
        stem, ending = os.path.splitext(os.path.basename(name))
        target = os.path.join(directory, f"{simple_name(stem, 'disk')}.{simple_name(ending[1:], 'img')}")
        write_unpacked(self._content(name), target, self._summary, force=force)
        self._summary.keep("", f"{name} in the archive", f"taken out to {target}")
        return target

    def _path(self, name: str) -> str:
        """Return the path of a file of a directory. Raises `SubmitError`."""
        parts = name.split("/")
        path = os.path.join(self._directory, *parts)
        if "" in parts or ".." in parts or "." in parts or ":" in name or not os.path.isfile(path):
            joined = f"its chunks (ovf:chunkSize) are joined by: cat {shlex.quote(name)}.0* >{shlex.quote(name)}"
            hint = joined if os.path.isfile(f"{path}.000000000") else "keep the package together."
            raise SubmitError(f"{name!a} is not a regular file in {self._directory}.", hint)
        require_beside(path, name, os.path.join(self._directory, self._descriptor))
        return path

    @contextmanager
    def _opened(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file, whose holes in an archive are read as zeros. Raises `SubmitError`."""
        if not self.is_archive:
            with open_regular(self._path(name)) as file:
                yield file
            return
        if name not in self._members:
            raise SubmitError(f"{name!a} is not in {self.called}.", "see what tar -t shows of it.")
        with tarfile.open(self.path, "r:") as archive:
            member = archive.extractfile(self._members[name])
            assert member is not None  # `_members` has regular files only
            yield member

    def _content(self, name: str) -> Iterator[bytes]:
        """Read a file and verify its digest. Raises `SubmitError`."""
        digest = hashlib.new(self._digests.get(name, ("sha1", ""))[0], usedforsecurity=False)
        with self._opened(name) as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                yield chunk
        self._compare(name, digest.hexdigest())

    def _compare(self, name: str, found: str) -> None:
        if name in self._digests and self._digests[name][1] != found:
            problem = f"{name} is not the file of the package's manifest: its digest differs."
            raise SubmitError(problem, "get the package again.")


class _Headers(io.FileIO):
    """A tar file whose reads are limited to the size of headers: tarfile itself reads as much as a header claims."""

    _left = _MOST_HEADERS

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= min(_MOST_EXTRA, self._left):
            raise tarfile.ReadError("its headers are too long")
        self._left -= size
        return super().read(size)


def _members(descriptor: int, name: str) -> dict[str, tarfile.TarInfo]:
    """List the regular files of a tar file, by their plain names. Raises `SubmitError`."""
    found: dict[str, tarfile.TarInfo] = {}
    end = os.fstat(descriptor).st_size
    os.lseek(descriptor, 0, os.SEEK_SET)
    try:
        with _Headers(descriptor, closefd=False) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for place, member in enumerate(archive):
                if place >= MOST_MEMBERS:
                    problem = f"{name} has more than {MOST_MEMBERS} files."
                    raise SubmitError(problem, "see whether it is the right file.")
                if member.isdir():
                    continue
                if not member.isreg():
                    problem = f"{name} has {member.name!a}, which is not a regular file."
                    raise SubmitError(problem, "make it anew with tar --format=ustar, of plain files.")
                if not 0 <= _stored(member) <= end - member.offset_data:
                    raise SubmitError(f"{name} ends in the middle of {member.name!a}.", "get it again.")
                parts = member.name.removeprefix("./").split("/")
                if not member.name.isprintable() or ".." in parts or "" in parts:
                    problem = f"{name} has a file {member.name!a}."
                    raise SubmitError(problem, "keep the files of a package in its directory.")
                found["/".join(parts)] = member
    except (tarfile.TarError, ValueError, OverflowError, RecursionError, OSError) as error:
        raise SubmitError(f"{name} is a damaged tar file: {error}.", "get it again.") from error
    return found


def _stored(member: tarfile.TarInfo) -> int:
    """Return the bytes of a member's data, which tar -S stores without its holes. Raises ValueError."""
    pieces: Any = member.sparse if member.issparse() else [(0, member.size)]
    at = 0
    for offset, size in filter(any, pieces):  # (0, 0) is an unused entry
        if size < 0 or not at <= offset <= member.size - size:
            raise ValueError("its holes make no sense")
        at = offset + size
    return sum(size for _, size in pieces)


CPU, MEMORY, IDE, SCSI, NIC, FLOPPY, CD, DVD, STORAGE = 3, 4, 5, 6, 10, 14, 15, 16, 20
_DISKS = 17, 31
"""The types of a disk, and of a logical disk by version 2 of the standard."""
_CONTROLLERS = {IDE: "ide", SCSI: "scsi", STORAGE: "sata"}
"""Type of a controller -> its kind, unless its subtype says more."""
_SLOTS = (3, 8, 9, 10, 16, 17, 18, 19)
"""The PCI slots of VirtualBox's NICs."""
_DRIVES = {FLOPPY: "raw", CD: "iso", DVD: "iso"}
"""Type of a drive -> format of its medium."""

_UNIT = re.compile(r"(?:byte|([kmgt])(?:i?b|(?:ilo|ega|iga|era)bytes?))((?:\*\d{1,4}(?:\^\d{1,2})?){0,4})", re.ASCII)
"""A unit such as ``byte * 2^20``, ``byte * 1024 * 1024``, ``MegaBytes`` or ``GB``."""


def amount(unit: str) -> int:
    """Parse a unit to bytes; 0 for an invalid one."""
    found = _UNIT.fullmatch(unit.lower().replace(" ", ""))
    if found is None:
        return 0
    product = 1 << 10 * (" kmgt".index(found[1]) if found[1] else 0)
    for factor in found[2].split("*")[1:]:
        base, _, power = factor.partition("^")
        product *= int(base) ** int(power or 1)
    return product


class Item:
    """One item, with its elements by local names; those that are read are marked as handled."""

    def __init__(self, element: etree._Element, account: Account) -> None:
        self.element, self._account, self.place = element, account, account.place(element)
        account.take(element, "configuration", "bound")
        self.type, self.instance = self.number("ResourceType"), self.first("InstanceID")
        self.subtype = self.first("ResourceSubType").lower()
        said = [self.first(name) for name in ("ElementName", "Caption", "ResourceSubType", "Description")]
        self.summary = f"{next(filter(None, said), 'an item')} (resource type {self.first('ResourceType')})"

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


def machine(options: argparse.Namespace, summary: Summary) -> Guest:
    """Read a descriptor or an archive. Raises `SubmitError`."""
    return PackageReader(Package(options.file, summary), options, summary).read()


class PackageReader:
    """A package on its way to a `Guest`."""

    def __init__(self, package: Package, options: argparse.Namespace, summary: Summary) -> None:
        self._package, self._options, self._summary = package, options, summary
        descriptor, data = package.descriptor()
        self._root = root = read(data, descriptor)
        if local(root.tag) != "Envelope":
            raise SubmitError(f"{descriptor} describes {local(root.tag)[:40]!a}, no OVF Envelope.")
        for heading in [element for element in root.iter() if local(element.tag) == "Info"]:
            remove(heading)  # of items that are reported separately
        self._account = account = Account(root)
        account.take(root, "version", "lang", "buildId", "schemaLocation")
        self._system, self._hardware = self._chosen_hardware()
        name = account.text(child(self._system, "Name")) or get(self._system, "id")
        self._made = Guest(simple_name(options.name, name, os.path.splitext(descriptor)[0], "vm"), vcpus=0)
        self._named = self._drives()
        self._items = self._chosen_items()
        self._controllers = {
            item.instance: _CONTROLLERS[item.type] if item.type == IDE else item.subtype or _CONTROLLERS[item.type]
            for item in self._items
            if item.type in _CONTROLLERS
        }
        """The word for each controller."""
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
            if item.type in readers:
                readers[item.type](item)
                continue
            self._account.take_all(item.element)
            if item.subtype == "vmware.vtpm":
                made.set_tpm(item.place)
            else:
                self._summary.skip(item.place, item.summary)
        self._virtualbox()
        self._vmware()
        self._add_disks()
        self._account.tell(self._summary)
        return made

    def _chosen_hardware(self) -> tuple[etree._Element, etree._Element]:
        """Find the virtual system that is to be converted, and its hardware, the first of several alternatives."""
        wanted, account = self._options.system, self._account
        systems = [element for element in self._root.iter() if local(element.tag) == "VirtualSystem"]
        chosen = [element for element in systems if not wanted or get(element, "id") == wanted]
        if len(chosen) != 1:
            names = ", ".join(get(element, "id")[:60] for element in systems[:20])
            more = f", none or several with the id {wanted}" if wanted else ""
            problem = f"The package describes {len(systems)} VMs{more}."
            raise SubmitError(problem, f"choose one with --system: {names or 'there is none'}.")
        hardware = child(chosen[0], "VirtualHardwareSection")
        if hardware is None:
            raise SubmitError("The virtual system has no VirtualHardwareSection.", "export it again.")
        account.take(chosen[0], "id")
        account.take(hardware)
        return chosen[0], hardware

    def _chosen_items(self) -> list[Item]:
        """List the items of the hardware that belong to the chosen configuration, of those that the package offers."""
        sections = [element for element in self._root.iter() if local(element.tag) == "DeploymentOptionSection"]
        offered = [element for section in sections for element in children(section, "Configuration")]
        wanted, names = self._options.configuration, [get(element, "id") for element in offered]
        if wanted and wanted not in names:
            hint = f"choose one of: {', '.join(names) or 'none'}."
            raise SubmitError(f"The package has no configuration {wanted!a}.", hint)
        defaults = [get(element, "id") for element in offered if get(element, "default") in ("true", "1")]
        chosen = next(filter(None, [wanted, *defaults, *names]), "")
        if offered:
            of = f"{chosen}, of {', '.join(names)} (--configuration)"
            self._summary.keep("", "the package's configuration", of)
        found = []
        for element in children(self._hardware, "Item", "StorageItem", "EthernetPortItem"):
            belongs = get(element, "configuration").split()
            # Items with limits for choices are not devices.
            if (belongs and chosen not in belongs) or get(element, "bound").lower() in ("min", "max"):
                self._account.take_all(element)
            else:
                found.append(Item(element, self._account))
        return found

    def _drives(self) -> dict[str, tuple[str, int, etree._Element]]:
        """Read the disks and files by the names that items use: file, capacity in bytes, and element.

        The file is empty for an empty disk, and the capacity 0 if it is unknown.
        """
        account, files, found = self._account, dict[str, str](), dict[str, tuple[str, int, etree._Element]]()
        for element in children(account.child(self._root, "References"), "File"):
            account.take(element, "size", "description")
            name, href = account.get(element, "id"), account.get(element, "href")
            if "%" in href and href not in self._package.names():  # by the standard it is a URI
                href = unquote(href)
            files[name] = href
            found[f"file/{name}"] = href, 0, element
        for element in children(account.child(self._root, "DiskSection"), "Disk"):
            account.take_all(element)
            unit = amount(get(element, "capacityAllocationUnits") or "byte")
            file, capacity = files.get(get(element, "fileRef"), ""), number(get(element, "capacity")) * unit
            found[f"disk/{get(element, 'diskId')}"] = file, capacity, element
        return found

    def _cpus(self, item: Item) -> None:
        item.use("AllocationUnits")
        made, cores = self._made, item.number("CoresPerSocket")
        made.vcpus = item.number("VirtualQuantity") or 1
        made.places["vcpus"] = made.places["Topology"] = item.place
        if made.vcpus > 1 and cores and made.vcpus % cores == 0:
            made.options["Topology"] = f"sockets={made.vcpus // cores},cores={cores},threads=1"

    def _memory(self, item: Item) -> None:
        made, unit, quantity = self._made, item.first("AllocationUnits"), item.number("VirtualQuantity")
        made.places["memory"] = item.place
        factor = amount(unit or "MB")
        if not unit:
            made.changed["memory"] = f"the number {quantity} has no unit, and is taken for MiB"
        elif not factor and not self._options.memory:
            raise SubmitError(f"{item.place}: {unit[:40]!a} is no unit of memory.", "give --memory.")
        made.memory_mib = -(-quantity * factor // (1 << 20))

    def _nic(self, item: Item) -> None:
        item.use("AddressOnParent")
        nic = GuestNic("", place=item.place, what=item.summary)
        addresses = [item.first(name).lower() for name in ("MACAddress", "Address")]
        nic.mac = next((address for address in addresses if address.count(":") == 5), "")
        nic.link_up = item.first("AutomaticAllocation").lower() != "false"
        for element in children(item.element, "Config"):
            if get(element, "key") == "slotInfo.pciSlotNumber":
                self._account.take(element, "key", "value", "required")
                nic.card = vmware_card_name(get(element, "value"))
        self._made.add_nic(nic, item.first("Connection"), item.subtype, asked=self._options.network)

    def _disk(self, item: Item) -> None:
        """Read a disk, or a drive with its medium."""
        resource = item.first("HostResource").removeprefix("ovf:").lstrip("/")
        file, capacity, described = self._named.get(resource, ("", 0, item.element))
        capacity = capacity or item.number("VirtualQuantity") * amount(item.first("AllocationUnits") or "byte")
        if file:
            disk = self._with_file(item, file, is_overlay=bool(get(described, "parentRef")))
        elif capacity and item.type not in _DRIVES:
            disk = GuestDisk("", "qcow2", place=item.place, what=item.summary)
            self._empty.append((disk, capacity))
        else:
            self._account.take_all(item.element)
            if item.type in _DRIVES and not resource:
                self._summary.skip(item.place, item.summary, "it is empty")
            else:
                self._summary.lose(item.place, item.summary, "it names no file of the package")
            return
        item.use("Address", "AutomaticAllocation", "VirtualQuantityUnits")
        parent = item.first("Parent")
        disk.put_on(self._controllers.get(parent, ""))
        if item.type in (CD, DVD):
            disk.bus, disk.writable = disk.bus or "sata", False
        elif item.type == FLOPPY:
            disk.bus = "floppy"
        self._order.append((parent, item.number("AddressOnParent"), disk))

    def _with_file(self, item: Item, file: str, *, is_overlay: bool) -> GuestDisk:
        if is_overlay:
            raise SubmitError(f"{item.place}: the disk is an overlay of another.", "export it without snapshots.")
        if file in self._paths and item.type not in _DRIVES:
            problem = f"{item.place}: {file!a} is the image of two disks."
            raise SubmitError(problem, "give each a file of its own in the package.")
        if file not in self._paths:
            self._paths[file] = self._package.file(file, self._options.dir, force=self._options.force)
        disk = GuestDisk(self._paths[file], _DRIVES.get(item.type, ""), place=item.place, hostile=True)
        disk.what = f"{item.summary}, {file}"
        if not disk.format:
            find_format(disk)  # exporters disagree about the addresses of formats
        return disk

    def _add_disks(self) -> None:
        """Add to the VM its disks: those with an image, and those that must be made."""
        made, summary = self._made, self._summary
        controllers = ["", *self._controllers]
        self._order.sort(key=lambda each: (controllers.index(each[0]) if each[0] in controllers else 0, each[1]))
        made.disks = [disk for _, _, disk in self._order]
        if self._empty:
            name_devices(made.disks)
            sizes = [(disk, -(-capacity // (1 << 20))) for disk, capacity in self._empty]
            made.disks = [disk for disk in made.disks if disk.path]
            made.options["Data_Disk"] = ", ".join(f"{disk.device}:{size}M" for disk, size in sizes)
            made.places["Data_Disk"] = sizes[0][0].place
            for disk, size in sizes:
                summary.keep(disk.place, disk.what, f"{disk.device}, an empty disk of {size} MiB")
            summary.advise("The empty disks are made where the job runs: say --append 'request_disk = …'.")
        for file, _, element in self._named.values():
            if file and file not in self._paths:
                self._paths[file] = ""
                summary.skip(self._account.place(element), f"file {file}")

    def _vmware(self) -> None:
        """Read firmware, architecture and clock, and what the guest's first boot reads."""
        account, made = self._account, self._made
        configs = {get(element, "key"): element for element in children(self._hardware, "Config")}
        firmware, secure = configs.get("firmware"), configs.get("bootOptions.efiSecureBootEnabled")
        for element in (firmware, secure):
            account.take(element, "key", "value", "required")
        if get(firmware, "value").lower() == "efi":
            made.set_firmware(account.place(firmware), secure=get(secure, "value").lower() == "true")
        extra = {get(element, "key"): element for element in children(self._hardware, "ExtraConfig")}
        for element in children(self._system, "OperatingSystemSection"):
            place, word = account.place(element), get(element, "osType").lower()
            if word.startswith("arm"):
                made.set_architecture("arm64", place, self._summary)
            elif word.startswith("win") and get(extra.get("rtc.diffFromUTC"), "value") != "0":  # as in a .vmx
                made.set_clock(LOCAL_TIME, place, word, self._summary)
        told = [part for product in children(self._system, "ProductSection") for part in children(product, "Property")]
        for element in (*extra.values(), *told):
            if GUEST_INFO.fullmatch(key := get(element, "key")) and get(element, "value"):
                account.take_all(element)
                self._summary.lose(account.place(element), key, Why.FIRST_BOOT)

    def _virtualbox(self) -> None:
        """Read from VirtualBox's own description the parts that the items lack."""
        account, made, summary = self._account, self._made, self._summary
        machine = next((element for element in self._system.iter() if local(element.tag) == "Machine"), None)
        if machine is None:
            return
        account.take(machine, *map(local, machine.keys()))
        if get(machine, "OSType").lower().endswith("arm64"):
            made.set_architecture("arm64", account.place(machine), summary)
        adapters = [each for each in machine.iter() if local(each.tag) == "Adapter" and get(each, "enabled") == "true"]
        slots = sorted(number(get(adapter, "slot")) for adapter in adapters)
        for slot, nic in zip(slots, made.nics, strict=True) if len(slots) == len(made.nics) else ():
            nic.card = f"enp0s{_SLOTS[slot]}" if slot < len(_SLOTS) else ""
        for element in machine.iter():
            tag, kind, place = local(element.tag), get(element, "type").lower(), account.place(element)
            if tag == "Firmware" and kind.startswith("efi"):
                made.set_firmware(place, secure=False)
            elif tag == "TrustedPlatformModule" and kind in ("v2_0", "swtpm"):
                made.set_tpm(place)
            elif tag == "RTC":
                made.set_clock(get(element, "localOrUTC"), place, in_words(element), summary)
            elif tag == "SharedFolder":
                summary.lose(place, f"the shared folder {get(element, 'name')}", Why.DIRECTORY)
            else:
                continue
            account.take_all(element)
