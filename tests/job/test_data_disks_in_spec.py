"""What a job may ask to be made for it, read and checked: empty disks, and files of its own on a drive."""

import errno
import os
import re
from pathlib import Path

import pytest

from tests import jobs
from tests.images.support import AS_ROOT, one, place, resolved
from tests.jobs import Files, owner
from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.errors import JobFault
from vmgahp.job.attributes import Options
from vmgahp.job.disks import Disk, DiskRequest, data_requests, drive_files

__all__ = ["place"]

MACHINE = Settings({"VM_MEMORY": "1024"})


def made_of(attribute: str) -> tuple[DiskRequest, ...]:
    return data_requests(Options(jobs.of_lines('JobVMType = "kvm"', attribute)), ())


def data_files(text: str, identity: object, directory: object = "/scratch") -> tuple[str, ...]:
    [request] = made_of(f'VMPARAM_vm_Data_Files = "{text}"')
    return drive_files(request, identity, str(directory))  # type: ignore[arg-type]


def data_disk(text: str) -> tuple[DiskRequest, ...]:
    return made_of(f'VMPARAM_vm_Data_Disk = "{text}"')


@pytest.mark.parametrize(
    ("text", "device", "size", "name", "image_format"),
    [
        ("vdb:2G", "vdb", 2 << 30, "vdb-data.qcow2", "qcow2"),
        ("SDC:512m", "sdc", 512 << 20, "sdc-data.qcow2", "qcow2"),
        ("vdb:1TiB:results.qcow2", "vdb", 1 << 40, "results.qcow2", "qcow2"),
        (" vdb : 10GB : results.raw ", "vdb", 10 << 30, "results.raw", "raw"),
        ("vdb:10G:results.IMG", "vdb", 10 << 30, "results.IMG", "raw"),
    ],
)
def test_a_data_disk(text: str, device: str, size: int, name: str, image_format: str) -> None:
    wanted = DiskRequest(text.strip(), name, device, "", True, image_format, "disk", size=size, made=True)
    assert data_disk(text) == (wanted,)


def test_several_data_disks() -> None:
    assert [disk.device for disk in data_disk("vdb:1G, vdc:2G")] == ["vdb", "vdc"]


WRONG = {
    "is not of the form": ("vdb", "vdb:1G:a.raw:w", "vdb::a.raw"),
    "is not a device": ("disk:1G", "vdb1:1G", "fda:1M"),
    "is not a size": ("vdb:1", "vdb:0G", "vdb:-1G", "vdb:99999999T"),
    "is not a name": ("vdb:1G:../a.raw", "vdb:1G:/etc/a.raw", "vdb:1G:.raw", "vdb:1G:-x.raw", "vdb:1G:a.vmdk"),
    "vdb is a disk of the job already": ("vdb:1G,vdb:2G",),
}


@pytest.mark.parametrize(("text", "problem"), [(text, problem) for problem, texts in WRONG.items() for text in texts])
def test_a_data_disk_that_makes_no_sense_is_refused(text: str, problem: str) -> None:
    with pytest.raises(JobFault, match=re.escape(problem)) as caught:
        data_disk(text)
    assert caught.value.code == errors.MISMATCHED
    assert "VMPARAM_vm_Data_Disk" in caught.value.problem


@pytest.mark.parametrize(
    ("name", "made", "problem"),
    [("disk.img", "vda:1G", "vda is a disk of the job already"), ("a.raw", "vdb:1G:a.raw", r"both a\.raw")],
)
def test_a_data_disk_beside_a_disk_of_the_same_device_or_file(name: str, made: str, problem: str) -> None:
    with pytest.raises(JobFault, match=problem):
        resolved(MACHINE, f"{name}:vda:w", Files((name,)), VMPARAM_vm_Data_Disk=f'"{made}"')


def test_a_file_of_two_disks_and_a_drive_that_no_disk_has(place: Path) -> None:
    drive_files = Files(scratch=("vda-a.qcow2",), shared=[str(place / "a")])
    with pytest.raises(JobFault, match=r"both vda-a\.qcow2"):
        resolved(one(place), "catalog:a:vda:w,vda-a.qcow2:vdb:w:qcow2", drive_files)
    attribute = {"VMPARAM_vm_Data_Files": '"in.csv, params.txt,in.csv"'}
    names = ("in.csv", "params.txt")
    _, disk = resolved(MACHINE, "x:sda:w", Files(("x", *names)), **attribute)
    assert disk == Disk("/scratch/vm_data_files.iso", "sdb", "", False, "raw", True, "cdrom", files=names)


@pytest.mark.parametrize("bad", [errno.ENOENT, errno.ELOOP, errno.EPERM, errno.EACCES])
def test_a_file_that_cannot_be_opened_is_named(bad: int) -> None:
    with pytest.raises(JobFault, match=re.escape(os.strerror(bad))) as caught:
        data_files("in.csv", Files(bad={"in.csv": bad}))
    assert '"in.csv"' in caught.value.problem.replace("'", '"')


def test_the_files_of_a_directory_and_no_links(scratch: Path) -> None:
    (scratch / "params/deep").mkdir(parents=True)
    for name in ("params/b", "params/deep/a"):
        (scratch / name).write_text("1")
    (scratch / "params/link").symlink_to("/etc/hostname")
    (scratch / "params/up").symlink_to("/")
    (scratch / "elsewhere").symlink_to("/etc")
    (scratch / "empty").mkdir()
    assert data_files("params/", owner(scratch), scratch) == ("params/b", "params/deep/a")
    for name in ("elsewhere", "elsewhere/hostname", "params/link", "empty", "/etc/hostname", "..", "params/../.."):
        with pytest.raises(JobFault, match="VMPARAM_vm_Data_Files"):
            data_files(name, owner(scratch), scratch)


@AS_ROOT
def test_a_directory_is_looked_at_as_the_jobs_user(scratch: Path) -> None:
    closed = scratch / "open" / "closed"
    closed.mkdir(parents=True)
    (closed / "secret").write_text("1")
    closed.chmod(0o700)
    with pytest.raises(JobFault, match="Permission denied"):
        data_files("open", owner(scratch), scratch)


def test_too_many_files(scratch: Path) -> None:
    (scratch / "many").mkdir()
    for number in range(501):
        (scratch / "many" / str(number)).touch()
    with pytest.raises(JobFault, match="501 files") as caught:
        data_files("many", owner(scratch), scratch)
    assert "archive" in caught.value.hint
