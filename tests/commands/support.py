"""What the tests of several commands ask of a text and of parsers."""

import argparse
from collections.abc import Container, Iterator

from vmgahp.commands.arguments import Parser


def absent(text: Container[str], *parts: str) -> list[str]:
    """Those of these parts that are not in a text, or not among lines."""
    return [part for part in parts if part not in text]


def parsers(parser: argparse.ArgumentParser) -> Iterator[Parser]:
    """A parser, and those below it."""
    assert isinstance(parser, Parser)
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from parsers(child)
