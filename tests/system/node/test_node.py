"""A job on a node as people have it, with AppArmor round its guest: it is suspended, vacated, and runs to its end."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.lab.guest import BANNER, DONE, counts, make_guest
from tests.lab.node import Node, NodeJob
from tests.system.pool.outcomes import CHECKPOINT

pytestmark = pytest.mark.node

SECONDS = 90
"""How long the guest counts. A starter does not listen in the first 30 of them, nor in 20 that a busy node takes."""
TIME = 300
"""Seconds for a step of a job. All of it is emulated, and libvirt loads seven AppArmor profiles for a start."""
CONFINED = re.compile(r"libvirt-[0-9a-f-]{36} \(enforce\)")


def guest_of(seconds: int) -> Callable[[Path], object]:
    return lambda home: make_guest(home / "guest.img", seconds)


def assert_confined(node: Node, job: NodeJob) -> None:
    assert CONFINED.fullmatch(node.wait_until(f"the guest of job {job.cluster}", job.confinement, TIME))


def test_a_job_goes_on_after_a_suspension_and_from_its_checkpoint(node: Node) -> None:
    job = node.submit("guest", guest_of(SECONDS), CHECKPOINT)
    assert_confined(node, job)
    node.wait_until("the first STATUS=Running", lambda: "STATUS=Running" in job.told(), TIME)

    job.command("condor_suspend")
    job.wait_for_event("suspended", TIME)
    node.wait_until("its QEMU to go", lambda: not job.confinement(), TIME)
    job.command("condor_continue")
    assert_confined(node, job)
    job.wait_for_event("unsuspended", TIME)

    job.command("condor_vacate_job")
    job.wait_for_event("evicted", TIME)
    job.wait_for_event("executing", TIME, times=2)
    assert_confined(node, job)

    job.wait_for_event("terminated", TIME)
    console = job.file("vm_console.log")
    assert console.count(BANNER) == 1, "it went on, it was not booted again"
    assert counts(console) == list(range(1, SECONDS + 1))
    assert console.endswith(f"{DONE}\n")
    assert "vm_checkpoint" not in node.run("ls", job.home).stdout
    assert node.denied() == []
