"""What looking at a job's files finds, where the machine fails and not the job."""

import errno
import os
from pathlib import Path

import pytest

from tests import jobs
from vmgahp import errors
from vmgahp.host.job_user import Identity
from vmgahp.job.disks import Disk
from vmgahp.job.look import backing_files


def failing(*_: object) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.qemu
def test_an_image_on_a_disk_that_cannot_be_read_is_the_machines_where_execute_fails(
    scratch: Path, user: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scratch / "guest.qcow2").write_bytes(b"nothing that qemu-img knows")
    jobs.own(scratch)
    disk = Disk(str(scratch / "guest.qcow2"), "vda", "", True, "qcow2", True, "disk")
    with pytest.raises(errors.JobFault):
        backing_files(disk, str(scratch), user)
    # Nothing is mapped at the address 0: a read fails as that of a broken disk does.
    monkeypatch.setattr(Identity, "open_scratch", lambda *_: os.open("/proc/self/mem", os.O_RDONLY))
    monkeypatch.setattr("vmgahp.host.job_user._try_execute", failing)
    with pytest.raises(errors.MachineFault, match="Input/output error"):
        backing_files(disk, str(scratch), user)
