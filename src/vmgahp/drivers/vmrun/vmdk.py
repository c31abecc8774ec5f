"""VMware's disks: what a ``.vmdk`` says of itself, and the path of its parent written anew.

A disk is described by a few lines of text, which either are a file of their own, beside the extents that
have the data (a split or a flat disk), or lie inside the one file of a monolithic sparse disk, in a place
of fixed size behind its header (VMware's "Virtual Disk Format 5.0", which is published). They name further
files, and they come with the job: so only files that stand beside the description are followed, and never
a device of this machine.

A snapshot's disk names its parent, and VMware may have written the parent's full path of the machine where
the snapshot was made. In another directory that name has to be corrected before anything runs.
"""

import os
import re
from collections.abc import Iterable
from typing import NamedTuple

from vmgahp import errors
from vmgahp.errors import JobFault
from vmgahp.host.job_user import Identity
from vmgahp.text import has_control, shown

LARGEST = 1 << 20
"""Bytes of a description; one with a thousand extents has some 50,000."""

MOST_LAYERS = 64
"""Of a disk and its parents; VMware itself allows some thirty snapshots in a row."""

_SECTOR = 512
_MAGIC = b"KDMV"
_CREATE_TYPES = (
    "monolithicsparse",
    "monolithicflat",
    "twogbmaxextentsparse",
    "twogbmaxextentflat",
    "streamoptimized",
    "vmfs",
)
"""The kinds of disk that are nothing but files; the others are a disk or partition of the host, or ESX's own."""

_LINES = re.MULTILINE | re.IGNORECASE
_CREATE_TYPE = re.compile(rb'^[ \t]*createType[ \t]*=[ \t]*"([^"\r\n]*)"[ \t]*\r?$', _LINES)
_PARENT = re.compile(rb'^([ \t]*parentFileNameHint[ \t]*=[ \t]*")([^"\r\n]*)("[ \t]*\r?)$', _LINES)
_EXTENT = re.compile(
    rb'^[ \t]*(?:RW|RDONLY|NOACCESS)[ \t]+[0-9]+[ \t]+([A-Z]+)(?:[ \t]+"([^"\r\n]*)"(?:[ \t]+[0-9]+)?)?[ \t]*\r?$',
    _LINES,
)
_BEGINNINGS = tuple(
    (re.compile(beginning, _LINES), whole)
    for beginning, whole in (
        (rb"^[ \t]*createType[ \t]*=", _CREATE_TYPE),
        (rb"^[ \t]*parentFileNameHint[ \t]*=", _PARENT),
        (rb"^[ \t]*(?:RW|RDONLY|NOACCESS)[ \t]", _EXTENT),
    )
)
"""How the lines begin that matter, and their one form that is understood here. VMware may understand more of
them, so whatever begins like one and is not of that form is refused."""

_LONE_RETURN = re.compile(rb"\r(?!\n)")

_HINT = "convert the disk with VMware or qemu-img: qemu-img convert -O vmdk OLD NEW."


class VmdkError(ValueError):
    """This is not a disk that can be used here; the text says why, without a full stop."""


class Vmdk(NamedTuple):
    """The description of one disk."""

    text: bytes
    offset: int
    """Where in the file it is; 0 for a file that has nothing else."""
    room: int
    """Bytes that it may fill, when it is inside a disk; 0 for a file that has nothing else."""
    parent: str
    """The parent's name as it is written; empty for a disk without a parent."""
    extents: tuple[str, ...]
    """The names of the files with the data; none for a disk that has its description inside."""


class VmdkLayer(NamedTuple):
    """A disk or a parent of one, with all that was looked at."""

    path: str
    """The name in the scratch directory, or a full path elsewhere."""
    files: tuple[str, ...]
    """The description and its extents, each as `path`."""
    parent: str = ""
    """What it has to call its parent before anything runs (`correct`); empty where that is right."""


def read(descriptor: int) -> Vmdk:
    """What the open file says of itself. Raises `VmdkError` and OSError."""
    head = os.pread(descriptor, _SECTOR, 0)
    offset = room = 0
    if head.startswith(_MAGIC):
        # Magic, version, flags, capacity, grain size; then where the description is, in sectors.
        if len(head) < 44:
            raise VmdkError("its header is cut off")
        offset = int.from_bytes(head[28:36], "little") * _SECTOR
        room = int.from_bytes(head[36:44], "little") * _SECTOR
        if not offset or not 0 < room <= LARGEST or offset > LARGEST:
            raise VmdkError("it is one extent of a disk and not the disk")
        text = os.pread(descriptor, room, offset)
    else:
        text = os.pread(descriptor, LARGEST + 1, 0)
        if len(text) > LARGEST:
            raise VmdkError("it is one extent of a disk and not the disk, or no disk at all")
    # Behind the end there may be the last bytes of a text that was longer, but no other description.
    text, _, rest = text.partition(b"\0")
    if any(beginning.search(rest) for beginning, _ in _BEGINNINGS):
        raise VmdkError("its description continues after its end")
    return _parse(text, offset, room)


def _parse(text: bytes, offset: int, room: int) -> Vmdk:
    for beginning, whole in _BEGINNINGS:
        if len(beginning.findall(text)) != len(whole.findall(text)) or _LONE_RETURN.search(text):
            raise VmdkError("its description has lines that cannot be understood")
    kinds = _CREATE_TYPE.findall(text)
    if len(kinds) != 1:
        raise VmdkError("it has no description of a VMware disk")
    kind = kinds[0].decode("utf-8", "replace")
    if kind.lower() not in _CREATE_TYPES:
        raise VmdkError(f"it is of the type {shown(kind)}, which is not made of files alone")
    parents = _PARENT.findall(text)
    if len(parents) > 1:
        raise VmdkError("it names more than one parent")
    extents = []
    for extent_kind, name in _EXTENT.findall(text):
        if extent_kind.upper() not in (b"SPARSE", b"FLAT", b"ZERO", b"VMFS"):
            raise VmdkError(f"it has an extent of the type {shown(extent_kind.decode())}")
        if extent_kind.upper() != b"ZERO":
            extents.append(_name(name))
    # Inside a sparse disk the only extent is the disk itself, under the name that it was made with.
    if room and len(extents) > 1:
        raise VmdkError("it has its description inside, and further extents")
    parent = parents[0][1].decode("utf-8", "surrogateescape") if parents else ""
    if "|" in parent:  # VMware's sign for an escaped character
        raise VmdkError(f"the name of its parent, {shown(parent)}, has a character that cannot be used")
    return Vmdk(text, offset, room, parent, () if room else tuple(extents))


def _name(name: bytes) -> str:
    text = name.decode("utf-8", "surrogateescape")
    if not text or text in (".", "..") or "/" in text or "|" in text or has_control(text):
        raise VmdkError(f"its extent {shown(text)} is not a file beside it")
    return text


def in_scratch(
    identity: Identity, directory: str, name: str, attribute: str, *, shared: bool = False
) -> list[VmdkLayer]:
    """The disk `name` of the scratch directory and its parents, nearest first; nothing is changed.

    A parent that is in the scratch directory too is to be named without a path; one elsewhere has
    to be a file that the job's user can read. With `shared`, for a job whose disks are not transferred, a
    full path that leads to a file is right as it is, and a file of the same name in the scratch directory
    is another one. Raises `JobFault`, which names `attribute`.
    """
    layers: list[VmdkLayer] = []
    while name:
        if len(layers) >= MOST_LAYERS or any(layer.path == name for layer in layers):
            raise _bad(attribute, name, "its parents have no end")
        try:
            vmdk = _open_and_read(identity, directory, name)
            for extent in vmdk.extents:
                os.close(identity.open_scratch(directory, extent, os.O_RDONLY))
            files = name, *vmdk.extents
            if not vmdk.parent:
                layers.append(VmdkLayer(name, files))
                break
            parent = _last_part(vmdk.parent)
            away = shared and vmdk.parent.startswith("/") and os.path.dirname(vmdk.parent) != directory
            away = away and identity.check_access(vmdk.parent, write=False) is None
            if not away and _is_in_scratch(identity, directory, parent):
                _with_parent(vmdk, parent)
                layers.append(VmdkLayer(name, files, "" if vmdk.parent == parent else parent))
                name = parent
                continue
            layers.append(VmdkLayer(name, files))
        except VmdkError as error:
            raise _bad(attribute, name, str(error), errors.BAD_IMAGE) from error
        except OSError as error:
            raise _bad(attribute, name, f"{error.strerror}, for the job's user") from error
        if not vmdk.parent.startswith("/"):
            raise _bad(attribute, name, f"its parent {shown(vmdk.parent)} is not in the scratch directory")
        layers += elsewhere(identity, vmdk.parent, attribute, MOST_LAYERS - len(layers))
        break
    return layers


def correct(identity: Identity, directory: str, layers: Iterable[VmdkLayer], attribute: str) -> None:
    """Have the layers in the scratch directory name their parents as they are to. Raises `JobFault`."""
    for layer in layers:
        if layer.parent:
            try:
                _write_parent(identity, directory, layer.path, layer.parent)
            except VmdkError as error:
                raise _bad(attribute, layer.path, str(error), errors.BAD_IMAGE) from error
            except OSError as error:
                raise _bad(attribute, layer.path, f"{error.strerror}, for the job's user") from error


def elsewhere(identity: Identity, path: str, attribute: str, most: int = MOST_LAYERS) -> list[VmdkLayer]:
    """The disk of a full path, its links resolved, and its parents, nearest first; nothing is changed.

    Raises `JobFault`, which names `attribute`.
    """
    layers: list[VmdkLayer] = []
    while path:
        try:
            descriptor = identity.open_named(path, os.O_RDONLY)
            try:
                # VMware has trouble with a path that has a symbolic link in it.
                path = os.readlink(f"/proc/self/fd/{descriptor}")
                vmdk = read(descriptor)
            finally:
                os.close(descriptor)
            if len(layers) >= most or any(layer.path == path for layer in layers):
                raise VmdkError("its parents have no end")
            directory = os.path.dirname(path)
            extents = [os.path.join(directory, extent) for extent in vmdk.extents]
            for extent in extents:
                os.close(identity.open_named(extent, os.O_RDONLY))
        except VmdkError as error:
            raise _bad(attribute, path, str(error), errors.BAD_IMAGE) from error
        except OSError as error:
            raise _bad(attribute, path, f"{error.strerror}, for the job's user") from error
        except errors.MachineFault as fault:  # a path of the job's may hang
            raise _bad(attribute, path, fault.problem.rstrip(".")) from fault
        layers.append(VmdkLayer(path, (path, *extents)))
        path = os.path.join(directory, vmdk.parent) if vmdk.parent else ""
    return layers


def _open_and_read(identity: Identity, directory: str, name: str) -> Vmdk:
    descriptor = identity.open_scratch(directory, name, os.O_RDONLY)
    try:
        return read(descriptor)
    finally:
        os.close(descriptor)


def _last_part(path: str) -> str:
    """The name without its directory, which may be of another system."""
    name = path.replace("\\", "/").rpartition("/")[2]
    return "" if name in (".", "..") or has_control(name) else name


def _is_in_scratch(identity: Identity, directory: str, name: str) -> bool:
    try:
        os.close(identity.open_scratch(directory, name, os.O_RDONLY))
    except (FileNotFoundError, IsADirectoryError):
        return False
    except OSError:
        if not name:
            return False
        raise
    return True


def _with_parent(vmdk: Vmdk, parent: str) -> bytes:
    """The description with another name of the parent. Raises `VmdkError` where its room is too small for it."""
    written = os.fsencode(parent)
    text = _PARENT.sub(lambda found: found[1] + written + found[3], vmdk.text)
    if vmdk.room and len(text) > vmdk.room:
        raise VmdkError(f"there is no room to name its parent {shown(parent)}")
    return text


def _write_parent(identity: Identity, directory: str, name: str, parent: str) -> None:
    """Replace the parent's path by `parent`: inside a disk in the room that its description has."""
    descriptor = identity.open_scratch(directory, name, os.O_RDWR)
    try:
        vmdk = read(descriptor)
        text = _with_parent(vmdk, parent)
        if vmdk.room:
            os.pwrite(descriptor, text.ljust(vmdk.room, b"\0"), vmdk.offset)
    finally:
        os.close(descriptor)
    if not vmdk.room:
        identity.write_scratch(directory, name, text)


def _bad(attribute: str, name: str, problem: str, word: str = errors.INVALID_DISK_PARAM) -> JobFault:
    hint = _HINT if word == errors.BAD_IMAGE else "send all files of the disk, or make them readable on this machine."
    return JobFault(word, f"{attribute}: the disk {shown(name)} cannot be used: {problem}.", hint)
