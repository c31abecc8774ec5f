"""A tar archive of the job's files, which a guest reads from a disk.

Its format is GNU tar's, because busybox's tar supports names of more than 100 bytes and files of more than 8 GiB in
this format only. The same files make the same bytes, at any time and place: it has neither the files' owners nor
their times.

The files are not trusted: any tree, of any size, that may change meanwhile, on a file system that may hang. So it
is walked and read by a separate process that has the job user's rights, limits and a deadline; no link is followed.
Holes of files become holes of the archive.
"""

import errno
import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from tarfile import BLOCKSIZE, DIRTYPE, GNU_FORMAT, SYMTYPE, TarInfo
from typing import NamedTuple

from vmgahp.errors import MachineFault
from vmgahp.host.job_user import Identity
from vmgahp.host.restrict import restrict
from vmgahp.host.run import FIRST_PASSED, run
from vmgahp.host.system_calls import open_beneath
from vmgahp.job.scratch_names import is_reserved

PREFIX = "inputs"
"""The directory of the job's files in the archive."""
MOST_ENTRIES = 250_000
DEEPEST = 100
"""The most directories above a file."""
PADDING = 1 << 20
"""The number of bytes to a multiple of which the archive is padded, since a disk consists of whole sectors."""

MEMORY = 1 << 30
CPU_SECONDS = 200
DEADLINE = 200.0
"""The limits of the process that packs. HTCondor waits 300 seconds for a start (VM_GAHP_REQ_TIMEOUT)."""

_LATEST = 8**11 - 1
"""The largest timestamp that the archive can have."""
_NO_ROOM, _UNPACKABLE = 3, 4
"""The exit statuses of the process that packs, besides 0 and Python's own 1."""


class Unpackable(Exception):
    """An error: the files cannot be packed. It has the problem, as a sentence without its end, and a hint."""

    def __init__(self, problem: str, hint: str) -> None:
        super().__init__(problem, hint)
        self.problem = problem
        self.hint = hint


class Packing(NamedTuple):
    """The contents to pack."""

    head: Mapping[str, bytes]
    """The first files of the archive, in this order."""
    names: Sequence[str] | None
    """The files and directories of the scratch directory; None for all except `but`."""
    but: Sequence[str] = ()
    when: int = 0
    """The timestamp of everything in it, in seconds since 1970."""


class Packed(NamedTuple):
    """The packed part of the job's files."""

    names: tuple[str, ...]
    """The names at the top of the scratch directory."""
    entries: int
    """The number of files, directories and links."""
    size: int
    """The bytes of all of them."""


def pack(directory: str, output: int, wanted: Packing, identity: Identity) -> Packed:
    """Write an archive of files of the scratch `directory` to an open file.

    Raises `Unpackable`, and OSError and `MachineFault` if it cannot be written.
    """
    if not output >= FIRST_PASSED:
        raise ValueError(f"{output} is one of the standard descriptors")
    plan = {
        "directory": directory,
        "head": [(name, content.decode("latin-1")) for name, content in wanted.head.items()],
        "names": wanted.names,
        "but": wanted.but,
        "when": wanted.when,
        "user": [identity.uid, identity.gid] if identity.switching else None,
    }
    done = run(
        [sys.executable, "-I", "-m", __name__],
        deadline=DEADLINE,
        stdin=json.dumps(plan).encode(),
        environ={"PATH": os.defpath, "TZ": "UTC"},
        pass_fds=[output],
        longest=64 << 20,
    )
    if done.status is None:
        raise OSError(errno.ETIMEDOUT, f"the job's inputs were not packed within {DEADLINE:.0f} seconds")
    if done.status == 0:
        names, entries, size = json.loads(done.out)
        return Packed(tuple(names), entries, size)
    words = done.complaints or ["it said nothing"]
    if done.status < 0:  # killed by its limits, or by another process of the job's user
        raise Unpackable(
            "the process that packs the inputs was killed", "see that nobody else uses the scratch directory."
        )
    if done.status == _NO_ROOM and words[-1].isdigit():
        raise OSError(int(words[-1]), os.strerror(int(words[-1])))
    if done.status == _UNPACKABLE:
        raise Unpackable(*(words[-2:] if len(words) > 1 else ("the inputs cannot be packed", "send plainer files.")))
    raise MachineFault(f"The job's inputs cannot be packed: {words[-1][:200]}.", "see the log of this machine.")


# The process that packs


class _Entry(NamedTuple):
    """A file, directory or link of the job, as it was before it is packed."""

    path: str
    """The path relative to the scratch directory."""
    mode: int
    size: int
    occupied: int
    """The bytes that it occupies on its file system."""
    target: str = ""
    """The target of a link."""


def _main() -> int:
    """Read the plan from standard input and carry it out; print errors to standard error."""
    plan = json.loads(sys.stdin.buffer.read())
    _header(_Entry("rehearsal", stat.S_IFREG, 0, 0), 0)  # loads all code before privileges are dropped
    restrict(plan["user"], memory=MEMORY, cpu_seconds=CPU_SECONDS, file_bytes=2**63 - 1)
    try:
        with open(FIRST_PASSED, "wb", buffering=1 << 18) as output:
            entries = _Walk(plan["directory"], plan["but"]).entries(plan["names"])
            head = [(name, content.encode("latin-1")) for name, content in plan["head"]]
            _require_room(output.fileno(), entries, sum(len(content) for _, content in head))
            when = min(plan["when"], _LATEST)
            for name, content in head:
                output.write(_header(_Entry(name, stat.S_IFREG | 0o755, len(content), 0), when))
                output.write(content + bytes(-len(content) % BLOCKSIZE))
            for entry in entries:
                output.write(_header(entry._replace(path=f"{PREFIX}/{entry.path}"), when))
                if stat.S_ISREG(entry.mode):
                    output.flush()
                    _copy(plan["directory"], entry, output.fileno())
            output.flush()
            end = output.tell() + 2 * BLOCKSIZE
            output.truncate(end + -end % PADDING)
    except Unpackable as unpackable:
        print(unpackable.problem, unpackable.hint, sep="\n", file=sys.stderr)  # noqa: T201 - to the process that started this one
        return _UNPACKABLE
    except OSError as error:
        print(error.errno or errno.EIO, file=sys.stderr)  # noqa: T201
        return _NO_ROOM
    except Exception as error:  # noqa: BLE001 - due to the files: the rehearsal has worked
        print(f"the inputs cannot be packed: {error!r}", "send fewer or plainer files.", sep="\n", file=sys.stderr)  # noqa: T201
        return _UNPACKABLE
    tops = dict.fromkeys(entry.path.partition("/")[0] for entry in entries)
    print(json.dumps([list(tops), len(entries), sum(entry.size for entry in entries)]))  # noqa: T201
    return 0


class _Walk:
    """A walk through the scratch directory that collects the entries to pack."""

    def __init__(self, directory: str, but: Sequence[str]) -> None:
        self._top = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._device = os.fstat(self._top).st_dev
        self._but = set(but)
        self._found: dict[str, _Entry] = {}

    def entries(self, names: Sequence[str] | None) -> list[_Entry]:
        """Return all entries, each directory before its content. Raises `Unpackable` and OSError."""
        if names is None:
            names = [name for name in os.listdir(self._top) if name not in self._but and not is_reserved(name)]
        for name in sorted(names, key=os.fsencode):
            if name in self._but or is_reserved(name):
                raise Unpackable(
                    f"{_shown(name)} is a disk of the VM, or no file of the job's", "leave it out of Run_Inputs."
                )
            above = self._top
            opened = []
            try:
                *parents, last = name.split("/")
                for parent in parents:
                    above = self._enter(above, parent, name)
                    opened.append(above)
                self._take(above, last, name, len(parents))
            finally:
                for each in opened:
                    os.close(each)
        return list(self._found.values())

    def _take(self, above: int, name: str, path: str, depth: int) -> None:
        """Add one name of a directory, with everything below it."""
        if path in self._found:
            return
        if len(self._found) >= MOST_ENTRIES:
            raise Unpackable(f"these are more than {MOST_ENTRIES} files", "put them into an archive.")
        if depth > DEEPEST:
            raise Unpackable(f"{_shown(path)} lies deeper than {DEEPEST} directories", "put it into an archive.")
        try:
            status = os.stat(name, dir_fd=above, follow_symlinks=False)
        except OSError as error:
            raise _no_entry(path, error) from error
        mode, target = status.st_mode, ""
        if stat.S_ISLNK(mode):
            target = os.readlink(name, dir_fd=above)
            _require_inside(path, target)
        elif not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise Unpackable(
                f"{_shown(path)} is neither a file nor a directory nor a link", "transfer no other kind of thing."
            )
        size = status.st_size if stat.S_ISREG(mode) else 0
        self._found[path] = _Entry(path, mode, size, status.st_blocks * 512, target)
        if stat.S_ISDIR(mode):
            inside = self._enter(above, name, path)
            try:
                for each in sorted(os.listdir(inside), key=os.fsencode):
                    self._take(inside, each, f"{path}/{each}", depth + 1)
            finally:
                os.close(inside)

    def _enter(self, above: int, name: str, path: str) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            inside = os.open(name, flags, dir_fd=above)
        except OSError as error:
            raise _no_entry(path, error) from error
        if os.fstat(inside).st_dev != self._device:
            os.close(inside)
            raise Unpackable(
                f"{_shown(path)} is on another file system", "let nothing be mounted in the scratch directory."
            )
        return inside


def _no_entry(path: str, error: OSError) -> Unpackable:
    return Unpackable(
        f"{_shown(path)} in the job's scratch directory cannot be read ({error.strerror})",
        "name what transfer_input_files brings, by the name that it has there, and let its owner read it.",
    )


def _shown(path: str) -> str:
    """Format a path for a message, on one line and not too long."""
    return ascii(path) if len(path) <= 200 else f"{path[:200]!a}…"


def _require_inside(path: str, target: str) -> None:
    """Make sure that a link leads into the working directory. Raises `Unpackable`."""
    parts = os.path.normpath(os.path.join(os.path.dirname(path), target)).split("/")
    if not target or target.startswith("/") or parts[0] == "..":
        raise Unpackable(
            f"the link {_shown(path)} leads out of the working directory, to {target[:200]!a}",
            "transfer what it leads to, or make it a relative link.",
        )


def _require_room(output: int, entries: Sequence[_Entry], more: int) -> None:
    needed = sum(min(entry.size, entry.occupied) + 2 * BLOCKSIZE for entry in entries) + more + PADDING
    status = os.fstatvfs(output)
    free = status.f_bavail * status.f_frsize
    if needed > free:
        raise Unpackable(
            f"the inputs take {needed >> 20} MiB on the drive that is made of them, and {free >> 20} MiB are free",
            "raise request_disk, or name what the program needs in Run_Inputs.",
        )


def _header(entry: _Entry, when: int) -> bytes:
    info = TarInfo(entry.path)
    info.mode, info.mtime, info.size = entry.mode & 0o777, when, entry.size
    if stat.S_ISDIR(entry.mode):
        info.type = DIRTYPE
    elif stat.S_ISLNK(entry.mode):
        info.type, info.linkname, info.mode = SYMTYPE, entry.target, 0o777
    return info.tobuf(GNU_FORMAT, "utf-8", "surrogateescape")


def _copy(directory: str, entry: _Entry, output: int) -> None:
    """Append the content of a file, padded to whole blocks."""
    try:
        source = open_beneath(os.fsencode(directory), os.fsencode(entry.path).split(b"/"), os.O_RDONLY, 0)
    except OSError as error:
        raise _no_entry(entry.path, error) from error
    try:
        begin = os.lseek(output, 0, os.SEEK_CUR)
        if os.fstat(source).st_size != entry.size:
            raise _changed(entry)
        for position, length in _pieces(source, entry):
            os.lseek(output, begin + position, os.SEEK_SET)
            while length:
                count = os.sendfile(output, source, position, min(length, 1 << 30))
                if not count:
                    raise _changed(entry)
                position, length = position + count, length - count
        if os.fstat(source).st_size != entry.size:
            raise _changed(entry)
        end = begin + entry.size + -entry.size % BLOCKSIZE
        os.ftruncate(output, end)
        os.lseek(output, end, os.SEEK_SET)
    finally:
        os.close(source)


def _pieces(source: int, entry: _Entry) -> Iterator[tuple[int, int]]:
    """Yield the offset and length of each part of a file that is not a hole."""
    position = 0
    while position < entry.size:
        try:
            begin = os.lseek(source, position, os.SEEK_DATA)
            position = min(os.lseek(source, begin, os.SEEK_HOLE), entry.size)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole up to its end, or the file was truncated
                return
            raise
        yield begin, position - begin


def _changed(entry: _Entry) -> Unpackable:
    return Unpackable(
        f"{_shown(entry.path)} has changed while it was packed", "see who writes to the job's scratch directory."
    )


if __name__ == "__main__":
    sys.exit(_main())
