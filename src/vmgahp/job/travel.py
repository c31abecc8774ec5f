"""What travels with a job's outputs, where HTCondor is to send these alone (``vm_outputs/``).

HTCondor sends no new directory home unless it is named, and then nothing but what is named; what is named and is not
there holds the job. So one directory has everything: at the end the outputs and what this server has written of the
VM, and for a checkpoint all that a restart needs. The latter are links, as long as the checkpoint stands.
"""

import os
from _collections_abc import Callable

from vmgahp import errors
from vmgahp.host import execute, scratch
from vmgahp.host.job_user import Identity
from vmgahp.job.ad import JobAd

DIRECTORY = "vm_outputs"
"""With a slash after it in the submit file: what is in it comes home, and not the directory."""

AT_END = (
    *("vm_exit.json", "vm_console.log", "vm_metrics.jsonl", "vm_error.txt", "vm_policy.txt"),
    *("vm_stdout", "vm_stderr", "vm_screenshot.png", "vm_screenshot.ppm"),
)
"""What goes home with the outputs, as far as it is there."""

ON_THEIR_OWN = ("_condor_stdout", "_condor_stderr")
"""What HTCondor sends in any case."""
MADE_ANEW = ("vm_cidata.iso", "vm_data_files.iso", "vm_run.tar")
"""Drives that every start makes."""


def left_behind(ad: JobAd) -> tuple[str, ...] | None:
    """The files that need not travel with a checkpoint, since every restart gets them anew; None for another job.

    The disks that a job brings do, for they change.
    """
    named = [name.strip().rstrip("/") for name in (ad.string("TransferOutput") or "").split(",")]
    if DIRECTORY not in named:
        return None
    if (disks := ad.string("VMPARAM_vm_Disk")) is None:
        return (*ON_THEIR_OWN, *MADE_ANEW)
    changing = {disk.strip().partition(":")[0] for disk in disks.split(",")}
    brought = {os.path.basename(name.strip()) for name in (ad.string("TransferInput") or "").split(",")}
    return (*ON_THEIR_OWN, *MADE_ANEW, *sorted(brought - changing - {""}))


class Luggage:
    """What the directory of a VM's outputs has beside them."""

    def __init__(self, directory: str, left: tuple[str, ...], identity: Identity, log: Callable[[str], None]) -> None:
        """In the scratch `directory`, in which there is one of outputs from now on. Raises `errors.Fault`."""
        self._scratch = directory
        self._left = left
        self._identity = identity
        self._log = log
        scratch.make_directory(directory, DIRECTORY, identity)

    def at_end(self) -> None:
        """The VM is over. What fails is logged."""
        try:
            self._identity.link_scratch(self._scratch, DIRECTORY, AT_END)
        except (OSError, errors.Fault) as error:
            self._log(f"what this server has written of the VM does not go home: {error}")

    def with_checkpoint(self) -> None:
        """A checkpoint was written. Raises `errors.Fault`."""
        try:
            self._identity.link_scratch(self._scratch, DIRECTORY, self._left, others=True)
        except OSError as error:
            problem = f"The checkpoint cannot be linked into {DIRECTORY}, which HTCondor sends ({error.strerror})."
            raise execute.blame(error, self._scratch, self._identity, problem) from error

    def without_checkpoint(self) -> None:
        """It is none any more. What fails is logged."""
        try:
            self._identity.unlink_links_scratch(self._scratch, DIRECTORY)
        except (OSError, errors.Fault) as error:
            self._log(f"{DIRECTORY} still has links to a checkpoint: {error}")
