"""What a contract's test must know of a driver and its hypervisor."""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.drivers import base
from vmgahp.drivers.base import Driver, Machine
from vmgahp.host.job_user import Identity
from vmgahp.job.ad import JobAd, quote
from vmgahp.vm_types import HTCONDORS

T = TypeVar("T")

DEADLINE = 240.0
"""Seconds that anything of the hypervisor's may take before the test fails."""

POLL = 0.05


class Subject(ABC):
    """One driver, with what a test must know of its hypervisor that the contract does not say."""

    vm_type: str
    soft_suspend = True
    """Whether a VM can be paused in memory."""
    suspend = True
    checkpoint = True
    """Whether a checkpoint can be made, and a later START in the same scratch directory restarts from it."""
    has_guest = True
    """Whether a guest really runs, so that `count` has something to say."""
    saves_at_once = True
    """Whether a guest can be saved before it has come up."""

    def __init__(self, directory: Path, settings: Settings, identity: Identity) -> None:
        self.directory = directory
        """A directory of the test's own; the jobs' scratch directories are below it."""
        self.settings = settings
        self.identity = identity
        self.log: list[str] = []
        self._drivers: list[Driver] = []
        self._machines: list[Machine] = []
        self._jobs: list[JobAd] = []

    def __enter__(self) -> "Subject":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave nothing behind, whatever the test did: no VM, and nobody who watches over one."""
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
        """A new driver, as another daemon on this machine would have it."""
        made = base.find(self.vm_type)(self.vm_type, settings or self.settings, self.identity, self.log.append)
        self._drivers.append(made)
        start = made.start

        def remember(job: JobAd) -> Machine:
            self._machines.append(start(job))
            return self._machines[-1]

        made.start = remember  # type: ignore[method-assign]
        return made

    def job(self, number: int = 1, *, ends: bool = False) -> JobAd:
        """The ad of a job with its files in a scratch directory.

        Its guest runs on and on, or powers itself off soon after its start (or after `power_off`).
        """
        scratch = self.directory / f"dir_{number}"
        scratch.mkdir(exist_ok=True)
        # The process's number keeps the VM apart from those of other tests on this machine.
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
        """The job with other expressions for some attributes; None takes one away."""
        pairs = dict(line.split(" = ", 1) for line in job.lines())
        for name, expression in changes.items():
            pairs.pop(name, None)
            if expression is not None:
                pairs[name] = expression
        return JobAd(pairs.items())

    def match(self, job: JobAd) -> str:
        """How the startd names the job's VM to the kill mode."""
        return job.vm_name() if self.vm_type in HTCONDORS else job.working_dir()

    @abstractmethod
    def prepare(self, scratch: Path, number: int, ends: bool) -> dict[str, str]:
        """Put a job's files into its scratch directory; returns the attributes that tell of them, as expressions."""

    @abstractmethod
    def exists(self, job: JobAd) -> bool:
        """Whether the hypervisor itself has the job's VM, running or saved; not asked through the driver."""

    @abstractmethod
    def bad_jobs(self) -> dict[str, JobAd]:
        """Jobs that cannot be started by their owners' fault, by what is wrong with each."""

    @abstractmethod
    def unfit(self) -> Settings:
        """Settings with which this machine runs no job at all, such as a hypervisor that is not there."""

    def power_off(self, job: JobAd) -> None:  # noqa: B027 - a real guest needs no help
        """Make the guest of a job that `ends` do so; for a hypervisor whose guests do nothing by themselves."""

    def server_dies(self, machine: Machine) -> None:  # noqa: B027 - mostly nothing but its memory goes with a process
        """What the kernel does when the server of a VM dies, such as to close what that holds open."""

    def count(self, job: JobAd) -> int:
        """How far the guest has counted; grows while it runs, and only then."""
        raise NotImplementedError


def until(condition: Callable[[], T], what: str) -> T:
    """Wait for something that sends no event, and return it."""
    end = time.monotonic() + DEADLINE
    while not (found := condition()):
        assert time.monotonic() < end, f"{what}: not within {DEADLINE:g} s"
        time.sleep(POLL)
    return found


def can_be_saved(subject: Subject, job: JobAd) -> None:
    """Wait until the guest has come so far."""
    if subject.has_guest and not subject.saves_at_once:
        goes_on(subject, job)


def goes_on(subject: Subject, job: JobAd) -> int:
    """Wait until the guest has counted on; returns where it was before."""
    before = subject.count(job)
    until(lambda: subject.count(job) > before, "the guest counts on")
    return before
