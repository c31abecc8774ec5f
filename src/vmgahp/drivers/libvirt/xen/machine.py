"""One Xen guest, and the save and restore of its memory."""

import libvirt

from vmgahp import errors, lifecycle
from vmgahp.checkpoint import memory_image_xen
from vmgahp.checkpoint.substitute import Substitute
from vmgahp.drivers.libvirt.describe import first_attribute
from vmgahp.drivers.libvirt.guest import Check, Make
from vmgahp.drivers.libvirt.machine import LibvirtMachine
from vmgahp.drivers.libvirt.save import Saver
from vmgahp.drivers.libvirt.xen.console import PtyCapture
from vmgahp.drivers.libvirt.xen.libxl_log import LibxlLog
from vmgahp.metrics import Status


class XenSaver(Saver):
    """A saver for libvirt's Xen driver.

    That driver saves without flags and restores the XML in the image, so it is given another image.
    """

    def substitute(self, descriptor: int, xml: str) -> Substitute:
        return memory_image_xen.substitute(descriptor, xml)

    def described_by(self, xml: str) -> None:
        """Return None, as the driver uses the XML of the image only."""

    def inspect(self, descriptor: int) -> None:
        memory_image_xen.inspect(descriptor)

    def write(self, domain: libvirt.virDomain, path: str, *, checkpoint: bool) -> None:
        domain.save(path)


class XenMachine(LibvirtMachine):
    """A Xen domain: it has no process on this machine, and its console is a terminal, another one after a restore."""

    libxl_log: LibxlLog | None = None
    """The log of libxl since the guest's start began."""

    def pid(self) -> int:
        """Return 0: a guest is Xen's, without a process in dom0."""
        return 0

    def look(self) -> Status:
        report = super().look()
        if report.state == lifecycle.RUNNING:
            self._follow_console()  # a guest that has rebooted has another terminal
        return report

    def require_saving(self, operation: str) -> None:
        if self.saver.cannot:
            raise errors.ClientFault(errors.VM_NO_SUPPORT_SUSPEND, f"{self.name} cannot be saved: {self.saver.cannot}.")

    def _require_ours(self) -> None:
        """Do nothing, since libvirt knows only Xen guests of this machine."""

    def save(self, operation: str) -> None:
        """Save the guest, after resuming a paused one, since libxl needs the guest's cooperation."""
        self.require_saving(operation)
        if self.state is not lifecycle.SOFT_SUSPENDED:
            super().save(operation)
            return
        self.unpause()
        try:
            super().save(operation)
        except BaseException:
            if not self.overruled:
                self.pause()
            raise

    def begin(self, make: Make, check: Check) -> None:
        def look(connection: libvirt.virConnect, domain: libvirt.virDomain, live: str) -> None:
            check(connection, domain, live)
            self._follow_console(live)

        super().begin(make, look)

    def _follow_console(self, live: str = "") -> None:
        """Capture the console's current terminal; without one the guest runs all the same."""
        console = self.resources.console
        if not isinstance(console, PtyCapture):
            return
        try:
            console.follow(_terminal(live or self.live_xml()))
        except (libvirt.libvirtError, errors.Fault, OSError) as error:
            self.log(f"{self.name}: its console cannot be read: {error}")


def _terminal(live: str) -> str:
    return first_attribute(live, "devices/console", "tty") or first_attribute(live, "devices/serial/source", "path")
