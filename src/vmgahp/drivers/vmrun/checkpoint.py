"""Checkpoints of VMware's VMs: what is written down of one, and whether one can be restored.

A checkpoint is a suspended VM: its memory (``.vmss`` and ``.vmem``), the disks of its snapshot, the working
copy of the ``.vmx``, all in the scratch directory, so HTCondor takes them along.
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
from vmgahp.drivers.vmrun.working_copy import WorkingCopy
from vmgahp.host import scratch
from vmgahp.host.job_user import Identity
from vmgahp.job.vmware import VmwareSpec, read_vmx
from vmgahp.job.vmx import Vmx

STATE_SUFFIXES = (".vmss", ".vmem", ".vmsn", ".vmsd", ".nvram")
"""What VMware keeps of a VM beside its ``.vmx`` and its disks."""

KIND = CheckpointKind(
    "vmrun",
    {
        "uuid": matching(UUID),
        "state": matching(re.compile(r"[^/\x00-\x1f\x7f]{1,250}\.vmss")),  # the file with the memory
    },
)


class VmrunRestart(NamedTuple):
    """A checkpoint that can be restored."""

    manifest: Manifest
    saved: Vmx
    """The working copy that came with it, which is the job's to change."""


def state_files(directory: str, vmx_name: str) -> list[str]:
    """The files that VMware keeps of a VM beside its ``.vmx`` and its disks, by name."""
    stem = vmx_name.removesuffix(".vmx")
    return sorted(entry for entry in os.listdir(directory) if entry.startswith(stem) and entry.endswith(STATE_SUFFIXES))


class VmrunCheckpoints(NamedTuple):
    """Finds and makes the checkpoints of one scratch directory."""

    identity: Identity
    directory: str
    log: Logger

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore(KIND, self.identity, self.directory, self.log)

    def find(self, spec: VmwareSpec, vmx_name: str) -> VmrunRestart | None:
        """The checkpoint in the scratch directory; None where there is none. Raises `Unusable`."""
        manifest = self.store.load()
        if manifest is None:
            return None
        # Which disks a guest has is the word of the working copy, which came back with it.
        self.store.check(manifest, self.store.now(spec, {}), map(FileRef.of, manifest.files))
        if manifest.facts["state"] not in (file.path for file in manifest.files if file.role == STATE):
            raise Unusable("its memory is not among its files.", True)
        try:
            return VmrunRestart(manifest, read_vmx(self.identity, self.directory, vmx_name))
        except errors.JobFault as fault:
            raise Unusable(fault.problem, True) from fault

    def refuse(self, spec: VmwareSpec, unusable: Unusable) -> Callable[[], None]:
        """Keep a checkpoint aside and say why, as `CheckpointStore.refuse` does."""
        own = state_files(self.directory, spec.vmx_file.removesuffix(".vmx") + "_condor.vmx")
        return self.store.refuse(spec.name, unusable, own, fresh_disks=spec.snapshot_disk)

    def write(self, spec: VmwareSpec, copy: WorkingCopy, facts: Facts, cpu_seconds: float) -> None:
        """Write the manifest of a VM that is suspended. Raises `errors.MachineFault`."""
        names = dict.fromkeys(name for chain in copy.disks.values() for layer in chain for name in layer.files)
        state = state_files(self.directory, copy.name)
        state += [copy.nvram] if copy.nvram in os.listdir(self.directory) else []
        refs = [FileRef(STATE, name) for name in state]
        refs += [FileRef(DISK, name) for name in names]
        self.store.write(self.store.now(spec, facts, cpu_seconds), refs)

    def forget(self, *names: str) -> None:
        """Remove files that are of no more use."""
        scratch.forget(self.identity, self.directory, self.log, *names)
