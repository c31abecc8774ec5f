"""What comes from a server, in words, and the screen that shows it.

Everything that a server says may have been said by a guest or by a stranger's job: nothing of it reaches a
terminal but printable characters, and no line of it is beyond `LONGEST`.
"""

from collections.abc import Callable, Mapping, Sequence
from textwrap import wrap
from typing import NamedTuple, TextIO

from vmgahp import lifecycle
from vmgahp.commands.page import Page
from vmgahp.protocol import error_words
from vmgahp.protocol.requests import digits
from vmgahp.text import escape

SENT, RECEIVED, GOOD, BAD, NOTE, LOG, PLAIN = "sent", "received", "good", "bad", "note", "log", "plain"
"""The kinds of what is shown; `COLORS` has a terminal's codes for them."""

COLORS = {SENT: "36", RECEIVED: "2", GOOD: "32", BAD: "31", NOTE: "33", LOG: "2", PLAIN: ""}

WIRE = (SENT, RECEIVED, LOG)
"""Lines that are shown as they are, however wide."""

LONGEST = 2000
"""Characters of one line that are shown; the rest is counted."""

_STATES: dict[str, str] = {
    lifecycle.RUNNING: "running",
    lifecycle.SUSPENDED: "suspended, its memory saved to a file",
    lifecycle.SOFT_SUSPENDED: "suspended, its memory in RAM",
    lifecycle.STOPPED: "stopped",
}


class Shown(NamedTuple):
    """One line for the person."""

    kind: str
    text: str


def clean(text: str) -> str:
    """`text` as one line that does nothing to a terminal, cut at `LONGEST`."""
    shown = escape(text[:LONGEST].encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"))
    return shown if len(text) <= LONGEST else f"{shown} ... and {len(text) - LONGEST} more characters"


def fields(payload: Sequence[str]) -> dict[str, str]:
    """The ``NAME=value`` words of a STATUS; of a name that comes twice the first one counts."""
    found: dict[str, str] = {}
    for word in payload:
        name, equals, value = word.partition("=")
        if equals:
            found.setdefault(name.upper(), value)
    return found


def status(payload: Sequence[str]) -> str:
    """The figures of a STATUS in words and units; what is not known is shown as it came."""
    left = fields(payload)
    state = left.pop("STATUS", "")
    said = [_STATES.get(state, clean(state) or "no state was said")]
    share, seconds = left.pop("CPUUTILIZATION", None), left.pop("CPUTIME", None)
    if share is not None:
        figure = _real(share)
        said.append(f"CPU {clean(share)}" if figure is None else f"CPU {figure * 100:.0f} %")
    if seconds is not None:
        figure = _real(seconds)
        said.append(f"CPU time {clean(seconds)}" if figure is None else f"{figure:.2f} s of CPU time")
    memory, most = left.pop("MEMORY", None), left.pop("MAXMEMORY", None)
    if memory is not None:
        of = "" if most is None else f" of {_mebibytes(most)}"
        said.append(f"{_mebibytes(memory)}{of} memory")
    said += [f"{clean(name)} {clean(value)}" for name, value in left.items()]
    said += [clean(word) for word in payload if "=" not in word]
    return ", ".join(said)


def error(word: str) -> str:
    """An error word with its meaning."""
    meaning = error_words.meaning(word)
    return f"{clean(word)}: {meaning}" if meaning else f"{clean(word)}, an unknown error word"


def duration(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.1f} ms" if seconds < 0.00995 else f"{seconds * 1000:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"


def _real(text: str) -> float | None:
    try:
        value = float(text) if len(text) <= 40 and text.isascii() else None
    except ValueError:
        return None
    return value if value is not None and abs(value) < 1e15 else None


def _mebibytes(text: str) -> str:
    kib = digits(text)
    if kib is None:
        return clean(text)
    return f"{kib / 1024:.0f} MiB" if kib % 1024 == 0 else f"{kib / 1024:.1f} MiB"


class Screen:
    """Where lines are shown: colors as the terminal and NO_COLOR have it."""

    def __init__(self, stream: TextIO, environ: Mapping[str, str]) -> None:
        self._page = Page.of(stream, environ)
        self._wraps = stream.isatty()
        self._stream = stream
        self.write: Callable[[str], object] = self._write

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def show(self, line: Shown) -> None:
        text = self._page.text(line.text)
        lines = [text]
        if self._wraps and line.kind not in WIRE and len(text) > self._page.width:
            indent = " " * (len(text) - len(text.lstrip()))
            lines = wrap(text, self._page.width, subsequent_indent=indent + "  ", break_on_hyphens=False)
        self.write("".join(self._page.paint(part, COLORS[line.kind]) + "\n" for part in lines))
