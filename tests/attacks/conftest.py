"""A machine that all attacks of a run share, and a count of what came of them."""

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.attacks.support import Battleground
from tests.lab.namespace import why_not

_COUNTED: Counter[tuple[str, str]] = Counter()


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Battleground]:
    if reason := why_not(pool=False):
        pytest.skip(reason)
    with Battleground(tmp_path_factory.mktemp("attacks")) as made:
        yield made


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for name, value in report.user_properties if report.when == "call" else ():
        if name == "attack":
            surface, times, breaches = value  # type: ignore[misc]
            _COUNTED[surface, "tried"] += times
            _COUNTED[surface, "breached"] += min(times, breaches)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _COUNTED:
        return
    terminalreporter.section("attacks")
    for surface in dict.fromkeys(surface for surface, _ in _COUNTED):
        tried, breached = _COUNTED[surface, "tried"], _COUNTED[surface, "breached"]
        terminalreporter.write_line(f"{surface}: {tried} tried, {tried - breached} stopped, {breached} breached")
