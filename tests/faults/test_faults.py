"""Faults at the points of a VM's life: a dozen by day, all of them in scripts/test --all."""

import importlib
import re
from collections.abc import Iterator

import pytest

from tests.faults import launcher
from tests.faults.cases import FAULTS, OPERATIONS, Case, Verdict, all_cases
from tests.faults.matrix import (
    BEGIN,
    END,
    MACHINES,
    PAGE,
    Machine,
    faults_table,
    in_words,
    tables,
    try_matrix,
    try_random,
)
from tests.faults.rows import ROWS
from tests.lab.namespace import why_not
from vmgahp import lifecycle

BY_DAY = [
    Case("START", "launch.made", "daemon: SIGKILL"),
    Case("START", "prepare.done", "libvirtd: SIGTERM"),
    Case("START from a checkpoint", "launch.made", "daemon: SIGTERM"),
    Case("SUSPEND", "save.begun", "libvirtd: SIGSTOP"),
    Case("SUSPEND", "save.written", "daemon: QUIT"),
    Case("RESUME of a saved VM", "restore.made", "QEMU: SIGKILL"),
    Case("RESUME of a saved VM", "restore.made", "disk: read-only"),
    Case("CHECKPOINT", "checkpoint.saved", "disk: full"),
    Case("CHECKPOINT", "checkpoint.written", "daemon: SIGKILL"),
    Case("STOP", "end.asked", "QEMU: SIGSTOP"),
    Case("SIGTERM", "end.begun", "libvirtd: SIGKILL"),
]
ROWS_BY_DAY = ["libvirtd: SIGTERM when the image of a CHECKPOINT is whole", "the second START of a live job"]
ROWS_BY_DAY += [
    "helper: SIGKILL at launch.made during START",
    "helper: SIGKILL at save.written during SUSPEND",
    "helper: SIGKILL at restore.made during RESUME of a saved VM",
]

RANDOM_SECONDS = 60.0


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    if reason := why_not(pool=False):
        pytest.skip(reason)
    with Machine(tmp_path_factory.mktemp("faults")) as made:
        yield made


def not_survived(verdict: Verdict) -> bool:
    return bool(verdict.lost) or not verdict.tried


def survived(verdict: Verdict) -> None:
    """Untried is what never came to its point, or had nothing there that could fail."""
    assert not not_survived(verdict), in_words(verdict)


def say_if_lost(verdict: Verdict) -> None:
    """Five hundred that survived would hide the one that did not."""
    if not_survived(verdict):
        print(in_words(verdict))


@pytest.mark.libvirt
@pytest.mark.parametrize("case", BY_DAY, ids=str)
def test_a_fault_is_survived(machine: Machine, case: Case) -> None:
    survived(machine.try_case(case))


@pytest.mark.libvirt
@pytest.mark.parametrize("row", ROWS_BY_DAY)
def test_a_mended_fault_stays_mended(machine: Machine, row: str) -> None:
    survived(machine.ask({"row": row}))


@pytest.mark.faults
@pytest.mark.parametrize("row", [row for row in ROWS if row not in ROWS_BY_DAY])
def test_every_mended_fault_stays_mended(machine: Machine, row: str) -> None:
    survived(machine.ask({"row": row}))


@pytest.mark.xdist_group("all machines")
@pytest.mark.faults
@pytest.mark.timeout(3000)
def test_every_fault_at_every_point_is_survived() -> None:
    if reason := why_not(pool=False):
        pytest.skip(reason)
    found = try_matrix(MACHINES, "", say_if_lost)
    assert [verdict[:3] for verdict in found if not_survived(verdict)] == []
    assert len(found) == len(all_cases())


@pytest.mark.xdist_group("all machines")
@pytest.mark.faults
def test_any_sequence_of_operations_and_faults_is_survived() -> None:
    if reason := why_not(pool=False):
        pytest.skip(reason)
    found = try_random(MACHINES, 1, RANDOM_SECONDS, say_if_lost)
    assert [verdict[:3] for verdict in found if not_survived(verdict)] == []


# The harness


def test_every_point_of_a_life_is_tried() -> None:
    assert {point for points in OPERATIONS.values() for point in points} == set(lifecycle.POINTS)


def test_there_are_at_least_five_hundred_faults() -> None:
    assert len(set(all_cases())) == len(all_cases()) >= 500


@pytest.mark.parametrize(("module", "name"), launcher.SHORTER)
def test_what_is_shortened_is_there(module: str, name: str) -> None:
    pytest.importorskip("libvirt")
    assert hasattr(importlib.import_module(module), name)


def test_the_tables_say_what_was_lost() -> None:
    lost = Verdict("SUSPEND", "save.begun", "disk: full", True, ["the guest"], 1.0, "")
    untried = Verdict("SUSPEND", "save.begun", "disk: read-only", False, [], 1.0, "")
    other = Verdict("SUSPEND", "save.named", "disk: full", True, [], 1.0, "")
    text = tables(
        [lost, untried, other], [Verdict("random", "seed 7", "12 steps", True, ["a request"], 60.0, "")], 90.0
    )
    assert "| SUSPEND | 3 | - | - | - | 1 of 2 |\n" in text
    assert "| disk: full | 1 of 2 |\n" in text
    assert "- SUSPEND, save.begun, disk: full: the guest\n" in text
    assert "12 operations, half of them with a fault, in 1 minutes on 1 machines; 1 sequences ended in a loss." in text
    assert "- seed 7: a request\n" in text


def test_the_page_has_the_tables_of_a_run() -> None:
    page = PAGE.read_text()
    assert faults_table() in page
    shown = page.partition(BEGIN)[2].partition(END)[0]
    assert re.match(r"On \d+ \w+ 20\d\d (\d+) faults were tried, in \d+ minutes; \1 survived\.\n", shown)
    for operation, points in OPERATIONS.items():
        assert re.search(rf"^\| {operation} \| {len(points)} \|( (\d+ of \d+|-) \|){{4}}$", shown, re.MULTILINE)
    for fault in FAULTS:
        assert re.search(rf"^\| {fault} \| (\d+) of \1 \|$", shown, re.MULTILINE)
    assert "\n- nothing.\n" in shown
    assert "; 0 sequences ended in a loss.\n" in shown
