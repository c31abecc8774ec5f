"""Checkpoints of VMs that a script manages, and the check that a VM can restart from one.

The script makes the files and names them, but does not tell which of them are disks.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from vmgahp import errors
from vmgahp.checkpoint.files import FileRef
from vmgahp.checkpoint.manifest import STATE, CheckpointKind, Facts, Manifest, text
from vmgahp.checkpoint.store import CANNOT_SAVE, CheckpointStore
from vmgahp.drivers.base import Logger
from vmgahp.host.job_user import Identity
from vmgahp.job.vm_spec import VmSpec

HINT = (
    "let the script name the files that it has made in the scratch directory; they belong to the job's user. "
    "The VM keeps running."
)


def _differences(then: Facts, now: Facts) -> Iterator[str]:
    if then["hypervisor"] != now["hypervisor"]:
        yield f"its hypervisor is {then['hypervisor']!a}, and this is {now['hypervisor']!a}"


KIND = CheckpointKind(
    "script",
    {
        "hypervisor": text(32),
        "note": text(500, may_be_empty=True),  # the script's own words to itself
    },
    most_files=1000,
    differences=_differences,
    knows_disks=False,
)


class ScriptCheckpoints(NamedTuple):
    """The checkpoint of one scratch directory: finds it and writes it."""

    identity: Identity
    directory: str
    log: Logger

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore(KIND, self.identity, self.directory, self.log)

    def find(self, spec: VmSpec, hypervisor: str) -> Manifest | None:
        """Return the checkpoint in the scratch directory, or None. Raises `Unusable`."""
        found = self.store.load()
        if found is not None:
            self.store.check(found, self.store.now(spec, {"hypervisor": hypervisor}), map(FileRef.of, found.files))
        return found

    def write(self, spec: VmSpec, facts: Facts, cpu_seconds: float, names: Iterable[str]) -> None:
        """Write the manifest of a VM that is saved. Raises `errors.MachineFault`."""
        refs = [FileRef(STATE, name) for name in dict.fromkeys(names)]
        if not refs:
            problem = f"The checkpoint of {spec.name} cannot be completed: the script names no files of it."
            raise errors.MachineFault(problem, HINT, CANNOT_SAVE)
        self.store.write(self.store.now(spec, facts, cpu_seconds), refs, HINT)
