"""Reads a job's ``vm_metrics.jsonl``, which may say anything, into samples and events.

What is no line of ours is counted and left out; so is what goes beyond `MOST_SAMPLES` and `MOST_EVENTS`. Texts
are made printable here, and numbers are finite, so that whoever draws them need not look again.
"""

import os
from stat import S_ISREG

from vmgahp.job.exit_code import EXIT_FILE
from vmgahp.metrics import is_counter
from vmgahp.metrics.file import LONGEST_LINE, NAME, parse
from vmgahp.text import escape

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import BinaryIO

LARGEST_FILE = 64 << 20
"""Bytes that are read; VM_METRICS_MAX is a quarter of it unless the administrator has said otherwise."""

MOST_SAMPLES, MOST_EVENTS, MOST_DEVICES = 250_000, 5_000, 64
LATEST = 2**32
"""Seconds since 1970 (the year 2106): a later time is nobody's."""

LONGEST_NAME, LONGEST_TEXT = 100, 1200


class Unreadable(Exception):
    """There is nothing to make a report of; the text says why, and what to do."""


class Sample:
    """What a VM had used at one moment; `disks` are bytes read and written, `cards` bytes received and sent."""

    __slots__ = (
        "cards",
        "cpu_seconds",
        "disks",
        "max_memory_kib",
        "memory_kib",
        "rss_kib",
        "state",
        "time",
        "vcpus",
    )

    def __init__(self, time: float, line: "Mapping[str, object]") -> None:
        self.time = time
        self.state = _text(line.get("state"), LONGEST_NAME)
        self.cpu_seconds = _number(line.get("cpu_seconds"))
        self.vcpus = max(1.0, _number(line.get("vcpus")))
        self.memory_kib = _number(line.get("memory_kib"))
        self.max_memory_kib = _number(line.get("max_memory_kib"))
        self.rss_kib = _number(line.get("rss_kib"))
        self.disks = dict(_pairs(line.get("block"), "read_bytes", "write_bytes"))
        self.cards = dict(_pairs(line.get("network"), "rx_bytes", "tx_bytes"))


class Event:
    """Something that has happened; `seconds` is how long it took, up to `time`; `size` in bytes, 0 where unknown."""

    __slots__ = ("detail", "error", "name", "pid", "seconds", "size", "state", "time", "vm_name")

    def __init__(self, time: float, line: "Mapping[str, object]") -> None:
        self.time = time
        self.name = _text(line.get("event"), LONGEST_NAME)
        self.state = _text(line.get("state"), LONGEST_NAME)
        self.seconds = min(_number(line.get("seconds")), time)
        self.size = _number(line.get("bytes"))
        self.error = _text(line.get("error"), LONGEST_TEXT)
        self.detail = _text(line.get("reason"), LONGEST_TEXT)
        self.vm_name = _text(line.get("name"), LONGEST_NAME)
        self.pid = int(_number(line.get("pid")))


class Story:
    """All that a file tells, in the order of time."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.events: list[Event] = []
        self.bad_lines = 0
        """Lines that are none of ours."""
        self.how_it_ended = self.exit_code = ""
        """By the ``vm_exit.json`` beside the file; empty where nobody knows."""
        self.left_out = 0
        """Lines beyond what is kept, and everything beyond `LARGEST_FILE` as one."""

    @property
    def begin(self) -> float:
        """When the first thing that is known of began."""
        times = [event.time - event.seconds for event in self.events] + [
            each.time for each in self.samples[:1]
        ]
        return min(times)

    @property
    def end(self) -> float:
        return max([event.time for event in self.events[-1:]] + [sample.time for sample in self.samples[-1:]])

    @property
    def name(self) -> str:
        """The VM's name, or an empty string."""
        return next((event.vm_name for event in reversed(self.events) if event.vm_name), "")


def find(place: str) -> str:
    """The file that a directory or a path means."""
    return os.path.join(place, NAME) if os.path.isdir(place) else place


def read(path: str) -> Story:
    """The story in a file. Raises `Unreadable`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not S_ISREG(os.fstat(descriptor).st_mode):
                raise Unreadable(f"{path} is not a regular file.")
            story = read_from(file)
        story.how_it_ended, story.exit_code = _ending(os.path.join(os.path.dirname(path), EXIT_FILE))
    except FileNotFoundError:
        raise Unreadable(
            f"There is no {path}. It comes home with a job whose machine has VM_METRICS_INTERVAL above 0."
        ) from None
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}.") from error
    if not (story.samples or story.events):
        raise Unreadable(f"{path} has no line of a VM's metrics in it.")
    return story


def read_from(file: "BinaryIO") -> Story:
    """The story in an open file."""
    story = Story()
    for text in _lines(file, story):
        line = parse(text)
        when = None if line is None else line.get("time")
        if line is None or not is_counter(when) or when > LATEST:  # type: ignore[operator]
            story.bad_lines += 1
        elif isinstance(line.get("event"), str):
            if len(story.events) < MOST_EVENTS:
                story.events.append(Event(float(when), line))  # type: ignore[arg-type]
            else:
                story.left_out += 1
        elif is_counter(line.get("cpu_seconds")):
            if len(story.samples) < MOST_SAMPLES:
                story.samples.append(Sample(float(when), line))  # type: ignore[arg-type]
            else:
                story.left_out += 1
        else:
            story.bad_lines += 1
    # Lines are written in the order of time, but a clock may be put right in between.
    story.samples.sort(key=lambda sample: sample.time)
    story.events.sort(key=lambda event: event.time)
    return story


def _ending(path: str) -> tuple[str, str]:
    """How the VM ended, and the guest's exit code."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            found = parse(file.read(LONGEST_LINE)) if S_ISREG(os.fstat(descriptor).st_mode) else None
    except OSError:
        return "", ""
    code = (found or {}).get("exit_code")
    is_code = isinstance(code, int) and not isinstance(code, bool) and 0 <= code <= 255
    return _text((found or {}).get("ended_by"), LONGEST_NAME), str(code) if is_code else ""


def _lines(file: "BinaryIO", story: Story) -> "Iterator[bytes]":
    left = LARGEST_FILE
    while text := file.readline(LONGEST_LINE + 1):
        left -= len(text)
        if left < 0:
            story.left_out += 1
            return
        if len(text) > LONGEST_LINE:
            story.bad_lines += 1
            while text and not text.endswith(b"\n") and left > 0:
                text = file.readline(LONGEST_LINE)
                left -= len(text)
        elif text.strip():
            yield text


def _pairs(devices: object, one: str, other: str) -> "Iterator[tuple[str, tuple[float, float]]]":
    if isinstance(devices, dict):
        for name, figures in list(devices.items())[:MOST_DEVICES]:
            if isinstance(figures, dict) and (one in figures or other in figures):
                yield _text(name, LONGEST_NAME), (_number(figures.get(one)), _number(figures.get(other)))


def _number(value: object) -> float:
    return float(value) if is_counter(value) else 0.0  # type: ignore[arg-type]


def _text(value: object, longest: int) -> str:
    return escape(value[:longest]) if isinstance(value, str) else ""
