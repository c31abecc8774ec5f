"""The pools of the tests here, and how the tests are shared out among the workers of pytest-xdist.

A starter sleeps 30 seconds after each START, and asks for a status every 30 at most: a test waits far more than it
computes, so that pools run side by side. They know nothing of each other, in namespaces of their own.
"""

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from tests.lab.namespace import default_root, newer_root, require_namespace, wheel_of
from tests.lab.pool import Pool
from tests.lab.systems import of_root, ran_on

HERE = Path(__file__).parent
POOL = pytest.StashKey[Pool]()

LONGEST_FIRST = (
    *("run", "pool", "newer", "checkpoints", "policies", "vsphere", "transfer_plugin", "means", "vmrun", "script"),
    *("libvirtd", "doctor", "guest", "any", "catalog", "xml_script", "debian_package", "getting_in", "lxc"),
)
"""The modules, from six minutes down to one: `pytest --dist=loadfile --no-loadscope-reorder` begins with the first,
and each runs in one worker with a pool that its tests share."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        name = item.path.stem.removeprefix("test_")
        return LONGEST_FIRST.index(name) if item.path.parent == HERE and name in LONGEST_FIRST else -1

    items.sort(key=place)


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool whose VM_GAHP_SERVER is this clone's daemon, installed from its wheel."""
    require_namespace()
    pool = Pool(tmp_path_factory.mktemp("pool"))
    request.session.stash[POOL] = pool
    with pool.running(wheel_of(tmp_path_factory)):
        pool.advertised = pool.offering()
        yield pool


@pytest.fixture(autouse=True)
def known_system(request: pytest.FixtureRequest) -> None:
    """Record whose HTCondor and libvirt it is."""
    root = newer_root() if request.path.stem == "test_newer" else default_root()
    if root.is_dir():
        ran_on(request.node, of_root(root))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the ends of HTCondor's and the daemon's logs with a failure."""
    report = yield
    pool = item.session.stash.get(POOL, None)
    if report.failed and pool:
        report.sections.append(("logs of the pool", pool.diagnosis()))
    return report
