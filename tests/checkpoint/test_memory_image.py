"""The head of a memory image: nothing that would make libvirtd stumble passes."""

import os
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.support import image
from vmgahp.checkpoint.memory_image import HEADER, LARGEST_HEAD, UNFINISHED, Damaged, Head, inspect


def look(content: bytes) -> Head:
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        return inspect(file.fileno())


def test_what_libvirt_writes() -> None:
    assert look(image()) == Head("<domain/>", "raw", True)
    assert look(image(cookie=b"", number=6, running=0)) == Head("<domain/>", "sparse", False)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "0 bytes"),
        (image()[: HEADER - 1], "91 bytes"),
        (image(magic=UNFINISHED), "never completed"),
        (image(magic=b"QFI\xfb"), "not a memory image"),
        (image(version=3), "not a memory image"),
        (image(version=0x02000000), "not a memory image"),
        (image(number=7), "number 7"),
        (image(length=0), "lengths"),
        (image(length=LARGEST_HEAD + 1), "lengths"),
        (image(length=2**32 - 1), "lengths"),
        (image(offset=2**32 - 1), "lengths"),
        (image(length=1000), "does not end"),
        (image(xml=b"<domain/>", offset=9), "does not end"),
        (image(cookie=b"<cookie/>", rest=b"x" * 64), "does not end"),
        (image(xml=b"\xff\0"), "UTF-8"),
    ],
)
def test_what_is_refused(content: bytes, said: str) -> None:
    with pytest.raises(Damaged, match=said):
        look(content)


@given(st.binary(max_size=300), st.integers(0, HEADER + 20))
def test_any_bytes(junk: bytes, at: int) -> None:
    whole = bytearray(image())
    whole[at : at + len(junk)] = junk
    for content in (junk, bytes(whole)):
        try:
            head = look(content)
        except Damaged:
            continue
        assert isinstance(head.xml, str)


def test_the_position_of_the_descriptor_does_not_matter() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(image())
        file.flush()
        os.lseek(file.fileno(), 50, os.SEEK_SET)
        assert inspect(file.fileno()).xml == "<domain/>"
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == 50
