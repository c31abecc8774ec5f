"""The one place that calls ``qemu-img``: to look into images, to make overlays, to convert.

It always runs as somebody who may be given everything that an image names (the job's user, or whoever typed the
command), within limits of memory and time, and is told the format: it never finds one out by itself, for what a
guest wrote into a raw image can look like the header of any other. What its failure means, and whose fault it is,
is the caller's to say: here it is `Trouble`.
"""

import functools
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

from vmgahp.host.job_user import Identity
from vmgahp.host.run import plain_environment, run

Progress = Callable[[float], None]

LOOK = 30.0
"""Seconds for a look at an image; a healthy one takes a hundredth of one."""
OVERLAY = 120.0
"""Seconds for making an overlay, which is a few KiB, and a look at the base."""

LOOK_CPU, LOOK_MEMORY = 10, 512 << 20
"""Limits of a look, which a crafted header can make work hard: seconds, bytes. QEMU takes as much memory for the tables
of an image, beyond that of its guest; those of an image of 2 TB that somebody means to use are a few MiB."""
CONVERT_MEMORY = 4 << 30

ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
"""Otherwise each of its threads reserves 64 MiB of addresses or more, and now and then the limit refuses it one."""

_CORRUPT, _LEAKS, _NOT_CHECKABLE = 2, 3, 63
"""Exit statuses of ``qemu-img check``."""

MOST_OUTPUT = 16 << 20
"""Bytes that are kept of what it prints; the description of a long backing chain is a few KiB."""


class Trouble(Exception):
    """``qemu-img`` did not do it; the text says why, in half a sentence."""


class CannotRun(Trouble):
    """This machine does not run it, whatever the image is."""


class NotInstalled(CannotRun):
    """There is no such program; `program` is its name."""

    def __init__(self, program: str) -> None:
        super().__init__(f"{program} is not installed (qemu-utils, util-linux)")
        self.program = program


class TooSlow(Trouble):
    """It had not ended after `seconds` and was killed."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"qemu-img had not ended after {seconds:g} s")
        self.seconds = seconds


class TooLarge(Trouble):
    """The new image would have had more bytes than it may."""

    def __init__(self) -> None:
        super().__init__("what comes out is larger than it may be")


class Refused(Trouble):
    """It ended with an error; the text is what it said, on one line and in English."""

    def __init__(self, said: str, status: int = 1) -> None:
        super().__init__(said)
        self.status = status
        """The exit status."""

    @property
    def no_access(self) -> bool:
        """Whether a file is not there, or is not the user's to open."""
        return "Permission denied" in str(self) or "No such file" in str(self)

    @property
    def no_space(self) -> bool:
        """Whether the file system is full."""
        return "No space left on device" in str(self)


def info(path: str, image_format: str, identity: Identity | None = None, *, seconds: float = LOOK) -> dict[str, Any]:
    """What the image's header says of it; its backing files are not opened.

    `image_format` is QEMU's name of what somebody says that it is. Without an `identity` it runs as the caller.
    Raises `Trouble`.
    """
    # -U: a template that another VM has open for writing is still to be looked at.
    found = _document(["info", "-U", "--output=json", "-f", image_format, _place(path)], identity, seconds)
    return dict(found)


def check(path: str, image_format: str, *, seconds: float) -> str:
    """What is wrong within the image, in half a sentence; empty for nothing, and for formats that nobody can check.

    Raises `Trouble`.
    """
    command = ["check", "-U", "--output=json", "-f", image_format, _place(path)]
    try:
        _run(command, None, seconds=seconds, memory=CONVERT_MEMORY)
    except Refused as refused:
        if refused.status == _NOT_CHECKABLE:
            return ""
        if refused.status in (_CORRUPT, _LEAKS):
            return "is damaged" if refused.status == _CORRUPT else "has room in it that is used by nothing"
        raise
    return ""


def measure(
    path: str, image_format: str, target_format: str, identity: Identity | None = None, *, seconds: float = LOOK
) -> int:
    """The bytes that the image would take converted to ``raw`` or ``qcow2``, without its holes. Raises `Trouble`."""
    options = ["measure", "-U", "--output=json", "-f", image_format, "-O", target_format]
    found = _document([*options, _place(path)], identity, seconds)
    return int(found["required"])


def create_overlay(
    base: str, base_format: str, to: str, identity: "Identity | None" = None, *, seconds: float = OVERLAY
) -> None:
    """Write an empty qcow2 image `to` that reads from `base`, by the full paths of both.

    What `to` was before is written over: give it a name of your own and rename it, so that half of an image is
    never taken for one. Raises `Trouble`.
    """
    command = ["create", "-q", "-f", "qcow2", "-F", base_format, "-b", _place(base), _place(to)]
    _run(command, identity, seconds=seconds, cpu=int(OVERLAY / 2))


def create_empty(to: str, to_format: str, size: int, identity: Identity | None = None) -> None:
    """Write an image `to` of `size` bytes without content, which takes hardly any room; as `create_overlay`."""
    _run(["create", "-q", "-f", to_format, _place(to), str(size)], identity, seconds=OVERLAY, cpu=LOOK_CPU)


def enlarge(path: str, image_format: str, size: int, identity: Identity | None = None) -> None:
    """Give an image `size` bytes, which are more than it has; what is new is empty. Raises `Trouble`."""
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

    `options` are those of the new format (``-o``); a file of more than `largest` bytes, if that is not 0, is given
    up. `progress` is told how far it is, in per cent. On a failure `to` may be there, half of it. Raises `Trouble`.
    """
    command = ["convert", "-p", "-f", source_format, "-O", to_format]
    for option in options:
        command += ["-o", option]
    command += [_place(source), _place(to)]
    _run(command, identity, seconds=seconds, memory=CONVERT_MEMORY, largest=largest, progress=progress)


def _place(path: str) -> str:
    """A path that is nothing but a path: ``nbd:…`` and ``json:…`` would be other things, ``-x`` an option."""
    return os.path.abspath(path)


def _document(command: Sequence[str], identity: Identity | None, seconds: float) -> Any:
    import json

    try:
        return json.loads(_run(command, identity, seconds=seconds, cpu=LOOK_CPU))
    except ValueError as error:
        raise Trouble(f"qemu-img said what is not JSON: {error}") from error


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
    """Run it and return what it printed. Raises `Trouble`."""
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
        raise TooLarge
    if done.status != 0:
        raise Refused(said[-1000:] or f"it ended with {done.status}", done.status)
    return done.out


def _tell(progress: Progress, out: bytearray, _err: bytearray) -> bool:
    """``    (12.34/100%)`` and a carriage return, again and again; the last whole one counts."""
    before, slash, rest = out.rpartition(b"/100%)")
    if slash:
        out[:] = rest
        try:
            progress(float(before.rpartition(b"(")[2]))
        except ValueError:
            pass
    return False
