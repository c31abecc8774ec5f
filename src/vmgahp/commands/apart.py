"""Work in a process of its own, which a hung file system may block forever."""

import atexit
import os
import select
import sys
import threading
from collections.abc import Callable

PATIENCE = 1.0
"""Seconds to wait for that process to exit after it has reported its result."""


def apart(work: Callable[[], int]) -> int:
    """Run `work`, which prints and returns the exit status, in a child process; wait only for its result.

    A thread that waits for a FUSE server that has read the request and does not answer cannot be killed, and its
    process neither exits nor closes its output. If the caller has other threads, or another standard output than the
    process, the work is done in this process.
    """
    if threading.active_count() > 1 or sys.stdout is not sys.__stdout__:
        return work()
    _flush()
    hearing, telling = os.pipe()
    child = os.fork()
    if not child:
        os.close(hearing)
        status = work()  # its exceptions reach the caller, as in this process
        _flush()
        atexit._run_exitfuncs()  # kills programs that are still running
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        os.write(telling, bytes([status]))
        os._exit(status)
    os.close(telling)
    told = os.read(hearing, 1)
    os.close(hearing)
    if told:
        with open(os.pidfd_open(child), "rb") as ended:
            if select.select([ended], [], [], PATIENCE)[0]:
                os.waitpid(child, 0)
        return told[0]
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
