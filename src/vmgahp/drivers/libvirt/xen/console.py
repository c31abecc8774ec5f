"""The console of a Xen guest: xenconsoled gives it a pseudo-terminal, which is read here."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable

from vmgahp.host import threads
from vmgahp.host.serial_capture import CHUNK, ConsoleCapture


class PtyCapture(ConsoleCapture):
    """A capture that reads one terminal after the other: a guest that is restored or reboots gets another one."""

    def __init__(self, path: str, open_output: Callable[[], int], limit: int, on_error: Callable[[str], None]) -> None:
        """Listen as `ConsoleCapture` does, for this process's own use."""
        super().__init__(path, open_output, limit, on_error)
        self._reader: threading.Thread | None = None
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._terminal = ""

    def is_reading(self, terminal: str) -> bool:
        """Return True if it reads this terminal, and the terminal has not ended."""
        reader = self._reader
        return reader is not None and reader.is_alive() and self._terminal == terminal

    def follow(self, terminal: str) -> None:
        """Read this terminal, such as ``/dev/pts/3``, from now on. Raises OSError if it does not exist."""
        if not terminal or self.is_reading(terminal):
            return
        self._leave()
        descriptor = os.open(terminal, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
        sink = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sink.connect(self.path)
            self._reader = threads.start(f"console {terminal}", self._read, descriptor, sink)
        except BaseException:
            os.close(descriptor)
            sink.close()
            raise
        self._terminal = terminal

    def close(self) -> None:
        """Close the capture as `ConsoleCapture.close` does, after reading what is left in the terminal."""
        self._leave()
        super().close()
        if self._stop >= 0:
            os.close(self._stop)
            self._stop = -1

    def _leave(self) -> None:
        if self._reader is not None:
            os.eventfd_write(self._stop, 1)
            self._reader.join()
            self._reader = None
            try:
                os.eventfd_read(self._stop)
            except BlockingIOError:
                pass

    def _read(self, descriptor: int, sink: socket.socket) -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.register(self._stop, select.POLLIN)
        try:
            while True:
                ready = {number for number, _ in poll.poll()}
                if descriptor not in ready:
                    return  # asked to stop, and everything is read
                if not (chunk := os.read(descriptor, CHUNK)):
                    return
                sink.sendall(chunk)
        except OSError:
            return  # the terminal has ended, or the capture has
        finally:
            os.close(descriptor)
            sink.close()
