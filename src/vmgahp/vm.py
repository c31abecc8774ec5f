"""The states of a virtual machine and the table of what may happen in each.

The session, the property tests and the documentation's diagram all read `TRANSITIONS`; nothing else
decides what is allowed. Names of the states are the words of ``STATUS=`` in the protocol.
"""

STARTING = "Starting"
RUNNING = "Running"
SOFT_SUSPENDED = "SoftSuspended"
SUSPENDED = "Suspended"
STOPPED = "Stopped"

STATES = (STARTING, RUNNING, SOFT_SUSPENDED, SUSPENDED, STOPPED)

START = "START"
STOP = "STOP"
SUSPEND = "SUSPEND"
SOFT_SUSPEND = "SOFT_SUSPEND"
RESUME = "RESUME"
CHECKPOINT = "CHECKPOINT"
STATUS = "STATUS"
GETPID = "GETPID"

OPERATIONS = (START, STOP, SUSPEND, SOFT_SUSPEND, RESUME, CHECKPOINT, STATUS, GETPID)

KEEP = "keep"
"""The operation is granted without calling the driver: the VM is already as asked."""

TRANSITIONS: dict[tuple[str, str], str] = {
    (STARTING, START): RUNNING,
    (RUNNING, STOP): STOPPED,
    (RUNNING, SUSPEND): SUSPENDED,
    (RUNNING, SOFT_SUSPEND): SOFT_SUSPENDED,
    (RUNNING, RESUME): KEEP,
    (RUNNING, CHECKPOINT): SUSPENDED,
    (SOFT_SUSPENDED, STOP): STOPPED,
    (SOFT_SUSPENDED, SUSPEND): SUSPENDED,
    (SOFT_SUSPENDED, SOFT_SUSPEND): KEEP,
    (SOFT_SUSPENDED, RESUME): RUNNING,
    (SOFT_SUSPENDED, CHECKPOINT): SUSPENDED,
    (SUSPENDED, STOP): STOPPED,
    (SUSPENDED, SUSPEND): KEEP,
    (SUSPENDED, RESUME): RUNNING,
    (SUSPENDED, CHECKPOINT): SUSPENDED,
    (STOPPED, STOP): STOPPED,
}
"""(state, operation) -> the state that a success leads to. What is not here is refused with
``VMGAHP_ERR_VM_INVALID_OPERATION``. STATUS and GETPID are allowed in every state and change none; a
STATUS may *find* that the guest is gone, which leads to `STOPPED` from anywhere."""


class Accounting:
    """Turns a driver's raw figures into those of a STATUS: CPU time that never runs backwards.

    A hypervisor counts from zero again when a saved VM is restored; the sum of what came before is kept
    here. CPUUTILIZATION is the CPU used since the last STATUS by wall time and vCPUs, 0 to 1.
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
        utilization = (total - self._reported_cpu) / wall if wall > 0 else 0.0
        self._reported_cpu = total
        self._reported_time = now
        return utilization, total
