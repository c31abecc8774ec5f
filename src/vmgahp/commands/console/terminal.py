"""The loop between a person, or a pipe, and a server: lines in, lines out.

Three ways to type: a pipe, whose lines are taken one after another, each when the one before it is settled; a
terminal that can do nothing but print lines; and a real one, which is `prompt`'s, with completion and history.
All of them drive one `Console`.
"""

import os
import select
import sys
from collections import deque
from time import monotonic

from vmgahp.commands.console.render import BAD, COLOURS, NOTE, WIRE, Line, clean
from vmgahp.commands.page import Page
from vmgahp.protocol.client import Client, ProtocolError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TextIO

    from vmgahp.commands.console.repl import Session

LONGEST_INPUT = 1 << 20
"""Bytes of one typed line."""

END_DEADLINE = 60.0
"""Seconds that the server has for its end after QUIT or the end of its input."""

LOST_DEADLINE = 5.0
"""The same for one that has closed an end of its pipes without being asked to end."""

LAST_WORDS = 10
"""Lines of its standard error that are shown of a server that has failed."""


class Screen:
    """Where lines are shown: colours as the terminal and NO_COLOR have it."""

    def __init__(self, stream: "TextIO", environ: "Mapping[str, str]") -> None:
        self._stream = stream
        self._page = Page.of(stream, environ)
        self._wraps = stream.isatty()
        self.write: Callable[[str], None] = self._write
        self._asking = False

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def ask(self, prompt: str) -> None:
        """Write a prompt, unless it stands there already; what is shown next begins a line of its own."""
        if not self._asking:
            self._asking = True
            self.write(prompt)

    def answered(self) -> None:
        """The line with the prompt was ended by whoever typed."""
        self._asking = False

    def show(self, line: Line) -> None:
        if self._asking:
            self.answered()
            self.write("\n")
        text = self._page.text(line.text)
        lines = [text]
        if self._wraps and line.kind not in WIRE and len(text) > self._page.width:
            from textwrap import wrap

            indent = " " * (len(text) - len(text.lstrip()))
            lines = wrap(text, self._page.width, subsequent_indent=indent + "  ", break_on_hyphens=False)
        self.write("".join(self._page.paint(part, COLOURS[line.kind]) + "\n" for part in lines))


class Console:
    """A session, its server, and a screen. What is typed is kept until the session takes it."""

    def __init__(self, session: "Session", client: Client, screen: Screen) -> None:
        self.session = session
        self.client = client
        self.screen = screen
        self.done = False
        """Nothing more is to be typed or to come."""
        self.lost = ""
        """Why it ended, where that was not on purpose."""
        self._typed: deque[str | None] = deque()

    def type(self, line: str | None) -> None:
        """A typed line, or None for the end of input."""
        self._typed.append(line)
        self.turn()

    @property
    def wants_input(self) -> bool:
        """Whether all that was typed was taken, and the next line would be."""
        return not self._typed and self._ready()

    def turn(self) -> None:
        """Take what the server has said and what was typed, send and show."""
        talk = self.session.conversation
        try:
            while (heard := self.client.next_line()) is not None:
                talk.received(heard, monotonic())
                self._send()
            talk.tick(monotonic())
            self._send()
            while self._typed and self._ready():
                line = self._typed.popleft()
                if line is not None:
                    self.session.typed(line, monotonic())
                elif not self._end_of_input():
                    self._typed.clear()
                self._send()
        except ProtocolError as error:
            self.lost = str(error).partition("; its log:")[0]
        self.flush()
        if self.client.ended and not talk.quitting and not self.lost:
            self.lost = "it has ended its output"
        if talk.broken:
            self.lost = self.lost or talk.broken
        self.done = bool(self.lost) or (talk.quitting and (self.client.ended or talk.settled()))

    def _end_of_input(self) -> bool:
        """The end of input was typed; whether that is the end."""
        talk = self.session.conversation
        if talk.requests and not self.session.asks and not talk.quitting:
            # Results that are still to come are waited for, then the end comes again.
            talk.waited_for |= {number for number, request in talk.requests.items() if not request.overdue}
            if talk.waited_for:
                self._typed.appendleft(None)
                return True
        return self.session.end_of_input(monotonic())

    def _ready(self) -> bool:
        """Whether the session takes a typed line now; one that is asked anything takes it at any time."""
        talk = self.session.conversation
        return talk.settled() if self.session.patient else talk.greeted and not talk.waited_for

    def _send(self) -> None:
        for line in self.session.conversation.take_sends():
            self.client.send(line)

    def flush(self) -> None:
        """Show what is to be shown."""
        for line in self.session.conversation.take_shown():
            self.screen.show(line)

    def timeout(self) -> float | None:
        """Seconds until `turn` is due, whatever happens; None for never."""
        deadline = self.session.conversation.next_deadline()
        return None if deadline is None else max(0.0, deadline - monotonic())

    def heard(self, mark: str, line: str) -> None:
        """What `Client` tells of lines as they go by: here the server's standard error."""
        if mark == "!":
            self.session.conversation.logged(line)

    def pump(self) -> None:
        """Take in what the server has said, and do what follows from it."""
        try:
            self.client.pump()
        except ProtocolError as error:
            self.lost = str(error)
        self.turn()

    def finish(self) -> bool:
        """End the server, and say how it ended; whether that was as it should be."""
        talk = self.session.conversation
        killed = bool(talk.broken)
        try:
            if killed:
                self.client.kill()
                self.client.pump()
            else:
                self.client.finish(LOST_DEADLINE if self.lost else END_DEADLINE)
        except ProtocolError as error:
            killed = True
            self.lost = self.lost or str(error).partition("; its log:")[0]
        self.flush()
        status = self.client.process.poll()
        if not self.lost and not status:
            return True
        why = self.lost or "it has ended"
        ended = "" if status is None or killed else f" Its {_exit(status)}."
        self.screen.show(Line(BAD, f"The server is lost: {clean(why)}.{ended}"))
        for line in list(talk.log)[-LAST_WORDS:]:
            self.screen.show(Line(NOTE, f"| {line}"))
        return False


def _exit(status: int) -> str:
    if status >= 0:
        return f"exit status is {status}"
    import signal

    try:
        return f"end was {signal.Signals(-status).name}"
    except ValueError:
        return f"end was signal {-status}"


def plain(console: Console, stdin: int, prompt: bool) -> None:
    """Lines from a pipe, or with a `prompt` from a terminal that can do nothing but print lines."""
    screen, session = console.screen, console.session
    buffer = bytearray()
    ended = False
    while not console.done:
        # From a pipe no more is read than can be taken; a terminal is read at any time.
        line = _cut(buffer, ended) if prompt or console.wants_input else None
        if line is not None:
            screen.answered()
            console.type(line)
            continue
        if ended and not buffer and console.wants_input:
            console.type(None)
            continue
        if prompt and session.conversation.settled():
            screen.ask(session.prompt)
        watched = console.client.descriptors()
        if not ended and len(buffer) < LONGEST_INPUT and (prompt or console.wants_input):
            watched.append(stdin)
        try:
            ready = select.select(watched, [], [], console.timeout())[0]
            if stdin in ready:
                data = os.read(stdin, 65536)
                buffer += data
                if not data and prompt:
                    console.type(None)  # a terminal's end of input is but a key
                else:
                    ended = not data
            console.pump()
        except KeyboardInterrupt:
            if not prompt:
                raise
            buffer.clear()
            session.interrupted()
            screen.write("\n")
            screen.answered()


def _cut(buffer: bytearray, ended: bool) -> str | None:
    """The next line in the buffer, taken out of it; None where there is no whole one."""
    end = buffer.find(b"\n")
    if end < 0:
        if not (buffer and (ended or len(buffer) >= LONGEST_INPUT)):
            return None
        end = len(buffer)
    line = bytes(buffer[:end]).removesuffix(b"\r").decode("utf-8", "surrogateescape")
    del buffer[: end + 1]
    return line


def can_edit(environ: "Mapping[str, str]") -> bool:
    """Whether standard input and output are a terminal on which a line can be edited."""
    dumb = environ.get("TERM", "") in ("", "dumb", "unknown")
    return sys.stdin.isatty() and sys.stdout.isatty() and not dumb
