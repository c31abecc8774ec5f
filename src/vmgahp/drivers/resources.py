"""The resources that a VM holds until its end, and the record of that end, for every driver."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from vmgahp import errors, lifecycle
from vmgahp.host.guardian import Guardian
from vmgahp.host.job_user import Identity
from vmgahp.host.runtime_dir import runtime_dir
from vmgahp.host.serial_capture import ConsoleCapture
from vmgahp.job import chirp, exit_code, published
from vmgahp.job.exit_code import BY_ITSELF, EXIT_FILE, GONE, PORT_BYTES, TO_BE_HELD, Ending
from vmgahp.job.published import JobUpdates
from vmgahp.job.scratch_files import OutputDirectory

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
        self._name = name
        self._cpu_seconds = cpu_seconds
        self._directory = directory
        self._updates = updates
        self._identity = identity
        self._log = log
        self._began = time.time()
        before = identity.sizes_scratch(directory, CONSOLE_FILE)[0]
        self.console: Callable[[], bytes] = partial(exit_code.tail_of, identity, directory, CONSOLE_FILE, before)
        """A function that returns the last output on the console since the guest was started here."""

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
                lambda _problem: log("The guest has written more to its exit port than is read of it."),
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


PASST, RELAY = "passt", "relay"


class PortForwards(NamedTuple):
    """The ports of this machine that lead to a guest's."""

    means: str
    """The program that listens on the ports: one of the two above."""
    address: str
    ports: tuple[tuple[int, int], ...]
    """The port of the guest and the port of this machine, for each."""
    directory: str = ""
    """The directory in which the ports are claimed."""

    @property
    def words(self) -> str:
        """Return the ports as text for users: ``22=127.0.0.1:22001 80=127.0.0.1:22002``."""
        address = f"[{self.address}]" if ":" in self.address else self.address
        return " ".join(f"{guests}={address}:{ours}" for guests, ours in self.ports)


class Resources:
    """A VM's guardian, and the actions at its end, which are done once (`vmgahp.drivers.managed`)."""

    def __init__(self, log: Callable[[str], None], server_ends: Callable[[], bool] = lambda: False) -> None:
        """Hold the resources of one VM; `server_ends` returns True if a VM that is being started is to end instead."""
        self.server_ends = server_ends
        self.updates = JobUpdates()
        self.guardian: Guardian | None = None
        self.exit: ExitRecord | None = None
        """The record of the end of a VM that runs; None while it is being started."""
        self.exit_status = 0
        """The exit status of the server after the VM has ended on its own."""
        self.console: ConsoleCapture | None = None
        self.exit_port: ExitPort | None = None
        self.run_ports: dict[str, ConsoleCapture] = {}
        """The ports of a guest that runs a program (`vmgahp.drivers.libvirt.program`)."""
        self.unpacked = 0
        """The bytes of EXECUTE that the outputs of that program take beside their archive."""
        self.luggage: OutputDirectory | None = None
        self.access: PortForwards | None = None
        self.before_restore: list[Callable[[], None]] = []
        """The functions that make anew what ended with the process of a VM that was saved."""
        self.while_running: list[Callable[[], None]] = []
        """The functions that start companions of the VM, in order, once it runs."""
        self.at_end: list[Callable[[], object]] = []
        """The actions when the VM is gone, in order, also after a start that failed."""
        self.not_started: list[Callable[[], None]] = []
        """The actions before `at_end` after a start that failed, in order; cleared after a successful start."""
        self.when_over: list[Callable[[], None]] = []
        """The actions after `at_end` when the job is over, in order; skipped if a checkpoint waits for its restart."""
        self._log = log

    def to_be_stopped(self) -> None:
        """Note that HTCondor has asked for the end of the VM, and waits for it."""
        if self.exit is not None:
            self.exit.tells = False

    def ended(self, how: str, when: float = 0.0, reason: str = "") -> None:
        """Record how the VM ended (a word of `vmgahp.job.exit_code`), when and why; the first record stands."""
        if self.exit is not None and not self.exit.how:
            self.exit.how, self.exit.ended_at, self.exit.reason = how, when, reason

    def not_ended(self, how: str) -> None:
        """Withdraw the record of an end that did not happen."""
        if self.exit is not None and self.exit.how == how:
            self.exit.how, self.exit.ended_at, self.exit.reason = "", 0.0, ""

    def release(self, *, kept: bool = False) -> None:
        """Clean up, without a checkpoint that is `kept`, and dismiss the guardian. Errors are logged."""
        for listener in (self.console, self.exit_port, *self.run_ports.values()):
            if listener is not None:
                listener.close()
        todo = [*self.not_started, *self.at_end]
        if not kept:
            todo += [self.exit.write] if self.exit is not None else []
            todo += self.when_over
        record = self.exit
        self.exit, self.not_started, self.at_end, self.when_over = None, [], [], []
        for action in todo:
            try:
                action()
            except Exception as error:  # noqa: BLE001 - the remaining actions must run all the same
                self._log(f"the end of a VM: {error}")
        if record is not None:
            self.exit_status = record.status
        if self.guardian is not None:
            self.guardian.dismiss()
