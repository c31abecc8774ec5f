"""One VM that a script manages, as the server sees it, and the run of that script.

The script is trusted as the administrator's other programs are (`vmgahp.host.trust`), and mostly runs as the job's
user, who owns the files that it works on. It names the files of a checkpoint, but not which of them are disks.
"""

import os
import pwd
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from vmgahp import errors, lifecycle
from vmgahp.checkpoint.manifest import STATE, CheckpointKind, Facts, Manifest, text
from vmgahp.checkpoint.store import CheckpointStore, FileRef, Unusable
from vmgahp.config import Settings
from vmgahp.drivers.managed import Deadlines, ManagedMachine
from vmgahp.drivers.resources import Resources
from vmgahp.drivers.script import protocol
from vmgahp.drivers.script.protocol import LONGEST_TEXT, Answer, Malformed, ScriptRequest
from vmgahp.drivers.surveyor import Logger
from vmgahp.hooks import clean, converse
from vmgahp.host import proc, trust, wait
from vmgahp.host.job_user import Identity
from vmgahp.host.run import condor_environment
from vmgahp.job.ad import JobAd
from vmgahp.job.vm_spec import VmSpec
from vmgahp.metrics import Status, Usage
from vmgahp.text import MAC

HYPERVISOR, SETTING, USER, LIMITS = "VM_HYPERVISOR", "VM_SCRIPT", "VM_SCRIPT_USER", "VM_SCRIPT_LIMITS"
JOB, CONDOR, ROOT = "job", "condor", "root"

REQUEST_VARIABLE = "VMGAHP_REQUEST"

KNOWN_LIMITS = (
    "as", "core", "cpu", "data", "fsize", "locks", "memlock", "msgqueue", "nice", "nofile", "nproc", "rss",
    "rtprio", "rttime", "sigpending", "stack",
)  # fmt: skip
"""The resources that can be limited, by prlimit's names."""

_NOT_EXECUTABLE = (126, 127)
_BY_HAND = "run it by hand with this action (docs/how-to/script-drivers.md says how), and see the server's log."


class ScriptFailed(errors.JobFault):
    """A failure of the script as the job's user: any process of that user can kill it, stop it or answer for it."""


FAILED = (errors.MachineFault, ScriptFailed)


class Program:
    """The script of the settings, for one user's jobs. Raises `errors.MachineFault` if it may not be run at all."""

    def __init__(self, settings: Settings, job: Identity, log_line: Logger, *, probes: bool = False) -> None:
        """Prepare to run the script as the user that the settings name for jobs of `job`, if it does not only probe."""
        self.user = named_user(settings, job)
        if probes and os.geteuid() != 0:
            self.user = job  # the startd probes as its own user, who cannot switch to another
        if os.geteuid() not in (0, self.user.uid):
            said = f"{USER} = {settings.string(USER)}"
            problem = f"{said}, and this server, which is not root, cannot run it as that user."
            raise errors.MachineFault(problem, f"start HTCondor as root, or set {USER} to {JOB}.")
        self.hypervisor = hypervisor(settings)
        self.path = settings.string(SETTING)
        self._is_the_jobs = self.user.switching and settings.string(USER) == JOB
        self._limits = limits(settings)
        self._log = log_line
        if not self.path:
            problem = f"{HYPERVISOR} = {self.hypervisor}, and {SETTING} is not set: there is no script to drive it."
            raise errors.MachineFault(problem, f"set {SETTING} to the full path of the hypervisor's script.")
        trust.require_trustworthy(self.path, SETTING, "or offer another VM_TYPE")

    def call(self, request: ScriptRequest, ad: JobAd | None, seconds: float) -> Answer:
        """Run the script once and parse its answer.

        Raises `errors.MachineFault` if it cannot be started, and the `fault` of its user if it does not end within
        `seconds`, or gives an invalid answer.
        """
        label = f"{SETTING} ({self.path}), {request.action}"
        try:
            output, status, last = converse(
                label,
                [self.path, request.action],
                deadline=seconds,
                log_line=self._log,
                hint=_BY_HAND,
                stdin=protocol.ad_text(ad),
                environ=self._environment() | request.environment(),
                given=(REQUEST_VARIABLE, request.document(ad)),
                longest=protocol.LONGEST_ANSWER,
                user=self.user,
                limits=self._limits,
            )
        except errors.MachineFault as fault:
            if isinstance(fault.__cause__, OSError):  # it has not begun
                raise
            raise self.fault(fault.problem, fault.hint) from fault
        if status in _NOT_EXECUTABLE:
            problem = f"{label} cannot be executed as uid {self.user.uid} (exit status {status}).{last}"
            hint = f"see that this user may execute it, and its interpreter; {USER} says who runs it."
            raise self.fault(problem, hint)
        try:
            answer = protocol.decode(request.action, output, status)
        except Malformed as error:
            problem = f"{label} gave no answer: {clean(str(error))[:LONGEST_TEXT]}.{last}"
            raise self.fault(problem, _BY_HAND) from error
        return answer._replace(reason=clean(answer.reason)[:LONGEST_TEXT])

    def fault(self, problem: str, hint: str) -> errors.Fault:
        """Return the fault for a failure of the running script: the job's if the job's user can cause it."""
        if self._is_the_jobs and self.user.may_execute(self.path):
            return ScriptFailed(errors.MISMATCHED, problem, f"ask the administrator of this machine: {hint}")
        return errors.MachineFault(problem, hint)

    def refused(self, answer: Answer, action: str) -> errors.Fault:
        """Return the fault for an outcome that no job causes by what it asks for."""
        reason = f": {answer.reason.rstrip('.')}" if answer.reason else ""
        problem = f"{SETTING} ({self.path}) answers {action} with {answer.outcome}{reason}."
        hint = f"let the script implement {', '.join(protocol.NEEDED)}, and reject jobs at their start only."
        return self.fault(problem, hint)

    def _environment(self) -> dict[str, str]:
        """Return the environment of the script; for another user than this server's, without the server's settings."""
        environ = condor_environment(os.environ)
        if self.user.switching:
            environ = {name: value for name, value in environ.items() if not name.upper().startswith("_CONDOR_")}
        try:
            entry = pwd.getpwuid(self.user.uid)
            name, home = entry.pw_name, entry.pw_dir
        except KeyError:
            name, home = str(self.user.uid), "/"
        return environ | {"HOME": home, "USER": name, "LOGNAME": name, "LC_ALL": "C.UTF-8"}


def hypervisor(settings: Settings) -> str:
    """Return VM_HYPERVISOR, which becomes part of attributes' names. Raises `errors.MachineFault` if it is invalid."""
    name = settings.string(HYPERVISOR)
    plain = name.replace("_", "a")
    if not (plain.isascii() and plain.isalnum() and not plain[0].isdigit() and len(plain) <= 32):
        problem = f"{HYPERVISOR} = {name or 'not set'} is not a name of a hypervisor."
        hint = f"set {HYPERVISOR} to a name of letters, digits and underscores, such as virtualbox."
        raise errors.MachineFault(problem, hint)
    return name


def limits(settings: Settings) -> list[str]:
    """Return VM_SCRIPT_LIMITS as options of prlimit. Raises `errors.MachineFault` if they are invalid."""
    found = []
    for word in settings.strings(LIMITS):
        name, _, value = word.lower().partition("=")
        if name not in KNOWN_LIMITS or not (value == "unlimited" or (value.isascii() and value.isdigit())):
            hint = f"write name=number or name=unlimited; the names are {', '.join(KNOWN_LIMITS)}."
            raise errors.MachineFault(f"{LIMITS}, entry {word!a}, is not a limit.", hint)
        found.append(f"--{name}={value}")
    return found


def named_user(settings: Settings, job: Identity) -> Identity:
    """Return the user that VM_SCRIPT_USER names for jobs of `job`. Raises `errors.MachineFault` if there is none."""
    word = settings.string(USER)
    if word == JOB:
        return job
    if word == ROOT:
        return Identity(0, 0)
    if word == CONDOR and "." in os.environ.get("CONDOR_IDS", ""):
        uid, _, gid = os.environ["CONDOR_IDS"].partition(".")
        if not (uid.isdecimal() and gid.isdecimal()):
            raise errors.MachineFault(f"CONDOR_IDS = {uid}.{gid} are no ids.", "set it to two numbers, uid.gid.")
        return Identity(int(uid), int(gid))
    try:
        entry = pwd.getpwnam(word)
    except KeyError:
        problem = f"{USER} = {word} ({settings.where(USER)}), and this machine knows no such user."
        hint = f"set {USER} to {JOB}, {CONDOR}, {ROOT}, or the name of a user of this machine."
        raise errors.MachineFault(problem, hint) from None
    return Identity(entry.pw_uid, entry.pw_gid)


_NAMED_FILES = (
    "let the script name the files that it has made in the scratch directory; they belong to the job's user. "
    "The VM keeps running."
)


def _differences(then: Facts, now: Facts) -> Iterator[str]:
    if then["hypervisor"] != now["hypervisor"]:
        yield f"its hypervisor is {then['hypervisor']!a}, and this is {now['hypervisor']!a}"


KIND = CheckpointKind(
    "script",
    {
        "hypervisor": text(32),
        "note": text(500, may_be_empty=True),  # the script's own words to itself
    },
    most_files=1000,
    differences=_differences,
    knows_disks=False,
)

POLL = 0.5
"""Seconds between two queries about a guest that was asked to power off."""

_STATES = {
    protocol.RUNNING: lifecycle.RUNNING,
    protocol.PAUSED: lifecycle.SOFT_SUSPENDED,
    protocol.SUSPENDED: lifecycle.SUSPENDED,
    protocol.STOPPED: lifecycle.STOPPED,
}
_WORDS = {state: word for word, state in _STATES.items()}
_WORDS |= {lifecycle.STARTING: protocol.RUNNING, lifecycle.CHECKPOINTED: protocol.SUSPENDED}
_ADDRESS = re.compile(r"[0-9a-f:.]{2,45}", re.ASCII | re.IGNORECASE)


class ScriptPlan(NamedTuple):
    """The plan of a START."""

    spec: VmSpec
    job: JobAd
    script: Program
    request: ScriptRequest
    checkpoint: CheckpointStore
    restart: Manifest | None = None
    unusable: Unusable | None = None
    """The reason why an existing checkpoint is not restored."""


class ScriptMachine(ManagedMachine):
    """A VM, which the script knows by its key."""

    def __init__(self, plan: ScriptPlan, resources: Resources, deadlines: Deadlines, log: Logger) -> None:
        super().__init__(plan.spec.name, resources, deadlines, log)
        self.spec = plan.spec
        self.request = plan.request
        """The request of the start; every later request is derived from it."""
        if self.spec.checkpoint:
            self.no_checkpoint = ""
        self._script = plan.script
        self.store: CheckpointStore = plan.checkpoint
        self._job = plan.job
        self.usage = Usage(plan.restart.cpu_seconds if plan.restart else 0)
        self._pid = 0
        self._asks_pid = True
        self._last_state = protocol.RUNNING
        """The state that the script reported last."""
        self._saved: Answer | None = None
        """The script's answer to the last CHECKPOINT."""

    def powered_on(self, answer: Answer) -> None:
        """Store the id and the pid of the script's answer to the start."""
        self.request = self.request._replace(id=answer.get("id"))
        self._pid = answer.get("pid", 0)

    def change(self, spec: VmSpec, job: JobAd) -> None:
        """Adopt the spec and the ad with which the script runs the VM."""
        self.spec, self._job = spec, job
        self.request = self.request._replace(memory_mib=spec.memory_mib, vcpus=spec.vcpus)

    def pid(self) -> int:
        if self.state not in (lifecycle.RUNNING, lifecycle.SOFT_SUSPENDED):
            return 0
        if not self._pid and self._asks_pid:
            answer = self._call(protocol.PID)
            self._asks_pid = answer.outcome == protocol.DONE
            self._pid = answer.get("pid", 0)
        return self._pid if self._is_the_users() else 0

    def look(self) -> Status:
        answer = self._need(protocol.STATUS)
        state = self._last_state = answer.get("state")
        if state == protocol.STOPPED:
            return Status(lifecycle.STOPPED)
        self._pid = answer.get("pid", 0) or self._pid
        told = answer.get("cpu_seconds", None)
        if told is None and self._is_the_users():
            told = proc.cpu_seconds(self._pid)
        memory = self.spec.memory_mib << 10
        mac, ip = answer.get("mac").lower() or self.spec.mac, answer.get("ip")
        return Status(
            _STATES[state],
            cpu_seconds=self.usage.read(told),
            vcpus=self.spec.vcpus,
            memory_kib=answer.get("memory_kib", 0) or memory,
            max_memory_kib=answer.get("max_memory_kib", 0) or memory,
            # They go into a line of the protocol, and may come from the guest itself.
            mac=mac if re.fullmatch(MAC, mac) else "",
            ip=ip if _ADDRESS.fullmatch(ip) else "",
        )

    def look_at_saved(self) -> None:
        if self._need(protocol.STATUS).get("state") == protocol.STOPPED:
            raise self._saved_is_lost()

    def ask_to_power_off(self) -> None:
        if self.state is lifecycle.SOFT_SUSPENDED:
            self._do(protocol.UNPAUSE, errors.VM_INVALID_OPERATION)
        self._do(protocol.STOP, errors.VM_INVALID_OPERATION)

    def wait_until_off(self, seconds: float) -> bool:
        is_over = wait.until(lambda: self.overruled or self._seen() == protocol.STOPPED, seconds, POLL)
        return is_over and not self.overruled

    def end_guest(self) -> None:
        """Destroy the VM, and query its state to make sure: the script's answer alone is not enough."""
        self._need(protocol.DESTROY)
        answer = self._call(protocol.STATUS)
        left = answer.get("state")
        if answer.outcome == protocol.DONE and left != protocol.STOPPED:
            problem = f"{SETTING} ({self._script.path}) says that it has destroyed {self.name}, and that it is {left}."
            raise self._script.fault(problem, "end the VM by hand, and see why the script did not.")

    def clear_up(self) -> None:
        self.end_guest()

    def before_release(self) -> None:
        if self.state is lifecycle.STARTING and self.request.restart:
            self.put_back()

    def pause(self) -> None:
        self._do(protocol.PAUSE, errors.VM_NO_SUPPORT_SUSPEND)

    def unpause(self) -> None:
        # A VM that runs by our records may have been suspended by others.
        suspended = self._last_state == protocol.SUSPENDED
        self._do(protocol.RESUME if suspended else protocol.UNPAUSE, errors.VM_INVALID_OPERATION)

    def save(self, operation: str) -> None:
        action, word = protocol.SUSPEND, errors.VM_NO_SUPPORT_SUSPEND
        if operation == lifecycle.CHECKPOINT:
            action, word = protocol.CHECKPOINT, errors.VM_NO_SUPPORT_CHECKPOINT
        try:
            self._saved = self._do(action, word)
        except FAILED as fault:
            if self._seen() != protocol.SUSPENDED:
                raise
            self.log(f"{self.name} is saved, although {fault.problem}")
            self._saved = None
        self.usage.carry()

    def keep_saved(self) -> None:
        self._saved = self._do(protocol.CHECKPOINT, errors.VM_NO_SUPPORT_CHECKPOINT)

    def write_manifest(self) -> None:
        files, note = (self._saved.get("files", []), self._saved.get("note")) if self._saved else ([], "")
        if not files:
            problem = f"The checkpoint of {self.name} cannot be completed: the script names no files of it."
            raise errors.MachineFault(problem, _NAMED_FILES, errors.CANNOT_SAVE)
        facts = {"hypervisor": self.request.hypervisor, "note": note}
        now = self.store.now(self.spec, facts, self.usage.seconds)
        self.store.write(now, [FileRef(STATE, name) for name in dict.fromkeys(files)], _NAMED_FILES)

    def restore(self, before_it_runs: Callable[[], None]) -> None:
        before_it_runs()
        try:
            self._do(protocol.RESUME, errors.VM_INVALID_OPERATION)
        except errors.Fault as fault:
            seen = self._seen()
            if seen == protocol.STOPPED:
                raise self._saved_is_lost() from fault
            if seen != protocol.RUNNING:
                raise
            self.log(f"{self.name} runs again, although {fault.problem}")

    def _call(self, action: str) -> Answer:
        long = action in (protocol.SUSPEND, protocol.RESUME, protocol.CHECKPOINT)
        request = self.request._replace(action=action, state=_WORDS[self.state], restart=False)
        if action == protocol.DESTROY:
            starting = self.state is lifecycle.STARTING
            # A start that was interrupted may not have put its uuid on the VM yet.
            uuid = "" if starting else request.uuid
            keep = self.request.restart if starting else self.state is lifecycle.CHECKPOINTED
            request = request._replace(uuid=uuid, keep=keep)
        return self._script.call(request, self._job, self.deadlines.memory if long else self.deadlines.usual)

    def _do(self, action: str, word: str) -> Answer:
        """Make a call that scripts need not implement, and may refuse. Raises `errors.ClientFault` with `word`."""
        gone = errors.ClientFault(errors.VM_NOT_FOUND, f"{self.name} is gone.")  # it may have powered itself off
        try:
            answer = self._call(action)
        except FAILED as fault:
            if self._seen() == protocol.STOPPED:
                raise gone from fault
            raise
        if answer.outcome == protocol.REJECTED and self._seen() == protocol.STOPPED:
            raise gone
        if answer.outcome != protocol.DONE:
            reason = answer.reason or f"{action} is {answer.outcome}"
            problem = f"{self.name}: the script of {self.request.hypervisor} cannot {action} it: {reason}."
            raise errors.ClientFault(word, problem)
        return answer

    def _need(self, action: str) -> Answer:
        """Make a call that every script must implement."""
        answer = self._call(action)
        if answer.outcome != protocol.DONE:
            raise self._script.refused(answer, action)
        return answer

    def _seen(self) -> str:
        """Return the state that the script reports; empty on an error."""
        try:
            return str(self._need(protocol.STATUS).get("state"))
        except errors.Fault:
            return ""

    def _saved_is_lost(self) -> errors.Fault:
        problem = f"{self.name} was suspended, and {SETTING} ({self._script.path}) says that there is no such VM now."
        return self.report_lost(problem, "see who has removed it; the job has to run again.")

    def _is_the_users(self) -> bool:
        """Return True if the pid is a process of the script's user: HTCondor measures it and may signal it."""
        uid = proc.uid(self._pid)
        return self._pid > 1 and uid is not None and self._script.user.uid in (0, uid)
