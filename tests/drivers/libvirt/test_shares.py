"""Directories that guests mount by virtiofs: the job's own and the machine's, and what goes through."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drivers.libvirt import support
from tests.drivers.libvirt.support import LINUX, ON_VIRTIO, USER_DATA, Job, done, refused, running, until
from tests.peer import Peer
from vmgahp import errors
from vmgahp.drivers.libvirt.start import virtiofs
from vmgahp.host.job_user import Identity
from vmgahp.host.runtime_dir import end_program, remove, runtime_dir
from vmgahp.job.attributes import Share

pytestmark = [pytest.mark.libvirt, pytest.mark.skipif(not virtiofs.program(), reason="needs virtiofsd")]

MISMATCHED = errors.MISMATCHED
as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root")
BY_VIRTIOFS = {"VM_SHARE_SCRATCH": "virtiofs"}

SCRIPT = """#!/bin/sh
set -x
for tag in {tags}; do
    mkdir -p /mnt/$tag
    mount -t virtiofs $tag /mnt/$tag && echo "mounted $tag"
done
{more}
echo "all done"
"""


def guest(linux: Job, more: str, *tags: str) -> None:
    linux.put("user-data", SCRIPT.format(tags=" ".join(tags), more=more))


def servers(linux: Job) -> list[int]:
    """The virtiofsd of this VM: they are the job's user, and have its directories in their command lines."""
    return list(support.processes("/virtiofsd\0", str(linux.scratch.parent)))


@contextlib.contextmanager
def sharing(linux: Job) -> Iterator[Peer]:
    """A server with a guest that has mounted its share."""
    guest(linux, "echo ready; cat", "share")
    with running(linux, *LINUX, ON_VIRTIO, USER_DATA, "VMPARAM_vm_Share = true", **BY_VIRTIOFS) as peer:
        until(lambda: "ready" in linux.console(), "the guest has mounted it")
        yield peer


@pytest.fixture
def machine(linux: Job) -> Path:
    """A directory of the machine's, which everybody may write to."""
    made = linux.scratch.parent / "of the machine"
    made.mkdir()
    made.chmod(0o777)
    (made / "table").write_text("of reference\n")
    (made / "link").symlink_to("table")
    return made


def test_what_a_guest_writes_to_its_share_comes_home_and_no_link_does(linux: Job) -> None:
    guest(
        linux,
        """cd /mnt/share
cat word
echo made > result
mkdir below && echo deep > below/deeper
ln -s /etc/passwd stolen || echo "no symbolic link"
mkfifo pipe || echo "no pipe"
mknod disk b 8 0 || echo "no device"
ln result twin && echo "a second name"
chmod 4755 result || echo "no set-user-id"
chmod 700 result && echo "a mode"
ls -ln""",
        "share",
    )
    inbox = linux.scratch / "inbox"
    inbox.mkdir()
    linux.own(inbox, linux.put(inbox / "word", "a word from the job\n"))
    with running(linux, *LINUX, ON_VIRTIO, USER_DATA, 'VMPARAM_vm_Share = "inbox"', **BY_VIRTIOFS) as peer:
        assert servers(linux)
        support.run_to_its_end(peer, linux)
    console = linux.console()
    for said in (
        "word from the job",
        "no symbolic link",
        "no pipe",
        "no device",
        "second name",
        "no set-user-id",
        "a mode",
    ):
        assert said in console, console
    assert {path.name for path in inbox.iterdir()} == {"word", "result", "below", "twin"}
    assert (inbox / "below" / "deeper").read_text() == "deep\n"
    for path in inbox.rglob("*"):
        assert not path.is_symlink()
        assert path.stat().st_uid == linux.scratch.stat().st_uid
    assert not servers(linux)


def test_the_machines_directories_are_read_and_written_as_the_administrator_says(linux: Job, machine: Path) -> None:
    other = machine.parent / "to write"
    other.mkdir()
    other.chmod(0o777)
    guest(
        linux,
        """cat /mnt/ref/link
echo no > /mnt/ref/table || echo "ref is not written"
rm /mnt/ref/table || echo "ref keeps it"
echo yes > /mnt/Data/told""",
        "ref",
        "Data",
    )
    settings = {
        "VM_SHARE_DIRS": "ref, Data", "VM_SHARE_DIR_REF": machine, "VM_SHARE_DIR_DATA": f"{other}:rw",
        "VM_SHARE_DIR_DATA_IF": 'TARGET.Owner == "alice"',
    }  # fmt: skip
    asks = (*LINUX, ON_VIRTIO, USER_DATA, 'VMPARAM_vm_Share_Dirs = "REF, data, ref"')
    with running(linux, *asks, 'Owner = "alice"', **settings) as peer:
        support.run_to_its_end(peer, linux)
    console = linux.console()
    for said in ("of reference", "ref is not written", "ref keeps it", "all done"):
        assert said in console, console
    assert (machine / "table").read_text() == "of reference\n"
    assert (other / "told").read_text() == "yes\n"
    assert (other / "told").stat().st_uid == linux.scratch.stat().st_uid
    said = refused(linux, MISMATCHED, *asks, 'Owner = "bob"', **settings)
    assert 'This machine gives its directory Data to VM jobs only where TARGET.Owner == "alice"' in said


def test_a_vm_that_shares_can_be_paused_and_not_saved(linux: Job) -> None:
    asks = (*LINUX, ON_VIRTIO, "VMPARAM_vm_Share = true", "JobVMCheckpoint = true")
    assert "JobVMCheckpoint" in refused(linux, MISMATCHED, *asks, **BY_VIRTIOFS)
    with sharing(linux) as peer:
        assert peer.run("SUSPEND", 1) == ["1", "VMGAHP_ERR_VM_NO_SUPPORT_SUSPEND"]
        done(peer, "SOFT_SUSPEND", "RESUME", "STOP")
        log = peer.quit()
    assert "its guest can mount a directory" in log
    assert not servers(linux)


def test_a_server_that_dies_leaves_no_virtiofsd(linux: Job) -> None:
    with sharing(linux) as peer:
        assert servers(linux)
        peer.end_by(signal.SIGKILL)
        until(lambda: linux.domain() is None, "the guardian ends the VM", 30)
        until(lambda: not servers(linux), "virtiofsd ends with QEMU", 10)


def test_a_virtiofsd_that_dies_takes_no_vm_with_it(linux: Job) -> None:
    with sharing(linux) as peer:
        for pid in servers(linux):
            os.kill(pid, signal.SIGKILL)
        until(lambda: not servers(linux), "virtiofsd is gone", 10)
        assert peer.run("STATUS", 1)[1] == "STATUS=Running"
        done(peer, "STOP")
        peer.quit()


# virtiofsd itself


@contextlib.contextmanager
def a_room() -> Iterator[str]:
    """A directory for a virtiofsd, which ends with it."""
    room = runtime_dir()
    try:
        yield room
    finally:
        remove(room)


def test_it_answers_here(user: Identity) -> None:
    assert virtiofs.trouble(user, 10) == ""


def test_one_that_nobody_connects_to_goes_with_its_room(user: Identity) -> None:
    with a_room() as room:
        virtiofs.begin(user, room, Share("x", "/usr", "virtiofs", writable=False), (os.getuid(), os.getgid()))
        pid = int(Path(room, "pid").read_text())
    assert not Path(room).exists()
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()


@pytest.mark.parametrize(("directory", "why"), [("/nonexistent", "No such file"), ("/etc/passwd", "Not a directory")])
def test_a_directory_of_the_administrator_that_is_none_is_the_machines(
    user: Identity, directory: str, why: str
) -> None:
    share = Share("x", directory, "virtiofs", setting="VM_SHARE_DIR_X")
    with a_room() as room, pytest.raises(errors.MachineFault, match=why) as caught:
        virtiofs.begin(user, room, share, (0, 0))
    assert "VM_SHARE_DIR_X" in caught.value.hint


@pytest.mark.parametrize("setting", ["", "VM_SHARE_DIR_X"])
def test_one_that_is_killed_before_it_serves_takes_no_machine_out_of_service(setting, user, monkeypatch):
    """Any other process of the job's user can kill it; here it ends by itself, as a kill may come too late."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with a_room() as room, pytest.raises(errors.JobFault, match="it does not begin"):
        virtiofs.begin(user, room, Share("x", "/usr", "virtiofs", setting=setting), (0, 0))


@as_root
def test_a_directory_that_the_jobs_user_may_not_read_is_refused(user: Identity) -> None:
    closed = Share("x", "/root", "virtiofs", setting="VM_SHARE_DIR_X")
    with a_room() as room, pytest.raises(errors.JobFault, match="cannot be read by the job's user"):
        virtiofs.begin(user, room, closed, (0, 0))


def test_another_that_has_the_process_id_is_not_ended(tmp_path: Path) -> None:
    (tmp_path / "pid").write_text(str(os.getpid()))
    end_program(str(tmp_path))


def test_where_there_is_none_the_job_is_told(user: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtiofs, "PLACES", ("/nonexistent",))
    assert virtiofs.trouble(user, 1) == "virtiofsd is not installed"
