"""The contract of a driver, kept by the one for vSphere: on an ESXi host and on a vCenter."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drivers.support import only
from tests.drivers.vsphere.simulator import MIB, VMX, Server, settings, write_disk
from tests.jobs import owner
from tests.lab.vcsim import Vcsim
from vmgahp.config import Settings
from vmgahp.host.job_user import Identity
from vmgahp.job.ad import JobAd
from vmgahp.testing.contract import DriverContract, Subject

pytestmark = pytest.mark.vsphere


class Esxi(Subject):
    vm_type = "vsphere"
    soft_suspend = False
    has_guest = False

    def __init__(self, directory: Path, sim: Vcsim, password: Path, identity: Identity) -> None:
        values = settings(sim, password, VM_MEMORY=1024, VM_NETWORKING=True, VM_NETWORKING_TYPE="nat")
        self.values = {name: str(value) for name, value in values.items()}
        super().__init__(directory, Settings(self.values), identity)
        self.server = Server(sim)

    def prepare(self, scratch: Path, number: int, ends: bool) -> dict[str, str]:
        (scratch / "machine.vmx").write_text(VMX)
        write_disk(scratch, "disk.vmdk", os.urandom(MIB))
        for path in (scratch, *scratch.iterdir()):
            os.chown(path, self.identity.uid, self.identity.gid)
        return {
            "VMPARAM_VMware_VMX_File": '"machine.vmx"',
            "VMPARAM_VMware_VMDK_Files": '"disk.vmdk,disk-flat.vmdk"',
            "VMPARAM_VMware_Transfer": "true",
        }

    def vm(self, job: JobAd) -> object:
        """The job's VM; a checkpoint that waits for its job is none, as a file in a spool directory is none."""
        for ref in self.server.jobs().values():
            tags = self.server.tags(ref)
            if tags["name"] == job.vm_name() and tags["state"] == "runs":
                return ref
        return None

    def exists(self, job: JobAd) -> bool:
        return self.vm(job) is not None

    def power_off(self, job: JobAd) -> None:
        self.server.guest_powers_off(self.vm(job))

    def bad_jobs(self) -> dict[str, JobAd]:
        job = self.job(2)
        return {
            "no .vmx": self.changed(job, VMPARAM_VMware_VMX_File=None),
            "a .vmx that is not there": self.changed(job, VMPARAM_VMware_VMX_File='"other.vmx"'),
            "a disk that is not there": self.changed(job, VMPARAM_VMware_VMDK_Files='"other.vmdk"'),
        }

    def unfit(self) -> Settings:
        return Settings(self.values | {"VSPHERE_DATASTORE": "nowhere"})


class TestEsxi(DriverContract):
    model = "esx"

    @pytest.fixture
    def subject(self, program: Path, tmp_path: Path, scratch: Path, password: Path) -> Iterator[Subject]:
        with Vcsim(tmp_path / "sim", self.model) as sim, Esxi(scratch.parent, sim, password, owner(scratch)) as subject:
            yield subject


@only(
    *("test_a_started_vm_runs", "test_destroyed_it_is_gone_and_once_is_as_good_as_twice", "test_suspended_and_resumed"),
    *("test_a_restart_goes_on_from_the_checkpoint", "test_a_start_clears_what_an_earlier_one_left"),
    *("test_the_survey_of_a_machine_that_works", "test_the_survey_of_an_unfit_machine_says_why"),
)
class TestVcenter(TestEsxi):
    model = "vpx"
