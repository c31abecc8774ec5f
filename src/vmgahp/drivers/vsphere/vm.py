"""The VMs on the server: their tags, power, snapshots and removal, for jobs, leftovers and kills.

The tags are extraConfig of the VM, under names that a guest cannot reach (it may change those that begin with
``guestinfo.``). Other execute hosts use the same server and the same folder, so every tag has the host of the VM, and
a VM of another host is never touched.

A server that went away in the middle of an operation may have carried it out. So the outcome is looked at before
anything is done twice.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
import uuid as uuids
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pyVmomi import vim, vmodl

from vmgahp import errors
from vmgahp.drivers.base import Logger
from vmgahp.drivers.vsphere.connection import Gone, VsphereConnection
from vmgahp.job.ad import JobAd

TAG_PREFIX = "vmgahp."

RUNS, SAVED = "runs", "saved"
"""The values of `Tag.state`: a server of this daemon serves the VM; it is a checkpoint and waits for its job."""

LONGEST_NAME = 80
"""The most characters of a VM's name with vSphere."""

OURS = re.compile(r".+-[0-9a-f]{8}", re.DOTALL)
"""The form of our VMs' names with vSphere (`entity_name`)."""


class Tag(NamedTuple):
    """The tags of a VM of ours."""

    id: str
    """The UUID of this one VM."""
    name: str
    """The VM's name with HTCondor, `JobAd.vm_name`."""
    job: str
    """The job's GlobalJobId if the starter sends it, else the name."""
    directory: str
    """The job's scratch directory; empty for a checkpoint."""
    host: str
    """The execute host that serves it (`this_host`); empty for a checkpoint."""
    state: str
    checkpoint: str = ""
    """The name of the snapshot that is the job's last checkpoint; empty if there is none."""
    expires: str = "0"
    """The time after which the checkpoint of a missing job may be destroyed, in seconds since 1970; 0 for never."""

    @property
    def has_expired(self) -> bool:
        """True if a checkpoint has waited for its job for too long."""
        return self.state == SAVED and self.expires.isdecimal() and 0 < int(self.expires[:20]) < time.time()

    def options(self) -> list[vim.option.OptionValue]:
        """Return the tags as extraConfig."""
        return [vim.option.OptionValue(key=TAG_PREFIX + key, value=value) for key, value in self._asdict().items()]

    def annotation(self) -> str:
        """Return the note for people who look at the VM in vSphere."""
        where = f"on {os.uname().nodename}, in {self.directory}" if self.directory else "waits as a checkpoint"
        return f"HTCondor job {self.name} ({self.job}), {where}. Looked after by vmgahp; do not change."

    @classmethod
    def read(cls, options: Any) -> Tag | None:
        """Read a VM's extraConfig; None for a VM that is not ours. The last value of a duplicate key counts."""
        values = {
            str(option.key).removeprefix(TAG_PREFIX): option.value for option in options or () if _is_tag(option.key)
        }
        if not all(values.get(name) for name in ("id", "name", "job", "state")):
            return None
        return cls(**{name: str(values.get(name, "")) for name in cls._fields})


def _is_tag(key: object) -> bool:
    return isinstance(key, str) and key.startswith(TAG_PREFIX)


def job_id(job: JobAd) -> str:
    """Return HTCondor's unique GlobalJobId, or the VM's name if that is not sent."""
    return (job.string("GlobalJobId") or job.vm_name())[:500]


def entity_name(name: str, uuid: str) -> str:
    """Return the VM's name with vSphere: the job's, without characters special to paths or datastores, and unique."""
    plain = re.sub(r"[^A-Za-z0-9_.@+-]", "_", name).lstrip(".-")
    return f"{plain[: LONGEST_NAME - 9] or 'job'}-{uuid[:8]}"


def this_host() -> str:
    """Return a name that tells this execute host from others.

    It has a digest of /etc/machine-id, which is not public itself.
    """
    machine, name = "", os.uname().nodename
    with suppress(OSError, UnicodeDecodeError):
        machine = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    return f"{name} {hashlib.sha256(f'vmgahp {name} {machine}'.encode()).hexdigest()[:16]}"


ON, OFF, SUSPENDED = "poweredOn", "poweredOff", "suspended"
"""The values of runtime.powerState."""

_TASKS = {ON: "PowerOnVM_Task", OFF: "PowerOffVM_Task", SUSPENDED: "SuspendVM_Task"}

SNAPSHOT = re.compile(r"vmgahp-[0-9a-f]{32}", re.ASCII)
"""The pattern of our snapshots' names."""


class VsphereVm(NamedTuple):
    """A VM by its reference; every method raises `errors.Fault`, and `Gone` if it does not exist (any more)."""

    connection: VsphereConnection
    ref: vim.VirtualMachine

    def power_state(self) -> str:
        """Return the power state: `ON`, `OFF` or `SUSPENDED`."""
        return str(self.connection.get(self.ref, "runtime.powerState"))

    def power(self, wanted: str, doing: str) -> None:
        """Power on (or resume), power off at once (without the memory of a suspended VM), or suspend."""
        if self.power_state() == wanted:
            return
        begin = getattr(self.ref, _TASKS[wanted])
        try:
            self.connection.task(lambda _content: begin(), doing, lambda: self.power_state() == wanted or None)
        except errors.Fault as fault:
            if isinstance(fault.__cause__, vmodl.fault.ManagedObjectNotFound):
                raise Gone(self.ref) from fault
            # The guest may have powered itself off just now.
            if not isinstance(fault.__cause__, vim.fault.InvalidPowerState) or self.power_state() != wanted:
                raise

    def ask_to_shut_down(self) -> bool:
        """Ask the guest to shut down; return False if no VMware Tools run in it."""
        seen = self.connection.properties(self.ref, "guest.toolsRunningStatus", "runtime.powerState")
        if seen.get("runtime.powerState") != ON or seen.get("guest.toolsRunningStatus") != "guestToolsRunning":
            return False
        self.connection.once(lambda _content: self.ref.ShutdownGuest(), "asking the guest to shut down")
        return True

    def retag(self, tag: Tag) -> None:
        """Replace the tags."""
        spec = vim.vm.ConfigSpec(extraConfig=tag.options(), annotation=tag.annotation())
        self.connection.task(lambda _content: self.ref.ReconfigVM_Task(spec), f"tagging {tag.name}")

    def snapshots(self) -> dict[str, vim.vm.Snapshot]:
        """Return all snapshots by their names."""
        info = self.connection.get(self.ref, "snapshot")
        answer = {}
        trees = list(info.rootSnapshotList) if info is not None else []
        while trees:
            tree = trees.pop()
            answer[str(tree.name)] = tree.snapshot
            trees += tree.childSnapshotList or ()
        return answer

    def take_snapshot(self, name: str) -> str:
        """Take a snapshot of a running guest with its memory, and return its name."""
        snapshot = f"vmgahp-{uuids.uuid4().hex}"
        about = f"checkpoint of {name}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}"
        self.connection.task(
            lambda _content: self.ref.CreateSnapshot_Task(snapshot, about, memory=True, quiesce=False),
            f"taking a checkpoint of {name}",
            lambda: snapshot in self.snapshots() or None,
        )
        return snapshot

    def go_back_to(self, snapshot: str, name: str) -> None:
        """Restore the guest from a snapshot."""
        found = self.snapshots().get(snapshot)
        if found is None:
            raise errors.HypervisorFault(
                f"The checkpoint of {name} is not on the server any more: it has no snapshot {snapshot}.",
                "see who has removed it.",
            )
        self.connection.task(lambda _content: found.RevertToSnapshot_Task(), f"going back to the checkpoint of {name}")
        # The server powers on a VM that was on when its snapshot with memory was taken; others are powered on here.
        self.power(ON, f"restarting {name} from its checkpoint")

    def _remove_snapshot(self, snapshot: Any) -> None:
        self.connection.task(
            lambda _content: snapshot.RemoveSnapshot_Task(removeChildren=False), "removing an older checkpoint"
        )

    def forget_snapshots(self, kept: str, log: Logger) -> None:
        """Remove the checkpoints before the last one, which is safely sent back by now; errors are logged."""
        try:
            for name, snapshot in self.snapshots().items():
                if name != kept and SNAPSHOT.fullmatch(name):
                    self._remove_snapshot(snapshot)
        except errors.Fault as fault:
            log(f"an older checkpoint stays on the server for now: {fault.problem}")

    def destroy(self, datacenter: vim.Datacenter) -> None:
        """Power the VM off and remove it with all files in its directory; one that is already gone is success."""
        try:
            directory = directory_of(self.connection.get(self.ref, "config.files.vmPathName"))
            self.power(OFF, "powering a VM off")
            # If it was removed, reading its state raises `Gone`.
            self.connection.task(lambda _content: self.ref.Destroy_Task(), "removing a VM", self._is_there)
        except errors.Fault as fault:
            if isinstance(fault, Gone) or isinstance(fault.__cause__, vmodl.fault.ManagedObjectNotFound):
                return
            raise
        # The server does not count an uploaded file as the VM's before it is attached.
        if directory:
            try:
                self.connection.task(
                    lambda content: content.fileManager.DeleteDatastoreFile_Task(directory, datacenter),
                    f"removing {directory}",
                )
            except errors.Fault as fault:
                if not isinstance(fault.__cause__, vim.fault.FileNotFound):
                    raise

    def _is_there(self) -> None:
        self.power_state()


class Tagged(NamedTuple):
    """A VM of ours on the server."""

    vm: VsphereVm
    tag: Tag


def find_tagged(connection: VsphereConnection, folder: vim.Folder) -> list[Tagged]:
    """Find all VMs of ours in the folder, other hosts' included. Raises `errors.Fault`."""
    children = connection.get(folder, "childEntity") or ()
    named = connection.of_each([ref for ref in children if isinstance(ref, vim.VirtualMachine)], "name")
    # extraConfig is long, so it is asked for only where the name may be one of ours.
    likely = [ref for ref, found in named if OURS.fullmatch(str(found.get("name", "")))]
    read = connection.of_each(likely, "config.extraConfig")
    tags = [(ref, Tag.read(found.get("config.extraConfig"))) for ref, found in read]
    return [Tagged(VsphereVm(connection, ref), tag) for ref, tag in tags if tag is not None]


def directory_of(path: str | None) -> str:
    """Return ``[datastore] directory`` of ``[datastore] directory/name.vmx``; empty without a directory."""
    directory, slash, name = (path or "").rpartition("/")
    return directory if slash and name.endswith(".vmx") and not directory.endswith("] ") else ""
