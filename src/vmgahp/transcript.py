"""Conversations as text, and the scripted peer that plays the client's side of one.

The format is a line each: ``> `` and what the client sent, ``< `` and what the server wrote, ``exit N`` with
its exit status. The first line is the greeting. Lines of any other form are comments.
"""

from dataclasses import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class Exchange:
    """What the client sent (None before its first line) and what the server wrote before the next."""

    sent: str | None
    received: list[str] = field(default_factory=list)


@dataclass
class Transcript:
    exchanges: list[Exchange]
    exit_status: int | None = None

    def sent(self) -> list[str]:
        """The client's lines."""
        return [exchange.sent for exchange in self.exchanges if exchange.sent is not None]

    def received(self) -> list[str]:
        """The server's lines."""
        return [line for exchange in self.exchanges for line in exchange.received]


def parse(text: str) -> Transcript:
    """Read a transcript. Nothing in it is refused: what is no line of the conversation is a comment."""
    transcript = Transcript([Exchange(None)])
    for line in text.split("\n"):
        if line.startswith(">"):
            transcript.exchanges.append(Exchange(line[2:]))
        elif line.startswith("<"):
            transcript.exchanges[-1].received.append(line[2:])
        elif line.startswith("exit "):
            transcript.exit_status = int(line[5:])
    return transcript


def render(transcript: Transcript) -> str:
    """The text of a transcript, as `parse` reads it."""
    lines = []
    for exchange in transcript.exchanges:
        if exchange.sent is not None:
            lines.append(f"> {exchange.sent}")
        lines += [f"< {line}" for line in exchange.received]
    if transcript.exit_status is not None:
        lines.append(f"exit {transcript.exit_status}")
    return "\n".join(lines) + "\n"


def play(
    script: Transcript, send: "Callable[[bytes], None]", receive: "Callable[[int], list[str]]"
) -> Transcript:
    """Play the client's side of `script` and return the conversation as it went.

    `send` takes the bytes of one line; `receive(n)` returns the server's next n lines, or as many as come.
    """
    heard = Transcript([])
    for exchange in script.exchanges:
        if exchange.sent is not None:
            send(exchange.sent.encode("utf-8", "surrogateescape") + b"\r\n")
        heard.exchanges.append(Exchange(exchange.sent, receive(len(exchange.received))))
    return heard
