"""The daemon and real guests: libvirt with QEMU, TCG where KVM does not work."""

import json
import os
import re
import signal
import socket
import subprocess
import threading
from pathlib import Path

import libvirt
import pytest

from tests.drivers.libvirt import support
from tests.drivers.libvirt.support import CHECKPOINT, WANTS, Job, done, run_to_its_end, running, until, vacate, words_of
from tests.lab.guest import counts, make_guest, read_count
from tests.lab.programs import a_program
from tests.lab.starter import ANY, FakeStarter
from tests.peer import daemon, environment
from vmgahp import errors
from vmgahp.cli import KILL, PROBE

pytestmark = pytest.mark.libvirt


@pytest.mark.smoke
def test_a_job_runs_to_its_own_end(job: Job) -> None:
    make_guest(job.disk, seconds=2)
    with running(job) as peer:
        assert b"qemu" in Path(f"/proc/{int(peer.run('GETPID', 1)[1])}/cmdline").read_bytes()
        words = words_of(peer.run("STATUS", 1))
        assert (words["STATUS"], words["MAXMEMORY"]) == ("Running", str(64 * 1024))
        assert 0 <= float(words["CPUTIME"]) < 60
        assert 0 <= float(words["CPUUTILIZATION"]) <= 1
        run_to_its_end(peer, job)
        assert peer.run("GETPID", 1) == ["0", "0"]
        owners = {path.name: path.stat().st_uid for path in job.scratch.iterdir()}
        names = ("guest.img", support.CONSOLE, support.METRICS, support.EXIT)
        assert owners == dict.fromkeys(names, job.scratch.stat().st_uid)
        assert "Traceback" not in peer.quit()
    assert "vmgahp guest done" in job.console()
    assert read_count(job.disk) == 2


def test_the_memory_of_a_status_is_what_of_it_the_guest_has_touched(job: Job) -> None:
    """To HTCondor it is the job's ResidentSetSize, and MAXMEMORY its ImageSize, which no policy may find too large."""
    with running(job, "JobVMMemory = 512") as peer:
        words = words_of(peer.run("STATUS", 1))
        assert 0 < int(words["MEMORY"]) < 256 * 1024
        assert words["MAXMEMORY"] == str(512 * 1024)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
@pytest.mark.parametrize("settings", [{}, {"VM_RUN_AS_JOB_USER": True}], ids=["libvirt's user", "the job's user"])
def test_qemu_runs_as_the_user_of_the_setting(job: Job, settings: dict[str, bool]) -> None:
    make_guest(job.disk, seconds=1)
    owner = job.scratch.stat().st_uid
    job.scratch.chmod(0o700)
    job.disk.chmod(0o600)
    with running(job, **settings) as peer:
        user = os.stat(f"/proc/{peer.run('GETPID', 1)[1]}").st_uid
        assert user == owner if settings else user not in (0, owner)
        run_to_its_end(peer, job)
    assert "vmgahp guest done" in job.console()
    assert job.disk.stat().st_uid == owner


@pytest.mark.smoke
def test_stop_destroys_a_guest_that_does_not_listen(job: Job) -> None:
    with running(job, VM_STOP_TIMEOUT=1) as peer:
        done(peer, "STOP")
        assert job.domain() is None
        assert peer.run("STATUS", 1) == ["0", "STATUS=Stopped"]
        assert "has not powered off in 1 s" in peer.quit()


@pytest.mark.parametrize("as_job_user", [pytest.param(True, marks=pytest.mark.smoke), False])
def test_a_suspended_guest_goes_on_where_it_was(job: Job, as_job_user: bool) -> None:
    """What HTCondor's own server loses: the guest counts on after a suspend, and its CPU time continues."""
    make_guest(job.disk, seconds=6)
    with running(job, VM_RUN_AS_JOB_USER=as_job_user) as peer:
        until(lambda: "3\n" in job.console(), "the guest counts to three")
        before = words_of(peer.run("STATUS", 1))
        pid = int(peer.run("GETPID", 1)[1])
        done(peer, "SUSPEND")
        assert job.domain() is None
        assert not Path(f"/proc/{pid}").exists()
        for _ in range(3):
            assert peer.run("STATUS", 1) == ["0", "STATUS=Suspended"]
        done(peer, "SUSPEND")
        assert peer.run("GETPID", 1) == ["0", "0"]
        image = job.scratch / "vm_suspend.mem"
        assert (image.stat().st_uid, image.stat().st_mode & 0o777) == (job.scratch.stat().st_uid, 0o600)
        done(peer, "RESUME")
        assert not image.exists()
        after = words_of(peer.run("STATUS", 1))
        assert after["STATUS"] == "Running"
        assert float(after["CPUTIME"]) >= float(before["CPUTIME"]) > 0
        assert 0 <= float(after["CPUUTILIZATION"]) <= 1
        assert int(peer.run("GETPID", 1)[1]) not in (0, pid)
        run_to_its_end(peer, job)
    assert counts(job.console()) == [1, 2, 3, 4, 5, 6]
    assert job.console().count("vmgahp guest up") == 1, "it was not booted twice"
    assert {path.name for path in job.scratch.iterdir()} == {
        "guest.img", support.CONSOLE, support.METRICS, support.EXIT,
    }  # fmt: skip


def test_a_save_that_fails_or_was_not_asked_for_leaves_the_guest_running(job: Job) -> None:
    (job.scratch / "vm_suspend.mem").mkdir()
    (job.scratch / "vm_suspend.mem" / "in the way").touch()
    with running(job) as peer:
        assert peer.run("CHECKPOINT", 1) == ["1", "VMGAHP_ERR_VM_NO_SUPPORT_CHECKPOINT"]
        assert peer.run("STATUS", 1)[1] == "STATUS=Running"
        assert peer.run("SUSPEND", 1) == ["1", "VMGAHP_ERR_VM_CANNOT_CREATE_CKPT_FILES"]
        assert peer.run("STATUS", 1)[1] == "STATUS=Running"
        before = len(counts(job.console()))
        until(lambda: len(counts(job.console())) > before, "the guest counts on")
        assert "vm_checkpoint" in peer.quit()
    assert not [path for path in job.scratch.iterdir() if path.name.endswith(".part")]


def test_an_image_that_was_changed_is_not_shown_to_libvirt(job: Job) -> None:
    with running(job) as peer:
        peer.run("SUSPEND", 1)
        image = job.scratch / "vm_suspend.mem"
        content = image.read_bytes()
        image.write_bytes(b"x" * 200 + content[200:])
        assert peer.run("RESUME", 1) == ["1", "VMGAHP_ERR_VM_INVALID_SUSPEND_FILE"]
        assert peer.run("STATUS", 1) == ["0", "STATUS=Suspended"]
        image.write_bytes(content)
        done(peer, "RESUME")


def test_what_an_administrator_does_is_seen_and_named(job: Job) -> None:
    with running(job) as peer:
        domain = job.domain()
        domain.suspend()
        assert peer.run("STATUS", 1) == ["0", "STATUS=SoftSuspended"]
        domain.resume()
        assert peer.run("STATUS", 1)[1] == "STATUS=Running"
        image = job.scratch.parent / "saved-by-somebody"
        domain.save(str(image))
        assert peer.run("STATUS", 1) == ["0", "STATUS=Suspended"]
        # Only the server has the disks as open files; an administrator lets QEMU open them by their names. With a limit
        # of memory libvirtd raises another of QEMU's, which in a container it may not.
        xml = job._connection.saveImageGetXMLDesc(str(image), libvirt.VIR_DOMAIN_SAVE_IMAGE_XML_SECURE)
        ours = r" fdgroup='\w+'|<seclabel model='dac' relabel='no'/>|<memtune>.*?</memtune>"
        xml = re.sub(ours, "", xml, flags=re.DOTALL)
        job._connection.restoreFlags(str(image), xml, 0)
        assert peer.run("STATUS", 1)[1] == "STATUS=Running"
        job.domain().destroy()
        assert peer.run("STATUS", 1) == ["0", "STATUS=Stopped"]
        log = peer.quit(status=1)
    for cause in ("it was paused", "it was resumed", "it was saved", "it was destroyed"):
        assert f"{job.name}: {cause}" in log


def shared_disk(job: Job, seconds: int | None) -> str:
    """Give the job another disk than the one that it had, outside of its scratch directory."""
    job.disk.unlink()
    job.disk = make_guest(job.scratch.parent / "shared.img", seconds)
    job.own(job.disk)
    return f'VMPARAM_vm_Disk = "{job.disk}:hda:w:raw"'


@pytest.mark.parametrize("shared", [pytest.param(False, marks=pytest.mark.smoke), True])
def test_a_checkpoint_restarts_and_the_guest_counts_on(job: Job, elsewhere: Path, shared: bool) -> None:
    """What HTCondor's own server has not done for years, with the disk transferred and in a shared directory."""
    make_guest(job.disk, seconds=5)
    more = [shared_disk(job, 5)] if shared else []
    cpu = {"VM_CPU_MODE": "host-model"} if shared else {}  # as libvirt works it out, it is the same at a restart
    vacate(job, *more, **cpu)
    assert {path.name for path in job.scratch.iterdir()} >= CHECKPOINT
    moved_disk = job.disk
    support.moved(job, elsewhere)
    if shared:
        job.disk = moved_disk
    with FakeStarter(job.scratch, ANY) as starter, running(job, WANTS, *more, **cpu) as peer:
        assert peer.run("STATUS", 1)[1] == "STATUS=Running"
        starter.wait_for("ulog", "The VM goes on from its checkpoint")
        run_to_its_end(peer, job)
    assert job.console().count("vmgahp guest up") == 1, "it was not booted again"
    assert counts(job.console()) == [1, 2, 3, 4, 5]
    assert read_count(job.disk) == 5
    assert CHECKPOINT.isdisjoint(path.name for path in job.scratch.iterdir()), "it is used up"


def test_a_suspended_vm_can_be_checkpointed(job: Job, elsewhere: Path) -> None:
    make_guest(job.disk, seconds=4)
    with running(job, WANTS) as peer:
        done(peer, "SUSPEND", "CHECKPOINT")
    assert {path.name for path in job.scratch.iterdir()} == {"guest.img", support.CONSOLE, support.METRICS, *CHECKPOINT}
    support.moved(job, elsewhere)
    with running(job) as peer:
        until(lambda: job.domain() is None, "the guest powers itself off")
    assert job.console().count("vmgahp guest up") == 1


def test_a_shared_disk_takes_no_periodic_checkpoint(job: Job) -> None:
    """It would change, and the memory would no longer fit it."""
    more = shared_disk(job, None)
    with support.greeted(job, vm_type="libvirt") as peer:
        peer.send_ad(*job.ad(WANTS, 'JobVMType = "libvirt"', more))
        assert peer.run("START", "libvirt") == ["0", "1"]
        assert peer.run("CHECKPOINT", 1) == ["1", "VMGAHP_ERR_VM_NO_SUPPORT_CHECKPOINT"]
        assert peer.run("STATUS", 1)[1] == "STATUS=Running"
        assert "would change after a periodic checkpoint" in peer.quit()


def test_a_damaged_checkpoint_is_kept_aside_and_the_guest_boots_afresh(job: Job) -> None:
    vacate(job)
    image = job.scratch / "vm_checkpoint.mem"
    content = bytearray(image.read_bytes())
    content[len(content) // 2] ^= 1
    image.write_bytes(content)
    with FakeStarter(job.scratch, ANY) as starter, running(job, WANTS) as peer:
        until(lambda: job.console().count("vmgahp guest up") == 2, "the guest boots again")
        assert peer.run("STATUS", 1)[0] == "0"
        until(starter.log, "the job's log says so")
        assert starter.log()[0].startswith("The VM starts afresh: its checkpoint cannot be used (")
        assert "vm_checkpoint.mem is damaged" in peer.quit()
    assert (job.scratch / "vm_checkpoint.mem.refused-1").read_bytes() == content


def test_a_restart_whose_qemu_is_killed_is_tried_once_more(job: Job) -> None:
    vacate(job)
    uuid = json.loads((job.scratch / "vm_checkpoint.json").read_text())["facts"]["uuid"]
    killer = threading.Thread(target=kill_qemu, args=(uuid,), daemon=True)
    killer.start()
    with running(job, WANTS) as peer:
        killer.join(support.PATIENCE)
        assert job.console().count("vmgahp guest up") == 1
        assert not [path.name for path in job.scratch.iterdir() if ".refused-" in path.name]
        assert "The restart is tried once more." in peer.quit()


def kill_qemu(uuid: str) -> None:
    """Kill a VM's QEMU as soon as it begins, which is waited for; its guardian has the UUID, too."""
    while not (found := support.processes(uuid, "-incoming")):
        pass
    for pid in found:
        os.kill(pid, signal.SIGKILL)


def test_a_checkpoint_whose_disk_has_moved_on_holds_the_job(job: Job) -> None:
    vacate(job)
    with job.disk.open("r+b") as disk:
        disk.seek(512 * 8)
        disk.write(b"changed by somebody")
    assert "guest.img" in support.refused(job, "VMGAHP_ERR_JOBCLASSAD_KVM_MISMATCHED_CHECKPOINT", WANTS)
    names = {path.name for path in job.scratch.iterdir()}
    assert names >= {"guest.img", "vm_checkpoint.mem.refused-1", "vm_checkpoint.json.refused-1"}


def test_a_guest_whose_restart_was_cut_off_boots_from_its_disks(job: Job) -> None:
    """Its disk has moved on since the checkpoint, as after a power cut, and nobody has exchanged it."""
    vacate(job)
    (job.scratch / "vm_checkpoint.json").rename(job.scratch / "vm_checkpoint.json.restarting")
    with job.disk.open("r+b") as disk:
        disk.seek(512 * 8)
        disk.write(b"written by the guest")
    with running(job, WANTS) as peer:
        until(lambda: job.console().count("vmgahp guest up") == 2, "the guest boots again")
        assert not [path.name for path in job.scratch.iterdir() if path.name.startswith("vm_checkpoint")]
        assert "as after a power cut" in peer.quit()


def test_another_jobs_checkpoint_is_not_gone_on_from(job: Job) -> None:
    vacate(job)
    job.cluster += 50
    job.name = f"alice_lab_{job.cluster}.0"
    with running(job, WANTS) as peer:
        until(lambda: job.console().count("vmgahp guest up") == 2, "the guest boots again")
        assert "it is the checkpoint of" in peer.quit()


def test_a_crafted_checkpoint_brings_no_device_of_the_host(job: Job) -> None:
    vacate(job)
    path = job.scratch / "vm_checkpoint.json"
    manifest = json.loads(path.read_text())
    facts = manifest["facts"]
    facts["xml"] = facts["xml"].replace(
        "<devices>", "<devices><hostdev mode='subsystem' type='usb'><source><vendor id='0x1'/></source></hostdev>"
    )
    path.write_text(json.dumps(manifest))
    with running(job, WANTS) as peer:
        assert "hostdev" not in job.domain().XMLDesc()
        assert "hostdev" in peer.quit(), "the log names what was in the way"


@pytest.mark.parametrize("end", ["QUIT", "EOF", "SIGTERM", "SIGQUIT"])
def test_the_end_of_the_server_is_the_end_of_its_guests(job: Job, end: str) -> None:
    with running(job) as peer:
        assert job.domain() is not None
        ends = {"QUIT": peer.quit, "EOF": peer.finish}
        ends[end]() if end in ends else peer.end_by(signal.Signals[end])
        assert peer.process.returncode == 0
    assert job.domain() is None


@pytest.mark.smoke
def test_a_killed_server_leaves_no_guest(job: Job) -> None:
    with running(job) as peer:
        peer.end_by(signal.SIGKILL)
        until(lambda: job.domain() is None, "the guardian destroys the guest")


def killed(vm_type: str, job: Job, match: str, *more: str) -> None:
    ended = daemon(environment(vm_type, job.scratch), KILL, "vmtype", vm_type, "match", match, *more)
    assert (ended.returncode, ended.stdout) == (0, "")


@pytest.mark.smoke
def test_kill_mode(job: Job) -> None:
    with running(job) as peer:
        killed("kvm", job, job.name)
        assert job.domain() is None
        assert peer.run("STATUS", 1) == ["0", "STATUS=Stopped"]
        peer.quit(status=1)
    killed("kvm", job, job.name)


def test_kill_mode_by_the_scratch_directory_spares_the_next_vm_of_a_name(job: Job) -> None:
    """What the startd names for every VM type that it does not know."""
    with running(job):
        killed("kvm", job, job.name, "uuid", "00000000-0000-4000-8000-000000000000")
        killed("libvirt", job, f"{job.scratch}2")
        assert job.domain() is not None
        killed("libvirt", job, str(job.scratch))
        assert job.domain() is None


@pytest.mark.parametrize("as_job_user", [True, False])
def test_an_overlay_on_a_shared_image(job: Job, as_job_user: bool) -> None:
    base = job.scratch.parent / "base.img"
    make_guest(base, seconds=1)
    base.chmod(0o644)
    before = base.stat()
    support.overlay(job, "guest.qcow2", base)
    with running(job, 'VMPARAM_vm_Disk = "guest.qcow2:vda:w:qcow2"', VM_RUN_AS_JOB_USER=as_job_user):
        assert base.stat().st_uid == before.st_uid
        until(lambda: job.domain() is None, "the guest powers itself off")
    assert "vmgahp guest done" in job.console()
    assert (base.stat().st_uid, base.stat().st_mtime) == (before.st_uid, before.st_mtime)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_disk_that_the_jobs_user_may_not_read_holds_the_job(job: Job) -> None:
    os.chown(job.disk, 0, 0)
    job.disk.chmod(0o600)
    support.refused(job, "VMGAHP_ERR_JOBCLASSAD_KVM_INVALID_DISK_PARAM")


def displayed(job: Job) -> str:
    """What libvirt says of the job's display."""
    return subprocess.check_output(["virsh", "-c", support.URI, "domdisplay", job.name], text=True).strip()


def test_vnc_listens_on_loopback_with_a_password(job: Job) -> None:
    with FakeStarter(job.scratch, ANY) as starter, running(job, "JobVMVNCConsole = true") as peer:
        display = json.loads((job.scratch / "vm_vnc.json").read_text())
        assert display["host"] == "127.0.0.1"
        assert 5900 <= display["port"] < 65536
        assert len(display["password"]) == 8
        assert (job.scratch / "vm_vnc.json").stat().st_mode & 0o777 == 0o600
        assert displayed(job).startswith("vnc://127.0.0.1:")
        assert peer.run("STATUS", 1)[0] == "0"
        where = f"127.0.0.1:{display['port']}"
        starter.wait_for("ulog", f"The VM's display is at {where} of its machine")
        assert starter.ad()["ChirpVMVNC"] == f'"{where}"'
        assert int(starter.ad()["ChirpVMMemoryPeak"]) >= int(starter.ad()["ChirpVMMemory"]) > 1000
        assert float(starter.ad()["ChirpVMCPU"]) > 0
        assert not [words for words in starter.told if display["password"] in " ".join(words)]
        assert display["password"] not in peer.quit()


def test_a_resumed_display_is_told_by_its_new_port(job: Job) -> None:
    def display() -> tuple[int, str]:
        told = json.loads((job.scratch / "vm_vnc.json").read_text())
        return told["port"], told["password"]

    with FakeStarter(job.scratch) as starter, running(job, "JobVMVNCConsole = true") as peer:
        before, password = display()
        done(peer, "SUSPEND")
        with socket.create_server(("127.0.0.1", before)):  # as another VM that was started meanwhile
            done(peer, "RESUME")
        after, same = display()
        assert (after != before, same) == (True, password)
        assert displayed(job).endswith(f":{after - 5900}")
        assert peer.run("STATUS", 1)[0] == "0"
        starter.wait_for("set_job_attr_delayed", "ChirpVMVNC", f'"127.0.0.1:{after}"')


def test_the_administrators_script_writes_the_xml(job: Job, tools: Path) -> None:
    xml = f"<domain type='qemu'><name>{job.name}</name><memory unit='MiB'>$1</memory><os><type>hvm</type></os></domain>"
    script = a_program(tools / "xml", f'cat > {tools}/ad\necho "{xml}"')
    with running(job, 'ClaimId = "hush"', LIBVIRT_XML_SCRIPT=script, LIBVIRT_XML_SCRIPT_ARGS="48") as peer:
        assert words_of(peer.run("STATUS", 1))["MAXMEMORY"] == str(48 * 1024)
    sent = (tools / "ad").read_text()
    assert f'VMPARAM_VM_NAME = "{job.name}"' in sent
    assert "hush" not in sent


def test_without_emulation_the_machine_is_blamed_where_kvm_does_not_work(job: Job) -> None:
    from vmgahp.host import kvm

    if not kvm.check():
        ended = daemon(environment("kvm", job.scratch), PROBE, "vmtype", "kvm")
        assert 'VM_kvm_ATTR_accel = "kvm"' in ended.stdout
        return
    assert "VM_ALLOW_EMULATION" in support.refused(job, "VMGAHP_ERR_CRITICAL", VM_ALLOW_EMULATION=False)
    ended = daemon(environment("kvm", job.scratch), PROBE, "vmtype", "kvm")
    assert (ended.stdout, ended.returncode) == ("", 1)
    assert "KVM does not work" in ended.stderr


@pytest.mark.parametrize("form", ["vmdk", "vdi", "vpc", "qcow"])
def test_a_disk_that_qemu_cannot_save_is_known_before_and_its_guest_runs_on(job: Job, form: str) -> None:
    image = job.scratch / f"old.{form}"
    subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", form, job.disk, image], check=True)
    job.own(image)
    disk = f'VMPARAM_vm_Disk = "{image.name}:hda:w:{form}"'
    said = support.refused(job, errors.INVALID_DISK_PARAM, disk, WANTS)
    assert f"qemu-img convert -f {form} -O qcow2 {image.name}" in said
    with running(job, disk) as peer:
        until(lambda: "2\n" in job.console(), "the guest counts to two")
        for word, code in (("SUSPEND", errors.VM_NO_SUPPORT_SUSPEND), ("CHECKPOINT", errors.VM_NO_SUPPORT_CHECKPOINT)):
            assert peer.run(word, 1) == ["1", code]
        assert words_of(peer.run("STATUS", 1))["STATUS"] == "Running"
        log = peer.quit()
    assert f"its disk hda is a {form} image, which QEMU cannot save" in log


@pytest.mark.smoke
def test_the_probe(job: Job) -> None:
    ended = daemon(environment("kvm", job.scratch, VM_ALLOW_EMULATION=True), PROBE, "vmtype", "kvm")
    assert ended.stdout.startswith(
        'VM_GAHP_VERSION = "0.0.1"\nVM_Type = "kvm"\nVM_Memory = 1024\nVM_Networking = FALSE\n'
    ), ended.stderr
    assert ended.returncode == 0


def test_a_closed_connection_keeps_no_descriptor() -> None:
    """A server opens one anew whenever libvirtd was restarted."""
    from vmgahp.drivers.libvirt.link.connection import LibvirtConnection

    def round_trip() -> int:
        opened = LibvirtConnection(support.URI, lambda _line: None)
        opened.call(lambda asked: asked.getVersion())
        opened.close()
        return len(os.listdir("/proc/self/fd"))

    settled = round_trip()
    until(lambda: round_trip() <= settled, "the descriptors to be closed")
