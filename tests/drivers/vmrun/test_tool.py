"""Calls of vmrun, whose fault their errors are, and what a machine with VMware advertises."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.lab.programs import a_program
from tests.lab.vmware import vmware
from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.daemon import probe
from vmgahp.drivers.vmrun import VmrunDriver, tool
from vmgahp.drivers.vmrun.tool import Hanging, Tool, VmrunError, find_process, from_vmrun, is_still, wait_for_end
from vmgahp.findings import BAD, OFF, OK
from vmgahp.host import proc
from vmgahp.testing.contract import until


@pytest.fixture
def vmrun(scratch, user):
    """Makes a vmrun that is a shell script."""

    def make(script, product="ws"):
        path = a_program(scratch.with_name("vmrun"), script)
        return Tool(str(path), product, user, str(scratch), said.append)

    said: list[str] = []
    make.said = said
    return make


class TestCalls:
    def test_the_words_and_the_environment(self, vmrun, user, scratch, monkeypatch):
        monkeypatch.setenv("SECRET", "x")
        output = vmrun('echo "$*"; id -u; pwd; env').run("start", "/a b.vmx", "nogui", seconds=20)
        *first, rest = output.split("\n", 3)
        assert first == ["-T ws start /a b.vmx nogui", str(user.uid), "/"]
        assert {f"HOME={scratch}", "LC_ALL=C", "SECRET=x"} & set(rest.splitlines()) == {f"HOME={scratch}", "LC_ALL=C"}

    @pytest.mark.parametrize("status", [0, 1, 255])
    def test_an_error_is_one_whatever_the_status(self, vmrun, status):
        with pytest.raises(VmrunError) as caught:
            vmrun(f'echo noise >&2; echo "Error: The snapshot does not exist"; exit {status}').run("x", seconds=20)
        assert caught.value.message == "The snapshot does not exist"

    def test_a_status_without_an_error_is_one_too(self, vmrun):
        with pytest.raises(VmrunError, match="something went wrong"):
            vmrun("echo something went wrong >&2; exit 255").run("x", seconds=20)
        with pytest.raises(VmrunError, match="exit status 3"):
            vmrun("exit 3").run("x", seconds=20)
        with pytest.raises(VmrunError, match="a/a/a"):  # a flood is no list
            vmrun("yes a/ | head -c 200000 | tr -d '\\n'; echo").running(20)

    def test_noise_is_no_error(self, vmrun):
        warning = "Warning: program compiled against libxml 209 using older 207"
        assert vmrun(f'echo "{warning}" >&2; echo "Total running VMs: 0"').run("list", seconds=20).split()[-1] == "0"
        assert warning in vmrun.said[0]
        made = vmrun('echo "$3" >&2')
        for word in ("a", "b"):
            made.run(word, seconds=20)
        assert len(vmrun.said) == 2, "each vmrun complains once"

    def test_a_listed_vm_is_known_by_its_path_behind_links_and_with_line_ends_of_windows(self, vmrun, tmp_path):
        assert vmrun("printf 'Total running VMs: 1\\r\\n/a/b.vmx\\r\\n'").running(20) == {"/a/b.vmx"}
        real = tmp_path / "real"
        real.mkdir()
        (tmp_path / "link").symlink_to(real)
        assert vmrun(f"echo Total running VMs: 1; echo {tmp_path}/link/a.vmx").running(20) == {f"{real}/a.vmx"}

    def test_one_that_hangs_is_ended_and_a_vm_that_keeps_the_pipes_open_holds_up_nothing(self, vmrun):
        with pytest.raises(Hanging, match="does not answer within 1 s"):
            vmrun("sleep 1000 & sleep 1000").run("list", seconds=1)
        pid = int(vmrun("sleep 20 & echo $!").run("start", seconds=1000))
        assert Path(f"/proc/{pid}/cmdline").read_bytes(), "its end was waited for"
        os.kill(pid, signal.SIGKILL)

    def test_one_that_cannot_be_started_blames_the_machine(self, user):
        with pytest.raises(errors.MachineFault, match="/nowhere/vmrun cannot be started"), tool.explained("listing"):
            Tool("/nowhere/vmrun", "ws", user, "/", print).run("list", seconds=1)

    def test_where_vmrun_is(self, vmrun, monkeypatch):
        path = vmrun("").path
        assert tool.find_tool(Settings({"VMWARE_VMRUN": path})) == path
        monkeypatch.setenv("PATH", os.path.dirname(path))
        assert tool.find_tool(Settings()) == path
        with pytest.raises(errors.MachineFault, match="There is no vmrun here"):
            tool.find_tool(Settings({"VMWARE_VMRUN": path + "x"}))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize(
    ("said", "kind"), [("[ $(id -u) = 64 ] || kill -9 $$", errors.JobFault), ("kill -9 $$", errors.MachineFault)]
)
def test_one_that_is_killed_is_the_machines_where_it_is_for_htcondors_user(vmrun, user, monkeypatch, said, kind):
    """A process of the job's user can kill its own, or answer for it."""
    monkeypatch.setenv("CONDOR_IDS", "64.64")
    made = vmrun(f"{said}\necho Total running VMs: 0")
    driver = VmrunDriver("vmware", Settings({"VMWARE_VMRUN": made.path}), user, print)
    with pytest.raises(errors.MachineFault) as caught, tool.explained("starting it"):
        made.run("start", seconds=20)
    found = driver.explain(None, caught.value)
    assert type(found) is kind
    assert caught.value.problem in found.problem
    with pytest.raises(errors.MachineFault) as caught, tool.explained("starting it"):
        Tool("/nowhere/vmrun", "ws", user, "/", print).run("list", seconds=1)
    assert driver.explain(None, caught.value) is caught.value, "it has not begun"
    monkeypatch.setattr(tool, "find_process", lambda *_: tool.Process(1, user.uid, "/a.vmx"))
    monkeypatch.setattr(tool, "wait_for_end", lambda *_, **__: False)
    with pytest.raises(errors.MachineFault, match="does not end though it was killed") as caught:
        made.end("/a.vmx", 20)
    assert type(driver.explain(None, caught.value)) is kind


class TestFaults:
    """Whose fault: an example of each message, those of the table in the documentation first."""

    @pytest.mark.parametrize(
        ("message", "kind", "code"),
        [
            ("The virtual machine is not powered on: /s/a.vmx", errors.ClientFault, errors.VM_NOT_FOUND),
            ("Cannot open VM: /s/a.vmx, The virtual machine cannot be found", errors.ClientFault, errors.VM_NOT_FOUND),
            ("The file is already in use", errors.JobFault, errors.INVALID_DISK_PARAM),
            ("A file was not found", errors.JobFault, errors.INVALID_DISK_PARAM),
            ("You do not have access rights to this file", errors.JobFault, errors.INVALID_DISK_PARAM),
            ("Cannot open the disk 'a' or one of the snapshot disks it depends on", errors.JobFault, errors.BAD_IMAGE),
            ("The parent virtual disk has been modified since", errors.JobFault, errors.BAD_IMAGE),
            ("The file specified is not a virtual disk", errors.JobFault, errors.BAD_IMAGE),
            ("Cannot read the virtual machine configuration file", errors.JobFault, errors.BAD_IMAGE),
            ("The specified version was not found", errors.MachineFault, errors.CRITICAL),
            ("Not enough physical memory is available", errors.MachineFault, errors.CRITICAL),
            ("An error occurred while writing a file; the disk is full", errors.MachineFault, errors.CRITICAL),
            ("Could not open /dev/vmmon: No such file or directory", errors.MachineFault, errors.CRITICAL),
            ("This product may not be executed: license", errors.MachineFault, errors.CRITICAL),
            ("This host does not support VT-x", errors.MachineFault, errors.CRITICAL),
            ("The operation was canceled", errors.HypervisorFault, errors.INTERNAL),
            ("The snapshot does not exist", errors.HypervisorFault, errors.INTERNAL),
        ],
    )
    def test_whose_fault(self, message, kind, code):
        fault = from_vmrun(VmrunError("start", message), "starting it", ["/s/a.vmx"])
        assert (type(fault), fault.code) == (kind, code)
        assert message.replace("/s/a.vmx", "") in fault.problem.replace("/s/a.vmx", "")

    def test_a_name_of_the_jobs_accuses_nobody(self):
        path = "/s/the license expired, disk is full, vmmon.vmdk"
        error = VmrunError("start", f"Cannot open the disk '{path}' or one of the snapshot disks it depends on.")
        assert isinstance(from_vmrun(error, "starting it", [path, ""]), errors.JobFault)


def test_a_vm_is_found_by_its_vmx_and_its_user_and_only_that_very_process_is_killed(scratch):
    name, vmx = scratch.with_name("vmware-vmx-debug"), str(scratch / "a b.vmx")
    name.symlink_to(sys.executable)
    with subprocess.Popen([name, "-c", "sum(range(10**7)); input()", "-x", vmx], stdin=subprocess.PIPE) as process:
        try:
            until(lambda: find_process(vmx), "the process has its name")
            found = find_process(vmx, os.getuid())
            assert found == (process.pid, os.getuid(), vmx)
            assert found in tool.running_processes(os.getuid())
            until(lambda: proc.cpu_seconds(process.pid) > 0, "it has used some CPU time")
            assert is_still(found)
            stranger = os.getuid() + 1
            assert (find_process(vmx, stranger), tool.running_processes(stranger)) == (None, [])
            assert wait_for_end(tool.Process(process.pid, os.getuid(), vmx + "other.vmx"), 20, kill=True)
            assert process.poll() is None
            assert not wait_for_end(found, 0.01)
            assert wait_for_end(found, 20, kill=True)
            assert process.wait() == -9
            assert wait_for_end(found, 20, kill=True)
            assert not is_still(found)
        finally:
            process.kill()


class TestSurvey:
    @pytest.fixture
    def devices(self, tmp_path, monkeypatch):
        directory = tmp_path / "dev"
        directory.mkdir()
        for name in ("vmmon", "vmnet8"):
            (directory / name).touch()
        monkeypatch.setattr("vmgahp.drivers.vmrun.DEVICES", str(directory))
        return directory

    def look(self, vmrun, user, seconds=20, **more):
        machine = Settings({"VMWARE_VMRUN": str(vmrun), **more})
        return VmrunDriver("vmware", machine, user, print).survey(time.monotonic() + seconds)

    def verdicts(self, found):
        return {finding.check: finding.verdict for finding in found.findings}

    @pytest.mark.parametrize(("product", "snapshots"), [("ws", True), ("player", False), ("fusion", True)])
    def test_what_a_machine_advertises(self, scratch, user, devices, product, snapshots):
        with vmware(product) as host:
            found = self.look(host.vmrun, user, VM_NETWORKING="true", VM_NETWORKING_TYPE="bridge, nat, user")
        assert found.attributes == {
            "version": "1.17.0", "product": product, "snapshot": snapshots, "suspend": True,
            "soft_suspend": product != "player", "checkpoint": True, "networking": "nat",
        }  # fmt: skip
        assert (found.networking, found.hypervisors) == (["nat"], ["vmware"])
        assert found.vm_types == ["vmware", "vmrun"]
        assert self.verdicts(found) == {
            "vmrun": OK, "snapshots": OK if snapshots else OFF, "vmmon": OK, "network bridge": OFF, "network nat": OK,
        }  # fmt: skip

    def test_a_product_that_the_settings_name(self, scratch, user, devices):
        with vmware("player") as host:
            assert self.look(host.vmrun, user, VMWARE_PRODUCT="player").attributes["product"] == "player"
            assert self.verdicts(self.look(host.vmrun, user, VMWARE_PRODUCT="ws")) == {"vmrun": BAD}
            found = self.look(host.vmrun, user, VMWARE_PRODUCT="esx")
        assert self.verdicts(found) == {"vmrun": BAD}
        assert "VMWARE_PRODUCT = esx" in found.findings[0].seen

    def test_a_vmrun_that_hangs_is_one_that_does_not_work(self, scratch, user):
        with vmware() as host:
            host.misbehave("hang:list")
            found = self.look(host.vmrun, user, seconds=1)
        assert self.verdicts(found) == {"vmrun": BAD}
        assert "does not answer" in found.findings[0].seen

    def test_no_mode_is_changed_where_its_home_cannot_be_removed(self, tmp_path, user, devices, monkeypatch):
        """As where the user has mounted a file system there; names in it may lead anywhere."""
        with vmware() as host, monkeypatch.context() as patched:
            patched.setattr("tempfile.tempdir", str(tmp_path))
            patched.setattr(os, "rmdir", Mock(side_effect=PermissionError))
            patched.setattr(os, "chmod", changed := Mock())
            self.look(host.vmrun, user)
        changed.assert_not_called()

    def test_a_module_that_is_not_loaded_where_vmware_is_installed(self, scratch, user, devices, monkeypatch):
        (devices / "vmmon").unlink()
        monkeypatch.setattr("vmgahp.drivers.vmrun.INSTALLED", str(devices))
        with vmware() as host:
            assert self.verdicts(self.look(host.vmrun, user))["vmmon"] == BAD

    @pytest.mark.parametrize("vm_type", ["vmware", "vmrun"])
    def test_the_startd_is_told_under_the_name_of_its_type(self, user, vm_type):
        with vmware() as host:
            settings = Settings({"VM_MEMORY": "64", "VMWARE_VMRUN": str(host.vmrun)})
            found = probe.probe(vm_type, settings, VmrunDriver(vm_type, settings, user, print), 60)
        wanted = {"VM_Type": vm_type, f"VM_{vm_type}_ATTR_snapshot": True, f"VM_{vm_type}_ATTR_product": "ws"}
        assert wanted.items() <= found.attributes.items()
