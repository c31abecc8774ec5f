"""The job's ``.vmdk`` files, and what an ESXi host takes.

A datastore wants a disk as two files: a descriptor, and an extent with the disk's plain content (``-flat``).
What the desktop products write by default, one growing file or pieces of 2 GB, an ESXi host does not run. So
only the plain content travels. The descriptor on the datastore is ours; a disk that is not flat is
converted by ``qemu-img``, there and back, with the rights of the job's user.
"""

import errno
import os
import re
import secrets
from typing import NamedTuple

from vmgahp import errors
from vmgahp.host import execute
from vmgahp.host.job_user import Identity
from vmgahp.images import qemu_img
from vmgahp.images.backing import backing_chain
from vmgahp.images.formats import names_files
from vmgahp.job.vmware import VMDK_FILES, VmwareSpec
from vmgahp.text import shown

SECTOR = 512
LARGEST_DESCRIPTOR = 64 << 10
CONVERT_DEADLINE = 3600.0
_HEAD = b"# Disk DescriptorFile"
_SETTING = re.compile(r'^[ \t]*([A-Za-z][A-Za-z0-9_.]*)[ \t]*=[ \t]*"?([^"\r\n]*)"?[ \t]*\r?$', re.MULTILINE)
_EXTENT = re.compile(
    r"^[ \t]*(RW|RDONLY|NOACCESS)[ \t]+([0-9]{1,15})[ \t]+([A-Z]+)"
    r'(?:[ \t]+"([^"\r\n]*)")?(?:[ \t]+([0-9]+))?[ \t]*\r?$',
    re.MULTILINE,
)
_FLAT_TYPES = ("monolithicflat", "vmfs", "vmfspreallocated", "vmfseagerzeroedthick", "vmfsthin")
_HINT = "convert the disk with qemu-img convert -O vmdk, and transfer all of its files."


class JobDisk(NamedTuple):
    """One disk of the job, looked at."""

    name: str
    """The name of its ``.vmdk`` in the job's ``.vmx``."""
    directory: str
    """Where its files are: the scratch directory, or one of a shared file system."""
    transferred: bool
    extent: str
    """The file with the plain content; empty where the disk has to be converted first."""

    def open(self, identity: Identity) -> int:
        """The open file with the plain content, as the job's user. Raises `errors.JobFault`."""
        return _open(self, self.extent, identity)


def look(name: str, spec: VmwareSpec, identity: Identity) -> JobDisk:
    """What kind of disk `name` is. Raises `errors.JobFault` where no VM could use it."""
    if "/" in name or "\\" in name or name in ("", ".", ".."):
        raise bad(name, "a disk is named by its name alone, without a directory", "rename it in the .vmx.")
    disk = JobDisk(name, spec.working_dir if spec.transfer else spec.dir, spec.transfer, "")
    descriptor = _open(disk, name, identity)
    with os.fdopen(descriptor, "rb") as file:
        head = file.read(LARGEST_DESCRIPTOR)
        size = os.fstat(descriptor).st_size
    if head.startswith(_HEAD) and size <= LARGEST_DESCRIPTOR:
        return _from_descriptor(disk, head.decode("utf-8", "replace"), identity)
    if not head.startswith(b"KDMV") or names_files("vmdk", head):
        raise bad(name, "it is not a .vmdk that can be used here", _HINT, errors.BAD_IMAGE)
    return disk


def _from_descriptor(disk: JobDisk, text: str, identity: Identity) -> JobDisk:
    settings = {name.lower(): value for name, value in _SETTING.findall(text)}
    extents = _EXTENT.findall(text)
    if settings.get("parentcid", "ffffffff").lower() != "ffffffff" or "parentfilenamehint" in settings:
        raise bad(disk.name, "it is the snapshot of another disk", "send a disk without snapshots.")
    if sum(line.split()[:1] == ["RW"] for line in text.split("\n")) != sum(access == "RW" for access, *_ in extents):
        raise bad(disk.name, "it has lines that cannot be understood", _HINT, errors.BAD_IMAGE)
    for _, _, _, file, _ in extents:
        if set("/\\:") & set(file) or file in (".", ".."):
            raise bad(disk.name, f"it keeps its data in {shown(file)}", _HINT)
    if not extents:
        raise bad(disk.name, "it is a descriptor that names no data", _HINT, errors.BAD_IMAGE)
    access, sectors, kind, file, offset = extents[0]
    flat = settings.get("createtype", "").lower() in _FLAT_TYPES and kind in ("FLAT", "VMFS")
    if not flat or len(extents) != 1 or access != "RW" or int(offset or 0) != 0:
        return disk
    disk = disk._replace(extent=file)
    opened = disk.open(identity)
    size = os.fstat(opened).st_size
    os.close(opened)
    if size != int(sectors) * SECTOR or not size:
        raise bad(
            disk.name,
            f"it is to have {int(sectors) * SECTOR} bytes, and {shown(file)} has {size}",
            "send the files as VMware wrote them.",
            errors.BAD_IMAGE,
        )
    return disk


def unpack(disk: JobDisk, scratch: str, raw: str, identity: Identity, seconds: float) -> None:
    """Write the plain content of a disk that is not flat into the file `raw` of the scratch directory.

    Raises `errors.JobFault` for a disk that qemu-img cannot read, or not within `seconds`.
    """
    path = os.path.join(disk.directory, disk.name)
    try:
        chain = backing_chain(path, "vmdk", identity, parts=True)
    except errors.JobFault as fault:
        raise fault.of(VMDK_FILES) from fault
    if chain:
        raise bad(disk.name, "it is the snapshot of another disk", "send a disk without snapshots.")
    _convert(path, os.path.join(scratch, raw), ("vmdk", "raw"), disk.name, identity, seconds)


def pack(disk: JobDisk, scratch: str, raw: str, target: str, identity: Identity) -> None:
    """The reverse: make `target` in the scratch directory, one growing file, from the plain content in `raw`."""
    source, made = os.path.join(scratch, raw), os.path.join(scratch, target)
    options = ("subformat=monolithicSparse",)
    _convert(source, made, ("raw", "vmdk"), disk.name, identity, CONVERT_DEADLINE, options)


def descriptor(extent: str, size: int, adapter: str, *, create_type: str = "vmfs") -> bytes:
    """The descriptor of a disk whose plain content of `size` bytes is the file `extent`.

    With ``vmfs`` as a datastore wants it, with ``monolithicFlat`` as the desktop products do.
    """
    heads = 16 if adapter == "ide" else 255
    cylinders = max(1, size // (heads * 63 * SECTOR))
    kind = "VMFS" if create_type == "vmfs" else "FLAT"
    offset = "" if create_type == "vmfs" else " 0"
    return (
        "# Disk DescriptorFile\n"
        "version=1\n"
        f"CID={secrets.randbelow(0xFFFFFFFE):08x}\n"
        "parentCID=ffffffff\n"
        f'createType="{create_type}"\n'
        "\n# Extent description\n"
        f'RW {size // SECTOR} {kind} "{extent}"{offset}\n'
        "\n# The Disk Data Base\n#DDB\n\n"
        f'ddb.adapterType = "{adapter}"\n'
        f'ddb.geometry.cylinders = "{cylinders}"\n'
        f'ddb.geometry.heads = "{heads}"\n'
        'ddb.geometry.sectors = "63"\n'
        'ddb.virtualHWVersion = "4"\n'
    ).encode()


def bad(name: str, problem: str, hint: str, word: str = errors.INVALID_DISK_PARAM) -> errors.JobFault:
    """The job's disk `name` is no good."""
    return errors.JobFault(word, f"{VMDK_FILES}, disk {shown(name)}: {problem}.", hint)


def _open(disk: JobDisk, name: str, identity: Identity) -> int:
    try:
        if disk.transferred:
            return identity.open_scratch(disk.directory, name, os.O_RDONLY)
        return identity.open_named(os.path.join(disk.directory, name), os.O_RDONLY)
    except OSError as error:
        where = "the job's scratch directory" if disk.transferred else shown(disk.directory)
        raise bad(
            disk.name,
            f"{shown(name)} cannot be opened in {where}: {error.strerror}",
            "add the file to transfer_input_files (or vmware_dir): a regular file that its owner may read.",
        ) from error


def _convert(
    source: str,
    target: str,
    formats: tuple[str, str],
    name: str,
    identity: Identity,
    seconds: float,
    options: tuple[str, ...] = (),
) -> None:
    try:
        qemu_img.convert(source, formats[0], target, formats[1], identity, seconds=max(1.0, seconds), options=options)
    except qemu_img.NotInstalled as error:
        raise errors.MachineFault(
            f"{error.program} is not installed, and {name} has to be converted.", "install qemu-utils and util-linux."
        ) from error
    except qemu_img.TooSlow as error:
        raise bad(name, f"it could not be converted within {seconds:.0f} s", "send it as a flat disk.") from error
    except qemu_img.Trouble as error:
        if isinstance(error, qemu_img.Refused) and error.no_space:
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            problem = f"{name} cannot be converted: {error}."
            raise execute.blame(full, os.path.dirname(target), identity, problem) from error
        raise bad(name, f"qemu-img cannot convert it ({error})", _HINT, errors.BAD_IMAGE) from error
