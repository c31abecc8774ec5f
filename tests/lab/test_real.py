"""The plugin that makes a skipped real test fail where everything was set up for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.namespace import REPOSITORY
from tests.lab.require_real import takes_root

TESTS = """
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

def test_other():
    pytest.skip("something else")
"""


@pytest.mark.parametrize(("required", "failed"), [(True, 2), (False, 0)])
def test_only_a_real_test_may_not_skip(tmp_path: Path, required: bool, failed: int) -> None:
    (tmp_path / "test_skips.py").write_text(TESTS)
    env = {name: value for name, value in os.environ.items() if name != "VMGAHP_REQUIRE_REAL"}
    command = [sys.executable, "-m", "pytest", "-p", "tests.lab.require_real", "-p", "no:cacheprovider", "-q"]
    done = subprocess.run(
        [*command, "-c", str(REPOSITORY / "pyproject.toml"), str(tmp_path)],
        cwd=REPOSITORY,
        env=env | ({"VMGAHP_REQUIRE_REAL": "1"} if required else {}),
        capture_output=True,
        text=True,
    )
    outcome = done.stdout.splitlines()[-1]
    assert f"{3 - failed} skipped" in outcome
    if failed:
        assert "1 failed" in outcome
        assert "1 error" in outcome
        assert "must run here, but it skipped: Skipped: no libvirt here" in done.stdout
    assert done.returncode == (1 if failed else 0)


@pytest.mark.parametrize(
    ("reason", "uid", "excused"),
    [
        ("Skipped: only root makes bridges", 1000, True),
        ("Skipped: only root makes bridges", 0, False),
        ("Skipped: no libvirt here", 1000, False),
    ],
)
def test_what_takes_root_may_skip_where_nobody_is_root(reason: str, uid: int, excused: bool) -> None:
    assert takes_root(reason, uid) is excused
