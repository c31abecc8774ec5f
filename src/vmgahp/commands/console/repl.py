"""What a person or a pipe types, made into lines for the server, and the loop over both.

`Interpreter` is pure: job ads, from a file or from condor_q, are asked of a `Place`. `Console` puts it between a
server and a screen, and `pipe` is the loop for lines that come from a pipe; `prompt` has that of a terminal.
"""

import os
import select
import signal
from collections import deque
from collections.abc import Callable
from itertools import count
from time import monotonic

from vmgahp import lifecycle
from vmgahp.commands.console import commands, render
from vmgahp.commands.console.conversation import WRONG, Conversation, Typed
from vmgahp.commands.console.job_ad import Ad
from vmgahp.commands.console.launch import Place
from vmgahp.commands.console.render import BAD, LOG, NOTE, PLAIN, Screen, Shown, clean
from vmgahp.errors import ClientFault
from vmgahp.protocol.client import Client, ProtocolError
from vmgahp.protocol.requests import Request, RequestState, digits
from vmgahp.text import redact

LONGEST_INPUT = 1 << 20
"""Bytes of one typed line."""

END_DEADLINE = 60.0
"""Seconds that the server has for its end after QUIT or the end of its input."""

LOST_DEADLINE = 5.0
"""The same for one that has closed an end of its pipes without being asked to end."""

LAST_WORDS = 10
"""Lines of its standard error that are shown of a server that has failed."""

_LOG_LINES = 20


class Interpreter:
    """What one person types at one conversation.

    `asks` says whether somebody is there to be asked before VMs are destroyed; `patient`, for input that comes
    from a pipe, makes every short form wait for its result before the next line is taken.
    """

    def __init__(self, place: Place, now: float, *, asks: bool, patient: bool) -> None:
        self.conversation = Conversation(now, place.explanation)
        self.asks = asks
        self.patient = patient
        self._place = place
        self._last_ad: Ad | None = None
        self._asked_to_quit = False
        self._groups = count(1)
        self._now = now

    @property
    def prompt(self) -> str:
        """What the next line is asked for with."""
        return "classad> " if self.conversation.in_ad else "vmgahp> "

    def memorable(self, line: str) -> bool:
        """Whether a line that is about to be typed may be kept in a history: job ads may not."""
        return not self.conversation.in_ad and bool(line.strip()) and redact(line) == line

    def typed(self, line: str, now: float) -> None:
        """A line of the person's, without its end."""
        self._now = now
        words = line.split()
        if self.conversation.in_ad:
            self._ad_line(line)
        elif words:
            if self._asked_to_quit and words[0].lower() in ("y", "yes", "quit"):
                words = ["quit"]
            elif words[0] != "quit":
                self._asked_to_quit = False
            self._command(line, words)

    def _command(self, line: str, words: list[str]) -> None:
        word, rest = words[0], words[1:]
        own = commands.own(word)
        if own is None:
            self._raw(line, word)
        elif own.operation:
            target = self._target(word, rest)
            if target is not None:
                self._request([], own.operation, str(target))
        elif hasattr(self, f"do_{word}"):
            getattr(self, f"do_{word}")(rest)
        elif rest:
            self._wrong(f"{word} takes nothing after it.")
        else:
            self._push(Typed(own.other))

    def end_of_input(self, now: float) -> bool:
        """The person is done: Control-D, or the end of a pipe. Whether that ends it all, or was a question.

        A job ad that was being typed is ended, and nothing else happens where somebody types.
        """
        self._now = now
        conversation = self.conversation
        if conversation.in_ad:
            self._ad_line("CLASSAD_END")
            if self.asks:
                return False
        if not conversation.quitting:
            self.do_quit([])
        return conversation.quitting or not self._asked_to_quit

    def interrupted(self) -> None:
        """Control-C: nothing is waited for any longer."""
        self.conversation.waited_for.clear()
        self._asked_to_quit = False

    # The protocol as it is

    def _push(self, *typed: Typed) -> None:
        self.conversation.push(typed, self._now)

    def _raw(self, line: str, word: str) -> None:
        """A line of the protocol: its word is in upper case, or a command of the protocol in any."""
        typed = Typed(line)
        if not ((word.isupper() and word[0].isalpha()) or ("_" in word and commands.protocol(word))):
            near = commands.nearest(word)
            hint = f"did you mean {near}?" if near else "help lists all there is."
            self._wrong(f"There is no command {clean(word)}: {hint}")
        elif typed.command == "QUIT":
            self.do_quit([])
        else:
            self._push(typed)

    def _ad_line(self, line: str) -> None:
        ends = line.strip().upper() == "CLASSAD_END"
        self.conversation.in_ad = not ends
        self._push(Typed("CLASSAD_END" if ends else line))

    def _wrong(self, text: str) -> None:
        self.conversation.fail(text, WRONG)

    # Commands of the console's own, each with the words after it

    def _ad_of(self, find: Callable[[str, str], Ad], *words: str) -> Ad | None:
        try:
            return find(*words)
        except ClientFault as fault:
            self.conversation.fail(f"{fault.sentence}.")
            return None

    def do_start(self, words: list[str]) -> None:
        live = len(words) > 1 and words[0] == "job"
        rest = words[1:] if live else words
        if not 0 < len(rest) <= 2:
            usage = "start takes the file of a job ad, or job and its id, and then a VM type if need be."
            self._wrong(usage)
            return
        vm_type = rest[1].lower() if len(rest) == 2 else ""
        ad = self._ad_of(self._place.ad_of_job if live else self._place.ad_of_file, rest[0], vm_type)
        if ad is None:
            return
        self._last_ad = ad
        self._show_notes(ad)
        group = next(self._groups)
        summary = f"> ({len(ad.lines)} attributes of {clean(ad.name)})"
        first, *others = ad.lines
        block = [Typed("CLASSAD", group=group), Typed(first, group=group, shown=summary)]
        block += (Typed(line, group=group, shown="") for line in others)
        self._request([*block, Typed("CLASSAD_END", group=group)], lifecycle.START, ad.vm_type)

    def _request(self, before: list[Typed], operation: str, argument: str) -> None:
        request = self.conversation.requests.new(operation, argument)
        if self.patient:
            self.conversation.waited_for.add(request.number or 0)
        self._push(*before, Typed(request.line, group=before[0].group if before else 0))

    def _target(self, word: str, words: list[str]) -> int | None:
        """The VM that is meant; None, and why is shown, where nobody can tell."""
        vms = self.conversation.vms
        number = digits(words[0]) if words else None
        if len(words) > 1:
            why = f"{word} takes the number of one VM."
        elif number is not None:
            return number
        elif words:
            why = f"{clean(words[0])} is not the number of a VM."
        elif len(vms) == 1:
            return next(iter(vms))
        elif vms:
            why = f"Which VM? There are {', '.join(map(str, vms))}."
        elif self._starting():
            why = "The VM has not started yet; wait waits for it."
        else:
            why = "No VM was started here: start one, or say a number."
        self._wrong(why)
        return None

    def _starting(self) -> list[Request]:
        pending = self.conversation.requests.pending.values()
        return [request for request in pending if request.operation == lifecycle.START]

    def do_vms(self, _: list[str]) -> None:
        conversation = self.conversation
        if not conversation.vms:
            conversation.show(PLAIN, "  No VM was started here, or none is left.")
        for number, state in conversation.vms.items():
            conversation.show(PLAIN, f"  VM {number}: {state}")
        for request in conversation.requests.pending.values():
            waited = render.duration(self._now - request.sent)
            conversation.show(PLAIN, f"  {request} has no result yet, after {waited}")

    def do_wait(self, words: list[str]) -> None:
        conversation = self.conversation
        pending = conversation.requests.pending
        number = digits(words[0].removeprefix("#")) if len(words) == 1 else None
        if not words:
            conversation.waited_for |= set(pending)
        elif number is None:
            self._wrong("wait takes the number of a request, or nothing.")
        elif number in pending:
            conversation.waited_for.add(number)
        else:
            conversation.show(NOTE, f"  Request #{number} has no result to wait for.")

    def do_ad(self, words: list[str]) -> None:
        ad = self._ad_of(self._place.ad_of_file, " ".join(words), "") if words else self._last_ad
        if ad is not None:
            for line in ad.lines:
                self.conversation.show(PLAIN, f"  {clean(redact(line))}")
            self._show_notes(ad)
        elif not words:
            self.conversation.show(PLAIN, "  No job ad was sent yet.")

    def _show_notes(self, ad: Ad) -> None:
        for note in ad.notes:
            self.conversation.show(NOTE, f"  {note}")

    def do_log(self, words: list[str]) -> None:
        conversation = self.conversation
        lines = digits(words[0]) if words else _LOG_LINES
        if len(words) == 1 and words[0] in ("on", "off"):
            conversation.live_log = words[0] == "on"
        elif len(words) > 1 or lines is None:
            self._wrong("log takes a number of lines, on or off.")
        else:
            for line in list(conversation.log)[max(0, len(conversation.log) - lines) :]:
                conversation.show(LOG, f"| {line}")
            if not conversation.log:
                conversation.show(PLAIN, "  The server has said nothing on its standard error.")

    def do_wire(self, words: list[str]) -> None:
        if words not in (["on"], ["off"]):
            self._wrong("wire is on or off.")
        else:
            self.conversation.wire = words == ["on"]

    def do_async(self, words: list[str]) -> None:
        if words not in (["on"], ["off"]):
            self._wrong("async is on or off.")
        else:
            self._push(Typed(f"ASYNC_MODE_{words[0].upper()}"))

    def do_help(self, words: list[str]) -> None:
        lines = commands.about(" ".join(words)) if words else commands.overview()
        for line in lines:
            self.conversation.show(line.kind, line.text)
        if lines[0].kind == BAD:
            self.conversation.status = WRONG

    def do_quit(self, _: list[str]) -> None:
        conversation = self.conversation
        living = [f"VM {number}" for number, state in conversation.vms.items() if state != lifecycle.STOPPED]
        living += [f"what {request} starts" for request in self._starting()]
        if living and self.asks and not self._asked_to_quit:
            self._asked_to_quit = True
            question = "quit again to do that, or type anything else to stay."
            conversation.show(NOTE, f"{' and '.join(living)} would be destroyed: {question}")
            return
        if living:
            conversation.show(NOTE, f"{' and '.join(living)} will be destroyed.")
        self._push(Typed("QUIT"))


class Console:
    """An interpreter, its server, and a screen. What is typed is kept until the interpreter takes it."""

    def __init__(self, interpreter: Interpreter, client: Client, screen: Screen) -> None:
        self.interpreter = interpreter
        self.conversation = interpreter.conversation
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
        conversation = self.conversation
        try:
            while (line := self.client.next_line()) is not None:
                conversation.received(line, monotonic())
                self._send()
            conversation.tick(monotonic())
            self._send()
            while self._typed and self._ready():
                typed = self._typed.popleft()
                if typed is not None:
                    self.interpreter.typed(typed, monotonic())
                elif not self._end_of_input():
                    self._typed.clear()
                self._send()
        except ProtocolError as error:
            self._lose(error)
        self.flush()
        if self.client.ended and not conversation.quitting:
            self.lost = self.lost or "it has ended its output"
        self.lost = self.lost or conversation.broken
        self.done = bool(self.lost) or (conversation.quitting and (self.client.ended or conversation.settled()))

    def _lose(self, error: ProtocolError) -> None:
        self.lost = self.lost or str(error).partition("; its log:")[0]

    def _end_of_input(self) -> bool:
        """The end of input was typed; whether that is the end."""
        conversation = self.conversation
        pending = conversation.requests.pending
        if pending and not self.interpreter.asks and not conversation.quitting:
            # Results that are still to come are waited for, then the end comes again.
            timely = (number for number, request in pending.items() if request.state is RequestState.ACCEPTED)
            conversation.waited_for.update(timely)
            if conversation.waited_for:
                self._typed.appendleft(None)
                return True
        return self.interpreter.end_of_input(monotonic())

    def _ready(self) -> bool:
        """Whether a typed line is taken now; where somebody can be asked, that is at any time."""
        conversation = self.conversation
        if self.interpreter.patient:
            return conversation.settled()
        return conversation.requests.greeted and not conversation.waited_for

    def _send(self) -> None:
        for line in self.conversation.take_sends():
            self.client.send(line)

    def flush(self) -> None:
        """Show what is to be shown."""
        for line in self.conversation.take_shown():
            self.screen.show(line)

    def timeout(self) -> float | None:
        """Seconds until `turn` is due, whatever happens; None for never."""
        deadline = self.conversation.next_deadline()
        return None if deadline is None else max(0.0, deadline - monotonic())

    def pump(self) -> None:
        """Take in what the server has said, and do what follows from it."""
        try:
            self.client.pump()
        except ProtocolError as error:
            self._lose(error)
        self.turn()

    def finish(self) -> bool:
        """End the server, and say how it ended; whether that was as it should be."""
        killed = bool(self.conversation.broken)
        try:
            if killed:
                self.client.kill()
                self.client.pump()
            else:
                self.client.finish(LOST_DEADLINE if self.lost else END_DEADLINE)
        except ProtocolError as error:
            killed = True
            self._lose(error)
        self.conversation.tell_all()
        self.flush()
        status = self.client.process.poll()
        if not self.lost and not status:
            return True
        said = list(self.conversation.log)[-LAST_WORDS:]
        if said:
            self.screen.show(Shown(BAD, f"The server says: {self.conversation.reason()}"))
        why = self.lost or "it has ended"
        ended = "" if status is None or killed else f" Its {_exit(status)}."
        self.screen.show(Shown(BAD, f"The server is lost: {clean(why)}.{ended}"))
        for line in said if len(said) > 1 else ():
            self.screen.show(Shown(NOTE, f"| {line}"))
        return False


def _exit(status: int) -> str:
    if status >= 0:
        return f"exit status is {status}"
    try:
        return f"end was {signal.Signals(-status).name}"
    except ValueError:
        return f"end was signal {-status}"


def pipe(console: Console, stdin: int) -> None:
    """Lines from a pipe, each taken when the one before it is settled; no more is read than can be taken."""
    buffer = bytearray()
    ended = False
    while not console.done:
        end = buffer.find(b"\n")
        if end < 0 and (ended or len(buffer) >= LONGEST_INPUT):
            end = len(buffer)
        if console.wants_input and ((end >= 0 and buffer) or ended):
            line = bytes(buffer[:end]).removesuffix(b"\r").decode("utf-8", "surrogateescape")
            console.type(line if buffer else None)
            del buffer[: end + 1]
            continue
        watched = console.client.descriptors()
        if not ended and console.wants_input:
            watched.append(stdin)
        if stdin in select.select(watched, [], [], console.timeout())[0]:
            data = os.read(stdin, 65536)
            buffer += data
            ended = not data
        console.pump()
