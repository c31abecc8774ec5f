"""The contract's tests of how a VM ends: during other operations, once, and without harm to others."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from vmgahp import errors, lifecycle
from vmgahp.checkpoint.store import MANIFEST_FILE
from vmgahp.drivers.base import Driver, Machine
from vmgahp.drivers.lifecycle import ManagedMachine
from vmgahp.job.ad import JobAd
from vmgahp.testing.subject import DEADLINE, Subject, can_be_saved, goes_on, until

REACHED = "vmgahp.drivers.lifecycle.reached"

TORN = (".part", ".tmp", ".restarting")
MEMORY = (".mem", ".vmss", ".vmem")
"""The suffixes of files that must never be left, and those that only a checkpoint may leave."""


class EndingContract:
    """The part of `vmgahp.testing.contract.DriverContract` about how VMs end."""

    @pytest.fixture
    def subject(self) -> Subject:
        raise NotImplementedError("give your class a fixture called subject")

    @pytest.fixture
    def driver(self, subject: Subject) -> Driver:
        return subject.driver()

    @pytest.fixture
    def job(self, subject: Subject) -> JobAd:
        return subject.job()

    @pytest.fixture
    def machine(self, driver: Driver, job: JobAd) -> Machine:
        return driver.start(job)

    # The end during other operations

    def test_an_end_that_two_ask_for_is_one(
        self, subject: Subject, job: JobAd, machine: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        points: list[str] = []
        monkeypatch.setattr(REACHED, points.append)
        assert beside(machine.destroy, machine.destroy) == [None, None]
        assert not subject.exists(job)
        assert machine.status().state == lifecycle.STOPPED
        assert points.count("end.released") == isinstance(machine, ManagedMachine)

    @pytest.mark.parametrize(
        ("operation", "point"),
        [
            ("suspend", ""),
            ("suspend", "save.written"),
            ("resume", ""),
            ("resume", "restore.made"),
            ("checkpoint", ""),
            ("checkpoint", "checkpoint.saved"),
            ("resume a checkpoint", ""),
            ("resume a checkpoint", "restore.set_aside"),
        ],
    )
    def test_an_end_in_the_middle_of_an_operation_leaves_no_vm_and_nothing_torn(
        self, subject: Subject, job: JobAd, driver: Driver, operation: str, point: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """End the VM at a point of the operation, if the driver has that point; otherwise in parallel with it."""
        if not (subject.checkpoint if "checkpoint" in operation else subject.suspend):
            return
        wanted = with_checkpoints(subject, job)
        before = set(Path(job.working_dir()).iterdir())
        machine = driver.start(wanted)
        can_be_saved(subject, job)
        perform = machine.checkpoint if operation == "checkpoint" else machine.suspend
        if operation.startswith("resume"):
            (machine.checkpoint if "checkpoint" in operation else machine.suspend)()
            perform = lambda: machine.resume(lifecycle.SUSPENDED)  # noqa: E731
        if point and isinstance(machine, ManagedMachine):
            outcome = ended_at(point, machine, perform, monkeypatch)
        else:
            _, outcome = beside(perform, machine.destroy)
        assert outcome is None
        assert machine.status().state == lifecycle.STOPPED
        left = [path.name for path in set(Path(job.working_dir()).iterdir()) - before]
        kept = MANIFEST_FILE in left
        assert not [name for name in left if name.endswith(TORN if kept else TORN + MEMORY)]
        if not kept:
            assert not subject.exists(job)
        again = subject.driver().start(wanted)
        assert again.status().state == lifecycle.RUNNING
        again.destroy()
        assert not subject.exists(job)

    @pytest.mark.parametrize("operation", ["suspend", "checkpoint"])
    def test_a_resume_that_failed_can_be_tried_again(
        self, subject: Subject, job: JobAd, driver: Driver, operation: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not (subject.checkpoint if operation == "checkpoint" else subject.suspend):
            return
        machine = driver.start(with_checkpoints(subject, job))
        before = goes_on(subject, job) if subject.has_guest else 0
        getattr(machine, operation)()
        if isinstance(machine, ManagedMachine):

            def fail(point: str) -> None:
                if point == "restore.set_aside":
                    raise errors.MachineFault("A test says so.", "end it.")

            with monkeypatch.context() as patch:
                patch.setattr(REACHED, fail)
                with pytest.raises(errors.MachineFault, match="A test says so"):
                    machine.resume(lifecycle.SUSPENDED)
            assert machine.status().state == lifecycle.SUSPENDED
        machine.resume(lifecycle.SUSPENDED)
        assert machine.status().state == lifecycle.RUNNING
        if subject.has_guest:
            assert goes_on(subject, job) >= before, "it resumed and did not begin anew"

    def test_a_start_of_the_same_name_elsewhere_leaves_a_living_vm_alone(self, subject: Subject, job: JobAd) -> None:
        """Start a VM of the same name, as two schedds may cause for one user; the second may get a VM or a fault."""
        first = subject.driver().start(job)
        twin = subject.changed(subject.job(2), ClusterId=job.expression("ClusterId"))
        try:
            second = subject.driver().start(twin)
        except errors.Fault:
            second = None
        assert first.status().state == lifecycle.RUNNING
        if second is not None:
            assert second.status().state == lifecycle.RUNNING
            second.destroy()
        assert subject.exists(job)
        assert first.status().state == lifecycle.RUNNING
        if subject.has_guest:
            goes_on(subject, job)


def with_checkpoints(subject: Subject, job: JobAd) -> JobAd:
    """Return the job with checkpoints allowed, if its driver can make them."""
    return subject.changed(job, JobVMCheckpoint="true") if subject.checkpoint else job


def beside(*calls: Callable[[], None]) -> list[errors.Fault | None]:
    """Make all calls in parallel and return the fault that each has raised."""
    together = threading.Barrier(len(calls))
    outcomes: list[errors.Fault | None] = [None] * len(calls)

    def run(number: int) -> None:
        together.wait(DEADLINE)
        try:
            calls[number]()
        except errors.Fault as fault:
            outcomes[number] = fault

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive(), "a call has not ended"
    return outcomes


def ended_at(
    point: str, machine: ManagedMachine, perform: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> errors.Fault | None:
    """Perform an operation and end the VM when it reaches this point, or after it; return the fault of the end."""
    come = threading.Event()

    def reached(now: str) -> None:
        if now == point and not come.is_set():
            come.set()
            until(lambda: machine.overruled, "the end is asked for")

    def operate() -> None:
        try:
            perform()
        finally:
            come.set()

    def end() -> None:
        assert come.wait(DEADLINE)
        machine.destroy()

    with monkeypatch.context() as patch:
        patch.setattr(REACHED, reached)
        return beside(operate, end)[1]
