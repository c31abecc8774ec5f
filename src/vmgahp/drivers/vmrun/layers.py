"""The layers of a job's disk, from the disk to its last parent, and the names of their parents.

A snapshot's disk names its parent, and VMware may have written the parent's full path of the machine where the snapshot
was made. In another directory that name has to be corrected before anything runs.
"""

import os
from collections.abc import Iterable
from typing import NamedTuple

from vmgahp import errors
from vmgahp.errors import JobFault
from vmgahp.host.job_user import Identity
from vmgahp.images import vmdk
from vmgahp.images.vmdk import Vmdk, VmdkError
from vmgahp.text import has_control, shown

MOST_LAYERS = 64
"""The most layers of one disk; VMware itself allows some thirty snapshots in a row."""

_CONVERT = "convert the disk with VMware or qemu-img: qemu-img convert -O vmdk OLD NEW."
_SEND = "send all files of the disk, or make them readable on this machine."


class VmdkLayer(NamedTuple):
    """A disk or a parent of one, with the files that were checked."""

    path: str
    """The name in the scratch directory, or a full path elsewhere."""
    files: tuple[str, ...]
    """The description and its extents, each as `path`."""
    parent: str = ""
    """The name to give its parent before a start (`correct`); empty if the name is right."""


def base_name(path: str) -> str:
    """Return the last part of a path, which may be of Windows; empty if that cannot be a file's name."""
    name = path.replace("\\", "/").rpartition("/")[2]
    return "" if name in (".", "..") or has_control(name) else name


def look(identity: Identity, directory: str, name: str, attribute: str, *, shared: bool = False) -> list[VmdkLayer]:
    """Look at the disk `name` and its parents, the nearest first; nothing is changed.

    `name` is that of a file in the scratch directory or a full path, whose links are resolved. A parent that is in the
    scratch directory too is to be named without a path; one elsewhere has to be a file that the job's user can read.
    With `shared`, for a job whose disks are not transferred, a full path that leads to a file is right as it is, and a
    file of the same name in the scratch directory is another one. Raises `JobFault`, which names `attribute`.
    """
    layers: list[VmdkLayer] = []
    while name:
        try:
            if name.startswith("/"):
                layer, below = _elsewhere(identity, name)
            else:
                layer, below = _in_scratch(identity, directory, name, shared)
            if len(layers) >= MOST_LAYERS or any(known.path == layer.path for known in layers):
                raise VmdkError("its parents have no end")
        except (VmdkError, OSError) as error:
            raise _bad(attribute, name, error) from error
        except errors.MachineFault as fault:
            if not name.startswith("/"):
                raise
            problem = fault.problem.rstrip(".")  # a full path of the job's may hang
            raise _bad(attribute, name, OSError(0, problem)) from fault
        layers.append(layer)
        name = below
    return layers


def correct(identity: Identity, directory: str, layers: Iterable[VmdkLayer], attribute: str) -> None:
    """Write the right names of their parents into the layers in the scratch directory. Raises `JobFault`."""
    for layer in layers:
        if layer.parent:
            try:
                _write_parent(identity, directory, layer.path, layer.parent)
            except (VmdkError, OSError) as error:
                raise _bad(attribute, layer.path, error) from error


def _elsewhere(identity: Identity, name: str) -> tuple[VmdkLayer, str]:
    """Return the layer of a full path, and where its parent is. Raises `VmdkError`, OSError, `errors.MachineFault`."""
    descriptor = identity.open_named(name, os.O_RDONLY)
    try:
        path = os.readlink(f"/proc/self/fd/{descriptor}")  # VMware has trouble with symbolic links
        found = vmdk.read(descriptor)
    finally:
        os.close(descriptor)
    files = [os.path.join(os.path.dirname(path), extent.file) for extent in found.extents]
    for file in files:
        os.close(identity.open_named(file, os.O_RDONLY))
    parent = os.path.join(os.path.dirname(path), found.parent) if found.parent else ""
    return VmdkLayer(path, (path, *files)), parent


def _in_scratch(identity: Identity, directory: str, name: str, shared: bool) -> tuple[VmdkLayer, str]:
    """Return the layer of the scratch directory, and where its parent is. Raises the same as `_elsewhere`."""
    found = _open_and_read(identity, directory, name)
    files = (name, *(extent.file for extent in found.extents))
    for file in files[1:]:
        os.close(identity.open_scratch(directory, file, os.O_RDONLY))
    if not found.parent:
        return VmdkLayer(name, files), ""
    is_path, near = found.parent.startswith("/"), base_name(found.parent)
    away = shared and is_path and os.path.dirname(found.parent) != directory
    if away and identity.check_access(found.parent, write=False) is None:
        return VmdkLayer(name, files), found.parent
    if near and _is_there(identity, directory, near):
        vmdk.with_parent(found, near)  # raises if the description has no room for it
        return VmdkLayer(name, files, "" if found.parent == near else near), near
    if not is_path:
        raise OSError(0, f"its parent {shown(found.parent)} is not in the scratch directory")
    return VmdkLayer(name, files), found.parent


def _open_and_read(identity: Identity, directory: str, name: str) -> Vmdk:
    descriptor = identity.open_scratch(directory, name, os.O_RDONLY)
    try:
        return vmdk.read(descriptor)
    finally:
        os.close(descriptor)


def _is_there(identity: Identity, directory: str, name: str) -> bool:
    try:
        os.close(identity.open_scratch(directory, name, os.O_RDONLY))
    except (FileNotFoundError, IsADirectoryError):
        return False
    return True


def _write_parent(identity: Identity, directory: str, name: str, parent: str) -> None:
    """Replace the parent's path by `parent`: inside a disk in the room that its description has."""
    descriptor = identity.open_scratch(directory, name, os.O_RDWR)
    try:
        found = vmdk.read(descriptor)
        text = vmdk.with_parent(found, parent)
        if found.room:
            os.pwrite(descriptor, text.ljust(found.room, b"\0"), found.offset)
    finally:
        os.close(descriptor)
    if not found.room:
        identity.write_scratch(directory, name, text)


def _bad(attribute: str, name: str, error: VmdkError | OSError) -> JobFault:
    code, problem, hint = errors.BAD_IMAGE, str(error), _CONVERT
    if isinstance(error, OSError):
        code, problem, hint = errors.INVALID_DISK_PARAM, error.strerror or str(error), _SEND
    return JobFault(code, f"{attribute}: the disk {shown(name)} cannot be used: {problem}.", hint)
