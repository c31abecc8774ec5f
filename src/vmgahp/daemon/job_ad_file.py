"""Keeps HTCondor's own ``.job.ad`` and ``.update.ad`` out of what goes to the spool.

Startds until March 2025 append a tag to ``.job.ad`` in the scratch directory when a job has to go (HTCondor's
commit 5d9afc32db took it out). The changed file then travels to the spool with the checkpoint, and at the
restart the starter, as the job's user, cannot write it over the one of the condor user that is there
already: "writing to file …/.job.ad: Permission denied", and the job is held. HTCondor sends what has
another size or time than before, so at a checkpoint, and at a STOP, which may be an eviction whose files are sent
too, the file is put back as it was at the START.

The same befalls ``.update.ad``, which the startd writes for jobs to read, at each of its updates: HTCondor 23.9 sends
it too (25 does not), and whether the starter can write it depends on who comes first. No guest sees it,
so it is removed then, and until the VM goes on a directory has the place of the temporary file by which the
startd would make another (``Resource::refresh_sandbox_ad``, which then says so in its log and does nothing else). The
starter sends no directories.
"""

import os
from stat import S_ISREG

from vmgahp.host.light import contextmanager, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = ".job.ad"
UPDATE = ".update.ad"
TEMPORARY = ".update.ad.tmp"

LARGEST = 4 << 20
"""Bytes; a job ad has a few thousand."""


class JobAdFile:
    """The file in one scratch directory, as it was when this was made."""

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
        """Put the file back as it was; False where it has not changed, or is not the same file any more.

        The startd's own file is removed, and not made anew before `release`.
        """
        self._bar_update()
        before = self._status
        if before is None:
            return False
        descriptor = self._open(os.O_WRONLY)
        if descriptor is None:
            return False
        try:
            now = os.fstat(descriptor)
            # Never another file that somebody has put in its place.
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
        """Let the startd write its own file again: the checkpoint has been sent."""
        with suppress(OSError), self._opened_directory() as directory:
            os.rmdir(TEMPORARY, dir_fd=directory)

    def _bar_update(self) -> None:
        with suppress(OSError), self._opened_directory() as directory:
            if not self._is_updated:
                os.lstat(UPDATE, dir_fd=directory)  # or no startd has written one here
                self._is_updated = True
            for call, name in ((os.unlink, TEMPORARY), (os.mkdir, TEMPORARY), (os.unlink, UPDATE)):
                with suppress(OSError):  # the next START may have trouble with the file, and this checkpoint has none
                    call(name, dir_fd=directory)

    def _open(self, flags: int) -> int | None:
        with suppress(OSError), self._opened_directory() as directory:
            return os.open(NAME, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
        return None

    @contextmanager
    def _opened_directory(self) -> "Iterator[int]":
        directory = os.open(self._directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield directory
        finally:
            os.close(directory)


def _is_condors(status: os.stat_result) -> bool:
    return S_ISREG(status.st_mode) and status.st_nlink == 1
