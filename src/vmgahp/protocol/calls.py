"""The session's record of a VM, and the calls that it makes to a driver."""

from vmgahp.lifecycle import STARTING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vmgahp.job.ad import JobAd
    from vmgahp.metrics import Accounting


class Vm:
    """The session's record of one VM; `id` is the protocol's."""

    __slots__ = ("accounting", "id", "last_status", "queue", "resumes", "running", "state")

    def __init__(self, vm_id: int) -> None:
        self.id = vm_id
        self.state = STARTING
        self.queue: list[Call] = []
        self.running: Call | None = None
        self.accounting: Accounting | None = None
        self.last_status: tuple[str, ...] | None = None
        self.resumes = False
        """True if the VM was running when its periodic checkpoint was made, and must be resumed."""


class Call:
    """One operation for a driver, and the request that it answers."""

    __slots__ = ("answered", "asked", "job", "operation", "request_id", "state", "vm")

    def __init__(self, target: Vm, operation: str, request_id: int, asked: float) -> None:
        self.vm = target
        self.operation = operation
        self.request_id = request_id
        """The client's request id; 0 for a call that the session makes itself, which has no result."""
        self.asked = asked
        self.answered = False
        """True once the client has its answer. After a timeout the outcome still changes the VM's state."""
        self.state = STARTING
        """The VM's state when the call was issued."""
        self.job: JobAd | None = None
        """The job ad, for a START."""
