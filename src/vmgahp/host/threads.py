"""Threads that do not outlive this process, how they wait, and the fault where none can be started.

A condition and a flag are threading's Condition and Event, as far as they are wanted here. With all that it brings
along, that module is two thirds of a MiB of the memory of each server.
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
"""Seconds between two attempts to end what takes too long."""


class Condition:
    """Something that threads wait for, which hold its lock, and others tell them of."""

    __slots__ = ("_lock", "_waiting")

    def __init__(self) -> None:
        self._lock: Any = RLock()
        self._waiting: list[Any] = []

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_error: object) -> None:
        self._lock.release()

    def wait(self, seconds: float | None = None) -> bool:
        """Let the lock go until somebody notifies, or so many seconds are over; whether somebody has."""
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
        """Wait until it is so, or so many seconds are over; whether it is."""
        end = None if seconds is None else monotonic() + seconds
        while not (found := is_so()):
            left = None if end is None else end - monotonic()
            if left is not None and left <= 0:
                break
            self.wait(left)
        return bool(found)

    def notify(self, most: int = 1) -> None:
        """Wake so many of those that wait. Raises RuntimeError for one who does not hold the lock."""
        if not self._lock._is_owned():
            raise RuntimeError("the lock is not held")
        woken, self._waiting[:most] = self._waiting[:most], []
        for each in woken:
            each.release()

    def notify_all(self) -> None:
        """Wake all that wait."""
        self.notify(len(self._waiting))


class Flag:
    """A flag that threads wait for."""

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
        """Wait until it is set, or so many seconds are over; whether it is."""
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
        """Begin, once. Raises RuntimeError where there can be none."""
        start_new_thread(self._live, ())

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return not self._ended.is_set()

    def join(self, seconds: float | None = None) -> None:
        """Wait until it has ended, or so many seconds are over."""
        self._ended.wait(seconds)

    def _live(self) -> None:
        try:
            self._run(*self._arguments)
        finally:
            del self._run, self._arguments
            self._ended.set()


def start(name: str, run: Callable[..., object], *arguments: object) -> Thread:
    """A thread that runs. Raises `MachineFault` where this machine has none left, as by a limit on processes."""
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
