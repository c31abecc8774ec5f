"""The settings by HTCondor's own condor_config_val: what it says of all at once, and of each alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import REPOSITORY
from tests.lab.namespace import LAB, Namespace, why_not

pytestmark = pytest.mark.pool

CONFIGURATION = """\
VM_TYPE = kvm
MY_SIZE = 256
VM_MEMORY = 2 * $(MY_SIZE)
VM_GAHP.VM_STOP_TIMEOUT = 7
VM_STOP_TIMEOUT = 3
VM_NETWORKING_TYPE =
"""

ASK = """\
import json, os, subprocess
from vmgahp import config
from vmgahp.config import sources
settings, tool = config.load(os.environ), sources.find_tool(os.environ)
def alone(name):
    done = subprocess.run([tool, "-subsystem", "VM_GAHP", name], capture_output=True, text=True)
    return None if done.stderr.startswith("Not defined") else done.stdout.strip()
print(json.dumps({name: [settings.string(name), settings.where(name), alone(name)] for name in config.BY_NAME}))
"""


@pytest.fixture
def namespace(tmp_path: Path) -> Iterator[Namespace]:
    """A machine on which HTCondor is installed, and nothing runs."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Namespace(tmp_path / "exchange") as namespace:
        shutil.copytree(REPOSITORY / "src/vmgahp", namespace.exchange / "src/vmgahp")
        namespace.path("/etc/condor/config.d/99-settings.config").write_text(CONFIGURATION)
        yield namespace


def test_the_tool_says_the_same_of_one_name_and_of_all(namespace: Namespace) -> None:
    environ = (f"PYTHONPATH={LAB}/src", "_condor_vm_gahp_log=/log", "_CONDOR_VM_GAHP.VM_NAT_NETWORK=lab")
    done = namespace.run("env", *environ, "/opt/vmgahp/bin/python", "-c", ASK)
    found = json.loads(done.stdout)
    said = {name: value for name, (value, where, _) in found.items() if where != "default"}
    assert said == {name: alone for name, (_, _, alone) in found.items() if alone is not None}
    expected = {"VM_MEMORY": "2 * 256", "VM_STOP_TIMEOUT": "7", "VM_GAHP_LOG": "/log", "VM_NAT_NETWORK": "lab"}
    assert said.items() >= expected.items()
    assert "VM_NETWORKING_TYPE" not in said, "empty is not set"
