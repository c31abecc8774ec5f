"""The states of a virtual machine, the table of what may happen in each, and what is kept of one.

The session, the property tests and the documentation's diagram all read `TRANSITIONS`; nothing else
decides what is allowed.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vmgahp.job_ad import JobAd

STARTING = "Starting"
RUNNING = "Running"
SOFT_SUSPENDED = "SoftSuspended"
"""Paused: the CPUs stand still, the memory stays in RAM."""
SUSPENDED = "Suspended"
"""Saved to a file in the scratch directory that is of use to this server alone."""
CHECKPOINTED = "Checkpointed"
"""Saved with all that a restart elsewhere needs; what is on disk stays when the server ends."""
STOPPED = "Stopped"

STATES = (STARTING, RUNNING, SOFT_SUSPENDED, SUSPENDED, CHECKPOINTED, STOPPED)

STATUS_WORDS = {state: state for state in STATES} | {CHECKPOINTED: SUSPENDED}
"""State -> the word of ``STATUS=``. The starter knows four words; for a checkpointed VM it expects
Suspended (``VMProc::process_vm_status_result`` in HTCondor's ``src/condor_starter.V6.1/vm_proc.cpp``)."""

START = "START"
STOP = "STOP"
SUSPEND = "SUSPEND"
SOFT_SUSPEND = "SOFT_SUSPEND"
RESUME = "RESUME"
CHECKPOINT = "CHECKPOINT"
STATUS = "STATUS"
GETPID = "GETPID"

OPERATIONS = (START, STOP, SUSPEND, SOFT_SUSPEND, RESUME, CHECKPOINT, STATUS, GETPID)

TYPES_WITHOUT_PERIODIC = ("kvm", "xen")
"""VM types for which condor_starter makes no periodic checkpoints (``VMProc::Ckpt`` in HTCondor's
``src/condor_starter.V6.1/vm_proc.cpp``): after a checkpoint of theirs the VM is always stopped."""

KEEP = "keep"
"""The operation is granted without calling the driver: the VM is already as asked."""

TRANSITIONS: dict[tuple[str, str], str] = {
    (STARTING, START): RUNNING,
    (RUNNING, STOP): STOPPED,
    (RUNNING, SUSPEND): SUSPENDED,
    (RUNNING, SOFT_SUSPEND): SOFT_SUSPENDED,
    (RUNNING, RESUME): KEEP,
    (RUNNING, CHECKPOINT): CHECKPOINTED,
    (SOFT_SUSPENDED, STOP): STOPPED,
    (SOFT_SUSPENDED, SUSPEND): SUSPENDED,
    (SOFT_SUSPENDED, SOFT_SUSPEND): KEEP,
    (SOFT_SUSPENDED, RESUME): RUNNING,
    (SOFT_SUSPENDED, CHECKPOINT): CHECKPOINTED,
    (SUSPENDED, STOP): STOPPED,
    (SUSPENDED, SUSPEND): KEEP,
    (SUSPENDED, RESUME): RUNNING,
    (SUSPENDED, CHECKPOINT): CHECKPOINTED,
    (CHECKPOINTED, STOP): STOPPED,
    (CHECKPOINTED, SUSPEND): KEEP,
    (CHECKPOINTED, SOFT_SUSPEND): KEEP,
    (CHECKPOINTED, RESUME): RUNNING,
    (CHECKPOINTED, CHECKPOINT): KEEP,
    (STOPPED, STOP): STOPPED,
}
"""(state, operation) -> the state that a success leads to. What is not here is refused with
``VMGAHP_ERR_VM_INVALID_OPERATION``. STATUS and GETPID are allowed in every state and change none; a
STATUS may *find* that the guest is gone, which leads to `STOPPED` from anywhere."""


def diagram() -> str:
    """`TRANSITIONS` as a Mermaid state diagram, which docs/reference/states.md shows."""
    lines = ["stateDiagram-v2", f"    [*] --> {STARTING}"]
    for (state, operation), outcome in TRANSITIONS.items():
        if state != outcome and outcome != KEEP:
            lines.append(f"    {state} --> {outcome}: {operation}")
    lines += [f"    {state} --> {STOPPED}: the guest is gone" for state in (RUNNING, SOFT_SUSPENDED)]
    lines += [f"    {STARTING} --> [*]: it fails", f"    {STOPPED} --> [*]: STOP"]
    return "\n".join(lines) + "\n"


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

    __slots__ = ("accounting", "goes_on", "id", "last_status", "queue", "running", "state")

    def __init__(self, vm_id: int) -> None:
        self.id = vm_id
        self.state = STARTING
        self.queue: list[Call] = []
        self.running: Call | None = None
        self.accounting: Accounting | None = None
        self.last_status: tuple[str, ...] | None = None
        self.goes_on = False
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
