"""One domain of libvirt, as the server sees it."""

import os
from collections.abc import Callable
from typing import TypeVar

import libvirt

from vmgahp import errors, lifecycle
from vmgahp.checkpoint.store import MANIFEST_FILE, MEMORY_FILE
from vmgahp.drivers.base import Machine
from vmgahp.drivers.libvirt import faults, other_hypervisors
from vmgahp.drivers.libvirt.connection import LibvirtConnection
from vmgahp.drivers.libvirt.save import Saver
from vmgahp.drivers.libvirt.stats import Meter
from vmgahp.drivers.resources import Resources
from vmgahp.job import exit_code
from vmgahp.metrics import Metrics, Status

Result = TypeVar("Result")
Check = Callable[[libvirt.virConnect, libvirt.virDomain, str], None]
"""Looks at a domain that was made and does not run yet, and at its live XML."""

SUSPEND_FILE = "vm_suspend.mem"

_STATES = {
    libvirt.VIR_DOMAIN_NOSTATE: lifecycle.RUNNING,
    libvirt.VIR_DOMAIN_RUNNING: lifecycle.RUNNING,
    libvirt.VIR_DOMAIN_BLOCKED: lifecycle.RUNNING,
    libvirt.VIR_DOMAIN_PAUSED: lifecycle.SOFT_SUSPENDED,
    libvirt.VIR_DOMAIN_SHUTDOWN: lifecycle.RUNNING,  # on its way out; gone at the next look
    libvirt.VIR_DOMAIN_SHUTOFF: lifecycle.STOPPED,
    libvirt.VIR_DOMAIN_CRASHED: lifecycle.STOPPED,
    libvirt.VIR_DOMAIN_PMSUSPENDED: lifecycle.SOFT_SUSPENDED,
}

_ADDRESS_SOURCES = (libvirt.VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_LEASE, libvirt.VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_ARP)

_PID_FILES = "{run}/libvirt/qemu/{name}.pid", "{run}/libvirt/qemu/run/{name}.pid"
"""Where the QEMU driver of libvirt notes the pid of a domain: the system's daemon, then a user's own."""

EVENT_WAIT = 2.0
"""Seconds to wait for the event that says why a domain is no longer there; none comes when it went while
libvirtd was away."""

DESTROY_WAIT = 10.0
"""Seconds to wait for the event that says that a destroyed domain is gone."""


class LibvirtMachine(Machine):
    """A transient domain: when it stops, libvirt forgets it, and nothing is left to undefine."""

    def __init__(
        self,
        name: str,
        uuid: str,
        connection: LibvirtConnection,
        resources: Resources,
        saver: Saver,
        *,
        stop_timeout: float,
        log: Callable[[str], None],
    ) -> None:
        self.name = name
        self.uuid = uuid
        self.mac = ""
        self.domain_type = "qemu"
        self.saver = saver
        self.no_checkpoint = "its driver has not said what belongs to one"
        """Why the VM cannot be checkpointed, in the form of "because …"; empty where it can."""
        self.screenshot: Callable[[], None] = lambda: None
        """Keeps what the guest shows when it fails, where it has a display."""
        self.write_manifest: Callable[[LibvirtMachine], None] | None = None
        """Writes down what belongs to the memory image of a checkpoint, once it is there."""
        self.description = ""
        """The domain XML as of the last save, without secrets."""
        self.cpu_before = 0.0
        """Seconds of CPU that the guest had used before it was last restored."""
        self._ip = ""
        self._connection = connection
        self._resources = resources
        self._stop_timeout = stop_timeout
        self._log = log
        self._meter = Meter(connection, name, uuid)
        self._watch = connection.watch(uuid, name)
        self._domain: libvirt.virDomain | None = None
        self._pid = 0
        self._last_report: Status | None = None
        self._saved_in = ""
        self._saved_xml = ""
        self._keep_image = False

    # What the server asks

    def status(self) -> Status:
        if self._resources.claimed:
            return Status(lifecycle.STOPPED)
        if self._saved_in:
            return Status(lifecycle.SUSPENDED)
        try:
            # One round trip; the memory is the balloon's, where there is one.
            state, max_memory, memory, vcpus, cpu_nanoseconds = self._connection.call(self._info)
        except libvirt.libvirtError as error:
            if not faults.is_no_domain(error):
                raise faults.from_libvirt(error, f"asking for the status of {self.name}") from error
            return self._absent()
        except errors.MachineFault as fault:
            # libvirtd is away, but QEMU does not depend on it: what is known still holds.
            if self._last_report is not None and self._is_ours(self._pid):
                self._log(f"{self.name} runs on as process {self._pid} although {fault.problem}")
                return self._last_report
            raise
        if state == libvirt.VIR_DOMAIN_CRASHED:
            self.screenshot()
            self._resources.ended(exit_code.CRASHED)
            self.destroy()
        elif self._watch.disk_error:
            self._watch.disk_error = False
            self.screenshot()
        self._last_report = Status(
            _STATES.get(state, lifecycle.RUNNING),
            cpu_seconds=self.cpu_before + cpu_nanoseconds / 1e9,
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

    def cpu_seconds(self) -> float:
        """What the guest had used when it was last looked at."""
        return self._last_report.cpu_seconds if self._last_report else self.cpu_before

    def metrics(self) -> Metrics | None:
        return None if self._saved_in or self._resources.claimed else self._meter.read()

    def saved_bytes(self) -> int:
        return self.saver.size(self._saved_in) if self._saved_in else 0

    def stop(self) -> None:
        self._resources.to_be_stopped()
        if not self._saved_in:
            try:
                self._call(self._ask_to_power_off)
                if self._watch.gone.wait(self._stop_timeout):
                    self._resources.ended(exit_code.POWERED_OFF_WHEN_ASKED)
                else:
                    self._log(f"{self.name} has not powered off in {self._stop_timeout:g} s: destroying it")
                    self.screenshot()
            except libvirt.libvirtError as error:
                if not faults.is_no_domain(error):
                    self._log(f"{self.name} cannot be asked to power off ({error}): destroying it")
        self.destroy()

    def destroy(self) -> None:
        self._watch.ours = True
        if not self._saved_in:
            try:
                self._call(lambda domain: domain.destroy())
                self._resources.ended(exit_code.DESTROYED)
                self._watch.gone.wait(DESTROY_WAIT)
            except libvirt.libvirtError as error:
                if not faults.is_no_domain(error):
                    raise faults.from_libvirt(error, f"destroying {self.name}") from error
        self.release()

    def undo(self) -> None:
        """Destroy what a start that failed has left, now or, where libvirtd is away, by the guardian."""
        try:
            self.destroy()
        except errors.Fault as fault:
            self._log(f"{self.name} is left to its guardian: {fault.problem}")
            self._resources.leave_to_guardian()

    def release(self) -> None:
        if not self._resources.begin_release():
            return
        self._resources.ended(exit_code.DESTROYED if self._saved_in else self._watch.how)
        self._connection.unwatch(self.uuid)
        if self._saved_in and not self._keep_image:
            self.saver.forget(self._saved_in)
        self._resources.release(kept=self._keep_image)

    def soft_suspend(self) -> None:
        self._operate("pausing", lambda domain: domain.suspend(), errors.VM_NO_SUPPORT_SUSPEND)

    def suspend(self) -> None:
        if reason := other_hypervisors.no_saving(self.domain_type):
            raise errors.ClientFault(errors.VM_NO_SUPPORT_SUSPEND, f"{self.name} cannot be saved: {reason}.")
        self._save(SUSPEND_FILE, checkpoint=False)

    def resume(self, state: str) -> None:
        if state == lifecycle.SOFT_SUSPENDED:
            self._operate("resuming", lambda domain: domain.resume())
        else:
            self._restore()

    def checkpoint(self) -> None:
        if self.no_checkpoint or self.write_manifest is None:
            raise errors.ClientFault(
                errors.VM_NO_SUPPORT_CHECKPOINT, f"{self.name} cannot be checkpointed: {self.no_checkpoint}."
            )
        if self._saved_in:
            self.saver.rename(self._saved_in, MEMORY_FILE)
            self._saved_in = MEMORY_FILE
        else:
            self._save(MEMORY_FILE, checkpoint=True)
        try:
            self.write_manifest(self)
        except BaseException:
            self._restore()
            raise
        self._keep_image = True

    # Saving and restoring

    def _require_ours(self) -> None:
        """Is the guest on this machine, so that its memory can be written to a file of ours?"""
        if self.pid() == 0:
            raise errors.HypervisorFault(
                f"The VM cannot be saved: no process of this machine is the QEMU of {self.name}.",
                "let libvirtd run in the process id namespace of the daemon.",
            )

    def _save(self, name: str, *, checkpoint: bool) -> None:
        self._operate("saving", lambda _domain: None)  # one that is gone is no fault of the hypervisor's
        self._require_ours()

        def save(domain: libvirt.virDomain) -> None:
            _, max_memory, _, _, cpu_nanoseconds = domain.info()
            # libvirtd itself says what the domain is; what is in the file may have been changed by then.
            migratable = libvirt.VIR_DOMAIN_XML_MIGRATABLE
            self._saved_xml = domain.XMLDesc(libvirt.VIR_DOMAIN_XML_SECURE | migratable)
            self.description = domain.XMLDesc(migratable)
            self.saver.save(domain, name, max_memory, self._saved_xml, checkpoint=checkpoint)
            self.cpu_before += cpu_nanoseconds / 1e9

        self._watch.ours = True
        self._watch.gone.clear()
        try:
            self._connection.once(lambda connection: save(self._find(connection)))
        except libvirt.libvirtError as error:
            raise faults.from_libvirt(error, f"saving {self.name}") from error
        finally:
            self._watch.ours = False
        self._saved_in = name
        self._pid = 0
        self._last_report = None
        self._log(f"{self.name} is saved in {name}")

    def _restore(self) -> None:
        descriptor = self.saver.open(self._saved_in)
        try:
            self.restore_from(descriptor, self._saved_xml)
        except libvirt.libvirtError as error:
            raise faults.from_libvirt(error, f"restoring {self.name}") from error
        finally:
            os.close(descriptor)
        # From here on the disks change, and the image no longer goes with them.
        for name in (self._saved_in, MANIFEST_FILE) if self._keep_image else (self._saved_in,):
            self.saver.forget(name)
        self._saved_in = ""
        self._keep_image = False

    def create(self, xml: str, check: Check) -> None:
        """Start the domain: it runs once `check` has seen it. Raises `libvirt.libvirtError`, and what that does.

        Where libvirt's driver of a hypervisor cannot start it paused, it runs while it is looked at.
        """

        def make(connection: libvirt.virConnect) -> libvirt.virDomain:
            try:
                return connection.createXML(xml, libvirt.VIR_DOMAIN_START_PAUSED)
            except libvirt.libvirtError as error:
                if not (not other_hypervisors.is_qemu(self.domain_type) and faults.is_unknown_flag(error)):
                    raise
            return connection.createXML(xml, 0)

        self._begin(make, check)

    def restart_from(self, descriptor: int, xml: str, check: Check) -> None:
        """Restore the domain from a checkpoint's open memory image; otherwise as `create`."""

        def restore(connection: libvirt.virConnect) -> libvirt.virDomain:
            self.saver.hand_over(connection, descriptor, xml, paused=True)
            return self._find(connection)

        self._begin(restore, check)
        self._log(f"{self.name} continues from its saved memory")

    def _begin(self, make: Callable[[libvirt.virConnect], libvirt.virDomain], check: Check) -> None:
        """Make the domain, whose CPUs stand still, have it looked at, and let it run."""

        def begin(connection: libvirt.virConnect) -> None:
            domain = self._domain = make(connection)
            check(connection, domain, domain.XMLDesc())
            if domain.info()[0] == libvirt.VIR_DOMAIN_PAUSED or other_hypervisors.is_qemu(self.domain_type):
                domain.resume()
            else:
                self._watch.resumed.set()

        self._watch.resumed.clear()
        self._watch.ours = True
        try:
            self._connection.once(begin)
            # The events of this come later than the answers, and are nobody's pause.
            self._watch.resumed.wait(EVENT_WAIT)
        finally:
            self._watch.ours = False

    def restore_from(self, descriptor: int, xml: str) -> None:
        """Let the guest continue from an open memory image, as `xml` describes it. Raises `libvirt.libvirtError`."""
        self._watch.gone.clear()
        self._watch.was_saved = False
        self._watch.ours = True
        try:
            self._connection.once(lambda connection: self.saver.restore(connection, descriptor, xml))
        finally:
            self._watch.ours = False
        self._log(f"{self.name} continues from its saved memory")

    # What helps

    def live_xml(self) -> str:
        """The domain as libvirt understood it. Raises `libvirt.libvirtError`."""
        return self._call(lambda domain: str(domain.XMLDesc()))

    def _call(self, function: Callable[[libvirt.virDomain], Result]) -> Result:
        return self._connection.call(lambda connection: function(self._find(connection)))

    def _find(self, connection: libvirt.virConnect) -> libvirt.virDomain:
        self._domain = faults.find(connection, self.name, self.uuid)
        return self._domain

    def _info(self, connection: libvirt.virConnect) -> list[int]:
        """virDomainGetInfo, without looking the domain up again: to ask about a wrong one does no harm."""
        domain = self._domain
        if domain is None or domain.connect() is not connection:
            domain = self._find(connection)
        figures: list[int] = domain.info()
        return figures

    def _operate(self, doing: str, function: Callable[[libvirt.virDomain], object], cannot: str = "") -> None:
        """Do something to the domain. Where its hypervisor knows no such thing the client is told `cannot`."""
        self._watch.ours = True
        try:
            self._call(function)
        except libvirt.libvirtError as error:
            if cannot and faults.is_unsupported(error):
                raise errors.ClientFault(
                    cannot, f"{self.name}: libvirt knows no {doing} of domains of type {self.domain_type}."
                ) from error
            raise faults.from_libvirt(error, f"{doing} {self.name}") from error
        finally:
            self._watch.ours = False

    def _absent(self) -> Status:
        """What it means that libvirt does not know the domain."""
        self._watch.gone.wait(EVENT_WAIT)
        if self._watch.was_saved:
            # By an administrator, to a place that we do not know: the guest is not gone.
            self._log(f"{self.name} was saved by somebody else: virsh restore brings it back")
            return Status(lifecycle.SUSPENDED)
        return Status(lifecycle.STOPPED)

    def _ask_to_power_off(self, domain: libvirt.virDomain) -> None:
        self._watch.ours = True
        if domain.info()[0] == libvirt.VIR_DOMAIN_PAUSED:
            domain.resume()  # a guest whose CPUs stand still hears no ACPI request
        domain.shutdown()

    def _address(self) -> str:
        """The guest's IP address, once the DHCP lease of its libvirt network or the host's ARP table has one."""
        if self._ip or not self.mac:
            return self._ip
        for source in _ADDRESS_SOURCES:
            self._ip = self._address_from(source)
            if self._ip:
                break
        return self._ip

    def _address_from(self, source: int) -> str:
        try:
            found = self._call(lambda domain: domain.interfaceAddresses(source, 0))
        except (libvirt.libvirtError, errors.Fault):
            return ""  # not every network has both, and no status depends on them
        for interface in found.values():
            for address in interface.get("addrs") or ():
                return str(address["addr"])
        return ""

    def _find_pid(self) -> int:
        if self.domain_type == "lxc":
            # The process that made the container, whose descendants all its others are.
            try:
                pid = int(self._call(lambda domain: domain.ID()))
            except (libvirt.libvirtError, errors.Fault):
                return 0
            return pid if self._is_ours(pid) else 0
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
        """Whether the process is this domain's: libvirt puts QEMU's UUID on its command line, or libvirt_lxc's name."""
        if pid <= 0:
            return False
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read(1 << 16)
                if self.domain_type == "lxc":
                    return b"libvirt_lxc" in words and self.name.encode() in words.split(b"\0")
                return self.uuid.encode() in words
        except OSError:
            return False
