"""The file that a conversation is written into: made safely, and never what holds the conversation up.

Whoever is recorded waits for no disk: a thread of its own does the writing. What a full or a dead disk does not
take in time is lost, and the transcript says how much; the next lines are tried again.
"""

import os
import time
from collections.abc import Callable
from threading import Condition, Thread

from vmgahp import errors
from vmgahp.host import trust

MOST_WAITING = 16 << 20
"""Characters that wait to be written; what comes beyond them is lost."""

CLOSE_DEADLINE = 5.0
"""Seconds that the end waits for the last lines to be written."""


def create(target: str) -> tuple[int, str]:
    """Make a new file, for nobody else to read: its descriptor and its name.

    Where `target` is a directory, the file gets a name with the time (UTC) and the process id, so that many
    can be made there. What exists already is never written to. As root the directory must be one that nobody
    else can write to, or one like ``/tmp``. Raises `MachineFault`.
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
    except FileExistsError:
        raise errors.MachineFault(
            f"No transcript is written to {path}: it exists.", "name another file, or a directory."
        ) from None
    except OSError as error:
        raise errors.MachineFault(
            f"No transcript is written to {path}: {error.strerror}.", "see to its directory."
        ) from None


class TranscriptFile:
    """Writes text to a descriptor, which it owns, without ever holding up who brings it.

    `complain` is called, in another thread, with a sentence the first time that something is lost.
    """

    def __init__(self, descriptor: int, complain: Callable[[str], object] = lambda _: None) -> None:
        self._descriptor = descriptor
        self._complain = complain
        self._complained = False
        self._changed = Condition()
        self._waiting: list[str] = []
        self._size = 0
        self._lost = 0
        self._torn = False
        self._closing = False
        self._thread = Thread(target=self._run, name="transcript", daemon=True)
        self._thread.start()

    def write(self, text: str) -> None:
        """Whole lines, each with its newline."""
        with self._changed:
            if self._size + len(text) > MOST_WAITING:
                self._lost += text.count("\n")
                return
            self._waiting.append(text)
            self._size += len(text)
            self._changed.notify()

    def close(self, timeout: float = CLOSE_DEADLINE) -> None:
        """Wait for the last lines to be written, but not for ever."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                if not self._waiting:
                    break
                texts, self._waiting, self._size = self._waiting, [], 0
                lost, self._lost = self._lost, 0
            self._put("".join(texts), lost)
        if self._lost:
            self._put("", self._lost)
        os.close(self._descriptor)

    def _put(self, text: str, lost: int) -> None:
        """Write lines, after a word on those that are lost; they are lost too where that fails."""
        lines = text.encode("utf-8", "backslashreplace")
        data = memoryview((f"# {lost} lines were lost here\n" if lost else "").encode() + lines)
        try:
            if self._torn:  # the last line went in half
                os.write(self._descriptor, b"\n")
                self._torn = False
            while data:
                number = os.write(self._descriptor, data)
                self._torn = data[number - 1] != 0x0A
                data = data[number:]
        except OSError as error:
            untold = lost if len(data) > len(lines) else 0
            with self._changed:
                self._lost += untold + lines[-len(data) :].count(b"\n")
            if not self._complained:
                self._complained = True
                self._complain(f"The transcript has gaps: {error.strerror}.")
