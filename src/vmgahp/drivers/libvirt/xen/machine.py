"""One Xen guest, and how its memory is saved and restored."""

from collections.abc import Callable

import libvirt

from vmgahp import errors, lifecycle
from vmgahp.checkpoint import memory_image, memory_image_xen
from vmgahp.drivers.libvirt.machine import SUSPEND_FILE, Check, LibvirtMachine
from vmgahp.drivers.libvirt.save import Saver
from vmgahp.drivers.libvirt.xen.console import PtyCapture
from vmgahp.drivers.libvirt.xen.libxl_log import LibxlLog
from vmgahp.metrics import Status


class XenSaver(Saver):
    """libvirt's Xen driver saves without flags, and restores what the image describes: it is given another image."""

    def hand_over(self, connection: libvirt.virConnect, descriptor: int, xml: str, *, paused: bool) -> None:
        """As `Saver.hand_over`, the image having `xml` in its head (`memory_image_xen.Substitute`)."""
        try:
            image = memory_image_xen.Substitute(descriptor, xml)
        except (OSError, memory_image.Damaged) as error:
            raise errors.MachineFault(f"A memory image cannot be used: {error}") from error
        with image:
            connection.restoreFlags(image.path, None, libvirt.VIR_DOMAIN_SAVE_PAUSED if paused else 0)

    def _inspect(self, descriptor: int) -> None:
        memory_image_xen.inspect(descriptor)

    def _save(self, domain: libvirt.virDomain, path: str, checkpoint: bool) -> None:
        domain.save(path)


class XenMachine(LibvirtMachine):
    """A Xen domain: no process of this machine is it, and its console is a terminal, another one after a restore."""

    libxl_log: LibxlLog | None = None
    """What libxl has said since the guest's start began."""

    def pid(self) -> int:
        """Always 0: a guest is Xen's, and no process of dom0's."""
        return 0

    def status(self) -> Status:
        report = super().status()
        if report.state == lifecycle.RUNNING:
            self._follow_console()  # a guest that has rebooted has another terminal
        return report

    def suspend(self) -> None:
        self._save(SUSPEND_FILE, checkpoint=False)

    def restore_from(self, descriptor: int, xml: str) -> None:
        super().restore_from(descriptor, xml)
        self._follow_console()

    def _require_ours(self) -> None:
        """Xen's guests are on this machine, or libvirt would not know them."""

    def _save(self, name: str, *, checkpoint: bool) -> None:
        """As any other; but one that is paused must run for it, for libxl asks the guest itself."""
        if self.saver.cannot:
            raise errors.ClientFault(errors.VM_NO_SUPPORT_SUSPEND, f"{self.name} cannot be saved: {self.saver.cannot}.")
        was_paused = False

        def let_run(domain: libvirt.virDomain) -> None:
            nonlocal was_paused
            was_paused = domain.info()[0] == libvirt.VIR_DOMAIN_PAUSED
            if was_paused:
                domain.resume()

        self._operate("saving", let_run)
        try:
            super()._save(name, checkpoint=checkpoint)
        except BaseException:
            if was_paused:
                self._operate("pausing", lambda domain: domain.suspend())
            raise

    def _begin(self, make: Callable[[libvirt.virConnect], libvirt.virDomain], check: Check) -> None:
        def look(connection: libvirt.virConnect, domain: libvirt.virDomain, live: str) -> None:
            check(connection, domain, live)
            self._follow_console(live)

        super()._begin(make, look)

    def _follow_console(self, live: str = "") -> None:
        """Keep what the guest says on the terminal that it has now; without that it runs all the same."""
        console = self._resources.console
        if not isinstance(console, PtyCapture):
            return
        try:
            console.follow(_terminal(live or self.live_xml()))
        except (libvirt.libvirtError, errors.Fault, OSError) as error:
            self._log(f"{self.name}: its console cannot be read: {error}")


def _terminal(live: str) -> str:
    from vmgahp.drivers.libvirt.describe import first_attribute

    return first_attribute(live, "devices/console", "tty") or first_attribute(live, "devices/serial/source", "path")
