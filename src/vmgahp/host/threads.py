"""Threads that end with the process, ways for them to wait, and the fault if none can be started.

A condition and a flag are the parts of threading's Condition and Event that are needed here. With all its imports,
that module takes two thirds of a MiB of the memory of each server.
"""

from _collections_abc import Callable, Iterator
from _queue import SimpleQueue
from _thread import RLock, start_new_thread
from _thread import allocate_lock as Lock
from time import monotonic

from vmgahp.errors import MachineFault
from vmgahp.host.light import contextmanager

__all__ = ["AGAIN_INTERVAL", "Condition", "Flag", "Lock", "Thread", "Worker", "overseen", "start"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

AGAIN_INTERVAL = 5.0
"""The seconds between two attempts to end an operation that takes too long."""


class Condition:
    """A condition variable: threads that hold its lock wait, and others notify them."""

    __slots__ = ("_lock", "_waiting")

    def __init__(self) -> None:
        self._lock: Any = RLock()
        self._waiting: list[Any] = []

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_error: object) -> None:
        self._lock.release()

    def wait(self, seconds: float | None = None) -> bool:
        """Release the lock and wait for a notification; return False on a timeout."""
        mine = Lock()
        mine.acquire()
        self._waiting.append(mine)
        held = self._lock._release_save()
        notified = False
        try:
            notified = mine.acquire(True, -1 if seconds is None else max(0.0, seconds))
        finally:
            self._lock._acquire_restore(held)
            if not notified and mine in self._waiting:
                self._waiting.remove(mine)
        return notified

    def wait_for(self, is_so: Callable[[], object], seconds: float | None = None) -> bool:
        """Wait until `is_so` returns true; return False on a timeout."""
        end = None if seconds is None else monotonic() + seconds
        while not (found := is_so()):
            left = None if end is None else end - monotonic()
            if left is not None and left <= 0:
                break
            self.wait(left)
        return bool(found)

    def notify(self, most: int = 1) -> None:
        """Wake at most `most` waiting threads. Raises RuntimeError if the caller does not hold the lock."""
        if not self._lock._is_owned():
            raise RuntimeError("the lock is not held")
        woken, self._waiting[:most] = self._waiting[:most], []
        for each in woken:
            each.release()

    def notify_all(self) -> None:
        """Wake all waiting threads."""
        self.notify(len(self._waiting))


class Flag:
    """A flag that threads can wait for."""

    __slots__ = ("_changed", "_is_set")

    def __init__(self) -> None:
        self._changed = Condition()
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        with self._changed:
            self._is_set = True
            self._changed.notify_all()

    def clear(self) -> None:
        with self._changed:
            self._is_set = False

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is set; return False on a timeout."""
        with self._changed:
            return self._is_set or self._changed.wait(seconds) or self._is_set


class Thread:
    """A thread, which ends with the process."""

    def __init__(self, run: Callable[..., object], arguments: tuple[object, ...], name: str) -> None:
        self.name = name
        self._run = run
        self._arguments = arguments
        self._ended = Flag()

    def start(self) -> None:
        """Start the thread, once. Raises RuntimeError if it cannot be started."""
        start_new_thread(self._live, ())

    def is_alive(self) -> bool:
        """Return True until it has ended."""
        return not self._ended.is_set()

    def join(self, seconds: float | None = None) -> None:
        """Wait until it has ended, for `seconds` at most."""
        self._ended.wait(seconds)

    def _live(self) -> None:
        try:
            self._run(*self._arguments)
        finally:
            del self._run, self._arguments
            self._ended.set()


def start(name: str, run: Callable[..., object], *arguments: object) -> Thread:
    """Start a thread. Raises `MachineFault` if this machine has none left, as by a limit on processes."""
    thread = Thread(run, arguments, name)
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

    def __init__(self, name: str, do: "Callable[[Any], object]") -> None:
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
    over = Flag()

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
