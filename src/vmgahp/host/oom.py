"""Whether the kernel has killed a process for want of memory, by the kernel's own log.

The control group of a VM is gone with it, and with the group its counts; the log says what happened and to whom.
"""

import os
import time

from vmgahp.host.light import NamedTuple

LOG = "/dev/kmsg"
LASTS = 600.0
"""Seconds for which a line in the log is about a process that has just ended, and not an earlier one of its number."""
LONGEST = 8192
"""Bytes of a record (``CONSOLE_EXT_LOG_MAX``)."""
MOST = 1 << 16
"""Records: more than the log has."""


class Killed(NamedTuple):
    """A process that the kernel has killed for want of memory."""

    group: str
    """The control group that was full; empty where the whole machine was."""
    limit_kib: int
    """Of that group; 0 where the log does not say."""


def killed(pid: int, log: str = LOG) -> Killed | None:
    """How a process of this number was killed just now; None where it was not, or the log cannot be read."""
    limit, found = 0, None
    for when, text in _records(log):
        if text.startswith(b"memory: usage "):
            limit = _number(text.partition(b"limit ")[2])
        elif text.startswith(b"oom-kill:"):
            said = dict(word.partition(b"=")[::2] for word in text.removeprefix(b"oom-kill:").split(b","))
            if _number(said.get(b"pid", b"")) == pid and 0 <= time.clock_gettime(time.CLOCK_MONOTONIC) - when < LASTS:
                group = said.get(b"oom_memcg", b"").decode(errors="replace")
                found = Killed(group, limit if group else 0)
            limit = 0
    return found


def _records(log: str) -> list[tuple[float, bytes]]:
    """The seconds since the boot and the text of each line that the kernel still has."""
    found = []
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        for _ in range(MOST):
            try:
                record = os.read(descriptor, LONGEST)
            except BrokenPipeError:  # it was overwritten meanwhile
                continue
            if not record:
                break
            head, _, text = record.partition(b";")
            fields = head.split(b",")
            found.append((_number(fields[2]) / 1e6 if len(fields) > 2 else 0.0, text.partition(b"\n")[0]))
    except OSError:
        pass  # that was all
    finally:
        os.close(descriptor)
    return found


def _number(text: bytes) -> int:
    """What a text begins with; 0 for no number."""
    digits = text[: len(text) - len(text.lstrip(b"0123456789"))][:18]
    return int(digits) if digits else 0
