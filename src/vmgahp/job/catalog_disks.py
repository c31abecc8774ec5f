"""What ``catalog:<name>`` in vm_disk stands for on this machine."""

import os
from collections.abc import Iterable, Sequence

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.errors import JobFault, MachineFault
from vmgahp.host.job_user import Identity
from vmgahp.images.catalog import SETTING, Catalog, read
from vmgahp.job.disks import DISK, Disk

MOST_NAMED = 20
"""Names of images that a sentence lists."""


def resolve(
    disks: Sequence[Disk], settings: Settings, identity: Identity, working_dir: str, memory_mib: int
) -> tuple[Disk, ...]:
    """The disks of a job, some of them of the catalog, with the images in place of their names.

    A disk that can be written is an overlay of the job's own, in its scratch directory; any other is the image itself.
    Raises `JobFault`, also where the image or the catalog must be repaired by the administrator: other jobs can run.
    """
    try:
        catalog = read(settings)
    except MachineFault as fault:
        name = next((disk.image.name for disk in disks if disk.image), "")
        raise _refused(name, "this machine's catalog of images cannot be used", fault.problem) from fault
    return tuple(
        disk if disk.image is None else _resolve(disk, disk.image.name, catalog, identity, working_dir, memory_mib)
        for disk in disks
    )


def _resolve(
    disk: Disk, name: str, catalog: Catalog | None, identity: Identity, working_dir: str, memory_mib: int
) -> Disk:
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
    kind = "cdrom" if entry.kind == "cdrom" else disk.kind
    if not disk.writable or kind == "cdrom":
        return disk._replace(path=entry.path, format=entry.format, writable=False, kind=kind, image=entry.image)
    file = f"{disk.device}-{name}.qcow2"
    return disk._replace(path=os.path.join(working_dir, file), format="qcow2", transferred=True, image=entry.image)


def unusable(name: str, fault: errors.Fault) -> JobFault:
    """The fault of a job whose image is there and cannot be used."""
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
