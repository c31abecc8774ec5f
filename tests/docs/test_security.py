"""The security page says what is tried, and names tests that are there."""

import re

from tests import REPOSITORY
from tests.attacks.support import BEGIN, END, PAGE, SURFACES, Must, Who, rows, table


def test_the_table_of_attacks_is_that_of_the_suite() -> None:
    """``python -m tests.attacks --write`` puts it there."""
    shown = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert shown == table()


def test_every_attack_that_the_page_names_is_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::([^`]+)`", PAGE.read_text())
    assert len(named) > 40
    attacks = {f"tests/attacks/test_{surface}.py": {row.name for row in rows(surface)} for surface in SURFACES}
    missing = [
        f"{path}::{name}"
        for path, name in named
        if name not in attacks.get(path, ()) and f"def {name}(" not in (REPOSITORY / path).read_text()
    ]
    assert missing == []


def test_every_surface_has_its_module_and_every_kind_of_attacker_a_row() -> None:
    modules = {path.stem.removeprefix("test_") for path in (REPOSITORY / "tests/attacks").glob("test_*.py")}
    assert modules == set(SURFACES)
    assert {row.who for surface in SURFACES for row in rows(surface)} == set(Who)
    assert {row.must for surface in SURFACES for row in rows(surface)} == set(Must)


def test_there_are_at_least_a_thousand_attacks() -> None:
    assert sum(row.times * len(row.modes) for surface in SURFACES for row in rows(surface)) >= 1000
