"""The files of a checkpoint as they were when it was made, to be compared later.

For checkpoints that the hypervisor itself makes of several files; those of libvirt are `vmgahp.checkpoint.store`'s.
"""

import os
import re
from typing import NamedTuple, TypeVar

from vmgahp import errors
from vmgahp.checkpoint import store as checkpoint
from vmgahp.checkpoint.store import Unusable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from vmgahp.checkpoint.manifest import Fields
    from vmgahp.host.job_user import Identity

Manifest = TypeVar("Manifest")

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
    from vmgahp.checkpoint.manifest import LARGEST  # loaded where there is one

    with open(descriptor, "rb") as file:
        return file.read(LARGEST + 1)


def find(
    identity: "Identity", directory: str, name: str, parse: "Callable[[bytes], Manifest]"
) -> "Manifest | None":
    """The manifest `name` as `parse` reads it; None where there is none. Raises `Unusable`."""
    try:
        data = load(identity, directory, name)
    except OSError as error:
        raise Unusable(f"{name} cannot be opened: {error.strerror}.", False) from error
    if data is None:
        return None
    from vmgahp.checkpoint.manifest import Invalid

    try:
        return parse(data)
    except Invalid as error:
        raise Unusable(f"{name} cannot be read: {error}", False) from error


def write(
    identity: "Identity",
    directory: str,
    name: str,
    number: int,
    manifest: "NamedTuple",
    parse: "Callable[[bytes], object]",
) -> None:
    """Write a manifest of the format `number`, all or nothing. Raises OSError, `Invalid` where `parse` does."""
    import json

    content = {
        field: [state._asdict() for state in value] if isinstance(value, tuple) else value
        for field, value in manifest._asdict().items()
    }
    data = json.dumps({"format": number, **content}, indent=1).encode() + b"\n"
    parse(data)
    identity.write_scratch(directory, name, data)


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
