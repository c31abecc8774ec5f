"""The words of the console: its commands with their help, and the meaning of a server's answers. Pure."""

from collections.abc import Mapping
from typing import NamedTuple

from vmgahp import lifecycle
from vmgahp.commands.arguments import did_you_mean
from vmgahp.protocol import error_words
from vmgahp.protocol.requests import PREFIX
from vmgahp.text import escape

SENT, RECEIVED, GOOD, BAD, NOTE, PLAIN = "sent", "received", "good", "bad", "note", ""
"""The kinds of lines that are shown."""

LONGEST = 2000
"""The maximum number of characters of one line that are shown."""


class Command(NamedTuple):
    """A command: of the console in lower case, of the protocol in upper case."""

    arguments: str
    text: str
    """The help for the command; `overview` shows the first sentence."""
    operation: str = ""
    """The operation of `lifecycle` that it requests."""


# fmt: off
COMMANDS: dict[str, Command] = {
    "start": Command("AD [TYPE]  or  job ID [TYPE]", "send a job ad and start a VM from it. AD is a file of lines "
        "Name = expression, as of condor_q -l or .job.ad; job 12.0 asks condor_q. The VM's working directory becomes "
        "the console's, secrets are left out, and the VM gets a name of its own, because a START destroys an earlier "
        "VM of the same name. Files are not copied. The result is the number of the VM.", lifecycle.START),
    "status": Command("[VM]", "show the state of a VM and what it has used. CPU time is seconds of all its CPUs "
        "together; CPU is what was used since the last STATUS by wall time and CPUs. An unknown VM is stopped.",
        lifecycle.STATUS),
    "pid": Command("[VM]", "show the process id of a VM's hypervisor. It is 0 where there is none or where it is kept "
        "back, as by default (VM_REPORT_PID).", lifecycle.GETPID),
    "suspend": Command("[VM]", "save a VM's memory to a file and free its memory. Only this server can resume from the "
        "file.", lifecycle.SUSPEND),
    "soft-suspend": Command("[VM]", "stop a VM's CPUs and keep its memory in RAM. HTCondor does so where "
        "VM_SOFT_SUSPEND is true.", lifecycle.SOFT_SUSPEND),
    "resume": Command("[VM]", "let a VM run again after suspend, soft-suspend or checkpoint", lifecycle.RESUME),
    "checkpoint": Command("[VM]", "save a VM with all that a restart elsewhere needs. The VM does not run afterwards: "
        "stop or resume it. The files are in its working directory.", lifecycle.CHECKPOINT),
    "stop": Command("[VM]", "end a VM: ask its guest to power off, then destroy it. The guest has VM_STOP_TIMEOUT "
        "seconds to power off.", lifecycle.STOP),
    "vms": Command("", "list the VMs that were started here, and the requests without a result"),
    "wait": Command("[REQUEST]", "wait for the result of a request, or of all. Control-C ends the waiting."),
    "ad": Command("AD [TYPE]  or  job ID [TYPE]", "show what start would send"),
    "log": Command("[LINES]  or  on|off", "show the end of the server's standard error, or all of it as it comes"),
    "help": Command("[COMMAND or ERROR]", "list all commands, or explain one of them or an error word"),
    "quit": Command("", "destroy all VMs and end. Control-D does the same."),
    "ASYNC_MODE_ON": Command("", "let the server say R when a result is there, as it does from the beginning"),
    "ASYNC_MODE_OFF": Command("", "let the server say no R. Results wait until RESULTS fetches them."),
    "RESULTS": Command("", "fetch the results that are there. The reply says how many lines follow, one for each "
        "request that has ended since. The console fetches them by itself when an R comes."),
    "VERSION": Command("", "show the server's version, as in its greeting"),
    "COMMANDS": Command("", "list the commands that the server knows"),
    "SUPPORT_VMS": Command("", "list the VM types that START accepts"),
    "CLASSAD": Command("", "begin a job ad of your own. Each line up to CLASSAD_END, or Control-D, is an attribute, "
        "Name = expression, and is not answered."),
    "CLASSAD_END": Command("", "end a job ad. Without a CLASSAD before it, the ad that was sent is forgotten."),
}
# fmt: on

PROTOCOL = tuple(PREFIX + row.operation for row in COMMANDS.values() if row.operation)
"""The commands of the protocol that a command of the console sends."""

LEGEND = (
    "A line that begins with a word in upper case goes to the server as it is, CONDOR_VM_STATUS 12 1 for example. VM "
    "is the number of a VM, and may be left out while there is only one. # and a number is a request."
)

_FIGURES = {
    "STATUS": "{}",
    "CPUUTILIZATION": "CPU {}",
    "CPUTIME": "{} s of CPU time",
    "MEMORY": "{} KiB of memory",
    "MAXMEMORY": "{} KiB at most",
}
"""The fields of a STATUS in words."""


def overview() -> list[str]:
    """List the commands."""
    return [*(f"  {f'{word} {row.arguments}':36}{row.text.split('. ')[0]}" for word, row in COMMANDS.items()), LEGEND]


def about(topic: str) -> list[str]:
    """Explain a command or an error word; empty for an unknown one."""
    for word, row in COMMANDS.items():
        sends = [PREFIX + row.operation] if row.operation else []
        if topic.lower() == word.lower() or topic.upper() in sends:
            text = row.text.removesuffix(".") + "."
            return [f"{word} {row.arguments}".rstrip(), f"  {text}", *(f"  It sends {each}." for each in sends)]
    if meaning := error_words.meaning(topic):
        return [error_words.short(topic), f"  {meaning}", f"  {error_words.fate(topic)}"]
    return []


def suggestion(word: str) -> str:
    """Suggest the known word closest to `word`, or else the command that lists all words."""
    return did_you_mean(word[:60], (*COMMANDS, *PROTOCOL, *error_words.WORDS)) or "; help lists all commands."


def clean(text: str) -> str:
    """Make one line of `text` that is harmless to a terminal; a guest or another user's job may have written it."""
    shown = escape(text[:LONGEST].encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"))
    return shown if len(text) <= LONGEST else f"{shown} ... and {len(text) - LONGEST} more characters"


def error(word: str) -> str:
    """Explain an error word."""
    return f"{clean(word)}: {error_words.meaning(word) or 'an unknown error word'}"


def figures(status: Mapping[str, str]) -> str:
    """Put the fields of a STATUS into words; unknown fields are shown unchanged."""
    return ", ".join(
        _FIGURES[name].format(clean(value)) if name in _FIGURES else f"{clean(name)} {clean(value)}"
        for name, value in status.items()
    )
