"""A guard that keeps HTCondor's own ``.job.ad`` and ``.update.ad`` out of the transfer to the spool.

Startds until March 2025 append a tag to ``.job.ad`` in the scratch directory when a job is evicted (HTCondor's
commit 5d9afc32db removed that). The changed file is then transferred to the spool with the checkpoint, and at the
restart the starter, as the job's user, cannot overwrite the existing one, which belongs to the condor user:
"writing to file …/.job.ad: Permission denied", and the job is held. HTCondor transfers files whose size or time
has changed, so at a checkpoint, and at a STOP, which may be an eviction whose files are transferred too, the file is
restored as it was at the START.

The same happens to ``.update.ad``, which the startd writes for jobs to read, at each of its updates: HTCondor 23.9
transfers it too (25 does not), and the starter can write it only if it comes first. Guests do not see it, so it is
removed then, and until the VM resumes a directory takes the name of the temporary file by which the startd would
make another (``Resource::refresh_sandbox_ad``, which then only writes a line to its log). The starter transfers no
directories.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from stat import S_ISREG

NAME = ".job.ad"
UPDATE = ".update.ad"
TEMPORARY = ".update.ad.tmp"

LARGEST = 4 << 20  # a job ad has a few thousand bytes


class JobAdFile:
    """The file in one scratch directory, as it was when this object was made."""

    __slots__ = ("_content", "_directory", "_is_updated", "_status")

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._content = b""
        self._is_updated = False
        self._status: os.stat_result | None = None
        descriptor = self._open(os.O_RDONLY)
        if descriptor is None:
            return
        try:
            status = os.fstat(descriptor)
            if _is_condors(status) and status.st_size <= LARGEST:
                self._content = os.read(descriptor, LARGEST)
                self._status = status
        except OSError:
            pass
        finally:
            os.close(descriptor)

    def restore(self) -> bool:
        """Restore the file, and let no ``.update.ad`` be made until `release`; return False if it is another now."""
        self._bar_update()
        before = self._status
        if before is None:
            return False
        descriptor = self._open(os.O_WRONLY)
        if descriptor is None:
            return False
        try:
            now = os.fstat(descriptor)
            # Never write to another file that has replaced it.
            if not _is_condors(now) or (now.st_dev, now.st_ino) != (before.st_dev, before.st_ino):
                return False
            if (now.st_size, now.st_mtime_ns) == (before.st_size, before.st_mtime_ns):
                return False
            os.pwrite(descriptor, self._content, 0)
            os.ftruncate(descriptor, len(self._content))
            os.utime(descriptor, ns=(before.st_atime_ns, before.st_mtime_ns))
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True

    def release(self) -> None:
        """Let the startd write its ``.update.ad`` again, after the checkpoint was transferred."""
        with suppress(OSError), self._opened_directory() as directory:
            os.rmdir(TEMPORARY, dir_fd=directory)

    def _bar_update(self) -> None:
        with suppress(OSError), self._opened_directory() as directory:
            if not self._is_updated:
                os.lstat(UPDATE, dir_fd=directory)  # raises if no startd has written one here
                self._is_updated = True
            for call, name in ((os.unlink, TEMPORARY), (os.mkdir, TEMPORARY), (os.unlink, UPDATE)):
                with suppress(OSError):  # only the next START could be affected
                    call(name, dir_fd=directory)

    def _open(self, flags: int) -> int | None:
        with suppress(OSError), self._opened_directory() as directory:
            return os.open(NAME, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
        return None

    @contextmanager
    def _opened_directory(self) -> Iterator[int]:
        directory = os.open(self._directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield directory
        finally:
            os.close(directory)


def _is_condors(status: os.stat_result) -> bool:
    return S_ISREG(status.st_mode) and status.st_nlink == 1
