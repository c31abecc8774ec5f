"""The machine that all attacks of a worker share, and the place of those that need none."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks.here import Here
from tests.attacks.support import Battleground
from tests.conftest import JOB_UID
from tests.lab.namespace import require_namespace


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Battleground]:
    require_namespace(pool=False)
    with Battleground(tmp_path_factory.mktemp("attacks")) as made:
        yield made


@pytest.fixture
def here() -> Iterator[Here]:
    # A user of this worker's own: its processes signal all that they may.
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    with tempfile.TemporaryDirectory(prefix="vmgahp-attack-") as execute:
        os.chmod(execute, 0o755)
        made = Here(Path(execute), JOB_UID + 100 + worker)
        yield made
        made.close()
