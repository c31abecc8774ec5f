"""The job's user, and operations on the job's files as that user.

The daemon runs as root, and the job chooses every name in its scratch directory: a symbolic link there may
point anywhere. So everything that the job may read or write is opened with the job user's rights, and inside
the scratch directory no symbolic link is followed at all. `vmgahp.host.child` describes how a process becomes that
user for one operation.

The job is blamed for an error in its scratch directory unless a test outside of it shows that the machine fails. A job
can make the directory fail in any way: close it, fill it, leave a directory or a FIFO in a file's place, mount a file
system of its own there that fails or hangs. So the errno proves nothing, and a machine that is blamed wrongly runs no
VM at all. Jobs cannot touch EXECUTE, in which HTCondor makes the scratch directories: root tests that one, and follows
nothing that belongs to the job.
"""

from __future__ import annotations

import errno
import os
from _thread import get_ident

from vmgahp.errors import MISMATCHED, Fault, JobFault, MachineFault, is_perhaps_the_machines
from vmgahp.host import child, system_calls
from vmgahp.host.system_calls import Opened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, TypeVar

    from vmgahp.host.child import Operation

    Result = TypeVar("Result")

_LARGEST_ID = 2**32 - 2
"""The largest valid id; one more is (uid_t)-1, "leave it unchanged" to the system: the child would stay root."""


class Identity:
    """The job's user; `switching` is true if the daemon must become that user.

    Without root the user is the caller, and every operation runs directly.
    """

    __slots__ = ("_child", "_groups", "gid", "switching", "uid")

    def __init__(self, uid: int, gid: int) -> None:
        self.uid = uid
        self.gid = gid
        self.switching = os.geteuid() == 0 and uid != 0
        self._groups: list[int] | None = None
        self._child: child.StayingChild | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Identity:
        """Return the user that VMGAHP_USER_UID and VMGAHP_USER_GID name; without root, the caller.

        A gid that is not set or 0 becomes the uid, as in ``init_uids`` of HTCondor's
        ``src/condor_vm-gahp/vmgahp_main.cpp``. Raises `MachineFault` for root without a usable uid.
        """
        if os.geteuid() != 0:
            return cls(os.geteuid(), os.getegid())
        uid = _id(environ, "VMGAHP_USER_UID")
        if uid == 0:
            problem = "The daemon runs as root and does not know for which user: VMGAHP_USER_UID is not set."
            hint = "set VMGAHP_USER_UID=<uid> and VMGAHP_USER_GID=<gid> to the job's user, who is not root."
            raise MachineFault(problem, hint)
        return cls(uid, _id(environ, "VMGAHP_USER_GID") or uid)

    @classmethod
    def of_owner(cls, directory: str) -> Identity | None:
        """Return the owner of a scratch directory; None without root, if root owns it, or if it does not exist."""
        try:
            status = os.stat(directory)
        except OSError:
            return None
        return cls(status.st_uid, status.st_gid) if os.geteuid() == 0 and status.st_uid else None

    @classmethod
    def of_condor(cls) -> Identity | None:
        """Return HTCondor's own user, of whom no job has processes; None if there is none, or if it is root."""
        import pwd

        uid, _, gid = os.environ.get("CONDOR_IDS", "").partition(".")
        try:
            user = cls(int(uid), int(gid)) if gid else cls(*pwd.getpwnam("condor")[2:4])
        except (KeyError, ValueError):
            return None
        return user if user.uid else None

    def groups(self) -> list[int]:
        """Return all groups of the user, from the group database; only `gid` for a uid without a name."""
        if self._groups is None:
            import pwd

            try:
                self._groups = os.getgrouplist(pwd.getpwuid(self.uid).pw_name, self.gid)
            except (KeyError, OSError):
                self._groups = [self.gid]
        return self._groups

    def of_process(self) -> dict[str, Any]:
        """Return arguments of `subprocess.Popen` that run a program as the user; none if it does so anyway."""
        if not self.switching:
            return {}
        return {"user": self.uid, "group": self.gid, "extra_groups": self.groups()}

    def becoming(self) -> tuple[int, int, int] | None:
        """Return what `system_calls.restrict` needs to make a child of this process the user; None if it is that."""
        return (self.uid, self.gid, os.getpid()) if self.switching else None

    def open_scratch(self, directory: str, name: str, flags: int, mode: int = 0o600) -> int:
        """Open the regular file `name` below `directory` as the user; return a descriptor.

        `name` is relative, without ``..``. No component of it may be a symbolic link: OSError ELOOP, or
        ENOTDIR for a link in a directory's place. Anything but a regular file (a FIFO, a device, a socket) is
        refused with EPERM, a directory with EISDIR, a bad name with EINVAL; every other OSError is the kernel's
        own. The descriptor is close-on-exec.

        Raises `MachineFault` if this machine lacks resources, or EXECUTE fails or hangs as well
        (`blame`): an OSError is always caused by the job's names, files or actions.
        """
        return self._in_scratch(directory, name, system_calls.open_beneath, flags, mode)

    def read_scratch(self, directory: str, name: str, most: int, start: int = -1) -> bytes:
        """Read the first `most` bytes of the file `name` below `directory`. Raises as `open_scratch`.

        With `start` these are the last `most` bytes of those from `start` on.
        """
        with open(self._in_scratch(directory, name, system_calls.read_beneath, most, start), "rb") as file:
            return file.read()

    def write_scratch(self, directory: str, name: str, data: bytes, mode: int = 0o600) -> None:
        """Replace the file `name` below `directory` by one with `data`, all or nothing, as the user.

        Raises as `open_scratch`; an existing `name`, even a symbolic link, is replaced and not followed.
        """
        temporary = b".%s.%d.%d.tmp" % (_components(name)[-1][:200], os.getpid(), get_ident())
        self._in_scratch(directory, name, system_calls.write_beneath, temporary, data, mode)

    def make_scratch(self, directory: str, name: str, write: Callable[[int], Result]) -> Result:
        """Replace the file `name` below `directory` by what `write` writes to an open one, all or nothing.

        Raises as `open_scratch`, and as `write`.
        """
        temporary = f".{name}.{os.getpid()}.tmp"
        self.unlink_scratch(directory, temporary)  # from a server that was killed and had this process id
        with Opened(self.open_scratch(directory, temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)) as output:
            try:
                result = write(output)
                self.rename_scratch(directory, temporary, name)
            except BaseException:
                self.unlink_scratch(directory, temporary)
                raise
        return result

    def rename_scratch(self, directory: str, old: str, new: str, replace: bool = True) -> None:
        """Rename a file below `directory` as the user; an existing file `new` is replaced.

        With `replace` false an existing one raises FileExistsError, though the user's own processes can create
        one at the same moment. Raises as `open_scratch`; a symbolic link is renamed itself.
        """
        self._in_scratch(directory, old, system_calls.rename_beneath, _components(new), replace)

    def link_scratch(self, directory: str, below: str, names: Sequence[str], others: bool = False) -> None:
        """Hard-link those files of `directory` in `names` that exist into the directory `below` it, as the user.

        Existing files there are kept. With `others` all files but `names` are linked, as HTCondor would transfer them
        back, and existing ones are replaced. Raises as `open_scratch`.
        """
        self._in_scratch(directory, below, system_calls.link_beneath, [_encode(name) for name in names], others)

    def unlink_links_scratch(self, directory: str, below: str) -> None:
        """Remove the links that `link_scratch` has made, as the user. Raises as `open_scratch`."""
        self._in_scratch(directory, below, system_calls.unlink_links_beneath)

    def occupied_scratch(self, directory: str, name: str) -> int:
        """Return the bytes that the file `name` below `directory` occupies; 0 on any error."""
        return self.sizes_scratch(directory, name)[1]

    def sizes_scratch(self, directory: str, name: str) -> tuple[int, int]:
        """Return the size of the file `name` below `directory`, and the bytes that it occupies; 0 on any error."""
        try:
            with open(self._in_scratch(directory, name, system_calls.sizes_beneath), "rb") as file:
                size, occupied = map(int, file.read().split())
        except (OSError, Fault):
            return 0, 0
        return size, occupied

    def has_scratch(self, directory: str, name: str) -> bool:
        """Return True if there is a file `name` below `directory`, of any kind. Raises as `open_scratch`."""
        try:
            self._in_scratch(directory, name, system_calls.find_beneath)
        except FileNotFoundError:
            return False
        return True

    def unlink_scratch(self, directory: str, name: str) -> None:
        """Remove the file `name` below `directory` as the user; a missing file counts as success.

        Raises as `open_scratch`; a symbolic link is removed itself.
        """
        try:
            self._in_scratch(directory, name, system_calls.unlink_beneath)
        except FileNotFoundError:
            return

    def check_access(self, path: str, write: bool) -> str | None:
        """Return the reason why the user cannot open the regular file `path` for reading (and writing), or None.

        Symbolic links are followed: this is for full paths that the job names on a shared file system, where
        the user's own rights are the limit. Files of the kernel's own (``/proc``, ``/sys``, ``/dev``) are
        refused. A file system that does not answer is a reason too: a job can name a path that hangs. Raises
        `MachineFault` if this machine lacks resources.
        """
        if not path.startswith("/"):
            return "it is not a full path"
        try:
            os.close(self.open_named(path, os.O_RDWR if write else os.O_RDONLY))
        except OSError as error:
            return f"{error.strerror}, for uid {self.uid} and {'writing' if write else 'reading'}"
        return None

    def may_execute(self, path: str) -> bool:
        """Return True if the user may execute the file. Raises `MachineFault` if this machine lacks resources."""
        try:
            self.run(system_calls.require_executable, _encode(path))
        except OSError:
            return False
        return True

    def open_named(self, path: str, flags: int) -> int:
        """Open the regular file of a full path as the user, as `check_access` does; return a descriptor.

        Raises OSError, also if the file system hangs, and `MachineFault` if this machine lacks resources.
        """
        return self._by_name(path, system_calls.open_named, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)

    def read_named(self, path: str, most: int) -> bytes:
        """Read the first `most` bytes of the file of a full path, as `open_named`; the file system may hang."""
        with open(self._by_name(path, system_calls.read_named, most), "rb") as file:
            return file.read()

    def run(self, operation: Operation, *arguments: object) -> int:
        """Run a function that makes system calls only, as the user. Raises OSError and `MachineFault`."""
        if not self.switching:
            return operation(*arguments)
        if (staying := self._child) is not None:
            return staying.run(operation, arguments)
        return child.run_as(self.uid, self.gid, self.groups(), operation, arguments)

    def at_hand(self) -> AtHand:
        """Return a context in which one child process does all operations as the user."""
        return AtHand(self)

    def _by_name(self, path: str, operation: Operation, *arguments: object) -> int:
        try:
            return self.run(operation, _encode(path), *arguments)
        except OSError as error:
            require_means(error, path, self)
            raise

    def _in_scratch(self, directory: str, name: str, operation: Operation, *arguments: object) -> int:
        try:
            return self.run(operation, _encode(directory), _components(name), *arguments)
        except OSError as error:
            if is_perhaps_the_machines(error):
                problem = f"This machine has failed at {os.path.join(directory, name)}: {error.strerror}."
                fault = blame(error, directory, self, problem)
                if isinstance(fault, MachineFault):
                    raise fault from error
            raise


class AtHand:
    """A context in which an identity has one `StayingChild`, if it needs one and one can be started."""

    __slots__ = ("_child", "_identity")

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._child: child.StayingChild | None = None

    def __enter__(self) -> None:
        user = self._identity
        if user.switching and user._child is None:
            try:
                self._child = user._child = child.StayingChild(user.uid, user.gid, user.groups())
            except (OSError, MachineFault):
                return  # the first operation reports the reason

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._identity._child = None
            self._child.close()


def _id(environ: Mapping[str, str], name: str) -> int:
    """Return a uid or gid from the environment, 0 if it is unset or not positive.

    Raises `MachineFault` for anything but a number.
    """
    text = environ.get(name, "").strip()
    if not text or (text.startswith("-") and text[1:].isdecimal()):
        return 0
    if not (text.isascii() and text.isdecimal()) or len(text) > 10 or int(text) > _LARGEST_ID:
        raise MachineFault(f"{name} = {text[:50]!r} is not a user or group id.", f"set {name} to a number.")
    return int(text)


def _encode(path: str) -> bytes:
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded:
        raise OSError(errno.EINVAL, "it is not a name that a file can have", path)
    return encoded


def _components(name: str) -> list[bytes]:
    parts = _encode(name).split(b"/")
    if any(part in (b"", b".", b"..") for part in parts):
        raise OSError(errno.EINVAL, "it is not a plain relative name", name)
    return parts


# The blame for an error in a scratch directory


LEAST_FREE = 1 << 20
"""The bytes that must be free for a start: for the console, the display and the reason of a failure. The needs of the
guest are not known."""

_OF_THE_WAY = (errno.ENOENT, errno.EACCES, errno.EPERM)
_OF_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_VERDICT = (errno.EACCES, errno.EPERM, errno.EEXIST)
"""The errors that prove nothing: root may be mapped to nobody on a network file system, and a name may be taken."""

_LOOK_AT_EXECUTE = (
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
        if error.errno in _OF_THE_WAY:
            try:
                identity.run(_enter, os.fsencode(directory), place)
            except OSError as found:
                if not is_perhaps_the_machines(found):
                    raise
                error = found  # perhaps of a file system that the job has mounted
        if is_perhaps_the_machines(error):
            name = b".vmgahp-%d-%d" % (os.getpid(), get_ident())
            as_root(identity, _try_execute, place, name, error.errno in _OF_ROOM)
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
        as_root(identity, open_directory, b"/")
    except OSError as found:
        raise MachineFault(f"{path} cannot be opened: {found.strerror}.", _LOOK_AT_EXECUTE) from error


def blame(
    error: OSError, directory: str, identity: Identity, problem: str, hint: str = "", code: str = MISMATCHED
) -> Fault:
    """Make the fault for an error beneath the scratch `directory`.

    `problem` is a sentence, `hint` and `code` are for the job's fault.
    """
    if reason := why(error, directory, identity):
        return MachineFault(f"{problem} {reason}", _LOOK_AT_EXECUTE)
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
        raise MachineFault(f"{directory} cannot be entered as uid {identity.uid}. {reason}", _LOOK_AT_EXECUTE)


def free_bytes(directory: str, identity: Identity) -> int:
    """Return the bytes that the job's user can still write in the scratch directory. Raises `Fault`."""
    return free_room(directory, identity)[0]


def free_room(directory: str, identity: Identity) -> tuple[int, int, int, int]:
    """Return the scratch directory's free bytes and inodes for the job's user, its inodes, its device (``st_dev``).

    Raises `Fault`. The job may have mounted a file system there that never answers.
    """
    try:
        with open(identity.run(system_calls.room_in, os.fsencode(directory)), "rb") as file:
            free, free_inodes, inodes, device = map(int, file.read().split())
            return free, free_inodes, inodes, device
    except OSError as error:
        raise blame(error, directory, identity, f"{directory} cannot be examined ({error.strerror}).") from error


def require_room(directory: str, identity: Identity, needed: int = LEAST_FREE) -> None:
    """Make sure that the scratch directory has `needed` free bytes. Raises `Fault`."""
    found = free_bytes(directory, identity)
    if found < needed:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        problem = f"There is no room in the scratch directory {directory}: {found >> 10} KiB are free."
        raise blame(full, directory, identity, problem)


def forget(identity: Identity, directory: str, log: Callable[[str], None], *names: str) -> None:
    """Remove files of a scratch directory that are no longer needed, if they exist. A failure is logged."""
    for name in names:
        try:
            identity.unlink_scratch(directory, name)
        except (OSError, Fault) as error:
            log(f"could not remove {name} from {directory}: {error}")


def make_directory(directory: str, name: str, identity: Identity) -> None:
    """Make sure that the scratch `directory` has a directory `name` that its user can read. Raises `Fault`."""
    try:
        identity._in_scratch(directory, name, system_calls.make_directory_beneath)
    except OSError as error:
        problem = f"The directory {name} of the job's scratch directory cannot be made or read ({error.strerror})."
        raise blame(error, directory, identity, problem) from error


def _execute(directory: str) -> bytes:
    """Return the directory in which starters make the jobs' directories, derived from the scratch directory's name."""
    from vmgahp.host import starter  # with typing, for which the first reply does not wait

    return os.fsencode(os.path.dirname(starter.directory_of(directory)) or ".")


def _is_mounted_read_only(directory: str) -> bool:
    """Return True if the scratch directory is a read-only mount of its own, but not FUSE, which any user can mount."""
    from vmgahp.host.proc import mounts  # as in `_execute`

    here = [mount for mount in mounts() if mount.place == os.path.normpath(directory)]
    return bool(here) and "ro" in here[-1].options and not here[-1].kind.startswith("fuse")


def resolved(directory: str) -> str:
    """Return the path of a scratch directory without links above it; EXECUTE may be behind one.

    Root asks nothing of the directory itself, on which the job may have mounted a file system that never answers.
    """
    above, name = os.path.split(os.path.normpath(directory))
    return os.path.join(os.path.realpath(above), name)


def is_mounted_on(directory: str) -> bool:
    """Return True if a FUSE file system, which any user can mount, is on the scratch directory or below it."""
    from vmgahp.host.proc import mounts  # as in `_execute`

    here = f"{os.path.normpath(directory)}/"
    return any(mount.kind.startswith("fuse") and f"{mount.place}/".startswith(here) for mount in mounts())


def as_root(identity: Identity, operation: child.Operation, *arguments: object) -> int:
    """Run an operation as root if this process is root, in a child, because EXECUTE may hang as well.

    Returns a descriptor or -1. Raises OSError and `MachineFault` as `Identity.run` does.
    """
    return child.run_as(0, 0, [0], operation, arguments) if identity.switching else operation(*arguments)


# Operations of the children: system calls only


def open_directory(path: bytes) -> int:
    os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    return -1


def _try_execute(execute: bytes, name: bytes, is_about_room: bool) -> int:
    """Check that a file can be created, written and removed in EXECUTE. Raises OSError."""
    with Opened(os.open(execute, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as above:
        room = os.statvfs(above)
        if is_about_room and room.f_bavail * room.f_frsize < LEAST_FREE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            try:
                # Without a name it waits for no lock of the directory, which any user who lists that can hold for ever.
                file, name = os.open(b".", os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=above), b""
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):  # its file system has none
                    raise
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
            if name:
                os.unlink(name, dir_fd=above)
    return -1


def _enter(directory: bytes, execute: bytes) -> int:
    """Check that the job's user owns and can enter its scratch directory. Changes by the user are no error."""
    try:
        there = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        if os.access(execute, os.W_OK, effective_ids=True):  # the user may have renamed it
            return -1
        raise
    with Opened(there):
        outside = os.stat(execute)
        try:
            here = os.fstat(there)
        except OSError:  # only a file system that the job has mounted refuses it
            return -1
        # On a file system that the job has mounted, the job chooses the owner of everything.
        if here.st_uid != os.geteuid() and here.st_dev == outside.st_dev:
            raise OSError(errno.EPERM, "the scratch directory belongs to another user")
    return -1
