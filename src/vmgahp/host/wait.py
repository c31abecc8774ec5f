"""Waiting with a deadline: for a descriptor, a lock, an attempt, a task or a block; and threads."""

import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fcntl import LOCK_NB, flock
from queue import SimpleQueue
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any, Generic, TypeVar

from vmgahp.errors import MachineFault

T = TypeVar("T")


def ready(descriptor: int, seconds: float) -> bool:
    """Wait until a descriptor is readable, or the process of a pidfd has exited; return False on a timeout."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
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


AGAIN_INTERVAL = 5.0
"""The seconds between two attempts to end an operation that takes too long."""


def start_thread(name: str, run: Callable[..., object], *arguments: object) -> Thread:
    """Start a thread. Raises `MachineFault` if this machine has none left, as by a limit on processes."""
    thread = Thread(target=run, args=arguments, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        problem = f"The machine is out of resources: there is no thread for {name} ({error})."
        hint = "look at the limits on processes: of HTCondor's user, of its control group, of this machine."
        raise MachineFault(problem, hint) from error
    return thread


class Task(Generic[T]):
    """A piece of work in a thread of its own, which its caller may abandon."""

    def __init__(self, name: str, work: Callable[[], T]) -> None:
        """Start the thread. Raises `MachineFault` as `start_thread` does."""
        self.error: BaseException | None = None
        self.began = monotonic()
        self._ended = Event()
        start_thread(name, self._run, work)

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._result = work()
        except BaseException as error:  # noqa: BLE001 - passed on to the waiting caller
            self.error = error
        self._ended.set()

    def wait(self, seconds: float) -> bool:
        """Wait for the work; return True if it has ended within `seconds`."""
        return self._ended.wait(max(0.0, seconds))

    def result(self) -> T:
        """Wait for the work, and return its result or raise its exception."""
        self._ended.wait()
        if self.error is not None:
            raise self.error
        return self._result


class Worker:
    """A thread with a queue, which handles its items in order, and sleeps while there are none."""

    def __init__(self, name: str, do: Callable[[Any], object]) -> None:
        """Start the thread. Raises `MachineFault` as `start_thread` does."""
        self._given: SimpleQueue[object] = SimpleQueue()
        self._do = do
        self.thread = start_thread(name, self._run)

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
    """Call `give_up` in a thread after `seconds`, repeatedly; no call outlives the block. Raises as `start_thread`."""
    over = Event()

    def watch() -> None:
        wait = seconds
        while not over.wait(wait):
            give_up()
            wait = AGAIN_INTERVAL

    watching = start_thread(f"{name}'s deadline", watch)
    try:
        yield
    finally:
        over.set()
        watching.join()
