"""``vmgahp replay --as-server``: plays a recorded server to a client.

It can be VM_GAHP_SERVER, or the other end of a test: each recorded line of the client is waited for, and what
the server wrote after it is written. The first line that is another one ends it.
"""

import os
import select
import sys
import time

from vmgahp.protocol import transcript_rules, wire
from vmgahp.protocol.transcript import CLIENT, STDERR, Line, Transcript
from vmgahp.protocol.transcript_rules import Difference, Step, command, request_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

REQUEST_DEADLINE = 600.0
"""Seconds that the next request is waited for: condor_starter may be silent for minutes (VM_STATUS_INTERVAL)."""

CLOSED = "(the end of input)"
SILENT = "(nothing in time)"


def run(recorded: Transcript, *, exact: bool = False, paced: bool = False, timeout: float = 0.0) -> int:
    """Play on standard input and output: the recorded exit status, or 1 after a difference, told on stderr."""
    stand_in = StandIn(recorded, _Pipe(0).read_line, _write, exact=exact, paced=paced, timeout=timeout)
    difference = stand_in.run()
    if difference is None:
        return max(0, recorded.exit_status or 0)
    sys.stderr.write(difference.show() + "\n")
    return 1


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


class _Pipe:
    """Lines from a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._reader = wire.LineReader()

    def read_line(self, timeout: float) -> str:
        """The next line as the server understands it, or `CLOSED`, or `SILENT` after `timeout` seconds."""
        end = time.monotonic() + timeout
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN)
        while (line := self._reader.next_line()) is None:
            if not poller.poll(max(0.0, end - time.monotonic()) * 1000):
                return SILENT
            data = os.read(self._descriptor, 65536)
            if not data:
                return CLOSED
            self._reader.feed(data)
        return line.decode("utf-8", "surrogateescape")


class StandIn:
    """The server's side of `recorded`. `read_line` may take so many seconds, `write` takes bytes.

    Unless `exact`, the client may number its requests as it likes, and its job ad is not looked at.
    """

    def __init__(
        self,
        recorded: Transcript,
        read_line: "Callable[[float], str]",
        write: "Callable[[bytes], None]",
        *,
        exact: bool = False,
        paced: bool = False,
        timeout: float = 0.0,
    ) -> None:
        self._recorded = recorded
        self._read_line = read_line
        self._write = write
        self._exact = exact
        self._paced = paced
        self._timeout = timeout or REQUEST_DEADLINE
        self._ids: dict[str, str] = {}
        """The client's request ids, by the recorded ones."""
        self._last_at: float | None = None

    def run(self) -> Difference | None:
        """Play until the end, or the first difference."""
        quits = False
        for step in self._steps():
            if not step.is_sent():
                try:
                    self._say(step)
                except BrokenPipeError:
                    return Difference(step.line.number, None, "(it no longer reads)", step.line.text)
            elif not step.in_ad:
                quits = command(step.line.text) == b"QUIT"
                said = self._hear(step.line)
                if said is not None:
                    return Difference(step.line.number, step.line.text, said)
            self._last_at = step.line.at
        if not quits:
            said = self._read_line(self._timeout)
            if said != CLOSED:
                return Difference(0, CLOSED, said)
        return None

    def _steps(self) -> "Iterable[Step]":
        if self._exact:
            return [Step(line) for line in self._recorded.lines if line.mark != STDERR]
        return transcript_rules.steps(self._recorded)

    def _say(self, step: Step) -> None:
        if self._paced and step.line.at is not None and self._last_at is not None:
            time.sleep(max(0.0, step.line.at - self._last_at))
        data = step.line.data
        for line in step.results:
            request_id = wire.words(line.text)[0]
            ours = self._ids.get(request_id, request_id).encode("utf-8", "surrogateescape")
            data += ours + line.data[len(request_id.encode("utf-8", "surrogateescape")) :]
        self._write(data)

    def _hear(self, line: Line) -> str | None:
        """Wait for the client's line: None for the recorded one, else what came instead."""
        assert line.mark == CLIENT
        said = self._read_line(self._timeout)
        if not self._exact and line.text.upper() == "CLASSAD_END":
            while said.upper() != "CLASSAD_END" and said not in (CLOSED, SILENT):
                said = self._read_line(self._timeout)
        return None if said == line.text or (not self._exact and self._is_alike(line.text, said)) else said

    def _is_alike(self, recorded: str, said: str) -> bool:
        wanted, asked = request_of(recorded), request_of(said)
        if wanted is None or asked is None:
            return recorded.upper() == said.upper()
        self._ids[wanted[0]] = asked[0]
        return wanted[1] == asked[1] and wanted[2].upper() == asked[2].upper()
