"""A job on a node as people have it, its guest confined: it is suspended, vacated, and runs to its end."""

from __future__ import annotations

import pytest
from tests.lab.node import Node
from tests.system.node.steps import assert_counted, guest_of, settle, suspend_and_continue, vacate
from tests.system.pool.outcomes import CHECKPOINT

pytestmark = pytest.mark.node

SECONDS = 90
"""How long the guest counts. A starter does not listen in the first 30 of them, nor in 20 that a busy node takes."""


def test_a_job_goes_on_after_a_suspension_and_from_its_checkpoint(node: Node) -> None:
    job = node.submit("guest", guest_of(SECONDS), CHECKPOINT)
    settle(node, job)

    suspend_and_continue(node, job)
    vacate(node, job)

    assert_counted(job, SECONDS)
    assert "vm_checkpoint" not in node.run("ls", job.home).stdout
    assert node.denied() == []
