"""Files that the command line tools read and write: jobs' own, which may be anything, and the log.

What a job wrote is in words that may be its own: control characters are shown as escapes, and secrets are hidden
once more.
"""

import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from stat import S_ISREG
from typing import BinaryIO, NamedTuple

from vmgahp.text import escape, redact

_LINE = re.compile(r"(\d\d/\d\d/\d\d \d\d:\d\d:\d\d) \(pid:(\d{1,10})\) (.*)", re.ASCII)


class NotRegular(OSError):
    """A directory, a FIFO, a device."""


def open_regular(path: str, *, follow: bool = True, directory: int | None = None) -> BinaryIO:
    """A regular file, open for reading; nothing waits for a FIFO or a device. Raises OSError."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    file = open(os.open(path, flags, dir_fd=directory), "rb")  # noqa: SIM115 - the caller closes it
    if S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise NotRegular(0, "it is not a regular file")


def write_anew(path: str, data: bytes) -> None:
    """Write a file that takes the place of a regular file or of none: never through a link, which may be a stranger's.

    Raises OSError.
    """
    with suppress(FileNotFoundError):
        if not S_ISREG(os.lstat(path).st_mode):
            raise NotRegular(0, "it is there, and is not a regular file")
    mask = os.umask(0o077)
    os.umask(mask)
    descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(path) or ".", prefix=".vmgahp-")
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o666 & ~mask)
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


class LogLine(NamedTuple):
    """A line of the daemon's log, as it may be shown."""

    time: float
    pid: str
    text: str


def log_lines(path: str, longest: int, *, follow: bool = True) -> Iterator[LogLine]:
    """The lines in the last `longest` bytes of a log. Raises OSError."""
    with open_regular(path, follow=follow) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - longest))
        text = file.read(longest).decode("utf-8", "replace")
    for line in text.split("\n"):
        found = _LINE.fullmatch(line.rstrip("\r"))
        if found is None:
            continue
        try:
            when = time.mktime(time.strptime(found[1], "%m/%d/%y %H:%M:%S"))
        except (ValueError, OverflowError):
            continue
        yield LogLine(when, found[2], escape(redact(found[3])))
