"""KVM is proved, not assumed: what `check` says in every case, and that it never outlives its deadline."""

import os
import sys

import pytest

from tests.lab.programs import a_program
from vmgahp.host import kvm


@pytest.fixture
def interpreter(tmp_path, monkeypatch):
    """Put a shell script in the place of the process with the guest."""
    return lambda body: monkeypatch.setattr(sys, "executable", str(a_program(tmp_path / "interpreter", body)))


def test_this_machine_gets_a_verdict():
    reason = kvm.check(1.0)
    assert not reason or reason.startswith("/dev/kvm ")


@pytest.mark.skipif(not os.access("/dev/kvm", os.R_OK | os.W_OK), reason="needs KVM")
def test_the_guest_really_runs_on_this_machine(monkeypatch):
    """With time enough, fast or slow, the loop ends by its hlt with nothing left to count."""
    monkeypatch.setattr(kvm, "BUDGET", 20.0)
    lines, killed = kvm._run_guest("/dev/kvm", 100.0)
    if lines and lines[0].startswith("failed KVM_"):
        pytest.skip("needs KVM")
    assert not killed
    assert lines[0].startswith("ran ")


@pytest.mark.parametrize(
    ("lines", "killed", "said"),
    [
        pytest.param(["ran 0.001100"], False, (), id="fast"),
        pytest.param(["ran 0.120000", "ran 0.002000"], False, (), id="the best of several times counts"),
        pytest.param(["ran 0.300000", "ran 0.200000"], False, ("too slow", "0.200 s"), id="the number is told"),
        pytest.param([f"ran {kvm.FAST_ENOUGH}"], False, ("too slow",), id="the limit itself"),
        pytest.param([], True, ("did not end",), id="a guest that never ends"),
        pytest.param(["ran 0.400000"], True, ("0.400 s",), id="slow, and the next try was killed"),
        pytest.param(["spent"], False, ("did not end", "of the processor's time"), id="all of its budget is spent"),
        pytest.param(["ran 0.400000", "spent"], False, ("0.400 s",), id="slow, and the next try spent the rest"),
        pytest.param([], False, ("without a word",), id="a death without a word"),
    ],
)
def test_what_the_guest_says(lines, killed, said, monkeypatch):
    monkeypatch.setattr(kvm, "_run_guest", lambda device, deadline: (lines, killed))
    reason = kvm.check(device="/dev/null")
    assert bool(reason) == bool(said)
    for part in said:
        assert part in reason


def test_no_device_or_one_that_is_no_kvm(tmp_path, monkeypatch):
    assert "does not exist" in kvm.check(device=str(tmp_path / "kvm"))
    assert kvm.check(device="/dev/null").startswith("/dev/null opens, but KVM_GET_API_VERSION failed: ")
    busy = "KVM_CREATE_VM failed: Device or resource busy"
    monkeypatch.setattr(kvm, "_run_guest", lambda device, deadline: ([f"failed {busy}"], False))
    assert kvm.check(device="/dev/null") == f"/dev/null opens, but {busy}"


def test_no_permission(tmp_path):
    device = tmp_path / "kvm"
    device.touch(0o000)
    tmp_path.chmod(0o755)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            os.write(writing, (kvm.check(device=str(device)) or "works").encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        reason = answer.read()
    os.waitpid(pid, 0)
    assert "may not be opened by user id" in reason


def test_the_process_is_killed_at_the_deadline(interpreter, tmp_path):
    """One that nothing else would end."""
    interpreter(f"echo $$ >{tmp_path}/pid\nexec sleep infinity")
    assert "did not end" in kvm.check(5.0, device="/dev/null")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    interpreter("echo ran 0.2\nexec sleep infinity")
    assert "0.200 s" in kvm.check(5.0, device="/dev/null")


def test_nothing_is_left_open_or_unreaped(interpreter, tmp_path):
    interpreter(f"echo $$ >{tmp_path}/pid\necho ran 0.001")
    before = os.listdir("/proc/self/fd")
    assert kvm.check(5.0, device="/dev/null") == ""
    assert os.listdir("/proc/self/fd") == before
    with pytest.raises(ChildProcessError):
        os.waitpid(int((tmp_path / "pid").read_text()), os.WNOHANG)


def test_a_guest_that_crawls_or_cannot_start(interpreter, monkeypatch, tmp_path):
    """And not with the deadline: it says more, and sooner, however busy the machine is."""
    interpreter("echo ran 0.4\nkill -PROF $$")
    assert "0.400 s" in kvm.check(100.0, device="/dev/null")
    interpreter("kill -PROF $$")
    assert f"within {kvm.BUDGET} s of the processor's time" in kvm.check(100.0, device="/dev/null")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    assert "cannot be started" in kvm.check(device="/dev/null")
    monkeypatch.setattr(sys, "executable", "")
    assert "no Python interpreter" in kvm.check(device="/dev/null")
