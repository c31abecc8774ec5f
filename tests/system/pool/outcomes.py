"""The start of a pool of its own, and what befalls the jobs of many pools."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.lab.guest import BANNER, DONE, counts
from tests.lab.namespace import OUR_SERVER, require_namespace, wheel_of
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
    require_namespace()
    with Pool(factory.mktemp(f"{name}-pool"), server, settings).running(wheel_of(factory), prepare) as pool:
        yield pool


def own_pool(name: str, *given: Any) -> Any:
    """Make a module's fixture `pool`: the words of `pool_of_its_own`, for all tests of the module."""

    @pytest.fixture(scope="module")
    def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
        with pool_of_its_own(tmp_path_factory, name, *given) as made:
            yield made

    return pool


def go_on_from_checkpoint(pool: Pool, job: Job) -> None:
    """Vacate a job as soon as its starter listens, and wait for the end of its second run."""
    pool.wait_until("the first STATUS=Running", lambda: "STATUS=Running" in pool.told(job), START)
    job.command("condor_vacate_job")
    end_after_eviction(pool, job)


def assert_ended_with_its_guest(pool: Pool, job: Job) -> None:
    """The job has ended as its server did, before any STATUS, and is not evicted for that."""
    job.wait_for_event("terminated", END)
    assert job.events().count("executing") == 1
    assert {"evicted", "held", "shadow exception"}.isdisjoint(job.events())
    assert "condor_starter learns from the exit of this server" in pool.daemon_log()
    assert pool.machine()["HasVM"] is True


def end_after_eviction(pool: Pool, job: Job) -> None:
    """Wait for the second run of a job that was vacated, and for its end."""
    pool.wait_until("it to start again", lambda: job.events().count("executing") >= 2, END)
    assert "evicted" in job.events()
    job.wait_for_event("terminated", END)


def ended(job: Job, timeout: float = START + END) -> dict[str, Any]:
    """A job's ad after its end."""
    job.wait_for_event("terminated", timeout)
    return job.ad()


def assert_counted(job: Job, seconds: int, console: str = "vm_console.log") -> None:
    """Wait for the end: one boot, every count once, and the end that the guest chose; one that was away was resumed."""
    job.wait_for_event("terminated", END)
    text = (job.directory / console).read_text()
    assert text.count(BANNER) == 1, "it was resumed, it was not booted again"
    assert counts(text) == list(range(1, seconds + 1))
    assert text.rstrip().endswith(DONE)
