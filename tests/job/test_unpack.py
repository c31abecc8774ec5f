"""The outputs of a guest: what an archive comes to, and that nothing of it gets anywhere else."""

import io
import os
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs import own, owner
from vmgahp.host.job_user import Identity
from vmgahp.job import unpack
from vmgahp.job.unpack import Unpacked

LARGE = 1 << 30


class Outputs:
    """A scratch directory with a directory for outputs, and the archive that a guest has sent."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.below = scratch / "vm_outputs"
        self.below.mkdir()
        self.user: Identity = owner(scratch)
        own(scratch, self.below)

    def unpack(self, archive: bytes, most: int = LARGE) -> Unpacked:
        path = self.scratch / "vm_outputs.tar"
        path.write_bytes(archive)
        with path.open("rb") as file:
            return unpack.unpack(file.fileno(), str(self.scratch), "vm_outputs", most, self.user)

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


def entry(name: str, content: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), 0o644
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def tar(*entries: tuple[tarfile.TarInfo, bytes], form: int = tarfile.GNU_FORMAT) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=form) as archive:
        for info, content in entries:
            archive.addfile(info, io.BytesIO(content))
    return made.getvalue()


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=kind, linkname=target)


DIRECTORY = {"type": tarfile.DIRTYPE, "mode": 0o755}


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_files_come_as_they_were(outputs: Outputs, form: int) -> None:
    long = "d" * 60 + "/" + "n" * 60
    sent = {"a.txt": b"a", "results/b\n c": b"\0" * 3_000_000 + b"end", "-x": b"", long: b"long"}
    done = outputs.unpack(tar(*(entry(f"./{name}", content) for name, content in sent.items()), form=form))
    assert outputs.files() == sent
    assert done == Unpacked(4, sum(map(len, sent.values())), (), "")


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
    assert (outputs.below / "sub/empty").is_dir()
    assert (outputs.below / "sub/run").stat().st_mode & 0o777 == 0o755
    assert os.readlink(outputs.below / "to") == "sub/run"


def test_the_owner_can_read_all_and_nobody_gains_rights(outputs: Outputs) -> None:
    archive = tar(
        entry("d", **DIRECTORY | {"mode": 0o1}), entry("d/f", b"1", mode=0o6000), entry("s", b"1", mode=0o7777)
    )
    assert outputs.unpack(archive).problem == ""
    modes = {name: stat.S_IMODE((outputs.below / name).stat().st_mode) for name in ("d", "d/f", "s")}
    assert modes == {"d": 0o701, "d/f": 0o600, "s": 0o777}
    assert {(outputs.below / name).stat().st_uid for name in modes} == {outputs.user.uid}


def test_a_hole_is_one_again(outputs: Outputs) -> None:
    assert outputs.unpack(tar(entry("f", bytes(50 << 20)))).size == 50 << 20
    assert (outputs.below / "f").stat().st_size == 50 << 20
    assert (outputs.below / "f").stat().st_blocks * 512 < 1 << 20


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "a/..", "./../x", "//x"])
def test_a_path_that_leads_elsewhere_ends_it(outputs: Outputs, name: str) -> None:
    done = outputs.unpack(tar(entry("before", b"1"), entry(name, b"2"), entry("behind", b"3")))
    assert "leads out" in done.problem
    assert outputs.files() == {"before": b"1"}
    assert sorted(os.listdir(outputs.scratch)) == ["vm_outputs", "vm_outputs.tar"]


@pytest.mark.parametrize(
    "target", ["/etc/passwd", "../secret", "d", "d/", ".", "gone", "l", "d/../../secret", "", "d/../../vm_outputs/f"]
)
@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_a_link_that_leads_to_no_file_of_the_outputs_is_left_out(outputs: Outputs, target: str, kind: bytes) -> None:
    """One to a directory would hold the job, one that leads elsewhere fetch what is there."""
    (outputs.scratch / "secret").write_bytes(b"secret")
    done = outputs.unpack(tar(entry("d", **DIRECTORY), entry("f", b"1"), link("l", target, kind)))
    assert not os.path.lexists(outputs.below / "l")
    assert done.left_out or "leads out" in done.problem
    assert outputs.files() == {"f": b"1"}


def test_nothing_is_written_through_a_link(outputs: Outputs, tmp_path: Path) -> None:
    """Neither one of the archive's nor one that was there."""
    (outputs.below / "out").symlink_to(tmp_path)
    (outputs.scratch / "secret").write_bytes(b"secret")
    os.link(outputs.scratch / "secret", outputs.below / "hard")
    archive = tar(
        *(link("d", str(tmp_path)), entry("d/x", b"1"), entry("out/x", b"1"), entry("f", b"0"), link("f2", "f")),
        *(entry("f2", b"2"), entry("hard", b"3")),
    )
    done = outputs.unpack(archive)
    assert not (tmp_path / "x").exists()
    assert (outputs.scratch / "secret").read_bytes() == b"secret"
    assert (outputs.below / "hard").read_bytes() == b"3"
    assert (outputs.below / "f").read_bytes() == b"0"
    assert any("out/x" in one for one in done.left_out)


@pytest.mark.parametrize("kind", [tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.CONTTYPE, b"S", b"Z"])
def test_what_is_no_file_is_left_out_and_told(outputs: Outputs, kind: bytes) -> None:
    done = outputs.unpack(tar(entry("f", b"1"), entry("odd", type=kind), entry("g", b"2")))
    assert outputs.files() == {"f": b"1", "g": b"2"}
    assert [one for one in done.left_out if one.startswith("'odd'")]


@pytest.mark.parametrize("name", [".job.ad", "_condor_stdout", "vm_exit.json", "vm_checkpoint.json", "vm_outputs/x"])
def test_a_name_of_htcondors_or_of_the_servers_is_left_out(outputs: Outputs, name: str) -> None:
    done = outputs.unpack(tar(entry(name, b"1"), entry("f", b"2")))
    assert outputs.files() == {"f": b"2"}
    assert done.left_out


def test_a_name_that_is_a_directory_and_a_file(outputs: Outputs) -> None:
    done = outputs.unpack(tar(entry("d", **DIRECTORY), entry("d", b"1"), entry("f", b"2"), entry("f/x", b"3")))
    assert outputs.files() == {"f": b"2"}
    assert len(done.left_out) == 2


def test_the_last_of_several_files_of_a_name_counts(outputs: Outputs) -> None:
    outputs.unpack(tar(entry("f", b"long before"), entry("f", b"new")))
    assert outputs.files() == {"f": b"new"}


def test_only_some_of_what_was_left_out_is_named(outputs: Outputs) -> None:
    done = outputs.unpack(tar(*(link(f"l{number}", "/") for number in range(1000))))
    assert len(done.left_out) == unpack.MOST_TOLD + 1
    assert done.left_out[-1] == "and 980 more"


def test_more_than_there_is_room_for_is_not_written(outputs: Outputs) -> None:
    """A bomb of holes counts as what it would be."""
    done = outputs.unpack(tar(entry("f", bytes(600_000)), entry("g", bytes(600_000))), most=1 << 20)
    assert "more than 1 MiB" in done.problem
    assert (done.entries, done.size) == (1, 600_000)
    huge = tarfile.TarInfo("huge")
    huge.size = 1 << 60
    done = outputs.unpack(huge.tobuf(tarfile.GNU_FORMAT))
    assert "more than" in done.problem
    assert not (outputs.below / "huge").exists()


@pytest.mark.parametrize(
    "archive",
    [
        b"\1" * 512,
        os.urandom(2048),
        tar(entry("f", b"1" * 10_000))[:6000],
        tar(entry("f", b"1"))[:300],
        tarfile.TarInfo("n").tobuf()[:156] + b"L" + tarfile.TarInfo("n").tobuf()[157:],
    ],
    ids=["no tar", "noise", "cut in a file", "cut in a header", "a wrong sum"],
)
def test_what_is_no_whole_archive_is_a_sentence(outputs: Outputs, archive: bytes) -> None:
    done = outputs.unpack(archive)
    assert done.problem
    assert outputs.files() == {}, "half a file is none"


def test_headers_that_want_all_memory_are_a_sentence(outputs: Outputs) -> None:
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 1 << 40
    assert outputs.unpack(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)).problem
    chain = b""
    for _ in range(5000):
        info.size = 2
        chain += info.tobuf(tarfile.GNU_FORMAT) + b"a\0".ljust(512, b"\0")
    assert outputs.unpack(chain + bytes(1024)).problem


def test_no_archive_at_all_is_no_problem(outputs: Outputs) -> None:
    assert outputs.unpack(bytes(10240)) == Unpacked(0, 0, (), "")


def test_too_deep_and_too_long_names_end_it(outputs: Outputs) -> None:
    assert "too deep" in outputs.unpack(tar(entry("a/" * 200 + "b", b"1"))).problem
    assert "too deep" in outputs.unpack(tar(entry("a" * 300, b"1"))).problem


def test_two_thousand_files(outputs: Outputs) -> None:
    done = outputs.unpack(tar(*(entry(f"d{number % 10}/f{number}", b"1") for number in range(2_000))))
    assert (done.entries, done.problem) == (2_000, "")
