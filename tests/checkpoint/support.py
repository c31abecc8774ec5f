"""Memory images of libvirt's QEMU driver, whole and broken."""

import struct
import tempfile
from typing import IO

from vmgahp.checkpoint.memory_image import HEADER, MAGIC


def image(
    xml: bytes = b"<domain/>\0",
    cookie: bytes = b"<cookie/>\0",
    magic: bytes = MAGIC,
    version: int = 2,
    length: int | None = None,
    running: int = 1,
    number: int = 0,
    offset: int | None = None,
    rest: bytes = bytes(64) + b"QEVM",
    pad: bytes = b"",
) -> bytes:
    length = len(xml) + len(cookie) + 64 if length is None else length
    offset = len(xml) * bool(cookie) if offset is None else offset
    head = struct.pack("=16s5I", magic, version, length, running, number, offset)
    return head.ljust(HEADER - len(pad), b"\0") + pad + xml + cookie + rest


def stored(content: bytes) -> IO[bytes]:
    """A file with that content."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - who asks for it closes it
    file.write(content)
    file.flush()
    return file
