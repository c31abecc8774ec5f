"""One VM that a script manages, as the server sees it."""

import re
import time

from vmgahp import errors, lifecycle
from vmgahp.drivers.base import Deadlines, Logger, Machine
from vmgahp.drivers.resources import Resources
from vmgahp.drivers.script import protocol
from vmgahp.drivers.script.checkpoint import ScriptCheckpoints
from vmgahp.drivers.script.program import SETTING, Program
from vmgahp.drivers.script.protocol import Answer, ScriptRequest
from vmgahp.drivers.script.spec import ScriptSpec
from vmgahp.host import proc
from vmgahp.job.ad import JobAd
from vmgahp.job.exit_code import DESTROYED
from vmgahp.metrics import Status

POLL = 0.5
"""Seconds between two looks at a guest that was asked to power off."""

_STATES = {
    protocol.RUNNING: lifecycle.RUNNING,
    protocol.PAUSED: lifecycle.SOFT_SUSPENDED,
    protocol.SUSPENDED: lifecycle.SUSPENDED,
    protocol.STOPPED: lifecycle.STOPPED,
}
_MAC = re.compile(r"[0-9a-f]{2}(?::[0-9a-f]{2}){5}", re.ASCII)
_ADDRESS = re.compile(r"[0-9a-f:.]{2,45}", re.ASCII | re.IGNORECASE)


class ScriptMachine(Machine):
    """A VM by its key."""

    def __init__(
        self,
        spec: ScriptSpec,
        script: Program,
        checkpoints: ScriptCheckpoints,
        request: ScriptRequest,
        job: JobAd,
        deadlines: Deadlines,
        log: Logger,
    ) -> None:
        self.name = spec.name
        self.spec = spec
        self.request = request
        """The start; every later request is like it."""
        self.resources = Resources(log)
        self.cpu_before = 0.0
        """Seconds of CPU that the guest had used before its checkpoint."""
        self._script = script
        self._checkpoints = checkpoints
        self._job = job
        self._deadlines = deadlines
        self._log = log
        self._state = protocol.RUNNING
        self._pid = 0
        self._asks_pid = True
        self._cpu_seconds = 0.0
        self._keep = False
        self._gone = False

    # What the driver says

    def started(self, answer: Answer) -> None:
        """What the script answered to the start."""
        self.request = self.request._replace(id=answer.text("id"))
        self._pid = answer.integer("pid")

    def change(self, spec: ScriptSpec, job: JobAd) -> None:
        """The script runs the VM like this instead."""
        self.spec, self._job = spec, job
        self.request = self.request._replace(memory_mib=spec.memory_mib, vcpus=spec.vcpus)

    def undo(self) -> None:
        """The start has failed: destroy whatever has the key, but not the checkpoint that it was to restore.

        A start that was cut off may not have come to putting its uuid on the VM.
        """
        self._keep = self.request.restart
        self.request = self.request._replace(uuid="")
        self.destroy()

    # What the server asks

    def status(self) -> Status:
        if self._gone:
            return Status(lifecycle.STOPPED)
        answer = self._ask(protocol.STATUS, self._deadlines.usual)
        if answer.outcome != protocol.DONE:
            raise refused(answer, self._script, protocol.STATUS)
        self._state = answer.text("state")
        if self._state == protocol.STOPPED:
            return Status(lifecycle.STOPPED)
        self._pid = answer.integer("pid") or self._pid
        told = answer.number("cpu_seconds")
        self._cpu_seconds = self.cpu_before + (self._process_seconds() if told is None else told)
        memory = self.spec.memory_mib << 10
        mac, ip = answer.text("mac").lower() or self.spec.mac, answer.text("ip")
        return Status(
            _STATES[self._state],
            cpu_seconds=self._cpu_seconds,
            vcpus=self.spec.vcpus,
            memory_kib=answer.integer("memory_kib") or memory,
            max_memory_kib=answer.integer("max_memory_kib") or memory,
            # They go into a line of the protocol, and may be the guest's own word.
            mac=mac if _MAC.fullmatch(mac) else "",
            ip=ip if _ADDRESS.fullmatch(ip) else "",
        )

    def cpu_seconds(self) -> float:
        """What the guest had used when it was last looked at."""
        return self._cpu_seconds

    def pid(self) -> int:
        if self._gone or self._state in (protocol.SUSPENDED, protocol.STOPPED):
            return 0
        if not self._pid and self._asks_pid:
            answer = self._ask(protocol.PID, self._deadlines.usual)
            self._asks_pid = answer.outcome == protocol.DONE
            self._pid = answer.integer("pid")
        return self._pid if self._is_the_users(self._pid) else 0

    def stop(self) -> None:
        self.resources.to_be_stopped()
        if not self._gone and self._state not in (protocol.SUSPENDED, protocol.STOPPED):
            try:
                if self._state == protocol.PAUSED:
                    self._do(protocol.UNPAUSE, self._deadlines.usual, errors.VM_INVALID_OPERATION)
                end = time.monotonic() + self._deadlines.stop
                answer = self._ask(protocol.STOP, self._deadlines.usual)
                if answer.outcome == protocol.DONE:
                    while self.status().state != lifecycle.STOPPED and time.monotonic() < end:
                        time.sleep(min(POLL, max(0.0, end - time.monotonic())))
                else:
                    self._log(f"{self.name} cannot be asked to power off: {answer.reason or answer.outcome}")
            except errors.Fault as fault:
                self._log(f"{self.name} cannot be asked to power off: {fault.problem}")
        self.destroy()

    def destroy(self) -> None:
        self.resources.ended(DESTROYED)
        if not self._gone:
            self._end()
            self._gone = True
        self.release()

    def release(self) -> None:
        if not self.resources.begin_release():
            return
        if not self._gone:
            try:
                self._end()
            except errors.Fault as fault:
                self._log(f"{self.name} is gone, and what is left of it cannot be cleared: {fault.problem}")
            self._gone = True
        self.resources.release(kept=self._keep)

    def soft_suspend(self) -> None:
        self._do(protocol.PAUSE, self._deadlines.usual, errors.VM_NO_SUPPORT_SUSPEND)
        self._state = protocol.PAUSED

    def suspend(self) -> None:
        self._do(protocol.SUSPEND, self._deadlines.memory, errors.VM_NO_SUPPORT_SUSPEND)
        self._state = protocol.SUSPENDED

    def resume(self, state: str) -> None:
        if state == lifecycle.SOFT_SUSPENDED:
            self._do(protocol.UNPAUSE, self._deadlines.usual, errors.VM_INVALID_OPERATION)
        else:
            # From here on the disks change, and what is written down of them is wrong.
            self._checkpoints.discard()
            self._keep = False
            self._do(protocol.RESUME, self._deadlines.memory, errors.VM_INVALID_OPERATION)
        self._state = protocol.RUNNING

    def checkpoint(self) -> None:
        if not self.spec.checkpoint and not self._gone:
            raise errors.ClientFault(
                errors.VM_NO_SUPPORT_CHECKPOINT,
                f"{self.name} cannot be checkpointed: the job does not ask for it with vm_checkpoint.",
            )
        answer = self._do(protocol.CHECKPOINT, self._deadlines.memory, errors.VM_NO_SUPPORT_CHECKPOINT)
        self._state = protocol.SUSPENDED
        try:
            self._checkpoints.write(
                self.spec, self.request.hypervisor, self._cpu_seconds, answer.words("files"), answer.text("note")
            )
        except errors.Fault:
            try:
                self.resume(lifecycle.SUSPENDED)
            except errors.Fault as fault:
                self._log(f"{self.name} stays suspended after a checkpoint that failed: {fault.problem}")
            raise
        self._keep = True

    # What helps

    def _ask(self, action: str, seconds: float) -> Answer:
        request = self.request._replace(
            action=action, state=self._state, keep=self._keep and action == protocol.DESTROY, restart=False
        )
        return self._script.call(request, self._job, seconds)

    def _do(self, action: str, seconds: float, word: str) -> Answer:
        """What a script need not know how to do, and may refuse. Raises `errors.ClientFault` with the word."""
        if self._gone:
            raise self._not_found()
        try:
            answer = self._ask(action, seconds)
        except errors.MachineFault as fault:
            if self._has_ended():
                raise self._not_found() from fault
            raise
        if answer.outcome == protocol.REJECTED and self._has_ended():
            raise self._not_found()
        if answer.outcome != protocol.DONE:
            reason = answer.reason or f"{action} is {answer.outcome}"
            raise errors.ClientFault(
                word, f"{self.name}: the script of {self.request.hypervisor} cannot {action} it: {reason}."
            )
        return answer

    def _has_ended(self) -> bool:
        """Whether the guest has powered itself off meanwhile, which is nobody's fault."""
        try:
            return self.status().state == lifecycle.STOPPED
        except errors.Fault:
            return False

    def _not_found(self) -> errors.ClientFault:
        return errors.ClientFault(errors.VM_NOT_FOUND, f"{self.name} is gone.")

    def _end(self) -> None:
        """Destroy the VM and make sure of it: the script's word alone is not enough."""
        answer = self._ask(protocol.DESTROY, self._deadlines.usual)
        if answer.outcome != protocol.DONE:
            raise refused(answer, self._script, protocol.DESTROY)
        answer = self._ask(protocol.STATUS, self._deadlines.usual)
        left = answer.text("state")
        if answer.outcome == protocol.DONE and left != protocol.STOPPED:
            raise errors.MachineFault(
                f"{SETTING} ({self._script.path}) says that it has destroyed {self.name}, and that it is {left}.",
                "end the VM by hand, and see why the script did not.",
            )

    def _is_the_users(self, pid: int) -> bool:
        """Whether there is such a process, and of the script's user: HTCondor measures and may signal it."""
        uid = proc.uid(pid)
        return pid > 1 and uid is not None and self._script.user.uid in (0, uid)

    def _process_seconds(self) -> float:
        """The CPU time of the VM's process, for a script that does not count it itself."""
        return proc.cpu_seconds(self._pid) if self._is_the_users(self._pid) else 0.0


def refused(answer: Answer, script: Program, action: str) -> errors.MachineFault:
    """The fault for an outcome that no job can be blamed for."""
    reason = f": {answer.reason.rstrip('.')}" if answer.reason else ""
    return errors.MachineFault(
        f"{SETTING} ({script.path}) answers {action} with {answer.outcome}{reason}.",
        f"let the script implement {', '.join(protocol.NEEDED)}, and reject jobs at their start only.",
    )
