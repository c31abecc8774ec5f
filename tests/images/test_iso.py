"""ISO images of a job's files: what is in them, by whom they are written, and what is refused."""

import os
import stat
import sys
from pathlib import Path

import pycdlib
import pytest

from tests import jobs
from tests.images.support import AS_ROOT, read
from tests.images.support import write as executable
from vmgahp.errors import JobFault, MachineFault
from vmgahp.host.job_user import Identity
from vmgahp.images import iso
from vmgahp.images.iso import Unfit, write


def test_a_guest_finds_names_and_contents(scratch: Path, user: Identity) -> None:
    contents = {"user-data": b"#cloud-config\n", "params/deep/In Put.csv": b"1,2\n" * 5000, "empty": b"", "ä": b"x"}
    write(str(scratch), "seed.iso", "cidata", contents, user, most_bytes=1 << 20)
    assert read(scratch / "seed.iso") == contents
    assert read(scratch / "seed.iso", "joliet") == contents
    assert (scratch / "seed.iso").read_bytes()[32768 + 40 : 32768 + 72].rstrip() == b"cidata"
    (scratch / "in").write_bytes(b"0123456789")
    with open(scratch / "in", "rb") as file:
        file.read()
        write(str(scratch), "a.iso", "X", {"in": file.fileno()}, user, most_bytes=10)
    assert read(scratch / "a.iso") == {"in": b"0123456789"}


def test_the_image_is_the_users_alone_and_follows_no_link(scratch: Path, user: Identity, tmp_path: Path) -> None:
    write(str(scratch), "seed.iso", "X", {"a": b"1"}, user, most_bytes=1 << 20)
    status = (scratch / "seed.iso").stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (user.uid, user.gid, 0o600)
    assert os.listdir(scratch) == ["seed.iso"]
    outside = tmp_path / "outside"
    outside.write_bytes(b"untouched")
    (scratch / "a.iso").symlink_to(outside)
    write(str(scratch), "a.iso", "X", {"a": b"1"}, user, most_bytes=10)
    assert outside.read_bytes() == b"untouched"
    assert not (scratch / "a.iso").is_symlink()


@pytest.mark.parametrize(("secret", "mode"), [(False, 0o444), (True, 0o400)])
def test_what_is_secret_is_for_the_guests_root(scratch: Path, user: Identity, secret: bool, mode: int) -> None:
    write(str(scratch), "a.iso", "X", {"d/f": b"1"}, user, most_bytes=100, secret=secret)
    image = pycdlib.PyCdlib()
    image.open(str(scratch / "a.iso"))
    assert stat.S_IMODE(image.get_record(rr_path="/d/f").rock_ridge.get_file_mode()) == mode


def test_the_same_contents_make_the_same_bytes(scratch: Path, user: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {"b": b"2", "a/c": b"1" * 3000}
    write(str(scratch), "one.iso", "X", contents, user, most_bytes=1 << 20)
    (scratch / "c").write_bytes(b"1" * 3000)
    os.utime(scratch / "c", (10**9, 10**9))
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    with open(scratch / "c", "rb") as file:
        write(str(scratch), "two.iso", "X", {"a/c": file.fileno(), "b": b"2"}, user, most_bytes=1 << 20)
    made = (scratch / "one.iso").read_bytes()
    assert made == (scratch / "two.iso").read_bytes()
    assert made[32768 + 813 :].startswith(b"2000010100000000\0"), "and no hour of today's is in it"


@pytest.mark.parametrize(
    ("contents", "why"),
    [
        ({"": b""}, "plain relative name"),
        ({"/etc/passwd": b""}, "plain relative name"),
        *(({"../x": b""}, "plain relative name"), ({"a/./b": b""}, "plain relative name")),
        *(({"a\0b": b""}, "plain relative name"), ({"\udcff": b""}, "UTF-8"), ({"x" * 201: b""}, "200 bytes")),
        ({"a/" * 7 + "b": b""}, "deeper"),
        ({"a": b"", "a/b": b""}, "both a file and a directory"),
        ({str(number): b"" for number in range(501)}, "501 files"),
        ({"a": b"12345", "b": b"678901"}, "11 bytes, and 10 is the most"),
    ],
)
def test_what_can_be_no_image_is_unfit(scratch: Path, user: Identity, contents: dict[str, bytes], why: str) -> None:
    with pytest.raises(Unfit, match=why):
        write(str(scratch), "a.iso", "X", contents, user, most_bytes=10)
    assert os.listdir(scratch) == []


def test_many_files_and_names_that_only_windows_confuses(scratch: Path, user: Identity) -> None:
    contents = {f"{number % 7}/file-{number}": b"%d" % number for number in range(500)}
    write(str(scratch), "a.iso", "X", contents, user, most_bytes=1 << 20)
    assert read(scratch / "a.iso") == contents
    contents = {"DATA": b"1", "Data": b"2", "a:b": b"3", "a;b": b"4", "é" * 60 + "1": b"5", "é" * 60 + "2": b"6"}
    write(str(scratch), "a.iso", "X", contents, user, most_bytes=100)
    assert read(scratch / "a.iso") == contents
    joliet = read(scratch / "a.iso", "joliet")
    assert sorted(joliet.values()) == [b"1", b"2", b"3", b"4", b"5", b"6"]
    assert len({name.lower() for name in joliet}) == 6


def test_a_directory_of_that_name_that_came_with_the_job_is_the_jobs_fault(scratch: Path, user: Identity) -> None:
    (scratch / "seed.iso" / "full").mkdir(parents=True)
    jobs.own(scratch)
    with pytest.raises(JobFault, match="Is a directory"):
        write(str(scratch), "seed.iso", "X", {"a": b"1"}, user, most_bytes=1 << 20)
    assert os.listdir(scratch) == ["seed.iso"]


@AS_ROOT
def test_it_is_written_where_the_user_may_write(scratch: Path, user: Identity) -> None:
    os.chown(scratch, 0, 0)
    with pytest.raises(MachineFault, match="Permission denied"):
        write(str(scratch), "a.iso", "X", {"a": b"1"}, user, most_bytes=10)


@AS_ROOT
def test_files_are_read_as_user(scratch: Path, user: Identity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen from within: the code is loaded by making an image of nothing as root; the job's is made without root."""
    notes, code = tmp_path / "notes", tmp_path / "code.py"
    code.write_text(
        f"import os, sys; from vmgahp.images import iso as m; made = m._image; notes = open({str(notes)!r}, 'a')\n"
        "def image(*rest):\n"
        "    print(os.getresuid(), os.getresgid(), os.getgroups(), file=notes, flush=True)\n"
        "    made(*rest)\n"
        "m._image = image; sys.exit(m._main())\n"
    )
    python = executable(tmp_path / "python", f"#!/bin/sh\nexec {sys.executable} {code}\n", mode=0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    write(str(scratch), "a.iso", "X", {"a": b"1"}, user, most_bytes=10)
    [_, wrote] = notes.read_text().splitlines()
    assert wrote == f"{(user.uid,) * 3} {(user.gid,) * 3} []"


def test_what_fails_while_it_is_written(scratch: Path, user: Identity) -> None:
    (scratch / "in").write_bytes(b"0123456789")
    with (
        open(scratch / "in", "rb") as file,
        open(scratch / "out", "wb+") as output,
        pytest.raises(Unfit, match="'in' has changed"),
    ):
        iso._write(output.fileno(), "X", [("in", file.fileno(), 5000)], user, secret=False)
    with open("/dev/full", "rb+", buffering=0) as full, pytest.raises(OSError, match="No space left"):
        iso._write(full.fileno(), "X", [], user, secret=False)
    with open(scratch / "huge", "wb+") as file:
        file.truncate(1 << 32)
        with pytest.raises(Unfit, match="'huge' has 4294967296 bytes"):
            write(str(scratch), "a.iso", "X", {"huge": file.fileno()}, user, most_bytes=1 << 40)


def test_pycdlib_is_named(scratch: Path, user: Identity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # one that finds this package and nothing else that was installed
    bare = executable(
        tmp_path / "bare-python",
        f"#!/bin/sh\nshift\nPYTHONPATH={Path(iso.__file__).parents[2]} exec {sys.executable} -S -c "
        '\'import runpy; runpy.run_module("vmgahp.images.iso", run_name="__main__")\'\n',
        mode=0o755,
    )
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(MachineFault) as raised:
        write(str(scratch), "a.iso", "X", {"a": b"1"}, user, most_bytes=10)
    assert "pycdlib is not installed" in raised.value.problem
    assert "pycdlib" in raised.value.hint
    assert os.listdir(scratch) == []
