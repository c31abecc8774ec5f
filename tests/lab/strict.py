"""A pytest plugin with the rules of scripts/test: a skip is a failure, and a retry is counted.

A developer without libvirt may run plain ``pytest`` and sees skips. scripts/test has set everything up, so there
a skip would hide that something was not tested: it loads this plugin with ``-p tests.lab.strict``, which fails each
test that skips for a reason that is not in `ALLOWED`.

Tests of real parts (hypervisors, pools, containers) are run once more where they fail. Each retry is printed as a
line ``RERAN``, and three in a run fail it (scripts/lib/record.py): defects of ours have looked like flakes. Unit
tests are never retried.
"""

import os
import re
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

REAL = ("attacks", "faults", "libvirt", "node", "podman", "pool", "qemu", "vsphere", "xen")
"""The marks of tests that use more than Python."""

ALLOWED = {
    r"\bneeds root$": lambda: os.getuid() != 0,
    r"\bneeds an ordinary user$": lambda: os.getuid() == 0,
    r"\bneeds KVM$": lambda: not os.access("/dev/kvm", os.R_OK | os.W_OK),
    r"\bneeds a machine without KVM$": lambda: os.path.exists("/dev/kvm"),
    r"\bneeds (control groups|a cgroup v2 of one's own)$": lambda: not os.path.exists("/sys/fs/cgroup/cgroup.procs"),
    r"\bneeds a libvirt with passt$": lambda: "=bookworm" in Path("/etc/os-release").read_text(),  # 9.0 refuses it
    r"\bSELinux('s)? policy lets libvirt start no passt$": lambda: "selinux" in os.environ.get("VMGAHP_NODE_LAB", ""),
    r"\bneeds Python before 3\.14$": lambda: sys.version_info >= (3, 14),
}
"""Patterns of reasons to skip -> the condition under which the reason is accepted."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of real parts for one retry (pytest-rerunfailures)."""
    for item in items:
        if any(item.get_closest_marker(mark) for mark in REAL) and item.get_closest_marker("flaky") is None:
            item.add_marker(pytest.mark.flaky(reruns=1))


def fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(re.search(pattern, reason) and holds() for pattern, holds in ALLOWED.items()):
            report.outcome = "failed"
            report.longrepr = f"{report.nodeid} skipped, and everything is set up here: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip into a failure unless its reason is allowed."""
    report = yield
    if not hasattr(report, "wasxfail"):
        fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Do the same for a module that skips as a whole while it is imported."""
    report = yield
    fail_if_skipped(report)
    return report


class Retries:
    """The retries of a run, in the process that hears of all tests."""

    def __init__(self) -> None:
        self.reran: list[tuple[str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "rerun":  # type: ignore[comparison-overlap] # pytest-rerunfailures' own outcome
            lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")] or [""]
            self.reran.append((report.nodeid, lines[0].removeprefix("E").strip()[:200]))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name, why in self.reran:
            terminalreporter.write_line(f"RERAN {name}: {why}")


def pytest_configure(config: pytest.Config) -> None:
    """Register the list of retries where all workers report to."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Retries())
