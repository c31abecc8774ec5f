"""What the tests on a node have in common: their guests, and what must hold of a job there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.lab.guest import BANNER, DONE, counts, make_guest
from tests.lab.node import Node, NodeJob

TIME = 300
"""Seconds for a step of a job. All of it is emulated, and libvirt loads seven AppArmor profiles for a start."""
CONFINED = re.compile(r"libvirt-[0-9a-f-]{36} \(enforce\)|system_u:system_r:svirt(_tcg)?_t:s0:c\d+,c\d+")


def guest_of(seconds: int | None) -> Callable[[Path], object]:
    """Make the files of a job whose guest counts so long, or for ever."""
    return lambda home: make_guest(home / "guest.img", seconds)


def assert_confined(node: Node, job: NodeJob) -> None:
    """Check that its guest runs, under an AppArmor profile or with SELinux's categories of its own."""
    assert CONFINED.fullmatch(node.wait_until(f"the guest of job {job.cluster}", job.confinement, TIME))


def settle(node: Node, job: NodeJob) -> None:
    """Wait until its guest runs and its starter listens again, which sleeps after a START."""
    assert_confined(node, job)
    node.wait_until("the first STATUS=Running", lambda: "STATUS=Running" in job.told(), TIME)


def assert_counted(job: NodeJob, seconds: int) -> None:
    """Its guest has counted to its end, and was booted once."""
    job.wait_for_event("terminated", TIME)
    console = job.file("vm_console.log")
    assert console.count(BANNER) == 1, "it went on, it was not booted again"
    assert counts(console) == list(range(1, seconds + 1))
    assert console.endswith(f"{DONE}\n")


def suspend_and_continue(node: Node, job: NodeJob) -> None:
    """Have its memory saved to disk, and its guest go on."""
    job.command("condor_suspend")
    job.wait_for_event("suspended", TIME)
    node.wait_until("its QEMU to go", lambda: not job.confinement(), TIME)
    job.command("condor_continue")
    assert_confined(node, job)
    job.wait_for_event("unsuspended", TIME)


def vacate(node: Node, job: NodeJob) -> None:
    """Have it evicted, and restart from its checkpoint."""
    job.command("condor_vacate_job")
    job.wait_for_event("evicted", TIME)
    job.wait_for_event("executing", TIME, times=2)
    assert_confined(node, job)
