"""A start from a checkpoint that fails: tried once more, or without it."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.drivers.small_driver import SmallDriver
from tests.drivers.support import WHO
from vmgahp.checkpoint.store import Unusable
from vmgahp.config import Settings
from vmgahp.drivers.managed import ManagedMachine
from vmgahp.drivers.resources import Resources
from vmgahp.errors import ClientFault, Fault, JobFault, MachineFault
from vmgahp.host import proc
from vmgahp.host.proc import Mount
from vmgahp.job.ad import JobAd


class Restarts(SmallDriver):  # type: ignore[misc]
    """Fails as it is told to, and then starts."""

    def __init__(self, *failures: Unusable) -> None:
        self.said: list[str] = []
        self.tried: list[str] = []
        self.failures = list(failures)
        super().__init__("small", Settings({"VM_MEMORY": "1"}), WHO, self.said.append)

    def plan(self, job: JobAd) -> str:
        return "from the checkpoint"

    def clear(self, plan: str) -> None:
        pass

    def without_checkpoint(self, plan: str, unusable: Unusable) -> tuple[str, Callable[[], None]]:
        return f"afresh: {unusable.reason}", lambda: None

    def _carry_out(self, plan: str, job: JobAd) -> str:
        self.tried.append(plan)
        if self.failures:
            raise self.failures.pop(0)
        return plan


def killed() -> Unusable:
    return Unusable("QEMU was killed.", True, by_accident=True)


def test_a_restart_is_tried_once_more_after_an_accident_alone_and_then_without_the_checkpoint() -> None:
    driver = Restarts(killed())
    assert driver.start(JobAd("")) == "from the checkpoint"
    assert driver.tried == ["from the checkpoint"] * 2
    assert driver.said == ["QEMU was killed. The restart is tried once more."]
    driver = Restarts(killed(), killed())
    assert driver.start(JobAd("")) == "afresh: QEMU was killed."
    assert driver.tried[:2] == ["from the checkpoint"] * 2
    driver = Restarts(Unusable("It is damaged.", True))
    assert driver.start(JobAd("")) == "afresh: It is damaged."
    assert driver.tried[:-1] == ["from the checkpoint"]


def test_a_server_that_ends_tries_nothing_again() -> None:
    driver = Restarts(killed())
    driver.interrupt()
    with pytest.raises(ClientFault):
        driver.start(JobAd(""))
    assert driver.tried == ["from the checkpoint"]


class Fails(Restarts):
    """Fails with an error of the system."""

    error = OSError()

    def _carry_out(self, plan: str, job: JobAd) -> str:
        raise self.error


@pytest.mark.parametrize(
    ("number", "place", "is_mounted", "fault"),
    [
        (errno.EIO, None, False, JobFault),  # such as of a FUSE file as its standard output
        (errno.ENOTCONN, "{}/out", True, JobFault),
        (errno.ENOMEM, None, True, JobFault),
        (errno.EACCES, None, True, JobFault),
        (errno.EACCES, None, False, MachineFault),  # such as of a socket in /run that SELinux denies
        (errno.EMFILE, None, False, MachineFault),
        (errno.EIO, "{}x/out", True, MachineFault),
        (errno.ENOSPC, "/run/vmgahp/x", True, MachineFault),
    ],
)
def test_an_error_that_a_file_system_of_the_jobs_can_cause_holds_the_job(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, number: int, place: str | None, is_mounted: bool, fault: type[Fault]
) -> None:
    mounts = [Mount("0:9", str(scratch / "out"), "fuse.x", ())] if is_mounted else []
    monkeypatch.setattr(proc, "mounts", lambda: mounts)
    driver = Fails()
    driver.error = OSError(number, os.strerror(number), place and place.format(scratch))
    (execute := scratch.with_name("execute")).symlink_to(scratch.parent)
    for directory in (scratch, execute / scratch.name):
        with pytest.raises(fault):
            driver.start(JobAd([("VM_WORKING_DIR", f'"{directory}"')]))


class Nested(SmallDriver):  # type: ignore[misc]
    """Starts another job of the server while it prepares one, as another thread does, and fails."""

    def __init__(self, *others: JobAd) -> None:
        self.others = list(others)
        super().__init__("small", Settings({"VM_MEMORY": "1"}), WHO, lambda _line: None)

    def plan(self, job: JobAd) -> str:
        return job.working_dir()

    def clear(self, plan: str) -> None:
        pass

    def prepare(self, plan: str, resources: Resources) -> ManagedMachine:
        if self.others:
            with pytest.raises(JobFault):
                self.start(self.others.pop())
        raise OSError(errno.EIO, os.strerror(errno.EIO), f"{plan}/out")


def test_the_error_of_one_job_is_looked_at_in_its_own_directory(scratch: Path) -> None:
    jobs = []
    for name in ("one", "other"):
        (scratch / name).mkdir()
        jobs.append(JobAd([("VM_WORKING_DIR", f'"{scratch / name}"')]))
    with pytest.raises(JobFault, match="/one/out"):
        Nested(jobs[1]).start(jobs[0])
