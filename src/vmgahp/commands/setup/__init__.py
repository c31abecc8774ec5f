"""``vmgahp setup``: writes the configuration of this machine, and says what to restart.

It asks on a terminal, or takes options; it shows the file, what changes, and what the doctor makes of it before
anything is written. `file` is about the file, `answers` about what it is to say.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Mapping
from shutil import get_terminal_size, which
from textwrap import wrap

from vmgahp import errors
from vmgahp.commands import page
from vmgahp.commands.arguments import UsageError, for_root, tell
from vmgahp.commands.doctor import examine
from vmgahp.commands.doctor.context import ask as run_program
from vmgahp.commands.setup import answers, file
from vmgahp.config import sources
from vmgahp.findings import BAD, OFF, Finding
from vmgahp.text import escape

DONE, NOT_DONE = 0, 1
"""The exit status."""

RESTART_DEADLINE = 60.0
"""Seconds for condor_restart, which hands on an order."""

RESTART = (
    "The startd asks the server what it can do when it starts; condor_reconfig does not make it ask again.\n"
    "As root, or whose HTCondor it is:\n"
    "    condor_restart -startd\n"
    "It ends the jobs that run here; condor_restart -peaceful -startd waits for their ends. Then: vmgahp doctor"
)
# VMUniverseMgr::init in HTCondor's src/condor_startd.V6/vmuniverse_mgr.cpp is called by the startd's main_init alone.

LATER = ("startd", "log", "VM_GAHP_LOG")
"""The doctor's checks of what comes with the restart, was there before, or is told by a name of HTCondor's."""

OF_SETTINGS = ("settings", "VM_TYPE", "VM_GAHP_SERVER", "VM_NETWORKING", "memory", "slots", "network")
"""Those of which what is merely worth fixing is told too; the rest of it is the doctor's."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of ``vmgahp setup``."""
    command.description = (
        f"Write HTCondor's configuration for VMs on this machine, {file.NAME} in its LOCAL_CONFIG_DIR. What no option "
        "says is asked for on a terminal, and else as it was written before, or as this machine suggests. The file, "
        "what changes, and what vmgahp doctor makes of it are shown before it is written. A file that somebody else "
        "has written or changed stays as it is, and nothing is restarted unasked."
    )
    add = command.add_argument
    add("--type", default="", metavar="VM_TYPE", help="the VM type, or several with commas for VM_TYPE any")
    add("--memory", default="", metavar="MIB", help="for all VMs together, in MiB or as 16G")
    add("--network", default="", metavar="KINDS", help="none, or of nat, bridge and user one or several with commas")
    add("--bridge", default="", metavar="NAME", help="the bridge of this machine, for the network bridge")
    add(
        "--emulation",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="whether guests run where KVM does not work, many times slower",
    )
    add("--server", default="", metavar="FILE", help="VM_GAHP_SERVER (default: that of this vmgahp)")
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other setting; NAME= takes it out; repeatable",
    )
    add("-o", "--output", default="", metavar="FILE", help="write this file, in place of the one that HTCondor reads")
    add("--remove", action="store_true", help="take away the file that this command has written")
    add("--dry-run", action="store_true", help="show what would be written, and write nothing")
    add("--yes", action="store_true", help="do not ask")
    add(
        "--restart",
        action="store_true",
        help="condor_restart -startd when it is written, which ends jobs that run here",
    )
    command.set_defaults(run=run)
    tell(
        command,
        examples=[
            ("vmgahp setup", "asks, shows what it would write, and asks once more"),
            ("vmgahp setup --type kvm --memory 16G --network nat --yes", "writes it"),
            ("vmgahp setup --dry-run", "shows what it would write, without asking"),
            ("vmgahp setup --set VM_SOFT_SUSPEND=True --yes", "one setting more; the others stay as they are there"),
            ("vmgahp setup --remove", "takes the file away"),
        ],
        statuses={NOT_DONE: "Nothing was written, or it was and another file's values count."},
    )


def run(options: argparse.Namespace) -> int:
    """Ask, show, write; the exit status."""
    environ = dict(os.environ)
    if not (options.yes or options.dry_run or sys.stdin.isatty()):
        raise UsageError("standard input is no terminal, so nothing can be asked; add --yes, or --dry-run to look.")
    try:
        path = os.path.abspath(options.output) if options.output else file.place(environ, sources.find_tool(environ))
        if not os.path.isdir(os.path.dirname(path)):
            raise file.NoPlace(f"There is no directory {os.path.dirname(path)}. Hint: make it, or name another file.")
        before: str | None
        refused = None
        try:
            before = file.read(path)
        except file.NotOurs as why:
            before, refused = why.text, why
            options.yes = True  # there is nothing to ask
        if options.remove:
            text = ""
        else:
            values = answers.values(
                options,
                file.values_in(before, path) if before and not refused else {},
                lambda given: _look(environ, given),
            )
            file.require_valid(values)
            text = file.text_of(values, shlex.join(["vmgahp", "setup", *_again(values, options)]))
    except errors.Fault as fault:
        return _failed(f"{fault.problem} Hint: {fault.hint}")
    except file.NoPlace as why:
        return _failed(str(why))
    except EOFError:
        return _failed("No answer. Nothing was written.")
    if options.remove and before is None:
        return _failed(f"{path} is not there. Nothing was removed.")
    changes = file.difference(before or "", text, path)
    _say("\n".join(["", *(escape(line) for line in changes or [f"{path} is as it would be written."]), ""]))
    if refused is not None:
        return _failed(str(refused))
    if changes and not options.remove:
        _let_the_doctor_look(environ, values)
    if options.dry_run:
        _say("Nothing was written: this was --dry-run.")
        return DONE
    if not changes:
        return DONE if options.remove or options.output else _counts(environ, values)
    if os.geteuid() != 0 and not os.access(os.path.dirname(path), os.W_OK):
        words = ["--remove"] if options.remove else _again(values, options)
        words += [*(["--output", path] if options.output else []), *(["--restart"] if options.restart else [])]
        return _failed(f"You may not write {path}. As root, run: {for_root('setup', *words, '--yes')}")
    if not options.yes and not answers.yes(f"{'Remove' if options.remove else 'Write'} {path}?"):
        _say("Nothing was written.")
        return NOT_DONE
    try:
        if file.read(path) != before:
            return _failed(f"{path} was written anew meanwhile. Nothing was done to it.")
        os.unlink(path) if options.remove else file.write(path, text)
    except file.NotOurs as why:
        return _failed(str(why))
    except OSError as error:
        return _failed(f"{path} cannot be written: {error.strerror or error}.")
    _say(f"{path} is {'removed' if options.remove else 'written'}.")
    status = DONE if options.remove or options.output else _counts(environ, values)
    return _restart(options, environ) or status


def _again(values: Mapping[str, str], options: argparse.Namespace) -> list[str]:
    """The options that make the same file."""
    return [*answers.words(values), *(["--server", options.server] if options.server else [])]


# This machine


def _with(environ: Mapping[str, str], values: Mapping[str, str]) -> dict[str, str]:
    """An environment in which HTCondor's tools, and the server, take these values for the configuration's."""
    log = {name: value for name, value in values.items() if value != file.MACROS.get(name)}
    return {**environ, **{f"_CONDOR_{name}": value for name, value in log.items()}}


def _look(environ: Mapping[str, str], values: Mapping[str, str]) -> list[Finding]:
    """What the doctor sees here, were there networks too."""
    tried = {**values, "VM_NETWORKING": "True", "VM_NETWORKING_TYPE": "nat"}
    return examine(_with(environ, tried), values["VM_TYPE"]).findings


def _let_the_doctor_look(environ: Mapping[str, str], values: Mapping[str, str]) -> None:
    """Show what the doctor would find wrong, or worth fixing, with this configuration."""
    done = examine(_with(environ, values), values["VM_TYPE"])
    wrong = [
        one
        for one in done.findings
        if one.check not in LATER
        and (one.verdict == BAD or (one.verdict == OFF and one.check.partition(" ")[0] in OF_SETTINGS))
    ]
    if wrong:
        sys.stdout.write(page.render(page.page_of_stdout(environ), [("What vmgahp doctor says of it", wrong)]) + "\n")
        if any(one.check == "kvm" for one in wrong):
            _say("To run guests by emulation: vmgahp setup --emulation\n")
    else:
        _say("vmgahp doctor finds nothing wrong with it.\n")


def _counts(environ: Mapping[str, str], values: Mapping[str, str]) -> int:
    """Say which of the values HTCondor takes from another file, or from its environment."""
    try:
        found, _, _ = sources.read(tuple(values), environ)
        where = sources.entries(environ).where()
    except errors.Fault as fault:
        return _failed(f"{fault.problem} Hint: {fault.hint}")
    status = DONE
    for name, value in values.items():
        counting = found.get(name, "").strip()
        is_same = counting == value or (value in ("True", "False") and counting.lower() == value.lower())
        if value != file.MACROS.get(name) and not is_same:
            status = _failed(
                f"{name} = {found.get(name, '(not set)')} counts all the same, of {where.get(name, 'somewhere else')}: "
                f"it is read later. Take it out there."
            )
    return status


def _restart(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    wanted = options.restart
    if not wanted and not options.yes and sys.stdin.isatty() and os.geteuid() == 0 and not options.output:
        wanted = answers.yes("Restart the startd now (condor_restart -startd)? It ends the jobs that run here.")
    if not wanted:
        _say(RESTART)
        return DONE
    beside = os.path.dirname(sources.find_tool(environ))
    places = [beside, os.path.join(os.path.dirname(beside), "sbin"), environ.get("PATH", ""), "/usr/sbin"]
    tool = which("condor_restart", path=":".join(places)) or "condor_restart"
    said = run_program([tool, "-startd"], RESTART_DEADLINE, environ)
    if said.status != 0:
        why = said.complaint or "it said nothing"
        return _failed(f"condor_restart -startd failed: {why}. Does HTCondor run here (systemctl start condor)?")
    _say("The startd restarts. See: vmgahp doctor, and condor_status -vm")
    return DONE


# Words


def _say(text: str) -> None:
    """Lines as wide as the terminal, those of a file and of commands as they are."""
    width = max(40, get_terminal_size().columns)
    for line in text.split("\n"):
        whole = not sys.stdout.isatty() or line.startswith((" ", "-", "+", "@", "#"))
        parts = [line] if whole else wrap(line, width, break_on_hyphens=False, break_long_words=False) or [""]
        sys.stdout.write("".join(f"{part}\n" for part in parts))


def _failed(sentence: str) -> int:
    sys.stdout.flush()
    sys.stderr.write(f"vmgahp setup: {escape(sentence)}\n")
    return NOT_DONE
