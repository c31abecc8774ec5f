"""Checkpoints of VMware's VMs: the manifest of one, and the check if one can be restored.

A checkpoint is a suspended VM: its memory (``.vmss`` and ``.vmem``), the disks of its snapshot, the working copy of the
``.vmx``, all in the scratch directory, so HTCondor takes them along.
"""

import os
import re
from collections.abc import Callable
from typing import NamedTuple

from vmgahp import errors
from vmgahp.checkpoint.files import FileRef, Unusable
from vmgahp.checkpoint.manifest import DISK, STATE, UUID, CheckpointKind, Facts, Manifest, matching
from vmgahp.checkpoint.store import CheckpointStore
from vmgahp.drivers.base import Logger
from vmgahp.drivers.vmrun import working_copy
from vmgahp.drivers.vmrun.working_copy import WorkingCopy
from vmgahp.host import scratch
from vmgahp.host.job_user import Identity
from vmgahp.job.vmware import VmwareSpec, read_vmx

STATE_SUFFIXES = (".vmss", ".vmem", ".vmsn", ".vmsd", ".nvram")
"""The suffixes of the files that VMware keeps of a VM beside its ``.vmx`` and its disks."""

KIND = CheckpointKind(
    "vmrun",
    {
        "uuid": matching(UUID),
        "state": matching(re.compile(r"[^/\x00-\x1f\x7f]{1,250}\.vmss")),  # the file with the memory
    },
)


class VmrunCheckpoints(NamedTuple):
    """The checkpoints of one scratch directory."""

    identity: Identity
    directory: str
    """The scratch directory, without links."""
    log: Logger

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore(KIND, self.identity, self.directory, self.log)

    def state_files(self, vmx_name: str) -> list[str]:
        """List the files that VMware keeps of a VM beside its ``.vmx`` and its disks, by name."""
        stem, there = vmx_name.removesuffix(".vmx"), os.listdir(self.directory)
        return sorted(name for name in there if name.startswith(stem) and name.endswith(STATE_SUFFIXES))

    def find(self, spec: VmwareSpec, fresh: WorkingCopy) -> tuple[Manifest, WorkingCopy] | None:
        """Return the checkpoint in the scratch directory, and its working copy; None without one. Raises `Unusable`."""
        manifest = self.store.load()
        if manifest is None:
            return None
        # The disks of a guest are those that the working copy names, which came back with it.
        self.store.check(manifest, self.store.now(spec, {}), map(FileRef.of, manifest.files))
        state = manifest.facts["state"]
        if state not in (file.path for file in manifest.files if file.role == STATE):
            raise Unusable("its memory is not among its files.", True)
        try:
            saved = read_vmx(self.identity, self.directory, fresh.name)
            return manifest, working_copy.restored(fresh, saved, state, spec, self.directory, self.identity)
        except errors.JobFault as fault:
            raise Unusable(fault.problem, True) from fault

    def refuse(self, spec: VmwareSpec, unusable: Unusable) -> Callable[[], None]:
        """Set a checkpoint aside and report why, as `CheckpointStore.refuse` does."""
        own = self.state_files(working_copy.name_for(spec.vmx_file))
        return self.store.refuse(spec.name, unusable, own, fresh_disks=spec.snapshot_disk)

    def write(self, spec: VmwareSpec, copy: WorkingCopy, facts: Facts, cpu_seconds: float) -> None:
        """Write the manifest of a VM that is suspended. Raises `errors.MachineFault`."""
        state = self.state_files(copy.name)
        state += [copy.nvram] if copy.nvram in os.listdir(self.directory) else []
        refs = [FileRef(STATE, name) for name in state] + [FileRef(DISK, name) for name in copy.files]
        self.store.write(self.store.now(spec, facts, cpu_seconds), refs)

    def forget(self, *names: str) -> None:
        """Remove files that are no longer needed."""
        scratch.forget(self.identity, self.directory, self.log, *names)
