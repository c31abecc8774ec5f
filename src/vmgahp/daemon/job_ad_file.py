"""A guard that keeps HTCondor's own ``.job.ad`` and ``.update.ad`` out of the transfer to the spool.

Startds until March 2025 append a tag to ``.job.ad`` when a job is evicted (HTCondor's commit 5d9afc32db removed that).
The changed file is then transferred to the spool with the checkpoint, and at the restart the starter, as the job's
user, cannot overwrite the existing one, which belongs to the condor user: "writing to file …/.job.ad: Permission
denied", and the job is held. HTCondor transfers files whose size or time has changed, so at a checkpoint, and at a
STOP, which may be an eviction whose files are transferred too, the file is restored as it was at the START.

The same happens to ``.update.ad``, which the startd writes for jobs to read, at each of its updates: HTCondor 23.9
transfers it too (25 does not), and the starter can write it only if it comes first. Guests do not see it, so it is
removed then, and until the VM resumes a directory takes the name of the temporary file by which the startd would make
another (``Resource::refresh_sandbox_ad``, which then only logs). The starter transfers no directories.

The files belong to HTCondor, so root reads and writes them, and in a directory where the job may have mounted a file
system that never answers. So a child with a deadline does it.
"""

from __future__ import annotations

import errno
import marshal
import os
from collections.abc import Callable
from contextlib import suppress
from stat import S_ISREG
from time import monotonic

from vmgahp.errors import Fault
from vmgahp.host import budget, system_calls
from vmgahp.host.job_user import Identity, as_root
from vmgahp.host.system_calls import Opened

NAME = ".job.ad"
UPDATE = ".update.ad"
TEMPORARY = ".update.ad.tmp"

LARGEST = 4 << 20  # a job ad has a few thousand bytes


class JobAdFile:
    """The file in one scratch directory, as it was when this object was made."""

    def __init__(self, directory: str, identity: Identity) -> None:
        self._directory, self._identity = directory, identity
        self._is_updated = False
        self._before: tuple[bytes, tuple[int, ...]] | None = None
        began = monotonic()
        with suppress(OSError), open(as_root(identity, _read, directory), "rb") as file:
            self._before = marshal.load(file)  # noqa: S302 - our own child has written it
        budget.current().spend(began)  # root waits, for a file system of the job's

    def restore(self) -> bool:
        """Restore the file, and let no ``.update.ad`` be made until `release`; return False if it is another now."""
        if self._does(_bar_update, self._is_updated):
            self._is_updated = True
        return self._before is not None and self._does(_restore, *self._before)

    def release(self) -> None:
        """Let the startd write its ``.update.ad`` again, after the checkpoint was transferred."""
        if self._is_updated:
            self._does(_release)

    def _does(self, operation: Callable[..., int], *arguments: object) -> bool:
        try:
            as_root(self._identity, operation, self._directory, *arguments)
        except (OSError, Fault):
            return False
        return True


# Operations of the child: system calls only


def _read(directory: str) -> int:
    """Return an unnamed file with the content of the file, and its device, inode, size and times."""
    with _opened(directory, os.O_RDONLY) as file:
        status = os.fstat(file)
        if not _is_condors(status) or status.st_size > LARGEST:
            raise OSError(errno.EPERM, "it is not HTCondor's")
        content = os.read(file, LARGEST)
    return system_calls.unnamed(marshal.dumps((content, _marks(status))))


def _restore(directory: str, content: bytes, before: tuple[int, ...]) -> int:
    with _opened(directory, os.O_WRONLY) as file:
        status = os.fstat(file)
        # Never write to another file that has replaced it.
        if not _is_condors(status) or _marks(status)[:2] != before[:2]:
            raise OSError(errno.ESTALE, "it is another file")
        if _marks(status)[:4] == before[:4]:
            raise OSError(errno.EALREADY, "it has not changed")
        os.pwrite(file, content, 0)
        os.ftruncate(file, len(content))
        os.utime(file, ns=(before[4], before[3]))
    return -1


def _bar_update(directory: str, is_updated: bool) -> int:
    with _opened_directory(directory) as place:
        if not is_updated:
            os.lstat(UPDATE, dir_fd=place)  # raises if no startd has written one here
        for call, name in ((os.unlink, TEMPORARY), (os.mkdir, TEMPORARY), (os.unlink, UPDATE)):
            with suppress(OSError):  # only the next START could be affected
                call(name, dir_fd=place)
    return -1


def _release(directory: str) -> int:
    with _opened_directory(directory) as place:
        os.rmdir(TEMPORARY, dir_fd=place)
    return -1


def _opened(directory: str, flags: int) -> Opened:
    with _opened_directory(directory) as place:
        return Opened(os.open(NAME, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place))


def _opened_directory(directory: str) -> Opened:
    return Opened(os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))


def _marks(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_atime_ns


def _is_condors(status: os.stat_result) -> bool:
    return S_ISREG(status.st_mode) and status.st_nlink == 1
