"""A sampler of the metrics of a server's VMs, in a thread of its own that no request waits for.

A VM is read soon after an operation, every VM_METRICS_INTERVAL seconds, and, with a timeout of half a second, before
an operation that ends its run. The thread runs only while there is something to read; the server's main thread has
the timer. A hypervisor that hangs blocks this thread alone, and no other one is started.
"""

import os
import threading
import time

from vmgahp import errors, lifecycle
from vmgahp.config import Settings
from vmgahp.drivers.base import Machine
from vmgahp.host import threads
from vmgahp.host.job_user import Identity
from vmgahp.log import Log
from vmgahp.metrics import Metrics, Status, Totals
from vmgahp.metrics.file import MetricsFile
from vmgahp.protocol.calls import Call

Outcome = Status | int | errors.Fault | None


BEFORE_WAIT = 0.5
"""The seconds that an operation which ends a run waits for the run's last figures."""

LARGEST_FILE = 16 << 20
"""Bytes of the samples of a VM's file of metrics."""

LONGEST_TEXT = 1000
"""The most characters of a reason or an error."""

EVENTS = {
    lifecycle.START: "start",
    lifecycle.STOP: "stop",
    lifecycle.SOFT_SUSPEND: "pause",
    lifecycle.SUSPEND: "suspend",
    lifecycle.RESUME: "resume",
    lifecycle.CHECKPOINT: "checkpoint",
}
"""The event in the line of each operation."""

ENDS_A_RUN = (lifecycle.STOP, lifecycle.SUSPEND, lifecycle.CHECKPOINT)
SAVES = (lifecycle.SUSPEND, lifecycle.CHECKPOINT)


class _Watched:
    """One VM whose figures are recorded."""

    def __init__(self, machine: Machine, file: MetricsFile) -> None:
        self.machine = machine
        self.file = file
        self.totals = Totals(file.last_sample())
        self.due = 0.0
        """The time of its next reading, by the monotonic clock."""
        self.readings = 0
        """The number of readings."""
        self.last: Metrics | None = None
        """The figures of the last line, to detect new ones without their time, since a clock can be set back."""
        self.failing = ""


class Sampler:
    """The sampler of one server's VMs, which also records their operations."""

    def __init__(self, settings: Settings, identity: Identity, log: Log) -> None:
        self._interval = float(settings.integer("VM_METRICS_INTERVAL"))
        self._identity = identity
        self._log = log
        self._vms: dict[int, _Watched] = {}
        self._changed = threading.Condition()
        self._wanted: dict[_Watched, None] = {}
        """The VMs that the thread reads next."""
        self._thread: threading.Thread | None = None
        self.due: float | None = None
        """The time at which `look` must be called, by the monotonic clock; None for never."""

    # Called by the main thread

    def look(self, now: float) -> None:
        """Have the VMs read that are due."""
        with self._changed:
            self._want([watched for watched in self._vms.values() if watched.due <= now], now)

    # Called by the workers

    def before(self, call: Call) -> None:
        """Wait briefly for a last reading before an operation that ends a run."""
        if call.operation not in ENDS_A_RUN:
            return
        with self._changed:
            watched = self._vms.get(call.vm.id)
            if watched is None:
                return
            goal = watched.readings + 1
            self._want([watched], time.monotonic())
            if self._thread is None:
                return
            self._changed.wait_for(lambda: watched.readings >= goal, BEFORE_WAIT)

    def done(self, call: Call, outcome: Outcome, began: float, machine: Machine | None) -> None:
        """Record the outcome of an operation that began at `began`, by the monotonic clock.

        Raises nothing: the client waits for its answer.
        """
        try:
            self._note(call, outcome, began, machine)
        except Exception as error:  # noqa: BLE001 - a bug here must not leave a request unanswered
            self._log.always(f"{call.operation} is not in the metrics: {type(error).__name__}: {error}")

    def _note(self, call: Call, outcome: Outcome, began: float, machine: Machine | None) -> None:
        if call.operation == lifecycle.START and machine is not None and not isinstance(outcome, errors.Fault):
            self._add(call, machine)
        watched = self._vms.get(call.vm.id)
        if watched is None:
            return
        if call.operation == lifecycle.STATUS:
            if not isinstance(outcome, errors.Fault | int | None) and outcome.state == lifecycle.STOPPED:
                self._end(watched, {"event": "end", "state": lifecycle.STOPPED, "reason": "the guest is gone"})
            return
        if call.operation not in EVENTS:
            return
        line: dict[str, object] = {"event": EVENTS[call.operation], "seconds": round(time.monotonic() - began, 3)}
        if call.operation == lifecycle.START:
            line |= {"name": watched.machine.name, "pid": os.getpid()}
        if isinstance(outcome, errors.Fault):
            line["error"] = outcome.render()[:LONGEST_TEXT]
        else:
            line["state"] = lifecycle.TRANSITIONS[call.state, call.operation]
            if call.operation in SAVES and (size := watched.machine.saved_bytes()):
                line["bytes"] = size
        if call.operation == lifecycle.STOP and "error" not in line:
            self._end(watched, line)
            return
        self._write(watched, line)
        with self._changed:
            self._want([watched], time.monotonic())

    def end(self, machine: Machine, reason: str) -> None:
        """Record the end of a VM that ends with the server."""
        for watched in list(self._vms.values()):
            if watched.machine is machine:
                self._end(watched, {"event": "end", "state": lifecycle.STOPPED, "reason": reason[:LONGEST_TEXT]})

    # The VMs

    def _add(self, call: Call, machine: Machine) -> None:
        assert call.job is not None
        file = MetricsFile(self._identity, call.job.working_dir(), LARGEST_FILE, self._log.always)
        with self._changed:
            self._vms[call.vm.id] = _Watched(machine, file)

    def _want(self, ready: list[_Watched], now: float) -> None:
        """Have the thread read these VMs; if it cannot be started, retry when they are due again."""
        for watched in ready:
            watched.due = now + self._interval
        self._wanted |= dict.fromkeys(ready)
        self._set_due()
        if self._thread is None and self._wanted:
            try:
                self._thread = threads.start("metrics", self._run)
            except errors.MachineFault as fault:
                self._log.always(f"no figures of VMs are kept for now: {fault.problem}")

    def _set_due(self) -> None:
        self.due = min((watched.due for watched in self._vms.values()), default=None)

    def _end(self, watched: _Watched, line: dict[str, object]) -> None:
        self._write(watched, line)
        with self._changed:
            self._vms = {number: other for number, other in self._vms.items() if other is not watched}
            self._wanted.pop(watched, None)
            self._set_due()
            self._changed.notify_all()
        watched.file.close()

    @staticmethod
    def _write(watched: _Watched, line: dict[str, object]) -> None:
        watched.file.add({"time": round(time.time(), 3)} | line, event=True)

    # The thread

    def _run(self) -> None:
        while ready := self._next():
            for watched in ready:
                self._read(watched)
            with self._changed:
                for watched in ready:
                    watched.readings += 1
                self._changed.notify_all()

    def _next(self) -> list[_Watched]:
        """Return the VMs to read; with none of them the thread ends."""
        with self._changed:
            ready = list(self._wanted)
            self._wanted.clear()
            if not ready:
                self._thread = None
            return ready

    def _read(self, watched: _Watched) -> None:
        """Write a line of one VM's figures, unless there are none or they have not changed."""
        try:
            metrics = watched.machine.metrics()
        except errors.Fault as fault:
            self._fails(watched, fault.problem)
            return
        except Exception as error:  # noqa: BLE001 - a bug in a driver may only cost figures
            self._fails(watched, f"an unexpected {type(error).__name__}: {error}")
            return
        watched.failing = ""
        if metrics is not None and metrics != watched.last:
            watched.last = metrics
            watched.file.add(watched.totals.sample(metrics))

    def _fails(self, watched: _Watched, why: str) -> None:
        if watched.failing != why:
            watched.failing = why
            self._log.debug(f"no figures of {watched.machine.name}: {why}")
