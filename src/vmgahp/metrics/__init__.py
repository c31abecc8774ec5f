"""What a VM has used so far: a driver's reading, and how readings become figures that never go down.

A hypervisor counts from zero again when a guest is restored, and so does another machine that a checkpoint
went to. `Totals` adds up what came before, so that the last line of ``vm_metrics.jsonl`` says what the job
has used in all.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

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


class Counters:
    """Adds up counters that begin anew now and then: no total ever goes down."""

    __slots__ = ("_before", "_last")

    def __init__(self, before: Mapping[Key, Number] | None = None) -> None:
        self._before = dict(before or {})
        self._last: dict[Key, Number] = {}

    def total(self, key: Key, raw: Number) -> Number:
        """All that a counter has counted, which shows `raw` now."""
        if raw < self._last.get(key, 0):
            self._begin_anew(key)
        self._last[key] = raw
        return self._before.get(key, 0) + raw

    def begin_anew(self) -> None:
        """Every counter begins anew, whether or not it shows less than before."""
        for key in tuple(self._last):
            self._begin_anew(key)

    def _begin_anew(self, key: Key) -> None:
        self._before[key] = self._before.get(key, 0) + self._last.pop(key)


class Totals:
    """Adds a VM's readings up over suspends, restores and restarts."""

    __slots__ = ("_counters", "_run")

    def __init__(self, earlier: Mapping[str, object] | None = None) -> None:
        """`earlier` is the last sample of the VM's earlier life, as it was read back: the job's own word."""
        self._counters = Counters(dict(_counters_of(earlier or {})))
        self._run = ""

    def sample(self, metrics: Metrics) -> dict[str, object]:
        """The line for a reading."""
        if metrics.run != self._run:
            self._counters.begin_anew()
        self._run = metrics.run
        return _line(metrics, {key: self._counters.total(key, raw) for key, raw in metrics.counters()})


class Accounting:
    """Turns a driver's figures into those of a STATUS.

    CPUUTILIZATION is the CPU used since the last STATUS, or since the START was asked for, by wall time and vCPUs.
    It is at most 1: the hypervisor's own threads, and the CPU time that a checkpoint brings with it, are none of the
    guest's vCPUs' now.
    """

    __slots__ = ("_counters", "_reported_cpu", "_reported_time")

    def __init__(self, now: float) -> None:
        self._counters = Counters()
        self._reported_cpu: Number = 0.0
        self._reported_time = now

    def account(self, raw_seconds: float, vcpus: int, now: float) -> tuple[float, float]:
        """(CPUUTILIZATION, CPUTIME in seconds) for a raw counter of `raw_seconds` read at `now`."""
        # The sum of what came before may be rounded to less than was reported.
        total = max(self._counters.total(("cpu_seconds",), raw_seconds), self._reported_cpu)
        wall = (now - self._reported_time) * max(vcpus, 1)
        utilization = min(1.0, (total - self._reported_cpu) / wall) if wall > 0 else 0.0
        self._reported_cpu = total
        self._reported_time = now
        return utilization, total


def _line(metrics: Metrics, totals: Mapping[Key, Number]) -> dict[str, object]:
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
