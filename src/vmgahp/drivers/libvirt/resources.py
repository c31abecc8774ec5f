"""What a domain needs beside libvirt."""

from collections.abc import Callable

from vmgahp.drivers import resources
from vmgahp.drivers.libvirt.exit_port import ExitPort
from vmgahp.host.serial_capture import ConsoleCapture


class Resources(resources.Resources):
    """Those of any VM, the capture of its console, and what a restore needs again."""

    def __init__(self, log: Callable[[str], None]) -> None:
        super().__init__(log)
        self.console: ConsoleCapture | None = None
        self.exit_port: ExitPort | None = None
        self.before_restore: list[Callable[[], None]] = []

    def release(self, *, kept: bool = False) -> None:
        if self.console is not None:
            self.console.close()
        if self.exit_port is not None:
            self.exit_port.close()
        super().release(kept=kept)
