"""The first disk of a job gets the size that the job asks for."""

import os
from pathlib import Path

import pytest

from tests.images.support import offering, place, write
from tests.job import support
from tests.jobs import own, owner
from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.drivers.libvirt.start import disks
from vmgahp.drivers.libvirt.start.disks import Provision
from vmgahp.errors import JobFault
from vmgahp.images import qemu_img

__all__ = ["place"]

MACHINE = Settings({"VM_MEMORY": "1024"})
MIB = 1 << 20


class Job:
    """A job in a scratch directory that wants a disk of some size."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.user = owner(path)

    def image(self, name: str, image_format: str, size: int = 4 * MIB) -> None:
        qemu_img.create_empty(str(self.path / name), image_format, size)
        own(self.path, self.path / name)

    def make(self, size: str, disk: str, settings: Settings = MACHINE, **changes: str) -> Provision:
        ad = {"VM_WORKING_DIR": f'"{self.path}"', "VMPARAM_vm_Disk": f'"{disk}"', "VMPARAM_vm_Disk_Size": f'"{size}"'}
        made = Provision(str(self.path), settings, self.user)
        made.make(support.found(settings, self.user, **(ad | changes)))
        return made

    def size(self, name: str, image_format: str) -> int:
        return int(qemu_img.info(str(self.path / name), image_format)["virtual-size"])


@pytest.fixture
def job(scratch: Path) -> Job:
    return Job(scratch)


@pytest.mark.qemu
@pytest.mark.parametrize("image_format", ["raw", "qcow2"])
def test_a_transferred_image_grows_once(job: Job, image_format: str) -> None:
    job.image("disk", image_format)
    for _ in range(2):
        job.make("20M", f"disk:vda:w:{image_format}")
        assert job.size("disk", image_format) == 20 * MIB


@pytest.mark.qemu
def test_an_overlay_of_the_catalog_grows_and_its_image_does_not(job: Job, place: Path) -> None:
    base = write(place / "a", b"content" + bytes(MIB - 7))
    settings = offering(place, '[a]\npath = "a"\nformat = "raw"\n')
    made = job.make("1G", "catalog:a:vda:w", settings)
    assert job.size("vda-a.qcow2", "qcow2") == 1 << 30
    assert base.stat().st_size == MIB
    job.make("1G", "catalog:a:vda:w", settings)
    made.undo()
    assert os.listdir(job.path) == []


@pytest.mark.qemu
@pytest.mark.parametrize(
    ("size", "problem"),
    [("2M", "has 4 MiB already, and none is made smaller"), ("900T", "MiB more, and [0-9]+ MiB are free for this job")],
)
def test_a_size_that_cannot_be_had(job: Job, size: str, problem: str) -> None:
    job.image("disk", "qcow2")
    before = (job.path / "disk").read_bytes()
    with pytest.raises(JobFault, match=f"VMPARAM_vm_Disk_Size.*{problem}"):
        job.make(size, "disk:vda:w:qcow2")
    assert (job.path / "disk").read_bytes() == before


@pytest.mark.qemu
def test_an_image_that_is_none(job: Job) -> None:
    (job.path / "disk").write_bytes(b"QFI\xfb" + bytes(1000))
    own(job.path, job.path / "disk")
    with pytest.raises(JobFault, match="cannot be enlarged"):
        job.make("1G", "disk:vda:w:qcow2")


@pytest.mark.parametrize(
    ("size", "disk", "problem"),
    [
        ("20", "disk.img:vda:w", "is not a size"),
        ("", "disk.img:vda:w", "is not a size"),
        ("1G", "disk.img:vda:r", "vda is no disk that the guest has to itself"),
        ("1G", "disk.img:vda:ws", "vda is no disk that the guest has to itself"),
        ("1G", "disk.img:fda:w", "fda is no disk"),
        ("1G", "disk.img:vda:w:vmdk", "format vmdk is not enlarged"),
    ],
)
def test_what_makes_no_sense_is_refused(size: str, disk: str, problem: str) -> None:
    attributes = {"VMPARAM_vm_Disk": f'"{disk}"', "VMPARAM_vm_Disk_Size": f'"{size}"'}
    support.refusal(errors.MISMATCHED, "VMPARAM_vm_Disk_Size", problem, **attributes)


def test_an_image_that_is_not_the_jobs_own_copy(job: Job, tmp_path: Path) -> None:
    shared = write(job.path.parent / "shared.img", b"x", 0o666)
    with pytest.raises(JobFault, match="is not the job's own copy"):
        job.make("1G", f"{shared}:vda:w")


@pytest.mark.qemu
def test_a_hypervisor_that_makes_no_disks(job: Job) -> None:
    job.image("disk", "raw")
    spec = support.found(
        MACHINE, job.user, VM_WORKING_DIR=f'"{job.path}"', VMPARAM_vm_Disk='"disk:vda:w"', VMPARAM_vm_Disk_Size='"1G"'
    )
    with pytest.raises(JobFault, match="VMPARAM_vm_Disk_Size"):
        disks.require_possible(spec, "xen", MACHINE)
