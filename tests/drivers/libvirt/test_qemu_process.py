"""QEMU without libvirtd: whose process it is, and its end."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from unittest.mock import Mock

import libvirt
import pytest

from tests import jobs
from tests.drivers.libvirt.support import PATIENCE, Job, another_vm, driving, running, until
from tests.peer import DEADLINE, environment
from vmgahp import config, errors
from vmgahp.drivers.libvirt.driver import LibvirtDriver
from vmgahp.drivers.libvirt.link import domains

NAME, UUID = "alice_lab_1.0", "11111111-1111-4111-8111-111111111111"
OTHER = "22222222-2222-4222-8222-222222222222"
WORDS = ("-name", f"guest={NAME},debug-threads=on", "-S", "-uuid", UUID, "-append", "-uuid", OTHER)

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a process that calls itself QEMU, and note it as libvirt does for the VM `NAME`."""
    pid_file = tmp_path / "libvirt/qemu/run" / f"{NAME}.pid"
    pid_file.parent.mkdir(parents=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with ExitStack() as ended:

        def one(*words: str, program: str = "qemu-system-x86_64") -> "subprocess.Popen[bytes]":
            shutil.copy("/bin/sh", tmp_path / program)
            command = [str(tmp_path / program), "-c", "read -r _", "sh", *words]
            made = ended.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE))
            ended.callback(made.kill)
            # One that begins has no arguments for a moment.
            until(Path(f"/proc/{made.pid}/cmdline").read_bytes, "the program to begin")
            pid_file.write_text(f"{made.pid}\n")
            return made

        yield one


@pytest.mark.parametrize("state", [signal.SIGCONT, signal.SIGSTOP])
def test_the_vms_own_is_killed_whether_it_runs_or_was_stopped(start: Start, state: signal.Signals) -> None:
    process = start(*WORDS)
    process.send_signal(state)
    assert domains.kill(NAME, UUID)
    assert process.wait(DEADLINE) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("words", "program"),
    [
        pytest.param(("-name", f"guest={NAME}2,debug-threads=on", *WORDS[2:]), "qemu-kvm", id="another name"),
        pytest.param((*WORDS[:4], OTHER, "-append", UUID), "qemu-kvm", id="another UUID"),
        pytest.param((*WORDS[:4], OTHER, "-append", "-uuid", UUID), "qemu-kvm", id="a UUID that its job has added"),
        pytest.param(WORDS, "python3", id="another program"),
        pytest.param((*WORDS[:3], "-uuid"), "qemu-kvm", id="nothing after the option"),
        pytest.param((), "qemu-kvm", id="no options"),
    ],
)
def test_a_process_that_has_got_its_number_is_spared(start: Start, words: tuple[str, ...], program: str) -> None:
    process = start(*words, program=program)
    assert not domains.kill(NAME, UUID)
    assert process.poll() is None


def test_one_that_has_ended_is_not_found(start: Start) -> None:
    start(*WORDS).communicate()
    assert not domains.kill(NAME, UUID)


def test_the_process_is_held_before_it_is_looked_at(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number that another process gets between the look and the signal is not what the signal goes to."""
    process = start(*WORDS)

    def look(_pid: int, _name: str, _uuid: str) -> bool:
        process.communicate()
        return True

    monkeypatch.setattr(domains, "is_qemu_of", look)
    monkeypatch.setattr(os, "kill", pytest.fail)
    assert domains.kill(NAME, UUID), "it has ended, and no other was hit"


def test_one_that_does_not_end_in_time_is_not_reported_as_gone(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start(*WORDS)
    monkeypatch.setattr(domains.signal, "pidfd_send_signal", lambda _descriptor, _number: None)
    assert not domains.kill(NAME, UUID, 0.01)
    assert process.poll() is None


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "99999999999999999999"])
def test_a_pid_file_with_nothing_in_it_names_nobody(start: Start, tmp_path: Path, text: str) -> None:
    process = start(*WORDS)
    (tmp_path / "libvirt/qemu/run" / f"{NAME}.pid").write_text(text)
    assert not domains.kill(NAME, UUID)
    assert process.poll() is None


def kill_without_libvirtd(scratch: Path, uuid: str) -> bool:
    """The kill mode where nobody listens on libvirtd's socket."""
    nowhere = f"qemu+unix:///system?socket={scratch}/nobody"
    settings = config.load(environment("kvm", scratch, VM_LIBVIRT_URI=nowhere))
    with closing(LibvirtDriver("kvm", settings, jobs.owner(scratch), lambda _line: None)) as driver:
        driver.connection.deadline = 0
        return driver.kill(NAME, uuid)


def test_without_libvirtd_the_kill_mode_ends_the_vm_whose_uuid_it_knows_and_no_other(start, scratch):
    process = start(*WORDS)
    for uuid in ("", OTHER):
        with pytest.raises(errors.MachineFault, match=r"does not answer|cannot be reached"):
            kill_without_libvirtd(scratch, uuid)
        assert process.poll() is None, uuid
    assert kill_without_libvirtd(scratch, UUID)
    assert process.wait(DEADLINE) == -signal.SIGKILL


@pytest.mark.libvirt
def test_a_domain_of_libvirts(connection: libvirt.virConnect) -> None:
    name = f"vmgahp-test-{os.getpid()}-killed"
    with another_vm(connection, name) as domain:
        assert not domains.kill(name, OTHER)
        assert domain.isActive()
        assert domains.kill(name, domain.UUIDString())
        until(lambda: name not in [one.name() for one in connection.listAllDomains()], "libvirt sees it")


@pytest.mark.libvirt
def test_a_stop_ends_a_vm_whose_qemu_hangs(job: Job) -> None:
    """To ask it to power off waits for ever, and so has a deadline; to destroy it then takes libvirt some seconds."""
    with running(job) as peer:
        hanging = Path(f"/proc/{peer.run('GETPID', 1)[1]}")
        os.kill(int(hanging.name), signal.SIGSTOP)
        assert peer.run("STOP", 1, PATIENCE) == ["0", "NULL"]
        assert job.domain() is None
        assert not hanging.exists()


@pytest.mark.libvirt
def test_a_stop_ends_a_vm_that_libvirt_does_not_destroy(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its QEMU is killed, and libvirt sees it."""
    log: list[str] = []
    with driving(job, log) as (driver, ad):
        machine = driver.start(ad)
        with monkeypatch.context() as patch:
            patch.setattr(libvirt.virDomain, "destroy", Mock(side_effect=libvirt.libvirtError("nothing can be done")))
            machine.destroy()
        until(lambda: job.domain() is None, "libvirt sees it")
        assert "Its QEMU was killed" in log[-1]
