"""What is tried: every operation, at every point of it, with every fault."""

from typing import NamedTuple

BEGUN = ("plan.looked", "clear.done", "prepare.guarded", "prepare.done")
SAVE = ("save.begun", "save.written", "save.named")
RESTORE = ("restore.begun", "restore.made", "restore.set_aside", "restore.runs")
END = ("end.begun", "end.gone", "end.released")

OPERATIONS: dict[str, tuple[str, ...]] = {
    "START": (*BEGUN, "launch.made", "launch.runs", "keep.done"),
    "START from a checkpoint": (*BEGUN, "launch.made", "restore.set_aside", "launch.runs", "keep.done"),
    "SOFT_SUSPEND": ("pause.begun", "pause.done"),
    "RESUME of a paused VM": ("unpause.begun", "unpause.done"),
    "SUSPEND": SAVE,
    "RESUME of a saved VM": RESTORE,
    "CHECKPOINT": ("checkpoint.begun", "save.begun", "save.written", "checkpoint.saved", "checkpoint.written"),
    "CHECKPOINT of a saved VM": ("checkpoint.begun", "checkpoint.saved", "checkpoint.written"),
    "RESUME of a checkpointed VM": RESTORE,
    "STOP": ("end.asked", *END),
    "STOP of a saved VM": END,
    "QUIT": END,
    "end of input": END,
    "SIGTERM": END,
}
"""Operation -> the points at which it is held."""

GUESTLESS = {*BEGUN, "save.written", "save.named", "checkpoint.saved", "checkpoint.written", "restore.begun"}
GUESTLESS |= {"end.gone", "end.released"}
"""Where there is no QEMU that could fail, and of these operations nowhere:"""
OF_SAVED = ("CHECKPOINT of a saved VM", "STOP of a saved VM")

ENDS = ("QUIT", "end of input", "SIGTERM")
"""What ends the daemon in order: operations, and faults of every other operation."""

ENDED = tuple(f"daemon: {end}" for end in ENDS)
"""What ends it so as a fault, and ends no daemon that ends."""

FAULTS: dict[str, str] = {
    "daemon: SIGKILL": "the guardian has to end the guest",
    "daemon: SIGTERM": "the daemon has to end the guest, whatever is under way",
    "daemon: QUIT": "the same, asked for by the client",
    "daemon: end of input": "the same, where the client has died",
    "daemon: SIGSTOP": "it stands still for some seconds",
    "libvirtd: SIGKILL": "it is started again a second later",
    "libvirtd: SIGTERM": "the same in order, as an upgrade of its package does",
    "libvirtd: SIGSTOP": "it hangs for longer than its client waits, and comes back",
    "QEMU: SIGKILL": "the guest is gone",
    "QEMU: SIGSTOP": "the guest's process hangs for good",
    "disk: full": "until the operation was answered",
    "disk: read-only": "until the operation was answered",
}
"""Fault -> what it is."""


class Case(NamedTuple):
    """One fault, at one point of one operation."""

    operation: str
    point: str
    fault: str

    def __str__(self) -> str:
        return f"{self.operation}, {self.point}, {self.fault}"


def all_cases() -> list[Case]:
    """Make the whole matrix. What waits for hung processes comes first, so that it waits beside the others."""
    cases = [
        Case(operation, point, fault)
        for operation, points in OPERATIONS.items()
        for point in points
        for fault in FAULTS
        if not (operation in ENDS and fault in ENDED)
        and not (fault.startswith("QEMU: ") and (point in GUESTLESS or operation in OF_SAVED))
    ]
    return sorted(cases, key=lambda case: "SIGSTOP" not in case.fault)


class Verdict(NamedTuple):
    """What came of a case."""

    operation: str
    point: str
    fault: str
    tried: int
    """The times that the point was reached and there was something to fail; of a random story, its steps."""
    lost: list[str]
    """What was lost, in words; empty where all survived."""
    seconds: float
    log: str
    """What was done and answered, where something was lost or nothing tried."""
