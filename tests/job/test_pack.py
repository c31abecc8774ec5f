"""The archive of a job's files: what is in it, that it is always the same, and what is refused."""

import io
import os
import shutil
import socket
import stat
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs import own
from vmgahp.errors import MachineFault
from vmgahp.host.job_user import Identity
from vmgahp.job import archive
from vmgahp.job.archive import Packing, Unpackable

LARGE = 1 << 30
HEAD = {"vmgahp-run/version": b"1\n", "vmgahp-run/run": b"#!/bin/sh\n"}


class Scratch:
    """A scratch directory, and the archive that is made of it."""

    def __init__(self, path: Path, user: Identity) -> None:
        self.path = path
        self.user = user
        self.archive = path / ".vm_run.tar.1.tmp"

    def put(self, name: str | bytes, content: bytes = b"", mode: int = 0o644) -> str:
        path = os.path.join(os.fsencode(self.path), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)
        os.chmod(path, mode)
        self.give()
        return os.fsdecode(path)

    def give(self) -> None:
        own(self.path, *(path for path in self.path.rglob("*") if not path.is_symlink()))

    def pack(
        self, names: tuple[str, ...] | None = None, but: tuple[str, ...] = (), when: int = 7, most: int = LARGE
    ) -> tuple[str, ...]:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        output = self.user.open_scratch(str(self.path), self.archive.name, flags)
        try:
            return archive.pack(str(self.path), output, Packing(HEAD, names, but, when), most, self.user)
        finally:
            os.close(output)

    def members(self) -> dict[str, tarfile.TarInfo]:
        with tarfile.open(self.archive) as archive:
            return {member.name: member for member in archive.getmembers()}

    def names(self) -> list[str]:
        """What is in it of the job's."""
        return [name.removeprefix("inputs/") for name in self.members() if name not in HEAD]

    def refused(self, *parts: str, names: tuple[str, ...] | None = None, most: int = LARGE) -> Unpackable:
        with pytest.raises(Unpackable) as caught:
            self.pack(names, most=most)
        for part in parts:
            assert part in caught.value.problem
        assert caught.value.hint.endswith(".")
        return caught.value


@pytest.fixture
def place(scratch: Path, user: Identity) -> Scratch:
    return Scratch(scratch, user)


def unpack(tar: list[str], place: Scratch, to: Path) -> None:
    with open(place.archive, "rb") as disk:
        subprocess.run([*tar, "-xpf", "-", "-C", str(to)], stdin=disk, check=True)


def test_a_guest_finds_the_program_first_and_then_the_inputs(place: Scratch, tmp_path: Path) -> None:
    place.put("fit.py", b"print(17)\n", 0o755)
    place.put("data/a b.csv", b"1,2\n" * 1000, 0o640)
    place.put("data/deep/er/empty")
    (place.path / "data/none").mkdir()
    (place.path / "data/last").symlink_to("a b.csv")
    place.give()
    assert place.pack() == ("data", "fit.py")
    assert place.archive.read_bytes()[:11] == b"vmgahp-run/"
    assert place.archive.stat().st_size % (1 << 20) == 0
    assert list(place.members())[: len(HEAD)] == list(HEAD)
    unpack(["tar"], place, tmp_path)
    inputs = tmp_path / "inputs"
    assert (inputs / "fit.py").read_bytes() == b"print(17)\n"
    assert stat.S_IMODE((inputs / "fit.py").stat().st_mode) == 0o755
    assert stat.S_IMODE((inputs / "data/a b.csv").stat().st_mode) == 0o640
    assert (inputs / "data/last").read_bytes() == b"1,2\n" * 1000
    assert (inputs / "data/none").is_dir()
    assert (inputs / "data/deep/er/empty").read_bytes() == b""
    assert (tmp_path / "vmgahp-run/run").read_bytes() == b"#!/bin/sh\n"


@pytest.mark.parametrize("tar", [["tar"], ["busybox", "tar"]], ids=["gnu", "busybox"])
def test_any_tar_reads_it_from_a_disk(place: Scratch, tmp_path: Path, tar: list[str]) -> None:
    if not shutil.which(tar[0]):
        pytest.skip(f"needs {tar[0]}")
    long = "/".join(["d" * 60] * 5)
    place.put(f"{long}/file", b"content")
    place.put("a\nb'$(c)", b"odd")
    place.put("x", b"0" * 10_000)
    (place.path / "link").symlink_to(f"{long}/file")
    place.pack()
    unpack(tar, place, tmp_path)
    inputs = tmp_path / "inputs"
    assert (inputs / long / "file").read_bytes() == b"content"
    assert (inputs / "a\nb'$(c)").read_bytes() == b"odd"
    assert (inputs / "link").read_bytes() == b"content"


def test_the_same_files_make_the_same_bytes(place: Scratch, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b", "a/y", "a/x", "c"):
        place.put(name, name.encode() * 100)
    place.pack()
    first = place.archive.read_bytes()
    shutil.rmtree(place.path / "a")
    for name in ("a/x", "a/y", "c"):
        place.put(name, name.encode() * 100)
        os.utime(place.path / name, (10**9, 10**9))
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    place.pack()
    assert place.archive.read_bytes() == first
    assert {member.mtime for member in place.members().values()} == {7}
    assert {(member.uid, member.gid, member.uname) for member in place.members().values()} == {(0, 0, "")}


def test_a_time_that_no_archive_can_have_and_a_time_limit(place: Scratch, monkeypatch: pytest.MonkeyPatch) -> None:
    place.put("a")
    place.pack(when=2**62)
    assert place.members()["inputs/a"].mtime == 8**11 - 1
    monkeypatch.setattr(archive, "PACK_DEADLINE", 0.0)
    with pytest.raises(OSError, match="not packed within"):
        place.pack()


def test_only_what_is_the_jobs_is_an_input(place: Scratch) -> None:
    for one in (".job.ad", "_condor_stdout", "vm_console.log", "vm_exit.json", "disk.qcow2", ".netrc", "in", "vm_list"):
        place.put(one)
    place.put("vm_outputs/a")
    place.put("data/vm_exit.json")
    assert place.pack(but=("disk.qcow2",)) == (".netrc", "data", "in", "vm_list")
    assert place.names() == [".netrc", "data", "data/vm_exit.json", "in", "vm_list"]


def test_named_inputs_and_no_others(place: Scratch) -> None:
    for name in ("a", "b", "data/x/1", "data/y/2"):
        place.put(name)
    assert place.pack(("data/x", "a")) == ("a", "data")
    assert place.names() == ["a", "data/x", "data/x/1"]
    assert place.pack(()) == ()
    assert place.names() == []


@pytest.mark.parametrize("name", ["vm_exit.json", ".job.ad", "disk.qcow2"])
def test_a_named_input_that_is_not_the_jobs(place: Scratch, name: str) -> None:
    place.put(name)
    with pytest.raises(Unpackable, match="no file of the job's"):
        place.pack((name,), but=("disk.qcow2",))


def test_a_named_input_that_is_not_there(place: Scratch) -> None:
    assert "transfer_input_files" in place.refused("data", "No such file", names=("data",)).hint
    place.put("a")
    place.refused("'a/b'", "Not a directory", names=("a/b",))


def test_names_that_are_no_text(place: Scratch) -> None:
    place.put(b"\xff\xfe", b"1")
    place.put("ä\u2028b", b"2")
    assert sorted(map(os.fsencode, place.pack())) == sorted([b"\xff\xfe", "ä\u2028b".encode()])
    with tarfile.open(place.archive, errors="surrogateescape") as archive:
        assert os.fsencode(archive.getnames()[-1]) == b"inputs/\xff\xfe"


def test_no_field_is_too_short(place: Scratch) -> None:
    with open(place.put("large"), "r+b") as file:
        file.truncate(9 << 30)
    assert "more than the 1 MiB" in place.refused(most=1 << 20).problem
    with tarfile.open(fileobj=io.BytesIO(place.archive.read_bytes() + bytes(10240)), mode="r|") as archive:
        assert next(member.size for member in archive if member.name == "inputs/large") == 9 << 30


def test_no_more_is_written_than_may_be(place: Scratch) -> None:
    place.put("a", b"x" * 2_000_000)
    assert "request_disk" in place.refused("more than the 1 MiB", most=1 << 20).hint
    assert place.archive.stat().st_size <= 1 << 20
    place.pack(most=3 << 20)


def test_what_is_no_file_says_nothing_of_the_others(place: Scratch) -> None:
    os.mkfifo(place.path / "fifo")
    socket.socket(socket.AF_UNIX).bind(str(place.path / "socket"))
    place.put("a", b"1")
    place.pack()
    assert place.names() == ["a", "fifo"]


def test_a_link_that_stays_is_packed_as_one_and_not_followed(place: Scratch) -> None:
    place.put("secret", b"1")
    (place.path / "d").mkdir()
    (place.path / "d/a").symlink_to("../secret")
    (place.path / "loop").symlink_to("loop")
    place.give()
    assert place.pack(("d", "loop")) == ("d", "loop")
    assert place.members()["inputs/d/a"].linkname == "../secret"
    assert place.names() == ["d", "d/a", "loop"]
    place.refused("'d/a/x'", names=("d/a/x",))


def test_a_file_with_two_names_is_packed_twice(place: Scratch) -> None:
    place.put("a", b"x" * 600)
    os.link(place.path / "a", place.path / "b")
    place.pack()
    assert [place.members()[f"inputs/{name}"].size for name in "ab"] == [600, 600]


def test_a_file_that_its_owner_may_not_read(place: Scratch) -> None:
    place.put("closed", b"1", 0)
    place.refused("closed", "Permission denied")


def deep(place: Scratch, levels: int) -> int:
    """The descriptor of a directory below as many others, with names as long as can be."""
    above = os.open(place.path, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(b"\xff" * 250, dir_fd=above)
        below = os.open(b"\xff" * 250, os.O_RDONLY, dir_fd=above)
        os.fchown(below, place.user.uid, place.user.gid)
        os.close(above)
        above = below
    return above


def test_a_name_that_is_too_long_to_be_told(place: Scratch) -> None:
    """It is the job's fault all the same."""
    above = deep(place, 90)
    os.mkdir("closed", 0, dir_fd=above)
    os.close(above)
    if place.user.switching:
        assert len(place.refused("tar: ").problem) < 500


def test_132_000_long_deep_names_are_the_jobs_fault(place: Scratch) -> None:
    """They take no memory: 132,000 paths of 8 KB are more than a process may have."""
    above = deep(place, 32)
    os.close(os.open("0", os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=above))
    for number in range(132_000):
        if number % 60_000 == 0:  # a file has 65,000 names at most
            first = f"{number:0250}"
            os.close(os.open(first, os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=above))
        else:
            os.link(first, f"{number:0250}", src_dir_fd=above, dst_dir_fd=above)
    os.close(above)
    assert "request_disk" in place.refused("more than the 64 MiB", most=64 << 20).hint


def test_too_many_names_are_at_fault_or_a_missing_find(place: Scratch, monkeypatch: pytest.MonkeyPatch) -> None:
    place.put("a")
    monkeypatch.setattr(archive, "LONGEST_LIST", 1)
    place.refused("too many files")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MachineFault, match="find is not installed"):
        place.pack()


@pytest.fixture
def restless(place: Scratch) -> Iterator[str]:
    """A file that always changes its length, in a directory that is now and then a link."""
    place.put("d/file", b"x" * 100_000)
    outside = place.path.parent / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"SECRET" * 10)
    (place.path / "link").symlink_to(outside)
    over = threading.Event()

    def change() -> None:
        while not over.is_set():
            with open(place.path / "e", "wb") as file:
                file.write(b"y" * 50_000)
            try:
                os.rename(place.path / "e", place.path / "d/file")
                os.rename(place.path / "d", place.path / "was")
                os.rename(place.path / "link", place.path / "d")
                os.rename(place.path / "d", place.path / "link")
                os.rename(place.path / "was", place.path / "d")
            except OSError:
                pass

    thread = threading.Thread(target=change)
    thread.start()
    yield "d"
    over.set()
    thread.join()


def test_who_changes_names_meanwhile_gets_nothing_of_others(place: Scratch, restless: str) -> None:
    for _ in range(15):
        try:
            place.pack((restless,))
        except (Unpackable, OSError):
            pass
        assert b"SECRET" not in place.archive.read_bytes()
