"""One VM of VMware's, as the server sees it."""

import os
import re
from collections.abc import Callable

from vmgahp import errors, lifecycle
from vmgahp.drivers.base import Deadlines, Logger, Machine
from vmgahp.drivers.resources import Resources
from vmgahp.drivers.vmrun import faults, processes
from vmgahp.drivers.vmrun.checkpoint import CANNOT_SAVE, VmrunCheckpoints, state_files
from vmgahp.drivers.vmrun.processes import Process
from vmgahp.drivers.vmrun.tool import Hanging, Tool, VmrunError
from vmgahp.host import proc
from vmgahp.job.exit_code import DESTROYED
from vmgahp.job.vmware import VmwareSpec, read_vmx
from vmgahp.job.vmx import Vmx
from vmgahp.metrics import Status

LEAVING_WAIT = 2.0
"""Seconds in which the process of a VM that is no longer listed may end."""

ADDRESS_SECONDS = 5.0
"""Seconds for a question after the guest's address, which no STATUS depends on."""

MOST_ADDRESS_HANGS = 3

ROOM_EXTRA = 64 << 20
"""Bytes beyond the guest's memory that a suspended VM may need."""

_MAC = re.compile(r"[0-9a-f]{2}(?::[0-9a-f]{2}){5}", re.ASCII | re.IGNORECASE)
_ADDRESS = re.compile(r"[0-9a-f:.]{2,45}", re.ASCII | re.IGNORECASE)


class VmrunMachine(Machine):
    """A VM by its working ``.vmx``."""

    def __init__(
        self,
        spec: VmwareSpec,
        tool: Tool,
        checkpoints: VmrunCheckpoints,
        vmx_name: str,
        deadlines: Deadlines,
        log: Logger,
    ) -> None:
        self.name = spec.name
        self.uuid = ""
        self.spec = spec
        self.vmx_name = vmx_name
        self.vmx = os.path.join(checkpoints.directory, vmx_name)
        """The full path of the working ``.vmx``, without links."""
        self.resources = Resources(log)
        self.write_manifest: Callable[[VmrunMachine], None] | None = None
        """Writes down what a checkpoint consists of, once the VM is suspended."""
        self.cpu_before = 0.0
        """Seconds of CPU that the guest had used before its process was started."""
        self.saved_in = ""
        """The name of the file with the guest's memory, while it is suspended."""
        self._tool = tool
        self._checkpoints = checkpoints
        self._uid = tool.identity.uid
        self._deadlines = deadlines
        self._log = log
        self._paused = False
        self._keep_state = False
        self._process: Process | None = None
        self._mac = ""
        self._ip = ""
        self._address_hangs = 0
        self._last_report: Status | None = None

    # What the server asks

    def status(self) -> Status:
        if self.saved_in:
            there = os.path.lexists(os.path.join(self._checkpoints.directory, self.saved_in))
            return Status(lifecycle.SUSPENDED if there else lifecycle.STOPPED)
        process = self._find_process()
        try:
            listed = processes.is_listed(self._tool.run("list", seconds=self._deadlines.usual), self.vmx)
        except (VmrunError, errors.MachineFault) as error:
            # vmrun is of no use just now, but the VM does not depend on it.
            if process is None or self._last_report is None:
                if isinstance(error, VmrunError):
                    raise faults.from_vmrun(error, f"asking for the status of {self.name}") from error
                raise
            self._log(f"{self.name} runs on as process {process.pid} although {error}")
            self._last_report = self._last_report._replace(cpu_seconds=self._cpu_seconds())
            return self._last_report
        if not listed and (process is None or processes.wait_for_end(process, LEAVING_WAIT)):
            return Status(lifecycle.STOPPED)
        memory = self.spec.memory_mib << 10
        self._last_report = Status(
            lifecycle.SOFT_SUSPENDED if self._paused else lifecycle.RUNNING,
            cpu_seconds=self._cpu_seconds(),
            vcpus=self.spec.vcpus,
            memory_kib=memory,
            max_memory_kib=memory,
            mac=self._find_mac(),
            ip=self._find_address(),
        )
        return self._last_report

    def cpu_seconds(self) -> float:
        """What the guest had used when it was last looked at."""
        return self._last_report.cpu_seconds if self._last_report else self.cpu_before

    def pid(self) -> int:
        process = None if self.saved_in else self._find_process()
        return process.pid if process else 0

    def stop(self) -> None:
        self.resources.to_be_stopped()
        if not self.saved_in:
            try:
                if self._paused:
                    self._run("unpause", self._deadlines.usual)  # a guest whose CPUs stand still hears nothing
                    self._paused = False
                self._run("stop", self._deadlines.stop, "soft")
            except (VmrunError, errors.MachineFault) as error:
                self._log(f"{self.name} cannot be asked to power off ({error}): stopping it hard")
        self.destroy()

    def destroy(self) -> None:
        self.resources.ended(DESTROYED)
        if not self.saved_in:
            processes.end(self._tool, self.vmx, self._uid, self._deadlines.usual, self._log)
        self.release()
        self.saved_in = ""

    def release(self) -> None:
        if not self.resources.begin_release():
            return
        if self.saved_in and not self._keep_state:
            self._forget_state()
        self.resources.release(kept=self._keep_state)

    def soft_suspend(self) -> None:
        try:
            self._run("pause", self._deadlines.usual)
        except VmrunError as error:
            if faults.is_not_supported(error):
                raise errors.ClientFault(
                    errors.VM_NO_SUPPORT_SUSPEND,
                    f"{self.name} cannot be paused: this VMware product has no pause (VMware Player has none).",
                    "set VM_SOFT_SUSPEND = False, so that VMs are suspended to disk.",
                ) from error
            raise faults.from_vmrun(error, f"pausing {self.name}", [self.vmx]) from error
        self._paused = True

    def suspend(self) -> None:
        self._require_free_space()
        try:
            if self._paused:
                self._run("unpause", self._deadlines.usual)
                self._paused = False
            cpu_seconds = self._cpu_seconds()
            self._run("suspend", self._deadlines.memory, "hard")
        except VmrunError as error:
            raise faults.from_vmrun(error, f"suspending {self.name}", [self.vmx]) from error
        process = self._find_process()
        if process is not None:
            processes.wait_for_end(process, self._deadlines.usual)  # it writes until its end
        self.saved_in = self._find_state()
        self.cpu_before = cpu_seconds
        self._process = None
        self._last_report = None
        self._log(f"{self.name} is suspended in {self.saved_in}")

    def resume(self, state: str) -> None:
        if state == lifecycle.SOFT_SUSPENDED:
            try:
                self._run("unpause", self._deadlines.usual)
            except VmrunError as error:
                raise faults.from_vmrun(error, f"resuming {self.name}", [self.vmx]) from error
            self._paused = False
        else:
            self._go_on()

    def checkpoint(self) -> None:
        if self.write_manifest is None:
            raise errors.ClientFault(
                errors.VM_NO_SUPPORT_CHECKPOINT,
                f"{self.name} cannot be checkpointed: the job does not ask for it with vm_checkpoint.",
            )
        was_saved = bool(self.saved_in)
        if not was_saved:
            self.suspend()
        try:
            self.write_manifest(self)
        except BaseException:
            if not was_saved:
                self._go_on()
            raise
        self._keep_state = True

    # What the driver asks

    def start(self) -> None:
        """Power the VM on, or resume it from the state that its ``.vmx`` names. Raises `VmrunError`."""
        self._run("start", self._deadlines.memory, "nogui")

    def current(self) -> Vmx:
        """The working ``.vmx`` as VMware has changed it. Raises `errors.JobFault`."""
        return read_vmx(self._tool.identity, self._checkpoints.directory, self.vmx_name)

    # What helps

    def _run(self, command: str, seconds: float, *arguments: str) -> str:
        return self._tool.run(command, self.vmx, *arguments, seconds=seconds)

    def _go_on(self) -> None:
        # From here on the disks change, and what is written down of them is wrong.
        self._checkpoints.discard()
        try:
            self.start()
        except VmrunError as error:
            raise faults.from_vmrun(error, f"resuming {self.name}", [self.vmx]) from error
        self._forget_state()
        self.saved_in = ""
        self._keep_state = False
        self._log(f"{self.name} is resumed")

    def _forget_state(self) -> None:
        """Remove the suspended memory, where VMware has not done so."""
        names = [self.saved_in] if self.saved_in else []
        if not self._find_process():
            names += [
                name
                for name in state_files(self._checkpoints.directory, self.vmx_name)
                if name.endswith((".vmss", ".vmem"))
            ]
        self._checkpoints.forget(*dict.fromkeys(names))

    def _find_state(self) -> str:
        """The file in which the guest's memory is. Raises `errors.HypervisorFault` where there is none."""
        stem = self.vmx_name.removesuffix(".vmx")
        found = [name for name in state_files(self._checkpoints.directory, self.vmx_name) if name.endswith(".vmss")]
        if not found:
            raise errors.HypervisorFault(
                f"vmrun says that it has suspended {self.name}, and there is no {stem}.vmss.",
                "read vmware.log in the job's scratch directory.",
                CANNOT_SAVE,
            )
        return f"{stem}.vmss" if f"{stem}.vmss" in found else found[0]

    def _require_free_space(self) -> None:
        directory = self._checkpoints.directory
        try:
            status = os.statvfs(directory)
        except OSError as error:
            raise self._no_room(f"{directory} cannot be examined: {error.strerror}") from error
        needed = (self.spec.memory_mib << 20) + ROOM_EXTRA
        free = status.f_bavail * status.f_frsize
        if free < needed:
            raise self._no_room(
                f"the guest's memory needs up to {needed >> 20} MiB in {directory}, and {free >> 20} MiB are free"
            )

    def _no_room(self, problem: str) -> errors.MachineFault:
        return errors.MachineFault(
            f"{self.name} cannot be suspended: {problem}.",
            "free disk space on the file system of EXECUTE; the VM keeps running.",
            CANNOT_SAVE,
        )

    def _find_process(self) -> Process | None:
        if self._process is None or not processes.is_still(self._process):
            self._process = processes.find(self.vmx, self._uid)
        return self._process

    def _cpu_seconds(self) -> float:
        process = self._find_process()
        return self.cpu_before + (proc.cpu_seconds(process.pid) if process else 0.0)

    def _find_mac(self) -> str:
        if not self._mac and self.spec.networking:
            self._mac = self.spec.mac
            try:
                generated = "" if self._mac else self.current().get("ethernet0.generatedAddress", "")
            except errors.Fault:
                generated = ""
            # The file is the job's to change, and the address goes into a line of the protocol.
            if _MAC.fullmatch(generated):
                self._mac = generated.lower()
        return self._mac

    def _find_address(self) -> str:
        """The guest's address, which VMware's Tools in it tell; empty where they do not run."""
        if self._ip or not self.spec.networking or self._paused or self._address_hangs >= MOST_ADDRESS_HANGS:
            return self._ip
        try:
            told = self._run("getGuestIPAddress", ADDRESS_SECONDS).strip()
        except Hanging:
            self._address_hangs += 1
            return ""
        except (VmrunError, errors.Fault):
            return ""
        # It is the guest's word.
        if _ADDRESS.fullmatch(told):
            self._ip = told
        return self._ip
