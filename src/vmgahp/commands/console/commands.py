"""The commands of the protocol and of the console, with what there is to say of each.

One table for the help, the completion and the session. The first part of it is the protocol's, in the order in
which a server lists its commands; the second is the console's own.
"""

from typing import NamedTuple

from vmgahp import lifecycle

VM_PREFIX = "CONDOR_VM_"

_OF_A_VM = ("VM_NOT_FOUND", "VM_INVALID_OPERATION", "INTERNAL", "CRITICAL")
"""What an operation of a VM may fail with."""


class Command(NamedTuple):
    """One command of the protocol."""

    word: str
    arguments: str
    short: str
    """What is typed here in its place; empty where there is no such form."""
    summary: str
    text: str
    result: str = ""
    """What a RESULTS says of it later, where that is anything."""
    errors: tuple[str, ...] = ()
    """Words, without their prefix, that it may fail with."""


class Own(NamedTuple):
    """One command of the console's own."""

    word: str
    arguments: str
    summary: str
    text: str
    protocol: str = ""
    """The command of the protocol that it stands for."""
    takes: str = ""
    """What its argument is, for the completion: ``vm``, ``ad``, ``help``, ``on|off``, ``request``."""


PROTOCOL: tuple[Command, ...] = (
    Command(
        "ASYNC_MODE_ON",
        "",
        "async on",
        "let the server say R when a result is there",
        "One line R is written when the first result since the last RESULTS arrives. A server is in this mode from "
        "the beginning.",
    ),
    Command(
        "ASYNC_MODE_OFF",
        "",
        "async off",
        "no R: ask with RESULTS",
        "Results wait until RESULTS fetches them.",
    ),
    Command(
        "CONDOR_VM_START",
        "REQUEST TYPE",
        "start AD [TYPE]",
        "start a VM from the job ad that was sent last",
        "The ad must have VM_WORKING_DIR and JobVMType, and the type must be that of the ad and of the server. The "
        "result is the id of the VM, which all other requests name.",
        "REQUEST 0 VM",
        (
            "NO_JOBCLASSAD_INFO",
            "NO_SUPPORTED_VM_TYPE",
            "JOBCLASSAD_NO_VM_MEMORY_PARAM",
            "JOBCLASSAD_MISMATCHED_HARDWARE_VT",
            "JOBCLASSAD_KVM_NO_DISK_PARAM",
            "JOBCLASSAD_KVM_INVALID_DISK_PARAM",
            "JOBCLASSAD_KVM_MISMATCHED_CHECKPOINT",
            "BAD_IMAGE",
            "CRITICAL",
            "INTERNAL",
        ),
    ),
    Command(
        "CONDOR_VM_STOP",
        "REQUEST VM",
        "stop [VM]",
        "end a VM: ask its guest to power off, then destroy it",
        "The guest has VM_STOP_TIMEOUT seconds to power itself off. A VM that was stopped is gone.",
        "REQUEST 0 NULL",
        _OF_A_VM,
    ),
    Command(
        "CONDOR_VM_SUSPEND",
        "REQUEST VM",
        "suspend [VM]",
        "save a VM's memory to a file and free its memory",
        "The file is of use to this server alone. RESUME goes on from it.",
        "REQUEST 0 NULL",
        (*_OF_A_VM, "VM_NO_SUPPORT_SUSPEND"),
    ),
    Command(
        "CONDOR_VM_SOFT_SUSPEND",
        "REQUEST VM",
        "soft-suspend [VM]",
        "stop a VM's CPUs and keep its memory in RAM",
        "What HTCondor uses where VM_SOFT_SUSPEND is true.",
        "REQUEST 0 NULL",
        (*_OF_A_VM, "VM_NO_SUPPORT_SUSPEND"),
    ),
    Command(
        "CONDOR_VM_RESUME",
        "REQUEST VM",
        "resume [VM]",
        "let a suspended VM go on",
        "After SUSPEND, SOFT_SUSPEND or CHECKPOINT alike.",
        "REQUEST 0 NULL",
        (*_OF_A_VM, "VM_INVALID_SUSPEND_FILE"),
    ),
    Command(
        "CONDOR_VM_CHECKPOINT",
        "REQUEST VM",
        "checkpoint [VM]",
        "save a VM with all that a restart elsewhere needs",
        "The VM does not run afterwards: STOP it, or RESUME it. The files are in its working directory.",
        "REQUEST 0 NULL",
        (*_OF_A_VM, "VM_NO_SUPPORT_CHECKPOINT", "VM_CANNOT_CREATE_CKPT_FILES"),
    ),
    Command(
        "CONDOR_VM_STATUS",
        "REQUEST VM",
        "status [VM]",
        "the state of a VM and what it has used",
        "A VM that nobody knows is Stopped. CPU time is seconds of all its CPUs together and never runs backwards; "
        "utilisation is the CPU used since the last STATUS by wall time and CPUs; memory is in KiB.",
        "REQUEST 0 STATUS=Running CPUUTILIZATION=0.5 CPUTIME=12.0 MEMORY=65536 MAXMEMORY=65536",
        ("INTERNAL", "CRITICAL"),
    ),
    Command(
        "CONDOR_VM_GETPID",
        "REQUEST VM",
        "pid [VM]",
        "the process id of the hypervisor's process for a VM",
        "0 where there is none, or where it is kept back (VM_REPORT_PID).",
        "REQUEST 0 PID",
        ("VM_NOT_FOUND", "INTERNAL", "CRITICAL"),
    ),
    Command(
        "QUIT", "", "quit", "destroy all VMs and end the server", "The reply comes when the VMs are gone."
    ),
    Command("VERSION", "", "version", "what the server calls itself", "The same text as its greeting."),
    Command("COMMANDS", "", "commands", "the commands that the server knows", ""),
    Command("SUPPORT_VMS", "", "types", "the VM types that START takes for a word", ""),
    Command(
        "RESULTS",
        "",
        "results",
        "fetch the results that are there",
        "The reply says how many lines follow, one for each request that has ended since. Fetched results are "
        "forgotten, and the next one is announced with an R again. The console fetches them by itself.",
    ),
    Command(
        "CLASSAD",
        "",
        "",
        "begin a job ad",
        "Every line up to CLASSAD_END is an attribute, Name = expression, and is not answered.",
    ),
    Command(
        "CLASSAD_END",
        "",
        "",
        "end a job ad",
        "Without a CLASSAD before it, the ad that was sent is forgotten.",
    ),
)

OWN: tuple[Own, ...] = (
    Own(
        "start",
        "AD [TYPE]  or  job ID [TYPE]",
        "send a job ad and start a VM from it",
        "AD is a file of Name = expression lines (condor_q -l, .job.ad) or of the [new; syntax]; job 12.0 asks "
        "condor_q. The VM's working directory becomes the console's, secrets are left out, and the VM gets a name of "
        "its own, for a START destroys what is left of an earlier VM of the same name. Files are not copied: "
        "the console says which it would look for and where.",
        "CONDOR_VM_START",
        "ad",
    ),
    *(
        Own(
            word,
            "[VM]",
            next(command.summary for command in PROTOCOL if command.word == VM_PREFIX + operation),
            "",
            VM_PREFIX + operation,
            "vm",
        )
        for word, operation in (
            ("status", lifecycle.STATUS),
            ("pid", lifecycle.GETPID),
            ("suspend", lifecycle.SUSPEND),
            ("soft-suspend", lifecycle.SOFT_SUSPEND),
            ("resume", lifecycle.RESUME),
            ("checkpoint", lifecycle.CHECKPOINT),
            ("stop", lifecycle.STOP),
        )
    ),
    Own("vms", "", "the VMs that were started here, as far as is known", "Nothing is asked of the server."),
    Own(
        "wait",
        "[REQUEST]",
        "wait for the result of a request, or of all of them",
        "What is typed meanwhile is kept until then. Control-C ends the waiting.",
        "",
        "request",
    ),
    Own(
        "ad",
        "[FILE]",
        "show the job ad that was sent last, or that of a file, without its secrets",
        "",
        "",
        "ad",
    ),
    Own(
        "log",
        "[LINES]  or  on|off",
        "the end of the server's standard error, or all as it comes",
        "",
        "",
        "log",
    ),
    Own("wire", "on|off", "show the lines of the protocol, or only what they mean", "", "", "on|off"),
    Own("async", "on|off", "whether the server says R when a result is there", "", "ASYNC_MODE_ON", "on|off"),
    Own("results", "", "fetch the results that are there", "", "RESULTS"),
    Own("version", "", "what the server calls itself", "", "VERSION"),
    Own("commands", "", "the commands that the server knows", "", "COMMANDS"),
    Own("types", "", "the VM types that START takes for a word", "", "SUPPORT_VMS"),
    Own("help", "[COMMAND | ERROR]", "this list, or all about a command or an error word", "", "", "help"),
    Own("quit", "", "destroy all VMs and end", "The end of input (Control-D) does the same.", "QUIT"),
)

OPERATIONS = {own.word: own.protocol.removeprefix(VM_PREFIX) for own in OWN if own.takes == "vm"}
"""Short form -> operation, for what is asked of a VM."""


def protocol(word: str) -> Command | None:
    """The command of the protocol of this name, in any case, with or without ``CONDOR_VM_``."""
    word = word.upper()
    return next((command for command in PROTOCOL if command.word in (word, VM_PREFIX + word)), None)


def own(word: str) -> Own | None:
    """The console's own command of this name."""
    return next((command for command in OWN if command.word == word), None)
