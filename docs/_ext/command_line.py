"""The commands of ``vmgahp`` as Markdown, from the parser that reads them."""

import argparse

from vmgahp.commands.tool import tool_parser


def _sub_commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _option(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else " " + str(action.metavar or _choices(action) or action.dest.upper())
    names = ", ".join(f"`{name}{value}`" for name in action.option_strings)
    return f"  - {names or f'`{action.metavar or action.dest}`'}: {plain(action.help or '')}"


def plain(text: str) -> str:
    """A sentence of the code's in Markdown: what would be a mark there is escaped."""
    return "".join("\\" + c if c in "\\<>*_`[]|" else c for c in text.replace("%%", "%"))


def _choices(action: argparse.Action) -> str:
    return "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""


def _describe(parser: argparse.ArgumentParser, lines: list[str]) -> None:
    children = _sub_commands(parser)
    if not children:
        own = [action for action in parser._actions if action.dest != "help"]
        usage = " ".join(parser.prog.split())
        lines += [f"`{usage}`", f": {plain(parser.description or '')}", ""]
        lines += [_option(action) for action in own]
        lines.append("")
    for child in children.values():
        _describe(child, lines)


def commands() -> str:
    """All commands with their arguments and options."""
    lines: list[str] = []
    _describe(tool_parser(), lines)
    return "\n".join(lines) + "\n"
