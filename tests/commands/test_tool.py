"""The command line of people: help, wrong words, and how a command ends."""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest

from tests.commands.support import parsers, vmgahp
from tests.peer import VMGAHP
from vmgahp import cli
from vmgahp.commands.arguments import WRONG_WORDS, Parser, for_root
from vmgahp.commands.tool import COMMANDS, NOBODY_READS, tool_parser

Typed = Callable[..., tuple[int, str, str]]


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Typed:
    """Run a command line: its status, and what it has written to stdout and to stderr."""
    monkeypatch.setenv("COLUMNS", "100")
    return partial(vmgahp, capsys)


class Interrupted:
    """A finder of modules in whose middle somebody types Control-C."""

    def find_spec(self, name: str, *_more: object) -> None:
        if name in ("vmgahp.commands.tool", "vmgahp.daemon.probe"):
            raise KeyboardInterrupt


def test_control_c_is_no_failure_while_modules_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes a tenth of a second, in which a traceback was printed."""
    from vmgahp import commands, daemon
    from vmgahp.daemon import probe

    assert probe
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    for package, module in ((commands, "tool"), (daemon, "probe")):
        monkeypatch.delattr(package, module)
        monkeypatch.delitem(sys.modules, f"{package.__name__}.{module}")
    assert cli.main(["vmgahp", "doctor"]) == cli.INTERRUPTED
    monkeypatch.setattr(cli, "_end_at_once", sys.exit)
    with pytest.raises(SystemExit) as ended:
        cli.daemon(["condor_vm-gahp", "-f", "-M", "0", "vmtype", "kvm"])
    assert ended.value.code == cli.INTERRUPTED


@pytest.mark.parametrize(
    ("path", "shown"),
    [("/usr/bin/vmgahp", "vmgahp"), ("/usr/local/bin/vmgahp", "vmgahp"), ("/opt/my vm/vmgahp", "'/opt/my vm/vmgahp'")],
)
def test_root_is_told_a_program_that_its_path_leads_to(monkeypatch: pytest.MonkeyPatch, path: str, shown: str) -> None:
    """That of sudo leads into no environment of Python's."""
    monkeypatch.setattr(sys, "argv", [path])
    assert for_root("doctor", "--type", "kvm") == f"{shown} doctor --type kvm"


EVERY = list(parsers(tool_parser()))
LEAVES = [parser for parser in EVERY if parser._subparsers is None]


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"]])
def test_the_help_has_all_commands_by_what_people_want(typed: Typed, words: list[str]) -> None:
    status, out, err = typed(*words)
    assert (status, err) == (0, "")
    places = [out.index(f"\n  {row.word} ") for row in COMMANDS]
    assert places == sorted(places)
    assert all(out.index(f"\n{row.group}:\n") < place for row, place in zip(COMMANDS, places, strict=True))


@pytest.mark.parametrize("words", [[], ["image"], ["submit"]])
def test_a_word_too_few_is_answered_by_the_help(typed: Typed, words: list[str]) -> None:
    status, out, err = typed(*words)
    assert (status, out) == (WRONG_WORDS, "")
    assert err == typed("help", *words)[1]


@pytest.mark.parametrize("parser", EVERY, ids=lambda parser: parser.prog)
def test_help_of_a_word_is_what_its_option_prints(typed: Typed, parser: Parser) -> None:
    words = parser.prog.split()[1:]
    assert typed("help", *words) == typed(*words, "--help")


@pytest.mark.parametrize("words", [["--version"], ["version"], ["--", "version"]])
def test_the_version(typed: Typed, words: list[str]) -> None:
    from vmgahp import __version__

    assert typed(*words) == (0, f"vmgahp {__version__} (VM GAHP protocol 0.0.1)\n", "")


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("docter", "doctor"), ("image ad", "add"), ("doctor --jsno", "--json"),
        ("probe --type kmv", "kvm"), ("image add a b --sha25=12", "--sha256"),
        ("submit disk d.raw --network Nat", "nat"), ("--verson version", "--version"),
    ],
)  # fmt: skip
def test_a_wrong_word_may_have_been_another(typed: Typed, line: str, meant: str) -> None:
    status, out, err = typed(*line.split())
    assert (status, out) == (WRONG_WORDS, "")
    assert f"did you mean {meant}?\n" in err
    assert len(err.splitlines()) == 2, "a sentence, and where there is more"


@pytest.mark.parametrize("row", COMMANDS, ids=lambda row: row.word)
def test_a_command_has_the_arguments_that_the_manual_has(row: object) -> None:
    """Only the chosen command's arguments are added, as they are where all are."""
    word = row.word  # type: ignore[attr-defined]
    chosen, everything = (
        next(iter(parser._subparsers._group_actions)).choices[word].format_help()  # type: ignore[union-attr,index]
        for parser in (tool_parser(word), tool_parser())
    )
    assert chosen == everything


@pytest.mark.parametrize("parser", LEAVES, ids=lambda parser: parser.prog)
def test_no_wrong_word_ends_in_a_traceback(typed: Typed, parser: Parser) -> None:
    """Each option without its value, with one that is none of its choices or kind, and each stranger of an option."""
    command = parser.prog.split()[1:]
    lines = [["--no-such-option"], ["--no-such-option=1"], ["\x1b[2J\udcff", "--\x1b[31m"]]
    for action in parser._actions:
        for option in action.option_strings[-1:]:
            if action.nargs not in (0, "?"):
                lines.append([option])
            if (action.choices or action.type) and option != "--type":
                lines.append([option, "\x1b[2J\udcff"])
    for line in lines:
        status, out, err = typed(*command, *line)
        assert (status, out) == (WRONG_WORDS, ""), line
        assert err.startswith(f"{parser.prog}: ")
        assert err.replace("\n", "").isprintable()


def test_only_what_is_missing_is_said_to_be(typed: Typed) -> None:
    assert typed("ssh") == (
        WRONG_WORDS,
        "",
        "vmgahp ssh: the following arguments are required: JOB.\nHint: see vmgahp ssh --help\n",
    )


NO_TIMES = ("nan", "inf", "-1", "0", "1e9")
DASHES_ARE_MISSING = ("run --image x python3 -c 1", "record sh -c 1", "replay file sh -c 1")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("kill ' '", "the name is empty"),  # as a script types it whose variable is not set
        *(("help image ad", "ad"), ("help docter", "docter")),
        *((f"replay --timeout {wrong} file -- sh", f"'{wrong}' is no time") for wrong in NO_TIMES),
        *((f"top --interval {wrong}", f"'{wrong}' is no time") for wrong in NO_TIMES),
        *((line, "after --") for line in DASHES_ARE_MISSING),
    ],
)
def test_what_is_wrong_with_a_word_is_said(typed: Typed, line: str, said: str) -> None:
    status, out, err = typed(*shlex.split(line))
    assert (status, out) == (WRONG_WORDS, "")
    assert said in err


NAMES = {
    "--type": "VM_TYPE", "--json": None, "--verbose": None, "--dry-run": None, "--force": None, "--dir": "DIR",
    "--set": "NAME=VALUE", "--name": "NAME", "--memory": "MIB", "--cpus": "N", "--append": "'COMMAND = VALUE'",
}  # fmt: skip
"""Options that mean the same wherever they are, and their values."""


@pytest.mark.parametrize("parser", LEAVES, ids=lambda parser: parser.prog)
def test_an_option_means_the_same_everywhere_and_a_command_tells_what_it_is_for(parser: Parser) -> None:
    for action in parser._actions:
        for option in NAMES.keys() & set(action.option_strings):
            assert (action.metavar, action.nargs == 0) == (NAMES[option], NAMES[option] is None), option
        if "-o" in action.option_strings:
            assert "--output" in action.option_strings
        assert not {"-v", "--vm-type", "--vmtype", "--out", "--overwrite", "--quiet"} & set(action.option_strings)
        if not isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            assert action.help, f"{parser.prog} {action.option_strings or action.dest}"
    assert parser.description
    assert parser.description.endswith(".")
    assert bool(parser.keys) == ("--json" in parser._option_string_actions), "the keys of --json are told"
    for typed_line, what in parser.examples:
        assert parser.prog in typed_line
        assert what


def test_only_what_control_c_ends_as_a_success_has_no_130() -> None:
    """As tests of these two show: the one that stays on a terminal, and the server."""
    assert {parser.prog for parser in LEAVES if 130 not in parser.statuses} == {"vmgahp serve", "vmgahp top"}
    assert all(text for parser in LEAVES for text in parser.statuses.values())


def test_what_nobody_reads_any_more_is_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as nobody:
        words = [*VMGAHP, "config", "--verbose"]
        done = subprocess.run(words, stdout=nobody, stderr=subprocess.PIPE, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (NOBODY_READS, b"")


def test_a_disk_that_is_full_is_no_traceback() -> None:
    with open("/dev/full", "wb") as full:
        words = [*VMGAHP, "config", "--json"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, check=False, timeout=60)
    said = b"vmgahp: standard output cannot be written: No space left on device.\n"
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.parametrize(("closed", "status"), [([1], 1), ([2], 0), ([0, 1, 2], 1)])
def test_descriptors_that_are_closed(closed: list[int], status: int) -> None:
    shell = " ".join(f"{number}>&-" for number in closed)
    command = ["sh", "-c", f'exec "$@" {shell}', "sh", *VMGAHP, "version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (status, "")


def test_a_command_loads_no_other() -> None:
    code = "import sys; from vmgahp.cli import main; main(['vmgahp', 'version']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    found = done.stdout.splitlines()[-1].split()
    ours = {"arguments", "by_hand", "tool"}
    assert {name for name in found if name.startswith("vmgahp.commands.")} == {f"vmgahp.commands.{one}" for one in ours}
