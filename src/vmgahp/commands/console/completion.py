"""What could come next on a line that is being typed. Pure but for the names of files."""

import os
from typing import NamedTuple

from vmgahp.commands.console import commands
from vmgahp.protocol import error_words
from vmgahp.text import escape

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vmgahp.commands.console.conversation import Conversation

MOST_FILES = 500
"""Names of a directory that are looked at."""

_TYPES = ("kvm", "qemu", "libvirt", "xen", "vmware", "vsphere", "script")


class Candidate(NamedTuple):
    """One way to go on."""

    text: str
    start: int
    """How many characters before the cursor it replaces, as a number below or equal to 0."""
    hint: str = ""


def complete(line: str, talk: "Conversation") -> "Iterator[Candidate]":
    """The candidates for a line up to the cursor."""
    if talk.in_ad:
        yield from _matching(line, ("CLASSAD_END",)) if line else ()
        return
    words = line.split(" ")
    last = words[-1]
    if len(words) == 1:
        yield from _first(last)
        return
    own = commands.own(words[0])
    command = None if own is not None else commands.protocol(words[0])
    if own is not None:
        yield from _own(own, words, last, talk)
    elif command is not None and command.arguments:
        yield from _protocol(command, words, last, talk)


def _first(last: str) -> "Iterator[Candidate]":
    for own in commands.OWN:
        if own.word.startswith(last):
            yield Candidate(own.word, -len(last), own.summary)
    if last[:1].isupper() or not last:
        for command in commands.PROTOCOL:
            if command.word.startswith(last):
                yield Candidate(command.word, -len(last), command.summary)


def _own(own: commands.Own, words: list[str], last: str, talk: "Conversation") -> "Iterator[Candidate]":
    match own.takes:
        case "vm" if len(words) == 2:
            yield from _vms(last, talk)
        case "request" if len(words) == 2:
            for number, request in talk.requests.items():
                if str(number).startswith(last):
                    yield Candidate(str(number), -len(last), request.operation)
        case "on|off" if len(words) == 2:
            yield from _matching(last, ("on", "off"))
        case "log" if len(words) == 2:
            yield from _matching(last, ("on", "off"))
        case "help" if len(words) == 2:
            yield from _help(last)
        case "ad":
            live = own.word == "start" and words[1] == "job"
            if len(words) == 2:
                if own.word == "start":
                    yield from _matching(last, ("job",))
                yield from _files(last)
            elif own.word == "start" and len(words) == (4 if live else 3):
                yield from _matching(last, _TYPES)


def _protocol(
    command: commands.Command, words: list[str], last: str, talk: "Conversation"
) -> "Iterator[Candidate]":
    wanted = command.arguments.split()
    if len(words) - 2 >= len(wanted):
        return
    match wanted[len(words) - 2]:
        case "REQUEST":
            fresh = str(max((*talk.requests, talk.last_id)) + 1)
            if fresh.startswith(last):
                yield Candidate(fresh, -len(last), "the next request id")
        case "VM":
            yield from _vms(last, talk)
        case "TYPE":
            yield from _matching(last, _TYPES)


def _vms(last: str, talk: "Conversation") -> "Iterator[Candidate]":
    for number, state in talk.vms.items():
        if str(number).startswith(last):
            yield Candidate(str(number), -len(last), state)


def _help(last: str) -> "Iterator[Candidate]":
    yield from _first(last)
    word = last.upper()
    for short in error_words.WORDS:
        for full in (short, f"VMGAHP_ERR_{short}"):
            if word and full.startswith(word):
                yield Candidate(full, -len(last), error_words.meaning(short))
                break


def _files(last: str) -> "Iterator[Candidate]":
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


def _matching(last: str, texts: "Iterable[str]") -> "Iterator[Candidate]":
    for text in texts:
        if text.lower().startswith(last.lower()):
            yield Candidate(text, -len(last))
