"""The disks that ``catalog:<name>`` in vm_disk means on this machine."""

import os
from collections.abc import Iterable

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.errors import JobFault, MachineFault
from vmgahp.host.job_user import Identity
from vmgahp.images.catalog import SETTING, Catalog, Image, read, trust
from vmgahp.images.formats import BackingFile, backing_chain
from vmgahp.job.disks import DISK, Disk, DiskRequest

MOST_NAMED = 20
"""The most names of images that a sentence lists."""


def resolve(
    request: DiskRequest, catalog: Catalog | None, identity: Identity, working_dir: str, memory_mib: int
) -> Disk:
    """Turn a request for an image of the catalog into a disk.

    A writable disk is an overlay in the job's scratch directory; any other is the image itself. Raises `JobFault`,
    even if the administrator must repair the image, because other jobs can run.
    """
    name = request.image
    if catalog is None:
        raise _refused(name, f"this machine has no catalog of images ({SETTING})")
    try:
        entry = catalog.find(name)
    except MachineFault as fault:
        raise unusable(name, fault) from fault
    if entry is None:
        raise _unknown(name, catalog.entries)
    if memory_mib < entry.min_memory:
        raise JobFault(
            errors.NO_MEMORY_PARAM,
            f"The VM has {memory_mib} MiB of memory, and the image {name} of {DISK} needs {entry.min_memory}.",
            f"set vm_memory = {entry.min_memory} or more.",
        )
    reason = identity.check_access(entry.path, False)
    if reason is not None:
        raise _refused(name, "its user may not read that image on this machine", f"{entry.path}: {reason}.")
    kind = "cdrom" if entry.kind == "cdrom" else request.kind
    overlay = request.writable and kind != "cdrom"
    path = os.path.join(working_dir, f"{request.device}-{name}.qcow2") if overlay else entry.path
    image_format = "qcow2" if overlay else entry.format
    partition = request.partition
    return Disk(
        path, request.device, partition, overlay, image_format, overlay, kind, image=entry.image, grow=request.grow
    )


def load(settings: Settings, requests: Iterable[DiskRequest]) -> Catalog | None:
    """Read the catalog of the machine; return None if no request needs it. Raises `JobFault`."""
    name = next((request.image for request in requests if request.image), "")
    if not name:
        return None
    try:
        return read(settings)
    except MachineFault as fault:
        raise _refused(name, "this machine's catalog of images cannot be used", fault.problem) from fault


def backing_of(image: Image, identity: Identity) -> tuple[BackingFile, ...]:
    """Return the backing files of an image of the catalog, which must be trustworthy too. Raises `JobFault`."""
    try:
        chain = backing_chain(image.path, image.format, identity)
        for file in chain:
            trust(image.name, file.path)
    except errors.Fault as fault:
        raise unusable(image.name, fault) from fault
    return tuple(file._replace(known_as=f"{image.known_as}+{number}") for number, file in enumerate(chain, start=1))


def unusable(name: str, fault: errors.Fault) -> JobFault:
    """Make the job's fault for an image that exists but is unusable."""
    return _refused(name, "that image cannot be used on this machine", fault.problem)


def _unknown(name: str, names: Iterable[str]) -> JobFault:
    import difflib

    listed = sorted(names)
    near = difflib.get_close_matches(name, listed, 1, 0.7)
    shown = ", ".join(listed[:MOST_NAMED]) + (", …" if len(listed) > MOST_NAMED else "")
    problem = f"this machine has no image of that name; it has {shown or 'none'}"
    return _refused(name, problem, f"Is it {near[0]} that is meant?" if near else "")


def _refused(name: str, problem: str, more: str = "") -> JobFault:
    return JobFault(
        errors.INVALID_DISK_PARAM,
        f"{DISK} names the image {name[:64]!a} (catalog:), and {problem}.{' ' if more else ''}{more}",
        f'write requirements = stringListMember("{name[:64]}", VM_Images) in the submit file, so that the job goes '
        "where that image is.",
    )
