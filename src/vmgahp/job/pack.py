"""A tar archive of the job's files, which a guest reads from a disk.

GNU tar makes it, in GNU's format: busybox's tar supports names of more than 100 bytes and files of more than 8 GiB in
this format only. The same files make the same bytes, at any time and place: it has neither the files' owners nor
their times.

The files are not trusted: any tree, of any size, that may change meanwhile, on a file system that may hang. So tar and
find run with the job user's rights, limits and a deadline, and no link is followed. Their errors are the job's fault.
"""

import errno
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from tarfile import BLOCKSIZE, GNU_FORMAT, TarInfo
from typing import Any, NamedTuple

from vmgahp.errors import MachineFault
from vmgahp.host import system_calls
from vmgahp.host.job_user import Identity
from vmgahp.host.run import Finished, run, which
from vmgahp.job.scratch_names import is_reserved

PREFIX = "inputs"
"""The directory of the job's files in the archive."""
PADDING = 1 << 20
"""The number of bytes to a multiple of which the archive is padded, since a disk consists of whole sectors."""

MEMORY = 1 << 30
CPU_SECONDS = 200
DEADLINE = 200.0
"""The limits of the process that packs. HTCondor waits 300 seconds for a start (VM_GAHP_REQ_TIMEOUT)."""
LONGEST_LIST = 1 << 20
"""The most bytes of the names at the top of a scratch directory."""

_LATEST = 8**11 - 1
"""The largest timestamp that the archive can have."""
_TOOLS = ("find", "tar", "truncate")
_SCRIPT = 'cat "/dev/fd/$0" && tar "$@" && truncate --size=%1M /dev/fd/1'
"""A shell script that prints the head, the archive and its padding; its arguments are tar's, its input the names."""


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
    head = os.memfd_create("head", os.MFD_CLOEXEC)
    try:
        with open(head, "wb", closefd=False) as file:
            file.writelines(_head(wanted.head, when))
            file.seek(0)
        done = _run(
            ["sh", "-c", _SCRIPT, str(head), *command],
            identity,
            stdin=b"".join(b"%b\0" % os.fsencode(name) for name in names),
            stdout=output,
            pass_fds=[head],
            most=most,
        )
    finally:
        os.close(head)
    if done.status == 128 + signal.SIGXFSZ:
        raise Unpackable(
            f"the inputs take more than the {most >> 20} MiB that are left for the drive that is made of them",
            "raise request_disk, or name what the program needs in Run_Inputs.",
        )
    if done.status:
        hint = "name what transfer_input_files brings, let its owner read it, and let nothing change it meanwhile."
        raise Unpackable(f"the inputs cannot be packed ({_complaint(done)})", hint)
    return tuple(dict.fromkeys(name.partition("/")[0] for name in names))


def _at_top(directory: str, but: Iterable[str], identity: Identity) -> list[str]:
    """List the job's files at the top of its scratch directory."""
    command = ["find", directory, "-mindepth", "1", "-maxdepth", "1", "-printf", "%P\\0"]
    done = _run(command, identity)
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
            raise Unpackable(
                f"{name[:200]!a} in the job's scratch directory cannot be read ({error.strerror})",
                "name what transfer_input_files brings, by the name that it has there, and let its owner read it.",
            ) from error


def _head(files: Mapping[str, bytes], when: int) -> Iterable[bytes]:
    for name, content in files.items():
        info = TarInfo(name)
        info.mode, info.mtime, info.size = 0o755, when, len(content)
        yield info.tobuf(GNU_FORMAT) + content + bytes(-len(content) % BLOCKSIZE)


def _run(command: Sequence[str], identity: Identity, most: int = 0, **how: Any) -> Finished:
    """Run a program that reads the scratch directory. Raises OSError."""
    limits = (f"--as={MEMORY}", f"--cpu={CPU_SECONDS}", "--core=0", f"--fsize={most}")
    done = run(command, deadline=DEADLINE, user=identity, groups=(), limits=limits, longest=LONGEST_LIST, **how)
    if done.status is None:
        raise OSError(errno.ETIMEDOUT, f"the job's inputs were not packed within {DEADLINE:.0f} seconds")
    return done


def _complaint(done: Finished) -> str:
    """Return the first error of a program, for a message."""
    said = next(iter(done.complaints), f"exit status {done.status}").rstrip(".")
    return said if len(said) <= 300 else f"{said[:150]}…{said[-150:]}"
