"""Fixtures that more than one test module uses."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.peer import Peer, environment

JOB_UID = 54321

# How long an example takes says more about the machine than about the code.
hypothesis.settings.register_profile("vmgahp", deadline=None)
hypothesis.settings.load_profile("vmgahp")


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
