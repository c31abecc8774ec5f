"""A guest's exit code, all the way: from its console by chirp into the job ad, and home in vm_exit.json."""

from __future__ import annotations

import json

import pytest
from tests.lab.guest import make_guest
from tests.lab.pool import Job, Pool

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
