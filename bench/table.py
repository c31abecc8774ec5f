"""The table of both servers: its rows with their goals, the page that it is on, and the comparison with that.

A figure is a median with its quartiles. The ratio of the two servers counts, of the values of one round, which were
measured one right after the other: noise of a round is in both. Memory hardly jitters.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

OURS, REFERENCE, FLOOR = "this", "reference", "floor"

FIFTH = 0.2
"""A ratio that is further from that of the page is not what the page says."""
TENTH = 0.1
"""Below this a ratio is as good as any."""
COUNT = 0.02
"""The same for memory and bytes, by which the guest's pages move an image."""

MICRO, MILLI, SECONDS, MIB = "µs", "ms", "s", "MiB"
HOURLY, A_MINUTE, TIMES = "s/h", "/min", "times"
FACTOR = {
    MICRO: 1000.0, MILLI: 1.0, SECONDS: 1 / 1000, MIB: 1 / 1024, HOURLY: 1 / 1000, A_MINUTE: 1.0, TIMES: 1.0,
}  # fmt: skip
"""The factor of a value of `stopwatch` (milliseconds, KiB, a count) by the unit of its row."""


class Goal(NamedTuple):
    """The most that a figure should be: a ratio to the reference's, or a value of its own."""

    most: float
    ratio: bool = True

    def words(self, unit: str) -> str:
        return f"{self.most:.1f}" if self.ratio else f"{self.most:g} {unit}"


class Row(NamedTuple):
    """A row of the table: its name for `stopwatch`, the part that measures it, and what it is in words."""

    key: str
    part: str
    title: str
    unit: str
    goal: Goal | None = None
    remark: str = ""


AS_FAST = Goal(1.0)
NO_WAIT = Goal(2, ratio=False)
NO_MORE = Goal(1.2, ratio=False)


READY = "0.3 s after ASYNC_MODE_ON: condor_starter takes a second."
FAMILY = "Of all its processes: the guardian of the VM is included."
OWN = "Anonymous pages: what no other process shares."
DATA = "Pages of programs and libraries that were written to: their variables, and addresses that the loader fills in."
SHARED = "PSS divides a page by the processes that share it; beside the servers those are libvirtd's and HTCondor's."
HALF = "Half of the guest's memory is random, which zlib makes no smaller, the rest untouched; files are on a tmpfs."
MOVED = "As HTCondor's file transfer counts it, and what it fills on the disk; without the guest's own disk."
MEANWHILE = "99 % of the VERSIONs that were sent every 5 ms are answered in this time: in START, and in those three."
HALTED = "All guests but one have halted; the one server has so many VMs."
SILENT = "Of all its processes, while the guest has halted and nobody asks; 120 s were watched."
SLEEPS = "The reference sleeps for two seconds when its VM is gone."

NO_VM, LIVE, MANY, FIFTY, QUIET = "without VM", "VM", "many", "fifty", "silent"


def _with_memory(part: str, mib: int) -> Iterator[Row]:
    for command in ("SUSPEND", "RESUME", "CHECKPOINT"):
        goal = Goal(1.2) if command == "CHECKPOINT" else Goal(1.1)
        yield Row(f"{command} {mib}", part, f"{command}, {part}", SECONDS, goal, HALF)
    yield Row(f"SUSPEND {mib} bytes", part, f"bytes of the SUSPEND, {part}", MIB, remark=MOVED)
    yield Row(f"CHECKPOINT {mib} bytes", part, f"bytes of the CHECKPOINT, {part}", MIB, remark=MOVED)
    yield Row(f"CHECKPOINT {mib} on disk", part, f"on disk of the CHECKPOINT, {part}", MIB, remark=MOVED)
    yield Row(f"meanwhile START {mib}", part, f"VERSION's p99 in START, {part}", MILLI, NO_WAIT, MEANWHILE)
    yield Row(f"meanwhile {mib}", part, f"VERSION's p99 in the three, {part}", MILLI, NO_WAIT, MEANWHILE)


ROWS = (
    Row("greeting", NO_VM, "from exec to the greeting", MILLI, AS_FAST),
    Row("first VERSION", NO_VM, "VERSION right after the greeting", MICRO),
    Row("first reply", NO_VM, "from exec to the first reply", MILLI, AS_FAST),
    Row("VERSION", NO_VM, "VERSION", MICRO, AS_FAST),
    Row("lone VERSION", NO_VM, "VERSION after a pause", MICRO),
    Row("STATUS", NO_VM, "STATUS and RESULTS, no VM", MICRO, AS_FAST),
    Row("CLASSAD", NO_VM, "job ad, a line at a time", MICRO, AS_FAST),
    Row("CLASSAD at once", NO_VM, "job ad, at once", MICRO, AS_FAST),
    Row("live STATUS", LIVE, "STATUS and RESULTS, a VM", MICRO, AS_FAST),
    Row("probe", "probe", "the probe", MILLI, Goal(400, ratio=False)),
    Row("START", LIVE, "START to its result", MILLI, Goal(1.1), READY),
    Row("QUIT", LIVE, "QUIT to the end, a VM", MILLI, remark=SLEEPS),
    *_with_memory("256 MiB", 256),
    *_with_memory("1 GiB", 1024),
    Row("idle Rss", NO_VM, "RSS without a job", MIB),
    Row("idle Anonymous", NO_VM, "its own without a job", MIB, remark=OWN),
    Row("live Rss", LIVE, "RSS with a VM", MIB, remark=FAMILY),
    Row("live Anonymous", LIVE, "its own with a VM", MIB, Goal(16, ratio=False), OWN),
    Row("live of files", LIVE, "data of its libraries, a VM", MIB, remark=DATA),
    *(
        Row(f"{kind} {count}", MANY, f"PSS of {count} {words}", MIB, remark=SHARED)
        for kind, one, more in (("Pss", "daemon", "daemons"), ("live Pss", "with a VM", "with a VM each"))
        for count, words in ((1, one), (10, more), (20, more))
    ),
    Row("VERSION of fifty", FIFTY, "VERSION, 50 VMs", MICRO, remark=HALTED),
    Row("VERSION of fifty to one", FIFTY, "VERSION, 50 VMs to one VM", TIMES, NO_MORE, HALTED),
    Row("STATUS of fifty", FIFTY, "STATUS, 50 VMs", MICRO, remark=HALTED),
    Row("STATUS of fifty to one", FIFTY, "STATUS, 50 VMs to one VM", TIMES, NO_MORE, HALTED),
    Row("silent CPU", QUIET, "CPU of an hour, a silent guest", HOURLY, Goal(0.5, ratio=False), SILENT),
    Row("silent switches", QUIET, "context switches, a silent guest", A_MINUTE, remark=SILENT),
)


def parts(words: Sequence[str]) -> list[str]:
    """Return the parts of the measurement that have a row with all of the words in its title."""
    chosen = [row for row in ROWS if all(word.casefold() in row.title.casefold() for word in words)]
    return list(dict.fromkeys(row.part for row in chosen))


class Spread(NamedTuple):
    """A median and its quartiles."""

    value: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Find the median and the quartiles; all the same for a single value."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return Spread(statistics.median(values), low, high)


class Line(NamedTuple):
    """The figures of a row; no floor where it has none."""

    row: Row
    ours: Spread
    theirs: Spread
    ratio: Spread
    floor: float | None
    values: dict[str, list[float]]
    """Every single value, by server."""

    def is_above_goal(self) -> bool:
        goal = self.row.goal
        return goal is not None and (self.ratio if goal.ratio else self.ours).value > goal.most


def summarize(found: Iterable[Mapping[str, Any]]) -> list[Line]:
    """Make lines of the values of `stopwatch`, in the order of `ROWS`."""
    values: dict[str, dict[str, list[float]]] = {}
    for value in found:  # of each server and row one in a round, in the order of rounds
        values.setdefault(value["row"], {}).setdefault(value["server"], []).append(value["value"])
    return [_line(row, values[row.key]) for row in ROWS if row.key in values]


def _line(row: Row, found: Mapping[str, Sequence[float]]) -> Line:
    values = {server: [value * FACTOR[row.unit] for value in of_server] for server, of_server in found.items()}
    ours, theirs = values[OURS], values[REFERENCE]
    ratios = [a / b if b else float("inf") for a, b in zip(ours, theirs, strict=True)]
    # A server that answers nobody while libvirt is at work is no floor for one that waits.
    floor = statistics.median(values[FLOOR]) if FLOOR in values and row.goal is not NO_WAIT else None
    return Line(row, spread(ours), spread(theirs), spread(ratios), floor, values)


# ---- output -----------------------------------------------------------------------------------------


def head(versions: Mapping[str, str]) -> str:
    return (
        f"{datetime.now(UTC):%Y-%m-%d}: vmgahp {versions[OURS]} by Python {versions['python']},"
        f" HTCondor {versions[REFERENCE]}, libvirt {versions['libvirt']}; {os.cpu_count()} processors"
    )


def table(lines: Sequence[Line]) -> str:
    """Lay the lines out as text: medians and ratios with their quartiles, remarks below."""
    remarks = list(dict.fromkeys(line.row.remark for line in lines if line.row.remark))
    cells = [["", "", OURS, REFERENCE, f"{OURS} / {REFERENCE}", "goal", FLOOR, ""]]
    for line in lines:
        row = line.row
        goal = (row.goal.words(row.unit) if row.goal else "") + (" !" if line.is_above_goal() else "")
        mark = f"[{remarks.index(row.remark) + 1}]" if row.remark else ""
        floor = "" if line.floor is None else f"{line.floor:.{_digits(line.floor)}f}"
        figures = [_figure(line.ours), _figure(line.theirs), _figure(line.ratio, 2)]
        cells.append([row.title, row.unit, *figures, goal, floor, mark])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    text = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    text += ["", "Medians (quartiles); a ratio is the median of the rounds' ratios; ! is above the goal."]
    text += [f"[{number}] {remark}" for number, remark in enumerate(remarks, start=1)]
    return "\n".join(text)


def _figure(figure: Spread, digits: int | None = None) -> str:
    """Word a median, with its quartiles where these say more."""
    digits = _digits(figure.value) if digits is None else digits
    value, low, high = (f"{number:.{digits}f}" for number in figure)
    return value if low == high else f"{value} ({low}-{high})"


def _digits(value: float) -> int:
    """Choose the decimals: three digits are more than such a figure is good for already."""
    return 2 if value < 10 else 1 if value < 100 else 0


def report(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Make the lines JSON for a program, every single value included."""
    return [
        {
            "name": line.row.key,
            "title": line.row.title,
            "unit": line.row.unit,
            "goal": line.row.goal and line.row.goal._asdict(),
            OURS: line.ours._asdict(),
            REFERENCE: line.theirs._asdict(),
            FLOOR: line.floor,
            "ratio": line.ratio._asdict(),
            "values": line.values,
        }
        for line in lines
    ]


# ---- the page ---------------------------------------------------------------------------------------


def written(page: str, name: str, text: str) -> str:
    """Put a text between the marks of its name on a page. Raises `ValueError` where the page has not one place."""
    place = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.DOTALL)
    page, found = place.subn(lambda _: f"{text}\n", page)
    if found != 1:
        raise ValueError(f"the page has {found} places for {name}")
    return page


_SPREAD = r"([\d.]+)(?: \([^)]*\))?"
_LINE = re.compile(rf"^(\S.*?) {{2,}}(\S+) +{_SPREAD} +{_SPREAD} +{_SPREAD}(?: |$)", re.MULTILINE)


def departures(page: str, lines: Sequence[Line]) -> dict[str, str]:
    """Find the figures that are no longer as the page says, each with its part.

    A count departs that differs, a ratio that three rounds of four show off by more than a fifth, and of a server by
    itself, where the reference's next to nothing is no measure, a figure that is off by as much.
    """
    known = {match[1]: (float(match[3]), float(match[5])) for match in _LINE.finditer(page)}
    text = {}
    for line in lines:
        title, unit = line.row.title, line.row.unit
        if title not in known:
            text[f"{title}: the page does not have it"] = line.row.part
            continue
        figure, ratio = known[title]
        if unit in (MIB, HOURLY, A_MINUTE):
            if abs(line.ours.value - figure) > max((COUNT if unit == MIB else FIFTH) * figure, 0.01):
                text[f"{title}: {_figure(line.ours)} {unit}, the page says {figure:g}"] = line.row.part
            continue
        low, high, ratio = (max(value, TENTH) for value in (line.ratio.low, line.ratio.high, ratio))
        if low > ratio * (1 + FIFTH) or high < ratio * (1 - FIFTH):
            text[f"{title}: {_figure(line.ratio, 2)} of the reference, the page says {ratio:g}"] = line.row.part
    return text
