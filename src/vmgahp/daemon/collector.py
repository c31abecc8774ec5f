"""A collector of the figures and events of VMs, with two sinks: the metrics file and the job ad.

The file (`vmgahp.metrics.file`) gets a line for each operation, and the VM's figures soon after an operation, every
VM_METRICS_INTERVAL seconds, and, with a timeout of half a second, before an operation that ends its run. One thread
reads them, and runs only while there is something to read; the server's main thread has the timer. A hypervisor that
hangs blocks this thread alone, and no other one is started.

The job ad is told through the starter, at moments when it listens. It does not while it waits for the answer to
anything but a STATUS, nor in the half minute after a START. So the first STATUS begins the reports, and each STATUS
begins one round at most, in a thread of its own with a short timeout; values not taken by then are sent in the next
round. Without changes no thread is started. Figures alone begin a round only as often as a starter passes them on.
Attributes about the end of a VM are sent before the answer to the STATUS that detects it (`vmgahp.drivers.resources`).
"""

import os
import threading
import time

from vmgahp import errors, lifecycle
from vmgahp.config import Settings
from vmgahp.drivers.base import Machine
from vmgahp.host import proc, wait
from vmgahp.host.job_user import Identity
from vmgahp.job import chirp, published
from vmgahp.log import Log
from vmgahp.metrics import Metrics, Status, Totals
from vmgahp.metrics.file import MetricsFile
from vmgahp.protocol.session import Call

Outcome = Status | int | errors.Fault | None

BEFORE_WAIT = 0.5
"""The seconds that an operation which ends a run waits for the run's last figures."""

LARGEST_FILE = 16 << 20
"""Bytes of the samples of a VM's file of metrics."""

LONGEST_TEXT = 1000
"""The most characters of a reason or an error in the file."""

ROUND_SECONDS = 8.0
"""The timeout of one round in seconds. A starter that waits for the answer to a STATUS does not listen for 3 s."""

FIGURES_SECONDS = 240.0
"""The seconds between two rounds for figures alone: a starter passes them on every STARTER_UPDATE_INTERVAL, 300 s."""

MOST_FAILURES = 5
"""The number of consecutive failed rounds after which there are no more."""

EVENTS = {operation: operation.lower() for _, operation in lifecycle.TRANSITIONS} | {lifecycle.SOFT_SUSPEND: "pause"}
"""The event in the file's line of each operation."""

ENDS_A_RUN = (lifecycle.STOP, lifecycle.SUSPEND, lifecycle.CHECKPOINT)
SAVES = (lifecycle.SUSPEND, lifecycle.CHECKPOINT)


class _Vm:
    """One VM, with the state of both sinks."""

    def __init__(self, machine: Machine, directory: str, file: MetricsFile | None) -> None:
        self.machine = machine
        self.directory = directory
        self.file = file
        self.totals = Totals(file.last_sample() if file else None)
        self.due = 0.0
        self.readings = 0
        self.last: Metrics | None = None
        """The figures of the last line, to detect new ones without their time, since a clock can be set back."""
        self.failing = ""
        self.report_due = 0.0
        self.failed_rounds = 0
        self.checkpoints = 0

    def write(self, line: dict[str, object]) -> None:
        """Write an event into the file."""
        if self.file:
            self.file.add({"time": round(time.time(), 3)} | line, event=True)


class Collector:
    """The collector of one server's VMs."""

    def __init__(self, settings: Settings, identity: Identity, log: Log) -> None:
        try:
            self._interval = float(settings.integer("VM_METRICS_INTERVAL"))
        except errors.MachineFault as fault:  # no job may fail for that
            log.always(fault.render())
            self._interval = 0.0
        self._identity = identity
        self._log = log
        self._vms: dict[int, _Vm] = {}
        self._changed = threading.Condition()
        self._wanted: dict[_Vm, None] = {}
        """The VMs that the thread reads next."""
        self._thread: threading.Thread | None = None
        self.due: float | None = None
        """The time at which `look` must be called, by the monotonic clock; None for never."""

    # Called by the main thread

    def look(self, now: float) -> None:
        """Have the VMs read that are due."""
        with self._changed:
            self._want([vm for vm in self._vms.values() if vm.due <= now], now)

    # Called by the workers

    def before(self, call: Call) -> None:
        """Wait briefly for a last reading before an operation that ends a run."""
        if call.operation not in ENDS_A_RUN:
            return
        with self._changed:
            vm = self._vms.get(call.vm.id)
            if vm is None:
                return
            goal = vm.readings + 1
            self._want([vm], time.monotonic())
            if self._thread is not None:
                self._changed.wait_for(lambda: vm.readings >= goal, BEFORE_WAIT)

    def done(self, call: Call, outcome: Outcome, began: float, machine: Machine | None) -> None:
        """Record the outcome of an operation since `began`, by the monotonic clock. Raises nothing."""
        try:
            if call.operation == lifecycle.START and machine is not None and not isinstance(outcome, errors.Fault):
                self._add(call, machine)
            vm = self._vms.get(call.vm.id)
            if vm is None:
                return
            if call.operation in EVENTS:
                self._note(vm, call, outcome, time.monotonic() - began)
            elif isinstance(outcome, Status) and outcome.state == lifecycle.STOPPED:
                self._end(vm, {"event": "end", "state": lifecycle.STOPPED, "reason": "the guest is gone"})
            elif isinstance(outcome, Status):
                self._publish_status(vm, outcome)
        except Exception as error:  # noqa: BLE001 - a bug here must not leave a request unanswered
            self._log.always(f"{call.operation} is not in the metrics: {type(error).__name__}: {error}")

    def end(self, machine: Machine, reason: str) -> None:
        """Record the end of a VM that ends with the server."""
        for vm in list(self._vms.values()):
            if vm.machine is machine:
                self._end(vm, {"event": "end", "state": lifecycle.STOPPED, "reason": reason[:LONGEST_TEXT]})

    # The VMs

    def _add(self, call: Call, machine: Machine) -> None:
        assert call.job is not None
        directory, file = call.job.working_dir(), None
        if self._interval:
            file = MetricsFile(self._identity, directory, LARGEST_FILE, self._log.always)
        vm = _Vm(machine, directory, file)
        of_program = {"event": "program", "state": lifecycle.RUNNING}
        machine.updates.on_stage = lambda stage: vm.write({**of_program, "reason": stage})
        machine.updates.forget(call.job.names("ChirpVM"))
        machine.updates.publish(published.STATE, lifecycle.RUNNING)
        if problem := chirp.missing(directory):
            vm.failed_rounds = MOST_FAILURES
            self._complain(vm, problem)
        with self._changed:
            self._vms[call.vm.id] = vm

    def _note(self, vm: _Vm, call: Call, outcome: Outcome, seconds: float) -> None:
        """Record an operation that changes a VM's state, or was to do so."""
        line: dict[str, object] = {"event": EVENTS[call.operation], "seconds": round(seconds, 3)}
        if call.operation == lifecycle.START:
            line |= {"name": vm.machine.name, "pid": os.getpid()}
        updates, size = vm.machine.updates, 0
        if isinstance(outcome, errors.Fault):
            line["error"] = outcome.render()[:LONGEST_TEXT]
            if call.operation != lifecycle.STOP:
                updates.publish(published.ERROR, outcome.sentence)
        else:
            line["state"] = state = lifecycle.TRANSITIONS[call.state, call.operation]
            if call.operation == lifecycle.STOP:
                return self._end(vm, line)
            if call.operation in SAVES and (size := vm.machine.saved_bytes()):
                line["bytes"] = size
            updates.publish(published.STATE, state)
            if call.operation == lifecycle.CHECKPOINT:
                vm.checkpoints += 1
                updates.publish(published.CHECKPOINTS, vm.checkpoints)
                updates.publish(published.CHECKPOINT_TIME, int(time.time()))
                updates.publish(published.CHECKPOINT_SECONDS, round(seconds, 1))
                updates.publish(published.CHECKPOINT_BYTES, size or None)
        vm.write(line)
        with self._changed:
            self._want([vm], time.monotonic())
        return None

    def _end(self, vm: _Vm, line: dict[str, object]) -> None:
        vm.write(line)
        with self._changed:
            self._vms = {number: other for number, other in self._vms.items() if other is not vm}
            self._wanted.pop(vm, None)
            self._set_due()
            self._changed.notify_all()
        if vm.file:
            vm.file.close()

    # The file

    def _want(self, ready: list[_Vm], now: float) -> None:
        """Have the thread read these VMs; if it cannot be started, retry when they are due again."""
        ready = [vm for vm in ready if vm.file]
        for vm in ready:
            vm.due = now + self._interval
        self._wanted |= dict.fromkeys(ready)
        self._set_due()
        if self._thread is None and self._wanted:
            try:
                self._thread = wait.start_thread("metrics", self._run)
            except errors.MachineFault as fault:
                self._log.always(f"no figures of VMs are kept for now: {fault.problem}")

    def _set_due(self) -> None:
        self.due = min((vm.due for vm in self._vms.values() if vm.file), default=None)

    def _run(self) -> None:
        while True:
            with self._changed:
                ready = list(self._wanted)
                self._wanted.clear()
                if not ready:
                    self._thread = None
                    return
            for vm in ready:
                self._read(vm)
            with self._changed:
                for vm in ready:
                    vm.readings += 1
                self._changed.notify_all()

    def _read(self, vm: _Vm) -> None:
        """Write a line of one VM's figures, unless there are none or they have not changed."""
        try:
            metrics = vm.machine.metrics()
        except Exception as error:  # noqa: BLE001 - a bug in a driver may only cost figures
            why = error.problem if isinstance(error, errors.Fault) else f"an unexpected {type(error).__name__}: {error}"
            if vm.failing != why:
                vm.failing = why
                self._log.debug(f"no figures of {vm.machine.name}: {why}")
            return
        vm.failing = ""
        if metrics is not None and metrics != vm.last and vm.file:
            vm.last = metrics
            vm.file.add(vm.totals.sample(metrics))

    # The job ad

    def _publish_status(self, vm: _Vm, status: Status) -> None:
        """Publish what a STATUS has found, and begin a round if there is something to tell."""
        updates = vm.machine.updates
        if status.state in (lifecycle.RUNNING, lifecycle.SOFT_SUSPENDED):
            updates.publish(published.STATE, status.state)
            if status.mac:
                updates.publish(published.MAC, status.mac)
            if addresses := vm.machine.addresses() or (status.ip and (status.ip,)):
                updates.publish(published.ADDRESSES, ", ".join(addresses))
        now = time.monotonic()
        if vm.failed_rounds >= MOST_FAILURES or not (updates.is_urgent() or now >= vm.report_due):
            return
        process = vm.machine.process()
        if process and (figures := proc.memory_kib(process)):
            updates.publish(published.MEMORY, figures[0])
            updates.publish(published.MEMORY_PEAK, figures[1])
            updates.publish(published.CPU, round(proc.cpu_seconds(process), 1))
        if not updates.unsaid() or not updates.turn.acquire(False):
            return  # nothing is new, or the last round still runs
        vm.report_due = now + FIGURES_SECONDS
        try:
            wait.start_thread("the starter", self._speak, vm)
        except errors.MachineFault as fault:
            updates.turn.release()
            self._complain(vm, fault.problem)

    def _speak(self, vm: _Vm) -> None:
        try:
            problem = chirp.tell(vm.machine.updates, vm.directory, self._identity, ROUND_SECONDS)
            vm.failed_rounds = 0
        except chirp.Unheard as error:
            vm.failed_rounds += 1
            problem = str(error)
        except Exception as error:  # noqa: BLE001 - a bug may only cost reports
            vm.failed_rounds = MOST_FAILURES
            problem = f"an unexpected {type(error).__name__}: {error}"
        finally:
            vm.machine.updates.turn.release()
        self._complain(vm, problem)

    def _complain(self, vm: _Vm, problem: str) -> None:
        if vm.machine.updates.is_new(problem):
            self._log.always(f"{vm.machine.name}: {problem}")
