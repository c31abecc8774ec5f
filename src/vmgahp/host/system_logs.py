"""The kernel's log and the audit log: kills for lack of memory, and denials of security modules.

The control group of a VM is removed with it, and so are its counters; the log keeps the event and the process.
"""

import os
import re
import time
from contextlib import suppress
from typing import NamedTuple

from vmgahp import errors
from vmgahp.host import wait
from vmgahp.host.system_calls import Opened

KERNEL_LOG = "/dev/kmsg"
KILL_LASTS = 600.0
"""The most seconds between a line in the log and now; an older one may be about another process with the same id."""
LONGEST_RECORD = 8192
"""The most bytes of a record (``CONSOLE_EXT_LOG_MAX``)."""
MOST_RECORDS = 1 << 16
"""The most records to read: more than the log has."""


class Killed(NamedTuple):
    """A kill by the kernel for lack of memory."""

    group: str
    """The control group that was full; empty if the whole machine was."""
    limit_kib: int
    """The group's limit in KiB; 0 if the log does not have it."""


def killed(pid: int, log: str = KERNEL_LOG) -> Killed | None:
    """Return how the process was killed just now; None if it was not, or the log cannot be read."""
    limit, found = 0, None
    for when, text in records(log):
        if text.startswith(b"memory: usage "):
            limit = _number(text.partition(b"limit ")[2])
        elif text.startswith(b"oom-kill:"):
            said = dict(word.partition(b"=")[::2] for word in text.removeprefix(b"oom-kill:").split(b","))
            since = time.clock_gettime(time.CLOCK_MONOTONIC) - when
            if _number(said.get(b"pid", b"")) == pid and 0 <= since < KILL_LASTS:
                group = said.get(b"oom_memcg", b"").decode(errors="replace")
                found = Killed(group, limit if group else 0)
            limit = 0
    return found


def records(log: str) -> list[tuple[float, bytes]]:
    """Return the lines that the kernel still has: the seconds since the boot, and the text."""
    found = []
    # At the end of the log a read fails.
    with suppress(OSError), Opened(os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as descriptor:
        for _ in range(MOST_RECORDS):
            try:
                record = os.read(descriptor, LONGEST_RECORD)
            except BrokenPipeError:  # the record was overwritten meanwhile
                continue
            if not record:
                break
            head, _, text = record.partition(b";")
            fields = head.split(b",")
            found.append((_number(fields[2]) / 1e6 if len(fields) > 2 else 0.0, text.partition(b"\n")[0]))
    return found


def _number(text: bytes) -> int:
    digits = text[: len(text) - len(text.lstrip(b"0123456789"))][:18]
    return int(digits) if digits else 0


AUDIT_LOG = "/var/log/audit/audit.log"
"""The log that auditd writes; without auditd the kernel's own log has the same lines."""
TAIL = 1 << 18
LONGEST_DENIAL = 400
_SETTLES = 0.3
"""Seconds that auditd may take to write a line."""

_DENIAL = re.compile(r"avc:\s+denied\b(?!.*permissive=1)|apparmor=\"DENIED\"")
_CONFINED = re.compile(
    r"scontext=[^:\s]*:[^:\s]*:(svirt|virt|swtpm|passt)|profile=\"(libvirt|virt|swtpm|passt|/usr/sbin/libvirtd)"
)
_WHEN = re.compile(r"audit\((\d+)\.\d+:\d+\)")


def denial_since(moment: float, audit: str = AUDIT_LOG, kernel: str = KERNEL_LOG) -> str:
    """Return the last denial since `moment`, in seconds since 1970; empty if none is known. Raises nothing."""
    boot = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)

    def attempt() -> str:
        lines = [text.decode(errors="replace") for when, text in records(kernel) if boot + when >= moment]
        for line in reversed([*lines, *tail(audit, TAIL).decode(errors="replace").splitlines()]):
            when = _WHEN.search(line)
            if when and int(when[1]) >= int(moment) and _DENIAL.search(line) and _CONFINED.search(line):
                return " ".join(line.split())[:LONGEST_DENIAL]
        return ""

    return wait.until(attempt, _SETTLES if os.access(audit, os.R_OK) else 0, 0.05)


def with_denial(fault: errors.Fault, denial: str) -> errors.Fault:
    """Return the fault with a denial in its hint, if there is one.

    The machine denies what the job's user could open: a job's fault for "Permission denied" becomes the machine's.
    """
    if not denial:
        return fault
    hint = f"a security module has denied it: {denial}"
    if isinstance(fault, errors.JobFault) and "Permission denied" in fault.problem:
        return errors.MachineFault(fault.problem, hint)
    fault.hint = f"{fault.hint} And {hint}" if fault.hint else hint
    return fault


def tail(path: str, most: int) -> bytes:
    """Return the last `most` bytes of a log; nothing if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most))
            return file.read(most)
    except OSError:
        return b""
