"""QEMU reads what the job's images are while nobody can write to them, and opens no file that they name."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.drivers.libvirt.support import WANTS, Job, at, holders, overlay, started
from vmgahp import errors
from vmgahp.drivers.libvirt.start import describe
from vmgahp.images import leases
from vmgahp.images.catalog import Image
from vmgahp.job.disks import Disk
from vmgahp.lifecycle import SUSPENDED

pytestmark = [pytest.mark.libvirt, pytest.mark.skipif(os.getuid() != 0, reason="needs root")]

MIB = 1 << 20
VMDK = '# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\ncreateType="monolithicFlat"\nRW 2048 FLAT "%s" 0\n'


class Trap(NamedTuple):
    """A disk of the job's, and what a process of the job's user writes over its beginning."""

    disk: Path
    good: bytes
    bad: bytes
    named: Path
    """The file that QEMU opens then."""

    def spring(self, header: bytes) -> None:
        with self.disk.open("r+b") as file:
            file.write(header)


@pytest.fixture
def named(scratch: Path) -> Path:
    """A file that QEMU's user may open, and that belongs to no disk of the job's."""
    path = scratch.parent / "named"
    path.write_bytes(bytes(MIB))
    path.chmod(0o666)
    return path


def trap(job: Job, named: Path, image_format: str) -> Trap:
    disk, spare = job.scratch / f"disk.{image_format}", job.scratch.parent / "spare"
    create = ["qemu-img", "create", "-q", "-f", image_format]
    subprocess.run([*create, disk, "1M"], check=True)
    bad = (VMDK % named).encode().ljust(512, b"\0")
    if image_format == "qcow2":
        subprocess.run([*create, "-o", f"data_file={named},data_file_raw=on", spare, "1M"], check=True)
        bad = spare.read_bytes()[:512]
    job.own(disk)
    return Trap(disk, disk.read_bytes()[:512], bad, named)


def disks(path: Path) -> str:
    return f'VMPARAM_vm_Disk = "{path}:vda:w:{path.suffix[1:]}"'


@pytest.mark.parametrize("as_job_user", [False, True], ids=["libvirt's user", "the job's user"])
@pytest.mark.parametrize("image_format", ["qcow2", "vmdk"])
def test_a_header_that_was_changed_after_the_look(job: Job, named: Path, image_format: str, as_job_user: bool) -> None:
    made, seen = trap(job, named, image_format), list[str]()
    with (
        at("prepare.done", lambda: made.spring(made.bad)),
        pytest.raises(errors.JobFault, match="keeps its data in another file") as caught,
        started(job, [], disks(made.disk), VM_RUN_AS_JOB_USER=as_job_user),
    ):
        seen += holders(named)
    assert caught.value.code == errors.INVALID_DISK_PARAM
    assert not seen
    assert job.domain() is None


def test_a_header_of_a_backing_file_counts(job: Job, named: Path) -> None:
    made = trap(job, named, "qcow2")
    top = overlay(job, "top.qcow2", made.disk, "qcow2")
    with (
        at("prepare.done", lambda: made.spring(made.bad)),
        pytest.raises(errors.JobFault, match="keeps its data in another file"),
        started(job, [], disks(top)),
    ):
        pytest.fail(f"{holders(named)} have it open")


def test_a_header_that_was_changed_while_the_vm_is_suspended(job: Job, named: Path) -> None:
    made = trap(job, named, "qcow2")
    with started(job, [], disks(made.disk)) as machine:
        machine.suspend()
        made.spring(made.bad)
        with pytest.raises(errors.JobFault, match="keeps its data in another file"):
            machine.resume(SUSPENDED)
        assert not holders(named)
        assert job.domain() is None
        made.spring(made.good)
        machine.resume(SUSPENDED)
        assert machine.status().state == "Running"
        assert not holders(named)


def test_a_process_that_has_the_disk_open_holds_the_job(job: Job, named: Path) -> None:
    made = trap(job, named, "qcow2")
    with (
        made.disk.open("r+b"),
        pytest.raises(errors.JobFault, match="is open in another process"),
        started(job, [], disks(made.disk)),
    ):
        pytest.fail("it was started")


@pytest.mark.parametrize("point", ["launch.made", "launch.runs"])
def test_nobody_writes_before_the_guest_runs_and_everybody_may_after(job: Job, named: Path, point: str) -> None:
    made, seen = trap(job, named, "qcow2"), list[bool]()

    def try_it() -> None:
        code = "import os, sys; os.open(sys.argv[1], os.O_RDWR | os.O_NONBLOCK)"
        words = [sys.executable, "-ISc", code, made.disk]
        seen.append(subprocess.run(words, stderr=subprocess.DEVNULL).returncode == 0)

    with at(point, try_it), started(job, [], disks(made.disk)) as machine:
        assert machine.status().state == "Running"
    assert seen == [point == "launch.runs"]


def test_a_vm_with_an_overlay_and_its_checkpoint_runs_as_ever(job: Job, named: Path) -> None:
    top = overlay(job, "top.qcow2", trap(job, named, "qcow2").disk, "qcow2")
    with started(job, [], WANTS, disks(top)) as machine:
        machine.checkpoint()
    with started(job, [], WANTS, disks(top)) as machine:
        assert machine.status().state == "Running"


def test_without_leases_qemu_is_the_jobs_user(job: Job, named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trap(job, named, "qcow2")
    monkeypatch.setattr(leases, "LOCAL", frozenset())
    with started(job, [], disks(made.disk)) as machine:
        assert os.stat(f"/proc/{machine.pid()}").st_uid == os.stat(job.scratch).st_uid


def test_an_overlay_on_an_image_of_the_catalog_is_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The image itself is root's, and needs not be held."""
    monkeypatch.setattr(leases, "LOCAL", frozenset())
    image = Image("debian", "/srv/debian.qcow2", "qcow2")
    overlay = Disk("/scratch/vda.qcow2", "vda", "", True, "qcow2", True, "disk", image=image)
    assert not describe._can_be_held(overlay)
    assert describe._can_be_held(overlay._replace(path=image.path, writable=False))
