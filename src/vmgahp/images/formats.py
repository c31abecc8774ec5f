"""The format of a disk image, as stated or by its file name, never guessed from its content.

A guest can write the header of another format into a raw image, and that header can name any file as its backing
file. So the header is used for one thing only: to refuse an image whose name leaves its format open.
"""

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

FORMATS = {
    "raw": "raw",
    "iso": "raw",
    "qcow2": "qcow2",
    "qcow": "qcow",
    "qed": "qed",
    "vmdk": "vmdk",
    "vdi": "vdi",
    "vpc": "vpc",
    "vhd": "vpc",
}
"""The image formats of vm_disk, each with its name for libvirt and QEMU (``storageFormat`` of libvirt's
storagecommon.rng, which has no vhdx)."""

BY_ENDING = {
    ".qcow2": "qcow2",
    ".qcow": "qcow",
    ".qed": "qed",
    ".vmdk": "vmdk",
    ".vdi": "vdi",
    ".vpc": "vpc",
    ".vhd": "vpc",
    ".raw": "raw",
    ".iso": "raw",
}
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
)
CONVERTIBLE = FORMATS | {"vhdx": "vhdx"}
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
    """Return True if the image with these first `HEADER` bytes names further files that have its data.

    QEMU opens them by those names. Backing files do not count: QEMU gets them explicitly (`vmgahp.images.backing`).
    """
    if image_format == "qcow2":
        return header[4:8] != _QCOW2_WITHOUT_FEATURES and bool(int.from_bytes(header[72:80], "big") & _QCOW2_DATA_FILE)
    if image_format == "vmdk":  # block/vmdk.c: one without a capacity has its description inside, and that names files
        return header[:4] != b"COWD" and (header[:4] != b"KDMV" or not any(header[12:20]))
    return False


WITH_UNFIT = ("qcow2", "qed", "vmdk")
"""The formats that `unfit` can reject."""


def unfit(image_format: str, header: bytes) -> str:
    """Return the reason to reject the image with these first `HEADER` bytes, as half a sentence; empty for none.

    The reasons are further files that it names, and anything that makes QEMU work for hours, or take any amount of
    memory, when it opens the image.
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
    (0, b"PK\3\4", "a zip archive"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (0, b"Rar!\x1a\7", "a rar archive"),
    (257, b"ustar", "a tar archive"),
    (0, b"%PDF-", "a PDF"),
    (0, b"\x7fELF", "a program"),
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
    """Return the name of the first row whose mark is at its place; empty for none."""
    return next((name for place, mark, name in table if header[place : place + len(mark)] == mark), "")


def image_format(name: str, said: str, file: "BinaryIO") -> str:
    """Return QEMU's format of the image in `file`: `said` if it is set, else that of the name's suffix, else raw.

    Raises `UnclearFormat` for an unknown format, and if the name leaves the format open and the header looks like
    another format than raw.
    """
    if said:
        if said.lower() not in FORMATS:
            raise UnclearFormat(f"{said[:40]!a} is not one of the formats {', '.join(FORMATS)}")
        return FORMATS[said.lower()]
    dot = name.rfind(".")
    by_name = BY_ENDING.get(name[dot:].lower(), "") if dot >= 0 else ""
    if by_name:
        return by_name
    likeness = looks_like(file.read(HEADER))
    if likeness:
        raise UnclearFormat(
            f"its name does not say what format it has, and it could be {likeness}, or raw with such a beginning"
        )
    return "raw"


def named_format(name: str) -> str:
    """Return the format of a name's suffix, for an image that may have to be converted; empty if there is none.

    This is QEMU's name of the format, or ``iso`` for a CD-ROM.
    """
    ending = os.path.splitext(name)[1].lower()
    return {".vhdx": "vhdx", ".iso": "iso"}.get(ending) or BY_ENDING.get(ending, "")


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
