"""What the pool is told of a VM: the names in the job ad, and the lines in the job's log.

Whoever knows something new says ``machine.news.publish(published.ADDRESSES, "10.0.0.7, fd00::7")``, from any thread
and at any time, also in the helper process that starts the VM; ``resources.news`` is the same. It costs nothing and
raises nothing. `vmgahp.daemon.publisher` passes on what has changed, when the starter listens
(`vmgahp.job.chirp`): after the first STATUS that follows, and at the VM's end before it is answered. A starter that
waits for a START, a suspend, a checkpoint or a STOP hears nothing, and neither does one whose START fails.

All names begin with Chirp, for only such attributes are taken of every job, and each is one row of `NAMES`, of which
the documents make their table. An ad can be read by everybody in the pool: no password is published, and of what a
guest says only what was looked at.
"""

from _thread import allocate_lock

from vmgahp.host.light import NamedTuple

Value = str | int | float | bool | None
"""None stands for undefined."""

LONGEST_VALUE = 990
"""Bytes of an expression; the starter takes 993."""
LONGEST_LINE = 1000
"""Bytes of a line in the job's log, which has 1023."""
MOST_LINES = 50
"""Lines that one VM puts into its job's log: a guest can make its address change as often as it likes."""
MOST_PROBLEMS = 5
"""That the log hears of why one VM's job is not told."""


class Name(NamedTuple):
    """One attribute of the job ad."""

    attribute: str
    meaning: str
    kind: str = "string"
    line: str = ""
    """What the job's log says when it changes, with ``{}`` for the value; empty for nothing."""
    lives: bool = False
    """Whether it is of no use, and undefined, when the VM is over."""
    is_figure: bool = False
    """Whether it changes all the time, and can wait for what is more urgent."""


STATE = Name("ChirpVMState", "Running, SoftSuspended, Suspended, Checkpointed or Stopped.")
ADDRESSES = Name(
    "ChirpVMAddresses", "The guest's addresses, IPv4 and IPv6, with commas.", line="The VM has {}", lives=True
)
MAC = Name("ChirpVMMAC", "The MAC addresses of its network cards, with commas.", lives=True)
VNC = Name(
    "ChirpVMVNC",
    "Where its display is, by VNC, on the machine that it runs on: address and port. The password is in "
    "vm_vnc.json, which the job's user alone can read.",
    line="The VM's display is at {} of its machine",
    lives=True,
)
SSH = Name(
    "ChirpVMSSH",
    "The ports of the machine that lead to the guest's, as in 22=127.0.0.1:22017, with blanks between them.",
    line="The VM is reached by {}",
    lives=True,
)
MEMORY = Name(
    "ChirpVMMemory", "KiB of the machine's memory that its hypervisor's process occupies.", "integer", is_figure=True
)
MEMORY_PEAK = Name("ChirpVMMemoryPeak", "The most of it so far on this machine.", "integer", is_figure=True)
CPU = Name(
    "ChirpVMCPU",
    "Seconds of CPU time that its hypervisor's process has used on this machine, the guest's among them.",
    "real",
    is_figure=True,
)
CHECKPOINTS = Name("ChirpVMCheckpoints", "How many checkpoints this machine has made of it.", "integer")
CHECKPOINT_TIME = Name("ChirpVMCheckpointTime", "When the last one was made: seconds since 1970.", "integer")
CHECKPOINT_SECONDS = Name("ChirpVMCheckpointSeconds", "How long it took, the transfer not counted.", "real")
CHECKPOINT_BYTES = Name("ChirpVMCheckpointBytes", "Bytes of the memory image that it has, packed.", "integer")
PAUSED = Name(
    "ChirpVMPauseReason",
    "Why the VM stands still though nobody has suspended the job, such as an error of a disk.",
    line="The VM is paused: {}",
    lives=True,
)
ERROR = Name("ChirpVMError", "Why the last suspend, resume or checkpoint failed.", line="{}")
POLICY = Name(
    "ChirpVMPolicy",
    "What the machine's administrator has changed in the VM, in short; vm_policy.txt, which comes home, has the lines.",
    line="{}",
)
HOLD_REASON = Name("ChirpVMHoldReason", "Why the job should be held, where its VM was ended for that.")
ENDED_BY = Name("ChirpVMEndedBy", "How the VM ended by itself, in the words of vm_exit.json.")
EXIT_CODE = Name("ChirpVMExitCode", "The exit code that the guest has said.", "integer")
EXIT_SIGNAL = Name(
    "ChirpVMExitSignal",
    "The signal that has ended the program of +VMPARAM_vm_Run, by which the job ends too.",
    "integer",
)
EXIT_REASON = Name("ChirpVMExitReason", "Why the VM was ended as a failure.", line="{}")

AT_ONCE = "VMExitCode"
"""The exit code once more, in jobs with ``+WantIOProxy = true`` or ``+WantRemoteUpdates = true``: set at once."""

NAMES = tuple(row for row in list(globals().values()) if isinstance(row, Name))
"""In the order in which the documents have them."""


class News:
    """What there is to be told of one VM: the last value of each name, and lines for the job's log."""

    __slots__ = ("_is_fresh", "_lines", "_lock", "_problems", "_said", "_spoken", "_values", "over", "turn")

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._values: dict[str, Value] = {}
        """By the attribute."""
        self._said: dict[str, Value] = {}
        """What the starter has taken."""
        self._is_fresh = False
        """Whether something may be unsaid that is no figure: each STATUS asks."""
        self._lines: list[str] = []
        self._spoken = 0
        self.turn = allocate_lock()
        """Held by who speaks with the starter."""
        self.over = False
        """Whether the VM is gone."""
        self._problems: set[str] = set()

    def publish(self, name: Name, value: Value) -> None:
        """Have this said, unless it is known already."""
        with self._lock:
            before = self._values.get(name.attribute, self)
            self._values[name.attribute] = value
            self._is_fresh |= not name.is_figure and value != before
        if name.line and value is not None and value != before:
            self.say(name.line.format(value))

    def value(self, name: Name) -> Value:
        """What was published last."""
        return self._values.get(name.attribute)

    def say(self, line: str) -> None:
        """Have a line in the job's log, where the job has the right to put one there."""
        with self._lock:
            if self._spoken < MOST_LINES:
                self._spoken += 1
                self._lines.append(line)

    def forget(self, attributes: "list[str]") -> None:
        """The job ad has these from an earlier run: what is not known again becomes undefined."""
        known = {attribute.lower() for attribute in attributes}
        with self._lock:
            for name in NAMES:
                if name.attribute.lower() in known:
                    self._values.setdefault(name.attribute, None)
            self._is_fresh = True

    def is_over(self) -> None:
        """The VM is gone, and nobody reaches it any more."""
        with self._lock:
            self.over = self._is_fresh = True
            self._values |= {name.attribute: None for name in NAMES if name.lives and name.attribute in self._values}

    def unsaid(self) -> "list[tuple[Name, Value]]":
        """What the starter has not taken yet, in the order of the table."""
        with self._lock:
            return [
                (name, self._values[name.attribute])
                for name in NAMES
                if name.attribute in self._values
                and self._said.get(name.attribute, self) != self._values[name.attribute]
            ]

    def is_urgent(self) -> bool:
        """Whether there is more to be said than figures."""
        if self._is_fresh:
            self._is_fresh = not all(name.is_figure for name, _ in self.unsaid())
        return self._is_fresh or bool(self._lines)

    def said(self, name: Name, value: Value) -> None:
        """The starter has taken it, or never will."""
        with self._lock:
            self._said[name.attribute] = value

    def take_lines(self) -> list[str]:
        """The lines that wait, each once."""
        with self._lock:
            lines, self._lines = self._lines, []
            return lines

    def is_new(self, problem: str) -> bool:
        """Whether the log is to have it: each problem once, and not many."""
        if not problem or problem in self._problems or len(self._problems) >= MOST_PROBLEMS:
            return False
        self._problems.add(problem)
        return True

    def plain(self) -> "tuple[dict[str, Value], list[str]]":
        """All of it, as another process can take it over (`take_over`), which then says the lines."""
        return self._values.copy(), self.take_lines()

    def take_over(self, plain: "tuple[dict[str, Value], list[str]]") -> None:
        """What another process has published, which nobody has been told of; it may have known less than this one."""
        values, lines = plain
        with self._lock:
            known = {name.line.format(self._values.get(name.attribute)) for name in NAMES if name.line}
            self._lines += [line for line in lines if line not in known]
            self._values |= values
            self._is_fresh = True


def expression(value: Value) -> str:
    """A value as an expression of a ClassAd, on one line; what is too long is cut.

    Strings are those of the new syntax, which chirp takes: a backslash hides what follows it, and letters of every
    alphabet stand as they are. What cannot be printed becomes a question mark.
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
    """On one line, of characters that can be shown."""
    return text if text.isprintable() else "".join(each if each.isprintable() else "?" for each in text)
