"""A hypervisor that exists only in memory, for tests and to try the protocol by hand.

It takes its cues from the job ad: ``Simulated_Fault = "job"|"machine"|"bug"|"exit"`` makes the START fail,
``Simulated_<OPERATION>_Gate = "path"`` makes an operation, or METRICS, wait until the file `path` exists (a test opens
the gate when it has seen enough), ``Simulated_Lifetime = n`` ends the guest at its n-th STATUS, ``Simulated_Mac`` and
``Simulated_Ip`` are its addresses, ``Simulated_Exit_Status`` the code with which it ends, ``Simulated_Pid`` its process
(0: none).
"""

import os

from vmgahp import errors, findings, lifecycle
from vmgahp.drivers.base import Driver, Machine, Survey
from vmgahp.host import wait
from vmgahp.job.ad import JobAd
from vmgahp.metrics import Metrics, Status

GATE_DEADLINE = 60.0
"""Seconds after which a gate opens by itself, so that a broken test ends."""

GATE_INTERVAL = 0.01


class SimulatedMachine(Machine):
    def __init__(self, job: JobAd, machines: dict[str, "SimulatedMachine"]) -> None:
        self.name = job.vm_name()
        self.working_dir = job.working_dir()
        self._job = job
        self._machines = machines
        self._state = lifecycle.RUNNING
        self._lifetime = job.integer("Simulated_Lifetime")
        self._cpu_seconds = 0.0

    def gate(self, operation: str) -> None:
        if (path := self._job.string(f"Simulated_{operation}_Gate")) is not None:
            wait.until(lambda: os.path.exists(path), GATE_DEADLINE, GATE_INTERVAL)

    def status(self) -> Status:
        self.gate(lifecycle.STATUS)
        if self._lifetime is not None:
            self._lifetime -= 1
            if self._lifetime <= 0:
                self._state = lifecycle.STOPPED
        self._cpu_seconds += 0.5
        memory = (self._job.integer("JobVMMemory") or 0) * 1024
        mac, ip = (self._job.string(f"Simulated_{name}") or "" for name in ("Mac", "Ip"))
        return Status(self._state, self._cpu_seconds, 1, memory, memory, mac, ip)

    def exit_status(self) -> int:
        return self._job.integer("Simulated_Exit_Status") or 0

    def metrics(self) -> Metrics | None:
        self.gate("METRICS")
        return super().metrics()

    def pid(self) -> int:
        self.gate(lifecycle.GETPID)
        pid = self._job.integer("Simulated_Pid")
        return 0 if self._state == lifecycle.STOPPED else os.getpid() if pid is None else pid

    def stop(self) -> None:
        self.gate(lifecycle.STOP)
        self.destroy()

    def destroy(self) -> None:
        self._state = lifecycle.STOPPED
        self._machines.pop(self.working_dir, None)

    def soft_suspend(self) -> None:
        self._go(lifecycle.SOFT_SUSPEND, lifecycle.SOFT_SUSPENDED)

    def suspend(self) -> None:
        self._go(lifecycle.SUSPEND, lifecycle.SUSPENDED)

    def resume(self, state: str) -> None:
        self._go(lifecycle.RESUME, lifecycle.RUNNING)

    def checkpoint(self) -> None:
        self._go(lifecycle.CHECKPOINT, lifecycle.SUSPENDED)

    def _go(self, operation: str, state: lifecycle.State) -> None:
        self.gate(operation)
        if self._state == lifecycle.STOPPED:
            raise errors.ClientFault(errors.VM_NOT_FOUND, f"{self.name} is gone.")
        self._state = state


class SimulatedDriver(Driver):
    """A driver that starts any job, on a machine that has memory for VMs."""

    _machines: dict[str, SimulatedMachine] = {}

    def start(self, job: JobAd) -> Machine:
        if fault := self._fault():
            raise fault
        if (job.integer("JobVMMemory") or 0) <= 0:
            raise errors.JobFault(errors.NO_MEMORY_PARAM, "JobVMMemory is not set.", "set vm_memory.")
        wanted = job.string("Simulated_Fault") or ""
        if wanted.startswith("job"):
            raise errors.JobFault(errors.INVALID_DISK_PARAM, f"Simulated_Fault is {wanted}.", "leave it out.")
        if wanted == "machine":
            raise errors.MachineFault("Simulated_Fault is machine.", "leave it out.")
        if wanted == "bug":
            raise ZeroDivisionError("Simulated_Fault is bug")
        if wanted == "exit":
            raise SystemExit("Simulated_Fault is exit")
        machine = SimulatedMachine(job, self._machines)
        machine.gate(lifecycle.START)
        self._machines[machine.working_dir] = machine
        return machine

    def kill(self, match: str, uuid: str = "") -> bool:
        for machine in list(self._machines.values()):
            if match in (machine.name, machine.working_dir):
                machine.destroy()
                return True
        return False

    def survey(self, end: float) -> Survey:
        seen = findings.judge("simulated", "the hypervisor in memory", self._fault(), "it runs nothing")
        return Survey([seen], hypervisors=["simulated"], vm_types=["simulated"])

    def _fault(self) -> errors.MachineFault | None:
        if self.settings.integer("VM_MEMORY") > 0:
            return None
        return errors.MachineFault("VM_MEMORY is not set.", "set VM_MEMORY to the MiB for VMs.")
