"""A look at the machine in a process of its own, which a hung file system may keep for good."""

import atexit
import os
import select
import sys
import threading
from collections.abc import Callable

PATIENCE = 1.0
"""Seconds for that process to end, once it has told how it came out."""


def apart(work: Callable[[], int]) -> int:
    """Do `work`, which returns the exit status and prints, in a process of its own, and wait for its word only.

    A thread that waits for a FUSE whose server has taken the question and does not answer cannot be killed, and its
    process neither ends nor lets go of its output. Whoever has other threads, or another standard output than the
    process, works in this one.
    """
    if threading.active_count() > 1 or sys.stdout is not sys.__stdout__:
        return work()
    _flush()
    hearing, telling = os.pipe()
    child = os.fork()
    if not child:
        os.close(hearing)
        status = work()  # what it raises is for whoever called, here as there
        _flush()
        atexit._run_exitfuncs()  # programs that still run are killed
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
