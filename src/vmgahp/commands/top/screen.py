"""The VMs of this machine and their present usage, as a table, once or live.

libvirt is asked for its domains. VMs that it does not know, of other drivers or suspended ones, are found in the
``vm_metrics.jsonl`` of their scratch directories, as far as the caller may read those.
"""

import argparse
import json
import os
import pwd
import re
import select
import sys
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import libvirt
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vmgahp import config, errors, lifecycle
from vmgahp.commands.arguments import print_json
from vmgahp.commands.files import NotRegular, open_regular, query_machines, write_anew
from vmgahp.commands.metrics_lines import Event, Sample, of_line, rates, read_line
from vmgahp.commands.page import UNLIMITED, duration, print_table, size
from vmgahp.commands.top import JOB, MACHINE, VM
from vmgahp.config import Settings
from vmgahp.drivers.libvirt.life.usage import Meter
from vmgahp.drivers.libvirt.link import faults
from vmgahp.drivers.libvirt.link.connection import LibvirtConnection
from vmgahp.host.starter import scratch_in
from vmgahp.host.system_calls import Opened
from vmgahp.metrics.file import MOST_LINES, NAME
from vmgahp.text import escape

LARGEST_READ = 16 << 20
"""The maximum number of bytes of a file that are read each time, from its end."""
MOST_SCRATCH = 500
DEADLINE, ANSWER = 5.0, 5.0
"""The deadlines in seconds for the connection to libvirt, and for its answer."""


VmRow = dict[str, Any]
"""A VM as it is displayed and printed as JSON, by the keys of `VM`; a figure is None if unknown."""


@dataclass
class Look:
    """The VMs at one moment."""

    rows: list[VmRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """The sentences about sources that could not be read."""
    time: float = field(default_factory=time.time)


@dataclass
class _Vm:
    """A VM that is looked at repeatedly: a domain of libvirt's, or a ``vm_metrics.jsonl`` that grows."""

    source: str
    scratch: str
    name: str = ""
    state: str = ""
    start: Event | None = None
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=2))
    """The last two samples since the last event."""
    size: Sample | None = None
    """The last sample, which tells the size of a VM that is suspended."""
    offset: int = 0
    """The bytes of the file that were read."""

    def add(self, line: Sample | Event | None) -> None:
        if line is None:
            return
        self.state = line.state or self.state
        if isinstance(line, Sample):
            self.size = line
            self.samples.append(line)
        else:
            if line.name == "start":
                self.start, self.name = line, line.vm_name
            self.samples.clear()

    def read_file(self) -> None:
        """Read the new lines of the file. Raises OSError."""
        with Opened(os.open(self.scratch, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)) as above:
            file = open_regular(NAME, follow=False, directory=above)
        with file:
            size = os.fstat(file.fileno()).st_size
            start = max(self.offset, size - LARGEST_READ) if self.offset <= size else 0
            data = os.pread(file.fileno(), LARGEST_READ, start)
        whole, _, rest = data.rpartition(b"\n")
        self.offset = start + len(data) - len(rest)
        for text in whole.rsplit(b"\n", MOST_LINES)[-MOST_LINES:]:
            self.add(read_line(text))

    def row(self, now: float) -> VmRow | None:
        """Return the row to display; None for a VM that has ended."""
        if self.state in ("", lifecycle.STOPPED):
            return None
        name = escape(self.name or os.path.basename(self.scratch))
        row: VmRow = dict.fromkeys(VM) | {"name": name, "source": self.source, "scratch": escape(self.scratch)}
        row |= {"owner": _owner(self.scratch), "state": self.state, "vcpus": 1}
        row |= {"age": max(0.0, now - self.start.time) if self.start else None}
        row |= dict.fromkeys(("memory_kib", "max_memory_kib", "rss_kib"), 0)
        if self.size is not None:
            row |= {"vcpus": int(self.size.vcpus), "max_memory_kib": int(self.size.max_memory_kib)}
            if self.state in (lifecycle.RUNNING, lifecycle.SOFT_SUSPENDED):
                row |= {"memory_kib": int(self.size.memory_kib), "rss_kib": int(self.size.rss_kib)}
        if len(self.samples) == 2 and self.samples[1].time > self.samples[0].time:
            found = rates(*self.samples)
            row |= {"cpu_percent": found.pop("cpu"), **found}
        return row


class Node:
    """This machine, queried repeatedly; rates are those between two looks."""

    def __init__(self, settings: Settings, execute: str = "") -> None:
        self._execute = execute or settings.string("EXECUTE")
        # A read-only connection, which every user may open, is enough.
        uri = settings.string("VM_LIBVIRT_URI") or "qemu:///system"
        self._connection = LibvirtConnection(uri, lambda _text: None, read_only=True)
        self._connection.deadline = DEADLINE
        self._domains: dict[str, tuple[_Vm, Meter]] = {}
        self._files: dict[str, _Vm] = {}

    def look(self) -> Look:
        """Return all VMs, those with the most CPU usage first."""
        look = Look()
        domains: list[_Vm] = []
        try:
            domains = self._connection.call(self._ask, seconds=DEADLINE + ANSWER)
        except libvirt.libvirtError as error:
            look.notes.append(faults.from_libvirt(error, "asking for the VMs of this machine").sentence)
        except errors.Fault as fault:
            look.notes.append(fault.sentence)
        self._read_files(look, [vm.scratch for vm in domains])
        files = self._files.copy()
        for vm in domains:
            file = files.pop(os.path.normpath(vm.scratch), None)
            vm.start = file.start if file else None
        look.rows = [row for vm in (*domains, *files.values()) if (row := vm.row(look.time))]
        look.rows.sort(key=lambda row: (-(row["cpu_percent"] or 0.0), row["name"]))
        look.notes = [escape(note) for note in look.notes]
        return look

    def _ask(self, connection: libvirt.virConnect) -> list[_Vm]:
        """Read the domains of jobs: they have a job's name, and the scratch directory as description."""
        flags = libvirt.VIR_CONNECT_LIST_DOMAINS_TRANSIENT | libvirt.VIR_CONNECT_LIST_DOMAINS_ACTIVE
        known: dict[str, tuple[_Vm, Meter]] = {}
        found = []
        for domain in connection.listAllDomains(flags):
            name, uuid = domain.name(), domain.UUIDString()
            if not is_vm_name(name):
                continue
            if uuid not in self._domains:
                scratch = ""
                with suppress(libvirt.libvirtError):  # it has none
                    scratch = domain.metadata(libvirt.VIR_DOMAIN_METADATA_DESCRIPTION, None)
                self._domains[uuid] = _Vm("libvirt", scratch, name), Meter(self._connection, name, uuid)
            vm, meter = known[uuid] = self._domains[uuid]
            metrics = meter.read() if vm.scratch.startswith("/") else None
            if metrics is not None:
                vm.add(of_line(metrics._asdict()))
                found.append(vm)
        self._domains = known
        return found

    def _read_files(self, look: Look, more: Iterable[str]) -> None:
        """Read the files of the scratch directories in EXECUTE and of `more`."""
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
            file = known.get(directory) or _Vm("metrics", directory)
            try:
                file.read_file()
            except (FileNotFoundError, NotADirectoryError, NotRegular):
                continue
            except OSError:
                closed += 1
                continue
            self._files[directory] = file
        if closed:
            missing = "VMs that libvirt does not know are missing"
            look.notes.append(f"{closed} scratch directories cannot be read by this user: {missing}.")


def is_vm_name(name: str) -> bool:
    """Return True for a name that jobs' VMs have: ``<User with @ as _>_<ClusterId>.<ProcId>``."""
    cluster, _, proc = name.rpartition("_")[2].partition(".")
    return "_" in name and all(word.isascii() and word.isdigit() for word in (cluster, proc))


def _owner(scratch: str) -> str:
    """Return the owner of a scratch directory; empty if it cannot be seen."""
    uid: int | str = ""
    with suppress(OSError, ValueError, KeyError):
        uid = os.stat(scratch, follow_symlinks=False).st_uid
        return pwd.getpwuid(uid).pw_name
    return str(uid)


# The table

BETWEEN = 1.0
"""The seconds between the two looks of a single table, for which the rates are computed."""
GAUGES = {
    **{key: (key, 1) for key in ("vcpus", "cpu_percent")},
    **{f"{key}_kib": (f"{key}_bytes", 1024) for key in ("memory", "max_memory", "rss")},
    **{key: (f"{key}_bytes_per_second", 1) for key in ("read", "written", "received", "sent")},
    "age": ("age_seconds", 1),
}
"""The keys of `VM` that Prometheus gets, each with the name of its gauge and the factor to its unit."""
COLORS = {"Running": "green", "SoftSuspended": "yellow", "Suspended": "blue", "Checkpointed": "magenta"}
UNKNOWN = "-"


def _known(show: Callable[[float], str], key: str) -> Callable[[VmRow], str]:
    return lambda row: UNKNOWN if row[key] is None else show(row[key])


COLUMNS: dict[str, tuple[int, Literal["left", "right"], Callable[[VmRow], str]]] = {
    "NAME": (0, "left", lambda row: row["name"]),
    "OWNER": (160, "left", lambda row: row["owner"] or UNKNOWN),
    "STATE": (0, "left", lambda row: row["state"]),
    "CPU": (0, "right", _known("{:.1f}%".format, "cpu_percent")),
    "VCPUS": (130, "right", lambda row: str(row["vcpus"])),
    "MEMORY": (80, "right", lambda row: size(row["memory_kib"] * 1024) if row["memory_kib"] else UNKNOWN),
    "READ/s": (80, "right", _known(size, "read")),
    "WRITE/s": (80, "right", _known(size, "written")),
    "RECV/s": (130, "right", _known(size, "received")),
    "SEND/s": (130, "right", _known(size, "sent")),
    "AGE": (130, "right", _known(duration, "age")),
    "SCRATCH": (200, "left", lambda row: row["scratch"]),
}
"""The columns, each with the width of the terminal from which there is room for it, its side, and its text."""


def run(options: argparse.Namespace) -> int:
    """Show the VMs; the exit status is 1 if no VMs could be queried. Raises `NotDone`."""
    if options.pool is not None:
        return _pool(options)
    node = Node(config.load(os.environ), options.execute)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else UNLIMITED)
    if options.once or options.json or options.prometheus or not console.is_terminal or console.is_dumb_terminal:
        return _once(node, console, options)
    with suppress(KeyboardInterrupt):
        _live(node, console, options.interval)
    return 0


def _once(node: Node, console: Console, options: argparse.Namespace) -> int:
    look = node.look()
    if any(row["source"] == "libvirt" for row in look.rows):
        time.sleep(BETWEEN)
        look = node.look()
    if options.json:
        print_json({"time": round(look.time, 3), "vms": look.rows, "notes": look.notes})
    elif options.prometheus == "-":
        sys.stdout.write(prometheus(look))
    elif options.prometheus:
        write_anew(options.prometheus, prometheus(look).encode(), 0o644)
    else:
        console.print(table(look, console.width))
    return 1 if look.notes and not look.rows else 0


def _pool(options: argparse.Namespace) -> int:
    """Show the VM jobs of a pool and its machines with VMs. Raises `NotDone`."""

    def ask(constraint: str, keys: Mapping[str, tuple[str, str]]) -> list[dict[str, Any]]:
        found = query_machines(constraint, [name for name, _ in keys.values()], options.pool)
        return [{key: ad.get(name) for key, (name, _) in keys.items()} for ad in found]

    now = time.time()
    jobs = ask("JobUniverse =?= 13", JOB)
    machines = ask('HasVM =?= true && SlotType =!= "Dynamic"', MACHINE)
    for job in jobs:
        job["age"] = max(0, round(now) - job["age"]) if isinstance(job["age"], int) else None
    jobs.sort(key=lambda job: [int(word) for word in re.findall("[0-9]+", str(job["job"]))])
    machines.sort(key=lambda machine: str(machine["machine"]))
    if options.json:
        print_json({"time": round(now, 3), "jobs": jobs, "machines": machines})
        return 0
    sys.stdout.write(f"VM jobs: {len(jobs)}, machines that offer VMs: {len(machines)}\n")
    for rows in (jobs, machines):
        if rows:
            sys.stdout.write("\n")
            print_table([key.upper().removesuffix("_MIB") for key in rows[0]], (_cells(row) for row in rows))
    return 0


def _cells(row: Mapping[str, Any]) -> list[str]:
    cells = {key: UNKNOWN if value in (None, "") else str(value) for key, value in row.items()}
    for key, show in (("age", duration), ("memory_mib", lambda mib: size(mib * (1 << 20)))):
        if isinstance(row.get(key), int):
            cells[key] = show(row[key])
    return list(cells.values())


def prometheus(look: Look) -> str:
    """Write the figures in Prometheus's text format; a figure that is unknown is left out."""
    # A job can name another's VM in its file, and two figures of one name spoil the whole text.
    rows = {(row["name"], row["owner"]): row for row in look.rows}.values()
    lines = ["# TYPE vmgahp_vms gauge", f"vmgahp_vms {len(look.rows)}"]
    lines += ["# TYPE vmgahp_unreadable_sources gauge", f"vmgahp_unreadable_sources {len(look.notes)}"]
    for key, (name, unit) in GAUGES.items():
        lines.append(f"# TYPE vmgahp_vm_{name} gauge")
        for row in (row for row in rows if row[key] is not None):
            # JSON quotes a printable text as Prometheus does.
            labels = (f"{label}={json.dumps(row[label], ensure_ascii=False)}" for label in ("name", "owner"))
            lines.append(f"vmgahp_vm_{name}{{{','.join(labels)}}} {row[key] * unit}")
    return "\n".join(lines) + "\n"


def _live(node: Node, console: Console, interval: float) -> None:
    """Show the VMs until a key is pressed; a query that hangs leaves the figures unchanged and the keys responsive."""
    looks: list[Look] = []

    def look() -> None:
        while True:
            looks[:] = [node.look()]
            time.sleep(interval)

    def shown() -> Group:
        return screen(looks[0], console.width) if looks else Group("Looking…")

    threading.Thread(target=look, name="looking", daemon=True).start()
    with Live(get_renderable=shown, console=console, screen=True, refresh_per_second=4):
        if not sys.stdin.isatty():
            threading.Event().wait()  # until Control-C
        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
        tty.setcbreak(terminal)
        try:
            key = b" "
            while key not in b"qQ\x04":
                # A Control-C just before a call does not end the call: look again.
                key = os.read(terminal, 1) if select.select([terminal], [], [], 1.0)[0] else b" "
        finally:
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def screen(look: Look, width: int) -> Group:
    """Lay out a screen: a line about all VMs, and the table, of which rich shows as much as fits."""
    running = sum(row["state"] == "Running" for row in look.rows)
    memory = size(sum(row["memory_kib"] for row in look.rows) * 1024)
    head = Text(time.strftime("%H:%M:%S", time.localtime(look.time)), "bold", no_wrap=True, overflow="ellipsis")
    head.append(f"  VMs: {len(look.rows)}, running: {running}, memory: {memory}  (q ends)  ", "not bold")
    head.append(os.uname().nodename)
    return Group(head, "", table(look, width))


def table(look: Look, width: int) -> Group:
    """Lay out the notes, and below them all VMs."""
    notes = [Text(note, "yellow") for note in look.notes]
    if not look.rows:
        none = "No VMs of jobs were found." if notes else "There are no VMs of jobs on this machine."
        return Group(*notes, none)
    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    fitting = {name: text for name, (least, _, text) in COLUMNS.items() if width >= least}
    for name in fitting:
        made.add_column(name, justify=COLUMNS[name][1], no_wrap=name != "NAME", overflow="fold")
    for row in look.rows:  # as `Text`, since a job's words are no markup
        style = COLORS.get(row["state"], "")
        made.add_row(*(Text(text(row), style if name == "STATE" else "") for name, text in fitting.items()))
    return Group(*notes, made)
