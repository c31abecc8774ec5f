"""Suspend and vacate under a real starter: the guest is resumed, and counts on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.lab.guest import BANNER, DONE, counts, make_guest, read_count
from tests.lab.pool import JOBS, Job, Pool
from tests.system.pool.outcomes import CHECKPOINT, END, START, settle

pytestmark = pytest.mark.pool

SECONDS = 90
"""How long the guests count: long enough to be interrupted after the starter's sleep."""

SOFT = "/etc/condor/config.d/99-soft-suspend.config"


def guest(home: Path) -> None:
    make_guest(home / "guest.img", SECONDS)


@pytest.fixture(scope="module")
def jobs(pool: Pool) -> Mapping[str, Job]:
    """Jobs side by side: two that will be vacated, one that will be paused in RAM."""
    pool.offering()
    shared = f"vm_disk = {JOBS}/shared/guest.img:hda:w:raw\ntransfer_input_files =\n"
    pool.namespace.path(SOFT).write_text("VM_SOFT_SUSPEND = True\n")
    submitted = {"paused": pool.submit("paused", guest)}
    pool.wait_until("its guest", submitted["paused"].is_running, START)
    pool.namespace.path(SOFT).unlink()
    submitted |= {
        "transferred": pool.submit("transferred", guest, CHECKPOINT),
        "shared": pool.submit("shared", guest, CHECKPOINT + shared),
        "chosen": pool.submit("chosen", guest, CHECKPOINT + "transfer_output_files = vm_outputs/\n"),
    }
    vacated = ("transferred", "shared", "chosen")
    commands = {"paused": "condor_suspend"} | dict.fromkeys(vacated, "condor_vacate_job")
    for name, command in commands.items():
        settle(pool, submitted[name])
        submitted[name].command(command)
    return submitted


@pytest.mark.parametrize("name", ["transferred", "shared", "chosen"])
def test_a_vacated_job_goes_on_from_its_checkpoint(pool: Pool, jobs: Mapping[str, Job], name: str) -> None:
    job = jobs[name]
    pool.wait_until("the job to be evicted", lambda: "evicted" in job.events(), END)
    pool.wait_until("it to start again", lambda: job.events().count("executing") >= 2, END)
    job.wait_for_event("terminated", END)
    ad = job.ad()
    assert ad["JobStatus"] == 4
    assert ad["ExitCode"] == 0
    console = (job.directory / "vm_console.log").read_text()
    assert console.count(BANNER) == 1, "it was resumed, it was not booted again"
    assert counts(console) == list(range(1, SECONDS + 1))
    assert console.endswith(f"{DONE}\n")
    # What is not among the outputs that are chosen is needed by the restart, and does not come home.
    assert read_count(job.directory / "guest.img") == (0 if name == "chosen" else SECONDS)
    assert (job.directory / "vm_exit.json").exists()
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
