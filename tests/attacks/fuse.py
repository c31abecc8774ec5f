"""A small FUSE file system of the job's user, which answers each request as an attack wants it, or never."""

import contextlib
import ctypes
import errno
import mmap
import os
import signal
import stat
import struct
from collections.abc import Iterator
from errno import EACCES, EAGAIN, EINTR, EIO, EMFILE, ENAMETOOLONG, ENOMEM, ENOSPC, EROFS, ESTALE, ETIMEDOUT
from pathlib import Path
from typing import NamedTuple

from vmgahp.host import wait

LOOKUP, FORGET, GETATTR, SETATTR, MKDIR, OPEN, READ, WRITE, STATFS = 1, 2, 3, 4, 9, 14, 15, 16, 17
FLUSH, INIT, OPENDIR, INTERRUPT, CREATE, FORGETS = 25, 26, 27, 36, 35, 42
DONE = (10, 11, 12, 18, 20, 25, 28, 29, 30, 34, 45)
"""Requests whose answer has no content, such as unlink, rename, flush and an empty readdir (``linux/fuse.h``)."""
NAMES = (LOOKUP, GETATTR, SETATTR, OPEN, OPENDIR, CREATE, STATFS, FLUSH)
"""Requests about names, and not about contents."""
_HEAD = struct.Struct("<IIQQIIII")
_MNT_DETACH, _MS_NOSUID_NODEV = 2, 6


class Behavior(NamedTuple):
    """What the file system does; each file has any name, and is of this size."""

    error: int = 0
    """The errno that is answered, to all requests or, with `late`, to those about contents."""
    late: bool = False
    silent: bool = False
    """True if there is no answer at all in place of an error."""
    dies: bool = False
    """True if the file system's process ends as soon as it is mounted."""
    size: int = 4096
    content: bytes = bytes(4096)
    """What each read answers, whatever was asked for."""
    mode: int = stat.S_IFREG | 0o644
    others: bool = True
    """True if it lets others than its user in, as it may on machines with user_allow_other in fuse.conf."""
    room: int = 1 << 20
    """Free blocks, of any number of which statfs tells."""


BEHAVIORS: dict[str, Behavior] = {
    **{
        f"{errno.errorcode[number]} {'later' if late else 'always'}": Behavior(number, late)
        for number, late in (
            *((number, False) for number in (EIO, ESTALE, ENOMEM, EMFILE, ENOSPC, EROFS, EACCES, ENAMETOOLONG)),
            *((number, True) for number in (EIO, ENOSPC, EAGAIN, EINTR, ETIMEDOUT)),
        )
    },
    "its process is gone": Behavior(dies=True),
    "it never answers": Behavior(silent=True),
    "it never answers a read or write": Behavior(silent=True, late=True),
    "files of no size": Behavior(size=0),
    "files of 8 EiB": Behavior(size=(1 << 63) - 1),
    "files of less than nothing": Behavior(size=-1),
    "reads of nothing": Behavior(content=b""),
    "reads of half": Behavior(content=b"\0" * 100),
    "noise": Behavior(content=bytes(range(256)) * 16),
    "FIFOs": Behavior(mode=stat.S_IFIFO | 0o666),
    "devices": Behavior(mode=stat.S_IFCHR | 0o666),
    "links": Behavior(mode=stat.S_IFLNK | 0o777, content=b"/etc/shadow"),
    "set-user-id": Behavior(mode=stat.S_IFREG | 0o7777),
    "nobody else is let in": Behavior(others=False),
    "nobody else is let in, and it never answers": Behavior(silent=True, others=False),
    "no room": Behavior(room=0),
    "room without end": Behavior(room=1 << 62),
}  # fmt: skip


@contextlib.contextmanager
def mounted(place: Path, uid: int, behavior: Behavior) -> Iterator[None]:
    """Mount it over a file or a directory, as fusermount3 does for its user."""
    is_file = place.is_file()
    device = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode={stat.S_IFREG if is_file else stat.S_IFDIR:o},user_id={uid},group_id={uid}"
    options += ",allow_other" * behavior.others
    if libc.mount(b"attack", bytes(place), b"fuse", _MS_NOSUID_NODEV, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), f"no FUSE at {place}")
    pid = os.fork()
    if not pid:
        try:
            os.setgid(uid)
            os.setuid(uid)
            _serve(device, uid, behavior, is_file)
        finally:
            os._exit(0)
    os.close(device)
    try:
        if behavior.dies:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        libc.umount2(bytes(place), _MNT_DETACH)


@contextlib.contextmanager
def held(directory: Path, page: Path, uid: int) -> Iterator[None]:
    """Hold the lock of a directory by listing it, as a user, into the memory of a file that is never read."""
    with mounted(page, uid, BEHAVIORS["it never answers a read or write"]):
        if not (pid := os.fork()):
            try:
                os.setgid(uid)
                os.setuid(uid)
                memory = ctypes.c_char.from_buffer(mmap.mmap(os.open(page, os.O_RDWR), 4096, mmap.MAP_PRIVATE))
                ctypes.CDLL(None).getdents64(os.open(directory, os.O_RDONLY), ctypes.byref(memory), 4096)
            finally:
                os._exit(0)
        proc = Path(f"/proc/{pid}")
        files = proc / "fd"  # after this one it makes one call
        assert wait.until(lambda: any(each.samefile(directory) for each in files.iterdir()), 20, 0.01)
        assert wait.until(lambda: "request_wait" in (proc / "wchan").read_text(), 20, 0.01)
        yield
    os.waitpid(pid, 0)


def _serve(device: int, uid: int, behavior: Behavior, is_file: bool) -> None:
    while True:
        data = os.read(device, 1 << 20)
        _, operation, unique, node, *_ = _HEAD.unpack_from(data)
        if operation == INIT:
            answer: bytes | int = struct.pack("<4I2H2I2H8I", 7, 31, 1 << 16, 0, 16, 12, 1 << 16, 1, 32, 0, *([0] * 8))
        elif operation in (FORGET, FORGETS, INTERRUPT):
            continue
        elif (behavior.error or behavior.silent) and not (behavior.late and operation in NAMES):
            if behavior.silent:
                continue
            answer = behavior.error
        else:
            answer = _answer(operation, node, data[_HEAD.size :], uid, behavior, is_file)
        error, content = (-answer, b"") if isinstance(answer, int) else (0, answer)
        with contextlib.suppress(OSError):  # who asked is gone, or the kernel refuses the lie
            os.write(device, struct.pack("<IiQ", 16 + len(content), error, unique) + content)
        if behavior.dies:
            return


def _answer(operation: int, node: int, asked: bytes, uid: int, behavior: Behavior, is_file: bool) -> bytes | int:
    is_directory = operation == MKDIR or (node == 1 and operation in (GETATTR, SETATTR) and not is_file)
    mode = stat.S_IFDIR | 0o755 if is_directory else behavior.mode
    size = behavior.size & (1 << 64) - 1
    attributes = struct.pack("<6Q10I", 2, size, size >> 9, 0, 0, 0, 0, 0, 0, mode, 1, uid, uid, 0, 4096, 0)
    entry, opened = struct.pack("<4Q2I", 2, 0, 0, 0, 0, 0) + attributes, bytes(16)
    match operation:
        case 1 | 9:
            return entry
        case 3 | 4:
            return bytes(16) + attributes
        case 14 | 27:
            return opened
        case 35:
            return entry + opened
        case 15:
            return behavior.content
        case 16:
            return struct.pack("<II", struct.unpack_from("<I", asked, 16)[0], 0)
        case 17:
            room = behavior.room
            return struct.pack("<5Q10I", room, room, room, room, room, 4096, 255, 4096, *([0] * 7))
    return b"" if operation in DONE else 38  # ENOSYS
