"""One domain of libvirt, as the server sees it."""

import os
import threading
import time
from collections.abc import Callable

from vmgahp import errors, lifecycle
from vmgahp.checkpoint.store import MEMORY_FILE
from vmgahp.drivers.base import Deadlines, Logger
from vmgahp.drivers.libvirt import binding as libvirt
from vmgahp.drivers.libvirt import faults, names, other_hypervisors
from vmgahp.drivers.libvirt.address import GuestAddress
from vmgahp.drivers.libvirt.faults import ConnectionLost
from vmgahp.drivers.libvirt.guest import EVENT_WAIT, Check, LibvirtGuest, Make, let_run
from vmgahp.drivers.libvirt.io_error import IoErrors
from vmgahp.drivers.libvirt.save import SUSPEND_FILE, MemoryFile, Saver
from vmgahp.drivers.libvirt.stats import Meter, cpu_seconds
from vmgahp.drivers.lifecycle import ManagedMachine
from vmgahp.drivers.resources import Resources
from vmgahp.host import proc, threads
from vmgahp.host.light import NamedTuple
from vmgahp.job import exit_code
from vmgahp.metrics import Metrics, Status

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vmgahp.drivers.libvirt.checkpoint import JobCheckpoints, LibvirtRestart
    from vmgahp.drivers.libvirt.hooks import Described

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

DESTROY_WAIT = 10.0
"""Seconds to wait for the event that says that a destroyed domain is gone."""

RESTORE_SHARE = 2 / 3
"""Of the time that the client waits: the rest is for a guest that boots afresh in a START."""

LOOK_INTERVAL = 0.5
"""Seconds between two looks at a guest that was asked to power off, or whose save has lost its libvirtd."""


class Order(NamedTuple):
    """What a start is to launch."""

    described: "Described"
    restart: "LibvirtRestart | None"
    """The checkpoint that it goes on from."""


class LibvirtMachine(ManagedMachine):
    """A transient domain: when it stops, libvirt forgets it, and nothing is left to undefine."""

    def __init__(
        self, guest: LibvirtGuest, resources: Resources, saver: Saver, deadlines: Deadlines, log: Logger
    ) -> None:
        super().__init__(guest.name, resources, deadlines, log)
        self.guest = guest
        self.uuid = guest.uuid
        self.mac = ""
        self.saver = saver
        self.screenshot: Callable[[], None] = lambda: None
        """Keeps what the guest shows when it fails, where it has a display."""
        self.checkpoints: JobCheckpoints
        self.order: Order
        """What is to be launched."""
        self.description = ""
        """The domain XML as of the last save, without secrets."""
        self.io_errors = IoErrors(guest, self._give_up, log)
        self.io_errors.at_first = lambda: self.screenshot()
        guest.watch.ending = self._last_look
        self._address = GuestAddress()
        self._meter = Meter(guest.connection, guest.name, guest.uuid)
        self._last_report: Status | None = None
        self._image = ""
        """The memory image of a VM that is saved."""
        self._saved_xml = ""
        self._unsure: MemoryFile | None = None
        """The memory image of a save of which nobody could say whether it was done."""

    # What the server asks

    def look(self) -> Status:
        if self._unsure is not None and self._settle():
            with self.io_errors.held():
                self._keep(self._unsure)
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
            # libvirtd is away, but QEMU does not depend on it: what is known still holds.
            if self._last_report is not None and (pid := self.guest.known_pid()):
                self.log(f"{self.name} runs on as process {pid} although {fault.problem}")
                return self._last_report
            raise
        if state == libvirt.VIR_DOMAIN_CRASHED:
            self.screenshot()
            self.resources.ended(exit_code.CRASHED, self.guest.watch.ended_at)
            self.destroy()
        elif state == libvirt.VIR_DOMAIN_PAUSED and self.state is lifecycle.RUNNING and self.io_errors.look():
            state = libvirt.VIR_DOMAIN_RUNNING  # HTCondor has suspended nothing, and need not resume it
        if self._last_report is None:
            self.pid()  # while libvirtd answers: by it a guest is known when libvirtd is away
        self._last_report = Status(
            _STATES.get(state, lifecycle.RUNNING),
            cpu_seconds=self.usage.read(cpu_seconds(cpu_nanoseconds)),
            vcpus=vcpus,
            memory_kib=memory,
            max_memory_kib=max_memory,
            mac=self.mac,
            ip=self._address.find(self.guest.call) if self.mac else "",
        )
        return self._last_report

    def pid(self) -> int:
        return self.guest.pid()

    def metrics(self) -> Metrics | None:
        if self.state not in (lifecycle.RUNNING, lifecycle.SOFT_SUSPENDED):
            return None
        found = self._meter.read()
        if found is not None and self.state in (lifecycle.RUNNING, lifecycle.SOFT_SUSPENDED):
            self.usage.at_least(found.cpu_seconds)
        return found

    def saved_bytes(self) -> int:
        return self.saver.size(self._image) if self._image else 0

    # The end

    def ask_to_power_off(self) -> None:
        def ask(domain: libvirt.virDomain) -> None:
            let_run(domain)  # a guest whose CPUs stand still hears no ACPI request
            domain.shutdown()

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
            self.guest.call(names.end, seconds=self.deadlines.usual)
            self.guest.watch.gone.wait(DESTROY_WAIT)
        except libvirt.libvirtError as error:
            if not faults.is_no_domain(error):
                self._kill(faults.from_libvirt(error, f"destroying {self.name}"))
        except errors.MachineFault as fault:
            self._kill(fault)

    def _kill(self, fault: errors.Fault) -> None:
        """End the guest without libvirt, which does not, or raise why it does not."""
        if not self.guest.kill():
            raise fault
        self.log(f"{self.name}: {fault.problem} Its QEMU was killed")

    def destroy(self) -> None:
        self._say_how_it_ended()  # it may have done so by itself
        super().destroy()

    def _say_how_it_ended(self) -> None:
        self.resources.ended(self.guest.watch.how, self.guest.watch.ended_at)

    def clear_up(self) -> None:
        self.guest.watch.gone.wait(EVENT_WAIT)  # one that is off is still there while libxl clears up after it
        self._say_how_it_ended()
        self.end_guest()

    def before_release(self) -> None:
        self._say_how_it_ended()
        if self.state is lifecycle.STARTING:
            self.put_back()  # not before the guest is gone: it may have run although its start failed
        self.io_errors.end()
        self.guest.connection.unwatch(self.uuid)
        self._forget_unsure()
        self.saver.forget_the_rest()

    def _last_look(self) -> None:
        """The guest has powered off or crashed, and its process is about to go."""
        if other_hypervisors.is_qemu(self.guest.type):
            self.usage.at_least(proc.cpu_seconds(self.guest.known_pid()))

    def _give_up(self, why: str) -> None:
        """The next STATUS finds the guest gone, and tells the starter, which hears nothing before."""
        self.log(f"{self.name} ends as a failure: {why}")
        self.resources.ended(exit_code.DISK_ERROR, time.time(), why)
        self.end_guest()

    # Saving and restoring

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

    def save(self, operation: str) -> None:
        self.require_saving(operation)
        self.guest.operate("saving", lambda _domain: None)  # one that is gone is no fault of the hypervisor's
        self._require_ours()
        _, max_memory, _, _, cpu_nanoseconds = self.guest.call(lambda domain: domain.info())
        # libvirtd itself says what the domain is; what is in the file may have been changed by then.
        migratable = libvirt.VIR_DOMAIN_XML_MIGRATABLE
        self._saved_xml = self.guest.call(lambda domain: domain.XMLDesc(libvirt.VIR_DOMAIN_XML_SECURE | migratable))
        self.description = self.guest.call(lambda domain: domain.XMLDesc(migratable))
        image = self.saver.begin(MEMORY_FILE if operation == lifecycle.CHECKPOINT else SUSPEND_FILE, max_memory)
        self.guest.watch.ours = True
        self.guest.watch.gone.clear()
        try:
            with self.io_errors.held():
                self._write(image, checkpoint=operation == lifecycle.CHECKPOINT)
                self.usage.read(cpu_seconds(cpu_nanoseconds))
                self.step("save.written")
                self._keep(image)
        finally:
            self.guest.watch.ours = False
            if image is not self._unsure:
                image.close()

    def require_saving(self, operation: str) -> None:
        """Raises `errors.ClientFault` where the VM's memory cannot be saved."""
        reason = self.saver.cannot or other_hypervisors.no_saving(self.guest.type)
        if reason:
            raise errors.ClientFault(errors.VM_NO_SUPPORT_SUSPEND, f"{self.name} cannot be saved: {reason}.")

    def keep_saved(self) -> None:
        self.saver.rename(self._image, MEMORY_FILE)
        self._image = MEMORY_FILE

    def write_manifest(self) -> None:
        self.checkpoints.write(self)

    def restore(self, before_it_runs: Callable[[], None]) -> None:
        descriptor = self.saver.open(self._image)
        try:
            self._restore_from(descriptor, before_it_runs)
        finally:
            os.close(descriptor)
        self.io_errors.let_go()

    def set_aside(self) -> None:
        self.checkpoints.store.begin_restart()

    def put_back(self) -> None:
        self.checkpoints.store.put_back()

    def forget_saved(self) -> None:
        if self._image == MEMORY_FILE:
            self.checkpoints.store.discard()
        elif self._image:
            self.saver.forget(self._image)
        self._image = ""

    def _require_ours(self) -> None:
        """Is the guest on this machine, so that its memory can be written to a file of ours?"""
        if self.pid() == 0:
            raise errors.HypervisorFault(
                f"The VM cannot be saved: no process of this machine is the QEMU of {self.name}.",
                "let libvirtd run in the process id namespace of the daemon.",
            )

    def _write(self, image: MemoryFile, *, checkpoint: bool) -> None:
        """Have the memory written, which ends the domain. Raises `errors.Fault` where it runs on, or nobody knows."""
        try:
            self.guest.connection.once(
                lambda connection: self.saver.write(
                    faults.find(connection, self.name, self.uuid), image.path, checkpoint=checkpoint
                )
            )
        except ConnectionLost as lost:
            self.log(f"libvirtd went away while it saved {self.name}: {lost}")
            self._unsure = image
            if not self._wait_for_outcome():
                raise errors.HypervisorFault(
                    f"{self.name} was not saved, and runs on: {lost}", "see why libvirtd went away."
                ) from lost
        except libvirt.libvirtError as error:
            raise faults.from_libvirt(error, f"saving {self.name}") from error

    def _wait_for_outcome(self) -> bool:
        """What `_settle` says, as soon as it can be said."""
        end = time.monotonic() + self.deadlines.memory
        while True:
            try:
                return self._settle()
            except errors.MachineFault:
                if self.lost or self.overruled or time.monotonic() >= end:
                    raise
            time.sleep(LOOK_INTERVAL)

    def _settle(self) -> bool:
        """Whether a save whose libvirtd went away has saved the guest after all; False where the guest runs on.

        libvirtd may have died before the memory was written or after it, and may still be at it. Raises
        `errors.MachineFault` where that cannot be said yet, and where the guest is lost.
        """
        try:
            saving = self.guest.call(lambda domain: domain.jobInfo())[0] != libvirt.VIR_DOMAIN_JOB_NONE
            if not saving and self.state is lifecycle.RUNNING:
                self.guest.call(let_run)
        except libvirt.libvirtError as error:
            if not faults.is_no_domain(error):
                raise faults.from_libvirt(error, f"looking what has become of {self.name}") from error
        else:
            if saving:
                raise errors.HypervisorFault(f"libvirt is still saving {self.name}.", "ask again later.")
            self._forget_unsure()
            return False
        if self._unsure is None or not self._unsure.is_whole():
            self._forget_unsure()
            raise self.report_lost(
                f"{self.name} is lost: libvirtd and QEMU went away while its memory was being written.",
                "see why they ended; the job has to start again.",
            )
        return True

    def _forget_unsure(self) -> None:
        if self._unsure is not None:
            self._unsure.close()
            self._unsure = None

    def _keep(self, image: MemoryFile) -> None:
        """The guest is gone and its memory whole: keep it, or have the guest run again. Raises `errors.Fault`.

        Where neither can be done, as on a file system that has become read-only, it stays where it is.
        """
        name = image.name
        try:
            image.keep()
        except (OSError, errors.Fault) as error:
            try:
                self._restore_from(image.descriptor, lambda: None)
            except errors.Fault as fault:
                self.log(f"{self.name} cannot run on ({fault.problem}), nor its memory be called {name}: {error}")
                name = image.leave()
            else:
                raise self.saver.fault(f"{name} cannot be kept in {self.saver.directory}: {error}") from error
        finally:
            image.close()
        self._image = name
        self._last_report = None
        self._unsure = None
        self.usage.carry()
        self.log(f"{self.name} is saved in {name}")

    def _restore_from(self, descriptor: int, before_it_runs: Callable[[], None]) -> None:
        """Let the guest continue from an open memory image, or leave no domain. Raises `errors.Fault`."""
        self.end_guest()  # an attempt that libvirtd did not outlive may have left one
        try:
            self.restart_from(descriptor, self._saved_xml, lambda *_: before_it_runs())
        except BaseException as error:
            self.end_guest()
            if isinstance(error, libvirt.libvirtError):
                raise faults.from_libvirt(error, f"restoring {self.name}") from error
            raise

    def restart_from(self, descriptor: int, xml: str, check: Check) -> None:
        """Restore the domain from an open memory image; it runs once `check` has seen it. Raises as `begin`.

        QEMU may wait for ever for what an image lacks: one that is not restored in time is ended.
        """
        seconds = self.deadlines.memory * RESTORE_SHARE
        late = threading.Event()

        def give_up() -> None:
            late.set()
            try:
                self.end_guest()
            except errors.Fault as fault:
                self.log(f"{self.name}, which is not restored in time: {fault.problem}")

        def restore(connection: libvirt.virConnect) -> libvirt.virDomain:
            try:
                with self.guest.defined(connection, xml), threads.overseen("the restore", seconds, give_up):
                    self.saver.restore(connection, descriptor, xml)
            except libvirt.libvirtError as error:
                if not late.is_set():
                    raise
                raise errors.HypervisorFault(
                    f"{self.name} was not restored from its saved memory within {seconds:g} s.",
                    "see what QEMU has waited for, and raise VM_GAHP_REQ_TIMEOUT where that was the disk.",
                ) from error
            return faults.find(connection, self.name, self.uuid)

        self.begin(restore, check)
        self.log(f"{self.name} continues from its saved memory")

    def begin(self, make: Make, check: Check) -> None:
        """As `LibvirtGuest.begin`."""
        self.guest.begin(make, check)

    def create(self, xml: str, check: Check) -> None:
        """Start the domain: it runs once `check` has seen it. Raises as `LibvirtGuest.begin`."""
        self.begin(self.guest.made_from(xml), check)

    # What helps

    def live_xml(self) -> str:
        """The domain as libvirt understood it. Raises `libvirt.libvirtError`."""
        return self.guest.call(lambda domain: str(domain.XMLDesc()))

    def _absent(self) -> Status:
        """What it means that libvirt does not know the domain."""
        self.guest.watch.gone.wait(EVENT_WAIT)
        if self.guest.watch.was_saved:
            # By an administrator, to a place that we do not know: the guest is not gone.
            self.log(f"{self.name} was saved by somebody else: virsh restore --xml brings it back, without fdgroup")
            return Status(lifecycle.SUSPENDED)
        return Status(lifecycle.STOPPED)
