"""Making sure that a VM is gone: vmrun is asked first, then its process is killed."""

import os

from vmgahp import errors
from vmgahp.drivers.vmrun import faults, processes, tool
from vmgahp.drivers.vmrun.tool import Tool, VmrunError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vmgahp.drivers.base import Logger


PROCESS_WAIT = 5.0
"""Seconds in which the process of a VM that vmrun has stopped must be gone."""


def is_listed(output: str, vmx: str) -> bool:
    """Whether ``vmrun list`` names the VM `vmx`, which is a path without links."""
    name = os.path.basename(vmx)
    return any(
        path == vmx or (os.path.basename(path) == name and os.path.realpath(path) == vmx)
        for path in tool.running(output)
    )


def end(vmrun: Tool, vmx: str, uid: int, seconds: float, log: "Logger") -> bool:
    """End the VM at once; whether there was one. Raises `errors.MachineFault` where it runs on."""
    process = processes.find(vmx, uid)
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
    process = process or processes.find(vmx, uid)
    if process is None:
        if problem is None:
            return was_there
        if isinstance(problem, VmrunError):
            raise faults.from_vmrun(problem, f"stopping {vmx}", [vmx])
        raise problem
    if problem is not None or not processes.wait_for_end(process, PROCESS_WAIT):
        reason = "" if problem is None else f" ({problem})"
        log(f"vmrun has not stopped {vmx}{reason}: killing process {process.pid}")
        try:
            gone = processes.kill(process)
        except OSError as error:
            raise errors.MachineFault(
                f"Process {process.pid} runs {vmx} and cannot be killed: {error.strerror}.",
                "kill it by hand.",
            ) from error
        if not gone:
            raise errors.MachineFault(
                f"Process {process.pid} runs {vmx} and does not end though it was killed.",
                "see what it waits for; its file system may hang.",
            )
    return True
