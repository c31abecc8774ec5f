"""Programs and files of the administrator's: a check that no other user can have written them.

`vmgahp.hooks.xml_script` and `vmgahp.hooks.policy` share this. Such programs run with the server's rights, mostly
root's.
"""

import errno
import os
from collections.abc import Sequence
from stat import S_ISDIR, S_ISREG, S_ISVTX

from vmgahp.errors import MachineFault


def require_trustworthy(path: str, setting: str, otherwise: str, *, executable: bool = True) -> None:
    """Make sure that only root, or the caller, can have written a file.

    This includes every directory and link on the way to it: a user who may write to one of them could
    replace the file. A directory with the sticky bit, such as ``/tmp``, protects its content. `setting`
    names the file, `otherwise` is the alternative to giving a valid one. Raises `MachineFault`.
    """
    what = "an executable" if executable else "a file"
    hint = f"give {setting} {what} that belongs to root, in directories that only root may write to"

    def refuse(problem: str) -> MachineFault:
        return MachineFault(f"{setting} = {path} {problem}.", f"{hint}; {otherwise}.")

    if not path.startswith("/"):
        raise refuse("is not an absolute path")
    trusted = {0, os.geteuid()}
    try:
        way = _way(path)
        if trouble := _trouble(way[:-1], trusted):
            raise refuse(f"is reached by {trouble}")
        file = os.lstat(way[-1])
        if not S_ISREG(file.st_mode):
            raise refuse("is not a regular file")
        if file.st_uid not in trusted:
            raise refuse(f"belongs to user id {file.st_uid}")
        if file.st_mode & 0o022:
            raise refuse(f"may be written to by others (mode {file.st_mode & 0o7777:04o})")
        mode = os.X_OK if executable else os.R_OK
        if not os.access(way[-1], mode, effective_ids=os.access in os.supports_effective_ids):
            raise refuse(f"may not be {'executed' if executable else 'read'} by this server")
    except OSError as error:
        raise refuse(f"cannot be used: {error.strerror}") from error


def trouble_with_directory(path: str) -> str:
    """Name other users who can change a directory (`require_trustworthy`); "" for none. Raises OSError."""
    return _trouble(_way(os.path.join(os.getcwd(), path)), {0, os.geteuid()})


def changeable_by_others(path: str) -> str:
    """Return the first part of a path that others than root could change; "" for none. Raises OSError."""
    way = _way(path)
    for passed in way:
        if _trouble([passed], {0}):
            return passed
    return way[-1] if os.lstat(way[-1]).st_mode & 0o022 else ""


def _trouble(way: Sequence[str], trusted: set[int]) -> str:
    for passed in way:
        there = os.lstat(passed)
        if there.st_uid not in trusted:
            return f"{passed}, which belongs to user id {there.st_uid}"
        if S_ISDIR(there.st_mode) and there.st_mode & 0o022 and not there.st_mode & S_ISVTX:
            return f"{passed}, to which others may write"
    return ""


def _way(path: str) -> list[str]:
    """List every directory and link that the kernel passes on its way to `path`, and finally the file itself."""
    passed = ["/"]
    here = "/"
    links = 0
    names = path.split("/")
    while names:
        name = names.pop(0)
        if name in ("", "."):
            continue
        if name == "..":
            here = os.path.dirname(here)
            continue
        there = os.path.join(here, name)
        passed.append(there)
        try:
            target = os.readlink(there)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: it is not a link
                raise
            here = there
            continue
        links += 1
        if links > 40:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        names[:0] = target.split("/")
        if target.startswith("/"):
            here = "/"
    return [*passed, here]
