"""Waiting with a deadline: for a descriptor, for a lock, or for an attempt to succeed."""

import select
from collections.abc import Callable
from fcntl import LOCK_NB, flock
from time import monotonic, sleep
from typing import TypeVar

T = TypeVar("T")


def ready(descriptor: int, seconds: float, events: int = select.POLLIN) -> bool:
    """Wait until a descriptor is readable, or the process of a pidfd has exited; return False on a timeout."""
    poll = select.poll()
    poll.register(descriptor, events)
    return bool(poll.poll(max(seconds, 0.0) * 1000))


def until(attempt: Callable[[], T], seconds: float, pause: float) -> T:
    """Repeat an attempt every `pause` seconds until its result is true; return its last result at the deadline."""
    end = monotonic() + seconds
    while not (result := attempt()) and (left := end - monotonic()) > 0:
        sleep(min(pause, left))
    return result


def lock(descriptor: int, kind: int, seconds: float) -> bool:
    """Lock a file by flock(2), which has no timeout itself; return False on a timeout. Raises OSError."""

    def attempt() -> bool:
        try:
            flock(descriptor, kind | LOCK_NB)
        except BlockingIOError:
            return False
        return True

    return until(attempt, seconds, 0.02)
