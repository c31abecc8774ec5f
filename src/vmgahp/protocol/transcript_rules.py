"""What in a recorded conversation is compared, and how: the rules that both sides of a replay share.

Two servers that mean the same do not say the same: an ``R`` comes when it comes, RESULTS finds what is ready,
a STATUS has figures in it. So a recording is read as what the protocol makes of it (`steps`), and what varies
from run to run is left out of the comparison (`alike`). The rules are told in docs/reference/transcripts.md.
"""

from collections import deque
from dataclasses import replace
from typing import NamedTuple

from vmgahp.protocol import wire
from vmgahp.protocol.transcript import CLIENT, SERVER, USUAL_END, Line, Transcript
from vmgahp.text import escape

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

READY = "R"
PREFIX = b"CONDOR_VM_"

FIGURES = ("CPUTIME", "CPUUTILIZATION", "MEMORY")
"""Words of a STATUS that must be there; their values are not compared."""

COMES_AND_GOES = ("IP", "MAC")
"""Words of a STATUS that are not compared at all: they depend on how far the guest has come."""


class Step(NamedTuple):
    """One line of a recording, and what it is to the protocol."""

    line: Line
    in_ad: bool = False
    """Of a line of the client: whether it belongs to the job ad."""
    request: str = ""
    """Of a line of the server: the request that it answers, if any."""
    results: tuple[Line, ...] = ()
    """The result lines after an answer to RESULTS."""

    def is_sent(self) -> bool:
        return self.line.mark == CLIENT

    def answers_results(self) -> bool:
        """Whether this is the answer to RESULTS that says how many there are."""
        return command(self.request) == b"RESULTS" and is_count(self.line.text)


class Difference(NamedTuple):
    """Where the other side did not say what is recorded."""

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


def command(request: str) -> bytes:
    """The command word of a request, in capitals."""
    return wire.split(request.encode("utf-8", "surrogateescape"))[0].upper()


def is_count(answer: str) -> bool:
    """Whether an answer is ``S`` and a number, as that of RESULTS."""
    return answer.startswith("S ") and answer[2:].isascii() and answer[2:].isdigit()


def steps(recorded: Transcript) -> "Iterator[Step]":
    """The conversation, with each answer put to its request and the result lines to their RESULTS."""
    unanswered: deque[str] = deque()
    in_ad = False
    lines = deque(line for line in recorded.lines if line.mark in (CLIENT, SERVER))
    while lines:
        line = lines.popleft()
        if line.mark == CLIENT:
            ends = in_ad and line.text.upper() == "CLASSAD_END"
            yield Step(line, in_ad=in_ad and not ends)
            if not in_ad or ends:
                unanswered.append(line.text)
                in_ad = command(line.text) == b"CLASSAD"
        elif line.text == READY or not unanswered:
            yield Step(line)
        else:
            step = Step(line, request=unanswered.popleft())
            if step.answers_results():
                count = min(int(line.text[2:]), len(lines))
                step = step._replace(results=tuple(lines.popleft() for _ in range(count)))
            yield step


def request_of(text: str) -> tuple[str, bytes, bytes] | None:
    """The request id, the operation (``STATUS``) and the argument of a request that has them."""
    words = wire.split(text.encode("utf-8", "surrogateescape"))
    if len(words) != 3 or not words[0].upper().startswith(PREFIX):
        return None
    return words[1].decode("utf-8", "surrogateescape"), words[0].upper()[len(PREFIX) :], words[2]


def alike(line: str, operation: bytes | None = None) -> str:
    """A line of the server without what may differ; `operation` is that of a result line.

    ======== ===========================================================================================
    anywhere the text of the version
    STATUS   the values of `FIGURES`; the words of `COMES_AND_GOES`
    GETPID   which pid; 0 remains, because it says that there is none
    ======== ===========================================================================================
    """
    if operation is None:
        before, version, _ = line.partition("$VMGahpVersion ")
        return before + version
    words = wire.words(line)
    if operation == b"GETPID" and words[1:2] == ["0"] and words[2:] != ["0"] and words[-1].isdigit():
        words[2:] = ["(a pid)"]
    elif operation == b"STATUS":
        named = [(word.partition("=")[0], word) for word in words]
        words = [
            f"{name}=(a figure)" if name in FIGURES else word
            for name, word in named
            if name not in COMES_AND_GOES
        ]
    return " ".join(words)


def adapted(recorded: Transcript, attributes: "Mapping[str, str]", vm_type: str = "") -> Transcript:
    """The recording for another place: attributes of the job ad set, and another VM type asked for.

    An attribute that the ad does not have is added at its end; names are compared without their case.
    """
    wanted = {name.lower(): f"{name} = {value}" for name, value in attributes.items()}
    if vm_type:
        wanted["jobvmtype"] = f'JobVMType = "{vm_type}"'
    lines: list[Line] = []
    missing: dict[str, str] = {}
    for step in steps(recorded):
        line = step.line
        text = line.text
        if step.in_ad:
            name = text.partition("=")[0].strip().lower()
            text = wanted.get(name, text)
            missing.pop(name, None)
        elif step.is_sent() and command(text) == b"CLASSAD":
            missing = dict(wanted)
        elif step.is_sent() and command(text) == b"CLASSAD_END":
            lines += [_said(line, added) for added in missing.values()]
            missing = {}
        elif step.is_sent() and vm_type and (asked := request_of(text)) and asked[1] == b"START":
            text = f"CONDOR_VM_START {asked[0]} {vm_type}"
        lines.append(line if text == line.text else _said(line, text))
        lines += step.results
    return Transcript(lines, recorded.exit_status)


def _said(line: Line, text: str) -> Line:
    return replace(line, data=text.encode("utf-8", "surrogateescape") + USUAL_END[line.mark])
