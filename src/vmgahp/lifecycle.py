"""The states of a virtual machine, the transitions between them, and the named points of its life.

The session, the property tests and the documents' diagram read `TRANSITIONS`; nothing else decides what is allowed.
"""

from __future__ import annotations


class State(str):
    """The state of a VM for the session, as a word of the protocol or of the log; each state is one object.

    It is not an Enum: that module takes a quarter of a MiB in each server, and a millisecond before its first reply.
    """

    __slots__ = ()
    _known: dict[str, State] = {}

    def __new__(cls, word: str) -> State:
        return cls._known.setdefault(word, super().__new__(cls, word))


STARTING = State("Starting")
RUNNING = State("Running")
SOFT_SUSPENDED = State("SoftSuspended")
"""Paused: the CPUs are stopped, the memory stays in RAM."""
SUSPENDED = State("Suspended")
"""Saved to a file in the scratch directory that is of use to this server alone."""
CHECKPOINTED = State("Checkpointed")
"""Saved with everything that a restart elsewhere needs; the files stay when the server ends."""
STOPPED = State("Stopped")

STATES = (STARTING, RUNNING, SOFT_SUSPENDED, SUSPENDED, CHECKPOINTED, STOPPED)

STATUS_WORDS: dict[str, State] = {**{state: state for state in STATES}, CHECKPOINTED: SUSPENDED}
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

TRANSITIONS: dict[tuple[str, str], State] = {
    (STARTING, START): RUNNING,
    (RUNNING, STOP): STOPPED,
    (RUNNING, SUSPEND): SUSPENDED,
    (RUNNING, SOFT_SUSPEND): SOFT_SUSPENDED,
    (RUNNING, RESUME): RUNNING,
    (RUNNING, CHECKPOINT): CHECKPOINTED,
    (SOFT_SUSPENDED, STOP): STOPPED,
    (SOFT_SUSPENDED, SUSPEND): SUSPENDED,
    (SOFT_SUSPENDED, SOFT_SUSPEND): SOFT_SUSPENDED,
    (SOFT_SUSPENDED, RESUME): RUNNING,
    (SOFT_SUSPENDED, CHECKPOINT): CHECKPOINTED,
    (SUSPENDED, STOP): STOPPED,
    (SUSPENDED, SUSPEND): SUSPENDED,
    (SUSPENDED, RESUME): RUNNING,
    (SUSPENDED, CHECKPOINT): CHECKPOINTED,
    (CHECKPOINTED, STOP): STOPPED,
    (CHECKPOINTED, SUSPEND): CHECKPOINTED,
    (CHECKPOINTED, SOFT_SUSPEND): CHECKPOINTED,
    (CHECKPOINTED, RESUME): RUNNING,
    (CHECKPOINTED, CHECKPOINT): CHECKPOINTED,
    (STOPPED, STOP): STOPPED,
}
"""(state, operation) -> the state after success. If the VM is in that state already, the operation is granted without
calling the driver. An operation that is missing here is refused with ``VMGAHP_ERR_VM_INVALID_OPERATION``. STATUS and
GETPID are allowed in every state and change none; a STATUS may *find* that the guest is gone, which leads to `STOPPED`
from any state."""

POINTS = {
    "plan.looked": "the job is read, its files are looked at, nothing is changed",
    "clear.done": "what an earlier start left is gone",
    "prepare.guarded": "the guardian watches",
    "prepare.done": "disks and sockets are made",
    "launch.made": "the guest exists, its CPUs stand still",
    "launch.runs": "the guest runs",
    "keep.done": "the VM is the server's",
    "pause.begun": "a SOFT_SUSPEND has begun",
    "pause.done": "the guest's CPUs stand still",
    "unpause.begun": "the RESUME of a paused guest has begun",
    "unpause.done": "the guest runs again",
    "save.begun": "the guest's memory is about to be written",
    "save.written": "the memory image is whole, under its partial name",
    "save.named": "the memory image has its name, the guest is gone",
    "checkpoint.begun": "a CHECKPOINT has begun",
    "checkpoint.saved": "its memory image is in place",
    "checkpoint.written": "its manifest is in place",
    "restore.begun": "the RESUME of a saved guest has begun",
    "restore.made": "the guest exists again, its CPUs stand still",
    "restore.set_aside": "the checkpoint is none any more, for the disks are about to change",
    "restore.runs": "the guest runs again",
    "end.begun": "nothing else is done to the VM any more",
    "end.asked": "the guest was asked to power off",
    "end.gone": "the guest was seen gone",
    "end.released": "what belonged to the VM is tidied up, and its guardian dismissed",
}
"""The named points of a VM's life -> the situation at each."""
