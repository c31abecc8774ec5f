"""One VM of VMware's, as the server sees it, and its checkpoints.

A checkpoint is a suspended VM: its memory (``.vmss`` and ``.vmem``), the disks of its snapshot, the working copy of the
``.vmx``, all in the scratch directory, so HTCondor takes them along.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from vmgahp import errors, lifecycle
from vmgahp.checkpoint.manifest import DISK, STATE, UUID, CheckpointKind, Manifest, matching
from vmgahp.checkpoint.store import CheckpointStore, FileRef, Unusable
from vmgahp.drivers.managed import Deadlines, ManagedMachine
from vmgahp.drivers.resources import Resources
from vmgahp.drivers.surveyor import Logger
from vmgahp.drivers.vmrun import tool, working_copy
from vmgahp.drivers.vmrun.tool import Process, Tool, VmrunError, explained, from_vmrun, wait_for_end
from vmgahp.drivers.vmrun.working_copy import UUID_KEY, WorkingCopy
from vmgahp.host import job_user, proc
from vmgahp.job.vmware import VmwareSpec, read_vmx
from vmgahp.job.vmx import Vmx
from vmgahp.metrics import Status, Usage
from vmgahp.text import MAC

STATE_SUFFIXES = (".vmss", ".vmem", ".vmsn", ".vmsd", ".nvram")
"""The suffixes of the files that VMware keeps of a VM beside its ``.vmx`` and its disks."""

KIND = CheckpointKind(
    "vmrun",
    {
        "uuid": matching(UUID),
        "state": matching(re.compile(r"[^/\x00-\x1f\x7f]{1,250}\.vmss")),  # the file with the memory
    },
)

LEAVING_WAIT = 2.0
"""Seconds within which the process of a VM that is no longer listed may exit."""

ADDRESS_SECONDS = 5.0
"""Seconds for a query of the guest's address, which no STATUS depends on."""

ROOM_EXTRA = 64 << 20
"""Bytes beyond the guest's memory that a suspended VM may need."""

_ADDRESS = re.compile(r"[0-9a-f:.]{2,45}", re.ASCII | re.IGNORECASE)


class VmrunPlan(NamedTuple):
    """The plan of a START."""

    spec: VmwareSpec
    vmrun: Tool
    directory: str
    """The scratch directory, without links."""
    checkpoint: CheckpointStore
    copy: WorkingCopy
    fresh: WorkingCopy
    """The working copy for a new boot, if `copy` restarts from a checkpoint."""
    restart: Manifest | None = None
    unusable: Unusable | None = None

    def state_files(self, *endings: str) -> list[str]:
        """List the files that VMware keeps of the VM beside its ``.vmx`` and disks, by name; those with `endings`."""
        stem, there = self.fresh.name.removesuffix(".vmx"), os.listdir(self.directory)
        return sorted(name for name in there if name.startswith(stem) and name.endswith(endings or STATE_SUFFIXES))

    def with_checkpoint(self) -> VmrunPlan:
        """Return the plan with the checkpoint in the scratch directory, if there is one. Raises `Unusable`."""
        store, fresh = self.checkpoint, self.fresh
        found = store.load()
        if found is None:
            return self
        # The disks of a guest are those that the working copy names, which came back with it.
        store.check(found, store.now(self.spec.vm, {}), map(FileRef.of, found.files))
        state = found.facts["state"]
        if state not in (file.path for file in found.files if file.role == STATE):
            raise Unusable("its memory is not among its files.", True)
        try:
            saved = read_vmx(store.identity, self.directory, fresh.name)
            copy = working_copy.restored(fresh, saved, state, self.spec, self.directory, store.identity)
        except errors.JobFault as fault:
            raise Unusable(fault.problem, True) from fault
        return self._replace(restart=found, copy=copy)

    def forget(self, *names: str) -> None:
        """Remove files of the scratch directory that are no longer needed; errors are logged."""
        job_user.forget(self.checkpoint.identity, self.directory, self.checkpoint.log, *names)


class VmrunMachine(ManagedMachine):
    """A VM, identified by its working ``.vmx``."""

    def __init__(self, plan: VmrunPlan, resources: Resources, deadlines: Deadlines, log: Logger) -> None:
        super().__init__(plan.spec.vm.name, resources, deadlines, log)
        self.uuid = plan.copy.vmx[UUID_KEY]
        self.spec = plan.spec
        if self.spec.vm.checkpoint:
            self.no_checkpoint = ""
        self.vmx = os.path.join(plan.directory, plan.copy.name)
        """The full path of the working ``.vmx``, without links."""
        self._plan = plan
        self.store = plan.checkpoint
        self._before = frozenset(os.listdir(plan.directory))
        """The files in the scratch directory before the start makes anything."""
        self._memory_file = plan.restart.facts["state"] if plan.restart else ""
        self._tool = plan.vmrun
        self._process: Process | None = None
        self.usage = Usage(plan.restart.cpu_seconds if plan.restart else 0)
        self._mac = plan.spec.vm.mac
        self._ip = ""
        self._may_ask_address = plan.spec.vm.networking
        self._last_report: Status | None = None
        self._may_be_saved = False

    def pid(self) -> int:
        process = self._find_process() if self.state in (lifecycle.RUNNING, lifecycle.SOFT_SUSPENDED) else None
        return process.pid if process else 0

    def look(self) -> Status:
        process = self._find_process()
        try:
            listed = self.vmx in self._tool.running(self.deadlines.usual)
        except VmrunError as error:
            # vmrun fails at the moment, but the VM does not depend on it.
            if process is None or self._last_report is None:
                raise from_vmrun(error, f"asking for the status of {self.name}", [self.vmx]) from error
            self.log(f"{self.name} runs on as process {process.pid} although {error}")
            self._last_report = self._last_report._replace(cpu_seconds=self._read_usage())
            return self._last_report
        if not listed and (process is None or wait_for_end(process, LEAVING_WAIT)):
            if not (self._may_be_saved and self._plan.state_files(".vmss")):
                return Status(lifecycle.STOPPED)
            self._find_memory_file(None)
            self.state = lifecycle.SUSPENDED
            self._is_saved()
            return Status(lifecycle.SUSPENDED)
        memory = self.spec.vm.memory_mib << 10
        self._last_report = Status(
            lifecycle.SOFT_SUSPENDED if self.state is lifecycle.SOFT_SUSPENDED else lifecycle.RUNNING,
            cpu_seconds=self._read_usage(),
            vcpus=self.spec.vm.vcpus,
            memory_kib=memory,
            max_memory_kib=memory,
            mac=self._find_mac(),
            ip=self._find_address(),
        )
        return self._last_report

    def look_at_saved(self) -> None:
        if not os.path.lexists(os.path.join(self._plan.directory, self._memory_file)):
            raise self._memory_is_lost(f"{self._memory_file} is not there any more")

    def ask_to_power_off(self) -> None:
        """Ask the guest; vmrun itself waits until it is off."""
        try:
            if self.state is lifecycle.SOFT_SUSPENDED:
                self._run("unpause", self.deadlines.usual)  # a paused guest does not receive the request
            self._run("stop", self.deadlines.stop, "soft")
        except VmrunError as error:
            raise errors.HypervisorFault(f"{error}.") from error

    def wait_until_off(self, seconds: float) -> bool:
        process = self._find_process()
        return process is None or wait_for_end(process, min(seconds, tool.PROCESS_WAIT))

    def end_guest(self) -> None:
        saved = self.state in (lifecycle.SUSPENDED, lifecycle.CHECKPOINTED)
        if not saved or self._find_process() is not None:
            self._tool.end(self.vmx, self.deadlines.usual)

    def before_release(self) -> None:
        if self.state is lifecycle.STARTING:
            if self._plan.restart is not None:
                self.put_back()
            made = set(os.listdir(self._plan.directory)) - self._before
            self._plan.forget(*sorted(name for name in made if not name.endswith((".lck", ".log"))))
        elif self.state is not lifecycle.CHECKPOINTED:
            self._forget_memory()

    def pause(self) -> None:
        try:
            self._run("pause", self.deadlines.usual)
        except VmrunError as error:
            if tool.is_not_supported(error):
                problem = f"{self.name} cannot be paused: this VMware product has no pause (VMware Player has none)."
                hint = "set VM_SOFT_SUSPEND = False, so that VMs are suspended to disk."
                raise errors.ClientFault(errors.VM_NO_SUPPORT_SUSPEND, problem, hint) from error
            raise from_vmrun(error, f"pausing {self.name}", [self.vmx]) from error

    def unpause(self) -> None:
        with explained(f"resuming {self.name}", [self.vmx]):
            self._run("unpause", self.deadlines.usual)

    def save(self, operation: str) -> None:
        self._require_free_space()
        paused = self.state is lifecycle.SOFT_SUSPENDED
        if paused:
            self.unpause()
        self._read_usage()
        self._plan.forget(*self._plan.state_files(".vmss"))  # of a suspension that was given up
        problem: VmrunError | None = None
        try:
            self._run("suspend", self.deadlines.memory, "hard")
        except VmrunError as error:
            problem = error
        process = self._find_process()
        # The process writes until it exits; one that vmrun has given up may still be writing.
        if process is not None and not wait_for_end(process, self.deadlines.usual if not problem else 0):
            self._may_be_saved = True  # `look` finds it when the process is gone
            if paused:
                self.pause()
            if problem is None:
                raise errors.HypervisorFault(f"vmrun has suspended {self.name}, and process {process.pid} runs on.")
            raise from_vmrun(problem, f"suspending {self.name}", [self.vmx]) from problem
        self._find_memory_file(problem)
        if problem is not None:
            self.log(f"{self.name} is saved although {problem}")
        self._is_saved()
        self.step("save.written")

    def _is_saved(self) -> None:
        self.usage.carry()
        self._process = self._last_report = None
        self._may_be_saved = False
        self.log(f"{self.name} is suspended in {self._memory_file}")

    def write_manifest(self) -> None:
        """Write it with the disks that the VM has now, which are those of its snapshot."""
        copy, directory, identity = self._plan.copy, self._plan.directory, self._tool.identity
        now = working_copy.restored(copy, self.current(), self._memory_file, self.spec, directory, identity)
        now.correct_parents(directory, identity)
        state = self._plan.state_files()
        state += [now.nvram] if now.nvram in os.listdir(directory) else []
        refs = [FileRef(STATE, name) for name in state] + [FileRef(DISK, name) for name in now.files]
        store, facts = self._plan.checkpoint, {"uuid": self.uuid, "state": self._memory_file}
        store.write(store.now(self.spec.vm, facts, self.usage.seconds), refs)

    def restore(self, before_it_runs: Callable[[], None]) -> None:
        self.look_at_saved()
        before_it_runs()
        try:
            self.power_on()
        except VmrunError as error:
            process = self._find_process()
            if process is None:
                self.look_at_saved()
                raise from_vmrun(error, f"resuming {self.name}", [self.vmx]) from error
            self.log(f"{self.name} runs again as process {process.pid} although {error}")
        self.log(f"{self.name} is resumed")

    def forget_saved(self) -> None:
        super().forget_saved()
        self._forget_memory()

    def power_on(self) -> None:
        """Power the VM on, or resume it from the state that its ``.vmx`` names. Raises `VmrunError`."""
        self._run("start", self.deadlines.memory, "nogui")

    def current(self) -> Vmx:
        """Read the working ``.vmx`` as VMware has changed it. Raises `errors.JobFault`."""
        return read_vmx(self._tool.identity, self._plan.directory, self._plan.copy.name)

    def _run(self, command: str, seconds: float, *arguments: str) -> str:
        return self._tool.run(command, self.vmx, *arguments, seconds=seconds)

    def _forget_memory(self) -> None:
        names = [self._memory_file] if self._memory_file else []
        if not self._find_process():
            names += self._plan.state_files(".vmss", ".vmem")
        self._plan.forget(*dict.fromkeys(names))
        self._memory_file = ""

    def _find_memory_file(self, problem: VmrunError | None) -> None:
        """Find the memory of the guest, which has ended. Raises `errors.Fault` if it is not found."""
        found = self._plan.state_files(".vmss")
        wanted = self._plan.copy.name.removesuffix(".vmx") + ".vmss"
        if not found:
            if problem is not None and tool.is_not_running(problem):
                raise from_vmrun(problem, f"suspending {self.name}", [self.vmx]) from problem
            said = "vmrun says that it has suspended it" if problem is None else str(problem)
            raise self._memory_is_lost(f"{said}, and there is no {wanted}")
        self._memory_file = wanted if wanted in found else found[0]

    def _memory_is_lost(self, reason: str) -> errors.Fault:
        problem = f"{self.name} has ended, and its memory is lost: {reason}."
        return self.report_lost(problem, "read vmware.log in the job's scratch directory; the job has to run again.")

    def _require_free_space(self) -> None:
        directory = self._plan.directory
        needed, free = (self.spec.vm.memory_mib << 20) + ROOM_EXTRA, job_user.free_bytes(directory, self._tool.identity)
        if free < needed:
            room = f"the guest's memory needs up to {needed >> 20} MiB in {directory}, and {free >> 20} MiB are free"
            hint = "free disk space on the file system of EXECUTE; the VM keeps running."
            raise errors.MachineFault(f"{self.name} cannot be suspended: {room}.", hint, errors.CANNOT_SAVE)

    def _find_process(self) -> Process | None:
        if self._process is None or not tool.is_still(self._process):
            self._process = tool.find_process(self.vmx, self._tool.identity.uid)
        return self._process

    def _read_usage(self) -> float:
        process = self._find_process()
        return self.usage.read(proc.cpu_seconds(process.pid) if process else None)

    def _find_mac(self) -> str:
        if not self._mac and self.spec.vm.networking:
            with suppress(errors.Fault):
                generated = self.current().get("ethernet0.generatedAddress", "").lower()
                # The file is the job's to change, and the address goes into a line of the protocol.
                self._mac = generated if re.fullmatch(MAC, generated) else ""
        return self._mac

    def _find_address(self) -> str:
        """Return the guest's address by VMware's Tools in it; empty if they do not run."""
        if self._ip or not self._may_ask_address or self.state is lifecycle.SOFT_SUSPENDED:
            return self._ip
        try:
            told = self._run("getGuestIPAddress", ADDRESS_SECONDS).strip()
        except VmrunError as error:
            self._may_ask_address = not isinstance(error, tool.Hanging)
            return ""
        # The guest reports it itself.
        self._ip = told if _ADDRESS.fullmatch(told) else ""
        return self._ip
