"""Fixtures for the tests with the vSphere simulator."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drivers.vsphere.simulator import Lab
from tests.lab import vcsim
from tests.lab.vcsim import PASSWORD, Vcsim


@pytest.fixture(scope="session")
def program() -> Path:
    try:
        return vcsim.build()
    except vcsim.Missing as missing:
        pytest.skip(f"no vSphere simulator: {missing}")


@pytest.fixture
def password(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text(PASSWORD + "\n")
    path.chmod(0o600)
    return path


def _lab(model: str, tmp_path: Path, scratch: Path, password: Path) -> Iterator[Lab]:
    made = Lab(Vcsim(tmp_path / "sim", model), scratch, password)
    yield made
    made.sim.stop()


@pytest.fixture
def lab(program: Path, tmp_path: Path, scratch: Path, password: Path) -> Iterator[Lab]:
    yield from _lab("esx", tmp_path, scratch, password)


@pytest.fixture(params=["esx", "vpx"])
def both(program: Path, request: pytest.FixtureRequest, tmp_path: Path, scratch: Path, password: Path) -> Iterator[Lab]:
    """The same test on an ESXi host and on a vCenter with a cluster."""
    yield from _lab(request.param, tmp_path, scratch, password)
