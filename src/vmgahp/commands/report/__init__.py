"""Command ``vmgahp report``: one page about a VM's life, from its ``vm_metrics.jsonl``.

Invalid lines are counted and left out, and so is everything beyond the limits here.
"""

import argparse
import os
import sys
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import BinaryIO, NamedTuple

from vmgahp import lifecycle
from vmgahp.commands.arguments import NotDone, tell
from vmgahp.commands.files import open_regular, write_anew
from vmgahp.commands.metrics_lines import MOST_DEVICES, Event, Sample, Traffic, rates, read_line
from vmgahp.job.exit_code import EXIT_FILE
from vmgahp.metrics.file import LONGEST_LINE, MOST_LINES, NAME, parse
from vmgahp.text import escape

LARGEST_FILE = 32 << 20
"""The maximum number of bytes that are read, twice the default size limit of vm_metrics.jsonl."""
MOST_EVENTS = 2_000
MOST_POINTS = 1200
"""The maximum number of samples that are drawn; more are thinned out, which loses peaks but not totals."""

BUSY, AWAY = "Busy", ""
"""The states of the picture for an operation under way, and for no VM."""
BOOTING, PROGRAM, ENDING = "Booting", "Program", "Ending"
STAGES = {"ready": BOOTING, "started": PROGRAM, "ended": ENDING, "taken": ENDING}
"""The parts of the time in which a guest with a program runs: the stage in the file -> the state of the picture."""
ENDS = ("stop", "end")
BREAKS = (*ENDS, "suspend", "checkpoint", "start", "resume")
"""The events over which no line is drawn."""


class Rate(NamedTuple):
    """A value between two moments."""

    begin: float
    end: float
    value: float


@dataclass
class Span:
    """A state from `begin` to `end`."""

    begin: float
    end: float
    state: str


@dataclass
class Story:
    """The content of a file, in the order of time."""

    samples: list[Sample] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    bad_lines: int = 0
    left_out: int = 0
    """The number of events beyond `MOST_EVENTS`; everything beyond the limits of the file counts as one."""
    ended_by: str = ""
    exit_code: str = ""
    """The exit code from ``vm_exit.json`` in the same directory, like `ended_by`; empty if unknown."""

    @cached_property
    def begin(self) -> float:
        return min([event.time - event.seconds for event in self.events] + [each.time for each in self.samples[:1]])

    @cached_property
    def end(self) -> float:
        return max([event.time for event in self.events[-1:]] + [sample.time for sample in self.samples[-1:]])

    @property
    def vm_name(self) -> str:
        return next((event.vm_name for event in reversed(self.events) if event.vm_name), "")

    def totals(self) -> tuple[Traffic, Traffic]:
        """Return the traffic of each disk and of each NIC. Counters never decrease, so the last ones count."""
        disks: Traffic = {}
        nics: Traffic = {}
        for sample in self.samples:
            for found, devices in ((disks, sample.disks), (nics, sample.nics)):
                known = len(found) >= MOST_DEVICES
                found |= {name: pair for name, pair in devices.items() if name in found or not known}
        return disks, nics

    def rates(self) -> dict[str, list[Rate]]:
        """Return the usage between each two samples, by name; memory and bytes a second in bytes, CPU in per cent."""
        found: dict[str, list[Rate]] = {}
        drawn = self.samples[:: len(self.samples) // MOST_POINTS + 1]
        pauses = sorted(now.time - then.time for then, now in pairwise(drawn))
        # A gap is three usual pauses; that is above the median, as samples taken at events make for short ones.
        longest = 3.0 * max(pauses[(len(pauses) - 1) * 3 // 4], 1.0) if pauses else 0.0
        breaks = [event.time for event in self.events if event.name in BREAKS and not event.error]
        for then, now in pairwise(drawn):
            is_broken = bisect_right(breaks, then.time) < bisect_right(breaks, now.time)
            if is_broken or not 0 < now.time - then.time <= longest:
                continue
            memory = {"memory": then.memory_kib * 1024, "rss": then.rss_kib * 1024}
            for name, value in (rates(then, now) | memory).items():
                found.setdefault(name, []).append(Rate(then.time, now.time, value))
        return found

    @cached_property
    def spans(self) -> list[Span]:
        """The VM's states one after another; times without a VM, or without knowledge of it, are left out."""
        start, operation, event, sample = range(4)  # the order of events at one moment
        marks = [(each.time, sample, each.state) for each in self.samples]
        for each in self.events:
            began = each.time - each.seconds
            marks += [(began, start, AWAY)] if each.name == "start" else []
            marks += [(began, operation, BUSY)] if each.seconds and each.name != "end" else []
            state = AWAY if each.name in ENDS else each.state
            marks.append((each.time, event, STAGES.get(each.reason, state) if each.name == "program" else state))
        found: list[Span] = []
        seen = 0.0
        runs: str = BOOTING if any(each.name == "program" for each in self.events) else lifecycle.RUNNING
        for time, kind, state in sorted(marks):
            if state in STAGES.values():
                runs = state
            state = runs if state == lifecycle.RUNNING else state
            if found and kind == sample and found[-1].state == BUSY:
                continue  # taken during an operation, which it does not end
            if found:
                # A life without an end in the file, as after a power failure, ended when the VM was last seen.
                found[-1].end = seen if kind == start else time
            if kind in (event, sample):
                seen = time
            if not found or found[-1].state != state:
                found.append(Span(time, time, state))
        if found:
            found[-1].end = max(found[-1].end, self.end)
        return [span for span in found if span.state != AWAY and span.end > span.begin]


def read_story(place: str) -> Story:
    """Read a file, or the one in a directory. Raises `NotDone`, OSError."""
    path = os.path.join(place, NAME) if os.path.isdir(place) else place
    try:
        with open_regular(path) as file:
            story = read_from(file)
    except FileNotFoundError:
        where = "from machines with VM_METRICS_INTERVAL above 0"
        raise NotDone(f"There is no {path}. A job brings its {NAME} home {where}.") from None
    if not (story.samples or story.events):
        raise NotDone(f"{path} has no line of a VM's metrics in it. Name the directory or the {NAME} of a job.")
    _read_ending(os.path.join(os.path.dirname(path), EXIT_FILE), story)
    return story


def read_from(file: BinaryIO) -> Story:
    story = Story()
    data = file.read(LARGEST_FILE + 1)
    lines = data.split(b"\n", MOST_LINES)
    story.left_out = int(len(data) > LARGEST_FILE or any(lines[MOST_LINES:]))
    for text in lines[:MOST_LINES]:
        line = read_line(text) if len(text) <= LONGEST_LINE else None
        if line is None:
            story.bad_lines += bool(text.strip())
        elif isinstance(line, Sample):
            story.samples.append(line)
        elif len(story.events) < MOST_EVENTS:
            story.events.append(line)
        else:
            story.left_out += 1
    # Lines are written in the order of time, but the clock may have been corrected in between.
    story.samples.sort(key=lambda sample: sample.time)
    story.events.sort(key=lambda event: event.time)
    return story


def _read_ending(path: str, story: Story) -> None:
    try:
        with open_regular(path, follow=False) as file:
            found = parse(file.read(LONGEST_LINE)) or {}
    except OSError:
        return
    ended_by, code = found.get("ended_by"), found.get("exit_code")
    story.ended_by = escape(ended_by[:100]) if isinstance(ended_by, str) else ""
    story.exit_code = str(code) if type(code) is int and 0 <= code <= 255 else ""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Make one HTML page of the vm_metrics.jsonl that comes back with a job: the VM's states over time, its CPU,
    memory, disks and network, its checkpoints, and what happened when. The page needs nothing but itself."""
    add = command.add_argument
    text = "the directory with vm_metrics.jsonl, or that file (default: here)"
    add("place", nargs="?", default=".", metavar="DIR", help=text)
    text = "where to (default: report.html here; - for standard output)"
    add("-o", "--output", default="report.html", metavar="FILE", help=text)
    command.set_defaults(run=lambda options: run(options.place, options.output))
    tell(
        command,
        examples=[("vmgahp report", "report.html, of the vm_metrics.jsonl that is here")],
        statuses={1: "There is no such file, it has no line of a VM's metrics, or it cannot be read or written."},
    )


def run(place: str, output: str) -> int:
    """Make the report and return the exit status."""
    from vmgahp.commands.report import page  # late: completions and man pages are made without lxml

    made = page.render(read_story(place))
    if output == "-":
        sys.stdout.buffer.write(made)
        return 0
    write_anew(output, made)
    sys.stdout.write(output + "\n")
    return 0
