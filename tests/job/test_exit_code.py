"""A guest's exit code: what is believed of what it says, and what becomes of it."""

import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from tests.lab.starter import ANY, FakeStarter
from vmgahp.drivers.resources import ExitRecord, Resources
from vmgahp.host.job_user import Identity
from vmgahp.job import chirp, exit_code, published
from vmgahp.job.exit_code import CONSOLE_BYTES, PORT_BYTES, from_console, from_port


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
        *((b"0", 0), (b"3\n", 3), (b" 4 \r\n", 4), (b"1\n2\n", 2), (b"2\n999\nno\n", 2), (b"256\n", None)),
        *((b"\xb2\n", None), (b"", None), (b"x" * PORT_BYTES + b"\n3\n", None)),
    ],
)
def test_the_port_is_believed_by_whole_lines(written: bytes, code: int | None) -> None:
    assert from_port(written) == code


# What is written down


class Vm:
    """What goes with a VM of no hypervisor."""

    def __init__(self, scratch: Path, user: Identity) -> None:
        self.said: list[str] = []
        self.resources = Resources(self.said.append)
        updates = self.resources.updates
        self.resources.exit = ExitRecord("vm", str(scratch), lambda: 1.25, updates, user, self.said.append)


@pytest.fixture
def vm(scratch: Path, user: Identity) -> Vm:
    return Vm(scratch, user)


def record(scratch: Path) -> dict[str, Any]:
    return json.loads((scratch / "vm_exit.json").read_text())


def test_an_end_is_not_before_its_start_when_the_clock_is_set_back(scratch: Path, user: Identity, vm: Vm) -> None:
    began = time.time()
    vm.resources.ended(exit_code.POWERED_OFF, began - 3600, "")
    vm.resources.release()
    assert record(scratch)["ended"] >= record(scratch)["started"]


def test_the_end_is_written_down_for_the_jobs_owner(scratch: Path, user: Identity, vm: Vm) -> None:
    (scratch / "vm_console.log").write_text("vmgahp-exit-code: 3\n")
    with FakeStarter(scratch):
        vm.resources.release()
    found = record(scratch)
    assert (found["exit_code"], found["source"], found["ended_by"]) == (3, "console", "gone")
    assert found["cpu_seconds"] == 1.25
    assert found["started"] <= found["ended"]
    status = (scratch / "vm_exit.json").stat()
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (user.uid, 0o600)
    assert vm.said == []


@pytest.mark.parametrize(
    ("how", "says", "status"),
    [
        *(("", "", 0), (exit_code.POWERED_OFF, "3", 3), (exit_code.CRASHED, "", 1), (exit_code.CRASHED, "0", 0)),
        *((exit_code.DISK_ERROR, "", 1), (exit_code.DISK_LIMIT, "", 1), (exit_code.DESTROYED_BY_OTHERS, "", 1)),
        *((exit_code.DESTROYED_BY_OTHERS, "3", 3), (exit_code.DESTROYED, "3", 0)),
        *((exit_code.POWERED_OFF_WHEN_ASKED, "3", 0), (exit_code.POWERED_OFF, "", 0), (exit_code.OUT_OF_MEMORY, "", 1)),
    ],
)
def test_what_a_server_leaves_with(scratch: Path, vm: Vm, how: str, says: str, status: int) -> None:
    """HTCondor takes it for the job's exit code, where HTCondor has not ended the VM itself."""
    (scratch / "vm_console.log").write_text(f"vmgahp-exit-code: {says}\n")
    vm.resources.ended(how)
    vm.resources.release()
    assert vm.resources.exit_status == status


def test_what_was_printed_before_this_run_says_nothing(scratch: Path, user: Identity) -> None:
    (scratch / "vm_console.log").write_text("vmgahp-exit-code: 3\n")
    os.chown(scratch / "vm_console.log", user.uid, user.gid)
    Vm(scratch, user).resources.release()
    assert record(scratch)["exit_code"] is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_console_that_the_user_may_not_read_says_nothing(scratch: Path, user: Identity, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("vmgahp-exit-code: 3\n")
    vm = Vm(scratch, user)
    (scratch / "vm_console.log").symlink_to(secret)
    vm.resources.release()
    assert record(scratch)["exit_code"] is None


def test_the_first_word_on_its_end_and_the_time_of_it_are_right(scratch: Path, user: Identity, vm: Vm) -> None:
    vm.resources.ended("")
    vm.resources.ended(exit_code.CRASHED)
    vm.resources.ended(exit_code.DESTROYED)
    vm.resources.release()
    assert record(scratch)["ended_by"] == "crashed"
    vm = Vm(scratch, user)
    vm.resources.ended(exit_code.POWERED_OFF, 4102444800.0)
    vm.resources.ended(exit_code.GONE, 4102445800.0)
    vm.resources.release()
    assert record(scratch)["ended"] == "2100-01-01T00:00:00+00:00"


def test_a_waiting_checkpoint_and_a_file_that_cannot_be_written_end_nothing(scratch: Path, user: Identity) -> None:
    Vm(scratch, user).resources.release(kept=True)
    assert not (scratch / "vm_exit.json").exists()
    vm = Vm(scratch, user)
    vm.resources.when_over.append(lambda: (scratch / "vm_exit.json").unlink())
    with FakeStarter(scratch):
        vm.resources.release()
    assert vm.said == []
    assert not (scratch / "vm_exit.json").exists()
    (scratch / "vm_exit.json").mkdir()
    vm = Vm(scratch, user)
    done: list[str] = []
    vm.resources.when_over.append(lambda: done.append("the rest"))
    vm.resources.release()
    assert done == ["the rest"]
    assert "vm_exit.json cannot be written" in vm.said[0]


# The job ad; a pool's own starter is in tests/system/pool/test_guest.py


def ended(scratch: Path, user: Identity, how: str = "", reason: str = "") -> None:
    vm = Vm(scratch, user)
    vm.resources.ended(how, reason=reason)
    vm.resources.release()


def test_the_starter_is_told_the_exit_code_and_how_it_ended(scratch: Path, vm: Vm) -> None:
    (scratch / "vm_console.log").write_text("vmgahp-exit-code: 3\n")
    with FakeStarter(scratch, ANY) as starter:
        vm.resources.ended(exit_code.POWERED_OFF)
        vm.resources.release()
    assert vm.said == []
    assert starter.told[0] == ["set_job_attr", "VMExitCode", "3"]
    assert starter.ad() == {
        "VMExitCode": "3", "ChirpVMState": '"Stopped"', "ChirpVMEndedBy": '"powered off"', "ChirpVMExitCode": "3",
        **dict.fromkeys(("ChirpVMExitReason", "ChirpVMHoldReason"), "undefined"),
    }  # fmt: skip


def test_what_the_ad_has_without_a_code_and_with_a_reason_to_hold(scratch: Path, user: Identity) -> None:
    with FakeStarter(scratch, ANY) as starter:
        ended(scratch, user)
    assert starter.ad()["VMExitCode"] == starter.ad()["ChirpVMExitCode"] == "undefined"
    with FakeStarter(scratch) as starter:
        ended(scratch, user, exit_code.DISK_LIMIT, "it has outgrown its disks")
    assert starter.ad()["ChirpVMHoldReason"] == starter.ad()["ChirpVMExitReason"] == '"it has outgrown its disks"'


def test_why_it_failed_is_in_the_job_ad_and_in_the_jobs_log(scratch: Path, user: Identity) -> None:
    with FakeStarter(scratch, ANY) as starter:
        ended(scratch, user, exit_code.DISK_ERROR, 'an error of the disk "vda"' + " and so on" * 120)
    found = record(scratch)
    assert (found["ended_by"], found["reason"][:26]) == ("disk error", 'an error of the disk "vda"')
    assert starter.ad()["ChirpVMExitReason"].startswith('"an error of the disk \\"vda\\" and so on')
    assert starter.ad()["ChirpVMHoldReason"] == "undefined", "it may go well on another machine"
    [line] = starter.log()
    assert line.startswith('an error of the disk "vda" and so on')
    assert len(line) == published.LONGEST_LINE


def test_a_starter_not_there_or_silent(scratch: Path, user: Identity, vm: Vm, monkeypatch: pytest.MonkeyPatch) -> None:
    vm.resources.release()
    assert [line for line in vm.said if "no starter can be reached by chirp" in line] == vm.said != []
    vm = Vm(scratch, user)
    with FakeStarter(scratch) as starter:
        vm.resources.release()
    assert starter.ad()["ChirpVMState"] == '"Stopped"'
    assert vm.said == []
    monkeypatch.setattr(chirp, "END_SECONDS", 0.2)
    vm = Vm(scratch, user)
    with FakeStarter(scratch) as starter:
        starter.answer = b""
        vm.resources.release()
    assert "the starter has not answered in time" in vm.said[0]


@pytest.mark.parametrize(
    ("how", "told"),
    [("", True), (exit_code.POWERED_OFF, True), (exit_code.CRASHED, True), (exit_code.DESTROYED, False)],
)
def test_only_an_end_of_its_own_is_told(scratch: Path, user: Identity, how: str, told: bool) -> None:
    with FakeStarter(scratch) as starter:
        ended(scratch, user, how)
    assert bool(starter.told) == told


def test_a_starter_that_waits_for_a_stop_is_not_spoken_to(scratch: Path, vm: Vm) -> None:
    with FakeStarter(scratch) as starter:
        vm.resources.to_be_stopped()
        vm.resources.release()
    assert starter.visits == 0
