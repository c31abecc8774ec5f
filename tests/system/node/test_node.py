"""Jobs on a node as people have it, where AppArmor confines each guest: they run, are suspended, and are vacated."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from tests.lab.guest import BANNER, DONE, counts, make_guest
from tests.lab.node import Node, NodeJob
from tests.system.pool.outcomes import CHECKPOINT, END, START

pytestmark = pytest.mark.node

SECONDS = 100
"""How long the guests count that are interrupted, the first 40 of which a starter does not listen."""
PLAIN = 5
CONFINED = re.compile(r"libvirt-[0-9a-f-]{36} \(enforce\)")


@pytest.fixture(scope="module")
def jobs(node: Node) -> Mapping[str, NodeJob]:
    """Jobs side by side, two of which are interrupted as soon as their starters listen."""
    interrupted = {"suspended": "condor_suspend", "vacated": "condor_vacate_job"}
    submitted = {
        "suspended": node.submit("suspended", guest_of(SECONDS)),
        "vacated": node.submit("vacated", guest_of(SECONDS), CHECKPOINT),
    }
    for name in interrupted:
        assert_confined(node, submitted[name])
    submitted["plain"] = node.submit("plain", guest_of(PLAIN))
    for name, command in interrupted.items():
        job = submitted[name]
        node.wait_until(f"the first STATUS=Running of {name}", lambda job=job: "STATUS=Running" in job.told(), START)
        job.command(command)
    return submitted


def guest_of(seconds: int) -> Callable[[Path], object]:
    return lambda home: make_guest(home / "guest.img", seconds)


def assert_confined(node: Node, job: NodeJob) -> None:
    assert CONFINED.fullmatch(node.wait_until(f"the guest of job {job.cluster}", job.confinement, START))


def assert_counted(job: NodeJob, seconds: int = SECONDS) -> None:
    """Its guest has ended as it should, and was booted once."""
    job.wait_for_event("terminated", END)
    console = job.file("vm_console.log")
    assert console.count(BANNER) == 1, "it went on, it was not booted again"
    assert counts(console) == list(range(1, seconds + 1))
    assert console.endswith(f"{DONE}\n")


def test_a_job_runs_to_its_end(jobs: Mapping[str, NodeJob]) -> None:
    assert_counted(jobs["plain"], PLAIN)


def test_a_suspended_job_goes_on(node: Node, jobs: Mapping[str, NodeJob]) -> None:
    job = jobs["suspended"]
    job.wait_for_event("suspended", START)
    node.wait_until("its QEMU to go", lambda: not job.confinement(), END)
    job.command("condor_continue")
    assert_confined(node, job)
    assert_counted(job)


def test_a_vacated_job_goes_on_from_its_checkpoint(node: Node, jobs: Mapping[str, NodeJob]) -> None:
    job = jobs["vacated"]
    job.wait_for_event("evicted", END)
    job.wait_for_event("executing", END, times=2)
    assert_confined(node, job)
    assert_counted(job)
    assert "vm_checkpoint" not in node.run("ls", job.home).stdout


def test_nothing_was_denied(node: Node, jobs: Mapping[str, NodeJob]) -> None:
    for job in jobs.values():
        job.wait_for_event("terminated", END)
    assert node.denied() == []
