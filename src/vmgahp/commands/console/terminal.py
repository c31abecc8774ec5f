"""Standard input and output of the console: prompt_toolkit on a terminal, lines anywhere else."""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app, get_app_or_none, run_in_terminal
from prompt_toolkit.completion import Completer, NestedCompleter, PathCompleter, WordCompleter, merge_completers
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory
from prompt_toolkit.output import create_output
from prompt_toolkit.renderer import print_formatted_text
from prompt_toolkit.styles import Style
from prompt_toolkit.utils import is_dumb_terminal
from prompt_toolkit.validation import ValidationError, Validator

from vmgahp.commands.console.conversation import BAD, COMMANDS, GOOD, NOTE, RECEIVED, SENT, Conversation
from vmgahp.host import trust
from vmgahp.protocol import requests
from vmgahp.protocol.client import ProtocolError
from vmgahp.protocol.session import COMMANDS as PROTOCOL

STYLE = Style.from_dict(
    {SENT: "ansicyan", RECEIVED: "ansibrightblack", GOOD: "ansigreen", BAD: "ansired", NOTE: "ansiyellow"}
    | {"bottom-toolbar": "noreverse ansibrightblack", "prompt": "bold"}
)


LOOK = 0.1
"""The seconds between two looks at what the server has sent while a line is typed."""


class Terminal:
    """The input and output of the console."""

    def __init__(self) -> None:
        self.is_person = sys.stdin.isatty()
        """True if a person types."""
        self._is_drawn = sys.stdout.isatty() and bool(os.environ.get("TERM")) and not is_dumb_terminal()
        self._is_typing = False
        self._is_ended = False
        """True after a signal has ended the console."""
        self._lines: list[tuple[str, str]] = []
        """The lines to show above the one that is being typed."""
        for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors=errors)

    def show(self, kind: str, text: str) -> None:
        """Show a line; while a line is being typed, `_listen` shows it above that."""
        self._lines.append((f"class:{kind}" if kind else "", f"{text}\n"))
        if not self._is_typing:
            self._print()

    def _print(self) -> None:
        lines, self._lines = self._lines, []
        if self._is_drawn:
            print_formatted_text(create_output(), FormattedText(lines), STYLE)
        else:
            sys.stdout.write("".join(text for _, text in lines))
            sys.stdout.flush()

    def run(self, talk: Conversation) -> None:
        """Read lines until the end. Raises `ProtocolError` if the server ends, and KeyboardInterrupt."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._signalled)
        talk.greet()
        session = prompt_session(talk) if self.is_person and self._is_drawn else None
        while not talk.over:
            try:
                try:
                    plain = talk.prompt if self.is_person else ""
                    typed = self._edited(session, talk) if session else input(plain)
                except EOFError:
                    talk.end_of_input()
                else:
                    for line in typed.split("\n"):  # several lines can be pasted at once
                        talk.typed(line)
                if not talk.over:
                    talk.turn()
            except KeyboardInterrupt:  # a person stops waiting
                if self._is_ended or not self.is_person:
                    raise

    def _signalled(self, _number: int, _frame: object) -> None:
        self._is_ended = True
        app = get_app_or_none()
        if app is None or app.future is None or app.future.done():
            raise KeyboardInterrupt
        app.exit(exception=KeyboardInterrupt())

    def _edited(self, session: PromptSession[str], talk: Conversation) -> str:
        """Read a line while lines of the server are shown as they arrive."""

        def listen() -> None:
            get_app().create_background_task(self._listen(talk))

        self._is_typing = True
        try:
            return session.prompt(pre_run=listen)
        finally:
            self._is_typing = False
            if self._lines:
                self._print()

    async def _listen(self, talk: Conversation) -> None:
        """Show what the server sends while a line is typed, which ends if the server does."""
        app = get_app()
        try:
            while True:
                talk.turn()
                if self._lines:
                    await run_in_terminal(self._print)
                await asyncio.sleep(LOOK)
        except ProtocolError as error:
            if app.future is not None and not app.future.done():
                app.exit(exception=error)


def prompt_session(talk: Conversation) -> PromptSession[str]:
    """Make the line editor."""
    return PromptSession(
        lambda: talk.prompt,
        history=History(history_file(os.environ), talk),
        completer=completer(talk),
        complete_while_typing=False,
        validator=_Validator(talk),
        validate_while_typing=False,
        bottom_toolbar=lambda: f" {talk.overview()}",
        style=STYLE,
        refresh_interval=1.0,
        enable_open_in_editor=False,
    )


class _Validator(Validator):
    """A check that keeps a line without a valid command in the editor."""

    def __init__(self, talk: Conversation) -> None:
        self._talk = talk

    def validate(self, document: Document) -> None:
        if trouble := self._talk.trouble(document.text):
            raise ValidationError(message=trouble)


def completer(talk: Conversation) -> Completer:
    """Make a completer of commands, VMs, requests, files and error words."""
    of_arguments: dict[str, Completer] = {
        "[VM]": WordCompleter(lambda: [str(number) for number in talk.vms]),
        "[REQUEST]": WordCompleter(lambda: [str(number) for number in talk.requests.pending]),
        COMMANDS["start"].arguments: merge_completers([WordCompleter(["job"]), PathCompleter(expanduser=True)]),
        COMMANDS["log"].arguments: WordCompleter(["on", "off"]),
        COMMANDS["help"].arguments: WordCompleter([*COMMANDS, *requests.WORDS]),
    }
    words = {word: of_arguments.get(row.arguments) for word, row in COMMANDS.items()}
    return NestedCompleter({**words, **dict.fromkeys(PROTOCOL)}, ignore_case=False)


class History(FileHistory):
    """A history that keeps neither job ads nor lines with secrets."""

    def __init__(self, path: str, talk: Conversation) -> None:
        super().__init__(path)
        self._talk = talk

    def store_string(self, string: str) -> None:
        """Append a line to the file; it is lost if the disk is full."""
        if self._talk.memorable(string):
            with suppress(OSError):
                super().store_string(string)


def history_file(environ: Mapping[str, str]) -> str:
    """Make the history's file, readable only by its owner; `os.devnull` if others could write to its directory."""
    try:
        path = Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "vmgahp/console_history"
        existing = next(directory for directory in path.parents if directory.exists())
        if trust.trouble_with_directory(str(existing)):  # for root, also the home of another user
            return os.devnull
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600))
    except (OSError, RuntimeError):
        return os.devnull
    return str(path)
