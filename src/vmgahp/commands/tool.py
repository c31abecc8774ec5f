"""The program ``vmgahp``: its commands, their help by purpose, and its exit statuses."""

import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import StringIO, TextIOWrapper
from typing import NamedTuple

from vmgahp import errors
from vmgahp.commands.arguments import NotDone, Parser, UsageError, add_table
from vmgahp.commands.by_hand import version_line
from vmgahp.host import packages
from vmgahp.text import escape

NOBODY_READS = 141
"""The exit status, as of a shell, when the reader of the output has gone (SIGPIPE)."""

MACHINE, JOBS, GUESTS, PROTOCOL, SELF = (
    "A machine that runs VMs",
    "Jobs",
    "VMs that run, and those that have run",
    "The protocol between HTCondor and the server",
    "This program",
)


class ToolCommand(NamedTuple):
    word: str
    group: str
    place: str
    """The ``module:function`` that adds the arguments and the function to run; the module is in `vmgahp.commands`.

    The docstring of that function is the command's description.
    """
    text: str


# fmt: off
COMMANDS = tuple(ToolCommand(*row) for row in (
    ("setup", MACHINE, "setup:add_arguments", "write the configuration of this machine, after asking"),
    ("doctor", MACHINE, "doctor:add_arguments",
        "say why condor_status -vm is empty, or a VM job stays idle, on this machine"),
    ("config", MACHINE, "config:add_arguments", "print the settings as they count here, and where each comes from"),
    ("probe", MACHINE, "by_hand:probe_arguments", "print what this machine would advertise, or why it would not"),
    ("image", MACHINE, "image:add_arguments", "keep the images that jobs name in the catalog, and make some"),
    ("run", JOBS, "run:add_arguments",
        "run a program in a virtual machine as a job: its files, its output and its exit code"),
    ("submit", JOBS, "submit:add_arguments",
        "write a submit file for a VM that exists: libvirt XML, OVF, .vmx, a Vagrant box, a disk"),
    ("top", GUESTS, "top:add_arguments", "show the VMs of this machine, live"),
    ("ssh", GUESTS, "reach:add_ssh", "get into the guest of a job by ssh"),
    ("view", GUESTS, "reach:add_view", "show the display of a job's guest"),
    ("attach", GUESTS, "reach:add_attach", "follow the serial console of a job's guest"),
    ("report", GUESTS, "report:add_arguments", "make a page of what a VM used and what happened to it"),
    ("kill", GUESTS, "by_hand:kill_arguments", "destroy a leftover VM by its name"),
    ("console", PROTOCOL, "console:add_arguments", "talk to a daemon by hand: job ads, requests, results in words"),
    ("record", PROTOCOL, "record:add_arguments", "run a server and write its conversation into a file"),
    ("replay", PROTOCOL, "replay:add_arguments",
        "play a recorded conversation to a server, and show the differences"),
    ("serve", PROTOCOL, "by_hand:serve_arguments", "speak the GAHP protocol on standard input and output"),
    ("version", SELF, "by_hand:version_arguments", "print the version"),
))
# fmt: on


class _Tool(Parser):
    """The parser of the first word, whose help is grouped by purpose."""

    def format_help(self) -> str:
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        for group in dict.fromkeys(command.group for command in COMMANDS):
            add_table(formatter, group, [(row.word, row.text) for row in COMMANDS if row.group == group])
        formatter.add_text("vmgahp help COMMAND, or man vmgahp-COMMAND, says more.")
        return "usage: vmgahp COMMAND [ARGUMENT ...]\n\n" + formatter.format_help()


def tool_parser(chosen: str = "") -> Parser:
    """Make the parser of ``vmgahp``, with the arguments of the chosen command, or of all for the manual pages."""
    text = "Virtual machines as HTCondor jobs. HTCondor itself starts condor_vm-gahp (VM_GAHP_SERVER); "
    parser = _Tool(prog="vmgahp", description=text + "this is the command-line tool beside it.")
    parser.add_argument("--version", action="version", version=version_line())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for row in COMMANDS:
        command = commands.add_parser(row.word, help=row.text)
        if chosen in (row.word, ""):
            module, _, name = row.place.partition(":")
            function = getattr(import_module(f"vmgahp.commands.{module}"), name)
            command.description = " ".join((function.__doc__ or "").split())
            function(command)
    return parser


def run(argv: Sequence[str]) -> int:
    """Execute the command line and return the exit status; a wrong word never leads to a traceback."""
    dumb = StringIO()  # stands in for closed streams, which are None in Python
    sys.stdout, sys.stderr = sys.stdout or dumb, sys.stderr or dumb
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for locales without UTF-8
    words = list(argv[1:])
    if words[:1] == ["--"]:
        del words[0]
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    try:
        options = tool_parser(next((word for word in words if not word.startswith("-")), "-")).parse_args(words)
        status, why = 1, ""
        try:
            status = options.run(options)
        except UsageError as error:
            options.parser.error(str(error))
        except (NotDone, errors.Fault) as refused:
            why = refused.sentence if isinstance(refused, errors.Fault) else str(refused)
        except OSError as error:
            if error.filename is None:
                raise
            why = f"{error.filename}: {error.strerror}."
        sys.stdout.flush()
        if why:
            sys.stderr.write(f"vmgahp {options.command}: {escape(why)}\n")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "vmgahp"):
            raise
        sys.stderr.write(f"vmgahp: the Python package {package} is missing. Hint: {packages.of_python(package)}\n")
        return 1
    except OSError as error:
        # Errors of other outputs are handled in place, or have a file's name.
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python reports it again at exit
        if error.errno == errno.EPIPE:
            return NOBODY_READS
        sys.stderr.write(f"vmgahp: standard output cannot be written: {error.strerror}.\n")
        return 1
    return status or int(bool(dumb.getvalue()))
