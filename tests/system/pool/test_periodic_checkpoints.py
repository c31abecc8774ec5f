"""Periodic checkpoints under a real starter, in a pool of their own: its startd offers another VM type."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.lab.guest import BANNER, counts, make_guest, read_count
from tests.lab.pool import Pool
from tests.system.pool.outcomes import CHECKPOINT, END, START

pytestmark = pytest.mark.pool

SECONDS = 90
"""How long the guest counts: long enough to be interrupted after the starter's sleep."""

PERIOD = 45
"""Seconds between periodic checkpoints: the first comes when the starter listens, the second when the test
has killed it."""


def guest(home: Path) -> None:
    make_guest(home / "guest.img", SECONDS)


@pytest.fixture
def periodic(pool: Pool) -> Iterator[Pool]:
    """The same machine, offering VMs of a type that has periodic checkpoints."""
    config = "/etc/condor/config.d/99-periodic.config"
    every = f"PERIODIC_CHECKPOINT = (time() - LastPeriodicCheckpoint) > {PERIOD}\n"
    pool.namespace.path(config).write_text("VM_TYPE = libvirt\n" + every)
    pool.run("condor_restart", "-startd")
    try:
        pool.wait_until("the machine to offer libvirt", lambda: pool.machine().get("VM_Type") == "libvirt", 120)
        yield pool
    finally:
        pool.namespace.path(config).unlink()
        pool.run("condor_restart", "-startd")
        pool.wait_until("the machine to offer kvm", lambda: pool.machine().get("VM_Type") == "kvm", 120)


def test_a_job_restarts_from_a_periodic_checkpoint(periodic: Pool) -> None:
    """The execute side is killed after one: the job restarts from there, with its disk as it was then."""
    pool = periodic
    job = pool.submit(
        "periodic",
        guest,
        CHECKPOINT + "vm_type = libvirt\n" + '+VMPARAM_vm_Disk = "guest.img:hda:w:raw"\n' + "job_lease_duration = 20\n",
    )
    pool.wait_until("its guest", job.is_running, START)  # whose first STATUS may come amid a checkpoint
    pool.wait_until("the checkpoint", lambda: "CONDOR_VM_CHECKPOINT" in pool.told(job), END)
    pool.wait_until("its QEMU to go", lambda: pool.qemu_of(job) is None, 60)
    pool.wait_until("its QEMU to be back", lambda: pool.qemu_of(job), END)
    counted = len(counts(pool.console(job)))
    pool.wait_until("the guest to count on", lambda: len(counts(pool.console(job))) > counted + 5, 60)
    lost = len(counts(pool.console(job)))
    server, starter = pool.wait_until("the job's daemon", lambda: pool.server_of(job), 10)
    # At once, as when the machine dies: a daemon that sees its starter go ends by itself.
    pool.namespace.kill(starter, "STOP")
    pool.namespace.kill(server, "KILL")
    pool.namespace.kill(starter, "KILL")
    pool.wait_until("it to start again", lambda: job.events().count("executing") >= 2, END)
    job.wait_for_event("terminated", END)
    console = (job.directory / "vm_console.log").read_text()
    assert console.count(BANNER) == 1
    numbers = counts(console)
    assert numbers[-1] == SECONDS
    assert numbers == list(range(1, SECONDS + 1)), f"it had counted to {lost} when it was killed"
    assert read_count(job.directory / "guest.img") == SECONDS
