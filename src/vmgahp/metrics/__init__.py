"""What a VM has used so far: a driver's reading, and how readings become figures that never go down.

A hypervisor counts from zero again when a guest is restored, and so does another machine that a checkpoint
went to. `Totals` adds up what came before, so that the last line of ``vm_metrics.jsonl`` says what the job
has used in all.
"""

from time import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Number = int | float
    Key = tuple[str, ...]

GAUGES = frozenset(("allocation", "capacity"))
"""Figures of a disk that say how large it is now; all the others of disks and cards are counters."""

LARGEST = 2**63 - 1
"""A larger counter in a line that was read back is nobody's."""


class Metrics:
    """A driver's reading of one VM, its counters as the hypervisor has them."""

    __slots__ = (
        "block",
        "cpu_seconds",
        "max_memory_kib",
        "memory_kib",
        "network",
        "rss_kib",
        "run",
        "state",
        "time",
        "vcpu_seconds",
        "vcpus",
    )

    def __init__(
        self,
        state: str,
        *,
        cpu_seconds: float = 0.0,
        vcpus: int = 1,
        vcpu_seconds: "Mapping[str, float] | None" = None,
        memory_kib: int = 0,
        max_memory_kib: int = 0,
        rss_kib: int = 0,
        block: "Mapping[str, Mapping[str, int]] | None" = None,
        network: "Mapping[str, Mapping[str, int]] | None" = None,
        run: str = "",
        when: float | None = None,
    ) -> None:
        self.time = time() if when is None else when
        """When the figures were true, in seconds since 1970."""
        self.state = state
        """One of `vmgahp.lifecycle`: RUNNING or SOFT_SUSPENDED; others use nothing."""
        self.run = run
        """Changes whenever the counters begin anew; empty where only their going down tells."""
        self.cpu_seconds = cpu_seconds
        self.vcpus = vcpus
        self.vcpu_seconds = dict(vcpu_seconds or {})
        """Of each vCPU, by its number; empty where the hypervisor does not tell them apart."""
        self.memory_kib = memory_kib
        """What the guest has now, which a balloon may make less than `max_memory_kib`."""
        self.max_memory_kib = max_memory_kib
        self.rss_kib = rss_kib
        """What the guest's process occupies of this machine's memory, 0 where nobody knows."""
        self.block = {name: dict(figures) for name, figures in (block or {}).items()}
        """Of each disk by its device: read_bytes, read_requests, write_bytes, write_requests, errors,
        allocation and capacity, as far as they are known."""
        self.network = {name: dict(figures) for name, figures in (network or {}).items()}
        """Of each card by its MAC address: rx_ and tx_ bytes, packets, errors and drops."""

    def counters(self) -> "Iterator[tuple[Key, Number]]":
        """Every figure that only grows, by its place in the line."""
        yield ("cpu_seconds",), self.cpu_seconds
        for number, seconds in self.vcpu_seconds.items():
            yield ("vcpu_seconds", number), seconds
        for kind, devices in (("block", self.block), ("network", self.network)):
            for name, figures in devices.items():
                for what, value in figures.items():
                    if what not in GAUGES:
                        yield (kind, name, what), value


class Totals:
    """Adds a VM's readings up over suspends, restores and restarts."""

    __slots__ = ("_before", "_last", "_run")

    def __init__(self, earlier: "Mapping[str, object] | None" = None) -> None:
        """`earlier` is the last sample of the VM's earlier life, as it was read back: the job's own word."""
        self._before: dict[Key, Number] = dict(_counters_of(earlier or {}))
        self._last: dict[Key, Number] = {}
        self._run = ""

    def sample(self, metrics: Metrics) -> "dict[str, object]":
        """The line for a reading."""
        if metrics.run != self._run:
            self._fold(self._last)
        self._run = metrics.run
        totals: dict[Key, Number] = {}
        for key, raw in metrics.counters():
            if raw < self._last.get(key, 0):
                self._fold((key,))
            self._last[key] = raw
            totals[key] = self._before.get(key, 0) + raw
        return _line(metrics, totals)

    def _fold(self, keys: "Mapping[Key, Number] | tuple[Key]") -> None:
        for key in tuple(keys):
            self._before[key] = self._before.get(key, 0) + self._last.pop(key)


def _line(metrics: Metrics, totals: "Mapping[Key, Number]") -> "dict[str, object]":
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
        line["vcpu_seconds"] = {
            number: round(totals["vcpu_seconds", number], 3) for number in metrics.vcpu_seconds
        }
    for kind, devices in (("block", metrics.block), ("network", metrics.network)):
        line[kind] = {
            name: {what: totals.get((kind, name, what), value) for what, value in figures.items()}
            for name, figures in devices.items()
        }
    return line


def _counters_of(line: "Mapping[str, object]") -> "Iterator[tuple[Key, Number]]":
    """The counters of a line that was read back; what is no counter is left out."""
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
    """Whether a value of a line is a number that a counter can have; NaN is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LARGEST


class Status:
    """What STATUS knows of a VM: its state, its use of the CPU, its memory, its addresses."""

    __slots__ = ("cpu_seconds", "ip", "mac", "max_memory_kib", "memory_kib", "state", "vcpus")

    def __init__(
        self,
        state: str,
        *,
        cpu_seconds: float = 0.0,
        vcpus: int = 1,
        memory_kib: int = 0,
        max_memory_kib: int = 0,
        mac: str = "",
        ip: str = "",
    ) -> None:
        self.state = state
        """One of `vmgahp.lifecycle`: RUNNING, SOFT_SUSPENDED, SUSPENDED or STOPPED."""
        self.cpu_seconds = cpu_seconds
        """Seconds of guest CPU since the hypervisor began to count; the server makes it monotonic."""
        self.vcpus = vcpus
        self.memory_kib = memory_kib
        self.max_memory_kib = max_memory_kib
        self.mac = mac
        self.ip = ip
