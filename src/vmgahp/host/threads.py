"""Threads that do not outlive this process, and the fault where none can be started."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vmgahp.errors import MachineFault

AGAIN_INTERVAL = 5.0
"""Seconds between two attempts to end what takes too long."""


def start(name: str, run: Callable[..., object], *arguments: object) -> threading.Thread:
    """A thread that runs. Raises `MachineFault` where this machine has none left, as by a limit on processes."""
    thread = threading.Thread(target=run, args=arguments, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise MachineFault(
            f"The machine is out of resources: there is no thread for {name} ({error}).",
            "look at the limits on processes: of HTCondor's user, of its control group, of this machine.",
        ) from error
    return thread


@contextmanager
def overseen(name: str, seconds: float, give_up: Callable[[], None]) -> Iterator[None]:
    """What is done meanwhile ends: after so many seconds `give_up` is called beside it, again and again until it has.

    No call is under way any more when this is left. Raises `MachineFault` as `start` does.
    """
    over = threading.Event()

    def watch() -> None:
        wait = seconds
        while not over.wait(wait):
            give_up()
            wait = AGAIN_INTERVAL

    watching = start(f"{name}'s deadline", watch)
    try:
        yield
    finally:
        over.set()
        watching.join()
