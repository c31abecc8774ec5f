"""Work as the job's user: what that user may do is done, and nothing else can be tricked out of root."""

import contextlib
import errno
import fcntl
import gc
import os
import resource
import select
import signal
import socket
import stat
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import JOB_UID, as_root
from vmgahp.errors import MachineFault
from vmgahp.host import child, job_user, system_calls
from vmgahp.host.job_user import Identity
from vmgahp.testing.contract import until

OTHER_UID = 54322
SHARED_GID = 54399


@pytest.fixture
def scratch(scratch):
    """A scratch directory that is closed to everyone else."""
    scratch.chmod(0o700)
    return scratch


HOW = ("a child each time", "a helper")


@pytest.fixture(params=HOW)
def user(user, request):
    """The job's user, for whom a helper does everything or each time a child of its own."""
    if request.param == "a helper":
        with user.at_hand():
            yield user
    else:
        yield user


@pytest.fixture
def place(scratch):
    """A directory that everyone may search, with the scratch directory in it."""
    return scratch.parent


def put(path, content=b"content", uid=JOB_UID, mode=0o600):
    path.write_bytes(content)
    path.chmod(mode)
    if os.geteuid() == 0:
        os.chown(path, uid, uid)
    return path


def refused(call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        return error.errno
    return None


# --- who it is


@as_root
def test_the_environment_names_the_user():
    user = Identity.from_environ({"VMGAHP_USER_UID": "54321", "VMGAHP_USER_GID": "54399"})
    assert (user.uid, user.gid, user.switching) == (54321, 54399, True)


@as_root
@pytest.mark.parametrize("gid", [None, "", "0", "-1"])
def test_a_gid_of_root_or_none_becomes_the_uid(gid):
    environ = {"VMGAHP_USER_UID": "54321"} | ({} if gid is None else {"VMGAHP_USER_GID": gid})
    assert Identity.from_environ(environ).gid == 54321


@as_root
@pytest.mark.parametrize("uid", [None, "", "0", "-5", "nobody", "1.5", "54321x", "4294967295", "4294967296", "²"])
def test_root_without_a_usable_uid_is_a_fault(uid):
    with pytest.raises(MachineFault, match="VMGAHP_USER_UID"):
        Identity.from_environ({} if uid is None else {"VMGAHP_USER_UID": uid})


def test_without_root_it_is_the_caller(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    monkeypatch.setattr(os, "getegid", lambda: 1235)
    user = Identity.from_environ({"VMGAHP_USER_UID": "54321"})
    assert (user.uid, user.gid, user.switching) == (1234, 1235, False)


def in_a_child(user, how, operation, monkeypatch):
    """Run what is no system call as the user, in each of the two ways."""
    monkeypatch.setattr(system_calls, operation.__name__, operation, raising=False)
    with user.at_hand() if how == "a helper" else contextlib.nullcontext():
        user.run(operation)


@as_root
@pytest.mark.parametrize("how", HOW)
def test_the_child_has_the_users_rights_only(how, monkeypatch):
    def report():
        status = Path("/proc/self/status").read_text()
        lines = [line for line in status.splitlines() if line.startswith(("Uid", "Gid", "Groups", "CapEff"))]
        raise OSError(errno.EPERM, " ".join(" ".join(lines).split()))

    user = Identity(JOB_UID, JOB_UID)
    user._groups = [JOB_UID, SHARED_GID]
    with pytest.raises(OSError, match="Uid") as caught:
        in_a_child(user, how, report, monkeypatch)
    # Real and saved uid stay root's, so that the user's own processes can neither signal nor trace it.
    assert caught.value.strerror == (
        f"Uid: 0 {JOB_UID} 0 {JOB_UID} Gid: {JOB_UID} {JOB_UID} {JOB_UID} {JOB_UID} "
        f"Groups: {JOB_UID} {SHARED_GID} CapEff: 0000000000000000"
    )
    assert os.geteuid() == 0


@as_root
def test_groups_are_those_of_the_group_database():
    assert Identity(JOB_UID, 7).groups() == [7]
    import pwd

    entry = pwd.getpwnam("daemon")
    assert Identity(entry.pw_uid, entry.pw_gid).groups() == os.getgrouplist("daemon", entry.pw_gid)


# --- the scratch directory


def test_a_file_is_made_written_and_read_in_parts_as_the_user(user, scratch):
    fd = user.open_scratch(str(scratch), "new", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.write(fd, b"text")
    os.close(fd)
    found = os.stat(scratch / "new")
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (user.uid, user.gid, 0o600)
    fd = user.open_scratch(str(scratch), "new", os.O_RDONLY)
    assert (os.read(fd, 10), os.get_inheritable(fd), os.get_blocking(fd)) == (b"text", False, True)
    os.close(fd)
    put(scratch / "there", b"a text")
    read = [user.read_scratch(str(scratch), "there", *what) for what in ((3,), (100,), (3, 0), (100, 4), (3, 100))]
    assert read == [b"a t", b"a text", b"ext", b"xt", b""]
    assert user.sizes_scratch(str(scratch), "there")[0] == 6
    assert user.sizes_scratch(str(scratch), "none") == (0, 0)


def test_a_lack_of_descriptors_is_the_machines(user, scratch):
    file = put(scratch / "there")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    calls = (
        lambda: user.open_scratch(str(scratch), "there", os.O_RDONLY),
        lambda: user.open_named(str(file), os.O_RDONLY),
        lambda: user.check_access(str(file), write=False),
    )
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        for call in calls:
            with pytest.raises(MachineFault, match="Too many open files"):
                call()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_what_the_kernel_says_is_passed_on(user, scratch):
    assert refused(user.open_scratch, str(scratch), "none", os.O_RDONLY) == errno.ENOENT
    assert refused(user.open_scratch, str(scratch / "none"), "x", os.O_RDONLY) == errno.ENOENT
    put(scratch / "there")
    exclusive = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    assert refused(user.open_scratch, str(scratch), "there", exclusive) == errno.EEXIST


@pytest.mark.parametrize("name", ["", ".", "..", "/etc/passwd", "../x", "a/../b", "a//b", "a/", "./a", "a\0b"])
def test_a_name_that_is_not_plain_is_refused(user, scratch, name):
    assert refused(user.open_scratch, str(scratch), name, os.O_RDONLY) == errno.EINVAL
    assert refused(user.write_scratch, str(scratch), name, b"") == errno.EINVAL
    assert refused(user.unlink_scratch, str(scratch), name) == errno.EINVAL


def test_no_symbolic_link_is_followed(user, place, scratch):
    secret = put(place / "secret", mode=0o666)
    (scratch / "link").symlink_to(secret)
    (scratch / "up").symlink_to(place)
    (scratch / "here").mkdir(mode=0o777)
    (scratch / "here").chmod(0o777)
    (scratch / "same").symlink_to(scratch / "here")
    put(scratch / "here" / "file")
    flags = os.O_RDWR | os.O_CREAT
    assert refused(user.open_scratch, str(scratch), "link", flags) == errno.ELOOP
    assert refused(user.open_scratch, str(scratch), "up/secret", flags) == errno.ENOTDIR
    assert refused(user.open_scratch, str(scratch), "same/file", flags) == errno.ENOTDIR
    assert refused(user.write_scratch, str(scratch), "up/secret", b"evil") == errno.ENOTDIR
    assert refused(user.unlink_scratch, str(scratch), "up/secret") == errno.ENOTDIR
    os.close(user.open_scratch(str(scratch), "here/file", os.O_RDONLY))
    user.write_scratch(str(scratch), "link", b"mine")
    assert not (scratch / "link").is_symlink()
    assert secret.read_bytes() == b"content"
    (scratch / "gone").symlink_to(secret)
    user.unlink_scratch(str(scratch), "gone")
    assert secret.exists()
    assert not (scratch / "gone").is_symlink()


def test_a_lease_of_another_process_is_not_taken_for_a_lack_of_this_machine(user, scratch):
    leased = put(scratch / "leased", mode=0o666)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # what the kernel tells the holder
    try:
        with leased.open("rb+") as held:
            fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            assert refused(user.open_scratch, str(scratch), "leased", os.O_RDONLY) == errno.EBUSY
    finally:
        signal.signal(signal.SIGIO, before)


def test_what_is_no_regular_file_is_refused_without_waiting(user, scratch):
    os.mkfifo(scratch / "fifo")
    (scratch / "dir").mkdir()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(scratch / "socket"))
    for path in scratch.iterdir():
        path.chmod(0o777)
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
        assert refused(user.open_scratch, str(scratch), "fifo", flags) == errno.EPERM
    assert refused(user.open_scratch, str(scratch), "socket", os.O_RDONLY) == errno.EPERM
    assert refused(user.open_scratch, str(scratch), "dir", os.O_RDONLY) == errno.EISDIR
    assert refused(user.open_scratch, str(scratch), "dir", os.O_RDWR) == errno.EISDIR
    listener.close()


@as_root
def test_a_device_is_refused(user, scratch):
    os.mknod(scratch / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    (scratch / "null").chmod(0o666)
    assert refused(user.open_scratch, str(scratch), "null", os.O_RDWR) in (errno.EPERM, errno.EACCES)


@as_root
def test_roots_and_other_peoples_files_stay_closed(user, place, scratch):
    put(place / "outside", uid=0)
    for name, uid in (("roots", 0), ("others", OTHER_UID)):
        put(scratch / name, uid=uid)
        assert refused(user.open_scratch, str(scratch), name, os.O_RDONLY) == errno.EACCES
    flags = os.O_WRONLY | os.O_CREAT
    assert refused(user.open_scratch, str(place), "new", flags) == errno.EACCES
    assert refused(user.write_scratch, str(place), "outside", b"") == errno.EACCES
    assert refused(user.unlink_scratch, str(place), "outside") == errno.EACCES
    assert (place / "outside").read_bytes() == b"content"


def test_rename_scratch_stays_within_and_replaces(user, place, scratch):
    put(scratch / "one", b"1")
    put(scratch / "two", b"2")
    (scratch / "dir").mkdir(mode=0o777)
    (scratch / "dir").chmod(0o777)
    (scratch / "up").symlink_to(place)
    user.rename_scratch(str(scratch), "one", "two")
    assert (scratch / "two").read_bytes() == b"1"
    user.rename_scratch(str(scratch), "two", "dir/three")
    assert (scratch / "dir" / "three").read_bytes() == b"1"
    assert refused(user.rename_scratch, str(scratch), "two", "four") == errno.ENOENT
    assert refused(user.rename_scratch, str(scratch), "dir/three", "up/four") == errno.ENOTDIR
    assert refused(user.rename_scratch, str(scratch), "dir/three", "../four") == errno.EINVAL
    assert sorted(os.listdir(place)) == ["dir_1"]


def test_unlink_scratch_does_not_mind_what_is_gone_and_write_scratch_replaces_all_or_nothing(user, scratch):
    put(scratch / "file")
    user.unlink_scratch(str(scratch), "file")
    user.unlink_scratch(str(scratch), "file")
    assert os.listdir(scratch) == []
    data = os.urandom(3_000_000)
    user.write_scratch(str(scratch), "file", b"old", 0o644)
    assert stat.S_IMODE(os.stat(scratch / "file").st_mode) == 0o644
    user.write_scratch(str(scratch), "file", data)
    assert (scratch / "file").read_bytes() == data
    assert os.stat(scratch / "file").st_uid == user.uid
    (scratch / "dir").mkdir()
    assert refused(user.write_scratch, str(scratch), "dir", b"x") == errno.EISDIR
    assert sorted(os.listdir(scratch)) == ["dir", "file"]


# --- paths that the job names


@as_root
def test_may_execute(user, place):
    program = place / "program"
    program.write_text("#!/bin/sh\n")
    for mode, expected in ((0o755, True), (0o750, False), (0o644, False)):
        program.chmod(mode)
        assert user.may_execute(str(program)) is expected
    assert not user.may_execute(str(place / "none"))


def test_check_access(user, place, scratch):
    image = put(scratch / "image")
    (place / "link").symlink_to(image)
    assert user.check_access(str(image), write=True) is None
    assert user.check_access(str(place / "link"), write=True) is None
    assert "No such file" in user.check_access(str(place / "none"), write=False)
    assert "directory" in user.check_access(str(scratch), write=False)
    assert "full path" in user.check_access("image", write=False)
    for name in ("/im\0age", "/im\ud800age"):
        assert "not a name" in user.check_access(name, write=False)
        assert refused(user.open_scratch, name, "x", os.O_RDONLY) == errno.EINVAL
    os.mkfifo(scratch / "fifo", 0o666)
    (scratch / "fifo").chmod(0o666)
    assert "regular" in user.check_access(str(scratch / "fifo"), write=False)


@pytest.mark.parametrize("path", ["/proc/self/mem", "/proc/version", "/sys/kernel/uevent_seqnum", "/dev/null"])
def test_the_kernels_own_files_are_no_images(user, place, path):
    (place / "link").symlink_to(path)
    assert user.check_access(path, write=False) is not None
    assert user.check_access(str(place / "link"), write=False) is not None


@as_root
def test_check_access_is_about_the_users_rights(user, place):
    readable = put(place / "readable", uid=0, mode=0o644)
    assert user.check_access(str(readable), write=False) is None
    reason = user.check_access(str(readable), write=True)
    assert "Permission denied" in reason
    assert str(JOB_UID) in reason
    shared = put(place / "shared", uid=0, mode=0o060)
    os.chown(shared, 0, SHARED_GID)
    assert user.check_access(str(shared), write=False) is not None
    assert Identity(JOB_UID, SHARED_GID).check_access(str(shared), write=True) is None
    member = Identity(JOB_UID, JOB_UID)
    member._groups = [JOB_UID, SHARED_GID]
    assert member.check_access(str(shared), write=True) is None
    assert "Permission denied" in user.check_access("/etc/shadow", write=False)


# --- the child


def hang(*_):
    while True:
        signal.pause()


@as_root
def test_a_file_system_that_hangs_is_given_up(user, monkeypatch):
    monkeypatch.setattr(child, "DEADLINE", 0.2)
    monkeypatch.setattr(job_user, "_try_execute", lambda *_: -1)  # which waits for a disk that others keep busy
    monkeypatch.setattr(system_calls, "open_beneath", hang)
    monkeypatch.setattr(system_calls, "open_named", hang)
    with pytest.raises(TimeoutError, match="has not answered"):
        user.open_scratch("/tmp", "x", os.O_RDONLY)
    assert "has not answered" in user.check_access("/tmp/x", write=False)
    monkeypatch.setattr(job_user, "_try_execute", hang)
    with pytest.raises(MachineFault, match="has not answered"):
        user.open_scratch("/tmp", "x", os.O_RDONLY)

    def reaped():
        for pid in child._unreaped[:]:
            child._reap(pid)
        return not child._unreaped

    until(reaped, "what was killed to be reaped")


@as_root
def test_a_child_that_dies_is_a_fault_of_the_machine(user):
    with pytest.raises(MachineFault, match="without an answer"):
        user.run(lambda: os._exit(1))
    with pytest.raises(MachineFault, match="without an answer"):
        user.run(lambda: [][1])


@as_root
@pytest.mark.parametrize("how", HOW)
def test_the_child_keeps_nothing_open_and_no_signal_reaches_it(how, monkeypatch):
    low = os.open("/etc/shadow", os.O_RDONLY)
    high = fcntl.fcntl(low, fcntl.F_DUPFD, 200)

    def report():
        blocked = len(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        raise OSError(errno.EPERM, f"{len(os.listdir('/proc/self/fd'))} {blocked > 50} {gc.isenabled()}")

    with pytest.raises(OSError, match="True") as caught:
        in_a_child(Identity(JOB_UID, JOB_UID), how, report, monkeypatch)
    assert caught.value.strerror == "2 True False"  # the channel, and the descriptor of the listing itself
    os.close(low)
    os.close(high)
    assert gc.isenabled()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


def test_many_threads_at_once(user, scratch):
    """Forking among busy threads: nothing deadlocks, nothing is mixed up, nothing is left open."""

    def work(number):
        for turn in range(5):
            name = f"file{number}"
            data = b"%d %d" % (number, turn)
            user.write_scratch(str(scratch), name, data)
            fd = user.open_scratch(str(scratch), name, os.O_RDONLY)
            assert os.read(fd, 100) == data
            os.close(fd)
            with contextlib.suppress(FileNotFoundError):
                user.open_scratch(str(scratch), "none", os.O_RDONLY)

    def litter(stop):
        while not stop.is_set():
            ring = [[] for _ in range(100)]
            for one, two in zip(ring, ring[1:] + ring[:1], strict=True):
                one.append(two)

    user.write_scratch(str(scratch), "first", b"")
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    stop = threading.Event()
    collector = threading.Thread(target=litter, args=(stop,))
    collector.start()
    turn = sys.getswitchinterval()
    sys.setswitchinterval(0.0001)  # of 5 ms as a rule: threads that wait for each other's turns do little else
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))  # raises what one of them raises
    finally:
        sys.setswitchinterval(turn)
        stop.set()
        collector.join()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert gc.isenabled()


# --- a helper


@pytest.fixture
def forks(monkeypatch):
    """Grows with each child that is made."""
    made = []
    fork = os.fork

    def counted():
        pid = fork()
        if pid:
            made.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", counted)
    return made


def gone(pid):
    return not os.path.exists(f"/proc/{pid}")


@as_root
def test_a_helper_does_it_all_and_is_gone_afterwards(scratch, forks):
    user = Identity(JOB_UID, JOB_UID)
    before = sorted(os.listdir("/proc/self/fd"))
    with user.at_hand():
        user.write_scratch(str(scratch), "file", b"text")
        assert user.read_scratch(str(scratch), "file", 10) == b"text"
        user.rename_scratch(str(scratch), "file", "other")
        with user.at_hand():  # one within the other
            user.unlink_scratch(str(scratch), "other")
        assert refused(user.open_scratch, str(scratch), "other", os.O_RDONLY) == errno.ENOENT
        job_user.make_directory(str(scratch), "directory", user)
        assert user.check_access(str(scratch / "directory"), write=False)
        [helper] = forks
        # Of what it has opened for others it keeps nothing, or it would count as one who has the file open.
        assert len(os.listdir(f"/proc/{helper}/fd")) == 1
    assert gone(helper)
    user.write_scratch(str(scratch), "file", b"text")
    assert len(forks) == 2
    assert sorted(os.listdir("/proc/self/fd")) == before


@as_root
def test_what_a_helper_cannot_be_told_a_child_does_and_it_keeps_no_lease_from_being_given(scratch, forks):
    user = Identity(JOB_UID, JOB_UID)
    data = os.urandom(100_000)
    with user.at_hand():
        user.write_scratch(str(scratch), "large", data)
        assert (scratch / "large").read_bytes() == data
        assert user.run(lambda: -1) == -1
    assert len(forks) == 3
    put(scratch / "image")
    with user.at_hand():
        descriptor = user.open_scratch(str(scratch), "image", os.O_RDWR)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        os.close(descriptor)


@as_root
def test_a_helper_that_dies_is_missed_by_none_but_who_waits_for_it(scratch, forks, monkeypatch):
    user = Identity(JOB_UID, JOB_UID)

    def make_directory_beneath(*_):
        os._exit(1)

    monkeypatch.setattr(system_calls, "make_directory_beneath", make_directory_beneath)
    with user.at_hand():
        with pytest.raises(MachineFault, match="without an answer"):
            job_user.make_directory(str(scratch), "x", user)
        user.write_scratch(str(scratch), "file", b"text")
        assert len(forks) == 2
    with user.at_hand():
        helper = os.pidfd_open(forks[-1])
        os.kill(forks[-1], signal.SIGKILL)
        assert select.select([helper], [], [], 45)[0], Path(f"/proc/{forks[-1]}/status").read_text()
        os.close(helper)
        user.write_scratch(str(scratch), "file", b"text")
    assert all(map(gone, forks))


@as_root
def test_a_helper_whose_file_system_hangs_is_given_up(scratch, forks, monkeypatch):
    user = Identity(JOB_UID, JOB_UID)

    def open_beneath(*_):
        hang()

    monkeypatch.setattr(child, "DEADLINE", 0.2)
    monkeypatch.setattr(job_user, "_try_execute", lambda *_: -1)  # which waits for a disk that others keep busy
    monkeypatch.setattr(system_calls, "open_beneath", open_beneath)
    with user.at_hand():
        with pytest.raises(TimeoutError, match="has not answered"):
            user.open_scratch(str(scratch), "x", os.O_RDONLY)
        user.write_scratch(str(scratch), "file", b"text")
        until(lambda: child._reap(forks[0]) or gone(forks[0]), "what was killed to be reaped")


@as_root
def test_a_helper_ends_with_its_parent(scratch):
    reading, writing = os.pipe()
    waiting, going = os.pipe()
    parent = os.fork()
    if not parent:
        try:
            user = Identity(JOB_UID, JOB_UID)
            user.at_hand().__enter__()
            os.write(writing, b"%d" % user._child._pid)
            os.read(waiting, 1)  # the helper is gone soon after its parent
        finally:
            os._exit(0)
    helper = os.pidfd_open(int(os.read(reading, 10)))
    os.write(going, b"x")
    os.waitpid(parent, 0)
    assert select.select([helper], [], [], 60)[0]
    for descriptor in (helper, reading, writing, waiting, going):
        os.close(descriptor)


def test_direct_work_without_root_is_the_same(monkeypatch, scratch, place):
    user = Identity(os.geteuid(), os.getegid())
    assert user.switching is False
    put(place / "secret")
    (scratch / "link").symlink_to(place / "secret")
    user.write_scratch(str(scratch), "file", b"x")
    assert refused(user.open_scratch, str(scratch), "link", os.O_RDONLY) == errno.ELOOP
    before = len(os.listdir("/proc/self/fd"))
    for name in ("none/x", "link", "file/x"):
        with contextlib.suppress(OSError):
            user.open_scratch(str(scratch), name, os.O_RDONLY)
    assert len(os.listdir("/proc/self/fd")) == before
