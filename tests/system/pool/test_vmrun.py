"""VMware jobs under HTCondor's own startd and starter, by the stand-in for vmrun.

condor_submit has no VMware jobs any more; the submit files here are as in docs/how-to/vmware.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.lab.guest import BANNER, DONE, counts, make_guest
from tests.lab.namespace import LAB
from tests.lab.pool import Job, Pool
from tests.lab.vmware import VMware, convert, count_on
from tests.system.pool import outcomes
from tests.system.pool.outcomes import END

pytestmark = pytest.mark.pool

SECONDS = 90
"""How long the guest counts: long enough to be interrupted after the starter's sleep of 30 s."""

CONFIG = f"VM_TYPE = vmrun\nVMWARE_VMRUN = {LAB}/vmware/vmrun\n"

TRANSFERRED = "+VMPARAM_VMware_Transfer = True\n+VMPARAM_VMware_SnapshotDisk = False\n"
"""The guest writes to the disk that came with the job, and it comes back."""

CHECKPOINTED = "vm_checkpoint = true\nwhen_to_transfer_output = ON_EXIT_OR_EVICT\n"

SUBMIT = """\
universe = vm
vm_type = vmrun
vm_memory = 64
+VMPARAM_VMware_VMX_File = "dos.vmx"
+VMPARAM_VMware_VMDK_Files = "dos.vmdk"
transfer_input_files = dos.vmx, dos.vmdk
should_transfer_files = YES
when_to_transfer_output = ON_EXIT
executable = {name}
log = job.log
"""

VMX = """\
.encoding = "UTF-8"
config.version = "8"
virtualHW.version = "10"
guestOS = "dos"
ide0:0.present = "TRUE"
ide0:0.fileName = "dos.vmdk"
serial0.present = "TRUE"
serial0.fileType = "file"
serial0.fileName = "serial.txt"
"""


def make_files(home: Path) -> None:
    (home / "dos.vmx").write_text(VMX)
    convert(make_guest(home / "dos.raw", SECONDS), home / "dos.vmdk")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool of its own, whose machine offers VMs by vmrun."""
    with outcomes.pool_of_its_own(tmp_path_factory, "vmrun", CONFIG, install_vmware) as pool:
        yield pool


def install_vmware(pool: Pool) -> None:
    place = pool.directory / "vmware"
    place.mkdir()
    VMware(place, seen_as=Path(LAB) / "vmware")


@pytest.fixture(scope="module")
def jobs(pool: Pool) -> Mapping[str, Job]:
    """All the jobs of this module, side by side; a starter listens to nobody for 30 s after its START."""
    submitted = {
        "whole": pool.submit("whole", make_files, TRANSFERRED, SUBMIT),
        "suspended": pool.submit("suspended", make_files, TRANSFERRED, SUBMIT),
        "removed": pool.submit("removed", make_files, TRANSFERRED, SUBMIT),
        "vacated": pool.submit("vacated", make_files, CHECKPOINTED, SUBMIT),
        "bad": pool.submit("bad", make_files, '+VMPARAM_VMware_VMX_File = "no.vmx"\n', SUBMIT),
    }
    outcomes.befall(pool, submitted, vmx_of)
    return submitted


def vmx_of(pool: Pool, job: Job) -> str | None:
    """The command line of the job's VM."""
    scratch = pool.scratch(job)
    for words in pool.namespace.processes().values():
        if scratch and "vmware-vmx" in words.split(" ", 1)[0] and f"{scratch}/dos_condor.vmx" in words:
            return words
    return None


def test_the_machine_offers_vmrun(pool: Pool) -> None:
    machine = pool.offering()
    assert machine["HasVM"] is True
    assert machine["VM_Type"] == "vmrun"
    assert machine["VM_vmrun_ATTR_snapshot"] is True
    assert machine["VM_vmrun_ATTR_product"] == "ws"


def test_a_removed_job_leaves_no_vm(pool: Pool, jobs: Mapping[str, Job]) -> None:
    outcomes.assert_removed(pool, jobs["removed"], vmx_of)


def test_a_suspended_job_goes_on_where_it_was(pool: Pool, jobs: Mapping[str, Job]) -> None:
    outcomes.go_on_after_suspension(pool, jobs["suspended"])
    assert_counted_through(jobs["suspended"])


def test_a_job_runs_to_its_end_and_its_disk_comes_home(jobs: Mapping[str, Job]) -> None:
    job = jobs["whole"]
    job.wait_for_event("terminated", END)
    assert_counted_through(job)


def assert_counted_through(job: Job) -> None:
    console = (job.directory / "serial.txt").read_text()
    assert counts(console) == list(range(1, SECONDS + 1))
    assert console.rstrip().endswith(DONE)
    assert count_on(job.directory / "dos.vmdk") == SECONDS


def test_a_job_without_its_vmx_is_held_and_the_machine_stays(pool: Pool, jobs: Mapping[str, Job]) -> None:
    outcomes.assert_held(pool, jobs["bad"], "VMGAHP_ERR_JOBCLASSAD_KVM")


def test_a_vacated_job_goes_on_from_its_checkpoint(pool: Pool, jobs: Mapping[str, Job]) -> None:
    job = jobs["vacated"]
    pool.wait_until("the job to be evicted", lambda: "evicted" in job.events(), END)
    pool.wait_until("it to start again", lambda: job.events().count("executing") >= 2, END)
    job.wait_for_event("terminated", END)
    console = (job.directory / "serial.txt").read_text()
    assert console.count(BANNER) == 1, "it was resumed, it was not booted again"
    assert counts(console) == list(range(1, SECONDS + 1))
    assert console.rstrip().endswith(DONE)
    assert count_on(job.directory / "dos.vmdk") == 0, "the guest wrote to the snapshot's disk"
    assert count_on(job.directory / "dos-000001.vmdk") == SECONDS
    assert not (job.directory / "vm_checkpoint.json").exists()
    assert vmx_of(pool, job) is None
