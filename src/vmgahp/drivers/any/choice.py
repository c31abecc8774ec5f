"""The VM type that was chosen for a job, and its images, kept in the scratch directory.

The file travels with the job and is the job's to change, so it decides nothing but which of the types that the job
could have anyhow, and which of its own files is which disk.
"""

import re
from typing import NamedTuple

from vmgahp import errors
from vmgahp.checkpoint import files
from vmgahp.checkpoint.files import Unusable
from vmgahp.host import execute
from vmgahp.host.job_user import Identity
from vmgahp.images.formats import CONVERTIBLE

FILE = "vm_choice.json"
FORMAT = 1
LARGEST = 1 << 20

_NAME = re.compile(r"[^/\x00-\x1f\x7f,:]{1,255}")


class Choice(NamedTuple):
    """An earlier choice, or none."""

    vm_type: str = ""
    """Empty where nothing was chosen yet."""
    images: dict[str, tuple[str, str]] = {}
    """Name of the job's image -> name and format of the one that was made of it."""


def load(directory: str, identity: Identity) -> Choice:
    """What an earlier start has written; nothing where there is no such file.

    Raises `errors.JobFault` for one that cannot be read: without it nobody knows on which image the guest has been.
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
    from vmgahp.checkpoint import manifest

    write(directory, FILE, manifest.encode(FORMAT, choice), identity, 0o644)  # the kill mode reads it, as another user


def write(directory: str, name: str, data: bytes, identity: Identity, mode: int = 0o600) -> None:
    """Write a file of the scratch directory, all or nothing. Raises `errors.Fault`."""
    try:
        identity.write_scratch(directory, name, data, mode)
    except OSError as error:
        raise execute.unwritable(name, error, directory, identity) from error


def _parse(data: bytes) -> Choice:
    """The choice that `data` is. Raises `vmgahp.checkpoint.manifest.Invalid`."""
    from vmgahp.checkpoint import manifest

    if len(data) > LARGEST:
        raise manifest.Invalid("it is too long.")
    top = manifest.read(data, FORMAT, Choice._fields)
    images = top.value("images")
    if not isinstance(images, dict) or not all(_is_image(name, image) for name, image in images.items()):
        raise manifest.Invalid("its images are no images.")
    vm_type = top.text("vm_type", 100, may_be_empty=True)
    return Choice(vm_type, {name: tuple(image) for name, image in images.items()})


def _is_image(name: str, image: object) -> bool:
    """Whether it is the name and format of an image that was made of the job's `name`."""
    if not (isinstance(image, list) and len(image) == 2 and all(isinstance(part, str) for part in image)):
        return False
    return bool(_NAME.fullmatch(name) and _NAME.fullmatch(image[0])) and image[1] in CONVERTIBLE
