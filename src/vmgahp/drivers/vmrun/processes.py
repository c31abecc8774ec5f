"""VMware's processes on this machine: one vmware-vmx for each VM that runs.

A process's owner chooses its name and arguments, so it counts only if its owner is the VM's.
"""

import os
import select
import signal
from typing import NamedTuple

from vmgahp import errors
from vmgahp.drivers.base import Logger
from vmgahp.drivers.vmrun import faults
from vmgahp.drivers.vmrun.tool import Tool, VmrunError
from vmgahp.host import proc

NAME = b"vmware-vmx"
"""The beginning of the processes' names; a debugging build is vmware-vmx-debug."""

KILL_WAIT = 10.0
"""Seconds within which a killed process must be gone."""

PROCESS_WAIT = 5.0
"""Seconds within which the process of a VM that vmrun has stopped must be gone."""


class Process(NamedTuple):
    """One VM that runs."""

    pid: int
    uid: int
    """The real user id, whatever rights the process has."""
    vmx: str
    """The full path of its ``.vmx``, without links."""


def running(uid: int | None = None) -> list[Process]:
    """List the VMs of all users, or of one."""
    found = (_process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [process for process in found if process is not None and uid in (None, process.uid)]


def find(vmx: str, uid: int | None = None) -> Process | None:
    """Return the process that runs the VM `vmx`, of the user `uid` if that is given."""
    return next((process for process in running(uid) if process.vmx == vmx), None)


def is_still(process: Process) -> bool:
    """Tell if that process runs that VM now."""
    return _process(process.pid) == process


def wait_for_end(process: Process, seconds: float, *, kill: bool = False) -> bool:
    """Wait for the exit of that process, after killing it if `kill` is set; return True if it is gone.

    Raises OSError if it cannot be killed.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        if not is_still(process):
            return True
        if kill:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    except ProcessLookupError:
        return True
    finally:
        os.close(descriptor)


def end(vmrun: Tool, vmx: str, uid: int, seconds: float, log: Logger) -> bool:
    """Kill a VM; return True if there was one. Raises `errors.MachineFault` if it runs on."""
    process = find(vmx, uid)
    problem: VmrunError | None = None
    try:
        vmrun.run("stop", vmx, "hard", seconds=seconds)
    except VmrunError as error:
        problem = error
    process = process or find(vmx, uid)
    was_there = problem is None or not faults.is_not_running(problem)
    if process is None:
        if problem is not None and was_there:
            raise faults.from_vmrun(problem, f"stopping {vmx}", [vmx]) from problem
        return was_there
    if (problem is None or not was_there) and wait_for_end(process, PROCESS_WAIT):
        return True
    log(f"vmrun has not stopped {vmx}{f' ({problem})' if problem else ''}: killing process {process.pid}")
    try:
        reason = "" if wait_for_end(process, KILL_WAIT, kill=True) else "and does not end though it was killed"
    except OSError as error:
        reason = f"and cannot be killed: {error.strerror}"
    if reason:
        hint = "kill it by hand; if it does not end, its file system may hang."
        raise errors.MachineFault(f"Process {process.pid} runs {vmx} {reason}.", hint)
    return True


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
