"""The files of a choice in the scratch directory: the VM type and its images, a ``.vmx`` for VMware.

They travel with the job and are the job's to change, so they decide nothing but which of the types that the job could
have anyhow, and which of its own files is which disk.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from vmgahp import errors
from vmgahp.checkpoint import files, manifest
from vmgahp.checkpoint.files import Unusable
from vmgahp.drivers.any.images import AnyDisk
from vmgahp.host import execute
from vmgahp.host.job_user import Identity
from vmgahp.images.formats import CONVERTIBLE
from vmgahp.job.disks import bad_disk
from vmgahp.job.vmx import Vmx

FILE = "vm_choice.json"
FORMAT = 1
VMX = "vm_choice.vmx"
CONSOLE = "vm_console.log"

_NAME = re.compile(r"[^/\x00-\x1f\x7f,:]{1,255}")

_IDE = {"hda": "ide0:0", "hdb": "ide0:1", "hdc": "ide1:0", "hdd": "ide1:1"}
_SCSI = tuple(f"scsi0:{number}" for number in range(16) if number != 7)
"""The places of disks on the SCSI bus; 7 is the controller itself."""


class Choice(NamedTuple):
    """An earlier choice; empty if there is none."""

    vm_type: str = ""
    """The chosen VM type; empty before the first choice."""
    images: dict[str, tuple[str, str]] = {}
    """The name and the format of the converted image, by the name of the job's image."""


def load(directory: str, identity: Identity) -> Choice:
    """Read what an earlier start has written; an empty choice where there is no such file.

    Raises `errors.JobFault` for one that cannot be read: without it it is unknown on which image the guest has been.
    """
    try:
        return files.find(identity, directory, FILE, _parse) or Choice()
    except Unusable as unusable:
        raise errors.JobFault(
            errors.MISMATCHED_CHECKPOINT,
            f"{FILE}, which says by which hypervisor the job ran before, cannot be used: {unusable.reason}",
            "submit the job anew, without this file.",
        ) from unusable


def store(directory: str, identity: Identity, choice: Choice) -> None:
    """Write it down, all or nothing. Raises `errors.Fault`."""
    write(directory, FILE, manifest.encode(FORMAT, choice), identity, 0o644)  # the kill mode reads it, as another user


def write(directory: str, name: str, data: bytes, identity: Identity, mode: int = 0o600) -> None:
    """Write a file of the scratch directory, all or nothing. Raises `errors.Fault`."""
    try:
        identity.write_scratch(directory, name, data, mode)
    except OSError as error:
        raise execute.unwritable(name, error, directory, identity) from error


def _parse(data: bytes) -> Choice:
    """Parse the file. Raises `vmgahp.checkpoint.manifest.Invalid`."""
    top = manifest.read(data, FORMAT, Choice._fields)
    images = top.value("images")
    if not isinstance(images, dict) or not all(_is_image(name, image) for name, image in images.items()):
        raise manifest.Invalid("its images are no images.")
    vm_type = top.text("vm_type", 100, may_be_empty=True)
    return Choice(vm_type, {name: tuple(image) for name, image in images.items()})


def _is_image(name: str, image: object) -> bool:
    """Tell if it is the name and format of an image that was made of the job's `name`."""
    if not (isinstance(image, list) and len(image) == 2 and all(isinstance(part, str) for part in image)):
        return False
    return bool(_NAME.fullmatch(name) and _NAME.fullmatch(image[0])) and image[1] in CONVERTIBLE


def vmx_for(disks: Sequence[AnyDisk]) -> Vmx:
    """Return a ``.vmx`` for a job without one: its disks, all in the scratch directory, and its console.

    The drivers for VMware put memory, CPUs and network into the working copy, as they do for every job. Raises
    `errors.JobFault`.
    """
    vmx = Vmx({"config.version": "8", "virtualHW.version": "10", "guestOS": "other-64"})
    vmx.update({"scsi0.present": "TRUE", "scsi0.virtualDev": "lsilogic"})
    free = list(_SCSI)
    for disk in disks:
        place = _IDE.get(disk.device.lower()) or (free.pop(0) if free else "")
        if not place or f"{place}.present" in vmx:
            raise bad_disk(
                disk.entry,
                "VMware's virtual machines have no more places for disks",
                f"use fewer disks, each with a device of its own; {len(_SCSI)} beside hda to hdd.",
            )
        vmx.update({f"{place}.present": "TRUE", f"{place}.fileName": disk.name})
        if disk.is_cdrom:
            vmx[f"{place}.deviceType"] = "cdrom-image"
    vmx.update({"serial0.present": "TRUE", "serial0.fileType": "file", "serial0.fileName": CONSOLE})
    return vmx
