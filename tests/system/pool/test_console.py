"""The console beside a real pool: the ad of a job that runs, and HTCondor's own server at the other end."""

from __future__ import annotations

import pytest
from tests.lab.guest import BANNER, make_guest
from tests.lab.namespace import LAB, REFERENCE_SERVER
from tests.lab.pool import Pool
from tests.system.pool.outcomes import START

pytestmark = pytest.mark.pool

VMGAHP = "/opt/vmgahp/bin/vmgahp"


def typed(pool: Pool, lines: str, *words: str) -> str:
    """What the console says to some lines, as root in the namespace, in a copy of the job's scratch directory."""
    command = " ".join([VMGAHP, "console", *words])
    return str(pool.run("sh", "-c", f"printf '{lines}' | {command}", check=False, timeout=180).stdout)


def test_the_ad_of_a_running_job_starts_a_vm_beside_the_jobs_own(pool: Pool) -> None:
    """A START destroys what is left of an earlier VM of its name; the job's VM must not be taken for that."""
    pool.offering()
    job = pool.submit("watched", lambda home: make_guest(home / "guest.img", None))
    pool.wait_until("its guest", job.is_running, START)
    scratch = f"{LAB}/beside"
    (pool.directory / "beside").mkdir()
    make_guest(pool.directory / "beside/guest.img", None)
    pool.run("chown", "-R", "alice", scratch)
    before = pool.qemu_of(job)
    said = typed(pool, f"start job {job.cluster}.0\\nstatus\\nsoft-suspend\\nstop\\n", "--dir", scratch)
    assert "#1 START: VM 1 runs" in said
    assert "#2 STATUS of VM 1: running, CPU " in said
    assert "#4 STOP of VM 1: done" in said
    assert pool.qemu_of(job) == before
    assert BANNER in (pool.directory / "beside/vm_console.log").read_text()
    # The same with HTCondor's own server; where KVM does not work it says no more than NULL of the START.
    reference = f"start job {job.cluster}.0\\nBOGUS\\nstop 7\\n"
    said = typed(pool, reference, "--dir", scratch, "--", REFERENCE_SERVER, "-f", "-t", "-M", "3")
    assert "#1 START" in said
    assert "BOGUS was refused" in said
    assert "#2 STOP of VM 7 failed: " in said
    assert "VMGAHP_ERR_VM_NOT_FOUND: There is no VM with this id" in said
    assert pool.qemu_of(job) == before
    job.command("condor_rm")
