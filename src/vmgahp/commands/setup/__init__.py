"""``vmgahp setup``: writes the configuration of this machine, and says what to restart.

It asks on a terminal, or takes options; it shows the file, the changes, and the doctor's findings before it writes.
`file` reads and writes the file, `answers` finds its values.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Mapping
from shutil import which

from vmgahp import errors
from vmgahp.commands.arguments import UsageError, for_root, tell
from vmgahp.commands.doctor import examine
from vmgahp.commands.doctor.context import ask as run_program
from vmgahp.commands.setup import answers, file
from vmgahp.config import sources
from vmgahp.findings import BAD, OFF, Finding
from vmgahp.text import escape

DONE, NOT_DONE = 0, 1
"""The exit statuses."""

RESTART_DEADLINE = 60.0
"""The deadline in seconds for condor_restart, which only passes a command on."""

RESTART = """\
The startd asks the server what it can do when it starts; condor_reconfig does not make it ask again.
As root, or as the user whose HTCondor it is:
    condor_restart -startd
It ends the jobs that run here; condor_restart -peaceful -startd waits for their ends. Then: vmgahp doctor
"""
# Only the startd's main_init calls VMUniverseMgr::init (HTCondor's src/condor_startd.V6/vmuniverse_mgr.cpp).

LATER = ("startd", "log", "VM_GAHP_LOG")
"""The doctor's checks that the new configuration changes only after the restart, or not at all."""

OF_SETTINGS = ("settings", "VM_TYPE", "VM_GAHP_SERVER", "VM_NETWORKING", "memory", "slots", "network")
"""The checks whose findings are shown even if they do not keep jobs from running."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vmgahp setup``."""
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
    text = "whether guests run where KVM does not work, many times slower"
    add("--emulation", action=argparse.BooleanOptionalAction, default=None, help=text)
    add("--server", default="", metavar="FILE", help="VM_GAHP_SERVER (default: that of this vmgahp)")
    text = "any other setting; NAME= takes it out; repeatable"
    add("--set", action="append", default=[], metavar="NAME=VALUE", help=text)
    add("-o", "--output", default="", metavar="FILE", help="write this file, in place of the one that HTCondor reads")
    add("--remove", action="store_true", help="take away the file that this command has written")
    add("--dry-run", action="store_true", help="show what would be written, and write nothing")
    add("--yes", action="store_true", help="do not ask")
    text = "condor_restart -startd when it is written, which ends jobs that run here"
    add("--restart", action="store_true", help=text)
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
    """Ask, show and write; return the exit status."""
    if not (options.yes or options.dry_run or sys.stdin.isatty()):
        raise UsageError("standard input is no terminal, so nothing can be asked; add --yes, or --dry-run to look.")
    try:
        return _set_up(options, dict(os.environ))
    except errors.Fault as fault:
        return _failed(fault.sentence)
    except file.NotWritten as refused:
        return _failed(str(refused))
    except EOFError:
        _say("")
        return _failed("No answer. Nothing was written.")


def _set_up(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    path = _path(options, environ)
    before, refused = _existing(path)
    values = {} if options.remove else _values(options, environ, None if refused else before, path, refused is None)
    again = _again(values, options)
    text = file.text_of(values, shlex.join(["vmgahp", "setup", *again])) if values else ""
    changes = file.difference(before or "", text, path)
    _say("\n".join(["", *(escape(line) for line in changes or [f"{path} is as it would be written."]), ""]))
    if refused is not None:
        raise refused
    if changes and values:
        _let_the_doctor_look(environ, values)
    if options.dry_run:
        _say("Nothing was written: this was --dry-run.")
        return DONE
    if changes and not _write(path, before, text, options, again):
        _say("Nothing was written.")
        return NOT_DONE
    status = DONE if options.remove or options.output else _counts(environ, values)
    return (_restart(options, environ) if changes else DONE) or status


def _path(options: argparse.Namespace, environ: Mapping[str, str]) -> str:
    path = os.path.abspath(options.output) if options.output else file.place(environ, sources.find_tool(environ))
    if not os.path.isdir(os.path.dirname(path)):
        raise file.NotWritten(f"There is no directory {os.path.dirname(path)}. Hint: make it, or name another file.")
    if options.remove and not os.path.lexists(path):
        raise file.NotWritten(f"{path} is not there. Nothing was removed.")
    return path


def _existing(path: str) -> tuple[str | None, file.NotOurs | None]:
    """Read the file; return its text, None if it is missing, and the reason why it must not be changed."""
    try:
        return file.read(path), None
    except file.NotOurs as refused:
        return refused.text, refused


def _values(
    options: argparse.Namespace, environ: Mapping[str, str], before: str | None, path: str, may_ask: bool
) -> dict[str, str]:
    """Find the settings by name, and ask for those that no option sets."""
    asking = may_ask and not (options.yes or options.dry_run)
    known = file.values_in(before, path) if before else {}
    found = answers.values(options, known, lambda given: _look(environ, given), asking=asking)
    file.require_valid(found)
    return found


def _again(values: Mapping[str, str], options: argparse.Namespace) -> list[str]:
    """List the options that make, or remove, the same file."""
    server = ["--server", options.server] if options.server else []
    return [*answers.words(values), *server] if values else ["--remove"]


def _let_the_doctor_look(environ: Mapping[str, str], values: Mapping[str, str]) -> None:
    """Show the doctor's bad or improvable findings with these values."""
    wrong = [
        one
        for one in examine(_with(environ, values), values["VM_TYPE"]).findings
        if one.check not in LATER
        and (one.verdict == BAD or (one.verdict == OFF and one.check.partition(" ")[0] in OF_SETTINGS))
    ]
    if wrong:
        from vmgahp.commands.page import Page  # late: completions and man pages are made without rich

        page = Page()
        page.say(page.findings([("What vmgahp doctor says of it", wrong)]) + "\n")
    else:
        _say("vmgahp doctor finds nothing wrong with it.\n")
    if any(one.check == "kvm" for one in wrong):
        _say("To run guests by emulation: vmgahp setup --emulation\n")


def _write(path: str, before: str | None, text: str, options: argparse.Namespace, again: list[str]) -> bool:
    """Write or remove the file, if that is wanted and it was not changed meanwhile; return False if not.

    A user who may not write it is told the command for root.
    """
    if os.geteuid() != 0 and not os.access(os.path.dirname(path), os.W_OK):
        more = [*(["--output", path] if options.output else []), *(["--restart"] if options.restart else [])]
        raise file.NotWritten(f"You may not write {path}. As root, run: {for_root('setup', *again, *more, '--yes')}")
    if not options.yes and not answers.yes(f"{'Write' if text else 'Remove'} {path}?"):
        return False
    if file.read(path) != before:
        raise file.NotWritten(f"{path} was written anew meanwhile. Nothing was done to it.")
    try:
        file.write(path, text) if text else os.unlink(path)
    except OSError as error:
        raise file.NotWritten(f"{path} cannot be written: {error.strerror or error}.") from error
    _say(f"{path} is {'written' if text else 'removed'}.")
    return True


def _with(environ: Mapping[str, str], values: Mapping[str, str]) -> dict[str, str]:
    """Make an environment in which HTCondor's tools and the server use the values as configuration."""
    plain = {name: value for name, value in values.items() if value != file.MACROS.get(name)}
    return {**environ, **{f"_CONDOR_{name}": value for name, value in plain.items()}}


def _look(environ: Mapping[str, str], values: Mapping[str, str]) -> list[Finding]:
    """Ask the doctor about this machine, as if networks were allowed too."""
    tried = {**values, "VM_NETWORKING": "True", "VM_NETWORKING_TYPE": "nat"}
    return examine(_with(environ, tried), values["VM_TYPE"]).findings


def _counts(environ: Mapping[str, str], values: Mapping[str, str]) -> int:
    """Report the values that HTCondor takes from another file, or from its environment; return the exit status."""
    found, _, _ = sources.read(tuple(values), environ)
    where = sources.entries(environ).where()
    status = DONE
    for name, value in values.items():
        counting = found.get(name, "").strip()
        is_same = counting == value or (value in ("True", "False") and counting.lower() == value.lower())
        if value != file.USUAL.get(name) and not is_same:  # what nobody has asked for may well be said elsewhere
            status = _failed(
                f"{name} = {counting or '(not set)'} counts all the same, of {where.get(name, 'somewhere else')}: "
                "it is read later. Take it out there."
            )
    return status


def _restart(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Restart the startd if that is wanted, or say how; return the exit status."""
    wanted = options.restart
    if not wanted and not options.yes and sys.stdin.isatty() and os.geteuid() == 0 and not options.output:
        wanted = answers.yes("Restart the startd now (condor_restart -startd)? It ends the jobs that run here.")
    if not wanted:
        _say(RESTART.rstrip())
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


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _failed(sentence: str) -> int:
    sys.stdout.flush()
    sys.stderr.write(f"vmgahp setup: {escape(sentence)}\n")
    return NOT_DONE
