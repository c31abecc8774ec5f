"""scripts/demo does what it says; it is the shortest way from nothing to a guest's own power-off."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.lab import demo
from tests.lab.namespace import REPOSITORY


@pytest.mark.libvirt
def test_the_demo_boots_a_guest_and_sees_it_stop() -> None:
    if not demo.SERVER.exists():
        pytest.skip(f"{demo.SERVER} is not installed (scripts/test does it)")
    done = subprocess.run(
        [sys.executable, "-m", "tests.lab.demo", "--seconds", "2"],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "> CONDOR_VM_START 1 kvm" in done.stdout
    assert "| vmgahp guest up" in done.stdout
    assert "STATUS=Stopped" in done.stdout
    assert "Seen: a guest booted" in done.stdout.splitlines()[-1]
