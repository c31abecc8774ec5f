"""Checks of HTCondor: its settings, slots, server and startd, and the failures in VM_GAHP_LOG."""

import os
import re
import stat
import time

from vmgahp import __version__, errors
from vmgahp.commands.doctor.context import AS_ROOT, Check, Context, ask, down_to, first_closed, may_look
from vmgahp.commands.files import log_lines, open_regular
from vmgahp.config import check as settings_check
from vmgahp.config import sources
from vmgahp.daemon.probe import Probe
from vmgahp.findings import OFF, OK, UNKNOWN, Finding, NotKnown
from vmgahp.host.trust import changeable_by_others
from vmgahp.job.ad import JobAd
from vmgahp.text import escape, redact
from vmgahp.vm_types import HTCONDORS

TOOL_DEADLINE = 10.0
"""The deadline in seconds for a tool of HTCondor; condor_status waits longer for a startd that is down."""

SERVER_DEADLINE = 10.0
"""The deadline in seconds for the server to print its version; a tenth of a second is usual."""

PACKAGED = "/usr/libexec/condor/condor_vm-gahp"
"""The server in Debian's package, whose vmgahp is in /usr/bin."""

_ATTRIBUTES = (
    *("Name", "HasVM", "VM_Type", "VM_Memory", "VM_AvailNum", "VM_Networking_Types", "PartitionableSlot"),
    *("VMOfflineReason", "VMOfflineTime"),
)


def installed(context: Context) -> Finding:
    """Check that HTCondor is installed."""
    check = Check(
        "HTCondor", "condor_config_val, beside the daemon that started this, on PATH and in the usual directories"
    )
    if context.tool:
        return check.ok(f"{context.tool} is there")
    if context.own_settings:
        seen = "There is none: the settings are a file's, and jobs are run by hand with vmgahp serve."
        return check.off(seen, "nothing, if that is what you want.")
    return check.bad(
        "There is no condor_config_val, so no HTCondor whose startd could offer VMs.",
        "install HTCondor, or put the directory of condor_config_val on PATH (set CONDOR_CONFIG where its "
        "configuration is not in /etc/condor).",
    )


def settings(context: Context) -> list[Finding]:
    """Check for settings that are unreadable, invalid or contradictory, or have names that look misspelled."""
    check = Check(settings_check.CHECK, settings_check.LOOKED_AT)
    found = [check.bad(fault.problem, fault.hint) for fault in context.faults]
    if not context.unread:
        try:
            entries = sources.entries(context.environ)
            for values in (context.loaded, context.settings):
                values.locate(entries.where())
        except errors.Fault as fault:
            entries = None
            found.append(check.unknown(fault.problem, fault.hint))
        found += settings_check.check(context.loaded, context.vm_type, entries)
    if not found:
        origin = context.settings.where("VM_TYPE")
        found.append(check.ok(f"they can be read (VM_TYPE: {origin})"))
    return found


def vm_type(context: Context) -> Finding:
    """Check VM_TYPE, and that there is a driver for it."""
    from vmgahp.drivers import base

    name = context.settings.string("VM_TYPE")
    check = Check("VM_TYPE", "VM_TYPE, the one type that the startd offers")
    if not name:
        judge = check.off if context.own_settings else check.bad
        return judge(
            "VM_TYPE is not set: HTCondor has no VM universe on this machine.",
            "set VM_TYPE = kvm in HTCondor's configuration; then condor_restart -startd.",
        )
    try:
        base.find(name.lower())
    except errors.Fault as fault:
        return check.bad(fault.problem, fault.hint)
    return check.ok(f"VM_TYPE = {name} ({context.settings.where('VM_TYPE')}), which has a driver")


# The server program


def server(context: Context) -> list[Finding]:
    """Check VM_GAHP_SERVER: that HTCondor can run it, only root can change it, and it is this daemon."""
    path = context.more("VM_GAHP_SERVER")
    check = Check("VM_GAHP_SERVER", "VM_GAHP_SERVER, the program that the startd and each starter run")
    if not path and context.own_settings:
        return []  # the server is only started by hand here
    if not path:
        hint = f"set VM_GAHP_SERVER = {our_launcher()}"
        return [check.bad("VM_GAHP_SERVER is not set.", hint)]
    reason, hint = _why_not_run(context, path)
    if reason:
        return [check.bad(f"VM_GAHP_SERVER = {path}, and {reason}.", hint)]
    try:
        changeable = changeable_by_others(path)
    except OSError as error:
        return [check.unknown(f"VM_GAHP_SERVER = {path} cannot be looked at: {error.strerror}.")]
    if changeable:
        return [
            check.off(
                f"Others than root can change {changeable}, and root runs VM_GAHP_SERVER = {path}. So it was "
                "not run to see what it is.",
                f"chown root {changeable}; chmod go-w {changeable}",
            )
        ]
    return [_identify(context, path, check)]


def is_ours(found: list[Finding]) -> bool:
    """Return True if the findings of `server` say that it is this daemon, and safe to run."""
    return all(finding.verdict == OK for finding in found)


def our_launcher() -> str:
    """Return the path of this installation's server: beside its Python, or that of Debian's package."""
    import sys

    beside = os.path.join(os.path.dirname(sys.executable), "condor_vm-gahp")
    return beside if os.path.exists(beside) or not os.path.exists(PACKAGED) else PACKAGED


def _why_not_run(context: Context, path: str) -> tuple[str, str]:
    if not path.startswith("/"):
        return "that is not a full path", f"set VM_GAHP_SERVER = {our_launcher()}"
    try:
        mode = os.stat(path).st_mode
    except PermissionError:
        raise NotKnown("root", f"VM_GAHP_SERVER = {path} cannot be looked at by this user.") from None
    except OSError as error:
        return f"that cannot be run: {error.strerror}", f"set VM_GAHP_SERVER = {our_launcher()}"
    if not stat.S_ISREG(mode):
        return "that is not a file", f"set VM_GAHP_SERVER = {our_launcher()}"
    if not mode & 0o111:
        return "root may not execute it", f"chmod 755 {path}"
    if context.is_root and not os.access(path, os.X_OK):
        return "root may not execute it", "see whether its file system is mounted with noexec (findmnt -T)."
    if context.vm_type not in HTCONDORS and context.condor:
        closed = first_closed(context.condor, [*down_to(os.path.dirname(path)), path])
        if closed:
            return (
                f"the startd runs it as the user condor for VM_TYPE = {context.vm_type}, who may not pass {closed}",
                f"chmod o+x {closed}",
            )
    return "", ""


def _identify(context: Context, path: str, check: Check) -> Finding:
    """Ask the program for its version, as the user who will run it."""
    who = None if context.vm_type in HTCONDORS else context.condor
    said = ask([path, "-version"], SERVER_DEADLINE, context.environ, who)
    first = " ".join(said.out.split())[:120]
    if said.status is None:
        seen = f"VM_GAHP_SERVER = {path} did not say its version within {SERVER_DEADLINE:g} s."
        return check.bad(seen, f"run {path} -version by hand.")
    if first.startswith("vmgahp "):
        if f"vmgahp {__version__} " not in f"{first} ":
            seen = f"VM_GAHP_SERVER = {path} is {first}, and this doctor is of version {__version__}."
            return check.off(seen, f"run the doctor beside it, {_beside(path)}")
        return check.ok(f"{path} is this daemon ({first})")
    if "CondorVersion" in first:
        return check.off(
            f"VM_GAHP_SERVER = {path} is HTCondor's own server; what is said here is about vmgahp.",
            f"set VM_GAHP_SERVER = {our_launcher()}; then condor_restart -startd.",
        )
    why = said.complaint or f"it ended with status {said.status} and said nothing"
    return check.bad(
        f"VM_GAHP_SERVER = {path} does not start: {why}.",
        f"run {path} -version and fix what it complains about, or set VM_GAHP_SERVER = {our_launcher()}",
    )


def _beside(path: str) -> str:
    if path == PACKAGED:
        return "/usr/bin/vmgahp doctor"
    return os.path.join(os.path.dirname(os.path.realpath(path)), "vmgahp doctor")


# Other settings


def networking(context: Context) -> Finding:
    """Check VM_NETWORKING and the related settings; the probe checks that the networks exist."""
    check = Check("VM_NETWORKING", "VM_NETWORKING, VM_NETWORKING_TYPE, VM_NETWORKING_DEFAULT_TYPE")
    ours = context.settings
    if not ours.boolean(check.name):
        seen = "VM_NETWORKING is off: jobs that ask for a network do not match this machine"
        return check.ok(seen)
    wrong = settings_check.networking(ours, context.vm_type)
    offered = ", ".join(ours.networking_types())
    return wrong or check.ok(f"jobs may have: {offered}")


def log_file(context: Context) -> Finding:
    """Check that there is a log and that it can be written, without writing to it."""
    path = context.settings.string("VM_GAHP_LOG")
    check = Check("VM_GAHP_LOG", "VM_GAHP_LOG")
    if not path.startswith("/") or path == os.devnull:
        return check.off(
            f"VM_GAHP_LOG is {path or 'not set'}: failures are in the starter's log at most.",
            "set VM_GAHP_LOG = $(LOG)/VMGahpLog",
        )
    directory = os.path.dirname(path)
    if not context.is_root and not may_look(directory):
        return check.unknown("Whether root can write it is not known.", AS_ROOT)
    if os.path.islink(path) or (os.path.exists(path) and not os.path.isfile(path)):
        seen, hint = f"{path} is not a regular file, and nothing is logged.", f"remove {path}."
    elif not os.path.isdir(directory):
        seen, hint = f"{directory} is not a directory, and nothing is logged.", f"mkdir {directory}"
    elif context.blind or not context.is_root:
        writable = os.access(path if os.path.exists(path) else directory, os.W_OK)
        verdict = OK if writable and not context.blind else UNKNOWN
        seen = f"{path} is where it is written" if verdict == OK else "Whether root can write it is not known."
        return Finding(check.name, verdict, f"{check.name} = {path}", seen, "" if verdict == OK else AS_ROOT)
    elif not os.access(path if os.path.exists(path) else directory, os.W_OK):
        seen, hint = f"root cannot write {path}.", "see whether its file system is mounted read-only."
    else:
        return check.ok(f"{path} can be written")
    return check.off(seen, hint)


# The startd


def startd(context: Context, cause: str = "", sure: bool = True) -> Finding:
    """Check the attributes about VMs in the startd's ad.

    `cause` is the first check that found something wrong, `sure` is True if all decisive checks were made.
    """
    check = Check("startd", "the startd's own ad (condor_status -pool, with its STARTD_ADDRESS_FILE)")
    if not context.tool:
        return check.unknown("There is no HTCondor here.")
    tool = context.program("condor_status")
    if not tool:
        return check.unknown(f"There is no condor_status beside {context.tool}.")
    start = "start HTCondor (systemctl start condor), see that DAEMON_LIST has STARTD, and look into StartLog."
    path = context.more("STARTD_ADDRESS_FILE")
    try:
        with open_regular(path) as file:
            address = file.readline(8192).decode("ascii", "replace").strip()
    except FileNotFoundError:
        seen = f"No startd runs on this machine: {path or 'STARTD_ADDRESS_FILE'} is not there."
        return check.bad(seen, start)
    except OSError as error:
        seen = f"{path} cannot be read: {error.strerror}."
        return check.unknown(seen, AS_ROOT)
    if not address.startswith("<"):
        return check.bad(f"{path} has no address in it.", start)
    command = [tool, "-pool", address, "-long", "-attributes", ",".join(_ATTRIBUTES)]
    said = ask(command, TOOL_DEADLINE, context.environ)
    ads = _ads(said.out)
    if not ads:
        first = next((line.strip() for line in said.err.splitlines() if line.strip()), "it has no slots")
        why = "not in time" if said.status is None else _clean(first)
        seen = f"The startd, which should be at {_clean(address)}, does not answer: {why}."
        return check.bad(seen, start)
    ad = next((ad for ad in ads if ad.boolean("PartitionableSlot")), ads[0])
    return _judge_ad(context, ad, check, cause, sure)


def _judge_ad(context: Context, ad: JobAd, check: Check, cause: str, sure: bool) -> Finding:
    interval = context.more("VM_RECHECK_INTERVAL") or "600"
    reason = ad.string("VMOfflineReason")
    if reason is not None and not ad.boolean("HasVM"):
        # The startd forgets the failure only when it is restarted (ResMgr::updateExtrasClassAd in HTCondor's
        # src/condor_startd.V6/ResMgr.cpp): a later successful probe does not help.
        return check.bad(
            f"A starter took this machine out of the VM universe{_ago(ad.integer('VMOfflineTime'))}: "
            f"VMOfflineReason is {_clean(reason)}.",
            "fix the cause (the last failures in the log, below, name it); then condor_restart -startd.",
        )
    if not ad.boolean("HasVM"):
        if not cause and not sure:
            seen = "HasVM is not true: the startd's own probe failed, or looked before this machine was as it is."
            return check.bad(seen, AS_ROOT)
        if not cause:
            seen = "HasVM is not true, although nothing was found wrong here: the startd looked earlier."
            hint = f"condor_restart -startd, or wait until it looks again (VM_RECHECK_INTERVAL, {interval} s)."
        else:
            seen = "HasVM is not true: the startd's own probe failed."
            hint = f"fix what is said above; then condor_restart -startd, or wait up to {interval} s."
        return check.bad(seen, hint)._replace(because=cause)
    offered = (ad.string("VM_Type") or "").lower()
    configured = context.settings.string("VM_TYPE").lower()
    if configured and offered != configured:
        seen = f"The startd offers VM_Type {_clean(offered)}, and VM_TYPE = {configured} now."
        return check.bad(seen, "condor_restart -startd")
    memory, number = ad.integer("VM_Memory"), ad.integer("VM_AvailNum")
    if memory is not None and memory <= 0:
        seen = "VM_Memory is 0 now: the VMs that run have all of VM_MEMORY, and further jobs wait."
        return check.off(seen, "wait for a job's end, or raise VM_MEMORY.")
    if number is not None and number <= 0:
        seen = "VM_AvailNum is 0 now: as many VMs run as VM_MAX_NUMBER allows, and further jobs wait."
        return check.off(seen, "wait for a job's end, or raise VM_MAX_NUMBER.")
    return check.ok(f"HasVM is true, VM_Type {_clean(offered)}, {memory} MiB are free")


def _ads(text: str) -> list[JobAd]:
    """Parse the ads of condor_status -long, which separates those of several slots by empty lines."""
    from vmgahp.job.ad import JobAd

    found = []
    for block in text.replace("\r", "").split("\n\n"):
        pairs = [pair for pair in map(JobAd.parse_line, block.splitlines()) if pair]
        if pairs:
            found.append(JobAd(pairs))
    return found


def _ago(when: int | None) -> str:
    if when is None:
        return ""
    minutes = max(0, int(time.time()) - when) // 60
    if minutes < 120:
        return f" {minutes} minutes ago"
    return f" {minutes // 60} hours ago" if minutes < 2880 else f" {minutes // 1440} days ago"


def _clean(text: str) -> str:
    return escape(redact(text))[:300].rstrip(".")


_ASKED = ("NUM_CPUS", "VM_MAX_NUMBER")


def slots(context: Context, probed: Probe) -> Finding | None:
    """Check the promised resources; None without HTCondor, VM_MEMORY, or a known memory overhead of QEMU."""
    memory = context.settings.integer("VM_MEMORY")
    need = probed.attributes.get(f"VM_{context.vm_type}_ATTR_overhead")
    if not context.tool or memory <= 0 or not isinstance(need, int):
        return None
    check = Check("slots", "VM_MEMORY, what QEMU needs for each VM, NUM_CPUS, VM_MAX_NUMBER, and what there is")
    cpus, whole = os.cpu_count() or 1, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    offered, most = (_number(context, name) for name in _ASKED)
    if offered > cpus:
        seen = f"NUM_CPUS = {offered}, and this machine has {cpus} CPUs: VMs and other jobs share what there is."
        return check.off(seen, f"take NUM_CPUS out, or set it to {cpus} at most.")
    vms = min(number for number in (offered or cpus, most) if number)
    if memory + vms * need > whole:
        seen = (
            f"VM_MEMORY = {memory} MiB is for guests, and the QEMU of each of {vms} VMs may need {need} MiB beside: "
            f"together {memory + vms * need} MiB of the {whole} MiB of this machine."
        )
        hint = f"set VM_MEMORY to {max(whole - vms * need, 0)} at most, or VM_MAX_NUMBER to fewer VMs."
        return check.off(seen, hint)
    return check.ok(f"{vms} VMs with all of VM_MEMORY need {memory + vms * need} of {whole} MiB")


def _number(context: Context, name: str) -> int:
    """Return a setting of HTCondor's own; 0 if it is unset or not a number. Raises `NotKnown`."""
    said = ask([context.tool, "-subsystem", "VM_GAHP", name], TOOL_DEADLINE, context.environ)
    if said.status is None:
        raise NotKnown("settings", f"{context.tool} did not say {name} within {TOOL_DEADLINE:g} s.")
    text = said.out.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


SHOWN = 3
LONGEST_TAIL = 1 << 20
"""The maximum number of bytes that are read of each file, from its end."""
LONGEST_SENTENCE = 600
MOST_FILES = 50

_WHO = re.compile(r" ?\((client|job's owner|administrator|hypervisor's administrator)\)$")


def failures(context: Context) -> list[Finding]:
    """List the last failures, the latest first, each once, with its time and its number of occurrences."""
    path = context.settings.string("VM_GAHP_LOG")
    looked_at = f"the last failures in {path} and the files beside it" if path else "VM_GAHP_LOG"
    if not path.startswith("/") or path == os.devnull:
        return [Finding("log", UNKNOWN, looked_at, "There is no log: VM_GAHP_LOG is not the path of a file.")]
    seen: dict[str, tuple[float, int]] = {}
    unread, read = [], 0
    for name in _files(path):
        try:
            lines = list(log_lines(name, LONGEST_TAIL, follow=False))
        except FileNotFoundError:
            continue
        except OSError as error:
            unread.append(f"{name} cannot be read: {error.strerror}")
            continue
        read += 1
        for line in lines:
            if "VMGAHP_ERR_" in line.text:
                latest, times = seen.get(line.text, (0.0, 0))
                seen[line.text] = (max(latest, line.time), times + 1)
    found = [Finding("log", UNKNOWN, looked_at, sentence + ".") for sentence in unread[:SHOWN]]
    last = sorted(seen.items(), key=lambda item: -item[1][0])[:SHOWN]
    found += [_finding(looked_at, sentence, *when) for sentence, when in last]
    if not found:
        found.append(Finding("log", OK, looked_at, "no failure is in it" if read else "there is none yet"))
    return found


def _files(path: str) -> list[str]:
    """List the log files: the log, the one before it (``.old``), and those with a user's name after a dot."""
    directory, base = os.path.split(path)
    try:
        names = [name for name in os.listdir(directory) if name == base or name.startswith(base + ".")]
    except FileNotFoundError:
        return []
    except OSError:
        return [path]
    return [os.path.join(directory, name) for name in sorted(names)[:MOST_FILES]]


def parted(sentence: str) -> tuple[str, str, str]:
    """Parse a rendered fault (`vmgahp.errors.Fault.render`): the problem, who must act, the hint."""
    who = _WHO.search(sentence)
    problem, _, hint = _WHO.sub("", sentence).partition(" Hint: ")
    return problem[:LONGEST_SENTENCE], who[1] if who else "", hint[:LONGEST_SENTENCE]


def _finding(looked_at: str, sentence: str, when: float, times: int) -> Finding:
    problem, who, hint = parted(sentence)
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
    often = f", {times} times" if times > 1 else ""
    # A job's own mistake has held that job and is not a problem of the machine.
    owners = who in ("job's owner", "client")
    acting = f" ({who})" if who else ""
    return Finding("log", OK if owners else OFF, looked_at, f"{stamp}{often}: {problem}{acting}", hint)
