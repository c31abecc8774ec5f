"""What the session keeps of a VM, and the calls that it makes of a driver."""

from vmgahp.lifecycle import STARTING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vmgahp.job.ad import JobAd
    from vmgahp.metrics import Accounting


class Vm:
    """What the session knows of one VM; `id` is the protocol's."""

    __slots__ = ("accounting", "id", "last_status", "queue", "resumes", "running", "state")

    def __init__(self, vm_id: int) -> None:
        self.id = vm_id
        self.state = STARTING
        self.queue: list[Call] = []
        self.running: Call | None = None
        self.accounting: Accounting | None = None
        self.last_status: tuple[str, ...] | None = None
        self.resumes = False
        """It ran when a periodic checkpoint was made, and is to run again."""


class Call:
    """One operation for a driver, and the request that it answers."""

    __slots__ = ("answered", "asked", "job", "operation", "request_id", "state", "vm")

    def __init__(self, target: Vm, operation: str, request_id: int, asked: float) -> None:
        self.vm = target
        self.operation = operation
        self.request_id = request_id
        """0 for a call of the session's own, which has no result."""
        self.asked = asked
        self.answered = False
        """It took too long and the client has been told so; what comes of it changes the VM's state only."""
        self.state = STARTING
        """The VM's state when the call was issued."""
        self.job: JobAd | None = None
        """The job ad, for a START."""
