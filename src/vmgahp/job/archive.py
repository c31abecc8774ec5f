"""Tar archives: the job's files for its guest, and the outputs of the guest's program.

GNU tar packs the job's files, in GNU's format: busybox's tar supports names of more than 100 bytes and files of more
than 8 GiB in this format only. The same files always make the same bytes: the archive has neither their owners nor
their times. The files are not trusted: any tree, which may change meanwhile, on a file system that may hang. So tar and
find run with the job user's rights, limits and a deadline, and no link is followed. Their errors are the job's fault.

A guest can put anything into an archive: any names, links, kinds, sizes and numbers, in any order. So it is read by
a separate process that has the job user's rights, limits and a deadline. It writes only below one new directory, and
only the files that the job has asked for, within what they may take of the file system.

HTCondor holds a job with a link to a directory, or with a file that its user cannot read, and waits for a FIFO for
ever. So only files and directories are made: a link to a file of the outputs becomes a second name of that file, and
all other entries are left out and reported.
"""

from __future__ import annotations

import ctypes
import errno
import io
import json
import os
import shutil
import signal
import sys
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from vmgahp.errors import MachineFault
from vmgahp.host import system_calls
from vmgahp.host.job_user import Identity
from vmgahp.host.run import Finished, run, which
from vmgahp.host.system_calls import Opened, restrict, unnamed
from vmgahp.job.scratch_files import is_reserved

PREFIX = "inputs"
"""The directory of the job's files in the archive."""

PACK_MEMORY = 1 << 30
PACK_CPU_SECONDS = 200
PACK_DEADLINE = 200.0
"""The limits of the process that packs. HTCondor waits 300 seconds for a start (VM_GAHP_REQ_TIMEOUT)."""
LONGEST_LIST = 1 << 20
"""The most bytes of the names at the top of a scratch directory."""

_LATEST = 8**11 - 1
"""The largest timestamp that the archive can have."""
_TOOLS = ("find", "tar", "truncate")
_SCRIPT = 'cat "/dev/fd/$0" && tar "$@" && truncate --size=%1M /dev/fd/1'
"""A shell script that prints the head, the archive and padding up to whole MiB, since a disk consists of whole sectors;
its arguments are tar's, its input the names."""


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


def pack(directory: str, output: int, wanted: Packing, most: int, identity: Identity) -> tuple[str, ...]:
    """Write an archive of at most `most` bytes to an open file; return the names at the top of the scratch `directory`.

    Raises `Unpackable`, and OSError and `MachineFault` if it cannot be written.
    """
    for tool in _TOOLS:  # not by an exit status, which other processes of the job's user can forge
        if which(tool) is None:
            raise MachineFault(f"The job's inputs cannot be packed: {tool} is not installed.", f"install {tool}.")
    names = _at_top(directory, wanted.but, identity) if wanted.names is None else wanted.names
    names = sorted(names, key=os.fsencode)
    for name in names:
        _require_plain(directory, name, wanted.but, identity)
    when = min(wanted.when, _LATEST)
    command = ["--create", "--format=gnu", "--sort=name", f"--mtime=@{when}"]
    command += ["--owner=0", "--group=0", "--numeric-owner", "--hard-dereference", "--one-file-system"]
    command += [f"--directory={directory}", f"--transform=s,^,{PREFIX}/,SH"]
    command += ["--warning=no-file-ignored", "--warning=no-xdev", "--null", "--files-from=-"]
    with Opened(unnamed(b"".join(_head(wanted.head, when)))) as head:
        done = _run(
            ["sh", "-c", _SCRIPT, str(head), *command],
            identity,
            stdin=b"".join(b"%b\0" % os.fsencode(name) for name in names),
            stdout=output,
            pass_fds=[head],
            most=most,
        )
    if done.status == 128 + signal.SIGXFSZ:
        problem = f"the inputs take more than the {most >> 20} MiB that are left for the drive that is made of them"
        raise Unpackable(problem, "raise request_disk, or name what the program needs in Run_Inputs.")
    if done.status:
        hint = "name what transfer_input_files brings, let its owner read it, and let nothing change it meanwhile."
        raise Unpackable(f"the inputs cannot be packed ({_complaint(done)})", hint)
    return tuple(dict.fromkeys(name.partition("/")[0] for name in names))


def _at_top(directory: str, but: Iterable[str], identity: Identity) -> list[str]:
    """List the job's files at the top of its scratch directory."""
    done = _run(["find", directory, "-mindepth", "1", "-maxdepth", "1", "-printf", "%P\\0"], identity)
    if len(done.out) > LONGEST_LIST:
        raise Unpackable("these are too many files", "put them into a directory, or into an archive.")
    if done.status:
        raise Unpackable(f"the inputs cannot be listed ({_complaint(done)})", "let their owner read the directory.")
    names = map(os.fsdecode, done.out.split(b"\0")[:-1])
    return [name for name in names if name not in but and not is_reserved(name)]


def _require_plain(directory: str, name: str, but: Iterable[str], identity: Identity) -> None:
    """Make sure that a name is the job's, and that no link leads to it: tar follows one on the way to a name."""
    if name in but or is_reserved(name):
        raise Unpackable(f"{name[:200]!a} is a disk of the VM, or no file of the job's", "leave it out of Run_Inputs.")
    if "/" in name:
        try:
            identity.run(system_calls.find_beneath, os.fsencode(directory), os.fsencode(name).split(b"/"))
        except OSError as error:
            problem = f"{name[:200]!a} in the job's scratch directory cannot be read ({error.strerror})"
            hint = "name what transfer_input_files brings, by the name that it has there, and let its owner read it."
            raise Unpackable(problem, hint) from error


def _head(files: Mapping[str, bytes], when: int) -> Iterable[bytes]:
    for name, content in files.items():
        info = tarfile.TarInfo(name)
        info.mode, info.mtime, info.size = 0o755, when, len(content)
        yield info.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % tarfile.BLOCKSIZE)


def _run(command: Sequence[str], identity: Identity, most: int = 0, **how: Any) -> Finished:
    """Run a program that reads the scratch directory. Raises OSError."""
    limits = (f"--as={PACK_MEMORY}", f"--cpu={PACK_CPU_SECONDS}", "--core=0", f"--fsize={most}")
    done = run(command, deadline=PACK_DEADLINE, user=identity, groups=(), limits=limits, longest=LONGEST_LIST, **how)
    if done.status is None:
        raise OSError(errno.ETIMEDOUT, f"the job's inputs were not packed within {PACK_DEADLINE:.0f} seconds")
    return done


def _complaint(done: Finished) -> str:
    """Return the first error of a program, for a message."""
    said = next(iter(done.complaints), f"exit status {done.status}").rstrip(".")
    return said if len(said) <= 300 else f"{said[:150]}…{said[-150:]}"


# Unpacking


DEEPEST = 100
"""The most directories above a file."""
LONGEST_CHAIN = 40
"""The most links that lead to each other, as for Linux."""
LONGEST_NAME = 255
"""The most bytes of a file's name, on any file system."""
MOST_TOLD = 20
"""The most omitted names that are reported."""

BLOCK, ENTRY = 4096, 512
"""The bytes of a file system's block, and those that a name and its inode take."""

UNPACK_MEMORY = 1 << 30
UNPACK_CPU_SECONDS = 1800
UNPACK_DEADLINE = 1800.0
"""The limits of the process that unpacks."""

_TAKEN = "there is another file or directory of that name, or in the place of its directory"
_AS_A_SHELL = 1 | 4 | 8
"""The flags FNM_PATHNAME, FNM_PERIOD and FNM_LEADING_DIR of fnmatch(3): a directory is meant with all in it."""


class Allowed(NamedTuple):
    """The outputs that a job may have."""

    names: Sequence[str]
    """The names and patterns that it has asked for. As in a shell, ``*`` is no name that begins with a dot."""
    size: int
    """The bytes that they may take of the file system, with their directories."""
    entries: int
    """The number of files, directories and links."""
    kept: int = 0
    """The bytes of the file system that they leave free, whatever else is written there meanwhile."""
    beside: Sequence[str] = ()
    """The files of the job's that come home to the same place."""


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
    taken: int = 0
    """The bytes of the file system that they take, with their directories; the most that they may if it is unknown."""


def unpack(archive: int, directory: str, below: str, allowed: Allowed, identity: Identity) -> Unpacked:
    """Unpack the open file `archive` into the new directory `below` of the scratch `directory`. Raises nothing."""
    plan = {"archive": archive, "directory": directory, "below": below, "allowed": allowed, "user": identity.becoming()}
    try:
        done = run(
            [sys.executable, "-I", "-c", _PROGRAM],
            deadline=UNPACK_DEADLINE,
            stdin=json.dumps(plan).encode(),
            environ={"PATH": os.defpath, "TZ": "UTC"},
            pass_fds=[archive],
        )
    except OSError as error:
        return Unpacked(0, 0, (), f"nothing can be started that unpacks the outputs ({error.strerror})")
    if done.status is None:
        late = f"the outputs were not unpacked within {UNPACK_DEADLINE:.0f} seconds"
        return Unpacked(0, 0, (), late, allowed.size)
    try:
        said = json.loads(done.out)
        taken = min(max(int(said[4]), 0), allowed.size)
        return Unpacked(int(said[0]), int(said[1]), tuple(map(str, said[2])), str(said[3]), taken)
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):  # ended by its limits, or by the user
        last = (done.complaints or ["it said nothing"])[-1][:200]
        return Unpacked(0, 0, (), f"what unpacks the outputs was ended: {last}", allowed.size)


def _program() -> str:
    """Return the code of the process that unpacks, of one piece: an upgrade may replace its files while a VM runs."""
    text = ["from __future__ import annotations"]
    for function in (restrict, is_reserved, unpack):
        with open(sys.modules[function.__module__].__file__ or "") as file:
            text += (line.rstrip("\n") for line in file if not line.startswith(("from vmgahp", "from __future__")))
    return "\n".join(text)


_PROGRAM = "" if __name__ == "__main__" else _program()

# The process that unpacks


class _Wrong(Exception):
    """An error that stops the unpacking; the text is the reason."""


class _LeftOut(Exception):
    """An error that omits one entry; the text is the reason."""


def _main() -> None:
    """Read the plan from standard input and carry it out; print the result to standard output."""
    plan = json.loads(sys.stdin.buffer.read())
    with tarfile.open(fileobj=io.BytesIO(tarfile.TarInfo("rehearsal").tobuf() + bytes(10240)), mode="r|") as tar:
        tar.next()  # loads all code before privileges are dropped
    archive = open(plan["archive"], "rb", buffering=0)  # noqa: SIM115 - it is open until the process ends
    problem, made = "", _Outputs(Allowed(*plan["allowed"]))
    restrict(plan["user"], memory=UNPACK_MEMORY, cpu_seconds=UNPACK_CPU_SECONDS, file_bytes=2**63 - 1)
    try:
        os.chdir(plan["directory"])
        shutil.rmtree(plan["below"], ignore_errors=True)  # of a server that was killed, or links that wait here
        os.mkdir(plan["below"], 0o755)
        os.chdir(plan["below"])
        os.umask(0o077)
        with tarfile.open(fileobj=archive, mode="r|", encoding="utf-8", errors="surrogateescape") as tar:
            while (entry := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # otherwise it keeps them all
                made.add(tar, entry)
        made.link()
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
    sys.stdout.write(json.dumps([made.entries, made.size, made.told(), problem, made.taken]))


class _Outputs:
    """The files made from an archive, in the current directory."""

    def __init__(self, allowed: Allowed) -> None:
        self.entries = self.size = 0
        self._allowed = allowed
        self._names = [os.fsencode(name) for name in allowed.names]
        self._match = ctypes.CDLL(None).fnmatch
        self.taken = self._all_entries = 0
        """The bytes of the file system that they take, and the number of files, directories and links."""
        self._left_out: list[str] = []
        self._number_left_out = 0
        self._links: list[tuple[str, str]] = []
        """The links of the archive, and the files to which they lead."""

    def told(self) -> list[str]:
        """Return the omitted entries, for a message."""
        more = self._number_left_out - len(self._left_out)
        return [*self._left_out, *([f"and {more} more"] if more else [])]

    def add(self, tar: tarfile.TarFile, entry: tarfile.TarInfo) -> None:
        """Unpack one entry. Raises `_Wrong`, OSError and tarfile's errors."""
        path = _plain(entry.name)
        if not path:  # the directory itself
            return
        try:
            if is_reserved(path) or path in self._allowed.beside:
                raise _LeftOut("a name of HTCondor's or of the server's")
            said = os.fsencode(path)
            is_asked_for = (
                not self._match(name, said, _AS_A_SHELL) or (said + b"/").startswith(name + b"/")
                for name in self._names
            )  # a name with brackets may be meant as it is, which is how a shell takes one that matches nothing
            if not any(is_asked_for):
                raise _LeftOut("the job has not asked for it")
            if entry.isdir():
                self._make_directory(path)
                os.chmod(path, entry.mode & 0o777 | 0o700)
            elif entry.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
                self._write(path, tar, entry)
            elif entry.issym() or entry.islnk():
                self._count(0)
                above = os.path.dirname(path) if entry.issym() and not entry.linkname.startswith("/") else ""
                self._links.append((path, os.path.normpath(os.path.join(above, entry.linkname))))
            else:
                raise _LeftOut("neither a file nor a directory nor a link")
        except _LeftOut as why:
            self._leave_out(path, str(why))
        except (FileExistsError, IsADirectoryError, NotADirectoryError):
            self._leave_out(path, _TAKEN)

    def link(self) -> None:
        """Make the links, after all files: each becomes another name of the file to which it leads."""
        targets = dict(self._links)
        for path, target in self._links:
            hops = 0
            # A link may lead to one that is made later: an archive has its entries in no order.
            while hops < LONGEST_CHAIN and target in targets and not os.path.lexists(target):
                target, hops = targets[target], hops + 1
            if target.startswith(("/", "../")) or not os.path.isfile(target):
                self._leave_out(path, "a link to what is no file of the outputs")
                continue
            try:
                self._make_directory(os.path.dirname(path))
                os.link(target, path)
                self.entries += 1
            except (FileExistsError, NotADirectoryError):
                self._leave_out(path, _TAKEN)

    def _count(self, size: int) -> None:
        """Count an entry of `size` bytes before it is made. Raises `_Wrong` if it is beyond what is allowed."""
        self._all_entries += 1
        taken = self.taken + ENTRY - -size // BLOCK * BLOCK
        if taken > self._allowed.size:
            raise _Wrong(f"they take more than the {self._allowed.size >> 20} MiB that are left for them")
        if self._all_entries > self._allowed.entries:
            raise _Wrong(f"they are more than {self._allowed.entries} files and directories")
        self.taken = taken

    def _make_directory(self, path: str) -> None:
        """Make a directory, and those above it, unless they exist."""
        if not path or os.path.isdir(path):
            return
        self._make_directory(os.path.dirname(path))
        self._count(BLOCK)
        os.mkdir(path)
        os.chmod(path, 0o755)  # noqa: S103 - whatever the umask is

    def _write(self, path: str, tar: tarfile.TarFile, entry: tarfile.TarInfo) -> None:
        if entry.size < 0:
            raise _Wrong(f"{path[:200]!a} has less than no bytes")
        self._count(entry.size)
        self._make_directory(os.path.dirname(path))
        content = tar.extractfile(entry)
        assert content is not None
        try:
            with open(path, "wb") as file:
                while data := content.read(1 << 20):
                    room = os.statvfs(".")  # a guest that runs on may fill its disks
                    if room.f_bavail * room.f_frsize < self._allowed.kept + len(data):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    file.write(data)
        except BaseException:
            with suppress(OSError):  # never leave a partial file
                os.unlink(path)
            raise
        os.chmod(path, entry.mode & 0o777 | 0o600)
        with suppress(OSError, ValueError, OverflowError):
            os.utime(path, (entry.mtime, entry.mtime))
        self.entries += 1
        self.size += entry.size

    def _leave_out(self, path: str, why: str) -> None:
        self._number_left_out += 1
        if len(self._left_out) < MOST_TOLD:
            self._left_out.append(f"{path[:200]!a}: {why}")


def _plain(name: str) -> str:
    """Return a path without dots and double slashes. Raises `_Wrong` for one that leads out, or is too long."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise _Wrong(f"they have the path {name[:200]!a}, which leads out of them")
    if len(parts) > DEEPEST or any(len(os.fsencode(part)) > LONGEST_NAME for part in parts):
        raise _Wrong(f"the path {name[:100]!a}… is too long or too deep")
    return "/".join(parts)


if __name__ == "__main__":
    _main()
