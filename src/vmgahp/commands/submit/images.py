"""Disk images for the front ends: checked, and converted to qcow2 on request.

An image of a stranger can name other files of this machine as parts of it. What would then be in the copy, or be
sent with the job, are files of the person who types the command: such an image is refused.
"""

import os
import tempfile
from typing import Any

from vmgahp.commands.files import open_regular
from vmgahp.commands.submit.machine import GuestDisk, simple_name
from vmgahp.commands.submit.summary import SubmitError, Summary
from vmgahp.images.formats import HEADER, looks_like, names_files

CONVERT = 86_400.0
"""Seconds for a conversion, which may well take hours."""
_MOST_DESCRIPTION = 1 << 20
"""Bytes that QEMU reads of a VMDK that is a description and nothing else."""


def check(disk: GuestDisk, summary: Summary, *, converting: bool = False) -> None:
    """Look at an image that goes with the job, or is converted before: that it is of its format, and whole.

    Raises `SubmitError`.
    """
    try:
        with open_regular(disk.path) as file:
            header = file.read(HEADER)
    except OSError as error:
        raise SubmitError(
            f"{disk.place or 'The disk'}: {disk.path} cannot be opened ({error.strerror}).",
            "bring the image here; or, where the execute machines have it at this path, say --shared.",
        ) from error
    if disk.format in ("raw", "iso"):
        if (likeness := looks_like(header)) and disk.format == "raw":
            summary.advise(f"{disk.path} is taken as raw, though it begins like {likeness}.")
        return
    if disk.format == "vmdk" and header.startswith(b"#"):
        disk.files = _flat_files(disk)
    if names_files(disk.format, header) and not disk.files:
        raise _refused(disk, "it keeps its data in another file", "convert it with qemu-img.")
    info = _info(disk)
    specific = (info.get("format-specific") or {}).get("data") or {}
    whole = {os.path.realpath(disk.path), *map(os.path.realpath, disk.files)}
    for extent in specific.get("extents") or []:
        if os.path.realpath(extent.get("filename", "")) not in whole:
            raise _refused(disk, f"parts of it are in {extent.get('filename')}", "see whether you trust who made it.")
    backing = info.get("full-backing-filename") or info.get("backing-filename")
    if backing and disk.hostile:
        raise _refused(disk, f"it is an overlay of {backing}", "export the VM without snapshots.")
    if backing and "backing-filename-format" not in info and disk.format != "vmdk":
        raise _refused(
            disk,
            f"it does not say what format its backing file {backing} has",
            f"write it into the image: qemu-img rebase -u -b {backing} -F FORMAT {disk.path}",
        )
    if backing:
        summary.advise(f"{disk.path} is an overlay of {backing}, which the execute machine must have at that path.")
    if specific.get("create-type") == "streamOptimized" and disk.writable and not converting:
        raise _refused(
            disk,
            "it is a compressed VMDK (streamOptimized), to which no guest can write",
            "say --convert, which makes a qcow2 of it.",
        )


def require_beside(path: str, place: str, described: str) -> None:
    """Make sure that an image is in the directory of the stranger's file that names it.

    Elsewhere it may be any file of whoever types the command. Raises `SubmitError`.
    """
    directory = os.path.realpath(os.path.dirname(os.path.abspath(described)))
    if not os.path.realpath(path).startswith(f"{directory.rstrip('/')}/"):
        raise SubmitError(
            f"{place}: {path} is not in {directory}, the directory of {os.path.basename(described)}, and "
            "would go with the job although a stranger may have named it.",
            "put it there; or say --own, where the file is your own (libvirt-xml and vmx).",
        )


def convert(disk: GuestDisk, directory: str, summary: Summary, *, force: bool) -> None:
    """Make a qcow2 image of the disk in `directory` and let the disk be that. Raises `SubmitError`."""
    from vmgahp.images import qemu_img

    stem = os.path.splitext(os.path.basename(disk.path))[0]
    target = os.path.join(directory, simple_name(stem, "disk") + ".qcow2")
    free(target, force)
    try:
        # Nobody else can put a link there.
        with tempfile.TemporaryDirectory(dir=directory, prefix=".vmgahp-") as own:
            temporary = os.path.join(own, "disk.qcow2")
            qemu_img.convert(disk.path, _qemu(disk.format), temporary, "qcow2", seconds=CONVERT)
            os.replace(temporary, target)
        summary.made.append(target)
    except (OSError, qemu_img.Trouble) as error:
        raise _refused(disk, f"it cannot be converted: {error}", "see what qemu-img says of it.") from error
    summary.carry(f"{os.path.basename(disk.path)} was converted to {target}")
    disk.path, disk.format, disk.name, disk.files = target, "qcow2", "", []


def free(target: str, force: bool) -> None:
    """Make sure that nothing is overwritten by accident. Raises `SubmitError`."""
    if os.path.lexists(target) and not force:
        raise SubmitError(f"{target} is there already.", "say --force to replace it, or --dir for another place.")


def _flat_files(disk: GuestDisk) -> list[str]:
    """The files of data that a plain VMDK descriptor names, all of them in its directory. Raises `SubmitError`."""
    import re

    with open(disk.path, "rb") as file:
        text = file.read(_MOST_DESCRIPTION).decode("utf-8", "replace")
    directory = os.path.dirname(disk.path)
    files: list[str] = []
    for name in re.findall(r'^\s*R[WD]\w*\s+[-+\d]+\s*[^\s"]*\s*"([^"\n]*)', text, re.MULTILINE):
        if not name or name in (".", "..") or set("/\\:") & set(name) or os.path.islink(f"{directory}/{name}"):
            raise _refused(disk, f"a part of it is {name!a}", "put all its files into one directory.")
        if name not in (os.path.basename(path) for path in files):
            files.append(os.path.join(directory, name))
    return files


def _info(disk: GuestDisk) -> dict[str, Any]:
    from vmgahp.images import qemu_img

    try:
        return qemu_img.info(disk.path, _qemu(disk.format))
    except qemu_img.NotInstalled as error:
        raise SubmitError(f"{error.program} is not installed.", "install qemu-utils and util-linux.") from error
    except qemu_img.Refused as error:
        raise _refused(disk, f"qemu-img cannot read it: {error}", f"see whether it is {disk.format}.") from error
    except qemu_img.Trouble as error:
        raise _refused(disk, f"qemu-img does not come to an end with it: {error}", "look at it.") from error


def _qemu(form: str) -> str:
    from vmgahp.images.formats import FORMATS

    return FORMATS[form]


def _refused(disk: GuestDisk, problem: str, hint: str) -> SubmitError:
    return SubmitError(f"{disk.place or 'The disk'}: {disk.path}: {problem}.", hint)
