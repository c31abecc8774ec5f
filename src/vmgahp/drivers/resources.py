"""The resources that a VM holds on this machine and releases at its end, for every driver."""

from collections.abc import Callable
from typing import NamedTuple

from vmgahp.drivers.exit_record import ExitPort, ExitRecord
from vmgahp.host.guardian import Guardian
from vmgahp.host.serial_capture import ConsoleCapture
from vmgahp.job.published import JobUpdates
from vmgahp.job.scratch_files import OutputDirectory  # only some jobs need it

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
    """A VM's guardian, and the actions at its end, which are done once (`vmgahp.drivers.lifecycle`)."""

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
        self.luggage: OutputDirectory | None = None
        self.access: PortForwards | None = None
        self.before_restore: list[Callable[[], None]] = []
        """The functions that make anew what ended with the process of a VM that was saved."""
        self.while_running: list[Callable[[], None]] = []
        """The functions that start companions of the VM, in order, once it runs."""
        self.at_end: list[Callable[[], None]] = []
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

    def leave_to_guardian(self) -> None:
        """Leave a VM that cannot be destroyed to the guardian, which is kept and acts when the server ends."""
        self.guardian = None
