"""The contract of `vmgahp.drivers.base` as tests, for any driver, also of another package.

In your own tests say what your driver is like in a `Subject`, and subclass `DriverContract`:

    from vmgahp.testing.contract import DriverContract, Subject

    class MyHypervisor(Subject):
        vm_type = "mine"
        ...

    class TestMyDriver(DriverContract):
        @pytest.fixture
        def subject(self, tmp_path):
            with MyHypervisor(tmp_path) as subject:
                yield subject

A driver that is installed under the entry-point group ``vmgahp.drivers`` is found by its VM type. Every case runs on a
subject of its own. A feature that a driver lacks is skipped only if its subject says so.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import pytest

from vmgahp import errors, findings, lifecycle
from vmgahp.checkpoint.store import MANIFEST_FILE
from vmgahp.config import Settings
from vmgahp.drivers import base
from vmgahp.drivers.base import Driver, Machine
from vmgahp.drivers.managed import ManagedMachine
from vmgahp.host import wait
from vmgahp.host.job_user import Identity
from vmgahp.job.ad import JobAd, quote
from vmgahp.vm_types import HTCONDORS

__all__ = ["DEADLINE", "POLL", "DriverContract", "Subject", "goes_on", "until"]

T = TypeVar("T")

DEADLINE = 240.0
"""The seconds that an operation of the hypervisor may take before the test fails."""

POLL = 0.05


class Subject(ABC):
    """One driver, with the facts about its hypervisor that a test needs and the contract does not define."""

    vm_type: str
    soft_suspend = True
    """True if a VM can be paused in memory."""
    suspend = True
    checkpoint = True
    """True if a checkpoint can be made, and a later START in the same scratch directory restarts from it."""
    has_guest = True
    """True if a guest really runs, so that `count` is meaningful."""
    saves_at_once = True
    """True if a guest can be saved before it has booted."""

    def __init__(self, directory: Path, settings: Settings, identity: Identity) -> None:
        self.directory = directory
        self.settings = settings
        self.identity = identity
        self.log: list[str] = []
        self._drivers: list[Driver] = []
        self._machines: list[Machine] = []
        self._jobs: list[JobAd] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Clean up, whatever the test did: end every VM, and every process that watches over one."""
        for machine in self._machines:
            try:
                machine.destroy()
            except errors.Fault as fault:
                self.log.append(f"{machine.name}: {fault.problem}")
            machine.release()
        for job in self._jobs:
            self.driver().kill(self.match(job))
        for driver in self._drivers:
            driver.close()

    def driver(self, settings: Settings | None = None) -> Driver:
        """Make a new driver, as another daemon on this machine would."""
        made = base.find(self.vm_type)(self.vm_type, settings or self.settings, self.identity, self.log.append)
        self._drivers.append(made)
        start = made.start

        def remember(job: JobAd) -> Machine:
            self._machines.append(start(job))
            return self._machines[-1]

        made.start = remember  # type: ignore[method-assign]
        return made

    def job(self, number: int = 1, *, ends: bool = False) -> JobAd:
        """Make the ad of a job whose guest runs on, or powers itself off at its start or after `power_off`."""
        scratch = self.directory / f"dir_{number}"
        scratch.mkdir(exist_ok=True)
        # The pid keeps the VM apart from those of other tests on this machine.
        ad = {
            "VM_WORKING_DIR": quote(str(scratch)),
            "JobVMType": quote(self.vm_type),
            "JobVMMemory": "64",
            "User": quote("alice@lab"),
            "ClusterId": str(os.getpid() * 100 + number),
            "ProcId": "0",
        }
        made = JobAd((ad | self.prepare(scratch, number, ends)).items())
        self._jobs.append(made)
        return made

    def changed(self, job: JobAd, **changes: str | None) -> JobAd:
        """Return the job with other expressions for some attributes; None removes an attribute."""
        pairs = dict(line.split(" = ", 1) for line in job.lines())
        for name, expression in changes.items():
            pairs.pop(name, None)
            if expression is not None:
                pairs[name] = expression
        return JobAd(pairs.items())

    def match(self, job: JobAd) -> str:
        """Return the name by which the startd passes the job's VM to the kill mode."""
        return job.vm_name() if self.vm_type in HTCONDORS else job.working_dir()

    @abstractmethod
    def prepare(self, scratch: Path, number: int, ends: bool) -> dict[str, str]:
        """Put a job's files into its scratch directory; return the attributes that describe them, as expressions."""

    @abstractmethod
    def exists(self, job: JobAd) -> bool:
        """Return True if the hypervisor itself has the job's VM, running or saved, without asking the driver."""

    @abstractmethod
    def bad_jobs(self) -> dict[str, JobAd]:
        """Return jobs that cannot be started through their owners' fault, by the description of the mistake."""

    @abstractmethod
    def unfit(self) -> Settings:
        """Return settings with which this machine cannot run any job, such as a hypervisor that does not exist."""

    def power_off(self, job: JobAd) -> None:  # noqa: B027 - a real guest needs no help
        """Power off the guest of a job that `ends`; needed only if the guests do nothing by themselves."""

    def server_dies(self, machine: Machine) -> None:  # noqa: B027 - usually a process leaves nothing behind
        """Do what the kernel does when the server of a VM dies, such as to close the files that it holds open."""

    def count(self, job: JobAd) -> int:
        """Return how far the guest has counted; the count grows only while the guest runs."""
        raise NotImplementedError


def until(condition: Callable[[], T], what: str) -> T:
    """Poll until a condition holds, and return its value."""
    found = wait.until(condition, DEADLINE, POLL)
    assert found, f"{what}: not within {DEADLINE:g} s"
    return found


def can_be_saved(subject: Subject, job: JobAd) -> None:
    """Wait until the guest has come far enough to be saved."""
    if not subject.saves_at_once:
        goes_on(subject, job)


def goes_on(subject: Subject, job: JobAd) -> int:
    """Wait until the guest, if there is a real one, has counted further; return the earlier count."""
    if not subject.has_guest:
        return 0
    before = subject.count(job)
    until(lambda: subject.count(job) > before, "the guest counts on")
    return before


REACHED = "vmgahp.drivers.managed.reached"

TORN = (".part", ".tmp", ".restarting")
MEMORY = (".mem", ".vmss", ".vmem")
"""The suffixes of files that must never be left, and those that only a checkpoint may leave."""


def with_checkpoints(subject: Subject, job: JobAd) -> JobAd:
    """Return the job with checkpoints allowed, if its driver can make them."""
    return subject.changed(job, JobVMCheckpoint="true") if subject.checkpoint else job


def beside(*calls: Callable[[], None]) -> list[errors.Fault | None]:
    """Make all calls in parallel and return the fault that each has raised."""
    together = threading.Barrier(len(calls))

    def make(call: Callable[[], None]) -> None:
        together.wait(DEADLINE)
        call()

    tasks = [wait.Task("a call", partial(make, call)) for call in calls]
    assert all(task.wait(DEADLINE) for task in tasks), "a call has not ended"
    return [task.error if isinstance(task.error, errors.Fault) else task.result() for task in tasks]


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


LAST = {"suspend": "save.written", "resume": "restore.made", "checkpoint": "checkpoint.saved"}
LAST |= {"resume a checkpoint": "restore.set_aside"}
"""The point of each operation at which it is interrupted."""


class DriverContract:
    """The tests of the contract. Subclass it with a name that begins with Test, and a fixture `subject`."""

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
        ("operation", "point"), [(operation, point) for operation, last in LAST.items() for point in ("", last)]
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
        perform = machine.checkpoint if "checkpoint" in operation else machine.suspend
        if operation.startswith("resume"):
            perform()
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
        before = goes_on(subject, job)
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
        goes_on(subject, job)

    # The life of a VM

    def test_a_started_vm_runs(self, subject: Subject, job: JobAd, machine: Machine) -> None:
        assert machine.name == job.vm_name()
        assert subject.exists(job)
        report = machine.status()
        assert report.state == lifecycle.RUNNING
        assert report.vcpus >= 1
        assert report.cpu_seconds >= 0
        assert report.memory_kib >= 0
        pid = machine.pid()
        assert pid == 0 or Path(f"/proc/{pid}").exists(), "it is that of a living process"
        goes_on(subject, job)

    def test_what_it_uses_is_known(self, subject: Subject, job: JobAd, machine: Machine) -> None:
        readings = []
        for _ in range(2):
            goes_on(subject, job)
            machine.found = time.time(), machine.status()  # as the server does
            readings.append(machine.metrics())
        first, second = readings
        assert first is not None
        assert second is not None
        assert (first.state, first.vcpus >= 1, second.time >= first.time) == (lifecycle.RUNNING, True, True)
        grown = dict(second.counters())
        assert all(0 <= value <= grown[key] for key, value in first.counters())
        machine.destroy()
        machine.found = time.time(), machine.status()
        assert machine.metrics() is None

    def test_destroyed_it_is_gone_and_once_is_as_good_as_twice(
        self, subject: Subject, job: JobAd, machine: Machine
    ) -> None:
        machine.destroy()
        assert not subject.exists(job)
        assert machine.status().state == lifecycle.STOPPED
        machine.destroy()
        machine.release()

    def test_stopped_it_is_gone(self, subject: Subject, job: JobAd, machine: Machine) -> None:
        machine.stop()
        assert not subject.exists(job)
        assert machine.status().state == lifecycle.STOPPED

    def test_a_guest_that_powers_itself_off_is_seen(self, subject: Subject, driver: Driver) -> None:
        job = subject.job(ends=True)
        machine = driver.start(job)
        subject.power_off(job)
        until(lambda: machine.status().state == lifecycle.STOPPED, "STOPPED is reported")
        machine.release()
        machine.release()
        assert not subject.exists(job)

    def test_the_jobs_files_are_there_at_the_end_and_nothing_of_the_drivers(
        self, subject: Subject, job: JobAd, driver: Driver
    ) -> None:
        scratch = Path(job.working_dir())
        before = {path.name for path in scratch.iterdir()}
        machine = driver.start(job)
        if subject.suspend:
            can_be_saved(subject, job)
            machine.suspend()
        machine.destroy()
        assert not subject.exists(job)
        assert machine.status().state == lifecycle.STOPPED
        after = {path.name for path in scratch.iterdir()}
        assert before <= after
        assert not [name for name in after - before if name.endswith((".tmp", ".mem", ".vmss", ".vmem"))]

    def test_two_vms_do_not_disturb_each_other(self, subject: Subject, driver: Driver) -> None:
        one, two = subject.job(1), subject.job(2)
        first, second = driver.start(one), driver.start(two)
        first.destroy()
        assert not subject.exists(one)
        assert second.status().state == lifecycle.RUNNING
        goes_on(subject, two)

    # Suspends and checkpoints

    def test_paused_and_resumed(self, subject: Subject, job: JobAd, machine: Machine) -> None:
        if not subject.soft_suspend:
            with pytest.raises(errors.ClientFault) as caught:
                machine.soft_suspend()
            assert caught.value.code == errors.VM_NO_SUPPORT_SUSPEND
            assert machine.status().state == lifecycle.RUNNING
            return
        machine.soft_suspend()
        assert machine.status().state == lifecycle.SOFT_SUSPENDED
        assert subject.exists(job)
        machine.resume(lifecycle.SOFT_SUSPENDED)
        assert machine.status().state == lifecycle.RUNNING
        goes_on(subject, job)

    def test_suspended_and_resumed(self, subject: Subject, job: JobAd, machine: Machine) -> None:
        if not subject.suspend:
            with pytest.raises(errors.ClientFault) as caught:
                machine.suspend()
            assert caught.value.code == errors.VM_NO_SUPPORT_SUSPEND
            return
        before = goes_on(subject, job)
        machine.suspend()
        assert machine.status().state == lifecycle.SUSPENDED
        machine.resume(lifecycle.SUSPENDED)
        assert machine.status().state == lifecycle.RUNNING
        assert goes_on(subject, job) >= before, "it resumed and did not begin anew"

    def test_a_restart_goes_on_from_the_checkpoint(self, subject: Subject, job: JobAd, driver: Driver) -> None:
        if not subject.checkpoint:
            with pytest.raises(errors.ClientFault) as caught:
                driver.start(job).checkpoint()
            assert caught.value.code == errors.VM_NO_SUPPORT_CHECKPOINT
            return
        # vm_no_output_vm keeps files from being transferred back when the job is over, and here it is not.
        wanted = subject.changed(job, JobVMCheckpoint="true", VMPARAM_No_Output_VM="true")
        machine = driver.start(wanted)
        before = goes_on(subject, job)
        machine.checkpoint()
        assert machine.status().state == lifecycle.SUSPENDED
        # As after an eviction: the client stops the VM, and another daemon starts it again.
        machine.stop()
        again = subject.driver().start(wanted)
        assert again.status().state == lifecycle.RUNNING
        assert goes_on(subject, job) >= before, "it resumed and did not begin anew"
        again.destroy()
        assert not subject.exists(job)

    # Clearing up

    def test_a_start_clears_what_an_earlier_one_left(self, subject: Subject, job: JobAd) -> None:
        subject.server_dies(subject.driver().start(job))
        again = subject.driver().start(job)
        assert again.status().state == lifecycle.RUNNING
        again.destroy()
        assert not subject.exists(job)

    def test_kill_mode_finds_the_vm_that_it_is_told_of_and_no_other(self, subject: Subject) -> None:
        one, two = subject.job(1), subject.job(2)
        driver = subject.driver()
        driver.start(one)
        second = driver.start(two)
        assert subject.driver().kill(subject.match(one)) is True
        assert not subject.exists(one)
        assert second.status().state == lifecycle.RUNNING

    def test_to_kill_what_is_not_there_is_no_error(self, subject: Subject, job: JobAd, driver: Driver) -> None:
        assert driver.kill(subject.match(job)) is False
        assert driver.kill("/nonexistent/dir_7" if subject.match(job).startswith("/") else "no_such_1.0") is False

    def test_a_driver_is_closed_with_its_vms_running(self, subject: Subject, job: JobAd, driver: Driver) -> None:
        driver.start(job)
        driver.close()
        driver.close()
        assert subject.exists(job)

    # Faults

    def test_a_bad_job_is_held_leaves_nothing_and_the_next_one_runs(self, subject: Subject, driver: Driver) -> None:
        bad = subject.bad_jobs()
        assert bad, "there is always something that a job can get wrong"
        for what, job in bad.items():
            with pytest.raises(errors.JobFault) as caught:
                driver.start(job)
            assert caught.value.code in errors.HOLD_CODES, what
            assert caught.value.problem, what
            assert caught.value.hint, what
            assert not subject.exists(job), what
        assert driver.start(subject.job(3)).status().state == lifecycle.RUNNING

    def test_a_job_without_memory_is_held(self, subject: Subject, job: JobAd, driver: Driver) -> None:
        with pytest.raises(errors.JobFault, match="JobVMMemory"):
            driver.start(subject.changed(job, JobVMMemory=None))
        assert not subject.exists(job)

    def test_an_unfit_machine_is_blamed_and_not_the_job(self, subject: Subject, job: JobAd) -> None:
        with pytest.raises(errors.MachineFault) as caught:
            subject.driver(subject.unfit()).start(job)
        assert caught.value.code not in errors.HOLD_CODES
        assert caught.value.hint

    def test_a_vm_that_is_gone_answers_with_faults_and_nothing_else(self, machine: Machine) -> None:
        machine.destroy()
        for operation in (machine.soft_suspend, machine.suspend, machine.checkpoint):
            with pytest.raises(errors.Fault):
                operation()
        with pytest.raises(errors.Fault):
            machine.resume(lifecycle.SOFT_SUSPENDED)
        assert machine.pid() == 0

    # The probe

    def test_the_survey_of_a_machine_that_works(self, subject: Subject, driver: Driver) -> None:
        survey = driver.survey(time.monotonic() + DEADLINE)
        assert findings.first_bad(survey.findings) is None, survey.findings
        assert survey.findings
        for finding in survey.findings:
            assert finding.check
            assert finding.verdict in findings.VERDICTS
            assert finding.subject
            assert finding.seen
            assert finding.hint or finding.verdict in (findings.OK, findings.UNKNOWN), finding
        assert subject.vm_type in survey.vm_types
        assert survey.hypervisors
        assert set(survey.networking) <= set(subject.settings.networking_types())
        for name, value in survey.attributes.items():
            assert name.replace("_", "").isalnum(), name
            assert isinstance(value, str | int | float | bool), name

    def test_the_survey_of_an_unfit_machine_says_why(self, subject: Subject) -> None:
        survey = subject.driver(subject.unfit()).survey(time.monotonic() + DEADLINE)
        bad = findings.first_bad(survey.findings)
        assert bad is not None
        assert bad.hint

    def test_a_survey_changes_nothing(self, subject: Subject, job: JobAd, driver: Driver) -> None:
        machine = driver.start(job)
        before = sorted(path.name for path in Path(job.working_dir()).iterdir())
        subject.driver().survey(time.monotonic() + DEADLINE)
        assert machine.status().state == lifecycle.RUNNING
        assert sorted(path.name for path in Path(job.working_dir()).iterdir()) == before
