"""A directory that virtiofsd cannot serve: its program runs as the job's user, whose processes can trace it."""

from pathlib import Path

import pytest

from vmgahp.drivers.libvirt.start.virtiofs import _refused
from vmgahp.errors import JobFault, MachineFault
from vmgahp.host.job_user import Identity
from vmgahp.job.attributes import Share


@pytest.mark.parametrize("setting", ["", "VM_SHARE_DIRS"])
def test_a_limit_of_the_jobs_user_is_no_fault_of_a_directory_that_is_there(
    scratch: Path, user: Identity, setting: str
) -> None:
    share = Share("data", str(scratch), "virtiofs", writable=False, setting=setting)
    assert isinstance(_refused(share, f"{scratch}\nToo many open files", user), JobFault)


def test_a_directory_of_the_administrator_that_is_not_there_is_the_fault_of_the_machine(
    scratch: Path, user: Identity
) -> None:
    share = Share("data", f"{scratch}/none", "virtiofs", writable=False, setting="VM_SHARE_DIRS")
    assert isinstance(fault := _refused(share, f"{scratch}/none\nNo such file or directory", user), MachineFault)
    assert "VM_SHARE_DIRS" in fault.hint
