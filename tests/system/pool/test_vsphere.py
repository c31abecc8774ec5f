"""vSphere jobs under HTCondor's own startd and starter, on VMware's simulator: a guest's end, and a checkpoint."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.drivers.vsphere.simulator import MIB, VMX, write_disk
from tests.lab import vcsim
from tests.lab.namespace import LAB
from tests.lab.pool import OF_ALL, Job, Pool
from tests.lab.vcsim import PASSWORD, USER
from tests.system.pool.outcomes import CHECKPOINT, END, START, pool_of_its_own

pytestmark = [pytest.mark.pool, pytest.mark.vsphere]

PORT = 8989

CONFIG = f"""
VM_TYPE = vsphere
VSPHERE_HOST = 127.0.0.1:{PORT}
VSPHERE_USER = {USER}
VSPHERE_PASSWORD_FILE = /etc/condor/vsphere.password
VSPHERE_TLS_PIN = {LAB}/sim/server.pem
VSPHERE_DATASTORE = LocalDS_0
"""

SUBMIT = f"""\
{OF_ALL}{CHECKPOINT}vm_type = vsphere
vm_memory = 64
+VMPARAM_VMware_VMX_File = "machine.vmx"
+VMPARAM_VMware_VMDK_Files = "disk.vmdk,disk-flat.vmdk"
transfer_input_files = machine.vmx, disk.vmdk, disk-flat.vmdk
"""


class VspherePool:
    """A pool, and a vSphere server in the same namespace."""

    pool: Pool
    server: subprocess.Popen[str]
    before: Path
    """The disk of the VM whose job was vacated, when it was."""

    def prepare(self, pool: Pool) -> None:
        """Before HTCondor starts: pyvmomi, the password, the simulator."""
        self.pool = pool
        import pyVmomi

        (packages,) = pool.namespace.path("/opt/vmgahp/lib").glob("python3*/site-packages")
        shutil.copytree(Path(pyVmomi.__file__).parent, packages / "pyVmomi", dirs_exist_ok=True)
        secret = pool.namespace.path("/etc/condor/vsphere.password")
        secret.write_text(PASSWORD + "\n")
        secret.chmod(0o600)
        pool.run("chown", "condor:", "/etc/condor/vsphere.password")
        (pool.directory / "sim").mkdir()
        shutil.copy(vcsim.build(), pool.directory / "vcsim")
        self.server = pool.namespace.popen(
            *("env", f"TMPDIR={LAB}/sim", f"VCSIM_USER={USER}", f"VCSIM_PASSWORD={PASSWORD}"),
            *(f"{LAB}/vcsim", "-listen", f"127.0.0.1:{PORT}", "-certificate", f"{LAB}/sim/server.pem"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.server.stdout.readline().startswith("listening")

    def guest_powers_off(self, job: Job) -> None:
        self.server.stdin.write(f"poweroff {job.domain}\n")
        self.server.stdin.flush()
        assert self.server.stdout.readline() == "ok\n"

    def disks(self, job: Job) -> list[Path]:
        """The disks of the job's VMs on the datastore."""
        return list(self.pool.directory.glob(f"sim/govcsim-*LocalDS_0*/{job.domain}-*/disk-scsi0-0-flat.vmdk"))

    def submit(self, name: str) -> Job:
        def make_files(home: Path) -> None:
            (home / "machine.vmx").write_text(VMX)
            write_disk(home, "disk.vmdk", CONTENT)

        return self.pool.submit(name, make_files, template=SUBMIT)


@pytest.fixture(scope="module")
def vsphere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VspherePool]:
    made = VspherePool()
    with pool_of_its_own(tmp_path_factory, "vsphere", CONFIG, made.prepare):
        yield made


CONTENT = os.urandom(MIB)
"""What is on the disk that each job sends."""


@pytest.fixture(scope="module")
def jobs(vsphere: VspherePool) -> Mapping[str, Job]:
    """All the jobs of this module, side by side; a starter listens to nobody for 30 s after its START."""
    pool = vsphere.pool
    submitted = {name: vsphere.submit(name) for name in ("vacated", "ends")}
    vacated = submitted["vacated"]
    pool.wait_until("the first STATUS=Running", lambda: "STATUS=Running" in pool.told(vacated), START)
    (vsphere.before,) = vsphere.disks(vacated)
    vacated.command("condor_vacate_job")
    return submitted


def test_the_machine_offers_vsphere(vsphere: VspherePool) -> None:
    machine = vsphere.pool.offering()
    assert machine["VM_Type"] == "vsphere"
    assert machine["VM_vsphere_ATTR_kind"] == "esxi"
    assert machine["VM_vsphere_ATTR_snapshot"] is True


def test_a_job_ends_with_its_guest_and_gets_its_disk(vsphere: VspherePool, jobs: Mapping[str, Job]) -> None:
    pool, job = vsphere.pool, jobs["ends"]
    pool.wait_until("the first STATUS=Running", lambda: "STATUS=Running" in pool.told(job), START)
    (disk,) = vsphere.disks(job)
    assert disk.read_bytes() == CONTENT
    disk.write_bytes(CONTENT[::-1])
    vsphere.guest_powers_off(job)
    job.wait_for_event("terminated", END)
    assert (job.directory / "disk-flat.vmdk").read_bytes() == CONTENT[::-1]
    assert vsphere.disks(job) == []


def test_a_vacated_job_goes_on_from_its_checkpoint(vsphere: VspherePool, jobs: Mapping[str, Job]) -> None:
    pool, job = vsphere.pool, jobs["vacated"]
    pool.wait_until("the job to be evicted", lambda: "evicted" in job.events(), END)
    pool.wait_until("it to start again", lambda: job.events().count("executing") >= 2, END)
    pool.wait_until("it to run again", lambda: "STATUS=Running" in pool.told(job), START)
    assert vsphere.disks(job) == [vsphere.before], "it is the VM that was there"
    vsphere.before.write_bytes(b"v" * MIB)
    vsphere.guest_powers_off(job)
    job.wait_for_event("terminated", END)
    assert (job.directory / "disk-flat.vmdk").read_bytes() == b"v" * MIB
    assert f"{job.domain} is restored from its checkpoint" in pool.daemon_log()
    assert vsphere.disks(job) == []
