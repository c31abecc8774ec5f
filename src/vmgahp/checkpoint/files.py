"""The files of a checkpoint as they were when it was made, to be compared later.

For checkpoints that the hypervisor itself makes of several files; those of libvirt are `vmgahp.checkpoint.store`'s.
"""

import os
import re
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from vmgahp import errors
from vmgahp.checkpoint.manifest import LARGEST, Fields, Invalid
from vmgahp.host.job_user import Identity

Manifest = TypeVar("Manifest")

SAMPLE_ENDS, SAMPLE_SIZE, SAMPLES = 1 << 20, 64 << 10, 32
"""Of an image the first and the last MiB are looked at, and 32 pieces of 64 KiB between: 4 MiB of any image,
however large, in 5 ms from the page cache and in a few dozen seeks from a disk. One of up to 4 MiB is looked
at as a whole."""

RESTARTING = ".restarting"
"""What the name of a manifest ends in while its guest is being restored."""

_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_CHUNK = 1 << 20


class Unusable(Exception):
    """The checkpoint cannot be restored; the text says why.

    `disks_intact` is true where every disk is known to be as it was at the checkpoint. A guest that then
    boots afresh finds its disks as after a power cut; otherwise nobody knows what it would find.
    """

    def __init__(self, reason: str, disks_intact: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.disks_intact = disks_intact


class CheckpointFile(NamedTuple):
    """One file as it was; only pieces of a large one are looked at (`sample`)."""

    path: str
    """A name in the scratch directory, or a full path elsewhere."""
    size: int
    sample: str


def describe(identity: Identity, directory: str, path: str, *, elsewhere: bool = False) -> CheckpointFile:
    """The file as it is, in the scratch `directory`, or by a full path where it may be `elsewhere`.

    Raises OSError, and `errors.MachineFault` where a full path's file system hangs.
    """
    if elsewhere and path.startswith("/"):
        descriptor = identity.open_named(path, os.O_RDONLY)
    else:
        descriptor = identity.open_scratch(directory, path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        return CheckpointFile(path, size, sample(descriptor, size))
    finally:
        os.close(descriptor)


def difference(identity: Identity, directory: str, then: CheckpointFile, *, elsewhere: bool = False) -> str:
    """In what the file is not as it was; empty where it is."""
    try:
        now = describe(identity, directory, then.path, elsewhere=elsewhere)
    except (OSError, errors.MachineFault) as error:
        reason = error.strerror if isinstance(error, OSError) else "its file system does not answer"
        return f"{then.path!a} cannot be opened ({reason})"
    if now.size != then.size:
        return f"{then.path!a} had {then.size} bytes and has {now.size} now"
    return f"the content of {then.path!a} has changed" if now.sample != then.sample else ""


def load(identity: Identity, directory: str, name: str) -> bytes | None:
    """The manifest `name` as it is, or None where there is none. Raises OSError.

    One that is too long is cut off where it becomes too long for `vmgahp.checkpoint.manifest.read`.
    """
    try:
        descriptor = identity.open_scratch(directory, name, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        return file.read(LARGEST + 1)


def find(identity: Identity, directory: str, name: str, parse: "Callable[[bytes], Manifest]") -> Manifest | None:
    """The manifest `name` as `parse` reads it; None where there is none. Raises `Unusable`."""
    try:
        data = load(identity, directory, name)
    except OSError as error:
        raise Unusable(f"{name} cannot be opened: {error.strerror}.", False) from error
    if data is None:
        return None
    try:
        return parse(data)
    except Invalid as error:
        raise Unusable(f"{name} cannot be read: {error}", False) from error


def write(identity: Identity, directory: str, name: str, data: bytes, parse: Callable[[bytes], object]) -> None:
    """Write the manifest `name`, all or nothing. Raises OSError, and `Invalid` for one that `parse` would not take."""
    parse(data)
    identity.write_scratch(directory, name, data)


def begin_restart(identity: Identity, directory: str, name: str) -> None:
    """Set the good manifest `name` aside while its guest is restored: from here on its disks may change.

    Raises `errors.MachineFault`.
    """
    try:
        identity.rename_scratch(directory, name, name + RESTARTING)
    except OSError as error:
        raise errors.MachineFault(
            f"{name} cannot be set aside in {directory}: {error.strerror}.", "check the file system of EXECUTE."
        ) from error


def put_back(identity: Identity, directory: str, name: str) -> None:
    """Undo `begin_restart`: the guest has not run. Raises OSError, and `errors.MachineFault`."""
    try:
        identity.rename_scratch(directory, name + RESTARTING, name)
    except FileNotFoundError:
        return


def read(top: Fields, where: str, most: int) -> tuple[CheckpointFile, ...]:
    """The files, `most` at most, in the field `where` of a manifest. Raises `vmgahp.checkpoint.manifest.Invalid`."""
    found = []
    for number, item in enumerate(top.items(where, most)):
        file = Fields(item, f"{where}[{number}].", CheckpointFile._fields)
        found.append(
            CheckpointFile(
                path=file.text("path", 4096),
                size=file.integer("size", 0, 2**63 - 1),
                sample=file.form("sample", _SHA256),
            )
        )
    return tuple(found)


def sample(descriptor: int, size: int) -> str:
    """SHA-256 over the size of an image and a few pieces of it, in hexadecimal."""
    import hashlib

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
