"""Memory images of libvirt's Xen driver: what is refused, and how another XML gets into one."""

import os
import struct
from collections.abc import Iterator

import pytest

from tests.checkpoint.support import stored
from vmgahp.checkpoint.memory_image import XEN_MAGIC, XEN_STREAM, Damaged, inspect_xen, substitute_xen

XML = b"<domain type='xen'><name>a</name></domain>"
MEMORY = XEN_STREAM + os.urandom(3 << 20)


def head(xml: bytes = XML + b"\0", magic: bytes = XEN_MAGIC, version: int = 2, length: int | None = None) -> bytes:
    return struct.pack("=16sII40x", magic, version, len(xml) if length is None else length) + xml


@pytest.fixture
def image() -> Iterator[int]:
    with stored(head() + MEMORY) as file:
        yield file.fileno()


def test_where_xens_stream_begins_and_that_another_xml_goes_before_it(image: int) -> None:
    assert inspect_xen(image) == 64 + len(XML) + 1
    other = "<domain type='xen'><description>größer</description></domain>"
    with substitute_xen(image, other) as whole, open(whole.path, "rb") as read:
        assert read.read() == head(other.encode() + b"\0") + MEMORY


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "0 bytes"), (head(magic=b"LibvirtQemudSave") + MEMORY, "not a memory image"),
        (head(version=1) + MEMORY, "not a memory image"), (head(length=0) + MEMORY, "length"),
        (head(length=1 << 31) + MEMORY, "length"), (head(XML) + MEMORY, "does not end"),
        (head(XML + b"\0more\0") + MEMORY, "does not end"), (head(b"\xff\xfe\0") + MEMORY, "UTF-8"),
        (head() + b"LibxlFmX", "not Xen's"), (head(), "not Xen's"),
    ],
)  # fmt: skip
def test_what_is_no_image(content: bytes, part: str) -> None:
    with stored(content) as file, pytest.raises(Damaged, match=part):
        inspect_xen(file.fileno())


def test_a_reader_that_goes_away_leaves_nothing_behind(image: int) -> None:
    before = os.listdir("/proc/self/fd")
    with substitute_xen(image, "<domain/>") as whole, open(whole.path, "rb") as read:
        assert read.read(64)
    with substitute_xen(image, "<domain/>"):
        pass  # nobody has read at all
    assert os.listdir("/proc/self/fd") == before
