"""The header of a memory image of libvirt's Xen driver, and the image with other XML.

That driver takes the domain's XML only from the image: it does not support a restore with an XML of the caller. So the
image must be given our XML (`vmgahp.checkpoint.substitute`).

The layout is ``libxlSavefileHeader`` of libvirt's ``src/libxl/libxl_conf.h``: the magic, the version, the length of the
XML with its NUL, padding to 64 bytes, the XML and its NUL; then Xen's own stream.
"""

import os
import struct
from typing import NamedTuple

from vmgahp.checkpoint.memory_image import Damaged
from vmgahp.checkpoint.substitute import Substitute, all_of

MAGIC = b"libvirt-xml\n \0 \r"
VERSION = 2
LARGEST_XML = 2 << 20

STREAM = b"LibxlFmt"
"""The magic bytes of Xen's own stream (``LIBXL_SAVE_IDENT``, in the byte order of the file)."""

_HEAD = struct.Struct("=16sII40x")


class XenHead(NamedTuple):
    """The head that libvirt wrote before Xen's stream."""

    xml: str
    """The domain as it was saved. It must not be trusted."""
    end: int
    """The offset of Xen's stream, in bytes."""


def inspect(fd: int) -> XenHead:
    """Read and check the head of the memory image that `fd` is open on. Raises `Damaged`."""
    start = os.pread(fd, _HEAD.size, 0)
    if len(start) < _HEAD.size:
        raise Damaged(f"it has {len(start)} bytes.")
    magic, version, length = _HEAD.unpack(start)
    if magic != MAGIC or version != VERSION:
        raise Damaged("it is not a memory image of libvirt's Xen driver.")
    if not 0 < length <= LARGEST_XML:
        raise Damaged("the length in its header is not possible.")
    xml = os.pread(fd, length, _HEAD.size)
    end = _HEAD.size + length
    if len(xml) != length or not xml.endswith(b"\0") or xml.count(b"\0") != 1:
        raise Damaged("its domain XML does not end.")
    if os.pread(fd, len(STREAM), end) != STREAM:
        raise Damaged("what follows its domain XML is not Xen's.")
    try:
        return XenHead(xml[:-1].decode(), end)
    except UnicodeDecodeError as error:
        raise Damaged("its domain XML is not UTF-8.") from error


def substitute(fd: int, xml: str) -> Substitute:
    """Return the memory image of `fd` with `xml` in its head. Raises `Damaged`, and as `Substitute` does."""
    offset = inspect(fd).end
    text = xml.encode() + b"\0"
    return Substitute(_HEAD.pack(MAGIC, VERSION, len(text)) + text, all_of(fd, offset))
