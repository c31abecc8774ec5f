"""The facts that a contract test must know about a driver and its hypervisor."""

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
        """A directory of the test, which holds the jobs' scratch directories."""
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
        """Make the ad of a job with its files in a scratch directory.

        Its guest runs on and on, or powers itself off soon after its start (or after `power_off`).
        """
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
    end = time.monotonic() + DEADLINE
    while not (found := condition()):
        assert time.monotonic() < end, f"{what}: not within {DEADLINE:g} s"
        time.sleep(POLL)
    return found


def can_be_saved(subject: Subject, job: JobAd) -> None:
    """Wait until the guest has come far enough to be saved."""
    if subject.has_guest and not subject.saves_at_once:
        goes_on(subject, job)


def goes_on(subject: Subject, job: JobAd) -> int:
    """Wait until the guest has counted further; return the earlier count."""
    before = subject.count(job)
    until(lambda: subject.count(job) > before, "the guest counts on")
    return before
