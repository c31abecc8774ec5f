"""The loop on a terminal: a line to edit while results arrive above it (prompt_toolkit)."""

import asyncio
import sys
from time import monotonic

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import Completer, Completion
from prompt_toolkit.completion.base import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import ANSI
from prompt_toolkit.history import History as ToolkitHistory
from prompt_toolkit.patch_stdout import patch_stdout
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.styles import Style

from vmgahp.commands.console.completion import complete

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from vmgahp.commands.console.history import History
    from vmgahp.commands.console.repl import Session
    from vmgahp.commands.console.terminal import Console

REFRESH = 1.0
"""Seconds between two looks at how long requests have taken."""

_STYLE = Style.from_dict({"bottom-toolbar": "noreverse ansibrightblack", "prompt": "bold"})

_NO_COLOUR = Style.from_dict({"bottom-toolbar": "noreverse", "prompt": "bold"})


class _Completer(Completer):
    def __init__(self, session: "Session") -> None:
        self._session = session

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> "Iterable[Completion]":
        for found in complete(document.text_before_cursor.lstrip(), self._session.conversation):
            yield Completion(found.text, found.start, display_meta=found.hint)


class _Remembered(ToolkitHistory):
    """`History` as prompt_toolkit wants it: the newest line first, and nothing in it that is not `memorable`."""

    def __init__(self, history: "History", session: "Session") -> None:
        super().__init__()
        self._history = history
        self._session = session

    def load_history_strings(self) -> "Iterable[str]":
        return reversed(self._history.lines)

    def append_string(self, string: str) -> None:
        if self._session.memorable(string):
            super().append_string(string.strip())

    def store_string(self, string: str) -> None:
        self._history.add(string)


def run(console: "Console", history: "History", *, colour: bool) -> None:
    """Type and show until the session is done."""
    asyncio.run(_Loop(console, history, colour).run())


class _Loop:
    def __init__(self, console: "Console", history: "History", colour: bool) -> None:
        self._console = console
        self._history = _Remembered(history, console.session)
        self._style = _STYLE if colour else _NO_COLOUR
        self._watched: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._finished = asyncio.Event()

    async def run(self) -> None:
        session = self._console.session
        prompt: PromptSession[str] = PromptSession(
            history=self._history,
            completer=_Completer(session),
            complete_while_typing=False,
            complete_style=CompleteStyle.MULTI_COLUMN,
            bottom_toolbar=self._toolbar,
            style=self._style,
            enable_open_in_editor=False,
            refresh_interval=REFRESH,
            reserve_space_for_menu=5,
        )
        # raw: the colours are ours; whatever a server said has been made harmless before.
        with patch_stdout(raw=True):
            self._console.screen.write = _print
            self._watch()
            while not self._console.done:
                typing = asyncio.ensure_future(self._ask(prompt))
                ending = asyncio.ensure_future(self._finished.wait())
                await asyncio.wait({typing, ending}, return_when=asyncio.FIRST_COMPLETED)
                ending.cancel()
                if not typing.done():
                    typing.cancel()
                await asyncio.wait({typing})
                if typing.cancelled():
                    break
                self._typed(typing.result())
                if session.conversation.quitting and not self._console.done:
                    await self._finished.wait()  # no more prompts until the server has answered
            self._unwatch()

    async def _ask(self, prompt: "PromptSession[str]") -> "str | type[KeyboardInterrupt] | None":
        """What was typed; None for Control-D, KeyboardInterrupt for Control-C, which as an exception ends loops."""
        try:
            return await prompt.prompt_async(lambda: ANSI(self._console.session.prompt))
        except EOFError:
            return None
        except KeyboardInterrupt:
            return KeyboardInterrupt

    def _typed(self, answer: "str | type[KeyboardInterrupt] | None") -> None:
        if answer is None:
            self._console.type(None)
        elif isinstance(answer, str):
            for line in answer.split("\n"):  # several lines can be pasted at once
                self._console.type(line)
        else:
            self._console.session.interrupted()
            self._console.turn()
        self._after()

    def _toolbar(self) -> str:
        talk = self._console.session.conversation
        parts = [f"VM {number} {state}" for number, state in talk.vms.items()] or ["no VM"]
        now = monotonic()
        parts += [f"{request} for {now - request.asked:.0f} s" for request in talk.requests.values()]
        if talk.waited_for:
            parts.append("waiting; Control-C ends that")
        return " " + " | ".join(parts)

    # The server

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        wanted = self._console.client.descriptors()
        for descriptor in self._watched:
            if descriptor not in wanted:
                loop.remove_reader(descriptor)
        for descriptor in wanted:
            if descriptor not in self._watched:
                loop.add_reader(descriptor, self._pump)
        self._watched = wanted
        if self._timer is not None:
            self._timer.cancel()
        due = self._console.timeout()
        self._timer = None if due is None else loop.call_later(due, self._pump)

    def _unwatch(self) -> None:
        loop = asyncio.get_running_loop()
        for descriptor in self._watched:
            loop.remove_reader(descriptor)
        if self._timer is not None:
            self._timer.cancel()

    def _pump(self) -> None:
        self._console.pump()
        self._after()

    def _after(self) -> None:
        """Something has happened: look at what to wait for now, and whether this is the end."""
        self._console.flush()
        self._watch()
        if self._console.done:
            self._finished.set()


def _print(text: str) -> None:
    """Above the line that is being typed: `patch_stdout` has put itself in the place of standard output."""
    sys.stdout.write(text)
    sys.stdout.flush()
