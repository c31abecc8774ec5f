"""Whose fault an error beneath a scratch directory is: what the job does to it, and what only a machine can do."""

import contextlib
import errno
import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import get_ident
from unittest.mock import Mock

import pytest

from tests.attacks import fuse
from tests.conftest import as_root
from vmgahp.errors import BAD_IMAGE, JobFault, MachineFault
from vmgahp.host import child, job_user, runtime_dir
from vmgahp.host.job_user import Identity

Mount = Callable[..., Path]

MIB = 1 << 20

SYMPTOMS = (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EMFILE, errno.ENOMEM, errno.EROFS)
"""Of a machine that is ill, and of a file system of the job's as well."""
FULL = (errno.ENOSPC, errno.EDQUOT)
CLOSED = (errno.ENOENT, errno.EACCES, errno.EPERM)
ODD = (errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EEXIST)

ROOM = {"a file system without bytes": "size=64k", "a file system without inodes": "nr_inodes=3"}


def error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.fixture
def mount() -> Iterator[Mount]:
    mounted = []

    def mount(place: Path, options: str, user: Identity) -> Path:
        options = f"mode=755,uid={user.uid},gid={user.gid},{options}".rstrip(",")
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


def leave(place: Path, free: int) -> None:
    """Fill a file system until so many bytes are free."""
    with (place / "filling").open("wb") as file:
        status = os.statvfs(place)
        os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize - free)
    status = os.statvfs(place)
    assert status.f_bavail * status.f_frsize == free


def job_in(place: Path, user: Identity) -> str:
    """A scratch directory in an EXECUTE."""
    directory = place / "dir_1"
    directory.mkdir()
    if os.geteuid() == 0:
        os.chown(directory, user.uid, user.gid)
    return str(directory)


def ill(reason: str) -> str:
    return rf"EXECUTE \(.*\) is ill: {reason}"


each_number = pytest.mark.parametrize("number", [*SYMPTOMS, *FULL, *CLOSED, *ODD], ids=errno.errorcode.get)


@each_number
def test_no_error_is_the_machines_while_execute_is_well(scratch: Path, user: Identity, number: int) -> None:
    assert job_user.why(error(number), str(scratch), user) == ""
    fault = job_user.blame(error(number), str(scratch), user, "It fails.", code=BAD_IMAGE)
    assert isinstance(fault, JobFault)
    assert (fault.code, fault.problem) == (BAD_IMAGE, "It fails.")
    assert ("request_disk" in fault.hint) is (number in FULL)
    assert ("the job's user may write there" in fault.hint) is (number not in FULL)
    assert job_user.blame(error(number), str(scratch), user, "It fails.", "do this").hint == "do this"
    assert os.listdir(scratch.parent) == [scratch.name], "nothing is left of the look"


@as_root
@pytest.mark.parametrize("options", ROOM.values(), ids=ROOM)
@pytest.mark.parametrize("whole", [False, True], ids=["of its own", "of EXECUTE"])
def test_a_full_execute_is_the_machines(scratch: Path, user: Identity, mount: Mount, options: str, whole: bool) -> None:
    place = mount(scratch, options, user)
    if whole:
        place = scratch / "dir_1"
        place.mkdir()
        os.chown(place, user.uid, user.gid)
    fill(scratch)
    with pytest.raises(MachineFault if whole else OSError, match="No space left") as caught:
        user.write_scratch(str(place), "new", bytes(8192))
    if isinstance(caught.value, OSError):
        assert "request_disk" in job_user.unwritable("new", caught.value, str(place), user).hint
    else:
        assert f"EXECUTE ({scratch}) is ill: No space left on device" in str(caught.value)


@as_root
def test_a_directory_in_one_of_the_starters_has_its_execute(scratch: Path, user: Identity, mount: Mount) -> None:
    """What the starter has made may be a file system of its own, which the job fills."""
    place = mount(scratch, "size=64k", Identity(0, 0)) / "scratch"
    place.mkdir()
    os.chown(place, user.uid, user.gid)
    fill(place)
    with pytest.raises(OSError, match="No space left") as caught:
        user.write_scratch(str(place), "new", bytes(8192))
    assert "request_disk" in job_user.unwritable("new", caught.value, str(place), user).hint


@as_root
@each_number
def test_a_read_only_execute_is_the_machines_for_a_symptom(scratch, user, mount, number):
    directory = job_in(mount(scratch, "size=3m", user), user)
    subprocess.run(["mount", "-o", "remount,ro", scratch], check=True)
    fault = job_user.blame(error(number), directory, user, "It fails.")
    if number in (*SYMPTOMS, errno.ENOSPC):
        assert isinstance(fault, MachineFault)
        assert fault.problem == f"It fails. EXECUTE ({scratch}) is ill: Read-only file system."
        assert "see that EXECUTE" in fault.hint
    else:
        assert isinstance(fault, JobFault)


@as_root
@each_number
def test_an_execute_that_no_user_can_reach_is_the_machines(scratch: Path, user: Identity, number: int) -> None:
    scratch.parent.chmod(0o700)
    fault = job_user.blame(error(number), str(scratch), user, "It fails.")
    assert isinstance(fault, MachineFault if number in CLOSED else JobFault)


@as_root
def test_root_looks_where_the_user_may_not(scratch: Path, user: Identity) -> None:
    scratch.parent.chmod(0o700)
    closed = scratch.parent / "closed/execute"
    closed.mkdir(parents=True)
    assert job_user.why(error(errno.EIO), job_in(closed, user), user) == ""


@as_root
@pytest.mark.parametrize(("free", "is_ill"), [(MIB - 4096, True), (MIB, False)])
def test_a_start_takes_a_mebibyte_of_it(scratch: Path, user: Identity, mount: Mount, free: int, is_ill: bool) -> None:
    directory = job_in(mount(scratch, "size=3m", user), user)
    leave(scratch, free)
    assert ("No space left" in job_user.why(error(errno.ENOSPC), directory, user)) is is_ill
    assert job_user.why(error(errno.EIO), directory, user) == "", "it is not about room, and there is some"


@as_root
def test_a_file_system_that_counts_no_files_has_room_for_them(scratch: Path, user: Identity, mount: Mount) -> None:
    directory = job_in(mount(scratch, "size=3m,nr_inodes=0", user), user)
    assert os.statvfs(scratch).f_files == 0
    assert job_user.why(error(errno.ENOSPC), directory, user) == ""


def test_what_is_kept_for_root_is_not_free(scratch: Path, user: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file system of large blocks, of which 999 KiB are a user's and 7992 root's."""
    status = os.statvfs_result((1 << 20, 1024, 100_000, 7992, 999, 100, 100, 100, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: status)
    assert job_user.free_bytes(str(scratch), user) == 999 * 1024
    assert "No space left" in job_user.why(error(errno.ENOSPC), str(scratch), user)
    job_user.require_room(str(scratch), user, 999 * 1024)


@as_root
@pytest.mark.parametrize("options", ROOM.values(), ids=ROOM)
def test_a_read_only_one_is_ill_for_any_error(scratch: Path, user: Identity, mount: Mount, options: str) -> None:
    directory = job_in(mount(scratch, options, user), user)
    fill(scratch)
    assert "No space left" in job_user.why(error(errno.EIO), directory, user)


def test_what_loses_all_that_is_written_is_ill(scratch: Path, user: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", Mock(side_effect=error(errno.EIO)))
    assert "Input/output error" in job_user.why(error(errno.EIO), str(scratch), user)
    assert os.listdir(scratch.parent) == [scratch.name], "nothing is left of the look"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM], ids=errno.errorcode.get)
def test_a_network_may_squash_root(scratch: Path, user: Identity, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    real = os.open

    def squashed(path: bytes, flags: int, *rest: int, **more: int) -> int:
        if flags & os.O_CREAT:
            raise error(number)
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", squashed)
    assert job_user.why(error(errno.EIO), str(scratch), user) == ""


def test_a_look_leaves_other_files_alone(scratch: Path, user: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    other = scratch.parent / f".vmgahp-{os.getpid()}-{get_ident()}"
    other.write_bytes(b"another's")
    assert job_user.why(error(errno.EIO), str(scratch), user) == ""
    assert other.read_bytes() == b"another's"
    monkeypatch.chdir(scratch.parent)
    assert job_user.why(error(errno.EIO), scratch.name, user) == ""


@as_root
def test_an_execute_that_hangs_is_given_up(scratch: Path, user: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "DEADLINE", 0.2)
    monkeypatch.setattr(job_user, "_try_execute", lambda *_: time.sleep(10))
    assert "has not answered uid 0" in job_user.why(error(errno.EIO), str(scratch), user)


@as_root
def test_a_user_who_holds_the_lock_of_a_directory_holds_up_nothing(scratch, user, monkeypatch):
    """Any user can hold that of a directory that all may list, such as EXECUTE and /run."""
    (base := scratch.parent / "vmgahp").mkdir(0o711)
    monkeypatch.setattr(runtime_dir, "ROOT_BASE", str(base))
    monkeypatch.setattr(child, "DEADLINE", 5.0)
    (page := scratch / "page").touch()
    with fuse.held(scratch.parent, page, user.uid):
        assert job_user.why(error(errno.EIO), str(scratch), user) == ""
        job_user.as_root(user, lambda: runtime_dir.make_root_base() or -1)


MOUNTED = {
    "nothing": ([], ""),
    "read-only": (["ro"], "It was mounted so."),
    "to be written": (["rw"], ""),
    "to be written, and read-only above": (["rw", "ro"], "It was mounted so."),
    "read-only, and to be written above": (["ro", "rw"], ""),
}


@as_root
@pytest.mark.parametrize(("layers", "reason"), MOUNTED.values(), ids=MOUNTED)
def test_no_user_mounts_read_only(scratch: Path, user: Identity, mount: Mount, layers: list[str], reason: str) -> None:
    for options in layers:
        mount(scratch, options, user)
    for directory in (f"{scratch}", f"{scratch}/"):
        assert job_user.why(error(errno.EROFS), directory, user) == reason
    assert job_user.why(error(errno.EIO), str(scratch), user) == "", "the error is not about that"


@as_root
@pytest.mark.parametrize(
    ("is_full", "outcomes"),
    [
        # The job itself has named the full path: any other machine may have it read-only too.
        (False, [*["It was mounted so."] * 4, "Read-only file system"]),
        (True, ["No space left on device", *[""] * 3, "No such file or directory"]),
    ],
    ids=["read-only", "full"],
)
def test_a_file_system_of_its_own_that_fails_is_the_machines_where_no_job_can_do_that(
    scratch: Path, user: Identity, mount: Mount, is_full: bool, outcomes: list[str]
) -> None:
    place = str(mount(scratch, "size=64k", user))
    user.write_scratch(place, "there", b"text")
    if is_full:
        fill(scratch)
    else:
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)

    def outcome(call: Callable[..., int | None], *arguments: object) -> str:
        try:
            if (opened := call(*arguments)) is not None:
                os.close(opened)
        except MachineFault as fault:
            return fault.problem.rpartition("system. ")[2]
        except OSError as error:
            return error.strerror
        return ""

    assert outcomes == [
        outcome(user.write_scratch, place, "new", bytes(8192)),
        outcome(user.open_scratch, place, "there", os.O_RDWR),
        outcome(user.rename_scratch, place, "there", "here"),
        outcome(user.unlink_scratch, place, "there"),
        outcome(user.open_named, f"{place}/there", os.O_RDWR),
    ]


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@each_number
def test_a_path_of_the_jobs_own_is_the_machines_where_nothing_can_be_opened(user: Identity, number: int) -> None:
    job_user.require_means(error(number), "/a/path", user)
    is_symptom = number in (*SYMPTOMS, errno.ENOSPC)
    expected = pytest.raises(MachineFault, match=r"^/a/path cannot be opened: Too many open files")
    with expected if is_symptom else contextlib.nullcontext(), no_more_files():
        job_user.require_means(error(number), "/a/path", user)


@as_root
@pytest.mark.parametrize("needed", [(), (2 * MIB,)], ids=["a start", "more"])
def test_without_room_the_job_is_held(scratch: Path, user: Identity, mount: Mount, needed: tuple[int, ...]) -> None:
    mount(scratch, "size=4m", user)
    enough = needed[0] if needed else MIB
    leave(scratch, enough)
    job_user.require_room(str(scratch), user, *needed)
    leave(scratch, enough - 4096)
    said = f"no room in the scratch directory {scratch}: {enough // 1024 - 4} KiB are free"
    with pytest.raises(JobFault, match=said) as caught:
        job_user.require_room(str(scratch), user, *needed)
    assert "request_disk" in caught.value.hint


@as_root
def test_without_room_in_execute_the_machine_is_ill(scratch: Path, user: Identity, mount: Mount) -> None:
    directory = job_in(mount(scratch, "size=3m", user), user)
    leave(scratch, MIB // 2)
    with pytest.raises(MachineFault, match=rf"512 KiB are free\. {ill('No space left on device')}"):
        job_user.require_room(directory, user)


def test_a_directory_is_made_once_and_its_room_is_asked_while_it_is_there(scratch: Path, user: Identity) -> None:
    for _ in range(2):
        job_user.make_directory(str(scratch), "share", user)
    assert (scratch / "share").stat().st_uid == user.uid
    inside = scratch / "dir_2"
    with pytest.raises(JobFault, match=f"{inside} cannot be examined .No such file"):
        job_user.free_bytes(str(inside), user)
    if user.switching:
        (scratch / "share").rmdir()
        scratch.rmdir()
        with pytest.raises(MachineFault, match=rf"{scratch} cannot be examined .*{ill('No such file')}"):
            job_user.free_bytes(str(scratch), user)


@as_root
@pytest.mark.parametrize("mode", [0, 0o100, 0o400, 0o500, 0o1777])
def test_what_the_user_has_done_to_its_directory_is_the_jobs(scratch: Path, user: Identity, mode: int) -> None:
    scratch.chmod(mode)
    job_user.require_entry(str(scratch), user)


@as_root
@pytest.mark.parametrize(
    "harm",
    [lambda place: os.chown(place, 12345, 0), Path.rmdir, lambda place: place.parent.chmod(0o700)],
    ids=["another's", "gone", "closed above"],
)
def test_what_no_user_can_do_to_its_directory_is_the_machines(
    scratch: Path, user: Identity, harm: Callable[[Path], None]
) -> None:
    harm(scratch)
    with pytest.raises(MachineFault, match=rf"^{scratch} cannot be entered as uid {user.uid}\. {ill('')}"):
        job_user.require_entry(str(scratch), user)


@as_root
def test_a_directory_that_its_user_could_rename_is_the_jobs_to_lose(scratch: Path, user: Identity) -> None:
    scratch.parent.chmod(0o1777)
    scratch.rename(scratch.parent / "elsewhere")
    job_user.require_entry(str(scratch), user)


@as_root
def test_a_file_system_of_the_users_says_nothing_of_its_owner(scratch: Path, user: Identity, mount: Mount) -> None:
    mount(scratch, "size=64k", Identity(user.uid + 1, user.gid))
    job_user.require_entry(str(scratch), user)


@as_root
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda place: place.symlink_to("/etc"), id="link"),
        pytest.param(lambda place: place.symlink_to("nowhere"), id="dangling"),
        pytest.param(Path.touch, id="file"),
        pytest.param(os.mkfifo, id="fifo"),
        pytest.param(lambda place: place.mkdir(mode=0), id="closed"),
    ],
)
def test_a_directory_that_is_something_else_is_the_jobs(
    scratch: Path, user: Identity, make: Callable[[Path], None]
) -> None:
    make(scratch / "share")
    os.chown(scratch / "share", user.uid, user.gid, follow_symlinks=False)
    with pytest.raises(JobFault, match="share"):
        job_user.make_directory(str(scratch), "share", user)
