"""The contract of a driver, kept by the one for vmrun: by VMware Workstation and by Player."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drivers.support import counted, needs_qemu, only
from tests.jobs import owner
from tests.lab.vmware import VMware, VmwareJob, vmware
from vmgahp import errors, lifecycle
from vmgahp.config import Settings
from vmgahp.drivers.vmrun.machine import VmrunMachine
from vmgahp.host.job_user import Identity
from vmgahp.job.ad import JobAd
from vmgahp.testing.contract import DriverContract, Subject

pytestmark = [pytest.mark.qemu, needs_qemu]


class Workstation(Subject):
    vm_type = "vmware"
    snapshot_disk = True

    def __init__(self, directory: Path, host: VMware, identity: Identity) -> None:
        settings = {"VM_MEMORY": "1024", "VM_STOP_TIMEOUT": "1", "VMWARE_VMRUN": str(host.vmrun)}
        super().__init__(directory, Settings(settings), identity)
        self.host = host

    def prepare(self, scratch: Path, number: int, ends: bool) -> dict[str, str]:
        os.chown(scratch, self.identity.uid, self.identity.gid)
        for old in scratch.iterdir():
            old.unlink()
        made = VmwareJob(scratch, seconds=1 if ends else None)
        lines = dict(line.split(" = ", 1) for line in made.ad() if line.startswith("VMPARAM_"))
        return lines | {"VMPARAM_VMware_SnapshotDisk": str(self.snapshot_disk).lower()}

    def exists(self, job: JobAd) -> bool:
        vmx = os.path.join(job.working_dir(), "dos_condor.vmx")
        return vmx in self.host.pids() or os.path.exists(vmx.removesuffix(".vmx") + ".vmss")

    def bad_jobs(self) -> dict[str, JobAd]:
        job = self.job(2)
        return {
            "no .vmx": self.changed(job, VMPARAM_VMware_VMX_File=None),
            "a .vmx that is not there": self.changed(job, VMPARAM_VMware_VMX_File='"other.vmx"'),
            "no snapshot": self.changed(job, VMPARAM_VMware_Transfer="false", VMPARAM_VMware_SnapshotDisk="false"),
        }

    def unfit(self) -> Settings:
        return Settings({"VM_MEMORY": "1024", "VMWARE_VMRUN": "/nonexistent/vmrun"})

    def count(self, job: JobAd) -> int:
        return counted(job, "serial.txt")


class Player(Workstation):
    snapshot_disk = False
    soft_suspend = False

    def bad_jobs(self) -> dict[str, JobAd]:
        return {"snapshot disks": self.changed(self.job(2), VMPARAM_VMware_SnapshotDisk="true")}


class TestWorkstation(DriverContract):
    @pytest.fixture
    def subject(self, scratch: Path) -> Iterator[Subject]:
        with vmware() as host, Workstation(scratch.parent, host, owner(scratch)) as subject:
            yield subject

    def test_a_dry_run_says_what_vmware_would_read_and_changes_nothing(self, subject: Subject, job: JobAd) -> None:
        scratch = Path(job.working_dir())
        before = {path.name: path.read_bytes() for path in scratch.iterdir()}
        described = subject.driver().describe(job)
        assert f'displayName = "{job.vm_name()}"\n' in described
        assert 'ide0:0.fileName = "dos.vmdk"\n' in described
        assert {path.name: path.read_bytes() for path in scratch.iterdir()} == before

    def test_a_guest_for_whose_memory_there_is_no_room_runs_on(self, subject: Subject, machine: VmrunMachine) -> None:
        machine.spec = machine.spec._replace(vm=machine.spec.vm._replace(memory_mib=1 << 40))
        with pytest.raises(errors.MachineFault, match="MiB are free") as caught:
            machine.suspend()
        assert caught.value.code == "VMGAHP_ERR_VM_CANNOT_CREATE_CKPT_FILES"
        assert machine.status().state == lifecycle.RUNNING


@only(
    *("test_a_started_vm_runs", "test_paused_and_resumed", "test_a_restart_goes_on_from_the_checkpoint"),
    *("test_a_bad_job_is_held_leaves_nothing_and_the_next_one_runs", "test_the_survey_of_a_machine_that_works"),
)
class TestPlayer(DriverContract):
    @pytest.fixture
    def subject(self, scratch: Path) -> Iterator[Subject]:
        with vmware("player") as host, Player(scratch.parent, host, owner(scratch)) as subject:
            yield subject
