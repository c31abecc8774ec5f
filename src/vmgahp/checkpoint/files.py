"""Files that come back with a job: how to describe and compare them, and small records about them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from vmgahp import errors
from vmgahp.checkpoint.manifest import LARGEST, CheckpointFile, Invalid
from vmgahp.host import job_user
from vmgahp.host.job_user import Identity
from vmgahp.host.system_calls import Opened

Record = TypeVar("Record")
AnyFile = TypeVar("AnyFile", CheckpointFile, "FileRef")

SAMPLE_ENDS, SAMPLE_SIZE, SAMPLES = 1 << 20, 64 << 10, 32
"""The parts of an image that are sampled: its first and last MiB, and 32 pieces of 64 KiB between: 4 MiB of any image,
however large, in 5 ms from the page cache and in a few dozen seeks from a disk. An image of up to 4 MiB is read as a
whole."""

_CHUNK = 1 << 20


class Unusable(Exception):
    """A checkpoint that cannot be restored; the text says why.

    `disks_intact` is true if every disk is known to be as it was at the checkpoint. A guest that then boots afresh
    finds its disks as after a power cut; otherwise the state of its disks is unknown. `by_accident` is true if the
    failure says nothing about the checkpoint, such as a hypervisor's process that was killed.
    """

    def __init__(self, reason: str, disks_intact: bool, *, by_accident: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.disks_intact = disks_intact
        self.by_accident = by_accident


class FileRef(NamedTuple):
    """A reference to a file that is to be described."""

    role: str
    path: str
    """A name in the scratch directory, or a full path there or elsewhere."""
    device: str = ""
    writable: bool = False
    format: str = ""
    known_as: str = ""
    """The name of an image of the catalog, or of one of its backing files: on another machine it has another path and
    another modification time."""

    @classmethod
    def of(cls, then: CheckpointFile) -> FileRef:
        """Make a reference to the same file as it is now."""
        return cls(then.role, then.path, then.device, then.writable, then.format)


# Looking at files


def describe(identity: Identity, directory: str, ref: FileRef) -> CheckpointFile:
    """Describe the file, with a sample of it, read as the job's user. Raises OSError and `errors.MachineFault`."""
    inside = _inside(directory, ref.path)
    try:
        if inside is None:
            descriptor = identity.open_named(ref.path, os.O_RDONLY)
        else:
            descriptor = identity.open_scratch(directory, inside, os.O_RDONLY)
        with Opened(descriptor):
            status = os.fstat(descriptor)
            size = status.st_size
            digest = sample(descriptor, size)
    except OSError as error:
        raise OSError(error.errno, error.strerror, ref.path) from error
    return CheckpointFile(
        role=ref.role,
        path=ref.known_as or (ref.path if inside is None else inside),
        transferred=inside is not None,
        device=ref.device,
        writable=ref.writable,
        format=ref.format,
        size=size,
        mtime_ns=0 if ref.known_as else status.st_mtime_ns,
        digest=digest,
    )


def differences(
    identity: Identity, directory: str, saved: Iterable[CheckpointFile], current: Iterable[FileRef]
) -> list[str]:
    """List the differences from the saved files, whatever their paths are now. Raises `errors.Fault`."""
    then, now = _by_device(saved), _by_device(current)
    if then.keys() != now.keys():
        return [f"the disks were {', '.join(then) or 'none'} and are {', '.join(now) or 'none'} now"]
    reasons = []
    for device, refs in now.items():
        about = f"disk {device}" if device else ""
        if len(refs) != len(then[device]):
            had, has = len(then[device]) - 1, len(refs) - 1
            reasons.append(f"{about or 'it'} had {had} backing files and has {has} now")
            continue
        found = [
            difference
            for file, ref in zip(then[device], refs, strict=True)
            if (difference := _difference(identity, directory, file, ref))
        ]
        # One reason is enough for a disk; for other files all are given.
        reasons += [f"{about}: {found[0]}"] if about and found else found
    return reasons


def _by_device(files: Iterable[AnyFile]) -> dict[str, list[AnyFile]]:
    found: dict[str, list[AnyFile]] = {}
    for file in files:
        found.setdefault(file.device, []).append(file)
    return found


def _difference(identity: Identity, directory: str, then: CheckpointFile, ref: FileRef) -> str:
    try:
        now = describe(identity, directory, ref)
    except OSError as error:
        if _inside(directory, ref.path) is not None and errors.is_perhaps_the_machines(error):
            raise unreadable(identity, directory, ref.path, error) from error
        return f"{ref.path!a} cannot be opened ({error.strerror})"  # the job chose the file system
    if (then.role, then.writable) != (now.role, now.writable):
        return f"{now.path!a} was {_words(then)} and is {_words(now)} now"
    if (then.path, then.transferred) != (now.path, now.transferred):
        return f"it was in {then.path!a} and is in {now.path!a} now"
    if then.format != now.format:
        return f"{now.path!a} had the format {then.format} and has {now.format} now"
    if then.size != now.size:
        return f"{now.path!a} had {then.size} bytes and has {now.size} now"
    if then.digest != now.digest:
        return f"the content of {now.path!a} has changed"
    # A transfer gives a file a new modification time.
    if not now.transferred and 0 not in (then.mtime_ns, now.mtime_ns) and then.mtime_ns != now.mtime_ns:
        return f"{now.path!a} has been written to since"
    return ""


def _words(file: CheckpointFile) -> str:
    return f"a {'writable' if file.writable else 'read-only'} {file.role}"


def unreadable(identity: Identity, directory: str, path: str, error: OSError) -> errors.Fault:
    """Make the fault for a file that its file system cannot read: its content is unknown, and the checkpoint stays."""
    hint = "see what is wrong with it; a checkpoint of the job stays as it is."
    problem = f"{path!a} cannot be read ({error.strerror})."
    return job_user.blame(error, directory, identity, problem, hint, errors.MISMATCHED_CHECKPOINT)


def _inside(directory: str, path: str) -> str | None:
    """Return the path relative to the scratch directory, or None for a file elsewhere."""
    if not path.startswith("/"):
        return path
    start = directory.rstrip("/") + "/"
    rest = path.removeprefix(start)
    plain = all(part not in ("", ".", "..") for part in rest.split("/"))
    return rest if path.startswith(start) and plain else None


def sample(descriptor: int, size: int) -> str:
    """Compute the SHA-256 of the size of an image and a few pieces of it, in hexadecimal."""
    digest = hashlib.sha256(b"%d\n" % size)
    for offset, length in _pieces(size):
        digest.update(os.pread(descriptor, length, offset))
    return digest.hexdigest()


def _pieces(size: int) -> list[tuple[int, int]]:
    between = size - 2 * SAMPLE_ENDS
    if between <= SAMPLES * SAMPLE_SIZE:
        return [(offset, min(_CHUNK, size - offset)) for offset in range(0, size, _CHUNK)]
    step = (between - SAMPLE_SIZE) / (SAMPLES - 1)
    return [
        (0, SAMPLE_ENDS),
        *((SAMPLE_ENDS + int(number * step), SAMPLE_SIZE) for number in range(SAMPLES)),
        (size - SAMPLE_ENDS, SAMPLE_ENDS),
    ]


# Records: small JSON files, of which a manifest is one


def find(identity: Identity, directory: str, name: str, parse: Callable[[bytes], Record]) -> Record | None:
    """Read a record of the scratch directory; None if there is none. Raises `Unusable` and `errors.Fault`."""
    try:
        data = identity.read_scratch(directory, name, LARGEST + 1)  # one more, so that one too long stays too long
    except FileNotFoundError:
        return None
    except OSError as error:
        if errors.is_perhaps_the_machines(error):
            raise unreadable(identity, directory, name, error) from error
        raise Unusable(f"{name} cannot be opened: {error.strerror}.", False) from error
    try:
        return parse(data)
    except Invalid as error:
        raise Unusable(f"{name} cannot be read: {error}", False) from error


def write(identity: Identity, directory: str, name: str, data: bytes, parse: Callable[[bytes], object]) -> None:
    """Write the record `name` atomically. Raises OSError, and `Invalid` for one that `parse` would refuse."""
    parse(data)
    identity.write_scratch(directory, name, data)
