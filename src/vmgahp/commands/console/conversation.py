"""The conversation as a person follows it: requests in step, and what is known of the VMs. Pure.

Lines from the server go in with `received`, what to send comes out of `take_sends` and what to show out of
`take_shown`. As the real client does, the next request is sent when the last one was answered, and an R makes a
RESULTS follow. `vmgahp.protocol.requests` says what each line is.
"""

from collections import deque
from collections.abc import Callable, Iterable

from vmgahp import lifecycle
from vmgahp.commands.console import render
from vmgahp.commands.console.render import BAD, GOOD, LOG, NOTE, PLAIN, RECEIVED, SENT, Shown, clean
from vmgahp.protocol import error_words, wire
from vmgahp.protocol.requests import Kind, Request, Requests, RequestState, digits, result_count
from vmgahp.text import redact

FETCH_INTERVAL = 0.5
"""Seconds between two RESULTS while somebody waits and the server is told to say no R."""

LOG_LINES = 1000
"""Lines of the server's standard error that are kept."""

REFUSED = (
    "was refused: an unknown command, a wrong number of words, a request id that is used or no positive number, an "
    "unknown VM type, or a VM id that is no number."
)


class Typed(Request):
    """A line for the server, and how it is shown."""

    def __init__(self, line: str, *, group: int = 0, shown: str | None = None) -> None:
        super().__init__(line)
        self.group = group
        """Lines of one number belong together: when one is refused, the rest is not sent."""
        self.shown = f"> {clean(redact(line))}" if shown is None else shown
        """What is shown in its place; empty for nothing."""


class Conversation:
    """One server, one person. `explain` is asked for the sentences that a server left about a failed START."""

    def __init__(self, now: float, explain: Callable[[], str]) -> None:
        self.requests = Requests(now)
        self.quitting = False
        """QUIT was sent."""
        self.broken = ""
        """Why this server cannot be talked to any longer; empty while it can."""
        self.failures = 0
        """Answers that were errors, and lines that could not be sent."""
        self.wire = True
        self.live_log = False
        self.in_ad = False
        """A CLASSAD was sent by hand, and its lines are typed."""
        self.vms: dict[int, str] = {}
        """VM id -> its state, as far as is known."""
        self.waited_for: set[int] = set()
        """The requests whose results come before anything else that was typed."""
        self.log: deque[str] = deque(maxlen=LOG_LINES)
        self._explain = explain
        self._began = self._fetched = now
        self._outgoing: deque[Typed] = deque()
        self._sends: list[str] = []
        self._shown: list[Shown] = []

    # What goes in and comes out

    def take_sends(self) -> list[str]:
        """Lines to be written to the server, once."""
        sends, self._sends = self._sends, []
        return sends

    def take_shown(self) -> list[Shown]:
        """Lines to be shown, once."""
        shown, self._shown = self._shown, []
        return shown

    def show(self, kind: str, text: str) -> None:
        self._shown.append(Shown(kind, text))

    def fail(self, text: str) -> None:
        """Show what went wrong, and count it."""
        self.failures += 1
        self.show(BAD, text)

    def push(self, typed: Iterable[Typed], now: float) -> None:
        """Send lines, each when the one before it was answered."""
        self._outgoing += typed
        self._advance(now)

    def settled(self) -> bool:
        """Whether the next typed line may be taken: everything is answered, and nothing is waited for."""
        asked = self.requests
        return asked.greeted and not (self._outgoing or asked.unanswered or asked.results_left or self.waited_for)

    def logged(self, line: str) -> None:
        """A line of the server's standard error."""
        text = clean(redact(line))
        self.log.append(text)
        if self.live_log:
            self.show(LOG, f"| {text}")

    def received(self, line: str, now: float) -> None:
        """A line of the server."""
        received = self.requests.received(line)
        request = received.request
        took = ""
        if received.kind is Kind.GREETING:
            if not self.requests.greeted:
                self.show(BAD, f"< {clean(line)}")
                return
            took = self._took(self._began, now)
        elif received.kind is Kind.REPLY and request is not None:
            took = self._took(request.sent, now)
        if self.wire and received.kind is not Kind.UNASKED:
            self.show(RECEIVED, f"< {clean(line)}{took}")
        match received.kind:
            case Kind.READY:
                fetching = (*self.requests.unanswered, *self._outgoing)
                if not any(typed.command == "RESULTS" for typed in fetching):
                    self._outgoing.appendleft(Typed("RESULTS"))
            case Kind.REPLY if isinstance(request, Typed):
                self._reply(request)
            case Kind.RESULT if request is not None:
                self.waited_for.discard(request.number or 0)
                self._result(request, self._took(request.sent, now))
            case Kind.RESULT:
                self.show(NOTE, f"No request waits for this result: {clean(line)}")
            case Kind.UNASKED:
                self.fail(f"The server says, without being asked: {clean(line)}")
        self._advance(now)

    def next_deadline(self) -> float | None:
        """When `tick` should be called at the latest, or None."""
        due = self.requests.next_deadline()
        if not self._polls():
            return due
        fetch = self._fetched + FETCH_INTERVAL
        return fetch if due is None else min(due, fetch)

    def tick(self, now: float) -> None:
        """Notice what has taken too long, and fetch results where no R announces them."""
        self.broken = self.broken or clean(self.requests.broken(now))
        for request in self.requests.overdue(now):
            self.waited_for.discard(request.number or 0)
            waited = render.duration(now - request.sent)
            self.fail(f"{request} has no result after {waited}: condor_starter would give up now.")
        if self._polls() and now >= self._fetched + FETCH_INTERVAL:
            self._fetched = now
            self.push([Typed("RESULTS")], now)

    def _polls(self) -> bool:
        asked = self.requests
        return bool(self.waited_for) and not (asked.asynchronous or asked.unanswered or self._outgoing)

    def _advance(self, now: float) -> None:
        asked = self.requests
        while asked.greeted and self._outgoing and not (asked.unanswered or asked.results_left):
            typed = self._outgoing.popleft()
            self._sends.append(typed.line)
            if typed.shown and self.wire:
                self.show(SENT, typed.shown)
            if asked.sent(typed, now) and typed.command == "QUIT":
                self.quitting = True

    def _took(self, began: float, now: float) -> str:
        return f"   ({render.duration(now - began)})"

    # Replies

    def _reply(self, asked: Typed) -> None:
        if asked.state is not RequestState.REFUSED:
            self._accepted(asked)
            return
        dropped = [asked]
        while asked.group and self._outgoing and self._outgoing[0].group == asked.group:
            dropped.append(self._outgoing.popleft())
        self.waited_for -= {typed.number for typed in dropped if typed.number is not None}
        what = clean(asked.command) or "An empty line"
        reply = asked.reply or ""
        match wire.words(reply)[0]:
            case "E":
                self.fail(f"{what} {REFUSED}")
            case "F":
                said = " ".join(map(render.error, asked.words())) or "no reason was given"
                self.fail(f"{what} failed: {said}")
            case _:
                self.fail(f"{what} was answered with an invalid reply: {clean(reply)}")

    def _accepted(self, asked: Typed) -> None:
        words = [clean(word) for word in asked.words()]
        said = ", ".join(words)
        match asked.command:
            case "RESULTS":
                if result_count(asked.reply or "") is None:
                    self.fail(f"RESULTS was answered without a number of results: {said}")
            case "CLASSAD":
                self.in_ad = not asked.group
            case "ASYNC_MODE_ON":
                self.show(NOTE, "The server says R when a result is there.")
            case "ASYNC_MODE_OFF":
                self.show(NOTE, "The server no longer says R.")
            case "VERSION":
                self.show(PLAIN, f"  It calls itself {' '.join(words).strip(' $')}")
            case "COMMANDS":
                self.show(PLAIN, f"  It knows {said}")
            case "SUPPORT_VMS":
                self.show(PLAIN, f"  START takes the types {said}")
            case "QUIT":
                self.show(PLAIN, "  The VMs are gone; the server ends.")

    # Results

    def _result(self, request: Request, took: str) -> None:
        success, *words = (*request.result, "") if len(request.result) == 1 else request.result
        if success == "0":
            self.show(GOOD, f"{request}: {self._success(request, words)}{took}")
            return
        self.fail(f"{request} failed: {render.error(words[0])}{took}")
        if request.operation == lifecycle.START:
            if error_words.meaning(words[0]):
                self.show(NOTE, f"  {error_words.fate(words[0])}")
            for said in self._explain().splitlines():
                self.show(NOTE, f"  It left this: {clean(said)}")

    def _success(self, request: Request, words: list[str]) -> str:
        target = digits(request.argument)
        vm = -1 if target is None else target
        match request.operation:
            case lifecycle.START:
                number = digits(words[0])
                if number is None:
                    return f"the reply has no VM id: {clean(words[0])}"
                self.vms[number] = lifecycle.RUNNING
                return f"VM {number} runs"
            case lifecycle.STATUS:
                state = render.fields(words).get("STATUS", "")
                if vm in self.vms and state:
                    self.vms[vm] = clean(state)
                return render.status(words)
            case lifecycle.GETPID:
                return "no process" if words[0] == "0" else f"process {clean(words[0])}"
        state = self.vms.get(vm, "")
        if request.operation == lifecycle.STOP:
            self.vms.pop(vm, None)
        elif state:
            self.vms[vm] = lifecycle.TRANSITIONS.get((state, request.operation), state)
        said = "" if words[0] in ("", error_words.NOTHING) else f", {clean(' '.join(words))}"
        return f"done{said}"
