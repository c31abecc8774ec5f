"""The daemon and VMware jobs, by a stand-in for vmrun that runs their guests for real under QEMU."""

import copy
import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.drivers.support import does, needs_qemu, status
from tests.lab.guest import counts
from tests.lab.programs import a_program
from tests.lab.vmware import VMware, VmwareJob, count_on, vmware
from tests.peer import Peer, daemon, environment, kill_guardian
from vmgahp.cli import KILL
from vmgahp.job.vmx import Vmx
from vmgahp.testing.contract import until

pytestmark = [pytest.mark.qemu, needs_qemu]

VM_NOT_FOUND = "VMGAHP_ERR_VM_NOT_FOUND"


@pytest.fixture
def host() -> Iterator[VMware]:
    with vmware() as made:
        yield made


@pytest.fixture
def job(scratch: Path) -> VmwareJob:
    return VmwareJob(scratch)


def serving(job: VmwareJob, host: VMware, **settings: object) -> Peer:
    settings = {
        "VMWARE_VMRUN": host.vmrun, "VM_STOP_TIMEOUT": 1, "VM_REPORT_PID": True, "VM_REPORT_ADDRESS": True,
    } | settings  # fmt: skip
    return Peer(environment("vmware", job.scratch, **settings) | {"CONDOR_IDS": "64.64"})


def start(peer: Peer, job: VmwareJob, *more: str, wanted: tuple[str, str] = ("0", "1")) -> None:
    assert peer.line().startswith("$VMGahpVersion")
    peer.send_ad(*job.ad(*more))
    result = peer.run("START", "vmware")
    assert tuple(result) == wanted, f"{result}\n{peer.end_by(signal.SIGTERM)}"


@contextmanager
def running(job: VmwareJob, host: VMware, *more: str, **settings: object) -> Iterator[Peer]:
    """A daemon with the job's VM; QUIT at the end."""
    with serving(job, host, **settings) as peer:
        start(peer, job, *more)
        yield peer
        if peer.process.returncode is None:
            peer.quit()


def refused(job: VmwareJob, host: VMware, code: str, *more: str, **settings: object) -> str:
    """A START that is refused with this code; the reason that the job's owner reads."""
    with serving(job, host, **settings) as peer:
        start(peer, job, *more, wanted=("1", f"VMGAHP_ERR_{code}"))
        peer.quit()
    return (job.scratch / "vm_error.txt").read_text()


def kill(job: VmwareJob, host: VMware, *more: str, user: int | None = None, **settings: object) -> None:
    """The kill mode, for a directory and perhaps a VM of its own there."""
    environ = environment("vmware", job.scratch, VMWARE_VMRUN=host.vmrun, **settings)
    if user is not None:
        environ |= {"VMGAHP_USER_UID": str(user), "VMGAHP_USER_GID": str(user)}
    ended = daemon(environ, KILL, "vmtype", "vmware", "match", *more)
    assert ended.returncode == 0, ended.stderr


def lying(host: VMware, lie: str) -> Path:
    """A vmrun that is the host's, except for what this line of shell says."""
    return a_program(host.vmrun.with_name("lying"), f'{lie}\nexec {host.vmrun} "$@"')


def goes_on(job: VmwareJob, beyond: int = 0) -> None:
    """Wait for a count beyond this one; the guest never began anew and left no number out."""
    until(lambda: [n for n in counts(job.console()) if n > beyond], f"the guest counts beyond {beyond}")
    seen = counts(job.console())
    assert seen == list(range(1, len(seen) + 1))


def test_a_job_runs_to_its_own_end(scratch: Path, host: VMware) -> None:
    job = VmwareJob(scratch, seconds=2)
    before = job.disk.read_bytes()
    with running(job, host) as peer:
        pid = int(peer.run("GETPID", 1)[1])
        assert host.pids() == {str(job.working_vmx): pid}
        words = status(peer)
        assert (words["STATUS"], words["MAXMEMORY"]) == ("Running", str(32 * 1024))
        until(lambda: not host.pids(), "the guest powers itself off")
        assert peer.run("STATUS", 1) == ["0", "STATUS=Stopped"]
        assert peer.run("GETPID", 1) == ["0", "0"]
        assert "Traceback" not in peer.quit()
    assert "vmgahp guest done" in job.console()
    assert job.disk.read_bytes() == before, "the job's own disk has changed"
    assert (count_on(job.disk), count_on(scratch / "dos-000001.vmdk")) == (0, 2)
    ended = json.loads((scratch / "vm_exit.json").read_text())
    assert (ended["exit_code"], ended["ended_by"], ended["cpu_seconds"] > 0) == (None, "gone", True)


def test_vmrun_and_the_guest_run_as_the_jobs_user(job: VmwareJob, host: VMware) -> None:
    owner = job.scratch.stat().st_uid
    with running(job, host) as peer:
        pid = int(peer.run("GETPID", 1)[1])
        assert os.stat(f"/proc/{pid}").st_uid == owner
        environ = Path(f"/proc/{pid}/environ").read_bytes()
        assert f"HOME={job.scratch}".encode() in environ
        assert b"_CONDOR_" not in environ
    assert {line.split()[0] for line in host.calls()} == {str(owner)}
    assert {path.stat().st_uid for path in job.scratch.iterdir()} == {owner}


def test_stop_ends_a_guest_without_tools(job: VmwareJob, host: VMware) -> None:
    with running(job, host) as peer:
        does(peer, "STOP")
        assert not host.pids()
        assert peer.run("STATUS", 1) == ["0", "STATUS=Stopped"]
    assert [line.split()[1::2] for line in host.calls() if " stop " in line] == [["stop", "soft"], ["stop", "hard"]]


def test_a_paused_guest_is_suspended_and_resumed_where_it_was(job: VmwareJob, host: VMware) -> None:
    with running(job, host) as peer:
        goes_on(job, beyond=1)
        does(peer, "SOFT_SUSPEND", "SUSPEND")
        assert not host.pids()
        assert (job.scratch / "dos_condor.vmss").exists()
        assert peer.run("STATUS", 1) == ["0", "STATUS=Suspended"]
        assert peer.run("GETPID", 1) == ["0", "0"]
        last = counts(job.console())[-1]
        does(peer, "RESUME")
        assert peer.run("STATUS", 1)[1] == "STATUS=Running"
        goes_on(job, beyond=last)
    assert not (job.scratch / "dos_condor.vmss").exists()


@pytest.mark.parametrize("lost", ["before STATUS", "before RESUME", "by the suspend"])
def test_a_guest_whose_memory_is_lost_has_not_done_its_job(job: VmwareJob, host: VMware, lost: str) -> None:
    # The suspend that loses it kills the guest and says that all is well.
    lie = f'[ "$3" != suspend ] || exec {host.vmrun} -T ws stop "$4" hard' if lost == "by the suspend" else ""
    with running(job, host, VMWARE_VMRUN=lying(host, lie)) as peer:
        if lie:
            assert peer.run("SUSPEND", 1)[0] == "1"
        else:
            does(peer, "SUSPEND")
            (job.scratch / "dos_condor.vmss").unlink()
        assert peer.run("RESUME" if lost == "before RESUME" else "STATUS", 1) == ["1", "VMGAHP_ERR_INTERNAL"]
        assert peer.run("STATUS", 1) == ["1", "VMGAHP_ERR_INTERNAL"]
        does(peer, "STOP")
        assert peer.run("STATUS", 1) == ["0", "STATUS=Stopped"]


def test_a_suspend_that_was_not_answered_and_done_is_done(job: VmwareJob, host: VMware) -> None:
    lie = f'if [ "$3" = suspend ]; then {host.vmrun} "$@"; echo "Error: The operation was canceled"; exit 255; fi'
    with running(job, host, VMWARE_VMRUN=lying(host, lie)) as peer:
        goes_on(job, beyond=1)
        does(peer, "SUSPEND")
        last = counts(job.console())[-1]
        does(peer, "RESUME")
        goes_on(job, beyond=last)


def test_a_suspend_that_was_given_up_and_is_done_later_has_not_ended_the_job(job: VmwareJob, host: VMware) -> None:
    go = job.scratch / "go"
    later = f'while [ ! -e {go} ]; do sleep 0.1; done; exec {host.vmrun} "$@"'
    lie = f"if [ $3 = suspend ]; then setsid sh -c '{later}' sh " + '"$@" >/dev/null 2>&1 &'
    lie += ' echo "Error: The operation was canceled"; exit 255; fi'
    with running(job, host, VMWARE_VMRUN=lying(host, lie)) as peer:
        goes_on(job, beyond=1)
        assert peer.run("SUSPEND", 1)[0] == "1"
        go.touch()
        until(lambda: not host.pids(), "VMware has saved it")
        assert peer.run("STATUS", 1) == ["0", "STATUS=Suspended"]
        last = counts(job.console())[-1]
        does(peer, "RESUME")
        goes_on(job, beyond=last)


def test_a_guest_whose_suspend_fails_runs_on_and_has_an_end(job: VmwareJob, host: VMware) -> None:
    with running(job, host) as peer:
        host.misbehave("fail:suspend=The_operation_was_canceled")
        assert peer.run("SUSPEND", 1)[0] == "1"
        assert peer.run("STATUS", 1)[1] == "STATUS=Running"
        [pid] = host.pids().values()
        os.kill(pid, signal.SIGTERM)
        until(lambda: not host.pids(), "the guest is off")
        assert peer.run("STATUS", 1) == ["0", "STATUS=Stopped"]


def test_a_resume_that_fails_can_be_tried_again(job: VmwareJob, host: VMware) -> None:
    with running(job, host, "JobVMCheckpoint = true") as peer:
        goes_on(job, beyond=1)
        does(peer, "CHECKPOINT")
        last = counts(job.console())[-1]
        host.misbehave("fail:start=Not_enough_physical_memory")
        assert peer.run("RESUME", 1)[0] == "1"
        assert (job.scratch / "vm_checkpoint.json").exists()
        host.misbehave()
        does(peer, "RESUME")
        goes_on(job, beyond=last)
        assert not list(job.scratch.glob("vm_checkpoint.json*"))


@pytest.mark.parametrize("fails", [False, True])
def test_a_checkpoint_is_none_while_its_guest_is_started(job: VmwareJob, host: VMware, fails: bool) -> None:
    """A server that dies meanwhile leaves disks that have moved on, and no checkpoint that says otherwise."""
    last = vacate(job, host)
    seen = host.vmrun.with_name("seen")
    seen.touch()
    seen.chmod(0o666)
    error = "echo 'Error: Not enough physical memory'; exit 255; " if fails else ""
    lie = f'if [ "$3" = start ]; then ls -A {job.scratch} >{seen}; {error}fi'
    ad, settings = "JobVMCheckpoint = true", {"VMWARE_VMRUN": lying(host, lie)}
    if fails:
        refused(job, host, "JOBCLASSAD_MISMATCHED_HARDWARE_VT", ad, **settings)
        settings = {}
    else:
        with running(job, host, ad, **settings):
            goes_on(job, beyond=last)
    assert "vm_checkpoint.json" not in seen.read_text().split()
    assert (job.scratch / "vm_checkpoint.json").exists() is fails
    assert not (job.scratch / "vm_checkpoint.json.restarting").exists()


def vacate(job: VmwareJob, host: VMware, *more: str) -> int:
    """Run a job, checkpoint it and stop it, as for a vacate; the last count on its console."""
    with running(job, host, "JobVMCheckpoint = true", *more) as peer:
        goes_on(job, beyond=1)
        does(peer, "CHECKPOINT")
        assert not host.pids()
        assert json.loads((job.scratch / "vm_checkpoint.json").read_text())["cpu_seconds"] > 0
        does(peer, "STOP")
    return counts(job.console())[-1]


def move(job: VmwareJob, place: Path) -> None:
    """Move the job to the scratch directory of another machine; the old one is gone there."""
    job.scratch.rename(place)
    job.scratch, job.vmx, job.disk = place, place / job.vmx.name, place / job.disk.name
    job.working_vmx = place / job.working_vmx.name


@pytest.mark.parametrize("vmdk_type", ["monolithicSparse", "twoGbMaxExtentSparse", "twoGbMaxExtentFlat"])
def test_a_checkpoint_restarts_on_another_machine(scratch: Path, host: VMware, vmdk_type: str) -> None:
    job = VmwareJob(scratch, vmdk_type=vmdk_type)
    original = {path.name: path.read_bytes() for path in scratch.glob("dos*.vmdk")}
    last = vacate(job, host)
    used = json.loads((scratch / "vm_checkpoint.json").read_text())["cpu_seconds"]
    assert str(scratch).encode() not in (scratch / "dos-000001.vmdk").read_bytes()[:4096]
    move(job, scratch.with_name("dir_2"))
    with running(job, host, "JobVMCheckpoint = true") as peer:
        goes_on(job, beyond=last)
        assert float(status(peer)["CPUTIME"]) > used
        assert not (job.scratch / "vm_checkpoint.json").exists()
        does(peer, "STOP")
    assert count_on(job.scratch / "dos-000001.vmdk") >= last
    assert {name: (job.scratch / name).read_bytes() for name in original} == original


def test_a_checkpoint_has_the_jobs_own_nvram(job: VmwareJob, host: VMware) -> None:
    (job.scratch / "dos.nvram").write_bytes(b"MRVN, with boot entries")
    job.own(job.scratch / "dos.nvram")
    job.write_vmx('nvram = "dos.nvram"')
    last = vacate(job, host)
    files = json.loads((job.scratch / "vm_checkpoint.json").read_text())["files"]
    assert "dos.nvram" in [file["path"] for file in files]
    with running(job, host, "JobVMCheckpoint = true") as peer:
        assert 'nvram = "dos.nvram"' in job.working_vmx.read_text()
        goes_on(job, beyond=last)
        does(peer, "STOP")


def test_a_checkpoint_without_snapshot_disks_has_the_jobs_own(job: VmwareJob, host: VMware) -> None:
    last = vacate(job, host, "VMPARAM_VMware_SnapshotDisk = false")
    assert count_on(job.disk) >= last
    move(job, job.scratch.with_name("dir_2"))
    with running(job, host, "JobVMCheckpoint = true", "VMPARAM_VMware_SnapshotDisk = false"):
        goes_on(job, beyond=last)
    assert not list(job.scratch.glob("dos-0*.vmdk"))


def test_a_checkpoint_that_is_damaged_begins_anew(job: VmwareJob, host: VMware) -> None:
    vacate(job, host)
    with open(job.scratch / "dos_condor.vmss", "r+b") as file:
        file.write(b"damaged")
    (job.scratch / "serial.txt").unlink()
    with running(job, host, "JobVMCheckpoint = true") as peer:
        goes_on(job)
        assert "the content of 'dos_condor.vmss' has changed" in peer.quit()
    assert (job.scratch / "dos_condor.vmss.refused-1").exists()


def test_disks_that_have_changed_hold_the_job(job: VmwareJob, host: VMware) -> None:
    vacate(job, host, "VMPARAM_VMware_SnapshotDisk = false")
    with open(job.disk, "r+b") as file:
        file.seek(1000)
        file.write(b"moved on")
    text = refused(job, host, "JOBCLASSAD_KVM_MISMATCHED_CHECKPOINT", "VMPARAM_VMware_SnapshotDisk = false")
    assert "the content of 'dos.vmdk' has changed" in text
    assert not host.pids()


def test_a_checkpoint_cannot_smuggle_lines_into_the_vmx(job: VmwareJob, host: VMware) -> None:
    vacate(job, host)
    lines = job.working_vmx.read_text()
    job.working_vmx.write_text(
        lines + 'ide1:0.present = "TRUE"\nide1:0.deviceType = "cdrom-raw"\nide1:0.fileName = "/dev/sr0"\n'
        'uuid.location = "56 4d|22|0Ahgfs.linkRootShare = |22TRUE"\n'
    )
    job.own(job.working_vmx)
    with running(job, host, "JobVMCheckpoint = true"):
        vmx = Vmx.decode(job.working_vmx.read_bytes())
        assert "ide1:0.present" not in vmx
        assert "hgfs.linkRootShare" not in vmx
        assert vmx["uuid.location"] == '56 4d"\nhgfs.linkRootShare = "TRUE'


class TestSharedDisks:
    """Transfer = False: the disks stay on a shared file system, which nothing may be written to."""

    @pytest.fixture
    def shared(self, job: VmwareJob) -> Path:
        directory = job.scratch.with_name("shared")
        directory.mkdir()
        job.disk.rename(directory / "dos.vmdk")
        job.own(directory)
        job.disk = directory / "dos.vmdk"
        return directory

    def ad(self, shared: Path) -> tuple[str, str]:
        return "VMPARAM_VMware_Transfer = false", f'VMPARAM_VMware_Dir = "{shared}"'

    def test_the_guest_writes_to_the_scratch_directory(self, job: VmwareJob, host: VMware, shared: Path) -> None:
        job.write_vmx('ide0:0.mode = "independent-persistent"')
        before = job.disk.read_bytes()
        with running(job, host, *self.ad(shared)) as peer:
            goes_on(job, beyond=1)
            does(peer, "STOP")
        assert [path.name for path in shared.iterdir()] == ["dos.vmdk"]
        assert job.disk.read_bytes() == before
        assert count_on(job.scratch / "dos-000001.vmdk") > 1

    def test_a_checkpoint_restarts_with_them(self, job: VmwareJob, host: VMware, shared: Path) -> None:
        last = vacate(job, host, *self.ad(shared))
        # A file of the parent's name in the scratch directory is another one.
        job.scratch.joinpath("dos.vmdk").write_text("something else")
        job.scratch.rename(job.scratch.with_name("dir_2"))
        job.scratch = job.scratch.with_name("dir_2")
        with running(job, host, "JobVMCheckpoint = true", *self.ad(shared)):
            goes_on(job, beyond=last)


def test_a_scratch_directory_behind_a_symbolic_link(job: VmwareJob, host: VMware) -> None:
    link = job.scratch.with_name("link")
    link.symlink_to(job.scratch)
    real, job.scratch = job.scratch, link
    with running(job, host) as peer:
        assert list(host.pids()) == [str(real / "dos_condor.vmx")]
        assert peer.run("STATUS", 1)[1] == "STATUS=Running"
    assert not host.pids()


def test_networking(job: VmwareJob, host: VMware) -> None:
    host.misbehave("tools")
    job.write_vmx('ethernet0.virtualDev = "e1000"', 'ethernet0.connectionType = "custom"')
    more = ["JobVMNetworking = true", 'JobVM_MACADDR = "00:50:56:12:34:56"']
    with running(job, host, *more, VM_NETWORKING=True, VM_NETWORKING_TYPE="nat, bridge") as peer:
        words = status(peer)
        assert (words["MAC"], words["IP"]) == ("00:50:56:12:34:56", "192.0.2.17")
        vmx = Vmx.decode(job.working_vmx.read_bytes())
        assert (vmx["ethernet0.connectionType"], vmx["ethernet0.addressType"]) == ("nat", "static")


@pytest.mark.parametrize(
    "lie",
    ["", 'case "$*" in *getGuestIPAddress*) echo "1.2.3.4 STATUS=Stopped"; exit;; esac'],
    ids=["no Tools", "an address of two words"],
)
def test_a_generated_address_is_told_and_nothing_that_is_none(job: VmwareJob, host: VMware, lie: str) -> None:
    settings = {"VM_NETWORKING": True, "VM_NETWORKING_TYPE": "nat", "VMWARE_VMRUN": lying(host, lie)}
    with running(job, host, "JobVMNetworking = true", **settings) as peer:
        words = status(peer)
        assert words["MAC"].startswith("00:0c:29:")
        assert "IP" not in words


class TestFailures:
    """A vmrun that hangs, lies or complains."""

    def test_noise_and_errors_that_end_with_status_0(self, job: VmwareJob, host: VMware) -> None:
        host.misbehave("noise", "exit0")
        with running(job, host) as peer:
            assert peer.run("STATUS", 1)[1] == "STATUS=Running"
            # The soft stop fails with status 0 for want of VMware Tools, and that must not count as done.
            does(peer, "STOP")
            assert not host.pids()
            assert "program compiled against libxml" in peer.quit()

    @pytest.mark.parametrize(
        ("mode", "settings", "code", "said"),
        [
            (
                "exit0 fail:start=The_file_is_already_in_use",
                {},
                "JOBCLASSAD_KVM_INVALID_DISK_PARAM",
                ["The file is already in use"],
            ),
            ("hang:all", {"VM_GAHP_REQ_TIMEOUT": 10}, "CRITICAL", ["vmrun does not answer"]),
            ("", {"VMWARE_VMRUN": "/nowhere/vmrun"}, "CRITICAL", ["VMWARE_VMRUN = /nowhere/vmrun"]),
            ("no disk", {}, "BAD_IMAGE", ["ide0:0.fileName", "'dos.vmdk'"]),
            ("no snapshot", {}, "JOBCLASSAD_MISMATCHED_HARDWARE_VT", ["would write to dos.vmdk itself"]),
            ("name is taken", {}, "JOBCLASSAD_MISMATCHED_HARDWARE_VT", ["dos_condor.vmx"]),
        ],
    )
    def test_a_start_that_fails_says_why_and_leaves_nothing(self, job, host, mode, settings, code, said):
        if mode == "no disk":
            job.disk.write_bytes(b"no disk at all")
        elif mode == "name is taken":
            job.working_vmx.mkdir()
        elif mode == "no snapshot":
            settings = {"VMWARE_VMRUN": lying(host, '[ "$3" != snapshot ] || exit 0')}
        else:
            host.misbehave(*mode.split())
        before, disk = sorted(path.name for path in job.scratch.iterdir()), job.disk.read_bytes()
        text = refused(job, host, code, **settings)
        assert [part for part in said if part not in text] == []
        assert sorted(path.name for path in job.scratch.iterdir()) == [*before, "vm_error.txt"]
        assert job.disk.read_bytes() == disk
        assert mode != "no disk" or not [line for line in host.calls() if " start " in line]

    @pytest.mark.parametrize("mode", ["hang:list", "unlisted"])
    def test_a_vm_that_is_not_listed_and_has_a_process_runs(self, job: VmwareJob, host: VMware, mode: str) -> None:
        with running(job, host, VM_GAHP_REQ_TIMEOUT=20) as peer:
            assert peer.run("STATUS", 1)[1] == "STATUS=Running"
            host.misbehave(mode)
            assert peer.run("STATUS", 1)[1] == "STATUS=Running"
            host.misbehave()
        assert not host.pids()

    @pytest.mark.parametrize(("mode", "said"), [("hang:stop", "does not answer within 2 s"), ("unclean", "killing")])
    def test_a_stop_in_vain_is_followed_by_a_kill(self, job: VmwareJob, host: VMware, mode: str, said: str) -> None:
        with running(job, host, VM_GAHP_REQ_TIMEOUT=20) as peer:
            host.misbehave(mode)
            does(peer, "STOP")
            assert not host.pids()
            assert said in peer.quit()


class TestEndings:
    """Whatever ends the daemon, no guest computes on without a job."""

    @pytest.mark.parametrize("mode", ["", "unlisted"])
    @pytest.mark.parametrize("dead", [True, False], ids=["dead", "alive"])
    def test_leftovers_of_the_same_job_are_cleared_and_the_vm_of_a_living_server_is_not(
        self, job: VmwareJob, host: VMware, scratch: Path, mode: str, dead: bool
    ) -> None:
        with running(job, host) as first:
            assert list(host.pids()) == [str(job.working_vmx)]
            other = scratch.with_name("dir_2")
            shutil.copytree(scratch, other)
            again = copy.copy(job)
            again.scratch = other
            for path in (other, *other.iterdir()):
                job.own(path)
            if dead:
                kill_guardian(Vmx.decode(job.working_vmx.read_bytes())["vmgahp.uuid"])
                first.end_by(signal.SIGKILL)
            host.misbehave(mode)
            with running(again, host) as second:
                here, there = str(job.working_vmx), str(other / "dos_condor.vmx")
                assert sorted(host.pids()) == ([there] if dead else sorted([here, there]))
                assert ("still runs from an earlier start" in second.quit()) is dead

    def test_a_start_clears_what_an_earlier_one_has_left(self, job: VmwareJob, host: VMware) -> None:
        left = ["dos_condor.vmss", "dos_condor.vmem", "vm_checkpoint.json.restarting"]
        for name in left:
            job.scratch.joinpath(name).write_bytes(b"left")
            job.own(job.scratch / name)
        with running(job, host):
            assert not [name for name in left if (job.scratch / name).exists()]

    @pytest.mark.parametrize("user", [64, None], ids=["the startd's user", "the job's user, with a UUID"])
    def test_the_kill_mode_ends_the_vm_of_a_directory_and_no_other(
        self, job: VmwareJob, host: VMware, user: int | None
    ) -> None:
        with running(job, host) as peer:
            another = job.scratch.with_name("dir_0")
            another.mkdir()
            job.own(another)
            kill(job, host, str(another), user=user)
            assert host.pids(), "the VM of another directory was killed"
            kill(job, host, str(job.scratch), "uuid", "another")
            assert host.pids(), "a late kill has hit the next VM"
            uuid = Vmx.decode(job.working_vmx.read_bytes())["vmgahp.uuid"]
            kill(job, host, str(job.scratch), *(() if user else ("uuid", uuid)), user=user)
            assert host.pids() == {}
            assert peer.run("STATUS", 1) == ["0", "STATUS=Stopped"]

    def test_a_vmrun_that_hangs_does_not_save_a_vm_from_the_kill_mode(self, job: VmwareJob, host: VMware) -> None:
        with running(job, host):
            host.misbehave("hang:all")
            kill(job, host, str(job.scratch), VM_GAHP_REQ_TIMEOUT=10)
            assert host.pids() == {}
            host.misbehave()
