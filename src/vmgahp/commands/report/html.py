"""The report as one HTML page that needs nothing but itself: no script, no font, no network."""

from lxml import etree

from vmgahp.commands import units
from vmgahp.commands.report import chart, series

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vmgahp.commands.report.reader import Event, Story
    from vmgahp.commands.report.series import Figures

MOST_ROWS = 2000

STYLE = """
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
p.soft, footer { color: var(--soft); margin: .2rem 0; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .6rem; margin: 1.2rem 0; }
dl div { background: var(--panel); border: 1px solid var(--grid); border-radius: 6px; padding: .5rem .75rem; }
dt { color: var(--soft); font-size: .8rem; }
dd { margin: 0; font-size: 1.15rem; font-weight: 600; font-variant-numeric: tabular-nums; }
figure { margin: 0; overflow-x: auto; }
figure svg { width: 100%; height: auto; min-width: 40rem; display: block; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid var(--grid); }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
td.when, td.number, th.number { white-space: nowrap; font-variant-numeric: tabular-nums; }
td.number, th.number { text-align: right; padding-right: 1.2rem; }
td.what { font-weight: 600; white-space: nowrap; }
td.said { overflow-wrap: anywhere; }
tr.log td.said { color: var(--soft); font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: .85em; }
tr.failed td.what { color: var(--bad); }
@media print { main { max-width: none; padding: 0; } figure svg { min-width: 0; } tr, figure { break-inside: avoid; } }
"""


def render(story: "Story", figures: "Figures", log: "Sequence[tuple[float, str]]", source: str) -> bytes:
    """The page; `log` are the lines of the daemon's log, `source` names the file that this was made from."""
    html = etree.Element("html", lang="en")
    html.set("class", "vm-report")
    head = etree.SubElement(html, "head")
    etree.SubElement(head, "meta", charset="utf-8")
    policy = etree.SubElement(head, "meta", content="default-src 'none'; style-src 'unsafe-inline'")
    policy.set("http-equiv", "Content-Security-Policy")
    etree.SubElement(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    etree.SubElement(head, "meta", name="color-scheme", content="light dark")
    name = story.name or "A VM"
    _add(head, "title", f"{name}: report")
    _add(head, "style", chart.STYLE + STYLE)
    main = etree.SubElement(etree.SubElement(html, "body"), "main")
    _add(main, "h1", name)
    _add(
        main,
        "p",
        f"{units.clock(story.begin)} to {units.clock(story.end)} ({units.zone(story.end)}), "
        f"{units.duration(story.end - story.begin)}",
        "soft",
    )
    _summary(main, story, figures)
    figure = etree.SubElement(main, "figure")
    picture = chart.draw(story, figures)
    for style in picture.findall(f"{{{chart.SVG}}}style"):
        picture.remove(style)  # it is in the page's head
    figure.append(picture)
    _devices(main, figures)
    _happened(main, story, log)
    _footer(main, story, source)
    return b"<!DOCTYPE html>\n" + etree.tostring(html, method="html", encoding="utf-8", pretty_print=True)


def _summary(main: "etree._Element", story: "Story", figures: "Figures") -> None:
    time_in: dict[str, float] = {}
    for span in series.spans(story):
        time_in[span.state] = time_in.get(span.state, 0.0) + span.end - span.begin
    disks = [sum(pair[way] for pair in figures.disks.values()) for way in (0, 1)]
    cards = [sum(pair[way] for pair in figures.cards.values()) for way in (0, 1)]
    made = series.checkpoints(story.events)
    sizes = f" ({units.size(max(event.size for event in made))})" if any(event.size for event in made) else ""
    figures_of = [
        *(
            (chart.STATE_NAMES.get(state, state).capitalize(), units.duration(time_in[state]))
            for state in chart.STATE_NAMES
            if state in time_in
        ),
        ("CPU time", units.duration(figures.cpu_seconds)),
        ("Read from disks", units.size(disks[0])),
        ("Written to disks", units.size(disks[1])),
    ]
    if figures.cards:
        figures_of += [("Received", units.size(cards[0])), ("Sent", units.size(cards[1]))]
    figures_of.append(("Checkpoints" + (", the largest" if sizes else ""), f"{len(made)}{sizes}"))
    figures_of += [
        (term, said)
        for term, said in (("How it ended", story.how_it_ended), ("The guest's exit code", story.exit_code))
        if said
    ]
    listing = etree.SubElement(main, "dl")
    for term, value in figures_of:
        pair = etree.SubElement(listing, "div")
        _add(pair, "dt", term)
        _add(pair, "dd", value)


def _devices(main: "etree._Element", figures: "Figures") -> None:
    rows = [
        (name, units.size(one), units.size(other))
        for devices in (figures.disks, figures.cards)
        for name, (one, other) in devices.items()
    ]
    if rows:
        _add(main, "h2", "Disks and network cards")
        body = _table(main, ("Device", "Read or received", "Written or sent"), numbers=(1, 2))
        for name, one, other in rows:
            row = etree.SubElement(body, "tr")
            _add(row, "td", name, "what")
            _add(row, "td", one, "number")
            _add(row, "td", other, "number")


def _happened(main: "etree._Element", story: "Story", log: "Sequence[tuple[float, str]]") -> None:
    _add(main, "h2", "What happened when")
    rows: list[tuple[float, int, Event | str]] = [(event.time, 1, event) for event in story.events]
    rows += [(when, 0, text) for when, text in log]
    rows.sort(key=lambda row: row[:2])
    if not rows:
        _add(main, "p", "Nothing is known.", "soft")
        return
    body = _table(main, ("Time", "After", "What", "Took", "Size", "More"), numbers=(1, 3, 4))
    begin = story.begin
    for when, _, thing in rows[:MOST_ROWS]:
        row = etree.SubElement(body, "tr")
        _add(row, "td", units.clock(when), "when")
        _add(row, "td", units.duration(max(0.0, when - begin)), "number")
        if isinstance(thing, str):
            row.set("class", "log")
            cells = ("log", "what"), ("", "number"), ("", "number"), (thing, "said")
        else:
            if thing.error:
                row.set("class", "failed")
            more = "; ".join(text for text in (thing.error, thing.detail) if text)
            more = more or chart.STATE_NAMES.get(thing.state, thing.state.lower())
            cells = (
                (thing.name + (" failed" if thing.error else ""), "what"),
                (units.duration(thing.seconds) if thing.seconds else "", "number"),
                (units.size(thing.size) if thing.size else "", "number"),
                (more, "said"),
            )
        for text, style in cells:
            _add(row, "td", text, style)
    if len(rows) > MOST_ROWS:
        _add(main, "p", f"{len(rows) - MOST_ROWS} more are not shown.", "soft")


def _footer(main: "etree._Element", story: "Story", source: str) -> None:
    from vmgahp import __version__

    footer = etree.SubElement(main, "footer")
    _add(
        footer,
        "p",
        f"Made from {source} (samples: {len(story.samples)}, events: {len(story.events)}) by vmgahp {__version__}.",
    )
    if story.bad_lines:
        _add(footer, "p", f"{story.bad_lines} lines of the file make no sense and were left out.")
    if story.left_out:
        _add(footer, "p", "The file is too long to be read as a whole; its end is not here.")


def _table(main: "etree._Element", heads: "Iterable[str]", numbers: "Sequence[int]") -> "etree._Element":
    table = etree.SubElement(main, "table")
    row = etree.SubElement(etree.SubElement(table, "thead"), "tr")
    for place, text in enumerate(heads):
        cell = _add(row, "th", text, "number" if place in numbers else "")
        cell.set("scope", "col")
    return etree.SubElement(table, "tbody")


def _add(parent: "etree._Element", tag: str, text: str, style: str = "") -> "etree._Element":
    element = etree.SubElement(parent, tag)
    element.text = text
    if style:
        element.set("class", style)
    return element
