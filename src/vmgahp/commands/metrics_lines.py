"""Lines of a job's ``vm_metrics.jsonl`` as samples and events, for the commands that show them.

The file is the job's and may have any content: texts are made printable and cut, numbers are finite and not negative.
"""

from collections.abc import Mapping
from typing import NamedTuple

from vmgahp.metrics import LARGEST, is_counter
from vmgahp.metrics.file import parse
from vmgahp.text import escape

MOST_DEVICES = 64
LATEST = 2**32
"""The latest valid time, in seconds since 1970 (the year 2106)."""

LONGEST_NAME, LONGEST_TEXT = 200, 1200

Traffic = dict[str, tuple[float, float]]
"""The bytes by device: read and written, or received and sent."""


class Sample(NamedTuple):
    """The usage of a VM at one moment; `cpu_seconds`, `disks` and `nics` count since the job began."""

    time: float
    state: str
    cpu_seconds: float
    vcpus: float
    memory_kib: float
    max_memory_kib: float
    rss_kib: float
    disks: Traffic
    nics: Traffic


class Event(NamedTuple):
    time: float
    name: str
    state: str
    """The VM's state afterwards; empty after a failure."""
    seconds: float
    """The duration of the operation that ended at `time`, in seconds."""
    size: float
    """The bytes of the memory image; 0 if unknown."""
    error: str
    reason: str
    vm_name: str


def read_line(text: bytes) -> Sample | Event | None:
    """Parse one line; None if it is neither a sample nor an event."""
    return of_line(parse(text) or {})


def of_line(line: Mapping[str, object]) -> Sample | Event | None:
    """Return the sample or the event of a parsed line, or of a driver's reading; None if it is neither."""
    time, event = line.get("time"), line.get("event")
    if not is_counter(time) or time > LATEST:  # type: ignore[operator]
        return None
    time, state = _number(time), _text(line.get("state"), LONGEST_NAME)
    if isinstance(event, str):
        seconds, size = (_number(line.get(key)) for key in ("seconds", "bytes"))
        error, reason = (_text(line.get(key), LONGEST_TEXT) for key in ("error", "reason"))
        name, vm_name = (_text(value, LONGEST_NAME) for value in (event, line.get("name")))
        return Event(time, name, state, min(seconds, time), size, error, reason, vm_name)
    if not is_counter(line.get("cpu_seconds")):
        return None
    cpu, vcpus = (_number(line.get(key)) for key in ("cpu_seconds", "vcpus"))
    memory, most, rss = (_number(line.get(key)) for key in ("memory_kib", "max_memory_kib", "rss_kib"))
    disks = _traffic(line.get("block"), "read_bytes", "write_bytes")
    nics = _traffic(line.get("network"), "rx_bytes", "tx_bytes")
    return Sample(time, state, cpu, max(1.0, vcpus), memory, most, rss, disks, nics)


def rates(then: Sample, now: Sample) -> dict[str, float]:
    """Return the use between two samples: per cent of the vCPUs, and bytes a second of the devices of both."""
    used = {"cpu": 100 * (now.cpu_seconds - then.cpu_seconds) / now.vcpus}
    for names, old, new in ((("read", "written"), then.disks, now.disks), (("received", "sent"), then.nics, now.nics)):
        for way, name in enumerate(names):
            used[name] = sum(max(0.0, new[each][way] - old[each][way]) for each in new if each in old)
    seconds = now.time - then.time  # which may be next to nothing: JSON has no infinity
    return {name: min(max(0.0, value) / seconds, float(LARGEST)) for name, value in used.items()}


def _traffic(devices: object, one: str, other: str) -> Traffic:
    found = list(devices.items())[:MOST_DEVICES] if isinstance(devices, dict) else []
    return {
        _text(name, LONGEST_NAME): (_number(figures.get(one)), _number(figures.get(other)))
        for name, figures in found
        if isinstance(figures, dict) and (one in figures or other in figures)
    }


def _number(value: object) -> float:
    return float(value) if is_counter(value) else 0.0  # type: ignore[arg-type]


def _text(value: object, longest: int) -> str:
    return escape(value[:longest]) if isinstance(value, str) else ""
