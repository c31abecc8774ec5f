"""The only module that calls ``qemu-img``: to examine images, to make overlays, to convert.

It always runs as a user who may read everything that an image names (the job's user, or the user of the command),
within limits of memory and time, and with an explicit format: it never detects one, for a guest can write the header of
any other format into a raw image. A failure raises `Trouble`; the caller decides on its meaning and whose fault it is.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

from vmgahp import errors
from vmgahp.host.job_user import Identity
from vmgahp.host.run import plain_environment, run

Progress = Callable[[float], None]

LOOK = 30.0
"""The timeout for examining an image, in seconds; a good one takes a hundredth of a second."""
OVERLAY = 120.0
"""The timeout for making an overlay of a few KiB and examining its base, in seconds."""
CHECK = 1800.0
"""The timeout for checking an image, which reads all its tables, in seconds."""

LOOK_CPU, LOOK_MEMORY = 10, 512 << 20
"""The limits for examining an image, in seconds and bytes, since a crafted header can cost much of both. QEMU takes the
same memory for an image's tables, besides the guest's; those of an honest image of 2 TB are a few MiB."""
CONVERT_MEMORY = 4 << 30

ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
"""An environment for one malloc arena: otherwise each thread reserves 64 MiB, which may exceed the limit."""

_CORRUPT, _LEAKS, _NOT_CHECKABLE = 2, 3, 63
"""The exit statuses of ``qemu-img check``."""

_NAMES = ("backing-filename", "full-backing-filename", "backing-filename-format")
"""The members of a description of an image that are used as text."""

MOST_OUTPUT = 16 << 20
"""The most bytes of its output that are kept; the description of a long backing chain is a few KiB."""


class Trouble(Exception):
    """A failure of ``qemu-img``; the text is the reason, as half a sentence."""


class CannotRun(Trouble):
    """A failure to run it on this machine, whatever the image is."""

    def fault(self) -> errors.MachineFault:
        """Make the fault of a START: the machine stays in service, since processes of the job's user may cause it."""
        return errors.HypervisorFault(f"{self}.", "see that qemu-img works.")


class NotInstalled(CannotRun):
    """A missing program; `program` is its name."""

    def __init__(self, program: str) -> None:
        super().__init__(f"{program} is not installed (qemu-utils, util-linux)")
        self.program = program

    def fault(self) -> errors.MachineFault:
        return errors.MachineFault(f"{self}.", "install qemu-utils and util-linux.")


class TooSlow(Trouble):
    """A timeout: it was killed after `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"qemu-img had not ended after {seconds:g} s")
        self.seconds = seconds


class Refused(Trouble):
    """An exit with an error; the text is its message, on one line and in English."""

    def __init__(self, said: str, status: int = 1) -> None:
        super().__init__(said)
        self.status = status

    @property
    def no_access(self) -> bool:
        """Return True if a file is missing, or the user may not open it."""
        return "Permission denied" in str(self) or "No such file" in str(self)

    @property
    def no_space(self) -> bool:
        """Return True if the file system is full."""
        return "No space left on device" in str(self)


def as_of_the_system(trouble: Trouble) -> OSError:
    """Return an OSError for a failure of qemu-img, by the system's error text at the end of its message."""
    said = str(trouble)
    known = (number for number in errno.errorcode if said.endswith(os.strerror(number)))
    return OSError(errno.ETIMEDOUT if isinstance(trouble, TooSlow) else next(known, errno.EINVAL), said)


def info(path: str, image_format: str, identity: Identity | None = None, *, seconds: float = LOOK) -> dict[str, Any]:
    """Return the description of an image from its header; its backing files are not opened.

    `image_format` is the stated format in QEMU's words; without an `identity` the caller runs it. Raises `Trouble`.
    """
    # -U: a template may be open for writing by another VM.
    found = _document(["info", "-U", "--output=json", "-f", image_format, _place(path)], identity, seconds)
    if not all(isinstance(found.get(name, ""), str) for name in _NAMES):
        raise Trouble("the answer of qemu-img does not describe an image")
    _number(found, "virtual-size")
    return found


def check(path: str, image_format: str, *, leaks: bool = True) -> str:
    """Check an image; return the damage in half a sentence, or "" for none, and for formats that cannot be checked.

    Without `leaks`, room that is used by nothing is no damage. Raises `Trouble`.
    """
    command = ["check", "-U", "--output=json", "-f", image_format, _place(path)]
    try:
        _run(command, None, seconds=CHECK, memory=CONVERT_MEMORY)
    except Refused as refused:
        if refused.status == _NOT_CHECKABLE or (refused.status == _LEAKS and not leaks):
            return ""
        if refused.status in (_CORRUPT, _LEAKS):
            return "is damaged" if refused.status == _CORRUPT else "has room in it that is used by nothing"
        raise
    return ""


def measure(path: str, image_format: str, identity: Identity | None = None, *, seconds: float = LOOK) -> int:
    """Return the bytes that the image would take converted to ``qcow2``, without holes. Raises `Trouble`."""
    options = ["measure", "-U", "--output=json", "-f", image_format, "-O", "qcow2"]
    return _number(_document([*options, _place(path)], identity, seconds), "required")


def create_overlay(base: str, base_format: str, to: str, identity: Identity | None = None) -> None:
    """Write an empty qcow2 image `to` that reads from `base`, by the full paths of both.

    It overwrites `to`: use a temporary name and rename the file, so as to use no partial image. Raises `Trouble`.
    """
    command = ["create", "-q", "-f", "qcow2", "-F", base_format, "-b", _place(base), _place(to)]
    _run(command, identity, seconds=OVERLAY, cpu=int(OVERLAY / 2))


def create_empty(to: str, to_format: str, size: int, identity: Identity | None = None) -> None:
    """Write an empty image `to` of `size` bytes, which takes hardly any room; see `create_overlay` for the rest."""
    _run(["create", "-q", "-f", to_format, _place(to), str(size)], identity, seconds=OVERLAY, cpu=LOOK_CPU)


def enlarge(path: str, image_format: str, size: int, identity: Identity | None = None) -> None:
    """Enlarge an image to `size` bytes; the new part is empty. Raises `Trouble`."""
    _run(["resize", "-q", "-f", image_format, _place(path), str(size)], identity, seconds=OVERLAY, cpu=LOOK_CPU)


def convert(
    source: str,
    source_format: str,
    to: str,
    to_format: str,
    identity: Identity | None = None,
    *,
    seconds: float,
    options: Sequence[str] = (),
    largest: int = 0,
    progress: Progress | None = None,
) -> None:
    """Write the content of the image `source`, and of its backing files, as the new image `to`.

    `options` are those of the new format (``-o``); the conversion is aborted at `largest` bytes, if that is not 0.
    The callback `progress` gets the percentage. A failure may leave a partial `to`. Raises `Trouble`.
    """
    command = ["convert", "-p", "-f", source_format, "-O", to_format]
    for option in options:
        command += ["-o", option]
    command += [_place(source), _place(to)]
    _run(command, identity, seconds=seconds, memory=CONVERT_MEMORY, largest=largest, progress=progress)


def _place(path: str) -> str:
    """Make a path absolute: ``nbd:…`` and ``json:…`` would not be taken for paths, and ``-x`` for an option."""
    return os.path.abspath(path)


def _document(command: Sequence[str], identity: Identity | None, seconds: float) -> dict[str, Any]:
    """Return the JSON object that qemu-img prints; processes of the `identity` can forge it. Raises `Trouble`."""
    try:
        found = json.loads(_run(command, identity, seconds=seconds, cpu=LOOK_CPU))
    except (ValueError, RecursionError) as error:
        raise Trouble(f"the answer of qemu-img is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise Trouble("the answer of qemu-img is not a JSON object")
    return found


def _number(found: dict[str, Any], name: str) -> int:
    """Return a size in bytes of a document. Raises `Trouble`."""
    number = found.get(name)
    if type(number) is not int or not 0 <= number < 1 << 63:
        raise Trouble(f"qemu-img gave {str(number)[:50]!a} as {name}")
    return number


def _run(
    arguments: Sequence[str],
    identity: Identity | None,
    *,
    seconds: float,
    cpu: int = 0,
    memory: int = LOOK_MEMORY,
    largest: int = 0,
    progress: Progress | None = None,
) -> bytes:
    """Run qemu-img and return its output. Raises `Trouble`."""
    limits = [f"--as={memory}"]
    if cpu:
        limits.append(f"--cpu={cpu}")
    if largest:
        limits.append(f"--fsize={largest}")
    try:
        done = run(
            ["qemu-img", *arguments],
            deadline=seconds,
            environ=plain_environment() | ONE_ARENA,
            user=identity,
            limits=limits,
            umask=0o077 if identity else -1,
            longest=MOST_OUTPUT,
            until=functools.partial(_tell, progress) if progress else None,
        )
    except FileNotFoundError as error:
        raise NotInstalled(str(error.filename)) from error
    except OSError as error:
        raise CannotRun(f"qemu-img cannot be run ({error.strerror})") from error
    if done.status is None:
        raise TooSlow(seconds)
    said = " ".join(done.err.decode("utf-8", "replace").split()).removeprefix("qemu-img: ")
    if largest and (done.status == -signal.SIGXFSZ or (done.status != 0 and said.endswith("File too large"))):
        raise Trouble("what comes out is larger than it may be")
    if done.status != 0:
        raise Refused(said[-1000:] or f"it ended with {done.status}", done.status)
    return done.out


def _tell(progress: Progress, out: bytearray, _err: bytearray) -> bool:
    """Report the last complete percentage: qemu-img repeats ``    (12.34/100%)`` and a carriage return."""
    before, slash, rest = out.rpartition(b"/100%)")
    if slash:
        out[:] = rest
        try:
            per_cent = float(before.rpartition(b"(")[2])
        except ValueError:
            return False
        if 0 <= per_cent <= 100:  # it can be forged: inf
            progress(per_cent)
    return False
