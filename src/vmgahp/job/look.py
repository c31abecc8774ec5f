"""A check of the files that a job names, as the job's user, which finds them and their backing files.

Otherwise a disk that the hypervisor cannot open would be blamed on the machine. Arguments and results are plain data.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from math import inf
from time import monotonic

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.errors import JobFault, MachineFault
from vmgahp.host.job_user import Identity
from vmgahp.images.catalog import SETTING, Catalog, Image, read, trust
from vmgahp.images.formats import HEADER, BackingFile, backing_chain, looks_like
from vmgahp.job import cloud_init, vm_spec, xen
from vmgahp.job.disks import DISK, Disk, DiskRequest, bad_disk, drive_files, find_file, require_own_files
from vmgahp.job.spec import JobSpec, is_saved_by_qemu, require_saveable_disks
from vmgahp.text import nearest

LOOK = 90.0
"""The timeout, in seconds, for examining all images of a job: a START that takes too long is the machine's fault."""


def look(spec: JobSpec, settings: Settings, identity: Identity) -> JobSpec:
    """Find all files of the job, and the backing files of its disks. Raises `errors.Fault`."""
    spec = find(spec, settings, identity)
    end = monotonic() + LOOK
    directory = spec.vm.working_dir
    disks = (
        disk._replace(backing=backing_files(disk, directory, identity, end), mark=_mark(disk, directory, identity))
        for disk in spec.disks
    )
    spec = spec._replace(disks=tuple(disks))
    if spec.vm.checkpoint and is_saved_by_qemu(spec.vm.vm_type, settings):
        require_saveable_disks(spec.disks)
    return spec


def find(spec: JobSpec, settings: Settings, identity: Identity) -> JobSpec:
    """Find the slot and all files of the job, without examining images. Raises `errors.Fault`."""
    spec = spec._replace(vm=vm_spec.settle_slot(spec.vm, settings, identity))
    if spec.xen is not None:
        spec = spec._replace(xen=xen.look(spec.xen, spec.vm.working_dir, identity))
    disks = _disks(spec, settings, identity)
    if spec.devices.user_data is not None:
        cloud_init.look(spec.devices.user_data, spec.vm.working_dir, identity)
    for disk in disks:
        if spec.vm.checkpoint and disk.shared and disk.writable and not disk.transferred:
            why = "JobVMCheckpoint = true contradicts it: they keep writing after the checkpoint."
            hint = "set vm_checkpoint = false, or give the disk the permission r, rs or w."
            problem = f"{DISK} shares {disk.path} with other writers, and {why}"
            raise JobFault(errors.INVALID_DISK_PARAM, problem, hint)
    return spec._replace(disks=disks)


def is_there(directory: str, disk: Disk, identity: Identity) -> bool:
    """Return True if a disk that would be made exists already and its user can open it. Raises `JobFault`."""
    name = os.path.basename(disk.path)
    try:
        os.close(identity.open_scratch(directory, name, os.O_RDWR))
    except FileNotFoundError:
        return False
    except OSError as error:
        problem = f"{DISK}: {name} in the job's scratch directory cannot be opened ({error.strerror})."
        hint = "leave it out, or transfer a regular file, no link."
        raise JobFault(errors.INVALID_DISK_PARAM, problem, hint) from error
    return True


def _disks(spec: JobSpec, settings: Settings, identity: Identity) -> tuple[Disk, ...]:
    catalog: Catalog | None = None
    found = []
    if name := next((request.image for request in spec.requests if request.image), ""):
        try:
            catalog = read(settings)
        except MachineFault as fault:
            raise _refused_image(name, "this machine's catalog of images cannot be used", fault.problem) from fault
    for request in spec.requests:
        if request.image:
            disk = catalog_disk(request, catalog, identity, spec.vm.working_dir, spec.vm.memory_mib)
        elif request.made:
            files = drive_files(request, identity, spec.vm.working_dir)
            disk = _disk(request, os.path.join(spec.vm.working_dir, request.file), True)._replace(files=files)
        else:
            disk = _image(request, spec.vm.working_dir, identity)
        found.append(disk)
    require_own_files(found)
    return tuple(found)


def _image(request: DiskRequest, working_dir: str, identity: Identity) -> Disk:
    refused = partial(bad_disk, request.entry)
    path, transferred = find_file(request.file, working_dir, identity, request.writable, refused)
    if request.grow and not transferred:
        problem = f"{path} is not the job's own copy, and so VMPARAM_vm_Disk_Size cannot enlarge it"
        raise refused(problem, "transfer the image, or leave out the size.")
    return _disk(request, path, transferred)


def _disk(request: DiskRequest, path: str, transferred: bool) -> Disk:
    asked = request.device, request.partition, request.writable, request.format
    return Disk(path, *asked, transferred, request.kind, request.shared, size=request.size, grow=request.grow)


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
            with suppress(OSError):  # raises MachineFault if the machine, and not the image, is at fault
                identity.read_scratch(working_dir, os.path.basename(disk.path), HEADER)
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


MOST_NAMED = 20
"""The most names of images that a sentence lists."""


def catalog_disk(
    request: DiskRequest, catalog: Catalog | None, identity: Identity, working_dir: str, memory_mib: int
) -> Disk:
    """Turn a request for an image of the catalog into a disk.

    A writable disk is an overlay in the job's scratch directory; any other is the image itself. Raises `JobFault`,
    even if the administrator must repair the image, because other jobs can run.
    """
    name = request.image
    if catalog is None:
        raise _refused_image(name, f"this machine has no catalog of images ({SETTING})")
    try:
        entry = catalog.find(name)
    except MachineFault as fault:
        raise unusable_image(name, fault) from fault
    if entry is None:
        raise _unknown(name, catalog.entries)
    if memory_mib < entry.min_memory:
        problem = f"The VM has {memory_mib} MiB of memory, and the image {name} of {DISK} needs {entry.min_memory}."
        raise JobFault(errors.NO_MEMORY_PARAM, problem, f"set vm_memory = {entry.min_memory} or more.")
    reason = identity.check_access(entry.path, False)
    if reason is not None:
        raise _refused_image(name, "its user may not read that image on this machine", f"{entry.path}: {reason}.")
    kind = "cdrom" if entry.kind == "cdrom" else request.kind
    overlay = request.writable and kind != "cdrom"
    path = os.path.join(working_dir, f"{request.device}-{name}.qcow2") if overlay else entry.path
    image_format = "qcow2" if overlay else entry.format
    found = _disk(request, path, overlay)
    return found._replace(writable=overlay, format=image_format, kind=kind, image=entry.image)


def backing_of(image: Image, identity: Identity) -> tuple[BackingFile, ...]:
    """Return the backing files of an image of the catalog, which must be trustworthy too. Raises `JobFault`."""
    try:
        chain = backing_chain(image.path, image.format, identity)
        for file in chain:
            trust(image.name, file.path)
    except errors.Fault as fault:
        raise unusable_image(image.name, fault) from fault
    return tuple(file._replace(known_as=f"{image.known_as}+{number}") for number, file in enumerate(chain, start=1))


def unusable_image(name: str, fault: errors.Fault) -> JobFault:
    """Make the job's fault for an image that exists but is unusable."""
    return _refused_image(name, "that image cannot be used on this machine", fault.problem)


def _unknown(name: str, names: Iterable[str]) -> JobFault:
    listed = sorted(names)
    near = nearest(name, listed, 0.7)
    shown = ", ".join(listed[:MOST_NAMED]) + (", …" if len(listed) > MOST_NAMED else "")
    problem = f"this machine has no image of that name; it has {shown or 'none'}"
    return _refused_image(name, problem, f"Is it {near} that is meant?" if near else "")


def _refused_image(name: str, problem: str, more: str = "") -> JobFault:
    problem = f"{DISK} names the image {name[:64]!a} (catalog:), and {problem}.{' ' if more else ''}{more}"
    wanted = f'requirements = stringListMember("{name[:64]}", VM_Images)'
    hint = f"write {wanted} in the submit file, so that the job goes where that image is."
    return JobFault(errors.INVALID_DISK_PARAM, problem, hint)
