"""The file of a transcript, written without ever delaying the conversation.

A separate thread does the writing. Lines that a full or a hanging disk does not take in time are lost, and the
transcript has their number; later lines are written again.
"""

import os
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread

from vmgahp import errors
from vmgahp.host import trust

MOST_WAITING = 16 << 20
"""The most characters that wait to be written; more are lost."""

CLOSE_DEADLINE = 5.0
"""The seconds that `close` waits for the last lines to be written."""


def create(target: str) -> tuple[int, str]:
    """Create a file that only its owner can read; return its descriptor and its name.

    In a directory the file gets a name with the time (UTC) and the process id. An existing file is never
    written to. For root, only root may be able to write to the directory, or it must be one like ``/tmp``.
    Raises `MachineFault`.
    """
    path = target
    if os.path.isdir(target):
        path = os.path.join(target, time.strftime("vmgahp-%Y%m%dT%H%M%SZ", time.gmtime()) + f"-{os.getpid()}.txt")
    try:
        directory = os.path.dirname(path) or "."
        trouble = trust.trouble_with_directory(directory) if os.geteuid() == 0 else ""
        if trouble:
            raise errors.MachineFault(
                f"No transcript is written to {path}: it is reached by {trouble}.",
                "name a directory that belongs to root and that only root may write to.",
            )
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY
        return os.open(path, flags, 0o600), path
    except OSError as error:
        raise errors.MachineFault(
            f"No transcript is written to {path}: {error.strerror}.", "name a new file, or a directory."
        ) from None


class TranscriptFile:
    """A writer to a descriptor, which it owns and closes, in a thread of its own.

    `complain` is a callback, called in that thread with a sentence the first time that lines are lost.
    """

    def __init__(self, descriptor: int, complain: Callable[[str], object] = lambda _: None) -> None:
        self._descriptor = descriptor
        self._complain: Callable[[str], object] | None = complain
        self._texts: SimpleQueue[str | None] = SimpleQueue()
        self._lock = Lock()
        self._waiting = 0
        """The number of characters in the queue."""
        self._lost = 0
        """The number of lost lines that the file does not mention yet."""
        self._torn = False
        """True after a write that ended within a line."""
        self._thread = Thread(target=self._run, name="transcript", daemon=True)
        self._thread.start()

    def write(self, text: str) -> None:
        """Take whole lines, each with its newline, and return at once."""
        with self._lock:
            if self._waiting + len(text) > MOST_WAITING:
                self._lost += text.count("\n")
                return
            self._waiting += len(text)
        self._texts.put(text)

    def close(self, timeout: float = CLOSE_DEADLINE) -> None:
        """Wait for the last lines to be written, for `timeout` seconds at most."""
        self._texts.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (text := self._texts.get()) is not None:
            self._put(text)
        if self._lost:
            self._put("")
        os.close(self._descriptor)

    def _put(self, text: str) -> None:
        with self._lock:
            self._waiting -= len(text)
            lost, self._lost = self._lost, 0
        gap = ("\n" if self._torn else "") + (f"# {lost} lines were lost here\n" if lost else "")
        data = memoryview((gap + text).encode("utf-8", "backslashreplace"))
        try:
            while data:
                size = os.write(self._descriptor, data)
                self._torn = data[size - 1] != ord("\n")
                data = data[size:]
        except OSError as error:
            with self._lock:
                self._lost += lost + text.count("\n")
            if self._complain is not None:
                self._complain(f"The transcript has gaps: {error.strerror}.")
                self._complain = None
