"""QEMU gets the job's disks as open files: whatever becomes of their names, nothing else is opened or given away."""

import os
import signal
import socket
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from fcntl import F_GETFL, fcntl
from pathlib import Path

import pytest

from tests import jobs
from tests.domain.support import SCRIPTED, spec
from tests.drivers.libvirt import support
from tests.drivers.libvirt.support import WANTS, Job, at, done, driver_for, holders, moved, refused, running, vacate
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
    driver, ad = driver_for(job, [], VM_RUN_AS_JOB_USER=as_job_user)
    with at("prepare.done", lambda: replace_by_link(job.disk, secret)):
        machine = driver.start(ad)
    try:
        assert machine.status().state == "Running"
        assert holders(secret) == []
    finally:
        machine.destroy()
        driver.close()


@both
def test_names_that_are_swapped_all_the_time(job: Job, secret: Path, as_job_user: bool) -> None:
    """A process of the job's user renames as fast as it can, and each START meets it somewhere else."""
    link, over = job.scratch / "link", threading.Event()
    link.symlink_to(secret)

    def swap() -> None:
        while not over.is_set():
            for old, new in (("guest.img", "own"), ("link", "guest.img"), ("guest.img", "link"), ("own", "guest.img")):
                os.rename(job.scratch / old, job.scratch / new)

    thread = threading.Thread(target=swap)
    with support.greeted(job, VM_RUN_AS_JOB_USER=as_job_user) as peer:
        thread.start()
        try:
            for _ in range(12):
                peer.send_ad(*job.ad())
                result = peer.run("START", "kvm")
                assert result[0] == "0" or result[1] in errors.HOLD_CODES, f"{result}\n{peer.end_by(signal.SIGTERM)}"
                assert holders(secret) == []
                for operation in ("SUSPEND", "RESUME", "STOP") if result[0] == "0" else ():
                    answer = peer.run(operation, result[1])
                    assert answer == ["0", "NULL"], f"{operation}: {answer}\n{peer.end_by(signal.SIGTERM)}"
        finally:
            over.set()
            thread.join()


def every_kind(job: Job) -> list[str]:
    """The ad of a job with an overlay, its backing file, a CD-ROM, a disk that is made, and cloud-init's drive."""
    (job.scratch / "cd.iso").write_bytes(bytes(1 << 20))
    (job.scratch / "base.img").write_bytes(bytes(1 << 20))
    (job.scratch / "user-data").write_text("#cloud-config\n")
    command = ["qemu-img", "create", "-q", "-f", "qcow2", "-b", "base.img", "-F", "raw", "over.qcow2"]
    subprocess.run(command, cwd=job.scratch, check=True)
    for path in job.scratch.iterdir():
        job.own(path)
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


@both
@pytest.mark.parametrize("file", FILES[:4])
def test_a_file_replaced_before_it_is_opened(job: Job, secret: Path, as_job_user: bool, file: str) -> None:
    driver, ad = driver_for(job, [], VM_RUN_AS_JOB_USER=as_job_user, ad=every_kind(job))
    with at("clear.done", lambda: replace_by_link(job.scratch / file, secret)), pytest.raises(errors.JobFault):
        driver.start(ad)
    driver.close()
    assert job.domain() is None


def fifo(path: Path) -> None:
    os.mkfifo(path, 0o666)


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@both
@pytest.mark.parametrize(
    "make",
    [
        fifo, Path.mkdir, listening, lambda path: os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5)),
        lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to("/proc/self/mem"), lambda path: None,
    ],
    ids=["a FIFO", "a directory", "a socket", "a device", "a link to a device", "a link to memory", "nothing"],
)  # fmt: skip
def test_what_is_no_file_when_it_is_opened(job: Job, make: Callable[[Path], None], as_job_user: bool) -> None:
    def replace() -> None:
        job.disk.unlink()
        make(job.disk)

    driver, ad = driver_for(job, [], VM_RUN_AS_JOB_USER=as_job_user)
    with at("clear.done", replace), pytest.raises(errors.JobFault) as caught:
        driver.start(ad)
    driver.close()
    assert caught.value.code == BAD_DISK
    assert job.domain() is None


@both
def test_a_fifo_in_place_of_the_disk_of_a_vm_that_runs(job: Job, as_job_user: bool) -> None:
    with running(job, VM_RUN_AS_JOB_USER=as_job_user, VM_METRICS_INTERVAL=1) as peer:
        job.disk.unlink()
        fifo(job.disk)
        assert peer.run("STATUS", 1)[1] == "STATUS=Running"
        done(peer, "SOFT_SUSPEND", "RESUME", "SUSPEND", "RESUME", "STOP")


@both
def test_a_restart_whose_disk_was_replaced(job: Job, elsewhere: Path, secret: Path, as_job_user: bool) -> None:
    vacate(job, VM_RUN_AS_JOB_USER=as_job_user)
    moved(job, elsewhere)
    driver, ad = driver_for(job, [], VM_RUN_AS_JOB_USER=as_job_user, ad=(WANTS,))
    with at("clear.done", lambda: replace_by_link(job.disk, secret)), pytest.raises(errors.JobFault):
        driver.start(ad)
    driver.close()
    assert job.domain() is None


@both
def test_a_restart_whose_disk_is_open_already(job: Job, elsewhere: Path, secret: Path, as_job_user: bool) -> None:
    vacate(job, VM_RUN_AS_JOB_USER=as_job_user)
    moved(job, elsewhere)
    log: list[str] = []
    driver, ad = driver_for(job, log, VM_RUN_AS_JOB_USER=as_job_user, ad=(WANTS,))
    with at("prepare.done", lambda: replace_by_link(job.disk, secret)):
        machine = driver.start(ad)
    try:
        assert any("continues from its saved memory" in line for line in log), log
        assert holders(secret) == []
    finally:
        machine.destroy()
        driver.close()


def test_more_disks_than_a_vm_can_have(job: Job) -> None:
    (job.scratch / "data.img").write_bytes(bytes(1 << 20))
    job.own(job.scratch / "data.img")
    letters = "abcdefghijklmnopqrstuvwxyz"
    names = [f"vd{first}{second}" for first in letters for second in letters][:64]
    disks = ",".join(["guest.img:hda:w:raw", *(f"data.img:{name}:r:raw" for name in names)])
    assert "64 files" in refused(job, BAD_DISK, f'VMPARAM_vm_Disk = "{disks}"')


def scripted(job: Job, source: str, kind: str = "file") -> str:
    """A program for LIBVIRT_XML_SCRIPT that believes what the job's ad says of its disk."""
    devices = (
        f"<disk type='{kind}'><driver name='qemu' type='raw'/><source {source}/><target dev='hda' bus='ide'/></disk>"
    )
    xml = SCRIPTED.format(memory=64, vcpus=1, devices=devices).replace("<name>x<", f"<name>{job.name}<")
    script = job.scratch.parent / "script"
    script.write_text(f"#!/bin/sh\ncat <<'END'\n{xml}\nEND\n")
    script.chmod(0o755)
    return str(script)


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
    files = DiskFiles(spec(working_dir=str(job.scratch)), jobs.owner(job.scratch))
    try:
        files.open(f"<domain><devices>{disk}</devices></domain>")
        [descriptor] = files.files().values()
        assert bool(fcntl(descriptor, F_GETFL) & os.O_DIRECT) == direct
    finally:
        files.close()


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
    command = ["qemu-img", "create", "-q", "-f", "qcow2", "-b", base.name, "-F", "raw", job.disk.name]
    subprocess.run(command, cwd=job.scratch, check=True)
    job.own(job.disk)
    script = scripted(job, f"file='{job.disk}'").replace("raw", "qcow2")
    Path(script).write_text(Path(script).read_text().replace("type='raw'", "type='qcow2'"))
    driver, ad = driver_for(job, [], LIBVIRT_XML_SCRIPT=script, ad=('VMPARAM_vm_Disk = "guest.img:hda:w:qcow2"',))
    with at("prepare.done", lambda: replace_by_link(base, secret)):
        machine = driver.start(ad)
    try:
        found = [source.get("file") for source in job.live().findall("devices/disk//source")]
        assert found == [str(job.disk), str(base)]
        assert holders(secret) == []
    finally:
        machine.destroy()
        driver.close()
