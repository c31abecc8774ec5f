"""What ``vmgahp image build`` refuses, and what it leaves of itself; `test_boot` boots what it makes."""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import jobs
from tests.commands.image.support import Place, place
from tests.commands.support import absent
from tests.images.support import write
from vmgahp.commands.arguments import NotDone
from vmgahp.commands.image import build

__all__ = ["place"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["debian-99"], "one of debian-12 or debian-13"),
        (["debian-12", "--size", "much"], "--size: much is no size"),
        (["debian-12", "--mirror", "-"], "no URL"),
        (["debian-12", "--packages", "a,--b"], "--b is no name of a Debian package"),
        (["debian-12", "--copy", "/etc/passwd"], "not FILE:PATH"),
        (["debian-12", "--copy", "/etc/passwd:/etc/../x"], "not FILE:PATH"),
        (["debian-12", "--copy", "/nonexistent:/x"], "is not a file"),
    ],
)
def test_what_cannot_be_made_is_refused_at_once(place: Place, words: list[str], complaint: str) -> None:
    ended = place.image("build", *words)
    assert ended.status == 2
    assert complaint in ended.err


def test_an_image_that_is_there_stays(place: Place, tmp_path: Path) -> None:
    there = tmp_path / "a.qcow2"
    there.write_text("mine")
    assert "is there already" in place.image("build", "debian-12", "-o", str(there)).err
    assert there.read_text() == "mine"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_root_makes_none_where_others_could_lead_it_elsewhere(place: Place, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    said = place.refused("build", "debian-12", "-o", str(theirs / "a.qcow2"))
    assert f"{theirs}, which belongs to user id 65534" in said
    assert list(theirs.iterdir()) == []


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_link_of_a_users_leads_root_to_nothing_that_an_image_would_show(scratch: Path, tmp_path: Path) -> None:
    (scratch / "link").symlink_to(write(tmp_path / "secret", b"secret"))
    jobs.own(scratch, write(scratch / "own", b"own"))

    def copy(name: str) -> None:
        options = argparse.Namespace(copy=[(str(scratch / name), "tool")], name="debian-12")
        build._Build(options, str(tmp_path), str(tmp_path))._write_ours()

    copy("own")
    with pytest.raises(NotDone, match="which other users can change"):
        copy("link")


def test_what_is_missing_is_named_with_packages(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build, "FILES", {"/nonexistent": "grub-pc-bin"})
    said = place.image("build", "debian-12", "-o", str(tmp_path / "a.qcow2")).err
    packages = ("mmdebstrap", "mtools", "e2fsprogs", "qemu-utils", "grub-pc-bin")
    assert absent(said, "apt-get install", *packages) == []


# What is called in place of the true one; each is a shell script.
_FAILS = "echo 'E: no such suite' >&2; exit 25"
_STAYS = 'touch "$TMPDIR/packages"; echo > "$READY"; exec sleep 600'


def begin(directory: Path, mmdebstrap: str, before: str = "") -> "subprocess.Popen[str]":
    """A build with that program in place of mmdebstrap, and Python statements that come `before` it."""
    programs = directory / "bin"
    for made in (programs, directory / "out", directory / "rooms"):
        made.mkdir()
    for name in (*build.PROGRAMS, "newuidmap"):
        if name not in ("unshare", "tar"):
            (programs / name).write_text(f"#!/bin/sh\n{mmdebstrap if name == 'mmdebstrap' else 'exit 1'}\n")
            (programs / name).chmod(0o755)
    code = (
        "import sys; from vmgahp.commands.image import build; build.FILES = {}; "
        f"{before}from vmgahp.cli import main; sys.exit(main(['vmgahp', 'image', *sys.argv[1:]]))"
    )
    environ = {"PATH": f"{programs}:{os.environ['PATH']}", "TMPDIR": f"{directory}/rooms"}
    command = [sys.executable, "-P", "-c", code, "build", "debian-12", "-o", str(directory / "out" / "a.qcow2")]
    return subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)


def left(directory: Path) -> list[str]:
    return [str(path) for name in ("out", "rooms") for path in (directory / name).rglob("*")]


_INTERRUPTED = (
    "import os; discard = build._discard; build._discard = lambda room: (os.kill(os.getpid(), 2), discard(room)); "
)


@pytest.mark.parametrize(("before", "status"), [("", 1), (_INTERRUPTED, 130)], ids=["failed", "clean-up interrupted"])
def test_what_failed_is_told_and_nothing_is_left(tmp_path: Path, before: str, status: int) -> None:
    running = begin(tmp_path, _FAILS, before)
    _, err = running.communicate(timeout=60)
    assert (running.returncode, left(tmp_path)) == (status, []), err
    assert before or "mmdebstrap ended with 25: E: no such suite" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_of_one_that_is_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    running = begin(tmp_path, _STAYS.replace("$READY", str(ready)))
    ready.read_text()  # to its end, or a SIGPIPE could end the program
    assert any(path.endswith("/packages") for path in left(tmp_path))
    running.send_signal(number)
    _, err = running.communicate(timeout=60)
    assert (running.returncode, left(tmp_path)) == (130, []), err
