"""Checkpoints of VMware's VMs: what is written down of one, and whether one can be restored.

A checkpoint is a suspended VM: its memory (``.vmss`` and ``.vmem``), the disks of its snapshot, the working
copy of the ``.vmx``, all in the scratch directory, so HTCondor takes them along. The manifest, written last,
says what they were like; memory and disks that do not belong together would destroy each other.
"""

import os
import re
from collections.abc import Iterable
from typing import NamedTuple

from vmgahp import errors
from vmgahp.checkpoint import files, store
from vmgahp.checkpoint.files import CheckpointFile, Unusable
from vmgahp.checkpoint.manifest import encode
from vmgahp.drivers.base import Logger
from vmgahp.drivers.vmrun.vmdk import VmdkLayer
from vmgahp.host import scratch
from vmgahp.host.job_user import Identity
from vmgahp.job.vmware import VmwareSpec, read_vmx
from vmgahp.job.vmx import Vmx

MANIFEST_FILE = "vmware_checkpoint.json"
FORMAT = 1

STATE_SUFFIXES = (".vmss", ".vmem", ".vmsn", ".vmsd", ".nvram")
"""What VMware keeps of a VM beside its ``.vmx`` and its disks."""

CANNOT_SAVE = errors.PREFIX + "VM_CANNOT_CREATE_CKPT_FILES"

_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)
_STATE = re.compile(r"[^/\x00-\x1f\x7f]{1,250}\.vmss")
_MOST_FILES = 5000


class VmrunManifest(NamedTuple):
    """One checkpoint."""

    name: str
    """The VM's name, which says whose checkpoint it is."""
    uuid: str
    state: str
    """The file with the memory, in the scratch directory."""
    memory_mib: int
    vcpus: int
    cpu_seconds: float
    memory: tuple[CheckpointFile, ...]
    """What VMware keeps of the VM: `state`, and what goes with it."""
    disks: tuple[CheckpointFile, ...]


class VmrunRestart(NamedTuple):
    """A checkpoint that can be restored."""

    manifest: VmrunManifest
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

    def find(self, spec: VmwareSpec, vmx_name: str) -> VmrunRestart | None:
        """The checkpoint in the scratch directory; None where there is none. Raises `Unusable`."""
        content = files.find(self.identity, self.directory, MANIFEST_FILE, _parse)
        if content is None:
            return None
        self._check(content, spec)
        try:
            return VmrunRestart(content, read_vmx(self.identity, self.directory, vmx_name))
        except errors.JobFault as fault:
            raise Unusable(fault.problem, True) from fault

    def refuse(self, spec: VmwareSpec, unusable: Unusable) -> None:
        """Keep a checkpoint aside and say why.

        Raises `errors.JobFault` where the guest writes to its own disks and these are not as they were: their state
        is unknown. With snapshot disks it starts on the job's own again.
        """
        kept = self._set_aside(state_files(self.directory, spec.vmx_file.removesuffix(".vmx") + "_condor.vmx"))
        problem = f"The checkpoint of {spec.name} cannot be used: {unusable.reason}"
        if not unusable.disks_intact and not spec.snapshot_disk:
            raise errors.JobFault(
                errors.MISMATCHED_CHECKPOINT,
                problem,
                "submit the job again with disks that are in order; the checkpoint's files end in .refused.",
            )
        self.log(f"{problem} It is kept as {', '.join(kept) or 'it was'}; the guest boots anew.")

    def write(
        self,
        spec: VmwareSpec,
        vmx_name: str,
        uuid: str,
        state: str,
        cpu_seconds: float,
        disks: Iterable[tuple[VmdkLayer, ...]],
    ) -> None:
        """Write the manifest of a VM that is suspended. Raises `errors.MachineFault`."""
        from vmgahp.checkpoint.manifest import Invalid

        def states(names: Iterable[str]) -> tuple[CheckpointFile, ...]:
            return tuple(files.describe(self.identity, self.directory, name, elsewhere=True) for name in names)

        try:
            names = dict.fromkeys(name for chain in disks for layer in chain for name in layer.files)
            memory = states(state_files(self.directory, vmx_name))
            saved = VmrunManifest(
                spec.name, uuid, state, spec.memory_mib, spec.vcpus, cpu_seconds, memory, states(names)
            )
            files.write(self.identity, self.directory, MANIFEST_FILE, encode(FORMAT, saved), _parse)
        except (OSError, Invalid) as error:
            raise errors.MachineFault(
                f"The checkpoint of {spec.name} cannot be completed: {error}.",
                "look at the file system of the scratch directory; the VM keeps running.",
                CANNOT_SAVE,
            ) from error

    def begin_restart(self) -> None:
        """The guest is about to continue and its disks to change: no later START restores this checkpoint."""
        files.begin_restart(self.identity, self.directory, MANIFEST_FILE)

    def put_back(self) -> None:
        """The guest has not continued after all; a failure is logged."""
        try:
            files.put_back(self.identity, self.directory, MANIFEST_FILE)
        except (OSError, errors.Fault) as error:
            self.log(f"{MANIFEST_FILE} cannot be put back: {error}")

    def discard(self) -> None:
        """The guest has continued: the manifest of its checkpoint is obsolete."""
        self.forget(MANIFEST_FILE, MANIFEST_FILE + files.RESTARTING)

    def forget(self, *names: str) -> None:
        """Remove files that are of no more use."""
        scratch.forget(self.identity, self.directory, self.log, *names)

    # What helps

    def _check(self, content: VmrunManifest, spec: VmwareSpec) -> None:
        """Whether everything is as it was. Raises `Unusable`."""
        changed = [reason for state in content.disks if (reason := self._difference(state))]
        reasons = []
        if content.name != spec.name:
            reasons.append(f"it is the checkpoint of {content.name!a}, and this is {spec.name}")
        if (content.memory_mib, content.vcpus) != (spec.memory_mib, spec.vcpus):
            reasons.append(
                f"the VM had {content.memory_mib} MiB and {content.vcpus} CPUs, and is to have "
                f"{spec.memory_mib} MiB and {spec.vcpus} now"
            )
        if content.state not in (state.path for state in content.memory):
            reasons.append("its memory is not among its files")
        reasons += [reason for state in content.memory if (reason := self._difference(state))]
        if reasons or changed:
            raise Unusable("; ".join(reasons + changed) + ".", not changed)

    def _difference(self, then: CheckpointFile) -> str:
        return files.difference(self.identity, self.directory, then, elsewhere=True)

    def _set_aside(self, names: Iterable[str]) -> list[str]:
        """Rename the files, the manifest first: what is left is never a checkpoint."""
        made = []
        for name in (MANIFEST_FILE, *names):
            try:
                made += store.set_aside(self.identity, self.directory, [name])
            except OSError as error:
                self.log(f"{name} cannot be set aside: {error.strerror}")
        return made


def _parse(data: bytes) -> VmrunManifest:
    """The manifest that `data` is. Raises `vmgahp.checkpoint.manifest.Invalid`."""
    from vmgahp.checkpoint import manifest

    top = manifest.read(data, FORMAT, VmrunManifest._fields)
    return VmrunManifest(
        name=top.text("name", 300),
        uuid=top.form("uuid", _UUID),
        state=top.form("state", _STATE),
        memory_mib=top.integer("memory_mib", 1, 10**9),
        vcpus=top.integer("vcpus", 1, 10**6),
        cpu_seconds=top.real("cpu_seconds", 1e12),
        memory=files.read(top, "memory", _MOST_FILES),
        disks=files.read(top, "disks", _MOST_FILES),
    )
