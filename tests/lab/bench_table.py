"""The table of the bench: its rows with their goals, the statistics, the page that it is on, and the check of that.

A value is worth as much as its interval. What counts is the ratio of the two servers, which were measured one right
after the other; where its interval spans 1 there is no difference to speak of. Instructions and memory hardly jitter.
"""

from __future__ import annotations

import os
import random
import re
import statistics
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

OURS, REFERENCE, FLOOR = "this", "reference", "floor"
RESAMPLES = 2000

FIFTH = 0.2
"""A ratio that is further from that of the page is not what the page says."""
TENTH = 0.1
"""Below this a ratio is as good as any."""
COUNT = 0.02
"""So with a count: the seed of Python's hashes moves instructions by half of this, the guest's own pages an image."""

BEGIN, END = "<!-- bench -->", "<!-- /bench -->"

MICRO, MILLI, SECONDS, MIB = "µs", "ms", "s", "MiB"
THOUSAND, HOURLY, A_MINUTE, TIMES, CALLS = "1000", "s/h", "/min", "times", "calls"
SCALE = {
    MICRO: 1000.0, MILLI: 1.0, SECONDS: 1 / 1000, MIB: 1 / 1024, THOUSAND: 1 / 1000, HOURLY: 1 / 1000, A_MINUTE: 1.0,
    TIMES: 1.0, CALLS: 1.0,
}  # fmt: skip
"""What a value of `stopwatch` (milliseconds, KiB, a count) is multiplied with."""
COUNTS = (MIB, THOUSAND, CALLS)


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
LEAST_BYTES = Goal(0.6)
NO_WAIT = Goal(2, ratio=False)
NO_MORE = Goal(1.2, ratio=False)

USER = "In user mode, as the processor counts them. The seed of Python's hashes moves them by 1 %."
NO_COUNTER = (
    "This machine's processor counts no instructions for us (perf_event_open says no), so these are the"
    " calls of read and write that the server's /proc/PID/io counts."
)
PROOF = "What is known of KVM in this boot was removed before."
KNOWN = (
    "After a probe, as on any machine that gets a job, and 0.3 s after ASYNC_MODE_ON: condor_starter takes a second."
)
FAMILY = "Of all its processes: the guardian of the VM is included."
OWN = "Anonymous pages: what no other process shares."
DATA = "Pages of programs and libraries that were written to: their variables, and addresses that the loader fills in."
SHARED = "PSS divides a page by the processes that share it; beside the servers those are libvirtd's and HTCondor's."
HALF = "Half of the guest's memory is random, which zlib makes no smaller, the rest untouched; files are on a tmpfs."
MOVED = "As HTCondor's file transfer counts it, and what it fills on the disk; without the guest's own disk."
MIXED = "Of the used half one number in four is random, and the others rise: zstd leaves as much of programs and text."
MEANWHILE = "99 % of the VERSIONs that were sent every 5 ms are answered in this time: in START, and in those three."
HALTED = "All guests but one have halted; the one server has so many VMs."
SILENT = "Of all its processes, while the guest has halted and nobody asks; 120 s were watched."
SLEEPS = "The reference sleeps for two seconds when its VM is gone."

NO_VM, LIVE, MANY, FIFTY, QUIET = "without VM", "VM", "many", "fifty", "silent"


def _with_memory(part: str, mib: int) -> Iterator[Row]:
    for command in ("SUSPEND", "RESUME", "CHECKPOINT"):
        yield Row(f"{command} {mib}", part, f"{command}, {part}", SECONDS, remark=HALF)
    yield Row(f"SUSPEND {mib} bytes", part, f"bytes of the SUSPEND, {part}", MIB, remark=MOVED)
    yield Row(f"CHECKPOINT {mib} bytes", part, f"bytes of the CHECKPOINT, {part}", MIB, LEAST_BYTES, MOVED)
    yield Row(f"CHECKPOINT {mib} on disk", part, f"on disk of the CHECKPOINT, {part}", MIB, LEAST_BYTES, MOVED)
    yield Row(f"meanwhile START {mib}", part, f"VERSION's p99 in START, {part}", MILLI, NO_WAIT, MEANWHILE)
    yield Row(f"meanwhile {mib}", part, f"VERSION's p99 in the three, {part}", MILLI, NO_WAIT, MEANWHILE)


def _counted(key: str, part: str, title: str) -> Iterator[Row]:
    yield Row(f"{key} instructions", part, f"instructions of {title}", THOUSAND, remark=USER)
    yield Row(f"{key} calls", part, f"calls of {title}", CALLS, remark=NO_COUNTER)


ROWS = (
    Row("greeting", NO_VM, "from exec to the greeting", MILLI, AS_FAST),
    Row("first VERSION", NO_VM, "VERSION right after the greeting", MICRO),
    Row("first reply", NO_VM, "from exec to the first reply", MILLI),
    Row("VERSION", NO_VM, "VERSION", MICRO, AS_FAST),
    Row("lone VERSION", NO_VM, "VERSION after a pause", MICRO),
    Row("STATUS", NO_VM, "STATUS and RESULTS, no VM", MICRO, AS_FAST),
    Row("CLASSAD", NO_VM, "job ad, a line at a time", MICRO, AS_FAST),
    Row("CLASSAD at once", NO_VM, "job ad, at once", MICRO, AS_FAST),
    Row("live STATUS", LIVE, "STATUS and RESULTS, a VM", MICRO, AS_FAST),
    *_counted("VERSION", NO_VM, "VERSION"),
    *_counted("STATUS", NO_VM, "STATUS, no VM"),
    *_counted("CLASSAD", NO_VM, "a job ad"),
    *_counted("live STATUS", LIVE, "STATUS, a VM"),
    *_counted("VERSION of fifty", FIFTY, "VERSION, 50 VMs"),
    *_counted("probe", "probe", "the probe"),
    *_counted("START", "START anew", "a job ad and START"),
    Row("probe", "probe", "the probe", MILLI, Goal(3.0), KNOWN),
    Row("probe anew", "probe", "the probe after a boot", MILLI, Goal(400, ratio=False), PROOF),
    Row("START", LIVE, "START to its result", MILLI, Goal(1.2), KNOWN),
    Row("START anew", "START anew", "START without a probe", MILLI, remark=PROOF),
    Row("QUIT", LIVE, "QUIT to the end, a VM", MILLI, remark=SLEEPS),
    *_with_memory("256 MiB", 256),
    *_with_memory("1 GiB", 1024),
    Row("CHECKPOINT 256, mixed", "mixed", "CHECKPOINT, 256 MiB, mixed", SECONDS, remark=MIXED),
    Row("CHECKPOINT 256, mixed bytes", "mixed", "its bytes, 256 MiB, mixed", MIB, LEAST_BYTES, MIXED),
    Row("idle Rss", NO_VM, "RSS without a job", MIB),
    Row("idle Anonymous", NO_VM, "its own without a job", MIB, remark=OWN),
    Row("live Rss", LIVE, "RSS with a VM", MIB, remark=FAMILY),
    Row("live Anonymous", LIVE, "its own with a VM", MIB, Goal(9, ratio=False), OWN),
    Row("live of files", LIVE, "data of its libraries, a VM", MIB, remark=DATA),
    *(
        Row(f"{kind} {count}", MANY, f"PSS of {count} {words}", MIB, goal if count == 10 else None, SHARED)
        for kind, one, more, goal in (
            ("Pss", "daemon", "daemons", None),
            ("live Pss", "with a VM", "with a VM each", Goal(1.7)),
        )
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
    """The parts of the measurement that rows with all of the words in their title belong to."""
    chosen = [row for row in ROWS if all(word.casefold() in row.title.casefold() for word in words)]
    return list(dict.fromkeys(row.part for row in chosen))


class Spread(NamedTuple):
    """A figure and the interval that it comes with."""

    value: float
    low: float
    high: float


Samples = Mapping[str, Mapping[str, Mapping[int, float]]]
"""Row -> server -> round -> value."""


# ---- statistics -------------------------------------------------------------------------------------


def quartiles(values: Sequence[float]) -> Spread:
    """The median with the quartiles; all the same for a single value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high)


def ratio(ours: Sequence[float], theirs: Sequence[float], seed: int = 1) -> Spread:
    """The ratio of the medians, with the interval that 95 % of bootstrap resamples fall into.

    The two come in pairs, one a round, and are drawn in pairs: what a round's noise does to both is not
    taken for a difference between them. The drawing is the same for the same values.
    """
    pairs = list(zip(ours, theirs, strict=True))
    draw = random.Random(seed)
    resampled = sorted(_ratio_of_medians(draw.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    edge = RESAMPLES // 40
    return Spread(_ratio_of_medians(pairs), resampled[edge], resampled[-edge - 1])


def _ratio_of_medians(pairs: Sequence[tuple[float, float]]) -> float:
    theirs = statistics.median(b for _, b in pairs)
    return statistics.median(a for a, _ in pairs) / theirs if theirs else float("inf")


class Line(NamedTuple):
    """What is known of a row in the end; no floor where it has none."""

    row: Row
    ours: Spread
    theirs: Spread
    ratio: Spread
    floor: float | None = None

    def above_goal(self) -> bool:
        goal = self.row.goal
        return goal is not None and (self.ratio if goal.ratio else self.ours).value > goal.most


def collect(values: Iterable[Mapping[str, Any]]) -> Samples:
    """Put the values of `stopwatch` in their places."""
    samples: dict[str, dict[str, dict[int, float]]] = {}
    for found in values:
        of_server = samples.setdefault(found["row"], {}).setdefault(found["server"], {})
        of_server[found["round"]] = found["value"]
    return samples


def summarize(samples: Samples) -> list[Line]:
    """The lines of all rows that were measured, in the order of `ROWS`; rounds without a pair do not count."""
    lines = []
    for row in ROWS:
        of_row = samples.get(row.key, {})
        ours, theirs, floor = (of_row.get(server, {}) for server in (OURS, REFERENCE, FLOOR))
        rounds = sorted(ours.keys() & theirs.keys())
        if rounds:
            scale = SCALE[row.unit]
            a, b = ([values[turn] * scale for turn in rounds] for values in (ours, theirs))
            # What answers nobody while libvirt is at work is no floor for who waits.
            least = statistics.median(floor.values()) * scale if floor and row.goal is not NO_WAIT else None
            lines.append(Line(row, quartiles(a), quartiles(b), ratio(a, b), least))
    return lines


# ---- output -----------------------------------------------------------------------------------------


def head(versions: Mapping[str, str]) -> str:
    return (
        f"{datetime.now(UTC):%Y-%m-%d}: vmgahp {versions[OURS]} by Python {versions['python']},"
        f" HTCondor {versions[REFERENCE]}, libvirt {versions['libvirt']}; {os.cpu_count()} processors"
    )


def table(lines: Sequence[Line]) -> str:
    """The lines as text: medians with quartiles, ratios with their intervals, remarks below."""
    remarks = list(dict.fromkeys(line.row.remark for line in lines if line.row.remark))
    cells = [["", "", OURS, REFERENCE, f"{OURS} / {REFERENCE}", "goal", FLOOR, ""]]
    for line in lines:
        row = line.row
        figures = [_figure(spread, _digits(spread.value)) for spread in (line.ours, line.theirs)]
        least = "" if line.floor is None else _short(line.floor)
        goal = (row.goal.words(row.unit) if row.goal else "") + (" !" if line.above_goal() else "")
        mark = f"[{remarks.index(row.remark) + 1}]" if row.remark else ""
        cells.append([row.title, row.unit, *figures, _figure(line.ratio, 2), goal, least, mark])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    text = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    text += [
        "",
        "Medians (quartiles); ratio of the medians (95 % of resamples); the most by the goal, ! where above it.",
    ]
    text += [f"[{number}] {remark}" for number, remark in enumerate(remarks, start=1)]
    return "\n".join(text)


def _figure(spread: Spread, digits: int) -> str:
    """The value with its interval, where that says more than the value."""
    value, low, high = (f"{figure:.{digits}f}" for figure in spread)
    return value if low == high else f"{value} ({low}-{high})"


def _digits(value: float) -> int:
    """Three digits are more than such a figure is good for already."""
    return 2 if value < 10 else 1 if value < 100 else 0


BESIDE = {
    "VERSION": ["VERSION instructions"],
    "live STATUS": ["live STATUS instructions"],
    "probe": ["probe instructions", "probe anew"],
    "probe anew": ["probe instructions", "probe"],
    "START": ["START instructions", "START anew"],
    "live Anonymous": ["idle Anonymous", "live of files"],
    "live Pss 10": ["live Pss 1", "live Anonymous"],
    **{row.key: ["CHECKPOINT 256, mixed bytes"] for row in ROWS if row.goal is LEAST_BYTES and row.part != "mixed"},
}
"""What else was measured that says what a row is made of."""


def distances(lines: Sequence[Line]) -> str:
    """A paragraph for each figure above its goal: how far it is, what of that is the floor, and what was seen too."""
    by_key = {line.row.key: line for line in lines}
    text = []
    for line in lines:
        goal = line.row.goal
        if goal is None or not line.above_goal():
            continue
        most = goal.most * line.theirs.value if goal.ratio else goal.most
        words = f"- **{line.row.title}**: {_amount(line, line.ours.value)} where the goal allows {_short(most)}."
        if line.floor is not None:
            words += f" The floor is {_amount(line, line.floor)}, "
            words += "above the goal as well" if line.floor > most else "within the goal"
            rest = line.ours.value - line.floor
            own = rest > COUNT * line.ours.value
            words += f"; {_amount(line, rest)} are this server's own." if own else "; this server adds nothing to it."
        beside = [
            f"{other.row.title} {_amount(other, other.ours.value)}"
            + ("" if other.floor is None else f", floor {_short(other.floor)}")
            + f", reference {_short(other.theirs.value)}"
            for other in map(by_key.get, BESIDE.get(line.row.key, ()))
            if other
        ]
        if beside:
            words += f" Beside it: {'; '.join(beside)}."
        text.append(textwrap.fill(words, 120, subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(text) or "None: every figure that has a goal meets it."


def _amount(line: Line, value: float) -> str:
    return f"{_short(value)} {line.row.unit}" if line.row.unit != THOUSAND else f"{_short(value)} thousand"


def _short(value: float) -> str:
    return f"{value:.{_digits(value)}f}"


def report(lines: Sequence[Line], samples: Samples, versions: Mapping[str, str]) -> dict[str, Any]:
    """The same for a program, every single value included."""
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "processors": os.cpu_count(),
        "versions": dict(versions),
        "rows": [
            {
                "name": line.row.key,
                "title": line.row.title,
                "unit": line.row.unit,
                "goal": line.row.goal and {"most": line.row.goal.most, "ratio": line.row.goal.ratio},
                OURS: line.ours._asdict(),
                REFERENCE: line.theirs._asdict(),
                FLOOR: line.floor,
                "ratio": line.ratio._asdict(),
                "values": {
                    server: [value * SCALE[line.row.unit] for value in of_round.values()]
                    for server, of_round in samples[line.row.key].items()
                },
            }
            for line in lines
        ],
    }


# ---- the page ---------------------------------------------------------------------------------------


def written(page: str, lines: Sequence[Line], versions: Mapping[str, str]) -> str:
    """The page with what was measured between its marks."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    block = f"```\n{head(versions)}\n\n{table(lines)}\n```\n\n## Above the goal\n\n{distances(lines)}\n"
    return f"{before}{BEGIN}\n{block}{END}{after}"


_SPREAD = r"([\d.]+)(?: \([^)]*\))?"
_LINE = re.compile(rf"^(\S.*?) {{2,}}(\S+) +{_SPREAD} +{_SPREAD} +{_SPREAD}(?: |$)")


def committed(page: str) -> dict[str, tuple[float, float]]:
    """Title -> this server's figure and its ratio to the reference's, as the page has them."""
    block = page.split(BEGIN)[1].split(END)[0]
    found = filter(None, map(_LINE.match, block.splitlines()))
    return {match[1]: (float(match[3]), float(match[5])) for match in found}


def departures(page: str, lines: Sequence[Line]) -> dict[str, str]:
    """What is no longer as the page says, and the part it belongs to.

    That is a count which differs, a ratio which is off by more than a fifth for sure, and of what a server does by
    itself, where the reference's next to nothing is no measure, a figure that is off by as much.
    """
    known = committed(page)
    text = {}
    for line in lines:
        title, unit = line.row.title, line.row.unit
        figure, of_page = known.get(title, (0.0, 0.0))
        now = f"{_figure(line.ours, _digits(line.ours.value))} {unit}"
        if title not in known:
            text[f"{title}: the page does not have it"] = line.row.part
        elif unit in (*COUNTS, HOURLY, A_MINUTE):
            if abs(line.ours.value - figure) > max((COUNT if unit in COUNTS else FIFTH) * figure, 0.01):
                text[f"{title}: {now}, the page says {figure:g}"] = line.row.part
        elif max(line.ratio.low, TENTH) > max(of_page, TENTH) * (1 + FIFTH) or max(line.ratio.high, TENTH) < max(
            of_page, TENTH
        ) * (1 - FIFTH):
            text[f"{title}: {_figure(line.ratio, 2)} of the reference, the page says {of_page:g}"] = line.row.part
    return text
