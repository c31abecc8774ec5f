"""A pytest plugin: where VMGAHP_REQUIRE_REAL is set, a test that needs the real thing may not skip.

A developer without libvirt may run plain ``pytest`` and sees skips. scripts/test has set everything up,
so there a skip would hide that the part which matters was not tested; it loads this with ``-p``.

Where VMGAHP_DURATIONS names a file, it gets a line for each test: how many seconds it took, and its name.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator

import pytest

REAL = ("libvirt", "pool", "qemu", "vsphere", "xen")
if os.getuid() == 0:  # who becomes the job's user; nobody else's containers are tested
    REAL += ("podman",)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn the skip of a test that is marked as real into a failure."""
    report = yield
    real = [mark for mark in REAL if item.get_closest_marker(mark)]
    if report.skipped and real and os.environ.get("VMGAHP_REQUIRE_REAL") and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
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
