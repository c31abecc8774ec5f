"""One Xen guest, and how its memory is saved and restored."""

from vmgahp import errors, lifecycle
from vmgahp.checkpoint import memory_image_xen
from vmgahp.checkpoint.substitute import Substitute
from vmgahp.drivers.libvirt import binding as libvirt
from vmgahp.drivers.libvirt.guest import Check, Make
from vmgahp.drivers.libvirt.machine import LibvirtMachine
from vmgahp.drivers.libvirt.save import Saver
from vmgahp.drivers.libvirt.xen.console import PtyCapture
from vmgahp.drivers.libvirt.xen.libxl_log import LibxlLog
from vmgahp.metrics import Status


class XenSaver(Saver):
    """libvirt's Xen driver saves without flags, and restores what the image describes: it is given another image."""

    def substitute(self, descriptor: int, xml: str) -> Substitute:
        return memory_image_xen.substitute(descriptor, xml)

    def described_by(self, xml: str) -> None:
        """Nothing: it takes the XML of the image alone."""

    def inspect(self, descriptor: int) -> None:
        memory_image_xen.inspect(descriptor)

    def write(self, domain: libvirt.virDomain, path: str, *, checkpoint: bool) -> None:
        domain.save(path)


class XenMachine(LibvirtMachine):
    """A Xen domain: no process of this machine is it, and its console is a terminal, another one after a restore."""

    libxl_log: LibxlLog | None = None
    """What libxl has said since the guest's start began."""

    def pid(self) -> int:
        """Always 0: a guest is Xen's, and no process of dom0's."""
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
        """Xen's guests are on this machine, or libvirt would not know them."""

    def save(self, operation: str) -> None:
        """As any other; but one that is paused must run for it, for libxl asks the guest itself."""
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
        """Keep what the guest says on the terminal that it has now; without that it runs all the same."""
        console = self.resources.console
        if not isinstance(console, PtyCapture):
            return
        try:
            console.follow(_terminal(live or self.live_xml()))
        except (libvirt.libvirtError, errors.Fault, OSError) as error:
            self.log(f"{self.name}: its console cannot be read: {error}")


def _terminal(live: str) -> str:
    from vmgahp.drivers.libvirt.describe import first_attribute

    return first_attribute(live, "devices/console", "tty") or first_attribute(live, "devices/serial/source", "path")
