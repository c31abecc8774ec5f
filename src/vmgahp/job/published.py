"""The facts about a VM that the pool gets: attributes of the job ad, and lines of the job's log.

Any code publishes a fact by ``machine.updates.publish(published.ADDRESSES, "10.0.0.7, fd00::7")``, from any thread
and at any time; ``resources.updates`` is the same object. This is cheap and raises nothing. `vmgahp.daemon.collector`
passes on changes when the starter listens (`vmgahp.job.chirp`): after the next STATUS, and at the VM's end before the
STATUS is answered. A starter that waits for a START, a suspend, a checkpoint or a STOP does not listen, and neither
does one whose START fails.

All names begin with Chirp, because a starter accepts only such attributes for every job, and each is one row of
`NAMES`, from which the table in the documents is made. Every user of the pool can read an ad: no password is
published, and a guest's words only after a check.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import NamedTuple

Value = str | int | float | bool | None
"""The type of a value; an undefined one is None."""

LONGEST_VALUE = 990
"""The most bytes of an expression; the starter accepts 993."""
LONGEST_LINE = 1000
"""The most bytes of a line in the job's log, whose limit is 1023."""
MOST_LINES = 50
"""The most lines of one VM in its job's log: a guest can change its address as often as it likes."""
MOST_PROBLEMS = 5
"""The most messages in the server's log about failures to report one VM's facts."""


class Name(NamedTuple):
    """One attribute of the job ad."""

    attribute: str
    meaning: str
    kind: str = "string"
    line: str = ""
    """The line for the job's log when the value changes, with ``{}`` for the value; empty for none."""
    lives: bool = False
    """True if it becomes undefined at the VM's end."""
    is_figure: bool = False
    """True if it changes all the time, and can wait for more urgent ones."""


STATE = Name("ChirpVMState", "Running, SoftSuspended, Suspended, Checkpointed or Stopped.")
ADDRESSES = Name(
    "ChirpVMAddresses", "The guest's IPv4 and IPv6 addresses, separated by commas.", line="The VM has {}", lives=True
)
MAC = Name("ChirpVMMAC", "The MAC addresses of its network cards, separated by commas.", lives=True)
VNC = Name(
    "ChirpVMVNC",
    "The address and port of its display (VNC) on the machine. The password is in vm_vnc.json, which only the job's "
    "user can read.",
    line="The VM's display is at {} of its machine",
    lives=True,
)
SSH = Name(
    "ChirpVMSSH",
    "The forwarded ports, such as 22=127.0.0.1:22017, separated by blanks.",
    line="The VM is reached by {}",
    lives=True,
)
MEMORY = Name("ChirpVMMemory", "The resident memory of the hypervisor's process in KiB.", "integer", is_figure=True)
MEMORY_PEAK = Name("ChirpVMMemoryPeak", "The maximum of ChirpVMMemory on this machine.", "integer", is_figure=True)
CPU = Name(
    "ChirpVMCPU",
    "The CPU seconds of the hypervisor's process on this machine, the guest's included.",
    "real",
    is_figure=True,
)
CHECKPOINTS = Name("ChirpVMCheckpoints", "The number of checkpoints made on this machine.", "integer")
CHECKPOINT_TIME = Name("ChirpVMCheckpointTime", "The time of the last checkpoint, in seconds since 1970.", "integer")
CHECKPOINT_SECONDS = Name(
    "ChirpVMCheckpointSeconds", "The duration of the last checkpoint, without the transfer.", "real"
)
CHECKPOINT_BYTES = Name("ChirpVMCheckpointBytes", "The size of its memory image in bytes.", "integer")
PAUSED = Name(
    "ChirpVMPauseReason",
    "The reason why the VM is paused although the job is not suspended, such as a disk error.",
    line="The VM is paused: {}",
    lives=True,
)
ERROR = Name("ChirpVMError", "The reason why the last suspend, resume or checkpoint failed.", line="{}")
POLICY = Name(
    "ChirpVMPolicy",
    "A summary of the administrator's changes to the VM (VM_POLICY); vm_policy.txt has the details.",
    line="{}",
)
HOLD_REASON = Name("ChirpVMHoldReason", "The reason to hold the job, if its VM failed by its fault.")
ENDED_BY = Name("ChirpVMEndedBy", "The way in which the VM ended by itself, as ended_by in vm_exit.json.")
EXIT_CODE = Name("ChirpVMExitCode", "The guest's exit code.", "integer")
EXIT_SIGNAL = Name(
    "ChirpVMExitSignal", "The signal that ended the program of +VMPARAM_vm_Run, and so the job.", "integer"
)
EXIT_REASON = Name("ChirpVMExitReason", "The reason why the VM failed.", line="{}")

AT_ONCE = "VMExitCode"
"""The exit code's attribute in jobs with ``+WantIOProxy = true`` or ``+WantRemoteUpdates = true``; set at once."""

NAMES = tuple(row for row in list(globals().values()) if isinstance(row, Name))
"""All names, in the order of the table in the documents."""


class JobUpdates:
    """The updates of one VM: the last value of each name, and lines for the job's log."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._values: dict[str, Value] = {}
        """The published values by attribute."""
        self._said: dict[str, Value] = {}
        """The values that the starter has taken."""
        self._is_fresh = False
        """True if values other than figures may be unreported: a cheap test for each STATUS."""
        self._lines: list[str] = []
        self._spoken = self._offers = 0
        self.turn = Lock()
        """A lock that is held while the starter is talked to."""
        self.over = False
        """True once the VM is gone."""
        self._problems: set[str] = set()
        self.on_stage: Callable[[str], None] = lambda _stage: None
        """A callback for each stage of the program in the guest, for the file of metrics."""

    def publish(self, name: Name, value: Value) -> None:
        """Set a value, to be reported if it has changed."""
        with self._lock:
            before = self._values.get(name.attribute, self)
            self._values[name.attribute] = value
            self._is_fresh |= not name.is_figure and value != before
        if name.line and value is not None and value != before:
            self.say(name.line.format(value))

    def value(self, name: Name) -> Value:
        """Return the last published value."""
        return self._values.get(name.attribute)

    def say(self, line: str) -> None:
        """Add a line for the job's log, if the job is allowed to write there."""
        with self._lock:
            if line and self._spoken < MOST_LINES:
                self._spoken += 1
                self._lines.append(line)

    def forget(self, attributes: list[str]) -> None:
        """Make attributes of the job ad from an earlier run undefined, unless they are published again."""
        known = {attribute.lower() for attribute in attributes}
        with self._lock:
            for name in NAMES:
                if name.attribute.lower() in known:
                    self._values.setdefault(name.attribute, None)
            self._is_fresh = True

    def is_over(self) -> None:
        """Record that the VM is gone, and make its live attributes undefined."""
        with self._lock:
            self.over = self._is_fresh = True
            self._values |= {name.attribute: None for name in NAMES if name.lives and name.attribute in self._values}

    def unsaid(self) -> list[tuple[Name, Value]]:
        """Return the values that the starter has not taken yet, in the order of the table."""
        with self._lock:
            known = [(name, self._values[name.attribute]) for name in NAMES if name.attribute in self._values]
            return [(name, value) for name, value in known if self._said.get(name.attribute, self) != value]

    def is_urgent(self) -> bool:
        """Return True if there is more to report than figures."""
        if self._is_fresh:
            self._is_fresh = not all(name.is_figure for name, _ in self.unsaid())
        return self._is_fresh or bool(self._lines)

    def said(self, name: Name, value: Value) -> None:
        """Record that the starter has taken or refused a value."""
        with self._lock:
            self._said[name.attribute] = value

    def next_line(self) -> str:
        """Return the first waiting line; empty if there is none.

        A line that was returned twice without `line_said` may be in the log, and its answer too late: all are forgotten
        then, lest they fail every round.
        """
        with self._lock:
            if self._offers == 2:
                self._forget_lines()
            self._offers += bool(self._lines)
            return self._lines[0] if self._lines else ""

    def line_said(self, line: str) -> None:
        """Record that the starter has taken a line."""
        with self._lock:
            if self._lines[:1] == [line]:  # the round at the VM's end may have said it meanwhile
                del self._lines[0]
                self._offers = 0

    def drop_lines(self) -> None:
        """Forget the waiting lines, which the starter refuses."""
        with self._lock:
            self._forget_lines()

    def _forget_lines(self) -> None:
        self._lines.clear()
        self._offers = 0

    def is_new(self, problem: str) -> bool:
        """Return True if a problem should be logged: each one once, and a limited number of them."""
        if not problem or problem in self._problems or len(self._problems) >= MOST_PROBLEMS:
            return False
        self._problems.add(problem)
        return True


def expression(value: Value) -> str:
    """Format a value as an expression of a ClassAd, on one line; cut it if it is too long.

    Strings are in the new syntax, which chirp takes: a backslash escapes the next character, and letters of every
    alphabet are written as they are. Unprintable characters become question marks.
    """
    if value is None:
        return "undefined"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    text = printable(value).replace("\\", "\\\\").replace('"', '\\"')
    cut = text.encode()[: LONGEST_VALUE - 2].decode(errors="ignore")
    if len(cut) < len(text) and (len(cut) - len(cut.rstrip("\\"))) % 2:
        cut = cut[:-1]  # half of an escape
    return f'"{cut}"'


def printable(text: str) -> str:
    """Replace unprintable characters, line ends included, by question marks."""
    return text if text.isprintable() else "".join(each if each.isprintable() else "?" for each in text)
