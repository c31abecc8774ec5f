"""The lines of the daemon's log that are about one VM, beside what its metrics tell.

All servers of a machine write to one log, each with its own process id, which a start's line of the metrics
names. What it says is in the words of jobs too, so it is made printable, and secrets are hidden once more.
"""

import os
import re
import time
from stat import S_ISREG

from vmgahp.commands.report.reader import Unreadable
from vmgahp.text import escape, redact

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vmgahp.commands.report.reader import Story

LONGEST_TAIL = 16 << 20
"""Bytes that are read of a log, from its end."""
MOST_LINES = 1000
MARGIN = 30.0
"""Seconds before the first and after the last line of the metrics that still belong to the VM."""

_LINE = re.compile(r"(\d\d/\d\d/\d\d \d\d:\d\d:\d\d) \(pid:(\d{1,10})\) (.*)", re.ASCII)


def about(path: str, story: "Story") -> list[tuple[float, str]]:
    """When, and what, of one log, in its own order. Raises `Unreadable`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not S_ISREG(status.st_mode):
                raise Unreadable(f"{path} is not a regular file.")
            file.seek(max(0, status.st_size - LONGEST_TAIL))
            text = file.read(LONGEST_TAIL).decode("utf-8", "replace")
    except OSError as error:
        raise Unreadable(
            f"{path} cannot be read: {error.strerror}. Its readers are the administrators."
        ) from error
    pids = {str(event.pid) for event in story.events if event.pid}
    begin, end = story.begin - MARGIN, story.end + MARGIN
    found: list[tuple[float, str]] = []
    for line in text.split("\n"):
        match = _LINE.fullmatch(line.rstrip("\r"))
        if match is None or not (match[2] in pids or (story.name and story.name in match[3])):
            continue
        try:
            when = time.mktime(time.strptime(match[1], "%m/%d/%y %H:%M:%S"))
        except (ValueError, OverflowError):
            continue
        if begin <= when <= end and len(found) < MOST_LINES:
            found.append((when, escape(redact(match[3]))))
    return found
