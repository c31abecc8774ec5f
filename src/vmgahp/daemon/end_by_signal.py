"""Ends a server by the signal that has ended its guest's program: HTCondor takes it for the job's."""

import atexit
import os
import resource

from vmgahp.host.light import signal


def end_by(number: int) -> int:
    """End this process; the exit status where the signal does not do it."""
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    # To the kernel 1 is a limit also where a program of the machine's takes the cores.
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1) if hard else (0, 0))
    atexit._run_exitfuncs()  # programs that still run are killed
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    return 128 + number
