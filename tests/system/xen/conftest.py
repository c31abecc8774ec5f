"""One machine with Xen for all tests here, for it takes half a minute to boot."""

from collections.abc import Generator, Iterator

import pytest
from tests.lab.systems import ran_on
from tests.lab.xen import XenHost, why_not

XEN = pytest.StashKey[XenHost]()


@pytest.fixture(scope="session")
def xen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[XenHost]:
    """A machine with Xen, up to the libvirt in its dom0; without our package."""
    if reason := why_not():
        pytest.skip(reason)
    host = XenHost(tmp_path_factory.mktemp("xen"))
    request.session.stash[XEN] = host
    try:
        host.open()
        yield host
    finally:
        host.close()


@pytest.fixture(autouse=True)
def known_system(request: pytest.FixtureRequest, xen: XenHost) -> None:
    """Record which Xen it is."""
    ran_on(request.node, xen.system)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the ends of dom0's logs with a failure."""
    report = yield
    host = item.session.stash.get(XEN, None)
    if report.failed and host:
        report.sections.append(("logs of dom0", host.diagnosis()))
    return report
