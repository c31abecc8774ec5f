"""The client's side of the protocol, as condor_starter speaks it, over a command's pipes.

It keeps to what the real client does: lines end with CR LF, every request waits for its one reply line, an
``R`` may come between any two lines, and results are fetched with RESULTS and split at unescaped spaces. It
waits for nothing without an end, and has no threads: whoever has to watch something else at the same time, a
terminal say, watches `Client.descriptors` too and calls `Client.pump`.
"""

import os
import select
import signal
import subprocess
import time
from collections import deque

from vmgahp.protocol import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from typing import IO, Self

DEADLINE = 60.0
"""Seconds that one answer, one result or the server's end may take, unless the caller says otherwise."""

MOST_LOG = 4 << 20
"""Bytes of the server's standard error that are kept; the oldest go first."""

PREFIX = "CONDOR_VM_"
"""What the commands that take a request id begin with; callers leave it out."""

_IDLE = 0.1
"""Seconds between two calls of `idle`."""


class ProtocolError(Exception):
    """The server said something that the real client would not take, or nothing in time."""


class Client:
    """A server process and the conversation with it; in a ``with`` it is killed at the latest.

    The server is the leader of a process group of its own, so that it ends with all its helpers and a ^C at
    the terminal is the client's alone. What it says on standard error goes to `log`, or is kept for
    `errors` where there is none. `heard` is called with ``>``, ``<`` or ``!`` and the line as lines go by (what
    was sent, what the server answered, what it said on standard error where that is kept); bytes that are not
    UTF-8 are surrogates in it. `idle` is called about ten times a second while there is nothing to read.

    Raises OSError where the command cannot be started.
    """

    def __init__(
        self,
        argv: "Sequence[str]",
        environ: "Mapping[str, str] | None" = None,
        cwd: "str | Path | None" = None,
        log: "IO[str] | IO[bytes] | None" = None,
        heard: "Callable[[str, str], None] | None" = None,
        idle: "Callable[[], None] | None" = None,
    ) -> None:
        self.ready = False
        """Whether an ``R`` has come since the last RESULTS."""
        self.ended = False
        """Whether the server has closed its output."""
        self._outcomes: dict[int, list[str]] = {}
        self._last_id = 0
        self._heard = heard
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
        os.set_blocking(self.process.stdin.fileno(), False)

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()
        self._close()

    # Bytes

    def descriptors(self) -> list[int]:
        """What to wait for: the server's output and, where it is kept, its standard error, while they last."""
        streams = (None if self.ended else self.process.stdout, self.process.stderr)
        return [stream.fileno() for stream in streams if stream is not None and not stream.closed]

    def pump(self, timeout: float = 0.0, *, writing: bool = False) -> bool:
        """Wait until the server says something, for `timeout` seconds at most, and take it in.

        With `writing`, room for more input ends the wait too. False where nothing happened.
        """
        poller = select.poll()
        for descriptor in self.descriptors():
            poller.register(descriptor, select.POLLIN)
        if writing:
            assert self.process.stdin is not None
            poller.register(self.process.stdin.fileno(), select.POLLOUT)
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
            self._reader.feed(data)
            while (line := self._reader.next_line()) is not None:
                if line is wire.TOO_LONG:
                    raise ProtocolError(f"the server's line is longer than {wire.MAX_REQUEST} bytes")
                self._lines.append(line.decode("utf-8", "surrogateescape"))
                self._tell("<", self._lines[-1])
        elif err is not None and not err.closed and descriptor == err.fileno():
            data = os.read(descriptor, 65536)
            if not data:
                err.close()
            self._log += data
            del self._log[:-MOST_LOG]
            *lines, self._log_line = (self._log_line + data).split(b"\n")
            self._log_line = self._log_line[-wire.MAX_REQUEST :]
            for line in lines:
                self._tell("!", line.decode("utf-8", "surrogateescape"))

    def _tell(self, mark: str, line: str) -> None:
        if self._heard is not None:
            self._heard(mark, line)

    def _wait(self, end: float, what: str) -> None:
        """Wait for more of the server until the monotonic clock shows `end`."""
        left = end - time.monotonic()
        if left <= 0:
            raise ProtocolError(f"{what}{self._last_words()}")
        if self._idle is not None:
            self._idle()
            left = min(left, _IDLE)
        self.pump(left)

    def _last_words(self) -> str:
        return f"; its log:\n{self.errors()}" if self._log else ""

    def errors(self) -> str:
        """What the server has said on standard error so far, where that is kept."""
        return self._log.decode("utf-8", "replace")

    # Lines

    def send(self, line: str | bytes, timeout: float = DEADLINE) -> None:
        """Write one line, and its end."""
        data = line.encode("utf-8", "surrogateescape") if isinstance(line, str) else line
        if self._heard is not None:
            self._tell(">", data.decode("utf-8", "surrogateescape"))
        self.write(data + b"\r\n", timeout)

    def write(self, data: bytes, timeout: float = DEADLINE) -> None:
        """Write bytes as they are, and take in meanwhile what the server says."""
        assert self.process.stdin is not None
        end = time.monotonic() + timeout
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self.process.stdin.fileno(), rest) :]
            except BlockingIOError:
                left = end - time.monotonic()
                if left <= 0:
                    raise ProtocolError(f"the server read nothing in {timeout:g} s") from None
                self.pump(left, writing=True)
            except (BrokenPipeError, ValueError):
                raise ProtocolError(f"the server no longer reads{self._last_words()}") from None

    def next_line(self) -> str | None:
        """A line that has come already, an ``R`` included; None where there is none."""
        return self._lines.popleft() if self._lines else None

    def read_line(self, timeout: float = DEADLINE) -> str:
        """The next line, whatever it is."""
        end = time.monotonic() + timeout
        while not self._lines:
            if self.ended:
                self._await_exit(end)
                status = self.process.returncode
                raise ProtocolError(f"the server ended its output (exit {status}){self._last_words()}")
            self._wait(end, f"no line from the server in {timeout:g} s")
        return self._lines.popleft()

    def line(self, timeout: float = DEADLINE) -> str:
        """The next line that is no ``R``, which only is kept in mind, as `ready`."""
        end = time.monotonic() + timeout
        while (line := self.read_line(max(0.0, end - time.monotonic()))) == "R":
            self.ready = True
        return line

    def wait_for_r(self, timeout: float = DEADLINE) -> None:
        """Wait until results are ready, unless it is known that they are."""
        while not self.ready:
            line = self.read_line(timeout)
            if line != "R":
                raise ProtocolError(f"the server spoke without being asked, and it was no R: {line!r}")
            self.ready = True

    # Requests

    def greeting(self, timeout: float = DEADLINE) -> str:
        """The line that comes before any request."""
        line = self.read_line(timeout)
        if not line.startswith("$VMGahpVersion "):
            raise ProtocolError(f"this is no greeting: {line!r}")
        return line

    def ask(self, line: str) -> str:
        """Send a request: its reply line as it is."""
        self.send(line)
        return self.line()

    def say(self, line: str) -> list[str]:
        """Send a request that has to be accepted: the words after the ``S`` of its reply."""
        reply = self.ask(line)
        accepted, *rest = wire.words(reply)
        if accepted != "S":
            raise ProtocolError(f"{line!r} was answered {reply!r}")
        return rest

    def send_ad(self, *lines: str) -> None:
        """The CLASSAD block: only its ends are answered."""
        self.say("CLASSAD")
        for line in lines:
            self.send(line)
        self.say("CLASSAD_END")

    def request(self, command: str, argument: object) -> int:
        """Send a request such as STATUS, without waiting for its result: its request id."""
        self._last_id += 1
        self.say(f"{PREFIX}{command} {self._last_id} {argument}")
        return self._last_id

    def results(self) -> list[str]:
        """RESULTS, which also re-arms the ``R``: the result lines as they are."""
        [count] = self.say("RESULTS")
        self.ready = False
        return [self.line() for _ in range(int(count))]

    def outcome(self, request_id: int, timeout: float = DEADLINE) -> list[str]:
        """Wait for a result: the words after the request id. Results of other requests are kept."""
        end = time.monotonic() + timeout
        while request_id not in self._outcomes:
            self.wait_for_r(max(0.0, end - time.monotonic()))
            for line in self.results():
                number, *words = wire.words(line)
                self._outcomes[int(number)] = words
        return self._outcomes.pop(request_id)

    def run(self, command: str, argument: object, timeout: float = DEADLINE) -> list[str]:
        """Send a request and wait for its result: the words after the request id."""
        return self.outcome(self.request(command, argument), timeout)

    def call(self, command: str, argument: object, timeout: float = DEADLINE) -> str:
        """Send a request that has to succeed: the words of its result. Raises `ProtocolError` if it failed."""
        success, *words = self.run(command, argument, timeout)
        if success != "0":
            raise ProtocolError(f"{command} failed: {' '.join(words)}")
        return " ".join(words)

    # The end

    def quit(self, timeout: float = DEADLINE) -> str:
        """QUIT, and the server's good end: its log, as `errors`."""
        self.say("QUIT")
        log = self.finish(timeout)
        if self.process.returncode:
            raise ProtocolError(f"the server's exit status is {self.process.returncode}{self._last_words()}")
        return log

    def finish(self, timeout: float = DEADLINE) -> str:
        """End of input, which makes any server destroy its machines and exit: its log, as `errors`."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._await_exit(time.monotonic() + timeout)
        self._close()
        return self.errors()

    def end_by(self, number: int, timeout: float = DEADLINE) -> str:
        """End the server, and it alone, by a signal: its log, as `errors`."""
        self.process.send_signal(number)
        self._await_exit(time.monotonic() + timeout)
        self._close()
        return self.errors()

    def kill(self) -> None:
        """Kill the server and what is left of its process group, and wait for its end."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.kill()
        self.process.wait()

    def _await_exit(self, end: float) -> None:
        """Wait until the server has exited, and take in all that it said."""
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
        # Others may still have its pipes and write on and on: no more is taken than what pipes can hold.
        for _ in range(MOST_LOG >> 16):
            if not (self.descriptors() and self.pump()):
                break

    def _close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self.ended = True
