"""The format of a disk image, stated or by its file name, and the backing files in its header.

A guest can write the header of another format into a raw image, and that header can name any file as its backing
file. So the header is used for one thing only: to refuse an image whose name leaves its format open.

A job can write the header of an image as well, and name any file of the host as its backing file. libvirt, which reads
it as root, would give that file to QEMU. So ``qemu-img info`` reads it with the rights of the job's user and within
limits, and the chain that it finds is written into the domain XML, which libvirt and QEMU take instead of the header's.
"""

from __future__ import annotations

import os
import re
from math import inf
from time import monotonic
from typing import Any, BinaryIO, NamedTuple

from vmgahp import errors
from vmgahp.host import budget
from vmgahp.host.job_user import Identity
from vmgahp.text import has_control, not_for_xml, shown

FORMATS = {name: name for name in ("raw", "iso", "qcow2", "qcow", "qed", "vmdk", "vdi", "vpc")}
FORMATS |= {"iso": "raw", "vhd": "vpc"}
"""The image formats of vm_disk, each with its name for libvirt and QEMU (libvirt's storagecommon.rng, without vhdx)."""

BY_ENDING = {f".{name}": image_format for name, image_format in FORMATS.items()}
"""The format of each file name suffix, in lower case. ``.img`` is used for images of all formats."""

_HEADERS = (
    (0, b"QFI\xfb", "qcow2"),
    (0, b"QED\0", "qed"),
    (0, b"KDMV", "vmdk"),
    (0, b"COWD", "vmdk"),
    (0, b"# Disk DescriptorFile", "vmdk"),
    (64, b"\x7f\x10\xda\xbe", "vdi"),
    (0, b"conectix", "vpc"),
    (0, b"vhdxfile", "vhdx"),
    (0, b"WithoutFreeSpace", "parallels"),
    (0, b"WithouFreSpacExt", "parallels"),
)
CONVERTIBLE = FORMATS | {"vhdx": "vhdx", "parallels": "parallels"}
"""The formats of `FORMATS`, and those that can only be converted, since no hypervisor here uses them."""

HEADER = 512
"""The number of bytes at the beginning of an image that `looks_like` needs."""

_QCOW2_WITHOUT_FEATURES = b"\0\0\0\2"
"""The version of a qcow2 header that has no features (docs/interop/qcow2.txt of QEMU)."""
_QCOW2_DIRTY, _QCOW2_DATA_FILE = 1, 4
"""The bits of its incompatible features: it was not closed, the data is in another file."""
_QCOW2_BITMAPS = 1
"""The bit of its autoclear features for bitmaps; QEMU takes memory for each."""
_QED_NEED_CHECK = 2
"""The bit of QED that corresponds to `_QCOW2_DIRTY` (docs/interop/qed_spec.txt)."""

MOST_SNAPSHOTS = 256
"""The most internal snapshots of a qcow2 image; QEMU reads one after the other when it opens the image."""


def names_files(image_format: str, header: bytes) -> bool:
    """Return True if the image's data is in further files, which its header names; backing files do not count."""
    if image_format == "qcow2":
        return header[4:8] != _QCOW2_WITHOUT_FEATURES and bool(int.from_bytes(header[72:80], "big") & _QCOW2_DATA_FILE)
    if image_format == "vmdk":  # block/vmdk.c: one without a capacity has its description inside, and that names files
        return header[:4] != b"COWD" and (header[:4] != b"KDMV" or not any(header[12:20]))
    return False


WITH_UNFIT = ("qcow2", "qed", "vmdk")


def unfit(image_format: str, header: bytes) -> str:
    """Return the reason to reject the image with these first `HEADER` bytes, as half a sentence; empty for none.

    The reasons are further files that it names, and whatever costs QEMU hours, or any amount of memory, to open it.
    """
    if names_files(image_format, header):
        return "keeps its data in another file"
    if image_format == "qed" and int.from_bytes(header[16:24], "little") & _QED_NEED_CHECK:
        return "was not closed, so that all of it would have to be checked"
    if image_format != "qcow2" or not header.startswith(b"QFI\xfb"):
        return ""  # QEMU itself refuses an image that is not of its format
    if int.from_bytes(header[60:64], "big") > MOST_SNAPSHOTS:
        return f"has more than {MOST_SNAPSHOTS} snapshots"
    if header[4:8] == _QCOW2_WITHOUT_FEATURES:
        return ""
    if int.from_bytes(header[72:80], "big") & _QCOW2_DIRTY:
        return "was not closed, so that all of it would have to be checked"
    if int.from_bytes(header[88:96], "big") & _QCOW2_BITMAPS:
        return "has bitmaps, such as a backup keeps"
    return ""


_OTHERS = (
    (0, b"\x1f\x8b", "gzip"),
    (0, b"\xfd7zXZ\0", "xz"),
    (0, b"BZh", "bzip2"),
    (0, b"\x28\xb5\x2f\xfd", "zstd"),
    (0, b"\x04\x22\x4d\x18", "lz4"),
    (0, b"PK\3\4", "a zip archive"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (0, b"Rar!\x1a\7", "a rar archive"),
    (257, b"ustar", "a tar archive"),
    (0, b"%PDF-", "a PDF"),
    (0, b"\x7fELF", "a program"),
    (0, b"LUKS\xba\xbe", "an encrypted volume (LUKS)"),
    (0, b"\x3a\xff\x26\xed", "a sparse image of Android's"),
    (0, b"MSWIM\0\0\0", "an image of Windows files (WIM)"),
    (0, b"EVF\t\r\n\xff\0", "a forensic image (E01)"),
)
_TEXT = bytes((*b"\t\n\f\r", *range(32, 127)))


def not_a_disk(header: bytes) -> str:
    """Name the kind of a file with these first `HEADER` bytes if it is known not to be a disk; return "" otherwise."""
    return _by_magic(header, _OTHERS) or ("a text" if header and not header.translate(None, _TEXT) else "")


class UnclearFormat(ValueError):
    """An error: the format of an image is not stated; the text is a sentence without its end."""


def looks_like(header: bytes) -> str:
    """Return the format whose magic number the first `HEADER` bytes have; empty for none. This proves nothing."""
    return _by_magic(header, _HEADERS)


def _by_magic(header: bytes, table: tuple[tuple[int, bytes, str], ...]) -> str:
    return next((name for place, mark, name in table if header[place : place + len(mark)] == mark), "")


def image_format(name: str, said: str, file: BinaryIO) -> str:
    """Return QEMU's format: `said`, else that of the suffix, else raw if it looks so. Raises `UnclearFormat`."""
    if said:
        if said.lower() not in FORMATS:
            raise UnclearFormat(f"{said[:40]!a} is not one of the formats {', '.join(FORMATS)}")
        return FORMATS[said.lower()]
    dot = name.rfind(".")
    if by_name := BY_ENDING.get(name[dot:].lower() if dot >= 0 else ""):
        return by_name
    if likeness := looks_like(file.read(HEADER)):
        could = f"it could be {likeness}, or raw with such a beginning"
        raise UnclearFormat(f"its name does not say what format it has, and {could}")
    return "raw"


def named_format(name: str) -> str:
    """Return the format of a name's suffix, as QEMU names it, or ``iso``, for a conversion; empty for none."""
    ending = os.path.splitext(name)[1].lower()
    return {".vhdx": "vhdx", ".iso": "iso", ".hds": "parallels"}.get(ending) or BY_ENDING.get(ending, "")


def proven_format(name: str, said: str, header: bytes) -> str:
    """Return the format of an image that may have to be converted: `said`, or the one of both its name and its header.

    This is QEMU's name of it, or ``iso`` for a CD-ROM. If the job does not state the format, only an image with such a
    name is taken for raw: a reader that takes an image for raw and one that does not would open different files. A
    header alone proves nothing, for a guest can have written it. Raises `UnclearFormat`.
    """
    if said:
        if said.lower() not in CONVERTIBLE:
            raise UnclearFormat(f"{said[:40]!a} is not one of the formats {', '.join(CONVERTIBLE)}")
        return "iso" if said.lower() == "iso" else CONVERTIBLE[said.lower()]
    by_name = named_format(name)
    if by_name in ("raw", "iso"):
        return by_name
    likeness = looks_like(header)
    if by_name and by_name == likeness:
        return by_name
    seen = f"begins like {likeness}" if likeness else "begins like no format that has a header"
    if by_name:
        raise UnclearFormat(f"its name says {by_name}, and it {seen}")
    raise UnclearFormat(f"neither the job nor the image's name says what format it has (it {seen})")


MOST_LAYERS = 64
"""The most backing files of one image; QEMU has each of them open, and libvirt describes none deeper than 200."""


class BackingFile(NamedTuple):
    """One backing file."""

    path: str
    format: str
    known_as: str = ""
    """The name of it in a checkpoint, if that is not its path: for an image of the administrator's catalog."""


def backing_chain(
    path: str, image_format: str, identity: Identity, *, parts: bool = False, end: float = inf
) -> tuple[BackingFile, ...]:
    """Return the backing files of an image, the nearest first.

    Each name is checked before it is used, for it could be that of a server or a device. With `parts` the data of the
    image may be in further files, which the caller has checked; `end` is the deadline by the monotonic clock. Raises
    `errors.JobFault` for an image that is not of its format, that is damaged, or whose backing files have no stated
    format or are not readable for the job's user.
    """
    from vmgahp.images import qemu_img  # most jobs do not need it

    if image_format == "raw":
        return ()
    found: list[BackingFile] = []
    end = min(end, monotonic() + qemu_img.LOOK)
    while image_format != "raw":
        image = _look(path, image_format, identity, end, parts=parts and not found)
        below = _backing_file(path, image)
        if below is None:
            break
        found.append(below)
        if len(found) > MOST_LAYERS:
            problem = f"{found[0].path} and what is below it are a circle, or more than {MOST_LAYERS} backing files"
            raise _bad(errors.INVALID_DISK_PARAM, problem, "write them into one image: qemu-img convert.")
        path, image_format = below.path, below.format
    if found:
        _header(path, identity)  # check that the last one, which is not examined, can be read
    return tuple(found)


def _backing_file(path: str, image: dict[str, Any]) -> BackingFile | None:
    name = image.get("full-backing-filename") or image.get("backing-filename")
    if not name:
        return None
    if not name.startswith("/") or has_control(name) or not_for_xml(name):
        problem = f"the backing file of {path} is {shown(name)}, which is no file of this machine, or cannot be named"
        hint = "use images whose backing files are plain files, with names that can be printed."
        raise _bad(errors.INVALID_DISK_PARAM, problem, hint)
    image_format = image.get("backing-filename-format") or ""
    if image_format not in FORMATS.values():
        of = f"{shown(image_format)} as the format of" if image_format else "no format of"
        problem = f"{path} names {of} its backing file {name}, and vm_disk's formats are {', '.join(FORMATS)}"
        hint = f"write it into the image: qemu-img rebase -u -b {name} -F FORMAT {path}"
        raise _bad(errors.INVALID_DISK_PARAM, problem, hint)
    return BackingFile(name, image_format)


def require_whole(path: str, image_format: str, identity: Identity) -> None:
    """Check an image whose backing files are known, without following its header's. Raises `errors.Fault`."""
    from vmgahp.images import qemu_img  # most jobs do not need it

    _look(path, image_format, identity, monotonic() + qemu_img.LOOK)


def _look(path: str, image_format: str, identity: Identity, end: float, *, parts: bool = False) -> dict[str, Any]:
    header = _header(path, identity)
    if not parts and (reason := unfit(image_format, header)):
        if looks_like(header) == image_format:
            raise _unfit(path, image_format, reason)
        raise _unusable(path, image_format, "it does not begin like one")
    info = _info(path, image_format, identity, end - monotonic())
    if info.get("encrypted"):
        raise _unfit(path, image_format, "is encrypted, and no VM here has its key")
    return info


def _header(path: str, identity: Identity) -> bytes:
    try:
        return identity.read_named(path, HEADER)
    except OSError as error:
        problem = f"{path} cannot be opened ({error.strerror}, for uid {identity.uid})"
        hint = "use images whose backing files the job's user can read on this machine."
        raise _bad(errors.INVALID_DISK_PARAM, problem, hint) from error


def _unfit(path: str, image_format: str, reason: str) -> errors.JobFault:
    hint = f"write it anew: qemu-img convert -f {image_format} -O qcow2 {path} NEW"
    return _bad(errors.INVALID_DISK_PARAM, f"{path} {reason}", hint)


def _unusable(path: str, image_format: str, why: object, *, no_access: bool = False) -> errors.JobFault:
    word = errors.INVALID_DISK_PARAM if no_access else errors.BAD_IMAGE
    return _bad(word, f"{path} is not a usable {image_format} image ({why})", "see what qemu-img info says about it.")


def _info(path: str, image_format: str, identity: Identity, seconds: float) -> dict[str, Any]:
    from vmgahp.images import qemu_img  # most jobs do not need it

    try:
        if seconds <= 0:
            raise qemu_img.TooSlow(0)
        return qemu_img.info(path, image_format, identity, seconds=seconds)
    except qemu_img.NotInstalled as error:
        problem = f"{error.program} is not installed, and {path} has to be looked at."
        raise errors.MachineFault(problem, "install qemu-utils and util-linux.") from error
    except qemu_img.TooSlow as error:
        late = f"could not be read within {error.seconds:g} s" if error.seconds else "was not read: no time is left"
        hint = "see that the file system answers, and use fewer images."
        raise _bad(errors.BAD_IMAGE, f"{path} {late}", hint) from error
    except qemu_img.Refused as error:
        raise _unusable(path, image_format, error, no_access=error.no_access) from error
    except qemu_img.CannotRun as error:
        raise errors.HypervisorFault(f"{path}: {error}.", "see that qemu-img works.") from error
    except qemu_img.Trouble as error:
        hint = "see what qemu-img info says about it."
        raise _bad(errors.BAD_IMAGE, f"{path} cannot be looked at ({error})", hint) from error


def _bad(word: str, problem: str, hint: str) -> errors.JobFault:
    return errors.JobFault(word, f"{problem}.", hint, "VMPARAM_vm_Disk")


# VMware's disks
#
# A disk is described by a few lines of text, which are either a file of their own, beside the extents that have the
# data (a split or a flat disk), or inside the only file of a monolithic sparse disk, in an area of fixed size after
# its header (VMware's "Virtual Disk Format 5.0", which is published). They name further files, and the job provides
# them: so only files beside the description are accepted, and never a device of this machine.


LARGEST_VMDK = 1 << 20
"""The most bytes of a description; one with a thousand extents has some 50,000."""

SECTOR = 512
_VMDK_MAGIC = b"KDMV"
_VMDK_KINDS = (
    *("monolithicsparse", "monolithicflat", "twogbmaxextentsparse", "twogbmaxextentflat", "streamoptimized"),
    *("vmfs", "vmfspreallocated", "vmfseagerzeroedthick", "vmfsthin"),
)
"""The kinds of disks that consist of files only; others are a disk or partition of the host, or a snapshot of ESX."""

_VMDK_LINES = re.MULTILINE | re.IGNORECASE
_CREATE_TYPE = re.compile(rb'^[ \t]*createType[ \t]*=[ \t]*"([^"\r\n]*)"[ \t]*\r?$', _VMDK_LINES)
_PARENT = re.compile(rb'^([ \t]*parentFileNameHint[ \t]*=[ \t]*")([^"\r\n]*)("[ \t]*\r?)$', _VMDK_LINES)
_EXTENT = re.compile(
    rb"^[ \t]*(RW|RDONLY|NOACCESS)[ \t]+([0-9]{1,15})[ \t]+([A-Z]+)"
    rb'(?:[ \t]+"([^"\r\n]*)"(?:[ \t]+([0-9]{1,15}))?)?[ \t]*\r?$',
    _VMDK_LINES,
)
_BEGINNINGS = (
    (re.compile(rb"^[ \t]*createType[ \t]*=", _VMDK_LINES), _CREATE_TYPE),
    (re.compile(rb"^[ \t]*parentFileNameHint[ \t]*=", _VMDK_LINES), _PARENT),
    (re.compile(rb"^[ \t]*(?:RW|RDONLY|NOACCESS)[ \t]", _VMDK_LINES), _EXTENT),
)
"""The beginnings of relevant lines, each with the only form that is accepted. VMware may accept more
forms, so a line that begins like one and is not of that form is refused."""

_LONE_RETURN = re.compile(rb"\r(?!\n)")


class VmdkError(ValueError):
    """A disk that cannot be used; the text is the reason, as half a sentence."""


class Extent(NamedTuple):
    """A file with data of a disk."""

    access: str
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
    parent: str
    """The parent's name as written; empty for a disk without a parent."""
    extents: tuple[Extent, ...]
    """The files with the data; empty for a disk that has its description inside."""


def read_vmdk(descriptor: int) -> Vmdk:
    """Read the description of an open disk. Raises `VmdkError` and OSError."""
    began = monotonic()
    try:
        return _read_vmdk(descriptor)
    finally:  # half a second for one of a megabyte, and a job may have thousands
        budget.current().spend(began)


def _read_vmdk(descriptor: int) -> Vmdk:
    head = os.pread(descriptor, SECTOR, 0)
    offset = room = 0
    if head.startswith(_VMDK_MAGIC):
        # Magic, version, flags, capacity, grain size; then the place and size of the description, in sectors.
        offset = int.from_bytes(head[28:36], "little") * SECTOR
        room = int.from_bytes(head[36:44], "little") * SECTOR
        if len(head) < 44 or not any(head[12:20]):  # without a capacity QEMU takes it for a description only
            raise VmdkError("its header is cut off")
        if not offset or not 0 < room <= LARGEST_VMDK or offset > LARGEST_VMDK:
            raise VmdkError("it is one extent of a disk and not the disk")
        text = os.pread(descriptor, room, offset)
    else:
        text = os.pread(descriptor, LARGEST_VMDK + 1, 0)
        if len(text) > LARGEST_VMDK:
            raise VmdkError("it is one extent of a disk and not the disk, or no disk at all")
    # The end may be followed by the rest of an older, longer text, but not by another description.
    text, _, rest = text.partition(b"\0")
    if any(beginning.search(rest) for beginning, _ in _BEGINNINGS):
        raise VmdkError("its description continues after its end")
    return parse_vmdk(text, offset, room)


def parse_vmdk(text: bytes, offset: int = 0, room: int = 0) -> Vmdk:
    """Parse a description that was found at this place. Raises `VmdkError`."""
    for beginning, whole in _BEGINNINGS:
        if len(beginning.findall(text)) != len(whole.findall(text)) or _LONE_RETURN.search(text):
            raise VmdkError("its description has lines that cannot be understood")
    kinds, parents, lines = _CREATE_TYPE.findall(text), _PARENT.findall(text), _EXTENT.findall(text)
    if len(kinds) != 1:
        raise VmdkError("it has no description of a VMware disk")
    kind = kinds[0].decode("utf-8", "replace")
    if kind.lower() not in _VMDK_KINDS:
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
