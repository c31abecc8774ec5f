"""What a START of a plain job costs, in counts, which unlike times say the same on every machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drivers.libvirt.support import Job, running
from tests.peer import environment

pytestmark = pytest.mark.libvirt

SCRIPT = Path(__file__).with_name("start_counts.py")

QUESTIONS = {
    "virConnectOpen": 1, "virConnectDomainEventRegisterAny": 2, "virConnectListAllDomains": 3,
    "virConnectGetCapabilities": 1, "virDomainDefineXML": 1, "virDomainFDAssociate": 1, "virDomainCreateWithFlags": 1,
    "virDomainUndefineFlags": 1, "virDomainGetXMLDesc": 1, "virDomainGetInfo": 1, "virDomainSetMemoryParameters": 1,
    "virDomainSetSchedulerParametersFlags": 1, "virDomainResume": 1, "virDomainIsPersistent": 1,
    "virDomainGetMetadata": 1,
}  # fmt: skip
"""What libvirtd is asked, and how often at most; the last two are of a domain that is none of ours."""

LOCAL = {
    "virConnectIsAlive", "virConnectSetKeepAlive", "virDomainFree", "virDomainGetID", "virDomainGetName",
    "virDomainGetUUIDString", "virEventRegisterDefaultImpl", "virEventRunDefaultImpl", "virGetLastError",
    "virRegisterErrorHandler",
}  # fmt: skip
"""What the library does by itself."""

NEEDED_BY_FEW = {"classad2", "htcondor2", "lxml", "pycdlib"}
"""Packages that a plain job does without, and that cost all starts some milliseconds otherwise."""

MOST_MODULES = 45
"""The modules whose functions a START calls, threads and constructors included; the number may only fall."""


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
    assert len(found["entered"]) <= MOST_MODULES, "\n".join(found["entered"])
    assert not NEEDED_BY_FEW & {*found["modules"], *found["later"]}


def test_a_server_with_a_vm_has_at_most_24_mib_of_its_own(job: Job) -> None:
    """It has 18 as a package, whose code is compiled; a clone's first servers compile it, which takes 3 more."""
    with running(job) as peer:
        peer.run("STATUS", 1)
        memory = Path(f"/proc/{peer.process.pid}/smaps_rollup").read_text()
        [own] = [int(line.split()[1]) for line in memory.splitlines() if line.startswith("Anonymous:")]
        assert own <= 24 << 10, f"{own} KiB of pages that no other process shares"
