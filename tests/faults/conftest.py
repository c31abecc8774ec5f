"""A machine for each worker of pytest-xdist, and a share of all that is marked `faults`."""

from collections.abc import Iterator

import pytest

from tests.faults.matrix import Machine
from tests.lab.namespace import require_namespace


def shard(text: str) -> tuple[int, int]:
    """Read K/N. Raises ValueError."""
    number, shards = (int(part) for part in text.split("/"))
    if not 0 <= number < shards:
        raise ValueError(text)
    return number, shards


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--faults-shard",
        type=shard,
        metavar="K/N",
        help="of each test marked faults only every N-th case, beginning with number K, which counts from 0",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the cases of a shard, by their place among all cases of their test, whatever else was selected."""
    if config.getoption("--faults-shard") is None:
        return
    number, shards = config.getoption("--faults-shard")
    others = []
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("faults"):
            [place] = item.callspec.indices.values()
            if place % shards != number:
                others.append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    require_namespace(pool=False)
    with Machine(tmp_path_factory.mktemp("faults")) as made:
        yield made
