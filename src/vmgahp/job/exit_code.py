"""The exit code of a guest's work, as the guest says it, and the file for the job's owner.

A VM has no exit code. So the guest says one, in a line of its serial console or on a virtio port that the job asked for
(``VMPARAM_vm_Exit_Port``): the server leaves with it, by which it is the job's, and it is sent back in ``vm_exit.json``
and, where the job can be reached by chirp, into the job ad.

What a guest says is a stranger's word: of a limited piece of it a number from 0 to 255 is believed, and nothing else.
"""

import os

from vmgahp.host.job_user import Identity
from vmgahp.host.light import NamedTuple

EXIT_FILE = "vm_exit.json"
PORT = "org.vmgahp.exit"
"""The port's name; in a Linux guest it is ``/dev/virtio-ports/org.vmgahp.exit``."""
MARKER = "vmgahp-exit-code:"
"""What begins the line of the console; the number follows."""

PORT_BYTES = 4096
"""What is kept of all that the guest writes to the port."""
CONSOLE_BYTES = 64 << 10
"""How much of the console's end is looked at: a guest says a good deal when it shuts down."""

# What is looked for with `re`, which a server is to load at its VM's end and not before.
_LINE = rb"(?:^|[\r\n])[ \t]*" + MARKER.encode() + rb"[ \t]*([0-9]{1,3})[ \t]*(?=[\r\n]|$)"
_NUMBER = rb"\s*([0-9]{1,3})\s*"


class Ending(NamedTuple):
    """One VM's end."""

    how: str
    """One of those below."""
    exit_code: int | None
    source: str
    """``program``, ``port`` or ``console``; empty where the guest said nothing."""
    began: float
    """When it was started, or restarted from a checkpoint, on this machine: seconds since 1970."""
    ended: float
    reason: str
    """Why it was ended as a failure; empty where it was not."""
    cpu_seconds: float | None
    """What it is known to have used; None where it was never looked at."""
    doubt: str = ""
    """What may be wrong with what the job asked for; empty for nothing."""
    signal: int = 0
    """By which the program that the guest ran was ended; 0 for none."""


POWERED_OFF = "powered off"
"""The guest did so by itself."""
POWERED_OFF_WHEN_ASKED = "powered off when asked"
"""HTCondor wanted the VM to end, and the guest heard it."""
DESTROYED = "destroyed"
"""HTCondor wanted the VM to end, and it was ended."""
CRASHED = "crashed"
"""The guest panicked, or its hypervisor's process ended without its doing."""
DESTROYED_BY_OTHERS = "destroyed by somebody else"
DISK_ERROR = "disk error"
"""An error of a disk has kept the guest from running for too long (VM_IO_ERROR_TIMEOUT)."""
DISK_LIMIT = "disk limit"
"""Its disks have outgrown what the job has asked for."""
OUT_OF_MEMORY = "out of memory"
"""Its hypervisor's process has outgrown its limit on memory."""
NOT_READY = "guest not ready"
"""The guest has not begun the program that it was to run."""
RUN_FAILED = "run failed"
"""The guest could not run its program, or what came of it could not be had."""
GONE = "gone"
"""It ended by itself; the hypervisor does not say how."""

BY_ITSELF = (POWERED_OFF, CRASHED, DISK_ERROR, DISK_LIMIT, OUT_OF_MEMORY, NOT_READY, RUN_FAILED, GONE)
"""The job is over, and not told to be."""

TO_BE_HELD = (DISK_LIMIT, OUT_OF_MEMORY, NOT_READY, RUN_FAILED)
"""What only the job's owner can mend."""

_DEADLY = (*range(1, 17), *range(24, 28), *range(29, 32))
"""The signals that end a process which does nothing about them."""


def status_of(ending: Ending) -> int:
    """The exit status of a server whose VM has ended so: HTCondor takes it for the job's exit code.

    Where it is negative the server is to end by that signal, which HTCondor takes for the job's, too.
    """
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
    """The exit code that the end of a console says, by the last line that says one; None for none."""
    import re

    said = [int(number) for number in re.findall(_LINE, end[-CONSOLE_BYTES:])]
    return next((number for number in reversed(said) if number <= 255), None)


def from_port(written: bytes) -> int | None:
    """The exit code that the guest has written to its port: the last line that is a number; None for none."""
    import re

    for line in reversed(written[:PORT_BYTES].splitlines()):
        found = re.fullmatch(_NUMBER, line)
        if found and int(found[1]) <= 255:
            return int(found[1])
    return None


def render(ending: Ending) -> bytes:
    """The content of ``vm_exit.json``."""
    import json
    from datetime import UTC, datetime

    def time(seconds: float) -> str:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")

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
    """The end of a file of the scratch directory, as the job's user sees it, from the offset `start` on at most.

    Empty where there is no such file or it cannot be read.
    """
    from vmgahp.errors import Fault

    try:
        descriptor = identity.open_scratch(directory, name, os.O_RDONLY)
    except (OSError, Fault):
        return b""
    try:
        size = os.fstat(descriptor).st_size
        start = max(start, size - CONSOLE_BYTES)
        return os.pread(descriptor, max(0, size - start), start)
    except OSError:
        return b""
    finally:
        os.close(descriptor)
