"""What is made of what a guest says of its program, and of what it does not say."""

import os
import threading
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from tests import jobs
from tests.job.support import entry, tar
from vmgahp import errors, lifecycle
from vmgahp.drivers.libvirt.program import monitor
from vmgahp.drivers.libvirt.program.monitor import QUIET_SECONDS, STATE_FILE, ProgramMonitor, RunProgress, read
from vmgahp.drivers.libvirt.start.describe import CONTROL, OUTPUTS, append_to
from vmgahp.drivers.resources import Resources
from vmgahp.host import wait as threads
from vmgahp.host.serial_capture import LinePort
from vmgahp.job.exit_code import CRASHED, DESTROYED, GONE, POWERED_OFF, Ending, status_of
from vmgahp.job.scratch_files import OutputDirectory

BOOT, LIMIT = 600, 60
RUN = SimpleNamespace(boot_timeout=BOOT, time_limit=LIMIT, outputs=None, beside=())


class Machine:
    """One that runs; it stands in for its guest, too."""

    def __init__(self) -> None:
        self.name = "vm"
        self.said: list[str] = []
        self.log = self.said.append
        self.resources = Resources(self.log)
        self.updates = self.resources.updates
        self.state = lifecycle.RUNNING
        self.deadlines = SimpleNamespace(stop=30)
        self.guest = SimpleNamespace(watch=SimpleNamespace(gone=threading.Event()))
        self.io_errors = SimpleNamespace(under_way=False, stop=lambda _why: self.may_end)
        self.may_end = True
        self.given_up: list[tuple[str, str]] = []
        self.fails = False

    def screenshot(self) -> None:
        pass

    def report_lost(self, problem: str, _hint: str) -> None:
        self.said.append(problem)

    def give_up(self, how: str, why: str) -> None:
        if self.fails:
            raise errors.HypervisorFault("it does not end.")
        self.given_up.append((how, why))

    def end_guest(self) -> None:
        self.given_up.append(("", ""))


class Port(LinePort):
    """One at which nobody is."""

    def __init__(self) -> None:
        self.lines = SimpleQueue()
        self.answers: list[str] = []

    def say(self, line: str) -> None:
        self.answers.append(line)


class Outputs:
    """A capture of what a test says has come."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.limit = 1 << 30
        self.left = lambda: float("inf")
        self.is_cut = False

    @property
    def written(self) -> int:
        return self.file.stat().st_size

    def empty(self) -> None:
        os.truncate(self.file, 0)


class Scene:
    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.machine = Machine()
        self.port = Port()
        self.file = scratch / "vm_outputs.tar"
        self.outputs = Outputs(self.file)
        self.send(b"")
        self.machine.resources.run_ports = {CONTROL: self.port, OUTPUTS: self.outputs}  # type: ignore[dict-item]
        self.watch = self.watching()

    def watching(self, kept: int = 0) -> ProgramMonitor:
        return ProgramMonitor(self.machine, RUN, str(self.scratch), kept, jobs.owner(self.scratch))  # type: ignore[arg-type]

    def send(self, data: bytes) -> None:
        self.file.write_bytes(data)
        jobs.own(self.scratch, self.file)

    def hear(self, *lines: str) -> None:
        for line in lines:
            self.watch.hear(line)
            self.watch.look()

    def end_with(self, outputs: bytes) -> None:
        """The program ends, and its outputs have come."""
        self.send(outputs)
        self.hear(*BEGUN, "ended exit 0", f"outputs {len(outputs)}")

    def wait(self, seconds: float) -> None:
        """The guest runs for so long, and says nothing."""
        self.watch._elapsed += seconds
        self.watch.look()

    def ending(self, how: str = POWERED_OFF) -> Ending:
        return self.watch.ending(Ending(how, None, "", 0.0, 1.0, "", None))


@pytest.fixture
def scene(scratch: Path) -> Scene:
    return Scene(scratch)


def archive(**files: bytes) -> bytes:
    return tar(*(entry(name, content) for name, content in files.items()))


BEGUN = ("hello 1", "inputs 3", "started")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        pytest.param(("ended exit 7", "outputs 0", "off"), (7, POWERED_OFF, 7, ""), id="failure"),
        pytest.param(("ended signal 11", "outputs 0"), (-11, POWERED_OFF, None, ""), id="signal"),
        pytest.param(("ended signal 19", "outputs 0"), (147, POWERED_OFF, None, ""), id="signal that ends nobody"),
        pytest.param(("ended limit", "outputs 0"), (1, POWERED_OFF, None, "the 60 s of its time limit"), id="limit"),
        pytest.param(("ended exit 0",), (1, "run failed", 0, "before its outputs were here"), id="no outputs"),
        pytest.param(
            ("ended exit 0", "outputs 0", "failed outputs a.csv is not there"),
            (1, "run failed", 0, "the outputs are not complete: a.csv is not there"),
            id="a missing output",
        ),
        pytest.param(
            ("ended exit 256", "ended exit -1", "ended signal 0", "ended signal 65", "ended", "ended exit", "xyz", ""),
            (1, POWERED_OFF, None, "before the program had ended"),
            id="nonsense",
        ),
        pytest.param(("outputs 0", "off"), (1, POWERED_OFF, None, "before the program had ended"), id="out of turn"),
    ],
)
def test_how_a_vm_has_ended(scene: Scene, lines: tuple[str, ...], expected: tuple[object, ...]) -> None:
    stages: list[str] = []
    scene.machine.updates.on_stage = stages.append
    scene.hear(*BEGUN, *lines)
    ending = scene.ending()
    assert (status_of(ending), ending.how, ending.exit_code) == expected[:3]
    assert stages[:2] == ["ready", "started"]
    assert str(expected[3]) in ending.reason
    assert bool(expected[3]) == bool(ending.reason)


def test_an_end_that_htcondor_wants_is_no_failure(scene: Scene) -> None:
    scene.hear(*BEGUN)
    assert scene.ending(DESTROYED).reason == ""


@pytest.mark.parametrize("how", [GONE, CRASHED])
def test_a_guest_that_is_gone_in_the_middle_is_a_failure(scene: Scene, how: str) -> None:
    scene.hear(*BEGUN)
    ending = scene.ending(how)
    assert (status_of(ending), ending.how) == (1, how)
    assert "before the program had ended" in ending.reason


@pytest.mark.parametrize(
    ("lines", "seconds", "how", "why"),
    [
        pytest.param((), BOOT, "guest not ready", "has not begun the program within 600 s", id="nothing"),
        pytest.param(("hello 1", "inputs 3"), BOOT, "guest not ready", "was 'inputs 3'", id="not started"),
        pytest.param(BEGUN, LIMIT + 120, "run failed", "a time limit of 60 s, which the guest ignores", id="limit"),
        pytest.param((*BEGUN, "ended exit 0"), 3600, "run failed", "has not sent the outputs", id="outputs"),
        pytest.param((*BEGUN, "ended exit 0", "outputs 0"), 120, "", "", id="it does not power off"),
    ],
)
def test_each_stage_has_its_time(scene: Scene, lines: tuple[str, ...], seconds: int, how: str, why: str) -> None:
    scene.hear(*lines)
    scene.wait(seconds)
    assert scene.machine.given_up == []
    scene.wait(1)
    scene.wait(0)
    [(word, reason)] = scene.machine.given_up
    assert word == how
    assert why in reason
    scene.wait(seconds)
    assert len(scene.machine.given_up) == 1


def test_a_guest_that_stands_still_has_time(scene: Scene) -> None:
    scene.machine.state = lifecycle.SOFT_SUSPENDED
    scene.wait(10 * BOOT)
    scene.wait(0)
    assert scene.machine.given_up == []


def test_a_guest_whose_work_is_done_is_ended_though_the_first_try_has_paused_it(scene: Scene) -> None:
    scene.hear("hello 1", "ready", "started", "ended exit 0", "outputs 0")
    scene.machine.io_errors.under_way = True
    scene.wait(10 * BOOT)
    assert scene.machine.given_up == [("", "")]


def test_a_guest_that_cannot_be_ended_now_is_ended_later(scene: Scene) -> None:
    scene.machine.may_end = False
    scene.hear("hello 1", "failed room 3 MiB needed, 1 MiB free")
    assert scene.machine.given_up == []
    scene.machine.may_end, scene.machine.fails = True, True
    scene.wait(1)
    scene.machine.fails = False
    scene.wait(1)
    assert scene.machine.given_up == [("run failed", "there is no room in the guest: 3 MiB needed, 1 MiB free")]


def outputs(scene: Scene, where: str = "vm_outputs") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (scene.scratch / where).iterdir()}


def test_outputs_are_unpacked_before_the_guest_hears_that_it_may_go(scene: Scene) -> None:
    data = archive(a=b"1", b=b"22")
    scene.hear(*BEGUN, "ended exit 0", f"outputs {len(data)}")
    scene.send(data[:100])
    scene.wait(0)
    assert scene.port.answers == []
    scene.send(data)
    scene.wait(0)
    assert scene.port.answers == ["taken"]
    assert outputs(scene, ".vm_outputs") == {"a": b"1", "b": b"22"}
    scene.hear(f"outputs {len(data)}")
    assert scene.port.answers == ["taken", "taken"]
    scene.watch.forget()
    assert [path.name for path in scene.scratch.iterdir()] == ["vm_outputs"]
    assert outputs(scene) == {"a": b"1", "b": b"22"}


def test_outputs_are_in_no_checkpoint_and_a_checkpoint_takes_none_away(scene: Scene) -> None:
    """At a restart they would be files of the scratch directory, in the place of inputs of the same names."""
    (scene.scratch / "a").write_bytes(b"an input")
    jobs.own(scene.scratch, scene.scratch / "a")
    data = archive(a=b"an output")
    scene.send(data)
    luggage = OutputDirectory(str(scene.scratch), (), jobs.owner(scene.scratch), print)
    scene.watch._keep()
    scene.hear(*BEGUN, "ended exit 0", f"outputs {len(data)}")
    luggage.with_checkpoint()
    assert outputs(scene)["a"] == b"an input"
    luggage.without_checkpoint()
    scene.watch.forget()
    assert outputs(scene) == {"a": b"an output"}


def test_a_mistake_in_what_follows_a_guest_leaves_it_to_nobody(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(_line: str) -> None:
        scene.port.lines.put(None)
        raise KeyError("stage")

    monkeypatch.setattr(scene.watch, "hear", stumble)
    scene.port.lines.put("hello 1")
    scene.watch._run()
    scene.watch.look()
    assert scene.machine.given_up == [("run failed", "it cannot be followed: an unexpected KeyError: 'stage'")]


def test_outputs_that_are_not_whole_are_asked_for_again_a_few_times(scene: Scene) -> None:
    scene.hear(*BEGUN, "ended exit 0")
    for number in range(monitor.MOST_TRIES):
        scene.send(b"cut")
        scene.hear("outputs 10000")
        scene.wait(QUIET_SECONDS + 1)
        assert scene.port.answers == ["again"] * (number + 1)
        assert scene.file.read_bytes() == b""
    scene.hear("outputs 10000")
    scene.wait(QUIET_SECONDS + 1)
    scene.wait(0)
    assert [how for how, _ in scene.machine.given_up] == ["run failed"]


def test_outputs_that_cannot_be_unpacked_come_home_as_they_are(scene: Scene) -> None:
    scene.end_with(b"no archive" * 1000)
    assert scene.port.answers == ["taken"]
    ending = scene.ending()
    assert (ending.how, ending.exit_code, status_of(ending)) == ("run failed", 0, 1)
    assert "the outputs cannot be unpacked" in ending.reason
    scene.watch.forget()
    assert (scene.scratch / "vm_outputs" / "vm_outputs.tar").stat().st_size == 10000


def test_too_many_outputs_say_what_to_raise(scene: Scene) -> None:
    scene.outputs.is_cut = True
    scene.hear(*BEGUN, "ended exit 0", "outputs 10000")
    scene.wait(0)
    assert "raise request_disk" in scene.ending().reason


def test_where_no_directory_goes_home_the_archive_does(scene: Scene) -> None:
    scene.watch.is_alone = True
    data = archive(a=b"1")
    scene.end_with(data)
    scene.watch.forget()
    assert scene.file.read_bytes() == data


def test_outputs_take_no_more_than_archive_disks_and_prints_leave_of_what_was_asked_for(scene: Scene) -> None:
    scene.outputs.left = lambda: 300_000
    scene.end_with(archive(a=b"x" * 600_000))
    assert "they take more than" in scene.watch.failure[1]


@pytest.mark.parametrize(("left", "taken"), [(1 << 30, 512 + 4096), (5000, 512 + 4096), (4000, 0)])
def test_outputs_that_are_unpacked_stay_in_the_account_beside_their_archive(
    scene: Scene, left: int, taken: int
) -> None:
    scene.outputs.left = lambda: left - scene.machine.resources.unpacked
    scene.end_with(archive(a=b"x", **{} if left > 5000 else {"b": b"x"}))
    assert bool(scene.watch.failure[1]) == (left <= 5000)
    assert scene.machine.resources.unpacked == taken


def test_outputs_leave_to_other_jobs_what_is_kept_free(scene: Scene) -> None:
    scene.watch = scene.watching(kept=1 << 62)
    scene.end_with(archive(a=b"x"))
    assert "they take more than the 0 MiB" in scene.watch.failure[1]


@pytest.mark.parametrize("lines", [(), BEGUN, (*BEGUN, "ended signal 9"), (*BEGUN, "ended exit 3", "outputs 0")])
def test_a_restart_goes_on_where_the_guest_was(scene: Scene, lines: tuple[str, ...]) -> None:
    scene.watch._keep()
    scene.hear(*lines)
    assert read((scene.scratch / STATE_FILE).read_bytes()) == scene.watch.progress


def test_a_state_that_has_changed_since_a_checkpoint_does_not_go_home(scene: Scene) -> None:
    scene.watch._keep()
    luggage = OutputDirectory(str(scene.scratch), (), jobs.owner(scene.scratch), print)
    luggage.with_checkpoint()
    scene.hear(*BEGUN)
    luggage.without_checkpoint()
    scene.watch.forget()
    assert list((scene.scratch / "vm_outputs").iterdir()) == []


def test_a_vm_whose_program_nobody_can_follow_is_lost_and_no_failure_of_the_jobs(scene, monkeypatch):
    none_left = Mock(side_effect=errors.MachineFault("No thread can be started.", "raise the limit."))
    scene.machine.resources.exit = SimpleNamespace(program=None)  # type: ignore[assignment]
    monkeypatch.setattr(threads, "start_thread", none_left)
    scene.machine.restart = None  # type: ignore[attr-defined]
    vm = SimpleNamespace(working_dir=str(scene.scratch), sent=(False, None))
    spec = SimpleNamespace(vm=vm, devices=SimpleNamespace(run=RUN))
    monitor.begin(scene.machine, spec, 0, jobs.owner(scene.scratch))  # type: ignore[arg-type]
    assert scene.machine.given_up == [("", "")]
    assert "No thread can be started." in scene.machine.said[-1]


def test_outputs_that_were_taken_before_a_checkpoint_are_there_after_it(scene: Scene) -> None:
    scene.send(archive(a=b"1"))
    scene.watch.progress = RunProgress("taken", "exit", 3)
    scene.watch.begin()
    scene.watch.end()
    scene.watch.forget()
    assert outputs(scene) == {"a": b"1"}
    assert not scene.watch.failure[0]


@pytest.mark.parametrize("text", [b"", b"\xff\0", b"taken - 0", b"started exit 3", b"ended exit 256", b"ended off 0"])
def test_a_state_of_nobodys_is_that_of_a_program_that_runs(text: bytes) -> None:
    assert read(text) == RunProgress("started")


@pytest.mark.parametrize(("asked", "printed"), [(50 << 20, 50 << 20), (5 << 30, monitor.MOST_PRINTED)])
def test_what_the_program_prints_is_within_what_the_job_asks_for(monkeypatch, asked, printed):
    limits = {}
    monkeypatch.setattr(monitor, "most_outputs", lambda *_: asked)
    monkeypatch.setattr(monitor, "runtime_dir", lambda: "/")
    monkeypatch.setattr(monitor, "LinePort", lambda *_, **__: None)
    monkeypatch.setattr(
        monitor, "ConsoleCapture", lambda path, _file, limit, _log, **__: limits.update({os.path.basename(path): limit})
    )
    run = SimpleNamespace(stdout="out", stderr="err")
    spec = SimpleNamespace(devices=SimpleNamespace(run=run), vm=SimpleNamespace(working_dir="/"))
    monitor.listen(spec, None, (0, 0), None, None, SimpleNamespace(run_ports={}), anew=True)  # type: ignore[arg-type]
    assert limits == {monitor.OUT: printed, monitor.ERR: printed, monitor.OUTPUTS: asked}
    ours = SimpleNamespace(open_scratch=lambda _directory, _name, flags: flags)
    assert append_to("out", "/", ours, anew=True) & os.O_TRUNC, "emptied as its user"  # type: ignore[arg-type]
