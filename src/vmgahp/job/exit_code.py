"""The exit code that a guest reports for its work, and the file for the job's owner.

A VM has no exit code. So the guest reports one, in a line of its serial console or on a virtio port that the job asks
for (``VMPARAM_vm_Exit_Port``): the server exits with it, so that it becomes the job's, and it is sent back in
``vm_exit.json`` and, if chirp works for the job, in the job ad.

A guest is not trusted: only a limited part of its output is read, and only a number from 0 to 255 is accepted.
"""

import json
import re
from time import gmtime, strftime
from typing import NamedTuple

from vmgahp.errors import Fault
from vmgahp.host.job_user import Identity

EXIT_FILE = "vm_exit.json"
PORT = "org.vmgahp.exit"
"""The port's name; in a Linux guest it is ``/dev/virtio-ports/org.vmgahp.exit``."""
MARKER = "vmgahp-exit-code:"
"""The beginning of the line on the console; the number follows."""

PORT_BYTES = 4096
"""The most bytes of the port's output that are kept."""
CONSOLE_BYTES = 64 << 10
"""The bytes at the console's end that are searched: a guest prints many lines when it shuts down."""

# Patterns for `re`, which a server loads only at its VM's end.
_LINE = rb"(?:^|[\r\n])[ \t]*" + MARKER.encode() + rb"[ \t]*([0-9]{1,3})[ \t]*(?=[\r\n]|$)"
_NUMBER = rb"\s*([0-9]{1,3})\s*"


class Ending(NamedTuple):
    """The end of one VM."""

    how: str
    """The way it ended, one of the constants below."""
    exit_code: int | None
    source: str
    """The source of the exit code: ``program``, ``port`` or ``console``; empty if there is none."""
    began: float
    """The time of its start, or restart from a checkpoint, on this machine, in seconds since 1970."""
    ended: float
    reason: str
    """The reason for which it was ended as a failure; empty if it was not."""
    cpu_seconds: float | None
    """The CPU time that was last seen; None if it was never read."""
    doubt: str = ""
    """A hint at a mistake in the job's request; empty for none."""
    signal: int = 0
    """The signal that ended the guest's program; 0 for none."""


POWERED_OFF = "powered off"
POWERED_OFF_WHEN_ASKED = "powered off when asked"
DESTROYED = "destroyed"
CRASHED = "crashed"
"""A guest that panicked, or whose hypervisor process ended unexpectedly."""
DESTROYED_BY_OTHERS = "destroyed by somebody else"
DISK_ERROR = "disk error"
"""A guest that a disk error has paused for too long (VM_IO_ERROR_TIMEOUT)."""
DISK_LIMIT = "disk limit"
OUT_OF_MEMORY = "out of memory"
NOT_READY = "guest not ready"
RUN_FAILED = "run failed"
"""A guest that could not run its program, or whose result could not be read."""
GONE = "gone"
"""A VM that ended by itself in a way that the hypervisor does not report."""

BY_ITSELF = (POWERED_OFF, CRASHED, DISK_ERROR, DISK_LIMIT, OUT_OF_MEMORY, NOT_READY, RUN_FAILED, GONE)
"""The ways in which a VM ends without a request."""

TO_BE_HELD = (DISK_LIMIT, OUT_OF_MEMORY, NOT_READY, RUN_FAILED)
"""The ways that only the job's owner can correct."""

_DEADLY = (*range(1, 17), *range(24, 28), *range(29, 32))
"""The signals whose default action ends a process."""


def status_of(ending: Ending) -> int:
    """Return the server's exit status, for HTCondor the job's; negative for the signal to end by."""
    if ending.how not in (*BY_ITSELF, DESTROYED_BY_OTHERS):
        return 0
    if ending.how in (NOT_READY, RUN_FAILED):
        return 1
    if ending.signal:
        return -ending.signal if ending.signal in _DEADLY else 128 + ending.signal
    if ending.exit_code is not None:
        return ending.exit_code
    return 0 if ending.how in (POWERED_OFF, GONE) and not ending.reason else 1


def from_console(end: bytes) -> int | None:
    """Return the exit code in the last such line of a console's end; None if there is none."""
    said = [int(number) for number in re.findall(_LINE, end[-CONSOLE_BYTES:])]
    return next((number for number in reversed(said) if number <= 255), None)


def from_port(written: bytes) -> int | None:
    """Return the exit code that the guest has written to its port, the last line with a number; None if it has none."""
    for line in reversed(written[:PORT_BYTES].splitlines()):
        found = re.fullmatch(_NUMBER, line)
        if found and int(found[1]) <= 255:
            return int(found[1])
    return None


def render(ending: Ending) -> bytes:
    """Return the content of ``vm_exit.json``."""

    def time(seconds: float) -> str:
        return strftime("%Y-%m-%dT%H:%M:%S+00:00", gmtime(seconds))

    content = {
        "exit_code": ending.exit_code,
        "source": ending.source or None,
        "ended_by": ending.how,
        "reason": ending.reason or None,
        "started": time(ending.began),
        "ended": time(ending.ended),
        "cpu_seconds": None if ending.cpu_seconds is None else round(ending.cpu_seconds, 2),
    }
    if ending.signal:
        content["signal"] = ending.signal
    if ending.doubt:
        content["hint"] = ending.doubt
    return json.dumps(content, indent=1).encode() + b"\n"


def tail_of(identity: Identity, directory: str, name: str, start: int = 0) -> bytes:
    """Read the end of a scratch file, from `start` on, as the job's user; empty if it cannot be read."""
    try:
        return identity.read_scratch(directory, name, CONSOLE_BYTES, start)
    except (OSError, Fault):
        return b""
