"""A helper process: it does what takes much code and memory, hands back what comes of it, and is gone.

The server starts it as an interpreter of its own, and not by a fork: another thread of the server may hold any lock of
libvirt's. Both talk by messages over a socket pair: a word, plain data, descriptors. Either hears when the other
is gone, and a helper without a server ends at once, with the descriptors that it has not handed over yet.
"""

import _socket
import errno
import marshal
import os
import select
import sys
from _thread import allocate_lock

from vmgahp.errors import MachineFault
from vmgahp.host import own_code
from vmgahp.host.light import signal
from vmgahp.host.run import open_descriptors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

COMMAND: tuple[str, ...] = ()
"""What tests run a helper's module by, in place of this server's own code."""

CHANNEL = 3
"""Where a helper finds its end of the socket pair."""

LARGEST = 1 << 15
"""Bytes of a message that go through the socket; those of a longer one are in a file in memory."""

MOST_DESCRIPTORS = 253
"""Of one message (SCM_MAX_FD in the kernel)."""

_SHORT, _LONG = b"s", b"l"


class HungUp(Exception):
    """Nobody is at the other end any more."""


class Message:
    """What was received; whoever takes it looks after its descriptors."""

    __slots__ = ("data", "descriptors", "word")

    def __init__(self, word: str, data: object, descriptors: "list[int]") -> None:
        self.word = word
        self.data = data
        self.descriptors = descriptors


class Channel:
    """One end of the socket pair. Any thread may send, one receives."""

    def __init__(self, descriptor: int) -> None:
        self._socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, descriptor)
        self._sending = allocate_lock()

    def send(self, word: str, data: object = None, descriptors: "Sequence[int]" = ()) -> None:
        """Say a word, with what `marshal` can write and with descriptors, which stay the caller's. Raises `HungUp`."""
        body, memory, passed = marshal.dumps((word, data)), -1, list(descriptors)  # type: ignore[arg-type]
        try:
            if len(body) > LARGEST:
                memory = in_memory(body)
                body, passed = _LONG, [memory, *passed]
            else:
                body = _SHORT + body
            rights = b"".join(each.to_bytes(4, sys.byteorder) for each in passed)
            ancillary = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)] if passed else []
            with self._sending:
                self._socket.sendmsg([body], ancillary, _socket.MSG_NOSIGNAL)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF):
                raise
            raise HungUp from error
        finally:
            if memory >= 0:
                os.close(memory)

    def receive(self) -> Message:
        """The next message, waited for. Raises `HungUp`, and OSError where there are no descriptors left."""
        room = _socket.CMSG_SPACE(4 * MOST_DESCRIPTORS)
        try:
            body, ancillary, flags, _ = self._socket.recvmsg(LARGEST + 1, room, _socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError as error:
            raise HungUp from error
        passed = [
            int.from_bytes(rights[place : place + 4], sys.byteorder)
            for _, _, rights in ancillary
            for place in range(0, len(rights), 4)
        ]
        if flags & _socket.MSG_CTRUNC:
            close(passed)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if not body:
            raise HungUp
        if body == _LONG:
            memory = passed.pop(0)
            body = _SHORT + read(memory)
            os.close(memory)
        word, data = marshal.loads(body[1:])  # noqa: S302 - both ends are this package
        return Message(word, data, passed)

    def close(self) -> None:
        """Let go of it: the other end hears so."""
        self._socket.close()


class Helper(Channel):
    """A helper process, seen from the server."""

    def __init__(self, module: str) -> None:
        """Start the module, whose `main` it is to run. Raises `MachineFault` where there can be no such process."""
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        super().__init__(ours.detach())
        self._ending = allocate_lock()
        command = [*(COMMAND or own_code.interpreter()), module]
        try:
            self._pid = os.posix_spawn(
                command[0],
                command,
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_DUP2, theirs.fileno(), CHANNEL),
                    *((os.POSIX_SPAWN_CLOSE, number) for number in open_descriptors() if number > CHANNEL),
                ],
                setsid=True,
                setsigmask=[],
                setsigdef=set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP},
            )
            self._process = os.pidfd_open(self._pid)
        except OSError as error:
            self.close()
            raise MachineFault(
                f"No helper process can be started: {error.strerror}.",
                "look at the memory and at the limit of processes of this machine.",
            ) from error
        finally:
            theirs.close()

    def has_ended(self, seconds: float) -> bool:
        """Whether it ends within so many seconds."""
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def kill(self) -> None:
        """End it at once, from any thread; one that was dismissed is gone."""
        with self._ending:
            if self._process >= 0:
                signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def dismiss(self, seconds: float) -> None:
        """It has done its work: let go of it, and see that it is gone within so many seconds, by force where not."""
        self.close()
        if not self.has_ended(seconds):
            self.kill()
        try:
            os.waitpid(self._pid, 0)
        except ChildProcessError:
            pass  # whoever reaps all children has done it
        with self._ending:
            os.close(self._process)
            self._process = -1


class Spare:
    """A helper that is started before it is needed, and loads its modules meanwhile."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._lock = allocate_lock()
        self._helper: Helper | None = None
        self._is_over = False

    def get_ready(self) -> None:
        """Have one at hand. Raises `MachineFault`."""
        with self._lock:
            if self._helper is None and not self._is_over:
                self._helper = Helper(self._module)

    def take(self) -> Helper:
        """The one at hand, or a new one where there is none that lives. Raises `MachineFault`."""
        with self._lock:
            taken, self._helper = self._helper, None
        if taken is not None and taken.has_ended(0):
            taken.dismiss(0)
            taken = None
        return taken or Helper(self._module)

    def close(self) -> None:
        """None is needed any more."""
        with self._lock:
            self._is_over = True
            if self._helper is not None:
                self._helper.dismiss(0)
                self._helper = None


def in_memory(data: bytes) -> int:
    """A file without a name that has the data."""
    descriptor = os.memfd_create("helper", os.MFD_CLOEXEC)
    with memoryview(data) as rest:
        place = 0
        while place < len(rest):
            place += os.write(descriptor, rest[place:])
    return descriptor


def read(descriptor: int) -> bytes:
    """All of a file of `in_memory`."""
    data, size = bytearray(), os.fstat(descriptor).st_size
    while len(data) < size:
        data += os.pread(descriptor, size - len(data), len(data))
    return bytes(data)


def close(descriptors: "Sequence[int]") -> None:
    """Let go of descriptors."""
    for each in descriptors:
        os.close(each)
