"""The VMs of this machine and their present usage, as a table, once or live.

libvirt is asked for its domains. VMs that it does not know, of other drivers or suspended ones, are found in the
``vm_metrics.jsonl`` of their scratch directories, as far as the caller may read those.
"""

import argparse
import os
import pwd
import sys
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import libvirt
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vmgahp import config, errors, lifecycle
from vmgahp.commands.arguments import print_json
from vmgahp.commands.files import NotRegular, open_regular
from vmgahp.commands.metrics_lines import Event, Sample, read_line
from vmgahp.commands.units import duration, size
from vmgahp.config import Settings
from vmgahp.drivers.libvirt import faults
from vmgahp.drivers.libvirt.connection import LibvirtConnection
from vmgahp.drivers.libvirt.stats import Meter
from vmgahp.host.starter import scratch_in
from vmgahp.metrics import Metrics
from vmgahp.metrics.file import MOST_LINES, NAME
from vmgahp.text import escape

LARGEST_READ = 16 << 20
"""The maximum number of bytes of a file that are read each time, from its end."""
MOST_SCRATCH = 500
DEADLINE, ANSWER = 5.0, 5.0
"""The deadlines in seconds for the connection to libvirt, and for its answer."""


class Reading(NamedTuple):
    """The usage of a VM up to one moment, in seconds and bytes of all its devices."""

    time: float
    cpu_seconds: float
    read: float
    written: float
    received: float
    sent: float


@dataclass
class VmRow:
    """A VM as it is displayed; a figure is None if unknown."""

    name: str
    source: str
    """The origin of the row: ``libvirt``, or ``metrics`` for a file in the scratch directory."""
    scratch: str
    owner: str = ""
    state: str = ""
    vcpus: int = 1
    memory_kib: int = 0
    max_memory_kib: int = 0
    rss_kib: int = 0
    cpu_percent: float | None = None
    """The CPU usage in per cent of all the VM's vCPUs."""
    read: float | None = None
    """The bytes read a second; the next three are rates too."""
    written: float | None = None
    received: float | None = None
    sent: float | None = None
    age: float | None = None
    """The seconds since its start on this machine."""

    def rate(self, then: Reading | None, now: Reading) -> None:
        """Compute the rates from two readings of one run."""
        if then is not None and now.time > then.time:
            seconds = now.time - then.time
            cpu, *rates = (max(0.0, after - before) / seconds for before, after in zip(then[1:], now[1:], strict=True))
            self.cpu_percent = 100 * cpu / max(self.vcpus, 1)
            self.read, self.written, self.received, self.sent = rates


@dataclass
class Look:
    """The VMs at one moment."""

    rows: list[VmRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """The sentences about sources that could not be read."""
    time: float = field(default_factory=time.time)


class Node:
    """This machine, queried repeatedly; rates are those between two looks."""

    def __init__(self, settings: Settings, execute: str = "") -> None:
        self._execute = execute or settings.string("EXECUTE")
        # A read-only connection, which every user may open, is enough.
        uri = settings.string("VM_LIBVIRT_URI") or "qemu:///system"
        self._connection = LibvirtConnection(uri, lambda _text: None, read_only=True)
        self._connection.deadline = DEADLINE
        self._domains: dict[str, _Domain] = {}
        self._files: dict[str, _File] = {}

    def look(self) -> Look:
        """Return all VMs, those with the most CPU usage first."""
        look = Look()
        try:
            look.rows = self._connection.call(self._ask, seconds=DEADLINE + ANSWER)
        except libvirt.libvirtError as error:
            look.notes.append(faults.from_libvirt(error, "asking for the VMs of this machine").sentence)
        except errors.Fault as fault:
            look.notes.append(fault.sentence)
        files = self._read_files(look, [row.scratch for row in look.rows])
        for row in look.rows:
            file = files.pop(os.path.normpath(row.scratch), None)
            if file is not None and file.start is not None:
                row.age = max(0.0, look.time - file.start.time)
        look.rows += filter(None, (file.row(look.time) for file in files.values()))
        for row in look.rows:
            row.owner = _owner(row.scratch)
        look.rows.sort(key=lambda row: (-(row.cpu_percent or 0.0), row.name))
        look.notes = [escape(note) for note in look.notes]
        return look

    def _ask(self, connection: libvirt.virConnect) -> list[VmRow]:
        """Read the domains of jobs: they have a job's name, and the scratch directory as description."""
        flags = libvirt.VIR_CONNECT_LIST_DOMAINS_TRANSIENT | libvirt.VIR_CONNECT_LIST_DOMAINS_ACTIVE
        known: dict[str, _Domain] = {}
        rows = []
        for domain in connection.listAllDomains(flags):
            name, uuid = domain.name(), domain.UUIDString()
            if not is_vm_name(name):
                continue
            if uuid not in self._domains:
                try:
                    scratch = domain.metadata(libvirt.VIR_DOMAIN_METADATA_DESCRIPTION, None)
                except libvirt.libvirtError:
                    scratch = ""  # it has none
                self._domains[uuid] = _Domain(Meter(self._connection, name, uuid), scratch)
            known[uuid] = one = self._domains[uuid]
            metrics = one.meter.read() if one.scratch.startswith("/") else None
            if metrics is None:
                continue
            row = VmRow(escape(name), "libvirt", escape(one.scratch), state=metrics.state, vcpus=metrics.vcpus)
            row.memory_kib, row.max_memory_kib = metrics.memory_kib, metrics.max_memory_kib
            row.rss_kib = metrics.rss_kib
            before, one.reading = one.reading, _reading(metrics)
            row.rate(before, one.reading)
            rows.append(row)
        self._domains = known
        return rows

    def _read_files(self, look: Look, more: Iterable[str]) -> "dict[str, _File]":
        """Read the files of the scratch directories in EXECUTE and of `more`; return them by directory."""
        names: list[str] = []
        try:
            names = sorted(os.listdir(self._execute)) if self._execute else []
        except OSError as error:
            look.notes.append(f"The scratch directories in {self._execute} cannot be seen: {error.strerror}.")
        inside = (scratch_in(os.path.join(self._execute, name)) for name in names)
        directories = list(dict.fromkeys(os.path.normpath(path) for path in (*inside, *more)))[:MOST_SCRATCH]
        known, self._files = self._files, {}
        closed = 0
        for directory in directories:
            file = known.get(directory) or _File(directory)
            try:
                file.read()
            except (FileNotFoundError, NotADirectoryError, NotRegular):
                continue
            except OSError:
                closed += 1
                continue
            self._files[directory] = file
        if closed:
            look.notes.append(
                f"{closed} scratch directories cannot be read by this user: VMs that libvirt does not know are missing."
            )
        return dict(self._files)


@dataclass
class _Domain:
    """A domain of libvirt's that was seen before, and its last reading."""

    meter: Meter
    scratch: str
    reading: Reading | None = None


class _File:
    """A ``vm_metrics.jsonl`` that grows."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.start: Event | None = None
        self._state = ""
        self._samples: deque[Sample] = deque(maxlen=2)
        """The last two samples since the last event."""
        self._sample: Sample | None = None
        self._offset = 0

    def read(self) -> None:
        """Read the new lines. Raises OSError."""
        above = os.open(self.directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            file = open_regular(NAME, follow=False, directory=above)
        finally:
            os.close(above)
        with file:
            size = os.fstat(file.fileno()).st_size
            start = max(self._offset, size - LARGEST_READ) if self._offset <= size else 0
            data = os.pread(file.fileno(), LARGEST_READ, start)
        whole, _, rest = data.rpartition(b"\n")
        self._offset = start + len(data) - len(rest)
        for text in whole.rsplit(b"\n", MOST_LINES)[-MOST_LINES:]:
            line = read_line(text)
            if line is None:
                continue
            self._state = line.state or self._state
            if isinstance(line, Sample):
                self._sample = line
                self._samples.append(line)
            else:
                self.start = line if line.name == "start" else self.start
                self._samples.clear()

    def row(self, now: float) -> VmRow | None:
        """Return the row of its VM; None if that has ended."""
        if self._state in ("", lifecycle.STOPPED):
            return None
        name = self.start.vm_name if self.start is not None else ""
        row = VmRow(name or os.path.basename(self.directory), "metrics", escape(self.directory), state=self._state)
        if self._sample is not None:
            row.vcpus, row.max_memory_kib = int(self._sample.vcpus), int(self._sample.max_memory_kib)
            if self._state in (lifecycle.RUNNING, lifecycle.SOFT_SUSPENDED):
                row.memory_kib, row.rss_kib = int(self._sample.memory_kib), int(self._sample.rss_kib)
        if len(self._samples) == 2:
            row.rate(*(Reading(each.time, each.cpu_seconds, *each.traffic) for each in self._samples))
        row.age = max(0.0, now - self.start.time) if self.start is not None else None
        return row


def is_vm_name(name: str) -> bool:
    """Return True for a name that jobs' VMs have: ``<User with @ as _>_<ClusterId>.<ProcId>``."""
    cluster, _, proc = name.rpartition("_")[2].partition(".")
    return "_" in name and all(word.isascii() and word.isdigit() for word in (cluster, proc))


def _reading(metrics: Metrics) -> Reading:
    def of(devices: Mapping[str, Mapping[str, int]], what: str) -> float:
        return sum(figures.get(what, 0) for figures in devices.values())

    disks, nics = metrics.block, metrics.network
    traffic = of(disks, "read_bytes"), of(disks, "write_bytes"), of(nics, "rx_bytes"), of(nics, "tx_bytes")
    return Reading(metrics.time, metrics.cpu_seconds, *traffic)


def _owner(scratch: str) -> str:
    """Return the owner of a scratch directory; empty if it cannot be seen."""
    try:
        uid = os.stat(scratch, follow_symlinks=False).st_uid
    except (OSError, ValueError):
        return ""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


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
