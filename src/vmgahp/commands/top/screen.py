"""The VMs of a machine as lines, or on a terminal as a table that renews itself."""

import os
import sys
import time
from textwrap import wrap

from vmgahp.commands.top.node import Look, Node, VmRow
from vmgahp.commands.units import duration, size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rich.console import Group

COLUMNS = (
    *("NAME", "OWNER", "STATE", "CPU", "VCPUS", "MEMORY"),
    *("READ/s", "WRITE/s", "RECV/s", "SEND/s", "AGE", "SCRATCH"),
)
NUMBERS = frozenset(("CPU", "VCPUS", "MEMORY", "READ/s", "WRITE/s", "RECV/s", "SEND/s", "AGE"))
FIRST_TO_GO = ("SCRATCH", "OWNER", "VCPUS", "AGE", "RECV/s", "SEND/s", "READ/s", "WRITE/s", "MEMORY")
"""The columns that a narrow terminal does without, in this order."""
AROUND = 5
"""Lines of the screen that are not of VMs."""
UNKNOWN = "-"

COLORS = {"Running": "green", "SoftSuspended": "yellow", "Suspended": "blue", "Checkpointed": "magenta"}


def cells(row: VmRow) -> dict[str, str]:
    """A VM's texts by their columns."""

    def rate(value: float | None) -> str:
        return UNKNOWN if value is None else size(value)

    return {
        "NAME": row.name,
        "OWNER": row.owner or UNKNOWN,
        "STATE": row.state or UNKNOWN,
        "CPU": UNKNOWN if row.cpu_percent is None else f"{row.cpu_percent:.1f}%",
        "VCPUS": str(row.vcpus),
        "MEMORY": size(row.memory_kib * 1024) if row.memory_kib else UNKNOWN,
        "READ/s": rate(row.read),
        "WRITE/s": rate(row.written),
        "RECV/s": rate(row.received),
        "SEND/s": rate(row.sent),
        "AGE": UNKNOWN if row.age is None else duration(row.age),
        "SCRATCH": row.scratch or UNKNOWN,
    }


LEAST_NAME = 24
"""Characters of a VM's name for which a narrow terminal does without other columns."""


def _nobody(look: Look) -> str:
    return "No VMs of jobs were found." if look.notes else "There are no VMs of jobs on this machine."


def plain(look: Look, width: int = 0) -> str:
    """The table as lines, and what could not be looked at below it; `width` is a terminal's, 0 for anything else."""
    if not look.rows:
        lines = [_nobody(look)]
    else:
        table = [cells(row) for row in look.rows]
        widths = _fitting(table, width)
        lines = [
            "  ".join(
                text.rjust(wide) if name in NUMBERS else text.ljust(wide)
                for name, wide in widths.items()
                for text in [_shortened(line[name], wide)]
            ).rstrip()
            for line in ({name: name for name in COLUMNS}, *table)
        ]
    notes = [line for note in look.notes for line in (wrap(note, width) if width else [note])]
    return "\n".join(lines + notes) + "\n"


def _fitting(table: list[dict[str, str]], width: int) -> dict[str, int]:
    """The columns that there is room for, and how wide each is; 0 is any width."""
    widths = {name: max([len(name), *(len(line[name]) for line in table)]) for name in COLUMNS}
    if width:
        longest, widths["NAME"] = widths["NAME"], min(widths["NAME"], LEAST_NAME)
        for name in FIRST_TO_GO:
            if _room(widths, width) < 0:
                del widths[name]
        widths["NAME"] = max(1, min(longest, widths["NAME"] + _room(widths, width)))
    return widths


def _room(widths: dict[str, int], width: int) -> int:
    return width - sum(widths.values()) - 2 * (len(widths) - 1)


def _shortened(text: str, size: int) -> str:
    """A name without its middle: the job's id is at its end."""
    tail = size // 2
    return text if len(text) <= size else f"{text[: size - tail - 1]}~{text[len(text) - tail :]}"


def rich_table(look: Look, width: int, height: int = 0) -> "Group":
    """The same for a terminal of so many columns, and so many lines where it does not scroll."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    lines = [cells(row) for row in look.rows]
    widths = _fitting(lines, width - 2)  # rich pads the last column too
    notes = [Text(line, "yellow") for note in look.notes for line in wrap(note, width)]
    room = max(1, height - AROUND - len(notes)) if height else len(lines)
    hidden = len(lines) - room
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in widths:
        table.add_column(name, justify="right" if name in NUMBERS else "left", no_wrap=True, overflow="ellipsis")
    for line in lines[:room]:
        color = COLORS.get(line["STATE"], "")
        texts = [(name, _shortened(line[name], wide)) for name, wide in widths.items()]
        table.add_row(*(Text(text, color if name == "STATE" else "") for name, text in texts))
    running = sum(row.state == "Running" for row in look.rows)
    clock, vms = time.strftime("%H:%M:%S", time.localtime(look.time)), f"VMs: {len(look.rows)}, running: {running}"
    memory = f", memory: {size(sum(row.memory_kib for row in look.rows) * 1024)}"
    room_for_host = width - len(f"  {clock}  {vms}    q ends")
    head = Text(f"{_shortened(os.uname().nodename, max(room_for_host, 3))}  {clock}  ", "bold", no_wrap=True)
    head.append(vms, "not bold")
    if len(os.uname().nodename) + len(memory) <= room_for_host:
        head.append(memory, "not bold")
    head.append("    q ends", "dim")
    more = [Text(f"and {hidden} more: --once shows all", "dim")] if hidden > 0 else []
    return Group(head, Text(""), table if lines else Text(_nobody(look), "dim"), *more, Text(""), *notes)


def terminal_width() -> int:
    """How many columns standard output has; 0 where it is no terminal, and lines may be as long as they are."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):
        return 0


def live(node: Node, interval: float) -> None:
    """Show the VMs until q or Ctrl-C; a libvirtd that hangs holds up the figures and not the keys."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with _Keys() as keys, Live(console=console, screen=True, auto_refresh=False) as screen:
        looks = _Looks(node, interval)
        screen.update("Looking…", refresh=True)
        while True:
            key = keys.wait_for(looks.ready)
            if key in ("q", "Q", "\x03", "\x04"):
                return
            look = looks.last
            if look is not None:
                screen.update(rich_table(look, console.width, console.height), refresh=True)


def repeat(node: Node, interval: float) -> None:
    """Lines again and again, for a terminal that can do no more, until Ctrl-C."""
    looks = _Looks(node, interval)
    while True:
        looks.wait()
        if looks.last is not None:
            sys.stdout.write(plain(looks.last, terminal_width()) + "\n")
            sys.stdout.flush()


class _Looks:
    """Looks in a thread of its own, which ends with the program."""

    def __init__(self, node: Node, interval: float) -> None:
        import threading

        self.last: Look | None = None
        self.ready, self._said = os.pipe2(os.O_CLOEXEC)
        self._node = node
        self._interval = interval
        self._pause = threading.Event()
        threading.Thread(target=self._run, name="looking", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                self.last = self._node.look()
            except Exception as error:  # noqa: BLE001 - the screen stays, and says that its figures are old
                if self.last is not None:
                    self.last.notes = [f"This is old: {type(error).__name__}: {error}"]
            os.write(self._said, b"\0")
            self._pause.wait(self._interval)

    def wait(self) -> None:
        """Until there is a new look."""
        os.read(self.ready, 4096)


class _Keys:
    """Single keys of the terminal that standard input is, without a line end after each."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno() if sys.stdin.isatty() else -1
        self._before: list[object] | None = None

    def __enter__(self) -> "_Keys":
        if self._fd >= 0:
            import termios
            import tty

            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            import termios

            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)  # type: ignore[arg-type]

    def wait_for(self, descriptor: int) -> str:
        """A key that was pressed, or an empty string when there is something to read on the descriptor."""
        import select

        watched = [descriptor] + ([self._fd] if self._fd >= 0 else [])
        ready = select.select(watched, [], [])[0]
        if descriptor in ready:
            os.read(descriptor, 4096)
        if self._fd in ready:
            return os.read(self._fd, 1).decode("ascii", "replace") or "\x04"
        return ""
