"""Features with which QEMU saves no VM: a job with checkpoints is held, and a SUSPEND has a reason to refuse."""

from pathlib import Path

import pytest

from tests import jobs
from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.host.job_user import Identity
from vmgahp.images.formats import FORMATS, BackingFile
from vmgahp.job import look, spec
from vmgahp.job.disks import Disk
from vmgahp.job.spec import JobSpec


def parsed(disk: str, checkpoint: str = "true", vm_type: str = "kvm", **settings: str) -> JobSpec:
    ad = jobs.ad(VMPARAM_vm_Disk=f'"{disk}"', JobVMCheckpoint=checkpoint, JobVMType=f'"{vm_type}"')
    return JobSpec.parse(ad, Settings({"VM_MEMORY": "1024", **settings}))


@pytest.mark.parametrize("form", ["vmdk", "vdi", "vpc", "vhd", "qcow"])
@pytest.mark.parametrize("permission", ["w", "r"])
def test_a_job_with_checkpoints_is_held_for_a_disk_that_qemu_cannot_save(form: str, permission: str) -> None:
    with pytest.raises(errors.JobFault, match="JobVMCheckpoint") as caught:
        parsed(f"root.qcow2:vda:w:qcow2,disk.{form}:vdb:{permission}:{form}")
    assert caught.value.code == errors.INVALID_DISK_PARAM
    assert f"disk.{form}:vdb" in caught.value.problem
    assert f"qemu-img convert -f {FORMATS[form]} -O qcow2 disk.{form}" in caught.value.hint
    assert "vm_checkpoint = false" in caught.value.hint


@pytest.mark.parametrize("form", ["raw", "qcow2", "qed", "iso"])
def test_it_runs_with_any_other(form: str) -> None:
    assert parsed(f"disk.{form}:vda:w:{form}").vm.checkpoint


@pytest.mark.parametrize(
    ("vm_type", "checkpoint", "settings"),
    [("kvm", "false", {}), ("xen", "true", {}), ("libvirt", "true", {"VM_LIBVIRT_DOMAIN_TYPE": "test"})],
)
def test_a_job_without_checkpoints_or_qemu_may_have_it(vm_type: str, checkpoint: str, settings: dict[str, str]) -> None:
    assert parsed("disk.vmdk:vda:w:vmdk", checkpoint, vm_type, **settings).requests


def test_a_backing_file_counts_as_the_disk_does(scratch: Path, user: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    (scratch / "disk.qcow2").write_bytes(b"QFI\xfb")
    jobs.own(scratch)
    monkeypatch.setattr(look, "backing_files", lambda *_: (BackingFile("/images/base.vmdk", "vmdk"),))
    ad = jobs.ad(scratch=scratch, VMPARAM_vm_Disk='"disk.qcow2:vda:w:qcow2"', JobVMCheckpoint="true")
    settings = Settings({"VM_MEMORY": "1024"})
    with pytest.raises(errors.JobFault, match=r"/images/base\.vmdk") as caught:
        look.look(JobSpec.parse(ad, settings), settings, user)
    assert "-O qcow2" in caught.value.hint
    free = jobs.ad(scratch=scratch, VMPARAM_vm_Disk='"disk.qcow2:vda:w:qcow2"')
    assert look.look(JobSpec.parse(free, settings), settings, user).disks[0].backing


def domain(devices: str, more: str = "") -> str:
    return f"<domain type='kvm'>{more}<devices>{devices}</devices></domain>"


DISK = "<disk type='file' device='disk'><driver name='qemu' type='{}'/>{}<target dev='vdb'/></disk>"


@pytest.mark.parametrize(
    ("xml", "said"),
    [
        (domain(DISK.format("vmdk", "")), "its disk vdb is a vmdk image"),
        (
            domain(DISK.format("qcow2", "<backingStore type='file'><format type='vdi'/></backingStore>")),
            "its disk vdb is on a vdi image",
        ),
        (domain("<disk type='dir'><driver type='fat'/><target dev='sda'/></disk>"), "its disk sda is a directory"),
        (domain("<filesystem type='mount'/>"), "can mount a directory"),
        (domain("<hostdev mode='subsystem' type='pci'/>"), "hostdev"),
        (domain("<interface type='hostdev'/>"), "hostdev"),
        (domain("<shmem name='m'><model type='ivshmem-doorbell'/></shmem>"), "ivshmem"),
        (domain("<video><model type='virtio'><acceleration accel3d='yes'/></model></video>"), "3D"),
        (domain("", "<cpu><feature name='invtsc'/></cpu>"), "invtsc"),
        (domain("<controller type='nvme' index='0'/>"), "NVMe"),
        (domain("", "<features><hyperv mode='passthrough'/></features>"), "Hyper-V"),
        (domain("", "<launchSecurity type='sev'/>"), "encrypted"),
    ],
)
def test_the_reason_for_which_a_vm_cannot_be_saved_is_known_before(xml: str, said: str) -> None:
    assert said in spec.save_blocker(xml)


@pytest.mark.parametrize(
    "xml",
    [
        domain(""),
        domain(DISK.format("qcow2", "<backingStore type='file'><format type='raw'/><backingStore/></backingStore>")),
        domain("<disk type='dir'><driver type='fat'/><target dev='sda'/><readonly/></disk>"),
        domain("<hostdev mode='subsystem' type='usb'/>"),
        domain("<shmem name='m' role='master'><model type='ivshmem-plain'/></shmem>"),
        domain("", "<cpu><feature policy='disable' name='invtsc'/></cpu>"),
        domain("", "<cpu><feature name='invtsc'/></cpu><clock><timer name='tsc' frequency='9'/></clock>"),
        domain("<interface type='user'/><tpm model='tpm-crb'/>"),
        "this is no XML",
    ],
)
def test_no_reason_is_given_for_a_vm_that_can_be_saved(xml: str) -> None:
    assert spec.save_blocker(xml) == ""


@pytest.mark.parametrize(("backing", "name"), [((), "disk.vmdk"), ((BackingFile("/b.vdi", "vdi"),), "/b.vdi")])
def test_disks_are_judged_without_a_job(backing: tuple[BackingFile, ...], name: str) -> None:
    form = "qcow2" if backing else "vmdk"
    disk = Disk("/scratch/disk.vmdk", "vda", "", True, form, True, "disk", backing=backing)
    with pytest.raises(errors.JobFault, match=name):
        spec.require_saveable_disks([disk])
