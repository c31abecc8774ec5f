"""``vmgahp replay``: plays the client's side of a recording to a server and shows the differences."""

import argparse
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from vmgahp.commands.arguments import add_type, seconds, tell
from vmgahp.protocol import transcript, wire
from vmgahp.protocol.client import DEADLINE, Client, ProtocolError
from vmgahp.protocol.requests import READY, Kind, Request, Requests, result_count
from vmgahp.protocol.transcript import Step, Transcript, TranscriptError, alike
from vmgahp.text import escape, redact

GRACE = 0.3
"""Seconds that the line after a wrong one is waited for: the wrong one may just be one too many."""

MOST_TOO_MANY = 8
"""Lines after a wrong one that are looked at to see whether the recorded one still comes."""

POLL = 0.2
"""Seconds between two RESULTS where no R announces anything."""

SAME, DIFFERENT, TROUBLE = 0, 1, 2
"""Exit statuses."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of ``vmgahp replay``."""
    command.description = (
        "Start COMMAND, say to it what the client says in FILE, and show where its answers differ. "
        "Figures, pids, addresses and the order in which results come are not compared."
    )
    command.add_argument("file", metavar="FILE", help="a conversation, from vmgahp record")
    command.add_argument("words", nargs="*", metavar="COMMAND", help="the server and its arguments, after --")
    command.add_argument(
        "--timeout", type=seconds, default=DEADLINE, metavar="SECONDS", help="how long an answer may take (default: 60)"
    )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="replace an attribute of the job ad, such as VM_WORKING_DIR='\"/tmp/here\"'; may be given again",
    )
    add_type(command, "", "ask for VMs of this type, in place of the recorded one")
    command.set_defaults(run=_main)
    tell(
        command,
        examples=[("vmgahp replay talk.txt -- condor_vm-gahp -f -t -M 3", "where that server answers otherwise")],
        statuses={SAME: "Nothing differs.", DIFFERENT: "Something does.", TROUBLE: "It could not be tried."},
    )


def _main(options: argparse.Namespace) -> int:
    try:
        recorded = transcript.load(options.file)
        attributes = {}
        for setting in options.set:
            name, equals, value = setting.partition("=")
            if not equals or not name.strip():
                raise ValueError(f"--set {setting}: it takes NAME=VALUE")
            attributes[name.strip()] = value.strip()
        if not options.words:
            raise ValueError("it takes a COMMAND, after --")
        if recorded.exit_status is None:
            _complain(f"{options.file} does not say how the server ended: that is not compared, and it may be cut off.")
        recorded = transcript.adapted(recorded, attributes, options.type)
        return run(recorded, options.words, options.timeout)
    except (OSError, TranscriptError, ValueError) as error:
        _complain(f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error))
        return TROUBLE


def _complain(text: str) -> None:
    sys.stderr.write(f"vmgahp replay: {escape(text)}\n")


def run(recorded: Transcript, argv: list[str], timeout: float = DEADLINE) -> int:
    """Play to a command and print the differences. Raises OSError where it cannot be started."""

    def heard(mark: str, line: str) -> None:
        if mark == transcript.STDERR:
            sys.stderr.write(f"{escape(redact(line))}\n")

    with Client(argv, os.environ, heard=heard) as client:
        replay = Replay(recorded, Pipes(client), timeout)
        differences = replay.run()
        try:
            client.finish(timeout)
        except ProtocolError:
            differences.append(Difference(0, "(the server's end)", "(it did not exit in time)"))
        else:
            status = client.process.returncode
            if recorded.exit_status not in (None, status):
                differences.append(Difference(0, f"exit {recorded.exit_status}", f"exit {status}"))
    for difference in differences:
        sys.stdout.write(difference.show() + "\n")
    if replay.unplayed:
        sys.stdout.write(f"The server said no more: {replay.unplayed} lines of the recording were not played.\n")
    return DIFFERENT if differences else SAME


class Difference(NamedTuple):
    """Where the server did not say what is recorded."""

    number: int
    """The line of the recording, 0 where it has none."""
    recorded: str | None
    said: str | None
    request: str = ""
    """What this answers."""

    def show(self) -> str:
        """For people: where, then the lines of both sides."""
        where = f"line {self.number}" if self.number else "at the end"
        shown = [f"{where}, {escape(self.request)}:" if self.request else f"{where}:"]
        if self.recorded is not None:
            shown.append(f"- {escape(self.recorded)}")
        if self.said is not None:
            shown.append(f"+ {escape(self.said)}")
        return "\n".join(shown)


class Pipes:
    """Who is played to: a process, or in tests another object with these methods."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def send(self, data: bytes) -> None:
        """Write bytes; what keeps them from being written shows when the answer is read."""
        with suppress(ProtocolError):
            self._client.write(data)

    def receive(self, timeout: float) -> str | None:
        """The next line, without its end; None where none came in `timeout` seconds, or ever will."""
        end = time.monotonic() + timeout
        try:
            while (line := self._client.next_line()) is None:
                left = end - time.monotonic()
                if self._client.ended or not self._client.pump(left) or left < 0:
                    return None
        except ProtocolError as error:
            return f"({str(error).partition('; its log:')[0]})"
        return line

    def end(self) -> None:
        """Close the server's input."""
        if self._client.process.stdin:
            self._client.process.stdin.close()


class Replay:
    """The client's side of `recorded`, played to a server; what differs is in `differences`.

    Results are compared by their request id, whenever they come. The first answer that does not come ends the
    play; `unplayed` is the number of lines that are left then.
    """

    def __init__(self, recorded: Transcript, server: Pipes, timeout: float = DEADLINE) -> None:
        self.differences: list[Difference] = []
        self.unplayed = 0
        self._steps = transcript.steps(recorded)
        self._server = server
        self._timeout = timeout
        self._requests = Requests()
        self._last_sent = ""
        self._owed: deque[Request] = deque()
        """What was sent, and is still answered in the recording."""
        self._unasked: deque[str] = deque()
        """Lines that answer nothing, the greeting first, and that were not compared yet."""
        self._results: dict[str, deque[str]] = {}
        """Results that were fetched and are not asked for yet, by request id."""
        self._unknown: set[str] = set()
        """The ids of results that no request waited for."""

    def run(self) -> list[Difference]:
        left = sum(1 + len(step.results) for step in self._steps)
        for step in self._steps:
            left -= 1 + len(step.results)
            if not self._play(step):
                self.unplayed = left
                self._server.end()
                return self.differences
        self._server.end()
        self._wait(lambda: False, self._timeout)
        for text in (*(request.reply for request in self._owed if request.reply), *self._unasked):
            self._differ(0, None, text)
        recorded = {wire.words(line.line.text)[0] for step in self._steps for line in step.results}
        for number, results in self._results.items():
            # Nobody fetched the result in the recording; here it was fetched along with another.
            if number in recorded or number in self._unknown:
                for text in results:
                    self._differ(0, None, text, "RESULTS")
        return self.differences

    def _play(self, step: Step) -> bool:
        """One step; False where the server has not said anything in time."""
        if step.is_sent():
            return self._send(step)
        if step.line.text == READY:
            return self._expect_r(step)
        return self._expect_results(step) if step.answers_results() else self._expect(step)

    # The client's lines

    def _send(self, step: Step) -> bool:
        self._last_sent, last = step.line.text, self._last_sent
        if not step.in_ad:
            if not self._owed:
                self._wait(lambda: False, 0.0)
                while self._unasked:
                    self._differ(step.line.number, None, self._unasked.popleft(), last)
            self._owed.append(Request(step.line.text))
            self._requests.sent(self._owed[-1])
        self._server.send(step.line.data)
        return True

    # The server's lines

    def _wait(self, done: Callable[[], object], timeout: float) -> bool:
        """Take in lines until `done`; False where that does not come about in time."""
        end = time.monotonic() + timeout
        while not done():
            line = self._server.receive(max(0.0, end - time.monotonic()))
            if line is None:
                return False
            self._take(line)
        return True

    def _take(self, line: str) -> None:
        if line == READY and (self._requests.ready or not self._requests.asynchronous):
            self._differ(0, None, READY, "")
        received = self._requests.received(line)
        if received.kind in (Kind.GREETING, Kind.UNASKED):
            self._unasked.append(line)
        elif received.kind is Kind.RESULT:
            number = wire.words(line)[0]
            self._results.setdefault(number, deque()).append(line)
            if received.request is None:
                self._unknown.add(number)

    def _expect(self, step: Step) -> bool:
        """Compare a reply, or a line that answers nothing; False where there is none."""
        line, answered = step.line, step.request.line if step.request is not None else ""
        request = self._owed.popleft() if step.request is not None else None
        if request is None:
            said = self._unasked.popleft() if self._wait(lambda: self._unasked, self._timeout) else None
        else:
            self._wait(lambda: request.reply is not None, self._timeout)
            said = request.reply
        if said is None:
            self._differ(line.number, line.text, None, answered)
        elif alike(said) != alike(line.text):
            self._find_again(step, said, answered)
        return said is not None

    def _find_again(self, step: Step, said: str, answered: str) -> None:
        """Decide whether a wrong line stands for the recorded one, or is one too many before it."""
        line = step.line
        wanted = alike(line.text)
        self._wait(lambda: len(self._unasked) >= MOST_TOO_MANY or wanted in map(alike, self._unasked), GRACE)
        if wanted not in map(alike, self._unasked):
            self._differ(line.number, line.text, said, answered)
            return
        while alike(said) != wanted:
            self._differ(line.number, None, said, answered)
            said = self._unasked.popleft()

    def _expect_r(self, step: Step) -> bool:
        # What it announced may have been fetched already, with a RESULTS that the recording does not have.
        if any(self._results.values()) or self._wait(lambda: self._requests.ready, self._timeout):
            return True
        self._differ(step.line.number, READY, None)
        return False

    def _expect_results(self, step: Step) -> bool:
        """Read the answer to RESULTS, and ask again until all results that are recorded here have come."""
        if not self._fetched(self._owed.popleft(), step):
            return False
        for result in step.results:
            line, text = result.line, result.line.text
            number, operation = wire.words(text)[0], result.request.operation if result.request else ""
            asked = f"CONDOR_VM_{operation} {number}"
            end = time.monotonic() + self._timeout
            while not self._results.get(number):
                left = end - time.monotonic()
                announces = self._requests.asynchronous
                announced = self._wait(lambda: self._requests.ready, left if announces else min(POLL, left))
                if left <= 0 or (announces and not announced):
                    self._differ(line.number, text, None, asked)
                    return False
                again = Request("RESULTS")
                self._requests.sent(again)
                self._server.send(b"RESULTS\r\n")
                if not self._fetched(again, step):
                    return False
            said = self._results[number].popleft()
            if alike(said, operation) != alike(text, operation):
                self._differ(line.number, text, said, asked)
        return True

    def _fetched(self, request: Request, step: Step) -> bool:
        """Read S and a number, and so many results; False where that is not what comes."""
        self._wait(lambda: request.reply is not None, self._timeout)
        said = request.reply
        if said is not None and result_count(said) is not None:
            if self._wait(lambda: not self._requests.results_left, self._timeout):
                return True
            said += f" (and {self._requests.results_left} of them did not come)"
        self._differ(step.line.number, step.line.text, said, "RESULTS")
        return False

    def _differ(self, number: int, recorded: str | None, said: str | None, request: str | None = None) -> None:
        request = self._last_sent if request is None else request
        self.differences.append(Difference(number, recorded, said, request))
