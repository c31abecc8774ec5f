"""Threads that do not outlive this process, and the fault where none can be started."""

import threading
from _queue import SimpleQueue
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vmgahp.errors import MachineFault

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

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


class Worker:
    """A thread that does what it is given, one after another, and does not wake while it is given nothing."""

    def __init__(self, name: str, do: "Callable[[Any], object]") -> None:
        """Raises `MachineFault` as `start` does."""
        self._given: SimpleQueue[object] = SimpleQueue()
        self._do = do
        self.thread = start(name, self._run)

    def give(self, what: object) -> None:
        """Have it done when all is done that was given before."""
        self._given.put(what)

    def end(self) -> None:
        """Let the thread end when all is done that it was given. Nothing is given to it any more."""
        self._given.put(None)

    def _run(self) -> None:
        while (what := self._given.get()) is not None:
            self._do(what)
            del what  # such as a job ad


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
