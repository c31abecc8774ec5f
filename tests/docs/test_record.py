"""The pages of what was tried show what the record of a full run has counted."""

import json
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.attacks.support import SURFACES, Must, Who, rows

PAGE = REPOSITORY / "docs/explanation/security.md"


def test_every_surface_has_its_module_and_every_kind_of_attacker_a_row() -> None:
    modules = (REPOSITORY / "tests/attacks").glob("test_*.py")
    assert {path.stem.removeprefix("test_") for path in modules if "\n@attack(" in path.read_text()} == set(SURFACES)
    assert {row.who for surface in SURFACES for row in rows(surface)} == set(Who)
    assert {row.must for surface in SURFACES for row in rows(surface)} == set(Must)


def tables(record: Path) -> str:
    import attacks_tried

    return str(attacks_tried.tables(record))


def test_the_page_shows_what_the_run_has_counted_and_no_more(tmp_path: Path) -> None:
    counts = {"ad": [40, 2], "guest": [7, 0], "gone": [1, 1]}
    part = {"commit": "0123456789abcdef", "date": "2026-11-25", "system": "Debian 12 (bookworm)", "seconds": 600}
    part |= {"passed": 5, "failed": 2, "skipped": 1, "rerun": 4}
    part |= {"counts": {"attacks by surface": counts, "attacks by attacker": {"job's user": [48, 3]}}}
    record = tmp_path / "tried.json"
    record.write_text(json.dumps({"parts": {"attacks": part}}))
    shown = tables(record)
    assert "2026-11-25 at commit `0123456789ab`, on Debian 12 (bookworm), in 10 minutes" in shown
    assert "5 passed, 2 failed, 1 skipped, 4 run again" in shown
    assert "| [Attacks by the job ad](../../tests/attacks/test_ad.py) | 40 | 38 | 2 |\n" in shown
    assert "| gone | 1 | 0 | 1 |\n" in shown, "what was tried once and is a module no more"
    assert "| all | 48 | 45 | 3 |\n" in shown
    assert "| job's user | 48 | 45 | 3 |\n" in shown
    assert PAGE.read_text().count("```{from-code} attacks-tried\n```") == 1
    assert "| tried |" not in PAGE.read_text()


@pytest.mark.parametrize("text", ["", '{"parts": {"faults": {}}}'], ids=["no file", "no part"])
def test_the_page_says_that_nothing_is_recorded(tmp_path: Path, text: str) -> None:
    record = tmp_path / "tried.json"
    if text:
        record.write_text(text)
    assert tables(record) == "Not recorded yet.\n"


def test_the_page_of_tested_systems_shows_where_the_tests_ran(tmp_path: Path) -> None:
    import tested_on

    node = {"system": "Debian 13", "security": "AppArmor", "libvirt": "11.3.0", "QEMU": "10.0.2", "HTCondor": "23.9.6"}
    part = {"system": "Debian 12", "date": "2026-11-25", "passed": 4, "failed": 1, "ran on": [[node, 5]]}
    record = tmp_path / "tried.json"
    record.write_text(json.dumps({"parts": {"node": part}}))
    rows = tested_on.table(record).splitlines()
    [row] = [row for row in rows if "AppArmor" in row and "11.3.0" in row]
    assert row.endswith("| Debian 13, AppArmor | 11.3.0 | 10.0.2 | 23.9.6 | 5 | 1 | 2026-11-25 |")
    assert sum("not recorded yet" in row for row in rows) == len(tested_on.PARTS) - 1
