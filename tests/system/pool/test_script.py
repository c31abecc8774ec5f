"""Script-managed jobs under HTCondor's own startd and starter, by the example for VirtualBox and its stand-in."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.lab.guest import BANNER, DONE, counts, make_guest
from tests.lab.namespace import LAB, REPOSITORY
from tests.lab.pool import Job, Pool
from tests.lab.vmware import convert
from tests.system.pool import outcomes
from tests.system.pool.outcomes import END

pytestmark = pytest.mark.pool

SECONDS = 100
"""How long the guest counts: long enough to be interrupted after the starter's sleep of 30 s."""

HERE = f"{LAB}/virtualbox"
CONFIG = f"VM_TYPE = script\nVM_HYPERVISOR = virtualbox\nVM_SCRIPT = {HERE}/script\n"

SUBMIT = """\
universe = vm
vm_type = script
vm_memory = 64
transfer_input_files = disk.vmdk
should_transfer_files = YES
when_to_transfer_output = ON_EXIT
executable = {name}
log = job.log
"""
DISK = '+VMPARAM_vm_Disk = "disk.vmdk:sda:w:vmdk"\n'
CHECKPOINTED = DISK + "vm_checkpoint = true\nwhen_to_transfer_output = ON_EXIT_OR_EVICT\n"


def make_files(home: Path) -> None:
    convert(make_guest(home / "disk.raw", SECONDS), home / "disk.vmdk")


def install(pool: Pool) -> None:
    place = pool.directory / "virtualbox"
    place.mkdir()
    place.chmod(0o755)
    state = place / "state"
    state.mkdir()
    state.chmod(0o1777)
    for name in ("VBoxManage", "vmrun"):
        shutil.copyfile(REPOSITORY / "tests" / "lab" / name, place / name)
    tool = place / "vbox"
    tool.write_text(f'#!/bin/sh\nVBOX_STATE_DIR={HERE}/state exec python3 {HERE}/VBoxManage "$@"\n')
    script = place / "script"
    text = (REPOSITORY / "config" / "scripts" / "virtualbox").read_text()
    script.write_text(text.replace('VBOXMANAGE = "VBoxManage"', f'VBOXMANAGE = "{HERE}/vbox"'))
    for path in (tool, script):
        path.chmod(0o755)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool of its own, whose machine offers VMs by the script."""
    with outcomes.pool_of_its_own(tmp_path_factory, "script", CONFIG, install) as pool:
        yield pool


@pytest.fixture(scope="module")
def jobs(pool: Pool) -> Mapping[str, Job]:
    """All the jobs of this module, side by side; a starter listens to nobody for 30 s after its START."""
    submitted = {
        "suspended": pool.submit("suspended", make_files, DISK, SUBMIT),
        "removed": pool.submit("removed", make_files, DISK, SUBMIT),
        "vacated": pool.submit("vacated", make_files, CHECKPOINTED, SUBMIT),
        "bad": pool.submit("bad", make_files, DISK.replace("disk.vmdk:", "no.vmdk:"), SUBMIT),
    }
    outcomes.befall(pool, submitted, vm_of)
    return submitted


def vm_of(pool: Pool, job: Job) -> str | None:
    """The command line of the job's VM."""
    scratch = pool.scratch(job)
    for words in pool.namespace.processes().values():
        if scratch and "VBoxHeadless" in words.split(" ", 1)[0] and f"{scratch}/vm_console.log" in words:
            return words
    return None


def test_the_machine_offers_what_the_script_says(pool: Pool) -> None:
    machine = pool.offering()
    assert machine["HasVM"] is True
    assert machine["VM_Type"] == "script"
    assert machine["VM_HYPERVISORS"] == "virtualbox"
    assert machine["VM_virtualbox_ATTR_version"].startswith("7.")
    assert machine["VM_script_ATTR_checkpoint"] is True


def test_a_removed_job_leaves_no_vm(pool: Pool, jobs: Mapping[str, Job]) -> None:
    outcomes.assert_removed(pool, jobs["removed"], vm_of)


def test_a_job_that_the_script_rejects_is_held_and_the_machine_stays(pool: Pool, jobs: Mapping[str, Job]) -> None:
    outcomes.assert_held(pool, jobs["bad"])


def test_a_suspended_job_goes_on_where_it_was(pool: Pool, jobs: Mapping[str, Job]) -> None:
    outcomes.go_on_after_suspension(pool, jobs["suspended"])
    assert_counted_through(jobs["suspended"])


def test_a_vacated_job_goes_on_from_its_checkpoint(jobs: Mapping[str, Job]) -> None:
    job = jobs["vacated"]
    job.wait_for_event("terminated", END)
    assert "evicted" in job.events()
    assert_counted_through(job)


def assert_counted_through(job: Job) -> None:
    """One boot, every count once, the end that the guest chose itself, and the console at home."""
    console = (job.directory / "vm_console.log").read_text()
    assert console.count(BANNER) == 1
    assert counts(console.encode()) == list(range(1, SECONDS + 1))
    assert DONE in console
