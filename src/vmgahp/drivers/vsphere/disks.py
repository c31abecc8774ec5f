"""The job's ``.vmdk`` files, and the form that an ESXi host takes.

A datastore wants a disk as two files: a descriptor, and an extent with the disk's plain content (``-flat``). What the
desktop products write by default, one growing file or pieces of 2 GB, an ESXi host does not run. So only the plain
content travels. The descriptor on the datastore is ours; a disk that is not flat is converted by ``qemu-img``, there
and back, with the rights of the job's user.
"""

import errno
import os
import secrets

from vmgahp import errors
from vmgahp.host import execute
from vmgahp.host.job_user import Identity
from vmgahp.images import qemu_img, vmdk
from vmgahp.images.backing import backing_chain
from vmgahp.job.vmware import VMDK_FILES, VmwareSpec
from vmgahp.text import shown

CONVERT_DEADLINE = 3600.0
_FLAT_TYPES = ("monolithicflat", "vmfs", "vmfspreallocated", "vmfseagerzeroedthick", "vmfsthin")
_HINT = "convert the disk with qemu-img convert -O vmdk, and transfer all of its files."
_SEND = "add the file to transfer_input_files (or vmware_dir): a regular file that its owner may read."


def flat_extent(name: str, spec: VmwareSpec, identity: Identity) -> str:
    """Look at the disk `name`, and return the file with its plain content; empty where it has to be converted first.

    Raises `errors.JobFault` where no VM could use it.
    """
    descriptor = open_file(name, name, spec, identity)
    try:
        found = vmdk.read(descriptor)
    except vmdk.VmdkError as error:
        raise bad(name, str(error), _HINT, errors.BAD_IMAGE) from error
    finally:
        os.close(descriptor)
    if found.parent:
        raise bad(name, "it is the snapshot of another disk", "send a disk without snapshots.")
    if found.kind not in _FLAT_TYPES or len(found.extents) != 1:
        return ""
    (extent,) = found.extents
    if extent.access != "RW" or extent.kind == "SPARSE" or extent.offset:
        return ""
    descriptor = open_file(name, extent.file, spec, identity)
    size, wanted = os.fstat(descriptor).st_size, extent.sectors * vmdk.SECTOR
    os.close(descriptor)
    if size != wanted or not size:
        problem = f"it is to have {wanted} bytes, and {shown(extent.file)} has {size}"
        raise bad(name, problem, "send the files as VMware wrote them.", errors.BAD_IMAGE)
    return extent.file


def open_file(disk: str, name: str, spec: VmwareSpec, identity: Identity) -> int:
    """Open a file of a disk or drive, in the scratch directory or a shared one, as the job's user. Raises `JobFault`.

    `disk` is the name that the job's owner knows.
    """
    try:
        if spec.transfer:
            return identity.open_scratch(spec.working_dir, name, os.O_RDONLY)
        return identity.open_named(os.path.join(spec.dir, name), os.O_RDONLY)
    except OSError as error:
        where = "the job's scratch directory" if spec.transfer else shown(spec.dir)
        raise bad(disk, f"{shown(name)} cannot be opened in {where}: {error.strerror}", _SEND) from error


def unpack(name: str, spec: VmwareSpec, raw: str, identity: Identity, seconds: float) -> None:
    """Write the plain content of a disk that is not flat into the file `raw` of the scratch directory.

    Raises `errors.Fault`: `errors.JobFault` for a disk that qemu-img cannot read, or not within `seconds`.
    """
    path = os.path.join(spec.working_dir if spec.transfer else spec.dir, name)
    try:
        chain = backing_chain(path, "vmdk", identity, parts=True)
    except errors.JobFault as fault:
        raise fault.of(VMDK_FILES) from fault
    if chain:
        raise bad(name, "it is the snapshot of another disk", "send a disk without snapshots.")
    _convert(path, os.path.join(spec.working_dir, raw), ("vmdk", "raw"), name, identity, seconds)


def pack(name: str, scratch: str, raw: str, target: str, identity: Identity) -> None:
    """Make `target` in the scratch directory, one growing file, from the plain content in `raw`. Raises as `unpack`."""
    source, made = os.path.join(scratch, raw), os.path.join(scratch, target)
    _convert(source, made, ("raw", "vmdk"), name, identity, CONVERT_DEADLINE, ("subformat=monolithicSparse",))


def descriptor(extent: str, size: int, adapter: str, *, create_type: str = "vmfs") -> bytes:
    """Return the descriptor of a disk whose plain content of `size` bytes is the file `extent`.

    With ``vmfs`` as a datastore wants it, with ``monolithicFlat`` as the desktop products do.
    """
    heads = 16 if adapter == "ide" else 255
    cylinders = max(1, size // (heads * 63 * vmdk.SECTOR))
    kind, offset = ("VMFS", "") if create_type == "vmfs" else ("FLAT", " 0")
    return (
        "# Disk DescriptorFile\n"
        "version=1\n"
        f"CID={secrets.randbelow(0xFFFFFFFE):08x}\n"
        "parentCID=ffffffff\n"
        f'createType="{create_type}"\n'
        "\n# Extent description\n"
        f'RW {size // vmdk.SECTOR} {kind} "{extent}"{offset}\n'
        "\n# The Disk Data Base\n#DDB\n\n"
        f'ddb.adapterType = "{adapter}"\n'
        f'ddb.geometry.cylinders = "{cylinders}"\n'
        f'ddb.geometry.heads = "{heads}"\n'
        'ddb.geometry.sectors = "63"\n'
        'ddb.virtualHWVersion = "4"\n'
    ).encode()


def bad(name: str, problem: str, hint: str, word: str = errors.INVALID_DISK_PARAM) -> errors.JobFault:
    """Return the fault about the job's disk `name`."""
    return errors.JobFault(word, f"{VMDK_FILES}, disk {shown(name)}: {problem}.", hint)


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
