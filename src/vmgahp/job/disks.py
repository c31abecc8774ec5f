"""The disks that a job asks for in vm_disk, checked, and what an image is found to be.

Asking is one thing and finding another: `requests` opens nothing, and `vmgahp.job.look` makes a `Disk` of each request.
"""

import errno
import os
import re
from collections.abc import Callable, Iterable, Sequence

from vmgahp import errors
from vmgahp.errors import JobFault
from vmgahp.host.job_user import Identity
from vmgahp.host.light import NamedTuple
from vmgahp.images import CATALOG
from vmgahp.images.backing import BackingFile
from vmgahp.images.formats import FORMATS
from vmgahp.job.ad import JobAd
from vmgahp.text import has_control, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vmgahp.images.catalog import Image

DISK = "VMPARAM_vm_Disk"
NO_FILE = "/dev/null"
"""What jobs name whose VM a script describes without a disk of theirs; condor_submit wants an entry."""
DISK_HINT = "write vm_disk = file:device:permission[:format], such as disk.img:vda:w:qcow2, several with commas."
CATALOG_HINT = "write vm_disk = catalog:name:device:permission, such as catalog:debian-12:vda:w."

_DEVICE = re.compile(r"((?:vd|sd|hd|xvd)[a-z]{1,2}|fd[ab])([0-9]{0,2})", re.ASCII)
_WORD = re.compile(r"[A-Za-z0-9_.+-]{1,64}", re.ASCII)
PERMISSIONS = ("r", "w", "rw", "rs", "ws", "rws")


class DiskEntry(NamedTuple):
    """One entry of vm_disk, taken apart and not judged."""

    text: str
    """As the job writes it."""
    fields: tuple[str, ...]
    """File, device, permission and perhaps format, or ``catalog``, name, device and permission, where well-formed."""

    @property
    def is_of_catalog(self) -> bool:
        """Whether it names an image of the catalog; ``catalog:vda:w`` and ``catalog:vda:w:qcow2`` name a file."""
        fields = self.fields
        return fields[0].lower() == CATALOG and len(fields) > 3 and fields[2].lower() not in PERMISSIONS

    @property
    def is_well_formed(self) -> bool:
        """Whether it has the fields that it must have."""
        return len(self.fields) in ((4,) if self.is_of_catalog else (3, 4)) and all(self.fields)


class DiskRequest(NamedTuple):
    """One entry of vm_disk, or a disk that is made for the job, as the job asks for it."""

    entry: str
    """The entry as the job writes it, for sentences to people."""
    file: str
    """The image as the job names it, empty for one of the catalog; of a disk that is made, the name that it gets."""
    device: str
    """The whole device as the guest is to see it, such as ``vda``; without the digits of a partition."""
    partition: str
    """The digits of ``sda2``, mostly none. Only Xen guests know disks that are a partition."""
    writable: bool
    format: str
    """As libvirt names it; ``raw`` where the job gave none: an image is never looked into to find out."""
    kind: str
    """``disk``, ``cdrom`` (the format iso, or a name that ends in ``.iso``) or ``floppy`` (fda, fdb)."""
    shared: bool = False
    """Whether other VMs use the image at the same time, which the job says by an ``s`` in the permission."""
    image: str = ""
    """The name of an image of this machine's catalog."""
    size: int = 0
    """Bytes of an empty disk that is made at the job's start (`vmgahp.job.data_disks`)."""
    files: tuple[str, ...] = ()
    """Files and directories of the scratch directory that it is made of at the job's start."""
    grow: int = 0
    """Bytes that its image is to have before the start, if they are more than it has; 0 for what it has."""
    made: bool = False
    """Whether it is made at the job's start under that name, so that it need not be there."""


class Disk(NamedTuple):
    """A disk as it is to be attached: what a request was found to be."""

    path: str
    """The full path of the image; of a transferred one, in the scratch directory."""
    device: str
    """This and what follows as in `DiskRequest`, but that an image of the catalog has the format that it has there."""
    partition: str
    writable: bool
    format: str
    transferred: bool
    """Whether the image is transferred with the job, or made for it: it is in the scratch directory."""
    kind: str
    shared: bool = False
    image: "Image | None" = None
    """The image of this machine that it is, or that it is an overlay of where it can be written."""
    size: int = 0
    """Bytes of an empty disk; 0 for any other."""
    files: tuple[str, ...] = ()
    """All files that it is made of, those of directories too."""
    backing: tuple[BackingFile, ...] = ()
    """Its backing files, the nearest first."""
    grow: int = 0
    """As in `DiskRequest`."""
    mark: str = ""
    """The format whose mark an image has of which the job says, or does not deny, that it is raw."""

    @property
    def doubt(self) -> str:
        """What its owner should hear of its format, as a sentence; empty where all seems well."""
        if not self.mark:
            return ""
        name = os.path.basename(self.path)
        return (
            f"{name} is taken for a raw image, and begins like {self.mark}: a guest that sees the header of an image "
            f"does not boot. Write {name}:{self.device}:{'w' if self.writable else 'r'}:{self.mark} in vm_disk."
        )

    @property
    def is_made(self) -> bool:
        """Whether it is a file that this daemon makes in the scratch directory, if it is not there yet."""
        return bool(self.size or self.files or (self.image and self.writable))


def requests(ad: JobAd, own: Sequence[DiskEntry] = (), *, any_word: bool = False) -> tuple[DiskRequest, ...]:
    """All disks of vm_disk, or those of the job's `own` XML, in the job's order. Raises `JobFault`.

    Where the VM is described by somebody else (LIBVIRT_XML_SCRIPT), `any_word` may be a device or a permission, and
    ``/dev/null`` stands for no disk.
    """
    text = ",".join(entry.text for entry in own) or ad.string(DISK)
    if text is None:
        raise JobFault(
            errors.NO_DISK_PARAM, f"{DISK} = {shown(ad.expression(DISK))}: the job gives its VM no disk.", DISK_HINT
        )
    found: dict[str, DiskRequest] = {}
    listed = own or entries(text)
    for entry in listed:
        if any_word and entry.is_well_formed and os.path.normpath(entry.fields[0]) == NO_FILE:
            continue
        disk = _request(entry, any_word)
        # To a Xen guest sda1 and sda2 are two disks; to any other, one.
        device = disk.device + (disk.partition if ad.vm_type() == "xen" else "")
        if device in found:
            raise bad_disk(entry.text, f"{device} is used twice", "give every disk its own device.")
        found[device] = disk
    if not listed:
        raise JobFault(errors.NO_DISK_PARAM, f"{DISK} = {shown(text)} names no disk.", DISK_HINT)
    return tuple(found.values())


def entries(text: str) -> tuple[DiskEntry, ...]:
    """The entries of a vm_disk: ``file:device:permission[:format]`` (``parseXenDiskParam``), or of the catalog."""
    found = []
    for entry in filter(None, (entry.strip() for entry in text.split(","))):
        made = DiskEntry(entry, tuple(field.strip() for field in entry.split(":")))
        if len(made.fields) == 4 and not made.fields[3] and not made.is_of_catalog:
            made = made._replace(fields=made.fields[:3])
        found.append(made)
    return tuple(found)


def device_of(text: str) -> tuple[str, str] | None:
    """A device's name without the digits of a partition, and those digits; None for what no VM can have."""
    found = _DEVICE.fullmatch(text.lower())
    if found is None or (found[1].startswith("hd") and found[1] not in ("hda", "hdb", "hdc", "hdd")):
        return None
    return found[1], found[2]


def kind_of(device: str, file: str, image_format: str) -> str:
    """What the guest sees: ``disk``, ``cdrom`` or ``floppy``; the catalog knows itself what its images are."""
    if device.lower().startswith("fd"):
        return "floppy"
    return "cdrom" if image_format.lower() == "iso" or file.lower().endswith(".iso") else "disk"


def free_device(disks: Iterable[DiskRequest]) -> str:
    """A device for one more read-only drive; empty where there is none left.

    It is of the kind that the guest's first disk is, for which it has a driver: Debian's kernel for clouds knows
    virtio and has no driver for SATA, others know no IDE. With virtio the drive is a read-only disk, elsewhere a
    CD-ROM.
    """
    taken = {disk.device: disk.kind for disk in disks}
    prefix = next((device[:-1] for device, kind in taken.items() if kind != "floppy"), "sd")
    prefix = prefix if device_of(prefix + "a") else "vd"
    names = (f"{start}{letter}" for start in (prefix, "sd") for letter in "abcdefghijklmnopqrstuvwxyz")
    return next((name for name in names if name not in taken and device_of(name)), "")


def made_drive(disks: Iterable[DiskRequest], file: str, attribute: str) -> DiskRequest:
    """A drive that is made for the job, which wants it by this `attribute`, behind its disks. Raises `JobFault`."""
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
        # Each writer has its own idea of where a cluster is; QEMU opens no such image twice for writing.
        hint = "convert the image to raw, or give every VM an image of its own."
        raise bad_disk(entry.text, f"an image of the format {image_format} cannot have several writers", hint)
    return DiskRequest(entry.text, file, name, partition, writable, FORMATS[image_format], kind, shared)


def _of_catalog(entry: DiskEntry) -> DiskRequest:
    """What the image is, the catalog knows (`vmgahp.images.catalog`)."""
    _, image, device, permission = entry.fields
    name, partition, writable, shared = _attachment(entry.text, device, permission)
    if shared:
        problem = "shares an image of the catalog, which any number of VMs use, each with an overlay of its own"
        raise bad_disk(entry.text, problem, "write the permission r or w.")
    return DiskRequest(entry.text, "", name, partition, writable, "", kind_of(name, "", ""), image=image)


def _attachment(entry: str, device: str, permission: str, any_word: bool = False) -> tuple[str, str, bool, bool]:
    """The device, the digits of its partition, whether it can be written and whether others use it too."""
    found = device_of(device)
    if found is None and any_word and _WORD.fullmatch(device):
        found = device, ""
    if found is None:
        hint = "use a device such as vda, sda, xvda, hda to hdd, fda or fdb."
        raise bad_disk(entry, f"{shown(device)} is not a device that a VM can have", hint)
    permission = permission.lower()
    if permission not in PERMISSIONS and any_word and _WORD.fullmatch(permission):
        permission = "w"  # what it means only the script knows: the job's user must be able to write
    if permission not in PERMISSIONS:
        hint = "use r, w or rw, or rs, ws or rws for a disk that several VMs use at once."
        raise bad_disk(entry, f"{shown(permission)} is not a permission", hint)
    return *found, "w" in permission, permission.endswith("s")


def find_file(
    file: str, directory: str, identity: Identity, writable: bool, refused: Callable[[str, str], JobFault]
) -> tuple[str, bool]:
    """Where a file of the job's is, and whether it came with the job; its user can open it.

    As with the C++ daemon, what has the same base name as a file of the scratch `directory` *is* that file, for
    condor_submit leaves the path of the submit machine. Raises what `refused` makes of a problem and a hint.
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
    """The fault of one entry of vm_disk; `problem` is a sentence without its end."""
    return JobFault(code, f"{DISK}, entry {shown(entry)}: {problem}.", hint)
