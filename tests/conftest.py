"""Fixtures that more than one test module uses."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import jobs
from tests.lab.libvirtd_watch import Watch, connect
from tests.lab.processes import gather_pages
from tests.lab.starter import FakeStarter
from tests.peer import Peer, environment, kill_guardian
from vmgahp.host.job_user import Identity
from vmgahp.vm_types import SIMULATED_SWITCH

JOB_UID = 54321

as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root")

os.environ[SIMULATED_SWITCH] = "1"  # for every daemon that a test starts

# How long an example takes says more about the machine than about the code. `quick` is for every day, `full` for CI;
# `HYPOTHESIS_PROFILE=full` or `--hypothesis-profile=full` asks for it by hand.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=20)
hypothesis.settings.register_profile("full", deadline=None, max_examples=100)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("full" if os.environ.get("CI") else "quick"))


def examples(full: int) -> int:
    """How many examples a test gets that has `full` of them in the full profile."""
    return max(1, full * hypothesis.settings.default.max_examples // 100)


FOUND_BY_TEXT = ("pool", "xen", "node", "faults")
"""The marks by which scripts/test finds the modules of a part."""

DEADLINES = {
    "attacks": 600, "faults": 600, "libvirt": 180, "qemu": 180, "podman": 180, "vsphere": 300, "pool": 900, "xen": 900,
    "node": 1800,
}  # fmt: skip
"""Seconds for a test with a marker, its fixtures included; the longest counts. The first of vSphere's builds
the simulator, in two minutes on a busy machine."""
UNIT_DEADLINE = 60

LIBVIRTD = Watch(connect)


def pytest_configure() -> None:
    """Give the children of tests default signal dispositions, whatever this process was told to ignore.

    What a non-interactive shell starts in the background ignores SIGINT, and so do its children: none of them
    could be interrupted. A handler that does nothing ignores as well, but is not inherited.
    """
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A hang ends with the stacks of all threads, and not with CI's patience."""
    for mark, path in {(mark, item.path) for item in items for mark in FOUND_BY_TEXT if item.get_closest_marker(mark)}:
        if f"mark.{mark}" not in path.read_text():
            raise pytest.UsageError(f"{path}: scripts/test looks for the words mark.{mark} in modules with such tests")
    for item in items:
        seconds = [DEADLINES[mark.name] for mark in item.iter_markers() if mark.name in DEADLINES]
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(max(seconds, default=UNIT_DEADLINE)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test of a libvirtd that is gone, before it waits for it until its deadline."""
    if item.get_closest_marker("libvirt") and (trouble := LIBVIRTD.trouble()):
        pytest.fail(f"the libvirtd of these tests has answered, and is lost: {trouble}", pytrace=False)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Before the first fork."""
    if os.geteuid() == 0 and len(session.items) > 1:
        gather_pages()


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A scratch directory such as condor_starter makes: mode 755 for VM jobs, owned by the job's user.

    Not below pytest's own directory, which is closed to other users and closed again by every run.
    """
    with tempfile.TemporaryDirectory(prefix="vmgahp-test-") as outer:
        directory = Path(outer) / "dir_1"
        directory.mkdir()
        os.chmod(outer, 0o755)
        if os.getuid() == 0:
            os.chown(directory, JOB_UID, JOB_UID)
        yield directory
        # They try for a month, each minute anew, to end what has gone with the test or was never there.
        kill_guardian(outer)


@pytest.fixture
def user(scratch: Path) -> Identity:
    """The job's user."""
    return jobs.owner(scratch)


@pytest.fixture
def starter(scratch: Path) -> Iterator[FakeStarter]:
    with FakeStarter(scratch) as made:
        yield made


@pytest.fixture
def peer(scratch: Path) -> Iterator[Peer]:
    """A client of a server with the simulated hypervisor, past the greeting."""
    with Peer(environment("simulated", scratch)) as client:
        assert client.line().startswith("$VMGahpVersion")
        yield client


def simulated_ad(scratch: Path, *more: str) -> list[str]:
    return jobs.lines(scratch, *more, JobVMType='"simulated"', ProcId=3)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew")
