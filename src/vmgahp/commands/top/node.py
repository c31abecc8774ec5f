"""The VMs of this machine and their present usage.

libvirt is asked for its domains. VMs that it does not know, of other drivers or suspended ones, are found in the
``vm_metrics.jsonl`` of their scratch directories, as far as the caller may read those.
"""

import os
import pwd
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vmgahp import errors, lifecycle
from vmgahp.commands.files import NotRegular, open_regular
from vmgahp.commands.metrics_lines import Event, Sample, read_line
from vmgahp.config import Settings
from vmgahp.drivers.libvirt import binding as libvirt
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
