"""What the pools of the single VM types have in common: their start, and what befalls their jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pytest
from tests.lab.namespace import OUR_SERVER, wheel_of, why_not
from tests.lab.pool import Job, Pool

START = 90
END = 150
"""Seconds that anything may take before the test fails: every start of a VM is followed by 30 in which the starter
sleeps, and a status comes every 30."""

CHECKPOINT = "vm_checkpoint = true\nwhen_to_transfer_output = ON_EXIT_OR_EVICT\n"


def settle(pool: Pool, job: Job) -> None:
    """Wait until the starter listens again after a START: it has asked for the pid and a status."""
    pool.wait_until(f"the guest of job {job.cluster}", job.is_running, START)
    pool.wait_until("the first STATUS=Running", lambda: "STATUS=Running" in pool.told(job), START)


@contextmanager
def pool_of_its_own(
    factory: pytest.TempPathFactory,
    name: str,
    settings: str,
    prepare: Callable[[Pool], None] | None = None,
    server: str = OUR_SERVER,
) -> Iterator[Pool]:
    """A pool with these settings; `prepare` is called before HTCondor starts."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    pool = Pool(factory.mktemp(f"{name}-pool"), server, settings)
    try:
        pool.start(wheel_of(factory), prepare)
        yield pool
    finally:
        pool.stop()


def befall(pool: Pool, jobs: Mapping[str, Job], vm_of: Callable[[Pool, Job], str | None]) -> None:
    """Remove the job ``removed``, suspend ``suspended`` and vacate ``vacated``, once all VMs run but that of ``bad``.

    `vm_of` is the command line of a job's VM.
    """
    for name, job in jobs.items():
        if name != "bad":
            pool.wait_until(f"the VM of {name}", lambda job=job: vm_of(pool, job), START)
    jobs["removed"].command("condor_rm")
    jobs["suspended"].command("condor_suspend")
    pool.wait_until("the first STATUS=Running", lambda: "STATUS=Running" in pool.told(jobs["vacated"]), START)
    jobs["vacated"].command("condor_vacate_job")


def assert_removed(pool: Pool, job: Job, vm_of: Callable[[Pool, Job], str | None]) -> None:
    """A job that was removed leaves no VM."""
    job.wait_for_event("removed", END)
    pool.wait_until("its VM to go", lambda: not vm_of(pool, job), END)


def assert_held(pool: Pool, job: Job, word: str = "VMGAHP_ERR_JOBCLASSAD") -> None:
    """The job is held at its START with a word that blames it, and the machine stays."""
    job.wait_for_event("held", END)
    ad = job.ad()
    assert ad["HoldReasonCode"] == 6
    assert word in ad["HoldReason"]
    assert pool.machine()["HasVM"] is True


def go_on_after_suspension(pool: Pool, job: Job) -> None:
    """Two status intervals suspended, then condor_continue, and the job ends by itself."""
    pool.wait_until("two STATUS=Suspended", lambda: pool.told(job).count("STATUS=Suspended") >= 2, END)
    assert {"terminated", "evicted"}.isdisjoint(job.events())
    job.command("condor_continue")
    job.wait_for_event("terminated", END)
