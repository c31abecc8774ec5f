"""Checks of HTCondor: its settings, slots, server and startd, and the failures in VM_GAHP_LOG."""

import glob
import os
import re
import stat
import sys
import time
from collections.abc import Sequence

from vmgahp import __version__, errors, findings
from vmgahp.commands.arguments import for_root
from vmgahp.commands.doctor.context import AS_ROOT, Check, Context, User, ask, down_to, first_closed, may_look
from vmgahp.commands.files import RESTART, complaint, log_lines, open_regular, pairs_of
from vmgahp.config import check as settings_check
from vmgahp.config import sources
from vmgahp.drivers import base
from vmgahp.findings import BAD, UNKNOWN, Finding
from vmgahp.host import proc
from vmgahp.host.trust import changeable_by_others
from vmgahp.job.ad import JobAd
from vmgahp.text import escape, redact
from vmgahp.vm_types import HTCONDORS

DEADLINE = 10.0
"""The deadline in seconds for condor_status, which waits longer for a startd that is down, and for the version of the
server, which usually takes a tenth of a second."""

PACKAGED = "/usr/libexec/condor/condor_vm-gahp"
"""The server in Debian's package, whose vmgahp is in /usr/bin."""

RECOVER = for_root("doctor", "--recover")


def installed(context: Context) -> Finding:
    """Check that HTCondor is installed."""
    places = "beside the daemon that started this, on PATH and in the usual directories"
    check = Check("HTCondor", f"condor_config_val, {places}")
    if context.tool:
        return check.ok(f"{context.tool} is there")
    if context.own_settings:
        seen = "There is none: the settings are a file's, and jobs are run by hand with vmgahp serve."
        return check.off(seen, "nothing, if that is what you want.")
    elsewhere = "set CONDOR_CONFIG where its configuration is not in /etc/condor"
    hint = f"install HTCondor, or put the directory of condor_config_val on PATH ({elsewhere})."
    return check.bad("There is no condor_config_val, so no HTCondor whose startd could offer VMs.", hint)


def not_configured(context: Context) -> Finding | None:
    """Return the finding for an HTCondor of which nobody has asked for VMs; None for any other."""
    if not context.tool or context.own_settings or context.fault or context.bad_names:
        return None
    if any(context.settings.where(name) != "default" for name in ("VM_TYPE", "VM_MEMORY")):
        return None
    seen = "HTCondor is not configured for VMs on this machine: neither VM_TYPE nor VM_MEMORY is set."
    return Check("VM_TYPE", "VM_TYPE and VM_MEMORY").bad(seen, f"run {for_root('setup')} as root.")


def settings(context: Context) -> list[Finding]:
    """Check for settings that are unreadable, invalid or contradictory, or have names that look misspelled."""
    check = Check(settings_check.CHECK, settings_check.LOOKED_AT)
    if context.fault:
        return [check.bad(context.fault.problem, context.fault.hint)]
    found: list[Finding] = []
    entries = None
    try:
        entries = sources.entries(context.environ)
        for values in (context.loaded, context.settings):
            values.locate(entries.where())
    except errors.Fault as fault:
        found.append(check.unknown(fault.problem, fault.hint))
    found += settings_check.check(context.loaded, context.vm_type, entries)
    return found or [check.ok(f"they can be read (VM_TYPE: {context.settings.where('VM_TYPE')})")]


def vm_type(context: Context) -> Finding:
    """Check VM_TYPE, and that there is a driver for it."""
    name = context.settings.string("VM_TYPE")
    check = Check("VM_TYPE", "VM_TYPE, the one type that the startd offers")
    if not name:
        judge = check.off if context.own_settings else check.bad
        hint = f"set VM_TYPE = kvm in HTCondor's configuration; then {RESTART}"
        return judge("VM_TYPE is not set: HTCondor has no VM universe on this machine.", hint)
    try:
        base.find(name.lower())
    except errors.Fault as fault:
        return check.bad(fault.problem, fault.hint)
    return check.ok(f"VM_TYPE = {name} ({context.settings.where('VM_TYPE')}), which has a driver")


# The server program


def server(context: Context) -> Finding | None:
    """Check VM_GAHP_SERVER: that HTCondor can run it, only root can change it, and it is this daemon."""
    path = context.more["VM_GAHP_SERVER"]
    check = Check("VM_GAHP_SERVER", "VM_GAHP_SERVER, the program that the startd and each starter run")
    if not path:  # without HTCondor the server is only started by hand
        return None if context.own_settings else check.bad("VM_GAHP_SERVER is not set.", _use_ours())
    named = f"VM_GAHP_SERVER = {path}"
    reason, hint = _why_not_run(context, path)
    if reason and hint == AS_ROOT:
        return check.for_root(f"{named}, and {reason}.")
    if reason:
        return check.bad(f"{named}, and {reason}.", hint)
    try:  # a personal HTCondor runs it as the user whose it is
        changeable = changeable_by_others(path) if context.is_root or context.blind else ""
    except OSError as error:
        return check.unknown(f"{named} cannot be looked at: {error.strerror}.")
    if changeable:
        seen = f"Others than root can change {changeable}, and root runs {named}. So it was not run to see what it is."
        return check.off(seen, f"chown root {changeable}; chmod go-w {changeable}")
    # The program tells its version to the user who will run it.
    said = ask([path, "-version"], DEADLINE, context.environ, as_whom(context))
    first = " ".join(said.out.decode("utf-8", "replace").split())[:120]
    if said.status is None:
        return check.bad(f"{named} did not say its version within {DEADLINE:g} s.", f"run {path} -version by hand.")
    if f"vmgahp {__version__} " in f"{first} ":
        return check.ok(f"{path} is this daemon ({first})")
    if first.startswith("vmgahp "):
        beside = os.path.join(os.path.dirname(os.path.realpath(path)), "vmgahp doctor")
        beside = "/usr/bin/vmgahp doctor" if path == PACKAGED else beside
        return check.off(f"{named} is {first}, and this doctor is of version {__version__}.", f"run {beside}")
    if "CondorVersion" in first:
        seen = f"{named} is HTCondor's own server; what is said here is about vmgahp."
        return check.off(seen, f"{_use_ours()}; then {RESTART}")
    why = complaint(said) or f"it ended with status {said.status} and said nothing"
    hint = f"run {path} -version and fix what it complains about, or {_use_ours()}"
    return check.bad(f"{named} does not start: {why}.", hint)


def our_launcher() -> str:
    """Return the path of this installation's server: beside its Python, or that of Debian's package."""
    beside = os.path.join(os.path.dirname(sys.executable), "condor_vm-gahp")
    return beside if os.path.exists(beside) or not os.path.exists(PACKAGED) else PACKAGED


def _use_ours() -> str:
    return f"set VM_GAHP_SERVER = {our_launcher()}"


def as_whom(context: Context) -> User | None:
    """Return the user as whom the startd runs the server; None for root."""
    return None if context.vm_type in HTCONDORS else context.condor


def _why_not_run(context: Context, path: str) -> tuple[str, str]:
    """Return the reason why HTCondor cannot run the server, and the hint; empty if it can."""
    if not path.startswith("/"):
        return "that is not a full path", _use_ours()
    try:
        mode = os.stat(path).st_mode
    except PermissionError:
        return "this user cannot look at it", AS_ROOT
    except OSError as error:
        return f"that cannot be run: {error.strerror}", _use_ours()
    if not stat.S_ISREG(mode):
        return "that is not a file", _use_ours()
    if not mode & 0o111:
        return "root may not execute it", f"chmod 755 {path}"
    if context.is_root and not os.access(path, os.X_OK):
        return "root may not execute it", "see whether its file system is mounted with noexec (findmnt -T)."
    who = as_whom(context)
    if who and (closed := first_closed(who, [*down_to(os.path.dirname(path)), path])):
        runs = f"the startd runs it as the user condor for VM_TYPE = {context.vm_type}"
        return f"{runs}, who may not pass {closed}", f"chmod o+x {closed}"
    return "", ""


# Other settings


def networking(context: Context) -> Finding:
    """Check VM_NETWORKING and the related settings; the probe checks that the networks exist."""
    check = Check("VM_NETWORKING", "VM_NETWORKING, VM_NETWORKING_TYPE, VM_NETWORKING_DEFAULT_TYPE")
    ours = context.settings
    if not ours.boolean(check.name):
        return check.ok("VM_NETWORKING is off: jobs that ask for a network do not match this machine")
    wrong = settings_check.networking(ours, context.vm_type)
    return wrong or check.ok(f"jobs may have: {', '.join(ours.networking_types())}")


def log_file(context: Context) -> Finding:
    """Check that there is a log and that it can be written, without writing to it."""
    path = context.settings.string("VM_GAHP_LOG")
    check = Check("VM_GAHP_LOG", f"VM_GAHP_LOG = {path}")
    if not path.startswith("/") or path == os.devnull:
        seen = f"VM_GAHP_LOG is {path or 'not set'}: failures are in the starter's log at most."
        return check.off(seen, "set VM_GAHP_LOG = $(LOG)/VMGahpLog")
    directory, is_there = os.path.dirname(path), os.path.exists(path)
    writable = os.access(path if is_there else directory, os.W_OK)
    if not context.is_root and (context.blind or not writable or not may_look(directory)):
        return check.for_root("Whether root can write it is not known.")
    if os.path.islink(path) or (is_there and not os.path.isfile(path)):
        return check.off(f"{path} is not a regular file, and nothing is logged.", f"remove {path}.")
    if not os.path.isdir(directory):
        return check.off(f"{directory} is not a directory, and nothing is logged.", f"mkdir {directory}")
    if not writable:
        return check.off(f"root cannot write {path}.", "see whether its file system is mounted read-only.")
    return check.ok(f"{path} can be written")


def slots(context: Context) -> Finding | None:
    """Check the promised resources; None without HTCondor, VM_MEMORY, or a known memory overhead of QEMU."""
    memory = context.settings.integer("VM_MEMORY")
    need = context.probe.attributes.get(f"VM_{context.vm_type}_ATTR_overhead")
    if not context.tool or memory <= 0 or not isinstance(need, int):
        return None
    check = Check("slots", "VM_MEMORY, what QEMU needs for each VM, NUM_CPUS, VM_MAX_NUMBER, and what there is")
    cpus, whole = os.cpu_count() or 1, proc.physical_memory_mib()
    offered, most = (_number(context, name) for name in ("NUM_CPUS", "VM_MAX_NUMBER"))
    if offered > cpus:
        seen = f"NUM_CPUS = {offered}, and this machine has {cpus} CPUs: VMs and other jobs share what there is."
        return check.off(seen, f"take NUM_CPUS out, or set it to {cpus} at most.")
    vms = min(number for number in (offered or cpus, most) if number)
    if (together := memory + vms * need) > whole:
        seen = f"VM_MEMORY = {memory} MiB is for guests, and the QEMU of each of {vms} VMs may need {need} MiB beside: "
        seen += f"together {together} MiB of the {whole} MiB of this machine."
        hint = f"set VM_MEMORY to {max(whole - vms * need, 0)} at most, or VM_MAX_NUMBER to fewer VMs."
        return check.off(seen, hint)
    return check.ok(f"{vms} VMs with all of VM_MEMORY need {together} of {whole} MiB")


def _number(context: Context, name: str) -> int:
    """Return a number of `MORE_SETTINGS`; 0 if it is unset or not a number."""
    text = context.more[name]
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


# The startd


def startd(context: Context) -> Finding:
    """Check the attributes about VMs in the startd's ad."""
    check = Check("startd", "the startd's own ad (condor_status -pool, with its STARTD_ADDRESS_FILE)")
    if not context.tool:
        return check.unknown("There is no HTCondor here.")
    tool = os.path.join(os.path.dirname(context.tool), "condor_status")
    if not os.access(tool, os.X_OK):
        return check.unknown(f"There is no condor_status beside {context.tool}.")
    start = "start HTCondor (systemctl start condor), see that DAEMON_LIST has STARTD, and look into StartLog."
    path = context.more["STARTD_ADDRESS_FILE"]
    try:
        with open_regular(path) as file:
            address = file.readline(8192).decode("ascii", "replace").strip()
    except FileNotFoundError:
        seen = f"No startd runs on this machine: {path or 'STARTD_ADDRESS_FILE'} is not there."
        return check.bad(seen, start)
    except OSError as error:
        return check.for_root(f"{path} cannot be read: {error.strerror}.")
    if not address.startswith("<"):
        return check.bad(f"{path} has no address in it.", start)
    wanted = "Name,HasVM,VM_Type,VM_Memory,VM_AvailNum,PartitionableSlot,VMOfflineReason,VMOfflineTime"
    command = [tool, "-pool", address, "-long", "-attributes", wanted]
    said = ask(command, DEADLINE, context.environ)
    # Empty lines separate the ads of several slots.
    texts = "" if said.status is None else said.out.decode("utf-8", "replace").replace("\r", "")
    ads = [JobAd(pairs) for text in texts.split("\n\n") if (pairs := pairs_of(text))]
    if not ads:
        why = "not in time" if said.status is None else _clean((said.complaints or ["it has no slots"])[0].strip())
        return check.bad(f"The startd, which should be at {_clean(address)}, does not answer: {why}.", start)
    return _judge_ad(context, next((ad for ad in ads if ad.boolean("PartitionableSlot")), ads[0]), check)


def _judge_ad(context: Context, ad: JobAd, check: Check) -> Finding:
    reason = ad.string("VMOfflineReason")
    if reason is not None and not ad.boolean("HasVM"):
        # A later successful probe does not bring it back (ResMgr::updateExtrasClassAd in HTCondor's
        # src/condor_startd.V6/ResMgr.cpp).
        since = ""
        if (when := ad.integer("VMOfflineTime")) is not None:
            minutes = max(0, int(time.time()) - when) // 60
            since = f" {minutes} minutes ago" if minutes < 120 else f" {minutes // 60} hours ago"
        seen = f"A starter took this machine out of the VM universe{since}: VMOfflineReason is {_clean(reason)}."
        hint = f"fix the cause (the last failures in the log, below, name it); then, as root: {RECOVER}"
        return check.bad(seen, hint)
    if not ad.boolean("HasVM"):
        return _not_offered(context, check)
    offered = (ad.string("VM_Type") or "").lower()
    configured = context.settings.string("VM_TYPE").lower()
    if configured and offered != configured:
        seen = f"The startd offers VM_Type {_clean(offered)}, and VM_TYPE = {configured} now."
        return check.bad(seen, RESTART)
    memory, number = ad.integer("VM_Memory"), ad.integer("VM_AvailNum")
    if memory is not None and memory <= 0:
        seen = "VM_Memory is 0 now: the VMs that run have all of VM_MEMORY, and further jobs wait."
        return check.off(seen, "wait for a job's end, or raise VM_MEMORY.")
    if number is not None and number <= 0:
        seen = "VM_AvailNum is 0 now: as many VMs run as VM_MAX_NUMBER allows, and further jobs wait."
        return check.off(seen, "wait for a job's end, or raise VM_MAX_NUMBER.")
    return check.ok(f"HasVM is true, VM_Type {_clean(offered)}, {memory} MiB are free")


def _not_offered(context: Context, check: Check) -> Finding:
    """Explain a startd that offers no VMs by the findings so far."""
    interval = context.more["VM_RECHECK_INTERVAL"] or "600"
    if bad := findings.first_bad(context.found):
        hint = f"fix what is said above; then wait up to {interval} s, or {RESTART}"
        return check.bad("HasVM is not true: the startd's own probe failed.", hint)._replace(because=bad.check)
    if any(one.verdict == UNKNOWN and findings.row_of(one.check).is_decisive for one in context.found):
        seen = "HasVM is not true: the startd's own probe failed, or looked before this machine was as it is."
        return check.bad(seen, AS_ROOT)
    seen = "HasVM is not true, although nothing was found wrong here: the startd looked earlier."
    return check.bad(seen, f"wait until it looks again (VM_RECHECK_INTERVAL, {interval} s), or {RESTART}")


def may_recover(found: Sequence[Finding]) -> bool:
    """Return True if a starter took the machine out of the VM universe, and nothing else is wrong with it now."""
    bad = [one for one in found if one.verdict == BAD and not one.because]
    return [one.check for one in bad] == ["startd"] and RECOVER in bad[0].hint


def _clean(text: str) -> str:
    return escape(redact(text))[:300].rstrip(".")


# The log

SHOWN = 3
LONGEST_TAIL = 1 << 20
"""The maximum number of bytes that are read of each file, from its end."""
LONGEST_SENTENCE = 600

_WHO = re.compile(r" ?\((client|job's owner|administrator|hypervisor's administrator)\)$")
_FAILURE, _SUCCESS = "VMGAHP_ERR_", "started "
"""A part of the line of each failure, and the beginning of that of each VM that has started."""


def failures(context: Context) -> list[Finding]:
    """List the failures since a VM last started, the latest first, each once, with its time and number."""
    path = context.settings.string("VM_GAHP_LOG")
    check = Check("log", f"the last failures in {path} and the files beside it" if path else "VM_GAHP_LOG")
    if not path.startswith("/") or path == os.devnull:
        return [check.unknown("There is no log: VM_GAHP_LOG is not the path of a file.")]
    seen: dict[str, tuple[float, int]] = {}
    unread, read, success = [], False, 0.0
    # Beside the log: the one before it (.old), and those with a user's name after a dot.
    names = [path, *(name for name in sorted(glob.glob(f"{glob.escape(path)}.*")) if not name.endswith(".lock"))]
    for name in names[:50]:
        try:
            lines = list(log_lines(name, LONGEST_TAIL))
        except FileNotFoundError:
            continue
        except OSError as error:
            unread.append(check.unknown(f"{name} cannot be read: {error.strerror}."))
            continue
        read = True
        for when, text in lines:
            if _FAILURE in text:
                latest, times = seen.get(text, (0.0, 0))
                seen[text] = (max(latest, when), times + 1)
            elif text.startswith(_SUCCESS):
                success = max(success, when)
    current = sorted(((last, sentence) for sentence, last in seen.items() if last[0] >= success), reverse=True)
    found = unread[:SHOWN] + [_finding(check, sentence, *last) for last, sentence in current[:SHOWN]]
    nothing = "no failure is in it since a VM last started" if success else "no failure is in it"
    return found or [check.ok(nothing if read else "there is none yet")]


def parted(sentence: str) -> tuple[str, str, str]:
    """Parse a rendered fault (`vmgahp.errors.Fault.render`): the problem, who must act, the hint."""
    who = _WHO.search(sentence)
    problem, _, hint = _WHO.sub("", sentence).partition(" Hint: ")
    return problem[:LONGEST_SENTENCE], who[1] if who else "", hint[:LONGEST_SENTENCE]


def _finding(check: Check, sentence: str, when: float, times: int) -> Finding:
    problem, who, hint = parted(sentence)
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
    often = f", {times} times" if times > 1 else ""
    seen = f"{stamp}{often}: {problem}{f' ({who})' if who else ''}"
    # A job's own mistake has held that job and is not a problem of the machine.
    return check.ok(seen, hint) if who in ("job's owner", "client") else check.off(seen, hint)
