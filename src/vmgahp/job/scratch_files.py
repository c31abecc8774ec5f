"""The table of the files in a scratch directory: writers, reserved names, ways home.

A reserved name belongs to HTCondor or this daemon. Such a file is neither an input nor an output of the job: guests
need not see it, and must not replace it.

HTCondor transfers a new directory only if it is named, and then only named files; a named file that is missing holds
the job. So one directory, ``vm_outputs/``, can have everything: at the end the outputs and this server's files about
the VM, and for a checkpoint all that a restart needs. The latter are links, for as long as the checkpoint is valid.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from vmgahp import errors
from vmgahp.host import job_user
from vmgahp.host.job_user import Identity
from vmgahp.host.run import run
from vmgahp.job.ad import JobAd

_BEGINNINGS = (
    *(".chirp", ".condor", ".docker", ".job", ".machine.ad", ".update.ad", "_condor_", "condor_exec", "docker_std"),
    ".vm_",
)
"""The prefixes of HTCondor's files, and of our temporary files."""


class Travel(Enum):
    """The ways of a file whose job names only ``vm_outputs/`` in `transfer_output_files`."""

    HOME = "back to the submit machine, and with a checkpoint"
    CHECKPOINT = "with a checkpoint"
    NOWHERE = "not transferred: each start makes it anew"


class ScratchFile(NamedTuple):
    """A file that this daemon writes into a scratch directory, as the job's user."""

    name: str
    content: str
    """A phrase in Markdown for docs/reference/files.md, which is made from `FILES`; its links are relative to it."""
    writer: str
    """The module below ``vmgahp`` that writes it."""
    travel: Travel


_HOW_IT_ENDED = "../how-to/exit-codes.md"
_RUN = "`VMPARAM_vm_Run`"

FILES = tuple(
    ScratchFile(name, content, writer, travel)
    for travel, rows in {
        Travel.HOME: (
            ("vm_exit.json", f"[how the VM ended]({_HOW_IT_ENDED})", "drivers/resources"),
            ("vm_console.log", "the guest's serial console, at most `VM_CONSOLE_LOG_MAX`", "host/serial_capture"),
            ("vm_metrics.jsonl", "[what the VM used](metrics.md)", "metrics/file"),
            ("vm_error.txt", "why a START failed and what to do; removed by the next START. A held job transfers "
             "nothing, so that it stays on the node", "daemon/server"),
            ("vm_policy.txt", "the changes of `VM_POLICY`, a diff without passwords", "drivers/libvirt/start/hooks"),
            ("vm_stdout", f"the output of {_RUN}, if the job names no file for it", "drivers/libvirt/program/monitor"),
            ("vm_stderr", "its error output, likewise", "drivers/libvirt/program/monitor"),
            ("vm_screenshot.png", f"the [screen of a failed guest]({_HOW_IT_ENDED}#a-picture-of-a-failure)",
             "drivers/libvirt/life/guest"),
            ("vm_screenshot.ppm", "the same, where libvirt makes no PNG", "drivers/libvirt/life/guest"),
        ),
        Travel.CHECKPOINT: (
            ("vm_checkpoint.json", "the manifest of a [checkpoint](../explanation/checkpoints.md); "
             "`….restarting` while it is restored, `….refused-<n>` if it could not be used", "checkpoint/store"),
            ("vm_checkpoint.mem", "the memory of a checkpoint under libvirt", "drivers/libvirt/life/save"),
            ("vm_suspend.mem", "the memory of a suspended VM; removed when it resumes or ends",
             "drivers/libvirt/life/save"),
            ("vm_catalog.json", "the [catalog image](../how-to/images.md) of each `<device>-<name>.qcow2`, the job's "
             "overlay of it", "drivers/libvirt/start/disks"),
            ("vm_choice.json", "the VM type that was chosen for `vm_type = any`", "drivers/any"),
            ("vm_choice.vmx", "the `.vmx` that was made for it", "drivers/any"),
            ("vm_run.json", f"the inputs of {_RUN}; removed at its end", "drivers/libvirt/program/drive"),
            ("vm_run_state.txt", "the progress of the program; removed at its end", "drivers/libvirt/program/monitor"),
            ("vm_outputs.tar", "its outputs as the guest sends them, unpacked into `vm_outputs` (first `.vm_outputs`); "
             "kept if they cannot be unpacked, or if `transfer_output_files` does not name `vm_outputs/`",
             "drivers/libvirt/program/monitor"),
        ),
        Travel.NOWHERE: (
            ("vm_cidata.iso", "the drive with cloud-init's data", "job/cloud_init"),
            ("vm_data_files.iso", "the drive with the files of `VMPARAM_vm_Data_Files`", "job/disks"),
            ("vm_run.tar", f"the drive with the program of {_RUN} and its inputs", "drivers/libvirt/program/drive"),
            ("vm_vnc.json", "the display's host, port and one-time password; mode 0600", "drivers/libvirt/driver"),
            ("vm_access.json", "the [ports that lead to the guest](../how-to/getting-in.md); mode 0600",
             "drivers/libvirt/start/forwarding"),
        ),
    }.items()
    for name, content, writer in rows
)  # fmt: skip
"""Every file of this daemon's by its fixed name."""

DIRECTORY = "vm_outputs"
"""The directory of the outputs, with a slash in the submit file, so that HTCondor transfers its content only."""

_OURS = {DIRECTORY, *(file.name for file in FILES)}


def is_reserved(name: str) -> bool:
    """Return True if a name at the top of a scratch directory, or the first part of a path, is not the job's."""
    top = name.partition("/")[0]
    ours = ".".join(top.split(".")[:2])  # vm_checkpoint.json.refused-1 counts as vm_checkpoint.json
    return ours in _OURS or top.startswith(_BEGINNINGS) or top == "lost+found"


AT_END = tuple(file.name for file in FILES if file.travel is Travel.HOME)
"""The files that are transferred with the outputs, if they exist."""
ON_THEIR_OWN = ("_condor_stdout", "_condor_stderr")
"""The files that HTCondor always transfers."""
MADE_ANEW = tuple(file.name for file in FILES if file.travel is Travel.NOWHERE)


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
        job_user.make_directory(directory, DIRECTORY, identity)

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


# Operations on the whole directory


EMPTYING, LOOKING = 60.0, 10.0
"""The timeouts for emptying it, and for finding its files, in seconds."""


def empty_directory(directory: str, identity: Identity, log: Callable[[str], None]) -> None:
    """Empty the directory for vm_no_output_vm, so that no file is transferred back. A failure is logged."""
    try:
        _done(["find", directory, "-xdev", "-mindepth", "1", "-delete"], identity, EMPTYING)
    except OSError as error:
        log(f"vm_no_output_vm: could not empty {directory}: {error.strerror}")


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
