"""The whole daemon as a process, with the simulated hypervisor: pipes, signals, workers, the end."""

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import jobs
from tests.conftest import simulated_ad
from tests.peer import DAEMON, DEADLINE, Peer, environment
from tests.protocol.recordings import TRANSCRIPTS
from vmgahp import errors, lifecycle
from vmgahp.config import Settings
from vmgahp.daemon import job_ad_file, server
from vmgahp.daemon.job_ad_file import JobAdFile
from vmgahp.host import budget, child, proc
from vmgahp.host.job_user import Identity
from vmgahp.host.wait import Task
from vmgahp.job.ad import JobAd
from vmgahp.protocol import transcript, wire
from vmgahp.protocol.session import Call, Vm
from vmgahp.testing.contract import until
from vmgahp.vm_types import SIMULATED_SWITCH


def start(peer: Peer, scratch: Path, *more: str) -> list[str]:
    """Send a job ad and START the VM: the result."""
    peer.send_ad(*simulated_ad(scratch, *more))
    return peer.run("START", "simulated")


@contextlib.contextmanager
def served(scratch: Path, **settings: object) -> Iterator[Peer]:
    with Peer(environment("simulated", scratch, **settings)) as peer:
        peer.line()
        yield peer


def beside(scratch: Path) -> Path:
    """The scratch directory of another job."""
    made = scratch.parent / "dir_2"
    made.mkdir()
    os.chown(made, scratch.stat().st_uid, scratch.stat().st_gid)
    return made


def test_the_recorded_conversation_through_pipes(scratch: Path) -> None:
    """The reference's own recording: each line, each R too, in its order."""
    recorded = transcript.load(str(TRANSCRIPTS / "protocol.txt"))
    with Peer(environment("kvm", scratch)) as peer:
        for line in recorded.lines:
            if line.mark == transcript.CLIENT:
                peer.write(line.data)
            else:
                assert peer.read_line() == line.text, f"line {line.number}"
        peer.finish()
        assert peer.next_line() is None
        assert peer.process.returncode == recorded.exit_status


@pytest.mark.parametrize("command", ["CHECKPOINT", "STOP"])
def test_what_htcondor_writes_for_the_job_does_not_go_to_the_spool(peer: Peer, scratch: Path, command: str) -> None:
    file, update, temporary = (scratch / name for name in (".job.ad", ".update.ad", ".update.ad.tmp"))
    file.write_text("ClusterId = 7\n")
    start(peer, scratch)
    with file.open("a") as appended:
        appended.write("ToE = []\n")
    update.write_text("Cpus = 1\n")
    assert peer.run(command, 1) == ["0", "NULL"]
    assert file.read_text() == "ClusterId = 7\n"
    assert not update.exists()
    assert temporary.is_dir(), "the startd cannot write another while the starter sends the files"
    if command == "CHECKPOINT":
        assert peer.run("RESUME", 1) == ["0", "NULL"]
        assert not temporary.exists()
    peer.quit()


def test_of_two_starts_in_one_directory_the_second_touches_nothing(peer: Peer, scratch: Path) -> None:
    assert start(peer, scratch)[0] == "0"
    before = {path.name: path.stat().st_mtime_ns for path in scratch.iterdir()}
    with served(scratch) as other:
        assert start(other, scratch) == ["1", errors.VM_INVALID_OPERATION], "no fault of the job"
        assert {path.name: path.stat().st_mtime_ns for path in scratch.iterdir()} == before
        assert "STATUS=Running" in peer.run("STATUS", 1)
        assert start(peer, scratch) == ["1", errors.VM_INVALID_OPERATION]
        assert peer.run("STOP", 1) == ["0", "NULL"]
        assert start(other, scratch)[0] == "0"
        assert "is the scratch directory of another VM" in other.quit()
    peer.quit()


@pytest.mark.parametrize(("tells", "words"), [(False, []), (True, ["MAC=52:54:00:00:00:01", "IP=192.0.2.7"])])
def test_pid_and_addresses_are_told_where_the_settings_say_so(scratch: Path, tells: bool, words: list[str]) -> None:
    with served(scratch, VM_REPORT_PID=tells, VM_REPORT_ADDRESS=tells) as peer:
        start(peer, scratch, 'Simulated_Mac = "52:54:00:00:00:01"', 'Simulated_Ip = "192.0.2.7"')
        assert peer.run("GETPID", 1) == ["0", str(peer.process.pid if tells else 0)]
        assert peer.run("STATUS", 1)[1 : len(words) + 2] == [*words, "STATUS=Running"]
        peer.quit()


@pytest.mark.parametrize("by_quit", [True, False])
def test_after_quit_a_server_leaves_with_its_guests_exit_code(peer: Peer, scratch: Path, by_quit: bool) -> None:
    """condor_starter takes it for the job's; a server that ends unasked says nothing of a guest."""
    start(peer, scratch, "Simulated_Lifetime = 1", "Simulated_Exit_Status = 3")
    assert peer.run("STATUS", 1) == ["0", "STATUS=Stopped"]
    if by_quit:
        assert "the server ends with the guest's exit code 3" in peer.quit(status=3)
    else:
        peer.finish()
        assert peer.process.returncode == 0


# The end of a guest, for condor_starter


@pytest.fixture
def as_starter() -> Iterator[None]:
    """Give this process, the parent of each server, the name of condor_starter."""
    name = Path(f"/proc/{os.getpid()}/comm")
    before = name.read_text()
    name.write_text("condor_starter")
    yield
    name.write_text(before)


def attended(peer: Peer, scratch: Path, *more: str) -> None:
    """Start a VM and ask for its pid, as condor_starter does 30 seconds after a START."""
    success, vm = start(peer, scratch, *more)
    assert success == "0"
    assert peer.run("GETPID", vm)[0] == "0"


@pytest.mark.parametrize("status", [0, 3, -signal.SIGTERM])
@pytest.mark.usefixtures("as_starter")
def test_a_server_of_a_starter_exits_as_its_guest_and_leaves_its_pipes(peer: Peer, scratch: Path, status: int) -> None:
    attended(peer, scratch, "Simulated_Lifetime = 1", "Simulated_Pid = 0", f"Simulated_Exit_Status = {status}")
    assert peer.process.wait(DEADLINE) == status
    assert peer.ask("RESULTS") == "S 0"
    assert peer.run("STATUS", 1) == ["0", "STATUS=Stopped"]
    assert peer.run("SUSPEND", 1) == ["1", errors.VM_INVALID_OPERATION]
    assert peer.run("STOP", 1) == ["0", "NULL"]
    assert start(peer, beside(scratch)) == ["1", errors.VM_NOT_FOUND]
    log = peer.quit(status=status)
    assert "condor_starter learns from the exit of this server" in log
    assert "Traceback" not in log
    assert json.loads((scratch / "vm_metrics.jsonl").read_text().splitlines()[-1])["reason"] == "the guest is gone"


@pytest.mark.usefixtures("as_starter")
def test_what_answers_for_a_server_ends_with_its_client(peer: Peer, scratch: Path) -> None:
    attended(peer, scratch, "Simulated_Lifetime = 1", "Simulated_Pid = 0")
    peer.process.wait(DEADLINE)
    peer.process.stdin.close()
    assert select.select([peer.process.stdout], [], [], DEADLINE)[0]
    assert os.read(peer.process.stdout.fileno(), 1) == b"", "no process has it open any more"


@pytest.mark.usefixtures("as_starter")
def test_the_end_of_a_guest_is_seen_by_its_process(peer: Peer, scratch: Path) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as guest:
        attended(peer, scratch, "Simulated_Lifetime = 2", f"Simulated_Pid = {guest.pid}")
        assert peer.run("STATUS", 1)[1] == "STATUS=Running", "and no look has shortened its life"
        guest.kill()
        guest.wait()
        assert peer.process.wait(DEADLINE) == 0


@pytest.mark.usefixtures("as_starter")
def test_the_process_of_a_resumed_guest_is_another_one(peer: Peer, scratch: Path) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as guest:
        attended(peer, scratch, "Simulated_Lifetime = 2", f"Simulated_Pid = {guest.pid}")
        assert peer.run("SUSPEND", 1)[0] == "0"
        assert peer.run("GETPID", 1)[0] == "0"
        guest.kill()
        guest.wait()
        assert peer.run("STATUS", 1) == ["0", "STATUS=Suspended"], "it lives, though its process has ended"
        assert peer.run("RESUME", 1)[0] == "0"
        assert peer.process.wait(DEADLINE) == 0


@pytest.mark.usefixtures("as_starter")
def test_a_server_of_two_vms_exits_when_both_have_ended(peer: Peer, scratch: Path) -> None:
    gate = scratch.parent / "status"
    attended(peer, scratch, "Simulated_Lifetime = 1", "Simulated_Pid = 0", f'Simulated_STATUS_Gate = "{gate}"')
    assert start(peer, beside(scratch), "ProcId = 4", "Simulated_Lifetime = 2", "Simulated_Pid = 0") == ["0", "2"]
    gate.touch()
    assert peer.run("STATUS", 2)[1] == "STATUS=Running"
    assert peer.run("GETPID", 2)[0] == "0"
    assert peer.process.wait(DEADLINE) == 0


@pytest.mark.usefixtures("as_starter")
def test_a_server_of_a_starter_serves_on_where_the_settings_say_so(scratch: Path) -> None:
    with served(scratch, VM_END_EARLY=False) as peer:
        attended(peer, scratch, "Simulated_Lifetime = 2", "Simulated_Pid = 0")
        assert peer.run("STATUS", 1)[1] == "STATUS=Running", "no look has shortened its life"
        peer.quit()


def test_a_server_of_another_client_serves_on(peer: Peer, scratch: Path) -> None:
    attended(peer, scratch, "Simulated_Lifetime = 2", "Simulated_Pid = 0")
    assert peer.run("STATUS", 1)[1] == "STATUS=Running", "no look has shortened its life"
    peer.quit()


def test_everything_else_is_answered_while_a_start_and_a_save_go_on(peer: Peer, scratch: Path) -> None:
    start_gate, save_gate = scratch.parent / "start", scratch.parent / "save"
    assert start(peer, scratch, f'Simulated_SUSPEND_Gate = "{save_gate}"') == ["0", "1"]
    before = peer.run("STATUS", 1)
    saving = peer.request("SUSPEND", 1)
    peer.send_ad(*simulated_ad(beside(scratch), "ProcId = 4", f'Simulated_START_Gate = "{start_gate}"'))
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
        ("job of \udcff", "VMGAHP_ERR_JOBCLASSAD_KVM_INVALID_DISK_PARAM", "job's owner"),
        ("machine", "VMGAHP_ERR_CRITICAL", "administrator"),
        ("bug", "VMGAHP_ERR_INTERNAL", "hypervisor's administrator"),
        ("exit", "VMGAHP_ERR_INTERNAL", "hypervisor's administrator"),
    ],
)
def test_a_failed_start_says_why_in_a_file(peer: Peer, scratch: Path, fault: str, word: str, who: str) -> None:
    assert start(peer, scratch, f'Simulated_Fault = "{fault}"') == ["1", word]
    text = (scratch / server.ERROR_FILE).read_text()
    assert text.startswith(f"{word}: ")
    assert text.endswith(f" ({who})\n")
    log = peer.quit()
    assert word in log
    assert "NULL" not in log


def test_vm_error_is_not_written_through_a_link(peer: Peer, scratch: Path) -> None:
    victim = scratch.parent / "victim"
    victim.write_text("precious")
    (scratch / server.ERROR_FILE).symlink_to(victim)
    start(peer, scratch, 'Simulated_Fault = "job"')
    assert victim.read_text() == "precious"
    peer.quit()


def test_the_reason_of_an_earlier_start_does_not_go_home_with_the_job(peer: Peer, scratch: Path) -> None:
    assert start(peer, scratch, 'Simulated_Fault = "job"')[0] == "1"
    assert (scratch / server.ERROR_FILE).exists()
    assert start(peer, scratch) == ["0", "2"]
    assert not (scratch / server.ERROR_FILE).exists()
    peer.quit()


def test_something_else_of_that_name_holds_up_no_start(peer: Peer, scratch: Path) -> None:
    (scratch / server.ERROR_FILE).mkdir()
    assert start(peer, scratch) == ["0", "1"]
    assert server.ERROR_FILE in peer.quit()


def test_two_vms_do_not_share_a_scratch_directory(peer: Peer, scratch: Path) -> None:
    gate = scratch.parent / "start"
    (scratch / server.ERROR_FILE).write_text("of an earlier start")
    peer.send_ad(*simulated_ad(scratch, f'Simulated_START_Gate = "{gate}"'))
    first = peer.request("START", "simulated")
    until(lambda: not (scratch / server.ERROR_FILE).exists(), "the first one has the directory")
    same = scratch.parent / "other" / ".." / scratch.name
    (scratch.parent / "other").mkdir()
    assert start(peer, same, "ProcId = 4") == ["1", errors.VM_INVALID_OPERATION]
    assert not (scratch / server.ERROR_FILE).exists(), "it would go home with the first VM's job"
    gate.touch()
    peer.wait_for_r()
    assert peer.results() == [f"{first} 0 1"]
    assert start(peer, beside(scratch), "ProcId = 4") == ["0", "3"]
    assert str(scratch) in peer.quit()


def test_a_directory_is_free_again_when_its_guest_is_gone_or_has_not_started(peer: Peer, scratch: Path) -> None:
    assert start(peer, scratch, "Simulated_Lifetime = 1") == ["0", "1"]
    assert peer.run("STATUS", 1) == ["0", "STATUS=Stopped"]
    assert start(peer, scratch, 'Simulated_Fault = "job"')[0] == "1"
    assert start(peer, scratch) == ["0", "3"]
    peer.quit()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize(
    ("options", "word"), [("ro", errors.CRITICAL), ("size=4k", errors.INVALID_DISK_PARAM)], ids=["read-only", "full"]
)
def test_a_scratch_file_system_that_fails_does_not_hold_the_job(scratch: Path, options: str, word: str) -> None:
    uid = scratch.stat().st_uid
    script = f'mount -t tmpfs -o uid={uid},mode=755 none "$0" && mount -o remount,{options} "$0" || exit 1'
    fill = 'head -c 1M /dev/zero > "$0/large" 2>/dev/null; ' if options != "ro" else ""
    through = ["unshare", "--mount", "sh", "-c", f'{script}; {fill}exec "$@"', str(scratch)]
    with Peer(environment("simulated", scratch), through=through) as peer:
        peer.line()
        assert start(peer, scratch, 'Simulated_Fault = "job"') == ["1", word]
        assert start(peer, beside(scratch), 'Simulated_Fault = "job"') == ["1", errors.INVALID_DISK_PARAM]
        peer.quit()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_scratch_directory_that_is_closed_to_its_user_does_not_hold_the_job(peer: Peer, scratch: Path) -> None:
    os.chown(scratch, 0, 0)
    assert start(peer, scratch, 'Simulated_Fault = "job"') == ["1", errors.CRITICAL]
    peer.quit()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_a_signal_destroys_the_vms_and_ends_the_server_well(peer: Peer, scratch: Path, number: signal.Signals) -> None:
    start(peer, scratch)
    log = peer.end_by(number)
    assert peer.process.returncode == 0
    assert number.name in log
    assert "Traceback" not in log


@pytest.mark.parametrize("stream", ["stdin", "stdout"])
def test_a_client_that_closes_its_end_ends_the_server_well(peer: Peer, stream: str) -> None:
    getattr(peer.process, stream).close()
    assert peer.process.wait(DEADLINE) == 0
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
    os.set_blocking(peer.process.stdin.fileno(), False)
    sent = 0
    while select.select([], [peer.process.stdin], [], 2.0)[1]:
        try:
            sent += os.write(peer.process.stdin.fileno(), b"COMMANDS\r\n" * 400)
        except BlockingIOError:
            continue
        assert sent < 8 << 20, "the server takes requests without end"
    os.set_blocking(peer.process.stdin.fileno(), True)
    assert memory(peer, "VmRSS") < 64 << 10, "KiB"
    peer.process.stdin.close()
    assert peer.process.wait(DEADLINE) == 0, "the end of input is seen all the same"


def memory(peer: Peer, figure: str) -> int:
    """KiB that the server has, or with VmHWM has had at most."""
    with open(f"/proc/{peer.process.pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(figure))


def test_an_ad_of_a_million_short_lines_costs_little_memory_and_log(peer: Peer, scratch: Path) -> None:
    peer.send("CLASSAD")
    assert peer.line() == "S"
    before = memory(peer, "VmHWM")
    for line in *simulated_ad(scratch), *["a=1\n" * 100_000, "nonsense\n" * 100_000] * 5:
        peer.send(line)
    assert peer.ask("CLASSAD_END") == "S"
    assert memory(peer, "VmHWM") - before < 24 << 10, "KiB"
    assert peer.run("START", "simulated") == ["0", "1"]
    assert len(peer.quit()) < 4096


# Where no thread can be started


LIMITED_UID = 54777
"""The uid of no other process: the kernel counts those of a user, threads included, and sets root no limit."""

AS_LIMITED = ("setpriv", f"--reuid={LIMITED_UID}", f"--regid={LIMITED_UID}", "--clear-groups")


@contextlib.contextmanager
def limited(scratch: Path, *before: str) -> Iterator[Peer]:
    """A server of a user to whom a limit on processes applies, with the rights to read this installation."""
    rights = ["--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
    with Peer(environment("simulated", scratch), through=[*AS_LIMITED, *rights, *before]) as peer:
        peer.line()
        yield peer


def limit(peer: Peer, threads: int) -> None:
    subprocess.run([*AS_LIMITED, "prlimit", f"--pid={peer.process.pid}", f"--nproc={threads}:"], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_request_that_no_thread_can_carry_out_gets_a_fault_and_the_server_lives_on(scratch: Path) -> None:
    with limited(scratch) as peer:
        assert start(peer, scratch) == ["0", "1"]
        limit(peer, 1)
        assert start(peer, beside(scratch), "ProcId = 4") == ["1", errors.CRITICAL]
        assert peer.run("STATUS", 1)[1] == "STATUS=Running", "a VM has its thread"
        limit(peer, 1000)
        assert start(peer, scratch.parent / "dir_2", "ProcId = 4") == ["0", "3"]
        limit(peer, 1)
        assert "Traceback" not in peer.quit()
    for directory in (scratch, scratch.parent / "dir_2"):
        ends = [json.loads(line) for line in (directory / "vm_metrics.jsonl").read_text().splitlines()]
        assert ends[-1]["reason"] == "the server has ended: QUIT received", "its VM was destroyed"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.usefixtures("as_starter")
def test_the_end_of_a_guest_is_told_by_a_status_where_no_process_can_be_started(scratch: Path) -> None:
    def has_tried() -> bool:
        peer.pump(0.1)
        return "no process can be started" in peer.errors()

    with limited(scratch) as peer, subprocess.Popen(["cat"], stdin=subprocess.PIPE) as guest:
        exits = "Simulated_Exit_Status = 3"
        attended(peer, scratch, "Simulated_Lifetime = 1", f"Simulated_Pid = {guest.pid}", exits)
        limit(peer, 1)
        guest.kill()
        guest.wait()
        until(has_tried, "the server to try")
        assert peer.run("STATUS", 1) == ["0", "STATUS=Stopped"]
        peer.quit(status=3)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_settings_are_read_where_no_thread_can_be_started(scratch: Path) -> None:
    with limited(scratch, "prlimit", "--nproc=1:") as peer:
        assert start(peer, scratch) == ["1", errors.CRITICAL]
        limit(peer, 1000)
        assert start(peer, scratch) == ["0", "2"]
        peer.quit()


# The settings


def test_quit_does_not_wait_for_the_settings(scratch: Path) -> None:
    settings = scratch.parent / "settings"
    os.mkfifo(settings)
    with Peer(environment("simulated", scratch) | {"VMGAHP_CONFIG": str(settings)}) as peer:
        peer.line()
        peer.send_ad(*simulated_ad(scratch))
        peer.request("START", "simulated")
        until(lambda: len(os.listdir(f"/proc/{peer.process.pid}/task")) > 2, "the START waits for them")
        peer.send("QUIT")
        assert peer.line(server.DESTROY_DEADLINE / 2) == "S"
        peer.finish()
        assert peer.process.returncode == 0


@pytest.mark.parametrize("machine", ["kvm", "any", "vmrun"])
@pytest.mark.parametrize(
    "vm_type",
    ["simulated", "any", "libvirt", "qemu", "script", "test", "nonsense", "lxc", " lxc", "vsphere,script", ""],
)
def test_a_job_is_run_by_the_driver_of_the_machines_type_or_held(scratch: Path, machine: str, vm_type: str) -> None:
    """The starter gives a server the type that the job has, and asks for a VM of that type."""
    if (machine, vm_type) == ("any", "any"):
        return
    with Peer(environment(vm_type, scratch, VM_TYPE=machine, VM_ANY_TYPES="kvm, xen")) as peer:
        peer.line()
        peer.send_ad(*simulated_ad(scratch, f'JobVMType = "{vm_type}"'))
        answer = peer.run("START", vm_type.replace(" ", "\\ "))
        assert answer == ["1", errors.MISMATCHED], (scratch / "vm_error.txt").read_text()
        assert "VMType" in (scratch / "vm_error.txt").read_text() or "VM type" in (scratch / "vm_error.txt").read_text()


@pytest.mark.parametrize(
    "value",
    [
        *('"xen"', "undefined", "error", "7", "true", '{"kvm"}', '[a = "kvm"]', "Nothing", '"kvm', "ClaimId"),
        'ifThenElse(random() < 2, "xen", "kvm")',
        'ifThenElse(isUndefined(ClaimId), "any", "kvm")',
        "1" + "+1" * 300_000,
    ],
    ids=lambda value: value[:20],
)
def test_a_job_whose_type_is_not_what_the_starter_made_of_it_is_held(scratch: Path, value: str) -> None:
    with Peer(environment("kvm", scratch, VM_TYPE="kvm")) as peer:
        peer.line()
        peer.send_ad('ClaimId = "secret-71"', *simulated_ad(scratch, f"JobVMType = {value}"))
        assert peer.run("START", "kvm") == ["1", errors.MISMATCHED]
        assert "secret" not in (scratch / "vm_error.txt").read_text() + peer.errors()


def test_the_requirements_of_the_policy_hold_for_every_driver(scratch: Path) -> None:
    with served(scratch, VM_POLICY_REQUIREMENTS="JobVMMemory > 100000") as peer:
        assert start(peer, scratch) == ["1", errors.MISMATCHED]
    assert "VM_POLICY_REQUIREMENTS" in (scratch / "vm_error.txt").read_text()


def a_start(scratch: Path) -> tuple[server.Server, Call]:
    made = server.Server("simulated", str(scratch), {}, to_stderr=True)
    made._settings, made._identity = Settings({}), Identity(os.geteuid(), os.getegid())
    call = Call(Vm(1), lifecycle.START, 1, 0.0)
    call.job = JobAd([("VM_WORKING_DIR", f'"{scratch}"')])
    return made, call


def test_the_ad_is_evaluated_within_the_time_of_its_start(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (made, call), seen = a_start(scratch), []

    def type_for(*_: object) -> str:
        seen.append(budget.current().left(float("inf")))
        raise errors.ClientFault(errors.VM_NOT_FOUND, "It was seen.")

    monkeypatch.setattr("vmgahp.drivers.base.type_for", type_for)
    with pytest.raises(errors.ClientFault, match="It was seen"):
        made._start(call)
    made._leave_directory(1)
    assert seen[0] < made.session.start_timeout


@pytest.mark.parametrize("place", ["vmgahp.drivers.base.type_for", "vmgahp.metrics.file.MetricsFile.add"])
def test_a_start_that_waits_for_a_file_of_the_jobs_is_the_jobs_fault(scratch, monkeypatch, place) -> None:
    """No deadline ends a read of a file whose lock another process holds, and no write."""
    monkeypatch.setenv(SIMULATED_SWITCH, "1")
    monkeypatch.setattr(server, "START_SHARE", 0.005)
    made, call = a_start(scratch)
    made._settings = jobs.MACHINE
    call.job = jobs.ad(jobs.BASE, scratch, JobVMType='"simulated"')
    os.mkfifo(scratch / "memory")
    with open(scratch / "memory", "r+b", buffering=0) as file:
        monkeypatch.setattr(place, lambda *_, **__: file.read(1).decode())
        task = Task("the START", lambda: made._start(call))
        until(lambda: call.late == errors.MISMATCHED, "it is the job's")
        file.write(bytes(99))
        assert task.wait(DEADLINE)
        made._destroy_all()
    made._leave_directory(1)
    assert f"waited for {scratch}/memory" in (scratch / "vm_error.txt").read_text()
    made, call = a_start(scratch)
    made._directories[1] = str(scratch), None
    monkeypatch.setattr(proc, "awaited_file", lambda _: f"{scratch}0/memory")
    made._judge(call, 0)
    assert call.late == errors.CRITICAL, "it is of another job"


def test_the_hypervisor_in_memory_is_for_tests_only(scratch: Path) -> None:
    environ = environment("simulated", scratch, VM_TYPE="simulated")
    del environ["VMGAHP_SIMULATED"]
    with Peer(environ) as peer:
        peer.line()
        peer.send_ad(*simulated_ad(scratch))
        assert peer.run("START", "simulated") == ["1", errors.NO_SUPPORTED_VM_TYPE]


def test_the_server_looks_at_its_deadlines_when_the_settings_are_read(scratch: Path) -> None:
    """The deadline of VM_GAHP_REQ_TIMEOUT applies to a request that came before it was read, too."""
    made = server.Server("simulated", str(scratch), environment("simulated", scratch), to_stderr=True)
    made._configuring.acquire()
    made._configure()
    assert select.select([made._pipes.wake_read], [], [], 0)[0]


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


def test_no_secret_of_the_ad_reaches_the_log(scratch: Path) -> None:
    with served(scratch, VM_GAHP_DEBUG="D_FULLDEBUG") as peer:
        secrets = ['ClaimId = "<127.0.0.1:9618>#1#1#hush-1"', 'TransferKey = "hush-2"']
        secrets += ['Broken "hush-3"', '_condor_privKey = "hush-4"']
        start(peer, scratch, *secrets, 'Simulated_Fault = "bug"')
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


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """The client's ends of a server's pipes, of which the server within this process has the others."""
    theirs, to = os.pipe()
    came, ours = os.pipe()
    monkeypatch.setattr(server, "STDIN", theirs)
    monkeypatch.setattr(server, "STDOUT", ours)
    return to, came


def test_what_the_client_does_not_read_waits_until_it_does(ends: tuple[int, int]) -> None:
    made = server.ClientPipes()
    sent = b"".join(b"%d\n" % number for number in range(100_000))
    made.write(sent)
    got = b""
    while len(got) < len(sent):
        got += os.read(ends[1], 1 << 16)
        made.wait(0.0)
    assert got == sent


def test_an_interval_of_years_is_waited_for(ends: tuple[int, int]) -> None:
    os.write(ends[0], b"VERSION\r\n")
    assert server.ClientPipes().wait(1e12) == (b"VERSION\r\n", False)


def test_a_process_that_ends_wakes_once(ends: tuple[int, int]) -> None:
    made = server.ClientPipes()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        watched = os.pidfd_open(process.pid)
        made.watched.add(watched)
        assert made.wait(0.0) == (b"", False)
        process.kill()
        assert made.wait(None) == (b"", True)
        assert made.watched == set()
        assert made.wait(0.0) == (b"", False)
    os.close(watched)


def test_what_others_have_in_common_with_the_daemon_stays_as_it_is(scratch: Path) -> None:
    """A client that writes to the same pipe, or a shell behind us, would be told to try again later."""
    read, write = os.pipe()
    environ = environment("simulated", scratch)
    words = [*DAEMON, "-f", "-M", "3"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=write, stderr=write, env=environ, cwd=scratch) as daemon:
        daemon.stdin.write(b"VERSION\r\n")
        daemon.stdin.flush()
        found = b""
        while found.count(b"\n") < 2:
            found += os.read(read, 4096)
        assert found == wire.GREETING + b"\nS " + wire.GREETING + b"\n"
        assert not fcntl.fcntl(write, fcntl.F_GETFL) & os.O_NONBLOCK
        daemon.stdin.write(b"QUIT\r\n")
    os.close(read)
    os.close(write)


def test_a_vm_has_one_worker_for_all_its_requests(scratch: Path) -> None:
    with served(scratch, VM_METRICS_INTERVAL=0) as peer:
        assert start(peer, scratch) == ["0", "1"]
        tasks = Path(f"/proc/{peer.process.pid}/task")
        until(lambda: len(list(tasks.iterdir())) == 2, "the thread that has read the settings is gone")
        threads = sorted(tasks.iterdir())
        for command in ("STATUS", "SUSPEND", "RESUME", "STATUS", "GETPID"):
            assert peer.run(command, 1)[0] == "0"
        assert sorted(tasks.iterdir()) == threads
        assert peer.run("STOP", 1) == ["0", "NULL"]
        peer.quit()


WHO = Identity(65534, 65534)


def made(directory: Path) -> Path:
    path = directory / ".job.ad"
    path.write_text("ClusterId = 1\n")
    return path


def test_what_was_appended_goes_and_a_file_in_its_place_is_left_alone(tmp_path: Path) -> None:
    path = made(tmp_path)
    before = path.stat()
    kept = JobAdFile(str(tmp_path), WHO)
    with path.open("a") as file:
        file.write("ToE = []\n")
    assert kept.restore()
    assert path.read_text() == "ClusterId = 1\n"
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert not kept.restore(), "it is as it was"
    path = made(tmp_path)
    kept = JobAdFile(str(tmp_path), WHO)
    other = tmp_path / "precious"
    other.write_text("precious")
    for replace in (path.symlink_to, path.hardlink_to):
        path.unlink()
        replace(other)
        assert not kept.restore()
    assert other.read_text() == "precious"


def test_without_a_file_nothing_is_made_and_a_temporary_one_does_not_travel_either(tmp_path: Path) -> None:
    assert not JobAdFile(str(tmp_path), WHO).restore()
    assert not JobAdFile(str(tmp_path / "nowhere"), WHO).restore()
    JobAdFile(str(tmp_path), WHO).restore()
    assert not list(tmp_path.iterdir())
    update(tmp_path)
    (tmp_path / ".update.ad.tmp").write_text("x")
    JobAdFile(str(tmp_path), WHO).restore()
    assert files(tmp_path) == []


def update(directory: Path) -> None:
    """Write the file as the startd does at each of its updates while a job runs."""
    temporary = directory / ".update.ad.tmp"
    temporary.write_text("x")
    temporary.rename(directory / ".update.ad")


def files(directory: Path) -> list[str]:
    """List the files that the starter sends; it leaves out directories."""
    return [path.name for path in directory.iterdir() if path.is_file()]


def test_what_the_startd_writes_for_jobs_does_not_travel(tmp_path: Path) -> None:
    (tmp_path / "output.dat").write_text("x")
    update(tmp_path)
    kept = JobAdFile(str(tmp_path), WHO)
    for _ in range(2):
        kept.restore()
        assert files(tmp_path) == ["output.dat"]
        with pytest.raises(IsADirectoryError):  # while the starter sends the checkpoint
            update(tmp_path)
        assert files(tmp_path) == ["output.dat"]
    kept.release()
    kept.restore()  # the startd has not come in between
    with pytest.raises(IsADirectoryError):
        update(tmp_path)
    kept.release()
    update(tmp_path)
    assert sorted(files(tmp_path)) == [".update.ad", "output.dat"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_file_system_of_the_jobs_that_hangs_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path)
    monkeypatch.setattr(child, "DEADLINE", 0.1)
    for operation in ("_read", "_bar_update", "_restore"):
        monkeypatch.setattr(job_ad_file, operation, lambda *_: time.sleep(1000))
    kept = JobAdFile(str(tmp_path), WHO)
    assert not kept.restore()
    kept.release()
