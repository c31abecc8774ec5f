"""A command on another Debian: what it sees, and what is left of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.lab.namespace import REPOSITORY, why_not

pytestmark = pytest.mark.pool

SCRIPT = """\
touch written && ls written
python -c 'import lxml, pytest, vmgahp; print(lxml.__file__, pytest.__file__, vmgahp.__file__, sep="\\n")'
virsh -q -c qemu:///system list --all --name
exit 7
"""


def test_it_sees_the_clone_that_suites_libraries_and_our_pytest() -> None:
    if reason := why_not():
        pytest.skip(reason)
    command = [sys.executable, "-m", "tests.lab.on_suite", "trixie", "sh", "-e", "-c", SCRIPT]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    ours = f"{REPOSITORY}/src/vmgahp/__init__.py"
    assert done.stdout.split() == ["written", "/usr/lib/python3/dist-packages/lxml/__init__.py", pytest.__file__, ours]
    assert not (REPOSITORY / "written").exists()
