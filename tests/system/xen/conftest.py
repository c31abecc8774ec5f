"""One machine with Xen for all tests here, for it takes half a minute to boot, and the guests that they share."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from typing import Any

import libvirt
import pytest
from tests.lab.systems import ran_on
from tests.lab.xen import XenHost, why_not
from tests.system.xen.guests import START, Events, Guest

XEN = pytest.StashKey[XenHost]()


@pytest.fixture(scope="session")
def xen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[XenHost]:
    """A machine with Xen, up to the libvirt in its dom0; without our package."""
    reason = why_not()
    if reason:
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


@pytest.fixture(scope="session")
def connection(xen: XenHost) -> Iterator[Any]:
    libvirt.registerErrorHandler(lambda *_: None, None)
    connection = xen.libvirt()
    yield connection
    connection.close()


@pytest.fixture
def counter(xen: XenHost, connection: Any, request: pytest.FixtureRequest) -> Iterator[Guest]:
    """A guest that is named after its test, and not started."""
    made = Guest(xen, connection, request.node.name.removeprefix("test_")[:40].strip("_"))
    yield made
    made.destroy()


@pytest.fixture(scope="session")
def running(xen: XenHost, connection: Any) -> Iterator[Guest]:
    """One running guest that obeys no shutdown request, for the tests that leave it running."""
    made = Guest(xen, connection, "running")
    made.start("deaf")
    made.goes_on()
    yield made
    made.destroy()


@pytest.fixture(scope="session")
def events(xen: XenHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Events]:
    """Listening since before the first guest of the tests that ask for it."""
    found = Events(xen, tmp_path_factory.mktemp("events") / "events")
    yield found
    found.process.kill()
    found.process.wait()


@pytest.fixture(scope="session")
def paused_shutdown(xen: XenHost) -> Iterator[tuple[threading.Thread, list[Any]]]:
    """A shutdown request to a paused guest, under way on a connection of its own: it takes a minute."""
    connection = xen.libvirt()
    made = Guest(xen, connection, "paused")
    domain = made.start()
    made.goes_on()
    domain.suspend()
    came_of_it: list[Any] = []

    def shut_down() -> None:
        try:
            came_of_it.append(domain.shutdown())
        except libvirt.libvirtError as error:
            came_of_it.append(error)

    thread = threading.Thread(target=shut_down, daemon=True)
    thread.start()
    yield thread, came_of_it
    thread.join(START)
    made.destroy()
    connection.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the ends of dom0's logs with a failure."""
    report = yield
    host = item.session.stash.get(XEN, None)
    if report.failed and host:
        report.sections.append(("logs of dom0", host.diagnosis()))
    return report
