"""vm_metrics.jsonl: figures that never go down, a file that is the job's, and a server that waits for neither."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import jobs
from tests.conftest import simulated_ad
from tests.peer import Peer, environment
from vmgahp import errors, lifecycle
from vmgahp.config import Settings
from vmgahp.daemon.collector import Collector
from vmgahp.drivers.simulated import SimulatedMachine
from vmgahp.host.job_user import Identity
from vmgahp.log import Log
from vmgahp.metrics import Metrics, Status, Totals, Usage
from vmgahp.metrics.file import LONGEST_LINE, NAME, ROOM_FOR_EVENTS, MetricsFile, last_sample
from vmgahp.protocol.session import Call, Vm
from vmgahp.testing.contract import until


def lines(scratch: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (scratch / NAME).read_text().splitlines()]


def events(scratch: Path) -> list[object]:
    return [line["event"] for line in lines(scratch) if "event" in line]


def reading(cpu: float, written: int = 0, run: str = "") -> Metrics:
    return Metrics(
        lifecycle.RUNNING, time.time(), cpu_seconds=cpu, block={"vda": {"write_bytes": written, "capacity": 9}}, run=run
    )


def written(line: dict[str, object]) -> object:
    return line["block"]["vda"]["write_bytes"]  # type: ignore[index]


# Figures


def test_what_begins_anew_is_added_to_what_there_was() -> None:
    totals = Totals()
    first = totals.sample(reading(10.0, 100, run="1"))
    # It has counted further than before already: that its counters began anew shows by the run alone.
    second = totals.sample(reading(12.0, 150, run="2"))
    assert [(line["cpu_seconds"], written(line)) for line in (first, second)] == [(10.0, 100), (22.0, 250)]
    assert totals.sample(reading(12.5, 160, run="2"))["cpu_seconds"] == 22.5
    assert second["block"]["vda"]["capacity"] == 9, "how large a disk is is not added up"
    totals = Totals()
    totals.sample(reading(10.0, 100))
    line = totals.sample(reading(10.5, 30))
    assert (line["cpu_seconds"], written(line)) == (10.5, 130)
    line = Totals(Totals().sample(reading(10.0, 100, run="7"))).sample(reading(1.0, 5, run="1"))
    assert (line["cpu_seconds"], written(line)) == (11.0, 105)


def test_what_a_guest_has_used_whoever_has_read_it() -> None:
    usage = Usage(100.0)
    assert [usage.read(raw) for raw in (None, 10.0, None, 11.0)] == [100.0, 110.0, 110.0, 111.0]
    usage = Usage()
    usage.read(10.0)
    usage.carry()
    assert usage.seconds == 10.0
    assert usage.read(12.0) == 22.0
    usage = Usage(100.0)
    usage.read(10.0)
    usage.at_least(9.0)
    assert usage.seconds == 110.0
    usage.at_least(12.0)
    assert usage.seconds == 112.0
    assert usage.read(11.0) == 112.0, "it has not begun anew"
    assert usage.read(13.0) == 113.0


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 1 << 40), st.sampled_from("ab")), max_size=30))
def test_figures_never_go_down(readings: list[tuple[float, int, str]]) -> None:
    totals = Totals()
    before = (0.0, 0)
    for cpu, bytes_written, run in readings:
        line = totals.sample(reading(cpu, bytes_written, run))
        now = (line["cpu_seconds"], written(line))
        assert now[0] >= before[0]  # type: ignore[operator]
        assert now[1] >= before[1]  # type: ignore[operator]
        before = now  # type: ignore[assignment]


@pytest.mark.parametrize(
    "text",
    [
        *(b"\xff\xfe\n", b"[" * 60000, b'{"cpu_seconds": "many"}', b'{"cpu_seconds": NaN, "block": [1]}'),
        b'{"cpu_seconds": -1, "block": {"vda": {"write_bytes": -5}}}',
        b'{"cpu_seconds": 1e400, "block": {"vda": {"write_bytes": true}}}',
        b'{"cpu_seconds": ' + b"9" * 4000 + b"}",
        b'{"cpu_seconds": {}, "block": {"vda": 7}, "network": null, "vcpu_seconds": []}',
        b"null\n7\n[]\n",
    ],
)
def test_a_line_that_the_job_has_made_up_does_no_harm(text: bytes) -> None:
    line = Totals(last_sample(text)).sample(reading(1.0, 5))
    assert (line["cpu_seconds"], written(line)) == (1.0, 5)


# The file


def test_it_is_the_jobs_users_own(scratch: Path, user: Identity) -> None:
    with contextlib.closing(MetricsFile(user, str(scratch), 1000, pytest.fail)) as file:
        file.add({"event": "start"})
    status = (scratch / NAME).stat()
    assert (status.st_uid, status.st_mode & 0o777) == (user.uid, 0o600)


@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
def test_what_is_no_file_is_not_written_to_and_the_vm_runs_without(scratch: Path, user: Identity, kind: str) -> None:
    victim = scratch.parent / "victim"
    victim.write_text("precious")
    victim.chmod(0o666)
    path = scratch / NAME
    {"link": lambda: path.symlink_to(victim), "fifo": lambda: os.mkfifo(path), "directory": path.mkdir}[kind]()
    told: list[str] = []
    file = MetricsFile(user, str(scratch), 1000, told.append)
    assert file.last_sample() is None
    file.add({"event": "start"})
    file.close()
    assert victim.read_text() == "precious"
    assert [NAME in text for text in told] == [True]


def test_it_is_gone_on_with_after_a_torn_line(scratch: Path, user: Identity) -> None:
    (scratch / NAME).write_text('{"cpu_seconds":3}\n{"cpu_sec')
    (scratch / NAME).chmod(0o666)
    file = MetricsFile(user, str(scratch), 1000, pytest.fail)
    assert file.last_sample() == {"cpu_seconds": 3}
    file.add({"cpu_seconds": 4})
    file.close()
    assert (scratch / NAME).read_text().splitlines()[-1] == '{"cpu_seconds":4}'


def test_it_has_a_limit_and_events_a_little_more_room(scratch: Path, user: Identity) -> None:
    told: list[str] = []
    file = MetricsFile(user, str(scratch), 100, told.append)
    for number in range(2 * ROOM_FOR_EVENTS // 20):
        file.add({"cpu_seconds": number})
    size = (scratch / NAME).stat().st_size
    assert 60 < size <= 100
    file.add({"event": "stop"}, event=True)
    assert (scratch / NAME).stat().st_size > size
    for _ in range(2 * ROOM_FOR_EVENTS // 16):
        file.add({"event": "stop"}, event=True)
    assert (scratch / NAME).stat().st_size <= 100 + ROOM_FOR_EVENTS
    assert ["reached its limit of 100 bytes" in text for text in told] == [True]
    file.close()


def test_no_line_is_longer_than_whoever_reads_it_will_take(scratch: Path, user: Identity) -> None:
    with contextlib.closing(MetricsFile(user, str(scratch), 10 * LONGEST_LINE, pytest.fail)) as file:
        file.add({"event": "x" * LONGEST_LINE}, event=True)
        file.add({"event": "end"}, event=True)
    assert events(scratch) == ["end"]


# The server


@contextlib.contextmanager
def started(scratch: Path, *more: str, interval: object = 1) -> Iterator[Peer]:
    """A client of a server that reads its VM's figures often, and has started one."""
    with Peer(environment("simulated", scratch, VM_METRICS_INTERVAL=interval, VM_GAHP_DEBUG="D_FULLDEBUG")) as peer:
        peer.line()
        peer.send_ad(*simulated_ad(scratch, *more))
        assert peer.run("START", "simulated") == ["0", "1"]
        yield peer


def test_what_happens_to_a_vm_is_there_before_its_answer(scratch: Path) -> None:
    with started(scratch) as peer:
        (start,) = lines(scratch)
        wanted = {"event": "start", "name": "alice_lab_7.3", "pid": peer.process.pid, "state": "Running"}
        assert start.items() >= wanted.items()
        for command, event, state in (
            *(("SOFT_SUSPEND", "pause", "SoftSuspended"), ("RESUME", "resume", "Running")),
            *(("SUSPEND", "suspend", "Suspended"), ("RESUME", "resume", "Running")),
            *(("CHECKPOINT", "checkpoint", "Checkpointed"), ("STOP", "stop", "Stopped")),
        ):
            assert peer.run(command, 1) == ["0", "NULL"]
            last = [line for line in lines(scratch) if "event" in line][-1]
            assert (last["event"], last["state"]) == (event, state)
            assert float(str(last["seconds"])) >= 0
        assert "Traceback" not in peer.quit()
    assert events(scratch)[-1] == "stop", "the end of the server is none of a VM that was stopped"


def test_what_status_finds_is_kept_by_a_driver_that_knows_no_more(scratch: Path) -> None:
    with started(scratch) as peer:
        seen = []
        for number in (1, 2):
            assert peer.run("STATUS", 1)[1] == "STATUS=Running"
            until(lambda: len(lines(scratch)) > number, "a line of figures")  # noqa: B023
            seen.append(lines(scratch)[-1])
        assert [line["cpu_seconds"] for line in seen] == [0.5, 1.0]
        assert seen[0]["memory_kib"] == 64 * 1024
        peer.quit()
    assert lines(scratch)[-1]["reason"] == "the server has ended: QUIT received"


def test_the_stages_of_a_program_are_there(scratch: Path, user: Identity) -> None:
    collector, machine, _ = sampled(scratch, user, SimulatedMachine)
    machine.updates.on_stage("started")
    last = [line for line in lines(scratch) if line.get("event") == "program"]
    assert [(line["state"], line["reason"]) for line in last] == [("Running", "started")]
    collector.end(machine, "over")
    machine.updates.on_stage("ended")
    assert events(scratch)[-1] == "end", "nothing is written after it"


def test_the_end_of_a_guest_is_there(scratch: Path) -> None:
    with started(scratch, "Simulated_Lifetime = 1") as peer:
        peer.run("STATUS", 1)
        assert events(scratch) == ["start", "end"]
        peer.run("STOP", 1)
        peer.quit()
    assert events(scratch) == ["start", "end"]


def test_a_hypervisor_that_hangs_holds_up_no_request_and_one_thread(scratch: Path) -> None:
    gate = scratch.parent / "gate"
    with started(scratch, f'Simulated_METRICS_Gate = "{gate}"') as peer:

        def threads() -> list[str]:
            return sorted(os.listdir(f"/proc/{peer.process.pid}/task"))

        until(lambda: len(threads()) == 3, "the VM's worker and the thread for the figures")
        hanging = threads()
        # Each of these has figures taken, or would.
        for command in ("STATUS", "SUSPEND", "RESUME", "SOFT_SUSPEND", "RESUME", "CHECKPOINT", "RESUME"):
            assert peer.run(command, 1)[0] == "0"
        until(lambda: threads() == hanging, "no further thread")
        assert peer.run("STOP", 1) == ["0", "NULL"]
        gate.touch()
        until(lambda: len(threads()) == 1, "they end with the last VM")
        peer.quit()
    assert events(scratch)[-1] == "stop"


def sampled(scratch: Path, user: Identity, kind: type[SimulatedMachine]) -> tuple[Collector, SimulatedMachine, Call]:
    """A collector whose VM has started, that VM, and a SUSPEND of it."""
    call = Call(Vm(1), lifecycle.START, 1, 0.0)
    call.job = jobs.of_lines(*simulated_ad(scratch))
    machine = kind(call.job, {})
    machine.found = time.time(), machine.status()
    collector = Collector(Settings({"VM_METRICS_INTERVAL": "1"}), user, Log())
    collector.done(call, None, 0.0, machine)
    save = Call(call.vm, lifecycle.SUSPEND, 2, 0.0)
    save.state = lifecycle.RUNNING
    return collector, machine, save


def test_a_vm_that_starts_while_the_only_other_one_ends_has_its_time(scratch: Path, user: Identity) -> None:
    """What the main thread waits for is a time that poll can wait for."""
    collector, machine, save = sampled(scratch, user, SimulatedMachine)
    other = Call(Vm(2), lifecycle.START, 3, 0.0)
    other.job = jobs.of_lines(*simulated_ad(scratch))
    collector._add(other, machine)
    collector.done(Call(save.vm, lifecycle.STATUS, 4, 0.0), Status(lifecycle.STOPPED), 0.0, machine)
    assert collector.due <= time.monotonic()
    collector.look(time.monotonic())
    assert time.monotonic() < collector.due < time.monotonic() + 2


def test_a_failure_is_told_with_its_reason(scratch: Path, user: Identity) -> None:
    collector, machine, save = sampled(scratch, user, SimulatedMachine)
    for _ in range(3):
        collector.before(save)  # each has the VM read, which knows nothing new
    collector.done(save, errors.MachineFault("The disk is full.", "make room."), 0.0, machine)
    collector.end(machine, "enough")
    found = lines(scratch)
    assert events(scratch) == ["start", "suspend", "end"]
    assert len(found) == 4, "figures that have not changed hands are not told again"
    (failed,) = [line for line in found if line.get("event") == "suspend"]
    assert "The disk is full." in str(failed["error"])
    assert "state" not in failed


def test_a_clock_that_is_set_back_stops_no_figures(scratch: Path, user: Identity) -> None:
    collector, machine, save = sampled(scratch, user, SimulatedMachine)
    collector.before(save)
    machine.found = time.time() - 3600, machine.status()
    collector.before(save)
    collector.end(machine, "enough")
    assert [line["cpu_seconds"] for line in lines(scratch) if "cpu_seconds" in line] == [0.5, 1.0]


def test_without_a_thread_figures_can_wait(scratch: Path, user: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        collector, machine, save = sampled(scratch, user, SimulatedMachine)
        collector.before(save)
    assert events(scratch) == ["start"]
    collector.done(save, None, time.monotonic(), machine)
    until(lambda: any("cpu_seconds" in line for line in lines(scratch)), "figures")
    collector.end(machine, "enough")


def test_a_driver_that_breaks_at_it_leaves_no_request_unanswered(scratch: Path, user: Identity) -> None:
    class Broken(SimulatedMachine):
        def saved_bytes(self) -> int:
            raise OSError("broken")

        def metrics(self) -> Metrics:
            raise ZeroDivisionError

    collector, machine, save = sampled(scratch, user, Broken)
    collector.before(save)
    collector.done(save, None, 0.0, machine)
    collector.end(machine, "enough")
    assert events(scratch) == ["start", "end"]


def test_a_failed_start_and_no_or_a_wrong_interval_leave_no_file(scratch: Path) -> None:
    with Peer(environment("simulated", scratch)) as peer:
        peer.line()
        peer.send_ad(*simulated_ad(scratch, 'Simulated_Fault = "job"'))
        assert peer.run("START", "simulated")[0] == "1"
        peer.quit()
    with started(scratch, interval=0) as peer:
        assert peer.run("STATUS", 1)[0] == "0"
        peer.quit()
    assert not (scratch / NAME).exists()
    with started(scratch, interval="often") as peer:
        assert "VM_METRICS_INTERVAL = often" in peer.quit()
    assert not (scratch / NAME).exists()
