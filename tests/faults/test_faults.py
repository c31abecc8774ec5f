"""Faults at the points of a VM's life: all of them by scripts/test --faults, a shard in each run of CI."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.faults import launcher
from tests.faults.cases import FAULTS, OPERATIONS, Case, Verdict, all_cases
from tests.faults.matrix import LIVES, LONGEST, Machine, in_words
from tests.faults.rows import ROWS
from tests.lab.namespace import LabError, require_namespace
from vmgahp import lifecycle

SHARDS = 7
"""The shards into which CI divides the matrix."""

SEEDS = range(1, 2 * SHARDS + 1)
RANDOM_SECONDS = 45.0

patient = pytest.mark.timeout(LIVES * LONGEST + RANDOM_SECONDS + 60)
"""The machine ends first what hangs, and says where it stood."""


def survived(verdict: Verdict) -> None:
    """Fail also where it never came to the point, or nothing was there that could fail."""
    assert verdict.tried, in_words(verdict)
    assert not verdict.lost, in_words(verdict)


def counted(request: pytest.FixtureRequest, what: str, name: str, verdict: Verdict) -> None:
    """Count it for the record, and fail where it was not survived."""
    lost = int(bool(verdict.lost))
    request.node.user_properties.append(("counted", [what, name, max(verdict.tried, lost), lost]))
    survived(verdict)


# The longest come first


@patient
@pytest.mark.faults
@pytest.mark.parametrize("seed", SEEDS)
def test_any_sequence_of_faults_is_survived(machine: Machine, seed: int, request: pytest.FixtureRequest) -> None:
    counted(request, "random sequences", f"seed {seed}", machine.try_random(seed, RANDOM_SECONDS))


@patient
@pytest.mark.faults
@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_every_fault_at_every_point_is_survived(machine: Machine, case: Case, request: pytest.FixtureRequest) -> None:
    counted(request, "faults", f"{case.operation} | {case.fault}", machine.ask({"case": case}))


@patient
@pytest.mark.faults
@pytest.mark.parametrize("row", ROWS)
def test_every_mended_fault_stays_mended(machine: Machine, row: str) -> None:
    survived(machine.ask({"row": row}))


# The harness


def test_every_point_of_a_life_is_tried_and_no_case_twice() -> None:
    assert {point for points in OPERATIONS.values() for point in points} == set(lifecycle.POINTS)
    assert len(set(all_cases())) == len(all_cases())


@pytest.mark.parametrize("number", range(SHARDS))
def test_each_shard_has_every_operation_point_and_fault(number: int) -> None:
    operations, points, faults = (set(column) for column in zip(*all_cases()[number::SHARDS], strict=True))
    assert operations == set(OPERATIONS)
    assert points == set(lifecycle.POINTS)
    assert faults == set(FAULTS)


def test_a_shard_is_selected_by_its_option() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "faults"]
    command += ["--faults-shard", f"3/{SHARDS}", __file__]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"::test_every_fault_at_every_point_is_survived\[(.+)\]$", listed, re.MULTILINE)
    assert found == [str(case) for case in all_cases()[3::SHARDS]]
    for test, cases in (("every_mended_fault_stays_mended", len(ROWS)), ("any_sequence", len(SEEDS))):
        assert cases // SHARDS <= listed.count(f"::test_{test}") <= cases // SHARDS + 1


@pytest.mark.parametrize(("module", "name"), launcher.SHORTER)
def test_what_is_shortened_is_there(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


def test_the_page_says_what_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(REPOSITORY / "docs" / "_ext"), *sys.path])
    import faults_tried

    record = tmp_path / "tried.json"
    assert faults_tried.tried(record) == "Not recorded yet.\n"
    counts = {
        "faults": {"SUSPEND | disk: full": [3, 1], "SUSPEND | disk: read-only": [2, 0]},
        "random sequences": {"seed 1": [30, 0], "seed 2": [12, 1]},
    }
    part = {"commit": "0f67703", "date": "2026-11-05", "system": "Debian 12", "seconds": 90, "counts": counts}
    record.write_text(json.dumps({"parts": {"faults": part}}))
    text = faults_tried.tried(record)
    assert text.startswith("On 5 November 2026 5 faults were tried, in 2 minutes, on Debian 12 (commit `0f67703`); 4 ")
    assert "| SUSPEND | 3 | - | - | - | 4 of 5 |\n" in text
    assert "| disk: full | 2 of 3 |\n" in text
    assert "\n- SUSPEND, disk: full: 1 of 3\n" in text
    assert "2 random sequences had 42 operations, half of them with a fault; 1 sequences ended in a loss.\n" in text


class Unlucky(Machine):
    """A machine whose first life ends at the first question."""

    def _answer(self, what: object, seconds: float) -> list[object]:
        if not self._lost:
            raise LabError("its libvirtd is gone")
        return super()._answer(what, seconds)


@pytest.mark.libvirt
def test_a_lost_machine_is_replaced(tmp_path: Path) -> None:
    require_namespace(pool=False)
    with Unlucky(tmp_path) as machine:
        with pytest.warns(UserWarning, match="its libvirtd is gone"):
            assert machine.try_random(1, 0.0).lost == []
        assert machine.try_random(2, 0.0).lost == []


@pytest.mark.libvirt
def test_a_machine_that_is_lost_again_fails_every_test(tmp_path: Path) -> None:
    require_namespace(pool=False)
    with Machine(tmp_path) as machine:
        with (
            pytest.warns(UserWarning, match="no question"),
            pytest.raises(LabError, match="AssertionError: no question"),
        ):
            machine.answer("no question")
        with pytest.raises(LabError, match="AssertionError: no question"):
            machine.try_random(1, 0.0)
