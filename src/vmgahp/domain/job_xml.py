"""Libvirt XML of a job's own: ``+VMPARAM_Libvirt_XML``.

`vmgahp.domain.sanitize` rebuilds it from what the rows of `vmgahp.domain.model` let jobs have, and refuses the rest.
Its requests are added to the job ad, which is then read like any job's: images are located and opened as the job's
user, networks are those on offer, memory and CPUs those of the machine. If the ad has the same request, both must
agree: HTCondor has matched and accounts for the ad, and the XML may request less memory and fewer CPUs.

The remainder is merged into the description that this package makes of every job. Ours is the frame: name, UUID,
memory, CPUs, images with their backing files, networks, the console, the display, the user of the hypervisor. The job's
XML contributes the guest's side of these, and devices that do not use the host: the rows name the `Author` of each.

libvirt gives a kernel and an initrd to the hypervisor's user by changing their owner, as root and by their names. In a
directory of the job's a symbolic link could redirect that to any file; so libvirt gets copies in a directory of root's,
which are removed with the VM. docs/reference/job-xml.md is for users.
"""

import errno
import os
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import partial
from math import prod
from typing import NamedTuple, TypeVar
from xml.etree import ElementTree as etree

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.domain import model
from vmgahp.domain.model import AGENT, DEVICES, DOMAIN, Author, Element, Side, value
from vmgahp.domain.sanitize import read, refused, sanitized
from vmgahp.errors import JobFault
from vmgahp.host import runtime_dir
from vmgahp.host.job_user import Identity
from vmgahp.host.system_calls import Opened
from vmgahp.job import disks
from vmgahp.job.ad import JobAd, Plain
from vmgahp.job.attributes import LIBVIRT_XML as ATTRIBUTE
from vmgahp.job.attributes import Options
from vmgahp.job.disks import DISK
from vmgahp.job.spec import unsaveable_feature
from vmgahp.job.vm_spec import Nic, first_integer, nics
from vmgahp.text import shown

ALLOWED = "VM_ALLOW_LIBVIRT_XML"

Found = TypeVar("Found")


class JobXml(NamedTuple):
    """The XML of a job, sanitized, with its requests."""

    file_name: str
    domain: etree.Element
    ad: JobAd
    """The job ad, with the requests of the XML as attributes."""
    boot_files: Mapping[str, str]
    """The names in the scratch directory of a kernel and an initrd, by element."""
    dropped: tuple[str, ...]
    """The parts of the file about the machine that it was made for, which are dropped."""

    def describe(self, ours: str, directory: str, make_room: Callable[[], str] | None, identity: Identity) -> str:
        """Merge the job's XML into ours, and copy its kernel unless it is only for display. Raises `errors.Fault`."""
        paths = {tag: f"(copy of {name})" for tag, name in self.boot_files.items()}
        if make_room is not None and self.boot_files:
            paths = copy_boot_files(self.boot_files, directory, identity, make_room, self.file_name)
        return merge(ours, self.domain, paths)

    def without(self) -> str:
        """List the dropped parts in a sentence; empty if there are none."""
        what = ", ".join(self.dropped)
        return what and f"{shown(self.file_name)} has these of another machine, and they are dropped: {what}."


def load(ad: JobAd, settings: Settings, identity: Identity) -> JobXml | None:
    """Load the XML of a job; None for a job without. Raises `JobFault`."""
    if ad.value(ATTRIBUTE) is None:
        return None
    name = (ad.string(ATTRIBUTE) or "").strip()
    if not name or os.path.basename(name) in ("", ".", ".."):
        raise refused(ad.expression(ATTRIBUTE) or "", "it names no file", f'write +{ATTRIBUTE} = "domain.xml".')
    for setting, forbidden in ((ALLOWED, not settings.boolean(ALLOWED)), ("LIBVIRT_XML_SCRIPT", settings.xml_script())):
        if forbidden:
            problem = f"this machine takes no XML from jobs ({setting})"
            raise refused(name, problem, f"leave {ATTRIBUTE} out, or submit to a pool whose machines take it.")
    directory = ad.working_dir()
    domain, dropped = sanitized(read(name, directory, identity), name)
    if ad.boolean("JobVMCheckpoint") and (why := unsaveable_feature(domain)):
        problem = f"JobVMCheckpoint = true contradicts it, for QEMU cannot save the VM: {why}"
        raise refused(name, problem, "remove that from the file, or set vm_checkpoint = false.")
    whole = completed(ad, domain, settings, name)
    return JobXml(name, domain, whole, boot_file_names(domain, name, directory, identity), dropped)


_KINDS = {"network": "nat", "bridge": "bridge", "user": "user"}


def completed(ad: JobAd, domain: etree.Element, settings: Settings, name: str) -> JobAd:
    """Return the ad with all requests of a sanitized domain as attributes. Raises `JobFault`."""
    reader = _Reader(ad, name)
    reader.memory(domain)
    reader.vcpus(domain)
    reader.disks(domain)
    reader.interfaces(domain, settings)
    reader.devices(domain)
    reader.firmware(domain)
    return ad.changed(reader.found)


class _Reader:
    """A reader of requests, which knows those of the ad about the same things."""

    def __init__(self, ad: JobAd, name: str) -> None:
        self.ad = ad
        self.name = name
        self.options = Options(ad)
        self.found: dict[str, Plain | None] = {}

    def memory(self, domain: etree.Element) -> None:
        memory, current = (model.memory(domain.find(tag)) for tag in ("memory", "currentMemory"))
        if current > memory:
            raise self._refused("/domain/currentMemory is more than /domain/memory", "let it be the same, or less.")
        _, given = first_integer(self.ad, "JobVMMemory", "RequestMemory")
        if not memory or given is None:
            return  # the ad alone decides the amount; a missing one is refused there
        if memory > given << 20:
            problem = f"/domain/memory is {-(-memory >> 20)} MiB, and the job has {given} MiB (JobVMMemory)"
            raise self._refused(problem, "set vm_memory to as much, or lower it in the file.")
        self.found["JobVMMemory"] = -(-memory >> 20)

    def vcpus(self, domain: etree.Element) -> None:
        number = int(domain.findtext("vcpu") or 0)
        _, ours = first_integer(self.ad, "JobVM_VCPUS", "RequestCpus")
        granted = max(ours or 1, 1)
        if number > granted:
            problem = f"/domain/vcpu is {number}, and the job has {granted} (JobVM_VCPUS)"
            raise self._refused(problem, "set vm_vcpus to as many, or lower it in the file.")
        topology = domain.find("cpu/topology")
        if topology is not None:
            if self.options.has("Topology"):
                attribute = self.options.attribute("Topology")
                raise self._refused(f"it has a CPU topology, and the job has {attribute} too", "leave one of them out.")
            product, has = prod(map(int, topology.attrib.values())), number or granted
            if product != has:
                problem = f"/domain/cpu/topology has {product} CPUs, and the VM has {has}"
                raise self._refused(problem, "let them be the same.")
        if number:
            self.found["JobVM_VCPUS"] = number

    def disks(self, domain: etree.Element) -> None:
        """Read the disks, which must be among those of vm_disk if the job has it."""
        found: dict[str, tuple[str, ...]] = {}
        for number, disk in enumerate(domain.iterfind("devices/disk"), start=1):
            path = f"/domain/devices/disk[{number}]"
            file, device = model.value(disk, "source", "file"), model.value(disk, "target", "dev").lower()
            if disk.get("type", "file") != "file" or not file or not device:
                raise self._refused(f"{path} has no source file or no target dev", "give it both.")
            if "," in file or ":" in file or file != file.strip():
                problem = f"{path}/source/@file = {shown(file)} has a comma, a colon or a blank at its end"
                raise self._refused(problem, "give the image another name.")
            if device in found:
                raise self._refused(f"{path}/target/@dev = {device} is used twice", "give every disk its own device.")
            form = model.value(disk, "driver", "type", "raw").lower()
            if disk.get("device") == "cdrom" and form == "raw":
                form = "iso"
            written = disk.find("readonly") is None and disk.get("device") != "cdrom"
            permission = ("w" if written else "r") + ("s" if disk.find("shareable") is not None else "")
            found[device] = (file, device, permission, form)
        if self._has(DISK):
            self._require_same_disks(found.values())
        elif found:
            self.found[DISK] = ",".join(map(":".join, found.values()))

    def interfaces(self, domain: etree.Element, settings: Settings) -> None:
        """Read the interfaces; only networks that the machine offers are accepted, as for any job."""
        ours = {"network": "VM_NAT_NETWORK", "bridge": "VM_NETWORKING_BRIDGE_INTERFACE"}
        found = []
        for number, interface in enumerate(domain.iterfind("devices/interface"), start=1):
            path = f"/domain/devices/interface[{number}]"
            kind = interface.get("type", "")
            if kind not in _KINDS:
                raise self._refused(f"{path} has no type", "write network, bridge or user.")
            source = interface.find("source")
            for attribute, said in () if source is None else source.items():
                setting = ours.get(kind, "")
                if attribute != kind or said != settings.string(setting):
                    problem = f"{path}/source/@{attribute} = {shown(said)} is not a network that jobs get here"
                    problem += f" ({setting} = {settings.string(setting)})" if setting else ""
                    raise self._refused(problem, "leave the source out: jobs get this machine's own.")
            address = model.value(interface, "mac", "address").replace("-", ":")
            link_up = model.value(interface, "link", "state") != "down"
            found.append(Nic(_KINDS[kind], address, model.value(interface, "model", "type", "virtio"), link_up))
        if not found:
            return
        if self._has("JobVMNetworking") and not self.ad.boolean("JobVMNetworking"):
            raise self._declined("JobVMNetworking")
        text = ", ".join(map(str, found))
        asked: dict[str, Plain | None] = {"JobVMNetworking": True, self.options.attribute("NICs"): text}
        if self.options.string("NICs"):
            changed = self.ad.changed(asked)
            if nics(self.ad, settings, self.options) != nics(changed, settings, Options(changed)):
                raise self.options.refused("NICs", f"the job's own XML asks for {shown(text)}", "keep one of them.")
        self.found |= asked

    def devices(self, domain: etree.Element) -> None:
        if domain.find("devices/graphics") is not None:
            if self._has("JobVMVNCConsole") and not self.ad.boolean("JobVMVNCConsole"):
                raise self._declined("JobVMVNCConsole")
            self.found["JobVMVNCConsole"] = True
        if domain.find("devices/tpm") is not None:
            attribute = self.options.attribute("TPM")
            if self.options.has("TPM") and not self.options.boolean("TPM"):
                raise self._declined(attribute)
            self.found[attribute] = True

    def firmware(self, domain: etree.Element) -> None:
        """Read the firmware and the architecture."""
        element = domain.find("os")
        if element is None:
            return
        features = {each.get("name"): each.get("enabled") for each in element.iterfind("firmware/feature")}
        # Without enrolled keys the firmware starts unsigned systems, too: that is plain UEFI, and ours enrolls keys.
        secure = features.get("secure-boot") == "yes" and features.get("enrolled-keys") != "no"
        firmware = {"bios": "bios", "efi": "uefi"}.get(element.get("firmware", ""), "")
        if element.find("firmware") is not None and firmware != "uefi":
            raise self._refused("/domain/os/firmware is for <os firmware='efi'>", "set the attribute too.")
        self._take("Firmware", "uefi-secure" if firmware and secure else firmware)
        arch = model.value(element, "type", "arch")
        self._take("Arch", "" if arch == os.uname().machine else arch)
        if element.find("kernel") is None and any(element.find(tag) is not None for tag in ("initrd", "cmdline")):
            raise self._refused("/domain/os has an initrd or a cmdline and no kernel", "add the kernel.")

    def _take(self, option: str, value: str) -> None:
        """Take a value for an option, which must be the ad's if the ad has one."""
        attribute, given = self.options.attribute(option), self.options.string(option)
        if value and given and given.lower() != value:
            problem = f"it asks for {shown(value)}, and {attribute} = {shown(given)}"
            raise self._refused(problem, f"leave {attribute} out.")
        if value:
            self.found[attribute] = value

    def _require_same_disks(self, asked: Iterable[tuple[str, ...]]) -> None:
        """Make sure that vm_disk has every disk of the XML, with the same file, permission and format.

        condor_submit requires vm_disk of jobs of type kvm, so it takes precedence; the XML may add details.
        """
        text = self.ad.string(DISK) or ""
        given = {}
        for entry in disks.entries(text):
            if entry.is_well_formed and not entry.is_of_catalog:
                file, device, permission, form = (*entry.fields, "raw")[:4]
                mode = ("w" if "w" in permission.lower() else "r") + ("s" if "s" in permission.lower() else "")
                form = form.lower()
                given[device.lower()] = os.path.basename(file), mode, "raw" if form == "iso" else form
        for file, device, mode, form in asked:
            same = os.path.basename(file), mode, "raw" if form == "iso" else form
            if given.get(device) != same:
                hint = "let vm_disk name every disk of the file with its device, permission and format."
                raise self._refused(f"its disk {device} is {':'.join(same)}, and {DISK} = {shown(text)}", hint)

    def _has(self, attribute: str) -> bool:
        return self.ad.value(attribute) is not None

    def _refused(self, problem: str, hint: str) -> JobFault:
        return refused(self.name, problem, hint)

    def _declined(self, attribute: str) -> JobFault:
        """Make the fault for a request of the XML that the ad contradicts; it may make the same request or none."""
        problem = f"it asks for what {attribute} = {shown(self.ad.expression(attribute))} declines"
        return self._refused(problem, f"leave {attribute} out, or the device out of the file.")


LARGEST_BOOT_FILES = 256 << 20
"""The maximum number of bytes of both together; they lie in memory, in addition to the guest's own copy."""

KEPT_FREE = 128 << 20
"""The number of bytes that they leave free, or a quarter of a smaller file system."""

_CHUNK = 1 << 20


def boot_file_names(domain: etree.Element, name: str, directory: str, identity: Identity) -> dict[str, str]:
    """Return the names by element, each of a file that the job's user can read. Raises `JobFault`."""
    found = {}
    total = 0
    for tag in ("kernel", "initrd"):
        text = domain.findtext(f"os/{tag}")
        if text is None:
            continue
        base = os.path.basename(text)
        with Opened(_open(base, directory, identity, name)) as descriptor:
            total += os.fstat(descriptor).st_size
        found[tag] = base
    if total > LARGEST_BOOT_FILES:
        most = f"{LARGEST_BOOT_FILES >> 20} MiB can be booted from so"
        raise refused(name, f"its kernel and initrd have {total >> 20} MiB, and {most}")
    return found


def copy_boot_files(
    files: Mapping[str, str], directory: str, identity: Identity, make_room: Callable[[], str], name: str
) -> dict[str, str]:
    """Copy the files into a directory that `make_room` makes; return the paths by element. Raises `errors.Fault`."""
    room = make_room()
    left = LARGEST_BOOT_FILES
    paths = {}
    try:
        for tag, base in files.items():
            paths[tag] = os.path.join(room, tag)
            with os.fdopen(_open(base, directory, identity, name), "rb") as read, open(paths[tag], "xb") as written:
                # libvirt gives it to the hypervisor's user; other users can read it if they could read the original.
                mode = _look(base, name, os.fstat, read.fileno()).st_mode
                os.fchmod(written.fileno(), 0o400 | mode & 0o044)
                while chunk := _look(base, name, read.read, min(_CHUNK, left + 1)):
                    left -= len(chunk)
                    if left < 0:
                        raise refused(name, f"its kernel and initrd have more than {LARGEST_BOOT_FILES >> 20} MiB")
                    # This machine needs /run, and other jobs fill it at the same time.
                    status = os.statvfs(room)
                    if status.f_bavail * status.f_frsize < min(status.f_blocks * status.f_frsize // 4, KEPT_FREE):
                        raise OSError(errno.ENOSPC, f"{os.path.dirname(room)} is nearly full")
                    written.write(chunk)
    except BaseException as error:
        runtime_dir.remove(room)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
            raise refused(name, f"there is no room for its kernel and initrd: {error.strerror}") from error
        if isinstance(error, OSError):
            raise errors.MachineFault(f"The job's kernel cannot be copied to {room}: {error}.") from error
        raise
    return paths


def _open(base: str, directory: str, identity: Identity, name: str) -> int:
    return _look(base, name, partial(identity.open_scratch, directory, base), os.O_RDONLY)


def _look(base: str, name: str, look: Callable[[int], Found], argument: int) -> Found:
    try:
        return look(argument)
    except OSError as error:
        problem = f"/domain/os: {shown(base)} in the job's scratch directory cannot be opened or read: {error.strerror}"
        hint = "add the file to transfer_input_files; it is a regular file, no link."
        raise refused(name, problem, hint) from error


_KEPT_PARTS = ("topology", "smm", "tcg")
"""The parts of our CPU and features that stay: the topology of VMPARAM_vm_Topology, TCG's cache, and the smm that UEFI
has with secure boot only."""

_ORDER = (
    *("name", "uuid", "title", "description", "maxMemory", "memory", "currentMemory", "memoryBacking"),
    *("vcpu", "iothreads", "os", "features", "cpu", "clock", "on_poweroff", "on_reboot", "on_crash"),
    *("pm", "devices", "seclabel"),
)


def merge(ours: str, job: etree.Element, boot_files: Mapping[str, str]) -> str:
    """Merge the job's XML into our domain XML; `boot_files` are the paths of its kernel and initrd, by element."""
    domain = etree.fromstring(ours)
    uefi = domain.find("os[@firmware='efi']") is not None
    for element in job:
        if DOMAIN.children[element.tag].author is Author.EITHER:
            tag = element.tag
            kept = [part for part in domain.iterfind(f"{tag}/*") if part.tag in _KEPT_PARTS]
            taken = _replace(domain, element)
            if uefi:
                _drop(taken, "smm")
            taken.extend(part for part in kept if taken.find(part.tag) is None)
    _operating_system(domain, job, boot_files)
    devices = domain.find("devices")
    assert devices is not None
    if job.find("os/boot") is not None or job.find("devices/*/boot") is not None:
        for device in devices:
            _drop(device, "boot")
    for asked in job.iterfind("devices/disk"):
        name = value(asked, "target", "dev").lower()
        for disk in devices.iterfind("disk"):
            if value(disk, "target", "dev") == name:
                _take(disk, asked, DEVICES["disk"])
                if asked.get("device") in ("disk", "cdrom"):
                    disk.set("device", asked.get("device", ""))
    # Both are in the order of the job's XML; there is one serial port and one TPM.
    for tag in ("interface", "serial", "tpm"):
        for device, asked in zip(devices.iterfind(tag), job.iterfind(f"devices/{tag}"), strict=False):
            _take(device, asked, DEVICES[tag])
    added = [asked for asked in job.iterfind("devices/*") if DEVICES[asked.tag].author is not Author.DAEMON]
    for asked in added:
        if DEVICES[asked.tag].author is Author.EITHER:
            _drop(devices, asked.tag)
    if job.find("devices/controller[@type='usb'][@model='none']") is not None:
        _drop(devices, "input[@bus='usb']")
    for port in devices.findall("channel"):
        if value(port, "target", "name") == AGENT and job.find(f"devices/channel/target[@name='{AGENT}']") is not None:
            devices.remove(port)
    # Several of its controllers may have one identity: the companions of a USB 2 controller share its index.
    theirs = {_known_by(controller) for controller in job.iterfind("devices/controller")}
    for controller in devices.findall("controller"):
        if _known_by(controller) in theirs:
            devices.remove(controller)
    devices.extend(deepcopy(asked) for asked in added)
    domain[:] = sorted(domain, key=lambda child: _ORDER.index(child.tag) if child.tag in _ORDER else len(_ORDER))
    etree.indent(domain)
    return etree.tostring(domain, encoding="unicode")


def _known_by(controller: etree.Element) -> tuple[str | None, str]:
    return controller.get("type"), controller.get("index", "0")


def _replace(parent: etree.Element, element: etree.Element) -> etree.Element:
    _drop(parent, element.tag)
    made = deepcopy(element)
    parent.append(made)
    return made


def _drop(parent: etree.Element, tag: str) -> None:
    for old in parent.findall(tag):
        parent.remove(old)


def _operating_system(domain: etree.Element, job: etree.Element, boot_files: Mapping[str, str]) -> None:
    ours, theirs = domain.find("os"), job.find("os")
    if ours is None or theirs is None:
        return
    kind, wanted = ours.find("type"), theirs.find("type")
    if kind is not None and wanted is not None:
        for name, said in wanted.items():
            kind.set(name, said)
    for element in theirs:
        if element.tag in ("type", "firmware"):
            continue  # ours has the firmware that `requests` has read
        if element.tag != "boot" or element is theirs.find("boot"):
            _drop(ours, element.tag)
        made = deepcopy(element)
        if element.tag in ("kernel", "initrd"):
            made.text = boot_files[element.tag]
        ours.append(made)


def _take(ours: etree.Element, asked: etree.Element, row: Element) -> None:
    """Copy the guest's side of a job's device, or of a part of it, to ours; the host's side stays ours."""
    for name, said in asked.items():
        if Side.GUEST in row.attributes[name].side and Side.HOST not in row.attributes[name].side:
            ours.set(name, said)
    for part in asked:
        below, mine = row.children[part.tag], ours.find(part.tag)
        if below.side is Side.GUEST and all(each.side is not Side.HOST for each in below.attributes.values()):
            _replace(ours, part)
        elif mine is not None:
            _take(mine, part, below)
