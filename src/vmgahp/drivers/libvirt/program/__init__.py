"""The program of a job in its guest: the ports by which it reports, and its outputs.

Outputs are unpacked beside their directory and replace it at the end: until then it holds the files of a checkpoint,
and outputs there would become files of the scratch directory at a restart, where they replace inputs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.drivers.base import Logger
from vmgahp.drivers.libvirt.start.describe import CONTROL, ERR, OUT, OUTPUTS
from vmgahp.drivers.libvirt.start.disks import kept_free, limit_of
from vmgahp.drivers.resources import Resources
from vmgahp.host import job_user
from vmgahp.host.job_user import Identity
from vmgahp.host.runtime_dir import runtime_dir
from vmgahp.host.serial_capture import ConsoleCapture, LinePort
from vmgahp.job.archive import ENTRY, Allowed, Unpacked, unpack
from vmgahp.job.scratch_files import DIRECTORY
from vmgahp.job.spec import JobSpec

UNPACKED = ".vm_outputs"
"""The directory in which they are unpacked: HTCondor sends no directory that is not named."""
INODES_KEPT = 64
"""The part of EXECUTE's inodes, one in so many, that is left for other jobs."""


class RunOutputs:
    """The outputs of one guest."""

    def __init__(self, directory: str, names: Sequence[str], kept: int, identity: Identity, log: Logger) -> None:
        """Prepare for the outputs `names`, with `kept` bytes left free for other jobs in EXECUTE's file system."""
        self.directory = directory
        self._names = names
        self._kept = kept
        self.identity = identity
        self._log = log
        self.are_unpacked = False
        self.problem = ""
        """The reason why the outputs cannot be unpacked completely; empty if they can."""

    def unpack(self, most: int) -> None:
        """Unpack the archive; it and its files may take `most` bytes together. Raises nothing."""
        try:
            allowed = self._allowed(most - self.identity.occupied_scratch(self.directory, OUTPUTS_FILE))
            stream = self.identity.open_scratch(self.directory, OUTPUTS_FILE, os.O_RDONLY)
            try:
                done = unpack(stream, self.directory, UNPACKED, allowed, self.identity)
            finally:
                os.close(stream)
        except (OSError, errors.Fault) as error:
            done = Unpacked(0, 0, (), error.problem if isinstance(error, errors.Fault) else str(error))
        for left_out in done.left_out:
            self._log(f"of the outputs is left out {left_out}")
        self.are_unpacked, self.problem = True, done.problem
        self._log(
            f"the outputs are {done.entries} files with {done.size} bytes{': ' * bool(done.problem)}{done.problem}"
        )

    def _allowed(self, most: int) -> Allowed:
        """Return the room for outputs in EXECUTE's file system, at most `most` bytes. Raises `Fault` and OSError."""
        left = job_user.free_bytes(self.directory, self.identity) - self._kept
        room = os.statvfs(self.directory)
        inodes = room.f_favail - (room.f_files // INODES_KEPT if self._kept else 0)
        if not room.f_files:  # a file system without a fixed number of them
            inodes = left // ENTRY
        return Allowed(self._names, max(min(most, left), 0), max(inodes, 0))

    def bring_home(self) -> None:
        """Put the outputs into the directory that is sent back, as files or else as the archive. Errors are logged."""
        moves = [(UNPACKED, DIRECTORY)] if self.are_unpacked else []
        moves += [(OUTPUTS_FILE, f"{DIRECTORY}/{OUTPUTS_FILE}")] if self.problem else []
        for old, new in moves:
            try:
                self.identity.rename_scratch(self.directory, old, new)
            except (OSError, errors.Fault) as error:
                self._log(f"{old} does not go home: {error}")


# Ports


OUTPUTS_FILE = "vm_outputs.tar"
"""The file with the outputs received so far: it travels with a checkpoint."""
MOST_PRINTED = 1 << 30
"""The most bytes of the program's output, and of its errors."""


def most_outputs(spec: JobSpec, settings: Settings, identity: Identity) -> int:
    """Return the most bytes that packed outputs may have: the job's limit or the free space. Raises `errors.Fault`."""
    left = max(job_user.free_bytes(spec.working_dir, identity) - kept_free(settings, spec.working_dir), 0)
    left += identity.occupied_scratch(spec.working_dir, OUTPUTS_FILE)  # of a checkpoint, or soon emptied
    return min(limit_of(spec, settings) or left, left)


def listen(
    spec: JobSpec, settings: Settings, owner: tuple[int, int], identity: Identity, log: Logger, resources: Resources
) -> None:
    """Listen on all ports of a job with a program, for the QEMU of `owner`. Raises `errors.Fault`."""
    run, directory = spec.devices.run, spec.working_dir
    assert run is not None
    most = most_outputs(spec, settings, identity)

    def opened(name: str) -> int:
        try:
            return identity.open_scratch(directory, name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            raise job_user.unwritable(name, error, directory, identity) from error

    ports, room = resources.run_ports, runtime_dir()
    ports[CONTROL] = LinePort(os.path.join(room, CONTROL), log, owner=owner)
    for name, file, limit in (
        (OUT, run.stdout, MOST_PRINTED),
        (ERR, run.stderr, MOST_PRINTED),
        (OUTPUTS, OUTPUTS_FILE, most),
    ):
        ports[name] = ConsoleCapture(os.path.join(room, name), lambda file=file: opened(file), limit, log, owner=owner)  # type: ignore[misc]


def begin_afresh(resources: Resources) -> None:
    """Empty the files of an earlier run of the job, since this one does not continue it. Raises OSError."""
    for name in (OUT, ERR, OUTPUTS):
        if name in resources.run_ports:
            resources.run_ports[name].empty()
