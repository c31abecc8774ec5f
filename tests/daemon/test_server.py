"""The whole daemon as a process, with the simulated hypervisor: pipes, signals, workers, the end."""

import os
import select
import signal
from pathlib import Path

import pytest

from tests.conftest import simulated_ad
from tests.peer import DEADLINE, Peer, environment
from tests.protocol.recordings import TRANSCRIPTS, play_exactly
from vmgahp import errors
from vmgahp.daemon import server
from vmgahp.protocol import transcript, wire


def start(peer: Peer, scratch: Path, *more: str) -> list[str]:
    """Send a job ad and START the VM: the result."""
    peer.send_ad(*simulated_ad(scratch, *more))
    return peer.run("START", "simulated")


def test_the_recorded_conversation_through_pipes(scratch: Path) -> None:
    recorded = transcript.load(str(TRANSCRIPTS / "protocol.txt"))
    with Peer(environment("kvm", scratch)) as peer:
        play_exactly(recorded, peer.write, peer.read_line)
        peer.finish()
        assert peer.next_line() is None
        assert peer.process.returncode == recorded.exit_status


def test_the_life_of_a_vm(peer: Peer, scratch: Path) -> None:
    assert start(peer, scratch) == ["0", "1"]
    assert peer.run("STATUS", 1)[1] == "STATUS=Running"
    assert peer.run("GETPID", 1) == ["0", str(peer.process.pid)]
    assert peer.run("SUSPEND", 1) == ["0", "NULL"]
    assert peer.run("STATUS", 1) == ["0", "STATUS=Suspended"]
    assert peer.run("RESUME", 1) == ["0", "NULL"]
    assert peer.run("STOP", 1) == ["0", "NULL"]
    assert peer.run("STATUS", 1) == ["0", "STATUS=Stopped"]
    peer.quit()


def test_a_checkpoint_leaves_the_starters_job_ad_as_it_was(peer: Peer, scratch: Path) -> None:
    file = scratch / ".job.ad"
    file.write_text("ClusterId = 7\n")
    start(peer, scratch)
    with file.open("a") as appended:
        appended.write("ToE = []\n")
    assert peer.run("CHECKPOINT", 1) == ["0", "NULL"]
    assert file.read_text() == "ClusterId = 7\n"
    peer.quit()


def test_the_pid_is_kept_back_where_the_settings_say_so(scratch: Path) -> None:
    with Peer(environment("simulated", scratch, VM_REPORT_PID=False)) as peer:
        peer.line()
        start(peer, scratch)
        assert peer.run("GETPID", 1) == ["0", "0"]
        peer.quit()


def test_a_guest_that_powers_off_does_not_end_the_server(peer: Peer, scratch: Path) -> None:
    start(peer, scratch, "Simulated_Lifetime = 1")
    assert peer.run("STATUS", 1) == ["0", "STATUS=Stopped"]
    assert peer.ask("VERSION") == "S " + wire.GREETING.decode()
    peer.quit()


def test_everything_else_is_answered_while_a_start_and_a_save_go_on(peer: Peer, scratch: Path) -> None:
    start_gate, save_gate = scratch.parent / "start", scratch.parent / "save"
    assert start(peer, scratch, f'Simulated_SUSPEND_Gate = "{save_gate}"') == ["0", "1"]
    before = peer.run("STATUS", 1)
    saving = peer.request("SUSPEND", 1)
    peer.send_ad(*simulated_ad(scratch, "ProcId = 4", f'Simulated_START_Gate = "{start_gate}"'))
    starting = peer.request("START", "simulated")
    assert peer.ask("VERSION") == "S " + wire.GREETING.decode()
    assert peer.results() == []
    assert peer.run("STATUS", 99) == ["0", "STATUS=Stopped"]
    assert peer.run("STATUS", 1) == before, "answered with the last known status while the save continues"
    start_gate.touch()
    peer.wait_for_r()
    assert peer.results() == [f"{starting} 0 2"]
    save_gate.touch()
    peer.wait_for_r()
    assert peer.results() == [f"{saving} 0 NULL"]
    peer.quit()


@pytest.mark.parametrize(
    ("fault", "word", "who"),
    [
        ("job", "VMGAHP_ERR_JOBCLASSAD_KVM_INVALID_DISK_PARAM", "job's owner"),
        ("machine", "VMGAHP_ERR_CRITICAL", "administrator"),
        ("bug", "VMGAHP_ERR_INTERNAL", "hypervisor's administrator"),
    ],
)
def test_a_failed_start_says_why_in_the_scratch_directory(
    peer: Peer, scratch: Path, fault: str, word: str, who: str
) -> None:
    assert start(peer, scratch, f'Simulated_Fault = "{fault}"') == ["1", word]
    text = (scratch / server.ERROR_FILE).read_text()
    assert text.startswith(f"{word}: ")
    assert text.endswith(f" ({who})\n")
    peer.quit()


def test_vm_error_is_not_written_through_a_link(peer: Peer, scratch: Path) -> None:
    victim = scratch.parent / "victim"
    victim.write_text("precious")
    (scratch / server.ERROR_FILE).symlink_to(victim)
    start(peer, scratch, 'Simulated_Fault = "job"')
    assert victim.read_text() == "precious"
    peer.quit()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_a_signal_destroys_the_vms_and_ends_the_server_well(peer: Peer, scratch: Path, number: signal.Signals) -> None:
    start(peer, scratch)
    log = peer.end_by(number)
    assert peer.process.returncode == 0
    assert number.name in log
    assert "Traceback" not in log


def test_the_end_of_input_ends_the_server_well(peer: Peer) -> None:
    assert "Traceback" not in peer.finish()
    assert peer.process.returncode == 0


def test_a_client_that_is_gone_ends_the_server_well(peer: Peer) -> None:
    assert peer.process.stdout is not None
    peer.process.stdout.close()
    peer.process.wait(DEADLINE)
    assert peer.process.returncode == 0
    assert "Traceback" not in peer.finish()


def test_quit_during_a_start_leaves_no_vm(peer: Peer, scratch: Path) -> None:
    gate = scratch.parent / "start"
    peer.send_ad(*simulated_ad(scratch, f'Simulated_START_Gate = "{gate}"'))
    peer.request("START", "simulated")
    peer.send("QUIT")
    gate.touch()
    assert peer.line() == "S"
    peer.finish()
    assert peer.process.returncode == 0


def test_a_reader_that_stops_reading_is_not_read_from(peer: Peer) -> None:
    """Output stays bounded: requests are no longer taken when nobody takes the replies."""
    assert peer.process.stdin is not None
    os.set_blocking(peer.process.stdin.fileno(), False)
    sent = 0
    while select.select([], [peer.process.stdin], [], 2.0)[1]:
        try:
            sent += os.write(peer.process.stdin.fileno(), b"COMMANDS\r\n" * 400)
        except BlockingIOError:
            continue
        assert sent < 8 << 20, "the server takes requests without end"
    os.set_blocking(peer.process.stdin.fileno(), True)
    with open(f"/proc/{peer.process.pid}/status") as status:
        resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS:"))
    assert resident < 64 << 10, "KiB"


def test_a_refusal_before_the_settings_are_read_is_explained_too(scratch: Path) -> None:
    settings = scratch.parent / "settings"
    os.mkfifo(settings)
    with Peer(environment("simulated", scratch) | {"VMGAHP_CONFIG": str(settings)}) as peer:
        peer.line()
        peer.send_ad(*simulated_ad(scratch, 'VMPARAM_vm_Types = "kvm, xen"'))
        request = peer.request("START", "simulated")
        peer.pump(0.5)  # a server that did not wait for its settings would say R by now
        settings.write_text("")
        peer.wait_for_r()
        assert peer.results() == [f"{request} 1 {errors.MISMATCHED}"]
        assert "VMPARAM_vm_Types" in (scratch / "vm_error.txt").read_text()


def test_garbage_is_answered_and_survived(peer: Peer) -> None:
    peer.send(b"\0\xff\xfe garbage")
    assert peer.line() == "E"
    for _ in range(10):
        peer.write(b"x" * (1 << 20))
    peer.send("")
    assert peer.line() == "E"
    assert "Traceback" not in peer.quit()


def test_no_secret_of_the_ad_reaches_the_log(scratch: Path) -> None:
    with Peer(environment("simulated", scratch, VM_GAHP_DEBUG="D_FULLDEBUG")) as peer:
        peer.line()
        start(
            peer,
            scratch,
            'ClaimId = "<127.0.0.1:9618>#1#1#hush-1"',
            'TransferKey = "hush-2"',
            'Broken "hush-3"',
            '_condor_privKey = "hush-4"',
            'Simulated_Fault = "bug"',
        )
        log = peer.quit()
    assert "START" in log
    assert "hush" not in log


def test_nothing_is_imported_from_the_scratch_directory(scratch: Path) -> None:
    for name in ("vmgahp", "lxml", "libvirt", "threading", "sitecustomize"):
        (scratch / f"{name}.py").write_text("import os; os.mkdir('/tmp/owned-by-the-job')\n")
    with Peer(environment("simulated", scratch) | {"PYTHONPATH": ""}) as peer:
        assert peer.line().startswith("$VMGahpVersion")
        peer.quit()
    assert not Path("/tmp/owned-by-the-job").exists()
