"""The picture of the report: states, use and events over one axis of time, as SVG.

Built by hand with lxml: what is wanted is a few step lines with gaps, a band and markers over a common axis,
and no script; the libraries that draw that take tens of MiB, or put a script into the picture.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from lxml import etree
from lxml.builder import ElementMaker

from vmgahp import lifecycle
from vmgahp.commands import units
from vmgahp.commands.report import series
from vmgahp.commands.report.reader import Event, Story
from vmgahp.commands.report.series import Figures, Rate, Span

Element = etree._Element
X = Callable[[float], float]
"""Where in the picture a moment is."""

SVG = "http://www.w3.org/2000/svg"
_MAKER: Any = ElementMaker(namespace=SVG, nsmap={None: SVG})


class Frame(NamedTuple):
    """How wide the picture is, and the space for the labels on its left."""

    name: str
    width: int
    left: int
    most_times: int
    """Labels of the axis of time."""

    @property
    def plot(self) -> int:
        return self.width - self.left - RIGHT


RIGHT = 22
WIDE, NARROW = Frame("wide", 960, 84, units.MOST_TIMES), Frame("narrow", 360, 66, 4)
"""The picture for all that has room, and that for a phone."""
HEIGHT, ABOVE = 104, 46
"""Of a chart, and of the space above it with its title and legend."""
TOP, BAND, BELOW = 66, 24, 58
"""Where the band of states begins, its height, and the space for the axis of time."""
SHORT = 120.0
"""Seconds of a life below which the axis counts them, and does not tell the time of day."""
LEAST_SPAN = 0.3
"""Units of a state and to the one before it, below which there is nothing to see of it any more."""
MOST_FLAGS, LONGEST_LABEL = 500, 20
"""Events that are marked in the picture, and the characters of an event's name there; the table has them all."""

STATE_NAMES = {
    lifecycle.RUNNING: "running",
    lifecycle.SOFT_SUSPENDED: "paused in memory",
    lifecycle.SUSPENDED: "suspended to disk",
    lifecycle.CHECKPOINTED: "checkpointed",
    series.BUSY: "starting, saving, restoring",
}
"""State -> what the legend calls it."""

STYLE = """
.vm-report { --ink: #1f2328; --soft: #59636e; --grid: #d8dee4; --ground: #ffffff; --panel: #f6f8fa;
  --one: #0969da; --two: #bc4c00; --run: #2da44e; --pause: #d4a72c; --save: #54aeff; --check: #8250df;
  --busy: #8c959f; --bad: #cf222e; }
@media (prefers-color-scheme: dark) { .vm-report { --ink: #e6edf3; --soft: #9198a1; --grid: #30363d;
  --ground: #0d1117; --panel: #151b23; --one: #58a6ff; --two: #f0883e; --run: #3fb950; --pause: #d29922;
  --save: #388bfd; --check: #a371f7; --busy: #6e7681; --bad: #f85149; } }
@media print { .vm-report { --ink: #000000; --soft: #333333; --grid: #cccccc; --ground: #ffffff;
  --panel: #ffffff; --one: #0550ae; --two: #953800; --run: #2da44e; --pause: #d4a72c; --save: #54aeff;
  --check: #8250df; --busy: #8c959f; --bad: #a40e26; } }
.Running { --state: var(--run); } .SoftSuspended { --state: var(--pause); } .Suspended { --state: var(--save); }
.Checkpointed { --state: var(--check); } .Busy { --state: var(--busy); }
.vm-report text { font: 12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--ink); }
.vm-report .ground { fill: var(--ground); }
.vm-report .panel { fill: var(--panel); }
.vm-report .grid { stroke: var(--grid); stroke-width: 1; }
.vm-report text.head { font-weight: 600; font-size: 13px; }
.vm-report text.soft, .vm-report tspan.soft { fill: var(--soft); font-size: 11px; font-weight: 400; }
.vm-report .line { fill: none; stroke-width: 1.7; stroke-linejoin: round; }
.vm-report .one { stroke: var(--one); }
.vm-report .two { stroke: var(--two); stroke-dasharray: 5 2.5; }
.vm-report .area { fill: var(--one); fill-opacity: 0.13; stroke: none; }
.vm-report rect.state, .vm-report tspan.state { fill: var(--state); }
.vm-report tspan.key { font-weight: 700; stroke: none; }
.vm-report tspan.one { fill: var(--one); } .vm-report tspan.two { fill: var(--two); }
.vm-report .marker { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 2 3; }
.vm-report .marker.checkpoint { stroke: var(--check); stroke-dasharray: none; }
.vm-report .marker.failed { stroke: var(--bad); stroke-dasharray: none; }
.vm-report .flag { fill: var(--soft); }
.vm-report .flag.checkpoint { fill: var(--check); }
.vm-report .flag.failed { fill: var(--bad); }
"""


class Chart(NamedTuple):
    """What one panel shows: its lines by their names, and the marks of its axis, from 0 up."""

    title: str
    unit: str
    lines: list[tuple[str, list[Rate]]]
    marks: list[tuple[float, str]]


def worth_drawing(story: Story, figures: Figures) -> bool:
    """Whether there is anything over time to be seen: figures, or more than one state."""
    return bool(len(series.spans(story)) > 1 or any(_charts(figures)))


def draw(story: Story, figures: Figures, frame: Frame = WIDE) -> Element:
    """The picture as an element."""
    begin, length = story.begin, max(story.end - story.begin, 0.01)

    def x(when: float) -> float:
        return frame.left + frame.plot * min(max((when - begin) / length, 0.0), 1.0)

    charts = list(_charts(figures))
    if length < SHORT:
        marks = units.second_marks(begin, length, frame.most_times)
        caption = f"seconds since {units.clock(begin)} ({units.zone(begin)})"
    else:
        marks = units.time_marks(begin, begin + length, frame.most_times)
        days = " to ".join(sorted({units.clock(when)[:10] for when in (begin, story.end)}))
        caption = f"{days}, local time ({units.zone(story.end)})"
    times = [(x(when), label) for when, label in marks]
    events = [(x(event.time), event) for event in story.events[:MOST_FLAGS]]
    end = TOP + BAND + len(charts) * (ABOVE + HEIGHT)
    parts = [*_band(series.spans(story), x, frame)]
    for number, chart in enumerate(charts):
        parts += _chart(chart, TOP + BAND + ABOVE + number * (ABOVE + HEIGHT), x, times, events, frame)
    parts += _flags(events, frame)
    for at, label in times:
        parts.append(_text(at, end + 17, label, "soft", "middle"))
    parts.append(_text(frame.left + frame.plot / 2, end + 44, caption, "soft", "middle"))
    described = (
        f"From {units.clock(begin)} to {units.clock(story.end)}: the VM's states as a band, and below it "
        f"{', '.join(chart.title for chart in charts) or 'no figures'} over time, with "
        f"{len(series.checkpoints(story.events))} checkpoints as marks. "
        "The same is in the tables of the report as text."
    )
    name = f"vm-report-{frame.name}"
    root = _element(
        "svg",
        f"vm-report {frame.name}",
        _element("title", "", f"What {story.name or 'the VM'} used, and what happened", id=f"{name}-title"),
        _element("desc", "", described, id=f"{name}-text"),
        _element("style", "", STYLE),
        _element("rect", "ground", width=frame.width, height=end + BELOW),
        *parts,
        viewBox=f"0 0 {frame.width} {end + BELOW}",
        role="img",
        width=frame.width,
        height=end + BELOW,
    )
    root.set("aria-labelledby", f"{name}-title {name}-text")
    return root


def _charts(figures: Figures) -> Iterator[Chart]:
    """The charts that have something in them."""
    if peak := _peak(figures.cpu):
        yield Chart("CPU", "per cent of the VM's vCPUs", [("used", figures.cpu)], units.percent_marks(peak))
    memory = [("of the guest", figures.memory), ("occupied on the machine", figures.rss)]
    disks = [("read", figures.disk_read), ("written", figures.disk_written)]
    network = [("received", figures.received), ("sent", figures.sent)]
    for title, unit, lines, per in (
        ("Memory", "binary units", memory, ""),
        ("Disks", "all together", disks, "/s"),
        ("Network", "all NICs together", network, "/s"),
    ):
        if shown := [(name, line) for name, line in lines if _peak(line)]:
            top = max(_peak(line) for _, line in shown)
            yield Chart(title, unit, shown, units.byte_marks(top, per))


def _peak(line: list[Rate]) -> float:
    return max((rate.value for rate in line), default=0.0)


def _band(spans: Sequence[Span], x: X, frame: Frame) -> Iterator[Element]:
    """The states, and where there is room for it their legend above."""
    yield _text(frame.left - 8, TOP + 16, "State", "head", "end")
    yield _element("rect", "panel", x=frame.left, y=TOP, width=frame.plot, height=BAND)
    last = 0.0
    for span in spans:
        left, wide = x(span.begin), x(span.end) - x(span.begin)
        if wide < LEAST_SPAN and left - last < LEAST_SPAN:
            continue
        last = left
        state = span.state if span.state in STATE_NAMES else series.BUSY
        name, took = STATE_NAMES.get(span.state, span.state), units.duration(span.end - span.begin)
        title = _element("title", "", f"{name}: {units.clock(span.begin)}, {took}")
        size = {"width": max(1.0, wide), "height": BAND}
        yield _element("rect", f"state {state}", title, x=left, y=TOP, **size)
    seen = {span.state for span in spans} if frame is WIDE else ()
    yield _legend(frame.left, 18, [(f"state {key}", "■", STATE_NAMES[key]) for key in STATE_NAMES if key in seen])


def _chart(
    chart: Chart, y: float, x: X, times: list[tuple[float, str]], events: list[tuple[float, Event]], frame: Frame
) -> Iterator[Element]:
    """One panel, its upper edge at `y`: step lines with gaps, over the lines of the axes and of the events."""
    top, bottom = chart.marks[-1][0], y + HEIGHT
    left, right = frame.left, frame.left + frame.plot
    head = _text(left if frame is WIDE else 4, y - 10, chart.title, "head")
    if frame is WIDE:
        head.append(_element("tspan", "soft", chart.unit, dx=8))
    yield head
    yield _element("rect", "panel", x=left, y=y, width=frame.plot, height=HEIGHT)
    for value, label in chart.marks:
        at = bottom - HEIGHT * value / top
        yield _element("line", "grid", x1=left, x2=right, y1=at, y2=at)
        yield _text(left - 8, at + 4, label, "soft", "end")
    verticals = [(at, "grid") for at, _ in times] + [(at, f"marker {_kind(event)}") for at, event in events]
    for at, style in verticals:
        yield _element("line", style, x1=at, x2=at, y1=y, y2=bottom)
    names = [name if frame is WIDE else name.removeprefix("occupied ") for name, _ in chart.lines]
    keys = [(style, "━━", name) for name, style in zip(names, ("one", "two"), strict=False)]
    yield _legend(right, y - 10, keys, "end")
    for (name, line), style in zip(chart.lines, ("one", "two"), strict=False):
        pieces: list[str] = []
        last = None
        for rate in line:
            at = bottom - HEIGHT * min(rate.value, top) / top
            step = f"{x(rate.begin):.1f},{at:.1f} L{x(rate.end):.1f},{at:.1f}"
            if last is not None and rate.begin <= last:
                pieces[-1] += f" L{step}"
            else:
                pieces.append(f"M{step}")
            last = rate.end
        for piece in pieces if len(chart.lines) == 1 else ():
            first, end = piece[1:].partition(",")[0], piece.rpartition("L")[2].partition(",")[0]
            outline = f"M{first},{bottom:.1f} L{piece[1:]} L{end},{bottom:.1f} Z"
            yield _element("path", "area", d=outline)
        yield _element("path", f"line {style}", _element("title", "", f"{chart.title}: {name}"), d=" ".join(pieces))


def _flags(events: list[tuple[float, Event]], frame: Frame) -> Iterator[Element]:
    """What happened, above the band, with a word or two where there is space."""
    free = 0.0
    for x, event in events:
        kind, said = _kind(event), told(event)
        title = _element("title", "", f"{units.clock(event.time)}: {said}")
        yield _element("path", f"flag {kind}", title, d=f"M{x - 5:.1f},{TOP - 16} h10 l-5,9 Z")
        label = said if kind == "checkpoint" else event.name[:LONGEST_LABEL]
        wide = 6.2 * len(label)
        fits = x + wide <= frame.width - 4
        left = x - 5 if fits else x + 5 - wide
        if left >= free:
            yield _text(left if fits else x + 5, TOP - 21, label, "soft", "start" if fits else "end")
            free = left + wide + 10


def _kind(event: Event) -> str:
    return "failed" if event.error else "checkpoint" if event.name == "checkpoint" else "other"


def told(event: Event) -> str:
    """What has happened, in a few words: ``checkpoint, 820 KiB in 2.1 s``."""
    words = event.name + (" failed" if event.error else "")
    if event.size:
        words += f", {units.size(event.size)}"
    if event.seconds:
        words += f"{' in' if event.size else ', took'} {units.duration(event.seconds)}"
    return words


# Elements


def _element(tag: str, style: str, *children: Element | str, **values: object) -> Element:
    texts = {
        name: f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
        for name, value in values.items()
    }
    element: Element = _MAKER(tag, texts | ({"class": style} if style else {}), *children)
    return element


def _text(x: float, y: float, text: str, style: str, anchor: str = "start") -> Element:
    element = _element("text", style, text, x=x, y=y)
    element.set("text-anchor", anchor)
    return element


def _legend(x: float, y: float, keys: Sequence[tuple[str, str, str]], anchor: str = "start") -> Element:
    """Signs in their colors, each with its name."""
    legend = _text(x, y, "", "soft", anchor)
    for number, (style, sign, name) in enumerate(keys):
        legend.append(_element("tspan", f"key {style}", sign, **({"dx": 18} if number else {})))
        legend.append(_element("tspan", "", name, dx=5))
    return legend
