"""Small things done to the job's scratch directory as a whole."""

import errno
import os
from _collections_abc import Callable

from vmgahp.errors import Fault
from vmgahp.host import execute
from vmgahp.host.job_user import Identity
from vmgahp.host.run import run

DEADLINE = 60.0
"""Seconds for emptying it."""
LOOKING = 10.0
"""Seconds for finding its files."""


def empty(directory: str, identity: Identity, log: Callable[[str], None]) -> None:
    """vm_no_output_vm: leave nothing in the directory that would be sent back. A failure is logged."""
    try:
        _done(["find", directory, "-xdev", "-mindepth", "1", "-delete"], identity, DEADLINE)
    except OSError as error:
        log(f"vm_no_output_vm: could not empty {directory}: {error.strerror}")


def forget(identity: Identity, directory: str, log: Callable[[str], None], *names: str) -> None:
    """Remove files that are of no more use, if they are there. A failure is logged."""
    for name in names:
        try:
            identity.unlink_scratch(directory, name)
        except (OSError, Fault) as error:
            log(f"could not remove {name} from {directory}: {error}")


def make_directory(directory: str, name: str, identity: Identity) -> None:
    """See that the scratch `directory` has a directory `name` that its user can read. Raises `Fault`."""
    try:
        identity.make_directory(directory, name)
    except OSError as error:
        problem = f"The directory {name} of the job's scratch directory cannot be made or read ({error.strerror})."
        raise execute.blame(error, directory, identity, problem) from error


def files_below(directory: str, name: str, identity: Identity, most: int) -> list[str]:
    """The regular files in the directory `name` of the scratch directory and all below, by their paths from it on.

    Sorted, of one file system, found as the job's user, and no link is followed; `most` of them where there are more.
    Raises OSError where that cannot be found out, or not in time.
    """
    find = 'find -P "$1" -xdev -type f -printf "%P\\0" | head -z -n "$2"'
    found = _done(["sh", "-c", find, "sh", os.path.join(directory, name), str(most)], identity, LOOKING)
    return sorted(os.fsdecode(path) for path in found.split(b"\0") if path)


def _done(command: list[str], identity: Identity, seconds: float) -> bytes:
    """What a command prints that runs as the job's user. Raises OSError where it fails, or complains."""
    done = run(command, deadline=seconds, user=identity, groups=[])
    if done.status is None:
        raise OSError(errno.ETIMEDOUT, f"it was not done within {seconds:g} s")
    if done.status != 0 or done.err:
        raise OSError(errno.EIO, " ".join(done.complaints)[-200:] or f"it ended with {done.status}")
    return done.out
