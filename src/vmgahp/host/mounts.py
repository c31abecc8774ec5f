"""The mounted file systems, from the kernel's list, without access to any of them: one may hang."""

import os
from collections.abc import Iterator
from typing import NamedTuple

_ESCAPED = ((b"\\040", b" "), (b"\\011", b"\t"), (b"\\012", b"\n"), (b"\\134", b"\\"))


class Mount(NamedTuple):
    """A line of ``/proc/self/mountinfo`` (proc(5)); the last of several at one place hides the others."""

    id: str
    place: str
    kind: str
    """The type of the file system, as mount(8) names it."""
    options: tuple[str, ...]
    """The options of the mount and of the file system."""


def mounts() -> Iterator[Mount]:
    """Yield all mounts that this process sees, in the kernel's order."""
    with open("/proc/self/mountinfo", "rb") as lines:
        for line in lines:
            before, _, after = line.rstrip(b"\n").partition(b" - ")
            fields, (kind, _, more) = before.split(b" "), after.split(b" ", 2)
            place = fields[4]
            for escaped, plain in _ESCAPED:
                place = place.replace(escaped, plain)
            options = os.fsdecode(fields[5] + b"," + more).split(",")
            yield Mount(fields[0].decode(), os.fsdecode(place), os.fsdecode(kind), tuple(options))
