"""VMware's disks: the description in a ``.vmdk`` file.

A disk is described by a few lines of text, which are either a file of their own, beside the extents that have the data
(a split or a flat disk), or inside the only file of a monolithic sparse disk, in an area of fixed size after its
header (VMware's "Virtual Disk Format 5.0", which is published). They name further files, and the job provides them: so
only files beside the description are accepted, and never a device of this machine.
"""

import os
import re
from typing import NamedTuple

from vmgahp.text import has_control, shown

LARGEST = 1 << 20
"""The most bytes of a description; one with a thousand extents has some 50,000."""

SECTOR = 512
_MAGIC = b"KDMV"
_KINDS = (
    *("monolithicsparse", "monolithicflat", "twogbmaxextentsparse", "twogbmaxextentflat", "streamoptimized"),
    *("vmfs", "vmfspreallocated", "vmfseagerzeroedthick", "vmfsthin"),
)
"""The kinds of disks that consist of files only; others are a disk or partition of the host, or a snapshot of ESX."""

_LINES = re.MULTILINE | re.IGNORECASE
_CREATE_TYPE = re.compile(rb'^[ \t]*createType[ \t]*=[ \t]*"([^"\r\n]*)"[ \t]*\r?$', _LINES)
_PARENT = re.compile(rb'^([ \t]*parentFileNameHint[ \t]*=[ \t]*")([^"\r\n]*)("[ \t]*\r?)$', _LINES)
_EXTENT = re.compile(
    rb"^[ \t]*(RW|RDONLY|NOACCESS)[ \t]+([0-9]{1,15})[ \t]+([A-Z]+)"
    rb'(?:[ \t]+"([^"\r\n]*)"(?:[ \t]+([0-9]{1,15}))?)?[ \t]*\r?$',
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
"""The beginnings of relevant lines, each with the only form that is accepted. VMware may accept more
forms, so a line that begins like one and is not of that form is refused."""

_LONE_RETURN = re.compile(rb"\r(?!\n)")


class VmdkError(ValueError):
    """A disk that cannot be used; the text is the reason, as half a sentence."""


class Extent(NamedTuple):
    """A file with data of a disk."""

    access: str
    """The access: ``RW``, ``RDONLY`` or ``NOACCESS``."""
    sectors: int
    kind: str
    """The kind: ``SPARSE``, ``FLAT`` or ``VMFS``."""
    file: str
    offset: int
    """The sector at which the data begins."""


class Vmdk(NamedTuple):
    """The description of one disk."""

    text: bytes
    offset: int
    """The offset of the description in the file; 0 if the file has nothing else."""
    room: int
    """The most bytes of a description inside a disk; 0 if the file has nothing else."""
    kind: str
    """The ``createType``, in lower case."""
    parent: str
    """The parent's name as written; empty for a disk without a parent."""
    extents: tuple[Extent, ...]
    """The files with the data; empty for a disk that has its description inside."""


def read(descriptor: int) -> Vmdk:
    """Read the description of an open disk. Raises `VmdkError` and OSError."""
    head = os.pread(descriptor, SECTOR, 0)
    offset = room = 0
    if head.startswith(_MAGIC):
        # Magic, version, flags, capacity, grain size; then the place and size of the description, in sectors.
        offset = int.from_bytes(head[28:36], "little") * SECTOR
        room = int.from_bytes(head[36:44], "little") * SECTOR
        if len(head) < 44 or not any(head[12:20]):  # without a capacity QEMU takes it for a description only
            raise VmdkError("its header is cut off")
        if not offset or not 0 < room <= LARGEST or offset > LARGEST:
            raise VmdkError("it is one extent of a disk and not the disk")
        text = os.pread(descriptor, room, offset)
    else:
        text = os.pread(descriptor, LARGEST + 1, 0)
        if len(text) > LARGEST:
            raise VmdkError("it is one extent of a disk and not the disk, or no disk at all")
    # The end may be followed by the rest of an older, longer text, but not by another description.
    text, _, rest = text.partition(b"\0")
    if any(beginning.search(rest) for beginning, _ in _BEGINNINGS):
        raise VmdkError("its description continues after its end")
    return parse(text, offset, room)


def parse(text: bytes, offset: int = 0, room: int = 0) -> Vmdk:
    """Parse a description that was found at this place. Raises `VmdkError`."""
    for beginning, whole in _BEGINNINGS:
        if len(beginning.findall(text)) != len(whole.findall(text)) or _LONE_RETURN.search(text):
            raise VmdkError("its description has lines that cannot be understood")
    kinds, parents, lines = _CREATE_TYPE.findall(text), _PARENT.findall(text), _EXTENT.findall(text)
    if len(kinds) != 1:
        raise VmdkError("it has no description of a VMware disk")
    kind = kinds[0].decode("utf-8", "replace")
    if kind.lower() not in _KINDS:
        raise VmdkError(f"it is of the type {shown(kind)}, which does not consist of files alone")
    if len(parents) > 1:
        raise VmdkError("it names more than one parent")
    if not lines:
        raise VmdkError("its description names no data")
    extents = [extent for line in lines if (extent := _extent(*line)) is not None]
    # Inside a sparse disk the only extent is the disk itself, under the name that it was made with.
    if room and len(extents) > 1:
        raise VmdkError("it has its description inside, and further extents")
    parent = parents[0][1].decode("utf-8", "surrogateescape") if parents else ""
    if "|" in parent:  # VMware's sign for an escaped character
        raise VmdkError(f"the name of its parent, {shown(parent)}, has a character that cannot be used")
    return Vmdk(text, offset, room, kind.lower(), parent, () if room else tuple(extents))


def _extent(access: bytes, sectors: bytes, kind: bytes, name: bytes, offset: bytes) -> Extent | None:
    """Return one extent; None for an extent of zeros, which has no file."""
    word = kind.upper().decode()
    if word not in ("SPARSE", "FLAT", "ZERO", "VMFS"):
        raise VmdkError(f"it has an extent of the type {shown(word)}")
    if word == "ZERO":
        return None
    file = name.decode("utf-8", "surrogateescape")
    # QEMU takes the part before a colon for a protocol.
    if file in ("", ".", "..") or set(file) & set("/\\:|") or has_control(file):
        raise VmdkError(f"its extent {shown(file)} is not a file beside it")
    return Extent(access.upper().decode(), int(sectors), word, file, int(offset or 0))


def with_parent(disk: Vmdk, parent: str) -> bytes:
    """Return the description with another name of the parent. Raises `VmdkError` if it does not fit."""
    written = os.fsencode(parent)
    text = _PARENT.sub(lambda found: found[1] + written + found[3], disk.text)
    if disk.room and len(text) > disk.room:
        raise VmdkError(f"there is no room to name its parent {shown(parent)}")
    return text
