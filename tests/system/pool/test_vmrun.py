"""VMware jobs under HTCondor's own startd and starter, by the stand-in for vmrun.

condor_submit has no VMware jobs any more; the submit files here are as in docs/how-to/vmware.md.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.lab.namespace import LAB
from tests.lab.pool import OF_ALL, Job, Pool
from tests.lab.vmware import VMware, VmwareJob, count_on
from tests.system.pool.outcomes import CHECKPOINT, assert_counted, go_on_from_checkpoint, own_pool

pytestmark = pytest.mark.pool

SECONDS = 90
"""How long the guest counts: long enough to be interrupted after the starter's sleep of 30 s."""

CONFIG = f"VM_TYPE = vmrun\nVMWARE_VMRUN = {LAB}/vmware/vmrun\n"

TRANSFERRED = "+VMPARAM_VMware_Transfer = True\n+VMPARAM_VMware_SnapshotDisk = False\n"
"""The guest writes to the disk that came with the job, and it comes back."""

CONSOLE = "serial.txt"

SUBMIT = f"""\
{OF_ALL}vm_type = vmrun
vm_memory = 64
+VMPARAM_VMware_VMX_File = "dos.vmx"
+VMPARAM_VMware_VMDK_Files = "dos.vmdk"
transfer_input_files = dos.vmx, dos.vmdk
"""


def make_files(home: Path) -> None:
    VmwareJob(home, SECONDS)


def install_vmware(pool: Pool) -> None:
    place = pool.directory / "vmware"
    place.mkdir()
    VMware(place, seen_as=Path(LAB) / "vmware")


pool = own_pool("vmrun", CONFIG, install_vmware)


@pytest.fixture(scope="module")
def jobs(pool: Pool) -> Mapping[str, Job]:
    """All the jobs of this module, side by side."""
    return {
        "whole": pool.submit("whole", make_files, TRANSFERRED, SUBMIT),
        "vacated": pool.submit("vacated", make_files, CHECKPOINT, SUBMIT),
    }


def test_a_vacated_job_goes_on_from_its_checkpoint(pool: Pool, jobs: Mapping[str, Job]) -> None:
    job = jobs["vacated"]
    go_on_from_checkpoint(pool, job)
    assert_counted(job, SECONDS, CONSOLE)
    assert count_on(job.directory / "dos.vmdk") == 0, "the guest wrote to the snapshot's disk"
    assert count_on(job.directory / "dos-000001.vmdk") == SECONDS
    assert not (job.directory / "vm_checkpoint.json").exists()


def test_a_job_runs_to_its_end_and_its_disk_comes_home(jobs: Mapping[str, Job]) -> None:
    job = jobs["whole"]
    assert_counted(job, SECONDS, CONSOLE)
    assert count_on(job.directory / "dos.vmdk") == SECONDS


def test_the_machine_offers_vmrun(pool: Pool) -> None:
    machine = pool.offering()
    assert machine["VM_Type"] == "vmrun"
    assert machine["VM_vmrun_ATTR_snapshot"] is True
    assert machine["VM_vmrun_ATTR_product"] == "ws"
