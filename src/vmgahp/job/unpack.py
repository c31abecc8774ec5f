"""An unpacker for the outputs of a guest's program, which the guest sends as a tar archive.

A guest can put anything into an archive: any names, links, kinds, sizes and numbers, in any order. So it is read by
a separate process that has the job user's rights, limits and a deadline. It writes only below one directory, in which
it walks each path without following links, and never writes into existing files.

HTCondor holds a job with a link to a directory, or with a file that its user cannot read, and waits for a FIFO for
ever. These are not made: links lead to files of the outputs, and all other entries are left out and reported.
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import sys
import tarfile
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from vmgahp.host.job_user import Identity
from vmgahp.host.restrict import restrict
from vmgahp.host.run import FIRST_PASSED, run
from vmgahp.job.scratch_names import is_reserved

MOST_ENTRIES = 1_000_000
DEEPEST = 100
"""The most directories above a file."""
LONGEST_NAME = 255
"""The most bytes of a file's name, on any file system."""
MOST_TOLD = 20
"""The most omitted names that are reported."""

MEMORY = 1 << 30
CPU_SECONDS = 1800
DEADLINE = 1800.0
"""The limits of the process that unpacks."""

_PIECE = 1 << 20
_ZEROS = bytes(_PIECE)
_INSIDE = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Unpacked(NamedTuple):
    """The result of unpacking an archive."""

    entries: int
    """The number of files and links that were made, without directories."""
    size: int
    """The bytes of these files."""
    left_out: tuple[str, ...]
    """A list of some omitted entries, each with the reason."""
    problem: str
    """The reason why the unpacking stopped early, as a sentence without its end; empty if it did not."""


def unpack(archive: int, directory: str, below: str, most_bytes: int, identity: Identity) -> Unpacked:
    """Unpack the open file `archive` into the directory `below` of the scratch `directory`.

    `most_bytes` is the limit for all files together. Raises ValueError for a standard descriptor, and nothing else.
    """
    if not archive >= FIRST_PASSED:
        raise ValueError(f"{archive} is one of the standard descriptors")
    plan = {
        "directory": os.path.join(directory, below),
        "most_bytes": most_bytes,
        "user": [identity.uid, identity.gid] if identity.switching else None,
    }
    try:
        done = run(
            [sys.executable, "-I", "-m", __name__],
            deadline=DEADLINE,
            stdin=json.dumps(plan).encode(),
            environ={"PATH": os.defpath, "TZ": "UTC"},
            pass_fds=[archive],
        )
    except OSError as error:
        return _nothing(f"nothing can be started that unpacks the outputs ({error.strerror})")
    if done.status is None:
        return _nothing(f"the outputs were not unpacked within {DEADLINE:.0f} seconds")
    try:
        said = json.loads(done.out)
        return Unpacked(int(said[0]), int(said[1]), tuple(map(str, said[2])), str(said[3]))
    except (ValueError, TypeError, IndexError):  # killed by its limits, or by another process of the job's user
        return _nothing(f"what unpacks the outputs was ended: {(done.complaints or ['it said nothing'])[-1][:200]}")


def _nothing(problem: str) -> Unpacked:
    return Unpacked(0, 0, (), problem)


# The process that unpacks


class _Wrong(Exception):
    """An error that stops the unpacking; the text is the reason."""


class _LeftOut(Exception):
    """An error that omits one entry; the text is the reason."""


def _main() -> int:
    """Read the plan from standard input and carry it out; print the result to standard output."""
    import tarfile

    plan = json.loads(sys.stdin.buffer.read())
    with tarfile.open(fileobj=io.BytesIO(tarfile.TarInfo("rehearsal").tobuf() + bytes(10240)), mode="r|") as tar:
        tar.next()  # loads all code before privileges are dropped
    archive = open(FIRST_PASSED, "rb", buffering=0)  # noqa: SIM115 - it is open until the process ends
    restrict(plan["user"], memory=MEMORY, cpu_seconds=CPU_SECONDS, file_bytes=2**63 - 1)
    problem, made = "", _Outputs(plan["most_bytes"])
    try:
        os.umask(0o077)
        made.top = os.open(plan["directory"], _INSIDE)
        with tarfile.open(fileobj=archive, mode="r|", encoding="utf-8", errors="surrogateescape") as tar:
            number = 0
            while (entry := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # otherwise it keeps them all
                number += 1
                if number > MOST_ENTRIES:
                    raise _Wrong(f"there are more than {MOST_ENTRIES} of them")
                made.add(tar, entry)
        made.finish()
    except _Wrong as wrong:
        problem = str(wrong)
    except tarfile.TarError as error:
        problem = f"they are no whole tar archive ({error})"
    except OSError as error:
        problem = f"they cannot be written ({error.strerror})"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            problem = f"there is no room for them in the scratch directory behind {made.size >> 20} MiB"
    except (MemoryError, RecursionError, ValueError, OverflowError) as error:
        problem = f"they are no tar archive ({type(error).__name__})"
    sys.stdout.write(json.dumps([made.entries, made.size, made.told(), problem]))
    return 0


class _Outputs:
    """The files made from an archive."""

    def __init__(self, most_bytes: int) -> None:
        self.top = -1
        self.entries = self.size = 0
        self._most_bytes = most_bytes
        self._left_out: list[str] = []
        self._number_left_out = 0
        self._links: list[tuple[list[str], str]] = []
        self._modes: dict[tuple[str, ...], int] = {}
        """The modes of directories, which are set at the end, so that files can be written into them before."""

    def told(self) -> list[str]:
        """Return the omitted entries, for a message."""
        more = self._number_left_out - len(self._left_out)
        return [*self._left_out, *([f"and {more} more"] if more else [])]

    def add(self, tar: tarfile.TarFile, entry: tarfile.TarInfo) -> None:
        """Unpack one entry. Raises `_Wrong`, OSError and tarfile's errors."""
        import tarfile

        parts = self._parts(entry.name)
        if not parts:  # the directory itself
            return
        try:
            if is_reserved(parts[0]):
                raise _LeftOut("a name of HTCondor's or of the server's")
            if entry.type == tarfile.DIRTYPE:
                os.close(self._enter(parts))
                self._modes[tuple(parts)] = entry.mode & 0o777 | 0o700
            elif entry.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
                self._write(parts, tar, entry)
            elif entry.type == tarfile.SYMTYPE:
                self._links.append((parts, entry.linkname))
            elif entry.type == tarfile.LNKTYPE:
                self._link(parts, self._parts(entry.linkname))
            else:
                raise _LeftOut("neither a file nor a directory nor a link")
        except _LeftOut as why:
            self._leave_out(parts, why)

    def finish(self) -> None:
        """Make the symbolic links and set the directories' modes, after all files."""
        for parts, target in self._links:
            try:
                self._make_symbolic(parts, target)
            except _LeftOut as why:
                self._leave_out(parts, why)
        for inside, mode in self._modes.items():
            with suppress(_LeftOut):
                directory = self._enter(list(inside))
                os.fchmod(directory, mode)
                os.close(directory)

    def _leave_out(self, parts: Sequence[str], why: Exception) -> None:
        self._number_left_out += 1
        if len(self._left_out) < MOST_TOLD:
            self._left_out.append(f"{'/'.join(parts)[:200]!a}: {why}")

    @staticmethod
    def _parts(name: str) -> list[str]:
        """Split a relative path. Raises `_Wrong` for a path that leads out of the directory, or is invalid."""
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if name.startswith("/") or ".." in parts or "\0" in name:
            raise _Wrong(f"they have the path {name[:200]!a}, which leads out of them")
        if len(parts) > DEEPEST or any(len(os.fsencode(part)) > LONGEST_NAME for part in parts):
            raise _Wrong(f"the path {name[:100]!a}… is too long or too deep")
        return parts

    def _enter(self, parts: Sequence[str]) -> int:
        """Open a directory of the outputs, and make it if it is missing. Raises `_LeftOut` if it is not a directory."""
        inside = os.dup(self.top)
        try:
            for part in parts:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=inside)
                outside, inside = inside, os.open(part, _INSIDE, dir_fd=inside)
                os.close(outside)
        except OSError as error:
            os.close(inside)
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise _LeftOut("what it lies in is no directory") from error
            raise
        for end in range(1, len(parts) + 1):
            self._modes.setdefault(tuple(parts[:end]), 0o755)
        return inside

    def _clear(self, name: str, above: int) -> None:
        """Remove an existing file, which may be a link or have other links. Raises `_LeftOut` for a directory."""
        try:
            os.unlink(name, dir_fd=above)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno in (errno.EISDIR, errno.EPERM):
                raise _LeftOut("there is a directory of that name") from error
            raise

    def _write(self, parts: Sequence[str], tar: tarfile.TarFile, entry: tarfile.TarInfo) -> None:
        if entry.size > self._most_bytes - self.size:
            raise _Wrong(f"they have more than {self._most_bytes >> 20} MiB")
        content = tar.extractfile(entry)
        above = self._enter(parts[:-1])
        try:
            self._clear(parts[-1], above)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(parts[-1], flags, 0o600, dir_fd=above)
            try:
                position = 0
                while content is not None and position < entry.size:
                    piece = content.read(min(_PIECE, entry.size - position))
                    if not piece:
                        raise _Wrong("they end in the middle of a file")
                    if piece != _ZEROS[: len(piece)]:  # a piece of zeros becomes a hole
                        _write_all(file, piece, position)
                    position += len(piece)
                os.ftruncate(file, entry.size)
                os.fchmod(file, entry.mode & 0o777 | 0o600)
                with suppress(OSError, ValueError, OverflowError):
                    os.utime(file, (entry.mtime, entry.mtime))
            except BaseException:
                with suppress(OSError):  # never leave a partial file
                    os.unlink(parts[-1], dir_fd=above)
                raise
            finally:
                os.close(file)
        finally:
            os.close(above)
        self.entries += 1
        self.size += entry.size

    def _link(self, parts: Sequence[str], target: Sequence[str]) -> None:
        """Make a hard link to an existing file."""
        self._require_file(target)
        source = self._enter(target[:-1])
        above = self._enter(parts[:-1])
        try:
            if list(parts) == list(target):
                return
            self._clear(parts[-1], above)
            os.link(target[-1], parts[-1], src_dir_fd=source, dst_dir_fd=above, follow_symlinks=False)
        finally:
            os.close(source)
            os.close(above)
        self.entries += 1

    def _make_symbolic(self, parts: Sequence[str], target: str) -> None:
        resolved = os.path.normpath(os.path.join(*parts[:-1], target)).split("/")
        if not target or target.startswith("/") or resolved[0] == ".." or resolved == list(parts):
            raise _LeftOut("a link that leads out of the outputs")
        self._require_file(resolved)
        above = self._enter(parts[:-1])
        try:
            self._clear(parts[-1], above)
            os.symlink(target, parts[-1], dir_fd=above)
        finally:
            os.close(above)
        self.entries += 1

    def _require_file(self, parts: Sequence[str]) -> None:
        """Make sure that a link leads to a file of these outputs. Raises `_LeftOut`."""
        inside = os.dup(self.top)
        try:
            for part in parts[:-1]:
                outside, inside = inside, os.open(part, _INSIDE, dir_fd=inside)
                os.close(outside)
            if parts and stat.S_ISREG(os.stat(parts[-1], dir_fd=inside, follow_symlinks=False).st_mode):
                return
        except OSError:
            pass
        finally:
            os.close(inside)
        raise _LeftOut("a link to what is no file of the outputs")


def _write_all(file: int, piece: bytes, position: int) -> None:
    view = memoryview(piece)
    while view:
        count = os.pwrite(file, view, position)
        view, position = view[count:], position + count


if __name__ == "__main__":
    sys.exit(_main())
