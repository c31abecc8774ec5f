"""A vSphere server that is killed, restarts, hangs or fails, in the middle of each operation; and leftovers."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.drivers.support import does, status
from tests.drivers.vsphere import simulator
from tests.drivers.vsphere.simulator import BIG, CHECKPOINT, CRITICAL, INTERNAL, MANIFEST, Job, Lab, refused
from tests.lab.vcsim import PASSWORD, Vcsim
from tests.peer import Peer, kill_guardian
from vmgahp.config import Settings
from vmgahp.drivers.vsphere.connection import VsphereConnection
from vmgahp.drivers.vsphere.inventory import Inventory, Store
from vmgahp.errors import HOLD_CODES, JobFault
from vmgahp.testing.contract import until

pytestmark = pytest.mark.vsphere


def kept_whole(job: Job) -> None:
    """Nothing of the job's was changed, and nothing put beside it."""
    assert job.disk() == job.content
    ours = {"vm_error.txt", "vm_exit.json", "vm_metrics.jsonl", MANIFEST}
    names = set(os.listdir(job.scratch)) - ours
    assert names == {"disk-flat.vmdk", "disk.vmdk", "machine.vmx"}


def result(peer: Peer) -> list[str]:
    """The words of the one result that is on its way."""
    peer.wait_for_r()
    (line,) = peer.results()
    return line.split(" ")[1:]


def start_until(peer: Peer, lab: Lab, method: str) -> None:
    """A START that is on its way, and has come to this method of the server's."""
    peer.line()
    peer.send_ad(*lab.job.ad())
    peer.request("START", "vsphere")
    lab.sim.reached(method)


def request_until(peer: Peer, lab: Lab, operation: str, when: str) -> str:
    """An operation that is on its way, and has come to its method of the server's: the command."""
    command, method = OPERATIONS[operation]
    lab.sim.tell(f"at {method} hold 3000000" if method == "GET" else f"at {method} {when}")
    peer.request(command, 1)
    lab.sim.reached(method)
    return command


def fails_and_serves_on(peer: Peer) -> None:
    """The result on its way is a failure that does not hold the job, and the daemon is there."""
    code, word = result(peer)
    assert (code, word in HOLD_CODES) == ("1", False), word
    assert peer.ask("VERSION").startswith("S $VMGahpVersion")


# kill -9 of the server


TASKS = ["CreateVM_Task", "ReconfigVM_Task", "PowerOnVM_Task"]
STARTS = ["PUT hold 3000000", *(f"{method} {when}" for method in TASKS for when in ("hold", "after-hold"))]


@pytest.mark.parametrize("where", STARTS)
def test_the_server_is_killed_in_the_middle_of_a_start(both: Lab, where: str) -> None:
    both.job = Job(both.scratch, BIG)
    both.sim.tell(f"at {where}")
    with both.serve(**both.quick) as peer:
        start_until(peer, both, where.split()[0])
        both.sim.kill()
        fails_and_serves_on(peer)
        assert "vSphere" in (both.scratch / "vm_error.txt").read_text()
        peer.quit()
    kept_whole(both.job)
    both.again()
    with both.running():
        pass


OPERATIONS = {
    "status": ("STATUS", "RetrievePropertiesEx"),
    "suspend": ("SUSPEND", "SuspendVM_Task"),
    "snapshot": ("CHECKPOINT", "CreateSnapshot_Task"),
    "power off": ("CHECKPOINT", "PowerOffVM_Task"),
    "tag": ("CHECKPOINT", "ReconfigVM_Task"),
    "download": ("STOP", "GET"),
    "destroy": ("STOP", "Destroy_Task"),
    "remove the files": ("STOP", "DeleteDatastoreFile_Task"),
}


@pytest.mark.parametrize("when", ["hold", "after-hold"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_server_is_killed_in_the_middle_of_an_operation(both: Lab, operation: str, when: str) -> None:
    both.job = Job(both.scratch, BIG)
    with both.running(CHECKPOINT, **both.quick) as peer:
        request_until(peer, both, operation, when)
        both.sim.kill()
        fails_and_serves_on(peer)
        # A new server knows nothing of the VM: its guest has not ended in order, and the job not either.
        both.again()
        code, word = peer.run("STATUS", 1)[:2]
        if operation in ("destroy", "remove the files"):
            until(lambda: peer.run("STATUS", 1) == ["0", "STATUS=Stopped"], "its disks are downloaded")
        else:
            assert (code, word) == ("1", INTERNAL), word
    kept_whole(both.job)


def test_a_vm_that_was_removed_is_no_guest_that_has_ended(lab: Lab) -> None:
    with lab.watched() as (peer, server, vm):
        server.wait(vm.PowerOffVM_Task())
        server.wait(vm.Destroy_Task())
        assert peer.run("STATUS", 1) == ["1", INTERNAL]
        does(peer, "STOP")
        assert "its disks are lost" in peer.quit()


# The services of the server restart; its VMs live on


@pytest.mark.parametrize("where", [*STARTS, "PUT drop 3000000"])
def test_a_start_survives_a_restart_of_the_services(both: Lab, where: str) -> None:
    both.job = Job(both.scratch, BIG)
    both.sim.tell(f"at {where}")
    with both.serve() as peer:
        start_until(peer, both, where.split()[0])
        both.sim.tell("down")
        both.sim.tell("up")
        assert result(peer) == ["0", "1"]
        server = both.server()
        vm = server.job()
        disks = [one for one in server.get(vm, "config.hardware.device") if hasattr(one, "capacityInKB")]
        assert (server.power(vm), len(disks)) == ("poweredOn", 1)
        assert (server.directory(vm) / "disk-scsi0-0-flat.vmdk").read_bytes() == BIG
        peer.quit()
        assert server.left() == ({}, [])


@pytest.mark.parametrize("when", ["hold", "after-hold"])
@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "snapshot"])
def test_an_operation_survives_a_restart_of_the_services(lab: Lab, operation: str, when: str) -> None:
    lab.job = Job(lab.scratch, BIG)
    with lab.running(CHECKPOINT) as peer:
        command = request_until(peer, lab, operation, when)
        lab.sim.tell("down")
        lab.sim.tell("up")
        assert result(peer)[0] == "0"
        server = lab.server()
        if command == "STOP":
            assert server.left() == ({}, [])
        elif command == "SUSPEND":
            assert server.power(server.job()) == "suspended"
    kept_whole(lab.job)


def test_a_download_continues_where_it_was(lab: Lab) -> None:
    lab.job = Job(lab.scratch, BIG)
    with lab.running() as peer:
        lab.sim.tell("at GET drop 5000000")
        peer.request("STOP", 1)
        lab.sim.reached("GET")
        lab.sim.tell("at GET drop 5000000")  # which is more than what is left
        assert result(peer) == ["0", "NULL"]
        assert peer.quit().count("broke off, once more") == 1
    kept_whole(lab.job)


def test_a_download_that_keeps_failing_is_tried_again_at_the_next_status(lab: Lab) -> None:
    with lab.watched(**lab.quick) as (peer, server, vm):
        server.guest_powers_off(vm)
        lab.sim.tell("at GET hold 0")
        assert status(peer)["STATUS"] == "Running"
        lab.sim.reached("GET")
        lab.sim.tell("down")
        until(lambda: peer.run("STATUS", 1)[0] == "1", "the download has failed")
        kept_whole(lab.job)
        lab.sim.tell("up")
        until(lambda: peer.run("STATUS", 1) == ["0", "STATUS=Stopped"], "the disks are downloaded")
    kept_whole(lab.job)


def test_a_session_that_expires_is_renewed(both: Lab) -> None:
    with both.running() as peer:
        for command in ("STATUS", "SUSPEND", "RESUME", "STATUS", "STOP"):
            both.sim.tell("logout")
            assert peer.run(command, 1)[0] == "0", command
        assert "logging in at the vSphere server again" in peer.quit()
    kept_whole(both.job)


@pytest.mark.parametrize("how", ["logout", "forget"])
def test_a_session_that_expires_before_a_transfer(lab: Lab, how: str) -> None:
    lab.sim.tell("at CreateVM_Task after-hold")
    with lab.serve() as peer:
        start_until(peer, lab, "CreateVM_Task")
        lab.sim.tell(how)
        lab.sim.tell("go")
        assert result(peer) == ["0", "1"]
        peer.quit()


def test_a_server_that_hangs_is_not_waited_for(lab: Lab) -> None:
    with lab.running(**lab.quick) as peer:
        with lab.sim.hanging():
            assert peer.run("STATUS", 1) == ["1", CRITICAL]
        until(lambda: peer.run("STATUS", 1)[0] == "0", "it answers again")


@pytest.mark.parametrize("method", TASKS)
def test_a_task_that_never_ends(lab: Lab, method: str) -> None:
    lab.sim.tell(f"at {method} stall")
    word, text, _ = refused(lab, **lab.quick)
    assert (word, "within 4 s" in text) == (INTERNAL, True), text
    assert lab.server().jobs() == {}


@pytest.mark.parametrize(
    ("method", "fault", "word"),
    [
        ("CreateVM_Task", "NoPermission", CRITICAL),
        ("CreateVM_Task", "VirtualHardwareVersionNotSupported", "VMGAHP_ERR_JOBCLASSAD_MISMATCHED_HARDWARE_VT"),
        ("CreateVM_Task", "InvalidDatastore", CRITICAL),
        ("ReconfigVM_Task", "InvalidDeviceSpec", "VMGAHP_ERR_JOBCLASSAD_MISMATCHED_HARDWARE_VT"),
        ("ReconfigVM_Task", "InvalidDiskFormat", "VMGAHP_ERR_BAD_IMAGE"),
        ("PowerOnVM_Task", "InsufficientMemoryResourcesFault", CRITICAL),
        ("PowerOnVM_Task", "NoDiskSpace", CRITICAL),
        ("PowerOnVM_Task", "RestrictedVersion", CRITICAL),
        ("PowerOnVM_Task", "FileLocked", INTERNAL),
    ],
)
def test_a_start_whose_task_fails_leaves_nothing_behind(both: Lab, method: str, fault: str, word: str) -> None:
    both.sim.tell(f"at {method} fail {fault}")
    found, text, _ = refused(both)
    assert (found, fault in text) == (word, True), text
    assert both.server().left() == ({}, [])
    kept_whole(both.job)


# Leftovers, kill mode, guardian


def crash(peer: Peer, uuid: str) -> None:
    """The execute machine loses its power: the server of this VM and its guardian are gone at once."""
    kill_guardian(uuid)
    peer.end_by(signal.SIGKILL)


def test_a_server_killed_in_the_middle_of_an_upload_leaves_nothing(lab: Lab) -> None:
    lab.job = Job(lab.scratch, BIG)
    lab.sim.tell("at PUT hold 3000000")
    with lab.serve() as peer:
        start_until(peer, lab, "PUT")
        server = lab.server()
        assert any("flat" in name for name in server.files())
        peer.process.kill()
        until(lambda: server.files() == [], "the half uploaded disk is gone")
        assert server.jobs() == {}


def test_a_start_that_failed_with_its_server_away_is_cleared_by_the_guardian(lab: Lab) -> None:
    with lab.serve(**lab.quick) as peer:
        lab.sim.tell("at PowerOnVM_Task after-hold")
        start_until(peer, lab, "PowerOnVM_Task")
        lab.sim.tell("down")
        assert result(peer)[0] == "1"
        lab.sim.tell("up")
        server = lab.server()
        assert len(server.jobs()) == 1
        peer.quit()
    until(lambda: server.jobs() == {}, "the guardian has removed the VM")


def test_what_a_crash_left_of_another_job_is_cleared_once_its_directory_is_gone(lab: Lab) -> None:
    gone = lab.other_scratch("dir_7")
    with lab.watched(job=Job(gone)) as (peer, server, left):
        crash(peer, server.tags(left)["id"])
    with lab.running():
        assert left in server.jobs().values(), "the job may still run"
    shutil.rmtree(gone)
    with lab.running():
        assert left not in server.jobs().values()


def test_a_late_kill_does_not_hit_the_next_vm_of_the_directory(lab: Lab) -> None:
    with lab.running() as peer:
        assert lab.killing(lab.scratch, "uuid", "00000000-0000-0000-0000-000000000000").returncode == 0
        assert status(peer)["STATUS"] == "Running"


def test_an_administrator_removes_a_checkpoint_by_the_name_of_its_vm(lab: Lab) -> None:
    server = lab.vacate()
    assert len(server.jobs()) == 1
    assert "does not exist" in lab.killing("alice_lab_1.0").stderr
    assert len(server.jobs()) == 1
    assert "was destroyed" in lab.killing(lab.job.name).stderr
    assert server.left() == ({}, [])


def test_what_another_execute_host_runs_is_left_alone(lab: Lab) -> None:
    with lab.watched() as (peer, server, theirs):
        crash(peer, server.tags(theirs)["id"])
    server.configure(theirs, vmgahp__host="elsewhere 0123456789abcdef")
    assert lab.killing(lab.scratch).returncode == 0
    with lab.running():
        assert theirs in server.jobs().values()
        assert server.power(theirs) == "poweredOn"
    assert server.job() == theirs


def test_a_killed_server_keeps_the_last_periodic_checkpoint(lab: Lab) -> None:
    with lab.watched(CHECKPOINT) as (peer, server, vm):
        does(peer, "CHECKPOINT")
        assert status(peer)["STATUS"] == "Running"
        peer.end_by(signal.SIGKILL)
        until(lambda: server.tags(vm)["state"] == "saved", "the guardian has switched the VM off")
    assert server.power(vm) == "poweredOff"
    with lab.running(CHECKPOINT, scratch=lab.other_scratch()):
        assert server.job() == vm


# Who may come in


def test_a_wrong_password(both: Lab) -> None:
    both.password.write_text("wrong\n")
    word, text, log = refused(both)
    assert (word, "InvalidLogin" in text) == (CRITICAL, True), text
    assert "wrong" not in log.replace("wrong_", "")
    attributes, said = both.probe()
    assert (attributes, "InvalidLogin" in said) == ({}, True), said


def test_neither_password_nor_session_can_be_seen(lab: Lab) -> None:
    seen = []
    with lab.running(VM_GAHP_DEBUG="D_FULLDEBUG") as peer:
        lab.sim.tell("logout")
        status(peer)
        ended = lab.killing(lab.other_scratch())
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != lab.sim.process.pid:
                try:
                    content = [Path(f"/proc/{name}/{file}").read_bytes() for file in ("cmdline", "environ")]
                except OSError:
                    continue
                if any(bytes(lab.scratch.parent) in part for part in content):  # tests beside this have simulators too
                    seen += [part.decode("utf-8", "replace") for part in content]
        seen += [peer.quit(), ended.stderr]
    assert len(seen) > 2
    for secret in (PASSWORD, "&amp; &lt;secret", "vmware_soap_session"):
        assert [text for text in seen if secret in text] == []


@pytest.mark.parametrize("pinned", [True, False])
def test_a_certificate_that_is_not_accepted(lab: Lab, tmp_path: Path, pinned: bool) -> None:
    with Vcsim(tmp_path / "other") as other:
        pin = other.certificate
    word, text, _ = refused(lab, VSPHERE_TLS_PIN=pin if pinned else "")
    assert (word, "is not accepted" in text, "VSPHERE_TLS_PIN" in text) == (CRITICAL, True, True), text


def test_an_authority_may_vouch_for_a_certificate_and_verification_may_be_off(lab: Lab) -> None:
    with Peer(lab.environ(VSPHERE_TLS_PIN="") | {"SSL_CERT_FILE": str(lab.sim.certificate)}) as peer:
        simulator.start(peer, lab.job)
        peer.quit()
    with lab.running(VSPHERE_TLS_PIN="", VSPHERE_TLS_VERIFY=False):
        pass
    _, said = lab.probe(VSPHERE_TLS_PIN="", VSPHERE_TLS_VERIFY=False)
    assert "not offered: tls" in said


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_password_file_that_others_may_use(lab: Lab, mode: int) -> None:
    lab.password.chmod(mode)
    word, text, _ = refused(lab)
    said = [words in text for words in ("VSPHERE_PASSWORD_FILE", "chmod 0600", PASSWORD)]
    assert (word, said) == (CRITICAL, [True, True, False]), text


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_password_file_of_a_stranger(lab: Lab) -> None:
    os.chown(lab.password, 54322, 54322)
    word, text, _ = refused(lab)
    assert (word, "uid 54322" in text) == (CRITICAL, True)


def test_the_probe(both: Lab) -> None:
    server = simulator.Server(both.sim)

    def sessions() -> set[str]:
        return {session.key for session in server.get(server.content.sessionManager, "sessionList")}

    before = sessions()
    attributes, said = both.probe(VM_NETWORKING=True, VM_NETWORKING_TYPE="nat,bridge")
    wanted = {
        **dict.fromkeys(("VM_Type", "VM_TYPES", "VM_HYPERVISORS"), "vsphere"),
        "VM_vsphere_ATTR_kind": "vcenter" if both.sim.model == "vpx" else "esxi",
        "VM_vsphere_ATTR_version": "6.5.0",
        "VM_vsphere_ATTR_snapshot": "TRUE",
        "VM_Networking_Types": "nat,bridge" if both.sim.model == "vpx" else "nat",
    }
    assert attributes.items() >= wanted.items(), said
    assert sessions() == before, "the server's sessions are limited"
    if both.sim.model == "esx":
        assert "DC0_DVPG0" in said


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"VSPHERE_DATACENTER": "nowhere"}, "no such data center: DC0"),
        ({"VSPHERE_DATASTORE": "nowhere"}, "no such datastore: LocalDS_0"),
        ({"VSPHERE_RESOURCE_POOL": ""}, "not exactly one host or cluster: DC0_H0, DC0_C0"),
        ({"VSPHERE_RESOURCE_POOL": "nowhere"}, "no such host or cluster: DC0_H0, DC0_C0"),
        ({"VSPHERE_RESOURCE_POOL": "DC0_C0/nowhere"}, "no such resource pool"),
        ({"VSPHERE_FOLDER": "nowhere"}, "no such folder"),
        ({"VSPHERE_HOST": ""}, "VSPHERE_HOST is not set"),
        ({"VSPHERE_USER": ""}, "VSPHERE_USER is not set"),
    ],
)
def test_what_is_not_there_is_named(tmp_path, scratch, password, program, values, said):
    with Vcsim(tmp_path / "sim", "vpx") as sim:
        attributes, text = Lab(sim, scratch, password).probe(**values)
    assert (attributes, said in text) == ({}, True), text


def test_a_probe_of_a_server_that_hangs_ends_in_time(lab: Lab) -> None:
    with lab.sim.hanging():
        attributes, said = lab.probe()
    assert (attributes, "not VM-capable" in said) == ({}, True), said


def test_a_quit_gives_a_download_up(lab: Lab) -> None:
    lab.job = Job(lab.scratch, BIG)
    with lab.watched() as (peer, server, vm):
        server.guest_powers_off(vm)
        lab.sim.tell("at GET hold 3000000")
        assert status(peer)["STATUS"] == "Running"
        lab.sim.reached("GET")
        peer.send("QUIT")
        lab.sim.tell("go")
        assert peer.line() == "S"
        log = peer.finish()
    assert "canceled" in log or "its disks are downloaded" in log
    assert server.jobs() == {}
    kept_whole(lab.job)


def test_an_upload_that_takes_longer_than_a_start_may_holds_the_job(lab: Lab) -> None:
    values = {name: str(value) for name, value in simulator.settings(lab.sim, lab.password, VM_MEMORY=64).items()}
    connection = VsphereConnection(Settings(values), print)
    store = Store(connection, Inventory(connection, Settings(values)).place(), print)
    with open(lab.scratch / "disk-flat.vmdk", "rb") as file, pytest.raises(JobFault) as caught:
        store.upload(file.fileno(), "disk.vmdk", "x-flat.vmdk", time.monotonic() - 1)
    assert "VM_GAHP_REQ_TIMEOUT" in caught.value.render()
    connection.close()
