"""Threads that end with the process, and the fault if none can be started."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

from vmgahp.errors import MachineFault

__all__ = ["AGAIN_INTERVAL", "Worker", "overseen", "start"]

AGAIN_INTERVAL = 5.0
"""The seconds between two attempts to end an operation that takes too long."""


def start(name: str, run: Callable[..., object], *arguments: object) -> Thread:
    """Start a thread. Raises `MachineFault` if this machine has none left, as by a limit on processes."""
    thread = Thread(target=run, args=arguments, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise MachineFault(
            f"The machine is out of resources: there is no thread for {name} ({error}).",
            "look at the limits on processes: of HTCondor's user, of its control group, of this machine.",
        ) from error
    return thread


class Worker:
    """A thread with a queue, which handles its items in order, and sleeps while there are none."""

    def __init__(self, name: str, do: Callable[[Any], object]) -> None:
        """Start the thread. Raises `MachineFault` as `start` does."""
        self._given: SimpleQueue[object] = SimpleQueue()
        self._do = do
        self.thread = start(name, self._run)

    def give(self, what: object) -> None:
        """Append an item to the queue."""
        self._given.put(what)

    def end(self) -> None:
        """Let the thread end after the last item. No more items may be given."""
        self._given.put(None)

    def _run(self) -> None:
        while (what := self._given.get()) is not None:
            self._do(what)
            del what  # such as a job ad


@contextmanager
def overseen(name: str, seconds: float, give_up: Callable[[], None]) -> Iterator[None]:
    """Limit the time of the block: after `seconds` call `give_up` in another thread, repeatedly until the block ends.

    No call is running any more after the block. Raises `MachineFault` as `start` does.
    """
    over = Event()

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
