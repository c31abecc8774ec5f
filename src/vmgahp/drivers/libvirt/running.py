"""One domain of libvirt that was started: its status, pauses and end; all that a server does itself."""

import time
from _collections_abc import Callable, Mapping, Sequence

from vmgahp import errors, lifecycle
from vmgahp.drivers.base import Deadlines, Logger
from vmgahp.drivers.libvirt import binding as libvirt
from vmgahp.drivers.libvirt import ending, faults, qemu_process
from vmgahp.drivers.libvirt.address import GuestAddress
from vmgahp.drivers.libvirt.agent import GuestAgent
from vmgahp.drivers.libvirt.guest import EVENT_WAIT, LibvirtGuest, let_run
from vmgahp.drivers.libvirt.io_error import IoErrors
from vmgahp.drivers.libvirt.stats import Meter, cpu_seconds
from vmgahp.drivers.lifecycle import ManagedMachine
from vmgahp.drivers.resources import Resources
from vmgahp.host import proc
from vmgahp.job import exit_code, published
from vmgahp.metrics import Metrics, Status

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

CALL_SECONDS = 20.0
"""Seconds for a call to libvirt that ends a VM; it takes 15 s to destroy a domain that does not end."""

DESTROY_WAIT = 10.0
"""Seconds to wait for the event that says that a destroyed domain is gone."""

LOOK_INTERVAL = 0.5
"""Seconds between two checks of a guest that was asked to power off, or whose save has lost its libvirtd."""


class RunningMachine(ManagedMachine):
    """A transient domain: when it stops, libvirt forgets it, and nothing is left to undefine."""

    def __init__(self, guest: LibvirtGuest, resources: Resources, deadlines: Deadlines, log: Logger) -> None:
        super().__init__(guest.name, resources, deadlines, log)
        self.guest = guest
        self.uuid = guest.uuid
        self.mac = ""
        self.screenshot: Callable[[], None] = lambda: None
        """A callback that keeps the guest's display when it fails, if it has one."""
        self.io_errors = IoErrors(guest, lambda why: self.give_up(exit_code.DISK_ERROR, why), log)
        self.io_errors.at_first = lambda: self.screenshot()
        self.has_address: Callable[[str], None] = lambda _address: None
        """A callback for the guest's address, called with each STATUS."""
        self.io_errors.paused = lambda why: self.news.publish(published.PAUSED, why)
        guest.watch.ending = self._last_look
        self.agent: GuestAgent | None = None
        """The guest's agent, if it has a port for one and this process serves the VM."""
        self._address = GuestAddress()
        self._meter = Meter(guest.connection, guest.name, guest.uuid)
        self._last_report: Status | None = None

    def serve(self) -> None:
        """Start the companions of the running VM, which this process serves from now on."""
        for begin in self.resources.while_running:
            try:
                begin(self)
            except Exception as error:  # noqa: BLE001 - a companion that fails is no reason to lose the VM
                self.log(f"{self.name} runs without what was to accompany it: {error}")

    def disk_files(self) -> Mapping[str, int]:
        """Return the descriptors of the job's disks that its QEMU has, by libvirt's groups."""
        return self.guest.files.files() if self.guest.files is not None else {}

    def was_saved_after_all(self) -> bool:
        """Return True if a save with unknown outcome turns out to have completed, so that this VM is SUSPENDED."""
        return False

    def look(self) -> Status:
        if self.was_saved_after_all():
            self.state = lifecycle.SUSPENDED
            return Status(lifecycle.SUSPENDED)
        try:
            # One round trip; the memory is the balloon's, where there is one.
            state, max_memory, memory, vcpus, cpu_nanoseconds = self.guest.connection.call(self.guest.info)
        except libvirt.libvirtError as error:
            if not faults.is_no_domain(error):
                raise faults.from_libvirt(error, f"asking for the status of {self.name}") from error
            return self._absent()
        except errors.MachineFault as fault:
            # libvirtd is down, but QEMU does not depend on it: the last status is still valid.
            if self._last_report is not None and (pid := self.guest.known_pid()):
                self.log(f"{self.name} runs on as process {pid} although {fault.problem}")
                return self._last_report
            raise
        if state == libvirt.VIR_DOMAIN_CRASHED:
            self.screenshot()
            self.resources.ended(exit_code.CRASHED, self.guest.watch.ended_at)
            self.destroy()
        elif state == libvirt.VIR_DOMAIN_PAUSED and self.state is lifecycle.RUNNING and self.io_errors.look():
            state = libvirt.VIR_DOMAIN_RUNNING  # HTCondor has not suspended the VM, and need not resume it
        if self._last_report is None:
            self.pid()  # looked up while libvirtd answers, to find the guest when it does not
        if self.mac and (known_here := self._address.find(self.guest.call)):
            self.has_address(known_here[0])  # never the guest's own claim, since a port of this machine may lead there
        addresses = self.addresses()
        self._last_report = Status(
            _STATES.get(state, lifecycle.RUNNING),
            cpu_seconds=self.usage.read(cpu_seconds(cpu_nanoseconds)),
            vcpus=vcpus,
            memory_kib=self._resident(memory),
            max_memory_kib=max_memory,
            mac=self.mac,
            ip=addresses[0] if addresses else "",
        )
        if self.agent is not None and self.state is lifecycle.RUNNING:
            self.agent.look()
        return self._last_report

    def _resident(self, memory_kib: int) -> int:
        """Return the KiB of the guest's memory on this machine: at most what its QEMU occupies, huge pages included."""
        known = proc.memory_kib(self.guest.noted_pid) if qemu_process.is_qemu(self.guest.type) else None
        return memory_kib if known is None else min(memory_kib, known[0])

    def addresses(self) -> Sequence[str]:
        return (self.agent.addresses if self.agent is not None else ()) or self._address.found

    def pid(self) -> int:
        return self.guest.pid()

    def process(self) -> int:
        return self.guest.known_pid()

    def metrics(self) -> Metrics | None:
        if self.state not in (lifecycle.RUNNING, lifecycle.SOFT_SUSPENDED):
            return None
        found = self._meter.read()
        if found is not None and self.state in (lifecycle.RUNNING, lifecycle.SOFT_SUSPENDED):
            self.usage.at_least(found.cpu_seconds)
        return found

    # The end

    def ask_to_power_off(self) -> None:
        def ask(domain: libvirt.virDomain) -> None:
            let_run(domain)  # a paused guest does not receive an ACPI request
            if self.agent is None or not self.agent.power_off(self.deadlines.stop):
                # By default libvirt would wait for an agent that does not answer.
                try:
                    domain.shutdownFlags(libvirt.VIR_DOMAIN_SHUTDOWN_ACPI_POWER_BTN if is_qemu else 0)
                except libvirt.libvirtError:
                    if not self.guest.watch.gone.wait(EVENT_WAIT):  # it may just have obeyed its agent
                        raise

        is_qemu = qemu_process.is_qemu(self.guest.type)

        self.guest.operate("asking to power off", ask, seconds=self.deadlines.usual)

    def wait_until_off(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not self.overruled and (left := end - time.monotonic()) > 0:
            if self.guest.watch.gone.wait(min(left, LOOK_INTERVAL)):
                return True
        if not self.overruled:
            self.screenshot()
        return False

    def end_guest(self) -> None:
        self.guest.watch.ours = True
        try:
            self.guest.call(ending.end, seconds=self.deadlines.usual)
            self._hear_its_end(DESTROY_WAIT)
        except libvirt.libvirtError as error:
            if not faults.is_no_domain(error):
                self._kill(faults.from_libvirt(error, f"destroying {self.name}"))
            elif self.state is not lifecycle.STARTING:
                self._hear_its_end(EVENT_WAIT)
        except errors.MachineFault as fault:
            self._kill(fault)

    def _hear_its_end(self, seconds: float) -> None:
        """Wait for the event with the reason of the end, since the guest may have ended before it was destroyed."""
        watch = self.guest.watch
        if watch.gone.wait(seconds) and watch.how == exit_code.POWERED_OFF:
            self.resources.not_ended(exit_code.DESTROYED)
            self._say_how_it_ended()

    def _kill(self, fault: errors.Fault) -> None:
        """Kill the guest's process without libvirt, or raise `fault`, for which libvirt has not ended the guest."""
        if not self.guest.kill():
            raise fault
        self.log(f"{self.name}: {fault.problem} Its QEMU was killed")

    def destroy(self) -> None:
        self._say_how_it_ended()  # it may have ended on its own
        super().destroy()

    def _say_how_it_ended(self) -> None:
        how, reason, end = self.guest.watch.how, "", self.resources.exit
        if how == exit_code.CRASHED and end is not None and not end.how:
            reason, is_limit = self.guest.why_killed()
            how = exit_code.OUT_OF_MEMORY if is_limit else how
            if reason:
                self.log(f"{self.name}: {reason}")
        self.resources.ended(how, self.guest.watch.ended_at, reason)

    def clear_up(self) -> None:
        self.guest.watch.gone.wait(EVENT_WAIT)  # a guest that is off remains while libxl clears up after it
        self._say_how_it_ended()
        self.end_guest()

    def before_release(self) -> None:
        self._say_how_it_ended()
        self.io_errors.end()
        self.guest.connection.unwatch(self.uuid)

    def _last_look(self) -> None:
        """Record the CPU time of a guest that has powered off or crashed, before its process goes."""
        if qemu_process.is_qemu(self.guest.type):
            self.usage.at_least(proc.cpu_seconds(self.guest.known_pid()))

    def pause(self) -> None:
        seconds = self.deadlines.usual
        with self.io_errors.held():
            self.guest.operate("pausing", lambda domain: domain.suspend(), errors.VM_NO_SUPPORT_SUSPEND, seconds)

    def unpause(self) -> None:
        def resume(domain: libvirt.virDomain) -> None:
            if domain.info()[0] != libvirt.VIR_DOMAIN_RUNNING:  # libvirtd itself resumes what it finds in a save
                domain.resume()

        self.guest.operate("resuming", resume, seconds=self.deadlines.usual)
        self.io_errors.let_go()
        self.goes_on()

    def goes_on(self) -> None:
        """Note that the guest runs again after it was paused."""
        if self.agent is not None:
            self.agent.resumed()

    def _absent(self) -> Status:
        """Return the status of a domain that libvirt does not know."""
        self.guest.watch.gone.wait(EVENT_WAIT)
        if self.guest.watch.was_saved:
            # An administrator has saved it to an unknown place: the guest is not gone.
            way = "virsh restore --xml brings it back, without fdgroup and memtune"
            self.log(f"{self.name} was saved by somebody else: {way}")
            return Status(lifecycle.SUSPENDED)
        return Status(lifecycle.STOPPED)
