"""A guest's end, all the way: from its console by chirp into the job ad, and home in vm_exit.json.

And `vmgahp console` beside a running job, with its ad, and with HTCondor's own server at the other end.
"""

import json
from pathlib import Path

import pytest
from tests.lab.guest import BANNER, growing_sector, make_guest
from tests.lab.namespace import LAB, REFERENCE_SERVER, VMGAHP
from tests.lab.pool import JOBS, USER, Job, Pool
from tests.system.pool.outcomes import END, START, ended

pytestmark = pytest.mark.pool


def test_the_exit_code_is_in_the_job_ad_and_comes_home(pool: Pool) -> None:
    """Two jobs side by side: one as they all are, and one that wants to be told at once."""
    pool.offering()

    def submit(name: str, code: int, *more: str) -> Job:
        words = f"vmgahp-exit-code: {code}"
        commands = "\n".join(more)
        return pool.submit(name, lambda home: make_guest(home / "guest.img", 3, last_words=words), commands)

    plain = submit("exit-plain", 3, "on_exit_hold = ChirpVMExitCode =!= 0")
    told = submit("exit-told", 0, "+WantIOProxy = true", "on_exit_remove = VMExitCode =?= 0")
    plain.wait_for_event("held", START + END)
    assert plain.ad()["ChirpVMExitCode"] == 3
    ad = ended(told)
    assert (ad["VMExitCode"], ad["ChirpVMExitCode"]) == (0, 0)
    assert ad["JobStatus"] == 4
    found = json.loads((told.directory / "vm_exit.json").read_text())
    assert (found["exit_code"], found["source"], found["ended_by"]) == (0, "console", "powered off")


def test_condor_q_says_how_a_vm_is(pool: Pool) -> None:
    """Where HTCondor passes on soon what it otherwise does every five, and fifteen, minutes."""
    pool.offering()
    soon = pool.namespace.path("/etc/condor/config.d/99-soon.config")
    soon.write_text("STARTER_UPDATE_INTERVAL = 15\nSHADOW_QUEUE_UPDATE_INTERVAL = 15\n")
    try:
        job = pool.submit(
            "published",
            lambda home: make_guest(home / "guest.img", None),
            "vm_vnc = true\n+WantRemoteUpdates = true\njob_ad_information_attrs = ChirpVMState, ChirpVMVNC",
        )
        pool.wait_until("the job ad to say how the VM is", lambda: "ChirpVMMemory" in job.ad(), START + END)
        ad = job.ad()
        assert ad["ChirpVMState"] == "Running"
        assert 1000 < ad["ChirpVMMemory"] <= ad["ChirpVMMemoryPeak"] < 2 << 20
        assert ad["ChirpVMCPU"] > 0
        display = ad["ChirpVMVNC"]
        assert display.startswith("127.0.0.1:59")

        def is_in_the_log(words: str) -> None:
            pool.wait_until(words, lambda: words in (job.directory / "job.log").read_text(), END)

        is_in_the_log(f"The VM's display is at {display} of its machine")
        is_in_the_log(f'ChirpVMVNC = "{display}"')  # also for a job without the right to put lines there
        asked = pool.run("condor_q", str(job.cluster), "-af", "ChirpVMState", "ChirpVMVNC", user=USER).stdout
        assert asked.split() == ["Running", display]
        job.command("condor_rm")
    finally:
        soon.unlink()


def test_why_a_vm_with_a_full_disk_has_failed_is_in_the_jobs_ad_and_log(pool: Pool) -> None:
    pool.offering()
    pool.namespace.path("/etc/condor/config.d/99-full.config").write_text("VM_IO_ERROR_TIMEOUT = 5\n")
    pool.run("mkdir", "/full")
    pool.run("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/full")

    def make(home: Path) -> None:
        make_guest(home / "guest.img", None)
        pool.run("cp", "--sparse=always", f"{JOBS}/{home.name}/guest.img", "/full/base.img")
        pool.run("qemu-img", "create", "-f", "qcow2", "-F", "raw", "-b", "/full/base.img", "/full/over.qcow2")
        pool.run("chown", "-R", USER, "/full")
        pool.run("sh", "-c", "cat /dev/zero > /full/ballast", check=False)

    job = pool.submit(
        "exit-full",
        make,
        "vm_disk = /full/over.qcow2:hda:w:qcow2\n+WantIOProxy = true\n"
        "on_exit_hold = ChirpVMExitReason isnt undefined\non_exit_hold_reason = ChirpVMExitReason",
    )
    job.wait_for_event("held", START + END)
    why = "an error of the disk hda (no space left) has kept the guest from running for 5 s"
    assert job.ad()["ChirpVMExitReason"] == why
    assert (job.directory / "job.log").read_text().count(why) == 2, "as a line of its own, and as why it is held"
    assert why in job.reason()


def test_a_vm_that_outgrows_request_disk_ends_and_its_job_is_held_by_its_owner_or_by_the_pool(pool: Pool) -> None:
    pool.offering()
    by_the_pool = "SYSTEM_PERIODIC_HOLD = ChirpVMHoldReason isnt undefined && ByThePool =?= true\n"
    by_the_pool += "SYSTEM_PERIODIC_HOLD_REASON = ChirpVMHoldReason\n"
    pool.namespace.path("/etc/condor/config.d/99-hold.config").write_text(by_the_pool)

    def make(home: Path) -> None:
        with open(home / "guest.img", "wb") as disk:
            disk.write(growing_sector(32))
            disk.truncate(64 << 20)
        convert = ["qemu-img", "convert", "-O", "qcow2", "guest.img", "guest.qcow2"]
        pool.run(*convert, cwd=f"{JOBS}/{home.name}")
        (home / "guest.img").unlink()

    asks = "vm_disk = guest.qcow2:hda:w:qcow2\ntransfer_input_files = guest.qcow2\nrequest_disk = 8MB\n"
    told = "on_exit_hold = ChirpVMHoldReason isnt undefined\non_exit_hold_reason = ChirpVMHoldReason\n"
    jobs = [pool.submit("grows", make, asks + told)]
    jobs += [pool.submit("grows-by-the-pool", make, asks + "+ByThePool = true\n")]
    for job, code in zip(jobs, (3, 26), strict=True):
        job.wait_for_event("held", START + END)
        ad = job.ad()
        why = ad["ChirpVMHoldReason"]
        assert why.startswith("the disks and outputs of the VM occupy ")
        assert "MiB, and request_disk is 8 MiB: raise it in the submit file" in why
        assert 8 < int(why.split()[8]) < 40
        assert why in job.reason()
        assert ad["HoldReasonCode"] == code


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
    assert "#2 STATUS of VM 1: Running CPU" in said
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
