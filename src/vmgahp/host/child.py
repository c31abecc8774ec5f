"""Operations as another user: in a child that becomes that user, answers and exits.

Since seteuid changes every thread of the process, the work is done by a forked child that takes on the user's groups,
gid and effective uid, does one operation, passes the descriptor or the error back over a socket pair, and exits. Its
real uid stays root's: the user's own processes can neither signal nor trace it. The alternative, setfsuid and the bare
setgroups system call in the calling thread, is faster, but needs the system call's number for each architecture, cannot
be abandoned when a file system hangs, and a failure to switch back would leave a thread of root with the wrong rights.
A child costs two milliseconds; for many operations, as at a start, one `StayingChild` serves all of them.

Forking a process with threads is safe as long as the child takes no lock that another thread may have
held. So everything is prepared before the fork, and the child makes system calls only: signals are
blocked around the fork (a handler of the daemon must not run in the child), the garbage collector is off
(a finaliser in the child would speak on the daemon's connections), all other descriptors are closed (a
child that hangs must not keep the daemon's pipes open), and it ends with ``os._exit``. The parent waits
for a limited time; a child that a file system hangs is killed, and reaped when the kernel lets it go.

No other code in the process may wait for any child (``waitpid(-1)``).
"""

import errno
import gc
import marshal
import os
from _thread import allocate_lock
from sys import byteorder
from time import monotonic

from vmgahp.errors import MachineFault
from vmgahp.host import budget, system_calls

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from typing import Any, NoReturn

    Operation = Callable[..., int]
    """A function that runs as the user with prepared arguments, makes system calls only, returns a descriptor or -1,
    and raises OSError."""
    Life = Callable[[socket.socket, tuple[int, int]], object]
    """The body of a child: it takes the socket to its parent, and the socket option for passing descriptors."""
    Answer = tuple[bytes, int, bool]
    """The message, a descriptor or -1, and whether the descriptor was lost for lack of room."""

DEADLINE = 30.0
"""The timeout of one operation in seconds, after which its file system counts as hung."""

_LONGEST = 1 << 16
"""The most bytes of one message to a `StayingChild`."""

_fork_lock = allocate_lock()
_unreaped: list[int] = []


def run_as(uid: int, gid: int, groups: list[int], operation: "Operation", arguments: "tuple[Any, ...]") -> int:
    """Run an operation in a child that is the user, and return its descriptor or -1.

    Raises the operation's OSError, ETIMEDOUT if no answer comes within `DEADLINE`, `MachineFault` if the child
    cannot be started, and `Fault` if a START has no time left for it (`vmgahp.host.budget`).
    """
    seconds = budget.current().left(DEADLINE)
    pid, channel = _fork(uid, gid, groups, lambda theirs, rights: _answer(theirs, rights, operation, arguments))
    try:
        answer = _receive(channel, pid, uid, seconds)
    finally:
        channel.close()
    _gone(pid, 0)
    return _result(answer, uid)


class StayingChild:
    """A child that runs as the user and does one operation after another until it is closed.

    It inherits only the socket to its parent, keeps no file open, and exits with its parent.
    """

    def __init__(self, uid: int, gid: int, groups: list[int]) -> None:
        """Start the child. Raises OSError and `MachineFault`."""
        self._user = uid, gid, groups
        self._lock = allocate_lock()
        self._pid, self._channel = _fork(uid, gid, groups, _serve)

    def run(self, operation: "Operation", arguments: "tuple[Any, ...]") -> int:
        """Run an operation as `run_as` does; use a separate child if this one is busy or gone, or cannot take it."""
        if getattr(system_calls, operation.__name__, None) is operation and self._lock.acquire(False):
            try:
                seconds = budget.current().left(DEADLINE)
                message = marshal.dumps((operation.__name__, arguments))
                if self._pid and len(message) <= _LONGEST and _sent(self._channel, message):
                    return self._answered(seconds)
            finally:
                self._lock.release()
        return run_as(*self._user, operation, arguments)

    def close(self) -> None:
        """End the child; may be called again."""
        with self._lock:
            self._channel.close()
            if self._pid:
                _gone(self._pid, 0)
            self._pid = 0

    def _answered(self, seconds: float) -> int:
        uid = self._user[0]
        pid, self._pid = self._pid, 0
        answer = _receive(self._channel, pid, uid, seconds)
        if answer[0]:
            self._pid = pid
        else:
            _reap(pid)  # it was killed
        return _result(answer, uid)


def _fork(uid: int, gid: int, groups: list[int], life: "Life") -> "tuple[int, socket.socket]":
    """Fork a child that becomes the user, runs `life` and exits; return its process id and our end of the socket pair.

    Raises OSError and `MachineFault`.
    """
    import signal  # with enum, for which the greeting does not wait
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
                    _child(uid, gid, groups, life, theirs, rights, last)
            except OSError as error:
                hint = "look at the memory and at the limit of processes of this machine."
                raise MachineFault(f"No process can be started for uid {uid}: {error.strerror}.", hint) from error
            finally:
                if collecting:
                    gc.enable()
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        ours.settimeout(DEADLINE)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return pid, ours


def _child(
    uid: int, gid: int, groups: list[int], life: "Life", channel: "socket.socket", rights: tuple[int, int], last: int
) -> "NoReturn":
    """Run in the child: become the user, run `life`, exit. Never returns or raises."""
    try:
        try:
            os.closerange(0, channel.fileno())
            os.closerange(channel.fileno() + 1, last)
            os.setgroups(groups)
            os.setresgid(gid, gid, gid)
            os.seteuid(uid)
        except OSError as error:
            _complain(channel, error)
        else:
            life(channel, rights)
    finally:
        os._exit(0)


def _serve(channel: "socket.socket", rights: tuple[int, int]) -> None:
    """Serve a `StayingChild`'s operations in its child, until the parent closes the socket."""
    while message := channel.recv(_LONGEST):
        name, arguments = marshal.loads(message)  # noqa: S302 - only the parent has the other end
        _answer(channel, rights, getattr(system_calls, name), arguments)


def _answer(
    channel: "socket.socket", rights: tuple[int, int], operation: "Operation", arguments: tuple[object, ...]
) -> None:
    """Run the operation and send its descriptor or error to the parent."""
    try:
        descriptor = operation(*arguments)
        if descriptor < 0:
            channel.send(b"0")
            return
        channel.sendmsg([b"0"], [(*rights, descriptor.to_bytes(4, byteorder))])
        os.close(descriptor)
    except OSError as error:
        _complain(channel, error)


def _complain(channel: "socket.socket", error: OSError) -> None:
    channel.send(b"%d %s" % (error.errno or errno.EIO, (error.strerror or "").encode()))


def _sent(channel: "socket.socket", message: bytes) -> bool:
    try:
        channel.send(message)
    except OSError:
        return False
    return True


def _receive(channel: "socket.socket", pid: int, uid: int, seconds: float) -> "Answer":
    """Receive the next answer of a child, and kill the child on a timeout. Raises OSError."""
    import signal
    import socket

    began = monotonic()
    channel.settimeout(seconds)
    try:
        # Not socket.recv_fds: that of Python 3.11 loses its flags.
        message, passed, flags, _ = channel.recvmsg(1024, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
    except TimeoutError:
        os.kill(pid, signal.SIGKILL)
        _reap(pid)
        late = f"its file system has not answered uid {uid} within {seconds:.0f} seconds"
        raise OSError(errno.ETIMEDOUT, late) from None
    except ConnectionResetError:  # it was killed before it read the question
        return b"", -1, False
    finally:
        if uid:
            budget.current().spend(began)
    descriptor = -1
    for _, _, data in passed:
        descriptor = int.from_bytes(data[:4], byteorder)
    return message, descriptor, bool(flags & socket.MSG_CTRUNC)


def _result(answer: "Answer", uid: int) -> int:
    """Turn an answer into a descriptor or -1. Raises its OSError, and `MachineFault` for an empty answer."""
    message, descriptor, is_cut = answer
    if is_cut:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if descriptor >= 0:
        return descriptor
    number, _, text = message.partition(b" ")
    if not number.isdigit():
        hint = "look for what kills processes on this machine, such as a lack of memory."
        raise MachineFault(f"The helper process for uid {uid} ended without an answer.", hint)
    if number != b"0":
        raise OSError(int(number), text.decode("utf-8", "replace"))
    return -1


def _reap(pid: int) -> None:
    """Reap a killed child, now or, while the kernel holds it in a hung file system, later."""
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
