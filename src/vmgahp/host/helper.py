"""A helper process for work that takes much code and memory: it returns the results and exits.

The server starts it as a new interpreter, and not by a fork: another thread of the server may hold any lock of
libvirt's. Both exchange messages over a socket pair: a word, plain data, descriptors. Each notices the other's
exit, and a helper without a server exits at once, with the descriptors that it has not handed over yet.
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
"""The command by which tests run a helper's module, in place of this server's own code."""

CHANNEL = 3
"""The descriptor of a helper's end of the socket pair."""

LARGEST = 1 << 15
"""The most bytes of a message that go through the socket; a longer one is passed as a file in memory."""

MOST_DESCRIPTORS = 253
"""The most descriptors of one message (SCM_MAX_FD in the kernel)."""

_SHORT, _LONG = b"s", b"l"


class HungUp(Exception):
    """An error: the other end has closed the socket."""


class Message:
    """A received message; its receiver owns the descriptors."""

    __slots__ = ("data", "descriptors", "word")

    def __init__(self, word: str, data: object, descriptors: "list[int]") -> None:
        self.word = word
        self.data = data
        self.descriptors = descriptors


class Channel:
    """One end of the socket pair. Any thread may send, but only one may receive."""

    def __init__(self, descriptor: int) -> None:
        self._socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, descriptor)
        self._sending = allocate_lock()

    def send(self, word: str, data: object = None, descriptors: "Sequence[int]" = ()) -> None:
        """Send a word with data that `marshal` can write, and descriptors, which stay the caller's. Raises `HungUp`."""
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
        """Wait for the next message. Raises `HungUp`, and OSError if no descriptors are left."""
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
        """Close the socket, which the other end notices."""
        self._socket.close()


class Helper(Channel):
    """The server's handle on a helper process."""

    def __init__(self, module: str) -> None:
        """Start a process that runs `main` of the module. Raises `MachineFault` if it cannot be started."""
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
        """Wait for its exit; return False on a timeout."""
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def kill(self) -> None:
        """Kill it, from any thread; does nothing after `dismiss`."""
        with self._ending:
            if self._process >= 0:
                signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def dismiss(self, seconds: float) -> None:
        """Close the socket to a helper that has done its work, and wait for its exit; kill it after `seconds`."""
        self.close()
        if not self.has_ended(seconds):
            self.kill()
        try:
            os.waitpid(self._pid, 0)
        except ChildProcessError:
            pass  # other code has reaped it
        with self._ending:
            os.close(self._process)
            self._process = -1


class Spare:
    """A helper that is started in advance, and loads its modules meanwhile."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._lock = allocate_lock()
        self._helper: Helper | None = None
        self._is_over = False

    def get_ready(self) -> None:
        """Start the spare helper unless there is one. Raises `MachineFault`."""
        with self._lock:
            if self._helper is None and not self._is_over:
                self._helper = Helper(self._module)

    def take(self) -> Helper:
        """Return the spare helper, or a new one if it is missing or has exited. Raises `MachineFault`."""
        with self._lock:
            taken, self._helper = self._helper, None
        if taken is not None and taken.has_ended(0):
            taken.dismiss(0)
            taken = None
        return taken or Helper(self._module)

    def close(self) -> None:
        """Dismiss the spare helper, and start none from now on."""
        with self._lock:
            self._is_over = True
            if self._helper is not None:
                self._helper.dismiss(0)
                self._helper = None


def in_memory(data: bytes) -> int:
    """Make an unnamed file in memory with the data; return its descriptor."""
    descriptor = os.memfd_create("helper", os.MFD_CLOEXEC)
    with memoryview(data) as rest:
        place = 0
        while place < len(rest):
            place += os.write(descriptor, rest[place:])
    return descriptor


def read(descriptor: int) -> bytes:
    """Read a whole file made by `in_memory`."""
    data, size = bytearray(), os.fstat(descriptor).st_size
    while len(data) < size:
        data += os.pread(descriptor, size - len(data), len(data))
    return bytes(data)


def close(descriptors: "Sequence[int]") -> None:
    """Close descriptors."""
    for each in descriptors:
        os.close(each)
