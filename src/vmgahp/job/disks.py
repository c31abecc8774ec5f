"""The disks that a job asks for in vm_disk, checked, and the disks with the images found for them.

Requests and results are separate: `requests` opens no files, and `vmgahp.job.look` makes a `Disk` from each request.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from vmgahp import errors
from vmgahp.errors import JobFault
from vmgahp.host.job_user import Identity
from vmgahp.images import CATALOG, iso
from vmgahp.images.catalog import Image
from vmgahp.images.formats import FORMATS, BackingFile
from vmgahp.job.ad import JobAd
from vmgahp.job.attributes import GENERAL, OPTION_PREFIX, Options, refusal
from vmgahp.job.scratch_files import files_below
from vmgahp.text import has_control, shown

DISK = "VMPARAM_vm_Disk"
NO_FILE = "/dev/null"
"""The file in the vm_disk of a job whose VM a script describes without disks; condor_submit demands an entry."""
DISK_HINT = "write vm_disk = file:device:permission[:format], such as disk.img:vda:w:qcow2, several with commas."
CATALOG_HINT = "write vm_disk = catalog:name:device:permission, such as catalog:debian-12:vda:w."

_DEVICE = re.compile(r"((?:vd|sd|hd|xvd)[a-z]{1,2}|fd[ab])([0-9]{0,2})", re.ASCII)
_WORD = re.compile(r"[A-Za-z0-9_.+-]{1,64}", re.ASCII)
PERMISSIONS = ("r", "w", "rw", "rs", "ws", "rws")


class DiskEntry(NamedTuple):
    """One entry of vm_disk, parsed and not checked."""

    text: str
    fields: tuple[str, ...]
    """The fields: file, device, permission and perhaps format, or ``catalog``, name, device and permission."""

    @property
    def is_of_catalog(self) -> bool:
        """Return True for an image of the catalog; ``catalog:vda:w`` and ``catalog:vda:w:qcow2`` name a file."""
        fields = self.fields
        return fields[0].lower() == CATALOG and len(fields) > 3 and fields[2].lower() not in PERMISSIONS

    @property
    def is_well_formed(self) -> bool:
        """Return True if it has all required fields."""
        return len(self.fields) in ((4,) if self.is_of_catalog else (3, 4)) and all(self.fields)


class DiskRequest(NamedTuple):
    """A job's request for a disk: one entry of vm_disk, or a disk that is made for the job."""

    entry: str
    """The entry as the job writes it, for messages."""
    file: str
    """The image as the job names it, empty for one of the catalog; for a disk that is made, its name."""
    device: str
    """The whole device in the guest, such as ``vda``, without the digits of a partition."""
    partition: str
    """The digits of ``sda2``, usually none. Only Xen guests have disks that are a partition."""
    writable: bool
    format: str
    """The format's name in libvirt; ``raw`` if the job gave none: a format is never detected from an image."""
    kind: str
    """The kind: ``disk``, ``cdrom`` (the format iso, or a name that ends in ``.iso``) or ``floppy`` (fda, fdb)."""
    shared: bool = False
    """True if other VMs use the image at the same time, by an ``s`` in the permission."""
    image: str = ""
    size: int = 0
    """The bytes of an empty disk that is made at the job's start."""
    files: tuple[str, ...] = ()
    """The files and directories of the scratch directory from which it is made at the job's start."""
    grow: int = 0
    """The bytes to which its image is enlarged before the start, if it is smaller; 0 for no change."""
    made: bool = False
    """True if it is made at the job's start under that name, so that it need not exist."""


class Disk(NamedTuple):
    """A disk to attach, as found for a request."""

    path: str
    """The full path of the image; for a transferred one, in the scratch directory."""
    device: str
    """The device; this and the next fields are as in `DiskRequest`, except for the catalog's format of an image."""
    partition: str
    writable: bool
    format: str
    transferred: bool
    """True if the image is transferred with the job, or made for it: it is in the scratch directory."""
    kind: str
    shared: bool = False
    image: Image | None = None
    """The image of this machine's catalog that it is, or of which a writable one is an overlay."""
    size: int = 0
    files: tuple[str, ...] = ()
    """All files from which it is made, those of directories too."""
    backing: tuple[BackingFile, ...] = ()
    grow: int = 0
    mark: str = ""
    """The format whose magic number a raw image has; empty if it has none."""

    @property
    def doubt(self) -> str:
        """Return a warning for its owner about its format, as a sentence; empty if there is none."""
        if not self.mark:
            return ""
        name = os.path.basename(self.path)
        entry = f"{name}:{self.device}:{'w' if self.writable else 'r'}:{self.mark}"
        doubt = f"{name} is taken for a raw image, and begins like {self.mark}"
        return f"{doubt}: a guest that sees the header of an image does not boot. Write {entry} in vm_disk."

    @property
    def is_made(self) -> bool:
        """Return True if this daemon makes the file in the scratch directory unless it exists."""
        return bool(self.size or self.files or (self.image and self.writable))


def requests(ad: JobAd, *, any_word: bool = False) -> tuple[DiskRequest, ...]:
    """Return all disks of vm_disk; `any_word` accepts any device, permission and /dev/null. Raises `JobFault`."""
    text = ad.string(DISK)
    if text is None:
        problem = f"{DISK} = {shown(ad.expression(DISK))}: the job gives its VM no disk."
        raise JobFault(errors.NO_DISK_PARAM, problem, DISK_HINT)
    found: dict[str, DiskRequest] = {}
    listed = entries(text)
    for entry in listed:
        if any_word and entry.is_well_formed and os.path.normpath(entry.fields[0]) == NO_FILE:
            continue
        disk = _request(entry, any_word)
        # For a Xen guest sda1 and sda2 are two disks; for any other, one.
        device = disk.device + (disk.partition if ad.vm_type() == "xen" else "")
        if device in found:
            raise bad_disk(entry.text, f"{device} is used twice", "give every disk its own device.")
        found[device] = disk
    if not listed:
        raise JobFault(errors.NO_DISK_PARAM, f"{DISK} = {shown(text)} names no disk.", DISK_HINT)
    return tuple(found.values())


def entries(text: str) -> tuple[DiskEntry, ...]:
    """Split a vm_disk into entries: ``file:device:permission[:format]`` (``parseXenDiskParam``), or of the catalog."""
    found = []
    for entry in filter(None, (entry.strip() for entry in text.split(","))):
        made = DiskEntry(entry, tuple(field.strip() for field in entry.split(":")))
        if len(made.fields) == 4 and not made.fields[3] and not made.is_of_catalog:
            made = made._replace(fields=made.fields[:3])
        found.append(made)
    return tuple(found)


def device_of(text: str) -> tuple[str, str] | None:
    """Return a device's name without the digits of a partition, and those digits; None for an invalid device."""
    found = _DEVICE.fullmatch(text.lower())
    if found is None or (found[1].startswith("hd") and found[1] not in ("hda", "hdb", "hdc", "hdd")):
        return None
    return found[1], found[2]


def kind_of(device: str, file: str, image_format: str) -> str:
    """Return the kind of drive in the guest: ``disk``, ``cdrom`` or ``floppy``; the catalog has its own kinds."""
    if device.lower().startswith("fd"):
        return "floppy"
    return "cdrom" if image_format.lower() == "iso" or file.lower().endswith(".iso") else "disk"


def made_drive(disks: Iterable[DiskRequest], file: str, attribute: str) -> DiskRequest:
    """Return a request for a drive, after the job's disks, that this `attribute` needs. Raises `JobFault`.

    It is of the same kind as the first disk, for which the guest has a driver: Debian's kernel for clouds has one for
    virtio and none for SATA, others have none for IDE. With virtio it is a read-only disk, otherwise a CD-ROM.
    """
    taken = {disk.device: disk.kind for disk in disks}
    prefix = next((device[:-1] for device, kind in taken.items() if kind != "floppy"), "sd")
    prefix = prefix if device_of(prefix + "a") else "vd"
    names = (f"{start}{letter}" for start in (prefix, "sd") for letter in "abcdefghijklmnopqrstuvwxyz")
    if device := next((name for name in names if name not in taken and device_of(name)), ""):
        return DiskRequest("", file, device, "", False, "raw", "cdrom", made=True)
    problem = f"VMPARAM_vm_Disk leaves no device for a drive, and {attribute} needs one."
    raise JobFault(errors.INVALID_DISK_PARAM, problem, "use fewer disks.")


def _request(entry: DiskEntry, any_word: bool) -> DiskRequest:
    if has_control(entry.text):
        raise bad_disk(entry.text, "has a control character")
    if not entry.is_well_formed and entry.is_of_catalog:
        problem = "is not of the form catalog:name:device:permission; the catalog knows the format"
        raise bad_disk(entry.text, problem, CATALOG_HINT)
    if not entry.is_well_formed:
        raise bad_disk(entry.text, "is not of the form file:device:permission[:format]")
    if entry.is_of_catalog:
        return _of_catalog(entry)
    file, device, permission, image_format = (*entry.fields, "raw")[:4]
    name, partition, written, shared = _attachment(entry.text, device, permission, any_word)
    image_format = image_format.lower()
    if image_format not in FORMATS:
        hint = f"convert the image with qemu-img, or name one of: {', '.join(FORMATS)}."
        raise bad_disk(entry.text, f"{shown(image_format)} is not an image format that can be used here", hint)
    kind = kind_of(name, file, image_format)
    writable = written and kind != "cdrom"
    if shared and writable and FORMATS[image_format] != "raw":
        # Each writer keeps its own cluster tables, and QEMU refuses to open such an image twice for writing.
        hint = "convert the image to raw, or give every VM an image of its own."
        raise bad_disk(entry.text, f"an image of the format {image_format} cannot have several writers", hint)
    return DiskRequest(entry.text, file, name, partition, writable, FORMATS[image_format], kind, shared)


def _of_catalog(entry: DiskEntry) -> DiskRequest:
    """Check an entry for an image of the catalog, which defines its format (`vmgahp.images.catalog`)."""
    _, image, device, permission = entry.fields
    name, partition, writable, shared = _attachment(entry.text, device, permission)
    if shared:
        problem = "shares an image of the catalog, which any number of VMs use, each with an overlay of its own"
        raise bad_disk(entry.text, problem, "write the permission r or w.")
    return DiskRequest(entry.text, "", name, partition, writable, "", kind_of(name, "", ""), image=image)


def _attachment(entry: str, device: str, permission: str, any_word: bool = False) -> tuple[str, str, bool, bool]:
    """Return the device, the digits of its partition, and whether it is writable and shared."""
    found = device_of(device)
    if found is None and any_word and _WORD.fullmatch(device):
        found = device, ""
    if found is None:
        hint = "use a device such as vda, sda, xvda, hda to hdd, fda or fdb."
        raise bad_disk(entry, f"{shown(device)} is not a device that a VM can have", hint)
    permission = permission.lower()
    if permission not in PERMISSIONS and any_word and _WORD.fullmatch(permission):
        permission = "w"  # only the script knows its meaning: require write access for the job's user
    if permission not in PERMISSIONS:
        hint = "use r, w or rw, or rs, ws or rws for a disk that several VMs use at once."
        raise bad_disk(entry, f"{shown(permission)} is not a permission", hint)
    return *found, "w" in permission, permission.endswith("s")


def find_file(
    file: str, directory: str, identity: Identity, writable: bool, refused: Callable[[str, str], JobFault]
) -> tuple[str, bool]:
    """Find a file of the job; return its path and whether it came with the job. Its user can open it.

    As in the C++ daemon, a path with the same base name as a file of the scratch `directory` *is* that file, because
    condor_submit keeps the path of the submit machine. Raises the fault that `refused` makes of a problem and a hint.
    """
    name = os.path.basename(file)
    try:
        os.close(identity.open_scratch(directory, name, os.O_RDWR if writable else os.O_RDONLY))
        return os.path.join(directory, name), True
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EISDIR, errno.EINVAL):
            problem = f"{shown(name)} in the job's scratch directory cannot be opened: {error.strerror}"
            hint = "transfer a regular file, no link, that its owner may read, and write if the permission is w."
            raise refused(problem, hint) from error
    if not file.startswith("/"):
        problem = f"{shown(file)} is not in the job's scratch directory and is not a full path"
        raise refused(problem, "add the file to transfer_input_files, or give its full path on a shared file system.")
    reason = identity.check_access(file, writable)
    if reason is not None:
        problem = f"{shown(file)} cannot be opened on this machine ({reason})"
        raise refused(problem, "transfer the file, or make it accessible to the job's user on this machine.")
    return file, False


def bad_disk(entry: str, problem: str, hint: str = DISK_HINT, code: str = errors.INVALID_DISK_PARAM) -> JobFault:
    """Make the fault of one entry of vm_disk; `problem` is a sentence without its end."""
    return JobFault(code, f"{DISK}, entry {shown(entry)}: {problem}.", hint)


# Disks that are made for a job
#
# ``VMPARAM_vm_Data_Disk = "vdb:20G"`` is an empty disk that is transferred back with the guest's data;
# ``VMPARAM_vm_Data_Files = "in.csv, params"`` gives the guest those transferred files on a CD-ROM. Both are for
# prepared images of the machine, which are not made for the job.


LABEL = "JOBDATA"
FILES_IMAGE = "vm_data_files.iso"
"""The file of that CD-ROM in the scratch directory; it is made from the files there, and not transferred back."""

LARGEST_FILES = 4 << 30
"""The most bytes of the job's files together: they are copied while HTCondor waits for the start."""

_OURS = ["data_disk", "data_files", "disk_size", "exit_port", "meta_data", "network_config", "run", "user_data"]
"""The options that only the drivers with QEMU support, for which a disk or port is made."""

_UNITS = {"m": 20, "g": 30, "t": 40}
_SIZE = re.compile(r"([1-9][0-9]{0,6})([mgt])(?:i?b)?", re.ASCII | re.IGNORECASE)
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,199}", re.ASCII)
_FORMATS = {".qcow2": "qcow2", ".raw": "raw", ".img": "raw"}


def data_requests(options: Options, others: Sequence[DiskRequest]) -> tuple[DiskRequest, ...]:
    """Return requests for the disks that must be made for the job, besides the `others`. Raises `JobFault`."""
    found = list(others)
    for entry in options.string("Data_Disk").split(","):
        if entry.strip():
            disk = _data_disk(options, entry.strip())
            if any(disk.device == other.device for other in found):
                problem = f"{disk.device} is a disk of the job already"
                raise options.refused("Data_Disk", problem, "give every disk its own device.")
            found.append(disk)
    if names := [name.strip().rstrip("/") for name in options.string("Data_Files").split(",") if name.strip()]:
        drive = made_drive(found, FILES_IMAGE, options.attribute("Data_Files"))
        found.append(drive._replace(entry=options.shown("Data_Files"), files=tuple(names)))
    return tuple(found[len(others) :])


def _data_disk(options: Options, entry: str) -> DiskRequest:
    """Parse one ``device:size[:file]``."""
    hint = 'write +VMPARAM_vm_Data_Disk = "vdb:20G", a device and a size with M, G or T, and perhaps :name.qcow2.'
    fields = [field.strip() for field in entry.split(":")]
    if not 2 <= len(fields) <= 3 or not all(fields):
        raise options.refused("Data_Disk", f"{shown(entry)} is not of the form device:size[:file]", hint)
    device, size = device_of(fields[0]), _size(fields[1])
    if device is None or device[1] or device[0].startswith("fd"):
        raise options.refused("Data_Disk", f"{shown(fields[0])} is not a device for a disk", hint)
    if not size:
        raise options.refused("Data_Disk", f"{shown(fields[1])} is not a size", hint)
    name = fields[2] if len(fields) == 3 else f"{device[0]}-data.qcow2"
    image_format = _FORMATS.get(os.path.splitext(name)[1].lower(), "")
    if not _FILE.fullmatch(name) or not image_format:
        problem = f"{shown(name)} is not a name for a disk that is made"
        raise options.refused("Data_Disk", problem, f"write a plain name that ends in {', '.join(_FORMATS)}.")
    return DiskRequest(entry, name, device[0], "", True, image_format, "disk", size=size, made=True)


def _size(text: str) -> int:
    """Parse a size and return its bytes; 0 if it is invalid."""
    found = _SIZE.fullmatch(text)
    return int(found[1]) << _UNITS[found[2].lower()] if found else 0


def enlarged(options: Options, first: DiskRequest) -> DiskRequest:
    """Return the job's `first` disk with the requested size. Raises `JobFault`."""
    size = _size(options.string("Disk_Size"))
    if not size:
        raise options.refused("Disk_Size", "it is not a size", 'write +VMPARAM_vm_Disk_Size = "20G", with M, G or T.')
    if not first.writable or first.shared or first.kind != "disk":
        problem = f"{first.device} is no disk that the guest has to itself and can write to"
        raise options.refused("Disk_Size", problem, f"put the disk that is meant first in {DISK}.")
    if not first.image and first.format not in _FORMATS.values():
        problem = f"an image of the format {first.format} is not enlarged here"
        raise options.refused("Disk_Size", problem, "convert it to qcow2 or raw.")
    return first._replace(grow=size)


def drive_files(request: DiskRequest, identity: Identity, directory: str) -> tuple[str, ...]:
    """List the files of a drive: those that the job names, and all in directories that it names. Raises `JobFault`."""
    found = list(dict.fromkeys(file for name in request.files for file in _files(request, name, identity, directory)))
    try:
        iso.check_names(found)
    except iso.Unfit as unfit:
        raise refusal(request.entry, str(unfit), "give the files other names.") from unfit
    if len(found) > iso.MOST_FILES:
        problem = f"these are {len(found)} files, and the drive takes {iso.MOST_FILES}"
        raise refusal(request.entry, problem, "put them into an archive.")
    return tuple(found)


def _files(request: DiskRequest, name: str, identity: Identity, directory: str) -> list[str]:
    """Find a file of the scratch directory by name, or all files of a directory of that name."""
    try:
        try:
            os.close(identity.open_scratch(directory, name, os.O_RDONLY))
            return [name]
        except IsADirectoryError:
            found_files = files_below(directory, name, identity, iso.MOST_FILES + 1)
    except OSError as error:
        problem = f"{shown(name)} in the job's scratch directory cannot be opened ({error.strerror})"
        hint = "name files that transfer_input_files brings, without the directories that they come from."
        raise refusal(request.entry, problem, hint) from error
    if not found_files:
        problem = f"the directory {shown(name)} has no file in it"
        raise refusal(request.entry, problem, "remove it, or transfer its files.")
    return [f"{name}/{file}" for file in found_files]


def require_own_files(disks: Iterable[Disk]) -> None:
    """Make sure that no generated disk has the file of another disk. Raises `JobFault`."""
    taken: dict[str, Disk] = {}
    for disk in disks:
        other = taken.setdefault(disk.path, disk)
        if other is not disk and (disk.is_made or other.is_made):
            problem = f"{disk.device} and {other.device} are both {os.path.basename(disk.path)}"
            hint = f"take that file out of {DISK}, or give the data disk another name."
            problem += ", and one of them is made for the job under that name."
            raise JobFault(errors.INVALID_DISK_PARAM, problem, hint)


def refuse_made(ad: JobAd) -> None:
    """Refuse generated disks and ports, and images of the catalog, for VM types without them. Raises `JobFault`."""
    vm_type = ad.vm_type()
    hint = "remove it, or require a machine with kvm or qemu in VM_HYPERVISORS."
    for prefix in (OPTION_PREFIX, GENERAL, f"VM_{vm_type}_ATTR_"):
        for attribute in ad.names(prefix):
            value = ad.expression(attribute) or ""
            if attribute[len(prefix) :].lower() in _OURS and value.lower() not in ("undefined", "false"):
                problem = f"{attribute} = {shown(value)}, and neither disks nor ports are made for jobs of the type"
                raise JobFault(errors.MISMATCHED, f"{problem} {shown(vm_type)}.", hint)
    for entry in entries(ad.string(DISK) or ""):
        if entry.is_of_catalog:
            raise bad_disk(entry.text, f"jobs of the type {shown(vm_type)} have no images of a catalog", hint)
