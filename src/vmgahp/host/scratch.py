"""Operations on the job's scratch directory as a whole."""

import errno
import os
from collections.abc import Callable

from vmgahp.errors import Fault
from vmgahp.host import job_user
from vmgahp.host.job_user import Identity
from vmgahp.host.run import run

DEADLINE = 60.0
"""The timeout for emptying it, in seconds."""
LOOKING = 10.0
"""The timeout for finding its files, in seconds."""


def empty(directory: str, identity: Identity, log: Callable[[str], None]) -> None:
    """Empty the directory for vm_no_output_vm, so that no file is transferred back. A failure is logged."""
    try:
        _done(["find", directory, "-xdev", "-mindepth", "1", "-delete"], identity, DEADLINE)
    except OSError as error:
        log(f"vm_no_output_vm: could not empty {directory}: {error.strerror}")


def forget(identity: Identity, directory: str, log: Callable[[str], None], *names: str) -> None:
    """Remove files that are no longer needed, if they exist. A failure is logged."""
    for name in names:
        try:
            identity.unlink_scratch(directory, name)
        except (OSError, Fault) as error:
            log(f"could not remove {name} from {directory}: {error}")


def make_directory(directory: str, name: str, identity: Identity) -> None:
    """Make sure that the scratch `directory` has a directory `name` that its user can read. Raises `Fault`."""
    try:
        identity.make_directory(directory, name)
    except OSError as error:
        problem = f"The directory {name} of the job's scratch directory cannot be made or read ({error.strerror})."
        raise job_user.blame(error, directory, identity, problem) from error


def files_below(directory: str, name: str, identity: Identity, most: int) -> list[str]:
    """List the regular files in and below the directory `name` of the scratch directory, by paths relative to it.

    They are sorted, at most `most`, and found as the job's user on one file system, without following links. Raises
    OSError if the search fails or takes too long.
    """
    find = 'find -P "$1" -xdev -type f -printf "%P\\0" | head -z -n "$2"'
    found = _done(["sh", "-c", find, "sh", os.path.join(directory, name), str(most)], identity, LOOKING)
    return sorted(os.fsdecode(path) for path in found.split(b"\0") if path)


def _done(command: list[str], identity: Identity, seconds: float) -> bytes:
    """Run a command as the job's user and return its output. Raises OSError if it fails, or writes to stderr."""
    done = run(command, deadline=seconds, user=identity, groups=[])
    if done.status is None:
        raise OSError(errno.ETIMEDOUT, f"it was not done within {seconds:g} s")
    if done.status != 0 or done.err:
        raise OSError(errno.EIO, " ".join(done.complaints)[-200:] or f"it ended with {done.status}")
    return done.out
