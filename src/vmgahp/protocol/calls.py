"""What the session keeps of a VM, and the calls that it makes of a driver."""

from vmgahp.lifecycle import STARTING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vmgahp.job.ad import JobAd


class Accounting:
    """Turns a driver's raw figures into those of a STATUS: CPU time that never runs backwards.

    A hypervisor counts from zero again when a saved VM is restored; the sum of what came before is kept
    here. CPUUTILIZATION is the CPU used since the last STATUS, or since the START was asked for, by wall
    time and vCPUs. It is at most 1: the hypervisor's own threads, and the CPU time that a checkpoint brings
    with it, are none of the guest's vCPUs' now.
    """

    __slots__ = ("_before", "_last_raw", "_reported_cpu", "_reported_time")

    def __init__(self, now: float) -> None:
        self._before = 0.0
        self._last_raw = 0.0
        self._reported_cpu = 0.0
        self._reported_time = now

    def account(self, raw_seconds: float, vcpus: int, now: float) -> tuple[float, float]:
        """(CPUUTILIZATION, CPUTIME in seconds) for a raw counter of `raw_seconds` read at `now`."""
        if raw_seconds < self._last_raw:
            self._before += self._last_raw
        self._last_raw = raw_seconds
        total = max(self._before + raw_seconds, self._reported_cpu)
        wall = (now - self._reported_time) * max(vcpus, 1)
        utilization = min(1.0, (total - self._reported_cpu) / wall) if wall > 0 else 0.0
        self._reported_cpu = total
        self._reported_time = now
        return utilization, total


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
