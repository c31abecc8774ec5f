"""The kernel's log, read for processes that it has killed for lack of memory.

The control group of a VM is removed with it, and so are its counters; the log keeps the event and the process.
"""

import os
import time
from typing import NamedTuple

LOG = "/dev/kmsg"
LASTS = 600.0
"""The most seconds between a line in the log and now; an older one may be about another process with the same id."""
LONGEST = 8192
"""The most bytes of a record (``CONSOLE_EXT_LOG_MAX``)."""
MOST = 1 << 16
"""The most records to read: more than the log has."""


class Killed(NamedTuple):
    """A kill by the kernel for lack of memory."""

    group: str
    """The control group that was full; empty if the whole machine was."""
    limit_kib: int
    """The group's limit in KiB; 0 if the log does not have it."""


def killed(pid: int, log: str = LOG) -> Killed | None:
    """Return how the process was killed just now; None if it was not, or the log cannot be read."""
    limit, found = 0, None
    for when, text in records(log):
        if text.startswith(b"memory: usage "):
            limit = _number(text.partition(b"limit ")[2])
        elif text.startswith(b"oom-kill:"):
            said = dict(word.partition(b"=")[::2] for word in text.removeprefix(b"oom-kill:").split(b","))
            if _number(said.get(b"pid", b"")) == pid and 0 <= time.clock_gettime(time.CLOCK_MONOTONIC) - when < LASTS:
                group = said.get(b"oom_memcg", b"").decode(errors="replace")
                found = Killed(group, limit if group else 0)
            limit = 0
    return found


def records(log: str) -> list[tuple[float, bytes]]:
    """Return the lines that the kernel still has: the seconds since the boot, and the text."""
    found = []
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        for _ in range(MOST):
            try:
                record = os.read(descriptor, LONGEST)
            except BrokenPipeError:  # the record was overwritten meanwhile
                continue
            if not record:
                break
            head, _, text = record.partition(b";")
            fields = head.split(b",")
            found.append((_number(fields[2]) / 1e6 if len(fields) > 2 else 0.0, text.partition(b"\n")[0]))
    except OSError:
        pass  # the end of the log
    finally:
        os.close(descriptor)
    return found


def _number(text: bytes) -> int:
    """Parse the number at the beginning of a text; return 0 if there is none."""
    digits = text[: len(text) - len(text.lstrip(b"0123456789"))][:18]
    return int(digits) if digits else 0
