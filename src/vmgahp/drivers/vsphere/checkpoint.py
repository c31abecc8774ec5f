"""Checkpoints: a snapshot with memory on the server, and a manifest in the scratch directory.

The disks and the memory of a VM on a server stay there; what travels with the job is a manifest that says which VM and
which snapshot. Any execute host that uses the same server and folder can restore the guest. A checkpoint whose job
never comes back is destroyed when its time is over, by whichever host next starts a job.

The manifest is the job's to change. It is believed only where the VM's own tag, which the job cannot write, says that
the VM is this very job's.
"""

import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from vmgahp.checkpoint.files import Unusable
from vmgahp.checkpoint.manifest import UUID, CheckpointKind, Facts, Manifest, matching, text
from vmgahp.checkpoint.store import CheckpointStore
from vmgahp.drivers.base import Logger
from vmgahp.drivers.vsphere.annotations import SAVED, Tag
from vmgahp.drivers.vsphere.vm import SNAPSHOT, Tagged
from vmgahp.host.job_user import Identity
from vmgahp.job.vmware import VmwareSpec

DAY = 86400


def _differences(then: Facts, now: Facts) -> Iterator[str]:
    if then["snapshot"] != now["snapshot"]:
        yield "the VM on the server has another one"


KIND = CheckpointKind(
    "vsphere",
    {
        "id": matching(UUID),  # that of the VM's tag
        "snapshot": matching(SNAPSHOT),
        # VSPHERE_HOST where it was made; for people, because a server has several names.
        "server": text(300, may_be_empty=True),
    },
    most_files=0,
    differences=_differences,
)


class VsphereCheckpoints(NamedTuple):
    """The checkpoints of one driver's jobs."""

    identity: Identity
    days: int
    """The seconds that a checkpoint waits for its job; 0 for ever."""
    log: Logger

    def store(self, directory: str) -> CheckpointStore:
        """Return the checkpoint of the job in this scratch directory."""
        return CheckpointStore(KIND, self.identity, directory, self.log)

    def write(self, spec: VmwareSpec, facts: Facts, cpu_seconds: float) -> None:
        """Write the manifest to the scratch directory. Raises `errors.MachineFault`."""
        store = self.store(spec.working_dir)
        store.write(store.now(spec, facts, cpu_seconds), ())

    def waiting(self, tag: Tag) -> Tag:
        """Return the tag of a VM that from now on is a checkpoint and no host's."""
        expires = int(time.time()) + self.days * DAY if self.days else 0
        return tag._replace(state=SAVED, directory="", host="", expires=str(expires))

    def match(self, manifest: Manifest, spec: VmwareSpec, job: str, vms: Iterable[Tagged]) -> Tagged:
        """Return the VM of the manifest. Raises `Unusable`."""
        found = next((vm for vm in vms if vm.tag.id == manifest.facts["id"]), None)
        if found is None:
            where = manifest.facts["server"]
            raise Unusable(f"its VM is not on this server; it was made on {where}, and may have expired.", True)
        if found.tag.job != job or found.tag.name != spec.name:
            raise Unusable("it is another job's.", True)
        store = self.store(spec.working_dir)
        store.check(manifest, store.now(spec, {"snapshot": found.tag.checkpoint}), ())
        return found
