"""The end of a VM: its exit file, and the port to which a guest writes its exit code."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from vmgahp import errors, lifecycle
from vmgahp.host.job_user import Identity
from vmgahp.host.runtime_dir import runtime_dir
from vmgahp.host.serial_capture import ConsoleCapture
from vmgahp.job import chirp, exit_code, published
from vmgahp.job.exit_code import BY_ITSELF, EXIT_FILE, GONE, PORT_BYTES, TO_BE_HELD, Ending
from vmgahp.job.published import JobUpdates

CONSOLE_FILE = "vm_console.log"


class ExitRecord:
    """A writer of ``vm_exit.json`` at the end of a job's VM; it also tells the starter the guest's exit code."""

    def __init__(
        self,
        name: str,
        directory: str,
        cpu_seconds: Callable[[], float],
        updates: JobUpdates,
        identity: Identity,
        log: Callable[[str], None],
    ) -> None:
        """Record the end of the VM `name`, which runs from now on, with its CPU time so far and its `updates`."""
        self.how = ""
        """The way in which the VM ended, once it is known: one of the words in `vmgahp.job.exit_code`."""
        self.ended_at = 0.0
        """The time of the end, in seconds since 1970; 0 stands for the time of `write`."""
        self.reason = ""
        """The reason for which the VM was ended as a failure; empty otherwise."""
        self.doubt = ""
        """A possible mistake in the job's options that was no reason to hold it; empty for none."""
        self.tells = True
        """True if the starter is told the exit code. It cannot receive it while it waits for a STOP to complete."""
        self.status = 0
        self.port: Callable[[], bytes] | None = None
        """A function that returns the bytes which the guest has written to its exit port, if it has one."""
        self.program: Callable[[Ending], Ending] | None = None
        """A function that adds to the end what the guest reported of its program, if it runs one."""
        self.console: Callable[[], bytes] = self._console_file
        """A function that returns the last output on the console since the guest was started here."""
        self._name = name
        self._cpu_seconds = cpu_seconds
        self._directory = directory
        self._updates = updates
        self._identity = identity
        self._log = log
        self._began = time.time()
        self._printed_before = _size(identity, directory, CONSOLE_FILE)

    def write(self) -> None:
        """Write the record of a VM that has ended. Errors are logged."""
        ending = self._ending()
        self.status = exit_code.status_of(ending)
        try:
            self._identity.write_scratch(self._directory, EXIT_FILE, exit_code.render(ending))
        except (OSError, errors.Fault) as error:
            self._log(f"{self._name}: {EXIT_FILE} cannot be written: {error}")
        if not self.tells or ending.how not in BY_ITSELF:
            return
        updates = self._updates
        updates.is_over()
        updates.publish(published.STATE, lifecycle.STOPPED)
        updates.publish(published.ENDED_BY, ending.how)
        updates.publish(published.EXIT_CODE, ending.exit_code)
        if self.program is not None:
            updates.publish(published.EXIT_SIGNAL, -self.status if self.status < 0 else None)
        updates.publish(published.EXIT_REASON, ending.reason or None)
        updates.publish(published.HOLD_REASON, ending.reason if ending.how in TO_BE_HELD else None)
        if problem := chirp.tell_end(updates, self._directory, self._identity, ending.exit_code):
            self._log(f"{self._name}: {problem}")

    def _ending(self) -> Ending:
        source = ""
        code = None
        if self.port is not None and (code := exit_code.from_port(self.port())) is not None:
            source = "port"
        elif (code := exit_code.from_console(self.console())) is not None:
            source = "console"
        ending = Ending(
            how=self.how or GONE,
            exit_code=code,
            source=source,
            began=self._began,
            ended=max(self.ended_at or time.time(), self._began),  # the clock may have been set back
            reason=self.reason,
            cpu_seconds=self._cpu_seconds() or None,
            doubt=self.doubt,
        )
        return self.program(ending) if self.program is not None else ending

    def _console_file(self) -> bytes:
        return exit_code.tail_of(self._identity, self._directory, CONSOLE_FILE, self._printed_before)


def _size(identity: Identity, directory: str, name: str) -> int:
    try:
        descriptor = identity.open_scratch(directory, name, os.O_RDONLY)
    except (OSError, errors.Fault):
        return 0
    try:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


_TOO_MUCH = "The guest has written more to its exit port than is read of it."


class ExitPort:
    """The virtio port to which a guest writes its exit code: a capture of the first bytes, in memory."""

    def __init__(self, owner: tuple[int, int], log: Callable[[str], None]) -> None:
        """Create the port's socket for QEMU's uid and gid, `owner`. Raises `errors.MachineFault`."""
        self._written = b""
        self._memory = os.memfd_create("exit", os.MFD_CLOEXEC)
        try:
            self._capture = ConsoleCapture(
                os.path.join(runtime_dir(), "exit"),
                lambda: os.dup(self._memory),
                PORT_BYTES,
                lambda _problem: log(_TOO_MUCH),
                owner=owner,
            )
        except BaseException:
            os.close(self._memory)
            raise
        self.path = self._capture.path

    def written(self) -> bytes:
        """Return the bytes that the guest has written; they are available after `close`."""
        return self._written

    def close(self) -> None:
        """Read the remaining bytes and close the port; may be called again."""
        if self._memory < 0:
            return
        self._capture.close()
        self._written = os.pread(self._memory, PORT_BYTES, 0)
        os.close(self._memory)
        self._memory = -1
