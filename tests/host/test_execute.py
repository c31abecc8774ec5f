"""Whose fault an error beneath a scratch directory is: what the job does to it, and what only a machine can do."""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vmgahp.errors import JobFault, MachineFault
from vmgahp.host import execute
from vmgahp.host.job_user import Identity

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount, and become another user")

ROOM = {"a file system without bytes": "size=64k", "a file system without inodes": "nr_inodes=3"}


def error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.fixture
def mount() -> Iterator[Callable[..., Path]]:
    mounted = []

    def mount(place: Path, options: str, user: Identity) -> Path:
        options = f"mode=755,uid={user.uid},gid={user.gid},{options}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], check=True)
        mounted.append(place)
        return place

    yield mount
    for place in reversed(mounted):
        subprocess.run(["umount", "-l", place], check=True)


def fill(directory: Path) -> None:
    """Until neither a byte nor a file has room."""
    for number in range(10):
        try:
            with (directory / f"filling{number}").open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    if file.tell() > 1 << 20:
                        break
        except OSError:
            return


@pytest.mark.parametrize(
    "number",
    [
        *(errno.EIO, errno.ESTALE, errno.ENOSPC, errno.ENOTCONN, errno.ETIMEDOUT, errno.EMFILE, errno.ENOMEM),
        *(errno.EROFS, errno.EDQUOT, errno.EISDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENOENT),
    ],
    ids=errno.errorcode.get,
)
def test_no_number_of_an_error_is_the_machines_while_execute_is_well(
    scratch: Path, user: Identity, number: int
) -> None:
    assert execute.why(error(number), str(scratch), user) == ""
    fault = execute.blame(error(number), str(scratch), user, "It fails.")
    assert isinstance(fault, JobFault)
    assert fault.hint
    assert os.listdir(scratch.parent) == [scratch.name], "nothing is left of the look"


@as_root
@pytest.mark.parametrize("options", ROOM.values(), ids=ROOM)
@pytest.mark.parametrize("is_execute", [False, True], ids=["of its own", "of EXECUTE"])
def test_a_full_file_system_is_the_machines_where_it_is_that_of_execute(
    scratch: Path, user: Identity, mount: Callable[..., Path], options: str, is_execute: bool
) -> None:
    place = mount(scratch, options, user)
    if is_execute:
        place = scratch / "dir_1"
        place.mkdir()
        os.chown(place, user.uid, user.gid)
    fill(scratch)
    with pytest.raises(MachineFault if is_execute else OSError, match="No space left") as caught:
        user.write_scratch(str(place), "new", bytes(8192))
    if isinstance(caught.value, OSError):
        assert "request_disk" in execute.unwritable("new", caught.value, str(place), user).hint
    else:
        assert f"EXECUTE ({scratch}) is ill: No space left on device" in str(caught.value)


@as_root
def test_of_a_scratch_directory_in_one_of_the_starters_execute_is_looked_at(
    scratch: Path, user: Identity, mount: Callable[..., Path]
) -> None:
    """What the starter has made may be a file system of its own, which the job fills."""
    place = mount(scratch, "size=64k", Identity(0, 0)) / "scratch"
    place.mkdir()
    os.chown(place, user.uid, user.gid)
    fill(place)
    with pytest.raises(OSError, match="No space left") as caught:
        user.write_scratch(str(place), "new", bytes(8192))
    assert "request_disk" in execute.unwritable("new", caught.value, str(place), user).hint


@as_root
def test_an_execute_that_is_read_only_is_the_machines(
    scratch: Path, user: Identity, mount: Callable[..., Path]
) -> None:
    place = mount(scratch, "size=64k", user) / "dir_1"
    place.mkdir()
    os.chown(place, user.uid, user.gid)
    subprocess.run(["mount", "-o", "remount,ro", scratch], check=True)
    with pytest.raises(MachineFault, match="is ill: Read-only file system"):
        user.write_scratch(str(place), "new", b"")


@as_root
@pytest.mark.parametrize("mode", [0, 0o100, 0o400, 0o500, 0o1777])
def test_what_the_user_has_done_to_its_directory_is_the_jobs(scratch: Path, user: Identity, mode: int) -> None:
    scratch.chmod(mode)
    execute.require_entry(str(scratch), user)


@as_root
@pytest.mark.parametrize("way", ["another's", "gone", "closed above"])
def test_what_no_user_can_do_to_its_directory_is_the_machines(scratch: Path, user: Identity, way: str) -> None:
    if way == "another's":
        os.chown(scratch, user.uid + 1, 0)
    elif way == "gone":
        scratch.rmdir()
    else:
        scratch.parent.chmod(0o700)
    with pytest.raises(MachineFault, match="is ill"):
        execute.require_entry(str(scratch), user)


@as_root
def test_a_directory_that_its_user_could_rename_is_the_jobs_to_lose(scratch: Path, user: Identity) -> None:
    scratch.parent.chmod(0o1777)
    scratch.rename(scratch.parent / "elsewhere")
    execute.require_entry(str(scratch), user)


@as_root
def test_a_file_system_that_the_user_has_mounted_says_nothing_of_its_owner(
    scratch: Path, user: Identity, mount: Callable[..., Path]
) -> None:
    mount(scratch, "size=64k", Identity(user.uid + 1, user.gid))
    execute.require_entry(str(scratch), user)


@as_root
@pytest.mark.parametrize("kind", ["link", "dangling", "file", "fifo", "closed"])
def test_a_directory_that_is_something_else_is_the_jobs(scratch: Path, user: Identity, kind: str) -> None:
    from vmgahp.host import scratch as things

    place = scratch / "share"
    match kind:
        case "link":
            place.symlink_to("/etc")
        case "dangling":
            place.symlink_to("nowhere")
        case "file":
            place.touch()
        case "fifo":
            os.mkfifo(place)
        case _:
            place.mkdir(mode=0)
            os.chown(place, user.uid, user.gid)
    with pytest.raises(JobFault, match="share"):
        things.make_directory(str(scratch), "share", user)


def test_a_directory_is_made_once(scratch: Path, user: Identity) -> None:
    from vmgahp.host import scratch as things

    for _ in range(2):
        things.make_directory(str(scratch), "share", user)
    assert (scratch / "share").stat().st_uid == user.uid
