"""The disks that a job asks for in vm_disk, checked, and the disks with the images found for them.

Requests and results are separate: `requests` opens no files, and `vmgahp.job.look` makes a `Disk` from each request.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from vmgahp import errors
from vmgahp.errors import JobFault
from vmgahp.host.job_user import Identity
from vmgahp.images import CATALOG
from vmgahp.images.catalog import Image
from vmgahp.images.formats import FORMATS, BackingFile
from vmgahp.job.ad import JobAd
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
    """The entry as the job writes it."""
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
    """The name of an image of this machine's catalog."""
    size: int = 0
    """The bytes of an empty disk that is made at the job's start (`vmgahp.job.data_disks`)."""
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
    """The bytes of an empty disk; 0 for any other."""
    files: tuple[str, ...] = ()
    """All files from which it is made, those of directories too."""
    backing: tuple[BackingFile, ...] = ()
    """The backing files, the nearest first."""
    grow: int = 0
    """The bytes to which its image is enlarged, as in `DiskRequest`."""
    mark: str = ""
    """The format whose magic number a raw image has; empty if it has none."""

    @property
    def doubt(self) -> str:
        """Return a warning for its owner about its format, as a sentence; empty if there is none."""
        if not self.mark:
            return ""
        name = os.path.basename(self.path)
        return (
            f"{name} is taken for a raw image, and begins like {self.mark}: a guest that sees the header of an image "
            f"does not boot. Write {name}:{self.device}:{'w' if self.writable else 'r'}:{self.mark} in vm_disk."
        )

    @property
    def is_made(self) -> bool:
        """Return True if this daemon makes the file in the scratch directory unless it exists."""
        return bool(self.size or self.files or (self.image and self.writable))


def requests(ad: JobAd, *, any_word: bool = False) -> tuple[DiskRequest, ...]:
    """Return all disks of vm_disk, in the job's order. Raises `JobFault`.

    With `any_word`, for LIBVIRT_XML_SCRIPT, any word is accepted as a device or a permission, and ``/dev/null`` stands
    for no disk.
    """
    text = ad.string(DISK)
    if text is None:
        raise JobFault(
            errors.NO_DISK_PARAM, f"{DISK} = {shown(ad.expression(DISK))}: the job gives its VM no disk.", DISK_HINT
        )
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


def free_device(disks: Iterable[DiskRequest]) -> str:
    """Return a free device for one more read-only drive; empty if none is left.

    It is of the same kind as the guest's first disk, for which the guest has a driver: Debian's kernel for clouds has
    one for virtio and none for SATA, others have none for IDE. With virtio the drive is a read-only disk, otherwise a
    CD-ROM.
    """
    taken = {disk.device: disk.kind for disk in disks}
    prefix = next((device[:-1] for device, kind in taken.items() if kind != "floppy"), "sd")
    prefix = prefix if device_of(prefix + "a") else "vd"
    names = (f"{start}{letter}" for start in (prefix, "sd") for letter in "abcdefghijklmnopqrstuvwxyz")
    return next((name for name in names if name not in taken and device_of(name)), "")


def made_drive(disks: Iterable[DiskRequest], file: str, attribute: str) -> DiskRequest:
    """Return a request for a drive, after the job's disks, that this `attribute` needs. Raises `JobFault`."""
    device = free_device(disks)
    if device:
        return DiskRequest("", file, device, "", False, "raw", "cdrom", made=True)
    raise JobFault(
        errors.INVALID_DISK_PARAM,
        f"VMPARAM_vm_Disk leaves no device for a drive, and {attribute} needs one.",
        "use fewer disks.",
    )


def _request(entry: DiskEntry, any_word: bool) -> DiskRequest:
    """Check one entry."""
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
            raise refused(
                f"{shown(name)} in the job's scratch directory cannot be opened: {error.strerror}",
                "transfer a regular file, no link, that its owner may read, and write if the permission is w.",
            ) from error
    if not file.startswith("/"):
        raise refused(
            f"{shown(file)} is not in the job's scratch directory and is not a full path",
            "add the file to transfer_input_files, or give its full path on a shared file system.",
        )
    reason = identity.check_access(file, writable)
    if reason is not None:
        raise refused(
            f"{shown(file)} cannot be opened on this machine ({reason})",
            "transfer the file, or make it accessible to the job's user on this machine.",
        )
    return file, False


def bad_disk(entry: str, problem: str, hint: str = DISK_HINT, code: str = errors.INVALID_DISK_PARAM) -> JobFault:
    """Make the fault of one entry of vm_disk; `problem` is a sentence without its end."""
    return JobFault(code, f"{DISK}, entry {shown(entry)}: {problem}.", hint)
