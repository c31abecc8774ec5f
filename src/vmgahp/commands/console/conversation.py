"""The conversation as a person follows it: requests in step, and what is known of the VMs. Pure.

Lines from the server go in with `received`, what to send comes out of `take_sends` and what to show out of
`take_shown`. As the real client does, the next request is sent when the last one was answered, and an R makes a
RESULTS follow. `vmgahp.protocol.requests` says what each line is.
"""

import re
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

PATIENCE = 0.5
"""Seconds that the server's own sentence on a failure is waited for: its log may begin after its first answers."""

LOG_LINES = 1000
"""Lines of the server's standard error that are kept."""

FAILED, WRONG = 1, 2
"""Exit statuses: a request that failed or was refused, and a line that is no command."""

_OF_THIS_PACKAGE = r"(?:\b{0}(?: of VM \d+)? (?:failed|refused): |\brefused {0}: |\brefused (?=an unknown command))(.+)"
"""How the log of `vmgahp.protocol.session` says why a request failed."""

_OF_ANY = (
    re.compile("VMGAHP_ERR_"),
    re.compile(r"^\S+: "),  # a program's name, or an exception's
    re.compile("fail|error|can(?:not|'t)|could not|unable|denied|refuse|invalid", re.IGNORECASE),
)
"""What a line has in it that says why, of any server, the surest first."""

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
        self.logged = 0
        """How many lines the server had logged when this was sent."""
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
        self.status = 0
        """The exit status of the last failure: an answer that was an error, a line that could not be sent."""
        self.wire = True
        self.live_log = False
        self.in_ad = False
        """A CLASSAD was sent by hand, and its lines are typed."""
        self.vms: dict[int, str] = {}
        """VM id -> its state, as far as is known."""
        self.waited_for: set[int] = set()
        """The requests whose results come before anything else that was typed."""
        self.log: deque[str] = deque(maxlen=LOG_LINES)
        self.logged_lines = 0
        """How many there have been."""
        self._untold: list[tuple[float, Request, Callable[[str], None]]] = []
        """Failures without a sentence of the server's so far: how long it is waited for, what failed, who tells it."""
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

    def fail(self, text: str, status: int = FAILED) -> None:
        """Show what went wrong, and remember that something did."""
        self.status = status
        self.show(BAD, text)

    def push(self, typed: Iterable[Typed], now: float) -> None:
        """Send lines, each when the one before it was answered."""
        self._outgoing += typed
        self._advance(now)

    def settled(self) -> bool:
        """Whether the next typed line may be taken: everything is answered, and nothing is waited for."""
        asked = self.requests
        expected = asked.unanswered or asked.results_left or self.waited_for or self._untold
        return asked.greeted and not (self._outgoing or expected)

    def logged(self, line: str) -> None:
        """A line of the server's standard error."""
        text = clean(redact(line))
        if text.strip():
            self.log.append(text)
            self.logged_lines += 1
        if self.live_log:
            self.show(LOG, f"| {text}")
        self._tell()

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
                self._reply(request, now)
            case Kind.RESULT if request is not None:
                self.waited_for.discard(request.number or 0)
                self._result(request, now)
            case Kind.RESULT:
                self.show(NOTE, f"No request waits for this result: {clean(line)}")
            case Kind.UNASKED:
                self.fail(f"The server says, without being asked: {clean(line)}")
        self._advance(now)

    def next_deadline(self) -> float | None:
        """When `tick` should be called at the latest, or None."""
        dues = [due for due, _, _ in self._untold]
        if (due := self.requests.next_deadline()) is not None:
            dues.append(due)
        if self._polls():
            dues.append(self._fetched + FETCH_INTERVAL)
        return min(dues, default=None)

    def tick(self, now: float) -> None:
        """Notice what has taken too long, and fetch results where no R announces them."""
        self._tell(now)
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
            typed.logged = self.logged_lines
            self._sends.append(typed.line)
            if typed.shown and self.wire:
                self.show(SENT, typed.shown)
            if asked.sent(typed, now) and typed.command == "QUIT":
                self.quitting = True

    def _took(self, began: float, now: float) -> str:
        return f"   ({render.duration(now - began)})"

    # Replies

    def _reply(self, asked: Typed, now: float) -> None:
        if asked.state is not RequestState.REFUSED:
            self._accepted(asked)
            return
        dropped = [asked]
        while asked.group and self._outgoing and self._outgoing[0].group == asked.group:
            dropped.append(self._outgoing.popleft())
        self.waited_for -= {typed.number for typed in dropped if typed.number is not None}
        what = clean(asked.command) or "An empty line"
        reply = asked.reply or ""
        said = " ".join(map(render.error, asked.words())) or "no reason was given"
        match wire.words(reply)[0]:
            case "E":
                self._fail(
                    asked, now, lambda why: self.fail(f"{what} was refused: {why}" if why else f"{what} {REFUSED}")
                )
            case "F":
                self._fail(asked, now, lambda why: self._say(f"{what} failed", why, said))
            case _:
                self.fail(f"{what} was answered with an invalid reply: {clean(reply)}")

    # Failures

    def _fail(self, asked: Request, now: float, tell: Callable[[str], None]) -> None:
        """Have a failure told with the server's sentence on it, or without one after a moment."""
        self._untold.append((now + PATIENCE, asked, tell))
        self._tell()

    def _tell(self, now: float = 0.0) -> None:
        untold, self._untold = self._untold, []
        for due, asked, tell in untold:
            if (why := self.reason(asked)) or now >= due:
                tell(why)
            else:
                self._untold.append((due, asked, tell))

    def tell_all(self) -> None:
        """Tell what is still to be told: the server says no more."""
        self._tell(float("inf"))

    def _say(self, what: str, why: str, word: str, took: str = "") -> None:
        """The sentence first, then what the word of the protocol means."""
        self.fail(f"{what}: {why or word}{took}")
        if why:
            self.show(NOTE, f"  {word}")

    def reason(self, asked: Request | None = None) -> str:
        """The server's own sentence on why something failed, from its log; empty where there is none.

        What was logged since `asked` was sent is looked at, the newest first; without it all that is kept.
        """
        lines = list(reversed(self.log))
        if not isinstance(asked, Typed):
            return _telling(lines) or (lines[0] if lines else "")
        of_it = re.compile(_OF_THIS_PACKAGE.format(re.escape(asked.operation or asked.command)))
        lines = lines[: self.logged_lines - asked.logged]
        own = next(filter(None, map(of_it.search, lines)), None)
        return own[1] if own else _telling(lines)

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

    def _result(self, request: Request, now: float) -> None:
        took = self._took(request.sent, now)
        success, *words = (*request.result, "") if len(request.result) == 1 else request.result
        if success == "0":
            self.show(GOOD, f"{request}: {self._success(request, words)}{took}")
        elif request.operation == lifecycle.START and (left := self._explain()):
            self._failed(request, words[0], took, *map(clean, left.splitlines()))
        else:
            self._fail(request, now, lambda why: self._failed(request, words[0], took, why))

    def _failed(self, request: Request, code: str, took: str, why: str, *more: str) -> None:
        self._say(f"{request} failed", why.removeprefix(f"{code}: "), render.error(code), took)
        if request.operation == lifecycle.START and error_words.meaning(code):
            self.show(NOTE, f"  {error_words.fate(code)}")
        for line in more:
            self.show(NOTE, f"  It left this: {line}")

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


def _telling(lines: list[str]) -> str:
    """The line that says best why something failed; empty where none does."""
    return next((line for form in _OF_ANY for line in filter(form.search, lines)), "")
