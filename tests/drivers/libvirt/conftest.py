"""Fixtures of tests with real guests on libvirt and QEMU."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import jobs
from tests.drivers.libvirt.support import NETWORK_XML, Job, libvirtd
from tests.drivers.support import AnyHypervisor, any_hypervisor
from tests.lab import linux_guest

if TYPE_CHECKING:
    import libvirt


@pytest.fixture(scope="session")
def connection() -> Iterator["libvirt.virConnect"]:
    with libvirtd() as opened:
        yield opened


@pytest.fixture
def job(scratch: Path, connection: "libvirt.virConnect") -> Iterator[Job]:
    made = Job(scratch, connection)
    yield made
    if (domain := made.domain()) is not None:
        domain.destroy()


@pytest.fixture
def linux(job: Job) -> Job:
    """The job with a Linux guest that runs its user data; its counting disk is just a disk."""
    if reason := linux_guest.why_not():
        pytest.skip(reason)
    job.own(*linux_guest.make(job.scratch))
    return job


@pytest.fixture
def elsewhere(scratch: Path) -> Path:
    other = scratch.parent / "dir_2"
    other.mkdir()
    jobs.own(scratch, other)
    return other


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A directory for the administrator's programs, which all may enter and root alone write to."""
    tmp_path.chmod(0o755)
    return tmp_path


@pytest.fixture
def network(connection: "libvirt.virConnect") -> Iterator["libvirt.virNetwork"]:
    made = connection.networkCreateXML(NETWORK_XML)
    yield made
    made.destroy()


@pytest.fixture
def subject(scratch: Path) -> Iterator[AnyHypervisor]:
    with any_hypervisor(scratch) as made:
        yield made
