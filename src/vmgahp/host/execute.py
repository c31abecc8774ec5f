"""The blame for an error in a scratch directory: the job's fault or the machine's.

The job is blamed unless a test outside of its directory shows that the machine fails. A job can make its scratch
directory fail in any way: close it, fill it, leave a directory or a FIFO in a file's place, mount a file system of its
own there that fails or hangs. So the errno proves nothing, and a machine that is blamed wrongly runs no VM at all.
Jobs cannot touch EXECUTE, in which HTCondor makes the scratch directories: root tests that one, and follows nothing
that belongs to the job.
"""

from __future__ import annotations

import errno
import os
from threading import get_ident

from vmgahp.errors import MISMATCHED, Fault, JobFault, MachineFault, is_perhaps_the_machines
from vmgahp.host import child, starter
from vmgahp.host.job_user import Identity
from vmgahp.host.mounts import mounts

LEAST_FREE = 1 << 20
"""The bytes that must be free for a start: for the console, the display and the reason of a failure. The needs of the
guest are not known."""

_OF_THE_WAY = (errno.ENOENT, errno.EACCES, errno.EPERM)
_OF_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_VERDICT = (errno.EACCES, errno.EPERM, errno.EEXIST)
"""The errors that prove nothing: root may be mapped to nobody on a network file system, and a name may be taken."""

_ILL = (
    "see that EXECUTE and its file system are well, that every user may pass to the scratch directories, and what "
    "the limits on memory, processes and open files are."
)
_RAISE = "raise request_disk, or send less."
_FREE = "see that the job's user may write there, and that nothing else of the job's has this name."


def why(error: OSError, directory: str, identity: Identity) -> str:
    """Find the machine's fault behind an error beneath the scratch `directory`; return an empty string for none."""
    place = _execute(directory)
    if error.errno == errno.EROFS and _is_mounted_read_only(directory):
        return "It was mounted so."
    try:
        if is_perhaps_the_machines(error):
            _as_root(identity, _look, place, b".vmgahp-%d-%d" % (os.getpid(), get_ident()), error.errno in _OF_ROOM)
        elif error.errno in _OF_THE_WAY:
            identity.run(_enter, os.fsencode(directory), place)
    except OSError as found:
        return f"EXECUTE ({os.fsdecode(place)}) is ill: {found.strerror}."
    return ""


def require_means(error: OSError, path: str, identity: Identity) -> None:
    """Make sure that this machine has the resources to open a file. Raises `MachineFault`.

    Called when a full path from the job cannot be opened. Every other cause is the job's fault; otherwise a job could
    take the machine out of service by naming a file system that fails.
    """
    if not is_perhaps_the_machines(error):
        return
    try:
        _as_root(identity, _open, b"/")
    except OSError as found:
        raise MachineFault(f"{path} cannot be opened: {found.strerror}.", _ILL) from error


def blame(
    error: OSError, directory: str, identity: Identity, problem: str, hint: str = "", code: str = MISMATCHED
) -> Fault:
    """Make the fault for an error beneath the scratch `directory`.

    `problem` is a sentence, `hint` and `code` are for the job's fault.
    """
    if reason := why(error, directory, identity):
        return MachineFault(f"{problem} {reason}", _ILL)
    return JobFault(code, problem, hint or (_RAISE if error.errno in _OF_ROOM else _FREE))


def unwritable(name: str, error: OSError, directory: str, identity: Identity) -> Fault:
    """Make the fault for a file of the server's own that cannot be written in the scratch `directory`."""
    problem = f"{name} cannot be written in the job's scratch directory ({error.strerror})."
    return blame(error, directory, identity, problem)


def require_entry(directory: str, identity: Identity) -> None:
    """Make sure that the job's user can enter its scratch directory. Raises `MachineFault`.

    Called when a file of the job cannot be opened, since the directory may be the cause.
    """
    if reason := why(OSError(errno.EACCES, "closed"), directory, identity):
        raise MachineFault(f"{directory} cannot be entered as uid {identity.uid}. {reason}", _ILL)


def free(directory: str, identity: Identity) -> int:
    """Return the bytes that the job's user can still write in the scratch directory. Raises `Fault`."""
    try:
        status = os.statvfs(directory)
    except OSError as error:
        raise blame(error, directory, identity, f"{directory} cannot be examined ({error.strerror}).") from error
    return status.f_bavail * status.f_frsize


def require_room(directory: str, identity: Identity, needed: int = LEAST_FREE) -> None:
    """Make sure that the scratch directory has `needed` free bytes. Raises `Fault`."""
    found = free(directory, identity)
    if found < needed:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        problem = f"There is no room in the scratch directory {directory}: {found >> 10} KiB are free."
        raise blame(full, directory, identity, problem)


def _execute(directory: str) -> bytes:
    """Return the directory in which starters make the jobs' directories, derived from the scratch directory's name."""
    return os.fsencode(os.path.dirname(starter.directory_of(directory)) or ".")


def _is_mounted_read_only(directory: str) -> bool:
    """Return True if the scratch directory is a read-only mount of its own, but not FUSE, which any user can mount."""
    found, directory = False, os.path.normpath(directory)
    for mount in mounts():
        if mount.place == directory:
            found = "ro" in mount.options and not mount.kind.startswith("fuse")
    return found


def _as_root(identity: Identity, operation: child.Operation, *arguments: object) -> None:
    """Run an operation as root if this process is root, in a child, because EXECUTE may hang as well."""
    if identity.switching:
        child.run_as(0, 0, [0], operation, arguments)
    else:
        operation(*arguments)


# Operations of the children: system calls only


def _open(path: bytes) -> int:
    os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    return -1


def _look(execute: bytes, name: bytes, is_about_room: bool) -> int:
    """Check that a file can be created, written and removed in EXECUTE. Raises OSError."""
    above = os.open(execute, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        room = os.statvfs(above)
        if is_about_room and room.f_bavail * room.f_frsize < LEAST_FREE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(name, flags, 0o600, dir_fd=above)
        except OSError as error:
            if error.errno in _NO_VERDICT:
                return -1
            raise
        try:
            os.write(file, bytes(4096))
            os.fsync(file)
        finally:
            os.close(file)
            os.unlink(name, dir_fd=above)
    finally:
        os.close(above)
    return -1


def _enter(directory: bytes, execute: bytes) -> int:
    """Check that the job's user owns and can enter its scratch directory. Changes by the user are no error."""
    try:
        there = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        if os.access(execute, os.W_OK, effective_ids=True):  # the user may have renamed it
            return -1
        raise
    try:
        here, outside = os.fstat(there), os.stat(execute)
        # On a file system that the job has mounted, the job chooses the owner of everything.
        if here.st_uid != os.geteuid() and here.st_dev == outside.st_dev:
            raise OSError(errno.EPERM, "the scratch directory belongs to another user")
    finally:
        os.close(there)
    return -1
