"""The resources that a VM has used: a driver's readings, and totals that never decrease.

A hypervisor counts from zero again when a guest is restored, and so does another machine that a checkpoint went to.
`Totals` adds the usage before that, so that the last line of ``vm_metrics.jsonl`` has the total usage of the job.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from vmgahp.lifecycle import State

Number = int | float
Key = tuple[str, ...]

GAUGES = frozenset(("allocation", "capacity"))
"""The figures of a disk that state its present size; all others of disks and NICs are counters."""

LARGEST = 2**63 - 1
"""The largest counter that is accepted in a line that was read back."""


class Metrics(NamedTuple):
    """A driver's reading of one VM, with the counters as the hypervisor has them."""

    state: State
    """A state of `vmgahp.lifecycle`: RUNNING or SOFT_SUSPENDED; a VM in another state uses nothing."""
    time: float
    cpu_seconds: float = 0.0
    vcpus: int = 1
    vcpu_seconds: Mapping[str, float] = {}
    """The seconds of each vCPU, by its number; empty if the hypervisor does not count them separately."""
    memory_kib: int = 0
    """The memory that the guest has now, which a balloon may make less than `max_memory_kib`."""
    max_memory_kib: int = 0
    rss_kib: int = 0
    """The memory of this machine that the guest's process occupies; 0 if unknown."""
    block: Mapping[str, Mapping[str, int]] = {}
    """The figures of each disk by its device: read_bytes, read_requests, write_bytes, write_requests, errors,
    allocation and capacity, as far as they are known."""
    network: Mapping[str, Mapping[str, int]] = {}
    """The figures of each NIC by its MAC address: rx_ and tx_ bytes, packets, errors and drops."""
    run: str = ""
    """An identifier that changes whenever the counters start anew; empty if only a decrease shows that."""

    def counters(self) -> Iterator[tuple[Key, Number]]:
        """Yield every counter, by its place in the line."""
        yield ("cpu_seconds",), self.cpu_seconds
        for number, seconds in self.vcpu_seconds.items():
            yield ("vcpu_seconds", number), seconds
        for kind, devices in (("block", self.block), ("network", self.network)):
            for name, figures in devices.items():
                for what, value in figures.items():
                    if what not in GAUGES:
                        yield (kind, name, what), value


class Usage:
    """One counter of a VM's usage, such as its seconds of CPU, which is kept from decreasing here and nowhere else.

    Readings are what the hypervisor has counted since its process of the guest started. A reading that is lower than
    the one before shows that counting has started anew. A caller that knows this must call `carry`, because the new
    counter may soon exceed the old reading. One thread reads at a time; any thread may read `seconds`.
    """

    def __init__(self, before: float = 0) -> None:
        """Start with the usage of an earlier life, as its checkpoint states it in `before`."""
        self.seconds = self._before = before
        self._last: float = 0

    def read(self, raw: float | None) -> float:
        """Add a reading and return the total; None is an unknown reading, such as of a guest that is ending."""
        if raw is not None:
            if raw < self._last:
                self.carry()
            self._last = raw
            # A sum may be rounded to less than was reported before.
            self.seconds = max(self.seconds, self._before + raw)
        return self.seconds

    def at_least(self, raw: float) -> None:
        """Take account of a reading by another thread, which may be older or newer than the last one."""
        self.seconds = max(self.seconds, self._before + raw)

    def carry(self) -> None:
        """Keep the usage so far, because the process has ended or the guest was saved: the next counter starts at 0."""
        self._before, self._last = self.seconds, 0


class Totals:
    """The sums of a VM's readings over suspends, restores and restarts."""

    def __init__(self, earlier: Mapping[str, object] | None = None) -> None:
        """Start with the last sample of the VM's earlier life, as it was read back; the job may have changed it."""
        self._used = {key: Usage(before) for key, before in _counters_of(earlier or {})}
        self._run = ""

    def sample(self, metrics: Metrics) -> dict[str, object]:
        """Return the line for a reading."""
        if metrics.run != self._run:
            for usage in self._used.values():
                usage.carry()
        self._run = metrics.run
        totals = {key: self._used.setdefault(key, Usage()).read(raw) for key, raw in metrics.counters()}
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


class Accounting:
    """The CPU figures of a STATUS, computed from a driver's readings.

    CPUUTILIZATION is the CPU used since the last STATUS, or since the START was requested, by wall time and vCPUs. It
    is at most 1: the hypervisor's own threads, and the CPU time that a checkpoint brings, are not time of the vCPUs.
    """

    def __init__(self, now: float) -> None:
        self._usage = Usage()
        self._asked = now

    def account(self, raw_seconds: float, vcpus: int, now: float) -> tuple[float, float]:
        """Return (CPUUTILIZATION, CPUTIME in seconds) for a raw counter of `raw_seconds` read at `now`."""
        before = self._usage.seconds
        used = self._usage.read(raw_seconds) - before
        wall = (now - self._asked) * max(vcpus, 1)
        self._asked = now
        return min(1.0, used / wall) if wall > 0 else 0.0, self._usage.seconds


def _counters_of(line: Mapping[str, object]) -> Iterator[tuple[Key, Number]]:
    """Yield the counters of a line that was read back; anything else is left out."""
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
    """Return True if a value of a line is a number that a counter can have, which NaN is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LARGEST


class Status(NamedTuple):
    """A VM's state, CPU usage, memory and addresses, for a STATUS."""

    state: State
    """A state of `vmgahp.lifecycle`: RUNNING, SOFT_SUSPENDED, SUSPENDED or STOPPED."""
    cpu_seconds: float = 0.0
    """Seconds of guest CPU since the hypervisor started counting; the server makes it monotonic."""
    vcpus: int = 1
    memory_kib: int = 0
    max_memory_kib: int = 0
    mac: str = ""
    ip: str = ""
