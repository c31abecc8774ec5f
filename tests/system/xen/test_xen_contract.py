"""The contract that every driver keeps, kept by the one for Xen's guests on a real Xen."""

import importlib
import io
import tarfile
from pathlib import Path

import pytest
from tests.lab.namespace import wheel_of
from tests.lab.xen import XenHost

pytestmark = pytest.mark.xen

SUITE = Path(__file__).parent / "dom0" / "contract_of_xen.py"
NEEDED = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments", "xdist", "execnet")
"""What of this Python dom0 lacks; none of it is compiled."""
DEADLINE = 2400
"""Seconds; from three hundred to seven hundred where nothing else runs."""


def packages() -> bytes:
    """Those, as a tar archive."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz", compresslevel=1) as tar:
        for name in NEEDED:
            source = Path(importlib.import_module(name).__file__ or "")
            place, inside = (source.parent, name) if source.name == "__init__.py" else (source, source.name)
            tar.add(place, inside, filter=lambda member: None if "__pycache__" in member.name else member)
    return archive.getvalue()


@pytest.mark.timeout(DEADLINE + 600)
def test_it_is_kept(xen: XenHost, tmp_path_factory: pytest.TempPathFactory) -> None:
    xen.install(wheel_of(tmp_path_factory))
    xen.write("/etc/vmgahp.conf", b"")
    xen.write("/tmp/packages.tar.gz", packages())
    xen.run("mkdir", "-p", "/tmp/contract")
    xen.run("tar", "-xzf", "/tmp/packages.tar.gz", "-C", "/tmp/contract", timeout=300)
    xen.put(SUITE, "/tmp/contract/test_contract_of_xen.py")
    done = xen.run(
        *("/opt/vmgahp/bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "--durations=5"),
        *("-p", "xdist.plugin", "-n", "2"),  # its second processor would have nothing to do
        "test_contract_of_xen.py",
        cwd="/tmp/contract",
        env={"VMGAHP_CONFIG": "/etc/vmgahp.conf", "PYTHONPATH": "/tmp/contract"},
        check=False,
        timeout=DEADLINE,
    )
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
