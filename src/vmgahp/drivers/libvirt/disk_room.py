"""The space that the disks of a VM may occupy on its machine, as its START knows it.

`vmgahp.drivers.libvirt.disk_limits` enforces it.
request_disk of a job limits its disks in the scratch directory. HTCondor fills RequestDisk in if the submit file does
not set it, with the size of the job's input: that is no limit.
"""

from __future__ import annotations

import os
from contextlib import suppress
from fcntl import F_GETFL, fcntl
from typing import TYPE_CHECKING

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.drivers.libvirt import disk_limits
from vmgahp.drivers.libvirt.disk_files import DiskFiles
from vmgahp.drivers.libvirt.run_ports import OUTPUTS_FILE
from vmgahp.errors import JobFault
from vmgahp.host import execute
from vmgahp.host.job_user import Identity
from vmgahp.images.still import OpenImage, head
from vmgahp.job.spec import JobSpec

if TYPE_CHECKING:
    from vmgahp.drivers.libvirt.machine import LibvirtMachine

LEAST_KEPT, LEAST_SHARE = 64 << 20, 64
"""The space kept free in EXECUTE without RESERVED_DISK: so many bytes, or one part in so many of the file system."""


def kept_free(settings: Settings, directory: str) -> int:
    """Return the bytes to leave free in EXECUTE's file system; 0 if the scratch directory has one of its own."""
    execute = settings.string("EXECUTE") or os.path.dirname(os.path.normpath(directory))
    try:
        room = os.statvfs(execute)
        if os.stat(directory).st_dev != os.stat(execute).st_dev:
            return 0
    except OSError:
        return 0  # the user of the directory reports the error
    reserved = settings.integer("RESERVED_DISK") << 20
    return reserved or min(LEAST_KEPT, room.f_blocks * room.f_frsize // LEAST_SHARE)


def require(spec: JobSpec, files: DiskFiles, settings: Settings) -> None:
    """Make sure that a VM's disks are not too large before it has written anything. Raises `JobFault`."""
    limit, found = limit_of(spec, settings), 0
    if limit:
        with suppress(OSError):  # an error of the job's own file system does not concern the machine
            found = disk_limits.occupied(image.descriptor for image in files.in_scratch().values())
    if found > disk_limits.allowed(limit):
        raise JobFault(
            errors.MISMATCHED,
            f"The VM's disks occupy {found >> 20} MiB already, and the job has asked for {limit >> 20} MiB "
            "(RequestDisk).",
            f"set request_disk = {(found >> 20) + 1}MB at least, with room for what the guest writes.",
        )


def look_after(machine: LibvirtMachine, spec: JobSpec, settings: Settings) -> None:
    """Have the disks of a VM watched once it runs, and log the size that they may reach."""
    images = machine.guest.files.in_scratch() if machine.guest.files is not None else {}
    limit, kept = limit_of(spec, settings), kept_free(settings, spec.working_dir)
    if not images or not (limit or kept):
        return
    machine.resources.while_running.append(lambda: disk_limits.begin(machine, limit, kept, images))
    try:
        largest = sum(map(_most, images.values())) if limit else 0
    except OSError:  # as above
        return
    saved = largest + (0 if machine.why_not_saved() else spec.memory_mib << 20)
    if largest > disk_limits.allowed(limit):
        machine.log(
            f"{machine.name}: its disks may come to {largest >> 20} MiB, and it ends where they occupy more than the "
            f"{limit >> 20} MiB that the job has asked for"
        )
    elif limit and saved > disk_limits.allowed(limit):
        machine.log(
            f"{machine.name}: its disks and its memory, where that is saved, may come to {saved >> 20} MiB, and the "
            f"job has asked for {limit >> 20} MiB (request_disk): HTCondor counts both"
        )


def most_outputs(spec: JobSpec, settings: Settings, identity: Identity) -> int:
    """Return the most bytes that a program's packed outputs may have: the job's limit or the free space.

    Raises `Fault`.
    """
    left = max(execute.free(spec.working_dir, identity) - kept_free(settings, spec.working_dir), 0)
    left += identity.occupied_scratch(spec.working_dir, OUTPUTS_FILE)  # of a checkpoint, or soon emptied
    return min(limit_of(spec, settings) or left, left)


def limit_of(spec: JobSpec, settings: Settings) -> int:
    """Return the bytes that the job's submit file asks for; 0 if it does not, or if they are no limit."""
    slot = spec.slot
    is_limit = slot.disk_is_asked and settings.boolean("VM_DISK_LIMIT")
    return max(slot.disk_kib or 0, 0) << 10 if is_limit else 0


def _most(image: OpenImage) -> int:
    """Return the bytes that an image can occupy, as far as its header tells."""
    now = disk_limits.occupied([image.descriptor])
    if fcntl(image.descriptor, F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        return now
    if image.format == "raw":
        return os.fstat(image.descriptor).st_size
    # The guest's size is at a fixed place there.
    return int.from_bytes(head(image)[24:32]) if image.format == "qcow2" else now
