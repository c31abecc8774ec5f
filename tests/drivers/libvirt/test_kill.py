"""The kill mode, which a node runs for each VM at once when its servers have all been killed."""

import subprocess
import sys
from pathlib import Path

from tests.drivers.support import TEST_URI
from tests.peer import environment

CODE = """
import os, sys
before = set(sys.modules)  # some Pythons load more by themselves
from vmgahp.daemon.kill import kill
status = kill("kvm", "alice_lab_1.0", "", os.environ, to_stderr=True)
print(status, *sorted(set(sys.modules) - before))
"""


def test_a_kill_loads_nothing_of_a_start(scratch: Path) -> None:
    environ = environment("kvm", scratch, VM_LIBVIRT_URI=TEST_URI)
    done = subprocess.run(
        [sys.executable, "-P", "-c", CODE], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    status, *modules = done.stdout.split()
    assert status == "0", done.stderr
    starts = ("vmgahp.job.spec", "vmgahp.domain", "vmgahp.checkpoint", "vmgahp.images", "vmgahp.drivers.base")
    assert [name for name in modules if name.startswith((*starts, "xml", "socket", "typing"))] == []
