"""Checkpoints of VMware's VMs: what is written down of one, and whether one can be gone on from.

A checkpoint is a suspended VM: its memory (``.vmss`` and ``.vmem``), the disks of its snapshot, the working
copy of the ``.vmx``, all in the scratch directory, so HTCondor takes them along. The manifest, written last,
says what they were like; memory and disks that do not belong together would destroy each other.
"""

import os
import re
from collections.abc import Iterable
from typing import NamedTuple

from vmgahp import errors
from vmgahp.checkpoint import files
from vmgahp.checkpoint.files import CheckpointFile
from vmgahp.checkpoint.store import Unusable
from vmgahp.drivers.base import Logger
from vmgahp.drivers.vmrun.vmdk import VmdkLayer
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
_MOST_REFUSED = 100


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
    """A checkpoint that may be gone on from."""

    manifest: VmrunManifest
    saved: Vmx
    """The working copy that came with it, which is the job's to change."""


def state_files(directory: str, vmx_name: str) -> list[str]:
    """The files that VMware keeps of a VM beside its ``.vmx`` and its disks, by name."""
    stem = vmx_name.removesuffix(".vmx")
    return sorted(
        entry for entry in os.listdir(directory) if entry.startswith(stem) and entry.endswith(STATE_SUFFIXES)
    )


class VmrunCheckpoints:
    """Finds and makes the checkpoints of one scratch directory."""

    def __init__(self, identity: Identity, directory: str, log: Logger) -> None:
        self._identity = identity
        self.directory = directory
        self._log = log

    def find(self, spec: VmwareSpec, vmx_name: str) -> VmrunRestart | None:
        """The checkpoint in the scratch directory; None where there is none, or none that can be used.

        Raises `errors.JobFault` as `refuse` does.
        """
        try:
            content = self._load()
            if content is None:
                return None
            self._check(content, spec)
            try:
                return VmrunRestart(content, read_vmx(self._identity, self.directory, vmx_name))
            except errors.JobFault as fault:
                raise Unusable(fault.problem, True) from fault
        except Unusable as unusable:
            self.refuse(spec, unusable)
            return None

    def refuse(self, spec: VmwareSpec, unusable: Unusable) -> None:
        """Keep a checkpoint aside and say why.

        Raises `errors.JobFault` where the guest writes to its own disks and these are not as they were: what a
        guest would find on them nobody knows. With snapshot disks it starts on the job's own again.
        """
        kept = self._set_aside(
            state_files(self.directory, spec.vmx_file.removesuffix(".vmx") + "_condor.vmx")
        )
        problem = f"The checkpoint of {spec.name} cannot be used: {unusable.reason}"
        if not unusable.disks_intact and not spec.snapshot_disk:
            raise errors.JobFault(
                errors.MISMATCHED_CHECKPOINT,
                problem,
                "submit the job again with disks that are in order; the checkpoint's files end in .refused.",
            )
        self._log(f"{problem} It is kept as {', '.join(kept) or 'it was'}; the guest boots afresh.")

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
        import json

        from vmgahp.checkpoint.manifest import Invalid

        try:
            names = dict.fromkeys(name for chain in disks for layer in chain for name in layer.files)
            content = {
                "format": FORMAT,
                "name": spec.name,
                "uuid": uuid,
                "state": state,
                "memory_mib": spec.memory_mib,
                "vcpus": spec.vcpus,
                "cpu_seconds": cpu_seconds,
                "memory": [self._describe(name)._asdict() for name in state_files(self.directory, vmx_name)],
                "disks": [self._describe(name)._asdict() for name in names],
            }
            data = json.dumps(content, indent=1).encode() + b"\n"
            _parse(data)
            self._identity.write_scratch(self.directory, MANIFEST_FILE, data)
        except (OSError, Invalid) as error:
            raise errors.MachineFault(
                f"The checkpoint of {spec.name} cannot be completed: {error}.",
                "look at the file system of the scratch directory; the VM goes on running.",
                CANNOT_SAVE,
            ) from error

    def discard(self) -> None:
        """The guest goes on and its disks change: what is written down of its checkpoint is of no more use."""
        self.forget(MANIFEST_FILE)

    def forget(self, *names: str) -> None:
        """Remove files that are of no more use."""
        for name in names:
            try:
                self._identity.unlink_scratch(self.directory, name)
            except (OSError, errors.Fault) as error:
                self._log(f"could not remove {name} from {self.directory}: {error}")

    # What helps

    def _load(self) -> VmrunManifest | None:
        try:
            data = files.load(self._identity, self.directory, MANIFEST_FILE)
        except OSError as error:
            raise Unusable(f"{MANIFEST_FILE} cannot be opened: {error.strerror}.", False) from error
        if data is None:
            return None
        from vmgahp.checkpoint.manifest import Invalid

        try:
            return _parse(data)
        except Invalid as error:
            raise Unusable(f"{MANIFEST_FILE} cannot be read: {error}", False) from error

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
        return files.difference(self._identity, self.directory, then, elsewhere=True)

    def _describe(self, path: str) -> CheckpointFile:
        return files.describe(self._identity, self.directory, path, elsewhere=True)

    def _set_aside(self, names: Iterable[str]) -> list[str]:
        """Rename the files, the manifest first: what is left is never a checkpoint."""
        made = []
        for name in (MANIFEST_FILE, *names):
            for number in range(1, _MOST_REFUSED):
                other = f"{name}.refused-{number}"
                try:
                    self._identity.rename_scratch(self.directory, name, other, replace=False)
                except FileExistsError:
                    continue
                except OSError as error:
                    if not isinstance(error, FileNotFoundError):
                        self._log(f"{name} cannot be set aside: {error.strerror}")
                    break
                made.append(other)
                break
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
