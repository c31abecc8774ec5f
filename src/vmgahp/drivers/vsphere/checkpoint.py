"""Checkpoints: a snapshot with memory on the server, and a manifest in the scratch directory.

The disks and the memory of a VM on a server stay there; what travels with the job is a manifest that says
which VM and which snapshot. Any execute host that uses the same server and folder can restore the guest. A
checkpoint whose job never comes back is destroyed when its time is over, by whichever host next starts a job.

The manifest is the job's to change. It is believed only where the VM's own tag, which the job cannot write,
says that the VM is this very job's.
"""

import re
import time
import uuid as uuids
from collections.abc import Callable, Iterable
from typing import NamedTuple

from pyVmomi import vim

from vmgahp import errors
from vmgahp.checkpoint import files
from vmgahp.checkpoint.files import Unusable
from vmgahp.checkpoint.manifest import encode
from vmgahp.drivers.vsphere import annotations, faults, power
from vmgahp.drivers.vsphere.annotations import Tag, Tagged
from vmgahp.drivers.vsphere.connection import VsphereConnection
from vmgahp.host import scratch
from vmgahp.host.job_user import Identity

MANIFEST_FILE = "vm_vsphere_checkpoint.json"
FORMAT = 1
LARGEST = 64 << 10
DAY = 86400.0

_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)
_SNAPSHOT = re.compile(r"vmgahp-[0-9a-f]{32}", re.ASCII)


class VsphereManifest(NamedTuple):
    """Which checkpoint the job has."""

    id: str
    """The UUID in the VM's tag."""
    snapshot: str
    server: str
    """VSPHERE_HOST where it was made; for people, because a server has several names."""
    cpu_seconds: float


class VsphereCheckpoints(NamedTuple):
    """Makes and finds the checkpoints of one driver's jobs."""

    connection: VsphereConnection
    identity: Identity
    days: int
    log: Callable[[str], None]

    # Making one

    def make(self, ref: "vim.VirtualMachine", name: str) -> str:
        """Take a snapshot of a running guest with its memory; its name. Raises `errors.Fault`."""
        snapshot = f"vmgahp-{uuids.uuid4().hex}"
        text = f"checkpoint of {name}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}"
        try:
            self.connection.task(
                lambda _content: ref.CreateSnapshot_Task(snapshot, text, memory=True, quiesce=False),
                f"taking a checkpoint of {name}",
            )
        except faults.ServerLost:
            if snapshot not in self.snapshots(ref):
                raise
        return snapshot

    def write(self, directory: str, manifest: VsphereManifest) -> None:
        """Leave the manifest in the scratch directory. Raises `errors.MachineFault`."""
        from vmgahp.checkpoint.manifest import Invalid

        try:
            files.write(self.identity, directory, MANIFEST_FILE, encode(FORMAT, manifest), _parse)
        except (OSError, Invalid) as error:
            raise errors.MachineFault(
                f"The checkpoint cannot be written down in {directory}: {error}.",
                "check the file system of EXECUTE; the VM keeps running.",
            ) from error

    def waiting(self, tag: Tag) -> Tag:
        """The tag of a VM that from now on is a checkpoint and no host's."""
        expires = time.time() + self.days * DAY if self.days else 0.0
        return tag._replace(state=annotations.SAVED, directory="", host="", expires=expires)

    def go_on(self, ref: "vim.VirtualMachine", snapshot: str, name: str) -> None:
        """Restore the guest from a snapshot. Raises `errors.Fault`."""
        found = self.snapshots(ref).get(snapshot)
        if found is None:
            raise errors.HypervisorFault(
                f"The checkpoint of {name} is not on the server any more: it has no snapshot {snapshot}.",
                "see who has removed it.",
            )
        # To go back twice does no harm.
        self.connection.retried_task(
            lambda _content: found.RevertToSnapshot_Task(), f"going back to the checkpoint of {name}"
        )
        # A snapshot with memory of a VM that was on is on again by itself; the others are told to.
        if power.state(self.connection, ref) != power.ON:
            power.on(self.connection, ref, f"restarting {name} from its checkpoint")

    def forget_others(self, ref: "vim.VirtualMachine", kept: str) -> None:
        """Remove the checkpoints before the last one, which is safely away by now; a failure is logged."""
        try:
            for name, snapshot in self.snapshots(ref).items():
                if name != kept and _SNAPSHOT.fullmatch(name):
                    self._remove(snapshot)
        except errors.Fault as fault:
            self.log(f"an older checkpoint stays on the server for now: {fault.problem}")

    def _remove(self, snapshot: "vim.vm.Snapshot") -> None:
        self.connection.task(
            lambda _content: snapshot.RemoveSnapshot_Task(removeChildren=False), "removing an older checkpoint"
        )

    def snapshots(self, ref: "vim.VirtualMachine") -> "dict[str, vim.vm.Snapshot]":
        """All snapshots of a VM by their names. Raises `errors.Fault`."""
        with faults.explained("looking for snapshots"):
            info = self.connection.properties(ref, "snapshot").get("snapshot")
        answer = {}
        trees = list(info.rootSnapshotList) if info is not None else []
        while trees:
            tree = trees.pop()
            answer[str(tree.name)] = tree.snapshot
            trees += tree.childSnapshotList or ()
        return answer

    # Finding one

    def find(self, directory: str, job: str, name: str, vms: Iterable[Tagged]) -> tuple[Tagged, VsphereManifest] | None:
        """The VM that the manifest in the scratch directory is about; None where there is no (good) one."""
        try:
            manifest = files.find(self.identity, directory, MANIFEST_FILE, _parse)
        except Unusable as unusable:
            self._refuse(directory, unusable.reason.rstrip("."))
            return None
        if manifest is None:
            return None
        for found in vms:
            if found.tag.id != manifest.id:
                continue
            if found.tag.job != job or found.tag.name != name:
                self._refuse(directory, "it is another job's")
                return None
            if found.tag.checkpoint != manifest.snapshot:
                self._refuse(directory, "the VM on the server has another one")
                return None
            return found, manifest
        self._refuse(directory, f"its VM is not on this server; it was made on {manifest.server}, and may have expired")
        return None

    def used_up(self, directory: str) -> None:
        """The guest continues, or has ended: the manifest in the scratch directory is obsolete."""
        scratch.forget(self.identity, directory, self.log, MANIFEST_FILE)

    def _refuse(self, directory: str, why: str) -> None:
        self.log(f"the job's checkpoint cannot be used: {why}. The guest boots anew, from the job's disks.")
        try:
            self.identity.rename_scratch(directory, MANIFEST_FILE, f"{MANIFEST_FILE}.refused")
        except (OSError, errors.Fault) as error:
            self.log(f"the checkpoint cannot be set aside: {error}")


def _parse(data: bytes) -> VsphereManifest:
    """The manifest that `data` is. Raises `vmgahp.checkpoint.manifest.Invalid`."""
    from vmgahp.checkpoint import manifest

    if len(data) > LARGEST:
        raise manifest.Invalid("it is too long.")
    top = manifest.read(data, FORMAT, VsphereManifest._fields)
    return VsphereManifest(
        id=top.form("id", _ID),
        snapshot=top.form("snapshot", _SNAPSHOT),
        server=top.text("server", 300, may_be_empty=True),
        cpu_seconds=top.real("cpu_seconds", 1e12),
    )
