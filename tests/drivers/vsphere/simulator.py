"""Jobs for the vSphere simulator, and a look at the server past the daemon."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests import jobs
from tests.drivers.support import does, status
from tests.lab.vcsim import PASSWORD, USER, Vcsim
from tests.peer import DEADLINE, Peer, daemon, environment
from vmgahp.cli import KILL, PROBE
from vmgahp.testing.contract import until

MIB = 1 << 20
BIG = os.urandom(MIB) * 8
MANIFEST = "vm_checkpoint.json"
CHECKPOINT = "JobVMCheckpoint = TRUE"
CRITICAL, INTERNAL = "VMGAHP_ERR_CRITICAL", "VMGAHP_ERR_INTERNAL"
NETWORKS = "nat = VM Network, bridge = DC0_DVPG0"


class Server:
    """The simulator as an administrator sees it, in a session of its own."""

    def __init__(self, sim: Vcsim) -> None:
        from pyVmomi import SoapStubAdapter, vim

        self.sim = sim
        unverified = ssl._create_unverified_context()  # noqa: S323 - the simulator makes a certificate anew
        how = {"version": "vim.version.version11", "sslContext": unverified, "httpConnectionTimeout": DEADLINE}
        stub = SoapStubAdapter("127.0.0.1", sim.port, **how)
        self.content = vim.ServiceInstance("ServiceInstance", stub).RetrieveContent()
        self.content.sessionManager.Login(USER, PASSWORD, None)

    def get(self, ref: Any, path: str) -> Any:
        from pyVmomi import vmodl

        query = vmodl.query.PropertyCollector
        spec = query.FilterSpec(
            propSet=[query.PropertySpec(type=type(ref), pathSet=[path])], objectSet=[query.ObjectSpec(obj=ref)]
        )
        try:
            found = self.content.propertyCollector.RetrievePropertiesEx([spec], query.RetrieveOptions())
        except vmodl.fault.ManagedObjectNotFound:
            return None  # it went away while we looked
        (answer,) = found.objects
        return next((one.val for one in answer.propSet), None)

    def vms(self) -> dict[str, Any]:
        """All VMs by name."""
        (datacenter,) = self.get(self.content.rootFolder, "childEntity")
        folder = self.get(datacenter, "vmFolder")
        return {name: ref for ref in self.get(folder, "childEntity") if (name := self.get(ref, "name"))}

    def jobs(self) -> dict[str, Any]:
        """Return the VMs that have our tags."""
        return {name: ref for name, ref in self.vms().items() if self.tags(ref)}

    def job(self) -> Any:
        (ref,) = self.jobs().values()
        return ref

    def tags(self, ref: Any) -> dict[str, str]:
        options = self.get(ref, "config.extraConfig") or ()
        return {one.key.removeprefix("vmgahp."): one.value for one in options if one.key.startswith("vmgahp.")}

    def power(self, ref: Any) -> str:
        return str(self.get(ref, "runtime.powerState"))

    def wait(self, task: Any) -> None:
        until(lambda: self.get(task, "info.state") in ("success", "error"), "the task ends")
        assert self.get(task, "info.state") == "success", self.get(task, "info.error")

    def configure(self, ref: Any, **values: object) -> None:
        """Extra configuration of a VM, such as our tags; two underscores in a name are a dot."""
        from pyVmomi import vim

        options = [vim.option.OptionValue(key=name.replace("__", "."), value=value) for name, value in values.items()]
        self.wait(ref.ReconfigVM_Task(vim.vm.ConfigSpec(extraConfig=options)))

    def set(self, ref: Any, **values: object) -> None:
        """The simulator's way to have a VM do something by itself: ``SET.`` and a property."""
        self.configure(ref, **{f"SET.{name}": value for name, value in values.items()})

    def guest_powers_off(self, ref: Any) -> None:
        self.set(ref, runtime__powerState="poweredOff", summary__runtime__powerState="poweredOff")

    def directory(self, ref: Any) -> Path:
        """The VM's directory in the datastore."""
        path = self.get(ref, "config.files.vmPathName")
        return self.sim.datastore() / Path(path.partition("] ")[2]).parent

    def files(self) -> list[str]:
        """All files of the datastore that are not of the simulator's own VM."""
        store = self.sim.datastore()
        names = [str(path.relative_to(store)) for path in store.rglob("*") if path.is_file()]
        return sorted(name for name in names if not name.startswith(("ha-host_VM", "DC0_")))

    def left(self) -> tuple[dict[str, Any], list[str]]:
        """Return our VMs and files that are there."""
        return self.jobs(), self.files()


def write_disk(scratch: Path, name: str, content: bytes) -> None:
    """A flat disk as the desktop products write it: a descriptor and its extent."""
    from vmgahp.drivers.vsphere.machine import disk_descriptor

    assert len(content) % 512 == 0
    extent = f"{name.removesuffix('.vmdk')}-flat.vmdk"
    text = disk_descriptor(extent, len(content), "lsilogic", create_type="monolithicFlat")
    (scratch / name).write_bytes(text)
    (scratch / extent).write_bytes(content)


VMX = """\
.encoding = "UTF-8"
config.version = "8"
virtualHW.version = "13"
guestOS = "ubuntu-64"
displayName = "my machine"
scsi0.present = "TRUE"
scsi0.virtualDev = "lsilogic"
scsi0:0.present = "TRUE"
scsi0:0.fileName = "disk.vmdk"
ethernet0.present = "TRUE"
ethernet0.virtualDev = "vmxnet3"
"""


class Job:
    """A VMware job in a scratch directory of its user."""

    number = 0

    def __init__(self, scratch: Path, content: bytes = b"", vmx: str = VMX) -> None:
        Job.number += 1
        self.cluster = os.getpid() * 100 + Job.number
        self.scratch = scratch
        self.name = f"alice_lab_{self.cluster}.0"
        self.content = content or os.urandom(MIB)
        (scratch / "machine.vmx").write_text(vmx)
        write_disk(scratch, "disk.vmdk", self.content)
        self.own()

    def own(self) -> None:
        jobs.own(self.scratch)

    def disk(self) -> bytes:
        return (self.scratch / "disk-flat.vmdk").read_bytes()

    def ad(self, *more: str, scratch: Path | None = None) -> list[str]:
        return jobs.lines(
            scratch or self.scratch,
            *more,
            JobVMType='"vsphere"',
            JobVM_VCPUS=2,
            VMPARAM_VMware_VMX_File='"machine.vmx"',
            VMPARAM_VMware_VMDK_Files='"disk.vmdk,disk-flat.vmdk"',
            VMPARAM_VMware_Transfer=True,
            VMPARAM_VMware_SnapshotDisk=False,
            ClusterId=self.cluster,
            GlobalJobId=f'"schedd.lab#{self.cluster}.0#1700000000"',
        )


def settings(sim: Vcsim, password: Path, **more: object) -> dict[str, object]:
    """Return the daemon's settings for a simulator."""
    pool = {"VSPHERE_RESOURCE_POOL": "DC0_C0"} if sim.model == "vpx" else {}
    return {
        "VSPHERE_HOST": sim.host, "VSPHERE_USER": USER, "VSPHERE_PASSWORD_FILE": password,
        "VSPHERE_TLS_PIN": sim.certificate, "VSPHERE_DATASTORE": "LocalDS_0", "VSPHERE_NETWORK_MAP": NETWORKS,
        "VM_STOP_TIMEOUT": 1, **pool, **more,
    }  # fmt: skip


def start(peer: Peer, job: Job, *more: str, scratch: Path | None = None) -> None:
    """START, which succeeds."""
    assert peer.line().startswith("$VMGahpVersion")
    peer.send_ad(*job.ad(*more, scratch=scratch))
    result = peer.run("START", "vsphere")
    assert result == ["0", "1"], f"{result}\n{peer.end_by(9)}"  # type: ignore[arg-type]


def powers_off(peer: Peer, server: Server, vm: Any = None) -> None:
    """The guest powers off, and its disks are downloaded."""
    server.guest_powers_off(vm or server.job())
    until(lambda: status(peer)["STATUS"] == "Stopped", "the VM has stopped")


class Lab:
    """A simulator, a job and what the daemon is told."""

    def __init__(self, sim: Vcsim, scratch: Path, password: Path) -> None:
        self.sim = sim
        self.scratch = scratch
        self.password = password
        self.job = Job(scratch)
        self.quick = {"VM_GAHP_REQ_TIMEOUT": 5}  # a second for calls, and four for tasks

    def environ(self, scratch: Path | None = None, **more: object) -> dict[str, str]:
        return environment("vsphere", scratch or self.scratch, **settings(self.sim, self.password, **more))

    def serve(self, scratch: Path | None = None, **more: object) -> Peer:
        return Peer(self.environ(scratch, **more))

    @contextmanager
    def running(
        self, *more: str, job: Job | None = None, scratch: Path | None = None, **values: object
    ) -> Iterator[Peer]:
        """A daemon with the job's VM, in the scratch directory of a later run if one is given; QUIT at the end."""
        job = job or self.job
        with self.serve(scratch or job.scratch, **values) as peer:
            start(peer, job, *more, scratch=scratch)
            yield peer
            if peer.process.returncode is None:
                peer.quit()

    @contextmanager
    def watched(self, *more: str, **values: Any) -> Iterator[tuple[Peer, Server, Any]]:
        """`running`, with the server and the job's VM there."""
        with self.running(*more, **values) as peer:
            server = self.server()
            yield peer, server, server.job()

    def vacate(self) -> Server:
        """Run the job, checkpoint it and stop it: the server, where the checkpoint waits."""
        with self.running(CHECKPOINT) as peer:
            does(peer, "CHECKPOINT", "STOP")
        return self.server()

    def server(self) -> Server:
        return Server(self.sim)

    def again(self) -> None:
        """The simulator was killed: a new one in its place, which knows nothing of the old one's VMs."""
        self.sim = self.sim.again()

    def other_scratch(self, name: str = "dir_2") -> Path:
        """The scratch directory of a later run of the job, with all that the job has by now."""
        directory = self.scratch.parent / name
        shutil.copytree(self.scratch, directory)
        jobs.own(self.scratch, directory, *directory.iterdir())
        return directory

    def killing(self, directory: Path | str, *more: str, **values: object) -> subprocess.CompletedProcess[str]:
        return daemon(self.environ(**values), KILL, "vmtype", "vsphere", "match", str(directory), *more)

    def probe(self, **values: object) -> tuple[dict[str, str], str]:
        """The attributes that the startd would read, and what was said on standard error."""
        ended = daemon(self.environ(**values), PROBE, "vmtype", "vsphere")
        pairs = (line.split(" = ", 1) for line in ended.stdout.splitlines())
        return {name: value.strip('"') for name, value in pairs}, ended.stderr


def refused(lab: Lab, *more: str, job: Job | None = None, **values: object) -> tuple[str, str, str]:
    """A START that fails: its word, what the job's owner reads, and the log."""
    with lab.serve(**values) as peer:
        assert peer.line().startswith("$VMGahpVersion")
        peer.send_ad(*(job or lab.job).ad(*more))
        code, word = peer.run("START", "vsphere")
        assert code == "1", word
        return word, (lab.scratch / "vm_error.txt").read_text(), peer.quit()
