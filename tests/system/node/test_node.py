"""A job on a node as people have it, with AppArmor round its guest: it is suspended, vacated, and runs to its end."""

from __future__ import annotations

import pytest
from tests.lab.node import Node
from tests.system.node.steps import TIME, assert_confined, assert_counted, guest_of, settle
from tests.system.pool.outcomes import CHECKPOINT

pytestmark = pytest.mark.node

SECONDS = 90
"""How long the guest counts. A starter does not listen in the first 30 of them, nor in 20 that a busy node takes."""


def test_a_job_goes_on_after_a_suspension_and_from_its_checkpoint(node: Node) -> None:
    job = node.submit("guest", guest_of(SECONDS), CHECKPOINT)
    settle(node, job)

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

    assert_counted(job, SECONDS)
    assert "vm_checkpoint" not in node.run("ls", job.home).stdout
    assert node.denied() == []
