"""The picture of the report: states, use and events over one axis of time, as SVG.

Built by hand with lxml: what is wanted is a few step lines with gaps, a band and markers over a common axis,
and no script; the libraries that draw that take tens of MiB, or put a script into the picture.
"""

from lxml import etree

from vmgahp import lifecycle
from vmgahp.commands import units
from vmgahp.commands.report import series

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from vmgahp.commands.report.reader import Event, Story
    from vmgahp.commands.report.series import Figures, Rate, Span

    Marks = list[tuple[float, str]]

SVG = "http://www.w3.org/2000/svg"

WIDTH, LEFT, RIGHT = 960, 84, 22
PLOT = WIDTH - LEFT - RIGHT
HEIGHT, ABOVE = 104, 46
"""Of a chart, and of the room above it with its title and legend."""
BAND = 24
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
svg.vm-report text { font: 12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--ink); }
svg.vm-report .ground { fill: var(--ground); }
svg.vm-report .panel { fill: var(--panel); }
svg.vm-report .grid { stroke: var(--grid); stroke-width: 1; }
svg.vm-report text.head { font-weight: 600; font-size: 13px; }
svg.vm-report .soft { fill: var(--soft); font-size: 11px; font-weight: 400; }
svg.vm-report .line { fill: none; stroke-width: 1.7; stroke-linejoin: round; }
svg.vm-report .one { stroke: var(--one); }
svg.vm-report .two { stroke: var(--two); stroke-dasharray: 5 2.5; }
svg.vm-report .area { fill: var(--one); fill-opacity: 0.13; stroke: none; }
svg.vm-report .Running { fill: var(--run); }
svg.vm-report .SoftSuspended { fill: var(--pause); }
svg.vm-report .Suspended { fill: var(--save); }
svg.vm-report .Checkpointed { fill: var(--check); }
svg.vm-report .Busy { fill: var(--busy); }
svg.vm-report .marker { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 2 3; }
svg.vm-report .marker.checkpoint { stroke: var(--check); stroke-dasharray: none; }
svg.vm-report .marker.failed { stroke: var(--bad); stroke-dasharray: none; }
svg.vm-report .flag { fill: var(--soft); }
svg.vm-report .flag.checkpoint { fill: var(--check); }
svg.vm-report .flag.failed { fill: var(--bad); }
"""


class _Chart:
    """One panel: its title, its lines with their names in the legend, and the marks of its axis."""

    def __init__(self, title: str, unit: str, lines: "list[tuple[str, list[Rate]]]", marks: "Marks") -> None:
        self.title = title
        self.unit = unit
        self.lines = lines
        self.marks = marks


def draw(story: "Story", figures: "Figures") -> "etree._Element":
    """The picture as an element."""
    return _Picture(story, figures).root


def _charts(figures: "Figures") -> list[_Chart]:
    """The panels for which there are figures."""

    def bytes_of(title: str, unit: str, lines: "list[tuple[str, list[Rate]]]", per: str) -> _Chart:
        top = max((rate.value for _, line in lines for rate in line), default=0.0)
        return _Chart(title, unit, lines, units.byte_marks(top, per))

    peak = max((rate.value for rate in figures.cpu), default=0.0)
    charts = [
        _Chart("CPU", "per cent of the VM's vCPUs", [("used", figures.cpu)], units.percent_marks(peak)),
        bytes_of(
            "Memory",
            "binary units",
            [("of the guest", figures.memory), ("occupied on the machine", figures.rss)],
            "",
        ),
        bytes_of(
            "Disks", "all together", [("read", figures.disk_read), ("written", figures.disk_written)], "/s"
        ),
    ]
    if figures.cards:
        network = [("received", figures.received), ("sent", figures.sent)]
        charts.append(bytes_of("Network", "all cards together", network, "/s"))
    for chart in charts:
        chart.lines = [
            (name, line) for name, line in chart.lines if any(rate.value for rate in line)
        ] or chart.lines[:1]
    return charts


class _Picture:
    def __init__(self, story: "Story", figures: "Figures") -> None:
        self._begin = story.begin
        self._length = max(story.end - story.begin, 1.0)
        self._times = units.time_marks(self._begin, self._begin + self._length)
        self._events = story.events[:MOST_FLAGS]
        charts = _charts(figures)
        self._top = 66
        bottom = self._top + BAND + len(charts) * (ABOVE + HEIGHT) + 58
        self.root = etree.Element(f"{{{SVG}}}svg", nsmap={None: SVG})  # type: ignore[dict-item]
        self._set(self.root, viewBox=f"0 0 {WIDTH} {bottom}", role="img", width=WIDTH, height=bottom)
        self.root.set("class", "vm-report")
        self.root.set("aria-labelledby", "vm-report-title vm-report-text")
        title = self._text_element("title", f"What {story.name or 'the VM'} used, and what happened")
        title.set("id", "vm-report-title")
        text = self._text_element("desc", self._description(story, charts))
        text.set("id", "vm-report-text")
        self._text_element("style", STYLE)
        self._add("rect", "ground", width=WIDTH, height=bottom)
        self._band(series.spans(story))
        end = self._top + BAND
        for chart in charts:
            self._chart(chart, end + ABOVE)
            end += ABOVE + HEIGHT
        self._flags()
        self._time_axis(story, end)

    def _description(self, story: "Story", charts: list[_Chart]) -> str:
        panels = ", ".join(chart.title for chart in charts)
        return (
            f"From {units.clock(story.begin)} to {units.clock(story.end)}: the VM's states as a band, and below it "
            f"{panels} over time, with {len(series.checkpoints(story.events))} checkpoints as marks. "
            "The same is in the tables of the report as text."
        )

    # Parts

    def _band(self, spans: "Sequence[Span]") -> None:
        y = self._top
        self._text(LEFT - 8, y + 16, "State", "head", "end")
        self._add("rect", "panel", x=LEFT, y=y, width=PLOT, height=BAND)
        last = 0.0
        for span in spans:
            x = self._x(span.begin)
            if self._x(span.end) - x < LEAST_SPAN and x - last < LEAST_SPAN:
                continue
            last = x
            known = span.state in STATE_NAMES
            piece = self._add(
                "rect",
                span.state if known else series.BUSY,
                x=x,
                y=y,
                width=max(1.0, self._x(span.end) - x),
                height=BAND,
            )
            self._title(
                piece,
                f"{STATE_NAMES.get(span.state, span.state)}: {units.clock(span.begin)}, "
                f"{units.duration(span.end - span.begin)}",
            )
        x = LEFT
        for state in [state for state in STATE_NAMES if any(span.state == state for span in spans)]:
            self._add("rect", state, x=x, y=8, width=12, height=12)
            self._text(x + 17, 18, STATE_NAMES[state], "soft")
            x += 34 + int(6.2 * len(STATE_NAMES[state]))

    def _chart(self, chart: _Chart, y: float) -> None:
        top = chart.marks[-1][0]
        head = self._text(LEFT, y - 10, chart.title, "head")
        unit = self._add("tspan", "soft", head, dx=8)
        unit.text = chart.unit
        self._add("rect", "panel", x=LEFT, y=y, width=PLOT, height=HEIGHT)
        for value, label in chart.marks:
            at = y + HEIGHT - HEIGHT * value / top
            self._add("line", "grid", x1=LEFT, x2=LEFT + PLOT, y1=at, y2=at)
            self._text(LEFT - 8, at + 4, label, "soft", "end")
        self._verticals(y, HEIGHT)
        x = LEFT + PLOT
        for name, style in reversed(
            list(zip((name for name, _ in chart.lines), ("one", "two"), strict=False))
        ):
            x -= int(6.2 * len(name)) + 6
            self._text(x, y - 10, name, "soft")
            self._add("line", f"line {style}", x1=x - 28, x2=x - 6, y1=y - 14, y2=y - 14)
            x -= 46
        if not any(line for _, line in chart.lines):
            self._text(LEFT + PLOT / 2, y + HEIGHT / 2 + 4, "no figures", "soft", "middle")
        for (name, line), style in zip(chart.lines, ("one", "two"), strict=False):
            points = self._steps(line, lambda value: y + HEIGHT - HEIGHT * min(value, top) / top)
            for piece in points if style == "one" and len(chart.lines) == 1 else ():
                base = f"{y + HEIGHT:.1f}"
                outline = f"M{piece[0][0]:.1f},{base} L{_path(piece)[1:]} L{piece[-1][0]:.1f},{base} Z"
                self._add("path", "area", d=outline)
            if points:
                path = self._add("path", f"line {style}", d=" ".join(_path(piece) for piece in points))
                self._title(path, f"{chart.title}: {name}")

    def _steps(self, line: "list[Rate]", place: "object") -> list[list[tuple[float, float]]]:
        """The corners of a line, in pieces between its gaps."""
        pieces: list[list[tuple[float, float]]] = []
        last = None
        for rate in line:
            y = place(rate.value)  # type: ignore[operator]
            if last is None or rate.begin > last:
                pieces.append([])
            pieces[-1] += [(self._x(rate.begin), y), (self._x(rate.end), y)]
            last = rate.end
        return pieces

    def _verticals(self, y: float, height: float) -> None:
        """The lines of the time axis and of what happened, across one panel and not through what stands between."""
        for when, _ in self._times:
            self._add("line", "grid", x1=self._x(when), x2=self._x(when), y1=y, y2=y + height)
        for event in self._events:
            x = self._x(event.time)
            self._add("line", f"marker {_kind(event)}", x1=x, x2=x, y1=y, y2=y + height)

    def _flags(self) -> None:
        """What happened, above the band, with a word or two where there is room."""
        free = 0.0
        for event in self._events:
            x, kind, said = self._x(event.time), _kind(event), told(event)
            flag = self._add("path", f"flag {kind}", d=f"M{x - 5:.1f},{self._top - 16} h10 l-5,9 Z")
            self._title(flag, f"{units.clock(event.time)}: {said}")
            label = said if kind == "checkpoint" else event.name[:LONGEST_LABEL]
            wide = 6.2 * len(label)
            if x >= free:
                fits = x + wide <= WIDTH - 4
                self._text(
                    x - 5 if fits else x + 5, self._top - 21, label, "soft", "start" if fits else "end"
                )
                free = x + wide + 10

    def _time_axis(self, story: "Story", bottom: float) -> None:
        for when, label in self._times:
            self._text(self._x(when), bottom + 17, label, "soft", "middle")
        days = sorted({units.clock(when)[:10] for when in (story.begin, story.end)})
        caption = f"{' to '.join(days)}, local time ({units.zone(story.end)})"
        self._text(LEFT + PLOT / 2, bottom + 40, caption, "soft", "middle")

    # Elements

    def _x(self, when: float) -> float:
        return LEFT + PLOT * min(max((when - self._begin) / self._length, 0.0), 1.0)

    def _add(
        self, tag: str, style: str, parent: "etree._Element | None" = None, **values: object
    ) -> "etree._Element":
        element = etree.SubElement(self.root if parent is None else parent, f"{{{SVG}}}{tag}")
        if style:
            element.set("class", style)
        self._set(element, **values)
        return element

    @staticmethod
    def _set(element: "etree._Element", **values: object) -> None:
        for name, value in values.items():
            element.set(name, f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value))

    def _text_element(self, tag: str, text: str) -> "etree._Element":
        element = self._add(tag, "")
        element.text = text
        return element

    def _text(
        self, x: float, y: float, text: str, style: str = "", anchor: str = "start"
    ) -> "etree._Element":
        element = self._add("text", style, x=x, y=y)
        element.set("text-anchor", anchor)
        element.text = text
        return element

    def _title(self, element: "etree._Element", text: str) -> None:
        title = etree.SubElement(element, f"{{{SVG}}}title")
        title.text = text
        element.insert(0, title)


def _kind(event: "Event") -> str:
    return "failed" if event.error else "checkpoint" if event.name == "checkpoint" else "other"


def told(event: "Event") -> str:
    """What has happened, in a few words: ``checkpoint, 820 KiB in 2.1 s``."""
    words = event.name + (" failed" if event.error else "")
    if event.size:
        words += f", {units.size(event.size)}"
    if event.seconds:
        words += f"{' in' if event.size else ', took'} {units.duration(event.seconds)}"
    return words


def _path(points: "Sequence[tuple[float, float]]") -> str:
    return "M" + " L".join(f"{x:.1f},{y:.1f}" for x, y in points)
