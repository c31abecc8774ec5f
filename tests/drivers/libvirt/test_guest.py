"""What guests are told and what they say, with real guests: cloud-init's drive, exit codes, pictures of failures."""

import contextlib
import json
import os
import re
import signal
import stat
import threading
import time
from datetime import datetime
from pathlib import Path

import libvirt
import pytest

from tests.drivers.libvirt import support
from tests.drivers.libvirt.support import LINUX, ON_VIRTIO, USER_DATA, Job, done, evict, run_to_its_end, running, until
from tests.images.support import read
from tests.lab import linux_guest
from tests.lab.guest import counts, make_guest, panicking_sector
from vmgahp.drivers.libvirt.life import guest
from vmgahp.drivers.libvirt.link.connection import LibvirtConnection
from vmgahp.drivers.libvirt.start import describe
from vmgahp.host.job_user import Identity

pytestmark = pytest.mark.libvirt

MISMATCHED = "VMGAHP_ERR_JOBCLASSAD_MISMATCHED_HARDWARE_VT"
SEED = "vm_cidata.iso"


# The exit code


@pytest.mark.parametrize(
    ("earlier", "says", "settings", "code"),
    [
        pytest.param("", "vmgahp-exit-code: 3", {}, 3, id="the last line of the console"),
        pytest.param("", "", {}, None, id="a guest that says nothing"),
        pytest.param("", "vmgahp-exit-code: 7", {"VM_CONSOLE_LOG_MAX": "20"}, 7, id="behind the console file's limit"),
        pytest.param("vmgahp-exit-code: 9\n", "", {}, None, id="a code of an earlier run"),
    ],
)
def test_the_exit_code(job: Job, earlier: str, says: str, settings: dict[str, str], code: int | None) -> None:
    if earlier:
        job.put("vm_console.log", earlier)
    make_guest(job.disk, seconds=2, last_words=says)
    with running(job, **settings) as peer:
        peer.run("STATUS", 1)
        found = run_to_its_end(peer, job)
        log = peer.quit(status=code or 0)
        assert log.count("the job ad gets nothing of this VM") == 1, "without chirp that is all there is to say"
        assert log.count("job ad") == 1
    assert not settings or "exit-code" not in job.console()
    source = "console" if code else None
    assert (found["exit_code"], found["source"], found["ended_by"]) == (code, source, "powered off")


@pytest.mark.parametrize("before", [[], ["SUSPEND"]], ids=["running", "suspended"])
def test_a_stopped_vm_was_destroyed(job: Job, before: list[str]) -> None:
    with running(job) as peer:
        done(peer, *before)
        assert not (job.scratch / "vm_exit.json").exists()
        done(peer, "STOP")
        assert job.exit_file()["ended_by"] == "destroyed"


@pytest.mark.parametrize(("begins", "entry"), [(b"QFI\xfb", "guest.img:hda:w"), (b"KDMV", "guest.img:hda:w:raw")])
def test_an_image_that_is_none_of_raw_is_told_and_runs(job: Job, begins: bytes, entry: str) -> None:
    """Its guest may have written that, and may not boot of it."""
    with job.disk.open("r+b") as file:
        file.write(begins)
    said = "guest.img is taken for a raw image, and begins like"
    with running(job, f'VMPARAM_vm_Disk = "{entry}"') as peer:
        done(peer, "STOP")
        assert said in str(job.exit_file()["hint"])
        assert said in peer.quit()


@pytest.mark.parametrize("panic", [False, True])
def test_the_end_and_the_last_figures_are_those_of_the_event(job: Job, panic: bool) -> None:
    """And not those of the STATUS that hears of it, or of none before it."""
    make_guest(job.disk, seconds=2)
    if panic:
        with open(job.disk, "r+b") as disk:
            disk.write(panicking_sector())
    with running(job) as peer:
        until(lambda: job.domain() is None, "the guest ends")
        ended = time.time()
        until(lambda: time.time() > ended + 3, "some time has passed")
        assert peer.run("STATUS", 1) == ["0", "STATUS=Stopped"]
        peer.quit(status=int(panic))
    found = job.exit_file()
    assert datetime.fromisoformat(str(found["ended"])).timestamp() <= ended + 2, "not when it was asked"
    samples = [json.loads(line) for line in (job.scratch / support.METRICS).read_text().splitlines()]
    known = [sample["cpu_seconds"] for sample in samples if "cpu_seconds" in sample]
    # How much it was at the very end can be seen where QEMU has not gone too fast.
    assert float(str(found["cpu_seconds"] or 0)) >= round(max(known, default=0), 2)


@pytest.mark.parametrize("end", ["STOP", "QUIT"])
def test_a_guest_that_has_powered_itself_off_was_not_destroyed(job: Job, end: str) -> None:
    """Although no STATUS has seen its end before HTCondor wanted it."""
    make_guest(job.disk, seconds=1)
    with running(job) as peer:
        until(lambda: job.domain() is None, "the guest ends")
        if end == "STOP":
            done(peer, end)
        else:
            peer.quit()
        assert job.exit_file()["ended_by"] == "powered off"


def test_the_word_of_a_guests_end_may_come_after_it(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, held = LibvirtConnection._lifecycle, []

    def late(self: LibvirtConnection, *event: object) -> None:
        if event[2] == libvirt.VIR_DOMAIN_EVENT_STOPPED:
            held.append(event)
        else:
            usual(self, *event)

    monkeypatch.setattr(LibvirtConnection, "_lifecycle", late)
    make_guest(job.disk, seconds=1)
    with support.driving(job, []) as (driver, ad):
        machine = driver.start(ad)
        until(lambda: held and job.domain() is None, "the guest ends")

        def tell() -> None:
            threading.Timer(0.5, lambda: [usual(driver.connection, *event) for event in held]).start()

        with support.at("end.begun", tell):
            machine.destroy()
        assert job.exit_file()["ended_by"] == "powered off"


def test_a_killed_qemu_is_a_crash(job: Job) -> None:
    with running(job) as peer:
        os.kill(int(peer.run("GETPID", 1)[1]), signal.SIGKILL)
        assert run_to_its_end(peer, job)["ended_by"] == "crashed"
        peer.quit(status=1)


def test_a_checkpoint_without_devices_of_this_machine_is_restarted(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a machine whose libvirt has no panic device, and where VM_GUEST_AGENT is false."""
    log: list[str] = []
    with monkeypatch.context() as older:
        older.setattr(describe, "PANIC_MODELS", {})
        with support.started(job, log, support.WANTS, VM_GUEST_AGENT=False) as machine:
            until(lambda: counts(job.console()), "the guest counts")
            machine.checkpoint()
            machine.stop()
    with support.started(job, log, support.WANTS):
        assert job.live().find("devices/panic") is None
        assert job.live().find("devices/channel") is None
        assert any("continues from its saved memory" in line for line in log)


def test_vm_no_output_vm_takes_the_exit_file_too(job: Job) -> None:
    make_guest(job.disk, seconds=1)
    with running(job, "VMPARAM_No_Output_VM = true") as peer:
        until(lambda: job.domain() is None, "the guest powers itself off")
        assert peer.run("STATUS", 1) == ["0", "STATUS=Stopped"]
        assert not (job.scratch / "vm_exit.json").exists()


def test_port_and_drive_survive_suspend_and_checkpoint(job: Job, elsewhere: Path) -> None:
    """The drive of cloud-init is made anew."""
    job.put("user-data", "#!/bin/sh\n")
    more = ("VMPARAM_vm_Exit_Port = true", USER_DATA, "JobVMCheckpoint = true", 'GlobalJobId = "s#1.0#2"')
    with running(job, *more) as peer:
        assert job.live().find("devices/channel/target[@name='org.vmgahp.exit']") is not None
        before = (job.scratch / SEED).read_bytes()
        done(peer, "SUSPEND", "RESUME")
        until(lambda: len(counts(job.console())) > 1, "the guest counts on")
        evict(peer)
    assert not (job.scratch / "vm_exit.json").exists(), "a checkpoint is no end"
    assert not (job.scratch / SEED).exists(), "it does not go home with a checkpoint either"
    support.moved(job, elsewhere)
    with running(job, *more) as peer:
        assert peer.run("STATUS", 1)[1] == "STATUS=Running"
        assert job.live().find("devices/channel/target[@name='org.vmgahp.exit']") is not None
        assert (job.scratch / SEED).read_bytes() == before
        assert "continues from its saved memory" in peer.quit()


# cloud-init's drive


def test_the_drive_is_there_while_the_vm_is(job: Job) -> None:
    job.put("user-data", "#cloud-config\npassword: geheim\n")
    job.put("net", "version: 2\n")
    with running(job, USER_DATA, 'VMPARAM_vm_Network_Config = "net"', 'GlobalJobId = "s#1.0#2"') as peer:
        host_name = job.name.replace("_", "-").replace(".", "-")
        assert read(job.scratch / SEED) == {
            "user-data": b"#cloud-config\npassword: geheim\n",
            "meta-data": f'instance-id: "s#1.0#2"\nlocal-hostname: "{host_name}"\n'.encode(),
            "network-config": b"version: 2\n",
        }
        status = (job.scratch / SEED).stat()
        assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o600, job.scratch.stat().st_uid)
        [drive] = [disk for disk in job.live().findall("devices/disk") if SEED in disk.find("source").get("file", "")]
        assert drive.find("target").get("dev") == "hdb", "as the disk of the job, hda, is an IDE disk"
        assert drive.get("device") == "cdrom"
        assert drive.find("readonly") is not None
        done(peer, "STOP")
        assert not (job.scratch / SEED).exists()
        assert "geheim" not in peer.quit()


@pytest.mark.parametrize(
    ("content", "more", "why"),
    [
        ("", (USER_DATA,), "the file is empty"),
        ("#cloud-config\n", ('VMPARAM_vm_Meta_Data = "user-data"',), "VMPARAM_vm_User_Data"),
        ("#cloud-config\n", ("VMPARAM_vm_Exit_Port = 3.5e",), "Exit_Port"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(job: Job, content: str, more: tuple[str, ...], why: str) -> None:
    job.put("user-data", content)
    said = support.refused(job, MISMATCHED, *more)
    assert why in said
    assert "VMPARAM_vm_" in said
    assert not (job.scratch / SEED).exists()


# Both, by a guest that reads and obeys


def test_a_linux_guest_finds_its_drive_and_its_port(linux: Job) -> None:
    script = """#!/bin/sh
echo "the script runs"
echo "vmgahp-exit-code: 4" > /dev/console
echo 5 > /dev/virtio-ports/org.vmgahp.exit
"""
    linux.put("user-data", script)
    with running(linux, *LINUX, ON_VIRTIO, USER_DATA, "VMPARAM_vm_Exit_Port = true") as peer:
        found = run_to_its_end(peer, linux)
        peer.quit(status=5)
    console = linux.console()
    assert "the script runs" in console, console
    assert "drive /dev/vdb" in console, "with a virtio disk it is one too, which every cloud's kernel can read"
    assert re.search(r"-r-------- +1 0 +0 .* user-data", console), "for the guest's root alone"
    assert f'instance-id: "{linux.name}"' in console
    assert (found["exit_code"], found["source"]) == (5, "port"), "the port counts before the console"


def test_a_flood_on_the_port_is_no_exit_code(linux: Job) -> None:
    linux.put("user-data", "#!/bin/sh\nyes x | head -c 1000000 > /dev/virtio-ports/org.vmgahp.exit\n")
    with running(linux, *LINUX, ON_VIRTIO, USER_DATA, "VMPARAM_vm_Exit_Port = true") as peer:
        assert run_to_its_end(peer, linux)["exit_code"] is None
        assert "more to its exit port than is read" in peer.quit()


# Pictures


def test_a_guest_that_does_not_listen_leaves_a_picture(job: Job) -> None:
    with running(job, "JobVMVNCConsole = true") as peer:
        until(lambda: counts(job.console()), "the guest counts")
        done(peer, "STOP")
        log = peer.quit()
    [picture] = job.scratch.glob("vm_screenshot.*")
    assert picture.stat().st_uid == job.scratch.stat().st_uid
    assert picture.read_bytes().startswith(b"\x89PNG\r\n" if picture.suffix == ".png" else b"P6\n")
    assert picture.name in log
    assert job.domain() is None


def test_a_panic_leaves_a_picture(linux: Job) -> None:
    linux.own(*linux_guest.make(linux.scratch, "<panic model='isa'/>"))
    linux.put("user-data", "#!/bin/sh\necho c > /proc/sysrq-trigger\n")
    with running(linux, *LINUX, ON_VIRTIO, USER_DATA, "JobVMVNCConsole = true") as peer:
        domain = linux.domain()
        assert domain is not None
        until(lambda: domain.info()[0] == libvirt.VIR_DOMAIN_CRASHED, "the guest panics")
        assert peer.run("STATUS", 1) == ["0", "STATUS=Stopped"]
        log = peer.quit(status=1)
    assert linux.domain() is None
    assert list(linux.scratch.glob("vm_screenshot.*"))
    assert linux.exit_file()["ended_by"] == "crashed"
    assert "the guest has panicked" in log


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_disk_that_is_full_leaves_a_picture(linux: Job) -> None:
    full = linux.scratch.parent / "full"
    with support.mounted(full, "size=1m,mode=755"):
        image = full / "big.img"
        image.touch()
        os.truncate(image, 4 << 20)
        linux.own(image)
        linux.put("user-data", "#!/bin/sh\ndd if=/dev/zero of=/dev/vdb bs=64k conv=fsync\n")
        disks = f'VMPARAM_vm_Disk = "guest.img:vda:w:raw,{image}:vdb:w:raw"'
        with running(linux, *LINUX, disks, USER_DATA, "JobVMVNCConsole = true") as peer:
            domain = linux.domain()
            assert domain is not None
            until(lambda: domain.info()[0] == libvirt.VIR_DOMAIN_PAUSED, "the disk has no room")
            assert peer.run("STATUS", 1)[1] == "STATUS=Running"
            until(lambda: list(linux.scratch.glob("vm_screenshot.*")), "its picture is there")
            assert "paused by an error of a disk" in peer.quit()


def taken(way: LibvirtConnection, uuid: str, scratch: Path, user: Identity, said: list[str]) -> None:
    guest.LibvirtGuest("test", uuid, "test", way, said.append).take_screenshot(str(scratch), user)


def test_a_picture_that_is_too_large_is_not_kept(connection, scratch, user, monkeypatch):
    """Of a domain of libvirt's own test hypervisor, which shows a picture of 8 KiB."""
    monkeypatch.setattr(guest, "MOST_BYTES", 100)
    said: list[str] = []
    with contextlib.closing(LibvirtConnection("test:///default", said.append)) as way:
        taken(way, way.call(lambda opened: opened.listAllDomains()[0].UUIDString()), scratch, user, said)
    assert "more than 100 bytes" in said[0]
    assert not list(scratch.iterdir())


def test_where_no_thread_can_start_a_picture_holds_no_end_up(scratch, user, monkeypatch):
    said: list[str] = []
    with contextlib.closing(LibvirtConnection("test:///default", said.append)) as way:
        monkeypatch.setattr(threading.Thread, "start", support.no_thread)
        taken(way, "", scratch, user, said)
    assert "no thread for the screenshot of test" in said[0]


def test_a_display_that_cannot_be_had_holds_nothing_up(job: Job) -> None:
    """The job's own file of that name is a directory: the VM is destroyed all the same."""
    for suffix in ("png", "ppm"):
        (job.scratch / f"vm_screenshot.{suffix}").mkdir()
    with running(job, "JobVMVNCConsole = true") as peer:
        done(peer, "STOP")
        assert "its screenshot cannot be taken" in peer.quit()
    assert job.domain() is None
