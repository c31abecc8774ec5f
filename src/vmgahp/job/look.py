"""A check of the files that a job names, as the job's user, which finds them and their backing files.

Otherwise a disk that the hypervisor cannot open would be blamed on the machine. Arguments and results are plain data.
"""

import os
from functools import partial
from math import inf
from time import monotonic

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.errors import JobFault
from vmgahp.host.job_user import Identity
from vmgahp.images.formats import HEADER, BackingFile, backing_chain, looks_like
from vmgahp.job import catalog_disks, cloud_init, data_disks, saving, slot, xen
from vmgahp.job.catalog_disks import backing_of
from vmgahp.job.disks import DISK, Disk, DiskRequest, bad_disk, find_file
from vmgahp.job.options import DISK_SIZE
from vmgahp.job.spec import JobSpec

LOOK = 90.0
"""The timeout, in seconds, for examining all images of a job: a START that takes too long is the machine's fault."""


def look(spec: JobSpec, settings: Settings, identity: Identity) -> JobSpec:
    """Find all files of the job, and the backing files of its disks. Raises `errors.Fault`."""
    spec = find(spec, settings, identity)
    end = monotonic() + LOOK
    directory = spec.working_dir
    disks = (
        disk._replace(backing=backing_files(disk, directory, identity, end), mark=_mark(disk, directory, identity))
        for disk in spec.disks
    )
    spec = spec._replace(disks=tuple(disks))
    if spec.checkpoint and saving.by_qemu(spec.vm_type, settings):
        saving.require_disks(spec.disks)
    return spec


def find(spec: JobSpec, settings: Settings, identity: Identity) -> JobSpec:
    """Find the slot and all files of the job, without examining images. Raises `errors.Fault`."""
    spec = slot.settle(spec, settings, identity)
    if spec.xen is not None:
        spec = spec._replace(xen=xen.look(spec.xen, spec.working_dir, identity))
    disks = _disks(spec, settings, identity)
    if spec.devices.user_data is not None:
        cloud_init.look(spec.devices.user_data, spec.working_dir, identity)
    for disk in disks:
        if spec.checkpoint and disk.shared and disk.writable and not disk.transferred:
            raise JobFault(
                errors.INVALID_DISK_PARAM,
                f"{DISK} shares {disk.path} with other writers, and JobVMCheckpoint = true contradicts it: they keep "
                "writing after the checkpoint.",
                "set vm_checkpoint = false, or give the disk the permission r, rs or w.",
            )
    return spec._replace(disks=disks)


def is_there(directory: str, disk: Disk, identity: Identity) -> bool:
    """Return True if a disk that would be made exists already and its user can open it. Raises `JobFault`."""
    name = os.path.basename(disk.path)
    try:
        os.close(identity.open_scratch(directory, name, os.O_RDWR))
    except FileNotFoundError:
        return False
    except OSError as error:
        raise JobFault(
            errors.INVALID_DISK_PARAM,
            f"{DISK}: {name} in the job's scratch directory cannot be opened ({error.strerror}).",
            "leave it out, or transfer a regular file, no link.",
        ) from error
    return True


def _disks(spec: JobSpec, settings: Settings, identity: Identity) -> tuple[Disk, ...]:
    """Find the disks of the requests."""
    if not any(request.image or request.made for request in spec.requests):
        return tuple(_image(request, spec.working_dir, identity) for request in spec.requests)

    catalog = catalog_disks.load(settings, spec.requests)
    found = []
    for request in spec.requests:
        if request.image:
            disk = catalog_disks.resolve(request, catalog, identity, spec.working_dir, spec.memory_mib)
        elif request.made:
            files = data_disks.files(request, identity, spec.working_dir)
            disk = _disk(request, os.path.join(spec.working_dir, request.file), True)._replace(files=files)
        else:
            disk = _image(request, spec.working_dir, identity)
        found.append(disk)
    data_disks.require_own_files(found)
    return tuple(found)


def _image(request: DiskRequest, working_dir: str, identity: Identity) -> Disk:
    """Find the disk with an image that the job names."""
    refused = partial(bad_disk, request.entry)
    path, transferred = find_file(request.file, working_dir, identity, request.writable, refused)
    if request.grow and not transferred:
        raise refused(
            f"{path} is not the job's own copy, and so VMPARAM_vm_{DISK_SIZE} cannot enlarge it",
            "transfer the image, or leave out the size.",
        )
    return _disk(request, path, transferred)


def _disk(request: DiskRequest, path: str, transferred: bool) -> Disk:
    return Disk(
        path,
        request.device,
        request.partition,
        request.writable,
        request.format,
        transferred,
        request.kind,
        request.shared,
        size=request.size,
        grow=request.grow,
    )


def backing_files(disk: Disk, working_dir: str, identity: Identity, end: float = inf) -> tuple[BackingFile, ...]:
    """Return the backing files of a disk, even before it is made. Raises `errors.Fault`."""
    if disk.image is not None:
        found = backing_of(disk.image, identity)
        top = BackingFile(disk.image.path, disk.image.format, disk.image.known_as)
        return (top, *found) if disk.writable else found
    if disk.files or (disk.size and not is_there(working_dir, disk, identity)):
        return ()
    try:
        return backing_chain(disk.path, disk.format, identity, end=end)
    except JobFault:
        if disk.transferred:
            _require_readable(working_dir, os.path.basename(disk.path), identity)
        raise


def _mark(disk: Disk, working_dir: str, identity: Identity) -> str:
    """Return the format whose magic number a raw disk has; the disk stays raw, for its guest may have written that."""
    if disk.format != "raw" or disk.kind != "disk" or disk.image or disk.is_made:
        return ""
    try:
        if disk.transferred:
            return looks_like(identity.read_scratch(working_dir, os.path.basename(disk.path), HEADER))
        return looks_like(identity.read_named(disk.path, HEADER))
    except OSError:
        return ""  # the error is reported when it is opened for use


def _require_readable(working_dir: str, name: str, identity: Identity) -> None:
    """Rule out the machine's failure after qemu-img has refused an image. Raises `errors.MachineFault`."""
    try:
        identity.read_scratch(working_dir, name, HEADER)
    except OSError:
        pass  # the error of the file is reported already
