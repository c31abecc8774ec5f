"""The loop on a terminal: a line to edit while results arrive above it (prompt_toolkit)."""

import asyncio
import os
import signal
import stat
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from time import monotonic

from prompt_toolkit import PromptSession
from prompt_toolkit.application import create_app_session, run_in_terminal
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import ANSI
from prompt_toolkit.history import FileHistory
from prompt_toolkit.output.plain_text import PlainTextOutput
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.styles import Style
from prompt_toolkit.utils import is_dumb_terminal

from vmgahp.commands.console.commands import complete
from vmgahp.commands.console.repl import Console, Interpreter

REFRESH = 1.0
"""Seconds between two looks at how long requests have taken."""

AGAIN = 0.5
"""Seconds after which a task that is to end is told again."""

LONGEST_LINE = 500
"""Characters of a line that is kept in the history; longer ones were pasted, not typed."""

LARGEST_HISTORY = 1 << 18
"""Bytes of the history's file; when it is longer, the oldest half goes."""

_STYLE = Style.from_dict({"bottom-toolbar": "noreverse ansibrightblack", "prompt": "bold"})
_NO_COLOR = Style.from_dict({"bottom-toolbar": "noreverse", "prompt": "bold"})


class _Completer(Completer):
    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        for found in complete(document.text_before_cursor.lstrip(), self._interpreter.conversation):
            yield Completion(found.text, found.start, display_meta=found.hint)


def history_path(environ: Mapping[str, str]) -> str:
    """Where the history is, by the XDG rules; empty where there is no home."""
    state = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):
        home = environ.get("HOME", "")
        if not os.path.isabs(home):
            return ""
        state = os.path.join(home, ".local", "state")
    return os.path.join(state, "vmgahp", "console_history")


def own_file(path: str) -> str:
    """A history's file, made and ready to be written; `os.devnull` where there can be none.

    The file is the user's and closed to others (0600), in a directory that only he can write. As root in somebody
    else's home it is left alone.
    """
    try:
        directory = os.path.dirname(path)
        os.makedirs(directory, mode=0o700, exist_ok=True)
        found = os.stat(directory)
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return os.devnull
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(path, flags, 0o600), "r+b", buffering=0) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                return os.devnull
            os.fchmod(file.fileno(), 0o600)
            if found.st_size > LARGEST_HISTORY:
                kept = os.pread(file.fileno(), LARGEST_HISTORY // 2, found.st_size - LARGEST_HISTORY // 2)
                file.truncate(0)
                file.write(kept.partition(b"\n")[2])
    except OSError:
        return os.devnull
    return path


class History(FileHistory):
    """What a person typed: short commands, and never a job ad."""

    def __init__(self, path: str, interpreter: Interpreter) -> None:
        super().__init__(own_file(path))
        self._interpreter = interpreter

    def load_history_strings(self) -> Iterable[str]:
        return [line for line in super().load_history_strings() if line.isprintable()]

    def append_string(self, string: str) -> None:
        if self._interpreter.memorable(string) and self.get_strings()[-1:] != [string.strip()]:
            super().append_string(string.strip())

    def store_string(self, string: str) -> None:
        if string.isprintable() and len(string) <= LONGEST_LINE:
            with suppress(OSError):
                super().store_string(string)


def run(console: Console, environ: Mapping[str, str]) -> None:
    """Type and show until the console is done. Raises KeyboardInterrupt where a signal ends it."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    ending = [number for number, handler in handlers.items() if handler != signal.SIG_IGN]
    try:
        with create_app_session(output=PlainTextOutput(sys.stdout) if is_dumb_terminal() else None):
            asyncio.run(_Loop(console, environ).run(ending))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        for number in ending:
            signal.signal(number, handlers[number])


class _Loop:
    def __init__(self, console: Console, environ: Mapping[str, str]) -> None:
        self._console = console
        self._dumb = is_dumb_terminal()
        self._asking = False
        """On a dumb terminal: a prompt stands on the last line."""
        self._texts: list[str] = []
        """What is to be shown."""
        self._prompt: PromptSession[str] = PromptSession(
            history=History(history_path(environ), console.interpreter),
            completer=_Completer(console.interpreter),
            complete_while_typing=False,
            complete_style=CompleteStyle.MULTI_COLUMN,
            bottom_toolbar=self._toolbar,
            style=_NO_COLOR if environ.get("NO_COLOR") else _STYLE,
            enable_open_in_editor=False,
            refresh_interval=REFRESH,
            reserve_space_for_menu=5,
        )

    async def run(self, ending: Iterable[int]) -> None:
        """All of it; a signal of `ending` cancels it, for as an exception it would be taken for a Control-C."""
        main = asyncio.current_task()
        assert main is not None
        for number in ending:
            asyncio.get_running_loop().add_signal_handler(number, main.cancel)
        screen = self._console.screen
        write, screen.write = screen.write, self._texts.append
        following = asyncio.create_task(self._follow())
        typing = asyncio.create_task(self._type())
        try:
            await asyncio.wait({following, typing}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                typing.cancel()
                await asyncio.wait({typing})
            if not typing.cancelled():
                typing.result()
            await following  # no more prompts until the server has answered a QUIT
        finally:
            for task in (following, typing):
                while not task.done():  # what draws a prompt may take a cancellation for its own
                    task.cancel()
                    await asyncio.wait({task}, timeout=AGAIN)
            screen.write = write
            write("".join(self._texts))

    async def _type(self) -> None:
        console = self._console
        while not (console.done or console.conversation.quitting):
            await self._flush()
            self._asking = self._dumb
            try:
                typed = await self._prompt.prompt_async(lambda: ANSI(console.interpreter.prompt))
            except EOFError:
                self._answered()
                console.type(None)
            except KeyboardInterrupt:
                self._answered()
                console.interpreter.interrupted()
                console.turn()
            else:
                self._asking = False
                for line in typed.split("\n"):  # several lines can be pasted at once
                    console.type(line)

    def _answered(self) -> None:
        if self._asking:
            self._write("")

    async def _follow(self) -> None:
        """Take in what the server says, as it comes, and what has taken too long."""
        loop = asyncio.get_running_loop()
        while not self._console.done:
            heard = asyncio.Event()
            watched = self._console.client.descriptors()
            for descriptor in watched:
                loop.add_reader(descriptor, heard.set)
            with suppress(TimeoutError):
                due = self._console.timeout()
                await asyncio.wait_for(heard.wait(), REFRESH / 2 if due is None else min(due, REFRESH / 2))
            for descriptor in watched:
                loop.remove_reader(descriptor)
            asked = self._asking
            self._console.pump()
            await self._flush()
            if asked and not self._asking and not self._console.done:
                self._write(self._console.interpreter.prompt)
                self._asking = True

    async def _flush(self) -> None:
        """Show what is to be shown, above the line that is being typed."""
        text = "".join(self._texts)
        self._texts.clear()
        if text and self._prompt.app.is_running:
            await run_in_terminal(lambda: self._write(text))
        elif text:
            self._write(text)

    def _write(self, text: str) -> None:
        sys.stdout.write(f"\n{text}" if self._asking else text)
        sys.stdout.flush()
        self._asking = False

    def _toolbar(self) -> str:
        conversation = self._console.conversation
        parts = [f"VM {number} {state}" for number, state in conversation.vms.items()] or ["no VM"]
        for request in conversation.requests.pending.values():
            parts.append(f"{request} for {monotonic() - request.sent:.0f} s")
        if conversation.waited_for:
            parts.append("waiting; Control-C ends that")
        return " " + " | ".join(parts)
