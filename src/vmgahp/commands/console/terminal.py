"""Standard input and output of the console: prompt_toolkit on a terminal, lines anywhere else."""

import asyncio
import os
import signal
import sys
from io import TextIOWrapper

from prompt_toolkit import PromptSession, print_formatted_text
from prompt_toolkit.application import get_app, get_app_or_none, run_in_terminal
from prompt_toolkit.completion import Completer, NestedCompleter, PathCompleter, WordCompleter, merge_completers
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.utils import is_dumb_terminal

from vmgahp.commands.console.conversation import COMMANDS, Conversation
from vmgahp.protocol import requests
from vmgahp.protocol.client import ProtocolError
from vmgahp.protocol.session import COMMANDS as PROTOCOL


class Terminal:
    def __init__(self) -> None:
        self.is_person = sys.stdin.isatty()
        self._is_drawn = sys.stdout.isatty() and bool(os.environ.get("TERM")) and not is_dumb_terminal()
        self._is_ended = False
        """True after a signal has ended the console."""
        for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors=errors)

    def show(self, kind: str, text: str) -> None:
        """Show a line, above the one that is being typed."""
        if self._is_drawn:
            print_formatted_text(FormattedText([(kind, text)]))
        else:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()

    def run(self, talk: Conversation) -> None:
        """Read lines until the end. Raises `ProtocolError` if the server ends, and KeyboardInterrupt."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._signalled)
        talk.greet()
        session: PromptSession[str] | None = None
        if self.is_person and self._is_drawn:
            session = PromptSession(lambda: talk.prompt, completer=completer(talk), complete_while_typing=False)
        while not talk.over:
            try:
                try:
                    typed = _edited(session, talk) if session else input(talk.prompt if self.is_person else "")
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


def _edited(session: PromptSession[str], talk: Conversation) -> str:
    """Read a line while lines of the server are shown as they arrive."""

    async def listen() -> None:
        app = get_app()
        try:
            while True:
                talk.turn()
                await asyncio.sleep(0.1)
        except ProtocolError as error:
            await run_in_terminal(lambda: None)  # after the lines that are still to be shown
            if app.future is not None and not app.future.done():
                app.exit(exception=error)

    def begin() -> None:
        get_app().create_background_task(listen())

    return session.prompt(pre_run=begin)


def completer(talk: Conversation) -> Completer:
    """Make a completer of commands, VMs, requests, files and error words."""
    of_arguments: dict[str, Completer] = {
        "[VM]": WordCompleter(lambda: [str(number) for number in talk.vms]),
        "[REQUEST]": WordCompleter(lambda: [str(number) for number in talk.requests.pending]),
        COMMANDS["start"].arguments: merge_completers([WordCompleter(["job"]), PathCompleter(expanduser=True)]),
        COMMANDS["help"].arguments: WordCompleter([*COMMANDS, *requests.WORDS]),
    }
    words = {word: of_arguments.get(row.arguments) for word, row in COMMANDS.items()}
    return NestedCompleter({**words, **dict.fromkeys(PROTOCOL)}, ignore_case=False)
