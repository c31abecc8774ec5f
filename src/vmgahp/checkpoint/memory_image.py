"""The head of a memory image as libvirt's QEMU driver writes it, looked at before libvirtd does.

A memory image that comes back with a job may be anything. libvirtd, which is root, takes the length of the
XML in it from its header, reads as many bytes as that says into memory, up to 4 GiB, and takes them for a
string that ends. So the header is checked here first, and the XML is read here.

The layout is ``virQEMUSaveHeader`` of libvirt's ``src/qemu/qemu_saveimage.h``: the magic, five 32-bit
numbers in the byte order of the machine, padding to 92 bytes, the XML and its NUL, libvirt's "cookie" and
its NUL, zeroes up to the length in the header, and then QEMU's own stream.
"""

import os
import struct
from dataclasses import dataclass

MAGIC, UNFINISHED = b"LibvirtQemudSave", b"LibvirtQemudPart"
VERSION = 2
HEADER = 92
LARGEST_HEAD = 2 << 20
"""Bytes of XML, cookie and padding; libvirt pads a few thousand by 64 KiB."""

FORMATS = ("raw", "gzip", "bzip2", "xz", "lzop", "zstd", "sparse")
"""By their numbers in the header. libvirt has the last two since 11.2 and says so itself where it has not."""

_FIELDS = struct.Struct("=16s5I")


class Damaged(Exception):
    """This is not a memory image that libvirtd should see; the text says why."""


@dataclass(frozen=True, slots=True)
class Head:
    """What libvirt wrote before the guest's memory."""

    xml: str
    """The domain as it was saved, VNC password included. Not to be trusted: see `vmgahp.domain.restore`."""
    format: str
    was_running: bool


def inspect(fd: int) -> Head:
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
    if not 0 < length <= LARGEST_HEAD or cookie >= length:
        raise Damaged("the lengths in its header are not possible.")
    head = os.pread(fd, length, HEADER)
    xml, cookie_text = (head[:cookie], head[cookie:]) if cookie else (head, b"\0")
    if len(head) != length or b"\0" not in xml or b"\0" not in cookie_text:
        raise Damaged("its domain XML does not end.")
    try:
        text = xml.partition(b"\0")[0].decode()
    except UnicodeDecodeError as error:
        raise Damaged("its domain XML is not UTF-8.") from error
    return Head(text, FORMATS[number], bool(running))
