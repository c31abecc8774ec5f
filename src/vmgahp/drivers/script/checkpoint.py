"""Checkpoints of VMs that a script manages, and whether a VM can restart from one.

The script makes the files and says which they are; the manifest, written last, says what they were like, so that
memory and disks which do not belong together are never brought together.
"""

from collections.abc import Iterable
from typing import NamedTuple

from vmgahp import errors
from vmgahp.checkpoint import files
from vmgahp.checkpoint.files import CheckpointFile, Unusable
from vmgahp.checkpoint.manifest import encode
from vmgahp.drivers.base import Logger
from vmgahp.drivers.script.spec import ScriptSpec
from vmgahp.host import scratch
from vmgahp.host.job_user import Identity

MANIFEST_FILE = "script_checkpoint.json"
FORMAT = 1

CANNOT_SAVE = errors.PREFIX + "VM_CANNOT_CREATE_CKPT_FILES"

_MOST_FILES = 1000


class ScriptRestart(NamedTuple):
    """A checkpoint that can be restored."""

    hypervisor: str
    name: str
    """The VM's name, which says whose checkpoint it is."""
    memory_mib: int
    vcpus: int
    cpu_seconds: float
    note: str
    """The script's own words to itself."""
    files: tuple[CheckpointFile, ...]


class ScriptCheckpoints(NamedTuple):
    """Finds and makes the checkpoint of one scratch directory."""

    identity: Identity
    directory: str
    log: Logger

    def find(self, spec: ScriptSpec, hypervisor: str) -> ScriptRestart | None:
        """The checkpoint in the scratch directory, or None.

        Raises `errors.JobFault` for one that cannot be used: the state of its disks is unknown.
        """
        try:
            found = files.find(self.identity, self.directory, MANIFEST_FILE, _parse)
        except Unusable as unusable:
            raise _unusable(spec, unusable.reason) from unusable
        if found is None:
            return None
        wanted = (hypervisor, spec.name, spec.memory_mib, spec.vcpus)
        reasons = [
            f"its {what} is {then!a}, and this is {now!a}"
            for what, then, now in zip(("hypervisor", "VM", "memory", "CPUs"), found[:4], wanted, strict=True)
            if then != now
        ]
        for then_file in found.files:
            if reason := files.difference(self.identity, self.directory, then_file):
                reasons.append(reason)
        if reasons:
            raise _unusable(spec, "; ".join(reasons))
        return found

    def write(self, spec: ScriptSpec, hypervisor: str, cpu_seconds: float, names: Iterable[str], note: str) -> None:
        """Write the manifest of a VM that is saved. Raises `errors.MachineFault`."""
        from vmgahp.checkpoint.manifest import Invalid

        try:
            states = tuple(files.describe(self.identity, self.directory, name) for name in dict.fromkeys(names))
            if not states:
                raise Invalid("the script names no files of it.")
            saved = ScriptRestart(hypervisor, spec.name, spec.memory_mib, spec.vcpus, cpu_seconds, note, states)
            files.write(self.identity, self.directory, MANIFEST_FILE, encode(FORMAT, saved), _parse)
        except (OSError, Invalid) as error:
            raise errors.MachineFault(
                f"The checkpoint of {spec.name} cannot be completed: {error}.",
                "let the script name the files that it has made in the scratch directory; they belong to the job's "
                "user. The VM keeps running.",
                CANNOT_SAVE,
            ) from error

    def exists(self) -> bool:
        """Whether there is a manifest, and so a VM that was saved and has not continued."""
        try:
            return files.load(self.identity, self.directory, MANIFEST_FILE) is not None
        except (OSError, errors.Fault):
            return True  # nobody knows, and what is kept can still be removed

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
        scratch.forget(self.identity, self.directory, self.log, MANIFEST_FILE, MANIFEST_FILE + files.RESTARTING)


def _parse(data: bytes) -> ScriptRestart:
    """The manifest that `data` is. Raises `vmgahp.checkpoint.manifest.Invalid`."""
    from vmgahp.checkpoint import manifest

    top = manifest.read(data, FORMAT, ScriptRestart._fields)
    return ScriptRestart(
        hypervisor=top.text("hypervisor", 32),
        name=top.text("name", 300),
        memory_mib=top.integer("memory_mib", 1, 10**9),
        vcpus=top.integer("vcpus", 1, 10**6),
        cpu_seconds=top.real("cpu_seconds", 1e12),
        note=top.text("note", 500, may_be_empty=True),
        files=files.read(top, "files", _MOST_FILES),
    )


def _unusable(spec: ScriptSpec, reason: str) -> errors.JobFault:
    return errors.JobFault(
        errors.MISMATCHED_CHECKPOINT,
        f"The checkpoint of {spec.name} cannot be used: {reason.rstrip('.')}.",
        "submit the job again with disks that are in order.",
    )
