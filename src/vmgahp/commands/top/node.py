"""The VMs of this machine, and what they use now.

Those of libvirt are asked for there; what libvirt does not know, VMs of other drivers and suspended ones, is in
the ``vm_metrics.jsonl`` of their scratch directories, as far as the caller may read those. The files are the
jobs': what they say is made printable and kept within bounds (`vmgahp.commands.report.reader`).
"""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from vmgahp import errors, lifecycle
from vmgahp.commands.files import NotRegular, open_regular
from vmgahp.config import Settings
from vmgahp.drivers.libvirt.connection import LibvirtConnection
from vmgahp.drivers.libvirt.stats import Meter
from vmgahp.host import packages
from vmgahp.host.starter import scratch_in
from vmgahp.metrics import Metrics, is_counter
from vmgahp.metrics.file import MOST_LINES, NAME, parse
from vmgahp.text import escape

FIRST_READ, NEXT_READ = 16 << 20, 1 << 20
"""Bytes of a file that are looked at, from its end, when it is first seen, and each time after."""
MOST_SCRATCH = 500
DEADLINE = 5.0
"""Seconds to reach libvirtd in."""
LONGEST = 200


class Reading(NamedTuple):
    """What a VM had used at one moment, summed up over its disks and its NICs, in bytes."""

    time: float
    cpu_seconds: float
    read: float
    written: float
    received: float
    sent: float


@dataclass
class VmRow:
    """A VM as it is shown; a figure that nobody knows is None."""

    name: str
    source: str
    """Who told: libvirt, or metrics for a file in the scratch directory."""
    scratch: str
    owner: str = ""
    state: str = ""
    vcpus: int = 1
    memory_kib: int = 0
    max_memory_kib: int = 0
    rss_kib: int = 0
    cpu_percent: float | None = None
    """Of all the VM's vCPUs."""
    read: float | None = None
    """Bytes a second, like the next three."""
    written: float | None = None
    received: float | None = None
    sent: float | None = None
    age: float | None = None
    """Seconds since its start here."""

    def rate(self, then: Reading | None, now: Reading | None) -> None:
        """Fill in what it uses, from two moments of one run."""
        if then is None or now is None or now.time <= then.time:
            return
        seconds = now.time - then.time
        cpu, *rates = (max(0.0, after - before) / seconds for before, after in zip(then[1:], now[1:], strict=True))
        self.cpu_percent = 100 * cpu / max(self.vcpus, 1)
        self.read, self.written, self.received, self.sent = rates


@dataclass
class Look:
    """What was seen at one moment."""

    rows: list[VmRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What could not be looked at, in sentences."""
    time: float = field(default_factory=time.time)


class Node:
    """Looks again and again; rates are those between two looks."""

    def __init__(self, settings: Settings, execute: str = "") -> None:
        self._execute = execute or settings.string("EXECUTE")
        self._uri = settings.string("VM_LIBVIRT_URI")
        self._connection: LibvirtConnection | None = None
        self._meters: dict[str, tuple[Meter, str, Reading | None]] = {}
        self._files: dict[str, _File] = {}

    def look(self) -> Look:
        """All VMs, those that use most of the CPU first."""
        look = Look()
        try:
            found = self._ask_libvirt()
        except errors.Fault as fault:
            look.notes.append(fault.sentence)
            found = []
        by_scratch = self._read_files(look, [row.scratch for row in found])
        for row in found:
            file = by_scratch.pop(os.path.normpath(row.scratch), None)
            if file is not None and file.started:
                row.age = max(0.0, look.time - file.started)
        found += [row for row in (file.row(look.time) for file in by_scratch.values()) if row is not None]
        for row in found:
            row.owner = _owner(row.scratch)
        look.notes = [escape(note) for note in look.notes]
        look.rows = sorted(found, key=lambda row: (-(row.cpu_percent or 0.0), row.name))
        return look

    # libvirt

    def _ask_libvirt(self) -> list[VmRow]:
        try:
            from vmgahp.drivers.libvirt import binding as libvirt
            from vmgahp.drivers.libvirt import faults
            from vmgahp.drivers.libvirt.connection import LibvirtConnection
        except ImportError as error:
            raise errors.MachineFault(
                f"It cannot be asked: {error}.", f"{packages.of_python('libvirt-python')}."
            ) from error
        if self._connection is None:
            # Every user may look, so it is not asked for more.
            uri = self._uri or "qemu:///system"
            self._connection = LibvirtConnection(uri, lambda _text: None, read_only=True)
            self._connection.deadline = DEADLINE
        try:
            return self._connection.call(self._domains)
        except libvirt.libvirtError as error:
            raise faults.from_libvirt(error, "asking for the VMs of this machine") from error

    def _domains(self, connection: object) -> list[VmRow]:
        from vmgahp.drivers.libvirt import binding as libvirt

        flags = libvirt.VIR_CONNECT_LIST_DOMAINS_TRANSIENT | libvirt.VIR_CONNECT_LIST_DOMAINS_ACTIVE
        rows = []
        seen = set()
        for domain in connection.listAllDomains(flags):  # type: ignore[attr-defined]
            uuid = domain.UUIDString()
            seen.add(uuid)
            row = self._domain(domain.name(), uuid, domain)
            if row is not None:
                rows.append(row)
        for uuid in self._meters.keys() - seen:
            del self._meters[uuid]
        return rows

    def _domain(self, name: str, uuid: str, domain: object) -> VmRow | None:
        """A domain that is a job's: it says whose by the scratch directory in its description."""
        from vmgahp.drivers.libvirt import binding as libvirt
        from vmgahp.drivers.libvirt.stats import Meter

        assert self._connection is not None
        if uuid not in self._meters:
            try:
                scratch = domain.metadata(libvirt.VIR_DOMAIN_METADATA_DESCRIPTION, None)  # type: ignore[attr-defined]
            except libvirt.libvirtError:
                scratch = ""  # it has none
            self._meters[uuid] = Meter(self._connection, name, uuid), scratch, None
        meter, scratch, before = self._meters[uuid]
        if not (scratch.startswith("/") and is_vm_name(name)):
            return None
        metrics = meter.read()
        if metrics is None:
            return None
        now = _usage(metrics)
        row = VmRow(escape(name), "libvirt", escape(scratch))
        row.state, row.vcpus = metrics.state, metrics.vcpus
        row.memory_kib, row.max_memory_kib, row.rss_kib = (metrics.memory_kib, metrics.max_memory_kib, metrics.rss_kib)
        row.rate(before, now)
        self._meters[uuid] = meter, scratch, now
        return row

    # Scratch directories

    def _read_files(self, look: Look, more: Iterable[str]) -> "dict[str, _File]":
        """The files of the scratch directories in EXECUTE, and of `more` directories, by the directories."""
        closed = 0
        names: list[str] = []
        try:
            names = sorted(os.listdir(self._execute)) if self._execute else []
        except OSError as error:
            look.notes.append(f"The scratch directories in {self._execute} cannot be seen: {error.strerror}.")
        made = (scratch_in(os.path.join(self._execute, name)) for name in names)
        directories = dict.fromkeys(map(os.path.normpath, made))
        for directory in more:
            directories.setdefault(os.path.normpath(directory))
        known, self._files = self._files, {}
        for directory in list(directories)[:MOST_SCRATCH]:
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


class _File:
    """A ``vm_metrics.jsonl`` that grows."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.started = 0.0
        self._name = ""
        self._state = ""
        self._sample: dict[str, object] = {}
        self._before: Reading | None = None
        self._now: Reading | None = None
        self._offset = -1

    def read(self) -> None:
        """Take in what is new. Raises OSError."""
        above = os.open(self.directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            file = open_regular(NAME, follow=False, directory=above)
        finally:
            os.close(above)
        with file:
            size = os.fstat(file.fileno()).st_size
            most = FIRST_READ if self._offset < 0 else NEXT_READ
            start = max(self._offset, size - most, 0) if self._offset <= size else 0
            data = os.pread(file.fileno(), most, start)
        whole, _, rest = data.rpartition(b"\n")
        self._offset = start + len(data) - len(rest)
        for text in whole.rsplit(b"\n", MOST_LINES)[-MOST_LINES:]:
            line = parse(text) if text else None
            if line is not None:
                self._take(line)

    def _take(self, line: dict[str, object]) -> None:
        when = line.get("time")
        if not is_counter(when):
            return
        if isinstance(line.get("state"), str):
            self._state = escape(str(line["state"])[:LONGEST])
        if "event" in line:
            if line["event"] == "start":
                self.started = float(when)  # type: ignore[arg-type]
                name = line.get("name")
                self._name = escape(name[:LONGEST]) if isinstance(name, str) else ""
            self._before = self._now = None
        elif is_counter(line.get("cpu_seconds")):
            self._sample = line
            disks = _sum(line.get("block"), "read_bytes", "write_bytes")
            nics = _sum(line.get("network"), "rx_bytes", "tx_bytes")
            self._before = self._now
            self._now = Reading(float(when), float(line["cpu_seconds"]), *disks, *nics)  # type: ignore[arg-type]

    def row(self, now: float) -> VmRow | None:
        """Its VM, unless it is over."""
        if self._state in ("", lifecycle.STOPPED):
            return None
        row = VmRow(self._name or os.path.basename(self.directory), "metrics", escape(self.directory))
        row.state = self._state
        row.vcpus = int(_number(self._sample, "vcpus")) or 1
        if self._state in (lifecycle.RUNNING, lifecycle.SOFT_SUSPENDED):
            row.memory_kib = int(_number(self._sample, "memory_kib"))
            row.rss_kib = int(_number(self._sample, "rss_kib"))
            row.rate(self._before, self._now)
        row.max_memory_kib = int(_number(self._sample, "max_memory_kib"))
        row.age = max(0.0, now - self.started) if self.started else None
        return row


def is_vm_name(name: str) -> bool:
    """Whether a name is one that jobs' VMs have: ``<User with @ as _>_<ClusterId>.<ProcId>``."""
    cluster, _, proc = name.rpartition("_")[2].partition(".")
    return "_" in name and all(word.isascii() and word.isdigit() for word in (cluster, proc))


def _usage(metrics: Metrics) -> Reading:
    disks, nics = (_sum(metrics.block, "read_bytes", "write_bytes"), _sum(metrics.network, "rx_bytes", "tx_bytes"))
    return Reading(metrics.time, metrics.cpu_seconds, *disks, *nics)


def _sum(devices: object, one: str, other: str) -> tuple[float, float]:
    found: Iterable[object] = devices.values() if isinstance(devices, dict) else ()
    pairs = [(_number(each, one), _number(each, other)) for each in found]
    return sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)


def _number(figures: object, name: str) -> float:
    value = figures.get(name) if isinstance(figures, dict) else None
    return float(value) if is_counter(value) else 0.0  # type: ignore[arg-type]


def _owner(scratch: str) -> str:
    """Whose a scratch directory is; empty where it cannot be seen."""
    import pwd

    try:
        uid = os.stat(scratch, follow_symlinks=False).st_uid
    except (OSError, ValueError):
        return ""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
