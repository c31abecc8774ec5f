"""A companion program of one QEMU, with a socket in a directory made by this process.

The directory, the `room`, comes from `runtime_dir.runtime_dir`. It has a file with the process id, so that any process
that learns of the VM's end can end the program.
"""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress

from vmgahp.host import proc, runtime_dir, wait
from vmgahp.host.system_calls import Opened

END_WAIT = 5.0
"""The seconds between SIGTERM and SIGKILL for a program."""


def remember(process: subprocess.Popen[bytes], room: str) -> None:
    """Detach a program from its Popen object and note its process id for `end`. Raises OSError."""
    process.returncode = 0
    with open(f"{room}/pid", "w") as file:
        file.write(str(process.pid))


def end(room: str, mark: str) -> None:
    """End the program of a room, if it still runs; the process is left alone unless `mark` is in its command line."""
    try:
        with open(f"{room}/pid") as file:
            pid = int(file.read(32))
        process = os.pidfd_open(pid)
    except (OSError, ValueError):
        return
    with suppress(OSError), Opened(process):  # it may exit meanwhile
        is_ours = mark.encode() in proc.command_line(pid)
        for number in (signal.SIGTERM, signal.SIGKILL) if is_ours else ():
            signal.pidfd_send_signal(process, number)
            if wait.ready(process, END_WAIT):
                break
    with suppress(ChildProcessError):  # it need not be a child of this process
        os.waitpid(pid, os.WNOHANG)


def over(room: str) -> None:
    """End the program that has the room in its command line, and remove the room. Raises nothing."""
    end(room, room)
    runtime_dir.remove(room)
