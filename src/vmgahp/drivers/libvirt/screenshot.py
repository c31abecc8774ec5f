"""A picture of the display of a guest that fails, kept for the job's owner.

libvirt takes it from QEMU, as PNG from QEMU 7.1 on and else as PPM, which every program for pictures reads; it is
kept as it comes. A guest chooses the size of its screen, so the size of the picture is limited; and a VM that has
failed may well hang, so `DEADLINE` limits the wait.
"""

from collections.abc import Callable

import libvirt

from vmgahp import errors
from vmgahp.drivers.libvirt.connection import LibvirtConnection
from vmgahp.host import threads
from vmgahp.host.job_user import Identity

NAMES = {"image/png": "vm_screenshot.png", "image/x-portable-pixmap": "vm_screenshot.ppm"}
"""The file in the scratch directory for each media type that virDomainScreenshot returns."""
MOST_BYTES = 32 << 20
DEADLINE = 5.0
"""Seconds by which it may delay the operation on the VM."""
_CHUNK = 256 << 10


class Screenshot:
    """The screenshot of one domain, taken once."""

    def __init__(
        self,
        connection: LibvirtConnection,
        name: str,
        uuid: str,
        directory: str,
        identity: Identity,
        log: Callable[[str], None],
    ) -> None:
        self._connection = connection
        self._name = name
        self._uuid = uuid
        self._directory = directory
        self._identity = identity
        self._log = log
        self._taken = False

    def take(self) -> None:
        """Take and keep it within the deadline. Raises nothing: a failure is logged."""
        if self._taken:
            return
        self._taken = True
        try:
            thread = threads.start(f"the screenshot of {self._name}", self._run)
        except errors.MachineFault as fault:
            self._log(fault.problem)
            return
        thread.join(DEADLINE)
        if thread.is_alive():
            self._log(f"{self._name}: its screenshot could not be taken within {DEADLINE:.0f} s")

    def _run(self) -> None:
        try:
            kind, picture = self._connection.once(self._get)
            self._identity.write_scratch(self._directory, NAMES[kind], picture)
            self._log(f"{self._name}: its screenshot is in {NAMES[kind]}")
        except (libvirt.libvirtError, errors.Fault, OSError, ValueError, KeyError) as error:
            self._log(f"{self._name}: its screenshot cannot be taken: {error}")

    def _get(self, connection: libvirt.virConnect) -> tuple[str, bytes]:
        """Return the media type and the picture. Raises `libvirt.libvirtError`, and ValueError if it is too large."""
        domain = connection.lookupByUUIDString(self._uuid)
        stream = connection.newStream()
        kind = str(domain.screenshot(stream, 0))
        picture = bytearray()
        while chunk := stream.recv(_CHUNK):
            picture += chunk
            if len(picture) > MOST_BYTES:
                stream.abort()
                raise ValueError(f"it has more than {MOST_BYTES} bytes")
        stream.finish()
        return kind, bytes(picture)
