"""Command ``vmgahp replay``: plays a recording to a server and shows the differences.

Two equivalent servers do not send identical lines: an ``R`` comes at any time, RESULTS returns what is ready, a STATUS
has figures in it. So replies and results are compared by the request that they answer, and without the parts that vary
from run to run (`alike`); an ``R`` is not compared.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import zip_longest
from typing import NamedTuple

from vmgahp.commands.arguments import add_type, assignment, seconds, tell
from vmgahp.protocol import transcript, wire
from vmgahp.protocol.client import DEADLINE, Client, ProtocolError
from vmgahp.protocol.requests import Kind, Request, Requests, RequestState, result_count
from vmgahp.protocol.transcript import CLIENT, STDERR, Line, Transcript, TranscriptError
from vmgahp.text import escape, redact

FIGURES = ("CPUTIME", "CPUUTILIZATION", "MEMORY")
"""The words of a STATUS that must be present; their values are not compared."""
COMES_AND_GOES = ("IP", "MAC")
"""The words of a STATUS that are not compared at all, because they depend on the progress of the guest."""

SAME, DIFFERENT, TROUBLE = 0, 1, 2
"""The exit statuses."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Start COMMAND, say to it what the client says in FILE, and show where its answers differ. Figures, pids,
    addresses and the order in which results come are not compared."""
    add = command.add_argument
    add("file", metavar="FILE", help="a conversation, from vmgahp record")
    add("words", nargs="+", metavar="COMMAND", help="the server and its arguments, after --")
    text = "how long an answer may take (default: 60)"
    add("--timeout", type=seconds, default=DEADLINE, metavar="SECONDS", help=text)
    text = "replace an attribute of the job ad, such as VM_WORKING_DIR='\"/tmp/here\"'; may be given again"
    add("--set", action="append", type=assignment, default=[], metavar="NAME=VALUE", help=text)
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
        if recorded.exit_status is None:
            _complain(f"{options.file} does not say how the server ended: that is not compared, and it may be cut off.")
        return run(adapted(recorded, dict(options.set), options.type), options.words, options.timeout)
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
            differences.append(Difference("the server's end", None, "it did not exit in time"))
        else:
            if recorded.exit_status not in (None, status := client.process.returncode):
                differences.append(Difference("the server's end", f"exit {recorded.exit_status}", f"exit {status}"))
    sys.stdout.writelines(f"{difference.show()}\n" for difference in differences)
    if replay.unplayed:
        sys.stdout.write(f"The server said no more: {replay.unplayed} lines of the recording were not played.\n")
    return DIFFERENT if differences else SAME


# The recording


def alike(line: str, operation: str = "") -> str:
    """Return a line of the server without the parts that may differ; `operation` is that of a result line.

    These are the text of the version, the values of `FIGURES` and the words of `COMES_AND_GOES` in a STATUS, and a pid,
    but for 0, which means that there is none.
    """
    if not operation:
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
    """Return the recording with attributes set at the end of the job ad, in any case, and with another VM type."""
    wanted = {"jobvmtype": f'JobVMType = "{vm_type}"'} if vm_type else {}
    wanted |= {name.lower(): f"{name} = {value}" for name, value in attributes.items()}
    lines: list[Line] = []
    in_ad = False
    for line in recorded.lines:
        request = Request(line.text)
        if line.mark != CLIENT:
            lines.append(line)
        elif request.command == "CLASSAD_END":
            lines += [*map(_sent, wanted.values() if in_ad else ()), line]
            in_ad = False
        elif in_ad:
            lines += [line] if line.text.partition("=")[0].strip().lower() not in wanted else []
        else:
            in_ad = request.command == "CLASSAD"
            is_start = vm_type and request.operation == "START"
            lines.append(_sent(f"CONDOR_VM_START {request.number} {vm_type}") if is_start else line)
    return Transcript(lines, recorded.exit_status)


def _sent(text: str) -> Line:
    return Line(CLIENT, text.encode("utf-8", "surrogateescape") + transcript.USUAL_END[CLIENT])


# The play


class Difference(NamedTuple):
    """An answer of the server that differs from the recorded one."""

    request: str
    """The request that is answered; empty for a line that answers none."""
    recorded: str | None
    said: str | None

    def show(self) -> str:
        """Format it for people: the request, then the lines of both sides."""
        sides = (("- ", self.recorded), ("+ ", self.said))
        shown = [mark + escape(text) for mark, text in sides if text is not None]
        return "\n".join([f"{escape(self.request) or 'no request'}:", *shown])


class Replay:
    """The client's side of a recording, played to a server.

    The first missing answer ends the play; `unplayed` is the number of lines that are left then.
    """

    def __init__(self, recorded: Transcript, client: Client, timeout: float = DEADLINE) -> None:
        self.unplayed = 0
        self._lines = [line for line in recorded.lines if line.mark != STDERR]
        self._client, self._timeout = client, timeout
        self._then, self._now = Requests(), client.requests
        self._sent: dict[Request, Request] = {}
        """Recorded request -> the request that was sent now."""
        self._unasked_then: list[str] = []
        self._unasked_now: list[str] = []
        """The lines that do not answer a request, the greeting first."""

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
        found = [("", *both, "") for both in zip_longest(self._unasked_then, self._unasked_now)]
        for recorded, sent in self._sent.items():
            has_counts = None not in (result_count(recorded.reply or ""), result_count(sent.reply or ""))
            if not has_counts and (recorded.reply is not None or not self.unplayed):
                found.append((sent.line, recorded.reply, sent.reply, ""))
            if recorded.result and sent.state is not RequestState.REFUSED:  # which is a difference already
                found.append((sent.line, _result(recorded), _result(sent), sent.operation))
        return [Difference(*row) for *row, of in found if alike(row[1] or "", of) != alike(row[2] or "", of)]

    def _send(self, line: Line) -> None:
        if not self._now.unanswered:
            self._wait(lambda: False, 0.0)  # what comes before a request does not answer it
        recorded, sent = Request(line.text), Request(line.text)
        if self._then.sent(recorded):  # a line of a job ad has no answer
            self._now.sent(sent)
            self._sent[recorded] = sent
        self._write(line.data)

    def _write(self, data: bytes) -> None:
        with suppress(ProtocolError):  # it shows when the answer is read
            self._client.write(data, self._timeout)

    def _hear(self, line: Line) -> bool:
        """Wait for the present answer of a recorded one, whatever it says; False if it does not come in time."""
        received = self._then.received(line.text)
        if received.kind is Kind.READY:
            return True
        if received.request is None:
            self._unasked_then.append(line.text)
            return self._wait(lambda: len(self._unasked_now) >= len(self._unasked_then), self._timeout)
        sent = self._sent[received.request]
        if received.kind is Kind.RESULT:
            return sent.state is RequestState.REFUSED or self._fetch(sent)
        self._wait(lambda: sent.reply is not None and not self._now.results_left, self._timeout)
        return sent.reply is not None

    def _fetch(self, request: Request) -> bool:
        """Send RESULTS until the result of `request` has come; False if it does not come in time."""
        end = time.monotonic() + self._timeout
        while request.state is not RequestState.FINISHED:
            self._wait(lambda: self._now.ready, 0.2)  # the server may not announce it by R
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
                self._unasked_now.append(received.line)
        return True


def _result(request: Request) -> str | None:
    return " ".join(map(wire.escape, (str(request.number), *request.result))) if request.result else None
