"""The manual pages of ``vmgahp``, a page for each command, from the parsers that read the words.

A file docs/man/vmgahp-COMMAND.md has the title; what is below it is put there when Sphinx reads it.
"""

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.writers.manpage import ManualPageTranslator

from vmgahp.commands.arguments import STATUSES, Parser
from vmgahp.commands.tool import COMMANDS, ToolCommand, tool_parser

WIDTH = 76
"""The columns of a synopsis, which fits a terminal of 80."""


def plain(text: str) -> str:
    """Escape Markdown's marks in a sentence of the code."""
    return "".join("\\" + c if c in "\\<>*_`[]|" else c for c in text.replace("%%", "%"))


def children(parser: argparse.ArgumentParser) -> dict[str, Parser]:
    """Return the subparsers of a parser by their words."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def man_pages() -> list[tuple[str, str, str]]:
    """List document, name and description of each command."""
    return [(f"man/vmgahp-{row.word}", f"vmgahp-{row.word}", row.text) for row in COMMANDS]


def commands() -> str:
    """List all commands by group, with links to their pages."""
    lines: list[str] = []
    for group in dict.fromkeys(row.group for row in COMMANDS):
        lines += [f"**{group}**", ""]
        lines += [
            line for row in COMMANDS if row.group == group for line in (_link(row), f": {plain(_begin(row.text))}.", "")
        ]
    return "\n".join(lines)


def statuses() -> str:
    """List the exit statuses that all commands have."""
    return _numbers(STATUSES)


def page(word: str) -> str:
    """Make the text below the title of a command's page."""
    [row] = [row for row in COMMANDS if row.word == word]
    parser = children(tool_parser(word))[word]
    below = children(parser)
    lines = ["## Synopsis", "", "```text", *_synopsis(parser, below), "```", ""]
    lines += ["## Description", "", plain(str(parser.description)), ""]
    common = _common(list(below.values()))
    if below:
        if common:
            lines += ["## Common options", "", *map(_argument, common)]
        for each in below.values():
            lines += [f"## {' '.join(each.prog.split())}", "", plain(str(each.description)), ""]
            lines += [_argument(action) for action in _own(each) if not _is_in(action, common)]
    elif own := _own(parser):
        lines += ["## Arguments and options", "", *map(_argument, own)]
    leaves = list(below.values()) or [parser]
    lines += [*_examples(leaves), *_all_statuses(leaves), *_keys(leaves)]
    others = [other for other in COMMANDS if other.group == row.group and other is not row]
    see = ", ".join(["[**vmgahp**(1)](vmgahp.md)", *map(_link, others)])
    return "\n".join([*lines, "## See also", "", see, ""])


def _link(row: ToolCommand) -> str:
    return f"[**vmgahp-{row.word}**(1)](/man/vmgahp-{row.word}.md)"


def _definitions(rows: Iterable[tuple[str, str]]) -> str:
    return "".join(f"`{term}`\n: {plain(text)}\n\n" for term, text in rows)


def _numbers(table: Mapping[int, str]) -> str:
    return _definitions((str(number), text) for number, text in table.items())


def _own(parser: Parser) -> list[argparse.Action]:
    return [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]


def _synopsis(parser: Parser, below: dict[str, Parser]) -> Iterator[str]:
    for each in below.values() or (parser,):
        formatter = argparse.HelpFormatter(each.prog, width=WIDTH)
        if below and _common(list(below.values())):
            # Of six with the same twenty options nobody sees what differs.
            words = [action for action in _own(each) if not action.option_strings]
            formatter.add_usage(None, words, [], prefix="")
            yield formatter.format_help().strip().replace(each.prog, f"{each.prog} [OPTION ...]", 1)
        else:
            formatter.add_usage(None, _own(each), each._mutually_exclusive_groups, prefix="")
            yield from formatter.format_help().strip().splitlines()


def _common(parsers: Sequence[Parser]) -> list[argparse.Action]:
    """Return the options that all of these parsers have with the same help."""
    first, *rest = [[action for action in _own(parser) if action.option_strings] for parser in parsers] or [[]]
    return [action for action in first if rest and all(_is_in(action, others) for others in rest)]


def _is_in(action: argparse.Action, others: Sequence[argparse.Action]) -> bool:
    return any((action.option_strings, action.help) == (other.option_strings, other.help) for other in others)


def _argument(action: argparse.Action) -> str:
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
    value = "" if action.nargs == 0 else " " + str(action.metavar or choices or action.dest.upper())
    names = ", ".join(f"`{name}{value}`" for name in action.option_strings) or f"`{action.metavar or action.dest}`"
    text = plain(_begin(action.help or ""))
    return f"{names}\n: {text}{'' if text.endswith('.') else '.'}\n"


def _examples(parsers: Sequence[Parser]) -> list[str]:
    lines = [
        line
        for parser in parsers
        for typed, what in parser.examples
        for line in (f"{plain(_begin(what))}:", "", "```sh", typed, "```", "")
    ]
    return ["## Examples", "", *lines] if lines else []


def _all_statuses(parsers: Sequence[Parser]) -> list[str]:
    """Make one list if all parsers have the same statuses, else the common list and the differences."""
    first, *rest = [dict(parser.statuses) for parser in parsers]
    if all(other == first for other in rest):
        return ["## Exit status", "", _numbers(first)]
    lines = ["## Exit status", "", statuses()]
    for parser in parsers:
        special = {number: text for number, text in parser.statuses.items() if STATUSES.get(number) != text}
        if special:
            lines += [f"`{parser.prog}`:", "", _numbers(special)]
    return lines


def _keys(parsers: Sequence[Parser]) -> list[str]:
    lines: list[str] = []
    told: list[object] = []
    for parser in parsers:
        if not parser.keys or parser.keys in told:
            continue
        told.append(parser.keys)
        some = [other.prog for other in parsers if other.keys == parser.keys]
        lines += ["One object on standard output, of " + ", ".join(f"`{prog} --json`" for prog in some) + ":", ""]
        lines.append(_definitions(parser.keys.items()))
    return ["## JSON", "", *lines] if lines else []


def _begin(text: str) -> str:
    """Capitalize a text, unless its first word is a name."""
    return text[:1].upper() + text[1:] if re.match(r"[a-z]+[ ,;:']", text) else text


def _read(app: Sphinx, document: str, source: list[str]) -> None:
    word = document.removeprefix("man/vmgahp-")
    if document.startswith("man/") and word in [row.word for row in COMMANDS]:
        source[0] += "\n" + page(word)


def _unlink(app: Sphinx, document: nodes.document, _name: str) -> None:
    """Remove internal links from a manual page, where their addresses would be empty."""
    if app.builder.name == "man":
        for link in list(document.findall(nodes.reference)):
            if link.get("internal"):
                link.replace_self(link.children)


class KeepNames(ManualPageTranslator):
    """The writer of manual pages; it keeps the case of programs' names in titles, which Sphinx puts into capitals."""

    def header(self) -> str:
        self._docinfo["title_upper"] = self._docinfo["title"]
        return super().header()

    def visit_title(self, node: nodes.title) -> None:
        text = node.astext()
        if self.section_level == 1 and isinstance(node.parent, nodes.section) and text.startswith("vmgahp "):
            self.body.append(f".SH {self.deunicode(text)}\n")
            raise nodes.SkipNode
        super().visit_title(node)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _read)
    app.set_translator("man", KeepNames)
    app.connect("doctree-resolved", _unlink)
    return {"parallel_read_safe": True}
