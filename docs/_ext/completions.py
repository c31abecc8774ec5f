"""The completions of ``vmgahp`` for bash, zsh and fish, made by shtab of the parser that reads the words.

    python docs/_ext/completions.py bash|zsh|fish >FILE
    python docs/_ext/completions.py DIRECTORY      all three, below it, where the shells look

Only the standard library, shtab and the modules of vmgahp are needed, so that they can be made wherever it is built.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import shtab

from vmgahp.commands.arguments import Parser
from vmgahp.commands.tool import tool_parser
from vmgahp.config.check import ELSEWHERE
from vmgahp.config.table import SETTINGS
from vmgahp.vm_types import DRIVERS

PLACES = {
    "bash": "bash-completion/completions/vmgahp",
    "zsh": "zsh/site-functions/_vmgahp",
    "fish": "fish/vendor_completions.d/vmgahp.fish",
}
"""The places below ``/usr/share``, or the ``share`` of another prefix."""

JOBS = 'timeout 3 condor_q -constraint JobUniverse==13 -format %d. ClusterId -format "%d\\n" ProcId 2>/dev/null'
IMAGES = "vmgahp image list 2>/dev/null | sed 1d | cut -d ' ' -f 1"

WORDS = {
    "jobs": JOBS,
    "images": IMAGES,
    "types": f"printf '%s\\n' {' '.join(sorted(DRIVERS))}",
    "settings": f"printf '%s\\n' {' '.join(sorted(row.name for row in (*SETTINGS, *ELSEWHERE)))}",
}
"""Kind -> a shell command that prints its words, one per line."""

KINDS = {"JOB": "jobs", "VM_TYPE": "types", "image check NAME": "images", "image update NAME": "images"}
KINDS |= {"image remove NAME": "images", "config NAME": "settings"}
"""The metavar of an argument, with its command where it means this there alone -> the kind of its words."""

FILES = ("FILE", "FILE|DIR", "AD", "PATH", "IMAGE", "SOURCE", "WORD", "COMMAND")


def _functions(shell: str) -> str:
    """Return the functions that the completions call."""
    form = {
        "bash": '_vmgahp_{name}() {{ local IFS=$\'\\n\'; compgen -W "$({words})" -- "$1"; }}',
        "zsh": '_vmgahp_{name}() {{ compadd -- ${{(f)"$({words})"}} }}',
        "fish": "function _vmgahp_{name}; {words}; end",
    }[shell]
    return "".join(form.format(name=name, words=words) + "\n" for name, words in WORDS.items())


def _mark(parser: Parser) -> None:
    """Tell shtab an argument's words, unless it is a choice or free text."""
    command = parser.prog.partition(" ")[2]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            continue
        name = str(action.metavar)
        kind = KINDS.get(f"{command} {name}", KINDS.get(name))
        if kind:
            function = f"_vmgahp_{kind}"
            action.complete = {"bash": function, "zsh": function, "fish": f"({function})"}  # type: ignore[attr-defined]
        elif (command == "report" and name == "DIR") or name in FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif name == "DIR":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]


def _parsers(parser: Parser) -> Iterator[Parser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _parsers(child)


def script(shell: str) -> str:
    """Make the completions for a shell as one file."""
    parser = tool_parser()
    for each in _parsers(parser):
        _mark(each)
    return shtab.complete(parser, shell=shell, preamble=_functions(shell))


def main(word: str) -> None:
    """Print the completions for a shell, or write those for all."""
    if word in PLACES:
        sys.stdout.write(script(word))
        return
    for shell, place in PLACES.items():
        path = Path(word, place)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script(shell))


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(f"{__doc__}")
    main(sys.argv[1])
