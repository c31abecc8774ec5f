"""The system calls of a process that runs as the job's user; they follow no link below a directory."""

from __future__ import annotations

import errno
import os
from stat import S_ISDIR, S_ISREG

_PR_SET_PDEATHSIG, _SIGKILL = 1, 9
_NO_IMAGES = (b"/proc/", b"/sys/", b"/dev/")


class Opened:
    """An open file descriptor for a ``with``, which closes it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _above(directory: bytes, parts: list[bytes]) -> Opened:
    """Open the directory of the last one of some parts of a path."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in parts[:-1]:
        with Opened(fd):
            fd = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    return Opened(fd)


def open_named(path: bytes, flags: int) -> int:
    fd = _open_regular(path, flags)
    if os.readlink(b"/proc/self/fd/%d" % fd).startswith(_NO_IMAGES):
        os.close(fd)
        raise OSError(errno.EPERM, "it is a file of the kernel's own")
    return fd


def require_executable(path: bytes) -> int:
    """Raise OSError if the user may not execute the file."""
    if not os.access(path, os.X_OK, effective_ids=True):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return -1


def read_named(path: bytes, most: int) -> int:
    """Return an unnamed file with the first bytes of another."""
    with Opened(open_named(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)) as fd:
        return unnamed(os.pread(fd, most, 0))


def room_in(directory: bytes) -> int:
    """Return an unnamed file with four numbers of a file system: its free bytes and inodes, its inodes, its device."""
    room, device = os.statvfs(directory), os.stat(directory).st_dev
    return unnamed(b"%d %d %d %d" % (room.f_bavail * room.f_frsize, room.f_favail, room.f_files, device))


def unnamed(data: bytes) -> int:
    """Return an unnamed file with the data, to be read from its beginning."""
    file = os.memfd_create("data", os.MFD_CLOEXEC)
    while data:
        data = data[os.write(file, data) :]
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _open_regular(path: bytes, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> int:
    try:
        fd = os.open(path, flags, mode, dir_fd=dir_fd)
    except OSError as error:
        # Errors that the user can cause must not look like a lack of resources.
        if error.errno == errno.ENXIO:  # a socket, or a FIFO without a reader
            raise OSError(errno.EPERM, "it is not a regular file") from None
        if error.errno == errno.EAGAIN:
            raise OSError(errno.EBUSY, "another process has a lease on it") from None
        raise
    kind = os.fstat(fd).st_mode
    if S_ISREG(kind):
        return fd
    os.close(fd)
    if S_ISDIR(kind):
        raise OSError(errno.EISDIR, "it is a directory")
    raise OSError(errno.EPERM, "it is not a regular file")


def open_beneath(directory: bytes, parts: list[bytes], flags: int, mode: int) -> int:
    with _above(directory, parts) as above:
        # O_NONBLOCK: a FIFO or a device must not hold up its own refusal.
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        fd = _open_regular(parts[-1], flags, mode, above)
        os.set_blocking(fd, True)
        return fd


def sizes_beneath(directory: bytes, parts: list[bytes]) -> int:
    """Return an unnamed file with two numbers: a file's size, and the bytes that it occupies."""
    with Opened(open_beneath(directory, parts, os.O_RDONLY, 0)) as fd:
        status = os.fstat(fd)
    return unnamed(b"%d %d" % (status.st_size, status.st_blocks * 512))


def read_beneath(directory: bytes, parts: list[bytes], most: int, start: int) -> int:
    """Return an unnamed file with the first bytes of another; with `start` not negative, its last ones from there."""
    data = b""
    with Opened(open_beneath(directory, parts, os.O_RDONLY, 0)) as fd:
        start = max(start, os.fstat(fd).st_size - most) if start >= 0 else 0
        while more := os.pread(fd, most - len(data), start + len(data)):
            data += more
    return unnamed(data)


def write_beneath(directory: bytes, parts: list[bytes], temporary: bytes, data: bytes, mode: int) -> int:
    with _above(directory, parts) as above:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(temporary, flags, mode, dir_fd=above)
        except FileExistsError:  # from a server that was killed; the name has this one's process id
            os.unlink(temporary, dir_fd=above)
            fd = os.open(temporary, flags, mode, dir_fd=above)
        try:
            with Opened(fd):
                position = 0
                while position < len(data):
                    position += os.write(fd, data[position : position + (1 << 20)])
            os.rename(temporary, parts[-1], src_dir_fd=above, dst_dir_fd=above)
        except OSError:
            os.unlink(temporary, dir_fd=above)
            raise
    return -1


def make_directory_beneath(directory: bytes, parts: list[bytes]) -> int:
    with _above(directory, parts) as above:
        try:
            os.mkdir(parts[-1], 0o755, dir_fd=above)
        except FileExistsError:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            os.close(os.open(parts[-1], flags, dir_fd=above))
    return -1


def rename_beneath(directory: bytes, old: list[bytes], new: list[bytes], replace: bool) -> int:
    with _above(directory, old) as source, _above(directory, new) as target:
        if not replace:
            try:
                os.stat(new[-1], dir_fd=target, follow_symlinks=False)
            except FileNotFoundError:
                pass
            else:
                raise FileExistsError(errno.EEXIST, "a file has that name already")
        os.rename(old[-1], new[-1], src_dir_fd=source, dst_dir_fd=target)
    return -1


def find_beneath(directory: bytes, parts: list[bytes]) -> int:
    """Raise OSError if there is no such file, or if a link leads to it."""
    with _above(directory, parts) as above:
        os.stat(parts[-1], dir_fd=above, follow_symlinks=False)
    return -1


def unlink_beneath(directory: bytes, parts: list[bytes]) -> int:
    with _above(directory, parts) as above:
        os.unlink(parts[-1], dir_fd=above)
    return -1


def link_beneath(directory: bytes, parts: list[bytes], names: list[bytes], others: bool) -> int:
    """Hard-link regular files of a directory into the one below it that `parts` name.

    The files are `names`, except those that exist there already; or, with `others`, all other files that do not begin
    with a dot, which replace existing ones.
    """
    opened = Opened(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    with opened as above, _above(directory, [*parts, b""]) as below:
        if others:
            there = (os.fsencode(name) for name in os.listdir(above))
            names = [name for name in there if not name.startswith(b".") and name not in names]
        for name in names:
            _link(name, above, below, others)
    return -1


def unlink_links_beneath(directory: bytes, parts: list[bytes]) -> int:
    """Remove the links that `link_beneath` has made."""
    with _above(directory, [*parts, b""]) as below:
        for name in os.listdir(directory):
            try:
                here = os.stat(os.path.join(directory, name), follow_symlinks=False)
                there = os.stat(name, dir_fd=below, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if S_ISREG(here.st_mode) and (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino):
                os.unlink(name, dir_fd=below)
    return -1


def _link(name: bytes, above: int, below: int, replace: bool) -> None:
    try:
        if not S_ISREG(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
            return
    except FileNotFoundError:
        return
    try:
        os.link(name, name, src_dir_fd=above, dst_dir_fd=below, follow_symlinks=False)
    except FileExistsError:
        if replace:
            os.unlink(name, dir_fd=below)
            os.link(name, name, src_dir_fd=above, dst_dir_fd=below, follow_symlinks=False)


def connect_loopback(address: str, port: int) -> int:
    """Begin a connection to a loopback address; return the socket, which may not be connected yet."""
    import socket  # `vmgahp.host.child` has loaded it before it forks

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    way = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        way.connect((address, port))
    except BlockingIOError:
        pass
    except BaseException:
        way.close()
        raise
    return way.detach()


def reserve_port(address: str, port: int) -> int:
    """Bind a port, on which only processes of the same user can listen then; return the socket, which does not."""
    import socket  # as above

    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore connections in TIME_WAIT
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((address, port))
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # nor may another listen by it
        return reserved.detach()


def restrict(user: tuple[int, int, int] | None, *, memory: int, cpu_seconds: int, file_bytes: int) -> None:
    """Become the user (`Identity.becoming`, without other groups; None: no change) and set limits, irrevocably.

    The process must have loaded all its code by then: the job's user may not be allowed to read the installation. It is
    killed when the thread that started it ends, even if that user's processes have stopped it.
    """
    import resource  # a shared library, for which the first reply does not wait

    for limit, least in (
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(limit)[1]
        value = least if hard == resource.RLIM_INFINITY else min(least, hard)
        resource.setrlimit(limit, (value, value))
    if user is not None:  # after the limits, which other processes of that user could change meanwhile
        become(*user)


def become(uid: int, gid: int, parent: int) -> None:
    """Become the user, without other groups, and be killed when the thread of `parent` that started this one ends."""
    import ctypes  # as above

    prctl = ctypes.CDLL(None).prctl
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.seteuid(uid)  # which would take the signal back; processes of the user meddle once the real uid has changed
    prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it had ended before
        os._exit(1)
    os.setresuid(uid, uid, uid)
