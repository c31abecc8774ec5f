"""A port by which a guest and its server tell each other short lines, both ways.

What a guest says is a stranger's: so much of it is read, and what is no line of plain text is not heard.
"""

import _socket
import os
from _collections_abc import Callable
from _queue import SimpleQueue

from vmgahp.host.serial_capture import ConsoleCapture

LONGEST_LINE = 512
MOST_LINES = 1000
"""One line again and again is one."""
MOST_WAITING = 10_000
"""Lines that nobody has taken yet; what comes then is not heard."""


class LinePort(ConsoleCapture):
    """Listens as a capture does; the lines that come wait in `lines`, and nothing is kept in a file."""

    def __init__(self, path: str, on_error: Callable[[str], None], *, owner: tuple[int, int] | None = None) -> None:
        super().__init__(path, _nowhere, 0, on_error, owner=owner)

    def _begin(self, path: str, limit: int, on_error: Callable[[str], None]) -> None:
        super()._begin(path, limit, on_error)
        self.lines: SimpleQueue[str | None] = SimpleQueue()
        """What has come; None is for whoever wants to wake the one who waits."""
        self._left = MOST_LINES
        self._rest = b""
        self._is_too_long = False
        """Whether the line under way is not heard."""
        self._last = ""
        self._connection: _socket.socket | None = None

    def say(self, line: str) -> None:
        """Tell the guest, if it is there: who waits for it asks again."""
        if (connection := self._connection) is not None:
            try:
                connection.send(line.encode() + b"\n")
            except OSError:
                return

    def _accept(self) -> _socket.socket:
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
