"""The ports by which a guest reports the progress of its program, and sends its outputs."""

from __future__ import annotations

import os

from vmgahp.drivers.base import Logger
from vmgahp.drivers.resources import Resources
from vmgahp.host import execute
from vmgahp.host.job_user import Identity
from vmgahp.host.line_port import LinePort
from vmgahp.host.runtime_dir import runtime_dir
from vmgahp.host.serial_capture import ConsoleCapture
from vmgahp.job.run import Run

CONTROL, OUT, ERR, OUTPUTS = "run", "out", "err", "outputs"
PREFIX = "org.vmgahp."
"""The prefix of the ports' names in the guest."""
OUTPUTS_FILE = "vm_outputs.tar"
"""The file with the outputs received so far: it travels with a checkpoint."""

MOST_PRINTED = 1 << 30
"""The most bytes of the program's output, and of its errors."""


def make(
    run: Run, directory: str, most: int, owner: tuple[int, int], identity: Identity, log: Logger, resources: Resources
) -> None:
    """Listen on all ports, for the QEMU of `owner`; `most` is the size limit of the outputs. Raises `errors.Fault`."""

    def opened(name: str) -> int:
        try:
            return identity.open_scratch(directory, name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            raise execute.unwritable(name, error, directory, identity) from error

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
