"""One domain of libvirt, as the server sees it."""

import os
import threading

import libvirt

from vmgahp import errors, vm
from vmgahp.drivers.base import Machine, Report
from vmgahp.drivers.libvirt import faults

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from vmgahp.console_capture import ConsoleCapture
    from vmgahp.drivers.libvirt.connection import Connection
    from vmgahp.guardian import Guardian

    Result = TypeVar("Result")

_STATES = {
    libvirt.VIR_DOMAIN_NOSTATE: vm.RUNNING,
    libvirt.VIR_DOMAIN_RUNNING: vm.RUNNING,
    libvirt.VIR_DOMAIN_BLOCKED: vm.RUNNING,
    libvirt.VIR_DOMAIN_PAUSED: vm.SOFT_SUSPENDED,
    libvirt.VIR_DOMAIN_SHUTDOWN: vm.RUNNING,  # on its way out; gone at the next look
    libvirt.VIR_DOMAIN_SHUTOFF: vm.STOPPED,
    libvirt.VIR_DOMAIN_CRASHED: vm.STOPPED,
    libvirt.VIR_DOMAIN_PMSUSPENDED: vm.SOFT_SUSPENDED,
}

_PID_FILES = "{run}/libvirt/qemu/{name}.pid", "{run}/libvirt/qemu/run/{name}.pid"
"""Where the QEMU driver of libvirt notes the pid of a domain: the system's daemon, then a user's own."""

DESTROY_WAIT = 10.0
"""Seconds to wait for the event that says that a destroyed domain is gone."""


class Belongings:
    """What a domain needs beside libvirt, let go of when it is gone."""

    def __init__(self) -> None:
        self.guardian: Guardian | None = None
        self.console: ConsoleCapture | None = None
        self.at_end: list[Callable[[], None]] = []
        """Called once, in order, when the VM is gone for good."""

    def let_go(self) -> None:
        if self.console is not None:
            self.console.close()
        for action in self.at_end:
            action()
        self.at_end = []
        if self.guardian is not None:
            self.guardian.dismiss()


class LibvirtMachine(Machine):
    """A transient domain: when it stops, libvirt forgets it, and nothing is left to undefine."""

    def __init__(
        self,
        name: str,
        uuid: str,
        connection: "Connection",
        belongings: Belongings,
        *,
        stop_timeout: float,
        log: "Callable[[str], None]",
    ) -> None:
        self.name = name
        self.uuid = uuid
        self.mac = ""
        self._ip = ""
        self._connection = connection
        self._belongings = belongings
        self._stop_timeout = stop_timeout
        self._log = log
        self._gone = connection.watch(uuid)
        self._pid = 0
        self._last_report: Report | None = None
        self._tidied = False
        self._tidy_lock = threading.Lock()

    # What the server asks

    def status(self) -> Report:
        try:
            state, max_memory, memory, vcpus, cpu_nanoseconds = self._call(lambda domain: domain.info())
        except libvirt.libvirtError as error:
            if faults.is_no_domain(error):
                return Report(vm.STOPPED)
            raise faults.from_libvirt(error, f"asking for the status of {self.name}") from error
        except errors.MachineFault as fault:
            # libvirtd is away, but QEMU does not depend on it: what is known still holds.
            if self._last_report is not None and self._is_ours(self._pid):
                self._log(f"{self.name} runs on as process {self._pid} although {fault.problem}")
                return self._last_report
            raise
        found = _STATES.get(state, vm.RUNNING)
        if state == libvirt.VIR_DOMAIN_CRASHED:
            self._log(f"{self.name} has crashed")
            self.destroy()
        self._last_report = Report(
            found,
            cpu_seconds=cpu_nanoseconds / 1e9,
            vcpus=vcpus,
            memory_kib=memory,
            max_memory_kib=max_memory,
            mac=self.mac,
            ip=self._address(),
        )
        if not self._pid:
            self.pid()
        return self._last_report

    def pid(self) -> int:
        if not self._is_ours(self._pid):
            self._pid = self._find_pid()
        return self._pid

    def stop(self) -> None:
        try:
            self._call(self._ask_to_power_off)
            if not self._gone.wait(self._stop_timeout):
                self._log(f"{self.name} has not powered off in {self._stop_timeout:g} s: destroying it")
        except libvirt.libvirtError as error:
            if not faults.is_no_domain(error):
                self._log(f"{self.name} cannot be asked to power off ({error}): destroying it")
        self.destroy()

    def destroy(self) -> None:
        try:
            self._call(lambda domain: domain.destroy())
            self._gone.wait(DESTROY_WAIT)
        except libvirt.libvirtError as error:
            if not faults.is_no_domain(error):
                raise faults.from_libvirt(error, f"destroying {self.name}") from error
        self.release()

    def release(self) -> None:
        with self._tidy_lock:
            if self._tidied:
                return
            self._tidied = True
        self._connection.unwatch(self.uuid)
        self._belongings.let_go()

    def soft_suspend(self) -> None:
        self._operate("pausing", lambda domain: domain.suspend())

    def resume(self, state: str) -> None:
        if state == vm.SUSPENDED:
            super().resume(state)
        self._operate("resuming", lambda domain: domain.resume())

    # What helps

    def _call(self, function: "Callable[[libvirt.virDomain], Result]") -> "Result":
        return self._connection.call(lambda connection: function(connection.lookupByUUIDString(self.uuid)))

    def _operate(self, doing: str, function: "Callable[[libvirt.virDomain], object]") -> None:
        try:
            self._call(function)
        except libvirt.libvirtError as error:
            raise faults.from_libvirt(error, f"{doing} {self.name}") from error

    def _ask_to_power_off(self, domain: "libvirt.virDomain") -> None:
        if domain.info()[0] == libvirt.VIR_DOMAIN_PAUSED:
            domain.resume()  # a guest whose CPUs stand still hears no ACPI request
        domain.shutdown()

    def _address(self) -> str:
        """The guest's IP address from the DHCP lease of the libvirt network, once there is one."""
        if self._ip or not self.mac:
            return self._ip
        try:
            found = self._call(
                lambda domain: domain.interfaceAddresses(libvirt.VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_LEASE, 0)
            )
        except (libvirt.libvirtError, errors.Fault):
            return ""  # not every network has leases, and no status depends on it
        for interface in found.values():
            for address in interface.get("addrs") or ():
                self._ip = address["addr"]
        return self._ip

    def _find_pid(self) -> int:
        runs = ["/run", "/var/run"]
        if os.environ.get("XDG_RUNTIME_DIR"):
            runs.append(os.environ["XDG_RUNTIME_DIR"])
        runs.append(f"/run/user/{os.getuid()}")
        runs.append(os.path.expanduser("~/.cache"))
        for run in runs:
            for pattern in _PID_FILES:
                try:
                    with open(pattern.format(run=run, name=self.name)) as file:
                        pid = int(file.read(32))
                except (OSError, ValueError):
                    continue
                if self._is_ours(pid):
                    return pid
        return 0

    def _is_ours(self, pid: int) -> bool:
        """Whether the process is this domain's QEMU: libvirt puts the UUID on its command line."""
        if pid <= 0:
            return False
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                return self.uuid.encode() in file.read(1 << 16)
        except OSError:
            return False
