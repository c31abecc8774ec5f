"""What a VM has used so far: a driver's reading, and how readings become figures that never go down.

A hypervisor counts from zero again when a guest is restored, and so does another machine that a checkpoint
went to. `Totals` adds up what came before, so that the last line of ``vm_metrics.jsonl`` says what the job
has used in all.
"""

from _collections_abc import Iterator, Mapping

from vmgahp.host.light import NamedTuple
from vmgahp.lifecycle import State

Number = int | float
Key = tuple[str, ...]

GAUGES = frozenset(("allocation", "capacity"))
"""Figures of a disk that say how large it is now; all the others of disks and NICs are counters."""

LARGEST = 2**63 - 1
"""A larger counter in a line that was read back is nobody's."""


class Metrics(NamedTuple):
    """A driver's reading of one VM, its counters as the hypervisor has them."""

    state: State
    """One of `vmgahp.lifecycle`: RUNNING or SOFT_SUSPENDED; others use nothing."""
    time: float
    """When the figures were true, in seconds since 1970."""
    cpu_seconds: float = 0.0
    vcpus: int = 1
    vcpu_seconds: Mapping[str, float] = {}
    """Of each vCPU, by its number; empty where the hypervisor does not tell them apart."""
    memory_kib: int = 0
    """What the guest has now, which a balloon may make less than `max_memory_kib`."""
    max_memory_kib: int = 0
    rss_kib: int = 0
    """What the guest's process occupies of this machine's memory, 0 where nobody knows."""
    block: Mapping[str, Mapping[str, int]] = {}
    """Of each disk by its device: read_bytes, read_requests, write_bytes, write_requests, errors,
    allocation and capacity, as far as they are known."""
    network: Mapping[str, Mapping[str, int]] = {}
    """Of each NIC by its MAC address: rx_ and tx_ bytes, packets, errors and drops."""
    run: str = ""
    """Changes whenever the counters begin anew; empty where only their going down tells."""

    def counters(self) -> Iterator[tuple[Key, Number]]:
        """Every figure that only grows, by its place in the line."""
        yield ("cpu_seconds",), self.cpu_seconds
        for number, seconds in self.vcpu_seconds.items():
            yield ("vcpu_seconds", number), seconds
        for kind, devices in (("block", self.block), ("network", self.network)):
            for name, figures in devices.items():
                for what, value in figures.items():
                    if what not in GAUGES:
                        yield (kind, name, what), value


class Usage:
    """One figure of what a VM has used, such as its seconds of CPU, and the only place that keeps it from going down.

    Readings are what the hypervisor has counted since its process of the guest began. Where one is lower than the one
    before, the counting has begun anew; who knows that it does says so with `carry`, for it may soon be past the old
    reading. One thread reads at a time; `seconds` can be asked for by any.
    """

    __slots__ = ("_before", "_last", "seconds")

    def __init__(self, before: float = 0) -> None:
        """`before` is what an earlier life had used, by its checkpoint."""
        self.seconds = self._before = before
        """All of it, as of the last reading."""
        self._last: float = 0

    def read(self, raw: float | None) -> float:
        """All of it, after a reading; None is one that the hypervisor does not know, as of a guest that is ending."""
        if raw is not None:
            if raw < self._last:
                self.carry()
            self._last = raw
            # A sum may be rounded to less than was said before.
            self.seconds = max(self.seconds, self._before + raw)
        return self.seconds

    def at_least(self, raw: float) -> None:
        """Another thread has read the same counter, nobody knows whether before or after the last reading."""
        self.seconds = max(self.seconds, self._before + raw)

    def carry(self) -> None:
        """The process has ended, or the guest was saved: what it has used remains, and the next one counts from 0."""
        self._before, self._last = self.seconds, 0


class Totals:
    """Adds a VM's readings up over suspends, restores and restarts."""

    __slots__ = ("_run", "_used")

    def __init__(self, earlier: Mapping[str, object] | None = None) -> None:
        """`earlier` is the last sample of the VM's earlier life, as it was read back: the job's own word."""
        self._used = {key: Usage(before) for key, before in _counters_of(earlier or {})}
        self._run = ""

    def sample(self, metrics: Metrics) -> dict[str, object]:
        """The line for a reading."""
        if metrics.run != self._run:
            for usage in self._used.values():
                usage.carry()
        self._run = metrics.run
        return _line(metrics, {key: self._used.setdefault(key, Usage()).read(raw) for key, raw in metrics.counters()})


class Accounting:
    """Turns a driver's figures into those of a STATUS.

    CPUUTILIZATION is the CPU used since the last STATUS, or since the START was asked for, by wall time and vCPUs.
    It is at most 1: the hypervisor's own threads, and the CPU time that a checkpoint brings with it, are none of the
    guest's vCPUs' now.
    """

    __slots__ = ("_asked", "_usage")

    def __init__(self, now: float) -> None:
        self._usage = Usage()
        self._asked = now

    def account(self, raw_seconds: float, vcpus: int, now: float) -> tuple[float, float]:
        """(CPUUTILIZATION, CPUTIME in seconds) for a raw counter of `raw_seconds` read at `now`."""
        before = self._usage.seconds
        used = self._usage.read(raw_seconds) - before
        wall = (now - self._asked) * max(vcpus, 1)
        self._asked = now
        return min(1.0, used / wall) if wall > 0 else 0.0, self._usage.seconds


def _line(metrics: Metrics, totals: Mapping[Key, float]) -> dict[str, object]:
    line: dict[str, object] = {
        "time": round(metrics.time, 3),
        "state": metrics.state,
        "cpu_seconds": round(totals["cpu_seconds",], 3),
        "vcpus": metrics.vcpus,
        "memory_kib": metrics.memory_kib,
        "max_memory_kib": metrics.max_memory_kib,
    }
    if metrics.rss_kib:
        line["rss_kib"] = metrics.rss_kib
    if metrics.vcpu_seconds:
        line["vcpu_seconds"] = {number: round(totals["vcpu_seconds", number], 3) for number in metrics.vcpu_seconds}
    for kind, devices in (("block", metrics.block), ("network", metrics.network)):
        line[kind] = {
            name: {what: totals.get((kind, name, what), value) for what, value in figures.items()}
            for name, figures in devices.items()
        }
    return line


def _counters_of(line: Mapping[str, object]) -> Iterator[tuple[Key, Number]]:
    """The counters of a line that was read back; anything else is left out."""
    if is_counter(line.get("cpu_seconds")):
        yield ("cpu_seconds",), line["cpu_seconds"]  # type: ignore[misc]
    seconds = line.get("vcpu_seconds")
    if isinstance(seconds, dict):
        yield from ((("vcpu_seconds", name), value) for name, value in seconds.items() if is_counter(value))
    for kind in ("block", "network"):
        devices = line.get(kind)
        for name, figures in devices.items() if isinstance(devices, dict) else ():
            for what, value in figures.items() if isinstance(figures, dict) else ():
                if what not in GAUGES and is_counter(value):
                    yield (kind, name, what), value


def is_counter(value: object) -> bool:
    """Whether a value of a line is a number that a counter can have, which NaN is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LARGEST


class Status(NamedTuple):
    """What STATUS knows of a VM: its state, its use of the CPU, its memory, its addresses."""

    state: State
    """One of `vmgahp.lifecycle`: RUNNING, SOFT_SUSPENDED, SUSPENDED or STOPPED."""
    cpu_seconds: float = 0.0
    """Seconds of guest CPU since the hypervisor began to count; the server makes it monotonic."""
    vcpus: int = 1
    memory_kib: int = 0
    max_memory_kib: int = 0
    mac: str = ""
    ip: str = ""
