"""The names of files in a scratch directory: which ones are reserved, and which are transferred.

A reserved name belongs to HTCondor or this daemon. Such a file is neither an input nor an output of the job: guests
need not see it, and must not replace it.

HTCondor transfers a new directory only if it is named, and then only named files; a named file that is missing holds
the job. So one directory, ``vm_outputs/``, can have everything: at the end the outputs and this server's files about
the VM, and for a checkpoint all that a restart needs. The latter are links, for as long as the checkpoint is valid.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from vmgahp import errors
from vmgahp.host import job_user, scratch
from vmgahp.host.job_user import Identity
from vmgahp.job.ad import JobAd

_BEGINNINGS = (
    *(".chirp", ".condor", ".docker", ".job", ".machine.ad", ".update.ad", "_condor_", "condor_exec", "docker_std"),
    ".vm_",
)
"""The prefixes of HTCondor's files, and of our temporary files."""

_OURS = frozenset(
    (
        "vm_access.json",
        "vm_catalog.json",
        "vm_checkpoint.json",
        "vm_checkpoint.mem",
        "vm_choice.json",
        "vm_choice.vmx",
        "vm_cidata.iso",
        "vm_console.log",
        "vm_data_files.iso",
        "vm_error.txt",
        "vm_exit.json",
        "vm_metrics.jsonl",
        "vm_outputs",
        "vm_outputs.tar",
        "vm_policy.txt",
        "vm_run.json",
        "vm_run.tar",
        "vm_run_state.txt",
        "vm_screenshot.png",
        "vm_screenshot.ppm",
        "vm_stderr",
        "vm_stdout",
        "vm_suspend.mem",
        "vm_vnc.json",
    )
)


def is_reserved(name: str) -> bool:
    """Return True if a name at the top of a scratch directory, or the first part of a path, is not the job's."""
    top = name.partition("/")[0]
    ours = ".".join(top.split(".")[:2])  # vm_checkpoint.json.refused-1 counts as vm_checkpoint.json
    return ours in _OURS or top.startswith(_BEGINNINGS) or top == "lost+found"


DIRECTORY = "vm_outputs"
"""The directory of the outputs, with a slash in the submit file, so that HTCondor transfers its content only."""

AT_END = (
    *("vm_exit.json", "vm_console.log", "vm_metrics.jsonl", "vm_error.txt", "vm_policy.txt"),
    *("vm_stdout", "vm_stderr", "vm_screenshot.png", "vm_screenshot.ppm"),
)
"""The files that are transferred with the outputs, if they exist."""

ON_THEIR_OWN = ("_condor_stdout", "_condor_stderr")
"""The files that HTCondor always transfers."""
MADE_ANEW = ("vm_cidata.iso", "vm_data_files.iso", "vm_run.tar")
"""The drives that are made at every start."""


def left_behind(ad: JobAd) -> tuple[str, ...] | None:
    """Return the files that a checkpoint need not have, since every restart gets them again; None for other jobs.

    The job's own disks must be in the checkpoint, because they change.
    """
    named = [name.strip().rstrip("/") for name in (ad.string("TransferOutput") or "").split(",")]
    if DIRECTORY not in named:
        return None
    if (disks := ad.string("VMPARAM_vm_Disk")) is None:
        return (*ON_THEIR_OWN, *MADE_ANEW)
    changing = {disk.strip().partition(":")[0] for disk in disks.split(",")}
    brought = {os.path.basename(name.strip()) for name in (ad.string("TransferInput") or "").split(",")}
    return (*ON_THEIR_OWN, *MADE_ANEW, *sorted(brought - changing - {""}))


class OutputDirectory:
    """The other files in the directory of a VM's outputs."""

    def __init__(self, directory: str, left: tuple[str, ...], identity: Identity, log: Callable[[str], None]) -> None:
        """Make the directory of outputs in the scratch `directory`. Raises `errors.Fault`."""
        self._scratch = directory
        self._left = left
        self._identity = identity
        self._log = log
        scratch.make_directory(directory, DIRECTORY, identity)

    def at_end(self) -> None:
        """Link the server's files about a VM that has ended. Errors are logged."""
        try:
            self._identity.link_scratch(self._scratch, DIRECTORY, AT_END)
        except (OSError, errors.Fault) as error:
            self._log(f"what this server has written of the VM does not go home: {error}")

    def with_checkpoint(self) -> None:
        """Link the files of a checkpoint that was written. Raises `errors.Fault`."""
        try:
            self._identity.link_scratch(self._scratch, DIRECTORY, self._left, others=True)
        except OSError as error:
            problem = f"The checkpoint cannot be linked into {DIRECTORY}, which HTCondor sends ({error.strerror})."
            raise job_user.blame(error, self._scratch, self._identity, problem) from error

    def without_checkpoint(self) -> None:
        """Remove the links of a checkpoint that is no longer valid. Errors are logged."""
        try:
            self._identity.unlink_links_scratch(self._scratch, DIRECTORY)
        except (OSError, errors.Fault) as error:
            self._log(f"{DIRECTORY} still has links to a checkpoint: {error}")
