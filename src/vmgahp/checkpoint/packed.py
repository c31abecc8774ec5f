"""Compressed memory images: packed in one pass that can hash them, and unpacked as a stream.

The content is the job's. So the programs, the same that libvirt uses for these formats, run as the job's user and
within limits; libvirtd, which would run them as root, gets an unpacked memory image.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from vmgahp import errors
from vmgahp.host import packages
from vmgahp.host.job_user import Identity
from vmgahp.host.run import plain_environment, run

Write = Callable[[bytes], object]

BEST = "zstd"
"""The format whose compression takes less time than is saved by writing fewer bytes. For 256 MiB of incompressible data
it takes 0.1 s, and gzip 5 s; programs and text are reduced to 31 per cent, by gzip to 33, by lz4 to 43."""

SPARSE_SINCE = 11_002_000, 9_000_000
"""The first versions of libvirt and QEMU that have the format ``sparse``, in which QEMU itself seeks."""

_APPARMOR = "<model>apparmor</model>"
"""The text in the capabilities of a libvirt that confines each QEMU with AppArmor: such a QEMU cannot open a file of
the job's in the way in which it would get a sparse image (`substitute.Held`)."""

_OPTIONS = {"zstd": ("-q", "-1", "-T2")}
"""The options beside -c for compressing."""

_MEMORY = 1 << 30

_SAMPLE, _IN_IT = bytes.fromhex("28b52ffd04482100005145564de1b76e7f"), b"QEVM"
"""A packed sample, and its content, which the program must unpack before its format is published."""
_TRIAL = 1.0


class NotPacked(Exception):
    """A program that failed to pack or unpack; the text says why."""


def best() -> str:
    """Return the format that this machine compresses in by default; empty if its program is missing."""
    return BEST if has(BEST) else ""


def require(identity: Identity) -> None:
    """Make sure, by one trial, that the program of `BEST` works. Raises `errors.MachineFault`."""
    sample = os.memfd_create("sample", os.MFD_CLOEXEC)
    try:
        os.write(sample, _SAMPLE)
        seen = bytearray()
        unpack(sample, 0, BEST, seen.extend, identity, _TRIAL, len(_IN_IT))
        if seen != _IN_IT:
            raise NotPacked(f"it has unpacked {bytes(seen)!r}")
    except (NotPacked, OSError) as error:
        raise errors.MachineFault(
            f"Checkpoints are not compressed, and those of other machines cannot be restored: {error}.",
            f"{packages.of_system(BEST)}.",
        ) from error
    finally:
        os.close(sample)


def has_sparse(libvirt_version: int, qemu_version: int, capabilities: str) -> bool:
    """Tell whether images of the format ``sparse`` can be restored, by the versions and capabilities from libvirt."""
    is_known = libvirt_version >= SPARSE_SINCE[0] and qemu_version >= SPARSE_SINCE[1]
    return is_known and _APPARMOR not in capabilities


def has(form: str) -> bool:
    """Return True if this machine has the program of a compressed format."""
    places = plain_environment()["PATH"].split(":")
    return any(place.startswith("/") and os.access(f"{place}/{form}", os.X_OK) for place in places)


def pack(image: int, start: int, form: str, write: Write, identity: Identity, seconds: float) -> None:
    """Compress the file of `image` from `start` on. Raises `NotPacked`, and what `write` does."""
    _filter([form, "-c", *_OPTIONS.get(form, ())], image, start, write, identity, seconds)


def unpack(
    image: int, start: int, form: str, write: Write, identity: Identity, seconds: float, most: int, reader: int = -1
) -> None:
    """Unpack the file of `image` from `start` on, to `most` bytes at most. Raises `NotPacked`, and what `write` does.

    It ends when the pipe to which `reader` writes has no readers any more.
    """
    left = most

    def bounded(data: bytes) -> None:
        nonlocal left
        left -= len(data)
        if left < 0:
            raise NotPacked(f"it becomes more than {most} bytes")
        write(data)

    _filter([form, "-dc"], image, start, bounded, identity, seconds, reader)


def _filter(
    words: list[str], image: int, start: int, write: Write, identity: Identity, seconds: float, reader: int = -1
) -> None:
    def take(out: bytearray, _err: bytearray) -> bool:
        if out:
            write(bytes(out))
            out.clear()
        return False

    source = os.open(f"/proc/self/fd/{image}", os.O_RDONLY)  # a file descriptor with an offset of its own
    try:
        os.lseek(source, start, os.SEEK_SET)
        limits = (f"--as={_MEMORY}", "--fsize=0", "--core=0")
        done = run(words, deadline=seconds, stdin=source, user=identity, limits=limits, until=take, reader=reader)
    except FileNotFoundError as error:
        raise NotPacked(f"{error.filename} is not installed") from error
    finally:
        os.close(source)
    if done.status != 0:
        why = "it had not ended" if done.status is None else " ".join(done.complaints)[-300:]
        raise NotPacked(f"{words[0]}: {why or f'it ended with {done.status}'}")
