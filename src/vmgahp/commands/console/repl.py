"""What a person types, made into lines for the server. Pure; the wire is `conversation`'s.

Whatever needs the world outside, a job ad's file or condor_q, is asked of `Outside`.
"""

from vmgahp import lifecycle
from vmgahp.commands.console import commands, help, render
from vmgahp.commands.console.conversation import Conversation, Out
from vmgahp.commands.console.job_ad import Ad, public_lines
from vmgahp.commands.console.render import BAD, LOG, NOTE, PLAIN
from vmgahp.errors import ClientFault

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    class Outside(Protocol):
        """What a session needs of the world."""

        def ad_of_file(self, path: str, vm_type: str) -> Ad:
            """A job ad from a file, ready to be sent. Raises `ClientFault`."""

        def ad_of_job(self, job: str, vm_type: str) -> Ad:
            """The ad of a job in the queue, ready to be sent. Raises `ClientFault`."""

        def explanation(self) -> str:
            """The sentences that a server left about the START that has failed just now."""


_LOG_LINES = 20


class Session:
    """One person at one conversation.

    `asks` says whether somebody is there to be asked before VMs are destroyed; `patient`, for input that comes
    from a pipe, makes every short form wait for its result before the next line is taken.
    """

    def __init__(self, outside: "Outside", now: float, *, serves: str, asks: bool, patient: bool) -> None:
        self.conversation = Conversation(now, outside.explanation)
        self.serves = serves
        """The server's VM type, as far as it is known."""
        self.last_ad: Ad | None = None
        self._outside = outside
        self.asks = asks
        self.patient = patient
        self._asked_to_quit = False
        self._groups = 0
        self._handlers: dict[str, Callable[[list[str], float], None]] = {
            "start": self._start,
            "vms": self._vms,
            "wait": self._wait,
            "ad": self._ad,
            "log": self._log,
            "wire": self._wire,
            "async": self._async,
            "help": self._help,
            "quit": self._quit,
        }

    @property
    def prompt(self) -> str:
        """What the next line is asked for with."""
        return "classad> " if self.conversation.in_ad else "vmgahp> "

    def memorable(self, line: str) -> bool:
        """Whether a line that is about to be typed may be kept in a history: job ads may not."""
        from vmgahp.text import redact

        return not self.conversation.in_ad and bool(line.strip()) and redact(line) == line

    def typed(self, line: str, now: float) -> None:
        """A line of the person's, without its end."""
        talk = self.conversation
        if talk.in_ad:
            self._ad_line(line, now)
            return
        words = line.split()
        if not words:
            return
        if self._asked_to_quit and words[0].lower() in ("y", "yes", "quit"):
            words = ["quit"]
        elif words[0] != "quit":
            self._asked_to_quit = False
        own = commands.own(words[0])
        if own is None:
            if _is_raw(words[0]):
                self._raw(line, now)
            else:
                near = help.nearest(words[0])
                hint = f"did you mean {near}?" if near else "help lists all there is."
                talk.fail(f"There is no command {render.clean(words[0])}: {hint}")
        elif own.takes == "vm":
            self._operate(own, words[1:], now)
        elif words[0] in self._handlers:
            self._handlers[words[0]](words[1:], now)
        elif len(words) > 1:
            talk.fail(f"{words[0]} takes nothing after it.")
        else:
            talk.push([Out(own.protocol)], now)

    def end_of_input(self, now: float) -> bool:
        """The person is done: Control-D, or the end of a pipe. Whether that ends the session, or was a question.

        A job ad that was being typed is ended, and nothing else happens where somebody types.
        """
        talk = self.conversation
        if talk.in_ad:
            self._ad_line("CLASSAD_END", now)
            if self.asks:
                return False
        if not talk.quitting:
            self._quit([], now)
        return talk.quitting or not self._asked_to_quit

    def interrupted(self) -> None:
        """Control-C: nothing is waited for any longer."""
        self.conversation.waited_for.clear()
        self._asked_to_quit = False

    # The protocol as it is

    def _raw(self, line: str, now: float) -> None:
        out = Out(line)
        if out.command == "QUIT":
            self._quit([], now)
        else:
            self.conversation.push([out], now)

    def _ad_line(self, line: str, now: float) -> None:
        talk = self.conversation
        if line.strip().upper() == "CLASSAD_END":
            talk.in_ad = False
            talk.push([Out("CLASSAD_END")], now)
        else:
            talk.push([Out(line, expects=False)], now)

    # Short forms

    def _start(self, words: list[str], now: float) -> None:
        talk = self.conversation
        live = len(words) > 1 and words[0] == "job"
        rest = words[1:] if live else words
        if not 0 < len(rest) <= 2:
            talk.fail("start takes the file of a job ad, or job and its id, and then a VM type if need be.")
            return
        vm_type = rest[1].lower() if len(rest) == 2 else ""
        try:
            ad = (self._outside.ad_of_job if live else self._outside.ad_of_file)(rest[0], vm_type)
        except ClientFault as fault:
            talk.fail(f"{fault.sentence}.")
            return
        self.last_ad = ad
        for note in ad.notes:
            talk.show(NOTE, f"  {note}")
        self._groups += 1
        summary = f"> ({len(ad.lines)} attributes of {render.clean(ad.name)})"
        outs = [Out("CLASSAD", group=self._groups)]
        for line in ad.lines:
            outs.append(Out(line, expects=False, group=self._groups, shown=summary))
            summary = ""
        outs.append(Out("CLASSAD_END", group=self._groups))
        self._request(outs, lifecycle.START, ad.vm_type, now)

    def _operate(self, own: commands.Own, words: list[str], now: float) -> None:
        target = self._target(own.word, words)
        if target is not None:
            self._request([], commands.OPERATIONS[own.word], str(target), now)

    def _request(self, before: list[Out], operation: str, argument: str, now: float) -> None:
        talk = self.conversation
        number = talk.fresh_id()
        if self.patient:
            talk.waited_for.add(number)
        line = f"{commands.VM_PREFIX}{operation} {number} {argument}"
        talk.push([*before, Out(line, group=self._groups if before else 0)], now)

    def _target(self, word: str, words: list[str]) -> int | None:
        """The VM that is meant; None, and why is shown, where nobody can tell."""
        talk = self.conversation
        if len(words) > 1:
            talk.fail(f"{word} takes the number of one VM.")
        elif words:
            number = render.number(words[0])
            if number is not None:
                return number
            talk.fail(f"{render.clean(words[0])} is no number of a VM.")
        elif len(talk.vms) == 1:
            return next(iter(talk.vms))
        elif talk.vms:
            talk.fail(f"Which VM? There are {', '.join(map(str, talk.vms))}.")
        elif any(request.operation == lifecycle.START for request in talk.requests.values()):
            talk.fail("The VM has not started yet; wait waits for it.")
        else:
            talk.fail("No VM was started here: start one, or say a number.")
        return None

    def _vms(self, words: list[str], now: float) -> None:
        talk = self.conversation
        if not talk.vms:
            talk.show(PLAIN, "  No VM was started here, or none is left.")
        for number, state in talk.vms.items():
            talk.show(PLAIN, f"  VM {number}: {state}")
        for request in talk.requests.values():
            talk.show(PLAIN, f"  {request} has no result yet, after {render.duration(now - request.asked)}")

    def _wait(self, words: list[str], now: float) -> None:
        talk = self.conversation
        if not words:
            talk.waited_for |= set(talk.requests)
            return
        number = render.number(words[0].removeprefix("#")) if len(words) == 1 else None
        if number is None:
            talk.fail("wait takes the number of a request, or nothing.")
        elif number in talk.requests:
            talk.waited_for.add(number)
        else:
            talk.show(NOTE, f"  Request #{number} waits for no result.")

    def _ad(self, words: list[str], now: float) -> None:
        talk = self.conversation
        ad = self.last_ad
        if words:
            try:
                ad = self._outside.ad_of_file(" ".join(words), "")
            except ClientFault as fault:
                talk.fail(f"{fault.sentence}.")
                return
        if ad is None:
            talk.show(PLAIN, "  No job ad was sent yet.")
            return
        for line in public_lines(ad.lines):
            talk.show(PLAIN, f"  {render.clean(line)}")
        for note in ad.notes:
            talk.show(NOTE, f"  {note}")

    def _log(self, words: list[str], now: float) -> None:
        talk = self.conversation
        word = words[0] if words else str(_LOG_LINES)
        count = render.number(word)
        if len(words) > 1 or (count is None and word not in ("on", "off")):
            talk.fail("log takes a number of lines, on or off.")
        elif count is None:
            talk.live_log = word == "on"
        else:
            for line in list(talk.log)[max(0, len(talk.log) - count) :]:
                talk.show(LOG, f"| {line}")
            if not talk.log:
                talk.show(PLAIN, "  The server has said nothing on its standard error.")

    def _wire(self, words: list[str], now: float) -> None:
        if words not in (["on"], ["off"]):
            self.conversation.fail("wire is on or off.")
        else:
            self.conversation.wire = words == ["on"]

    def _async(self, words: list[str], now: float) -> None:
        if words not in (["on"], ["off"]):
            self.conversation.fail("async is on or off.")
        else:
            self.conversation.push([Out(f"ASYNC_MODE_{words[0].upper()}")], now)

    def _help(self, words: list[str], now: float) -> None:
        lines = help.about(" ".join(words)) if words else help.overview()
        for line in lines:
            self.conversation.show(line.kind, line.text)
        if lines[0].kind == BAD:
            self.conversation.failures += 1

    def _quit(self, words: list[str], now: float) -> None:
        talk = self.conversation
        living = [f"VM {number}" for number, state in talk.vms.items() if state != lifecycle.STOPPED]
        living += [
            f"what {request} starts"
            for request in talk.requests.values()
            if request.operation == lifecycle.START
        ]
        if living and self.asks and not self._asked_to_quit:
            self._asked_to_quit = True
            question = "quit again to do that, or type anything else to stay."
            talk.show(NOTE, f"{' and '.join(living)} would be destroyed: {question}")
            return
        if living:
            talk.show(NOTE, f"{' and '.join(living)} will be destroyed.")
        talk.push([Out("QUIT")], now)


def _is_raw(word: str) -> bool:
    """Whether a word begins a line of the protocol: it is in upper case, or a command of it in any."""
    return (word.isupper() and word[0].isalpha()) or ("_" in word and commands.protocol(word) is not None)
