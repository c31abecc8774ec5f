"""Suspend, vacate and periodic checkpoints under a real starter: the guest goes on, and counts on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.lab.guest import BANNER, DONE, counts, make_guest, read_count
from tests.lab.pool import JOBS, Job, Pool

pytestmark = pytest.mark.pool

START = 120
END = 240
"""Seconds; every start of a VM is followed by 30 in which the starter sleeps, and a status comes every 30."""

SECONDS = 90
"""How long the guests count: long enough to be interrupted after the starter's sleep."""

PERIOD = 45
"""Seconds between periodic checkpoints: the first comes when the starter listens, the second when the test
has killed it."""

CHECKPOINT = "vm_checkpoint = true\nwhen_to_transfer_output = ON_EXIT_OR_EVICT\n"
SOFT = "/etc/condor/config.d/99-soft-suspend.config"


def guest(home: Path) -> None:
    make_guest(home / "guest.img", SECONDS)


def settle(pool: Pool, job: Job) -> None:
    """Wait until the starter listens again after a START: it has asked for the pid and a status."""
    pool.wait_until(f"the guest of job {job.cluster}", job.is_running, START)
    pool.wait_until("the first STATUS=Running", lambda: "STATUS=Running" in pool.told(job), START)


@pytest.fixture(scope="module")
def jobs(pool: Pool) -> Mapping[str, Job]:
    """Jobs side by side: two that will be vacated, one that will be paused in RAM."""
    pool.wait_until("the machine to have VMs", lambda: pool.machine().get("HasVM"), 60)
    shared = f"vm_disk = {JOBS}/shared/guest.img:hda:w:raw\ntransfer_input_files =\n"
    pool.namespace.path(SOFT).write_text("VM_SOFT_SUSPEND = True\n")
    submitted = {
        "paused": pool.submit("paused", guest),
    }
    pool.wait_until("its guest", submitted["paused"].is_running, START)
    pool.namespace.path(SOFT).unlink()
    submitted |= {
        "transferred": pool.submit("transferred", guest, CHECKPOINT),
        "shared": pool.submit("shared", guest, CHECKPOINT + shared),
    }
    commands = {"paused": "condor_suspend", "transferred": "condor_vacate_job", "shared": "condor_vacate_job"}
    for name, command in commands.items():
        settle(pool, submitted[name])
        submitted[name].command(command)
    return submitted


@pytest.mark.parametrize("name", ["transferred", "shared"])
def test_a_vacated_job_goes_on_from_its_checkpoint(pool: Pool, jobs: Mapping[str, Job], name: str) -> None:
    job = jobs[name]
    pool.wait_until("the job to be evicted", lambda: "evicted" in job.events(), END)
    pool.wait_until("it to start again", lambda: job.events().count("executing") >= 2, END)
    job.wait_for_event("terminated", END)
    ad = job.ad()
    assert ad["JobStatus"] == 4
    assert ad["ExitCode"] == 0
    console = (job.directory / "vm_console.log").read_text()
    assert console.count(BANNER) == 1, "it went on, it was not booted again"
    assert counts(console) == list(range(1, SECONDS + 1))
    assert console.endswith(f"{DONE}\n")
    assert read_count(job.directory / "guest.img") == SECONDS
    assert not [path.name for path in job.directory.iterdir() if path.name.startswith("vm_checkpoint")]


def test_a_job_that_is_paused_in_ram_goes_on(pool: Pool, jobs: Mapping[str, Job]) -> None:
    job = jobs["paused"]
    pool.wait_until("STATUS=SoftSuspended", lambda: pool.told(job).count("STATUS=SoftSuspended") >= 2, END)
    assert job.is_running(), "the domain is there, and paused"
    before = counts(pool.console(job))
    job.command("condor_continue")
    pool.wait_until("the guest to count", lambda: len(counts(pool.console(job))) > len(before) + 1, END)
    job.wait_for_event("terminated", END)
    console = (job.directory / "vm_console.log").read_text()
    assert console.count(BANNER) == 1
    assert counts(console) == list(range(1, SECONDS + 1))


@pytest.fixture
def periodic(pool: Pool) -> Iterator[Pool]:
    """The same machine, offering VMs of a type that has periodic checkpoints."""
    config = "/etc/condor/config.d/99-periodic.config"
    every = f"PERIODIC_CHECKPOINT = (time() - LastPeriodicCheckpoint) > {PERIOD}\n"
    pool.namespace.path(config).write_text("VM_TYPE = libvirt\n" + every)
    pool.run("condor_restart", "-startd")
    try:
        pool.wait_until(
            "the machine to offer libvirt", lambda: pool.machine().get("VM_Type") == "libvirt", 120
        )
        yield pool
    finally:
        pool.namespace.path(config).unlink()
        pool.run("condor_restart", "-startd")
        pool.wait_until("the machine to offer kvm", lambda: pool.machine().get("VM_Type") == "kvm", 120)


@pytest.mark.xdist_group("periodic")  # in a pool of its own: the startd is restarted for it
def test_a_job_restarts_from_a_periodic_checkpoint(periodic: Pool) -> None:
    """The execute side is killed after one: the job goes on from there, with its disk as it was then."""
    pool = periodic
    job = pool.submit(
        "periodic",
        guest,
        CHECKPOINT
        + "vm_type = libvirt\n"
        + '+VMPARAM_vm_Disk = "guest.img:hda:w:raw"\n'
        + "job_lease_duration = 20\n",
    )
    settle(pool, job)
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
