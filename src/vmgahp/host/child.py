"""Doing one thing as another user: in a child that becomes that user, answers and is gone.

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
from _thread import allocate_lock
from sys import byteorder

from vmgahp.errors import MachineFault

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from typing import NoReturn

    Operation = Callable[..., int]
    """Runs as the user with prepared arguments, makes system calls only, returns a descriptor or -1, and raises
    OSError."""

DEADLINE = 30.0
"""Seconds that one operation may take before its file system counts as hung."""

_fork_lock = allocate_lock()
_unreaped: list[int] = []


def run_as(uid: int, gid: int, groups: list[int], operation: "Operation", arguments: tuple[object, ...]) -> int:
    """Run an operation in a child that is the user, and return its descriptor or -1.

    Raises the operation's OSError, ETIMEDOUT where no answer comes within `DEADLINE`, and `MachineFault` where there
    can be no such child.
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
            late = f"its file system has not answered uid {uid} within {DEADLINE:.0f} seconds"
            raise OSError(errno.ETIMEDOUT, late) from None
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
