"""Directories for the sockets and pipes of one VM, outside of the scratch directory."""

import os
from _collections_abc import Iterable, Iterator
from stat import S_ISDIR, S_ISFIFO

from vmgahp.errors import MachineFault

LONGEST_PATH = 100
"""Bytes of a socket's path. The kernel's limit is 107 (``sun_path`` in unix(7)); QEMU's is the same."""


ROOT_BASE = "/run/vmgahp"

GIVEN = f"{ROOT_BASE}/given"
"""Notes of what others have given for a VM and are to have back (`vmgahp.drivers.libvirt.reservation`)."""


PREFIX = "vmgahp-"


_server = 0
"""The process to which a helper's directories belong; 0: they are of this one."""


def belong_to(server: int) -> None:
    """What this process makes from now on is another's, and lives as long as that does."""
    global _server
    _server = server


def owner() -> str:
    """Whose what this process makes is, as others can tell (`is_alive`)."""
    pid = _server or os.getpid()
    return f"{pid}-{_birth(pid)}"


def is_alive(name: str) -> bool:
    """Whether the process lives whose `owner` a name begins with."""
    pid, _, rest = name.partition("-")
    return pid.isascii() and pid.isdigit() and _birth(int(pid)) == rest.partition("-")[0] != ""


def runtime_dir(base: str | None = None) -> str:
    """Make a directory for one VM's sockets and return its path, which leaves room for ``/console``.

    `base` is where: by default ``/run/vmgahp`` as root, else the first of $XDG_RUNTIME_DIR, $TMPDIR and
    ``/tmp`` that will do. The directory's name says which process made it, for `sweep`. As root others may
    pass through it (0711) to a socket that is theirs; else it is the caller's alone. Raises `MachineFault`
    when there can be none.
    """
    bases = _bases() if base is None else [base]
    mine = f"{PREFIX}{owner()}"
    reason = "no directory is given"
    for place in bases:
        if len(os.fsencode(f"{place}/{mine}-999/console")) >= LONGEST_PATH:
            reason = f"{place} is too long: a socket's path has less than {LONGEST_PATH} bytes"
            continue
        try:
            if place == ROOT_BASE:
                make_root_base()
            for number in range(1000):
                path = f"{place}/{mine}-{number}"
                try:
                    os.mkdir(path, 0o700)
                except FileExistsError:
                    continue
                if os.geteuid() == 0:
                    os.chmod(path, 0o711)  # noqa: S103 - to pass through; nobody else can list or write
                return path
            reason = f"{place} is full of directories of this process"
        except OSError as error:
            reason = f"{place}: {error.strerror}"
    raise MachineFault(
        f"No directory can be made for the VM's sockets and pipes: {reason}.",
        f"make {ROOT_BASE} a directory that only root may write to; without root, set XDG_RUNTIME_DIR.",
    )


def shared(name: str) -> str:
    """Where something of this name is that many processes of this user use; it stays till the machine is down.

    Raises OSError.
    """
    base = _bases()[0]
    if base == ROOT_BASE:
        make_root_base()
    return f"{base}/{PREFIX}{os.geteuid()}-{name}"


def is_private(path: str) -> bool:
    """Whether it is a directory that only this user may write to."""
    try:
        there = os.lstat(path)
    except OSError:
        return False
    return S_ISDIR(there.st_mode) and there.st_uid == os.geteuid() and not there.st_mode & 0o022


def claim(uuid: str) -> str:
    """Say to other processes that this one looks after the VM `uuid`; a directory, to be removed with `remove`.

    Raises `MachineFault` and OSError.
    """
    path = runtime_dir()
    os.close(os.open(f"{path}/{uuid}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    return path


def remove(path: str) -> None:
    """Remove what `runtime_dir` has made, with all that is in it. Raises nothing."""
    _remove_directory(path, os.geteuid())


def let_in(fifo: str) -> None:
    """Have nobody wait any more who opens a FIFO to read from it, and finds no writer. Raises nothing."""
    try:
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW))
    except OSError:
        pass  # nobody reads from it, or it is gone


def is_claimed(uuid: str) -> bool:
    """Whether a process that lives looks after the VM `uuid`."""
    return any(_is_mine(f"{path}/{uuid}") and _birth(pid) == birth for path, pid, birth in _made_in(_bases()))


def claimed(prefix: str) -> set[str]:
    """What has a name that begins so, in the directories of processes that live."""
    found: set[str] = set()
    for path, pid, birth in _made_in(_bases()):
        if _is_mine(path) and _birth(pid) == birth:
            try:
                found.update(name for name in os.listdir(path) if name.startswith(prefix))
            except OSError:
                pass  # its VM has just ended
    return found


def _made_in(places: Iterable[str]) -> Iterator[tuple[str, int, str]]:
    """What `runtime_dir` has made there, and the process that did, with its birth. Others may write there too."""
    for place in places:
        try:
            names = [name for name in os.listdir(place) if name.startswith(PREFIX)]
        except OSError:
            continue
        for name in names:
            words = name.removeprefix(PREFIX).split("-")
            if len(words) == 3 and all(word.isascii() and word.isdigit() for word in words):
                yield f"{place}/{name}", int(words[0]), words[1]


def _is_mine(path: str) -> bool:
    """Whether it is there, and made by this user: others may write to ``/tmp``."""
    try:
        return os.lstat(path).st_uid == os.geteuid()
    except OSError:
        return False


def sweep(base: str | None = None) -> list[str]:
    """Remove what dead processes have left where `runtime_dir` makes directories; what was removed.

    A process id that was used again is told apart by the time at which the process started. Only
    directories of the caller's own user are touched. Raises nothing.
    """
    removed = []
    births: dict[int, str] = {}  # of two hundred servers, each of which has made several
    for path, pid, birth in _made_in(_bases() if base is None else [base]):
        if pid not in births:
            births[pid] = _birth(pid)
        if births[pid] != birth and _remove_directory(path, os.geteuid()):
            removed.append(path)
    return removed


def _bases() -> list[str]:
    """Where `runtime_dir` may make directories, best first."""
    if os.geteuid() == 0:
        return [ROOT_BASE]
    places = [os.environ.get("XDG_RUNTIME_DIR", ""), os.environ.get("TMPDIR", ""), "/tmp"]  # noqa: S108 - 0700
    return [place.rstrip("/") for place in places if place.startswith("/") and place.strip("/")]


def make_root_base() -> None:
    """Make sure of a directory that everybody may pass through and only root may write to."""
    try:
        os.mkdir(ROOT_BASE, 0o711)
        os.chmod(ROOT_BASE, 0o711)  # noqa: S103 - whatever the umask is
    except FileExistsError:
        there = os.lstat(ROOT_BASE)
        if not S_ISDIR(there.st_mode) or there.st_uid != 0 or there.st_mode & 0o022:
            raise PermissionError(1, "others than root may write there") from None


def _remove_directory(path: str, uid: int) -> bool:
    """Remove a directory of `uid` and what is in it, never what a link points to.

    Who waits at a FIFO in it, such as a libvirtd for a server that was killed, is let go.
    """
    try:
        there = os.lstat(path)
        if not S_ISDIR(there.st_mode) or there.st_uid != uid:
            return False
        for name in os.listdir(path):
            if S_ISFIFO(os.lstat(f"{path}/{name}").st_mode):
                let_in(f"{path}/{name}")
            os.unlink(f"{path}/{name}")
        os.rmdir(path)
    except OSError:
        return False
    return True


def _birth(pid: int) -> str:
    """When a process started, in ticks since boot: field 22 of proc_pid_stat(5); "" if none lives.

    One that has ended stays there for as long as its parent does not ask how.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # The second field is the program's name in brackets, and may hold anything.
            fields = stat.read().rpartition(b")")[2].split()
            return "" if fields[0] in (b"Z", b"X") else fields[19].decode()
    except (OSError, IndexError):
        return ""
