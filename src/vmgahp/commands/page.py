"""Findings, tables, sizes and times for people, colored by rich if the terminal has colors.

Paragraphs are wrapped here: rich would split commands and paths that are longer than a line, which nobody could copy.
"""

import os
import sys
import time
from collections.abc import Iterable, Sequence
from shutil import get_terminal_size
from textwrap import wrap
from typing import Literal, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vmgahp.findings import BAD, OFF, OK, UNKNOWN, Finding
from vmgahp.text import escape

MARKS = {OK: "✓", OFF: "!", BAD: "✗", UNKNOWN: "?"}
ASCII_MARKS = {OK: "ok", OFF: "!!", BAD: "XX", UNKNOWN: "??"}
"""The marks for an output that is not in UTF-8."""
STYLES = {OK: "green", OFF: "yellow", BAD: "bold red", UNKNOWN: "cyan"}

LEAST_WIDTH, MOST_WIDTH = 40, 110
UNLIMITED = 10_000
"""The columns of a table whose output is not a terminal."""


class Page(Console):
    """An output for people, with its width, its colors, and its character set."""

    def __init__(self, stream: TextIO | None = None, width: int | None = None) -> None:
        system: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"  # rich would leave bold and dim
        super().__init__(file=stream, width=width, color_system=system, highlight=False, markup=False, emoji=False)
        self.columns = max(LEAST_WIDTH, min(width or get_terminal_size().columns, MOST_WIDTH))
        self.is_utf8 = self.encoding.replace("-", "") == "utf8"

    def say(self, text: Text) -> None:
        """Print a text that is wrapped already."""
        self.print(text, soft_wrap=True, end="")

    def paragraph(self, text: str, style: str = "", lead: str = "", indent: int = 0) -> Text:
        """Wrap a text without control characters of terminals; further lines are aligned with its first word."""
        before = " " * indent + lead
        further = " " * len(before)
        lines = wrap(
            escape(text),
            self.columns,
            initial_indent=before,
            subsequent_indent=further,
            break_long_words=False,
            break_on_hyphens=False,
        )
        return Text("\n".join(lines) + "\n", style)

    def findings(self, sections: Sequence[tuple[str, Sequence[Finding]]], *, brief: bool = False) -> Text:
        """Format all sections; those without findings are left out.

        If `brief`, the places that were checked are left out, and findings that depend on another one that is shown are
        only named below that one.
        """
        everything = [one for _, found in sections for one in found]
        causes = {one.check for one in everything if brief and one.verdict != OK and not one.because}
        dependent: dict[str, list[str]] = {}
        for one in everything:
            if one.because in causes:
                dependent.setdefault(one.because, []).append(one.check)
        blocks = []
        for title, found in sections:
            block = Text()
            for one in found:
                if one.because not in causes:
                    block.append_text(self._finding(one, brief))
                    if names := dependent.pop(one.check, []):
                        named = f"Not checked because it depends on this: {', '.join(dict.fromkeys(names))}."
                        block.append_text(self.paragraph(named, "dim", indent=4))
            if block:
                blocks.append(Text.assemble((f"{escape(title)}\n" if title else "", "bold"), block))
        return Text("\n").join(blocks)

    def _finding(self, finding: Finding, brief: bool) -> Text:
        mark = (MARKS if self.is_utf8 else ASCII_MARKS)[finding.verdict]
        indent = len(mark) + 3
        seen = finding.seen if finding.seen[-1:] in (".", "!", "?") else f"{finding.seen}."
        # Many sentences begin with the name of the setting that they are about.
        is_named = seen.startswith(f"{finding.check} ")
        text = self.paragraph(seen if is_named else f"{finding.check}: {seen}", lead=f"  {mark} ")
        text.stylize(STYLES[finding.verdict], 2, 2 + len(mark))
        text.stylize("bold", indent, indent + len(finding.check) + (not is_named))
        if not brief:
            text.append_text(self.paragraph(finding.subject, "dim", "looked at ", indent))
        if finding.hint:
            text.append_text(self.paragraph(finding.hint, "", "→ " if self.is_utf8 else "-> ", indent))
        return text


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], styles: Sequence[str] = ()) -> None:
    """Print a table as wide as the terminal, or as its content; `styles` are those of the rows."""
    page = Page(width=None if sys.stdout.isatty() else UNLIMITED)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, heading in enumerate(headings):
        table.add_column(heading, overflow="fold", no_wrap=number == 0)
    for number, row in enumerate(rows):
        table.add_row(*(Text(escape(cell)) for cell in row), style=styles[number] if styles else None)
    page.print(table)


# Sizes, which are binary, durations and times

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")

_UNITS_OF_TIME = ((86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s"))


def size(amount: float) -> str:
    """Format bytes with about three digits: ``820 KiB``, ``1.5 GiB``."""
    power = 0
    while amount >= 1023.95 and power < len(UNITS) - 1:
        amount /= 1024
        power += 1
    return f"{amount:.0f} {UNITS[power]}" if amount >= 99.95 or power == 0 else f"{amount:.1f} {UNITS[power]}"


def duration(seconds: float) -> str:
    """Format seconds: ``15 ms``, ``2.1 s``, ``3 min 5 s``, ``2 h 10 min``, ``3 d 4 h``."""
    if 0 < seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    large, small, unit, part = next(row for row in _UNITS_OF_TIME if whole >= row[0])
    rest = whole % large // small
    return f"{whole // large} {unit} {rest} {part}" if rest else f"{whole // large} {unit}"


def clock(when: float) -> str:
    """Format a moment in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))


def zone(when: float) -> str:
    """Name the time zone of a moment: ``CET, UTC+0100``."""
    return time.strftime("%Z, UTC%z", time.localtime(when))
