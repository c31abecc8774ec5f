"""``vmgahp setup``: writes the configuration of this machine, and says what to restart.

The first line of the file has the checksum of the rest. A file without it, or with another, was edited by a person
and is not changed. The changes and the doctor's findings are shown before anything is written.
"""

import argparse
import hashlib
import os
import re
import shlex
import stat
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from difflib import unified_diff
from functools import partial
from shutil import which

from vmgahp import config, errors
from vmgahp.commands.arguments import NotDone, UsageError, assignment, did_you_mean, for_root, memory, tell, vm_type
from vmgahp.commands.doctor import condor, examine
from vmgahp.commands.doctor.context import User, down_to, first_closed
from vmgahp.commands.doctor.context import ask as run_program
from vmgahp.commands.files import RESTART, complaint, open_regular, write_anew
from vmgahp.config import check, sources
from vmgahp.config.check import ELSEWHERE, ELSEWHERE_BY_NAME
from vmgahp.config.table import setting_of
from vmgahp.drivers import base
from vmgahp.findings import BAD, OFF, OK
from vmgahp.host import proc
from vmgahp.job.ad import UNIVERSE
from vmgahp.job.engine import NOBODY
from vmgahp.text import escape
from vmgahp.vm_types import ANY, QEMU

FILE_NAME = "60-vmgahp.config"
_MARK = "# Written by vmgahp setup, which writes it anew where nobody else has changed it. SHA-256: "

MACROS = {"VM_GAHP_LOG": "$(LOG)/VMGahpLog"}
"""The values that HTCondor's language expands; any other value is taken literally."""

USUAL = {**MACROS, "VM_RECHECK_INTERVAL": "60"}
"""The default values that are written. HTCondor's 600 seconds would keep a machine whose libvirt was slow once, as
after a boot, without VMs for ten minutes."""

KNOWN = {setting.name for setting in (*config.SETTINGS, *ELSEWHERE)}

NONE = "none"
ANY_TYPES, TYPE, MEMORY, SERVER = "VM_ANY_TYPES", "VM_TYPE", "VM_MEMORY", "VM_GAHP_SERVER"
NETWORKING, KINDS, BRIDGE = "VM_NETWORKING", "VM_NETWORKING_TYPE", "VM_NETWORKING_BRIDGE_INTERFACE"
EMULATION = "VM_ALLOW_EMULATION"
KEYWORD, HOOK = "STARTER_DEFAULT_JOB_HOOK_KEYWORD", "VMGAHP_HOOK_PREPARE_JOB"

BY_OPTIONS = (ANY_TYPES, TYPE, MEMORY, NETWORKING, KINDS, EMULATION)
"""The settings with options of their own."""

LEAST_MEMORY = 256
"""The least MiB that are suggested, and the step between suggestions."""

DONE, NOT_DONE = 0, 1
"""The exit statuses."""

LATER = ("startd", "log", "VM_GAHP_LOG")
"""The doctor's checks that the new configuration changes only after the restart, or not at all."""

OF_SETTINGS = ("settings", "VM_TYPE", "VM_GAHP_SERVER", "VM_NETWORKING", "memory", "slots", "network")
"""The checks whose findings are shown even if they do not keep jobs from running."""

Values = Mapping[str, str]


def _marked(body: str) -> str:
    return f"{_MARK}{hashlib.sha256(body.encode()).hexdigest()}\n{body}"


KEY = "VMGAHP"
HOOK_NAME = "vmgahp-prepare-job"
SHELL = "#!/bin/sh\n"
HOOK_TEXT = SHELL + _marked(f"""\
# It holds a VM job that its START would hold, with the reason in a sentence.
# Whatever else fails here, also where vmgahp was removed, no job is held for it.
ad=$(cat)
case $ad in
*"JobUniverse = {UNIVERSE}"*)
    printf '%s\\n' "$ad" | timeout 60 {shlex.quote(sys.executable)} -I -m vmgahp.daemon.prepare_job
    ;;
esac
exit 0
""")
# HTCondor runs no job at all where a hook is missing (StarterHookMgr::reconfig in its src/condor_starter.V6.1), so
# this is a file of its own, which outlives the package.


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Write HTCondor's configuration for VMs on this machine, 60-vmgahp.config in its LOCAL_CONFIG_DIR. What no option
    says is asked for on a terminal, and else as it was written before, or as this machine suggests. The file, what
    changes, and what vmgahp doctor makes of it are shown before it is written. A file that somebody else has written or
    changed stays as it is, and nothing is restarted unasked."""
    add = command.add_argument
    add("--type", default="", metavar="VM_TYPE", help="the VM type, or several with commas for VM_TYPE any")
    add("--memory", default="", metavar="MIB", help="for all VMs together, in MiB or as 16G")
    add("--network", default="", metavar="KINDS", help="none, or of nat, bridge and user one or several with commas")
    text = "whether guests run where KVM does not work, many times slower"
    add("--emulation", action=argparse.BooleanOptionalAction, default=None, help=text)
    text = "any other setting; NAME= takes it out; repeatable"
    add("--set", action="append", type=assignment, default=[], metavar="NAME=VALUE", help=text)
    add("-o", "--output", default="", metavar="FILE", help="write this file, in place of the one that HTCondor reads")
    add("--remove", action="store_true", help="take away the file that this command has written")
    add("--dry-run", action="store_true", help="show what would be written, and write nothing")
    add("--yes", action="store_true", help="do not ask")
    text = "condor_restart -peaceful -startd when it is written, which waits for jobs that run here"
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
    environ = dict(os.environ)
    path = os.path.abspath(options.output) if options.output else _place(environ)
    if not os.path.isdir(os.path.dirname(path)):
        raise NotDone(f"There is no directory {os.path.dirname(path)}. Hint: make it, or name another file.")
    if options.remove and not os.path.lexists(path):
        raise NotDone(f"{path} is not there. Nothing was removed.")
    before = _read(path)
    values: dict[str, str] = {}
    if not options.remove:
        known = {name: value for _, name, value in sources.logical_lines(before or "", path)}
        ours = "" if options.output else path
        values = _values(options, environ, known, ours, asking=not (options.yes or options.dry_run))
        _require_valid(values)
    again = _words(values) if values else ["--remove"]
    text = file_text(values, shlex.join(["vmgahp", "setup", *again])) if values else ""
    changes = _difference(before or "", text, path)
    # An edited hook stops even the removal.
    is_old = any(_names_hook(one, path) for one in (before or "", text)) and _read(hook_path(path)) != HOOK_TEXT
    if is_old and _names_hook(text, path):
        changes.append(f"+++ {hook_path(path)}, which is not there, or of another version")
    _say("\n".join(["", *(escape(line) for line in changes or [f"{path} is as it would be written."]), ""]))
    if changes and values:
        _let_the_doctor_look(environ, values)
    if options.dry_run:
        _say("Nothing was written: this was --dry-run.")
        return DONE
    if changes and not _write(path, before, text, options, again):
        _say("Nothing was written.")
        return NOT_DONE
    status = DONE if options.remove or options.output else _counts(environ, values)
    return (_restart(environ, wanted=options.restart) if changes else DONE) or status


# The file


def _place(environ: Values) -> str:
    """Find the path in the last directory of LOCAL_CONFIG_DIR, or that of the existing file. Raises `NotDone`."""
    where, elsewhere = "HTCondor's LOCAL_CONFIG_DIR", "or name a file by --output FILE."
    if not sources.find_tool(environ):
        raise NotDone(
            "There is no HTCondor here whose configuration this could be: no condor_config_val is found. "
            f"Hint: install HTCondor, put the directory of condor_config_val on PATH, {elsewhere}"
        )
    named = sources.directories(environ)
    if not named:
        hint = "set LOCAL_CONFIG_DIR = /etc/condor/config.d in its configuration and make that"
        raise NotDone(f"{where} is not set: it reads no directory of files. Hint: {hint}, {elsewhere}")
    paths = [os.path.join(directory, FILE_NAME) for directory in reversed(named) if os.path.isdir(directory)]
    if not paths:
        missing = f"None of the directories of {where} is there: {', '.join(named)}."
        raise NotDone(f"{missing} Hint: mkdir -p {named[-1]}, {elsewhere}")
    return next((path for path in paths if os.path.lexists(path)), paths[0])


def file_text(values: Values, command: str) -> str:
    """Make the text of the file; `command` is the command line that makes it again."""
    lines = ["# The VM universe by vmgahp. Other settings: vmgahp config. Made by:", f"#   {command}"]
    body = "".join(f"{line}\n" for line in (*lines, *(f"{name} = {value}" for name, value in values.items())))
    return _marked(body)


def _read(path: str) -> str | None:
    """Read the file; None if it is missing. Raises `NotDone` unless it is as this command has written it."""
    try:
        with open_regular(path, follow=False) as file:
            text = file.read(1 << 16).decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NotDone(f"{path} cannot be read: {error.strerror or error}. Nothing is done to it.") from error
    mark = re.match(rf"(?:{SHELL})?{re.escape(_MARK)}([0-9a-f]{{64}})\n", text)
    if mark is None:
        raise NotDone(f"{path} was not written by vmgahp setup, and stays as it is. Move it away, or keep it.")
    if hashlib.sha256(text[mark.end() :].encode("utf-8", "surrogateescape")).hexdigest() != mark[1]:
        raise NotDone(
            f"{path} was changed since vmgahp setup wrote it, and stays as it is. Put the changes into a file of your "
            f"own (settings into one that HTCondor reads later, such as 61-local.config beside it), then rm {path}."
        )
    return text


def _difference(old: str, new: str, path: str) -> list[str]:
    """List the lines that would change, as diff -u shows them, without the line of the checksum."""
    before, after = ([line for line in text.splitlines() if not line.startswith(_MARK)] for text in (old, new))
    return list(unified_diff(before, after, path if old else os.devnull, path if new else os.devnull, lineterm="", n=1))


def _write(path: str, before: str | None, text: str, options: argparse.Namespace, again: list[str]) -> bool:
    """Write or remove the file, if that is wanted; return False if not. Raises `NotDone`, with the command for root."""
    if os.geteuid() != 0 and not os.access(os.path.dirname(path), os.W_OK):
        more = [*(["--output", path] if options.output else []), *(["--restart"] if options.restart else [])]
        raise NotDone(f"You may not write {path}. As root, run: {for_root('setup', *again, *more, '--yes')}")
    if not options.yes and _ask(f"{'Write' if text else 'Remove'} {path}? y or n", "n").lower() not in ("y", "yes"):
        return False
    if _read(path) != before:
        raise NotDone(f"{path} was written anew meanwhile. Nothing was done to it.")
    hook = hook_path(path)
    try:
        # A hook must be there as long as the settings name it.
        if _names_hook(text, path):
            write_anew(hook, HOOK_TEXT.encode(), 0o755)
        # Everyone may read it, like all of HTCondor's configuration, because it has no secrets.
        write_anew(path, text.encode(), 0o644) if text else os.unlink(path)
        if not text and _names_hook(before or "", path):
            with suppress(FileNotFoundError):
                os.unlink(hook)
    except OSError as error:
        raise NotDone(f"{path} cannot be written: {error.strerror or error}.") from error
    _say(f"{path} is {'written' if text else 'removed'}.")
    return True


# The settings


def _values(options: argparse.Namespace, environ: Values, before: Values, path: str, *, asking: bool) -> dict[str, str]:
    """Find the settings by name, in the order of the file; `before` has those of the present file.

    `path` is that file if HTCondor reads it, else empty. After a wrong answer the question is repeated. Raises
    `UsageError` for a wrong option, and `NotDone` at the end of the input.
    """
    extra = {name.upper(): value for name, value in options.set}
    for name, value in extra.items():
        _require_plain(name, value or "-")
        if name in BY_OPTIONS:
            raise UsageError(f"{name} is set by --type, --memory, --network or --emulation.")
    found = {SERVER: condor.our_launcher()}

    def choose(given: str, question: str, suggested: str, read: Callable[[str], dict[str, str]]) -> None:
        while True:
            try:
                found.update(read(given or (_ask(question, suggested) if asking else suggested)))
                return
            except UsageError as error:
                if given or not asking:
                    raise
                _say(escape(str(error)))

    was = before.get(ANY_TYPES, before.get(TYPE, "kvm"))
    choose(options.type, "VM type (kvm, xen, vmware, vsphere, any, ...)", was, _types)
    have = proc.physical_memory_mib()
    was = before.get(MEMORY) or str(max(have * 3 // 4 // LEAST_MEMORY * LEAST_MEMORY, LEAST_MEMORY))
    question = f"MiB for all VMs together, of the {have} MiB of this machine"
    choose(options.memory, question, was, lambda text: _memory(text, have))
    found.update({name: before.get(name, value) for name, value in USUAL.items()})
    # The doctor looks at this machine as if networks were allowed too.
    tried = {**found, NETWORKING: "True", KINDS: "nat"}
    seen = examine(_with(environ, tried), found[TYPE]).findings if asking or not (before or options.network) else []
    nat = any(one.check == "network nat" and one.verdict == OK for one in seen)
    was = before.get(KINDS, NONE) if before or not nat else "nat"
    question = "Networks that jobs may have (nat, bridge, user, none)"
    choose(options.network, question, was, lambda text: _kinds(text, found, extra))
    if asking and "bridge" in found.get(KINDS, "") and BRIDGE not in extra:
        choose("", "The bridge of this machine for them", before.get(BRIDGE, "br0"), partial(_require_plain, BRIDGE))
    if path and found[TYPE] in QEMU:
        found.update({name: before.get(name, value) for name, value in _hook(path, environ).items()})
    emulates = before.get(EMULATION, "") if options.emulation is None else str(options.emulation)
    if emulates:
        found[EMULATION] = emulates.capitalize()
    own = (*found, *BY_OPTIONS)
    kept = {name: value for name, value in before.items() if _is_known(name) and name not in own}
    return {name: value for name, value in {**found, **kept, **extra}.items() if value}


def hook_path(path: str) -> str:
    """Return the place of the hook: beside the directory of the file of settings, which HTCondor reads whole."""
    return os.path.join(os.path.dirname(os.path.dirname(path)), HOOK_NAME)


def _names_hook(text: str, path: str) -> bool:
    return f"\n{HOOK} = {hook_path(path)}\n" in text


def _hook(path: str, environ: Values) -> dict[str, str]:
    """Make the settings of the hook; none where it cannot be, or HTCondor would refuse it, or jobs could not run it.

    Another default for the hooks of this machine stays; jobs have ours by +HookKeyword then.
    """
    directory = os.path.dirname(hook_path(path))
    refused = os.stat(directory).st_mode & stat.S_IWOTH or not os.access(directory, os.W_OK)
    if refused or first_closed(User("nobody", NOBODY, NOBODY, ()), down_to(directory)):
        return {}
    said, _, _ = sources.read(("STARTER_JOB_HOOK_KEYWORD", KEYWORD), environ)
    is_free = not {value.strip() for value in said.values()} - {"", KEY}
    return {HOOK: hook_path(path), **({KEYWORD: KEY} if is_free else {})}


def _words(found: Values) -> list[str]:
    """List the options that set these values; the server is by default that of the vmgahp called."""
    said = ["--type", found.get(ANY_TYPES, found[TYPE]).replace(" ", ""), "--memory", found[MEMORY]]
    said += ["--network", found.get(KINDS, NONE).replace(" ", "")]
    if EMULATION in found:
        said.append("--emulation" if found[EMULATION] == "True" else "--no-emulation")
    usual = {**USUAL, SERVER: condor.our_launcher(), KEYWORD: KEY}
    for name, value in found.items():
        if name not in BY_OPTIONS and value != usual.get(name) and not (name == HOOK and value.endswith(HOOK_NAME)):
            said += ["--set", f"{name}={value}"]
    return said


def _is_known(name: str) -> bool:
    """Return True for a setting of this daemon or for VMs; a directory of VM_SHARE_DIRS makes one of its own."""
    with suppress(KeyError):
        return name in KNOWN or (bool(setting_of(name)) and name.isascii() and name.isidentifier())
    return False


def _require_plain(name: str, value: str) -> dict[str, str]:
    """Return the setting. Raises `UsageError` for an unknown one, or a value that HTCondor would not take literally."""
    if not _is_known(name):
        raise UsageError(f"{name} is not a setting{did_you_mean(name, KNOWN) or '; vmgahp config lists them.'}")
    if value != MACROS.get(name) and (
        not value.strip() or not value.isprintable() or "$" in value or value.rstrip().endswith("\\")
    ):
        raise UsageError(
            f"{name} = {value!a} is not a plain value: one line, without $, which HTCondor would replace, and without "
            "a \\ at the end, which would continue it. Leave the setting out for its default."
        )
    return {name: value}


def _require_valid(values: Values) -> None:
    """Raise `UsageError` for everything that `vmgahp.config.check` finds wrong, even if jobs would run."""
    for name, value in values.items():
        _require_plain(name, value)
    ours = {name: value for name, value in values.items() if name not in ELSEWHERE_BY_NAME}
    settings = config.Settings(ours, "given")
    vm_type = settings.string("VM_TYPE").lower()
    found = check.values(settings, vm_type)
    if not any(finding.verdict == BAD for finding in found):
        found += filter(None, [check.networking(settings, vm_type)])
    listed = [sources.Entry(name, value, "given") for name, value in values.items()]
    found += check.elsewhere(sources.Entries(listed, of_htcondor=True))
    for finding in found:
        raise UsageError(f"{finding.seen[:-1].replace(' (given)', '')}: {finding.hint}")


def _types(text: str) -> dict[str, str]:
    named = list(dict.fromkeys(vm_type(word) for word in text.replace(",", " ").split()))
    try:
        for one in named:
            base.find(one)
    except errors.Fault as fault:
        raise UsageError(f"{fault.problem} {fault.hint}") from fault
    if not named or (ANY in named and len(named) > 1):
        raise UsageError(f"{text!a} names no VM type, or any beside others; name one, several, or any alone.")
    return {TYPE: named[0]} if len(named) == 1 else {TYPE: ANY, ANY_TYPES: ", ".join(named)}


def _memory(text: str, have: int) -> dict[str, str]:
    amount = memory(text)
    if amount > have:
        raise UsageError(f"VM_MEMORY = {amount} MiB is more than this machine has, {have} MiB.")
    return {MEMORY: str(amount)}


def _kinds(text: str, found: Values, extra: Values) -> dict[str, str]:
    text = ", ".join(text.lower().replace(",", " ").split())
    if text == NONE:
        return {NETWORKING: "False"}  # explicit, because a file that is read earlier may have them on
    said = {NETWORKING: "True", KINDS: text}
    _require_valid({TYPE: found[TYPE], BRIDGE: "br0", **said, **extra})
    return said


# This machine


def _with(environ: Values, values: Values) -> dict[str, str]:
    """Make an environment in which HTCondor's tools and the server use the values as configuration."""
    plain = {name: value for name, value in values.items() if value != MACROS.get(name)}
    return {**environ, **{f"_CONDOR_{name}": value for name, value in plain.items()}}


def _let_the_doctor_look(environ: Values, values: Values) -> None:
    """Show the doctor's bad or improvable findings with these values."""
    found = [one for one in examine(_with(environ, values), values[TYPE]).findings if one.check not in LATER]
    ours = [one for one in found if one.verdict == OFF and one.check.partition(" ")[0] in OF_SETTINGS]
    wrong = [one for one in found if one.verdict == BAD or one in ours]
    if not wrong:
        _say("vmgahp doctor finds nothing wrong with it.\n")
        return
    from vmgahp.commands.page import Page  # late: completions and man pages are made without rich

    page = Page()
    page.say(page.findings([("What vmgahp doctor says of it", wrong)]) + "\n")
    if any(one.check == "kvm" for one in wrong):
        _say("To run guests by emulation: vmgahp setup --emulation\n")


def _counts(environ: Values, values: Values) -> int:
    """Report the values that HTCondor takes from another file, or from its environment; return the exit status."""
    found, _, _ = sources.read(tuple(values), environ)
    where = sources.entries(environ).where()
    status = DONE
    for name, value in values.items():
        counting = found.get(name, "").strip()
        is_same = counting == value or (value in ("True", "False") and counting.lower() == value.lower())
        if value != USUAL.get(name) and not is_same:  # what nobody has asked for may well be said elsewhere
            status = _failed(
                f"{name} = {counting or '(not set)'} counts all the same, of {where.get(name, 'somewhere else')}: "
                "it is read later. Take it out there."
            )
    return status


def _restart(environ: Values, *, wanted: bool) -> int:
    """Restart the startd if that is wanted, or say how; return the exit status."""
    if not wanted:
        # Only the startd's main_init calls VMUniverseMgr::init (HTCondor's src/condor_startd.V6/vmuniverse_mgr.cpp).
        _say(
            "The startd asks the server what it can do when it starts; condor_reconfig does not make it ask again.\n"
            f"As root, or as the user whose HTCondor it is:\n    {RESTART}\n"
            "It waits for the jobs that run here; without -peaceful it ends them. Then: vmgahp doctor"
        )
        return DONE
    beside = os.path.dirname(sources.find_tool(environ))
    places = (beside, f"{os.path.dirname(beside)}/sbin", environ.get("PATH", ""), "/usr/sbin")
    tool = which("condor_restart", path=":".join(places)) or "condor_restart"
    said = run_program([tool, "-peaceful", "-startd"], 60.0, environ)  # it only passes a command on
    if said.status != 0:
        why = complaint(said) or "it said nothing"
        return _failed(f"{RESTART} failed: {why}. Does HTCondor run here (systemctl start condor)?")
    _say("The startd restarts once no job runs here. See: vmgahp doctor, and condor_status -vm")
    return DONE


# The person


def _ask(question: str, suggested: str) -> str:
    """Ask for a value; an empty answer takes the suggested one. Raises `NotDone` at the end of the input."""
    try:
        return input(f"{question} [{suggested}]: ").strip() or suggested
    except EOFError:
        _say("")
        raise NotDone("No answer. Nothing was written.") from None


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _failed(sentence: str) -> int:
    sys.stdout.flush()
    sys.stderr.write(f"vmgahp setup: {escape(sentence)}\n")
    return NOT_DONE
