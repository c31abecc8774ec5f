"""``vmgahp replay``: plays a recorded client to a server and shows where that differs.

Results are compared by their request id, whenever they come; with `exact`, line by line in the recorded order.
`vmgahp.commands.replay_as_server` plays the other side.
"""

import os
import sys
import time
from collections import deque

from vmgahp.protocol import transcript_rules
from vmgahp.protocol import wire as gahp
from vmgahp.protocol.client import DEADLINE, Client, ProtocolError
from vmgahp.protocol.transcript import STDERR, Transcript, TranscriptError, load
from vmgahp.protocol.transcript_rules import READY, Difference, Step, alike, command, is_count, request_of
from vmgahp.text import escape

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from typing import Protocol

    class Wire(Protocol):
        """The way to a server."""

        def send(self, data: bytes) -> None:
            """Write bytes; what keeps them from being written shows when the answer is read."""

        def receive(self, timeout: float) -> str | None:
            """The next line, without its end; None where none came in `timeout` seconds, or ever will."""

        def end(self) -> None:
            """Close the server's input."""


MOST_TOO_MANY = 8
"""Lines after a wrong one that are looked at to see whether the recorded one still comes."""

GRACE = 0.3
"""Seconds that the line after a wrong one is waited for: the wrong one may just be one too many."""

POLL = 0.2
"""Seconds between two RESULTS where no ``R`` announces anything."""

SAME, DIFFERENT, TROUBLE = 0, 1, 2
"""Exit statuses."""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "replay",
        help="play a recorded conversation to a server, or to a client, and show the differences",
        description="Start COMMAND, say to it what the client says in FILE, and show where its answers differ. "
        "Figures, pids, addresses and the order in which results come are not compared. The exit status is 0 only "
        "if nothing differs, 1 if something does, 2 if it could not be tried. With --as-server the other side is "
        "played, on standard input and output.",
    )
    parser.add_argument("file", metavar="FILE", help="a conversation, from vmgahp record")
    parser.add_argument(
        "command", nargs="*", metavar="COMMAND", help="the server and its arguments, after --"
    )
    parser.add_argument("--as-server", action="store_true", help="be the server, to test a client")
    parser.add_argument(
        "--exact", action="store_true", help="compare every line as it is, in the recorded order"
    )
    parser.add_argument(
        "--paced", action="store_true", help="wait before each line as long as it took when it was recorded"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="how long an answer may take (default: 60), or with --as-server the next request (default: 600)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="replace an attribute of the job ad, such as VM_WORKING_DIR='\"/tmp/here\"'; may be given again",
    )
    parser.add_argument("--vm-type", default="", metavar="VM_TYPE", help="ask for VMs of this type instead")
    parser.set_defaults(run=_main)


def _main(options: "argparse.Namespace") -> int:
    try:
        recorded = load(options.file)
        attributes = {}
        for setting in options.set:
            name, equals, value = setting.partition("=")
            if not equals or not name.strip():
                raise ValueError(f"--set {setting}: it takes NAME=VALUE")
            attributes[name.strip()] = value.strip()
        if bool(options.command) == options.as_server:
            raise ValueError("it takes either a COMMAND, after --, or --as-server")
        if attributes or options.vm_type:
            recorded = transcript_rules.adapted(recorded, attributes, options.vm_type)
        if options.as_server:
            from vmgahp.commands import replay_as_server

            return replay_as_server.run(
                recorded, exact=options.exact, paced=options.paced, timeout=options.timeout
            )
        return run(
            recorded,
            options.command,
            exact=options.exact,
            paced=options.paced,
            timeout=options.timeout or DEADLINE,
        )
    except (OSError, TranscriptError, ValueError) as error:
        what = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        sys.stderr.write(f"vmgahp replay: {escape(what)}\n")
        return TROUBLE


def run(
    recorded: Transcript,
    argv: list[str],
    *,
    exact: bool = False,
    paced: bool = False,
    timeout: float = DEADLINE,
) -> int:
    """Play to a command and print the differences. Raises OSError where it cannot be started."""
    with Client(argv, os.environ, log=sys.stderr) as client:
        wire = ClientWire(client)
        replay = Replay(recorded, wire, exact=exact, paced=paced, timeout=timeout)
        differences = replay.run()
        try:
            client.finish(timeout)
        except ProtocolError:
            differences.append(Difference(0, "(the server's end)", "(it did not exit in time)"))
        else:
            status = client.process.returncode
            if recorded.exit_status not in (None, status):
                differences.append(Difference(0, f"exit {recorded.exit_status}", f"exit {status}"))
    for difference in differences:
        sys.stdout.write(difference.show() + "\n")
    if replay.unplayed:
        sys.stdout.write(
            f"The server said no more: {replay.unplayed} lines of the recording were not played.\n"
        )
    return DIFFERENT if differences else SAME


class ClientWire:
    """A `Wire` to a process."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def send(self, data: bytes) -> None:
        try:
            self._client.write(data)
        except ProtocolError:
            pass

    def receive(self, timeout: float) -> str | None:
        end = time.monotonic() + timeout
        try:
            while (line := self._client.next_line()) is None:
                if self._client.ended or not self._client.pump(end - time.monotonic()):
                    return None
        except ProtocolError as error:
            return f"({error})"
        return line

    def end(self) -> None:
        if self._client.process.stdin:
            self._client.process.stdin.close()


class Replay:
    """The client's side of `recorded`, on a wire; what differs is in `differences`.

    The first answer that does not come ends it; `unplayed` is the number of lines that are left then.
    """

    def __init__(
        self,
        recorded: Transcript,
        wire: "Wire",
        *,
        exact: bool = False,
        paced: bool = False,
        timeout: float = DEADLINE,
    ) -> None:
        self.differences: list[Difference] = []
        self.unplayed = 0
        self._recorded = recorded
        self._wire = wire
        self._exact = exact
        self._paced = paced
        self._timeout = timeout
        self._began = time.monotonic()
        self._silent = False
        self._last_sent = ""
        self._requests: dict[str, bytes] = {}
        """What each request id was used for last."""
        self._owed = 0
        """Answers to what was sent that the recording still has."""
        self._early: deque[str] = deque()
        """Lines that were read while something else was waited for."""
        self._results: dict[str, deque[str]] = {}
        """Results that were fetched and are not asked for yet."""
        self._ready = False
        self._announces = True
        """Whether async mode is on."""

    def run(self) -> list[Difference]:
        for step, left in self._steps():
            if step.is_sent():
                self._send(step)
            elif self._exact or not (step.line.text == READY or step.answers_results()):
                self._silent = not self._expect(step)
            elif step.line.text == READY:
                self._silent = not self._expect_r(step)
            else:
                self._silent = not self._expect_results(step)
            if self._silent:
                self.unplayed = left
                break
        self._wire.end()
        if not self._silent:
            self._look_at_the_rest()
        return self.differences

    def _steps(self) -> "Iterator[tuple[Step, int]]":
        """All steps, each with the number of lines after it; single lines with `exact`."""
        if self._exact:
            found = [Step(line) for line in self._recorded.lines if line.mark != STDERR]
        else:
            found = list(transcript_rules.steps(self._recorded))
        left = sum(1 + len(step.results) for step in found)
        for step in found:
            left -= 1 + len(step.results)
            yield step, left

    # The client's lines

    def _send(self, step: Step) -> None:
        line = step.line
        if self._paced and line.at is not None:
            self._listen_until(self._began + line.at)
        if not step.in_ad and not self._exact:
            if self._owed == 0:
                while (text := self._next(0.0)) is not None:
                    self._differ(line.number, None, text)
            self._owed += 1
            if asked := request_of(line.text):
                self._requests[asked[0]] = asked[1]
        self._last_sent = line.text
        self._wire.send(line.data)

    def _listen_until(self, end: float) -> None:
        while (left := end - time.monotonic()) > 0:
            text = self._wire.receive(left)
            if text is None:
                return
            self._early.append(text)

    # The server's lines

    def _read(self, timeout: float) -> str | None:
        return self._early.popleft() if self._early else self._wire.receive(timeout)

    def _next(self, timeout: float) -> str | None:
        """The next line, but for an ``R``, which is only kept in mind."""
        end = time.monotonic() + timeout
        while (text := self._read(max(0.0, end - time.monotonic()))) == READY and not self._exact:
            self._note_r()
        return text

    def _note_r(self) -> None:
        if self._ready or not self._announces:
            self._differ(0, None, READY, "")
        self._ready = True

    def _wait_for_r(self, timeout: float) -> bool:
        """Wait until results are announced; lines that come before are kept."""
        end = time.monotonic() + timeout
        others = []
        while not self._ready:
            text = self._read(max(0.0, end - time.monotonic()))
            if text is None:
                break
            if text == READY:
                self._note_r()
            else:
                others.append(text)
        self._early.extendleft(reversed(others))
        return self._ready

    def _expect(self, step: Step) -> bool:
        """Read the next line and compare it; False where there is none."""
        self._owed -= bool(step.request)
        text = self._next(self._timeout)
        if text is None:
            self._differ(step.line.number, step.line.text, None, step.request)
            return False
        if not self._is_same(step.line.text, text):
            self._find_again(step, text)
        elif command(step.request).startswith(b"ASYNC_MODE_"):
            self._announces, self._ready = command(step.request).endswith(b"ON"), False
        return True

    def _find_again(self, step: Step, text: str) -> None:
        """Decide whether a wrong line stands for the recorded one, or is one too many before it."""
        others: list[str] = []
        for _ in range(MOST_TOO_MANY):
            another = self._next(GRACE)
            if another is None:
                break
            if self._is_same(step.line.text, another):
                for extra in (text, *others):
                    self._differ(step.line.number, None, extra, step.request)
                return
            others.append(another)
        self._differ(step.line.number, step.line.text, text, step.request)
        self._early.extendleft(reversed(others))

    def _is_same(self, recorded: str, said: str) -> bool:
        return said == recorded or (not self._exact and alike(said) == alike(recorded))

    def _expect_r(self, step: Step) -> bool:
        # What it announced may have been fetched already, with a RESULTS that the recording does not have.
        if any(self._results.values()) or self._wait_for_r(self._timeout):
            return True
        self._differ(step.line.number, READY, None)
        return False

    def _expect_results(self, step: Step) -> bool:
        """Read the answer to RESULTS, and ask again until all results that are recorded here have come."""
        self._owed -= 1
        if not self._expect_count(step):
            return False
        for line in step.results:
            request_id = gahp.words(line.text)[0]
            operation = self._requests.get(request_id, b"")
            request = f"CONDOR_VM_{operation.decode()} {request_id}"
            end = time.monotonic() + self._timeout
            while not self._results.get(request_id):
                left = end - time.monotonic()
                announced = self._wait_for_r(left if self._announces else min(POLL, left))
                if left <= 0 or (self._announces and not announced):
                    self._differ(line.number, line.text, None, request)
                    return False
                self._wire.send(b"RESULTS\r\n")
                if not self._expect_count(step):
                    return False
            text = self._results[request_id].popleft()
            if alike(text, operation) != alike(line.text, operation):
                self._differ(line.number, line.text, text, request)
        return True

    def _expect_count(self, step: Step) -> bool:
        """Read ``S`` and a number, and so many results; False where that is not what comes."""
        text = self._next(self._timeout)
        if text is None or not is_count(text):
            self._differ(step.line.number, step.line.text, text, step.request)
            return False
        self._ready = False
        for number in range(int(text[2:])):
            result = self._next(self._timeout)
            if result is None:
                self._differ(
                    step.line.number, step.line.text, f"{text} (and only {number} came)", step.request
                )
                return False
            self._results.setdefault(gahp.words(result)[0], deque()).append(result)
        return True

    # The end

    def _look_at_the_rest(self) -> None:
        """What the server still says, and results that the recording does not have."""
        while (text := self._next(self._timeout)) is not None:
            self._differ(0, None, text)
        if self._exact:
            return
        recorded = {
            gahp.words(line.text)[0]
            for step in transcript_rules.steps(self._recorded)
            for line in step.results
        }
        for request_id, results in self._results.items():
            # Nobody fetched the result in the recording; here it was fetched along with another.
            if request_id in recorded or request_id not in self._requests:
                for text in results:
                    self._differ(0, None, text, "RESULTS")

    def _differ(
        self, number: int, recorded: str | None, said: str | None, request: str | None = None
    ) -> None:
        request = self._last_sent if request is None else request
        self.differences.append(Difference(number, recorded, said, request))
