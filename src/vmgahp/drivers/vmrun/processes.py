"""VMware's processes on this machine: one vmware-vmx for each VM that runs.

A process's name and arguments are its owner's to choose, so one counts only where its owner is the one whom
the VM belongs to.
"""

import os
import select
import signal
from collections.abc import Iterator
from typing import NamedTuple

from vmgahp import errors
from vmgahp.drivers.base import Logger
from vmgahp.drivers.vmrun import faults, tool
from vmgahp.drivers.vmrun.tool import Tool, VmrunError
from vmgahp.host import proc

NAME = b"vmware-vmx"
"""How the processes' names begin; a debugging build is vmware-vmx-debug."""

KILL_WAIT = 10.0
"""Seconds in which a killed process must be gone."""

PROCESS_WAIT = 5.0
"""Seconds in which the process of a VM that vmrun has stopped must be gone."""


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


def is_listed(output: str, vmx: str) -> bool:
    """Whether ``vmrun list`` names the VM `vmx`, which is a path without links."""
    name = os.path.basename(vmx)
    return any(
        path == vmx or (os.path.basename(path) == name and os.path.realpath(path) == vmx)
        for path in tool.running(output)
    )


def end(vmrun: Tool, vmx: str, uid: int, seconds: float, log: Logger) -> bool:
    """End the VM at once; whether there was one. Raises `errors.MachineFault` where it runs on."""
    process = find(vmx, uid)
    problem: VmrunError | errors.MachineFault | None = None
    was_there = True
    try:
        vmrun.run("stop", vmx, "hard", seconds=seconds)
    except VmrunError as error:
        if faults.is_not_running(error):
            was_there = False
        else:
            problem = error
    except errors.MachineFault as fault:
        problem = fault
    process = process or find(vmx, uid)
    if process is None:
        if problem is None:
            return was_there
        if isinstance(problem, VmrunError):
            raise faults.from_vmrun(problem, f"stopping {vmx}", [vmx])
        raise problem
    if problem is not None or not wait_for_end(process, PROCESS_WAIT):
        reason = "" if problem is None else f" ({problem})"
        log(f"vmrun has not stopped {vmx}{reason}: killing process {process.pid}")
        try:
            gone = kill(process)
        except OSError as error:
            raise errors.MachineFault(
                f"Process {process.pid} runs {vmx} and cannot be killed: {error.strerror}.", "kill it by hand."
            ) from error
        if not gone:
            raise errors.MachineFault(
                f"Process {process.pid} runs {vmx} and does not end though it was killed.",
                "see what it waits for; its file system may hang.",
            )
    return True


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
        with open(f"/proc/{pid}/comm", "rb") as file:
            if not file.read(64).startswith(NAME):
                return None
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            arguments = file.read(1 << 16).split(b"\0")
    except OSError:
        return None
    uid = proc.uid(pid)
    for argument in reversed(arguments):
        if uid is not None and argument.startswith(b"/") and argument.endswith(b".vmx"):
            return Process(pid, uid, os.fsdecode(argument))
    return None
