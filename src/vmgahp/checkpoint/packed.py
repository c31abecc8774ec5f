"""Memory images that libvirt has compressed, unpacked as a stream.

The content is the job's. So the programs, the same that libvirt uses for these formats, run as the job's user and
within limits; libvirtd, which would run them as root, gets an unpacked memory image.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from vmgahp.host.job_user import Identity
from vmgahp.host.run import plain_environment, run

Write = Callable[[bytes], object]

ZSTD = "zstd"
"""The compressed format that is restored on every machine that has its program, whatever its settings are."""

SPARSE_SINCE = 11_002_000, 9_000_000
"""The first versions of libvirt and QEMU that have the format ``sparse``, in which QEMU itself seeks."""

_APPARMOR = "<model>apparmor</model>"
"""The text in the capabilities of a libvirt that confines each QEMU with AppArmor: such a QEMU cannot open a file of
the job's in the way in which it would get a sparse image (`substitute.Held`)."""

_MEMORY = 1 << 30


class NotPacked(Exception):
    """A program that failed to unpack; the text says why."""


def has_sparse(libvirt_version: int, qemu_version: int, capabilities: str) -> bool:
    """Tell whether images of the format ``sparse`` can be restored, by the versions and capabilities from libvirt."""
    is_known = libvirt_version >= SPARSE_SINCE[0] and qemu_version >= SPARSE_SINCE[1]
    return is_known and _APPARMOR not in capabilities


def has(form: str) -> bool:
    """Return True if this machine has the program of a compressed format."""
    places = plain_environment()["PATH"].split(":")
    return any(place.startswith("/") and os.access(f"{place}/{form}", os.X_OK) for place in places)


def unpack(
    image: int, start: int, form: str, write: Write, identity: Identity, seconds: float, most: int, reader: int = -1
) -> None:
    """Unpack the file of `image` from `start` on, to `most` bytes at most. Raises `NotPacked`, and what `write` does.

    It ends when the pipe to which `reader` writes has no readers any more.
    """
    left = most

    def take(out: bytearray, _err: bytearray) -> bool:
        nonlocal left
        left -= len(out)
        if left < 0:
            raise NotPacked(f"it becomes more than {most} bytes")
        if out:
            write(bytes(out))
            out.clear()
        return False

    source = os.open(f"/proc/self/fd/{image}", os.O_RDONLY)  # a file descriptor with an offset of its own
    try:
        os.lseek(source, start, os.SEEK_SET)
        limits = (f"--as={_MEMORY}", "--fsize=0", "--core=0")
        words = [form, "-dc"]
        done = run(words, deadline=seconds, stdin=source, user=identity, limits=limits, until=take, reader=reader)
    except FileNotFoundError as error:
        raise NotPacked(f"{error.filename} is not installed") from error
    finally:
        os.close(source)
    if done.status != 0:
        why = "it had not ended" if done.status is None else " ".join(done.complaints)[-300:]
        raise NotPacked(f"{form}: {why or f'it ended with {done.status}'}")
