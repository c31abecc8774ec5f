"""A hypervisor that exists only in memory: for the tests of the server, and to try the protocol by hand.

It takes its cues from the job ad: ``Simulated_Fault = "job"|"machine"|"bug"`` makes the START fail,
``Simulated_<OPERATION>_Gate = "path"`` makes an operation wait until the file `path` exists (a test opens
the gate when it has seen enough), ``Simulated_Lifetime = n`` ends the guest at its n-th STATUS.
"""

import os
import threading

from vmgahp import errors, vm
from vmgahp.drivers.base import Driver, Machine, Report, Survey
from vmgahp.findings import OK, Finding

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vmgahp.job_ad import JobAd

GATE_DEADLINE = 60.0
"""Seconds after which a gate opens by itself, so that a broken test ends."""

GATE_INTERVAL = 0.01


class SimulatedMachine(Machine):
    def __init__(self, job: "JobAd", machines: dict[str, "SimulatedMachine"]) -> None:
        self.name = job.vm_name()
        self._job = job
        self._machines = machines
        self._state = vm.RUNNING
        self._lifetime = job.integer("Simulated_Lifetime")
        self._cpu_seconds = 0.0

    def gate(self, operation: str) -> None:
        path = self._job.string(f"Simulated_{operation}_Gate")
        if path is None:
            return
        waiting = threading.Event()
        for _ in range(int(GATE_DEADLINE / GATE_INTERVAL)):
            if os.path.exists(path):
                return
            waiting.wait(GATE_INTERVAL)

    def status(self) -> Report:
        self.gate(vm.STATUS)
        if self._lifetime is not None:
            self._lifetime -= 1
            if self._lifetime <= 0:
                self._state = vm.STOPPED
        self._cpu_seconds += 0.5
        memory = (self._job.integer("JobVMMemory") or 0) * 1024
        return Report(
            self._state, cpu_seconds=self._cpu_seconds, vcpus=1, memory_kib=memory, max_memory_kib=memory
        )

    def pid(self) -> int:
        self.gate(vm.GETPID)
        return os.getpid()

    def stop(self) -> None:
        self.gate(vm.STOP)
        self.destroy()

    def destroy(self) -> None:
        self._state = vm.STOPPED
        self._machines.pop(self.name, None)

    def soft_suspend(self) -> None:
        self.gate(vm.SOFT_SUSPEND)
        self._state = vm.SOFT_SUSPENDED

    def suspend(self) -> None:
        self.gate(vm.SUSPEND)
        self._state = vm.SUSPENDED

    def resume(self, state: str) -> None:
        self.gate(vm.RESUME)
        self._state = vm.RUNNING

    def checkpoint(self) -> None:
        self.gate(vm.CHECKPOINT)
        self._state = vm.SUSPENDED


class SimulatedDriver(Driver):
    """Starts whatever it is given."""

    _machines: dict[str, SimulatedMachine] = {}

    def start(self, job: "JobAd") -> Machine:
        fault = job.string("Simulated_Fault")
        if fault == "job":
            raise errors.JobFault(errors.INVALID_DISK_PARAM, "Simulated_Fault is job.", "leave it out.")
        if fault == "machine":
            raise errors.MachineFault("Simulated_Fault is machine.", "leave it out.")
        if fault == "bug":
            raise ZeroDivisionError("Simulated_Fault is bug")
        machine = SimulatedMachine(job, self._machines)
        machine.gate(vm.START)
        self._machines[machine.name] = machine
        return machine

    def kill(self, match: str, uuid: str = "") -> bool:
        machine = self._machines.pop(match, None)
        if machine is not None:
            machine.destroy()
        return machine is not None

    def survey(self, end: float) -> Survey:
        seen = Finding("simulated", OK, "the hypervisor in memory", "it is there, and runs nothing")
        return Survey([seen], hypervisors=["simulated"], vm_types=["simulated"])
