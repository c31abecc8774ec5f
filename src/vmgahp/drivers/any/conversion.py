"""A job's image as a new one of another format, in the scratch directory, made as the job's user.

The job's own image stays as it is; the new one, NAME.FORMAT beside it, is what the guest writes to and what is sent
back. Both take disk space while the job runs, so that is checked first.
"""

import errno
import os
from collections.abc import Callable
from time import monotonic

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.drivers.any.disks import AnyDisk
from vmgahp.drivers.base import Logger
from vmgahp.errors import JobFault, MachineFault
from vmgahp.host import execute, scratch
from vmgahp.host.job_user import Identity
from vmgahp.images import qemu_img
from vmgahp.images.backing import backing_chain
from vmgahp.job.ad import JobAd
from vmgahp.job.disks import bad_disk
from vmgahp.text import shown

STARTING = 60.0
"""Seconds that are kept, of those that the client waits for a START, for the start itself."""
START_EXTRA = 120.0
"""Seconds that condor_starter waits for a START beyond VM_GAHP_REQ_TIMEOUT."""
LEAST = 30.0

MEASURING = 120.0
"""Seconds for finding out how large the new image gets, which reads the tables of the old one."""

SPARE = 64 << 20
"""Bytes by which the new image may be larger than was measured, and that stay free: headers, and other formats' own
ideas of a table."""

STEP = 10.0
"""Per cent between two lines of the log."""

_OPTIONS = {"vmdk": ("subformat=monolithicSparse",)}
_MIB = 1 << 20


def patience(settings: Settings) -> float:
    """Seconds that the conversions of one start may take together."""
    return max(LEAST, settings.integer("VM_GAHP_REQ_TIMEOUT") + START_EXTRA - STARTING)


def convert(disk: AnyDisk, to_format: str, ad: JobAd, identity: Identity, log: Logger, end: float) -> AnyDisk:
    """Make the new image and return the disk that it is; to be done when the monotonic clock shows `end`.

    Raises `JobFault` for an image that is no good, or that does not fit into what the job has asked for, and
    `MachineFault` where the machine has less room than it has promised. Nothing is left of what failed.
    """
    directory = ad.working_dir()
    name = f"{disk.name}.{to_format}"
    temporary = f".{name}.new"
    _require_new(directory, name, disk, identity)
    size = 0
    try:
        backing_chain(disk.path, disk.format, identity)  # refuses what is no file of this machine
        size = qemu_img.measure(disk.path, disk.format, "qcow2", identity, seconds=MEASURING)
        _require_free_space(ad, disk, size, identity)
        log(f"converting {disk.name} ({disk.format}) to {name}: {-(-size // _MIB)} MiB")
        qemu_img.convert(
            disk.path,
            disk.format,
            os.path.join(directory, temporary),
            to_format,
            identity,
            seconds=max(1.0, end - monotonic()),
            options=_OPTIONS.get(to_format, ()),
            largest=0 if to_format == "raw" else size + size // 5 + SPARE,  # raw has holes, and all its length
            progress=_teller(f"converting {disk.name} to {name}", log),
        )
        identity.rename_scratch(directory, temporary, name, replace=False)
    except qemu_img.Trouble as error:
        scratch.forget(identity, directory, log, temporary)
        raise _judge(error, ad, disk, size, identity) from error
    except OSError as error:
        scratch.forget(identity, directory, log, temporary)
        raise execute.unwritable(name, error, directory, identity) from error
    except BaseException:
        scratch.forget(identity, directory, log, temporary)
        raise
    return disk._replace(path=os.path.join(directory, name), format=to_format, transferred=True)


def _teller(what: str, log: Logger) -> Callable[[float], None]:
    """Writes a line at every `STEP` percent."""
    told = 0.0

    def tell(per_cent: float) -> None:
        nonlocal told
        if per_cent >= told + STEP:
            told = per_cent // STEP * STEP
            log(f"{what}: {told:.0f} %")

    return tell


def _require_new(directory: str, name: str, disk: AnyDisk, identity: Identity) -> None:
    try:
        os.close(identity.open_scratch(directory, name, os.O_RDONLY))
    except FileNotFoundError:
        return
    except OSError:
        pass  # there is something else of that name
    raise bad_disk(disk.entry, f"{name}, which it would be converted to, is there already", "rename one of the two.")


def _require_free_space(ad: JobAd, disk: AnyDisk, size: int, identity: Identity) -> None:
    free = execute.free(ad.working_dir(), identity)
    if free < size + SPARE:
        raise _no_room(ad, disk, size, f"{free // _MIB} MiB are free", identity)


def _no_room(ad: JobAd, disk: AnyDisk, size: int, seen: str, identity: Identity) -> errors.Fault:
    """Whose fault it is that the new image has no room: of the machine only where it has promised as much and is full.

    The job can ask for more than it has got, and fill what it has got.
    """
    request = ad.integer("RequestDisk") or 0
    needed = size + SPARE + (_size_of(disk.path) if disk.transferred else 0)
    room = (size + SPARE) // _MIB
    problem = f"{disk.name} has to be converted, which takes {room} MiB in the scratch directory, and {seen}"
    if request * 1024 >= needed:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        problem = f"{problem}, though the job has asked for {request // 1024} MiB (RequestDisk)."
        return execute.blame(full, ad.working_dir(), identity, problem)
    return JobFault(
        errors.MISMATCHED,
        f"{problem}; RequestDisk = {shown(ad.expression('RequestDisk'))} does not ask for it.",
        f"set request_disk = {-(-needed // _MIB)}MB at least, or send an image that need not be converted.",
    )


def _size_of(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def _judge(error: qemu_img.Trouble, ad: JobAd, disk: AnyDisk, size: int, identity: Identity) -> errors.Fault:
    """Whose fault a failure of qemu-img is."""
    if isinstance(error, qemu_img.NotInstalled):
        return MachineFault(
            f"{error.program} is not installed, and {disk.name} has to be converted.",
            "install qemu-utils and util-linux.",
        )
    by_hand = f"convert it before you submit: qemu-img convert -f {disk.format} -O qcow2 OLD NEW."
    if isinstance(error, qemu_img.TooSlow):
        return bad_disk(
            disk.entry, f"it could not be converted within {error.seconds:.0f} s", by_hand, errors.BAD_IMAGE
        )
    if isinstance(error, qemu_img.TooLarge):
        return bad_disk(disk.entry, "it has more in it than its tables say", by_hand, errors.BAD_IMAGE)
    if isinstance(error, qemu_img.Refused) and error.no_space:
        return _no_room(ad, disk, size, f"qemu-img says: {error}", identity)
    return bad_disk(
        disk.entry,
        f"it cannot be converted from {disk.format} ({error})",
        "see what qemu-img check says about it, and that vm_disk names its true format.",
        errors.BAD_IMAGE,
    )
