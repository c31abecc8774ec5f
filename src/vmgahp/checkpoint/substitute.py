"""A memory image with another head: what a hypervisor is to restore from instead of the job's file.

What is in the head decides what libvirtd does as root: the domain XML names the emulator, which libvirtd runs to see
what it can do, and the number of the format the program that it unpacks the image with. The file is the job's user's
to write at any time, also after a look at it. So libvirtd reads no head of the job's: it gets a pipe, into which go a
head of our own and then what follows the head in the file; or, where it must be able to seek, the file itself with
the head written over, once nobody else can write to it.

The pipe has a name, in a directory of the VM's own to which the job's user cannot write: AppArmor's helper of libvirt's
(virt-aa-helper), which writes down what the new QEMU may read, takes no path beneath /proc.
"""

import fcntl
import os
import sys
import termios
from collections.abc import Callable

from vmgahp import errors
from vmgahp.checkpoint.packed import NotPacked
from vmgahp.host import runtime_dir, threads

_CHUNK = 1 << 20

_LET_IN = 0.05
"""Seconds after which somebody is let in who opens a pipe that has been written to its end."""

_LEAST_READ = 4096
"""Bytes after the head: whoever has taken fewer has looked for another head, and given none to a hypervisor."""
_NO_HEAD = "magic is incorrect"
"""In libvirt's words for a head that is none."""
_STARTED = "monitor"
"""In libvirt's words for a QEMU that has ended: it was started, so a head was found."""

Write = Callable[[bytes], object]
Rest = Callable[[Write, int], None]
"""Writes what follows a head; the number is that of the pipe, from which somebody may not read to the end."""


class Substitute:
    """`head`, and then all that `rest` writes, to be read once from `path`; in a ``with``, which ends what `rest` does.

    Raises OSError, and `errors.MachineFault` where no thread or directory can be had.
    """

    def __init__(self, head: bytes, rest: Rest, heads: int = 1) -> None:
        self._parts = head, rest
        self._heads = heads
        self._fed = self._left = 0
        self._over = threads.Flag()
        self._room = runtime_dir.runtime_dir()
        self.path = f"{self._room}/memory"
        opened = []

        def feed() -> None:
            try:
                with os.fdopen(writing, "wb", buffering=0) as out:
                    self._feed(out.fileno(), head * heads)
                    rest(lambda data: self._feed(out.fileno(), data), out.fileno())
            except (OSError, errors.MachineFault, NotPacked):
                pass  # nobody reads any more, or misses what is not there: who restores has said why
            # Who opens it now waits for a writer, and libvirtd would for ever. It reads what is left, and the end.
            while not self._over.wait(_LET_IN):
                runtime_dir.let_in(self.path)

        try:
            os.mkfifo(self.path, 0o600)
            # With a reader of ours the writer does not wait, and with the writer libvirtd does not; and what was
            # written stays between the two times that libvirtd opens it.
            for flags in (os.O_RDONLY | os.O_NONBLOCK, os.O_WRONLY):
                opened.append(os.open(self.path, flags))
            self._reading, writing = opened
            try:
                fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _CHUNK)
            except OSError:
                pass  # a user has so much for all pipes: it is slower
            self._thread = threads.start("the memory image", feed)
        except BaseException:
            for descriptor in opened:
                os.close(descriptor)
            runtime_dir.remove(self._room)
            raise

    def __enter__(self) -> "Substitute":
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._left = _bytes_in(self._reading)
        os.close(self._reading)
        self._thread.join()
        runtime_dir.remove(self._room)

    def with_another_head(self, said: str) -> "Substitute | None":
        """The same with the head twice, where no more than one was read; None where that was not why it failed.

        Some versions of libvirt open an image a second time, and read its head again before what follows it. 12.8 has
        that done by its I/O helper, which reads far ahead: then what libvirt `said` tells.
        """
        has_no_more = self._fed - self._left < len(self._parts[0]) + _LEAST_READ
        is_missed = _NO_HEAD in said or (has_no_more and _STARTED not in said)
        if self._heads > 1 or not is_missed:
            return None
        return Substitute(*self._parts, heads=2)

    def _feed(self, descriptor: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = os.write(descriptor, view)
            self._fed += written
            view = view[written:]


def all_of(fd: int, offset: int) -> Rest:
    """The rest of a file, for a `Substitute`."""

    def rest(write: Write, _: int) -> None:
        position = offset
        while chunk := os.pread(fd, _CHUNK, position):
            write(chunk)
            position += len(chunk)

    return rest


class Held:
    """The file of `fd` with `head` over its first bytes, to be read from `path`; in a ``with``, and then as it was.

    Until then it is root's, and nobody has it open who could write to it. Raises OSError, BlockingIOError above all
    where somebody has.
    """

    def __init__(self, head: bytes, fd: int) -> None:
        self._fd = fd
        self._owner = os.fstat(fd)
        self._before = b""
        self.path = f"/proc/{os.getpid()}/fd/{fd}"
        try:
            if os.geteuid() == 0:
                os.fchown(fd, 0, 0)
                os.fchmod(fd, 0o600)
                fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)  # refused while it is open for writing
                fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            self._before = os.pread(fd, len(head), 0)
            self._begin_with(head)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> "Held":
        return self

    def __exit__(self, *_: object) -> None:
        self._begin_with(self._before)
        if os.geteuid() == 0:
            os.fchmod(self._fd, self._owner.st_mode & 0o777)
            os.fchown(self._fd, self._owner.st_uid, self._owner.st_gid)

    def with_another_head(self, _: str) -> None:
        """Each who opens it reads it from its beginning."""

    def _begin_with(self, data: bytes) -> None:
        if data:
            writing = os.open(self.path, os.O_WRONLY)
            try:
                write_all(writing, data)
            finally:
                os.close(writing)


def can_be_held(fd: int) -> bool:
    """Whether the file system of `fd`, which nobody else has open, can say who has a file open for writing."""
    if os.geteuid() != 0:
        return True
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return True


def write_all(descriptor: int, data: bytes) -> None:
    """To a file, which may take less at a time. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _bytes_in(pipe: int) -> int:
    """What waits there to be read."""
    answer = bytearray(4)
    fcntl.ioctl(pipe, termios.FIONREAD, answer)
    return int.from_bytes(answer, sys.byteorder)
