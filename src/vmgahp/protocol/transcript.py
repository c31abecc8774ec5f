r"""The text format of conversations, its writer and its file.

docs/reference/transcripts.md describes it. A line each: ``> `` and what the client sent, ``< `` and what the server
wrote, ``! `` and what the server wrote to standard error, without the usual line end (CR LF from the client, LF from
the server). A line that is not plain text, or has another end, is a bytes literal of Python's right after the mark, its
end included: ``>b'VERSION\n'``. ``@ 1.250`` gives the time of the lines below it in seconds, ``exit N`` is the server's
exit status, negative for a signal, and ``#`` begins a comment.

Lines that a full disk does not take are lost, and the transcript has their number; later lines are written again.
"""

import ast
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from vmgahp import errors
from vmgahp.host import trust
from vmgahp.protocol import wire
from vmgahp.text import escape, is_hidden, redact

CLIENT, SERVER, STDERR = ">", "<", "!"

USUAL_END = {CLIENT: b"\r\n", SERVER: b"\n", STDERR: b"\n"}
"""The line end of each kind, unless the line is a literal."""

HINT = "Hint: vmgahp record writes transcripts."

LONGEST_SHOWN = 60
"""The most characters of an invalid line that a message shows."""

LARGEST = 8 << 20
"""The most characters of a transcript; a STATUS each minute makes 2 MiB a week."""

HIDDEN = '"<hidden>"'
"""The value written for a secret attribute: a string of ClassAds, so that the line remains an attribute."""

_ROW = re.compile(
    r"""([<>!])(?: (.*)|(b'(?:[^'\\]|\\.)*'|b"(?:[^"\\]|\\.)*"))?"""
    r"|@ [0-9]+(?:\.[0-9]+)?|exit (-?[0-9]{1,9})|#.*|\s*",
    re.ASCII,
)


class TranscriptError(ValueError):
    """An error in the text of a transcript; the message names the line."""


@dataclass
class Line:
    """One line of a conversation, as bytes with their end."""

    mark: str
    data: bytes
    number: int = field(default=0, compare=False)
    """The line number in the text, from 1."""

    @property
    def text(self) -> str:
        """The line without its end; bytes that are not UTF-8 become surrogates."""
        return self.data.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8", "surrogateescape")


@dataclass
class Transcript:
    """A conversation, and the exit status of its server if the transcript has it."""

    lines: list[Line] = field(default_factory=list)
    exit_status: int | None = None

    def texts(self, mark: str) -> list[str]:
        """Return the lines of one side, as `Line.text`."""
        return [line.text for line in self.lines if line.mark == mark]


def parse(text: str) -> Transcript:
    """Read a transcript. Raises `TranscriptError` for the first line that cannot be one of it."""
    transcript = Transcript()
    for number, row in enumerate(text.split("\n"), 1):
        found = _ROW.fullmatch(row.removesuffix("\r"))
        try:
            if found is None:
                raise ValueError
            mark, plain, literal, status = found.groups()
            data = ast.literal_eval(literal) if literal else (plain or "").encode("utf-8", "surrogateescape")
        except (ValueError, SyntaxError):
            shown = row if len(row) <= LONGEST_SHOWN else f"{row[:LONGEST_SHOWN]}..."
            raise TranscriptError(f"line {number}: {shown!r} is not a line of a transcript") from None
        if mark:
            if transcript.exit_status is not None:
                raise TranscriptError(f"line {number} comes after the server's exit: a transcript has one conversation")
            transcript.lines.append(Line(mark, data if literal else data + USUAL_END[mark], number))
        elif status:
            transcript.exit_status = int(status)
    return transcript


def load(path: str) -> Transcript:
    """Read the transcript in a file. Raises OSError, and `TranscriptError` for anything but a whole transcript."""
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        text = file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise TranscriptError(f"{path} has more than {LARGEST >> 20} MiB, which is too much for a conversation. {HINT}")
    try:
        transcript = parse(text)
    except TranscriptError as error:
        raise TranscriptError(f"{path}, {error}. {HINT}") from None
    if not transcript.lines:
        raise TranscriptError(f"{path} has no line of a conversation in it. {HINT}")
    if not text.endswith("\n"):
        raise TranscriptError(f"{path} is cut off in its last line. Hint: take that line out, to use the rest.")
    return transcript


def written(mark: str, data: bytes) -> str:
    """Return one line of a transcript, its newline included, that `parse` reads as just these bytes."""
    text = data.decode("utf-8", "surrogateescape")
    plain = text.removesuffix(USUAL_END[mark].decode())
    if plain != text and plain.replace("\t", "").isprintable():
        return f"{mark} {plain}\n"
    return f"{mark}{data!r}\n"


def redacted(data: bytes) -> bytes:
    """Return a line of either side with the values of secrets hidden, by the rules of the log.

    The line of a secret attribute of the job ad remains one, with `HIDDEN` as its value.
    """
    text = data.decode("utf-8", "surrogateescape")
    name, equals, value = text.partition("=")
    if equals and is_hidden(name.strip()):
        hidden = f"{name}= {HIDDEN}" + ("\r\n" if value.endswith("\r\n") else "\n" if value.endswith("\n") else "")
    else:
        hidden = redact(text)
    return hidden.encode("utf-8", "surrogateescape")


class Writer:
    """A writer of a running conversation, without its secrets, for several threads.

    Lines that cannot be written to `descriptor` are lost: the transcript has their number where it goes on, and the
    callback `complain` gets a sentence when that begins.
    """

    def __init__(self, descriptor: int, complain: Callable[[str], object] = lambda _: None) -> None:
        self._descriptor, self._complain = descriptor, complain
        self._began, self._last = time.monotonic(), ""
        self._lost = 0
        """The number of lost lines that the file does not mention yet."""
        self._lock = threading.Lock()

    def comment(self, text: str) -> None:
        """Write one comment line, which is not part of the conversation."""
        self._write(f"# {escape(redact(' '.join(text.splitlines())))}\n")

    def line(self, mark: str, data: bytes) -> None:
        """Write a line with its end, or that one was too long to be kept (`wire.TOO_LONG`)."""
        if data is wire.TOO_LONG:
            self.comment(f"{mark} a line of more than {wire.MAX_REQUEST} bytes is left out")
        elif data:
            with self._lock:
                when = f"@ {time.monotonic() - self._began:.3f}\n"
                self._write((when if when != self._last else "") + written(mark, redacted(data)))
                self._last = when

    def exit(self, status: int) -> None:
        """Write the server's exit status, which is the last line."""
        self._write(f"exit {status}\n")

    def _write(self, text: str) -> None:
        gap = f"\n# {self._lost} lines were lost here\n" if self._lost else ""  # the line before may be torn
        data = (gap + text).encode("utf-8", "backslashreplace")
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
            self._lost = 0
        except OSError as error:
            if not self._lost:
                self._complain(f"The transcript has gaps: {error.strerror}.")
            self._lost += text.count("\n")


def create_file(target: str) -> int:
    """Create a file that only its owner can read, and return its descriptor.

    In a directory the file gets a name with the time (UTC) and the process id. An existing file is never
    written to. For root, only root may be able to write to the directory, or it must be one like ``/tmp``.
    Raises `MachineFault`.
    """
    path = target
    if os.path.isdir(target):
        path = os.path.join(target, time.strftime("vmgahp-%Y%m%dT%H%M%SZ", time.gmtime()) + f"-{os.getpid()}.txt")
    try:
        if os.geteuid() == 0 and (trouble := trust.trouble_with_directory(os.path.dirname(path) or ".")):
            hint = "name a directory that belongs to root and that only root may write to."
            raise errors.MachineFault(f"No transcript is written to {path}: it is reached by {trouble}.", hint)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY
        return os.open(path, flags, 0o600)
    except OSError as error:
        problem = f"No transcript is written to {path}: {error.strerror}."
        raise errors.MachineFault(problem, "name a new file, or a directory.") from None
