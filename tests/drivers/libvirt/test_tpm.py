"""swtpm as a program of the job's user, whose other processes may leave it no room to run."""

import os
import resource
import subprocess
from pathlib import Path

import pytest

from vmgahp.drivers.libvirt.start import tpm
from vmgahp.host import proc, runtime_dir
from vmgahp.host.job_user import Identity
from vmgahp.testing.contract import until

pytestmark = [
    pytest.mark.qemu,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(tpm.why_none(True) != "", reason="needs swtpm"),
]


def test_its_user_can_write_nothing_outside_of_its_own_memory(user: Identity, scratch: Path) -> None:
    """Such a file in /run could take all that /run has, which libvirtd and others need."""
    room = runtime_dir.runtime_dir(str(scratch.parent))
    try:
        tpm.begin(user, print, room, user.uid, user.gid)
        pid = int(Path(room, "pid").read_text())
        until(lambda: proc.name(pid) == tpm.PROGRAM, "it runs")
        assert tpm.ask(room, 10) == ""
        opened = {path.readlink() for path in Path(f"/proc/{pid}/fd").iterdir()}
        assert [path for path in opened if path.is_relative_to("/") and path.is_file()] == []
        assert any(str(path).startswith("/memfd:") for path in opened)
        theirs = [path.name for path in Path(room).iterdir() if path.lstat().st_uid == user.uid]
        assert theirs == ["tpm"]
    finally:
        runtime_dir.remove(room)


def test_one_that_the_users_processes_keep_from_running_is_not_the_machines_fault(
    user: Identity, scratch: Path
) -> None:
    """By their number; QEMU fails then, and a second look finds the cause."""
    room, limits = scratch.parent / "room", resource.getrlimit(resource.RLIMIT_NPROC)
    room.mkdir()
    other = subprocess.Popen(["sleep", "1000"], **user.of_process())
    try:
        resource.setrlimit(resource.RLIMIT_NPROC, (0, limits[1]))
        tpm.begin(user, print, str(room), 0, 0)
        until(lambda: proc.birth(int((room / "pid").read_text())) == "", "it has ended")
    finally:
        resource.setrlimit(resource.RLIMIT_NPROC, limits)
        other.kill()
        other.wait()
        runtime_dir.remove(str(room))
