"""What befalls a node with a running job: killed servers, an upgrade, restarts of libvirt and HTCondor, a reboot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.lab.node import Node, NodeJob
from tests.lab.packages import build, kept_of, later_clone_of
from tests.system.node import steps
from tests.system.node.steps import TIME, assert_confined, assert_counted, guest_of, settle, suspend_and_continue
from tests.system.pool.outcomes import CHECKPOINT

pytestmark = pytest.mark.node

LONG = 150
LEASE = "job_lease_duration = 60\n"
"""A submit command: its shadow gives up a machine that has lost the job after a minute, not after forty."""


@pytest.fixture
def running(node: Node, request: pytest.FixtureRequest) -> Iterator[NodeJob]:
    """A job that would run for ever, once its starter listens."""
    job = node.submit(request.node.name, guest_of(None), LEASE)
    settle(node, job)
    yield job
    job.command("condor_rm")
    node.wait_until("its QEMU to go", lambda: not job.confinement(), TIME)


def begun_again(node: Node, job: NodeJob) -> None:
    """HTCondor starts it again, and its VM of the same name comes up anew."""
    job.wait_for_event("executing", TIME, times=2)
    assert_confined(node, job)


def test_a_killed_server_leaves_no_guest(node: Node, running: NodeJob) -> None:
    pid = running.ask_of_qemu("echo $pid")
    node.run("pkill", "-KILL", "-f", "condor_vm-gahp -f")
    node.wait_until("its QEMU to go", lambda: running.ask_of_qemu("echo $pid") != pid, TIME)
    begun_again(node, running)


def test_a_killed_htcondor_leaves_no_guest(node: Node, running: NodeJob) -> None:
    pid = running.ask_of_qemu("echo $pid")
    node.run("systemctl", "kill", "--signal=KILL", "condor")
    node.wait_until("its QEMU to go", lambda: running.ask_of_qemu("echo $pid") != pid, TIME)
    node.run("systemctl", "start", "condor", check=False)  # systemd may have done so
    node.wait_for_offer()
    begun_again(node, running)


def test_an_upgrade_and_a_restart_of_libvirt_leave_a_running_job_alone(
    node: Node, tmp_path_factory: pytest.TempPathFactory
) -> None:
    job = node.submit("upgraded", guest_of(LONG), CHECKPOINT)
    settle(node, job)
    pid = job.ask_of_qemu("echo $pid")
    later = later_clone_of(tmp_path_factory)
    words = ("--keep", str(kept_of(tmp_path_factory)), "--clone", str(later))
    [package] = build("build-deb", tmp_path_factory.mktemp("later"), *words)
    node.install(Path(package))
    node.run("systemctl", "restart", *node.libvirt)
    assert job.ask_of_qemu("echo $pid") == pid
    suspend_and_continue(node, job)
    steps.vacate(node, job)
    assert_counted(job, LONG)


def test_jobs_go_on_after_a_restart_of_htcondor_and_a_reboot(node: Node) -> None:
    job = node.submit("rebooted", guest_of(LONG), CHECKPOINT + LEASE)
    settle(node, job)
    node.run("systemctl", "restart", "condor", timeout=TIME)
    node.wait_for_offer()
    job.wait_for_event("executing", TIME, times=2)
    settle(node, job)
    node.reboot()
    node.wait_for_offer()
    job.wait_for_event("executing", TIME, times=3)
    assert_counted(job, LONG)
