"""The end of a server by the signal that has ended its guest's program, as HTCondor expects of a job."""

import atexit
import os
import resource
import signal


def end_by(number: int) -> int:
    """End this process by a signal; return an exit status if the signal does not end it."""
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    # A limit of 1 also suppresses core dumps that are piped to a program.
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1) if hard else (0, 0))
    atexit._run_exitfuncs()  # kill programs that still run
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    return 128 + number
