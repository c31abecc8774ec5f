"""A port by which a guest and its server exchange short lines.

A guest's input is not trusted: it is limited, and anything but lines of plain text is dropped.
"""

import os
import socket
from collections.abc import Callable
from queue import SimpleQueue

from vmgahp.host.serial_capture import ConsoleCapture

LONGEST_LINE = 512
MOST_LINES = 1000
"""The most lines of a guest; repetitions of the last line do not count."""
MOST_WAITING = 10_000
"""The most lines in the queue; more are dropped."""


class LinePort(ConsoleCapture):
    """A listener like a capture, which puts the lines into the queue `lines` and not into a file."""

    def __init__(self, path: str, on_error: Callable[[str], None], *, owner: tuple[int, int] | None = None) -> None:
        super().__init__(path, _nowhere, 0, on_error, owner=owner)

    def _begin(self, path: str, limit: int, on_error: Callable[[str], None]) -> None:
        super()._begin(path, limit, on_error)
        self.lines: SimpleQueue[str | None] = SimpleQueue()
        """The queue of lines; other code may put None into it to wake the reader."""
        self._left = MOST_LINES
        self._rest = b""
        self._is_too_long = False
        """True while the rest of a line that is too long is dropped."""
        self._last = ""
        self._connection: socket.socket | None = None

    def say(self, line: str) -> None:
        """Send a line to the guest, if it is connected; the guest asks again for a lost line that it needs."""
        if (connection := self._connection) is not None:
            try:
                connection.send(line.encode() + b"\n")
            except OSError:
                return

    def _accept(self) -> socket.socket:
        self._connection = super()._accept()
        return self._connection

    def _keep(self, chunk: memoryview) -> None:
        *lines, self._rest = (self._rest + bytes(chunk)).split(b"\n")
        for line in lines:
            if not self._is_too_long and len(line) <= LONGEST_LINE:
                self._hear(line)
            self._is_too_long = False
        if len(self._rest) > LONGEST_LINE:
            self._rest, self._is_too_long = b"", True

    def _hear(self, line: bytes) -> None:
        said = line.decode("ascii", "replace").strip()
        if said != self._last:
            self._left -= 1
            self._last = said
        if self._left < 0:
            self._cut = True
            self._note("limit", f"The guest has said more than {MOST_LINES} lines; no more of them is heard.")
        elif said and said.isprintable() and self.lines.qsize() < MOST_WAITING:
            self.lines.put(said)


def _nowhere() -> int:
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
