r"""Conversations as text: the format, and who writes it.

A line each: ``> `` and what the client sent, ``< `` and what the server wrote, ``! `` and what the server said
on standard error, without the usual end of such a line (CR LF from the client, LF from the server). Bytes
that are no plain text, or that end otherwise, stand in quotes right after the mark, their end included:
``>"VERSION\n"``. ``@ 1.250`` says when the lines after it went by, in seconds; ``exit N`` is the server's exit
status, negative for a signal, after which nothing is said. A line that begins with ``#`` is a comment, an empty one
is nothing, and any other shows that this is no transcript. The first line of the server is the greeting.

Two servers that mean the same do not say the same: an ``R`` comes when it comes, RESULTS finds what is ready,
a STATUS has figures in it. So a recording is compared by what the protocol makes of it (`steps`), and without what
varies from run to run (`alike`).
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from vmgahp.protocol import wire
from vmgahp.protocol.requests import Kind, Request, Requests, result_count
from vmgahp.text import escape, is_hidden, redact

CLIENT, SERVER, STDERR = ">", "<", "!"

USUAL_END = {CLIENT: b"\r\n", SERVER: b"\n", STDERR: b"\n"}
"""How a line of each kind ends unless it stands in quotes."""

HINT = "Hint: vmgahp record, and vmgahp console --record, write transcripts."

LONGEST_SHOWN = 60
"""Characters of a wrong line that a message shows."""

MAX_LINE = 1 << 20
"""Bytes of one line that are kept while its end is waited for."""

LARGEST = 8 << 20
"""Characters of a transcript that is read: a VM that is asked for its status each minute has one of 2 MiB a week."""

HIDDEN = '"<hidden>"'
"""Stands for the value of a secret attribute: a string of ClassAds, so that the line remains an attribute."""

FIGURES = ("CPUTIME", "CPUUTILIZATION", "MEMORY")
"""Words of a STATUS that must be there; their values are not compared."""

COMES_AND_GOES = ("IP", "MAC")
"""Words of a STATUS that are not compared at all: they depend on how far the guest has come."""

_ESCAPES = {"n": 10, "r": 13, "t": 9, '"': 34, "\\": 92}
_NAMES = {number: letter for letter, number in _ESCAPES.items()}


class TranscriptError(ValueError):
    """What should be a transcript is none, or a line of it cannot be read; the message names it."""


@dataclass
class Line:
    """One line of a conversation, as bytes with their end."""

    mark: str
    data: bytes
    at: float | None = None
    """Seconds since the beginning, to the millisecond, where the transcript says."""
    number: int = field(default=0, compare=False)
    """Where it stands in the text, from 1."""

    @property
    def text(self) -> str:
        """What the other side makes of it: without its end, bytes that are not UTF-8 as surrogates."""
        data = self.data.removesuffix(b"\n")
        return data.removesuffix(b"\r").decode("utf-8", "surrogateescape")


@dataclass
class Transcript:
    lines: list[Line] = field(default_factory=list)
    exit_status: int | None = None

    def sent(self) -> list[str]:
        """The client's lines, as `Line.text`."""
        return [line.text for line in self.lines if line.mark == CLIENT]

    def received(self) -> list[str]:
        """The server's lines, as `Line.text`."""
        return [line.text for line in self.lines if line.mark == SERVER]


def parse(text: str) -> Transcript:
    """Read a transcript. Raises `TranscriptError` for the first line that cannot be one of it."""
    transcript = Transcript()
    at: float | None = None
    for number, row in enumerate(text.split("\n"), 1):
        mark, rest = row[:1], row[1:].removesuffix("\r")
        if mark in USUAL_END:
            if transcript.exit_status is not None:
                raise TranscriptError(f"line {number} comes after the server's exit: a transcript has one conversation")
            transcript.lines.append(Line(mark, _read(mark, rest, number), at, number))
        elif mark == "@":
            try:
                at = round(float(rest), 3)
            except ValueError:
                raise TranscriptError(f"line {number}: {row!r} is not a time") from None
        elif row.startswith("exit "):
            try:
                transcript.exit_status = int(rest[4:])
            except ValueError:
                raise TranscriptError(f"line {number}: {row!r} is not an exit status") from None
        elif mark != "#" and row.strip():
            shown = row if len(row) <= LONGEST_SHOWN else f"{row[:LONGEST_SHOWN]}..."
            raise TranscriptError(f"line {number}: {shown!r} is no line of a transcript")
    return transcript


def load(path: str) -> Transcript:
    """Read the transcript in a file. Raises OSError, and `TranscriptError` for what no `Writer` has written whole."""
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        text = file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise TranscriptError(f"{path} has more than {LARGEST >> 20} MiB: it is no conversation that one would play")
    if not text:
        raise TranscriptError(f"{path} is empty. {HINT}")
    try:
        transcript = parse(text)
    except TranscriptError as error:
        raise TranscriptError(f"{path}, {error}. {HINT}") from None
    if not transcript.lines:
        raise TranscriptError(f"{path} has no line of a conversation in it. {HINT}")
    if not text.endswith("\n"):
        raise TranscriptError(f"{path} is cut off in its last line. Hint: take that line out, to use the rest.")
    return transcript


def _read(mark: str, rest: str, number: int) -> bytes:
    if rest[:1] in ("", " "):
        return rest[1:].encode("utf-8", "surrogateescape") + USUAL_END[mark]
    if rest[0] != '"' or len(rest) < 2 or rest[-1] != '"':
        raise TranscriptError(f"line {number}: after {mark!r} comes a space, or a quote and one at the end")
    data = bytearray()
    letters = iter(rest[1:-1])
    for letter in letters:
        if letter == '"':
            raise TranscriptError(f'line {number}: a quote within quotes is written \\"')
        if letter != "\\":
            data += letter.encode("utf-8", "surrogateescape")
            continue
        name = next(letters, "")
        if name in _ESCAPES:
            data.append(_ESCAPES[name])
            continue
        digits = next(letters, "") + next(letters, "") if name == "x" else ""
        if len(digits) != 2 or digits.strip("0123456789abcdefABCDEF"):
            raise TranscriptError(f"line {number}: \\{name}{digits} is not an escape")
        data.append(int(digits, 16))
    return bytes(data)


def written(mark: str, data: bytes) -> str:
    """One line of a transcript, its newline included, that `parse` reads as just these bytes."""
    end = USUAL_END[mark]
    if data.endswith(end):
        try:
            text = data[: -len(end)].decode()
        except UnicodeDecodeError:
            pass
        else:
            if text.replace("\t", "").isprintable():
                return f"{mark} {text}\n"
    quoted = "".join(_quoted(letter) for letter in data.decode("utf-8", "surrogateescape"))
    return f'{mark}"{quoted}"\n'


def _quoted(letter: str) -> str:
    if letter.isprintable() and letter not in '"\\':
        return letter
    return "".join(
        "\\" + _NAMES[byte] if byte in _NAMES else f"\\x{byte:02x}"
        for byte in letter.encode("utf-8", "surrogateescape")
    )


def render(transcript: Transcript) -> str:
    """The text of a transcript, as `parse` reads it."""
    text = ""
    at = None
    for line in transcript.lines:
        if line.at is not None and line.at != at:
            at = line.at
            text += f"@ {at:.3f}\n"
        text += written(line.mark, line.data)
    return text if transcript.exit_status is None else f"{text}exit {transcript.exit_status}\n"


class Splitter:
    r"""Bytes as they come, to lines with their ends, by the rule of the protocol: an escaped LF ends none.

    The lines make up the bytes again, but for a line longer than `MAX_LINE`, whose bytes are counted instead:
    what holds nothing back must not take all the memory either.
    """

    def __init__(self, *, escapes: bool = True) -> None:
        self._escapes = escapes
        self._buffer = bytearray()
        self._searched = 0
        self._dropped = 0

    def receive(self, data: bytes) -> Iterator[bytes | int]:
        """The lines that are whole now; for one that is too long the number of its bytes."""
        self._buffer += data
        while (end := self._buffer.find(b"\n", self._searched)) >= 0:
            self._searched = end + 1
            if self._escapes and wire.is_escaped(self._buffer, end):
                continue
            line = bytes(self._buffer[: end + 1])
            del self._buffer[: end + 1]
            self._searched = 0
            dropped, self._dropped = self._dropped, 0
            yield dropped + len(line) if dropped or len(line) > MAX_LINE else line
        self._searched = len(self._buffer)
        if len(self._buffer) > MAX_LINE:
            keep = 1 if wire.is_escaped(self._buffer, len(self._buffer)) else 0
            self._dropped += len(self._buffer) - keep
            del self._buffer[: len(self._buffer) - keep]
            self._searched = 0

    def rest(self) -> bytes | int:
        """What has come since the last whole line, once; empty mostly."""
        rest, self._buffer = bytes(self._buffer), bytearray()
        dropped, self._dropped = self._dropped, 0
        self._searched = 0
        return dropped + len(rest) if dropped else rest


def redacted(data: bytes) -> bytes:
    """A line of either side as it may be kept: by the rules of the log, with the values of secrets hidden.

    The line of a secret attribute of the job ad remains one, with `HIDDEN` as its value.
    """
    text = data.decode("utf-8", "surrogateescape")
    name, equals, _ = text.partition("=")
    if equals and is_hidden(name.strip()):
        end = b"\r\n" if data.endswith(b"\r\n") else b"\n" if data.endswith(b"\n") else b""
        return f"{name}= {HIDDEN}".encode("utf-8", "surrogateescape") + end
    hidden = redact(text)
    return data if hidden == text else hidden.encode("utf-8", "surrogateescape")


class Writer:
    """Writes a conversation as it goes by, without its secrets.

    `write` takes one or more whole lines of text at a time; `clock` counts seconds from anywhere, and None
    leaves the times out.
    """

    def __init__(self, write: Callable[[str], object], clock: Callable[[], float] | None = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._began = clock() if clock else 0.0
        self._last = ""

    def comment(self, text: str) -> None:
        """One line that is no part of the conversation."""
        self._write(f"# {escape(redact(' '.join(text.splitlines())))}\n")

    def line(self, mark: str, data: bytes | int) -> None:
        """A line with its end, or the number of bytes of one that was not kept (`Splitter`)."""
        if isinstance(data, int):
            self.comment(f"{mark} a line of {data} bytes is left out")
            return
        if not data:
            return
        when = f"@ {self._clock() - self._began:.3f}\n" if self._clock else ""
        self._write((when if when != self._last else "") + written(mark, redacted(data)))
        self._last = when

    def text(self, mark: str, line: str) -> None:
        """A line without its end, as `vmgahp.protocol.client.Client` has its lines heard."""
        self.line(mark, line.encode("utf-8", "surrogateescape") + USUAL_END[mark])

    def exit(self, status: int) -> None:
        """The server's end, which is the last line."""
        self._write(f"exit {status}\n")


# What is compared


@dataclass
class Step:
    """One line of a recording, and what it is to the protocol."""

    line: Line
    request: Request | None = None
    """What the client sent with it, or what it answers."""
    in_ad: bool = False
    """Whether it belongs to the job ad, and is not answered."""
    results: list["Step"] = field(default_factory=list)
    """The result lines after a reply to RESULTS."""

    def is_sent(self) -> bool:
        return self.line.mark == CLIENT

    def answers_results(self) -> bool:
        """Whether this is the reply to RESULTS that says how many there are."""
        of_results = self.request is not None and self.request.command == "RESULTS"
        return not self.is_sent() and of_results and result_count(self.line.text) is not None


def steps(recorded: Transcript) -> list[Step]:
    """The conversation, with each reply put to its request and the result lines to their RESULTS."""
    requests = Requests()
    found: list[Step] = []
    fetched: list[Step] = []
    for line in recorded.lines:
        if line.mark == CLIENT:
            request = Request(line.text)
            found.append(Step(line, request, in_ad=not requests.sent(request)))
        elif line.mark == SERVER:
            received = requests.received(line.text)
            step = Step(line, received.request)
            if received.kind is Kind.RESULT:
                fetched.append(step)
            else:
                found.append(step)
                if step.answers_results():
                    fetched = step.results
    return found


def alike(line: str, operation: str | None = None) -> str:
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
    if operation == "GETPID" and words[1:2] == ["0"] and words[2:] != ["0"] and words[-1].isdigit():
        words[2:] = ["(a pid)"]
    elif operation == "STATUS":
        named = [(word.partition("=")[0], word) for word in words]
        words = [
            f"{name}=(a figure)" if name in FIGURES else word for name, word in named if name not in COMES_AND_GOES
        ]
    return " ".join(words)


def adapted(recorded: Transcript, attributes: Mapping[str, str], vm_type: str = "") -> Transcript:
    """The recording for another place: attributes of the job ad set, and another VM type asked for.

    An attribute that the ad does not have is added at its end; names are compared without their case.
    """
    wanted = {name.lower(): f"{name} = {value}" for name, value in attributes.items()}
    if vm_type:
        wanted["jobvmtype"] = f'JobVMType = "{vm_type}"'
    lines: list[Line] = []
    missing: dict[str, str] = {}

    def add(line: Line, text: str) -> None:
        data = text.encode("utf-8", "surrogateescape") + USUAL_END[line.mark]
        lines.append(line if text == line.text else replace(line, data=data))

    for step in steps(recorded):
        line, text, request = step.line, step.line.text, step.request
        if step.in_ad:
            name = text.partition("=")[0].strip().lower()
            text = wanted.get(name, text)
            missing.pop(name, None)
        elif request is not None and step.is_sent():
            if request.command == "CLASSAD":
                missing = dict(wanted)
            elif request.command == "CLASSAD_END":
                for added in missing.values():
                    add(line, added)
                missing = {}
            elif request.operation == "START" and vm_type:
                text = f"CONDOR_VM_START {request.number} {vm_type}"
        add(line, text)
        lines += [result.line for result in step.results]
    return Transcript(lines, recorded.exit_status)
