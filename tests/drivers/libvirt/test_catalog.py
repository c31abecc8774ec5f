"""Images of the administrator's catalog and disks that are made for a job, with real guests."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import libvirt
import pytest

from tests.commands.doctor.support import Ad, Condor, as_root, pool, snapshot
from tests.drivers.libvirt.support import CHECKPOINT, WANTS, Job, done, moved, refused, run_to_its_end, running, until
from tests.jobs import owner
from tests.lab.guest import SECTOR, copying_sector, counts, make_guest, read_count
from tests.peer import daemon, environment
from vmgahp.cli import PROBE
from vmgahp.commands import doctor
from vmgahp.findings import OFF, OK
from vmgahp.images import iso

pytestmark = pytest.mark.libvirt

__all__ = ["pool"]

LAYER = "hda-counter.qcow2"
ON_IMAGE = 'VMPARAM_vm_Disk = "catalog:counter:hda:w"'
INVALID = "VMGAHP_ERR_JOBCLASSAD_KVM_INVALID_DISK_PARAM"


class Images:
    """A catalog with one image, which counts to two."""

    def __init__(self, directory: Path, file: str = "base.raw") -> None:
        directory.mkdir()
        directory.chmod(0o755)
        self.directory = directory
        self.base = make_guest(directory / file, 2)
        self.path = directory / "catalog.toml"
        self.say(f'[counter]\npath = "{file}"\nformat = "raw"\n')

    def say(self, text: str) -> None:
        self.path.write_text(text)
        self.path.chmod(0o644)

    @property
    def settings(self) -> dict[str, object]:
        return {"VM_CATALOG": self.path}


@pytest.fixture
def images(scratch: Path) -> Images:
    return Images(scratch.parent / "images")


@pytest.fixture
def job(job: Job) -> Job:
    job.disk.unlink()
    return job


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if not path.name.startswith("vm_metrics")}


def test_a_guest_boots_from_an_image_and_leaves_it_as_it_was(job: Job, images: Images) -> None:
    """Libvirt's own user reads it, and does not get it."""
    before = images.base.read_bytes()
    with running(job, ON_IMAGE, VM_RUN_AS_JOB_USER=False, **images.settings) as peer:
        empty = (job.scratch / LAYER).stat().st_blocks
        assert images.base.stat().st_uid == os.getuid()
        run_to_its_end(peer, job)
    assert "vmgahp guest done" in job.console()
    assert images.base.read_bytes() == before
    assert images.base.stat().st_uid == os.getuid()
    assert read_count(job.scratch / LAYER) == 2
    assert (job.scratch / LAYER).stat().st_blocks > empty
    record = json.loads((job.scratch / "vm_catalog.json").read_text())
    assert [(layer["file"], layer["image"]) for layer in record["layers"]] == [(LAYER, "counter")]
    assert {path.stat().st_uid for path in job.scratch.iterdir()} == {job.scratch.stat().st_uid}


def test_two_jobs_run_on_one_image(job: Job, elsewhere: Path, connection: "libvirt.virConnect", images: Images) -> None:
    make_guest(images.base, seconds=None)
    other = Job(elsewhere, connection)
    other.disk.unlink()
    with running(job, ON_IMAGE, **images.settings) as peer, running(other, ON_IMAGE, **images.settings) as second:
        for each in (job, other):
            until(lambda each=each: "2\n" in each.console(), "both count")
        assert read_count(images.base) == 0
        done(peer, "STOP")
        assert second.run("STATUS", 1)[1] == "STATUS=Running"
        done(second, "STOP")
    assert read_count(other.scratch / LAYER) >= 2


def test_a_job_that_cannot_start_leaves_no_disk_that_was_made_for_it(job: Job, images: Images) -> None:
    before = names(job.scratch)
    disks = 'VMPARAM_vm_Disk = "catalog:counter:hda:w,catalog:counter:sda1:w"'
    refused(job, INVALID, disks, 'VMPARAM_vm_Data_Disk = "vdb:1M"', **images.settings)
    assert names(job.scratch) - {"vm_error.txt", "vm_console.log"} == before


def test_an_image_whose_layer_is_gone_holds_the_job_and_is_not_offered(job: Job, images: Images) -> None:
    top = images.directory / "top.qcow2"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", images.base, "-F", "raw", top], check=True)
    images.say(images.path.read_text() + '[top]\npath = "top.qcow2"\nformat = "qcow2"\n')
    on_top = 'VMPARAM_vm_Disk = "catalog:top:hda:w"'
    with running(job, on_top, **images.settings) as peer:
        run_to_its_end(peer, job)
    assert read_count(job.scratch / "hda-top.qcow2") == 2
    assert 'VM_Images = "counter,top"' in probed(job, **images.settings)
    images.base.rename(images.directory / "gone")
    make_guest(images.directory / "counter.raw")
    images.say(images.path.read_text().replace("base.raw", "counter.raw"))
    assert "cannot be used on this machine" in refused(job, INVALID, on_top, **images.settings)
    said = probed(job, **images.settings)
    assert 'VM_Images = "counter"\n' in said
    assert "not offered: image top" in said


def test_a_checkpoint_goes_on_where_the_same_image_lies_elsewhere(job: Job, images: Images, elsewhere: Path) -> None:
    """And the drive with the job's files is made anew, byte for byte; the data disk is the one that came back."""
    make_guest(images.base, seconds=5)
    job.put("in.csv", "a,b\n")
    more = (WANTS, ON_IMAGE, 'VMPARAM_vm_Data_Disk = "vdb:64M"', 'VMPARAM_vm_Data_Files = "in.csv"')
    with running(job, *more, **images.settings) as peer:
        until(lambda: "2\n" in job.console(), "the guest counts to two")
        done(peer, "CHECKPOINT", "STOP")
    assert names(job.scratch) >= {*CHECKPOINT, LAYER, "vm_catalog.json", "vdb-data.qcow2"}
    assert "vm_data_files.iso" not in names(job.scratch)
    # The catalog of another machine: the same image, in another place, written at another time.
    copies = Images(elsewhere.parent / "copies", file="elsewhere.raw")
    shutil.copyfile(images.base, copies.base)
    images.base.unlink()
    moved(job, elsewhere)
    with running(job, *more, **copies.settings) as peer:
        run_to_its_end(peer, job)
    assert job.console().count("vmgahp guest up") == 1, "it was not booted again"
    assert counts(job.console()) == [1, 2, 3, 4, 5]
    assert read_count(copies.base) == 0


def test_a_job_that_comes_back_has_its_layer_on_the_image_whatever_its_header_says(job: Job, images: Images) -> None:
    make_guest(images.base, seconds=1)
    layer = job.scratch / LAYER
    inodes = set()
    for _ in range(2):
        with running(job, ON_IMAGE, **images.settings) as peer:
            inodes.add(layer.stat().st_ino)
            run_to_its_end(peer, job)
        subprocess.run(["qemu-img", "rebase", "-u", "-f", "qcow2", "-b", "/etc/shadow", "-F", "raw", layer], check=True)
    assert len(inodes) == 1
    assert job.console().count("vmgahp guest done") == 2


def probed(job: Job, **settings: object) -> str:
    ended = daemon(environment("kvm", job.scratch, VM_ALLOW_EMULATION=True, **settings), PROBE, "vmtype", "kvm")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


def test_a_broken_catalog_takes_no_machine_offline(job: Job, images: Images) -> None:
    images.path.write_text("[counter\n")
    said = probed(job, **images.settings)
    assert "VM_Images" not in said.replace("VM_CATALOG", "")
    assert "not offered: images" in said
    assert "cannot be used" in refused(job, INVALID, ON_IMAGE, **images.settings)


def test_a_read_only_disk_is_the_image_itself(job: Job, images: Images, elsewhere: Path) -> None:
    """And a copying guest proves that it reads it: it prints sector 0 of it, which has its own text at the end."""
    text = images.directory / "text.raw"
    text.write_bytes(b"from the catalog\r\n\0".ljust(1 << 20, b"\0"))
    job.put("boot.raw", copying_sector(0x81, 0, 0x80).ljust(1 << 20, b"\0"))
    images.say('[text]\npath = "text.raw"\nformat = "raw"\n')
    with running(job, 'VMPARAM_vm_Disk = "boot.raw:vda:w:raw,catalog:text:vdb:r"', **images.settings) as peer:
        run_to_its_end(peer, job)
    assert "from the catalog" in job.console()
    assert not {name for name in names(job.scratch) if "catalog" in name or "text" in name}


def image_of(files: dict[str, bytes], directory: Path) -> bytes:
    """The image with the job's files as the daemon makes it."""
    who = owner(directory)
    iso.write(str(directory), "same.iso", "JOBDATA", files, who, most_bytes=1 << 20)
    made = (directory / "same.iso").read_bytes()
    (directory / "same.iso").unlink()
    return made


@pytest.mark.parametrize(("boots_from", "drive", "sector"), [("vda", 0x82, 512), ("hda", 0xE0, 2048)])
def test_a_guest_reads_the_jobs_files_and_writes_to_its_data_disk(job, images, elsewhere, boots_from, drive, sector):
    """The files are on a virtio disk behind a virtio disk, and on a CD-ROM elsewhere; each drive is used by number."""
    files = {"in.csv": b"one of the job's files\r\n\0", "params/deep/a": b"1", "params/b": b"2"}
    for name, content in files.items():
        path = job.scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        for made in (path, *(parent for parent in path.parents if job.scratch in parent.parents)):
            job.own(made)
    place = image_of(files, elsewhere).index(files["in.csv"])
    assert place % 2048 == 0
    images.base.write_bytes(copying_sector(drive, place // sector, 0x81).ljust(1 << 20, b"\0"))
    more = ('VMPARAM_vm_Data_Disk = "vdb:64M:results.raw"', 'VMPARAM_vm_Data_Files = "in.csv, params"')
    with running(job, f'VMPARAM_vm_Disk = "catalog:counter:{boots_from}:w"', *more, **images.settings) as peer:
        run_to_its_end(peer, job)
    assert "one of the job's files" in job.console(), job.console()
    assert "vmgahp guest done" in job.console()
    home = job.scratch / "results.raw"
    assert home.stat().st_size == 64 << 20
    assert home.stat().st_blocks * 512 < 1 << 20
    with home.open("rb") as file:
        assert file.read(2 * SECTOR)[SECTOR:].startswith(files["in.csv"])
    assert not (job.scratch / "vm_data_files.iso").exists(), "the files go home themselves"


@as_root
def test_the_doctor_shows_images_and_describes_a_job_without_disks(pool: Condor, images: Images, scratch: Path) -> None:
    ad = Ad(scratch)
    (ad.directory / "in.csv").write_text("a,b")
    path = ad.write(
        'VMPARAM_vm_Disk = "catalog:counter:vda:w"',
        'VMPARAM_vm_Data_Disk = "vdb:1G"',
        'VMPARAM_vm_Data_Files = "in.csv"',
    )
    images.say(images.path.read_text() + 'description = "It counts"\n[gone]\npath = "gone"\nformat = "raw"\n')
    before = snapshot(ad.directory)
    examined = doctor.examine(pool.environ(VM_TYPE="qemu", **images.settings), job=path)
    shown = {finding.check: finding for finding in dict(examined.sections)["The catalog of images"]}
    assert (shown["images"].seen, shown["image gone"].verdict) == ("counter", OFF)
    assert (shown["image counter"].verdict, shown["image counter"].seen) == (OK, "It counts")
    assert examined.trial is not None
    for name in (LAYER.replace("hda", "vda"), "base.raw", "vdb-data.qcow2", "vm_data_files.iso"):
        assert name in examined.trial.description, (examined.trial.description, examined.trial.findings)
    assert snapshot(ad.directory) == before
