"""A pool in which no job can run any more: whatever is waited for there fails at once, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.lab.namespace import LabError, why_not
from tests.lab.pool import Pool

pytestmark = [pytest.mark.pool, pytest.mark.timeout(120)]
"""A wait in vain would take sixteen minutes."""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    """HTCondor and libvirt alone: no VM is wanted."""
    if reason := why_not():
        pytest.skip(reason)
    with Pool(tmp_path / "pool") as made:
        yield made


def end(pool: Pool, name: str) -> None:
    for pid, words in pool.namespace.processes().items():
        if words.split(" ")[0].endswith(name):
            pool.namespace.kill(pid, "KILL")


def assert_dead(pool: Pool, reason: str) -> None:
    """What is waited for is not even looked at, though it has come; and a job is not submitted."""
    with pytest.raises(LabError, match=reason):
        pool.wait_until("what never comes", lambda: None, 240)
    assert reason in pool.dead
    with pytest.raises(LabError, match=f"the pool is dead: .*{reason}"):
        pool.wait_until("what is there", lambda: True, 240)
    with pytest.raises(LabError, match=reason):
        pool.submit("late", lambda _: None)
    assert not (pool.directory / "jobs/late").exists()
    pool.dead = ""


def test_a_pool_that_lost_what_nothing_starts_again_is_dead(pool: Pool) -> None:
    assert pool.wait_until("what is there", lambda: True, 240)
    end(pool, "libvirtd")
    assert_dead(pool, "libvirtd is gone")
    pool.run("libvirtd", "-d")
    assert pool.wait_until("what is there", lambda: True, 240)
    end(pool, "condor_master")
    assert_dead(pool, "condor_master is gone")
    assert pool.namespace._holder
    pool.namespace._holder.kill()
    pool.namespace._holder.wait()
    assert_dead(pool, "the first process of the namespace is gone")
