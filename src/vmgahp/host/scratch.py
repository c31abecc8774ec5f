"""Small things done to the job's scratch directory as a whole."""

import os

from vmgahp.errors import MachineFault

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from vmgahp.host.job_user import Identity

DEADLINE = 60.0
"""Seconds for emptying it."""
MAKING = 10.0
"""Seconds for making a directory in it."""


def empty(directory: str, identity: "Identity", log: "Callable[[str], None]") -> None:
    """vm_no_output_vm: leave nothing in the directory that would be sent home. A failure is logged."""
    import subprocess

    try:
        subprocess.run(
            ["find", directory, "-xdev", "-mindepth", "1", "-delete"],
            cwd="/",
            timeout=DEADLINE,
            check=True,
            capture_output=True,
            **identity.of_process(groups=[]),
        )
    except (OSError, subprocess.SubprocessError) as error:
        log(f"vm_no_output_vm: could not empty {directory}: {error}")


def make_directory(path: str, identity: "Identity") -> None:
    """Make a directory, as the job's user, if it is not there; an empty path is none. Raises `MachineFault`."""
    if not path:
        return
    import subprocess

    try:
        subprocess.run(
            ["mkdir", "-p", "--", path],
            cwd="/",
            timeout=MAKING,
            check=True,
            capture_output=True,
            **identity.of_process(groups=[]),
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise MachineFault(
            f"{path} cannot be made as uid {identity.uid}: {error}.",
            "see that the job's user can write to its scratch directory, and that no file has this name.",
        ) from error


def files_beneath(directory: str, name: str, identity: "Identity", most: int) -> list[str]:
    """The regular files in the directory `name` of the scratch directory and all below, by their paths from it on.

    Sorted, of one file system, found as the job's user, and no link is followed; `most` of them where there are more.
    Raises OSError where that cannot be found out, or not in time.
    """
    import errno
    import subprocess

    find = 'timeout "$1" find -P "$2" -xdev -type f -printf "%P\\0" | head -z -n "$3"'
    try:
        found = subprocess.run(
            ["sh", "-c", find, "sh", f"{MAKING:g}", os.path.join(directory, name), str(most)],
            cwd="/",
            timeout=2 * MAKING,
            check=True,
            capture_output=True,
            **identity.of_process(groups=[]),
        )
    except subprocess.SubprocessError as error:
        raise OSError(errno.ETIMEDOUT, "its files cannot be listed in time", name) from error
    if found.stderr:
        raise OSError(errno.EIO, found.stderr.decode("utf-8", "replace").strip()[-200:], name)
    return sorted(os.fsdecode(path) for path in found.stdout.split(b"\0") if path)
