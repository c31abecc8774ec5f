"""Checkpoints of VMs that a script manages: what is written down of one, and whether it can be gone on from.

The script makes the files and says which they are; the manifest, written last, says what they were like, so that
memory and disks which do not belong together are never brought together.
"""

import os
import re
from typing import NamedTuple

from vmgahp import checkpoint, errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from vmgahp.drivers.base import Logger
    from vmgahp.drivers.script.wish import Wish
    from vmgahp.identity import Identity

MANIFEST_FILE = "script_checkpoint.json"
FORMAT = 1

CANNOT_SAVE = errors.PREFIX + "VM_CANNOT_CREATE_CKPT_FILES"

_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_LARGEST_FILE = 2**63 - 1
_MOST_FILES = 1000


class FileState(NamedTuple):
    """One file as it was; only pieces of a large one are looked at (`checkpoint.sample`)."""

    path: str
    size: int
    sample: str


class Restart(NamedTuple):
    """A checkpoint that may be gone on from."""

    hypervisor: str
    name: str
    """The VM's name, which says whose checkpoint it is."""
    memory_mib: int
    vcpus: int
    cpu_seconds: float
    note: str
    """The script's own words to itself."""
    files: tuple[FileState, ...]


class Checkpoints:
    """Finds and makes the checkpoint of one scratch directory."""

    def __init__(self, identity: "Identity", directory: str, log: "Logger") -> None:
        self._identity = identity
        self._directory = directory
        self._log = log

    def find(self, wish: "Wish", hypervisor: str) -> Restart | None:
        """The checkpoint in the scratch directory, or None.

        Raises `errors.JobFault` for one that cannot be used: what a guest would find on its disks nobody knows.
        """
        try:
            descriptor = self._identity.open_scratch(self._directory, MANIFEST_FILE, os.O_RDONLY)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unusable(wish, f"{MANIFEST_FILE} cannot be opened: {error.strerror}") from error
        from vmgahp.manifest import LARGEST, Invalid

        try:
            with os.fdopen(descriptor, "rb") as file:
                found = _parse(file.read(LARGEST + 1))
        except (OSError, Invalid) as error:
            raise _unusable(wish, f"{MANIFEST_FILE} cannot be read: {error}") from error
        wanted = (hypervisor, wish.name, wish.memory_mib, wish.vcpus)
        reasons = [
            f"its {what} is {then!a}, and this is {now!a}"
            for what, then, now in zip(("hypervisor", "VM", "memory", "CPUs"), found[:4], wanted, strict=True)
            if then != now
        ]
        reasons += [reason for state in found.files if (reason := self._difference(state))]
        if reasons:
            raise _unusable(wish, "; ".join(reasons))
        return found

    def write(
        self, wish: "Wish", hypervisor: str, cpu_seconds: float, files: "Iterable[str]", note: str
    ) -> None:
        """Write the manifest of a VM that is saved. Raises `errors.MachineFault`."""
        import json

        from vmgahp.manifest import Invalid

        try:
            states = [self._describe(name)._asdict() for name in dict.fromkeys(files)]
            if not states:
                raise Invalid("the script names no files of it.")
            content = {
                "format": FORMAT,
                "hypervisor": hypervisor,
                "name": wish.name,
                "memory_mib": wish.memory_mib,
                "vcpus": wish.vcpus,
                "cpu_seconds": cpu_seconds,
                "note": note,
                "files": states,
            }
            data = json.dumps(content, indent=1).encode() + b"\n"
            _parse(data)
            self._identity.write_scratch(self._directory, MANIFEST_FILE, data)
        except (OSError, Invalid) as error:
            raise errors.MachineFault(
                f"The checkpoint of {wish.name} cannot be completed: {error}.",
                "let the script name the files that it has made in the scratch directory; they belong to the job's "
                "user. The VM goes on running.",
                CANNOT_SAVE,
            ) from error

    def discard(self) -> None:
        """The guest goes on and its disks change: what is written down of its checkpoint is of no more use."""
        try:
            self._identity.unlink_scratch(self._directory, MANIFEST_FILE)
        except (OSError, errors.Fault) as error:
            self._log(f"could not remove {MANIFEST_FILE} from {self._directory}: {error}")

    def _difference(self, then: FileState) -> str:
        try:
            now = self._describe(then.path)
        except OSError as error:
            return f"{then.path!a} cannot be opened ({error.strerror})"
        return "" if now == then else f"{then.path!a} is not as it was"

    def _describe(self, name: str) -> FileState:
        descriptor = self._identity.open_scratch(self._directory, name, os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            return FileState(name, size, checkpoint.sample(descriptor, size))
        finally:
            os.close(descriptor)


def _parse(data: bytes) -> Restart:
    """The manifest that `data` is. Raises `vmgahp.manifest.Invalid`."""
    from vmgahp import manifest

    top = manifest.read(data, FORMAT, Restart._fields)
    files = []
    for number, item in enumerate(top.items("files", _MOST_FILES)):
        file = manifest.Fields(item, f"files[{number}].", FileState._fields)
        files.append(
            FileState(
                file.text("path", 4096),
                file.integer("size", 0, _LARGEST_FILE),
                file.form("sample", _SHA256),
            )
        )
    return Restart(
        hypervisor=top.text("hypervisor", 32),
        name=top.text("name", 300),
        memory_mib=top.integer("memory_mib", 1, 10**9),
        vcpus=top.integer("vcpus", 1, 10**6),
        cpu_seconds=top.real("cpu_seconds", 1e12),
        note=top.text("note", 500, may_be_empty=True),
        files=tuple(files),
    )


def _unusable(wish: "Wish", reason: str) -> errors.JobFault:
    return errors.JobFault(
        errors.MISMATCHED_CHECKPOINT,
        f"The checkpoint of {wish.name} cannot be used: {reason.rstrip('.')}.",
        "submit the job again with disks that are in order.",
    )
