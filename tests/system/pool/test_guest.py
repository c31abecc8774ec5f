"""A guest's exit code, all the way: from its console by chirp into the job ad, and home in vm_exit.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.lab.guest import make_guest
from tests.lab.pool import JOBS, USER, Job, Pool

pytestmark = pytest.mark.pool

START = 90
END = 120


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
    told.wait_for_event("terminated", START + END)
    ad = told.ad()
    assert (ad["VMExitCode"], ad["ChirpVMExitCode"]) == (0, 0)
    assert ad["JobStatus"] == 4
    found = json.loads((told.directory / "vm_exit.json").read_text())
    assert (found["exit_code"], found["source"], found["ended_by"]) == (0, "console", "powered off")


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
