"""The pipes of a server: from its client, to its client, and the one that wakes its main thread."""

import os
import select
import time

STDIN, STDOUT = 0, 1

READ_SIZE = 1 << 14
WRITE_SIZE = 4096
"""The bytes (PIPE_BUF on Linux) that can be written without blocking to a pipe that is reported writable."""

OUTPUT_LIMIT = 1 << 18
"""The bytes of unwritten output at which requests are no longer read, until the client reads its replies."""

LONGEST_WAIT = 86400.0
"""The longest timeout in seconds; poll has a limit of 24 days, and a setting can exceed that."""

_HUNG_UP = select.POLLHUP | select.POLLRDHUP | select.POLLERR | select.POLLNVAL
"""The events of an input that has no writer any more."""


class ClientPipes:
    """The pipes on which the main thread waits, reads and writes."""

    def __init__(self) -> None:
        self.why_end = ""
        """The reason why the client is gone; empty while it is not."""
        self.watched: set[int] = set()
        """The descriptors that wake the main thread as `wake` does; each is removed once it is readable."""
        self._output = bytearray()
        self.wake_read, self.wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._writable = select.poll()
        self._writable.register(STDOUT, select.POLLOUT)

    def wait(self, deadline: float | None) -> tuple[bytes, bool]:
        """Wait for an event, handle all that have occurred; return the client's input and whether `wake` was called.

        It returns at `deadline`, by the monotonic clock, at the latest, and sometimes without an event.
        """
        reads = len(self._output) < OUTPUT_LIMIT
        poller = select.poll()
        # A client that does not read may be gone, so watch for the end of its input even while it is not read.
        poller.register(STDIN, select.POLLIN if reads else select.POLLRDHUP)
        poller.register(STDOUT, select.POLLOUT if self._output else 0)
        for descriptor in (self.wake_read, *self.watched):
            poller.register(descriptor, select.POLLIN)
        timeout = None if deadline is None else min(max(0.0, deadline - time.monotonic()), LONGEST_WAIT) * 1000 + 1
        data, woken = b"", False
        for descriptor, events in poller.poll(timeout):
            if descriptor == STDIN:
                if reads:
                    data = self._read()
                elif events & _HUNG_UP:
                    self.why_end = "the client closed our input and does not read its replies"
            elif descriptor == self.wake_read:
                woken = True
                self._drain_wakes()
            elif descriptor in self.watched:
                woken = True
                self.watched.discard(descriptor)
            elif events & select.POLLOUT:
                self.write(b"")
            else:
                self.why_end = "the client no longer reads"
        return data, woken

    def _read(self) -> bytes:
        try:
            data = os.read(STDIN, READ_SIZE)
        except BlockingIOError:
            return b""
        except OSError as error:
            self.why_end = f"standard input failed: {error.strerror}"
            return b""
        if not data:
            self.why_end = "the client closed our input"
        return data

    def write(self, output: bytes | bytearray) -> None:
        """Write as much as possible without blocking; `wait` writes the rest."""
        self._output += output
        try:
            # The pipe is not set to non-blocking, for the client or a shell may share it. Where poll says that there is
            # room, a write of WRITE_SIZE bytes does not block.
            while self._output and any(events & select.POLLOUT for _, events in self._writable.poll(0)):
                del self._output[: os.write(STDOUT, self._output[:WRITE_SIZE])]
        except BlockingIOError:
            pass
        except OSError as error:
            self.why_end = f"standard output failed: {error.strerror}"
            self._output.clear()

    def take_unwritten(self) -> bytes:
        """Return the output that was not written so far, and forget it."""
        output, self._output = bytes(self._output), bytearray()
        return output

    def flush(self, seconds: float) -> None:
        """Write the rest of the output, for `seconds` at most."""
        end = time.monotonic() + seconds
        while self._output and (left := end - time.monotonic()) > 0:
            for _, events in self._writable.poll(left * 1000):
                if not events & select.POLLOUT:
                    return
                self.write(b"")

    def wake(self) -> None:
        """Make `wait` return; may be called in any thread."""
        try:
            os.write(self.wake_write, b"\0")
        except BlockingIOError:
            pass  # the pipe is full of wakes already

    def _drain_wakes(self) -> None:
        try:
            os.read(self.wake_read, 4096)
        except BlockingIOError:
            pass
