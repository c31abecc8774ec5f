"""Small things done to the job's scratch directory as a whole."""

from vmgahp.errors import MachineFault

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from vmgahp.identity import Identity

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
