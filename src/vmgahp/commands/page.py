"""Findings as people read them: a paragraph each, colored on a terminal and wrapped."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

from vmgahp.findings import BAD, OFF, OK, UNKNOWN, Finding
from vmgahp.text import escape

SYMBOLS = {OK: "✓", OFF: "!", BAD: "✗", UNKNOWN: "?"}
PLAIN = {OK: "ok", OFF: "!!", BAD: "XX", UNKNOWN: "??"}
"""Where the output's encoding has no symbols."""
_COLORS = {OK: "32", OFF: "33", BAD: "1;31", UNKNOWN: "36"}
_DIM = "2"

LEAST_WIDTH, USUAL_WIDTH, MOST_WIDTH = 40, 80, 110

_PAST_ASCII = {"“": '"', "”": '"', "→": "->"}


class Page:
    """Where the findings go: how wide it is, and whether it has colors and symbols."""

    def __init__(self, *, color: bool = False, symbols: bool = False, width: int = USUAL_WIDTH) -> None:
        self.color = color
        self.symbols = symbols
        self.width = max(LEAST_WIDTH, min(width, MOST_WIDTH))

    @classmethod
    def of(cls, stream: TextIO, environ: Mapping[str, str]) -> "Page":
        """What a stream can show: colors on a terminal without NO_COLOR, symbols where UTF-8 is written."""
        terminal = stream.isatty()
        width = USUAL_WIDTH
        if terminal:
            try:
                width = os.get_terminal_size(stream.fileno()).columns or USUAL_WIDTH
            except (OSError, ValueError):
                pass
        return cls(
            color=terminal and not environ.get("NO_COLOR") and environ.get("TERM", "") not in ("", "dumb"),
            symbols=(getattr(stream, "encoding", "") or "").lower().replace("-", "") == "utf8",
            width=width,
        )

    def paint(self, text: str, codes: str) -> str:
        return f"\x1b[{codes}m{text}\x1b[0m" if self.color and text else text

    def text(self, text: str) -> str:
        """`text` without anything that a terminal would act upon, nor what this page cannot show."""
        text = escape(text)
        if self.symbols or text.isascii():
            return text
        for fancy, plain in _PAST_ASCII.items():
            text = text.replace(fancy, plain)
        return text.encode("ascii", "backslashreplace").decode()


def render(page: Page, sections: Sequence[tuple[str, Sequence[Finding]]], *, brief: bool = False) -> str:
    """All sections, those without findings left out.

    Where it is to be `brief`, nothing is said of where it was looked, and the findings that stand on another one
    that is shown are named beneath that one and not shown themselves.
    """
    blocks = []
    shown = {one.check for _, found in sections for one in found if one.verdict != OK and not one.because}
    beneath: dict[str, list[str]] = {}
    if brief:
        for one in (one for _, found in sections for one in found if one.because in shown):
            beneath.setdefault(one.because, []).append(one.check)
        sections = [(title, [one for one in found if one.because not in shown]) for title, found in sections]
    for title, found in sections:
        if found:
            lines = [page.paint(page.text(title), "1")] if title else []
            for finding in found:
                lines += _finding(page, finding, brief)
                if followers := beneath.pop(finding.check, []):
                    names = ", ".join(dict.fromkeys(followers))
                    lines += _aside(page, " " * 4, "", f"What stands on it, and is not told: {names}.", _DIM)
            blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def _finding(page: Page, finding: Finding, brief: bool) -> list[str]:
    mark = (SYMBOLS if page.symbols else PLAIN)[finding.verdict]
    indent = " " * (len(mark) + 3)
    seen = page.text(finding.seen)
    if seen[-1:] not in ".!?":
        seen += "."
    # Many a sentence begins with the name of the setting that it is about.
    head = finding.check if seen.startswith(f"{finding.check} ") else f"{finding.check}:"
    body = _wrap(seen if head == finding.check else f"{head} {seen}", page.width - len(indent))
    lines = [f"  {page.paint(mark, _COLORS[finding.verdict])} {page.paint(body[0][: len(head)], '1')}"]
    lines[0] += body[0][len(head) :]
    lines += [indent + line for line in body[1:]]
    if not brief:
        lines += _aside(page, indent, "looked at ", finding.looked_at, _DIM)
    if finding.hint:
        lines += _aside(page, indent, "→ " if page.symbols else "-> ", finding.hint, "")
    return lines


def _aside(page: Page, indent: str, lead: str, text: str, codes: str) -> list[str]:
    """A paragraph under a finding, its further lines under its first word."""
    body = _wrap(page.text(text), page.width - len(indent) - len(lead))
    lines = [lead + body[0], *(" " * len(lead) + line for line in body[1:])]
    return [indent + (page.paint(line, codes) if codes else line) for line in lines]


def _wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width` characters; a command or a path that is longer is not cut."""
    from textwrap import wrap

    return wrap(text, max(width, 20), break_long_words=False, break_on_hyphens=False) or [""]


def verdict(page: Page, text: str, good: bool | None) -> str:
    """The last line: green for a machine that is fit, red for one that is not, neither for who knows."""
    codes = {True: "1;32", False: "1;31", None: "1;36"}[good]
    return "\n".join(page.paint(line, codes) for line in _wrap(page.text(text), page.width)) + "\n"


def page_of_stdout(environ: Mapping[str, str]) -> Page:
    """The page that standard output is."""
    return Page.of(sys.stdout, environ)
