"""A pytest plugin that keeps what came of a run: outcomes, seconds of each test, and what the tests counted.

Loaded with ``-p tests.lab.record``; VMGAHP_RECORD names the JSON file that is written at the end of the session.
scripts/lib/record.py joins these files into ``build/times.json`` and ``tests/tried.json``.

A test counts by ``request.node.user_properties.append(("counted", [table, key, tried, failed]))``; the numbers of all
workers are added up in ``counts[table][key]``. By `tests.lab.systems.ran_on` it says where it ran, which else is here.
"""

import json
import os
import time
from collections import Counter

import pytest

from tests.lab import systems

KEPT = 50
"""Tests whose seconds are kept: the slowest."""


class Record:
    """What is heard of all tests, in the process that hears of all."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.began = time.monotonic()
        self.seconds: Counter[str] = Counter()
        self.outcomes: dict[str, str] = {}
        self.reran: list[str] = []
        self.counts: dict[str, dict[str, list[int]]] = {}
        self.ran_on: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        outcome: str = report.outcome
        if outcome == "rerun":
            self.reran.append(report.nodeid)
            return
        if (report.when == "call" or outcome != "passed") and self.outcomes.get(report.nodeid) != "failed":
            self.outcomes[report.nodeid] = outcome
        if report.when == "call":
            said = [str(value) for name, value in report.user_properties if name == "ran on"]
            self.ran_on[said[0] if said else systems.here()] += 1
            for name, value in report.user_properties:
                if name == "counted":
                    table, key, tried, failed = value  # type: ignore[misc]
                    sums = self.counts.setdefault(table, {}).setdefault(key, [0, 0])
                    sums[0] += tried
                    sums[1] += failed

    def pytest_sessionfinish(self) -> None:
        outcomes = Counter(self.outcomes.values())
        record = {
            "seconds": round(time.monotonic() - self.began),
            **{name: outcomes[name] for name in ("passed", "failed", "skipped")},
            "rerun": self.reran,
            "slowest": [[round(taken, 1), name] for name, taken in self.seconds.most_common(KEPT)],
            "counts": self.counts,
            "ran on": [[json.loads(system), tests] for system, tests in self.ran_on.most_common()],
        }
        with open(self.path, "w") as file:
            json.dump(record, file, indent=1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Forget what a try counted that failed and is made again."""
    item.user_properties.clear()


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.get("VMGAHP_RECORD")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Record(path))
