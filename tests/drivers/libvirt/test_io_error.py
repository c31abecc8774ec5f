"""Guests that an error of a disk has paused: tried again, and given up."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import libvirt
import pytest

from tests.drivers.libvirt.support import Job, done, mounted, no_thread, overlay, run_to_its_end, running, until
from tests.lab.guest import counts
from tests.peer import DEADLINE
from vmgahp import errors
from vmgahp.drivers.libvirt.life import pauses
from vmgahp.drivers.libvirt.life.pauses import STALLED, IoErrors
from vmgahp.drivers.libvirt.link.connection import Watch

RUNNING = (libvirt.VIR_DOMAIN_RUNNING, 5)
PAUSED_BY_USER = (libvirt.VIR_DOMAIN_PAUSED, 1)

# Without libvirt


class Domain:
    """One whose disk is full until it has `room`."""

    def __init__(self) -> None:
        self.room = False
        self.now = STALLED
        self.resumed = threading.Semaphore(0)
        self.stalls: Callable[[], None] = lambda: None
        self.runs: Callable[[], None] = lambda: None

    def state(self) -> list[int]:
        return list(self.now)

    def diskErrors(self) -> dict[str, int]:
        return {"vda": libvirt.VIR_DOMAIN_DISK_ERROR_NO_SPACE}

    def suspend(self) -> None:
        self.now = PAUSED_BY_USER

    def resume(self) -> None:
        self.now = RUNNING if self.room else STALLED
        self.runs()
        self.resumed.release()
        if not self.room:
            self.stalls()


class Scene:
    """Stands in for the guest, too (`vmgahp.drivers.libvirt.life.guest.LibvirtGuest`)."""

    def __init__(self, patience: float = 0) -> None:
        self.domain = Domain()
        self.name = "vm"
        self.call: Callable[[Callable[[Domain], bool]], bool] = lambda function: function(self.domain)
        self.operate = lambda _doing, function: self.call(function)
        self.said: list[str] = []
        self.given_up: list[str] = []
        self.over = threading.Event()
        self.cannot_end = 0
        self.watch = Watch("vm")
        self.errors = IoErrors(self, self.give_up, self.say)  # type: ignore[arg-type]
        self.errors.patience = patience
        self.paused: list[str | None] = []
        self.errors.paused = self.paused.append
        self.domain.stalls = self.watch.disk_error
        self.domain.runs = self.watch.resumed.set

    def say(self, line: str) -> None:
        self.said.append(line)
        if "runs on" in line:
            self.over.set()

    def give_up(self, _how: str, why: str) -> None:
        if self.cannot_end:
            self.cannot_end -= 1
            raise errors.HypervisorFault("libvirtd is away.")
        self.given_up.append(why)
        self.errors.end()
        self.over.set()

    def tried(self, times: int = 1) -> None:
        for _ in range(times):
            assert self.domain.resumed.acquire(timeout=DEADLINE), "nobody resumes the guest"


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(pauses, "LONGEST_PAUSE", 0.02)
    monkeypatch.setattr(pauses, "SETTLED", 0.5)


@pytest.fixture
def scene(quickly: None) -> Iterator[Scene]:
    made = Scene()
    yield made
    made.errors.end()


def test_a_pause_that_was_asked_for_is_never_undone(scene: Scene) -> None:
    scene = Scene(patience=0.05)
    with scene.errors.held():
        scene.errors.seen()
    while scene.domain.resumed.acquire(blocking=False):
        pass
    assert not scene.domain.resumed.acquire(timeout=0.3), "held, it is not resumed"
    assert scene.given_up == [], "nor given up"
    scene.errors.let_go()
    scene.tried()
    scene.errors.end()


def test_a_pause_that_fails_is_none(scene: Scene) -> None:
    with pytest.raises(ValueError, match="no"), scene.errors.held():
        raise ValueError("no")
    scene.errors.seen()
    scene.tried()
    with scene.errors.held():
        pass
    with pytest.raises(ValueError, match="no"), scene.errors.held():
        raise ValueError("no")
    while scene.domain.resumed.acquire(blocking=False):
        pass
    assert not scene.domain.resumed.acquire(timeout=0.2), "what was held before is held on"


def test_one_that_was_stopped_waits_for_room_after_a_save_that_failed(scene: Scene) -> None:
    room = threading.Event()
    scene.errors.has_room, scene.domain.room = room.is_set, True
    assert scene.errors.stop("a file system that others fill")
    scene.errors.seen()
    with pytest.raises(ValueError, match="no"), scene.errors.held():
        raise ValueError("no")
    assert not scene.over.wait(3 * pauses.SETTLED), "it stands still"
    room.set()
    assert scene.over.wait(DEADLINE)
    assert scene.domain.now == RUNNING


def test_an_error_of_which_no_event_has_told_is_found(scene: Scene) -> None:
    assert scene.errors.look()
    scene.tried()
    other = Scene()
    other.domain.now = PAUSED_BY_USER
    assert not other.errors.look()
    other.call = Mock(side_effect=libvirt.libvirtError("gone"))
    assert not other.errors.look()


def test_to_hold_waits_for_an_attempt_under_way(scene: Scene) -> None:
    inside, go_on, held = threading.Event(), threading.Event(), threading.Event()

    def slow(function: Callable[[Domain], bool]) -> bool:
        inside.set()
        assert go_on.wait(DEADLINE)
        return function(scene.domain)

    scene.call = slow
    scene.errors.seen()
    assert inside.wait(DEADLINE)

    def hold() -> None:
        with scene.errors.held():
            held.set()

    threading.Thread(target=hold, daemon=True).start()
    assert not held.wait(0.1)
    go_on.set()
    assert held.wait(DEADLINE)
    assert scene.domain.resumed.acquire(blocking=False)
    assert not scene.domain.resumed.acquire(timeout=0.2)


def test_a_guest_that_somebody_else_has_paused_is_left_alone(scene: Scene) -> None:
    scene.domain.now = PAUSED_BY_USER
    scene.errors.seen()
    assert scene.over.wait(DEADLINE)
    assert not scene.domain.resumed.acquire(blocking=False)


def test_a_libvirtd_that_is_away_is_waited_for(scene: Scene) -> None:
    call, left = scene.call, [errors.HypervisorFault("away."), libvirt.libvirtError("gone")]

    def unsure(function: Callable[[Domain], bool]) -> bool:
        if left:
            raise left.pop()
        return call(function)

    scene.call = unsure
    scene.domain.room = True
    scene.errors.seen()
    assert scene.over.wait(DEADLINE)
    assert len([line for line in scene.said if "cannot be resumed" in line]) == 2


def test_a_guest_that_is_stopped_while_it_is_thought_to_run_on_waits_for_room(scene: Scene) -> None:
    room = threading.Event()
    scene.errors.has_room = room.is_set
    scene.domain.room = True
    scene.errors.seen()
    scene.tried()
    assert scene.errors.stop("a file system that others fill")
    assert not scene.over.wait(3 * pauses.SETTLED), "it stands still, and nobody may think otherwise"
    assert scene.domain.now == PAUSED_BY_USER
    scene.errors.seen()
    room.set()
    assert scene.over.wait(DEADLINE)
    assert scene.domain.now == RUNNING
    assert not scene.errors.under_way


def test_a_guest_that_was_stopped_and_that_somebody_else_has_resumed_runs_on(scene: Scene) -> None:
    assert scene.errors.stop("a file system that others fill")
    assert scene.errors.under_way
    scene.domain.now = RUNNING
    scene.errors.seen()
    assert scene.over.wait(DEADLINE)
    assert not scene.errors.under_way


def test_the_end_of_the_vm_is_the_end_of_it(scene: Scene) -> None:
    scene.errors.seen()
    scene.tried()
    thread = scene.errors._thread
    assert thread is not None
    scene.errors.end()
    thread.join(DEADLINE)
    assert not thread.is_alive()
    scene.errors.seen()
    assert not scene.errors.under_way


def test_a_machine_without_threads_is_tried_at_the_next_look(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", no_thread)
        scene.errors.seen()
        assert not scene.errors.under_way
    scene.domain.room = True
    scene.errors.seen()
    assert scene.over.wait(DEADLINE)


# A real guest, which counts on when its count is on its disk


class Full:
    """A job whose disk is on a file system with no space left."""

    def __init__(self, job: Job, directory: Path) -> None:
        self.job = job
        self._overlay = overlay(job, directory / "over.qcow2", job.disk)
        self._ballast = directory / "ballast"
        with contextlib.suppress(OSError), open(self._ballast, "wb", buffering=0) as ballast:
            while True:
                ballast.write(bytes(4096))

    def disk(self, device: str = "hda") -> str:
        return f'VMPARAM_vm_Disk = "{self._overlay}:{device}:w:qcow2"'

    def make_room(self) -> None:
        self._ballast.unlink()

    def is_paused(self) -> bool:
        domain = self.job.domain()
        return domain is not None and tuple(domain.state()) == STALLED


@pytest.fixture
def full(job: Job) -> Iterator[Full]:
    with mounted(job.scratch.parent / "full", "size=1m,mode=755") as directory:
        yield Full(job, directory)


@pytest.mark.libvirt
@pytest.mark.parametrize("device", ["hda", "vda"])
def test_a_guest_with_a_full_disk_goes_on_when_there_is_space(job: Job, full: Full, device: str) -> None:
    with running(job, full.disk(device)) as peer:
        until(full.is_paused, "the disk has no space")
        assert peer.run("STATUS", 1)[1] == "STATUS=Running", "HTCondor has suspended nothing"
        full.make_room()
        until(lambda: counts(job.console()), "the guest goes on")
        assert counts(job.console())[0] == 1, "with nothing lost"
        done(peer, "STOP")
        assert job.exit_file()["reason"] is None
        log = peer.quit()
    assert log.count("paused by an error of a disk") == 1
    assert "it was resumed" not in log, "nobody but the daemon has resumed it"


@pytest.mark.libvirt
def test_a_guest_whose_disk_stays_full_ends_as_a_failure(job: Job, full: Full) -> None:
    with running(job, full.disk(), VM_IO_ERROR_TIMEOUT=2) as peer:
        found = run_to_its_end(peer, job)
        assert (found["ended_by"], found["exit_code"]) == ("disk error", None)
        assert "disk hda (no space left)" in str(found["reason"])
        assert str(found["reason"]) in peer.quit(status=1)


@pytest.mark.libvirt
@pytest.mark.parametrize(("way", "state"), [("SOFT_SUSPEND", "SoftSuspended"), ("SUSPEND", "Suspended")])
def test_a_suspended_guest_is_left_alone_and_goes_on_at_its_resume(job: Job, full: Full, way: str, state: str) -> None:
    with running(job, full.disk(), VM_IO_ERROR_TIMEOUT=1) as peer:
        until(full.is_paused, "the disk has no space")
        done(peer, way)
        assert peer.run("STATUS", 1)[1] == f"STATUS={state}"
        full.make_room()
        # As long as it would have been tried again, and given up, by then.
        threading.Event().wait(3 * pauses.FIRST_PAUSE)
        assert peer.run("STATUS", 1)[1] == f"STATUS={state}"
        assert not counts(job.console())
        done(peer, "RESUME")
        until(lambda: counts(job.console()), "the guest goes on")
        assert counts(job.console())[0] == 1
        assert peer.run("STATUS", 1)[1] == "STATUS=Running"
