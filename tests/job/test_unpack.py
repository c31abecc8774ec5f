"""The outputs of a guest: what an archive comes to, and that nothing of it gets anywhere else."""

import os
import shutil
import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.job.support import entry, link, tar
from tests.jobs import own, owner
from vmgahp.host.job_user import Identity
from vmgahp.job.archive import _PROGRAM, BLOCK, ENTRY, MOST_TOLD, Allowed, Unpacked, unpack

LARGE = 1 << 30
ALL = ("*",)


class Outputs:
    """A scratch directory with a directory for outputs, and the archive that a guest has sent."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.below = scratch / "vm_outputs"
        self.user: Identity = owner(scratch)
        own(scratch)

    def unpack(self, archive: bytes, most=LARGE, names: Sequence[str] = ALL, entries=LARGE, kept=0) -> Unpacked:
        path = self.scratch / "vm_outputs.tar"
        path.write_bytes(archive)
        with path.open("rb") as file:
            allowed = Allowed(names, most, entries, kept, ("fit.log",))
            return unpack(file.fileno(), str(self.scratch), "vm_outputs", allowed, self.user)

    def files(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.below)): path.read_bytes()
            for path in self.below.rglob("*")
            if path.is_file() or path.is_symlink()
        }


@pytest.fixture
def outputs(scratch: Path) -> Iterator[Outputs]:
    yield Outputs(scratch)
    subprocess.run(["chmod", "-R", "u+rwx", str(scratch)], check=False)


DIRECTORY = {"type": tarfile.DIRTYPE, "mode": 0o755}


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_files_come_as_they_were(outputs: Outputs, form: int) -> None:
    long = "d" * 60 + "/" + "n" * 60
    sent = {"a.txt": b"a", "results/b\n c": b"\0" * 3_000_000 + b"end", "-x": b"", long: b"long"}
    packed = {**sent, "fit.log": b"where HTCondor writes its own"}
    done = outputs.unpack(tar(*(entry(f"./{name}", content) for name, content in packed.items()), form=form))
    assert outputs.files() == sent
    taken = (733 + 1 + 1 + 2) * BLOCK + (4 + 2) * ENTRY  # three files with content, and two directories
    left_out = ("'fit.log': a name of HTCondor's or of the server's",)
    assert done == Unpacked(4, sum(map(len, sent.values())), left_out, "", taken)


@pytest.mark.parametrize("command", [["tar"], ["busybox", "tar"]], ids=lambda words: words[0])
def test_what_a_guests_tar_makes_comes_as_it_was(outputs: Outputs, tmp_path: Path, command: list[str]) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {command[0]}")
    there = tmp_path / "there"
    (there / "sub/empty").mkdir(parents=True)
    (there / "sub/run").write_bytes(b"#!/bin/sh\n")
    (there / "sub/run").chmod(0o755)
    os.link(there / "sub/run", there / "again")
    (there / "to").symlink_to("sub/run")
    archive = subprocess.run([*command, "-cf", "-", "."], cwd=there, stdout=-1, check=True, timeout=60).stdout
    done = outputs.unpack(archive)
    assert (done.problem, done.left_out) == ("", ())
    assert outputs.files() == dict.fromkeys(("sub/run", "again", "to"), b"#!/bin/sh\n")
    assert not (outputs.below / "to").is_symlink(), "a link is another name of its file"
    assert (outputs.below / "sub/empty").is_dir()
    assert (outputs.below / "sub/run").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_a_link_to_a_link_is_a_file_in_whatever_order_they_come(outputs: Outputs, kind: bytes) -> None:
    done = outputs.unpack(tar(link("d/to", "../via"), link("via", "f", kind), entry("f", b"1"), link("round", "round")))
    assert outputs.files() == dict.fromkeys(("d/to", "via", "f"), b"1")
    assert done.left_out == ("'round': a link to what is no file of the outputs",)


def test_the_owner_can_read_all_and_nobody_gains_rights(outputs: Outputs) -> None:
    closed = entry("d", **DIRECTORY | {"mode": 0o1})
    archive = tar(closed, entry("d/f", b"1", mode=0o6000), entry("s", b"1", mode=0o7777))
    assert outputs.unpack(archive).problem == ""
    modes = {name: stat.S_IMODE((outputs.below / name).stat().st_mode) for name in ("d", "d/f", "s")}
    assert modes == {"d": 0o701, "d/f": 0o600, "s": 0o777}
    assert {(outputs.below / name).stat().st_uid for name in modes} == {outputs.user.uid}


def test_nothing_is_written_through_a_link(outputs: Outputs, tmp_path: Path) -> None:
    """Neither one of the archive's nor one that was there."""
    outputs.below.mkdir()
    (outputs.below / "out").symlink_to(tmp_path)
    (outputs.scratch / "secret").write_bytes(b"secret")
    os.link(outputs.scratch / "secret", outputs.below / "hard")
    own(outputs.scratch, outputs.below, outputs.scratch / "secret")
    archive = tar(
        *(link("d", str(tmp_path)), entry("d/x", b"1"), entry("out/x", b"1"), entry("f", b"0"), link("f2", "f")),
        *(entry("f2", b"2"), entry("hard", b"3")),
    )
    done = outputs.unpack(archive)
    assert list(tmp_path.iterdir()) == []
    assert (outputs.scratch / "secret").read_bytes() == b"secret"
    assert outputs.files() == {"d/x": b"1", "out/x": b"1", "f": b"0", "f2": b"2", "hard": b"3"}
    assert len(done.left_out) == 2


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (ALL, ["a", "b[3].csv", "r/.b", "r/c/d", "r/x.csv"]), ((".bashrc",), [".bashrc"]),
        (("r", "nothing"), ["r/.b", "r/c/d", "r/x.csv"]), (("r/*.csv", "a"), ["a", "r/x.csv"]),
        (("*.csv",), ["b[3].csv"]), (("b[3].csv",), ["b[3].csv"]),
        (("r/[[:alpha:]]",), ["r/c/d"]), ((r"\a",), ["a"]), ((".ssh/*",), [".ssh/authorized_keys"]),
        (("a/*", "?"), ["a", "r/.b", "r/c/d", "r/x.csv"]), ((), []),
    ],
)  # fmt: skip
def test_what_the_job_did_not_ask_for_is_left_out(outputs: Outputs, names: Sequence[str], expected: list[str]) -> None:
    """Whatever the guest sends: its image may be a stranger's, and the outputs replace files of the job's owner."""
    sent = ("a", ".bashrc", ".ssh/authorized_keys", "r/x.csv", "r/c/d", "r/.b", "b[3].csv")
    done = outputs.unpack(tar(*(entry(name, b"1") for name in sent)), names=names)
    assert (sorted(outputs.files()), done.problem) == (expected, "")
    assert len(done.left_out) == len(sent) - len(expected)
    assert all("has not asked" in one for one in done.left_out)


def test_several_entries_of_one_name(outputs: Outputs) -> None:
    done = outputs.unpack(tar(entry("d", **DIRECTORY), entry("d", b"1"), entry("f", b"2"), entry("f/x", b"3")))
    assert outputs.files() == {"f": b"2"}
    assert len(done.left_out) == 2
    outputs.unpack(tar(entry("f", b"long before"), entry("f", b"new")))
    assert outputs.files() == {"f": b"new"}, "the last of a name counts"


def test_only_some_of_what_was_left_out_is_named(outputs: Outputs) -> None:
    done = outputs.unpack(tar(*(link(f"l{number}", "/") for number in range(1000))))
    assert len(done.left_out) == MOST_TOLD + 1
    assert done.left_out[-1] == "and 980 more"


def test_more_than_there_is_room_for_is_not_written(outputs: Outputs) -> None:
    """A bomb of holes counts as what it would be."""
    done = outputs.unpack(tar(entry("f", bytes(600_000)), entry("g", bytes(600_000))), most=1 << 20)
    assert "more than the 1 MiB" in done.problem
    assert (done.entries, done.size) == (1, 600_000)
    huge = tarfile.TarInfo("huge")
    huge.size = 1 << 60
    done = outputs.unpack(huge.tobuf(tarfile.GNU_FORMAT))
    assert "more than" in done.problem
    assert not (outputs.below / "huge").exists()
    assert "there is no room" in outputs.unpack(tar(entry("x", b"1")), kept=1 << 62).problem
    assert not outputs.files()


def test_no_archive_at_all_is_no_problem(outputs: Outputs) -> None:
    assert outputs.unpack(bytes(10240)) == Unpacked(0, 0, (), "")


def test_it_needs_nothing_of_the_package_that_an_upgrade_replaces() -> None:
    """Neither before nor after the upgrade: there is no package without Python's site module."""
    words = [sys.executable, "-I", "-S", "-c", _PROGRAM]
    done = subprocess.run(words, input="", capture_output=True, text=True, check=False, timeout=60)
    assert "JSONDecodeError" in done.stderr
