"""The commands of the protocol and of the console: what they take, their help and their completion. Pure.

All is made of two tables; only the names of files are looked up.
"""

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from vmgahp import vm_types
from vmgahp.commands.console.render import BAD, GOOD, NOTE, PLAIN, Shown, clean
from vmgahp.protocol import error_words
from vmgahp.protocol.requests import PREFIX
from vmgahp.text import escape

if TYPE_CHECKING:
    from vmgahp.commands.console.conversation import Conversation

MOST_FILES = 500
"""Names of a directory that are looked at."""


class Command(NamedTuple):
    """One command, of the protocol or of the console's own."""

    word: str
    arguments: str
    other: str
    """Of a command of the protocol what is typed here in its place, of one of the console's the one that it sends."""
    summary: str
    text: str
    result: str
    """What a RESULTS says of it later, where that is anything."""
    errors: tuple[str, ...]
    """Words, without their prefix, that it may fail with."""

    @property
    def operation(self) -> str:
        """What one of the console's asks of a VM; empty where that is nothing."""
        return self.other.removeprefix(PREFIX) if self.arguments == "[VM]" else ""


def _table(text: str) -> Iterator[Command]:
    """Rows of ``usage | other | summary``, each with indented lines: of text, ``=`` a result, ``!`` errors."""
    for row in text.strip().split("\n\n"):
        first, *lines = row.replace("\n    ", " ").splitlines()
        usage, other, summary = (part.strip() for part in first.split(" | "))
        word, _, arguments = usage.partition(" ")
        marked = {line[2]: line[4:] for line in lines if line[2] in "=!"}
        said = " ".join(line.strip() for line in lines if line[2] not in "=!")
        errors = marked.get("!", "").replace("OF_A_VM", "VM_NOT_FOUND VM_INVALID_OPERATION INTERNAL CRITICAL")
        yield Command(word, arguments, other, summary, said, marked.get("=", ""), tuple(errors.split()))


PROTOCOL = tuple(
    _table("""
ASYNC_MODE_ON | async on | let the server say R when a result is there
  One line R is written when the first result since the last RESULTS arrives. A server is in this mode from
  the beginning.

ASYNC_MODE_OFF | async off | no R: ask with RESULTS
  Results wait until RESULTS fetches them.

CONDOR_VM_START REQUEST TYPE | start AD [TYPE] | start a VM from the job ad that was sent last
  The ad must have VM_WORKING_DIR and JobVMType, and the type must be that of the ad and of the server. The
  result is the id of the VM, which all other requests name.
  = REQUEST 0 VM
  ! NO_JOBCLASSAD_INFO NO_SUPPORTED_VM_TYPE JOBCLASSAD_NO_VM_MEMORY_PARAM JOBCLASSAD_MISMATCHED_HARDWARE_VT
    JOBCLASSAD_KVM_NO_DISK_PARAM JOBCLASSAD_KVM_INVALID_DISK_PARAM JOBCLASSAD_KVM_MISMATCHED_CHECKPOINT
    BAD_IMAGE CRITICAL INTERNAL

CONDOR_VM_STOP REQUEST VM | stop [VM] | end a VM: ask its guest to power off, then destroy it
  The guest has VM_STOP_TIMEOUT seconds to power itself off. A VM that was stopped is gone.
  = REQUEST 0 NULL
  ! OF_A_VM

CONDOR_VM_SUSPEND REQUEST VM | suspend [VM] | save a VM's memory to a file and free its memory
  The file is of use to this server alone. RESUME continues from it.
  = REQUEST 0 NULL
  ! OF_A_VM VM_NO_SUPPORT_SUSPEND

CONDOR_VM_SOFT_SUSPEND REQUEST VM | soft-suspend [VM] | stop a VM's CPUs and keep its memory in RAM
  What HTCondor uses where VM_SOFT_SUSPEND is true.
  = REQUEST 0 NULL
  ! OF_A_VM VM_NO_SUPPORT_SUSPEND

CONDOR_VM_RESUME REQUEST VM | resume [VM] | let a suspended VM run again
  After SUSPEND, SOFT_SUSPEND or CHECKPOINT alike.
  = REQUEST 0 NULL
  ! OF_A_VM VM_INVALID_SUSPEND_FILE

CONDOR_VM_CHECKPOINT REQUEST VM | checkpoint [VM] | save a VM with all that a restart elsewhere needs
  The VM does not run afterwards: STOP it, or RESUME it. The files are in its working directory.
  = REQUEST 0 NULL
  ! OF_A_VM VM_NO_SUPPORT_CHECKPOINT VM_CANNOT_CREATE_CKPT_FILES

CONDOR_VM_STATUS REQUEST VM | status [VM] | the state of a VM and what it has used
  A VM that nobody knows is Stopped. CPU time is seconds of all its CPUs together and never runs backwards;
  utilization is the CPU used since the last STATUS by wall time and CPUs; memory is in KiB.
  = REQUEST 0 STATUS=Running CPUUTILIZATION=0.5 CPUTIME=12.0 MEMORY=65536 MAXMEMORY=65536
  ! INTERNAL CRITICAL

CONDOR_VM_GETPID REQUEST VM | pid [VM] | the process id of the hypervisor's process for a VM
  0 where there is none, or where it is kept back, as by default (VM_REPORT_PID).
  = REQUEST 0 PID
  ! VM_NOT_FOUND INTERNAL CRITICAL

QUIT | quit | destroy all VMs and end the server
  The reply comes when the VMs are gone.

VERSION | version | what the server calls itself
  The same text as its greeting.

COMMANDS | commands | the commands that the server knows

SUPPORT_VMS | types | the VM types that START takes for a word

RESULTS | results | fetch the results that are there
  The reply says how many lines follow, one for each request that has ended since. Fetched results are
  forgotten, and the next one is announced with an R again. The console fetches them by itself.

CLASSAD |  | begin a job ad
  Every line up to CLASSAD_END is an attribute, Name = expression, and is not answered.

CLASSAD_END |  | end a job ad
  Without a CLASSAD before it, the ad that was sent is forgotten.
""")
)
"""The protocol's, in the order in which a server lists its commands."""


def _short(*words: str) -> Iterator[Command]:
    """The console's form of commands of the protocol that say all there is to say."""
    for command in PROTOCOL:
        word, _, arguments = command.other.partition(" ")
        if word in words:
            yield Command(word, arguments, command.word, command.summary, "", "", ())


OWN = (
    *_table("""
start AD [TYPE]  or  job ID [TYPE] | CONDOR_VM_START | send a job ad and start a VM from it
  AD is a file of Name = expression lines (condor_q -l, .job.ad) or of the [new; syntax]; job 12.0 asks
  condor_q. The VM's working directory becomes the console's, secrets are left out, and the VM gets a name of
  its own, for a START destroys what is left of an earlier VM of the same name. Files are not copied: the
  console says which it would look for and where.
"""),
    *_short("status", "pid", "suspend", "soft-suspend", "resume", "checkpoint", "stop"),
    *_table("""
vms |  | the VMs that were started here, as far as is known
  Nothing is asked of the server.

wait [REQUEST] |  | wait for the result of a request, or of all of them
  What is typed meanwhile is kept until then. Control-C ends the waiting.

ad [FILE] |  | show the job ad that was sent last, or that of a file, without its secrets

log [LINES]  or  on|off |  | the end of the server's standard error, or all as it comes

wire on|off |  | show the lines of the protocol, or only what they mean

async on|off | ASYNC_MODE_ON | whether the server says R when a result is there
"""),
    *_short("results", "version", "commands", "types"),
    *_table("""
help [COMMAND or ERROR] |  | this list, or all about a command or an error word

quit | QUIT | destroy all VMs and end
  The end of input (Control-D) does the same.
"""),
)
"""The console's own."""

LEGEND = (
    "A line that begins in upper case goes to the server as it is. # and a number is a request; VM is the number of "
    "a VM, which may be left out while there is only one."
)


def protocol(word: str) -> Command | None:
    """The command of the protocol of this name, in any case, with or without ``CONDOR_VM_``."""
    word = word.upper()
    return next((command for command in PROTOCOL if command.word in (word, PREFIX + word)), None)


def own(word: str) -> Command | None:
    """The console's own command of this name."""
    return next((command for command in OWN if command.word == word), None)


# Help


def overview() -> list[Shown]:
    """The list of commands."""
    width = max(len(f"{own.word} {own.arguments}") for own in OWN) + 2

    def rows(table: Iterable[Command]) -> Iterator[Shown]:
        for row in table:
            yield Shown(PLAIN, f"  {f'{row.word} {row.arguments}'.rstrip().ljust(width)}{row.summary}")

    own_rows = (Shown(GOOD, "Commands of the console"), *rows(OWN))
    return [*own_rows, Shown(GOOD, "Commands of the protocol"), *rows(PROTOCOL), Shown(NOTE, LEGEND)]


def about(topic: str) -> list[Shown]:
    """All about a command, of the console's or of the protocol's, or about an error word."""
    lines: list[Shown] = []
    found = own(topic.lower()) if not topic.isupper() else None
    if found is not None:
        lines += _title(found)
        if found.other:
            lines.append(Shown(PLAIN, f"  It sends {found.other}."))
        topic = found.other or topic
    command = protocol(topic)
    if command is not None:
        lines += _title(command)
        if command.other:
            lines.append(Shown(PLAIN, f"  Here for short: {command.other}"))
        if command.result:
            lines.append(Shown(PLAIN, f"  The result is such as: {command.result}"))
        if command.errors:
            lines.append(Shown(PLAIN, "  or REQUEST 1 and one of"))
        lines += [Shown(PLAIN, f"    {word}: {error_words.meaning(word)}") for word in command.errors]
    return lines or _about_word(topic)


def _title(row: Command) -> list[Shown]:
    lines = [f"  {row.summary[:1].upper()}{row.summary[1:]}.", *([f"  {row.text}"] if row.text else [])]
    return [Shown(GOOD, f"{row.word} {row.arguments}".rstrip()), *(Shown(PLAIN, line) for line in lines)]


def _about_word(topic: str) -> list[Shown]:
    meaning = error_words.meaning(topic)
    if meaning:
        word = topic if topic == error_words.NOTHING else f"VMGAHP_ERR_{error_words.short(topic)}"
        fate = error_words.fate(topic)
        return [Shown(GOOD, word), Shown(PLAIN, f"  {meaning}"), Shown(PLAIN, f"  {fate}")]
    near = nearest(topic)
    return [Shown(BAD, f"There is no help about {clean(topic)}." + (f" Did you mean {near}?" if near else ""))]


def nearest(word: str) -> str:
    """A command or an error word that looks like `word`; empty where none does."""
    import difflib

    known = [*(own.word for own in OWN), *(command.word for command in PROTOCOL), *error_words.WORDS]
    pool = {name.lower(): name for name in known}
    short = word.lower().removeprefix("vmgahp_err_")
    found = difflib.get_close_matches(short[:60], pool, 1, 0.6)
    return pool[found[0]] if found else ""


# Completion


class Candidate(NamedTuple):
    """One way to complete a line."""

    text: str
    start: int
    """How many characters before the cursor it replaces, as a number below or equal to 0."""
    hint: str = ""


def complete(line: str, conversation: "Conversation") -> Iterator[Candidate]:
    """The candidates for a line up to the cursor."""
    *before, last = line.split(" ")
    if conversation.in_ad:
        last, choices = line, {"CLASSAD_END": ""} if line else {}
    elif not before:
        choices = _first_words(last)
    else:
        takes = _takes(before)
        if takes in ("ad", "start"):
            yield from (Candidate("job", -len(last)),) if takes == "start" and "job".startswith(last) else ()
            yield from _files(last)
        choices = _choices(takes, last, conversation)
    for text, hint in choices.items():
        if text.lower().startswith(last.lower()):
            yield Candidate(text, -len(last), hint)


def _takes(before: list[str]) -> str:
    """What comes after these words: ``ad``, ``help``, ``on|off``, ``REQUEST``, ``VM`` and so on; empty for nothing."""
    found, place = own(before[0]), len(before) - 1
    if found is None:
        command = protocol(before[0])
        wanted = command.arguments.split() if command is not None else []
        return f"new {wanted[0]}" if wanted and not place else wanted[place] if place < len(wanted) else ""
    if found.word == "start" and place:
        return "TYPE" if place == (2 if before[1] == "job" else 1) else ""
    if place:
        return ""
    return found.word if found.word in ("start", "ad", "help") else found.arguments.split(" ")[-1].strip("[]")


def _first_words(last: str) -> dict[str, str]:
    rows: list[Command] = [row for row in OWN if row.word.startswith(last)]
    if last[:1].isupper() or not last:
        rows += [row for row in PROTOCOL if row.word.startswith(last)]
    return {row.word: row.summary for row in rows}


def _choices(takes: str, last: str, conversation: "Conversation") -> dict[str, str]:
    match takes:
        case "VM":
            return {str(number): state for number, state in conversation.vms.items()}
        case "REQUEST":
            pending = conversation.requests.pending.values()
            return {str(request.number): request.operation for request in pending}
        case "new REQUEST":
            return {str(conversation.requests.last_id + 1): "the next request id"}
        case "TYPE":
            return dict.fromkeys(vm_types.DRIVERS, "")
        case "on|off":
            return {"on": "", "off": ""}
        case "help":
            prefix = "VMGAHP_ERR_" if last.upper().startswith("VMGAHP_") else ""
            words = error_words.WORDS if last else {}
            return _first_words(last) | {prefix + word: meaning for word, meaning in words.items()}
    return {}


def _files(last: str) -> Iterator[Candidate]:
    """Names of files and directories that begin as `last` does; none with characters that a terminal acts upon."""
    directory, _, begin = last.rpartition("/")
    where = os.path.expanduser(f"{directory}/") if directory or last.startswith("/") else "."
    try:
        with os.scandir(where) as entries:
            found = []
            for _, entry in zip(range(MOST_FILES), entries, strict=False):
                if entry.name.startswith(begin) and (begin or not entry.name.startswith(".")):
                    found.append((entry.name, entry.is_dir()))
    except OSError:
        return
    for name, is_directory in sorted(found):
        if escape(name) == name and not any(character.isspace() for character in name):
            yield Candidate(name + ("/" if is_directory else ""), -len(begin))
