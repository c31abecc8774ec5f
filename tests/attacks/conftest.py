"""The machine that all attacks of a worker share."""

from collections.abc import Iterator

import pytest

from tests.attacks.support import Battleground
from tests.lab.namespace import why_not


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Battleground]:
    if reason := why_not(pool=False):
        pytest.skip(reason)
    with Battleground(tmp_path_factory.mktemp("attacks")) as made:
        yield made
