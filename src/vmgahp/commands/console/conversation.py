"""The conversation of a person or a script with a server: commands, job ads, answers.

Requests are sent as condor_starter does it: each after the answer to the one before, and an R leads to a RESULTS.
`vmgahp.protocol.requests` classifies each line of the server; this module shows it in words.
"""

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from time import monotonic
from typing import NamedTuple

from vmgahp import lifecycle
from vmgahp.commands.arguments import did_you_mean
from vmgahp.commands.files import ask_condor_q, parse_ad, read_ad_file
from vmgahp.errors import Fault
from vmgahp.job.ad import JobAd, quote
from vmgahp.protocol import requests
from vmgahp.protocol.client import Client, ProtocolError
from vmgahp.protocol.requests import PREFIX, Kind, Request, RequestState, digits
from vmgahp.protocol.session import COMMANDS as PROTOCOL
from vmgahp.protocol.transcript import STDERR
from vmgahp.text import escape, is_private, redact

SENT, RECEIVED, GOOD, BAD, NOTE, PLAIN = "ansicyan", "ansibrightblack", "ansigreen", "ansired", "ansiyellow", ""
"""The kinds of lines that are shown, as styles of prompt_toolkit."""

LONGEST = 2000
"""The maximum number of characters of one line that are shown."""


class Command(NamedTuple):
    arguments: str
    text: str
    operation: str = ""
    """The operation of `lifecycle` that it requests."""


COMMANDS: dict[str, Command] = {
    "start": Command("AD [TYPE]  or  job ID [TYPE]", "send a job ad and start a VM from it", lifecycle.START),
    "status": Command("[VM]", "show the state of a VM and what it has used", lifecycle.STATUS),
    "pid": Command("[VM]", "show the process id of a VM's hypervisor", lifecycle.GETPID),
    "suspend": Command("[VM]", "save a VM's memory to a file and free its memory", lifecycle.SUSPEND),
    "soft-suspend": Command("[VM]", "stop a VM's CPUs and keep its memory in RAM", lifecycle.SOFT_SUSPEND),
    "resume": Command("[VM]", "let a VM run again after suspend, soft-suspend or checkpoint", lifecycle.RESUME),
    "checkpoint": Command("[VM]", "save a VM with all that a restart elsewhere needs", lifecycle.CHECKPOINT),
    "stop": Command("[VM]", "end a VM: ask its guest to power off, then destroy it", lifecycle.STOP),
    "vms": Command("", "list the VMs that were started here, and the requests without a result"),
    "wait": Command("[REQUEST]", "wait for the result of a request, or of all (Control-C ends the waiting)"),
    "ad": Command("AD [TYPE]  or  job ID [TYPE]", "show what start would send"),
    "log": Command("[LINES]", "show the end of the server's standard error"),
    "help": Command("[COMMAND or ERROR]", "list all commands, or explain one of them or an error word"),
    "quit": Command("", "destroy all VMs and end, as Control-D does"),
}

LEGEND = (
    "AD is a file of lines Name = expression, as of condor_q -l or .job.ad; job 12.0 asks condor_q. VM is the number "
    "of a VM, and may be left out while there is only one. # and a number is a request. A line that begins with a "
    "word in upper case goes to the server as it is, CONDOR_VM_STATUS 12 1 for example."
)


def explain(topic: str = "") -> list[str]:
    """List the commands, or explain one of them or an error word; empty for an unknown one."""
    rows = {word: f"  {f'{word} {row.arguments}':36}{row.text}" for word, row in COMMANDS.items()}
    if not topic:
        return [*rows.values(), LEGEND]
    operation = topic.upper().removeprefix(PREFIX)
    for word, row in COMMANDS.items():
        if word == topic.lower() or row.operation == operation:
            return [rows[word], *([f"  It sends {PREFIX}{row.operation}."] if row.operation else [])]
    if meaning := requests.meaning(topic):
        return [requests.short(topic), f"  {meaning}", f"  {requests.fate(topic)}"]
    return [f"{topic} is a command of the protocol, and goes to the server as it is."] if topic in PROTOCOL else []


def clean_text(text: str) -> str:
    """Make one line of `text` that is harmless to a terminal; a guest or another user's job may have written it."""
    shown = escape(text[:LONGEST].encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"))
    return shown if len(text) <= LONGEST else f"{shown} ... and {len(text) - LONGEST} more characters"


def error_in_words(word: str) -> str:
    return f"{clean_text(word)}: {requests.meaning(word) or 'an unknown error word'}"


CLUSTER_BASE = 2_000_000_000
"""The first ClusterId of the console: schedds do not reach such numbers, and they still fit a C int."""


class Ad(NamedTuple):
    """A job ad that is ready to be sent."""

    lines: list[str]
    vm_type: str
    """The value of JobVMType, in lower case."""
    name: str
    """The VM's name in the hypervisor."""
    notes: list[str]
    """The changes that were made."""


def prepare_ad(text: str, working_dir: str, *, vm_type: str, serves: str, number: int) -> Ad:
    """Prepare the first ad of `text` for a START in `working_dir`.

    `vm_type` is the requested type, or empty for the ad's own; `serves` is the server's. The `number` makes the VM's
    name unique within this console. Raises `Fault`.
    """
    pairs = parse_ad(text)
    found = JobAd(pairs)
    wanted = (vm_type or found.vm_type() or serves).lower()
    sent = {"VM_WORKING_DIR": quote(working_dir), "JobVMType": quote(wanted)}
    sent |= {"ClusterId": str(CLUSTER_BASE + os.getpid()), "ProcId": str(number)}
    if found.string("User") is None:
        sent["User"] = quote(f"{os.getuid()}@console")
    replaced, secrets = {name.lower() for name in sent}, [name for name, _ in pairs if is_private(name)]
    notes = [f"Secrets were left out: {', '.join(secrets)}."] if secrets else []
    if wanted != serves:
        notes.append(f"Its type is {escape(wanted)}, and this server serves {serves}: that will be refused.")
    kept = [(name, value) for name, value in pairs if name.lower() not in replaced and name not in secrets]
    made = [*sent.items(), *kept]
    return Ad([f"{name} = {value}" for name, value in made], wanted, JobAd(made).vm_name(), notes)


POLL = 0.5
"""The interval in seconds between two RESULTS while the server is told not to send R."""

PATIENCE = 0.5
"""Seconds to wait for the server's log to explain a failure: it comes through another pipe than the answer."""

END_DEADLINE, LOST_DEADLINE = 60.0, 5.0
"""Seconds that the server has to exit after QUIT, or after the connection is lost."""

LOG_LINES, LAST_WORDS = 1000, 10
"""The lines of the server's standard error that are kept, and those that are shown when the server is lost."""

FAILED, WRONG_REQUEST = 1, 2
"""The exit statuses: a request failed or was refused; a line is not a command."""

_LOGGED = r"(?:\b{0}(?: of VM \d+)? (?:failed|refused): |\brefused {0}: |\brefused (?=an unknown command))(.+)"
"""The form in which `vmgahp.protocol.session` logs why a request failed."""

Show = Callable[[str, str], None]


class Conversation:
    """A server, which is started, and the person or script that talks to it.

    `show` gets the kind and the text of each line to show. Methods that wait for the server raise `ProtocolError` if
    the server ends; the start of the server raises OSError.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], *, person: bool, show: Show) -> None:
        self.show = show
        self.status = 0
        """The exit status of the last failure."""
        self.over = False
        """True after QUIT was sent."""
        self.in_ad = False
        """True while the lines of a job ad are typed."""
        self.vms: list[int] = []
        """The VMs that were started and are not known to be gone."""
        self.log: deque[tuple[float, str]] = deque(maxlen=LOG_LINES)
        self._working_dir, self._serves = environ["VMGAHP_WORKING_DIR"], environ["VMGAHP_VMTYPE"]
        self._person = person
        """True if a person types: the console does not wait for results, and asks before it destroys VMs."""
        self._warned = False
        self._starts = count()
        self.client = Client(command, environ, self._working_dir, heard=self._heard)
        self.requests = self.client.requests

    # Lines of the server

    def greet(self) -> None:
        end = monotonic() + requests.GREETING_DEADLINE
        while not self.requests.greeted:
            self._received(self.client.read_line(max(0.0, end - monotonic())))
        if self._person:
            self.show(NOTE, f"The working directory is {clean_text(self._working_dir)}. help lists what can be typed.")

    def turn(self) -> None:
        """Read what the server has sent meanwhile, and fetch results that are ready."""
        self.client.pump()
        while (line := self.client.next_line()) is not None:
            self._received(line)
        while self.requests.ready and not self.over:
            self.ask(Request("RESULTS"))
        if self.client.ended:
            self.client.read_line()  # says how it has ended

    def finish(self, lost: str = "") -> bool:
        """End the server, which may be `lost` for a reason already; False if it ended unexpectedly."""
        try:
            self.client.finish(LOST_DEADLINE if lost else END_DEADLINE)
        except ProtocolError as error:
            self.client.kill()
            lost = lost or str(error)
        status = self.client.process.returncode
        if not status and (self.over or not lost):
            return True
        for _, line in list(self.log)[-LAST_WORDS:]:
            self.show(NOTE, f"| {line}")
        why = lost.partition("; its log:")[0] or "it has ended"
        end = "" if "(exit" in why else f" (exit {status})"
        self.show(BAD, f"The server is lost: {clean_text(why)}{end}.")
        return False

    def _heard(self, mark: str, line: str) -> None:
        if mark == STDERR and (text := clean_text(redact(line)).rstrip()):
            self.log.append((monotonic(), text))

    def _received(self, line: str) -> None:
        received = self.requests.received(line)
        request = received.request
        took = _took(request) if received.kind is Kind.REPLY else ""
        self.show(RECEIVED, f"< {clean_text(line)}{took}")
        if received.kind is Kind.RESULT and request is not None:
            self._tell(request)
        elif received.kind in (Kind.RESULT, Kind.UNASKED):
            self.fail("No request waits for this line.")

    # Requests

    def ask(self, request: Request) -> bool:
        """Send a request and read its answer; False if it was refused."""
        self._catch_up()
        now = monotonic()  # the server's log from now on may be about this request
        self._send(request.line)
        self.requests.sent(request, now)
        self.over |= request.command == "QUIT"
        self._catch_up()
        if request.state is RequestState.REFUSED:
            why = self._reason(request)
            why = why or ", ".join(map(error_in_words, request.words())) or requests.meaning(requests.NOTHING)
            self.fail(f"{clean_text(request.command) or 'An empty line'} was refused: {why}")
        return request.state is not RequestState.REFUSED

    def _catch_up(self) -> None:
        """Read all outstanding answers; Control-C may have interrupted the wait for one."""
        while self.requests.unanswered or self.requests.results_left:
            self._received(self.client.read_line(requests.REPLY_DEADLINE))

    def _send(self, line: str) -> None:
        self.show(SENT, f"> {clean_text(redact(line))}")
        self.client.send(line)

    def _reason(self, request: Request) -> str:
        """Find the server's own sentence on a failure in its log since the request."""
        form = re.compile(_LOGGED.format(re.escape(request.operation or request.command)))
        end = monotonic() + PATIENCE
        while True:
            lines = (form.search(line) for when, line in reversed(self.log) if when >= request.sent)
            if found := next(filter(None, lines), None):
                return found[1]
            if monotonic() >= end or not self.client.pump(end - monotonic()):
                return ""

    def wait(self, numbers: Iterable[int]) -> None:
        """Wait until requests have their results, or are overdue."""
        waiting = [self.requests.pending[number] for number in numbers if number in self.requests.pending]
        self.turn()
        while any(each.state is RequestState.ACCEPTED for each in waiting):
            self.client.pump(POLL)
            if not self.requests.asynchronous:
                self.ask(Request("RESULTS"))
            self.turn()
            for late in self.requests.overdue(monotonic()):
                self.fail(f"{late} has no result{_took(late)}: condor_starter would give up now.")

    def _tell(self, request: Request) -> None:
        """Describe a result in words."""
        took = _took(request)
        success, *said = request.result
        if success == "0":
            self.show(GOOD, f"{request}: {self._succeeded(request, said)}{took}")
            return
        code = said[0] if said else requests.NOTHING
        why = self._reason(request).removeprefix(f"{code}: ")
        self.fail(f"{request} failed: {why or error_in_words(code)}{took}")
        if why:
            self.show(NOTE, f"  {error_in_words(code)}")
        if request.operation == lifecycle.START and requests.meaning(code):
            self.show(NOTE, f"  {requests.fate(code)}")

    def _succeeded(self, request: Request, said: list[str]) -> str:
        vm = digits(said[0] if request.operation == lifecycle.START and said else request.argument) or 0
        status = dict(word.partition("=")[::2] for word in said)
        if request.operation == lifecycle.START:
            self.vms.append(vm)
            return f"VM {vm} runs"
        if request.operation == lifecycle.STOP or status.get("STATUS") == lifecycle.STOPPED:
            self.vms = [each for each in self.vms if each != vm]
        if request.operation == lifecycle.STATUS:
            return clean_text(" ".join(said).removeprefix("STATUS="))
        return f"process {clean_text(' '.join(said))}" if request.operation == lifecycle.GETPID else "done"

    # Lines of the person

    @property
    def prompt(self) -> str:
        return "classad> " if self.in_ad else "vmgahp> "

    def typed(self, line: str) -> None:
        if self.in_ad:
            self._ad_line(line)
            return
        self._warned &= line.strip().lower() == "quit"
        match line.split():
            case []:
                pass
            case ["quit" | "QUIT"]:
                self._quit()
            case [word, *_] if word.isupper():
                self.in_ad = self.ask(Request(line)) and word == "CLASSAD"
            case [word, *_] if word not in COMMANDS:
                self._unknown(f"There is no command {clean_text(word)}", word)
            case ["start" | "ad" as verb, "job", job, *vm_type] if len(vm_type) < 2:
                self._ad(verb, ask_condor_q, job, *vm_type)
            case ["start" | "ad" as verb, file, *vm_type] if len(vm_type) < 2:
                self._ad(verb, read_ad_file, file, *vm_type)
            case [word, *vm] if COMMANDS[word].arguments == "[VM]" and len(vm) < 2:
                if (target := self._target(vm)) is not None:
                    self._request(COMMANDS[word].operation, target)
            case ["vms"]:
                pending = (f"{each}{_took(each)}" for each in self.requests.pending.values())
                known = " | ".join([*(f"VM {number}" for number in self.vms), *pending])
                self.show(PLAIN, f"  {known or 'no VM'}")
            case ["wait"]:
                self.wait(list(self.requests.pending))
            case ["wait", number] if (found := digits(number.removeprefix("#"))) is not None:
                self.wait([found])
            case ["log", *lines] if len(lines) < 2 and (wanted := digits((*lines, "20")[0])):
                for _, text in list(self.log)[-wanted:]:
                    self.show(NOTE, f"| {text}")
            case ["help", *topic] if len(topic) < 2:
                self._help(*topic)
            case [word, *_]:
                takes = COMMANDS[word].arguments or "nothing after it"
                self.fail(f"{word} takes {takes}. See: help {word}", WRONG_REQUEST)

    def end_of_input(self) -> None:
        """End the job ad that is being typed, or else the conversation."""
        if self.in_ad:
            self._ad_line("CLASSAD_END")
            if self._person:
                return
        if not self._person:
            self.wait(list(self.requests.pending))
        self._quit()

    def _ad_line(self, line: str) -> None:
        if line.strip().upper() == "CLASSAD_END":
            self.in_ad = False
            self.ask(Request("CLASSAD_END"))
        else:
            self._send(line)

    def _quit(self) -> None:
        starting = [each for each in self.requests.pending.values() if each.operation == lifecycle.START]
        if living := " and ".join([*map("VM {}".format, self.vms), *map("the VM of {}".format, starting)]):
            if self._person and not self._warned:
                self._warned = True
                self.show(NOTE, f"{living} would be destroyed: type quit again to do that.")
                return
            self.show(NOTE, f"{living} will be destroyed.")
        if self.ask(Request("QUIT")):
            self.show(PLAIN, "  The VMs are gone; the server ends.")

    def _request(self, operation: str, argument: object) -> None:
        request = self.requests.new(operation, argument)
        if self.ask(request) and not self._person:
            self.wait([request.number or 0])

    def _ad(self, verb: str, read: Callable[[str], str], source: str, vm_type: str = "") -> None:
        """Prepare a job ad and start a VM from it, or show it."""
        how = {"vm_type": vm_type, "serves": self._serves}
        try:
            ad = prepare_ad(read(source), self._working_dir, number=next(self._starts), **how)
        except Fault as fault:
            self.fail(fault.sentence)
            return
        for note in ad.notes:
            self.show(NOTE, f"  {note}")
        if verb == "ad":
            for line in ad.lines:
                self.show(PLAIN, f"  {clean_text(redact(line))}")
        elif self.ask(Request("CLASSAD")):
            self.show(SENT, f"> ({len(ad.lines)} attributes of {clean_text(ad.name)})")
            for line in ad.lines:
                self.client.send(line)
            self.ask(Request("CLASSAD_END"))
            self._request(lifecycle.START, ad.vm_type)

    def _target(self, named: Sequence[str]) -> int | None:
        """Find the VM that a command is about; if that is ambiguous, say what to do."""
        number = digits(named[0]) if named else self.vms[0] if len(self.vms) == 1 else None
        if number is None:
            wrong = f"{clean_text(named[0])} is not the number of a VM. " if named else ""
            known = f"There are {', '.join(map(str, self.vms))}" if self.vms else "There is no VM yet"
            self.fail(f"{wrong}{known}: start one, wait for its start, or name a VM by its number.", WRONG_REQUEST)
        return number

    def _help(self, topic: str = "") -> None:
        lines = explain(topic)
        if not lines:
            self._unknown(f"There is no help about {clean_text(topic)}", topic)
        for line in lines:
            self.show(PLAIN, line)

    def _unknown(self, problem: str, word: str) -> None:
        near = did_you_mean(word[:60], (*COMMANDS, *PROTOCOL, *requests.WORDS)) or "; help lists all commands."
        self.fail(problem + near, WRONG_REQUEST)

    def fail(self, text: str, status: int = FAILED) -> None:
        """Show an error, and remember the exit status."""
        self.status = status
        self.show(BAD, text)


def _took(request: Request | None) -> str:
    return f"   ({monotonic() - request.sent:.3f} s)" if request is not None else ""
