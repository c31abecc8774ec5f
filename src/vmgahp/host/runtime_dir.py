"""Directories for the sockets and pipes of one VM, outside of the scratch directory.

Such a directory, a `room`, may have a program that runs beside the VM's QEMU: a file has its process id, so that any
process that removes the room ends it.
"""

import os
import signal
import socket
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX
from functools import cache
from stat import S_ISDIR, S_ISFIFO

from vmgahp.errors import MachineFault
from vmgahp.host import proc, wait
from vmgahp.host.system_calls import Opened

LONGEST_PATH = 100
"""The most bytes of a socket's path. The kernel's limit is 107 (``sun_path`` in unix(7)); QEMU's is the same."""

ROOT_BASE = "/run/vmgahp"

GIVEN = f"{ROOT_BASE}/given"
"""The notes of resources that were reserved for a VM and must be returned (`vmgahp.drivers.libvirt.start.hooks`)."""

PREFIX = "vmgahp-"
LOCK_SECONDS = 2.0
"""Seconds to wait for the lock on claiming, which a stranger may hold in ``/tmp``: then go on without it."""


END_WAIT = 5.0
"""The seconds for a killed program to end; one in a hung file system never does."""


def owner() -> str:
    """Return the owner of this process's directories, as a text that other processes can check (`is_alive`)."""
    return f"{os.getpid()}-{proc.birth(os.getpid())}"


def is_alive(name: str) -> bool:
    """Return True if a name begins with the `owner` of a living process."""
    pid, _, rest = name.partition("-")
    return pid.isascii() and pid.isdigit() and proc.birth(int(pid)) == rest.partition("-")[0] != ""


def runtime_dir(base: str | None = None) -> str:
    """Make a directory for one VM's sockets and return its path, which leaves room for ``/console``.

    `base` is its parent: by default ``/run/vmgahp`` as root, else the first of $XDG_RUNTIME_DIR, $TMPDIR and ``/tmp``
    that is usable. The directory's name identifies the process that made it, for `sweep`. Root's lets other users pass
    through (0711) to their sockets; any other is the caller's alone. Raises `MachineFault` if it cannot be made.
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
                    os.chmod(path, 0o711)  # noqa: S103 - others can pass through, not list or write
                return path
            reason = f"{place} is full of directories of this process"
        except OSError as error:
            reason = f"{place}: {error.strerror}"
    hint = f"make {ROOT_BASE} a directory that only root may write to; without root, set XDG_RUNTIME_DIR."
    raise MachineFault(f"No directory can be made for the VM's sockets and pipes: {reason}.", hint)


def claim(uuid: str) -> str:
    """Claim the VM `uuid` for this process; return a directory for `remove`. Raises `MachineFault` and OSError."""
    path = runtime_dir()
    os.close(os.open(f"{path}/{uuid}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    return path


def claim_scratch(directory: str) -> str:
    """Claim a job's scratch directory; return a directory for `remove`, "" if another VM has it. Raises as `claim`."""
    from hashlib import sha256  # late: it loads OpenSSL, for which a probe has no time

    sweep()
    name, path = sha256(os.fsencode(directory)).hexdigest(), runtime_dir()
    with claiming(path):
        if name in claimed(name):
            remove(path)
            return ""
        os.close(os.open(f"{path}/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    return path


@contextmanager
def claiming(path: str) -> Iterator[None]:
    """Have one process at a time claim in the directory beside `path`. Raises OSError."""
    with Opened(os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as base:
        wait.lock(base, LOCK_EX, LOCK_SECONDS)
        yield


def remove(path: str) -> bool:
    """Remove a directory of `runtime_dir` with its content, never the target of a link. Raises nothing.

    Its program ends. Readers blocked at a FIFO in it, such as a libvirtd of a server that was killed, are released.
    """
    try:
        there = os.lstat(path)
        if not S_ISDIR(there.st_mode) or there.st_uid != os.geteuid():
            return False
        end_program(path)
        for name in os.listdir(path):
            if S_ISFIFO(os.lstat(f"{path}/{name}").st_mode):
                let_in(f"{path}/{name}")
            os.unlink(f"{path}/{name}")
        os.rmdir(path)
    except OSError:
        return False
    return True


def remember(process: subprocess.Popen[bytes], room: str) -> None:
    """Detach a program from its Popen object and note its process id for `end_program`. Raises OSError."""
    process.returncode = 0
    with open(f"{room}/pid", "w") as file:
        file.write(str(process.pid))


def end_program(room: str) -> None:
    """Kill the program of a room; a process is left alone unless it has the room in its command line.

    Raises nothing.
    """
    try:
        with open(f"{room}/pid") as file:
            pid = int(file.read(32))
        process = os.pidfd_open(pid)
    except (OSError, ValueError):
        return
    with suppress(OSError), Opened(process):  # it may exit meanwhile
        words = proc.command_line(pid)
        if os.fsencode(room) in words:
            signal.pidfd_send_signal(process, signal.SIGKILL)
            wait.ready(process, END_WAIT)
        elif words:
            return
    with suppress(ChildProcessError):  # it need not be a child of this process
        os.waitpid(pid, os.WNOHANG)


def let_in(fifo: str) -> None:
    """Release a reader that is blocked in opening a FIFO, because there is no writer. Raises nothing."""
    with suppress(OSError):  # it has no reader, or is gone
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW))


def is_claimed(uuid: str) -> bool:
    """Return True if a living process has claimed the VM `uuid`."""
    return any(_is_mine(f"{path}/{uuid}") and proc.birth(pid) == birth for path, pid, birth in _made_in(_bases()))


def claimed(prefix: str) -> set[str]:
    """Return the names with this prefix in the directories of living processes."""
    found: set[str] = set()
    for path, pid, birth in _made_in(_bases()):
        if _is_mine(path) and proc.birth(pid) == birth:
            with suppress(OSError):  # its VM has just ended
                found.update(name for name in os.listdir(path) if name.startswith(prefix))
    return found


def _made_in(places: Iterable[str]) -> Iterator[tuple[str, int, str]]:
    """Yield the directories of `runtime_dir` there, with process and birth; other users may have made some of them."""
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
    """Return True if it exists and belongs to this user: others may write to ``/tmp``."""
    try:
        return os.lstat(path).st_uid == os.geteuid()
    except OSError:
        return False


def sweep(base: str | None = None) -> list[str]:
    """Remove the directories that dead processes have left, and return their paths.

    The start of a process tells if its id was reused. Only the caller's own directories are touched. Raises nothing.
    """
    birth_of = cache(proc.birth)  # each of two hundred servers has made several
    made = _made_in(_bases() if base is None else [base])
    return [path for path, pid, birth in made if birth_of(pid) != birth and remove(path)]


def _bases() -> list[str]:
    """List the places where `runtime_dir` may make directories, best first."""
    if os.geteuid() == 0:
        return [ROOT_BASE]
    places = [os.environ.get("XDG_RUNTIME_DIR", ""), os.environ.get("TMPDIR", ""), "/tmp"]  # noqa: S108 - 0700
    return [place.rstrip("/") for place in places if place.startswith("/") and place.strip("/")]


def listen(listener: socket.socket, path: str, owner: tuple[int, int]) -> None:
    """Listen at a path to which only one user and group can connect. Raises OSError."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    listener.bind(path)
    # Connections are possible only after listen().
    os.chmod(path, 0o600)
    if os.geteuid() == 0:
        os.chown(path, *owner)
    listener.listen(4)


def make_root_base() -> None:
    """Make sure of a directory through which every user may pass and to which only root may write."""
    # To make one, even one that is there, waits for a lock of /run that any user who lists /run can hold for ever.
    if not os.path.lexists(ROOT_BASE):
        with suppress(FileExistsError):
            os.mkdir(ROOT_BASE, 0o711)
            os.chmod(ROOT_BASE, 0o711)  # noqa: S103 - whatever the umask is
    there = os.lstat(ROOT_BASE)
    if not S_ISDIR(there.st_mode) or there.st_uid != 0 or there.st_mode & 0o022:
        raise PermissionError(1, "others than root may write there")
