"""The files of a checkpoint as they were when it was made, to be compared later.

For checkpoints that the hypervisor itself makes of several files; those of libvirt are `vmgahp.checkpoint.store`'s.
"""

import os
import re
from typing import NamedTuple

from vmgahp import errors
from vmgahp.checkpoint import store as checkpoint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vmgahp.checkpoint.manifest import Fields
    from vmgahp.host.job_user import Identity

_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


class CheckpointFile(NamedTuple):
    """One file as it was; only pieces of a large one are looked at (`checkpoint.sample`)."""

    path: str
    """A name in the scratch directory, or a full path elsewhere."""
    size: int
    sample: str


def describe(identity: "Identity", directory: str, path: str, *, elsewhere: bool = False) -> CheckpointFile:
    """The file as it is, in the scratch `directory`, or by a full path where it may be `elsewhere`.

    Raises OSError, and `errors.MachineFault` where a full path's file system hangs.
    """
    if elsewhere and path.startswith("/"):
        descriptor = identity.open_named(path, os.O_RDONLY)
    else:
        descriptor = identity.open_scratch(directory, path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        return CheckpointFile(path, size, checkpoint.sample(descriptor, size))
    finally:
        os.close(descriptor)


def difference(identity: "Identity", directory: str, then: CheckpointFile, *, elsewhere: bool = False) -> str:
    """In what the file is not as it was; empty where it is."""
    try:
        now = describe(identity, directory, then.path, elsewhere=elsewhere)
    except (OSError, errors.MachineFault) as error:
        reason = error.strerror if isinstance(error, OSError) else "its file system does not answer"
        return f"{then.path!a} cannot be opened ({reason})"
    if now.size != then.size:
        return f"{then.path!a} had {then.size} bytes and has {now.size} now"
    return f"the content of {then.path!a} has changed" if now.sample != then.sample else ""


def load(identity: "Identity", directory: str, name: str) -> bytes | None:
    """The manifest `name` as it is, or None where there is none. Raises OSError.

    One that is too long is cut off where it becomes too long for `vmgahp.checkpoint.manifest.read`.
    """
    try:
        descriptor = identity.open_scratch(directory, name, os.O_RDONLY)
    except FileNotFoundError:
        return None
    from vmgahp.checkpoint.manifest import LARGEST

    with os.fdopen(descriptor, "rb") as file:
        return file.read(LARGEST + 1)


def read(top: "Fields", where: str, most: int) -> tuple[CheckpointFile, ...]:
    """The files, `most` at most, in the field `where` of a manifest. Raises `vmgahp.checkpoint.manifest.Invalid`."""
    from vmgahp.checkpoint.manifest import Fields

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
