"""One domain of libvirt from its start on, with all operations on it: start, save, restore."""

import os
import threading
import time
from collections.abc import Callable

from vmgahp import errors, lifecycle
from vmgahp.checkpoint.store import MEMORY_FILE
from vmgahp.drivers.base import Deadlines, Logger
from vmgahp.drivers.libvirt import binding as libvirt
from vmgahp.drivers.libvirt import faults, huge_pages, limits, other_hypervisors
from vmgahp.drivers.libvirt.faults import ConnectionLost
from vmgahp.drivers.libvirt.guest import Check, LibvirtGuest, Make, let_run
from vmgahp.drivers.libvirt.running import LOOK_INTERVAL, RunningMachine
from vmgahp.drivers.libvirt.save import RESTORE_SHARE, SUSPEND_FILE, MemoryFile, Saver
from vmgahp.drivers.libvirt.stats import cpu_seconds
from vmgahp.drivers.resources import SLIRP, Resources
from vmgahp.host import threads
from vmgahp.host.light import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vmgahp.drivers.libvirt.checkpoint import JobCheckpoints, LibvirtRestart
    from vmgahp.drivers.libvirt.hooks import Described


class Order(NamedTuple):
    """The description and the checkpoint that a start uses."""

    described: "Described"
    restart: "LibvirtRestart | None"
    """The checkpoint from which the VM continues; None for a new guest."""


class LibvirtMachine(RunningMachine):
    """A domain whose start, saves and restores happen in this process."""

    def __init__(
        self, guest: LibvirtGuest, resources: Resources, saver: Saver, deadlines: Deadlines, log: Logger
    ) -> None:
        super().__init__(guest, resources, deadlines, log)
        self.resumed: Callable[[], None] = lambda: None
        """A callback for a saved guest that runs again, in a new process that may have other ports."""
        self.saver = saver
        saver.seconds, saver.given_up = deadlines.memory, lambda: self.overruled
        self.checkpoints: JobCheckpoints
        self.order: Order
        """The description and the checkpoint for the start."""
        self.limits = limits.Limits()
        self.description = ""
        """The domain XML as of the last save, without secrets."""
        self.image = ""
        """The name of the memory image of a VM that is saved."""
        self.saved_xml = ""
        """The domain XML to restore."""
        self.has_display = False
        """True if the guest has a display for `screenshot`."""
        self.doubt = ""
        """The doubt about the job's options for the job's owner (`vmgahp.drivers.exit_record`)."""
        self.unsure: MemoryFile | None = None
        """The memory image of a save with unknown outcome."""

    def was_saved_after_all(self) -> bool:
        if self.unsure is None or not self._settle():
            return False
        with self.io_errors.held():
            self._keep(self.unsure)
        return True

    def saved_bytes(self) -> int:
        return self.saver.identity.occupied_scratch(self.saver.directory, self.image) if self.image else 0

    def before_release(self) -> None:
        if self.state is lifecycle.STARTING:
            self.put_back()  # after the guest is gone: it may have run although its start failed
        self.forget_unsure()
        self.saver.forget_the_rest()
        super().before_release()

    # Saving and restoring

    def save(self, operation: str) -> None:
        self.require_saving(operation)
        # Ask libvirtd for the XML, since the one in the file may have been changed by then.
        whole = libvirt.VIR_DOMAIN_XML_MIGRATABLE
        secrets = libvirt.VIR_DOMAIN_XML_SECURE | whole
        asked = self.guest.operate(
            "saving", lambda domain: (domain.info(), domain.XMLDesc(secrets), domain.XMLDesc(whole))
        )
        (_, max_memory, _, _, cpu_nanoseconds), *described = asked
        self.saved_xml, self.description = (limits.without(self.limits, xml) for xml in described)
        self._require_ours()
        self.begin_writing()
        image = self.saver.begin(self.image_of(operation), max_memory)
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
            if image is not self.unsure:
                image.close()

    def require_saving(self, operation: str) -> None:
        """Check that the VM's memory can be saved. Raises `errors.ClientFault` if not."""
        if reason := self.why_not_saved():
            raise errors.ClientFault(errors.VM_NO_SUPPORT_SUSPEND, f"{self.name} cannot be saved: {reason}.")

    def why_not_saved(self) -> str:
        """Return the reason why the VM's memory cannot be saved; empty if it can."""
        return self.saver.cannot or other_hypervisors.no_saving(self.guest.type)

    @staticmethod
    def image_of(operation: str) -> str:
        """Return the name of the memory image of a SUSPEND, or of a CHECKPOINT."""
        return MEMORY_FILE if operation == lifecycle.CHECKPOINT else SUSPEND_FILE

    def begin_writing(self) -> None:
        """Note that everything that a restore needs is known, except the memory."""

    def keep_saved(self) -> None:
        self.saver.rename(self.image, MEMORY_FILE)
        self.image = MEMORY_FILE

    def write_manifest(self) -> None:
        self.checkpoints.write(self)

    def restore(self, before_it_runs: Callable[[], None]) -> None:
        descriptor = self.saver.open(self.image)
        try:
            self._restore_from(descriptor, before_it_runs)
        finally:
            os.close(descriptor)
        self.io_errors.let_go()
        self.resumed()
        self.goes_on()

    def set_aside(self) -> None:
        self.checkpoints.store.begin_restart()

    def put_back(self) -> None:
        self.checkpoints.store.put_back()

    def forget_saved(self) -> None:
        if self.image == MEMORY_FILE:
            self.checkpoints.store.discard()
        elif self.image:
            self.saver.forget(self.image)
        self.image = ""

    def _require_ours(self) -> None:
        """Check that the guest is on this machine, so that its memory can be written to a file here."""
        if self.pid() == 0:
            raise errors.HypervisorFault(
                f"The VM cannot be saved: no process of this machine is the QEMU of {self.name}.",
                "let libvirtd run in the process id namespace of the daemon.",
            )

    def _write(self, image: MemoryFile, *, checkpoint: bool) -> None:
        """Have libvirt write the memory, which ends the domain.

        Raises `errors.Fault` if the guest runs on, or if the outcome is unknown.
        """
        try:
            self.guest.connection.once(
                lambda connection: self.saver.write(
                    faults.find(connection, self.name, self.uuid), image.path, checkpoint=checkpoint
                )
            )
        except ConnectionLost as lost:
            self.log(f"libvirtd went away while it saved {self.name}: {lost}")
            self.unsure = image
            if not self._wait_for_outcome():
                raise errors.HypervisorFault(
                    f"{self.name} was not saved, and runs on: {lost}", "see why libvirtd went away."
                ) from lost
        except libvirt.libvirtError as error:
            raise faults.from_libvirt(error, f"saving {self.name}") from error

    def see_whether_it_was_saved(self) -> None:
        """Keep the image that another process, which has ended, has written.

        Raises `errors.Fault` if it was not saved.
        """
        if not self._wait_for_outcome():
            raise errors.HypervisorFault(f"{self.name} was not saved, and runs on.", "see what has ended the save.")
        assert self.unsure is not None
        self._keep(self.unsure)

    def _wait_for_outcome(self) -> bool:
        """Wait until `_settle` has an answer, and return it."""
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
            raise self.report_lost(
                f"{self.name} is lost: libvirtd and QEMU went away while its memory was being written.",
                "see why they ended; the job has to start again.",
            )
        return True

    def forget_unsure(self) -> None:
        if self.unsure is not None:
            self.unsure.close()
            self.unsure = None

    def _keep(self, image: MemoryFile) -> None:
        """Keep the whole memory of a guest that is gone, or let the guest run again. Raises `errors.Fault`.

        If both fail, as on a file system that has become read-only, the image stays where it is.
        """
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
                raise self.saver.fault(f"{name} cannot be kept in {self.saver.directory}: {error}") from error
        finally:
            image.close()
        self.image = name
        self._last_report = None
        self.unsure = None
        self.usage.carry()
        self.log(f"{self.name} is saved in {name}")

    def _restore_from(self, descriptor: int, before_it_runs: Callable[[], None]) -> None:
        """Let the guest continue from an open memory image, or remove the domain. Raises `errors.Fault`."""
        self.end_guest()  # an attempt during which libvirtd died may have left one
        try:
            self.restart_from(descriptor, self._as_it_can_be(), lambda *_: before_it_runs())
        except BaseException as error:
            self.end_guest()
            if isinstance(error, libvirt.libvirtError):
                raise faults.from_libvirt(error, f"restoring {self.name}") from error
            raise

    def _as_it_can_be(self) -> str:
        """Return the XML of the saved domain, without resources of this machine that are taken now."""
        xml = huge_pages.as_there_are(self.saved_xml)
        if self.resources.access is None:
            return xml
        from vmgahp.drivers.libvirt import reach

        return reach.without_taken(xml, self.log)

    def restart_from(self, descriptor: int, xml: str, check: Check) -> None:
        """Restore the domain from an open memory image; it runs after `check` has approved it.

        Raises the same as `begin`.

        QEMU may wait for ever for data that an image lacks: a restore that exceeds its time is ended.
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
        """Make the domain as `LibvirtGuest.begin` does, and set its limits and its forwarded ports before it runs."""

        def look(connection: libvirt.virConnect, domain: libvirt.virDomain, live: str) -> None:
            check(connection, domain, live)
            limits.apply(self.limits, domain, live, self.guest.known_pid(), self.log)
            if (access := self.resources.access) is not None and access.means == SLIRP:
                from vmgahp.drivers.libvirt import reach

                self.resources.access = reach.open_slirp(domain, access, self.log)

        self.guest.begin(make, look)

    def make(self, image: int | None, xml: str, check: Check) -> None:
        """Start the domain, or restore it from an open memory image: it runs after `check` has approved it.

        Raises the same as `LibvirtGuest.begin`.
        """
        if image is not None:
            self.restart_from(image, xml, check)
        else:
            self.begin(self.guest.made_from(xml), check)

    # What helps

    def live_xml(self) -> str:
        """Return the domain XML as libvirt has understood it. Raises `libvirt.libvirtError`."""
        return self.guest.call(lambda domain: str(domain.XMLDesc()))
