"""The vSphere driver against VMware's own simulator: an ESXi host and a vCenter, jobs and their checkpoints.

The simulator runs no guests. What a guest does (power off, write to its disk, get an address) is done to its
VM from outside; see `tests.drivers.vsphere.simulator.Server`.
"""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.drivers.support import content_of, does, status
from tests.drivers.vsphere import simulator
from tests.drivers.vsphere.simulator import BIG, CHECKPOINT, CRITICAL, MANIFEST, MIB, VMX, Job, Lab, powers_off
from tests.lab.vcsim import Vcsim
from tests.peer import DEADLINE, kill_guardian
from vmgahp.testing.contract import until

pytestmark = pytest.mark.vsphere


# A job's lifecycle


def test_a_job_runs_to_its_own_end(both: Lab) -> None:
    kind = "bridge" if both.sim.model == "vpx" else "nat"
    more = ["JobVMNetworking = TRUE", f'JobVMNetworkingType = "{kind}"', 'JobVM_MACADDR = "00:50:56:01:02:03"']
    settings = {"VM_NETWORKING": True, "VM_NETWORKING_TYPE": "nat,bridge", "VM_REPORT_ADDRESS": True}
    theirs = both.server().vms()
    with both.watched(*more, **settings) as (peer, server, vm):
        assert server.get(vm, "name").startswith(both.job.name)
        wanted = {"hardware.memoryMB": 64, "hardware.numCPU": 2, "guestId": "ubuntu64Guest", "version": "vmx-13"}
        assert {name: server.get(vm, f"config.{name}") for name in wanted} == wanted
        devices = {type(one).__name__.rpartition(".")[2]: one for one in server.get(vm, "config.hardware.device")}
        disk, card = devices["VirtualDisk"], devices["VirtualVmxnet3"]
        assert (disk.capacityInKB, disk.controllerKey) == (1024, devices["VirtualLsiLogicController"].key)
        assert card.macAddress == "00:50:56:01:02:03"
        if both.sim.model == "vpx":
            assert server.get(vm, "resourcePool") != server.get(server.vms()["DC0_H0_VM0"], "resourcePool")
            assert card.backing.port.portgroupKey
        else:
            assert card.backing.deviceName == "VM Network"
        assert (server.directory(vm) / "disk-scsi0-0-flat.vmdk").read_bytes() == both.job.content
        assert "VMFS" in (server.directory(vm) / "disk-scsi0-0.vmdk").read_text()

        server.set(vm, guest__ipAddress="10.1.2.3", summary__runtime__maxCpuUsage=2000)
        server.set(vm, summary__quickStats__overallCpuUsage=1000, summary__quickStats__hostMemoryUsage=48)
        seen = status(peer)
        told = {"STATUS": "Running", "MAC": "00:50:56:01:02:03", "IP": "10.1.2.3"}
        told |= {"MEMORY": str(48 * 1024), "MAXMEMORY": str(64 * 1024)}
        assert {name: seen[name] for name in told} == told
        until(lambda: float(status(peer)["CPUTIME"]) > 0, "CPU time is counted")
        assert peer.run("GETPID", 1) == ["0", "0"]

        (server.directory(vm) / "disk-scsi0-0-flat.vmdk").write_bytes(b"written by the guest".ljust(MIB, b"\0"))
        powers_off(peer, server, vm)
        # From this answer on the starter sends the files away.
        assert both.job.disk() == b"written by the guest".ljust(MIB, b"\0")
        assert (both.scratch / "disk-flat.vmdk").stat().st_uid == both.scratch.stat().st_uid
        assert server.left() == ({}, [])
        ours = ["vm_exit.json", "vm_metrics.jsonl"]
        assert sorted(os.listdir(both.scratch)) == ["disk-flat.vmdk", "disk.vmdk", "machine.vmx", *ours]
        does(peer, "STOP")
        assert "downloading disk.vmdk (1.0 MiB): 100 %" in peer.quit()
    assert server.vms() == theirs, "VMs that are no jobs are left alone"
    assert {server.power(vm) for vm in theirs.values()} == {"poweredOn"}


def test_it_counts_as_running_until_its_disks_are_downloaded(lab: Lab) -> None:
    lab.job = Job(lab.scratch, BIG)
    with lab.watched() as (peer, server, vm):
        (server.directory(vm) / "disk-scsi0-0-flat.vmdk").write_bytes(BIG[::-1])
        lab.sim.tell("at GET hold 3000000")
        server.guest_powers_off(vm)
        assert status(peer)["STATUS"] == "Running"
        lab.sim.reached("GET")
        for _ in range(3):
            assert status(peer)["STATUS"] == "Running"
        assert lab.job.disk() == BIG, "a disk that is not all there must not replace the job's"
        assert peer.run("SUSPEND", 1) == ["1", "VMGAHP_ERR_VM_INVALID_OPERATION"]
        lab.sim.tell("go")
        until(lambda: status(peer)["STATUS"] == "Stopped", "the VM has stopped")
        assert lab.job.disk() == BIG[::-1]


@pytest.mark.parametrize("tools", [True, False], ids=["with Tools", "without Tools"])
def test_stop_shuts_the_guest_down_and_downloads_its_disks(both: Lab, tools: bool) -> None:
    with both.watched() as (peer, server, vm):
        if tools:
            server.set(vm, guest__toolsRunningStatus="guestToolsRunning")
        (server.directory(vm) / "disk-scsi0-0-flat.vmdk").write_bytes(b"e" * MIB)
        both.sim.tell("at PowerOffVM_Task fail RestrictedVersion")
        result = peer.run("STOP", 1)
        if tools:
            assert result == ["0", "NULL"], "a guest that shuts down need not be powered off"
        else:
            assert result[0] == "1", "without Tools it can only be powered off"
            does(peer, "STOP")
        assert (both.job.disk(), *server.left()) == (b"e" * MIB, {}, [])


def test_a_job_without_output_leaves_nothing_to_send(lab: Lab) -> None:
    with lab.watched("VMPARAM_No_Output_VM = TRUE") as (peer, server, _):
        powers_off(peer, server)
        assert (list(lab.scratch.iterdir()), server.jobs()) == ([], {})
        assert "downloading" not in peer.quit()


@pytest.mark.parametrize(
    "user", ['al ice%2f"[LocalDS_0]\\x$(id)`id`@lab', "-rf --@lab", "älice ☃@lab", "a" * 120 + "@lab", "..@lab"]
)
def test_a_name_with_odd_characters(lab: Lab, user: str) -> None:
    escaped = user.replace('"', '\\"')
    with lab.watched(f'User = "{escaped}"') as (peer, server, vm):
        assert len(server.get(vm, "name")) <= 80
        assert server.tags(vm)["name"] == f"{user.replace('@', '_')}_{lab.job.cluster}.0"
        assert server.directory(vm).parent == lab.sim.datastore()
        powers_off(peer, server, vm)
        assert server.files() == []


def test_a_shared_disk_is_downloaded_under_a_name_of_its_own(lab: Lab) -> None:
    shared = lab.scratch.parent / "shared"
    shared.mkdir()
    for name in ("disk.vmdk", "disk-flat.vmdk"):
        shutil.move(lab.scratch / name, shared / name)
    shared.chmod(0o755)
    more = [f'VMPARAM_VMware_Dir = "{shared}"', "VMPARAM_VMware_Transfer = FALSE", "VMPARAM_VMware_SnapshotDisk = TRUE"]
    with lab.watched(*more) as (peer, server, vm):
        (server.directory(vm) / "disk-scsi0-0-flat.vmdk").write_bytes(b"s" * MIB)
        powers_off(peer, server, vm)
        assert (shared / "disk-flat.vmdk").read_bytes() == lab.job.content
        assert lab.job.disk() == b"s" * MIB
        assert content_of(lab.scratch / "disk.vmdk", "vmdk") == b"s" * MIB


@pytest.mark.skipif(shutil.which("qemu-img") is None, reason="needs qemu-img")
@pytest.mark.parametrize("subformat", ["monolithicSparse", "twoGbMaxExtentSparse", "streamOptimized"])
def test_a_disk_that_is_not_flat_is_converted_there_and_back(lab: Lab, subformat: str) -> None:
    raw = lab.scratch.parent / "disk.raw"
    raw.write_bytes(lab.job.content + b"\0" * MIB)
    for old in lab.scratch.glob("disk*"):
        old.unlink()
    command = ["qemu-img", "convert", "-f", "raw", "-O", "vmdk", "-o", f"subformat={subformat}"]
    subprocess.run([*command, raw, lab.scratch / "disk.vmdk"], check=True, timeout=DEADLINE)
    lab.job.own()
    names = ",".join(path.name for path in lab.scratch.glob("disk*"))
    with lab.watched(f'VMPARAM_VMware_VMDK_Files = "{names}"') as (peer, server, vm):
        disk = server.directory(vm) / "disk-scsi0-0-flat.vmdk"
        assert disk.read_bytes() == raw.read_bytes()
        disk.write_bytes(b"g" * (2 * MIB))
        powers_off(peer, server)
        assert content_of(lab.scratch / "disk.vmdk", "vmdk") == b"g" * (2 * MIB)
        assert not list(lab.scratch.glob(".*"))


def test_images_and_serial_ports(lab: Lab) -> None:
    more = """\
ide1:0.present = "TRUE"
ide1:0.deviceType = "cdrom-image"
ide1:0.fileName = "tools.iso"
ide0:0.present = "TRUE"
ide0:0.deviceType = "cdrom-raw"
ide0:0.fileName = "/dev/cdrom"
serial0.present = "TRUE"
serial0.fileType = "file"
serial0.fileName = "console.txt"
serial1.present = "TRUE"
serial1.fileType = "device"
serial1.fileName = "/dev/ttyS0"
"""
    (lab.scratch / "machine.vmx").write_text(VMX + more)
    (lab.scratch / "tools.iso").write_bytes(b"iso")
    lab.job.own()
    with lab.watched() as (peer, server, vm):
        backings = [device.backing for device in server.get(vm, "config.hardware.device")]
        files = {backing.fileName for backing in backings if hasattr(backing, "fileName")}
        directory = server.get(vm, "config.files.vmPathName").rpartition("/")[0]
        names = ("disk-scsi0-0.vmdk", "cdrom-ide1-0.iso", "serial-serial0.txt")
        assert files == {f"{directory}/{name}" for name in names}
        assert (server.directory(vm) / "cdrom-ide1-0.iso").read_bytes() == b"iso"
        (server.directory(vm) / "serial-serial0.txt").write_text("login:")
        powers_off(peer, server, vm)
        assert (lab.scratch / "console.txt").read_text() == "login:"
        assert "is without ide0:0 (a device of the host), serial1" in peer.quit()


# Suspend and checkpoints


def test_a_checkpoint_restarts_on_another_machine(both: Lab) -> None:
    with both.watched(CHECKPOINT) as (peer, server, vm):
        name = server.get(vm, "name")
        does(peer, "CHECKPOINT")
        assert server.power(vm) == "poweredOff"
        (tree,) = server.get(vm, "snapshot").rootSnapshotList
        does(peer, "STOP")
    assert list(server.jobs()) == [name], "the checkpoint waits on the server"
    tags = server.tags(vm)
    assert (tags["state"], tags["directory"], tags["host"]) == ("saved", "", "")
    assert both.job.disk() == both.job.content
    assert both.killing(both.scratch).returncode == 0
    assert list(server.jobs()) == [name], "no kill of the old directory may hit it"

    elsewhere = both.other_scratch()
    with both.running(CHECKPOINT, scratch=elsewhere) as peer:
        assert list(server.jobs()) == [name], "it is the same VM"
        assert server.power(vm) == "poweredOn"
        assert server.get(vm, "snapshot").currentSnapshot == tree.snapshot
        assert server.tags(vm)["directory"] == str(elsewhere)
        (server.directory(vm) / "disk-scsi0-0-flat.vmdk").write_bytes(b"c" * MIB)
        powers_off(peer, server, vm)
        assert (elsewhere / "disk-flat.vmdk").read_bytes() == b"c" * MIB
        assert not (elsewhere / MANIFEST).exists()
        assert server.jobs() == {}
        assert "uploading" not in peer.quit(), "the disks were on the server"


def test_a_suspended_guest_is_resumed_or_checkpointed_whoever_has_suspended_it(lab: Lab) -> None:
    with lab.watched(CHECKPOINT) as (peer, server, vm):
        server.wait(vm.SuspendVM_Task())
        assert status(peer) == {"STATUS": "Suspended"}
        does(peer, "RESUME")
        assert server.power(vm) == "poweredOn"
        does(peer, "SUSPEND", "CHECKPOINT")
        (tree,) = server.get(vm, "snapshot").rootSnapshotList
        assert tree.state == "poweredOn", "a snapshot has the memory of a guest that runs"


def test_a_checkpoint_that_fails_leaves_the_guest_running(lab: Lab) -> None:
    with lab.watched(CHECKPOINT) as (peer, server, vm):
        lab.sim.tell("at CreateSnapshot_Task fail NoDiskSpace")
        assert peer.run("CHECKPOINT", 1) == ["1", CRITICAL]
        assert (server.power(vm), status(peer)["STATUS"]) == ("poweredOn", "Running")
        lab.sim.tell("at ReconfigVM_Task fail RestrictedVersion")
        assert peer.run("CHECKPOINT", 1) == ["1", CRITICAL]
        assert server.power(vm) == "poweredOn"
        assert not (lab.scratch / MANIFEST).exists()


def test_the_power_off_of_a_checkpoint_that_failed_is_not_the_end_of_the_guest(lab: Lab) -> None:
    with lab.watched(CHECKPOINT) as (peer, server, vm):
        lab.sim.tell("at PowerOffVM_Task fail RestrictedVersion")
        lab.sim.tell("at RevertToSnapshot_Task fail RestrictedVersion")
        assert peer.run("CHECKPOINT", 1) == ["1", CRITICAL]
        server.wait(vm.PowerOffVM_Task())  # which was under way, and whose answer was lost
        assert (status(peer)["STATUS"], server.power(vm)) == ("Running", "poweredOn")
        does(peer, "CHECKPOINT")


def test_a_guest_that_runs_on_after_a_checkpoint_that_failed_has_an_end(lab: Lab) -> None:
    with lab.watched(CHECKPOINT) as (peer, server, vm):
        lab.sim.tell("at PowerOffVM_Task fail RestrictedVersion")
        lab.sim.tell("at RevertToSnapshot_Task fail RestrictedVersion")
        assert peer.run("CHECKPOINT", 1) == ["1", CRITICAL]
        assert status(peer)["STATUS"] == "Running"
        server.wait(vm.PowerOffVM_Task())
        until(lambda: status(peer)["STATUS"] == "Stopped", "its disks are here")


def test_periodic_checkpoints(lab: Lab) -> None:
    with lab.watched(CHECKPOINT) as (peer, server, vm):
        seen = []
        for _ in range(2):
            does(peer, "CHECKPOINT")
            seen.append(json.loads((lab.scratch / MANIFEST).read_text())["facts"]["snapshot"])
            # The next STATUS says that the files have been sent away.
            assert (status(peer)["STATUS"], server.power(vm)) == ("Running", "poweredOn")
        assert seen[0] != seen[1]
        names = [tree.name for tree in server.get(vm, "snapshot").rootSnapshotList]
        assert names == [seen[1]], "the one before is in nobody's spool directory any more"
        # The daemon is told to end, and the job will come back with the manifest of its last checkpoint.
    assert (server.power(vm), server.tags(vm)["state"]) == ("poweredOff", "saved")
    with lab.running(CHECKPOINT, scratch=lab.other_scratch()):
        assert server.job() == vm


def test_a_checkpoint_of_another_job_is_not_believed(lab: Lab) -> None:
    server = lab.vacate()
    victim = server.job()
    elsewhere = lab.other_scratch()
    with lab.running(CHECKPOINT, job=Job(elsewhere)) as peer:
        assert (server.power(victim), server.tags(victim)["state"]) == ("poweredOff", "saved")
        assert (elsewhere / f"{MANIFEST}.refused-1").exists()
        assert "it is another job's" in peer.quit()
    assert list(server.jobs().values()) == [victim]


def test_a_manifest_that_cannot_be_read_is_set_aside(lab: Lab) -> None:
    (lab.scratch / MANIFEST).write_bytes(b"{}")
    lab.job.own()
    with lab.running(CHECKPOINT):
        assert (lab.scratch / f"{MANIFEST}.refused-1").read_bytes() == b"{}"


def test_a_checkpoint_whose_job_does_not_come_back_expires(lab: Lab) -> None:
    server = lab.vacate()
    lost = server.job()
    other = lab.other_scratch()
    (other / MANIFEST).unlink()
    with lab.running(job=Job(other)):
        assert lost in server.jobs().values()
    server.configure(lost, vmgahp__expires="1")
    with lab.running(job=Job(other)) as peer:
        assert lost not in server.jobs().values()
        assert "has waited for its job for too long" in peer.quit()


def test_a_suspended_vm_that_somebody_switched_off_is_neither_booted_anew_nor_done(lab: Lab) -> None:
    with lab.watched(CHECKPOINT) as (peer, server, vm):
        does(peer, "SUSPEND")
        server.wait(vm.PowerOffVM_Task())
        for command in ("RESUME", "CHECKPOINT"):
            assert peer.run(command, 1) == ["1", "VMGAHP_ERR_VM_INVALID_OPERATION"], command
        assert server.power(vm) == "poweredOff"
        for _ in range(2):
            assert peer.run("STATUS", 1) == ["1", simulator.INTERNAL], "its memory is lost, and the job must run again"
        does(peer, "STOP")
        assert server.left() == ({}, [])


@pytest.mark.parametrize("alive", [True, False])
def test_the_vm_of_a_job_of_the_same_name_is_left_alone_while_its_server_lives(lab: Lab, alive: bool) -> None:
    """Two schedds that say no GlobalJobId have jobs of one name."""
    nameless = "GlobalJobId = UNDEFINED"
    with lab.watched(nameless) as (first, server, vm):
        other = lab.other_scratch()
        if not alive:
            kill_guardian(server.tags(vm)["id"])
            first.end_by(signal.SIGKILL)
        with lab.running(nameless, scratch=other):
            assert (vm in server.jobs().values()) is alive
            assert len(server.jobs()) == 1 + alive


def test_vms_go_where_the_settings_say(program: Path, tmp_path: Path, scratch: Path, password: Path) -> None:
    with Vcsim(tmp_path / "sim", "vpx") as sim:
        lab = Lab(sim, scratch, password)
        server = lab.server()
        (datacenter,) = server.get(server.content.rootFolder, "childEntity")
        jobs = server.get(datacenter, "vmFolder").CreateFolder("batch").CreateFolder("jobs 1")
        clusters = server.get(server.get(datacenter, "hostFolder"), "childEntity")
        (top,) = (server.get(one, "resourcePool") for one in clusters if server.get(one, "name") == "DC0_C0")
        from pyVmomi import vim

        shares = vim.ResourceAllocationInfo(
            reservation=0, expandableReservation=True, limit=-1, shares=vim.SharesInfo(level="normal", shares=0)
        )
        pool = top.CreateResourcePool("batch", vim.ResourceConfigSpec(cpuAllocation=shares, memoryAllocation=shares))
        at = {"VSPHERE_DATACENTER": "DC0", "VSPHERE_FOLDER": "/batch/jobs 1/", "VSPHERE_RESOURCE_POOL": "DC0_C0/batch"}
        with lab.running(**at):
            (vm,) = server.get(jobs, "childEntity")
            assert server.get(vm, "resourcePool") == pool
            assert lab.killing(lab.scratch, **at).returncode == 0
            assert not server.get(jobs, "childEntity")


def test_a_vm_that_writes_to_another_disk_than_the_uploaded_one_is_not_taken_for_good(lab: Lab) -> None:
    from pyVmomi import vim

    with lab.watched() as (peer, server, vm):
        (disk,) = (one for one in server.get(vm, "config.hardware.device") if hasattr(one, "capacityInKB"))
        remove = vim.vm.device.VirtualDeviceSpec(operation="remove", device=disk)
        server.wait(vm.ReconfigVM_Task(vim.vm.ConfigSpec(deviceChange=[remove])))
        server.guest_powers_off(vm)
        until(lambda: peer.run("STATUS", 1)[0] == "1", "somebody is told")
        assert lab.job.disk() == lab.job.content
        assert "has written to another file" in peer.quit()
