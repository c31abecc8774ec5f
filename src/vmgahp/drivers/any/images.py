"""The disk images of a job for the choice of a hypervisor: their formats, and their conversion.

Reading refuses only an unclear format; other mistakes in an entry are left to the driver that gets the job. A new
image, NAME.FORMAT in the scratch directory, is made as the job's user: the guest writes to it, it is sent back, and the
job's own image stays as it is.
"""

import errno
import os
from collections.abc import Mapping
from functools import partial
from time import monotonic
from typing import NamedTuple

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.drivers.base import Logger, progress
from vmgahp.errors import MachineFault
from vmgahp.host import job_user, scratch
from vmgahp.host.job_user import Identity
from vmgahp.images import qemu_img
from vmgahp.images.formats import HEADER, UnclearFormat, backing_chain, proven_format
from vmgahp.job.ad import JobAd
from vmgahp.job.disks import DISK, PERMISSIONS, DiskEntry, bad_disk, entries, find_file, kind_of

START_EXTRA = 60.0
"""Seconds for conversions beyond VM_GAHP_REQ_TIMEOUT: condor_starter waits 120 s longer for a START, and the start
itself keeps half of that."""

MEASURING = 120.0
"""Seconds for measuring the new image, which reads the tables of the old one."""

SPARE = 64 << 20
"""Bytes by which the new image may be larger than was measured, and that stay free: headers and tables."""

_MIB = 1 << 20


class AnyDisk(NamedTuple):
    """One entry of vm_disk."""

    entry: str
    """The text that the job writes."""
    path: str = ""
    """The image's full path; empty if it is not an image that could be opened, such as one of the catalog."""
    device: str = ""
    permission: str = ""
    format: str = ""
    """QEMU's name of the image's format; ``iso`` for a CD-ROM."""
    original: str = ""
    """The name of the job's image, even if another image has replaced it."""
    transferred: bool = False
    """True if it is in the scratch directory."""

    @property
    def name(self) -> str:
        """The name of the image."""
        return os.path.basename(self.path)

    @property
    def writable(self) -> bool:
        """True if the guest writes to it."""
        return "w" in self.permission and not self.is_cdrom

    @property
    def is_cdrom(self) -> bool:
        """True if the guest sees a CD-ROM."""
        return kind_of(self.device, self.name, self.format) == "cdrom"

    @property
    def shared(self) -> bool:
        """True if other VMs use it at the same time."""
        return self.permission.endswith("s")

    def written(self) -> str:
        """Return the entry of vm_disk, with its format in any case."""
        if not self.path:
            return self.entry
        place = self.name if self.transferred else self.path
        return ":".join((place, self.device, self.permission, self.format))


def read(ad: JobAd, earlier: Mapping[str, tuple[str, str]], identity: Identity) -> tuple[AnyDisk, ...]:
    """Read the job's disks. Raises `JobFault` for an unknown format.

    `earlier` has the images that an earlier start made, and the guest has written to since: the name of the job's image
    -> the name and format of the one that takes its place.
    """
    found = entries(ad.string(DISK) or "")
    return tuple(_disk(entry, ad.working_dir(), earlier, identity) for entry in found)


def _disk(asked: DiskEntry, working_dir: str, earlier: Mapping[str, tuple[str, str]], identity: Identity) -> AnyDisk:
    entry = asked.text
    if asked.is_of_catalog or not asked.is_well_formed or asked.fields[2].lower() not in PERMISSIONS:
        return AnyDisk(entry)
    file, device, permission, said = (*asked.fields, "")[:4]
    original = os.path.basename(file)
    name, said = earlier.get(original, (original, said))
    try:
        place = os.path.join(os.path.dirname(file), name)
        path, transferred = find_file(place, working_dir, identity, False, partial(bad_disk, entry))
        header = identity.read_scratch(working_dir, name, HEADER) if transferred else identity.read_named(path, HEADER)
    except (OSError, errors.Fault):
        return AnyDisk(entry)
    try:
        image_format = proven_format(name, said, header)
    except UnclearFormat as error:
        hint = "write the format at the end of the entry, such as disk.img:vda:w:raw."
        raise bad_disk(entry, str(error), hint) from error
    return AnyDisk(entry, path, device, permission.lower(), image_format, original, transferred)


def patience(settings: Settings) -> float:
    """Return the seconds that the conversions of one start may take together."""
    return settings.integer("VM_GAHP_REQ_TIMEOUT") + START_EXTRA


def convert(disk: AnyDisk, to_format: str, directory: str, identity: Identity, log: Logger, end: float) -> AnyDisk:
    """Make the new image in the scratch directory by `end` (monotonic), and return its disk.

    Raises `errors.Fault`: `errors.JobFault` for an unusable image, or without room for the new one, unless EXECUTE
    itself is full. A failure leaves nothing.
    """
    name = f"{disk.name}.{to_format}"
    temporary = f".{name}.new"
    size = 0
    try:
        backing_chain(disk.path, disk.format, identity)  # rejects layers that are not files of this machine
        size = qemu_img.measure(disk.path, disk.format, "qcow2", identity, seconds=MEASURING)
        free = job_user.free_bytes(directory, identity)
        if free < size + SPARE:
            raise _no_room(disk, size, f"{free // _MIB} MiB are free", directory, identity)
        log(f"converting {disk.name} ({disk.format}) to {name}: {-(-size // _MIB)} MiB")
        qemu_img.convert(
            disk.path,
            disk.format,
            os.path.join(directory, temporary),
            to_format,
            identity,
            seconds=max(1.0, end - monotonic()),
            largest=0 if to_format == "raw" else size + size // 5 + SPARE,  # raw has holes, and all its length
            progress=progress(f"converting {disk.name} to {name}", log),
        )
        identity.rename_scratch(directory, temporary, name, replace=False)
    except qemu_img.NotInstalled as error:
        problem = f"{error.program} is not installed, and {disk.name} has to be converted."
        raise MachineFault(problem, "install qemu-utils and util-linux.") from error
    except qemu_img.Trouble as error:
        if isinstance(error, qemu_img.Refused) and error.no_space:
            raise _no_room(disk, size, f"qemu-img says: {error}", directory, identity) from error
        command = f"qemu-img convert -f {disk.format} -O qcow2 OLD NEW"
        hint = f"see that vm_disk names its true format, or convert it before you submit: {command}."
        problem = f"it cannot be converted from {disk.format} ({error})"
        raise bad_disk(disk.entry, problem, hint, errors.BAD_IMAGE) from error
    except FileExistsError as error:
        problem = f"{name}, which it would be converted to, is there already"
        raise bad_disk(disk.entry, problem, "rename one of the two.") from error
    except OSError as error:
        raise job_user.unwritable(name, error, directory, identity) from error
    finally:
        scratch.forget(identity, directory, log, temporary)
    return disk._replace(path=os.path.join(directory, name), format=to_format, transferred=True)


def _no_room(disk: AnyDisk, size: int, seen: str, directory: str, identity: Identity) -> errors.Fault:
    """Return the fault for a new image without space: the machine's only if EXECUTE itself is full."""
    room = (size + SPARE) // _MIB
    problem = f"{disk.name} has to be converted, which takes {room} MiB in the scratch directory, and {seen}."
    hint = f"set request_disk to {room} MiB more than the job's files, or send an image that need not be converted."
    return job_user.blame(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), directory, identity, problem, hint)
