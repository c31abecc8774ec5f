"""One node for all tests here, with this clone's package in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from tests.lab.node import Node, why_not
from tests.lab.packages import build, kept_of
from tests.lab.systems import ran_on

NODE = pytest.StashKey[Node]()


@pytest.fixture(scope="session")
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node that offers VMs, by our package, which was installed and set up as an administrator does."""
    if reason := why_not():
        pytest.skip(reason)
    if not shutil.which("dh_python3"):
        pytest.skip("there is no debhelper here (scripts/test --node installs it)")
    package = Path(os.environ.get("VMGAHP_PACKAGE", ""))  # of scripts/test, which builds it while others compute
    if not package.is_file():
        [package] = build("build-deb", tmp_path_factory.mktemp("package"), "--keep", str(kept_of(tmp_path_factory)))
    made = Node(tmp_path_factory.mktemp("node"))
    request.session.stash[NODE] = made
    try:
        made.open()
        made.install(package)
        if made.has_selinux:
            made.load_policy()
        made.set_up("--network", "none")
        yield made
    finally:
        made.close()


@pytest.fixture(autouse=True)
def known_system(request: pytest.FixtureRequest, node: Node) -> None:
    """Record which node it is."""
    ran_on(request.node, node.system)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the ends of the node's logs with a failure."""
    report = yield
    node = item.session.stash.get(NODE, None)
    if report.failed and node:
        report.sections.append(("logs of the node", node.diagnosis()))
    return report
