"""The head of a memory image: nothing that would make libvirtd stumble passes."""

import errno
import os
import select
import sys
from pathlib import Path

import pytest

from tests import jobs
from tests.checkpoint.support import image, stored
from vmgahp.checkpoint.memory_image import FORMATS, HEADER, LARGEST_HEAD, UNFINISHED, Damaged, Head, inspect
from vmgahp.checkpoint.memory_image import substitute as substitute_of
from vmgahp.checkpoint.substitute import Held, Substitute
from vmgahp.host.job_user import Identity


def look(content: bytes) -> Head:
    with stored(content) as file:
        return inspect(file.fileno())


def substitute(fd: int, xml: str) -> Substitute | Held:
    """Of an image that is not compressed."""
    return substitute_of(fd, xml, FORMATS, lambda *_: pytest.fail("there is nothing to unpack"))


def test_what_libvirt_writes_in_the_formats_of_this_machine() -> None:
    assert look(image()) == Head("<domain/>", "<cookie />", "raw", True, HEADER + 10 + 10 + 64)
    assert look(image(cookie=b"", number=6, running=0)) == Head("<domain/>", "", "sparse", False, HEADER + 10 + 64)
    with stored(image(number=1)) as file:
        assert inspect(file.fileno(), ("gzip", "raw")).format == "gzip"
        with pytest.raises(Damaged, match="has the format gzip, and the settings here have raw or zstd"):
            inspect(file.fileno(), ("raw", "zstd"))
    with stored(image()) as file:
        os.lseek(file.fileno(), 50, os.SEEK_SET)
        assert inspect(file.fileno()).xml == "<domain/>"
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == 50


COOKIE = b"<cookie>\n <cpu mode='custom'><model fallback='forbid'>EPYC-v3</model></cpu>\n <slirpHelper/>\n</cookie>\0"


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
        (image(offset=2**32 - 1), "lengths"),
        (image(length=1000), "does not end"),
        (image(xml=b"<domain/>", offset=9), "does not end"),
        (image(cookie=b"<cookie/>", rest=b"x" * 64), "does not end"),
        (image(xml=b"\xff\0"), "UTF-8"),
        (image(running=2), "what libvirt does not write"),
        (image(pad=b"\1"), "what libvirt does not write"),
        (image(xml=b"<domain/>\0<domain/>\0"), "something after"),
        (image(rest=bytes(63) + b"xQEVM"), "something after"),
        (image(rest=bytes(64)), "not QEMU's"),
        (image(cookie=b"<!DOCTYPE cookie><cookie/>\0"), "cookie cannot be read"),
        (image(cookie=b"<cookie><cpu>\xff</cpu></cookie>\0"), "cookie cannot be read"),
        (image(cookie=b"<cookie>%s</cookie>\0" % (b" " * (1 << 16))), "cookie cannot be read"),
        (image(cookie=b"<cookie>%s%s</cookie>\0" % (b"<cpu>" * 5000, b"</cpu>" * 5000)), "cookie cannot be read"),
        (image(cookie=b"<domain/>\0"), "not libvirt's"),
        (image(cookie=b"<cookie><devices/></cookie>\0"), "not libvirt's"),
        (image(cookie=COOKIE.replace(b"EPYC-v3", b"EPYC-v3,kvm=off")), "not libvirt's"),
    ],
)
def test_what_is_refused(content: bytes, said: str) -> None:
    with pytest.raises(Damaged, match=said):
        look(content)


@pytest.mark.parametrize("cookie", [b"", COOKIE])
def test_libvirtd_sees_no_head_of_the_jobs(cookie: bytes) -> None:
    """The emulator that the XML of a head names is run by libvirtd."""
    theirs = image(b"<domain><devices><emulator>/scratch/run-me</emulator></devices></domain>\0", cookie)
    memory = os.urandom(3 << 20)
    theirs_whole = stored(theirs + memory)
    with substitute(theirs_whole.fileno(), "<domain>größer</domain>") as whole, open(whole.path, "rb") as read:
        seen = read.read()
    with stored(seen) as file:
        head = inspect(file.fileno())
    assert (head.xml, head.was_running, head.format) == ("<domain>größer</domain>", True, "raw")
    assert bool(head.cookie) == bool(cookie)
    assert seen[head.end :] == b"QEVM" + memory
    assert b"run-me" not in seen


def test_a_file_system_that_cannot_splice_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor has one that keeps a splice waiting the lock of the pipe, with which libvirtd could not even open that."""
    memory, seen = os.urandom(3 << 20), []

    def refuse(_: int, target: int, *__: object, **___: object) -> int:
        seen.append(os.fstat(target).st_ino)
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "splice", refuse)
    with stored(image() + memory) as file, substitute(file.fileno(), "<domain/>") as whole:
        assert Path(whole.path).read_bytes().endswith(b"QEVM" + memory)
        assert os.stat(whole.path).st_ino not in seen
    assert seen


@pytest.mark.parametrize(("ahead", "said"), [(HEADER, "x"), (1 << 20, "operation failed: image magic is incorrect")])
def test_who_looks_for_a_second_head_gets_one(ahead: int, said: str) -> None:
    """libvirt opens an image twice since 11.2: for the head alone, and then for the head and what follows it.

    12.8 reads the second time by a helper, which takes what there is.
    """
    memory = os.urandom(3 << 20)
    with stored(image() + memory) as file:
        once = substitute(file.fileno(), "<domain/>")
        with once, open(once.path, "rb", buffering=0) as read:
            head = read.read(HEADER)
            read.read(int.from_bytes(head[20:24], sys.byteorder))
            assert read.read(ahead).startswith(b"QEVM")
        assert ahead > HEADER or once.with_another_head("internal error: qemu unexpectedly closed the monitor") is None
        twice = once.with_another_head(said)
        with twice, open(twice.path, "rb") as read:
            seen = read.read()
        assert seen.count(head) == 2
        assert seen.endswith(b"QEVM" + memory)
        assert twice.with_another_head("image magic is incorrect") is None
        with substitute(file.fileno(), "<domain/>") as whole, open(whole.path, "rb") as read:
            read.read()
        assert whole.with_another_head("it is damaged") is None


def test_the_pipe_is_where_a_guest_may_read_and_keeps_nobody_waiting(tmp_path: Path) -> None:
    """It takes no path beneath /proc, and none that the job's user could lead elsewhere."""
    with stored(image()) as file, substitute(file.fileno(), "<domain/>") as whole:
        room = Path(whole.path).resolve(strict=True).parent
        assert not room.is_relative_to("/proc")
        assert Path(whole.path).is_fifo()
        assert Path(whole.path).stat().st_mode & 0o777 == 0o600
        assert {(room.stat().st_uid, room.stat().st_mode & 0o022)} == {(os.geteuid(), 0)}
    assert not room.exists()
    # A small image is in the pipe before libvirtd comes; and it may come again when that has been read.
    with stored(image()) as file, substitute(file.fileno(), "<domain/>") as whole:
        writers = os.open(whole.path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            poll = select.poll()
            poll.register(writers, 0)  # which tells of the last writer's end
            assert poll.poll(10_000)
        finally:
            os.close(writers)
        assert Path(whole.path).read_bytes().endswith(b"QEVM")
        assert Path(whole.path).read_bytes() == b""


def test_a_head_is_written_over_where_qemu_must_seek(scratch: Path, user: Identity) -> None:
    """And then it is as it was, also whose it is."""
    content = image(b"<domain><devices><emulator>/scratch/run-me</emulator></devices></domain>\0", number=6)
    path = scratch / "image"
    path.write_bytes(content + bytes(1 << 20))
    jobs.own(scratch)
    path.chmod(0o640)
    descriptor = user.open_scratch(str(scratch), "image", os.O_RDONLY)
    try:
        with substitute(descriptor, "<domain/>") as whole:
            with open(whole.path, "rb") as file:
                assert inspect(file.fileno()).xml == "<domain/>"
                seen = file.read()
            assert seen[len(content) :] == bytes(1 << 20)
            assert b"run-me" not in seen
            if os.getuid() == 0:
                with pytest.raises(PermissionError):
                    user.open_scratch(str(scratch), "image", os.O_WRONLY)
        assert path.read_bytes() == content + bytes(1 << 20)
        assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (user.uid, 0o640)
        with pytest.raises(Damaged, match="no room"):
            substitute(descriptor, "<domain>" + "x" * (1 << 16) + "</domain>")
    finally:
        os.close(descriptor)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_file_that_somebody_may_still_write_to_is_not_used(scratch: Path, user: Identity) -> None:
    path = scratch / "image"
    path.write_bytes(image(number=6))
    jobs.own(scratch)
    descriptor = user.open_scratch(str(scratch), "image", os.O_RDONLY)
    writing = user.open_scratch(str(scratch), "image", os.O_WRONLY)
    try:
        with pytest.raises(BlockingIOError):
            substitute(descriptor, "<domain/>")
        assert path.read_bytes() == image(number=6)
        assert path.stat().st_uid == user.uid
    finally:
        os.close(descriptor)
        os.close(writing)
