"""The table of VM types: its rows lead to drivers, and the package's own metadata says the same."""

import tomllib

import pytest

from tests import REPOSITORY
from vmgahp import vm_types
from vmgahp.drivers import base


def test_the_entry_points_of_the_package_are_the_rows_of_the_table() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    drivers = {name: place for name, place in vm_types.DRIVERS.items() if name != "simulated"}
    assert project["entry-points"]["vmgahp.drivers"] == drivers


@pytest.mark.parametrize("row", vm_types.ROWS, ids=lambda row: row.name)
def test_every_type_has_its_driver(row: vm_types.VmType) -> None:
    assert issubclass(base.find(row.name), base.Driver)
