"""The report as one HTML page that needs nothing but itself: no script, no font, no network."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lxml import etree
from lxml.builder import ElementMaker

from vmgahp import __version__
from vmgahp.commands import units
from vmgahp.commands.report import chart, series
from vmgahp.commands.report.reader import MOST_EVENTS, Event, Story
from vmgahp.commands.report.series import Figures

MOST_ROWS = 2000

E: Any = ElementMaker()

STYLE = """
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
p.soft, footer { color: var(--soft); margin: .2rem 0; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .6rem; margin: 1.2rem 0; }
dl div { background: var(--panel); border: 1px solid var(--grid); border-radius: 6px; padding: .5rem .75rem; }
dl div.state { border-left: 4px solid var(--state); }
dt { color: var(--soft); font-size: .8rem; }
dd { margin: 0; font-size: 1.15rem; font-weight: 600; font-variant-numeric: tabular-nums; }
figure { margin: 0; }
figure svg { width: 100%; height: auto; display: block; }
figure svg.narrow { display: none; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid var(--grid); }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
td.when, td.number, th.number { white-space: nowrap; font-variant-numeric: tabular-nums; }
td.number, th.number { text-align: right; padding-right: 1.2rem; }
td.what { font-weight: 600; min-width: 6rem; overflow-wrap: anywhere; }
td.said { overflow-wrap: anywhere; }
tr.log td.said { color: var(--soft); font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: .85em; }
p.failed { color: var(--bad); overflow-wrap: anywhere; }
tr.failed td.what { color: var(--bad); }
@media screen and (max-width: 40rem) {
  figure svg.wide { display: none; } figure svg.narrow { display: block; max-width: 32rem; }
  dl { grid-template-columns: 1fr 1fr; }
  table.devices th { white-space: normal; vertical-align: bottom; }
  table.devices td.number, table.devices th.number { padding-right: 0; }
  table.events, table.events tbody { display: block; }
  table.events thead, table.events .number { display: none; }
  table.events tr { display: grid; grid-template-columns: auto 1fr; padding: .3rem 0;
    border-bottom: 1px solid var(--grid); }
  table.events td { border: 0; padding: 0 .8rem 0 0; }
  table.events td.said { grid-column: 1 / -1; } }
@media print { main { max-width: none; padding: 0; } tr, figure { break-inside: avoid; } }
"""


def render(story: Story, figures: Figures, log: Sequence[tuple[float, str]], source: str) -> bytes:
    """The page; `log` are the lines of the daemon's log, `source` names the file that this was made from."""
    name = story.name or "A VM"
    when = f"{units.clock(story.begin)} to {units.clock(story.end)} ({units.zone(story.end)})"
    policy = {"http-equiv": "Content-Security-Policy", "content": "default-src 'none'; style-src 'unsafe-inline'"}
    page = E.html(
        {"class": "vm-report", "lang": "en"},
        E.head(
            E.meta(charset="utf-8"),
            E.meta(policy),
            E.meta(name="viewport", content="width=device-width, initial-scale=1"),
            E.meta({"name": "color-scheme", "content": "light dark"}),
            E.title(f"{name}: report"),
            E.style(chart.STYLE + STYLE),
        ),
        E.body(
            E.main(
                E.h1(name),
                E.p({"class": "soft"}, f"{when}, {units.duration(story.end - story.begin)}"),
                *(E.p({"class": "failed"}, sentence) for sentence in _never_started(story)),
                E.dl(
                    *(
                        E.div({"class": style}, E.dt(term), E.dd(value))
                        for term, value, style in _summary(story, figures)
                    )
                ),
                *_pictures(story, figures),
                *_devices(figures),
                *_events(story, log),
                E.footer(*(E.p(sentence) for sentence in _footer(story, source))),
            )
        ),
    )
    return b"<!DOCTYPE html>\n" + etree.tostring(page, method="html", encoding="utf-8", pretty_print=True)


def _pictures(story: Story, figures: Figures) -> Iterator[Any]:
    """That for a phone and that for all others, of which the page shows one; none where nothing is to be seen."""
    if not chart.worth_drawing(story, figures):
        return
    figure = E.figure()
    for frame in (chart.WIDE, chart.NARROW):
        picture = chart.draw(story, figures, frame)
        for style in picture.findall(f"{{{chart.SVG}}}style"):
            picture.remove(style)  # it is in the page's head
        figure.append(picture)
    yield figure


def _never_started(story: Story) -> Iterator[str]:
    """Why there was never a VM, where that is so."""
    starts = [event for event in story.events if event.name == "start"]
    if starts and not story.samples and all(event.error for event in starts):
        yield f"The VM never started: {starts[-1].error}"


def _summary(story: Story, figures: Figures) -> Iterator[tuple[str, str, str]]:
    """Each figure: what it is, its value, and its style."""
    time_in: dict[str, float] = {}
    for span in series.spans(story):
        time_in[span.state] = time_in.get(span.state, 0.0) + span.end - span.begin
    for state, name in chart.STATE_NAMES.items():
        if state in time_in:
            yield name.capitalize(), units.duration(time_in[state]), f"state {state}"
    made = series.checkpoints(story.events)
    largest = max((event.size for event in made), default=0)
    totals = [("CPU time", units.duration(figures.cpu_seconds))] if story.samples else []  # unknown is not 0
    for devices, one, other in (
        (figures.disks, "Read from disks", "Written to disks"),
        (figures.nics, "Received", "Sent"),
    ):
        if devices:
            totals += [
                (term, units.size(sum(pair[way] for pair in devices.values()))) for way, term in enumerate((one, other))
            ]
    if largest:
        totals.append(("Checkpoints, the largest", f"{len(made)} ({units.size(largest)})"))
    elif made or story.samples:
        totals.append(("Checkpoints", str(len(made))))
    totals += [("How it ended", story.how_it_ended), ("The guest's exit code", story.exit_code)]
    for term, value in totals:
        if value:
            yield term, value, "total"


def _devices(figures: Figures) -> Iterator[Any]:
    rows = [
        E.tr(*_cells((name, "what"), (units.size(one), "number"), (units.size(other), "number")))
        for devices in (figures.disks, figures.nics)
        for name, (one, other) in devices.items()
    ]
    if rows:
        yield E.h2("Disks and NICs")
        yield _table("devices", ("Device", "Read or received", "Written or sent"), (1, 2), rows)


def _events(story: Story, log: Sequence[tuple[float, str]]) -> Iterator[Any]:
    yield E.h2("What happened when")
    found: list[tuple[float, int, Event | str]] = [(event.time, 1, event) for event in story.events]
    found += [(when, 0, text) for when, text in log]
    found.sort(key=lambda row: row[:2])
    if not found:
        yield E.p({"class": "soft"}, "Nothing is known.")
        return
    rows = [_happened(when, when - story.begin, thing) for when, _, thing in found[:MOST_ROWS]]
    yield _table("events", ("Time", "After", "What", "Took", "Size", "More"), (1, 3, 4), rows)
    if len(found) > MOST_ROWS:
        yield E.p({"class": "soft"}, f"{len(found) - MOST_ROWS} more are not shown.")


def _happened(when: float, after: float, thing: Event | str) -> Any:
    """An event, or a line of the log, as a row."""
    style, what, took, size = "log", "log", "", ""
    if isinstance(thing, str):
        more = thing
    else:
        style = "failed" if thing.error else ""
        what = thing.name + (" failed" if thing.error else "")
        took = units.duration(thing.seconds) if thing.seconds else ""
        size = units.size(thing.size) if thing.size else ""
        more = "; ".join(text for text in (thing.error, thing.detail) if text)
        more = more or chart.STATE_NAMES.get(thing.state, thing.state.lower())
    return E.tr(
        {"class": style} if style else {},
        *_cells(
            (units.clock(when), "when"),
            (units.duration(max(0.0, after)), "number"),
            (what, "what"),
            (took, "number"),
            (size, "number"),
            (more, "said"),
        ),
    )


def _footer(story: Story, source: str) -> Iterator[str]:
    counts = f"samples: {len(story.samples)}, events: {len(story.events)}"
    yield f"Made from {source} ({counts}) by vmgahp {__version__}."
    if story.bad_lines:
        yield f"{story.bad_lines} lines of the file make no sense and were left out."
    if story.left_out:
        yield f"The file is too long to be read as a whole: its end, or events beyond {MOST_EVENTS}, are not here."


def _cells(*texts: tuple[str, str]) -> list[Any]:
    return [E.td({"class": style}, text) for text, style in texts]


def _table(style: str, heads: Iterable[str], numbers: Sequence[int], rows: list[Any]) -> Any:
    cells = (
        E.th({"scope": "col", "class": "number" if place in numbers else ""}, text) for place, text in enumerate(heads)
    )
    return E.table({"class": style}, E.thead(E.tr(*cells)), E.tbody(*rows))
