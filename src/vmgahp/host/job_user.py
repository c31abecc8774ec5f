"""Who the job's user is, and doing what touches the job's files as that user.

The daemon runs as root, and every name in the job's scratch directory is the job's to choose: a symbolic
link there may point anywhere. So whatever the job may read or write is opened with the job user's rights,
and inside the scratch directory no symbolic link is followed at all.

How: seteuid changes every thread of the process, so the work is done by a forked child that takes on the
user's groups, gid and effective uid, does one operation, passes the descriptor or the error back over a
socket pair, and is gone. Its real uid stays root's: the user's own processes can neither signal nor trace
it. The other way, setfsuid and the bare setgroups system call in the calling thread, is faster, but needs
the system call's number for each architecture, cannot be abandoned when a file system hangs, and a failure
to switch back would leave a thread of root with the wrong rights. A child costs a millisecond, and there
are a handful for a job.

Forking a process with threads is safe as long as the child takes no lock that another thread may have
held. So everything is made ready before the fork, and the child makes system calls only: signals are
blocked around the fork (a handler of the daemon must not run in the child), the garbage collector is off
(a finaliser in the child would speak on the daemon's connections), all other descriptors are closed (a
child that hangs must not keep the daemon's pipes open), and it ends with ``os._exit``. The parent waits
for a limited time; a child that a file system hangs is killed, and reaped when the kernel lets it go.

Nobody else in the process may wait for just any child (``waitpid(-1)``).
"""

import errno
import os
from _thread import allocate_lock, get_ident
from sys import byteorder

from vmgahp.errors import MachineFault, is_machines
from vmgahp.host import system_calls

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping
    from typing import Any, NoReturn

    Operation = Callable[..., int]
    """Runs as the job's user with prepared arguments, makes system calls only, returns a descriptor or -1,
    and raises OSError."""

DEADLINE = 30.0
"""Seconds that one operation may take before its file system counts as hung."""

_LARGEST_ID = 2**32 - 2
"""One more is (uid_t)-1, which means "leave it as it is" to the system: the child would stay root."""

_fork_lock = allocate_lock()
_unreaped: list[int] = []


class Hung(MachineFault):
    """A file system did not answer in time."""


class Identity:
    """The job's user: `uid`, `gid`, and whether the daemon must become that user (`switching`).

    Without root the user is the caller, and every operation is done directly.
    """

    __slots__ = ("_groups", "gid", "switching", "uid")

    def __init__(self, uid: int, gid: int) -> None:
        self.uid = uid
        self.gid = gid
        self.switching = os.geteuid() == 0 and uid != 0
        self._groups: list[int] | None = None

    @classmethod
    def from_environ(cls, environ: "Mapping[str, str]") -> "Identity":
        """The user whom VMGAHP_USER_UID and VMGAHP_USER_GID name; the caller where this is not root.

        A gid that is not set or 0 becomes the uid, as in ``init_uids`` of HTCondor's
        ``src/condor_vm-gahp/vmgahp_main.cpp``. Raises `MachineFault` for root without a usable uid.
        """
        if os.geteuid() != 0:
            return cls(os.geteuid(), os.getegid())
        uid = _id(environ, "VMGAHP_USER_UID")
        if uid == 0:
            raise MachineFault(
                "The daemon runs as root and does not know for which user: VMGAHP_USER_UID is not set.",
                "set VMGAHP_USER_UID=<uid> and VMGAHP_USER_GID=<gid> to the job's user, who is not root.",
            )
        return cls(uid, _id(environ, "VMGAHP_USER_GID") or uid)

    @classmethod
    def of_owner(cls, directory: str) -> "Identity | None":
        """The owner of a scratch directory, for root; None where that is nobody's, is root's, or is not there."""
        try:
            status = os.stat(directory)
        except OSError:
            return None
        return cls(status.st_uid, status.st_gid) if os.geteuid() == 0 and status.st_uid else None

    def groups(self) -> list[int]:
        """All groups of the user, from the group database; only `gid` for a uid that has no name."""
        if self._groups is None:
            import pwd

            try:
                self._groups = os.getgrouplist(pwd.getpwuid(self.uid).pw_name, self.gid)
            except (KeyError, OSError):
                self._groups = [self.gid]
        return self._groups

    def of_process(self, groups: "list[int] | None" = None) -> "dict[str, Any]":
        """Arguments for `subprocess.Popen` that make a program run as the user; none where it does so anyway.

        `groups` are the supplementary ones, by default all that the user has.
        """
        if not self.switching:
            return {}
        return {"user": self.uid, "group": self.gid, "extra_groups": self.groups() if groups is None else groups}

    def open_scratch(self, directory: str, name: str, flags: int, mode: int = 0o600) -> int:
        """Open the regular file `name` below `directory` as the user; returns a descriptor.

        `name` is relative, without ``..``. No component of it may be a symbolic link: OSError ELOOP, or
        ENOTDIR where the link stands for a directory. What is no regular file (a FIFO, a device, a socket) is
        refused with EPERM, a directory with EISDIR, a bad name with EINVAL; everything else is the kernel's
        own OSError. The descriptor is close-on-exec.

        Raises `MachineFault` where the file system hangs, or fails, or this machine lacks something
        (`vmgahp.errors.is_machines`): an OSError is always about what the job has named or left there.
        """
        return self._in_scratch(directory, name, system_calls.open_beneath, flags, mode)

    def read_scratch(self, directory: str, name: str, most: int) -> bytes:
        """The first `most` bytes of the file `name` below `directory`. Raises as `open_scratch`."""
        with open(self.open_scratch(directory, name, os.O_RDONLY), "rb") as file:
            try:
                return file.read(most)
            except OSError as error:
                _blame(error, os.path.join(directory, name), in_scratch=True)
                raise

    def write_scratch(self, directory: str, name: str, data: bytes, mode: int = 0o600) -> None:
        """Replace the file `name` below `directory` by one with `data`, all or nothing, as the user.

        Raises as `open_scratch`; what `name` was before, be it a symbolic link, is replaced and not followed.
        """
        temporary = b".%s.%d.%d.tmp" % (_components(name)[-1][:200], os.getpid(), get_ident())
        self._in_scratch(directory, name, system_calls.write_beneath, temporary, data, mode)

    def rename_scratch(self, directory: str, old: str, new: str, replace: bool = True) -> None:
        """Give a file below `directory` another name, as the user; what had that name is replaced.

        With `replace` false that is a FileExistsError; only the user's own processes could still put a file
        of that name there at the same moment. Raises as `open_scratch`; a symbolic link is renamed itself.
        """
        self._in_scratch(directory, old, system_calls.rename_beneath, _components(new), replace)

    def unlink_scratch(self, directory: str, name: str) -> None:
        """Remove the file `name` below `directory` as the user; none being there is success.

        Raises as `open_scratch`; a symbolic link is removed itself.
        """
        try:
            self._in_scratch(directory, name, system_calls.unlink_beneath)
        except FileNotFoundError:
            return

    def check_access(self, path: str, write: bool) -> str | None:
        """Why the user cannot open the regular file `path` for reading (and writing), or None if that works.

        Symbolic links are followed: this is for full paths that the job names on a file system of many
        machines, where the user's own rights are the limit. Files of the kernel's own (``/proc``, ``/sys``,
        ``/dev``) are refused. A file system that does not answer is a reason too, not a fault of this
        machine: a job can name a path that hangs. Raises `MachineFault` where this machine lacks something.
        """
        if not path.startswith("/"):
            return "it is not a full path"
        try:
            os.close(self.open_named(path, os.O_RDWR if write else os.O_RDONLY))
        except OSError as error:
            return f"{error.strerror}, for uid {self.uid} and {'writing' if write else 'reading'}"
        except Hung as fault:
            return fault.problem
        return None

    def open_named(self, path: str, flags: int) -> int:
        """Open the regular file of a full path as the user, as `check_access` does; returns a descriptor.

        Raises OSError, and `MachineFault` where the file system hangs or this machine lacks something.
        """
        flags |= os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            return self._run(system_calls.open_named, _encode(path), flags)
        except OSError as error:
            _blame(error, path, in_scratch=False)
            raise

    def _in_scratch(self, directory: str, name: str, operation: "Operation", *arguments: object) -> int:
        try:
            return self._run(operation, _encode(directory), _components(name), *arguments)
        except OSError as error:
            _blame(error, os.path.join(directory, name), in_scratch=True)
            raise

    def _run(self, operation: "Operation", *arguments: object) -> int:
        if not self.switching:
            return operation(*arguments)
        return _run_as(self.uid, self.gid, self.groups(), operation, arguments)


def _id(environ: "Mapping[str, str]", name: str) -> int:
    """A uid or gid from the environment, 0 where there is none or not a positive one.

    Raises `MachineFault` for what is no number.
    """
    text = environ.get(name, "").strip()
    if not text or (text.startswith("-") and text[1:].isdecimal()):
        return 0
    if not (text.isascii() and text.isdecimal()) or len(text) > 10 or int(text) > _LARGEST_ID:
        raise MachineFault(f"{name} = {text[:50]!r} is not a user or group id.", f"set {name} to a number.")
    return int(text)


def _blame(error: OSError, path: str, *, in_scratch: bool) -> None:
    """Raise `MachineFault` for an error that is not about what the job has named or left there."""
    if is_machines(error, in_scratch=in_scratch):
        hint = "see that the file system of EXECUTE is well, and look at the limits on memory and open files."
        raise MachineFault(f"This machine has failed at {path}: {error.strerror}.", hint) from error


def _encode(path: str) -> bytes:
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded:
        raise OSError(errno.EINVAL, "it is not a name that a file can have", path)
    return encoded


def _components(name: str) -> list[bytes]:
    parts = _encode(name).split(b"/")
    if any(part in (b"", b".", b"..") for part in parts):
        raise OSError(errno.EINVAL, "it is not a plain relative name", name)
    return parts


def _run_as(uid: int, gid: int, groups: list[int], operation: "Operation", arguments: tuple[object, ...]) -> int:
    """Run an operation in a child that is the user, and return its descriptor or -1.

    Raises the operation's OSError, or `MachineFault` where no answer comes within `DEADLINE`.
    """
    import gc
    import signal
    import socket

    for pid in _unreaped[:]:
        _reap(pid)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        last = max(int(name) for name in os.listdir("/proc/self/fd")) + 64
        with _fork_lock:
            every_signal = signal.valid_signals()
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, every_signal)
            collecting = gc.isenabled()
            gc.disable()
            try:
                pid = os.fork()
                if pid == 0:
                    _child(uid, gid, groups, operation, arguments, theirs, rights, last)
            except OSError as error:
                raise MachineFault(
                    f"No process can be started for uid {uid}: {error.strerror}.",
                    "look at the memory and at the limit of processes of this machine.",
                ) from error
            finally:
                if collecting:
                    gc.enable()
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()
        ours.settimeout(DEADLINE)
        try:
            # Not socket.recv_fds: that of Python 3.11 loses its flags.
            message, passed, flags, _ = ours.recvmsg(1024, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            _reap(pid)
            raise Hung(
                f"A file system did not answer uid {uid} within {DEADLINE:.0f} seconds.",
                "look at the file systems of the scratch directory and of the disks that the job names.",
            ) from None
    finally:
        ours.close()
        theirs.close()
    _gone(pid, 0)
    if flags & socket.MSG_CTRUNC:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    for _, _, data in passed:
        return int.from_bytes(data[:4], byteorder)
    number, _, text = message.partition(b" ")
    if not number.isdigit():
        raise MachineFault(
            f"The helper process for uid {uid} ended without an answer.",
            "look for what kills processes on this machine, such as a lack of memory.",
        )
    if number != b"0":
        raise OSError(int(number), text.decode("utf-8", "replace"))
    return -1


def _child(
    uid: int,
    gid: int,
    groups: list[int],
    operation: "Operation",
    arguments: tuple[object, ...],
    channel: "socket.socket",
    rights: tuple[int, int],
    last: int,
) -> "NoReturn":
    """The whole life of the child: become the user, do it, answer, end. Never returns or raises."""
    try:
        try:
            os.closerange(0, channel.fileno())
            os.closerange(channel.fileno() + 1, last)
            os.setgroups(groups)
            os.setresgid(gid, gid, gid)
            os.seteuid(uid)
            fd = operation(*arguments)
            channel.sendmsg([b"0"], [(*rights, fd.to_bytes(4, byteorder))] if fd >= 0 else [])
        except OSError as error:
            channel.send(b"%d %s" % (error.errno or errno.EIO, (error.strerror or "").encode()))
    finally:
        os._exit(0)


def _reap(pid: int) -> None:
    """Collect a killed child, now or, where the kernel still holds it in a hung file system, later."""
    gone = _gone(pid, os.WNOHANG)
    if gone and pid in _unreaped:
        _unreaped.remove(pid)
    elif not gone and pid not in _unreaped:
        _unreaped.append(pid)


def _gone(pid: int, options: int) -> bool:
    try:
        return os.waitpid(pid, options)[0] != 0
    except ChildProcessError:
        return True
