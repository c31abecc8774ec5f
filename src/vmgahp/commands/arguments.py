"""The parser of all commands, and the options that have the same meaning in all of them."""

import argparse
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from vmgahp.host.guardian import SAFE_PATH
from vmgahp.text import escape, nearest
from vmgahp.vm_types import DRIVERS, SIMULATED

WRONG_WORDS = 2
"""The exit status for a command line that cannot be executed as it is."""

STATUSES = {
    0: "It is done.",
    1: "It failed; the reason is on standard error.",
    2: "Wrong arguments.",
    130: "Control-C.",
}
"""The exit statuses of every command, unless its own definition differs."""

FINDINGS = {
    "findings[].check": "what was looked for, such as kvm",
    "findings[].verdict": "ok; off: jobs do not get it here; bad: no job can run; unknown: it could not be looked at",
    "findings[].subject": "where it was looked",
    "findings[].seen": "what was seen",
    "findings[].hint": "what to do; empty where all is well",
    "findings[].because": "the check that this one stands on, where that is what is wrong; empty else",
}
"""The keys of findings, for `tell`."""


class UsageError(argparse.ArgumentTypeError):
    """A wrong command line, or word of it; the text is a sentence that names the mistake and how to correct it."""


class NotDone(Exception):
    """A request that was not carried out, with exit status 1; the text is a sentence that says why, and what to do."""


class Parser(argparse.ArgumentParser):
    """A parser that suggests corrections, and keeps the texts of the manual page that are not about options."""

    def __init__(self, **how: Any) -> None:
        super().__init__(allow_abbrev=False, **how)
        self.examples: Sequence[tuple[str, str]] = ()
        """The command lines of the examples, each with its effect."""
        self.statuses: Mapping[int, str] = STATUSES
        self.keys: Mapping[str, str] = {}
        """The keys that ``--json`` prints: the path of each (``vms[].name``), and its meaning."""

    def format_help(self) -> str:
        """Format the help with the examples, and with the exit statuses that differ from `STATUSES`."""
        formatter = self._get_formatter()
        special = {str(number): text for number, text in self.statuses.items() if STATUSES.get(number) != text}
        for title, rows in (("examples", self.examples), ("exit status", special.items())):
            add_table(formatter, title, rows)
        more = formatter.format_help()
        return super().format_help() + (more and f"\n{more}")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but report everything unknown as an error."""
        words = list(sys.argv[1:] if args is None else args)
        if self._subparsers is not None and not words:
            self.print_help(sys.stderr)
            self.exit(WRONG_WORDS)
        found, rest = super().parse_known_args(words, namespace)
        if rest:
            takes = {action.metavar for action in self._actions if action.nargs in ("+", "*")}
            is_behind = "--" not in words and takes & {"COMMAND", "WORD"}
            behind = "; the words of the other program go after --." if is_behind else ""
            if option := next((word.partition("=")[0] for word in rest if word.startswith("-")), ""):
                near = did_you_mean(option, (name for name in self._option_string_actions if name.startswith("--")))
                self.error(f"there is no option {option}{behind or near}")
            self.error(f"{' '.join(rest)} is too much" + (behind or "; there is no place for it."))
        if getattr(found, "parser", None) is None:
            found.parser = self
        return found, rest

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        words = [str(word) for word in action.choices]
        listed, near = f"{', '.join(words[:-1])} or {words[-1]}", did_you_mean(str(value), words)
        if isinstance(action, argparse._SubParsersAction):
            what = str(action.metavar).lower()
            self.error(f"there is no {what} {value or repr(value)}{near or f': there is {listed}.'}")
        self.error(f"{'/'.join(action.option_strings) or action.metavar} {value}: it is one of {listed}{near or '.'}")

    def error(self, message: str) -> NoReturn:
        """Exit with a sentence about the mistake, and a hint to the help."""
        end = "" if message.endswith((".", "?", "!")) else "."
        said = escape(message.removeprefix("argument "))
        self.exit(WRONG_WORDS, f"{self.prog}: {said}{end}\nHint: see {self.prog} --help\n")


def add_table(formatter: argparse.HelpFormatter, title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Add a section of words with their meanings to a help text."""
    formatter.start_section(title)
    for word, text in rows:
        formatter.add_argument(argparse.Action([], word, 0, help=text.replace("%", "%%"), metavar=word))
    formatter.end_section()


def tell(
    command: argparse.ArgumentParser,
    *,
    examples: Sequence[tuple[str, str]] = (),
    statuses: Mapping[int, str] | None = None,
    keys: Mapping[str, str] | None = None,
) -> None:
    """Set the parts of a command's manual page and help that are not about options.

    `examples` are command lines, each with its effect; `statuses` are those that differ from `STATUSES`, with an empty
    text for one that this command does not have; `keys` are those of `Parser.keys`.
    """
    assert isinstance(command, Parser)
    command.examples = examples
    command.statuses = {number: text for number, text in sorted({**STATUSES, **(statuses or {})}.items()) if text}
    command.keys = keys or {}


def add_type(command: argparse.ArgumentParser, default: str = "kvm", text: str = "") -> None:
    """Add ``--type``, the VM type as HTCondor has it."""
    text = text or f"the VM type: kvm, qemu, xen, vmware, or that of a driver (default: {default or 'that of VM_TYPE'})"
    command.add_argument("--type", type=vm_type, default=default, metavar="VM_TYPE", help=text)


def memory(text: str) -> int:
    """Parse an amount of memory in MiB; like HTCondor, with a fraction, a blank before the unit, and rounded up."""
    units = {"k": 1 / 1024, "": 1, "m": 1, "g": 1024, "t": 1024**2}
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(?:([kmgt])i?b?)?", text, re.ASCII | re.IGNORECASE)
    if not found or not float(found[1]):
        raise UsageError(f"{text!a} is not a valid memory size. Give MiB (2048) or a unit (4G).")
    if (mib := math.ceil(float(found[1]) * units[(found[2] or "").lower()])) > 1 << 24:  # as in the catalog of images
        raise UsageError(f"{text!a} is more than a VM can have.")
    return mib


def whole(most: int, wrong: str) -> Callable[[str], int]:
    """Make a parser of whole numbers from 1 to `most`, which says of any other text that it is `wrong`."""

    def parse(text: str) -> int:
        if not re.fullmatch("[0-9]{1,9}", text) or not 0 < int(text) <= most:
            raise UsageError(f"{text!a} is {wrong} from 1 to {most}")
        return int(text)

    return parse


cpus = whole(255, "not a valid number of CPUs. Give one")


def vm_type(text: str) -> str:
    """Parse a VM type, in lower case; one that is unknown here may exist on another machine."""
    word = text.lower()
    if word in ("", "kvm") or "," in word:
        return word
    from importlib.metadata import entry_points

    known = {*DRIVERS, SIMULATED}
    near = "" if word in known else did_you_mean(word, known)
    if near and not entry_points(group="vmgahp.drivers", name=word):
        raise UsageError(f"{text!a} is no VM type{near}")
    return word


def assignment(text: str) -> tuple[str, str]:
    """Parse NAME=VALUE."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if not (name and equals):
        raise UsageError(f"{text!a} is not NAME=VALUE")
    return name, value


def seconds(text: str) -> float:
    """Parse a time in seconds."""
    with suppress(ValueError):
        if 0.1 <= (value := float(text)) <= 86400:
            return value
    raise UsageError(f"{text!a} is no time: write seconds, from 0.1 to 86400")


def add_json(command: argparse.ArgumentParser, text: str = "print it all as one JSON object") -> None:
    """Add ``--json``; its keys are set by `tell`."""
    command.add_argument("--json", action="store_true", help=text)


def print_json(document: Mapping[str, object]) -> None:
    """Print an object on standard output as every ``--json`` does: indented, in ASCII."""
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def for_root(*words: str) -> str:
    """Return the command line for root: with this program's full path if root's PATH under sudo does not have it."""
    path = os.path.abspath(sys.argv[0])
    is_elsewhere = os.path.basename(path) == "vmgahp" and os.path.dirname(path) not in SAFE_PATH.split(":")
    return shlex.join([path if is_elsewhere else "vmgahp", *words])


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean X?`` for the known word closest to `word`, ignoring case; empty if none is close."""
    by_lower = {each.lower(): each for each in known}
    near = nearest(word.lower(), by_lower)
    return f"; did you mean {by_lower[near]}?" if near else ""
