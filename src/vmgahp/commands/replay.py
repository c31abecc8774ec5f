"""Command ``vmgahp replay``: plays a recording to a server and shows the differences.

Two equivalent servers do not send identical lines: an ``R`` comes at any time, RESULTS returns what is ready, a STATUS
has figures in it. So replies and results are compared by the request that they answer, and without the parts that vary
from run to run (`alike`); an ``R`` is not compared.
"""

import argparse
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from vmgahp.commands.arguments import UsageError, add_type, seconds, tell
from vmgahp.protocol import transcript, wire
from vmgahp.protocol.client import DEADLINE, Client, ProtocolError
from vmgahp.protocol.requests import Kind, Request, Requests, RequestState, result_count
from vmgahp.protocol.transcript import CLIENT, STDERR, Line, Transcript, TranscriptError
from vmgahp.text import escape, redact

POLL = 0.2
"""The seconds between two RESULTS for a result that the server does not announce by R."""

FIGURES = ("CPUTIME", "CPUUTILIZATION", "MEMORY")
"""The words of a STATUS that must be present; their values are not compared."""
COMES_AND_GOES = ("IP", "MAC")
"""The words of a STATUS that are not compared at all, because they depend on the progress of the guest."""

SAME, DIFFERENT, TROUBLE = 0, 1, 2
"""The exit statuses."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vmgahp replay``."""
    command.description = (
        "Start COMMAND, say to it what the client says in FILE, and show where its answers differ. "
        "Figures, pids, addresses and the order in which results come are not compared."
    )
    add = command.add_argument
    add("file", metavar="FILE", help="a conversation, from vmgahp record")
    add("words", nargs="*", metavar="COMMAND", help="the server and its arguments, after --")
    text = "how long an answer may take (default: 60)"
    add("--timeout", type=seconds, default=DEADLINE, metavar="SECONDS", help=text)
    text = "replace an attribute of the job ad, such as VM_WORKING_DIR='\"/tmp/here\"'; may be given again"
    add("--set", action="append", default=[], metavar="NAME=VALUE", help=text)
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
        settings = [setting.partition("=") for setting in options.set]
        for name, equals, value in settings:
            if not equals or not name.strip():
                raise UsageError(f"--set {name}{value}: it takes NAME=VALUE")
        if not options.words:
            raise UsageError("it takes a COMMAND, after --")
        if recorded.exit_status is None:
            _complain(f"{options.file} does not say how the server ended: that is not compared, and it may be cut off.")
        attributes = {name.strip(): value.strip() for name, _, value in settings}
        return run(adapted(recorded, attributes, options.type), options.words, options.timeout)
    except OSError as error:
        _complain(f"{error.filename}: {error.strerror}")
    except TranscriptError as error:
        _complain(str(error))
    return TROUBLE


def _complain(text: str) -> None:
    sys.stderr.write(f"vmgahp replay: {escape(text)}\n")


def run(recorded: Transcript, argv: list[str], timeout: float = DEADLINE) -> int:
    """Play the recording to a command and print the differences. Raises OSError if it cannot be started."""

    def heard(mark: str, line: str) -> None:
        if mark == STDERR:
            sys.stderr.write(f"{escape(redact(line))}\n")

    with Client(argv, os.environ, heard=heard) as client:
        replay = Replay(recorded, client, timeout)
        differences = replay.run()
        try:
            client.finish(timeout)
        except ProtocolError:
            differences.append(Difference(0, "(the server's end)", "(it did not exit in time)"))
        else:
            if recorded.exit_status not in (None, status := client.process.returncode):
                differences.append(Difference(0, f"exit {recorded.exit_status}", f"exit {status}"))
    sys.stdout.writelines(f"{difference.show()}\n" for difference in differences)
    if replay.unplayed:
        sys.stdout.write(f"The server said no more: {replay.unplayed} lines of the recording were not played.\n")
    return DIFFERENT if differences else SAME


# The recording


def alike(line: str, operation: str | None = None) -> str:
    """Return a line of the server without the parts that may differ; `operation` is that of a result line.

    These are the text of the version, the values of `FIGURES` and the words of `COMES_AND_GOES` in a STATUS, and a pid,
    but for 0, which means that there is none.
    """
    if operation is None:
        before, version, _ = line.partition("$VMGahpVersion ")
        return before + version
    words = wire.words(line)
    if operation == "GETPID" and words[1:2] == ["0"] and words[2:] != ["0"] and words[-1].isdigit():
        words[2:] = ["(a pid)"]
    elif operation == "STATUS":
        names = [word.partition("=")[0] for word in words]
        known = [pair for pair in zip(names, words, strict=True) if pair[0] not in COMES_AND_GOES]
        words = [f"{name}=" if name in FIGURES else word for name, word in known]
    return " ".join(words)


def adapted(recorded: Transcript, attributes: Mapping[str, str], vm_type: str = "") -> Transcript:
    """Return the recording with attributes of the job ad set, and with another VM type.

    An attribute that the ad does not have is added at its end; names are compared without their case.
    """
    wanted = {name.lower(): f"{name} = {value}" for name, value in attributes.items()}
    if vm_type:
        wanted["jobvmtype"] = f'JobVMType = "{vm_type}"'
    missing: dict[str, str] | None = None  # the attributes that the ad has not had so far; None outside of an ad
    lines: list[Line] = []
    for line in recorded.lines:
        texts, request = [line.text], Request(line.text)
        if line.mark != CLIENT:
            pass
        elif request.command == "CLASSAD_END":
            texts, missing = [*(missing or {}).values(), line.text], None
        elif missing is not None:
            name = line.text.partition("=")[0].strip().lower()
            texts = [wanted.get(name, line.text)]
            missing.pop(name, None)
        elif request.command == "CLASSAD":
            missing = dict(wanted)
        elif request.operation == "START" and vm_type:
            texts = [f"CONDOR_VM_START {request.number} {vm_type}"]
        end = transcript.USUAL_END[line.mark]
        new = (replace(line, data=text.encode("utf-8", "surrogateescape") + end) for text in texts)
        lines += [line] if texts == [line.text] else new
    return Transcript(lines, recorded.exit_status)


# The play


class Difference(NamedTuple):
    """A line of the server that differs from the recording."""

    number: int
    """The line number in the recording, 0 if it has none."""
    recorded: str | None
    said: str | None
    request: str = ""
    """The request that the line answers."""

    def show(self) -> str:
        """Format it for people: the place, then the lines of both sides."""
        where = f"line {self.number}" if self.number else "at the end"
        sides = (("- ", self.recorded), ("+ ", self.said))
        shown = [mark + escape(text) for mark, text in sides if text is not None]
        return "\n".join([f"{where}, {escape(self.request)}:" if self.request else f"{where}:", *shown])


class Replay:
    """The client's side of a recording, played to a server.

    Both conversations are followed by the protocol's rules, so that a reply or a result is compared with that to the
    same request, in any order. The first missing answer ends the play; `unplayed` is the number of lines that are left
    then.
    """

    def __init__(self, recorded: Transcript, client: Client, timeout: float = DEADLINE) -> None:
        self.differences: list[Difference] = []
        self.unplayed = 0
        self._lines = [line for line in recorded.lines if line.mark != STDERR]
        self._client, self._timeout = client, timeout
        self._then, self._now = Requests(), client.requests
        self._sent: dict[Request, Request] = {}
        """Recorded request -> the request that was sent now."""
        self._unasked: deque[str] = deque()
        """The lines that do not answer a request, the greeting first, and that were not compared yet."""

    def run(self) -> list[Difference]:
        """Play everything, close the server's input and return the differences."""
        for number, line in enumerate(self._lines, 1):
            if line.mark == CLIENT:
                self._send(line)
            elif not self._hear(line):
                self.unplayed = len(self._lines) - number
                break
        if self._client.process.stdin:
            self._client.process.stdin.close()
        if not self.unplayed:
            self._wait(lambda: False, self._timeout)
            for recorded, sent in self._sent.items():
                if recorded.reply is None and sent.reply is not None:
                    self._differ(0, None, sent.reply, sent.line)
            self._too_many(0, "")
        return self.differences

    def _send(self, line: Line) -> None:
        if not self._now.unanswered:
            self._wait(lambda: False, 0.0)
            self._too_many(line.number, line.text)
        recorded, sent = Request(line.text), Request(line.text)
        if self._then.sent(recorded):  # a line of a job ad has no answer
            self._now.sent(sent)
            self._sent[recorded] = sent
        self._write(line.data)

    def _write(self, data: bytes) -> None:
        with suppress(ProtocolError):  # it shows when the answer is read
            self._client.write(data, self._timeout)

    def _hear(self, line: Line) -> bool:
        """Compare a recorded line of the server with its present answer; False if that does not come in time."""
        received = self._then.received(line.text)
        sent = self._sent[received.request] if received.request is not None else None
        operation, asked, said = None, "", None
        if received.kind is Kind.READY:
            return True
        if sent is None:
            if self._wait(lambda: self._unasked, self._timeout):
                said = self._unasked.popleft()
        elif received.kind is Kind.RESULT:
            operation, asked = sent.operation, f"CONDOR_VM_{sent.operation} {sent.number}"
            if sent.state is RequestState.REFUSED:
                return True  # that was a difference
            if self._fetch(sent):
                said = " ".join(map(wire.escape, (str(sent.number), *sent.result)))
        else:
            asked = sent.line
            self._wait(lambda: sent.reply is not None and not self._now.results_left, self._timeout)
            said = sent.reply
            if None not in (result_count(line.text), result_count(said or "")) and not self._now.results_left:
                return True  # the number of results is not compared
        if said is None or alike(said, operation) != alike(line.text, operation):
            self._differ(line.number, line.text, said, asked)
        return said is not None

    def _fetch(self, request: Request) -> bool:
        """Send RESULTS until the result of `request` has come; False if it does not come in time."""
        end = time.monotonic() + self._timeout
        while request.state is not RequestState.FINISHED:
            self._wait(lambda: self._now.ready, POLL)
            self._now.sent(Request("RESULTS"))
            self._write(b"RESULTS\r\n")
            left = end - time.monotonic()
            if not self._wait(lambda: not (self._now.unanswered or self._now.results_left), left):
                return False
        return True

    def _wait(self, done: Callable[[], object], timeout: float) -> bool:
        """Read lines until `done` is true; False if that does not happen in time."""
        end = time.monotonic() + timeout
        while not done():
            try:
                received = self._client.receive(max(0.0, end - time.monotonic()))
            except ProtocolError:
                return False
            stray = received.kind is Kind.RESULT and received.request is None
            if stray or received.kind in (Kind.GREETING, Kind.UNASKED):
                self._unasked.append(received.line)
        return True

    def _too_many(self, number: int, before: str) -> None:
        while self._unasked:
            self._differ(number, None, self._unasked.popleft(), f"before {before}" if before else "")

    def _differ(self, number: int, recorded: str | None, said: str | None, request: str) -> None:
        self.differences.append(Difference(number, recorded, said, request))
