"""Disks generated for a job at its start: empty ones, and one with the job's files.

``VMPARAM_vm_Data_Disk = "vdb:20G"`` is an empty disk that is transferred back with the guest's data;
``VMPARAM_vm_Data_Files = "in.csv, params"`` gives the guest those transferred files on a CD-ROM. Both are for prepared
images of the machine, which are not made for the job.
"""

import os
import re
from collections.abc import Iterable, Sequence

from vmgahp import errors
from vmgahp.errors import JobFault
from vmgahp.host import scratch
from vmgahp.host.job_user import Identity
from vmgahp.images import iso
from vmgahp.job.ad import JobAd
from vmgahp.job.attributes import OPTION_PREFIX as PREFIX
from vmgahp.job.disks import DISK, Disk, DiskRequest, bad_disk, device_of, entries, free_device
from vmgahp.job.options import (
    DATA_DISK,
    DATA_FILES,
    DISK_SIZE,
    EXIT_PORT,
    GENERAL,
    META_DATA,
    NETWORK_CONFIG,
    RUN,
    USER_DATA,
    Options,
)
from vmgahp.text import shown

LABEL = "JOBDATA"
"""The volume label of the CD-ROM with the job's files."""
FILES_IMAGE = "vm_data_files.iso"
"""The file of that CD-ROM in the scratch directory; it is made from the files there, and not transferred back."""

LARGEST_FILES = 4 << 30
"""The most bytes of the job's files together: they are copied while HTCondor waits for the start."""

_OURS = tuple(
    option.lower()
    for option in (DATA_DISK, DATA_FILES, DISK_SIZE, EXIT_PORT, META_DATA, NETWORK_CONFIG, RUN, USER_DATA)
)
"""The options that only the drivers with QEMU support, for which a disk or port is made."""

_UNITS = {"m": 20, "g": 30, "t": 40}
_SIZE = re.compile(r"([1-9][0-9]{0,6})([mgt])(?:i?b)?", re.ASCII | re.IGNORECASE)
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,199}", re.ASCII)
_FORMATS = {".qcow2": "qcow2", ".raw": "raw", ".img": "raw"}
"""The formats of data disks, by the suffix of the file name."""


def requests(options: Options, others: Sequence[DiskRequest]) -> tuple[DiskRequest, ...]:
    """Return requests for the disks that must be made for the job, besides the `others`. Raises `JobFault`."""
    found = list(others)
    for entry in options.string(DATA_DISK).split(","):
        if entry.strip():
            disk = _data_disk(options, entry.strip())
            if any(disk.device == other.device for other in found):
                raise options.refused(
                    DATA_DISK, f"{disk.device} is a disk of the job already", "give every disk its own device."
                )
            found.append(disk)
    if names := [name.strip().rstrip("/") for name in options.string(DATA_FILES).split(",") if name.strip()]:
        device = free_device(found)
        if not device:
            raise options.refused(DATA_FILES, "there is no device left for a drive", "use fewer disks.")
        entry = options.shown(DATA_FILES)
        found.append(DiskRequest(entry, FILES_IMAGE, device, "", False, "raw", "cdrom", files=tuple(names), made=True))
    return tuple(found[len(others) :])


def _data_disk(options: Options, entry: str) -> DiskRequest:
    """Parse one ``device:size[:file]``."""
    hint = f'write +{PREFIX}{DATA_DISK} = "vdb:20G", a device and a size with M, G or T, and perhaps :name.qcow2.'
    fields = [field.strip() for field in entry.split(":")]
    if not 2 <= len(fields) <= 3 or not all(fields):
        raise options.refused(DATA_DISK, f"{shown(entry)} is not of the form device:size[:file]", hint)
    device, size = device_of(fields[0]), _size(fields[1])
    if device is None or device[1] or device[0].startswith("fd"):
        raise options.refused(DATA_DISK, f"{shown(fields[0])} is not a device for a disk", hint)
    if not size:
        raise options.refused(DATA_DISK, f"{shown(fields[1])} is not a size", hint)
    name = fields[2] if len(fields) == 3 else f"{device[0]}-data.qcow2"
    image_format = _FORMATS.get(os.path.splitext(name)[1].lower(), "")
    if not _FILE.fullmatch(name) or not image_format:
        raise options.refused(
            DATA_DISK,
            f"{shown(name)} is not a name for a disk that is made",
            f"write a plain name that ends in {', '.join(_FORMATS)}.",
        )
    return DiskRequest(entry, name, device[0], "", True, image_format, "disk", size=size, made=True)


def _size(text: str) -> int:
    """Parse a size and return its bytes; 0 if it is invalid."""
    found = _SIZE.fullmatch(text)
    return int(found[1]) << _UNITS[found[2].lower()] if found else 0


def enlarged(options: Options, first: DiskRequest) -> DiskRequest:
    """Return the job's `first` disk with the requested size. Raises `JobFault`."""
    size = _size(options.string(DISK_SIZE))
    if not size:
        raise options.refused(DISK_SIZE, "it is not a size", f'write +{PREFIX}{DISK_SIZE} = "20G", with M, G or T.')
    if not first.writable or first.shared or first.kind != "disk":
        problem = f"{first.device} is no disk that the guest has to itself and can write to"
        raise options.refused(DISK_SIZE, problem, f"put the disk that is meant first in {DISK}.")
    if not first.image and first.format not in _FORMATS.values():
        problem = f"an image of the format {first.format} is not enlarged here"
        raise options.refused(DISK_SIZE, problem, "convert it to qcow2 or raw.")
    return first._replace(grow=size)


def files(request: DiskRequest, identity: Identity, directory: str) -> tuple[str, ...]:
    """List the files of a drive: those that the job names, and all in directories that it names. Raises `JobFault`."""
    found: list[str] = []
    for name in request.files:
        found += _files(request, name, identity, directory)
    found = list(dict.fromkeys(found))
    try:
        iso.check_names(found)
    except iso.Unfit as unfit:
        raise _refused(request, str(unfit), "give the files other names.") from unfit
    if len(found) > iso.MOST_FILES:
        problem = f"these are {len(found)} files, and the drive takes {iso.MOST_FILES}"
        raise _refused(request, problem, "put them into an archive.")
    return tuple(found)


def _files(request: DiskRequest, name: str, identity: Identity, directory: str) -> list[str]:
    """Find a file of the scratch directory by name, or all files of a directory of that name."""
    try:
        try:
            os.close(identity.open_scratch(directory, name, os.O_RDONLY))
        except IsADirectoryError:
            found_files = scratch.files_below(directory, name, identity, iso.MOST_FILES + 1)
        else:
            return [name]
    except OSError as error:
        raise _refused(
            request,
            f"{shown(name)} in the job's scratch directory cannot be opened ({error.strerror})",
            "name files that transfer_input_files brings, without the directories that they come from.",
        ) from error
    if not found_files:
        problem = f"the directory {shown(name)} has no file in it"
        raise _refused(request, problem, "remove it, or transfer its files.")
    return [f"{name}/{file}" for file in found_files]


def _refused(request: DiskRequest, problem: str, hint: str) -> JobFault:
    return JobFault(errors.MISMATCHED, f"{request.entry}: {problem}.", hint)


def require_own_files(disks: Iterable[Disk]) -> None:
    """Make sure that no generated disk has the file of another disk. Raises `JobFault`."""
    taken: dict[str, Disk] = {}
    for disk in disks:
        other = taken.setdefault(disk.path, disk)
        if other is not disk and (disk.is_made or other.is_made):
            raise JobFault(
                errors.INVALID_DISK_PARAM,
                f"{disk.device} and {other.device} are both {os.path.basename(disk.path)}, and one of them is made "
                "for the job under that name.",
                f"take that file out of {DISK}, or give the data disk another name.",
            )


def refuse(ad: JobAd) -> None:
    """Refuse requests for generated disks, ports and images of the catalog, for VM types that do not support them.

    Raises `JobFault`.
    """
    vm_type = ad.vm_type()
    hint = "remove it, or require a machine with kvm or qemu in VM_HYPERVISORS."
    for prefix in (PREFIX, GENERAL, f"VM_{vm_type}_ATTR_"):
        for attribute in ad.names(prefix):
            value = ad.expression(attribute) or ""
            option = attribute[len(prefix) :].lower()
            if option in _OURS and value.lower() not in ("undefined", "false"):
                raise JobFault(
                    errors.MISMATCHED,
                    f"{attribute} = {shown(value)}, and neither disks nor ports are made for jobs of the type "
                    f"{vm_type}.",
                    hint,
                )
    for entry in entries(ad.string(DISK) or ""):
        if entry.is_of_catalog:
            raise bad_disk(entry.text, f"jobs of the type {vm_type} have no images of a catalog", hint)


__all__ = ["LABEL", "LARGEST_FILES", "enlarged", "files", "refuse", "requests", "require_own_files"]
