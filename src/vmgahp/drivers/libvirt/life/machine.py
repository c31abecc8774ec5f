"""One domain of libvirt from its start to its end, and all operations on it."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import libvirt

from vmgahp import errors, lifecycle
from vmgahp.checkpoint.store import MEMORY_FILE, CheckpointStore
from vmgahp.drivers.libvirt.life import usage
from vmgahp.drivers.libvirt.life.guest import EVENT_WAIT, Check, GuestAddress, GuestAgent, LibvirtGuest, Make, let_run
from vmgahp.drivers.libvirt.life.pauses import IoErrors
from vmgahp.drivers.libvirt.life.save import RESTORE_SHARE, SUSPEND_FILE, LibvirtRestart, MemoryFile, Saver
from vmgahp.drivers.libvirt.link import domains, faults
from vmgahp.drivers.libvirt.start import forwarding
from vmgahp.drivers.libvirt.start.hooks import Described
from vmgahp.drivers.managed import Deadlines, ManagedMachine
from vmgahp.drivers.resources import Resources
from vmgahp.drivers.surveyor import Logger
from vmgahp.host import budget, proc, system_logs, wait
from vmgahp.host.system_calls import Opened
from vmgahp.job import exit_code, published
from vmgahp.metrics import Metrics, Status

_STATES = usage.STATES | dict.fromkeys(usage.OVER, lifecycle.STOPPED)
"""The states of ours for libvirt's; any other is RUNNING, also SHUTDOWN: gone at the next look."""

CALL_SECONDS = 20.0
"""Seconds for a call to libvirt that ends a VM; it takes 15 s to destroy a domain that does not end."""
DESTROY_WAIT = 10.0
"""Seconds to wait for the event that says that a destroyed domain is gone."""
LOOK_INTERVAL = 0.5
"""Seconds between two checks of a guest that was asked to power off, or whose save has lost its libvirtd."""


class LibvirtMachine(ManagedMachine):
    """A transient domain: when it stops, libvirt forgets it, and nothing is left to undefine."""

    def __init__(
        self, guest: LibvirtGuest, resources: Resources, saver: Saver, deadlines: Deadlines, log: Logger
    ) -> None:
        super().__init__(guest.name, resources, deadlines, log)
        self.guest = guest
        self.uuid = guest.uuid
        self.mac = ""
        self.screenshot: Callable[[], None] = lambda: None
        """A callback that keeps the guest's display when it fails, if it has one."""
        self.io_errors = IoErrors(guest, self.give_up, log)
        self.io_errors.at_first = lambda: self.screenshot()
        self.has_address: Callable[[str], None] = lambda _address: None
        """A callback for the guest's address, called with each STATUS."""
        self.io_errors.paused = lambda why: self.updates.publish(published.PAUSED, why)
        guest.watch.ending = self._last_look
        self.agent: GuestAgent | None = None  # the guest's agent, if it has a port for one
        self._address = GuestAddress()
        self._meter = usage.Meter(guest.connection, guest.name, guest.uuid)
        self._last_report: Status | None = None
        self.resumed: Callable[[], None] = lambda: None
        """A callback for a saved guest that runs again, in a new process that may have other ports."""
        self.saver = saver
        saver.seconds = deadlines.memory
        self.store: CheckpointStore  # the place of the job's checkpoint
        self.write_checkpoint: Callable[[str, str, float], None]
        """A function that writes the manifest, with the UUID, the description and the CPU time."""
        self.described: Described
        self.restart: LibvirtRestart | None = None
        """The checkpoint from which the start continues the VM; None for a new guest."""
        self.plugged: tuple[str, ...] = ()
        """The NICs that are plugged into a guest which waited for any job, each as its XML."""
        self.limits = usage.Limits()
        self.description = ""  # the domain XML as of the last save, without secrets
        self.image = ""  # the name of the memory image of a VM that is saved
        self.saved_xml = ""  # the domain XML to restore
        self.unsure: MemoryFile | None = None  # the memory image of a save with unknown outcome

    def serve(self) -> None:
        """Start the companions of the running VM."""
        for begin in self.resources.while_running:
            try:
                begin()
            except Exception as error:  # noqa: BLE001 - a companion that fails is no reason to lose the VM
                self.log(f"{self.name} runs without what was to accompany it: {error}")

    def attach_agent(self, macs: Iterable[str], *, is_late: bool) -> None:
        """Attach the agent to the guest, which runs; `is_late` says that its clock has stood still."""
        self.agent = GuestAgent(self.guest, macs, self.log)
        self.guest.watch.agent_came = self.agent.look
        if is_late:
            self.agent.resumed()
        self.agent.look()  # it may have connected before

    def look(self) -> Status:
        if self.unsure is not None and self._settle():  # a save with unknown outcome has completed after all
            with self.io_errors.held():
                self._keep(self.unsure)
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
        # At most what its QEMU occupies, huge pages included.
        resident = proc.memory_kib(self.guest.noted_pid) if domains.is_qemu(self.guest.type) else None
        self._last_report = Status(
            _STATES.get(state, lifecycle.RUNNING),
            cpu_seconds=self.usage.read(usage.cpu_seconds(cpu_nanoseconds)),
            vcpus=vcpus,
            memory_kib=memory if resident is None else min(memory, resident[0]),
            max_memory_kib=max_memory,
            mac=self.mac,
            ip=addresses[0] if addresses else "",
        )
        if self.agent is not None and self.state is lifecycle.RUNNING:
            self.agent.look()
        return self._last_report

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

    def saved_bytes(self) -> int:
        return self.saver.identity.occupied_scratch(self.saver.directory, self.image) if self.image else 0

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

        is_qemu = domains.is_qemu(self.guest.type)
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
            self.guest.call(domains.end, seconds=self.deadlines.usual)
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
        if not domains.kill(self.name, self.uuid):
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

    def _last_look(self) -> None:
        """Record the CPU time of a guest that has powered off or crashed, before its process goes."""
        if domains.is_qemu(self.guest.type):
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

    def before_release(self) -> None:
        if self.state is lifecycle.STARTING:
            self.put_back()  # after the guest is gone: it may have run although its start failed
        self.forget_unsure()
        self.saver.forget_the_rest()
        self._say_how_it_ended()
        self.io_errors.end()
        self.guest.connection.unwatch(self.uuid)

    # Saving and restoring

    def save(self, operation: str) -> None:
        self.require_saving()
        if self.unsure is not None:
            self._settle()  # which closes the image of an earlier attempt, if the guest runs on
        # Ask libvirtd for the XML, since the one in the file may have been changed by then.
        whole = libvirt.VIR_DOMAIN_XML_MIGRATABLE
        secrets = libvirt.VIR_DOMAIN_XML_SECURE | whole
        (_, max_memory, _, _, cpu_nanoseconds), *described = self.guest.operate(
            "saving", lambda domain: (domain.info(), domain.XMLDesc(secrets), domain.XMLDesc(whole))
        )
        self.saved_xml, self.description = (usage.without_limits(self.limits, xml) for xml in described)
        if domains.is_qemu(self.guest.type) and self.pid() == 0:  # its memory is to be written to a file here
            problem = f"The VM cannot be saved: no process of this machine is the QEMU of {self.name}."
            raise errors.HypervisorFault(problem, "let libvirtd run in the process id namespace of the daemon.")
        is_checkpoint = operation == lifecycle.CHECKPOINT
        with self.saver.identity.at_hand():  # one fork for all that is done as the job's user
            image = self.saver.begin(MEMORY_FILE if is_checkpoint else SUSPEND_FILE, max_memory)
            self.guest.watch.ours = True
            self.guest.watch.gone.clear()
            try:
                with self.io_errors.held():
                    self._write(image, checkpoint=is_checkpoint)
                    self.usage.read(usage.cpu_seconds(cpu_nanoseconds))
                    self.step("save.written")
                    self._keep(image)
            finally:
                self.guest.watch.ours = False
                if image is not self.unsure:
                    image.close()

    def require_saving(self) -> None:
        """Check that the VM's memory can be saved. Raises `errors.ClientFault` if not."""
        if self.saver.cannot:
            raise errors.ClientFault(errors.VM_NO_SUPPORT_SUSPEND, f"{self.name} cannot be saved: {self.saver.cannot}.")

    def keep_saved(self) -> None:
        self.saver.rename(self.image, MEMORY_FILE)
        self.image = MEMORY_FILE

    def write_manifest(self) -> None:
        self.write_checkpoint(self.uuid, self.description, self.usage.seconds)

    def restore(self, before_it_runs: Callable[[], None]) -> None:
        with Opened(self.saver.open(self.image)) as descriptor:
            self._restore_from(descriptor, before_it_runs)
        self.io_errors.let_go()
        self.resumed()
        if self.agent is not None:
            self.agent.resumed()

    def forget_saved(self) -> None:
        if self.image == MEMORY_FILE:
            self.store.discard()
        elif self.image:
            self.saver.forget(self.image)
        self.image = ""

    def _write(self, image: MemoryFile, *, checkpoint: bool) -> None:
        """Have libvirt write the memory, which ends the domain. Raises `errors.Fault` if it may still run."""
        began = time.time()
        try:
            self.guest.connection.once(
                lambda opened: self.saver.write(self.guest.find(opened), image.path, checkpoint=checkpoint)
            )
        except faults.ConnectionLost as lost:
            self.log(f"libvirtd went away while it saved {self.name}: {lost}")
            self.unsure = image
            if not self._wait_for_outcome():
                problem = f"{self.name} was not saved, and runs on: {lost}"
                raise errors.HypervisorFault(problem, "see why libvirtd went away.") from lost
        except libvirt.libvirtError as error:
            if faults.is_blocked(error):
                problem = f"{self.name} cannot be saved: {faults.message_of(error)}"
                raise errors.ClientFault(errors.VM_NO_SUPPORT_SUSPEND, problem) from error
            if faults.is_closed(error):
                raise self.saver.fault(f"{faults.CLOSED}: {faults.message_of(error)}") from error
            raise self._fault(error, "saving", began) from error

    def _fault(self, error: libvirt.libvirtError, doing: str, began: float) -> errors.Fault:
        """Return the fault for an error of libvirt's, with what a security module has denied since `began`."""
        fault = faults.from_libvirt(error, f"{doing} {self.name}")
        return system_logs.with_denial(fault, system_logs.denial_since(began))

    def _wait_for_outcome(self) -> bool:
        end = time.monotonic() + self.deadlines.memory
        while True:
            try:
                return self._settle()
            except errors.MachineFault:
                if self.lost or self.overruled or time.monotonic() >= end:
                    raise
            time.sleep(LOOK_INTERVAL)

    def _settle(self) -> bool:
        """Return True if a save whose libvirtd went away has completed after all; False if the guest runs on.

        libvirtd may have died before or after the memory was written, and may still be writing it. Raises
        `errors.MachineFault` if the outcome is not known yet, and if the guest is lost.
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
            self.forget_unsure()
            return False
        if self.unsure is None or not self.unsure.is_whole():
            self.forget_unsure()
            problem = f"{self.name} is lost: libvirtd and QEMU went away while its memory was being written."
            raise self.report_lost(problem, "see why they ended; the job has to start again.")
        return True

    def forget_unsure(self) -> None:
        if self.unsure is not None:
            self.unsure.close()
            self.unsure = None

    def _keep(self, image: MemoryFile) -> None:
        """Keep a gone guest's memory; else let the guest run, or leave the image. Raises `errors.Fault`."""
        name = image.name
        try:
            image.keep()
        except (OSError, errors.Fault) as error:
            try:
                self._restore_from(image.to_restore(), lambda: None)
            except errors.Fault as fault:
                self.log(f"{self.name} cannot run on ({fault.problem}), nor its memory be called {name}: {error}")
                name = image.leave()
            else:
                if self.state is lifecycle.SOFT_SUSPENDED:
                    self.pause()
                raise self.saver.fault(f"{name} cannot be kept in {self.saver.directory}: {error}") from error
        finally:
            image.close()
            self.unsure = None
        self.image = name
        self._last_report = None
        self.usage.carry()
        self.log(f"{self.name} is saved in {name}")

    def _restore_from(self, descriptor: int, before_it_runs: Callable[[], None]) -> None:
        """Let the guest continue from an open memory image, or remove the domain. Raises `errors.Fault`."""
        self.end_guest()  # an attempt during which libvirtd died may have left one
        began = time.time()
        xml = usage.without_taken_pages(self.saved_xml)
        if self.resources.access is not None:
            xml = forwarding.without_taken(xml, self.log)
        try:
            self.restart_from(descriptor, xml, lambda *_: before_it_runs())
        except BaseException as error:
            self.end_guest()
            if isinstance(error, libvirt.libvirtError):
                raise self._fault(error, "restoring", began) from error
            if isinstance(error, OSError):
                problem = f"{self.name} cannot be restored: {error}."
                raise errors.HypervisorFault(problem, "see what is scarce, and which file system fails.") from error
            raise

    def restart_from(self, descriptor: int, xml: str, check: Check) -> None:
        """Restore the domain from an open memory image; it runs after `check` has approved it.

        QEMU may wait for ever for data that an image lacks: a restore beyond its time is ended. Raises as `begin`.
        """
        seconds = budget.current().left(self.deadlines.memory * RESTORE_SHARE)

        def restore(connection: libvirt.virConnect) -> libvirt.virDomain:
            with self.guest.defined(connection, xml):
                self.saver.restore(connection, descriptor, xml)
            return domains.find(connection, self.name, self.uuid)

        with self._ended_after("restore", seconds) as late:
            try:
                self.begin(restore, check)
            except libvirt.libvirtError as error:
                if not late.is_set():
                    raise
                problem = f"{self.name} was not restored from its saved memory within {seconds:.0f} s."
                hint = "see what QEMU has waited for, and raise VM_GAHP_REQ_TIMEOUT where that was the disk."
                raise errors.HypervisorFault(problem, hint) from error
        self.log(f"{self.name} continues from its saved memory")

    @contextmanager
    def _ended_after(self, doing: str, seconds: float) -> Iterator[threading.Event]:
        """End the guest if the block takes longer, so that libvirt gives up; return the event that tells of it."""
        late = threading.Event()

        def give_up() -> None:
            late.set()
            try:
                self.end_guest()
            except errors.Fault as fault:
                self.log(f"{self.name}, whose {doing} has taken {seconds:.0f} s: {fault.problem}")

        with wait.overseen(f"the {doing}", seconds, give_up):
            yield late

    def begin(self, make: Make, check: Check) -> None:
        """Make the domain as `LibvirtGuest.begin` does, and set its limits before it runs."""

        def look(connection: libvirt.virConnect, domain: libvirt.virDomain, live: str) -> None:
            check(connection, domain, live)
            usage.apply_limits(self.limits, domain, live, self.guest.known_pid(), self.log)

        self.guest.begin(make, look)

    def make(self, image: int | None, xml: str, check: Check) -> None:
        """Start the domain, or restore it from an open image: it runs after `check`. Raises the same as `begin`."""
        if image is not None:
            self.restart_from(image, xml, check)
        else:
            # A process of the job's user can stop a QEMU that runs as that user.
            with self._ended_after("start", budget.current().left(self.deadlines.memory)):
                self.begin(partial(self.guest.create, xml), check)

    def live_xml(self) -> str:
        """Return the domain XML as libvirt has understood it. Raises `libvirt.libvirtError`."""
        return self.guest.call(lambda domain: str(domain.XMLDesc()))
