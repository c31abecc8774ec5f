"""QEMU gets the job's disks as open files: whatever becomes of their names, nothing else is opened or given away."""

import os
import stat
import string
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from fcntl import F_GETFL, fcntl
from pathlib import Path

import pytest

from tests import jobs
from tests.domain.support import SCRIPTED, spec
from tests.drivers.libvirt import support
from tests.drivers.libvirt.support import WANTS, Job, at, done, driving, holders, refused, running, started
from tests.lab import odd_files
from tests.lab.programs import a_program
from vmgahp import errors
from vmgahp.drivers.libvirt.start.disks import DiskFiles

pytestmark = [pytest.mark.libvirt, pytest.mark.skipif(os.getuid() != 0, reason="needs root")]

both = pytest.mark.parametrize("as_job_user", [False, True], ids=["libvirt's user", "the job's user"])

BAD_DISK = errors.INVALID_DISK_PARAM


@pytest.fixture
def secret(scratch: Path) -> Iterator[Path]:
    """A file of root's and of the group of libvirt's directory, which the job's user may not open, nor change."""
    path = scratch.parent / "secret"
    path.write_bytes(bytes(1 << 20))
    os.chown(path, 0, os.stat("/var/lib/libvirt/qemu").st_gid)
    path.chmod(0o660)
    before = path.stat()
    yield path
    after = path.stat()
    assert (after.st_uid, after.st_gid, after.st_mode) == (before.st_uid, before.st_gid, before.st_mode)
    assert (after.st_mtime_ns, path.read_bytes()) == (before.st_mtime_ns, bytes(1 << 20))
    assert holders(path) == []


def replace_by_link(image: Path, target: Path) -> None:
    """What a process of the job's user does to one of its files, the old one staying under another name."""
    image.rename(image.with_suffix(".real"))
    image.symlink_to(target)


@both
def test_an_image_replaced_after_it_was_opened(job: Job, secret: Path, as_job_user: bool) -> None:
    with (
        at("prepare.done", lambda: replace_by_link(job.disk, secret)),
        started(job, [], VM_RUN_AS_JOB_USER=as_job_user) as machine,
    ):
        assert machine.status().state == "Running"
        assert holders(secret) == []


def every_kind(job: Job) -> list[str]:
    """The ad of a job with an overlay, its backing file, a CD-ROM, a disk that is made, and cloud-init's drive."""
    (job.scratch / "cd.iso").write_bytes(bytes(1 << 20))
    (job.scratch / "base.img").write_bytes(bytes(1 << 20))
    (job.scratch / "user-data").write_text("#cloud-config\n")
    support.overlay(job, "over.qcow2", "base.img")
    job.own()
    return [
        'VMPARAM_vm_Disk = "guest.img:hda:w:raw,over.qcow2:vdb:w:qcow2,cd.iso:hdc:r:iso"',
        'VMPARAM_vm_Data_Disk = "vdc:1M"',
        'VMPARAM_vm_User_Data = "user-data"',
    ]


FILES = ("guest.img", "over.qcow2", "base.img", "cd.iso", "vdc-data.qcow2", "vm_cidata.iso")


@both
def test_every_file_replaced_while_the_vm_is_suspended(job: Job, secret: Path, as_job_user: bool) -> None:
    with running(job, *every_kind(job), VM_RUN_AS_JOB_USER=as_job_user) as peer:
        sources = job.live().findall("devices/disk//source[@file]")
        assert sorted(Path(source.get("file", "")).name for source in sources) == sorted(FILES)
        assert {source.find("seclabel[@model='dac']").get("relabel") for source in sources} == {"no"}
        done(peer, "SUSPEND")
        for file in FILES:
            replace_by_link(job.scratch / file, secret)
        done(peer, "RESUME")
        assert holders(secret) == []
        for file in FILES:
            assert len(holders((job.scratch / file).with_suffix(".real"))) > 1
        done(peer, "SUSPEND", "STOP")


def held_for(job: Job, replace: Callable[[], None], *more: str, **settings: object) -> str:
    """The code of a START that is refused for what was replaced before it was opened."""
    with (
        driving(job, [], *more, **settings) as (driver, ad),
        at("clear.done", replace),
        pytest.raises(errors.JobFault) as caught,
    ):
        driver.start(ad)
    assert job.domain() is None
    return caught.value.code


@both
@pytest.mark.parametrize("file", FILES[:4])
def test_a_file_replaced_before_it_is_opened(job: Job, secret: Path, as_job_user: bool, file: str) -> None:
    ad = every_kind(job)
    held_for(job, lambda: replace_by_link(job.scratch / file, secret), *ad, VM_RUN_AS_JOB_USER=as_job_user)


NO_FILES: dict[str, Callable[[Path], object]] = {
    **{kind: odd_files.KINDS[kind] for kind in ("a FIFO", "a directory", "a socket")},
    "a device": lambda path: os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5)),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to memory": lambda path: path.symlink_to("/proc/self/mem"),
    "nothing": lambda path: None,
}


@both
@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_when_it_is_opened(job: Job, kind: str, as_job_user: bool) -> None:
    def replace() -> None:
        job.disk.unlink()
        NO_FILES[kind](job.disk)

    assert held_for(job, replace, VM_RUN_AS_JOB_USER=as_job_user) == BAD_DISK


@both
def test_a_fifo_in_place_of_the_disk_of_a_vm_that_runs(job: Job, as_job_user: bool) -> None:
    with running(job, VM_RUN_AS_JOB_USER=as_job_user, VM_METRICS_INTERVAL=1) as peer:
        job.disk.unlink()
        os.mkfifo(job.disk, 0o666)
        assert peer.run("STATUS", 1)[1] == "STATUS=Running"
        done(peer, "SOFT_SUSPEND", "RESUME", "SUSPEND", "RESUME", "STOP")


@both
def test_a_restart_whose_disk_was_replaced(job: Job, elsewhere: Path, secret: Path, as_job_user: bool) -> None:
    support.vacate(job, VM_RUN_AS_JOB_USER=as_job_user)
    support.moved(job, elsewhere)
    held_for(job, lambda: replace_by_link(job.disk, secret), WANTS, VM_RUN_AS_JOB_USER=as_job_user)


@both
def test_a_restart_whose_disk_is_open_already(job: Job, elsewhere: Path, secret: Path, as_job_user: bool) -> None:
    support.vacate(job, VM_RUN_AS_JOB_USER=as_job_user)
    support.moved(job, elsewhere)
    log: list[str] = []
    with (
        at("prepare.done", lambda: replace_by_link(job.disk, secret)),
        started(job, log, WANTS, VM_RUN_AS_JOB_USER=as_job_user),
    ):
        assert any("continues from its saved memory" in line for line in log), log
        assert holders(secret) == []


def test_more_files_than_a_vm_can_have(job: Job) -> None:
    job.put("data.img", bytes(1 << 20))
    options = ["-f", "qcow2", "-b", "data.img", "-F", "raw"]
    subprocess.run(["qemu-img", "create", "-q", *options, job.scratch / "over.qcow2"], check=True)
    disks = ",".join(
        ["guest.img:hda:w:raw", *(f"over.qcow2:vd{a}{b}:r:qcow2" for a in "ab" for b in string.ascii_lowercase)]
    )
    assert "64 files, with all backing files" in refused(job, BAD_DISK, f'VMPARAM_vm_Disk = "{disks}"')


def scripted(job: Job, source: str, kind: str = "file") -> str:
    """A program for LIBVIRT_XML_SCRIPT that believes what the job's ad says of its disk."""
    devices = (
        f"<disk type='{kind}'><driver name='qemu' type='raw'/><source {source}/><target dev='hda' bus='ide'/></disk>"
    )
    xml = SCRIPTED.format(memory=64, vcpus=1, devices=devices).replace("<name>x<", f"<name>{job.name}<")
    return str(a_program(job.scratch.parent / "script", f"cat <<'END'\n{xml}\nEND"))


@pytest.mark.parametrize("form", ["{}", "../{}", "/{}"])
def test_a_script_that_names_what_the_ad_names(job: Job, secret: Path, form: str) -> None:
    """The image is that of the same name in the scratch directory, and the file of root's is none of it."""
    job.disk.rename(job.scratch / secret.name)
    named = form.format(secret if form != "../{}" else secret.name)
    path = named if named.startswith("/") else f"{job.scratch}/{named}"
    with running(
        job, f'VMPARAM_vm_Disk = "{named}:hda:w:raw"', LIBVIRT_XML_SCRIPT=scripted(job, f"file='{path}'")
    ) as peer:
        assert holders(secret) == []
        assert job.live().find("devices/disk/source").get("file") == str(job.scratch / secret.name)
        done(peer, "SUSPEND", "RESUME", "STOP")


@pytest.mark.parametrize("source", ["dev='/dev/zero'", "dev='{scratch}/guest.img'"])
def test_a_script_that_names_a_device_of_the_ads(job: Job, source: str) -> None:
    job.disk.rename(job.scratch / "zero")
    script = scripted(job, source.format(scratch=job.scratch), "block")
    refused(job, BAD_DISK, 'VMPARAM_vm_Disk = "/dev/zero:hda:w:raw"', LIBVIRT_XML_SCRIPT=script)


@pytest.mark.parametrize("source", ["file='/dev/null'", "file='/dev/./null'", "dev='/dev/null'"])
def test_what_stands_for_no_disk_is_never_libvirts_to_open(job: Job, source: str) -> None:
    """It would be given to QEMU's user, and every program of the machine needs it."""
    xml = f"<domain><devices><disk><source {source}/></disk></devices></domain>"
    with pytest.raises(errors.JobFault, match="/dev/null is no image"):
        DiskFiles(spec(), jobs.owner(job.scratch)).open(xml)


@pytest.mark.parametrize(("cache", "direct"), [("none", True), ("directsync", True), ("writeback", False)])
def test_a_file_is_opened_as_qemu_would(job: Job, cache: str, direct: bool) -> None:
    """QEMU 9.1 and later take no other: "Failed to find file descriptor with matching flags"."""
    disk = f"<disk><driver type='raw' cache='{cache}'/><source file='{job.disk}'/></disk>"
    with closing(DiskFiles(spec(working_dir=str(job.scratch)), jobs.owner(job.scratch))) as files:
        files.open(f"<domain><devices>{disk}</devices></domain>")
        [descriptor] = files.files().values()
        assert bool(fcntl(descriptor, F_GETFL) & os.O_DIRECT) == direct


@pytest.mark.parametrize("through", ["link", "directory/secret"])
def test_a_script_that_names_a_link_of_the_jobs(job: Job, secret: Path, through: str) -> None:
    """What the guest says on the port would be written to what the link leads to."""
    (job.scratch / "link").symlink_to(secret)
    (job.scratch / "directory").symlink_to(secret.parent)
    script = Path(scripted(job, f"file='{job.disk}'"))
    port = "<serial type='file'><source path='{}'/></serial></devices>"
    text = script.read_text()
    script.write_text(text.replace("</devices>", port.format(job.scratch / through)))
    assert "is a link" in refused(job, errors.MISMATCHED, LIBVIRT_XML_SCRIPT=script)
    script.write_text(text.replace("</devices>", port.format(job.scratch / "new.log")))
    with running(job, LIBVIRT_XML_SCRIPT=script):
        assert (job.scratch / "new.log").exists()


def test_a_script_that_leaves_backing_files_to_libvirt(job: Job, secret: Path) -> None:
    """Whom the header of the image names libvirt would open as root, and give away."""
    base = job.scratch / "base.img"
    job.disk.rename(base)
    support.overlay(job, job.disk.name, base.name)
    script = scripted(job, f"file='{job.disk}'").replace("raw", "qcow2")
    Path(script).write_text(Path(script).read_text().replace("type='raw'", "type='qcow2'"))
    disk = 'VMPARAM_vm_Disk = "guest.img:hda:w:qcow2"'
    with at("prepare.done", lambda: replace_by_link(base, secret)), started(job, [], disk, LIBVIRT_XML_SCRIPT=script):
        found = [source.get("file") for source in job.live().findall("devices/disk//source")]
        assert found == [str(job.disk), str(base)]
        assert holders(secret) == []
