"""One pool for all tests here: starting one takes seconds, and jobs may well run side by side."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest
from tests.lab.namespace import build_wheel, why_not
from tests.lab.pool import Pool

POOL = pytest.StashKey[Pool]()


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool whose VM_GAHP_SERVER is this clone's daemon, installed from its wheel."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    pool = Pool(tmp_path_factory.mktemp("pool"))
    request.session.stash[POOL] = pool
    try:
        pool.start(build_wheel(tmp_path_factory.mktemp("wheel")))
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
