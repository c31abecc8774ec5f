"""The probe (``-M 0``), which reports to the startd the VMs that this machine can run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from time import monotonic, time

from vmgahp import PROTOCOL, __version__, config, errors, findings
from vmgahp.config import check, sources
from vmgahp.config.sources import Entries
from vmgahp.drivers.surveyor import Survey, Surveyor, Value, find_surveyor
from vmgahp.findings import BAD, OFF, OK, UNKNOWN, Finding
from vmgahp.host import libvirt_daemons, proc, runtime_dir
from vmgahp.host.job_user import Identity
from vmgahp.host.wait import Task
from vmgahp.log import Log
from vmgahp.vm_types import ANY, LIBVIRT

Attributes = dict[str, Value]

DEADLINE = 4.5
"""The seconds from the start of this process to the end of its probe. The startd ends one after five
(``VMGAHP_TEST_TIMEOUT`` in HTCondor's ``src/condor_startd.V6/vmuniverse_mgr.cpp``), and has to read its answer."""

RESERVE = 0.1
"""The seconds of these that are reserved for the work after the checks."""

SURVEY_RESERVE = 0.3
"""The seconds before the end of the checks at which a driver must have collected its results."""

LATER = "VMGAHP_PROBE_LATER"
"""The environment variable of a probe that has `LATER_DEADLINE` seconds and tells nobody but the next probes."""
LATER_DEADLINE = 60.0
KEPT_SECONDS = 900.0
"""The seconds for which the result of a probe counts for another one that has no time for its checks."""

MIB = 1 << 20

_POLICY = ("VM_POLICY", "VM_MAC_HOOK", "VM_POLICY_REQUIREMENTS")

DISK_SPACE, HOST_NAME = "disk space", "host name"

SLOW_NAME = 1.0
"""The seconds for looking up this machine's name, after which its resolver counts as slow."""


class Probe:
    """The result of probing this machine."""

    def __init__(self, vm_type: str, *found: Finding) -> None:
        self.vm_type = vm_type
        self.findings = list(found)
        self.attributes: Attributes = {}
        """The attributes for the startd; valid only without `trouble`."""
        self.seconds = 0.0

    @property
    def trouble(self) -> Finding | None:
        """Return the finding that keeps every job from running here, if there is one."""
        return findings.first_bad(self.findings)

    def document(self) -> dict[str, object]:
        """Return the whole result for ``--json``."""
        return {
            "vm_type": self.vm_type,
            "capable": self.trouble is None,
            "seconds": round(self.seconds, 3),
            "attributes": self.attributes if self.trouble is None else {},
            "findings": [finding._asdict() for finding in findings.explained(self.findings)],
        }


def probe(
    vm_type: str,
    settings: config.Settings,
    driver: Surveyor,
    seconds: float = DEADLINE - RESERVE,
    entries: Callable[[], Entries] | None = None,
    identity: Identity | None = None,
) -> Probe:
    """Run all checks in parallel, and collect the attributes for the startd, in the order of printing.

    `entries` lists the entries of the configuration; without it the settings are not checked. `identity` is the user as
    whom a container is run; without it this check is skipped. Raises `errors.MachineFault` for an invalid setting.
    """
    began = monotonic()
    end = began + seconds
    memory, execute = settings.integer("VM_MEMORY"), settings.string("EXECUTE")
    checks = {"memory": proc.physical_memory_mib, "driver": lambda: driver.survey(end - SURVEY_RESERVE)}
    if execute:
        checks[DISK_SPACE] = lambda: _free_mib(execute)
    if policy := [name for name in _POLICY if settings.string(name)]:
        checks["policy"] = lambda: _inspect_policy(settings)
    if entries is not None:
        checks["settings"] = entries
    if identity and settings.boolean("VM_PROBE_DOCKER"):
        from vmgahp.daemon import containers

        checks["containers"] = lambda: containers.look(identity, end - SURVEY_RESERVE)
    outcomes = findings.side_by_side(checks, end)
    found = Probe(vm_type)
    if entries is not None:
        listed = outcomes["settings"]
        if isinstance(listed, Entries):
            settings.locate(listed.where())
        found.findings += check.check(settings, vm_type, listed if isinstance(listed, Entries) else None)
        if network := check.networking(settings, vm_type):
            found.findings.append(network)
    physical, free = outcomes["memory"], outcomes.get(DISK_SPACE)
    usable = min(memory, physical) if isinstance(physical, int) else memory
    found.findings.append(_judge_memory(memory, physical))
    if policy:
        found.findings.append(_judge_policy(policy, vm_type, settings, outcomes["policy"]))
    survey = outcomes["driver"]
    if isinstance(survey, Survey):
        found.findings += survey.findings
    else:
        found.findings.append(findings.judge("hypervisor", f"the driver of VM type {vm_type}", survey, ""))
        survey = Survey()
    found.findings.append(_judge_disk_space(execute, memory, free))
    found.seconds = monotonic() - began
    if (seen := outcomes.get("containers")) is not None:
        of_machine, of_containers = containers.judge(seen)
        survey = survey._replace(machine_attributes={**survey.machine_attributes, **of_machine})
        found.findings += of_containers
    if isinstance(free, int) and free < memory:  # there is no room to save a VM's memory
        # The type any has attributes of other types besides its own.
        of_types = ("_ATTR_suspend", "_ATTR_checkpoint")
        own = survey.attributes.keys() & {"suspend", "checkpoint"}
        others = [name for name in survey.machine_attributes if name.startswith("VM_") and name.endswith(of_types)]
        survey = survey._replace(
            attributes={**survey.attributes, **dict.fromkeys(own, False)},
            machine_attributes={**survey.machine_attributes, **dict.fromkeys(others, False)},
        )
    found.attributes = _attributes(vm_type, settings, usable, survey, found.seconds)
    return found


def _attributes(vm_type: str, settings: config.Settings, memory: int, survey: Survey, seconds: float) -> Attributes:
    attributes: Attributes = {"VM_GAHP_VERSION": PROTOCOL, "VM_Type": vm_type, "VM_Memory": memory}
    attributes["VM_Networking"] = bool(survey.networking)
    if survey.networking:
        attributes["VM_Networking_Types"] = ",".join(survey.networking)
    if settings.boolean("VM_HARDWARE_VT"):
        attributes["VM_HardwareVT"] = True
    attributes["VM_TYPES"] = ",".join(survey.vm_types)
    attributes["VM_HYPERVISORS"] = ",".join(survey.hypervisors)
    attributes |= survey.machine_attributes
    attributes |= {f"VM_{vm_type}_ATTR_{name}": value for name, value in survey.attributes.items()}
    attributes["VM_Probe_Time"] = round(seconds, 3)
    attributes["VM_VMGAHP_VERSION"] = __version__
    return attributes


def _inspect_policy(settings: config.Settings) -> str:
    from vmgahp.hooks.policy import inspect  # only where there is a policy: each import takes of libvirt's time

    return inspect(settings)


def _judge_policy(names: list[str], vm_type: str, settings: config.Settings, outcome: object) -> Finding:
    """Judge whether the administrator's policy is usable; without it no job runs here."""
    subject = f"{', '.join(names)}: files, their owners and modes"
    for name in names:
        if not check.is_read(name, settings, vm_type):
            seen = f"{name} is about VMs that libvirt runs: of VM type {vm_type} it neither sees nor changes any"
            hint = "unset it here, or say with VM_POLICY_REQUIREMENTS which jobs this machine takes."
            return Finding("policy", OFF, subject, seen, hint)
    # The startd probes some types as its own user, who may not be allowed to check it.
    return findings.judge("policy", subject, outcome, str(outcome), BAD if os.geteuid() == 0 else UNKNOWN)


def _free_mib(directory: str) -> int:
    try:
        status = os.statvfs(directory)
    except OSError as error:
        hint = "make the directory, or set EXECUTE to the one that has the jobs' scratch directories."
        raise errors.MachineFault(f"EXECUTE = {directory} cannot be looked at: {error.strerror}.", hint) from error
    if status.f_flag & os.ST_RDONLY:
        problem = f"EXECUTE = {directory} is on a file system that is mounted read-only."
        raise errors.MachineFault(problem, "see why (dmesg), and mount it for writing.")
    return status.f_bavail * status.f_frsize // MIB


def _judge_memory(memory: int, physical: object) -> Finding:
    subject = "VM_MEMORY, and the memory of this machine"
    if memory <= 0:
        seen = f"VM_MEMORY is {memory or 'not set'}: no memory is set aside for VMs."
        hint = "set VM_MEMORY to the MiB that all VMs of this machine may use together."
        return Finding("memory", BAD, subject, seen, hint)
    if isinstance(physical, int) and physical < memory:
        seen = f"VM_MEMORY = {memory} MiB, and this machine has {physical} MiB: only these are advertised, and "
        seen += "nothing is left for the system."
        return Finding("memory", OFF, subject, seen, f"set VM_MEMORY to less than {physical}.")
    seen = f"VM_MEMORY = {memory} MiB of the {physical} MiB of this machine"
    return findings.judge("memory", subject, physical, seen, OFF)


def _judge_disk_space(execute: str, memory: int, free: object) -> Finding:
    subject = "the free disk space in EXECUTE, where a suspended VM's memory is saved"
    if not execute:
        return Finding(DISK_SPACE, UNKNOWN, subject, "EXECUTE is not set: there is no HTCondor here.")
    if isinstance(free, int) and free < memory:
        seen = f"EXECUTE = {execute} has {free} MiB free, and VMs may have {memory} MiB of memory (VM_MEMORY)."
        hint = f"free disk space in {execute}, lower VM_MEMORY, or set VM_SOFT_SUSPEND = True to suspend VMs in memory."
        return Finding(DISK_SPACE, OFF, subject, seen, hint)
    if isinstance(free, findings.Late):
        seen = f"EXECUTE = {execute} does not answer: {free.problem}"
        hint = "see in /proc/mounts which file system that is, and whether its server is there."
        return Finding(DISK_SPACE, BAD, subject, seen, hint)
    good = f"EXECUTE = {execute} has {free} MiB free, VM_MEMORY is {memory} MiB"
    return findings.judge(DISK_SPACE, subject, free, good)


def render(attributes: Attributes) -> str:
    """Format attributes as the lines of a ClassAd."""
    lines = []
    for name, value in attributes.items():
        text = str(value).upper()
        if isinstance(value, str):
            text = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        lines.append(f"{name} = {text}\n")
    return "".join(lines)


def _require_absolute_libraries() -> None:
    """Refuse a relative entry in LD_LIBRARY_PATH, which a starter gets, too. Raises `errors.MachineFault`."""
    with open("/proc/self/environ", "rb") as file:
        started_with = file.read().split(b"\0")
    for entry in started_with:
        name, _, value = entry.partition(b"=")
        if name == b"LD_LIBRARY_PATH" and value and not all(each.startswith(b"/") for each in value.split(b":")):
            raise errors.MachineFault(
                f"{os.fsdecode(entry)}, in HTCondor's environment, has an entry that is empty or relative: it stands "
                "for the working directory, so programs that root runs for a job would load the job's libraries.",
                "take that entry away where HTCondor's daemons are started; then restart them.",
            )


class Resolver:
    """A look-up of this machine's name, started at once; HTCondor's programs make it too, and wait for its answer."""

    def __init__(self) -> None:
        self.name = os.uname().nodename
        self._began = monotonic()
        self._took: float | None = None
        """The seconds until the answer, None so far."""
        self._is_tried_again = False
        self.wait: Callable[[float], bool] = lambda _seconds: False
        """A function that waits for its end; see `vmgahp.host.wait.Task.wait`."""
        with suppress(errors.MachineFault):  # without a thread it is not known
            self.wait = Task("the machine's name", self._look_up).wait

    def _look_up(self) -> None:
        try:
            self._ask()
        except OSError as error:
            # HTCondor accepts a name without an address. If no nameserver answers, it sleeps and asks again, 20
            # times (init_local_hostname_impl in its src/condor_utils/ipv6_hostname.cpp).
            self._is_tried_again = error.errno == socket.EAI_AGAIN
        self._took = monotonic() - self._began

    def _ask(self) -> None:
        # As bytes: for a text Python imports its codec for international names, and the probe has five seconds in all.
        socket.getaddrinfo(os.fsencode(self.name), None, 0, 0, 0, socket.AI_CANONNAME)

    def judge(self) -> Finding:
        """Judge the time that the look-up has taken so far."""
        subject = f"the address of {self.name}, this machine's name, from its resolver"
        seen = f"The address of {self.name}, this machine's name,"
        seconds = monotonic() - self._began if self._took is None else self._took
        if self._is_tried_again:
            seen = f"{seen} is not known, for no nameserver answers, and HTCondor's programs ask again for a minute."
        elif seconds < SLOW_NAME and self._took is not None:
            return Finding(HOST_NAME, OK, subject, f"{self.name} is looked up at once")
        elif seconds < SLOW_NAME:
            return Finding(HOST_NAME, UNKNOWN, subject, f"{seen} is not known after {seconds:.1f} s.")
        else:
            known = "is not known after" if self._took is None else "took"
            seen = f"{seen} {known} {seconds:.1f} s, and HTCondor's programs wait for it."
        hint = f"write {self.name} into /etc/hosts, or see which nameserver of /etc/resolv.conf does not answer."
        return Finding(HOST_NAME, OFF, subject, seen, hint)


def look(
    vm_type: str,
    environ: Mapping[str, str],
    log: Log,
    end: float,
    *,
    to_stderr: bool,
    awaited: Callable[[str], object] = str,
    loaded_as: Callable[[config.Settings], object] = repr,
) -> Probe:
    """Load the settings and the driver, and probe until `end`.

    `awaited` gets each step's name before its wait, `loaded_as` the settings.
    """
    if vm_type in (ANY, *LIBVIRT) and os.geteuid() == 0:
        libvirt_daemons.wake()  # an idle one needs seconds to start
    tool = sources.find_tool(environ)
    awaited(f"the settings, which {tool} reads" if tool else "the settings")
    try:
        loaded = Task("the settings", lambda: config.load(environ))
        listed = Task("the configuration", lambda: sources.entries(environ))
        with suppress(errors.Fault):  # reported below
            find_surveyor(vm_type)  # takes as long as HTCondor's tool, and runs meanwhile
        settings = loaded.result()
        loaded_as(settings)
        awaited("the log, VM_GAHP_LOG")
        log.open(settings, to_stderr=to_stderr)
        awaited(f"the driver of VM type {vm_type}")
        _require_absolute_libraries()
        wrong = check.values(settings, vm_type)
        if findings.first_bad(wrong):
            return Probe(vm_type, *wrong)
        identity = Identity.from_environ(environ)
        driver = find_surveyor(vm_type)(vm_type, settings, identity, log.always)
        awaited("the checks, each of which has a shorter time")
        return probe(vm_type, settings, driver, end - monotonic() - RESERVE, entries=listed.result, identity=identity)
    except errors.Fault as fault:
        return Probe(vm_type, findings.judge("settings", "the settings and the driver", fault, ""))


def _kept_name(vm_type: str) -> str:
    """Return the name of the kept result, and of the claim of the probe that finds it."""
    return f"probe-{vm_type}"


class _Kept:
    """The last result of a probe that has had the time for all its checks, since this machine booted.

    On a slow or busy machine the startd's five seconds may never be enough. So a probe whose checks were late leaves
    another one behind, whose result counts for the next.
    """

    def __init__(self, vm_type: str, settings: config.Settings, log: Log) -> None:
        self._log = log
        self._name = _kept_name(vm_type)
        self._path = f"{runtime_dir.ROOT_BASE}/{self._name}.json"
        self._for = {"version": __version__, "settings": dict(settings.given)}

    def write(self, found: Probe) -> None:
        """Keep a result; one with trouble, too, which ends the validity of an earlier one."""
        attributes = None if found.trouble else found.attributes
        try:
            runtime_dir.make_root_base()
            with open(f"{self._path}.new", "w", opener=partial(os.open, mode=0o600)) as file:
                json.dump(self._for | {"time": time(), "attributes": attributes}, file)
            os.replace(f"{self._path}.new", self._path)
        except OSError as error:
            self._log.always(f"the result of the probe is not kept: {error}")

    def instead_of(self, late: Probe, environ: Mapping[str, str]) -> Probe | None:
        """Leave a probe behind that finds what this one could not; return the kept result, if it still counts."""
        if not runtime_dir.is_claimed(self._name):
            with suppress(OSError):  # the next probe tries it again
                subprocess.Popen(
                    [sys.executable, "-I", *sys.argv],
                    env={**environ, LATER: "1"},
                    cwd="/",
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
        try:
            with open(self._path) as file:
                kept = json.load(file)
        except (OSError, ValueError):
            return None
        age = time() - kept["time"]
        if (
            not kept["attributes"]
            or not 0 <= age < KEPT_SECONDS
            or any(kept[key] != self._for[key] for key in self._for)
        ):
            return None
        self._log.always(f"this probe had no time for all its checks: what one has found {age:.0f} s ago counts")
        found = Probe(late.vm_type)
        found.attributes = kept["attributes"]
        return found


def run(vm_type: str, environ: Mapping[str, str], *, to_stderr: bool, as_json: bool = False) -> int:
    """Probe and print; return the exit status, which is 0 only for a machine that can run VMs.

    If no VM can run, nothing may be printed for the startd, because any output makes the machine VM-capable
    (``VMUniverseMgr`` in HTCondor's ``src/condor_startd.V6``). The reasons go to the log and to standard error.
    The process exits at once, even if checks still hang.
    """
    age, is_later = proc.age(os.getpid()), LATER in environ
    end = monotonic() + DEADLINE - (age if age < DEADLINE else 0)  # an older process is not a startd's probe
    end = monotonic() + LATER_DEADLINE if is_later else end
    log, doing, loaded = Log(), [""], [config.Settings()]
    host = Resolver()
    tells = to_stderr and not as_json
    claimed = runtime_dir.claim(_kept_name(vm_type)) if is_later else ""

    def probe_it() -> Probe:
        told, kept_as = doing.append, loaded.append
        return look(vm_type, environ, log, end, to_stderr=tells, awaited=told, loaded_as=kept_as)

    outcome = findings.side_by_side({"probe": probe_it}, end)["probe"]
    found = outcome if isinstance(outcome, Probe) else Probe(vm_type)
    if os.geteuid() == 0 and not to_stderr and vm_type in (ANY, *LIBVIRT):
        # A driver waits for a late check until then, and not longer.
        is_late = monotonic() > end - RESERVE - SURVEY_RESERVE
        kept = _Kept(vm_type, loaded[-1], log)
        if is_later or not is_late:
            kept.write(found)
        if is_later:
            runtime_dir.remove(claimed)
        elif is_late and (usable := kept.instead_of(found, environ)):
            found = outcome = usable
    if found is not outcome:
        late, named = findings.judge("probe", "this machine, with all checks", outcome, ""), host.judge()
        seen = f"{late.seen} It waited for {doing[-1]}."
        if named.verdict != OK:
            late, seen = late._replace(hint=named.hint), f"{seen} {named.seen}"
        found.findings.append(late._replace(seen=seen))
    found.findings.append(host.judge())
    trouble = found.trouble
    for finding in found.findings:
        if finding.verdict == OFF and finding is not trouble:
            what = "" if finding.check in (check.CHECK, HOST_NAME) else "not offered: "
            log.always(f"{what}{finding.check}: {finding.seen}")
    if trouble is not None:
        fault = errors.MachineFault(trouble.seen, trouble.hint)
        reason = f"this machine is not VM-capable: {fault.render()}"
        log.always(reason)
        if not as_json:
            log.tell_stderr(reason)
    if as_json:
        sys.stdout.write(json.dumps(found.document(), indent=2) + "\n")
    elif trouble is None:
        sys.stdout.write(render(found.attributes))
    sys.stdout.flush()
    return 0 if trouble is None else 1
