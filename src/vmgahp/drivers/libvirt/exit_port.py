"""The virtio port to which a guest writes its exit code."""

import os
from collections.abc import Callable

from vmgahp.host.runtime_dir import runtime_dir
from vmgahp.host.serial_capture import ConsoleCapture
from vmgahp.job.exit_code import PORT_BYTES


class ExitPort:
    """Listens for QEMU as a capture of a console does, and remembers the first that comes, in memory."""

    def __init__(self, owner: tuple[int, int], log: Callable[[str], None]) -> None:
        """`owner` is the uid and gid of the QEMU. Raises `errors.MachineFault`."""
        self._written = b""
        self._memory = os.memfd_create("exit", os.MFD_CLOEXEC)
        try:
            self._capture = ConsoleCapture(
                os.path.join(runtime_dir(), "exit"),
                lambda: os.dup(self._memory),
                PORT_BYTES,
                lambda _problem: log("The guest has written more to its exit port than is read of it."),
                owner=owner,
            )
        except BaseException:
            os.close(self._memory)
            raise
        self.path = self._capture.path

    def written(self) -> bytes:
        """What the guest has written, once this is closed."""
        return self._written

    def close(self) -> None:
        """Take what still waits; may be called again."""
        if self._memory < 0:
            return
        self._capture.close()
        self._written = os.pread(self._memory, PORT_BYTES, 0)
        os.close(self._memory)
        self._memory = -1
