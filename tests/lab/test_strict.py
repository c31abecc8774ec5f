"""The rules of scripts/test: which skips are failures, which failures are retried, and what is kept of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import REPOSITORY

SKIPS = """
import pytest

@pytest.mark.libvirt
def test_real():
    pytest.skip("no libvirt here")

@pytest.fixture
def pool():
    pytest.skip("no pool here")

@pytest.mark.pool
def test_pool(pool):
    pass

def test_unit():
    pytest.skip("something else")

def test_allowed():
    pytest.skip("needs {other}")
"""

FLAKES = """
import pathlib
import pytest

def fail_once(name):
    seen = pathlib.Path(name)
    if not seen.exists():
        seen.touch()
        raise AssertionError(f"the first time of {name}")

@pytest.mark.libvirt
def test_real(tmp_path_factory, request):
    request.node.user_properties.append(("counted", ["tries", "real", 2, 1]))
    fail_once("real")

def test_unit():
    fail_once("unit")
"""


def run(directory: Path, text: str, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, object]]:
    (directory / "test_it.py").write_text(text)
    plugins = [word for name in ("strict", "record") for word in ("-p", f"tests.lab.{name}")]
    command = [sys.executable, "-m", "pytest", *plugins, "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        [*command, "-c", REPOSITORY / "pyproject.toml", f"--rootdir={directory}", directory / "test_it.py"],
        cwd=directory,
        env=os.environ | {"VMGAHP_RECORD": str(directory / "record.json"), "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    return done, json.loads((directory / "record.json").read_text())


def test_a_skip_is_a_failure_except_for_who_runs_it(tmp_path: Path) -> None:
    other = "an ordinary user" if os.getuid() == 0 else "root"
    done, record = run(tmp_path, SKIPS.replace("{other}", other))
    assert done.returncode == 1, done.stdout
    assert (record["failed"], record["skipped"]) == (3, 1), done.stdout
    assert "skipped, and everything is set up here: Skipped: no libvirt here" in done.stdout


def test_the_reason_of_the_other_user_is_none_here(tmp_path: Path) -> None:
    mine = "root" if os.getuid() == 0 else "an ordinary user"
    _, record = run(tmp_path, SKIPS.replace("{other}", mine))
    assert (record["failed"], record["skipped"]) == (4, 0)


def test_a_module_that_skips_as_a_whole_is_a_failure(tmp_path: Path) -> None:
    done, _ = run(tmp_path, "import pytest\npytest.importorskip('no_such_module')\n")
    assert done.returncode != 0
    assert "everything is set up here" in done.stdout


def test_a_real_test_is_retried_once_and_said_and_a_unit_test_never(tmp_path: Path) -> None:
    done, record = run(tmp_path, FLAKES, "-n", "2")
    assert done.returncode == 1
    assert (record["passed"], record["failed"], record["rerun"]) == (1, 1, ["test_it.py::test_real"])
    assert record["counts"] == {"tries": {"real": [2, 1]}}, "the try that failed is not counted"
    assert "RERAN test_it.py::test_real: AssertionError: the first time of real" in done.stdout


# ---- scripts/lib/record.py ----


def recorded(directory: Path, *parts: dict[str, object]) -> Path:
    """Write what scripts/test leaves of a run, one part a record."""
    (directory / "steps").write_text("12.5\tinstalling\n0.2\tlooking\n")
    lines = []
    for number, part in enumerate(parts):
        (directory / f"part{number}.json").write_text(json.dumps(part))
        lines.append(f"part{number}\t{number + 1}\tok\n")
    (directory / "parts").write_text("".join(lines))
    return directory


def record_script(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, REPOSITORY / "scripts/lib/record.py", *words]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize(("number", "status"), [(2, 0), (3, 1)])
def test_three_retries_in_all_parts_fail_a_run(tmp_path: Path, number: int, status: int) -> None:
    part = {"passed": 5, "failed": 0, "skipped": 0, "slowest": [[3.0, "test_a"]], "counts": {}}
    names = [f"test_{one}" for one in range(number)]
    recorded(tmp_path, part | {"rerun": names[:1]}, part | {"rerun": names[1:]})
    done = record_script("run", tmp_path, tmp_path / "times.json")
    assert done.returncode == status, done.stdout + done.stderr
    assert all(f"RERAN {name}\n" in done.stdout for name in names)
    kept = json.loads((tmp_path / "times.json").read_text())
    assert [part["seconds"] for part in kept["parts"].values()] == [1, 2]
    assert kept["setup"] == [[12.5, "installing"], [0.2, "looking"]]
    assert "     3.0 s  part0: test_a" in done.stdout
