"""The wire as a person follows it: requests in step, results as they come, what is known of the VMs. Pure.

Lines from the server go in with `received`, what to send comes out of `take_sends` and what to show out of
`take_shown`. As the real client does, the next request is sent when the last one was answered, and an ``R`` makes
a RESULTS follow.
"""

from collections import deque

from vmgahp import lifecycle
from vmgahp.commands.console import render
from vmgahp.commands.console.commands import VM_PREFIX
from vmgahp.commands.console.render import BAD, GOOD, LOG, NOTE, PLAIN, RECEIVED, SENT, Line
from vmgahp.protocol import error_words, wire
from vmgahp.protocol.session import REQUEST_TIMEOUT, START_EXTRA
from vmgahp.text import redact

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

GREETING = "$VMGahpVersion "

GREETING_DEADLINE = 30.0
"""Seconds that a server has for its greeting."""

REPLY_DEADLINE = 60.0
"""Seconds that it has for a reply; the one to QUIT comes when the VMs are gone."""

FETCH_INTERVAL = 0.5
"""Seconds between two RESULTS while somebody waits and the server is told to say no R."""

LOG_LINES = 1000
"""Lines of the server's standard error that are kept."""

MOST_RESULTS = 1 << 20
"""More result lines than this are announced by no server that is sane."""


class Out:
    """A line for the server, and what is known of it until it is answered."""

    __slots__ = ("command", "expects", "group", "line", "request", "sent", "shown")

    def __init__(self, line: str, *, expects: bool = True, group: int = 0, shown: str | None = None) -> None:
        self.line = line
        words = wire.split(line.encode("utf-8", "surrogateescape"))
        self.command = words[0].decode("utf-8", "replace").upper()
        self.expects = expects
        """Whether it is answered, which the lines of a job ad are not."""
        self.group = group
        """Lines of one number belong together: when one is refused, the rest is not sent."""
        self.shown = shown
        """What is shown in its place; empty for nothing."""
        self.sent = 0.0
        self.request: Request | None = None
        if expects and self.command.startswith(VM_PREFIX) and len(words) == 3:
            number = render.number(words[1].decode("ascii", "replace"))
            if number is not None:
                operation = self.command.removeprefix(VM_PREFIX)
                self.request = Request(number, operation, render.number(words[2].decode("ascii", "replace")))


class Request:
    """A request with a result to come."""

    __slots__ = ("asked", "number", "operation", "overdue", "target")

    def __init__(self, number: int, operation: str, target: int | None) -> None:
        self.number = number
        self.operation = operation
        self.target = target
        """The VM; None for a START."""
        self.asked = 0.0
        self.overdue = False

    def __str__(self) -> str:
        return f"#{self.number} {self.operation}" + (
            f" of VM {self.target}" if self.target is not None else ""
        )

    def deadline(self) -> float:
        """When condor_starter gives up on it."""
        return self.asked + REQUEST_TIMEOUT + (START_EXTRA if self.operation == lifecycle.START else 0.0)


class Conversation:
    """One server, one person. `explain` is asked for the sentences that a server left about a failed START."""

    def __init__(self, now: float, explain: "Callable[[], str]") -> None:
        self.greeted = False
        self.quitting = False
        """QUIT was sent."""
        self.broken = ""
        """Why this server cannot be talked to any longer; empty while it can."""
        self.failures = 0
        """Answers that were errors, and lines that could not be sent."""
        self.wire = True
        self.live_log = False
        self.asynchronous = True
        self.in_ad = False
        """A CLASSAD was sent by hand, and its lines are typed."""
        self.requests: dict[int, Request] = {}
        """Accepted, and without a result so far."""
        self.vms: dict[int, str] = {}
        """VM id -> its state, as far as is known."""
        self.waited_for: set[int] = set()
        """The requests whose results come before anything else that was typed."""
        self.log: deque[str] = deque(maxlen=LOG_LINES)
        self._explain = explain
        self._began = now
        self._outgoing: deque[Out] = deque()
        self._asked: Out | None = None
        self._results_left = 0
        self.last_id = 0
        """The highest request id that was used."""
        self._fetched = now
        self._sends: list[str] = []
        self._shown: list[Line] = []

    # What goes in and comes out

    def take_sends(self) -> list[str]:
        """Lines to be written to the server, once."""
        sends, self._sends = self._sends, []
        return sends

    def take_shown(self) -> list[Line]:
        """Lines to be shown, once."""
        shown, self._shown = self._shown, []
        return shown

    def show(self, kind: str, text: str) -> None:
        self._shown.append(Line(kind, text))

    def fail(self, text: str) -> None:
        """Show what went wrong, and count it."""
        self.failures += 1
        self.show(BAD, text)

    def push(self, outs: "Iterable[Out]", now: float) -> None:
        """Send lines, each when the one before it was answered."""
        self._outgoing += outs
        self._advance(now)

    def fresh_id(self) -> int:
        """A request id that was not used before."""
        self.last_id += 1
        return self.last_id

    def settled(self) -> bool:
        """Whether the next typed line may be taken: everything is answered, and nothing is waited for."""
        idle = not (self._outgoing or self._asked or self._results_left)
        return self.greeted and idle and not self.waited_for

    def logged(self, line: str) -> None:
        """A line of the server's standard error."""
        text = render.clean(redact(line))
        self.log.append(text)
        if self.live_log:
            self.show(LOG, f"| {text}")

    def received(self, line: str, now: float) -> None:
        """A line of the server."""
        if not self.greeted:
            self.greeted = line.startswith(GREETING)
            if self.wire or not self.greeted:
                kind = RECEIVED if self.greeted else BAD
                self.show(kind, f"< {render.clean(line)}" + self._took(self._began, now, self.greeted))
            self._advance(now)
        elif line == "R":
            self._received_r(now)
        elif self._results_left:
            self._results_left -= 1
            self._wire_in(line, "")
            self._result(line, now)
            self._advance(now)
        elif self._asked is None:
            self.fail(f"The server says, without being asked: {render.clean(line)}")
        else:
            asked, self._asked = self._asked, None
            self._reply(asked, line, now)
            self._advance(now)

    def next_deadline(self) -> float | None:
        """When `tick` should be called at the latest, or None."""
        ends = [request.deadline() for request in self.requests.values() if not request.overdue]
        if not self.greeted:
            ends.append(self._began + GREETING_DEADLINE)
        if self._asked is not None:
            ends.append(self._asked.sent + REPLY_DEADLINE)
        if self._polls():
            ends.append(self._fetched + FETCH_INTERVAL)
        return min(ends, default=None)

    def tick(self, now: float) -> None:
        """Notice what has taken too long, and fetch results where no R announces them."""
        if not self.greeted and now >= self._began + GREETING_DEADLINE:
            self.broken = f"it said no greeting in {GREETING_DEADLINE:.0f} s"
        if self._asked is not None and now >= self._asked.sent + REPLY_DEADLINE:
            self.broken = f"it did not answer {render.clean(self._asked.command)} in {REPLY_DEADLINE:.0f} s"
        for request in self.requests.values():
            if not request.overdue and now >= request.deadline():
                request.overdue = True
                self.waited_for.discard(request.number)
                waited = render.duration(now - request.asked)
                self.fail(f"{request} has no result after {waited}: condor_starter would give up now.")
        if self._polls() and now >= self._fetched + FETCH_INTERVAL:
            self._fetched = now
            self.push([Out("RESULTS")], now)

    def _polls(self) -> bool:
        return bool(self.waited_for) and not self.asynchronous and not (self._asked or self._outgoing)

    # The wire

    def _advance(self, now: float) -> None:
        while self.greeted and self._outgoing and self._asked is None and not self._results_left:
            out = self._outgoing.popleft()
            out.sent = now
            self._sends.append(out.line)
            if out.shown is None:
                if self.wire:
                    self.show(SENT, f"> {render.clean(redact(out.line))}")
            elif out.shown and self.wire:
                self.show(SENT, out.shown)
            if out.command == "QUIT" and out.expects:
                self.quitting = True
            if out.expects:
                self._asked = out

    def _received_r(self, now: float) -> None:
        self._wire_in("R", "")
        fetching = self._asked is not None and self._asked.command == "RESULTS"
        if not fetching and not any(out.command == "RESULTS" for out in self._outgoing):
            self._outgoing.appendleft(Out("RESULTS"))
            self._advance(now)

    def _wire_in(self, line: str, took: str) -> None:
        if self.wire:
            self.show(RECEIVED, f"< {render.clean(line)}{took}")

    def _took(self, began: float, now: float, said: bool = True) -> str:
        return f"   ({render.duration(now - began)})" if said else ""

    def _reply(self, asked: Out, line: str, now: float) -> None:
        took = self._took(asked.sent, now)
        self._wire_in(line, took)
        accepted, *payload = wire.words(line)
        if accepted == "S":
            self._accepted(asked, payload)
            return
        if asked.request is not None:
            self.waited_for.discard(asked.request.number)
        if asked.group:
            while self._outgoing and self._outgoing[0].group == asked.group:
                dropped = self._outgoing.popleft()
                if dropped.request is not None:
                    self.waited_for.discard(dropped.request.number)
        what = render.clean(asked.command) or "An empty line"
        if accepted == "E":
            self.fail(
                f"{what} was refused: an unknown command, a wrong number of words, a request id that is used or no "
                "positive number, an unknown VM type, or a VM id that is no number."
            )
        elif accepted == "F":
            said = " ".join(map(render.error, payload)) or "no reason was said"
            self.fail(f"{what} failed: {said}")
        else:
            self.fail(f"{what} was answered with what is no reply: {render.clean(line)}")

    def _accepted(self, asked: Out, payload: list[str]) -> None:
        said = ", ".join(map(render.clean, payload))
        match asked.command:
            case "RESULTS":
                count = render.number(payload[0]) if len(payload) == 1 else None
                if count is None or count > MOST_RESULTS:
                    self.fail(f"RESULTS was answered with no number of results: {said}")
                else:
                    self._results_left = count
            case "CLASSAD":
                self.in_ad = not asked.group
            case "ASYNC_MODE_ON" | "ASYNC_MODE_OFF":
                self.asynchronous = asked.command == "ASYNC_MODE_ON"
                self.show(
                    NOTE,
                    "The server says R when a result is there." if self.asynchronous else "No R any more.",
                )
            case "VERSION":
                self.show(PLAIN, f"  It calls itself {' '.join(map(render.clean, payload)).strip(' $')}")
            case "COMMANDS":
                self.show(PLAIN, f"  It knows {said}")
            case "SUPPORT_VMS":
                self.show(PLAIN, f"  START takes the types {said}")
            case "QUIT":
                self.show(PLAIN, "  The VMs are gone; the server ends.")
        if asked.request is not None:
            asked.request.asked = asked.sent
            self.last_id = max(self.last_id, asked.request.number)
            self.requests[asked.request.number] = asked.request

    # Results

    def _result(self, line: str, now: float) -> None:
        result = render.result(line)
        request = self.requests.pop(result.request, None)
        self.waited_for.discard(result.request)
        if request is None:
            self.show(NOTE, f"This is the result of no request that waits for one: {render.clean(line)}")
            return
        took = self._took(request.asked, now)
        words = result.words or ("",)
        if not result.ok:
            self.fail(f"{request} failed: {render.error(words[0])}{took}")
            if request.operation == lifecycle.START:
                if error_words.meaning(words[0]):
                    self.show(NOTE, f"  {error_words.fate(words[0])}")
                for said in self._explain().splitlines():
                    self.show(NOTE, f"  It left this: {render.clean(said)}")
            return
        self.show(GOOD, f"{request}: {self._success(request, list(words))}{took}")

    def _success(self, request: Request, words: list[str]) -> str:
        target = request.target if request.target is not None else -1
        match request.operation:
            case lifecycle.START:
                number = render.number(words[0])
                if number is None:
                    return f"no id of a VM was said, but {render.clean(words[0])}"
                self.vms[number] = lifecycle.RUNNING
                return f"VM {number} runs"
            case lifecycle.STATUS:
                state = render.fields(words).get("STATUS", "")
                if target in self.vms and state:
                    self.vms[target] = render.clean(state)
                return render.status(words)
            case lifecycle.GETPID:
                return "no process" if words[0] == "0" else f"process {render.clean(words[0])}"
        state = self.vms.get(target, "")
        if request.operation == lifecycle.STOP:
            self.vms.pop(target, None)
        elif state:
            outcome = lifecycle.TRANSITIONS.get((state, request.operation), state)
            self.vms[target] = state if outcome == lifecycle.KEEP else outcome
        said = "" if words[0] in ("", error_words.NOTHING) else f", {render.clean(' '.join(words))}"
        return f"done{said}"
