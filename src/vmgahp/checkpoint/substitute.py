"""A memory image with another head, for the hypervisor to restore from instead of the job's file.

The head decides what libvirtd does as root: the domain XML names the emulator, which libvirtd runs to query its
capabilities, and the number of the format selects the program that unpacks the image. The job's user can write the file
at any time, also after it was checked. So libvirtd never reads a head of the job's: it gets a pipe with a head of our
own, followed by the rest of the file; or, if it must be able to seek, the file itself with the head overwritten, once
no other process can write to it.

The pipe has a name, in a directory of the VM's own to which the job's user cannot write: libvirt's AppArmor helper
(virt-aa-helper), which lists the files that the new QEMU may read, accepts no path beneath /proc.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import termios
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context

from vmgahp import errors
from vmgahp.host import runtime_dir, wait
from vmgahp.host.job_user import Identity
from vmgahp.host.run import run, which
from vmgahp.host.system_calls import Opened

Write = Callable[[bytes], object]

# Memory images that libvirt has compressed, unpacked as a stream.
#
# The content is the job's. So the programs, the same that libvirt uses for these formats, run as the job's user and
# within limits; libvirtd, which would run them as root, gets an unpacked memory image.

ZSTD = "zstd"
"""The compressed format that is restored on every machine that has its program, whatever its settings are."""

SPARSE_SINCE = 11_002_000, 9_000_000
"""The first versions of libvirt and QEMU that have the format ``sparse``, in which QEMU itself seeks."""

_APPARMOR = "<model>apparmor</model>"
"""The text in the capabilities of a libvirt that confines each QEMU with AppArmor: such a QEMU cannot open a file of
the job's in the way in which it would get a sparse image (`substitute.Held`)."""

_UNPACK_MEMORY = 1 << 30


class NotPacked(Exception):
    """A program that failed to unpack; the text says why."""


def has_sparse(libvirt_version: int, qemu_version: int, capabilities: str) -> bool:
    """Tell whether images of the format ``sparse`` can be restored, by the versions and capabilities from libvirt."""
    is_known = libvirt_version >= SPARSE_SINCE[0] and qemu_version >= SPARSE_SINCE[1]
    return is_known and _APPARMOR not in capabilities


def has_program(form: str) -> bool:
    """Return True if this machine has the program of a compressed format."""
    return which(form) is not None


def unpack_image(
    image: int, start: int, form: str, write: Write, identity: Identity, seconds: float, most: int, reader: int = -1
) -> None:
    """Unpack the file of `image` from `start` on, to `most` bytes at most. Raises `NotPacked`, and what `write` does.

    It ends when the pipe to which `reader` writes has no readers any more.
    """
    left = most

    def take(out: bytearray, _err: bytearray) -> bool:
        nonlocal left
        left -= len(out)
        if left < 0:
            raise NotPacked(f"it becomes more than {most} bytes")
        if out:
            write(bytes(out))
            out.clear()
        return False

    with Opened(os.open(f"/proc/self/fd/{image}", os.O_RDONLY)) as source:  # with an offset of its own
        os.lseek(source, start, os.SEEK_SET)
        limits = (f"--as={_UNPACK_MEMORY}", "--fsize=0", "--core=0")
        words = [form, "-dc"]
        try:
            done = run(words, deadline=seconds, stdin=source, user=identity, limits=limits, until=take, reader=reader)
        except FileNotFoundError as error:
            raise NotPacked(f"{error.filename} is not installed") from error
    if done.status != 0:
        why = "it had not ended" if done.status is None else " ".join(done.complaints)[-300:]
        raise NotPacked(f"{form}: {why or f'it ended with {done.status}'}")


_CHUNK = 1 << 20

_LET_IN = 0.05
"""The interval in seconds at which a reader that opens an exhausted pipe is let in."""

_END_WAIT = 5.0
_LEAST_READ = 4096
"""The minimum number of bytes read after the head: a reader of fewer was looking for a second head, and has not yet
given the image to a hypervisor."""
_NO_HEAD = "magic is incorrect"
"""The words of libvirt for a missing head."""
_STARTED = "monitor"
"""The words of libvirt for a QEMU that has ended: it was started, so a head was found."""


class Pipe:
    """The end of a pipe to which an image is written; its reader may stop early. Its functions raise OSError."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.written = 0

    def write(self, data: bytes) -> None:
        """Write all of `data`."""
        view = memoryview(data)
        while view:
            count = os.write(self.descriptor, view)
            self.written += count
            view = view[count:]

    def write_file(self, fd: int, offset: int) -> None:
        """Write a file from `offset` on: into the pipe go its pages in memory, and not a copy."""
        # By way of a pipe of its own: a splice has the lock of its pipe while it waits for the file, which processes of
        # the job's user can hold up, and with this pipe's it would hold up libvirtd.
        taking, giving = os.pipe()
        with Opened(taking), Opened(giving):
            _enlarge(giving)
            try:
                while count := os.splice(fd, giving, _CHUNK, offset_src=offset):
                    offset += count
                    while count:
                        moved = os.splice(taking, self.descriptor, count)
                        self.written += moved
                        count -= moved
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                while data := os.pread(fd, _CHUNK, offset):  # its file system cannot
                    self.write(data)
                    offset += len(data)


def _enlarge(pipe: int) -> None:
    with suppress(OSError):  # a user has a limited size for all pipes: it is only slower
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _CHUNK)


Rest = Callable[[Pipe], None]
"""A function that writes the rest of an image after the head."""


class Substitute:
    """A pipe at `path` with `head`, then the output of `rest`, to be read once; leaving the ``with`` ends `rest`.

    Raises OSError, and `errors.MachineFault` if no thread or directory can be made.
    """

    def __init__(self, head: bytes, rest: Rest, heads: int = 1) -> None:
        self._parts = head, rest
        self._heads = heads
        self._left = 0
        self._over = threading.Event()
        self._room = runtime_dir.runtime_dir()
        self.path = f"{self._room}/memory"
        opened = []

        def feed() -> None:
            # On an error the reader is gone, or notices the missing data: whoever restores reports it.
            with suppress(OSError, errors.Fault, NotPacked), Opened(self._pipe.descriptor):
                self._pipe.write(head * heads)
                rest(self._pipe)
            # A process that opens it now waits for a writer, libvirtd forever. It reads the rest, and then the end.
            while not self._over.wait(_LET_IN):
                runtime_dir.let_in(self.path)

        try:
            os.mkfifo(self.path, 0o600)
            # With a reader of our own the writer does not block, and with the writer libvirtd does not; and the data
            # stays in the pipe between the two times that libvirtd opens it.
            for flags in (os.O_RDONLY | os.O_NONBLOCK, os.O_WRONLY):
                opened.append(os.open(self.path, flags))
            self._reading, writing = opened
            self._pipe = Pipe(writing)
            _enlarge(writing)
            self._thread = wait.start_thread("the memory image", copy_context().run, feed)  # in the budget of the START
        except BaseException:
            for descriptor in opened:
                os.close(descriptor)
            runtime_dir.remove(self._room)
            raise

    def __enter__(self) -> Substitute:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        unread = fcntl.ioctl(self._reading, termios.FIONREAD, bytes(4))
        self._left = int.from_bytes(unread, sys.byteorder)
        os.close(self._reading)
        self._thread.join(_END_WAIT)  # a libvirtd that hangs has the other end, and the pipe is full
        runtime_dir.remove(self._room)

    def with_another_head(self, said: str) -> Substitute | None:
        """Return the same with the head twice, if the failure was that the head was needed twice; otherwise None.

        Some versions of libvirt open an image a second time, and read its head again before the rest. 12.8 does that
        with its I/O helper, which reads far ahead: then only libvirt's message, `said`, tells.
        """
        has_no_more = self._pipe.written - self._left < len(self._parts[0]) + _LEAST_READ
        is_missed = _NO_HEAD in said or (has_no_more and _STARTED not in said)
        if self._heads > 1 or not is_missed:
            return None
        return Substitute(*self._parts, heads=2)


class Held:
    """The file of `fd` with `head` over its first bytes, readable at `path`; leaving the ``with`` restores it.

    Until then it belongs to root, and no other process can write to it. Raises OSError, above all BlockingIOError if a
    process has it open for writing.
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

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self._begin_with(self._before)
        if os.geteuid() == 0:
            os.fchmod(self._fd, self._owner.st_mode & 0o777)
            os.fchown(self._fd, self._owner.st_uid, self._owner.st_gid)

    def with_another_head(self, _: str) -> None:
        """Return None: each reader that opens the file reads it from its beginning, so a second head never helps."""

    def _begin_with(self, data: bytes) -> None:
        if data:
            with open(self.path, "r+b") as file:
                file.write(data)


def can_be_held(fd: int) -> bool:
    """Return True if the file system of `fd`, open nowhere else, can tell who has a file open for writing (leases)."""
    if os.geteuid() != 0:
        return True
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return True
