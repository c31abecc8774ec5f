"""The outputs of a guest's program: the archive that it has sent, unpacked and sent back to the user.

They are unpacked beside that directory and replace it at the end: until then it holds the files of a checkpoint, and
outputs there would become files of the scratch directory at a restart, where they replace inputs.
"""

from __future__ import annotations

import os

from vmgahp import errors
from vmgahp.drivers.base import Logger
from vmgahp.drivers.libvirt.run_ports import OUTPUTS_FILE
from vmgahp.host import execute
from vmgahp.host.job_user import Identity
from vmgahp.job import unpack
from vmgahp.job.travel import DIRECTORY

UNPACKED = ".vm_outputs"
"""The directory in which they are unpacked: HTCondor sends no directory that is not named."""


class RunOutputs:
    """The outputs of one guest."""

    def __init__(self, directory: str, identity: Identity, log: Logger) -> None:
        self._directory = directory
        self._identity = identity
        self._log = log
        self.are_unpacked = False
        self.problem = ""
        """The reason why the outputs cannot be unpacked completely; empty if they can."""

    def unpack(self, most: int) -> None:
        """Unpack the archive, with `most` bytes at most. Raises nothing."""
        try:
            self._identity.make_directory(self._directory, UNPACKED)
            most = min(most, execute.free(self._directory, self._identity))
            stream = self._identity.open_scratch(self._directory, OUTPUTS_FILE, os.O_RDONLY)
            try:
                done = unpack.unpack(stream, self._directory, UNPACKED, most, self._identity)
            finally:
                os.close(stream)
        except (OSError, errors.Fault) as error:
            done = unpack.Unpacked(0, 0, (), error.problem if isinstance(error, errors.Fault) else str(error))
        for left_out in done.left_out:
            self._log(f"of the outputs is left out {left_out}")
        self.are_unpacked, self.problem = True, done.problem
        self._log(
            f"the outputs are {done.entries} files with {done.size} bytes{': ' * bool(done.problem)}{done.problem}"
        )

    def bring_home(self, *, as_files: bool) -> None:
        """Put the outputs into the directory that is sent back, as files or else as the archive. Errors are logged."""
        if not as_files:
            return
        moves = [(UNPACKED, DIRECTORY)] if self.are_unpacked else []
        moves += [(OUTPUTS_FILE, f"{DIRECTORY}/{OUTPUTS_FILE}")] if self.problem else []
        for old, new in moves:
            try:
                self._identity.rename_scratch(self._directory, old, new)
            except (OSError, errors.Fault) as error:
                self._log(f"{old} does not go home: {error}")
