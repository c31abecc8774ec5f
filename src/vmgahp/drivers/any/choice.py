"""The VM type that was chosen for a job, and its images, kept in the scratch directory.

The file travels with the job and is the job's to change, so it decides nothing but which of the types that the job
could have anyhow, and which of its own files is which disk.
"""

import errno
import json
import os
import re
from collections.abc import Mapping

from vmgahp import errors
from vmgahp.host.job_user import Identity
from vmgahp.images.formats import CONVERTIBLE

FILE = "vm_choice.json"
FORMAT = 1
LARGEST = 1 << 20

_NAME = re.compile(r"[^/\x00-\x1f\x7f,:]{1,255}")


class Memo:
    """An earlier choice, or none."""

    def __init__(self, vm_type: str = "", images: Mapping[str, tuple[str, str]] | None = None) -> None:
        self.vm_type = vm_type
        """Empty where nothing was chosen yet."""
        self.images = dict(images or {})
        """Name of the job's image -> name and format of the one that was made of it."""


def load(directory: str, identity: Identity) -> Memo:
    """What an earlier start has written; nothing where there is no such file.

    Raises `errors.JobFault` for one that cannot be read: without it nobody knows on which image the guest has been.
    """
    try:
        descriptor = identity.open_scratch(directory, FILE, os.O_RDONLY)
    except FileNotFoundError:
        return Memo()
    except OSError as error:
        raise _odd(error.strerror or "it cannot be opened") from error
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(LARGEST + 1)
    try:
        document = json.loads(data) if len(data) <= LARGEST else None
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError("it is no choice of this version")
        vm_type, images = document["vm_type"], document["images"]
        if not isinstance(vm_type, str) or not isinstance(images, dict):
            raise ValueError("its values are of another kind")
        return Memo(vm_type, {name: _image(name, image) for name, image in images.items()})
    except (ValueError, KeyError, RecursionError) as error:
        raise _odd(str(error)[:200]) from error


def store(directory: str, identity: Identity, memo: Memo) -> None:
    """Write it down, all or nothing. Raises OSError."""
    document = {"format": FORMAT, "vm_type": memo.vm_type, "images": memo.images}
    data = json.dumps(document, indent=1).encode() + b"\n"
    identity.write_scratch(directory, FILE, data, 0o644)  # the kill mode reads it, as another user


def unwritable(name: str, error: OSError) -> errors.Fault:
    """Whose fault it is that a file cannot be written in the scratch directory, which HTCondor has made for the job."""
    problem = f"{name} cannot be written in the job's scratch directory ({error.strerror})."
    if error.errno in (errno.EEXIST, errno.EISDIR, errno.ENOTEMPTY, errno.EDQUOT):
        return errors.JobFault(
            errors.MISMATCHED, problem, "see that nothing else of the job's has this name."
        )
    return errors.MachineFault(problem, "look at the file system of EXECUTE.")


def _image(name: str, image: object) -> tuple[str, str]:
    if not (isinstance(image, list) and len(image) == 2 and all(isinstance(part, str) for part in image)):
        raise ValueError(f"{name[:100]!a} is no image")
    made, image_format = image
    if not _NAME.fullmatch(name) or not _NAME.fullmatch(made) or image_format not in CONVERTIBLE:
        raise ValueError(f"{name[:100]!a} is no image")
    return made, image_format


def _odd(problem: str) -> errors.JobFault:
    return errors.JobFault(
        errors.MISMATCHED_CHECKPOINT,
        f"{FILE}, which says by which hypervisor the job ran before, cannot be used: {problem}.",
        "submit the job anew, without this file.",
    )
