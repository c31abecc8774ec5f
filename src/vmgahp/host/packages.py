"""The commands that install a missing package, by this system and by how vmgahp itself was installed."""

from __future__ import annotations

import os
import sys

OS_RELEASE = "/etc/os-release"

_DEBIAN = {"libvirt-python": "python3-libvirt", "prompt_toolkit": "python3-prompt-toolkit", "PyYAML": "python3-yaml"}
"""The names in Debian of the Python packages that are not called python3-NAME."""

_OF_RPM = {"/usr/lib64/vmgahp": "python3.{}", "/usr/lib/vmgahp": "python3"}
"""The RPM's environments on EL 9 and EL 10, which use the system's pip, and dnf's name for their Python."""


def of_system(debian: str, redhat: str = "") -> str:
    """Return the command that installs system packages, by their names in Debian and in Enterprise Linux."""
    try:
        with open(OS_RELEASE, encoding="utf-8", errors="replace") as file:
            pairs = [line.strip().partition("=") for line in file]
    except OSError:
        pairs = []
    family = " ".join(value.strip("\"'") for name, _, value in pairs if name in ("ID", "ID_LIKE")).split()
    if "debian" in family:
        return f"apt-get install {debian}"
    if "rhel" in family or "fedora" in family:
        return f"dnf install {redhat or debian}"
    return f"install {debian} (so Debian calls it) by this system's own means"


def of_python(name: str, least: str = "") -> str:
    """Return the command that installs a Python package for this vmgahp; `least` is the oldest version that works.

    A vmgahp from a distribution's package uses that distribution's packages, one from pipx uses pipx, and every
    other environment its own pip, or uv if it has none. The RPM's environment uses the system's pip.
    """
    wanted = f"'{name}>={least}'" if least else name
    if __file__.startswith("/usr/lib/python3/dist-packages/"):  # Debian's package, and nothing else, is there
        return f"apt-get install {_DEBIAN.get(name, f'python3-{name}')}"
    if "/pipx/venvs/" in f"{sys.prefix}/" or os.path.exists(f"{sys.prefix}/pipx_metadata.json"):
        everybody = "--global " if sys.prefix.startswith("/opt/pipx/") else ""
        return f"pipx inject {everybody}vmgahp {wanted}"
    from importlib.util import find_spec

    if find_spec("pip") is not None:
        return f"{sys.executable} -m pip install {wanted}"
    if sys.prefix in _OF_RPM:
        python = _OF_RPM[sys.prefix].format(sys.version_info.minor)
        return f"dnf install {python}-pip; {sys.executable} -m pip install {wanted}"
    return f"uv pip install --python {sys.executable} {wanted}"
