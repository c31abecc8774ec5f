"""Images made to harm who looks into them: each is the job's fault, in time, or an image like any other."""

import os
import random
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import jobs
from vmgahp import errors
from vmgahp.host.job_user import Identity
from vmgahp.images.formats import backing_chain, require_whole

pytestmark = pytest.mark.libvirt

LARGEST32, LARGEST64 = 2**32 - 1, 2**64 - 1
FORMATS = ["qcow2", "qcow", "qed", "vmdk", "vdi", "vpc"]

Change = Callable[[bytearray], None]


def put(at: int, form: str, *values: int) -> Change:
    """Write numbers over those of a header."""

    def change(data: bytearray) -> None:
        data[at : at + struct.calcsize(form)] = struct.pack(form, *values)

    return change


def all_of(*changes: Change) -> Change:
    def change(data: bytearray) -> None:
        for one in changes:
            one(data)

    return change


def extensions(*found: tuple[int, int]) -> Change:
    """The extensions of a qcow2 header, by type and length, with nothing in them."""
    return lambda data: put(104, ">" + "II" * len(found), *(number for one in found for number in one))(data)


ROWS: dict[str, Change] = {
    "qcow2: a first level with the most entries": put(36, ">I", 1 << 22),
    "qcow2: a first level beyond all": put(36, ">I", LARGEST32),
    "qcow2: a first level behind the end": put(40, ">Q", 1 << 62),
    "qcow2: a first level upon the header": put(40, ">Q", 0),
    "qcow2: the most of refcounts": put(56, ">I", 128),
    "qcow2: refcounts behind the end": put(48, ">Q", LARGEST64),
    "qcow2: the most snapshots": put(60, ">IQ", 65536, 65536),
    "qcow2: snapshots beyond all": put(60, ">IQ", LARGEST32, 65536),
    "qcow2: 16 EiB": put(24, ">Q", LARGEST64),
    "qcow2: an odd size": put(24, ">Q", 513),
    "qcow2: no bytes": put(24, ">Q", 0),
    "qcow2: clusters of one byte": put(20, ">I", 0),
    "qcow2: clusters of 2 MiB": put(20, ">I", 21),
    "qcow2: encrypted by AES": put(32, ">I", 1),
    "qcow2: encrypted by LUKS, without its header": put(32, ">I", 2),
    "qcow2: version 4": put(4, ">I", 4),
    "qcow2: all features": put(72, ">QQQ", LARGEST64, LARGEST64, LARGEST64),
    "qcow2: dirty and corrupt": put(72, ">Q", 3),
    "qcow2: extended entries": put(72, ">Q", 16),
    "qcow2: compressed in a way that nobody knows": all_of(put(72, ">Q", 8), put(104, ">B", 255)),
    "qcow2: refcounts of 2^255 bits": put(96, ">I", 255),
    "qcow2: a header of 4 GiB": put(100, ">I", LARGEST32),
    "qcow2: a header of no bytes": put(100, ">I", 0),
    "qcow2: a backing name of 4 GiB": put(8, ">QI", 512, LARGEST32),
    "qcow2: a backing name behind the end": put(8, ">QI", LARGEST64 - 100, 1023),
    "qcow2: a backing name of zeros": put(8, ">QI", 1000, 1023),
    "qcow2: a backing name upon the header": put(8, ">QI", 0, 1000),
    "qcow2: extensions without end": extensions(*[(0x12345678, 0)] * 8000),
    "qcow2: an extension of 4 GiB": extensions((0x12345678, LARGEST32)),
    "qcow2: bitmaps of 4 GiB": all_of(extensions((0x23852875, 24)), put(112, ">IIQQ", 65535, 0, 1 << 26, 0)),
    "qcow2: a format of 4 GiB": extensions((0xE2792ACA, LARGEST32)),
    "qcow2: names of features without end": extensions((0x6803F857, 48 * 1000)),
    "qcow2: a LUKS header of 2^63 bytes": all_of(
        put(32, ">I", 2), extensions((0x0537BE77, 16)), put(112, ">QQ", 65536, 1 << 63)
    ),
    "qcow: entries of 2^63 bytes": put(32, ">BB", 63, 63),
    "qcow: 16 EiB": put(24, ">Q", LARGEST64),
    "qcow: a backing name of 4 GiB": put(8, ">QI", 48, LARGEST32),
    "qed: clusters and tables beyond all": put(4, "<III", 1 << 31, 1 << 31, 1 << 31),
    "qed: clusters and tables of the most": put(4, "<III", 1 << 26, 16, 1),
    "qed: all features": put(16, "<QQQ", LARGEST64, LARGEST64, LARGEST64),
    "qed: to be repaired": put(16, "<Q", 2),
    "qed: a first level behind the end": put(40, "<Q", 1 << 62),
    "qed: 16 EiB": put(48, "<Q", LARGEST64),
    "qed: a backing name of 4 GiB": all_of(put(16, "<Q", 1), put(56, "<II", 64, LARGEST32)),
    "vmdk: 16 EiB": put(12, "<Q", LARGEST64),
    "vmdk: 8 EiB in small pieces": put(12, "<QQ", 1 << 54, 1),
    "vmdk: a description of 16 EiB": put(28, "<QQ", 1, LARGEST64),
    "vmdk: a directory of 2 GiB": all_of(put(12, "<QQ", 1 << 40, 128), put(44, "<I", 512)),
    "vmdk: one entry a table": all_of(put(12, "<QQ", 1 << 35, 8), put(44, "<I", 1)),
    "vmdk: no entry a table": put(44, "<I", 0),
    "vmdk: a directory at its end": put(56, "<Q", LARGEST64),
    "vdi: blocks beyond all": put(384, "<II", LARGEST32, LARGEST32),
    "vdi: 16 EiB": put(368, "<Q", LARGEST64),
    "vdi: the most blocks": all_of(put(368, "<Q", (1 << 20) * 0x1FFFFF80), put(384, "<I", 0x1FFFFF80)),
    "vdi: blocks of one byte": put(376, "<I", 1),
    "vpc: entries beyond all": put(512 + 28, ">II", LARGEST32, 1 << 21),
    "vpc: blocks of no bytes": put(512 + 32, ">I", 0),
    "vpc: a table behind the end": put(512 + 16, ">Q", LARGEST64),
}


def image(scratch: Path, image_format: str, change: Change | None = None) -> Path:
    path = scratch / f"disk.{image_format}"
    subprocess.run(["qemu-img", "create", "-q", "-f", image_format, path, "8M"], check=True)
    if change:
        data = bytearray(path.read_bytes().ljust(1 << 17, b"\0"))
        change(data)
        path.write_bytes(data)
    jobs.own(scratch, path)
    return path


def look(path: Path, image_format: str, user: Identity) -> str:
    """The word of the fault that the image is; empty where it is like any other. Every other fault is an error."""
    words = []
    for looks in (backing_chain, require_whole):
        try:
            looks(str(path), image_format, user)
        except errors.JobFault as fault:
            words.append(fault.code)
    assert set(words) <= {errors.BAD_IMAGE, errors.INVALID_DISK_PARAM}
    return words[0] if words else ""


@pytest.mark.parametrize("row", ROWS)
def test_no_header_is_more_than_the_jobs_fault(scratch: Path, user: Identity, row: str) -> None:
    image_format = row.partition(":")[0]
    look(image(scratch, image_format, ROWS[row]), image_format, user)


WORK = {
    "that QEMU would check for hours": ("qcow2", put(72, ">Q", 1)),
    "that QEMU would check, as QED": ("qed", put(16, "<Q", 2)),
    "whose bitmaps would fill the memory": ("qcow2", put(88, ">Q", 1)),
    "with a thousand snapshots": ("qcow2", put(60, ">I", 1000)),
    "with a thousand snapshots, of version 2": ("qcow2", all_of(put(4, ">I", 2), put(60, ">I", 1000))),
}


@pytest.mark.parametrize("row", WORK)
def test_an_image_that_makes_qemu_work_is_refused(scratch: Path, user: Identity, row: str) -> None:
    """qemu-img leaves such things alone in a look, and QEMU does them before it answers libvirt."""
    image_format, change = WORK[row]
    path = image(scratch, image_format, change)
    for looks in (backing_chain, require_whole):
        with pytest.raises(errors.JobFault) as caught:
            looks(str(path), image_format, user)
        assert "qemu-img convert" in caught.value.hint
        assert caught.value.code == errors.INVALID_DISK_PARAM


def test_a_table_that_would_fill_the_memory_is_refused(scratch: Path, user: Identity) -> None:
    blocks = 180 << 20  # of 4 bytes each in the table, which QEMU keeps in memory
    path = image(scratch, "vdi", all_of(put(368, "<Q", blocks << 20), put(384, "<II", blocks, 0)))
    os.truncate(path, blocks * 4 + (2 << 20))
    assert look(path, "vdi", user) == errors.BAD_IMAGE


def test_the_looks_at_all_images_of_a_job_have_one_end(scratch: Path, user: Identity) -> None:
    path = image(scratch, "qcow2")
    with pytest.raises(errors.JobFault, match="no time is left") as caught:
        backing_chain(str(path), "qcow2", user, end=0.0)
    assert caught.value.code == errors.BAD_IMAGE


@pytest.mark.parametrize("image_format", FORMATS)
def test_no_damage_is_more_than_the_jobs_fault(scratch: Path, user: Identity, image_format: str) -> None:
    path, chance = image(scratch, image_format), random.Random(image_format)
    whole = path.read_bytes()
    for _ in range(25):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 2, 8, 64))):
            data[chance.randrange(min(len(data), chance.choice((128, 512, 2048))))] = chance.choice((0, 1, 127, 255))
        path.write_bytes(data[: chance.choice((len(data), len(data), chance.randrange(1024)))])
        look(path, image_format, user)


@pytest.mark.parametrize("image_format", FORMATS)
@pytest.mark.parametrize("content", [b"", b"\0", bytes(1 << 20), b"QFI\xfb", b"KDMV", b"\xff" * 4096])
def test_what_has_no_format_is_the_jobs_fault(scratch: Path, user: Identity, image_format: str, content: bytes) -> None:
    path = scratch / "disk"
    path.write_bytes(content)
    jobs.own(scratch, path)
    assert look(path, image_format, user)


@pytest.mark.parametrize("image_format", FORMATS)
def test_a_file_of_terabytes_that_are_not_there(scratch: Path, user: Identity, image_format: str) -> None:
    path = image(scratch, image_format)
    os.truncate(path, 8 << 40)
    look(path, image_format, user)
