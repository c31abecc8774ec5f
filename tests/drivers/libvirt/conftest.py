"""Fixtures of tests with real guests on libvirt and QEMU."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.drivers.libvirt.support import NETWORK_XML, URI, Job

if TYPE_CHECKING:
    import libvirt


@pytest.fixture(scope="session")
def connection() -> Iterator["libvirt.virConnect"]:
    import libvirt

    libvirt.registerErrorHandler(lambda _context, _error: None, None)
    try:
        opened = libvirt.open(URI)
    except libvirt.libvirtError as error:
        pytest.skip(f"no libvirtd at {URI}: {error}")
    yield opened
    opened.close()


@pytest.fixture
def job(scratch: Path, connection: "libvirt.virConnect") -> Iterator[Job]:
    made = Job(scratch, connection)
    yield made
    domain = made.domain()
    if domain is not None:
        domain.destroy()


@pytest.fixture
def elsewhere(scratch: Path) -> Path:
    other = scratch.parent / "dir_2"
    other.mkdir()
    if os.getuid() == 0:
        os.chown(other, scratch.stat().st_uid, scratch.stat().st_gid)
    return other


@pytest.fixture
def network(connection: "libvirt.virConnect") -> Iterator["libvirt.virNetwork"]:
    made = connection.networkCreateXML(NETWORK_XML)
    yield made
    made.destroy()
