"""The pools of the tests here, and how the tests are shared out among the workers of pytest-xdist.

A starter sleeps 30 seconds after each START, and asks for a status every 30 at most: a test waits far more than it
computes, so that pools run side by side. They know nothing of each other, in namespaces of their own.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from tests.lab.namespace import wheel_of, why_not
from tests.lab.pool import Pool

HERE = Path(__file__).parent
POOL = pytest.StashKey[Pool]()

LONGEST_FIRST = (
    *(
        "pool",
        "checkpoints",
        "vsphere-checkpoint",
        "transfer_plugin",
        "periodic",
        "vmrun",
        "script",
        "vsphere",
    ),
    *("doctor", "transcripts", "any", "guest", "catalog", "libvirtd", "debian_package", "console", "lxc"),
)
"""The groups, as `pytest --dist=loadgroup --no-loadscope-reorder` begins with them: from six minutes down to one."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A module is a group, whose tests share a pool in one worker; a test whose jobs take long may name its own."""
    order: dict[pytest.Item, int] = {}
    for item in items:
        if item.path.parent == HERE:
            mark = item.get_closest_marker("xdist_group")
            name = mark.args[0] if mark else item.path.stem.removeprefix("test_")
            if not mark:
                item.add_marker(pytest.mark.xdist_group(name))
            order[item] = LONGEST_FIRST.index(name) if name in LONGEST_FIRST else -1
    items.sort(key=lambda item: order.get(item, -1))


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool whose VM_GAHP_SERVER is this clone's daemon, installed from its wheel."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    pool = Pool(tmp_path_factory.mktemp("pool"))
    request.session.stash[POOL] = pool
    try:
        pool.start(wheel_of(tmp_path_factory))
        pool.remember()
        yield pool
    finally:
        pool.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the ends of HTCondor's and the daemon's logs with a failure."""
    report = yield
    pool = item.session.stash.get(POOL, None)
    if report.failed and pool:
        report.sections.append(("logs of the pool", pool.diagnosis()))
    return report
