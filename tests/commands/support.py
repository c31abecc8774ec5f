"""Helpers for the tests of several commands: they call the program, and look at texts and parsers."""

import argparse
from collections.abc import Container, Iterator
from typing import NamedTuple

import pytest

from vmgahp import cli
from vmgahp.commands.arguments import Parser


class Done(NamedTuple):
    """Outcome of a command: the exit status, and what was said."""

    status: int
    out: str
    err: str


def vmgahp(capsys: pytest.CaptureFixture[str], *words: str) -> Done:
    """Call the program with these words."""
    capsys.readouterr()
    try:
        status = cli.main(["vmgahp", *words])
    except SystemExit as ended:
        status = int(ended.code or 0)
    return Done(status, *capsys.readouterr())


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
