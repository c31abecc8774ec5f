"""What a START of a plain job costs, in counts, which unlike times say the same on every machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drivers.libvirt.support import Job
from tests.peer import environment

SCRIPT = Path(__file__).with_name("start_counts.py")

QUESTIONS = {
    "virConnectOpen": 1,
    "virConnectDomainEventRegisterAny": 2,
    "virConnectListAllDomains": 3,
    "virConnectGetCapabilities": 1,
    "virDomainDefineXML": 1,
    "virDomainFDAssociate": 1,
    "virDomainCreateWithFlags": 1,
    "virDomainUndefineFlags": 1,
    "virDomainGetXMLDesc": 1,
    "virDomainGetInfo": 1,
    "virDomainSetMemoryParameters": 1,
    "virDomainSetSchedulerParametersFlags": 1,
    "virDomainResume": 1,
    "virDomainIsPersistent": 1,
    "virDomainGetMetadata": 1,
}
"""What libvirtd is asked, and how often at most; the last two are of a domain that is none of ours."""

LOCAL = {
    "virConnectIsAlive",
    "virConnectSetKeepAlive",
    "virDomainFree",
    "virDomainGetID",
    "virDomainGetName",
    "virDomainGetUUIDString",
    "virEventRegisterDefaultImpl",
    "virEventRunDefaultImpl",
    "virGetLastError",
    "virRegisterErrorHandler",
}
"""What the library does by itself."""

NEEDED_BY_FEW = {
    "ast",
    "dataclasses",
    "hashlib",
    "inspect",
    "platform",
    "subprocess",
    "uuid",
    "vmgahp.domain.job_xml.sanitize",
    "vmgahp.domain.restore",
    "vmgahp.drivers.libvirt.tpm",
    "vmgahp.hooks.policy",
    "vmgahp.hooks.xml_script",
    "vmgahp.images.catalog",
    "vmgahp.images.qemu_img",
    "vmgahp.job.cloud_init",
    "vmgahp.job.data_disks",
    "vmgahp.job.engine",
    "vmgahp.job.xen",
}
"""Modules that a plain job does without, and that cost all starts some milliseconds otherwise."""


def test_a_start_of_a_plain_job_is_made_of_little(job: Job) -> None:
    environ = environment("qemu", job.scratch, VM_STOP_TIMEOUT=0)
    command = [sys.executable, str(SCRIPT), str(job.scratch), *job.ad()]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, cwd=job.scratch)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    counts = {name: number for name, number in found["counts"].items() if name not in LOCAL}
    # Whatever is done as the job's user, one child does, which was there before.
    assert "fork" not in counts
    more = {name: number for name, number in counts.items() if number > QUESTIONS.get(name, 0)}
    assert not more, f"libvirtd is asked more than {QUESTIONS}"
    # typing's named tuples bring ast along with Python 3.14, which is the helper's and gone with it.
    few = NEEDED_BY_FEW - ({"ast"} if sys.version_info >= (3, 14) else set())
    assert not few & {*found["modules"], *found["later"]}


@pytest.mark.parametrize("name", sorted(NEEDED_BY_FEW))
def test_what_a_plain_job_does_without_is_there(name: str) -> None:
    """A module that was renamed would be missed by nobody."""
    from importlib.util import find_spec

    assert find_spec(name)
