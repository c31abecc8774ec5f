"""The deadline of a START over all its programs and file operations."""

import os
import time
from contextlib import nullcontext

import pytest

from tests.conftest import as_root
from vmgahp.errors import JobFault, MachineFault
from vmgahp.host import system_calls
from vmgahp.host.budget import Budget
from vmgahp.host.job_user import Identity
from vmgahp.host.run import run


def test_the_programs_of_a_start_have_one_deadline_over_all() -> None:
    with Budget(0.2):
        assert run(["sleep", "1000"], deadline=60).status is None
        with pytest.raises(MachineFault, match="more than 0 s"):
            run(["true"], deadline=60)
        with Budget():
            assert run(["true"], deadline=60).status == 0, "the clean-up has its own time"
    assert run(["true"], deadline=60).status == 0


@as_root
@pytest.mark.parametrize("how", ["user", "becomes"])
def test_a_start_that_programs_of_the_jobs_user_hold_up_is_the_jobs_fault(user: Identity, how: str) -> None:
    with Budget(1.0):
        assert run(["sh", "-c", "kill -STOP $$"], deadline=60, **{how: user}).status is None  # type: ignore[arg-type]
        with pytest.raises(JobFault, match=r"[1-9]\d* of them"):
            run(["true"], deadline=60)


@as_root
@pytest.mark.parametrize("staying", [False, True])
def test_a_start_that_file_systems_of_the_job_hold_up_is_the_jobs_fault(user, scratch, monkeypatch, staying):
    monkeypatch.setattr(os, "statvfs", lambda _: time.sleep(1000))
    with Budget(3.0):
        with user.at_hand() if staying else nullcontext(), pytest.raises(TimeoutError):
            user.run(system_calls.room_in, b"/")
        with pytest.raises(JobFault, match="of the job's user"):
            user.open_scratch(str(scratch), "x", os.O_RDONLY)
