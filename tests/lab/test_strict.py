"""The rules of scripts/test: which skips are failures, which failures are retried, and what is kept of a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import REPOSITORY

patient = pytest.mark.timeout(600)
"""Each starts a pytest of its own, of which a busy machine makes a minute."""

INI = """
[pytest]
markers =
    libvirt
    pool
"""

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

def test_of_the_other_user():
    pytest.skip("needs {other}")

def test_of_this_user():
    pytest.skip("needs {mine}")
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


def run(directory: Path, *options: str, **modules: str) -> tuple[str, dict[str, object]]:
    """Run modules in a pytest that has nothing of this one's: its options, plugins and place in a run."""
    (directory / "pytest.ini").write_text(INI)
    for name, text in modules.items():
        (directory / f"{name}.py").write_text(text)
    names = ("xdist.plugin", "pytest_rerunfailures", "tests.lab.strict", "tests.lab.record")
    plugins = [word for name in names for word in ("-p", name)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(REPOSITORY)}
    environ |= {"VMGAHP_RECORD": str(directory / "record.json")}
    argv = [sys.executable, "-m", "pytest", "-ra", *plugins, "-p", "no:cacheprovider", *options, str(directory)]
    done = subprocess.run(argv, cwd=directory, env=environ, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout, json.loads((directory / "record.json").read_text())


@patient
def test_a_skip_is_a_failure_except_for_who_runs_it(tmp_path: Path) -> None:
    mine, other = ("root", "an ordinary user") if os.getuid() == 0 else ("an ordinary user", "root")
    skips = SKIPS.replace("{other}", other).replace("{mine}", mine)
    whole = "import pytest\npytest.importorskip('no_such_module')\n"
    said, record = run(tmp_path, "--continue-on-collection-errors", test_it=skips, test_whole=whole)
    assert (record["failed"], record["skipped"]) == (4, 1), said
    assert "skipped, and everything is set up here: Skipped: no libvirt here" in said
    assert "test_whole.py skipped, and everything is set up here" in said


@patient
def test_a_real_test_is_retried_once_and_said_and_a_unit_test_never(tmp_path: Path) -> None:
    said, record = run(tmp_path, "-n", "2", test_it=FLAKES)
    assert (record["passed"], record["failed"], record["rerun"]) == (1, 1, ["test_it.py::test_real"]), said
    assert record["counts"] == {"tries": {"real": [2, 1]}}, "the try that failed is not counted"
    assert "RERAN test_it.py::test_real: AssertionError: the first time of real" in said


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


@pytest.mark.parametrize(("number", "status"), [(2, 0), (3, 1)])
def test_three_retries_in_all_parts_fail_a_run(tmp_path: Path, number: int, status: int) -> None:
    part = {"passed": 5, "failed": 0, "skipped": 0, "slowest": [[3.0, "test_a"]], "counts": {}}
    names = [f"test_{one}" for one in range(number)]
    recorded(tmp_path, part | {"rerun": names[:1]}, part | {"rerun": names[1:]})
    command = [sys.executable, REPOSITORY / "scripts/lib/record.py", "run", tmp_path, tmp_path / "times.json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    assert all(f"RERAN {name}\n" in done.stdout for name in names)
    kept = json.loads((tmp_path / "times.json").read_text())
    assert [part["seconds"] for part in kept["parts"].values()] == [1, 2]
    assert kept["setup"] == [[12.5, "installing"], [0.2, "looking"]]
    assert "     3.0 s  part0: test_a" in done.stdout
