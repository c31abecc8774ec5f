"""Jobs that do not mind which hypervisor they get, under HTCondor's own startd and starter."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from tests.lab.guest import make_guest, read_count
from tests.lab.pool import OF_ALL, Job, Pool
from tests.lab.vmware import convert, count_on
from tests.system.pool.outcomes import assert_counted, own_pool

pytestmark = pytest.mark.pool

SECONDS = 5

CONFIG = "VM_TYPE = any\nVM_ANY_TYPES = vmrun, kvm\n"
"""vmrun is not installed there, so kvm is the first that is proved."""

SUBMIT = f"""\
{OF_ALL}vm_type = any
vm_memory = 64
+VMPARAM_vm_Disk = "disk.vmdk:hda:w:vmdk"
transfer_input_files = disk.vmdk
"""

LIST = """\
vm_type = vmware,kvm
requirements = TARGET.VM_Type == "any" || stringListIMember(TARGET.VM_Type, MY.JobVMType)
"""


def disk(vmdk_type: str) -> Callable[[Path], None]:
    return lambda home: convert(make_guest(home / "disk.raw", SECONDS), home / "disk.vmdk", vmdk_type)


pool = own_pool("any", CONFIG)


@pytest.fixture(scope="module")
def jobs(pool: Pool) -> Mapping[str, Job]:
    """All the jobs of this module, side by side."""
    return {
        # To the disk of an OVA no guest can write.
        "converted": pool.submit("converted", disk("streamOptimized"), "", SUBMIT),
        "listed": pool.submit("listed", disk("monolithicSparse"), LIST, SUBMIT),
    }


def test_the_machine_offers_what_is_proved(pool: Pool) -> None:
    machine = pool.offering()
    assert machine["HasVM"] is True
    assert machine["VM_Type"] == "any"
    assert machine["VM_TYPES"] == "any,kvm"
    assert machine["VM_kvm_ATTR_accel"] == "tcg"


def test_a_disk_that_the_hypervisor_cannot_use_is_converted(jobs: Mapping[str, Job]) -> None:
    job = jobs["converted"]
    assert_counted(job, SECONDS)
    assert json.loads((job.directory / "vm_choice.json").read_text())["vm_type"] == "kvm"
    assert read_count(job.directory / "disk.vmdk.qcow2") == SECONDS
    assert count_on(job.directory / "disk.vmdk") == 0, "the job's own image is as it was"


def test_a_list_of_types_in_vm_type(jobs: Mapping[str, Job]) -> None:
    job = jobs["listed"]
    assert_counted(job, SECONDS)
    assert not (job.directory / "disk.vmdk.qcow2").exists()
    assert count_on(job.directory / "disk.vmdk") == SECONDS
