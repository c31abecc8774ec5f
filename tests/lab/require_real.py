"""A pytest plugin: where VMGAHP_REQUIRE_REAL is set, a test that needs the real thing may not skip.

A developer without libvirt may run plain ``pytest`` and sees skips. scripts/test has set everything up,
so there a skip would hide that the part which matters was not tested; it loads this with ``-p``.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

REAL = ("libvirt", "pool", "qemu", "vsphere", "xen")


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
