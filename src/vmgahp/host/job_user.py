"""The job's user, and operations on the job's files as that user.

The daemon runs as root, and the job chooses every name in its scratch directory: a symbolic link there may
point anywhere. So everything that the job may read or write is opened with the job user's rights, and inside
the scratch directory no symbolic link is followed at all.

`vmgahp.host.child` describes how a process becomes that user for one operation.
"""

import errno
import os
from _thread import get_ident

from vmgahp.errors import Fault, MachineFault, is_perhaps_the_machines
from vmgahp.host import child, system_calls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from vmgahp.host.child import Operation

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
    def from_environ(cls, environ: "Mapping[str, str]") -> "Identity":
        """Return the user that VMGAHP_USER_UID and VMGAHP_USER_GID name; without root, the caller.

        A gid that is not set or 0 becomes the uid, as in ``init_uids`` of HTCondor's
        ``src/condor_vm-gahp/vmgahp_main.cpp``. Raises `MachineFault` for root without a usable uid.
        """
        if os.geteuid() != 0:
            return cls(os.geteuid(), os.getegid())
        uid = _id(environ, "VMGAHP_USER_UID")
        if uid == 0:
            raise MachineFault(
                "The daemon runs as root and does not know for which user: VMGAHP_USER_UID is not set.",
                "set VMGAHP_USER_UID=<uid> and VMGAHP_USER_GID=<gid> to the job's user, who is not root.",
            )
        return cls(uid, _id(environ, "VMGAHP_USER_GID") or uid)

    @classmethod
    def of_owner(cls, directory: str) -> "Identity | None":
        """Return the owner of a scratch directory; None without root, if root owns it, or if it does not exist."""
        try:
            status = os.stat(directory)
        except OSError:
            return None
        return cls(status.st_uid, status.st_gid) if os.geteuid() == 0 and status.st_uid else None

    def groups(self) -> list[int]:
        """Return all groups of the user, from the group database; only `gid` for a uid without a name."""
        if self._groups is None:
            import pwd

            try:
                self._groups = os.getgrouplist(pwd.getpwuid(self.uid).pw_name, self.gid)
            except (KeyError, OSError):
                self._groups = [self.gid]
        return self._groups

    def of_process(self, groups: "list[int] | None" = None) -> "dict[str, Any]":
        """Return arguments of `subprocess.Popen` that run a program as the user; none if it does so anyway.

        `groups` are the supplementary groups, by default all that the user has.
        """
        if not self.switching:
            return {}
        return {"user": self.uid, "group": self.gid, "extra_groups": self.groups() if groups is None else groups}

    def open_scratch(self, directory: str, name: str, flags: int, mode: int = 0o600) -> int:
        """Open the regular file `name` below `directory` as the user; return a descriptor.

        `name` is relative, without ``..``. No component of it may be a symbolic link: OSError ELOOP, or
        ENOTDIR for a link in a directory's place. Anything but a regular file (a FIFO, a device, a socket) is
        refused with EPERM, a directory with EISDIR, a bad name with EINVAL; every other OSError is the kernel's
        own. The descriptor is close-on-exec.

        Raises `MachineFault` if this machine lacks resources, or EXECUTE fails or hangs as well
        (`vmgahp.host.execute`): an OSError is always caused by the job's names, files or actions.
        """
        return self._in_scratch(directory, name, system_calls.open_beneath, flags, mode)

    def read_scratch(self, directory: str, name: str, most: int) -> bytes:
        """Read the first `most` bytes of the file `name` below `directory`. Raises as `open_scratch`."""
        with open(self.open_scratch(directory, name, os.O_RDONLY), "rb") as file:
            try:
                return file.read(most)
            except OSError as error:
                self._require_well(error, directory, name)
                raise

    def write_scratch(self, directory: str, name: str, data: bytes, mode: int = 0o600) -> None:
        """Replace the file `name` below `directory` by one with `data`, all or nothing, as the user.

        Raises as `open_scratch`; an existing `name`, even a symbolic link, is replaced and not followed.
        """
        temporary = b".%s.%d.%d.tmp" % (_components(name)[-1][:200], os.getpid(), get_ident())
        self._in_scratch(directory, name, system_calls.write_beneath, temporary, data, mode)

    def make_directory(self, directory: str, name: str) -> None:
        """Make the directory `name` below `directory` as the user; an existing readable one counts as success.

        Raises as `open_scratch`.
        """
        self._in_scratch(directory, name, system_calls.make_directory_beneath)

    def rename_scratch(self, directory: str, old: str, new: str, replace: bool = True) -> None:
        """Rename a file below `directory` as the user; an existing file `new` is replaced.

        With `replace` false an existing one raises FileExistsError, though the user's own processes can create
        one at the same moment. Raises as `open_scratch`; a symbolic link is renamed itself.
        """
        self._in_scratch(directory, old, system_calls.rename_beneath, _components(new), replace)

    def link_scratch(self, directory: str, below: str, names: "Sequence[str]", others: bool = False) -> None:
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
        try:
            descriptor = self.open_scratch(directory, name, os.O_RDONLY)
        except (OSError, Fault):
            return 0
        try:
            return os.fstat(descriptor).st_blocks * 512
        finally:
            os.close(descriptor)

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

    def open_named(self, path: str, flags: int) -> int:
        """Open the regular file of a full path as the user, as `check_access` does; return a descriptor.

        Raises OSError, also if the file system hangs, and `MachineFault` if this machine lacks resources.
        """
        flags |= os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            return self.run(system_calls.open_named, _encode(path), flags)
        except OSError as error:
            from vmgahp.host import execute  # needed only after a failure

            execute.require_means(error, path, self)
            raise

    def read_named(self, path: str, most: int) -> bytes:
        """Read the first `most` bytes of the file of a full path, as `open_named`; the file system may hang."""
        try:
            copy = self.run(system_calls.read_named, _encode(path), most)
        except OSError as error:
            from vmgahp.host import execute  # needed only after a failure

            execute.require_means(error, path, self)
            raise
        with open(copy, "rb") as file:
            return file.read()

    def run(self, operation: "Operation", *arguments: object) -> int:
        """Run a function that makes system calls only, as the user. Raises OSError and `MachineFault`."""
        if not self.switching:
            return operation(*arguments)
        if (staying := self._child) is not None:
            return staying.run(operation, arguments)
        return child.run_as(self.uid, self.gid, self.groups(), operation, arguments)

    def at_hand(self) -> "AtHand":
        """Return a context in which one child process does all operations as the user."""
        return AtHand(self)

    def _in_scratch(self, directory: str, name: str, operation: "Operation", *arguments: object) -> int:
        try:
            return self.run(operation, _encode(directory), _components(name), *arguments)
        except OSError as error:
            self._require_well(error, directory, name)
            raise

    def _require_well(self, error: OSError, directory: str, name: str) -> None:
        """Raise `MachineFault` for an error that the job's names, files or actions did not cause."""
        if not is_perhaps_the_machines(error):
            return
        from vmgahp.host import execute

        problem = f"This machine has failed at {os.path.join(directory, name)}: {error.strerror}."
        fault = execute.blame(error, directory, self, problem)
        if isinstance(fault, MachineFault):
            raise fault from error


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


def _id(environ: "Mapping[str, str]", name: str) -> int:
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
