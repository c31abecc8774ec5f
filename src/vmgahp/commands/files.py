"""Files that the command line tools read and write: untrusted files of jobs, and the log.

Text that a job may have written is sanitized again: control characters are shown as escapes, and secrets are hidden.
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
    """A path that is a directory, a FIFO or a device."""


def open_regular(path: str, *, follow: bool = True, directory: int | None = None) -> BinaryIO:
    """Open a regular file for reading, without blocking on a FIFO or a device. Raises OSError."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    file = open(os.open(path, flags, dir_fd=directory), "rb")  # noqa: SIM115 - the caller closes it
    if S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise NotRegular(0, "it is not a regular file")


def write_anew(path: str, data: bytes) -> None:
    """Create a file or replace a regular one, but never write through a link, which an attacker may have made.

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
    """A line of the daemon's log, sanitized for display."""

    time: float
    pid: str
    text: str


def log_lines(path: str, longest: int, *, follow: bool = True) -> Iterator[LogLine]:
    """Yield the lines in the last `longest` bytes of a log. Raises OSError."""
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
