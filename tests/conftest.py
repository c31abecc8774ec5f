"""Fixtures that more than one test module uses."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.peer import Peer, environment

JOB_UID = 54321

# How long an example takes says more about the machine than about the code. `quick` is for every day, `full` for CI;
# `HYPOTHESIS_PROFILE=full` or `--hypothesis-profile=full` asks for it by hand.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=20)
hypothesis.settings.register_profile("full", deadline=None, max_examples=100)
hypothesis.settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("full" if os.environ.get("CI") else "quick")
)


def examples(full: int) -> int:
    """How many examples a test gets that has `full` of them in the full profile."""
    return max(1, full * hypothesis.settings.default.max_examples // 100)


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A scratch directory such as condor_starter makes: mode 755 for VM jobs, owned by the job's user.

    Not beneath pytest's own directory, which is closed to other users and closed again by every run.
    """
    with tempfile.TemporaryDirectory(prefix="vmgahp-test-") as outer:
        directory = Path(outer) / "dir_1"
        directory.mkdir()
        if os.getuid() == 0:
            os.chmod(outer, 0o755)
            os.chown(directory, JOB_UID, JOB_UID)
        yield directory


@pytest.fixture
def peer(scratch: Path) -> Iterator[Peer]:
    """A client of a server with the simulated hypervisor, past the greeting."""
    with Peer(environment("simulated", scratch)) as client:
        assert client.line().startswith("$VMGahpVersion")
        yield client


def simulated_ad(scratch: Path, *more: str) -> list[str]:
    return [
        f'VM_WORKING_DIR = "{scratch}"',
        'JobVMType = "simulated"',
        "JobVMMemory = 64",
        "ClusterId = 7",
        "ProcId = 3",
        'User = "alice@lab"',
        *more,
    ]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew")
