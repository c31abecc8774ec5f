"""A guest's exit code: what is believed of what it says, and what becomes of it."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.jobs import own
from vmgahp.config import Settings
from vmgahp.drivers.exit_record import ExitRecord
from vmgahp.drivers.resources import Resources
from vmgahp.host.job_user import Identity
from vmgahp.job import exit_code
from vmgahp.job.exit_code import CONSOLE_BYTES, PORT_BYTES, from_console, from_port, tell_starter


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"vmgahp-exit-code: 0\n", 0),
        (b"boot\r\nvmgahp-exit-code: 3\r\n[  9.1] reboot: Power down\r\n", 3),
        (b"vmgahp-exit-code:255", 255),
        (b"  vmgahp-exit-code:\t7  \r\n", 7),
        (b"vmgahp-exit-code: 1\nvmgahp-exit-code: 2\n", 2),
        (b"vmgahp-exit-code: 1\nvmgahp-exit-code: 256\nvmgahp-exit-code: nonsense\n", 1),
        *((b"vmgahp-exit-code:" + rest, None) for rest in (b" -1\n", b" 1.5\n", b" 0003\n", b" \xd9\xa3\n", b"\n3\n")),
        *((text, None) for text in (b'echo "vmgahp-exit-code: 3"\n', b"vmgahp-exit-code: 3 or so\n", b"")),
        (b"vmgahp-exit-code: 3\n" + b"x" * CONSOLE_BYTES, None),
    ],
)
def test_the_console_is_believed_by_whole_lines(text: bytes, code: int | None) -> None:
    assert from_console(text) == code


@pytest.mark.parametrize(
    ("written", "code"),
    [
        (b"0", 0),
        (b"3\n", 3),
        (b" 4 \r\n", 4),
        (b"1\n2\n", 2),
        (b"2\n999\nno\n", 2),
        (b"256\n", None),
        (b"\xb2\n", None),
        (b"", None),
        (b"x" * PORT_BYTES + b"\n3\n", None),
    ],
)
def test_the_port_is_believed_by_whole_lines(written: bytes, code: int | None) -> None:
    assert from_port(written) == code


@given(st.binary(max_size=200) | st.binary(max_size=20).map(lambda rest: b"vmgahp-exit-code: " + rest))
def test_whatever_a_guest_says_it_is_a_code_or_none(text: bytes) -> None:
    for code in (from_console(text), from_port(text)):
        assert code is None or 0 <= code <= 255


# What is written down


class Vm:
    """What goes with a VM of no hypervisor."""

    def __init__(self, scratch: Path, user: Identity, libexec: Path | None = None) -> None:
        self.said: list[str] = []
        settings = Settings({"LIBEXEC": str(libexec)} if libexec else {})
        self.resources = Resources(self.said.append)
        self.resources.exit = ExitRecord("vm", str(scratch), lambda: 1.25, settings, user, self.said.append)


def exit_code_in(scratch: Path) -> object:
    return json.loads((scratch / "vm_exit.json").read_text())["exit_code"]


def test_the_end_is_written_down_for_the_jobs_owner(scratch: Path, user: Identity) -> None:
    vm = Vm(scratch, user)
    (scratch / "vm_console.log").write_text("vmgahp-exit-code: 3\n")
    vm.resources.release()
    path = scratch / "vm_exit.json"
    found = json.loads(path.read_text())
    assert (found["exit_code"], found["source"], found["ended_by"]) == (3, "console", "gone")
    assert found["cpu_seconds"] == 1.25
    assert found["started"] <= found["ended"]
    assert path.stat().st_uid == user.uid
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert vm.said == []


def test_what_was_printed_before_this_run_says_nothing(scratch: Path, user: Identity) -> None:
    (scratch / "vm_console.log").write_text("vmgahp-exit-code: 3\n")
    os.chown(scratch / "vm_console.log", user.uid, user.gid)
    Vm(scratch, user).resources.release()
    assert exit_code_in(scratch) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_console_that_the_user_may_not_read_says_nothing(scratch: Path, user: Identity, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("vmgahp-exit-code: 3\n")
    vm = Vm(scratch, user)
    (scratch / "vm_console.log").symlink_to(secret)
    vm.resources.release()
    assert exit_code_in(scratch) is None


def test_who_knows_first_how_it_ended_is_right(scratch: Path, user: Identity) -> None:
    vm = Vm(scratch, user)
    vm.resources.ended("")
    vm.resources.ended(exit_code.CRASHED)
    vm.resources.ended(exit_code.DESTROYED)
    vm.resources.release()
    assert json.loads((scratch / "vm_exit.json").read_text())["ended_by"] == "crashed"


def test_the_end_was_when_it_was_seen_and_not_when_it_is_written_down(scratch: Path, user: Identity) -> None:
    vm = Vm(scratch, user)
    vm.resources.ended(exit_code.POWERED_OFF, 1793448000.0)
    vm.resources.ended(exit_code.GONE, 1793449000.0)
    vm.resources.release()
    assert json.loads((scratch / "vm_exit.json").read_text())["ended"] == "2026-10-31T12:00:00+00:00"


def test_a_checkpoint_that_waits_is_no_end(scratch: Path, user: Identity) -> None:
    Vm(scratch, user).resources.release(kept=True)
    assert not (scratch / "vm_exit.json").exists()


def test_it_is_written_before_the_directory_is_emptied(scratch: Path, user: Identity) -> None:
    vm = Vm(scratch, user)
    vm.resources.when_over.append(lambda: (scratch / "vm_exit.json").unlink())
    vm.resources.release()
    assert vm.said == []
    assert not (scratch / "vm_exit.json").exists()


def test_a_file_that_cannot_be_written_ends_nothing(scratch: Path, user: Identity) -> None:
    (scratch / "vm_exit.json").mkdir()
    vm = Vm(scratch, user)
    done: list[str] = []
    vm.resources.when_over.append(lambda: done.append("the rest"))
    vm.resources.release()
    assert done == ["the rest"]
    assert "vm_exit.json cannot be written" in vm.said[0]


# The job ad; a pool's own condor_chirp is in tests/system/pool/test_guest.py

STARTER = "127.0.0.1 34567 abcdefghij\n"


@pytest.fixture
def libexec(scratch: Path) -> Path:
    """Where something notes how condor_chirp is called, instead of it."""
    directory = scratch.parent / "libexec"
    directory.mkdir()
    notes = scratch.parent / "notes"
    notes.touch()
    notes.chmod(0o666)
    program = directory / "condor_chirp"
    program.write_text(f'#!/bin/sh\necho "$(id -u) $_CONDOR_CHIRP_CONFIG $*" >> {notes}\n. {directory}/then\n')
    program.chmod(0o755)
    (directory / "then").write_text("exit 0\n")
    return directory


def notes(libexec: Path) -> list[str]:
    return (libexec.parent / "notes").read_text().splitlines()


def configured(scratch: Path, text: str = STARTER) -> None:
    path = scratch / ".chirp.config"
    path.write_text(text)
    path.chmod(0o700)
    own(scratch, path)


@pytest.fixture
def tell(scratch: Path, user: Identity, libexec: Path) -> Callable[..., str]:
    """What is said when the starter is told of an exit code."""

    def telling(code: int | None = 3, text: str = STARTER) -> str:
        configured(scratch, text)
        return tell_starter(code, str(scratch), str(libexec), user)

    return telling


def test_the_starter_is_told_as_the_jobs_user(
    scratch: Path, user: Identity, libexec: Path, tell: Callable[..., str]
) -> None:
    assert tell() == ""
    who = f"{user.uid} {scratch}/.chirp.config"
    assert notes(libexec) == [
        f"{who} set_job_attr VMExitCode 3",
        f"{who} set_job_attr_delayed ChirpVMExitCode 3",
        f"{who} set_job_attr_delayed ChirpVMExitReason undefined",
    ]


def test_without_a_code_none_of_an_earlier_run_stays(libexec: Path, tell: Callable[..., str]) -> None:
    tell(None)
    assert [line.split()[-1] for line in notes(libexec)] == ["undefined", "undefined", "undefined"]


def test_why_it_failed_is_in_the_job_ad_and_in_the_jobs_log(scratch: Path, user: Identity, libexec: Path) -> None:
    configured(scratch)
    vm = Vm(scratch, user, libexec)
    vm.resources.ended(exit_code.DISK_ERROR, reason='an error of the disk "vda"' + " and so on" * 20)
    vm.resources.release()
    found = json.loads((scratch / "vm_exit.json").read_text())
    assert (found["ended_by"], found["reason"][:26]) == ("disk error", 'an error of the disk "vda"')
    told = [line.split(" ", 2)[2] for line in notes(libexec)]
    assert told[1] == "set_job_attr_delayed ChirpVMExitCode undefined"
    assert told[2].startswith('set_job_attr_delayed ChirpVMExitReason "an error of the disk \\"vda\\" and so on')
    assert told[3].startswith('ulog an error of the disk "vda" and so on')
    assert len(told[3]) == len("ulog ") + 127


def test_without_chirp_nothing_is_said(scratch: Path, user: Identity, libexec: Path) -> None:
    assert tell_starter(3, str(scratch), str(libexec), user) == ""
    assert notes(libexec) == []


@pytest.mark.parametrize(
    "text",
    [
        *("10.0.0.1 80 abc\n", "127.evil.example 80 abc\n", "localhost 80 abc\n"),
        *("127.0.0.1 80\n", "127.0.0.1 80 abc def\n", f"127.0.0.1 80 {'x' * 5000}\n"),
        *("127.0.0.1 80 abc\n10.0.0.1 80 abc\n", "\x00\xff"),
    ],
)
def test_nobody_but_the_starter_of_this_machine_is_spoken_to(
    libexec: Path, tell: Callable[..., str], text: str
) -> None:
    assert "not as a starter writes it" in tell(text=text)
    assert notes(libexec) == []


def test_a_failure_is_said_and_no_more(libexec: Path, tell: Callable[..., str]) -> None:
    (libexec / "then").write_text("echo no such attribute >&2; exit 1\n")
    assert tell().endswith("no such attribute")
    assert len(notes(libexec)) == 3


def test_one_of_the_two_is_enough(libexec: Path, tell: Callable[..., str]) -> None:
    (libexec / "then").write_text('[ "$1" = set_job_attr_delayed ]\n')
    assert tell() == ""


def test_a_starter_that_does_not_answer_is_not_waited_for(
    libexec: Path, tell: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exit_code, "CHIRP_SECONDS", 0.2)
    (libexec / "then").write_text("exec sleep 600\n")
    assert "timed out" in tell()


def test_a_machine_without_condor_chirp_says_so(scratch: Path, user: Identity) -> None:
    configured(scratch)
    for libexec in ("/nowhere", ""):
        assert "condor_chirp is not there" in tell_starter(3, str(scratch), libexec, user)


@pytest.mark.parametrize(
    ("how", "told"),
    [("", True), (exit_code.POWERED_OFF, True), (exit_code.CRASHED, True), (exit_code.DESTROYED, False)],
)
def test_only_an_end_of_its_own_is_told(scratch: Path, user: Identity, libexec: Path, how: str, told: bool) -> None:
    configured(scratch)
    vm = Vm(scratch, user, libexec)
    vm.resources.ended(how)
    vm.resources.release()
    assert bool(notes(libexec)) == told


def test_a_starter_that_waits_for_a_stop_is_not_spoken_to(scratch: Path, user: Identity, libexec: Path) -> None:
    configured(scratch)
    vm = Vm(scratch, user, libexec)
    vm.resources.to_be_stopped()
    vm.resources.release()
    assert notes(libexec) == []
