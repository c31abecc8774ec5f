"""The report as one HTML page: no script, no font, no network.

Along the axis of time positions are percentages, so that one picture fits a phone and a wide screen with letters of
the same size; only the lines are stretched (``preserveAspectRatio="none"``).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from lxml import etree
from lxml.builder import ElementMaker

from vmgahp import __version__, lifecycle
from vmgahp.commands.metrics_lines import Event
from vmgahp.commands.page import clock, duration, size, zone
from vmgahp.commands.report import BOOTING, BUSY, ENDING, MOST_EVENTS, PROGRAM, Rate, Span, Story
from vmgahp.metrics.file import NAME

SVG = "http://www.w3.org/2000/svg"
E: Any = ElementMaker()
_SVG: Any = ElementMaker(namespace=SVG, nsmap={None: SVG})

LEAST = 0.0005
"""The part of the width below which a state right after another is not drawn."""

BAND, TOP, HEAD, CHART, FOOT = 18, 40, 30, 90, 38
"""The pixels of the start and the end of the band of states, a chart's title, a chart, and the space below them all."""

STATES = {
    lifecycle.RUNNING: ("running", "#2da44e"),
    BOOTING: ("booting", "#0a7d91"),
    PROGRAM: ("the program runs", "#2da44e"),
    ENDING: ("outputs are sent, power off", "#9a6700"),
    lifecycle.SOFT_SUSPENDED: ("paused in memory", "#d4a72c"),
    lifecycle.SUSPENDED: ("suspended to disk", "#54aeff"),
    lifecycle.CHECKPOINTED: ("checkpointed", "#8250df"),
    BUSY: ("starting, saving, restoring", "#8c959f"),
}
"""The name and the color of each state; the colors are visible on a light and on a dark background."""
COLORS = ("#2f81f7", "#d9730d")
"""The colors of a chart's first and second line."""
FAILED = "#e5534b"

CHARTS = (
    ("CPU, per cent of the VM's vCPUs", {"cpu": "used"}, 100.0, lambda value: f"{value:.0f} %"),
    ("Memory", {"memory": "of the guest", "rss": "of its process"}, 0.0, size),
    ("Disks, all together", {"read": "read", "written": "written"}, 0.0, lambda value: f"{size(value)}/s"),
    ("Network, all NICs", {"received": "received", "sent": "sent"}, 0.0, lambda value: f"{size(value)}/s"),
)
"""The title of each chart, its lines by the names of `Story.rates`, the least value at its upper edge, its labels."""


class _Chart(NamedTuple):
    title: str
    lines: list[tuple[str, str, list[Rate]]]
    """The name, color and values of each line."""
    top: float
    label: Callable[[float], str]


STYLE = f"""
html {{ color-scheme: light dark; font-family: system-ui, sans-serif; }}
text {{ font-size: 12px; fill: currentColor; }}
line {{ stroke: currentColor; stroke-opacity: .2; }}
.flag {{ stroke-opacity: .7; stroke-dasharray: 2 3; }}
path {{ fill: none; stroke-width: 1.7; vector-effect: non-scaling-stroke; }}
body {{ margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 60rem; line-height: 1.5; }}
h1, p, dd, td {{ overflow-wrap: anywhere; }}
h1 {{ font-size: 1.5rem; margin: 0; }}
h2 {{ font-size: 1.1rem; margin: 2rem 0 .6rem; }}
dl {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .6rem; }}
dl div {{ border: 1px solid #8884; border-left-width: 4px; border-radius: 6px; padding: .4rem .7rem; }}
dt, footer {{ font-size: .8rem; }}
dd {{ margin: 0; font-size: 1.15rem; font-weight: 600; }}
table {{ border-collapse: collapse; width: 100%; font-size: .9rem; }}
th, td {{ text-align: left; vertical-align: top; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid #8884; }}
td span {{ white-space: nowrap; }}
.failed {{ color: {FAILED}; }}
@media print {{ body {{ max-width: none; }} tr, svg {{ break-inside: avoid; }} }}
"""


def render(story: Story) -> bytes:
    name = story.vm_name or "A VM"
    when = f"{clock(story.begin)} to {clock(story.end)} ({zone(story.end)}), {duration(story.end - story.begin)}"
    policy = {"http-equiv": "Content-Security-Policy", "content": "default-src 'none'; style-src 'unsafe-inline'"}
    starts = [event.error for event in story.events if event.name == "start"]
    failed = bool(starts) and not story.samples and all(starts)
    charts = _charts(story)
    page = E.html(
        {"lang": "en"},
        E.head(
            E.meta(charset="utf-8"),
            E.meta(policy),
            E.meta(name="viewport", content="width=device-width, initial-scale=1"),
            E.title(f"{name}: report"),
            E.style(STYLE),
        ),
        E.body(
            E.h1(name),
            E.p(when),
            *([E.p({"class": "failed"}, f"The VM never started: {starts[-1]}")] if failed else []),
            E.dl(*_summary(story)),
            *([picture(story, charts)] if len(story.spans) > 1 or charts else []),
            *_devices(story),
            *_events(story),
            E.footer(*(E.p(sentence) for sentence in _footer(story))),
        ),
    )
    return b"<!DOCTYPE html>\n" + etree.tostring(page, method="html", encoding="utf-8", pretty_print=True)


# The picture


def picture(story: Story, charts: Sequence[_Chart]) -> Any:
    """Draw states, use and events over time."""
    begin, length = story.begin, max(story.end - story.begin, 0.01)

    def at(when: float) -> float:
        return min(max((when - begin) / length, 0.0), 1.0)

    lower = TOP + len(charts) * (HEAD + CHART)
    titles = ", ".join(chart.title for chart in charts)
    about = f"The VM's states from {clock(begin)} to {clock(story.end)}, as a band. Below: {titles or 'no figures'}."
    root = _svg("svg", {"role": "img", "aria-label": about, "width": "100%", "height": lower + FOOT})
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        root.append(_vertical(part, TOP, lower, "time"))
        root.append(_text(part, lower + 16, duration(part * length) if part else "0"))
    root.append(_text(0.5, lower + 34, f"since {clock(begin)} ({zone(begin)})"))
    root.extend(_band(story.spans, at))
    for number, chart in enumerate(charts):
        root.extend(_chart(chart, TOP + HEAD + number * (HEAD + CHART), at))
    for event in story.events:
        root.append(_vertical(at(event.time), BAND, lower, "flag"))
        flag = _text(at(event.time), BAND - 4, "▼", {"style": f"fill: {FAILED}"} if event.error else {})
        flag.append(_svg("title", {}, f"{clock(event.time)}: {told(event)}"))
        root.append(flag)
    return root


def _charts(story: Story) -> list[_Chart]:
    """Make the charts that have data."""
    rates, found = story.rates(), []
    for title, names, least, label in CHARTS:
        lines = [(names[name], color, rates.get(name, [])) for name, color in zip(names, COLORS, strict=False)]
        lines = [line for line in lines if any(rate.value for rate in line[2])]
        if lines:
            top = max(least, *(rate.value for *_, values in lines for rate in values))
            found.append(_Chart(title, lines, top, label))
    return found


def _band(spans: Sequence[Span], at: Callable[[float], float]) -> Iterator[Any]:
    drawn = -1.0
    for span in spans:
        left, wide = at(span.begin), at(span.end) - at(span.begin)
        if wide >= LEAST or left - drawn >= LEAST:
            drawn = left
            name, color = STATES.get(span.state, (span.state, STATES[BUSY][1]))
            title = _svg("title", {}, f"{name}: {clock(span.begin)}, {duration(span.end - span.begin)}")
            place = {"x": _percent(left), "y": BAND, "width": _percent(max(wide, LEAST)), "height": TOP - BAND}
            yield _svg("rect", {"class": span.state if span.state in STATES else BUSY, "fill": color, **place}, title)


def _chart(chart: _Chart, y: int, at: Callable[[float], float]) -> Iterator[Any]:
    """Draw one chart with its upper edge at `y`: step lines with gaps."""
    keys = [_svg("tspan", {"class": "head", "font-weight": 600}, chart.title)]
    for name, color, _ in chart.lines:
        keys += [_svg("tspan", {"fill": color, "dx": 10}, "■"), _svg("tspan", {"dx": 4}, name)]
    yield _svg("text", {"y": y - 8}, *keys)
    box = {"viewBox": f"0 0 1000 {CHART}", "preserveAspectRatio": "none"}
    drawing = _svg("svg", {"y": y, "width": "100%", "height": CHART, **box})
    for _, color, rates in chart.lines:
        path, last = "", -1.0
        for rate in rates:
            path += f"{'L' if rate.begin == last else 'M'}{1000 * at(rate.begin):.1f},"
            path += f"{1 + (CHART - 2) * (1 - rate.value / chart.top):.1f}H{1000 * at(rate.end):.1f}"
            last = rate.end
        drawing.append(_svg("path", {"d": path, "stroke": color}))
    yield drawing
    for level, label in ((0, chart.label(chart.top)), (CHART // 2, chart.label(chart.top / 2)), (CHART, "")):
        yield _svg("line", {"x2": "100%", "y1": y + level, "y2": y + level})
        yield _text(0.0, y + level + 13, label)


def _svg(tag: str, values: dict[str, object], *children: Any) -> Any:
    return _SVG(tag, {name: str(value) for name, value in values.items()}, *children)


def _percent(part: float) -> str:
    return f"{100 * part:.2f}%"


def _text(x: float, y: float, text: str, values: dict[str, object] | None = None) -> Any:
    anchor = "start" if x < 0.08 else "end" if x > 0.92 else "middle"
    return _svg("text", {"x": _percent(x), "y": y, "text-anchor": anchor, **(values or {})}, text)


def _vertical(x: float, upper: int, lower: int, style: str) -> Any:
    return _svg("line", {"class": style, "x1": _percent(x), "x2": _percent(x), "y1": upper, "y2": lower})


# The tables


def _summary(story: Story) -> Iterator[Any]:
    def term(name: str, value: str, color: str = "#8884") -> Any:
        return E.div({"style": f"border-left-color: {color}"}, E.dt(name), E.dd(value))

    for state, (name, color) in STATES.items():
        if seconds := sum(span.end - span.begin for span in story.spans if span.state == state):
            yield term(name.capitalize(), duration(seconds), color)
    if story.samples:
        yield term("CPU time", duration(story.samples[-1].cpu_seconds))
    disks, nics = story.totals()
    for devices, names in ((disks, ("Read from disks", "Written to disks")), (nics, ("Received", "Sent"))):
        for way, name in enumerate(names if devices else ()):
            yield term(name, size(sum(pair[way] for pair in devices.values())))
    made = [event.size for event in story.events if event.name == "checkpoint" and not event.error]
    if made or story.samples:
        largest = f" (up to {size(max(made))})" if any(made) else ""
        yield term("Checkpoints", f"{len(made)}{largest}")
    for name, value in (("How it ended", story.ended_by), ("The guest's exit code", story.exit_code)):
        if value:
            yield term(name, value)


def _devices(story: Story) -> Iterator[Any]:
    rows = [(name, size(one), size(other)) for devices in story.totals() for name, (one, other) in devices.items()]
    if rows:
        yield E.h2("Disks and NICs")
        yield _table(("Device", "Read or received", "Written or sent"), [E.tr(*map(E.td, row)) for row in rows])


def _events(story: Story) -> Iterator[Any]:
    rows = []
    for event in story.events:
        more = "; ".join(filter(None, (event.error, event.reason)))
        more = more or STATES.get(event.state, (event.state.lower(),))[0]
        day, time = clock(event.time).split(" ")
        times = E.td(E.span(day), " ", E.span(time)), E.td(duration(max(0.0, event.time - story.begin)))
        what = E.td(E.b(told(event)), f": {more}" if more else "")
        rows.append(E.tr({"class": "failed" if event.error else ""}, *times, what))
    yield E.h2("What happened when")
    yield _table(("Time", "After", "What"), rows)


def told(event: Event) -> str:
    """Describe an event in a few words: ``checkpoint, 820 KiB in 2.1 s``."""
    words = event.name + (" failed" if event.error else "") + (f", {size(event.size)}" if event.size else "")
    return words + (f"{' in' if event.size else ', took'} {duration(event.seconds)}" if event.seconds else "")


def _footer(story: Story) -> Iterator[str]:
    counts = f"samples: {len(story.samples)}, events: {len(story.events)}"
    yield f"Made from {NAME} ({counts}) by vmgahp {__version__}."
    if story.bad_lines:
        yield f"{story.bad_lines} lines of the file make no sense and were left out."
    if story.left_out:
        yield f"The file is too long to be read as a whole: its end, or events beyond {MOST_EVENTS}, are not here."


def _table(heads: Sequence[str], rows: list[Any]) -> Any:
    return E.table(E.thead(E.tr(*map(E.th, heads))), E.tbody(*rows))
