"""A directory that virtiofsd cannot serve: its program runs as the job's user, whose processes can trace it."""

from pathlib import Path

from vmgahp.drivers.libvirt.start.virtiofs import _refused
from vmgahp.errors import MachineFault
from vmgahp.host.job_user import Identity
from vmgahp.job.attributes import Share


def test_a_directory_of_the_administrator_that_is_not_there_is_the_fault_of_the_machine(
    scratch: Path, user: Identity
) -> None:
    share = Share("data", f"{scratch}/none", "virtiofs", writable=False, setting="VM_SHARE_DIRS")
    assert isinstance(fault := _refused(share, f"{scratch}/none\nNo such file or directory", user), MachineFault)
    assert "VM_SHARE_DIRS" in fault.hint
