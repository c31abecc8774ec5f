"""A pytest plugin: where VMGAHP_REQUIRE_REAL is set, a test that needs the real thing may not skip.

A developer without libvirt may run plain ``pytest`` and sees skips. scripts/test has set everything up,
so there a skip would hide that the part which matters was not tested; it loads this with ``-p``.

Where VMGAHP_DURATIONS names a file, it gets a line for each test: how many seconds it took, and its name.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Generator

import pytest

REAL = ("faults", "libvirt", "podman", "pool", "qemu", "vsphere", "xen")


def takes_root(reason: object, uid: int) -> bool:
    """Whether a test skips since it takes root, which an ordinary user who has set everything up is still not."""
    return uid != 0 and re.search(r"\broot\b", str(reason)) is not None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn the skip of a test that is marked as real into a failure."""
    report = yield
    real = [mark for mark in REAL if item.get_closest_marker(mark)]
    if report.skipped and real and os.environ.get("VMGAHP_REQUIRE_REAL") and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        if takes_root(reason, os.getuid()):
            return report
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} is marked {real[0]} and must run here, but it skipped: {reason}"
    return report


class Durations:
    """How long each test took, its fixtures included."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        with open(self.path, "w") as file:
            file.writelines(f"{taken:8.1f} {name}\n" for name, taken in self.seconds.most_common())


def pytest_configure(config: pytest.Config) -> None:
    """Keep the times in the process that hears of all tests, not in each of its workers."""
    path = os.environ.get("VMGAHP_DURATIONS")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(path))
