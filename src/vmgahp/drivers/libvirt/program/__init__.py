"""The program of a job in its guest: the ports by which it reports, and the files that they fill."""

import os

from vmgahp.config import Settings
from vmgahp.drivers.base import Logger
from vmgahp.drivers.libvirt.start.describe import CONTROL, ERR, OUT, OUTPUTS
from vmgahp.drivers.libvirt.start.disks import kept_free, limit_of
from vmgahp.drivers.resources import Resources
from vmgahp.host import job_user
from vmgahp.host.job_user import Identity
from vmgahp.host.runtime_dir import runtime_dir
from vmgahp.host.serial_capture import ConsoleCapture, LinePort
from vmgahp.job.spec import JobSpec

OUTPUTS_FILE = "vm_outputs.tar"
"""The file with the outputs received so far: it travels with a checkpoint."""
MOST_PRINTED = 1 << 30
"""The most bytes of the program's output, and of its errors, if the job may have so much on disk."""


def most_outputs(spec: JobSpec, settings: Settings, identity: Identity) -> int:
    """Return the most bytes that a port's file may have: the job's limit or the free space. Raises `errors.Fault`."""
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
        (OUT, run.stdout, min(MOST_PRINTED, most)),
        (ERR, run.stderr, min(MOST_PRINTED, most)),
        (OUTPUTS, OUTPUTS_FILE, most),
    ):
        ports[name] = ConsoleCapture(os.path.join(room, name), lambda file=file: opened(file), limit, log, owner=owner)  # type: ignore[misc]


def begin_afresh(resources: Resources) -> None:
    """Empty the files of an earlier run of the job, since this one does not continue it. Raises OSError."""
    for name in (OUT, ERR, OUTPUTS):
        if name in resources.run_ports:
            resources.run_ports[name].empty()
