"""VMware's processes on this machine: one vmware-vmx for each VM that runs.

A process's name and arguments are its owner's to choose, so one counts only where its owner is the one whom
the VM belongs to.
"""

import os
import select
import signal
from collections.abc import Iterator
from typing import NamedTuple

NAME = "vmware-vmx"
"""How the processes' names begin; a debugging build is vmware-vmx-debug."""

KILL_WAIT = 10.0
"""Seconds in which a killed process must be gone."""


class Process(NamedTuple):
    """One VM that runs."""

    pid: int
    uid: int
    """The real one: whose process it is, whatever rights it has."""
    vmx: str
    """The full path of its ``.vmx``, without links."""


def find(vmx: str, uid: int | None = None) -> Process | None:
    """The process that runs the VM `vmx`, of the user `uid` where that is given."""
    return next((found for found in _all() if found.vmx == vmx and uid in (None, found.uid)), None)


def inside(directory: str, uid: int | None = None) -> list[Process]:
    """The processes whose ``.vmx`` is in `directory`."""
    return [found for found in _all() if os.path.dirname(found.vmx) == directory and uid in (None, found.uid)]


def all_of(uid: int) -> list[Process]:
    """All of a user's VMs."""
    return [found for found in _all() if found.uid == uid]


def cpu_seconds(pid: int) -> float:
    """The CPU time that a process has used with all its threads; 0 where there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


def is_still(process: Process) -> bool:
    """Whether that process runs that VM now."""
    return _process(process.pid) == process


def kill(process: Process, seconds: float = KILL_WAIT) -> bool:
    """Kill that very process and wait for its end; whether it is gone. Raises OSError."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        if not is_still(process):
            return True
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return _ends(descriptor, seconds)
    except ProcessLookupError:
        return True
    finally:
        os.close(descriptor)


def wait_for_end(process: Process, seconds: float) -> bool:
    """Whether that process ends within so many seconds."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        return not is_still(process) or _ends(descriptor, seconds)
    finally:
        os.close(descriptor)


def _ends(descriptor: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _all() -> Iterator[Process]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            found = _process(int(name))
            if found is not None:
                yield found


def _process(pid: int) -> Process | None:
    try:
        with open(f"/proc/{pid}/comm") as file:
            if not file.read(64).startswith(NAME):
                return None
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            arguments = file.read(1 << 16).split(b"\0")
        # Not the owner of /proc/<pid>: vmware-vmx is set-uid, and the kernel gives root's such a process.
        with open(f"/proc/{pid}/status") as file:
            uid = next(int(line.split()[1]) for line in file if line.startswith("Uid:"))
    except (OSError, ValueError, StopIteration):
        return None
    for argument in reversed(arguments):
        if argument.startswith(b"/") and argument.endswith(b".vmx"):
            return Process(pid, uid, os.fsdecode(argument))
    return None
