"""What a VM holds on this machine and releases at its end, for every driver."""

import sys
from _collections_abc import Callable

from vmgahp.drivers.exit_record import ExitPort, ExitRecord
from vmgahp.host import runtime_dir
from vmgahp.host.guardian import Guardian
from vmgahp.host.job_user import Identity
from vmgahp.host.light import NamedTuple
from vmgahp.host.serial_capture import ConsoleCapture
from vmgahp.job.published import News

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vmgahp.job.travel import Luggage  # for the jobs that want it

PASST, SLIRP, RELAY = "passt", "slirp", "relay"


class WayIn(NamedTuple):
    """The ports of this machine that lead to a guest's."""

    means: str
    """Who listens there, one of these."""
    address: str
    ports: tuple[tuple[int, int], ...]
    """The guest's port and this machine's, of each."""
    room: str = ""
    """Where they are claimed."""

    @property
    def words(self) -> str:
        """As text for others: ``22=127.0.0.1:22001 80=127.0.0.1:22002``."""
        address = f"[{self.address}]" if ":" in self.address else self.address
        return " ".join(f"{guests}={address}:{ours}" for guests, ours in self.ports)


class Later:
    """Something that is to be done later, maybe by another process: a function's name and plain arguments.

    The function gets the job's user, the log and what the caller gives before them.
    """

    __slots__ = ("_identity", "_log", "plain")

    def __init__(
        self,
        function: Callable[..., object] | str,
        identity: Identity,
        log: Callable[[str], None],
        *arguments: str | int,
    ) -> None:
        place = function if isinstance(function, str) else f"{function.__module__}:{function.__name__}"
        self.plain: tuple[str, tuple[str | int, ...]] = place, arguments
        """``module:function`` and the arguments, of which another process makes the same."""
        self._identity = identity
        self._log = log

    def __call__(self, *first: object) -> None:
        place, arguments = self.plain
        module, _, name = place.partition(":")
        __import__(module)
        getattr(sys.modules[module], name)(self._identity, self._log, *first, *arguments)


def unclaim(_identity: Identity, _log: Callable[[str], None], path: str) -> None:
    """The VM is gone that `runtime_dir.claim` was called for."""
    runtime_dir.remove(path)


def empty(identity: Identity, log: Callable[[str], None], directory: str) -> None:
    """The job is over, and nothing of its scratch directory is to be sent back."""
    from vmgahp.host import scratch

    scratch.empty(directory, identity, log)


class Resources:
    """A VM's guardian, and what is to be done at its end, which happens once (`vmgahp.drivers.lifecycle`)."""

    def __init__(self, log: Callable[[str], None], server_ends: Callable[[], bool] = lambda: False) -> None:
        """`server_ends` says that a VM which is being started is to end instead."""
        self.server_ends = server_ends
        self.news = News()
        """What the pool is to be told of the VM."""
        self.guardian: Guardian | None = None
        self.exit: ExitRecord | None = None
        """Of a VM that runs; none while it is still being started."""
        self.exit_status = 0
        """What the server is to leave with once the VM has ended by itself."""
        self.console: ConsoleCapture | None = None
        self.exit_port: ExitPort | None = None
        self.run_ports: dict[str, ConsoleCapture] = {}
        """Of a guest that runs a program (`vmgahp.drivers.libvirt.run_ports`)."""
        self.luggage: Luggage | None = None
        """What HTCondor sends with the outputs, of a job that has it send these alone."""
        self.access: WayIn | None = None
        """The ports of this machine that lead to the guest's, where there are any."""
        self.before_restore: list[Callable[[], None]] = []
        """Makes anew what ended with the process of a VM that was saved."""
        self.while_running: list[Later] = []
        """What lives as long as the VM: begun in order, with the machine, by whoever serves it, once it runs."""
        self.at_end: list[Callable[[], None]] = []
        """Done in order when the VM is gone, also by a start that failed."""
        self.not_started: list[Callable[[], None]] = []
        """Done in order before `at_end` by a start that failed; emptied by one that did not."""
        self.when_over: list[Callable[[], None]] = []
        """Done in order after `at_end` when the job is over: not where a checkpoint waits for its restart."""
        self._log = log

    def to_be_stopped(self) -> None:
        """HTCondor wants the VM to end, and waits for it."""
        if self.exit is not None:
            self.exit.tells = False

    def ended(self, how: str, when: float = 0.0, reason: str = "") -> None:
        """Say how the VM ended (`vmgahp.job.exit_code` has the words), when and why; what was said first stands."""
        if self.exit is not None and not self.exit.how:
            self.exit.how, self.exit.ended_at, self.exit.reason = how, when, reason

    def not_ended(self, how: str) -> None:
        """The end that was said to be has not come about."""
        if self.exit is not None and self.exit.how == how:
            self.exit.how, self.exit.ended_at, self.exit.reason = "", 0.0, ""

    def release(self, *, kept: bool = False) -> None:
        """Tidy up and dismiss the guardian; `kept` says that a checkpoint is left behind.

        What fails is logged and holds up nothing else: the guest is gone, whatever is left of it.
        """
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
            except Exception as error:  # noqa: BLE001 - what is still to be tidied up does not wait for a mend
                self._log(f"the end of a VM: {error}")
        if record is not None:
            self.exit_status = record.status
        if self.guardian is not None:
            self.guardian.dismiss()

    def leave_to_guardian(self) -> None:
        """The VM could not be destroyed: the guardian is never dismissed and does it when the server ends."""
        self.guardian = None
