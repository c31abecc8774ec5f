"""A client that starts a server and talks to it as condor_starter talks to its vm-gahp.

`vmgahp.protocol.requests` classifies each line. The client behaves as the real one does: lines end with CR LF, every
request waits for its reply, and results are fetched when an R announces them. Every wait has a timeout, and there are
no threads: a caller that has something else to watch, such as a terminal, polls `Client.descriptors` too and calls
`Client.pump`.
"""

import os
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

from vmgahp.protocol import wire
from vmgahp.protocol.requests import Received, Requests

DEADLINE = 60.0
"""The default timeout in seconds of one answer, one result or the server's exit."""

MOST_LOG = 4 << 20
"""The most bytes of the server's standard error that are kept; the oldest go first."""

_IDLE = 0.1  # seconds


class ProtocolError(Exception):
    """A line from the server that the real client would not accept, or a timeout."""


class Client:
    """A server process and the conversation with it; a ``with`` statement kills the process at the latest.

    The server is the leader of a process group of its own, so that it ends with all its helpers, and a ^C at the
    terminal reaches the client only. Its standard error goes to `log`, or without one is kept for `errors`. The
    callback `heard` gets each line with a mark: ``>`` if it was sent, ``<`` if the server answered it, ``!`` if it is
    from standard error and that is kept; bytes that are not UTF-8 become surrogates. The callback `idle` is called
    about ten times a second while there is nothing to read.

    Raises OSError if the command cannot be started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        log: IO[str] | IO[bytes] | None = None,
        heard: Callable[[str, str], None] | None = None,
        idle: Callable[[], None] | None = None,
    ) -> None:
        self.requests = Requests()
        """The requests that a caller counts; `send` and `write` add nothing here."""
        self.ended = False
        self._heard = heard or (lambda _mark, _line: None)
        self._idle = idle
        self._reader = wire.LineReader()
        self._lines: deque[str] = deque()
        self._log = bytearray()
        self._log_line = b""
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if log is None else log,
            env=None if environ is None else dict(environ),
            cwd=cwd,
            bufsize=0,
            process_group=0,
        )
        assert self.process.stdin is not None
        self._input = self.process.stdin
        os.set_blocking(self._input.fileno(), False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()
        self._close()

    # Bytes

    def descriptors(self) -> list[int]:
        """Return the descriptors to poll: the server's output and, if kept, its standard error, until closed."""
        streams = (None if self.ended else self.process.stdout, self.process.stderr)
        return [stream.fileno() for stream in streams if stream is not None and not stream.closed]

    def pump(self, timeout: float = 0.0, *, writing: bool = False) -> bool:
        """Read the server's output, or wait for it, or for room to write; return False on a timeout."""
        poller = select.poll()
        for descriptor in self.descriptors():
            poller.register(descriptor, select.POLLIN)
        if writing:
            poller.register(self._input.fileno(), select.POLLOUT)
        events = poller.poll(max(0.0, timeout) * 1000)
        for descriptor, event in events:
            if event & (select.POLLIN | select.POLLHUP | select.POLLERR):
                self._take(descriptor)
        return bool(events)

    def _take(self, descriptor: int) -> None:
        out, err = self.process.stdout, self.process.stderr
        if out is not None and not out.closed and descriptor == out.fileno():
            data = os.read(descriptor, 65536)
            self.ended = not data
            self._reader.receive(data)
            while (line := self._reader.next_line()) is not None:
                if line is wire.TOO_LONG:
                    raise ProtocolError(f"the server's line is longer than {wire.MAX_REQUEST} bytes")
                self._lines.append(line.decode("utf-8", "surrogateescape"))
                self._heard("<", self._lines[-1])
        elif err is not None and not err.closed and descriptor == err.fileno():
            data = os.read(descriptor, 65536)
            if not data:
                err.close()
            self._log += data
            del self._log[:-MOST_LOG]
            *lines, rest = (self._log_line + data).split(b"\n")
            self._log_line = rest[-wire.MAX_REQUEST :]
            for line in lines:
                self._heard("!", line.decode("utf-8", "surrogateescape"))

    def _last_words(self) -> str:
        return f"; its log:\n{self.errors()}" if self._log else ""

    def errors(self) -> str:
        """Return the server's standard error so far, if it is kept."""
        return self._log.decode("utf-8", "replace")

    # Lines

    def send(self, line: str | bytes, timeout: float = DEADLINE) -> None:
        """Write one line and its line end, without waiting for an answer."""
        data = line.encode("utf-8", "surrogateescape") if isinstance(line, str) else line
        self._heard(">", data.decode("utf-8", "surrogateescape"))
        self.write(data + b"\r\n", timeout)

    def write(self, data: bytes, timeout: float = DEADLINE) -> None:
        """Write bytes as they are; read the server's output meanwhile."""
        end = time.monotonic() + timeout
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._input.fileno(), rest) :]
            except BlockingIOError:
                left = end - time.monotonic()
                if left <= 0:
                    raise ProtocolError(f"the server read nothing in {timeout:g} s") from None
                self.pump(left, writing=True)
            except (BrokenPipeError, ValueError):
                raise ProtocolError(f"the server no longer reads{self._last_words()}") from None

    def next_line(self) -> str | None:
        """Return the next line that has arrived already, or None."""
        return self._lines.popleft() if self._lines else None

    def read_line(self, timeout: float = DEADLINE) -> str:
        """Wait for the next line, of any kind."""
        end = time.monotonic() + timeout
        while not self._lines:
            if self.ended:
                self._await_exit(end)
                status = self.process.returncode
                raise ProtocolError(f"the server ended its output (exit {status}){self._last_words()}")
            left = end - time.monotonic()
            if left <= 0:
                raise ProtocolError(f"no line from the server in {timeout:g} s{self._last_words()}")
            if self._idle is not None:
                self._idle()
                left = min(left, _IDLE)
            self.pump(left)
        return self._lines.popleft()

    def receive(self, timeout: float = DEADLINE) -> Received:
        """Wait for the next line, and classify it."""
        return self.requests.received(self.read_line(timeout))

    # The end

    def finish(self, timeout: float = DEADLINE) -> str:
        """Close the server's input, which makes it destroy its VMs and exit; return its log as `errors` does."""
        self._input.close()
        return self._end(timeout)

    def _end(self, timeout: float) -> str:
        self._await_exit(time.monotonic() + timeout)
        self._close()
        return self.errors()

    def kill(self) -> None:
        """Kill the server and the rest of its process group, and wait for its exit."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def _await_exit(self, end: float) -> None:
        exited = os.pidfd_open(self.process.pid) if self.process.returncode is None else -1
        try:
            while self.process.poll() is None:
                left = end - time.monotonic()
                if left <= 0:
                    self.kill()
                    raise ProtocolError(f"the server did not exit in time{self._last_words()}")
                poller = select.poll()
                for descriptor in (exited, *self.descriptors()):
                    poller.register(descriptor, select.POLLIN)
                poller.poll(left * 1000)
                self.pump()
        finally:
            if exited >= 0:
                os.close(exited)
        # Other processes may still write to its pipes: read no more than pipes can hold.
        for _ in range(MOST_LOG >> 16):
            if not (self.descriptors() and self.pump()):
                break

    def _close(self) -> None:
        for stream in (self._input, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self.ended = True
