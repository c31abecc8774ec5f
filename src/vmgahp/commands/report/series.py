"""Rates with their gaps, and the VM's states over time, from samples and events."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from vmgahp import lifecycle
from vmgahp.commands.report.reader import Event, Sample, Story

BUSY = "Busy"
"""Something is being done to the VM: a start, a save, a restore."""
AWAY = "Away"
"""There is no VM, or nobody knows of it."""

GAP = 3.0
"""A pause between two samples this many times longer than usual is one in which nobody looked."""

MOST_POINTS = 1200
"""Samples that are drawn; more are thinned out, which loses peaks and no totals."""

ENDS = ("stop", "end")
ENDS_A_RUN = (*ENDS, "suspend", "checkpoint", "start", "resume")


class Rate(NamedTuple):
    """An average between two samples."""

    begin: float
    end: float
    value: float


@dataclass
class Span:
    """A state from `begin` to `end`."""

    begin: float
    end: float
    state: str


class Figures:
    """The lines of the report's charts, and the totals of all lives of the VM."""

    def __init__(self, story: Story) -> None:
        self.cpu: list[Rate] = []
        """Per cent of the vCPUs."""
        self.memory: list[Rate] = []
        """Bytes that the guest has: known at each sample, and drawn until the next."""
        self.rss: list[Rate] = []
        """Bytes that its process occupies."""
        self.disk_read: list[Rate] = []
        self.disk_written: list[Rate] = []
        self.received: list[Rate] = []
        self.sent: list[Rate] = []
        """Bytes a second."""
        counted = [0.0, *(sample.cpu_seconds for sample in story.samples)]
        self.cpu_seconds = sum(_grown(then, now) for then, now in pairwise(counted))
        self.disks = _totals(sample.disks for sample in story.samples)
        """Bytes read and written by each disk."""
        self.nics = _totals(sample.nics for sample in story.samples)
        """Bytes received and sent by each NIC."""
        drawn = _thinned(story.samples)
        longest = GAP * _usual_pause(drawn)
        breaks = sorted(event.time for event in story.events if event.name in ENDS_A_RUN and not event.error)
        for then, now in pairwise(drawn):
            if 0 < now.time - then.time <= longest and not _between(breaks, then.time, now.time):
                self._draw(then, now)

    def _draw(self, then: Sample, now: Sample) -> None:
        seconds = now.time - then.time
        values = [(self.memory, then.memory_kib * 1024), (self.rss, then.rss_kib * 1024)]
        if not now.state == then.state == lifecycle.SOFT_SUSPENDED:
            used = _grown(then.cpu_seconds, now.cpu_seconds)
            disks, nics = _grown_devices(then.disks, now.disks), _grown_devices(then.nics, now.nics)
            values += [
                (self.cpu, 100 * used / seconds / now.vcpus),
                (self.disk_read, disks[0] / seconds),
                (self.disk_written, disks[1] / seconds),
                (self.received, nics[0] / seconds),
                (self.sent, nics[1] / seconds),
            ]
        for line, value in values:
            line.append(Rate(then.time, now.time, value))


def _totals(samples: Iterable[dict[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    """What each device has done; a counter that went down has begun anew."""
    last: dict[str, tuple[float, float]] = {}
    totals: dict[str, tuple[float, float]] = {}
    for devices in samples:
        for name, (one, other) in devices.items():
            if name in totals or len(totals) < 64:
                was, total = last.get(name, (0.0, 0.0)), totals.get(name, (0.0, 0.0))
                totals[name] = total[0] + _grown(was[0], one), total[1] + _grown(was[1], other)
                last[name] = one, other
    return totals


def spans(story: Story) -> list[Span]:
    """The VM's states, one after another; what is between them is not known."""
    marks: list[tuple[float, str]] = []
    for event in story.events:
        if event.seconds and event.name != "end":
            marks.append((event.time - event.seconds, BUSY))
        if event.name in ENDS:
            marks.append((event.time, AWAY))
        elif event.state:
            marks.append((event.time, event.state))
    marks += [(sample.time, sample.state) for sample in story.samples]
    marks.sort(key=lambda mark: mark[0])
    # A sample may be taken while something is being done, and changes nothing of that.
    busy = sorted((event.time - event.seconds, event.time) for event in story.events if event.seconds)
    index = 0
    of_events = {event.time for event in story.events}
    found: list[Span] = []
    for when, state in marks:
        while index < len(busy) and busy[index][1] <= when:
            index += 1
        meanwhile = index < len(busy) and busy[index][0] < when < busy[index][1]
        if meanwhile and state != BUSY and when not in of_events:
            continue
        if found:
            found[-1].end = when
        if not found or found[-1].state != state:
            found.append(Span(when, when, state))
    if found:
        found[-1].end = max(found[-1].end, story.end)
    return [span for span in _without_silence(found, story) if span.state != AWAY and span.end > span.begin]


def _without_silence(found: list[Span], story: Story) -> list[Span]:
    """Cut a state short that ended without a word, as when the machine lost its power: a start follows it."""
    starts = sorted(event.time - event.seconds for event in story.events if event.name == "start")
    seen = sorted([sample.time for sample in story.samples] + [event.time for event in story.events])
    for span in found:
        index = bisect_right(starts, span.begin)
        if span.state in (BUSY, AWAY) or index == len(starts) or starts[index] > span.end:
            continue
        last = bisect_left(seen, starts[index]) - 1
        span.end = max(span.begin, seen[last]) if last >= 0 else span.begin
    return found


def _thinned(samples: Sequence[Sample]) -> list[Sample]:
    """About `MOST_POINTS` of the samples, evenly over time, the first and the last among them."""
    if len(samples) <= MOST_POINTS:
        return list(samples)
    width = (samples[-1].time - samples[0].time) / MOST_POINTS or 1.0
    kept: list[Sample] = []
    last = -1
    for sample in samples:
        bucket = int((sample.time - samples[0].time) / width)
        if bucket == last and len(kept) > 1:
            kept[-1] = sample
        else:
            kept.append(sample)
        last = bucket
    return kept


def _usual_pause(samples: Sequence[Sample]) -> float:
    """Seconds from one sample to the next; those that are taken at events make for shorter ones."""
    pauses = sorted(now.time - then.time for then, now in pairwise(samples))
    return max(pauses[(len(pauses) - 1) * 3 // 4], 1.0) if pauses else 1.0


def _between(times: Sequence[float], begin: float, end: float) -> bool:
    index = bisect_right(times, begin)
    return index < len(times) and times[index] <= end


def _grown(then: float, now: float) -> float:
    return now - then if now >= then else now


def _grown_devices(then: dict[str, tuple[float, float]], now: dict[str, tuple[float, float]]) -> tuple[float, float]:
    """What all devices together have read and written more; one that was not there before counts from now on."""
    one = other = 0.0
    for name, (first, second) in now.items():
        if name in then:
            one += _grown(then[name][0], first)
            other += _grown(then[name][1], second)
    return one, other


def checkpoints(events: Sequence[Event]) -> list[Event]:
    """Those that were made."""
    return [event for event in events if event.name == "checkpoint" and not event.error]
