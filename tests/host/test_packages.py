"""What to type for a missing package, on each system and for each way in which vmgahp comes there."""

import re
import sys
from pathlib import Path

import pytest

from tests import REPOSITORY
from vmgahp.host import packages

OF_EL_9 = f"python3.{sys.version_info.minor}"
"""Not its own, python3, which is 3.9."""


@pytest.mark.parametrize(
    ("release", "said"),
    [
        ("ID=debian\n", "apt-get install ovmf"),
        ('ID="almalinux"\nID_LIKE="rhel centos fedora"\n', "dnf install edk2-ovmf"),
        ("ID=arch\n", "install ovmf (so Debian calls it) by this system's own means"),
        (None, "install ovmf (so Debian calls it) by this system's own means"),
    ],
)
def test_the_systems_own(release: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "os-release"
    if release is not None:
        file.write_text(release)
    monkeypatch.setattr(packages, "OS_RELEASE", str(file))
    assert packages.of_system("ovmf", "edk2-ovmf") == said


@pytest.mark.parametrize(
    ("module", "prefix", "pip", "said"),
    [
        ("/usr/lib/python3/dist-packages/vmgahp", "/usr", True, "apt-get install python3-pyvmomi"),
        ("", "/root/.local/share/pipx/venvs/vmgahp", False, "pipx inject vmgahp 'pyvmomi>=8.0'"),
        ("", "/opt/pipx/venvs/vmgahp", False, "pipx inject --global vmgahp 'pyvmomi>=8.0'"),
        ("", "/usr/lib64/vmgahp", True, f"{sys.executable} -m pip install 'pyvmomi>=8.0'"),
        ("", "/usr/lib64/vmgahp", False, f"dnf install {OF_EL_9}-pip; {sys.executable} -m pip install 'pyvmomi>=8.0'"),
        ("", "/usr/lib/vmgahp", False, f"dnf install python3-pip; {sys.executable} -m pip install 'pyvmomi>=8.0'"),
        ("", "/opt/vmgahp", True, f"{sys.executable} -m pip install 'pyvmomi>=8.0'"),
        ("", "/opt/vmgahp", False, f"uv pip install --python {sys.executable} 'pyvmomi>=8.0'"),
    ],
)
def test_a_python_package(module: str, prefix: str, pip: bool, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/root")
    monkeypatch.setattr(packages, "__file__", f"{module or prefix + '/lib'}/host/packages.py")
    monkeypatch.setattr(sys, "prefix", prefix)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: pip or None)
    assert packages.of_python("pyvmomi", "8.0") == said


def test_pipx_is_known_by_what_it_leaves_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environments have no pip where it has used uv, as 1.18 does."""
    (tmp_path / "pipx_metadata.json").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert packages.of_python("pyvmomi", "8.0") == "pipx inject vmgahp 'pyvmomi>=8.0'"


def test_nobody_names_an_installer_beside_it() -> None:
    """A hint that is written by hand is right on one system and for one way of installing."""
    typed = re.compile(r"\b(apt-get|apt|dnf|pip) install ")
    found = [
        str(path)
        for path in (REPOSITORY / "src").rglob("*.py")
        if path.name != "packages.py" and typed.search(path.read_text())
    ]
    # Its guests are made of Debian's packages, by Debian's tools.
    assert found == [str(REPOSITORY / "src/vmgahp/commands/image/build.py")]
