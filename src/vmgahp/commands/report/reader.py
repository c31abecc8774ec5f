"""Reads a job's ``vm_metrics.jsonl``, which may say anything, into samples and events.

What is no line of ours is counted and left out; so is what goes beyond `MOST_LINES` and `MOST_EVENTS`. Texts
are made printable here, and numbers are finite, so that the chart need not check them again.
"""

import os
from collections.abc import Iterator, Mapping
from typing import BinaryIO, NamedTuple

from vmgahp.commands import files
from vmgahp.commands.files import open_regular
from vmgahp.job.exit_code import EXIT_FILE
from vmgahp.metrics import is_counter
from vmgahp.metrics.file import LONGEST_LINE, MOST_LINES, NAME, parse
from vmgahp.text import escape

LARGEST_FILE = 32 << 20
"""Bytes that are read, twice what vm_metrics.jsonl becomes by default."""

MOST_EVENTS, MOST_DEVICES = 5_000, 64
LATEST = 2**32
"""Seconds since 1970 (the year 2106): a later time is nobody's."""

LONGEST_NAME, LONGEST_TEXT = 100, 1200

LONGEST_TAIL = 16 << 20
"""Bytes that are read of a log, from its end."""
MOST_LOG_LINES = 1000
MARGIN = 30.0
"""Seconds before the first and after the last line of the metrics that still belong to the VM."""


class Unreadable(Exception):
    """There is nothing to make a report of; the text says why, and what to do."""

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status
        """The exit status: 2 for a file of another kind."""


class Sample(NamedTuple):
    """What a VM had used at one moment; `disks` are bytes read and written, `nics` bytes received and sent."""

    time: float
    state: str
    cpu_seconds: float
    vcpus: float
    memory_kib: float
    rss_kib: float
    disks: dict[str, tuple[float, float]]
    nics: dict[str, tuple[float, float]]

    @classmethod
    def of(cls, time: float, line: Mapping[str, object]) -> "Sample":
        """The sample that a line of the file is."""
        return cls(
            time,
            _text(line.get("state"), LONGEST_NAME),
            _number(line.get("cpu_seconds")),
            max(1.0, _number(line.get("vcpus"))),
            _number(line.get("memory_kib")),
            _number(line.get("rss_kib")),
            dict(_pairs(line.get("block"), "read_bytes", "write_bytes")),
            dict(_pairs(line.get("network"), "rx_bytes", "tx_bytes")),
        )


class Event(NamedTuple):
    """Something that has happened; `seconds` is how long it took, up to `time`; `size` in bytes, 0 where unknown."""

    time: float
    name: str
    state: str
    seconds: float
    size: float
    error: str
    detail: str
    vm_name: str
    pid: int

    @classmethod
    def of(cls, time: float, line: Mapping[str, object]) -> "Event":
        """The event that a line of the file is."""
        return cls(
            time,
            _text(line.get("event"), LONGEST_NAME),
            _text(line.get("state"), LONGEST_NAME),
            min(_number(line.get("seconds")), time),
            _number(line.get("bytes")),
            _text(line.get("error"), LONGEST_TEXT),
            _text(line.get("reason"), LONGEST_TEXT),
            _text(line.get("name"), LONGEST_NAME),
            int(_number(line.get("pid"))),
        )


class Story:
    """All that a file tells, in the order of time."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.events: list[Event] = []
        self.bad_lines = 0
        """Lines that make no sense."""
        self.how_it_ended = self.exit_code = ""
        """From the ``vm_exit.json`` in the same directory; empty where it does not say."""
        self.left_out = 0
        """Events beyond what is kept, and everything beyond `LARGEST_FILE` or `MOST_LINES` as one."""

    @property
    def begin(self) -> float:
        """When the first thing that is known of began."""
        times = [event.time - event.seconds for event in self.events] + [each.time for each in self.samples[:1]]
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
        with open_regular(path) as file:
            story = read_from(file)
        story.how_it_ended, story.exit_code = _ending(os.path.join(os.path.dirname(path), EXIT_FILE))
    except FileNotFoundError:
        raise Unreadable(
            f"There is no {path}. A job brings its {NAME} home from machines with VM_METRICS_INTERVAL above 0."
        ) from None
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}.") from error
    if not (story.samples or story.events):
        raise Unreadable(
            f"{path} has no line of a VM's metrics in it. Name the directory or the {NAME} of a job.",
            status=2 if story.bad_lines else 1,
        )
    return story


def read_from(file: BinaryIO) -> Story:
    """The story in an open file."""
    story = Story()
    for text in _lines(file, story):
        line = parse(text)
        when = None if line is None else line.get("time")
        if line is None or not is_counter(when) or when > LATEST:  # type: ignore[operator]
            story.bad_lines += 1
        elif isinstance(line.get("event"), str):
            if len(story.events) < MOST_EVENTS:
                story.events.append(Event.of(float(when), line))  # type: ignore[arg-type]
            else:
                story.left_out += 1
        elif is_counter(line.get("cpu_seconds")):
            story.samples.append(Sample.of(float(when), line))  # type: ignore[arg-type]
        else:
            story.bad_lines += 1
    # Lines are written in the order of time, but a clock may be put right in between.
    story.samples.sort(key=lambda sample: sample.time)
    story.events.sort(key=lambda event: event.time)
    return story


def log_lines(path: str, story: Story) -> list[tuple[float, str]]:
    """When, and what, of the lines of one log of the daemon's that are about a VM. Raises `Unreadable`.

    All servers of a machine write to one log, each with its own process id, which a start's line of the metrics
    names.
    """
    pids = {str(event.pid) for event in story.events if event.pid}
    begin, end = story.begin - MARGIN, story.end + MARGIN
    try:
        found = [
            (line.time, line.text)
            for line in files.log_lines(path, LONGEST_TAIL)
            if begin <= line.time <= end and (line.pid in pids or (story.name and story.name in line.text))
        ]
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}. Its readers are the administrators.") from error
    return found[:MOST_LOG_LINES]


def _ending(path: str) -> tuple[str, str]:
    """How the VM ended, and the guest's exit code."""
    try:
        with open_regular(path, follow=False) as file:
            found = parse(file.read(LONGEST_LINE))
    except OSError:
        return "", ""
    code = (found or {}).get("exit_code")
    is_code = isinstance(code, int) and not isinstance(code, bool) and 0 <= code <= 255
    return _text((found or {}).get("ended_by"), LONGEST_NAME), str(code) if is_code else ""


def _lines(file: BinaryIO, story: Story) -> Iterator[bytes]:
    left, lines = LARGEST_FILE, 0
    while text := file.readline(LONGEST_LINE + 1):
        left -= len(text)
        lines += 1
        if left < 0 or lines > MOST_LINES:
            story.left_out += 1
            return
        if len(text) > LONGEST_LINE:
            story.bad_lines += 1
            while text and not text.endswith(b"\n") and left > 0:
                text = file.readline(LONGEST_LINE)
                left -= len(text)
        elif text.strip():
            yield text


def _pairs(devices: object, one: str, other: str) -> Iterator[tuple[str, tuple[float, float]]]:
    if isinstance(devices, dict):
        for name, figures in list(devices.items())[:MOST_DEVICES]:
            if isinstance(figures, dict) and (one in figures or other in figures):
                yield _text(name, LONGEST_NAME), (_number(figures.get(one)), _number(figures.get(other)))


def _number(value: object) -> float:
    return float(value) if is_counter(value) else 0.0  # type: ignore[arg-type]


def _text(value: object, longest: int) -> str:
    return escape(value[:longest]) if isinstance(value, str) else ""
