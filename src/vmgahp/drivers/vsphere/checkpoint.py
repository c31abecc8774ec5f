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
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from pyVmomi import vim

from vmgahp import errors
from vmgahp.checkpoint.files import Unusable
from vmgahp.checkpoint.manifest import UUID, CheckpointKind, Facts, Manifest, matching, text
from vmgahp.checkpoint.store import CheckpointStore
from vmgahp.drivers.vsphere import annotations, faults, power
from vmgahp.drivers.vsphere.annotations import Tag, Tagged
from vmgahp.drivers.vsphere.connection import VsphereConnection
from vmgahp.host.job_user import Identity
from vmgahp.job.vmware import VmwareSpec

DAY = 86400.0

_SNAPSHOT = re.compile(r"vmgahp-[0-9a-f]{32}", re.ASCII)


def _differences(then: Facts, now: Facts) -> Iterator[str]:
    if then["snapshot"] != now["snapshot"]:
        yield "the VM on the server has another one"


KIND = CheckpointKind(
    "vsphere",
    {
        "id": matching(UUID),  # that of the VM's tag
        "snapshot": matching(_SNAPSHOT),
        # VSPHERE_HOST where it was made; for people, because a server has several names.
        "server": text(300, may_be_empty=True),
    },
    most_files=0,
    differences=_differences,
)


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
        about = f"checkpoint of {name}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}"
        try:
            self.connection.task(
                lambda _content: ref.CreateSnapshot_Task(snapshot, about, memory=True, quiesce=False),
                f"taking a checkpoint of {name}",
            )
        except faults.ServerLost:
            if snapshot not in self.snapshots(ref):
                raise
        return snapshot

    def write(self, spec: VmwareSpec, vm_id: str, snapshot: str, cpu_seconds: float) -> None:
        """Leave the manifest in the scratch directory. Raises `errors.MachineFault`."""
        facts = {"id": vm_id, "snapshot": snapshot, "server": str(self.connection.access)}
        store = self.store(spec.working_dir)
        store.write(store.now(spec, facts, cpu_seconds), ())

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

    def match(self, manifest: Manifest, spec: VmwareSpec, job: str, vms: Iterable[Tagged]) -> Tagged:
        """The VM that the manifest is about. Raises `Unusable`."""
        found = next((vm for vm in vms if vm.tag.id == manifest.facts["id"]), None)
        if found is None:
            where = manifest.facts["server"]
            raise Unusable(f"its VM is not on this server; it was made on {where}, and may have expired.", True)
        if found.tag.job != job or found.tag.name != spec.name:
            raise Unusable("it is another job's.", True)
        store = self.store(spec.working_dir)
        store.check(manifest, store.now(spec, {"snapshot": found.tag.checkpoint}), ())
        return found

    def used_up(self, directory: str) -> None:
        """The guest continues, or has ended: the manifest in the scratch directory is obsolete."""
        self.store(directory).discard()

    def store(self, directory: str) -> CheckpointStore:
        """The checkpoint of the job in this scratch directory."""
        return CheckpointStore(KIND, self.identity, directory, self.log)
