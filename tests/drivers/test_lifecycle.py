"""The life of a VM that every driver shares: one state, operations that an end overrules, an end that happens once."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from vmgahp import errors
from vmgahp.drivers import managed as lives
from vmgahp.drivers.managed import Deadlines, ManagedMachine
from vmgahp.drivers.resources import ExitRecord, Resources
from vmgahp.job.exit_code import DISK_LIMIT, POWERED_OFF
from vmgahp.lifecycle import CHECKPOINTED, POINTS, RUNNING, SOFT_SUSPENDED, STOPPED, SUSPENDED
from vmgahp.metrics import Status

WAIT = 30.0


class Guest(ManagedMachine):
    """A guest; `its` hypervisor has its state, its files and all calls.

    `fails` names what does not work, `at` what is called in the middle of something.
    """

    no_checkpoint = ""

    def __init__(self, log: Callable[[str], None] = lambda _: None) -> None:
        super().__init__("guest", Resources(log), Deadlines(1, 1, 0.05), log)
        self.its = SimpleNamespace(guest=True, image=False, manifest=False, done=[])
        self.fails: set[str] = set()
        self.at: dict[str, Callable[[], None]] = {}
        self.resources.at_end.append(lambda: self.its.done.append("tidied up"))
        self.started()

    def _do(self, what: str) -> None:
        self.its.done.append(what)
        self.at.get(what, lambda: None)()
        if what in self.fails:
            raise errors.HypervisorFault(f"{what} fails.")

    def look(self) -> Status:
        return Status(RUNNING if self.its.guest else STOPPED)

    def pid(self) -> int:
        return 0

    def ask_to_power_off(self) -> None:
        self._do("ask")

    def wait_until_off(self, seconds: float) -> bool:
        return False

    def end_guest(self) -> None:
        self._do("end")
        self.its.guest = False

    def pause(self) -> None:
        self._do("pause")

    def unpause(self) -> None:
        self._do("unpause")

    def save(self, operation: str) -> None:
        self._do("save")
        self.its.guest, self.its.image = False, True

    def write_manifest(self) -> None:
        self._do("manifest")
        self.its.manifest = True

    def restore(self, before_it_runs: Callable[[], None]) -> None:
        self._do("restore")
        self.its.guest = True
        try:
            before_it_runs()
            self._do("run")
        except BaseException:
            self.its.guest = False
            raise

    def set_aside(self) -> None:
        self.its.manifest = False

    def put_back(self) -> None:
        self.its.manifest = True

    def forget_saved(self) -> None:
        self.its.image = False


class Bag:
    """A stand-in for the output directory."""

    def __init__(self, its: SimpleNamespace, *, full: bool = False) -> None:
        self._its = its
        self._full = full

    def with_checkpoint(self) -> None:
        assert self._its.manifest
        self._its.done.append("pack")
        if self._full:
            raise errors.MachineFault("there is no room", "make some.")

    def without_checkpoint(self) -> None:
        self._its.done.append("unpack")


def in_the_middle(guest: Guest, what: str) -> tuple[threading.Event, threading.Event]:
    """Have `what` wait: an event that says that it has begun, and one that lets it go on."""
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go_on.wait(WAIT)

    guest.at[what] = wait
    return begun, go_on


def test_the_states_are_those_of_the_session_and_every_point_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(lives, "reached", seen.append)
    guest = Guest()
    guest.soft_suspend()
    assert guest.state is SOFT_SUSPENDED
    guest.resume(SOFT_SUSPENDED)
    guest.checkpoint()
    guest.resume(CHECKPOINTED)
    guest.suspend()
    assert guest.state is SUSPENDED
    assert guest.status().state is SUSPENDED
    guest.checkpoint()
    assert guest.state is CHECKPOINTED
    guest.resume(CHECKPOINTED)
    assert guest.state is RUNNING
    assert (guest.its.guest, guest.its.image, guest.its.manifest) == (True, False, False)
    guest.stop()
    assert guest.state is STOPPED
    assert guest.status().state is STOPPED
    assert [point for point in seen if point not in POINTS] == []
    assert seen[-2:] == ["end.gone", "end.released"]


def test_a_vm_that_is_not_to_be_checkpointed_runs_on() -> None:
    guest = Guest()
    guest.no_checkpoint = "the job does not ask for it"
    with pytest.raises(errors.ClientFault, match="the job does not ask for it"):
        guest.checkpoint()
    assert (guest.state, guest.its.done) == (RUNNING, [])


def test_an_end_waits_for_a_checkpoint_that_is_written_down_already() -> None:
    guest = Guest()
    begun, go_on = in_the_middle(guest, "manifest")
    guest.at["end"] = go_on.set
    with ThreadPoolExecutor() as pool:
        saving = pool.submit(guest.checkpoint)
        assert begun.wait(WAIT)
        guest.destroy()
        saving.result(WAIT)
    assert guest.its.manifest
    assert guest.its.image, "a checkpoint stays when the server ends"


def test_an_end_that_fails_can_be_had_again_and_the_guardian_stays() -> None:
    guest = Guest()
    guest.fails = {"end"}
    with pytest.raises(errors.HypervisorFault):
        guest.destroy()
    assert guest.state is RUNNING
    assert "tidied up" not in guest.its.done
    guest.soft_suspend()
    guest.fails = set()
    guest.destroy()
    assert guest.state is STOPPED


def test_an_operation_that_does_not_stop_keeps_the_guardian(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives, "OVERRULE_SECONDS", 0.1)
    guest = Guest()
    begun, go_on = in_the_middle(guest, "save")
    with ThreadPoolExecutor() as pool:
        pool.submit(guest.suspend)
        assert begun.wait(WAIT)
        with pytest.raises(errors.HypervisorFault, match="SUSPEND has not stopped"):
            guest.destroy()
        assert "tidied up" not in guest.its.done
        go_on.set()
    guest.destroy()
    assert guest.its.done[-1] == "tidied up"


@pytest.mark.parametrize(
    ("before", "after"), [("started", RUNNING), ("soft_suspend", SOFT_SUSPENDED), ("suspend", SUSPENDED)]
)
def test_a_checkpoint_that_cannot_be_written_down_leaves_the_vm_as_it_was(before: str, after: str) -> None:
    guest = Guest()
    getattr(guest, before)()
    guest.fails = {"manifest"}
    with pytest.raises(errors.HypervisorFault):
        guest.checkpoint()
    assert guest.state is after
    assert guest.its.guest == (after is not SUSPENDED)


def test_a_guest_that_goes_on_after_a_failed_checkpoint_has_none_from_its_first_moment() -> None:
    guest = with_bag(full=True)
    seen: list[bool] = []
    guest.at["run"] = lambda: seen.append(guest.its.manifest)
    with pytest.raises(errors.MachineFault):
        guest.checkpoint()
    guest.suspend()
    with pytest.raises(errors.MachineFault):
        guest.checkpoint()
    guest.resume(SUSPENDED)
    assert seen == [False, False]


def test_a_vm_whose_directory_fails_at_its_end_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    guest = Guest(said.append)
    monkeypatch.setattr(guest, "before_release", Mock(side_effect=PermissionError("no look")))
    guest.its.guest = False
    guest.release()
    assert guest.status().state is STOPPED
    assert guest.its.done == ["tidied up"]
    assert "no look" in said[-1]


def test_a_lost_guest_has_not_stopped() -> None:
    guest = Guest()
    fault = guest.report_lost("The guest is lost.", "see why.")
    with pytest.raises(errors.HypervisorFault) as caught:
        guest.status()
    assert caught.value is fault
    with pytest.raises(errors.ClientFault):
        guest.suspend()
    guest.stop()
    assert guest.status().state is STOPPED


class Exit(ExitRecord):
    """Keeps how it ended, and writes nothing."""

    def __init__(self) -> None:
        self.how = self.reason = ""
        self.status = 0

    def write(self) -> None:
        pass


def test_a_guest_that_is_given_up_ends_with_the_reason_and_its_owner_hears_of_it() -> None:
    said: list[str] = []
    guest = Guest(said.append)
    guest.resources.exit = record = Exit()
    guest.give_up(DISK_LIMIT, "it is too large")
    assert guest.status().state == STOPPED
    guest.release()
    assert (record.how, record.reason) == (DISK_LIMIT, "it is too large")
    assert said == ["guest ends as a failure: it is too large"]


def test_a_guest_that_cannot_be_given_up_has_not_ended() -> None:
    guest = Guest()
    guest.resources.exit = record = Exit()
    guest.fails.add("end")
    with pytest.raises(errors.HypervisorFault):
        guest.give_up(DISK_LIMIT, "it is too large")
    assert (guest.status().state, record.how, record.reason) == (RUNNING, "", "")
    guest.fails.clear()
    guest.resources.ended(POWERED_OFF)
    assert record.how == POWERED_OFF, "as it does in the end"


def test_what_fails_at_the_end_holds_up_nothing_else() -> None:
    log: list[str] = []
    done: list[str] = []
    resources = Resources(log.append)
    resources.at_end += [lambda: int("a defect"), lambda: done.append("tidied up")]
    resources.release()
    assert done == ["tidied up"]
    assert "a defect" in log[0]


def with_bag(**how: bool) -> Guest:
    guest = Guest()
    guest.resources.luggage = Bag(guest.its, **how)  # type: ignore[assignment]
    return guest


def test_a_checkpoint_is_packed_and_unpacked_by_the_guest_that_goes_on() -> None:
    guest = with_bag()
    guest.checkpoint()
    assert guest.its.done == ["save", "manifest", "pack"]
    guest.fails = {"run"}
    with pytest.raises(errors.HypervisorFault):
        guest.resume(SUSPENDED)
    assert "unpack" not in guest.its.done
    guest.fails = set()
    guest.resume(SUSPENDED)
    assert guest.its.done[-2:] == ["run", "unpack"]


def test_a_checkpoint_that_cannot_be_packed_is_none() -> None:
    guest = with_bag(full=True)
    with pytest.raises(errors.MachineFault, match="no room"):
        guest.checkpoint()
    assert guest.state is RUNNING
    assert guest.its.done[:4] == ["save", "manifest", "pack", "unpack"]
