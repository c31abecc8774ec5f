"""The head of a memory image as libvirt's QEMU driver writes it, checked before libvirtd reads it.

A memory image that comes back with a job may have any content. Only images as libvirt writes them are accepted, in the
formats that the settings of this machine have written. Of the job's head libvirtd gets only the cookie, because it acts
on a head as root (`vmgahp.checkpoint.substitute`).

The layout is ``virQEMUSaveHeader`` of libvirt's ``src/qemu/qemu_saveimage.h``: the magic, five 32-bit numbers in the
byte order of the machine, padding to 92 bytes, the XML and its NUL, libvirt's "cookie" and its NUL, zeroes up to the
length in the header, and then QEMU's own stream.
"""

import os
import re
import struct
from collections.abc import Callable, Collection
from typing import NamedTuple
from xml.etree import ElementTree as etree

from vmgahp.checkpoint.substitute import Held, NotPacked, Substitute, Write

MAGIC, UNFINISHED = b"LibvirtQemudSave", b"LibvirtQemudPart"
VERSION = 2
HEADER = 92
LARGEST_HEAD = 2 << 20
"""The maximum number of bytes of XML, cookie and padding; libvirt writes a few thousand, padded by 64 KiB."""
LARGEST_COOKIE = 64 << 10

FORMATS = ("raw", "gzip", "bzip2", "xz", "lzop", "zstd", "sparse")
"""The formats, by their numbers in the header. libvirt has the last two since 11.2 and says if it lacks them."""
RAW, SPARSE = "raw", "sparse"

STREAM = b"QEVM"
"""The magic bytes of QEMU's own stream (``QEMU_VM_FILE_MAGIC``)."""

_FIELDS = struct.Struct("=16s5I")
_IN_COOKIE = re.compile(r"[A-Za-z0-9_.:+-]{0,64}", re.ASCII)


class Damaged(Exception):
    """A memory image that libvirtd must not read; the text says why."""


class Head(NamedTuple):
    """The head that libvirt wrote before the guest's memory."""

    xml: str
    """The domain as it was saved, VNC password included. It must not be trusted: see `vmgahp.domain.restore`."""
    cookie: str
    """The note of libvirt to itself: the CPU that QEMU has made of the requested one. Empty if there is none."""
    format: str
    was_running: bool
    end: int


Unpack = Callable[[int, Head, Write, int], None]
"""A function that writes the unpacked rest of a compressed image; its last argument is the pipe of `Write`, or -1."""


def inspect(fd: int, formats: Collection[str] = FORMATS) -> Head:
    """Read and check the head of the memory image that `fd` is open on. Raises `Damaged`."""
    start = os.pread(fd, HEADER, 0)
    if len(start) < HEADER:
        raise Damaged(f"it has {len(start)} bytes.")
    magic, version, length, running, number, cookie = _FIELDS.unpack_from(start)
    if magic == UNFINISHED:
        raise Damaged("the save was never completed.")
    if magic != MAGIC or version != VERSION:
        raise Damaged("it is not a memory image of libvirt's on a machine of this kind.")
    if number >= len(FORMATS):
        raise Damaged(f"it has a format, number {number}, that is not known.")
    if FORMATS[number] not in formats:
        raise Damaged(f"it has the format {FORMATS[number]}, and the settings here have {' or '.join(formats)}.")
    if running > 1 or any(start[_FIELDS.size :]):
        raise Damaged("its header has what libvirt does not write.")
    if not 0 < length <= LARGEST_HEAD or cookie >= length:
        raise Damaged("the lengths in its header are not possible.")
    head = os.pread(fd, length, HEADER)
    xml, cookie_text = (head[:cookie], head[cookie:]) if cookie else (head, b"\0")
    if len(head) != length or b"\0" not in xml or b"\0" not in cookie_text:
        raise Damaged("its domain XML does not end.")
    text, _, xml_rest = xml.partition(b"\0")
    noted, _, rest = cookie_text.partition(b"\0")
    if any(xml_rest) or any(rest):
        raise Damaged("there is something after its domain XML.")
    if FORMATS[number] == RAW and os.pread(fd, len(STREAM), HEADER + length) != STREAM:
        raise Damaged("what follows its domain XML is not QEMU's.")
    try:
        return Head(text.decode(), _cookie(noted), FORMATS[number], bool(running), HEADER + length)
    except UnicodeDecodeError as error:
        raise Damaged("its domain XML is not UTF-8.") from error


def substitute(fd: int, xml: str, formats: Collection[str], unpack: Unpack) -> Substitute | Held:
    """Return the memory image of `fd` with `xml` in its head, unpacked. Raises `Damaged`, and as the two classes do."""
    found = inspect(fd, formats)
    text, cookie = xml.encode() + b"\0", found.cookie.encode() + b"\0" * bool(found.cookie)
    length = len(text) + len(cookie)
    if found.format == SPARSE:  # QEMU finds the pages by their offsets in the file
        length = found.end - HEADER
        if len(text) + len(cookie) > length:
            raise Damaged("its head has no room for the domain XML.")
    number, at = FORMATS.index(SPARSE if found.format == SPARSE else RAW), len(text) if cookie else 0
    head = _FIELDS.pack(MAGIC, VERSION, length, found.was_running, number, at).ljust(HEADER, b"\0")
    head += (text + cookie).ljust(length, b"\0")
    if found.format == SPARSE:
        return Held(head, fd)
    if found.format == RAW:
        return Substitute(head, lambda pipe: pipe.write_file(fd, found.end))
    _require_stream(fd, found, unpack)
    return Substitute(head, lambda pipe: unpack(fd, found, pipe.write, pipe.descriptor))


def _require_stream(fd: int, found: Head, unpack: Unpack) -> None:
    """Make sure that QEMU's stream comes out of `unpack`: QEMU would wait forever for it. Raises `Damaged`."""
    begun = bytearray()

    def look(data: bytes) -> None:
        begun.extend(data)
        if len(begun) >= len(STREAM):
            raise NotPacked("that was enough")

    try:
        unpack(fd, found, look, -1)
    except NotPacked as error:
        if not begun:
            raise Damaged(f"it cannot be unpacked: {error}.") from error
    if not begun.startswith(STREAM):
        raise Damaged("what is packed in it is not QEMU's.")


def _cookie(data: bytes) -> str:
    """Return the cookie, if it has only words in the elements that libvirt gives it. Raises `Damaged`."""
    if not data:
        return ""
    try:
        if len(data) > LARGEST_COOKIE or b"<!" in data or b"<?" in data:
            raise ValueError("it is too long, or has more than elements")
        top = etree.fromstring(data.decode())
        text = etree.tostring(top, encoding="unicode")  # by recursion
    except (etree.ParseError, ValueError, RecursionError) as error:
        raise Damaged(f"its cookie cannot be read: {error}.") from error
    words = [word for each in top.iter() for word in (*each.attrib.values(), (each.text or "").strip())]
    known = top.tag == "cookie" and {each.tag for each in top} <= {"cpu", "slirpHelper"}
    if not known or not all(map(_IN_COOKIE.fullmatch, words)):
        raise Damaged("its cookie is not libvirt's.")
    return text


# The header of a memory image of libvirt's Xen driver, and the image with other XML.
#
# It takes the domain's XML only from the image: it does not support a restore with an XML of the caller. So
# the image must be given our XML (`vmgahp.checkpoint.substitute`).
#
# The layout is ``libxlSavefileHeader`` of libvirt's ``src/libxl/libxl_conf.h``: the magic, the version, the length of
# the XML with its NUL, padding to 64 bytes, the XML and its NUL; then Xen's own stream.

XEN_MAGIC = b"libvirt-xml\n \0 \r"
XEN_VERSION = 2
LARGEST_XEN_XML = 2 << 20

XEN_STREAM = b"LibxlFmt"
"""The magic bytes of Xen's own stream (``LIBXL_SAVE_IDENT``, in the byte order of the file)."""

_XEN_HEAD = struct.Struct("=16sII40x")


def inspect_xen(fd: int) -> int:
    """Check the head of the memory image that `fd` is open on; return the offset of Xen's stream. Raises `Damaged`."""
    start = os.pread(fd, _XEN_HEAD.size, 0)
    if len(start) < _XEN_HEAD.size:
        raise Damaged(f"it has {len(start)} bytes.")
    magic, version, length = _XEN_HEAD.unpack(start)
    if magic != XEN_MAGIC or version != XEN_VERSION:
        raise Damaged("it is not a memory image of libvirt's Xen driver.")
    if not 0 < length <= LARGEST_XEN_XML:
        raise Damaged("the length in its header is not possible.")
    xml = os.pread(fd, length, _XEN_HEAD.size)
    end: int = _XEN_HEAD.size + length
    if len(xml) != length or not xml.endswith(b"\0") or xml.count(b"\0") != 1:
        raise Damaged("its domain XML does not end.")
    if os.pread(fd, len(XEN_STREAM), end) != XEN_STREAM:
        raise Damaged("what follows its domain XML is not Xen's.")
    try:
        xml.decode()
    except UnicodeDecodeError as error:
        raise Damaged("its domain XML is not UTF-8.") from error
    return end


def substitute_xen(fd: int, xml: str) -> Substitute:
    """Return the memory image of `fd` with `xml` in its head. Raises `Damaged`, and as `Substitute` does."""
    offset, text = inspect_xen(fd), xml.encode() + b"\0"
    head = _XEN_HEAD.pack(XEN_MAGIC, XEN_VERSION, len(text)) + text
    return Substitute(head, lambda pipe: pipe.write_file(fd, offset))
