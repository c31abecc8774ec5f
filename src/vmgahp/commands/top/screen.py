"""The VMs of this machine as a table, once or live."""

import argparse
import os
import sys
import termios
import threading
import time
import tty
from dataclasses import asdict

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vmgahp import config, errors
from vmgahp.commands.arguments import print_json
from vmgahp.commands.top.node import Look, Node, VmRow
from vmgahp.commands.units import duration, size
from vmgahp.text import escape

BETWEEN = 1.0
"""The seconds between the two looks of a single table, for which the rates are computed."""

COLUMNS = (
    "NAME",
    "OWNER",
    "STATE",
    "CPU",
    "VCPUS",
    "MEMORY",
    "READ/s",
    "WRITE/s",
    "RECV/s",
    "SEND/s",
    "AGE",
    "SCRATCH",
)
TEXTS = ("NAME", "OWNER", "STATE", "SCRATCH")
FIRST_TO_GO = ("SCRATCH", "OWNER", "VCPUS", "AGE", "RECV/s", "SEND/s", "READ/s", "WRITE/s", "MEMORY")
"""The columns that a narrow terminal omits, in this order."""
LEAST_NAME = 24
"""The width of a VM's name for which a narrow terminal omits other columns."""
WIDEST = 10_000
"""The width of an output that is not a terminal."""
COLORS = {"Running": "green", "SoftSuspended": "yellow", "Suspended": "blue", "Checkpointed": "magenta"}
UNKNOWN = "-"


def run(options: argparse.Namespace) -> int:
    """Show the VMs; the exit status is 1 if no VMs could be queried."""
    try:
        node = Node(config.load(os.environ), options.execute)
    except errors.Fault as fault:
        sys.stderr.write(f"vmgahp top: {escape(fault.render())}\n")
        return 1
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDEST)
    if options.once or options.json or not console.is_terminal:
        return _once(node, console, as_json=options.json)
    try:
        if console.is_dumb_terminal:
            while True:
                console.print(table(node.look(), console.width), "")
                time.sleep(options.interval)
        _live(node, console, options.interval)
    except KeyboardInterrupt:
        pass
    return 0


def _once(node: Node, console: Console, *, as_json: bool) -> int:
    look = node.look()
    if any(row.source == "libvirt" for row in look.rows):
        time.sleep(BETWEEN)
        look = node.look()
    if as_json:
        print_json({"time": round(look.time, 3), "vms": [asdict(row) for row in look.rows], "notes": look.notes})
    else:
        console.print(table(look, console.width))
    return 1 if look.notes and not look.rows else 0


def _live(node: Node, console: Console, interval: float) -> None:
    """Show the VMs until a key is pressed; a query that hangs leaves the figures unchanged and the keys responsive."""
    looks: list[Look] = []

    def look() -> None:
        while True:
            looks[:] = [node.look()]
            time.sleep(interval)

    def shown() -> Group:
        return screen(looks[0], console.width, console.height) if looks else Group("Looking…")

    threading.Thread(target=look, name="looking", daemon=True).start()
    with Live(get_renderable=shown, console=console, screen=True, refresh_per_second=4):
        _wait_for_q()


def _wait_for_q() -> None:
    if not sys.stdin.isatty():
        threading.Event().wait()  # until Control-C
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        while os.read(terminal, 1) not in (b"q", b"Q", b"\x04", b""):
            pass
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


# The table


def screen(look: Look, width: int, height: int) -> Group:
    """Lay out a screen that does not scroll: a line about all VMs, as many of them as fit, the notes."""
    room = max(1, height - 4 - len(look.notes))
    running = sum(row.state == "Running" for row in look.rows)
    memory = size(sum(row.memory_kib for row in look.rows) * 1024)
    head = Text(time.strftime("%H:%M:%S", time.localtime(look.time)), "bold", no_wrap=True, overflow="ellipsis")
    head.append(f"  VMs: {len(look.rows)}, running: {running}, memory: {memory}  (q ends)  ", "not bold")
    head.append(os.uname().nodename)
    hidden = len(look.rows) - room
    more = [Text(f"and {hidden} more: --once shows all", "dim")] if hidden > 0 else []
    notes = [Text(note, "yellow", no_wrap=True, overflow="ellipsis") for note in look.notes]
    return Group(head, "", table(Look(look.rows[:room], [], look.time), width), *more, *notes)


def table(look: Look, width: int) -> Group:
    """Lay out all VMs, and below them the notes."""
    notes = [Text(note, "yellow") for note in look.notes]
    if not look.rows:
        none = "No VMs of jobs were found." if notes else "There are no VMs of jobs on this machine."
        return Group(none, *notes)
    lines = [cells(row) for row in look.rows]
    widths = {name: max(len(name), *(len(line[name]) for line in lines)) for name in COLUMNS}
    longest, widths["NAME"] = widths["NAME"], min(widths["NAME"], LEAST_NAME)
    for name in FIRST_TO_GO:
        if _room(widths, width) < 0:
            del widths[name]
    widths["NAME"] = max(1, min(longest, widths["NAME"] + _room(widths, width)))
    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for name in widths:
        made.add_column(name, justify="left" if name in TEXTS else "right", no_wrap=True)
    for line in lines:
        line["NAME"] = _shortened(line["NAME"], widths["NAME"])
        made.add_row(*(Text(line[name], COLORS.get(line[name], "") if name == "STATE" else "") for name in widths))
    return Group(made, *notes)


def cells(row: VmRow) -> dict[str, str]:
    """Format a VM by columns."""
    rates = {"READ/s": row.read, "WRITE/s": row.written, "RECV/s": row.received, "SEND/s": row.sent}
    return {
        "NAME": row.name,
        "OWNER": row.owner or UNKNOWN,
        "STATE": row.state or UNKNOWN,
        "CPU": UNKNOWN if row.cpu_percent is None else f"{row.cpu_percent:.1f}%",
        "VCPUS": str(row.vcpus),
        "MEMORY": size(row.memory_kib * 1024) if row.memory_kib else UNKNOWN,
        **{name: UNKNOWN if rate is None else size(rate) for name, rate in rates.items()},
        "AGE": UNKNOWN if row.age is None else duration(row.age),
        "SCRATCH": row.scratch or UNKNOWN,
    }


def _room(widths: dict[str, int], width: int) -> int:
    return width - sum(widths.values()) - 2 * (len(widths) - 1)


def _shortened(name: str, longest: int) -> str:
    """Cut out the middle of a name, because the job's id is at its end."""
    tail = longest // 2
    return name if len(name) <= longest else f"{name[: longest - tail - 1]}~{name[len(name) - tail :]}"
