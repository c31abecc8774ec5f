"""One VM that a script manages, as the server sees it, and its checkpoints.

The script makes the files of a checkpoint and names them, but does not tell which of them are disks.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from vmgahp import errors, lifecycle
from vmgahp.checkpoint.files import FileRef, Unusable
from vmgahp.checkpoint.manifest import STATE, CheckpointKind, Facts, Manifest, text
from vmgahp.checkpoint.store import CANNOT_SAVE, CheckpointStore
from vmgahp.drivers.base import Deadlines, Logger
from vmgahp.drivers.lifecycle import ManagedMachine
from vmgahp.drivers.resources import Resources
from vmgahp.drivers.script import protocol
from vmgahp.drivers.script.program import SETTING, Program
from vmgahp.drivers.script.protocol import Answer, ScriptRequest
from vmgahp.host import proc
from vmgahp.host.job_user import Identity
from vmgahp.job.ad import JobAd
from vmgahp.job.vm_spec import VmSpec
from vmgahp.metrics import Status, Usage
from vmgahp.text import MAC

HINT = (
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


class ScriptCheckpoints(NamedTuple):
    """The checkpoint of one scratch directory: finds it and writes it."""

    identity: Identity
    directory: str
    log: Logger

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore(KIND, self.identity, self.directory, self.log)

    def find(self, spec: VmSpec, hypervisor: str) -> Manifest | None:
        """Return the checkpoint in the scratch directory, or None. Raises `Unusable`."""
        found = self.store.load()
        if found is not None:
            self.store.check(found, self.store.now(spec, {"hypervisor": hypervisor}), map(FileRef.of, found.files))
        return found

    def write(self, spec: VmSpec, facts: Facts, cpu_seconds: float, names: Iterable[str]) -> None:
        """Write the manifest of a VM that is saved. Raises `errors.MachineFault`."""
        refs = [FileRef(STATE, name) for name in dict.fromkeys(names)]
        if not refs:
            problem = f"The checkpoint of {spec.name} cannot be completed: the script names no files of it."
            raise errors.MachineFault(problem, HINT, CANNOT_SAVE)
        self.store.write(self.store.now(spec, facts, cpu_seconds), refs, HINT)


POLL = 0.5
"""Seconds between two queries about a guest that was asked to power off."""

_STATES = {
    protocol.RUNNING: lifecycle.RUNNING,
    protocol.PAUSED: lifecycle.SOFT_SUSPENDED,
    protocol.SUSPENDED: lifecycle.SUSPENDED,
    protocol.STOPPED: lifecycle.STOPPED,
}
_WORDS = {state: word for word, state in _STATES.items()} | {
    lifecycle.STARTING: protocol.RUNNING,
    lifecycle.CHECKPOINTED: protocol.SUSPENDED,
}
_ADDRESS = re.compile(r"[0-9a-f:.]{2,45}", re.ASCII | re.IGNORECASE)


class ScriptPlan(NamedTuple):
    """The plan of a START."""

    spec: VmSpec
    job: JobAd
    script: Program
    request: ScriptRequest
    restart: Manifest | None
    checkpoints: ScriptCheckpoints
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
        self._checkpoints = plan.checkpoints
        self._job = plan.job
        self.usage = Usage(plan.restart.cpu_seconds if plan.restart else 0)
        self._pid = 0
        self._asks_pid = True
        self._last_state = protocol.RUNNING
        """The state that the script reported last."""
        self._saved: Answer | None = None
        """The script's answer to the last CHECKPOINT."""

    # What the driver says

    def powered_on(self, answer: Answer) -> None:
        """Store the id and the pid of the script's answer to the start."""
        self.request = self.request._replace(id=answer.get("id"))
        self._pid = answer.get("pid", 0)

    def change(self, spec: VmSpec, job: JobAd) -> None:
        """Adopt the spec and the ad with which the script runs the VM."""
        self.spec, self._job = spec, job
        self.request = self.request._replace(memory_mib=spec.memory_mib, vcpus=spec.vcpus)

    # What the server asks

    def cpu_seconds(self) -> float:
        """Return the CPU time of the guest at the last STATUS, in seconds."""
        return self.usage.seconds

    def pid(self) -> int:
        if self.state not in (lifecycle.RUNNING, lifecycle.SOFT_SUSPENDED):
            return 0
        if not self._pid and self._asks_pid:
            answer = self._call(protocol.PID)
            self._asks_pid = answer.outcome == protocol.DONE
            self._pid = answer.get("pid", 0)
        return self._pid if self._is_the_users() else 0

    # The life

    def look(self) -> Status:
        answer = self._look()
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
        if self._look().get("state") == protocol.STOPPED:
            raise self._saved_is_lost()

    def ask_to_power_off(self) -> None:
        if self.state is lifecycle.SOFT_SUSPENDED:
            self._do(protocol.UNPAUSE, errors.VM_INVALID_OPERATION)
        self._do(protocol.STOP, errors.VM_INVALID_OPERATION)

    def wait_until_off(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not (gone := self._seen() == protocol.STOPPED) and not self.overruled and time.monotonic() < end:
            time.sleep(min(POLL, max(0.0, end - time.monotonic())))
        return gone

    def end_guest(self) -> None:
        """Destroy the VM, and query its state to make sure: the script's answer alone is not enough."""
        answer = self._call(protocol.DESTROY)
        if answer.outcome != protocol.DONE:
            raise refused(answer, self._script, protocol.DESTROY)
        answer = self._call(protocol.STATUS)
        left = answer.get("state")
        if answer.outcome == protocol.DONE and left != protocol.STOPPED:
            raise errors.MachineFault(
                f"{SETTING} ({self._script.path}) says that it has destroyed {self.name}, and that it is {left}.",
                "end the VM by hand, and see why the script did not.",
            )

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
        except errors.MachineFault as fault:
            if self._seen() != protocol.SUSPENDED:
                raise
            self.log(f"{self.name} is saved, although {fault.problem}")
            self._saved = None
        self.usage.carry()

    def keep_saved(self) -> None:
        self._saved = self._do(protocol.CHECKPOINT, errors.VM_NO_SUPPORT_CHECKPOINT)

    def write_manifest(self) -> None:
        made = self._saved
        files, note = (made.get("files", []), made.get("note")) if made else ([], "")
        facts = {"hypervisor": self.request.hypervisor, "note": note}
        self._checkpoints.write(self.spec, facts, self.usage.seconds, files)

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

    def set_aside(self) -> None:
        self._checkpoints.store.begin_restart()

    def put_back(self) -> None:
        self._checkpoints.store.put_back()

    def forget_saved(self) -> None:
        self._checkpoints.store.discard()

    # What helps

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
        try:
            answer = self._call(action)
        except errors.MachineFault as fault:
            if self._seen() == protocol.STOPPED:
                raise self._not_found() from fault
            raise
        if answer.outcome == protocol.REJECTED and self._seen() == protocol.STOPPED:
            raise self._not_found()
        if answer.outcome != protocol.DONE:
            reason = answer.reason or f"{action} is {answer.outcome}"
            raise errors.ClientFault(
                word, f"{self.name}: the script of {self.request.hypervisor} cannot {action} it: {reason}."
            )
        return answer

    def _look(self) -> Answer:
        answer = self._call(protocol.STATUS)
        if answer.outcome != protocol.DONE:
            raise refused(answer, self._script, protocol.STATUS)
        return answer

    def _seen(self) -> str:
        """Return the state that the script reports; empty on an error."""
        try:
            return str(self._look().get("state"))
        except errors.Fault:
            return ""

    def _not_found(self) -> errors.ClientFault:
        """Return the fault for a guest that has powered itself off meanwhile, which is not an error of anyone's."""
        return errors.ClientFault(errors.VM_NOT_FOUND, f"{self.name} is gone.")

    def _saved_is_lost(self) -> errors.Fault:
        return self.report_lost(
            f"{self.name} was suspended, and {SETTING} ({self._script.path}) says that there is no such VM any more.",
            "see who has removed it; the job has to run again.",
        )

    def _is_the_users(self) -> bool:
        """Return True if the pid is a process of the script's user: HTCondor measures it and may signal it."""
        uid = proc.uid(self._pid)
        return self._pid > 1 and uid is not None and self._script.user.uid in (0, uid)


def refused(answer: Answer, script: Program, action: str) -> errors.MachineFault:
    """Return the machine's fault for an outcome that is not caused by the job."""
    reason = f": {answer.reason.rstrip('.')}" if answer.reason else ""
    return errors.MachineFault(
        f"{SETTING} ({script.path}) answers {action} with {answer.outcome}{reason}.",
        f"let the script implement {', '.join(protocol.NEEDED)}, and reject jobs at their start only.",
    )
