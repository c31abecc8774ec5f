"""The drive by which a guest gets the program to run, and the program its inputs.

It is a tar archive on a raw disk, which any guest with a shell and tar can read; the guest identifies it by its first
bytes. It is made at every start and removed with the VM. A VM that is restored finds it unchanged: if a job names no
inputs, the first start records the files that had come with the job, since files made later are not inputs.
"""

import errno
import re
import shlex
from collections.abc import Iterable
from typing import NamedTuple

from vmgahp import errors
from vmgahp.checkpoint import manifest, store
from vmgahp.drivers.libvirt.start.disks import names_in_scratch
from vmgahp.errors import JobFault
from vmgahp.host import job_user
from vmgahp.host.job_user import Identity
from vmgahp.job import archive
from vmgahp.job.attributes import OPTION_PREFIX as PREFIX
from vmgahp.job.attributes import RUN, RUN_INPUTS
from vmgahp.job.cloud_init import host_name
from vmgahp.job.run import DRIVE_FILE, RECORD, Run, guest_file
from vmgahp.job.spec import JobSpec

FORMAT = 1
VERSION = b"1\n"
"""The format version of `vmgahp-run/`."""
_NAME = re.compile(r"[^/\0\ud800-\udc7f\udd00-\udfff]{1,255}", re.DOTALL)  # os.fsencode has no bytes for those


class _Record(NamedTuple):
    """The content of `RECORD`."""

    job: str
    names: tuple[str, ...]  # the names in the scratch directory that came with the job


def make(spec: JobSpec, run: Run, most: int, identity: Identity) -> list[str]:
    """Make the drive, of at most `most` bytes, and return the new files. Raises `errors.Fault`."""
    directory = spec.vm.working_dir
    used = _used(spec)
    for name in (run.stdout, run.stderr):
        if name in used:
            problem = f"what the program prints cannot be written to {name[:100]!a}, which is there for the VM"
            raise JobFault(errors.MISMATCHED, f"{PREFIX}{RUN}: {problem}.", "give Out and Err names of their own.")
    recorded = _recorded(run, directory, identity) if run.inputs is None else None
    names = recorded.names if recorded else run.inputs
    wanted = archive.Packing(_head(spec, run), names, [*used, run.stdout, run.stderr], run.when)
    try:
        packed = identity.make_scratch(
            directory, DRIVE_FILE, lambda output: archive.pack(directory, output, wanted, most, identity)
        )
    except archive.Unpackable as unpackable:
        said = _refused(run, unpackable.problem, unpackable.hint)
        # Tar does not tell an error of the job's files from one of the machine's.
        unknown = OSError(errno.EIO, unpackable.problem)
        raise job_user.blame(unknown, directory, identity, said.problem, said.hint) from unpackable
    except OSError as error:
        raise job_user.unwritable(DRIVE_FILE, error, directory, identity) from error
    if names is None:
        _record(run, packed, directory, identity)
        return [DRIVE_FILE, RECORD]
    return [DRIVE_FILE]


def _head(spec: JobSpec, run: Run) -> dict[str, bytes]:
    """Return the content before the inputs: our program, and its settings."""
    settings = {
        "RUN_AS_ROOT": str(int(run.as_root)),
        "RUN_BOOT": run.boot,
        "RUN_TIME_LIMIT": str(run.time_limit or ""),
        "RUN_OUTPUTS_SET": str(int(run.outputs is not None)),
        "RUN_WAITS": str(int(run.waits)),
        "RUN_HOST_NAME": host_name(spec.vm.name),
        "RUN_NICS": str(len(spec.vm.nics)),
    }
    return {
        "vmgahp-run/version": VERSION,
        "vmgahp-run/run": guest_file("run"),
        "vmgahp-run/settings": _lines(f"{name}={shlex.quote(value)}" for name, value in settings.items()),
        "vmgahp-run/command": _lines([run.command]),
        "vmgahp-run/outputs": _lines(run.outputs or ()),
        "vmgahp-run/environment": _lines(f"export {name}={shlex.quote(value)}" for name, value in run.environment),
    }


def _lines(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")


def _used(spec: JobSpec) -> list[str]:
    """Return the files of the scratch directory that are for the VM, and not for the program."""
    seed = spec.devices.user_data
    return [*names_in_scratch(spec), *((seed.user_data, seed.meta_data, seed.network_config) if seed else ())]


# The record of the files that came with the job


def _recorded(run: Run, directory: str, identity: Identity) -> _Record | None:
    try:
        record = store.find_record(identity, directory, RECORD, _parse)
    except store.Unusable as unusable:
        raise _refused(run, unusable.reason.rstrip("."), f"leave {RECORD} out of what is transferred.") from unusable
    return record if record is not None and record.job == run.job else None


def _record(run: Run, names: tuple[str, ...], directory: str, identity: Identity) -> None:
    data = manifest.encode(FORMAT, _Record(run.job, names))
    try:
        store.write_record(identity, directory, RECORD, data, _parse)
    except manifest.Invalid as invalid:
        problem = f"the names of {len(names)} inputs are not to be written down: {invalid}"
        raise _refused(run, problem.rstrip("."), "put them into a directory, or into an archive.") from invalid
    except OSError as error:
        raise job_user.unwritable(RECORD, error, directory, identity) from error


def _parse(data: bytes) -> _Record:
    top = manifest.read(data, FORMAT, _Record._fields)
    names = top.items("names", archive.LONGEST_LIST)
    if not all(isinstance(name, str) and _NAME.fullmatch(name) and name not in (".", "..") for name in names):
        raise manifest.Invalid("it has names that no file can have.")
    return _Record(job=top.text("job", 1000), names=tuple(map(str, names)))


def _refused(run: Run, problem: str, hint: str) -> JobFault:
    said = f"{PREFIX}{RUN if run.inputs is None else RUN_INPUTS}"
    return JobFault(errors.MISMATCHED, f"{said}: {problem}.", hint)
