"""Disk images for the front ends: checked, and converted to qcow2 on request.

An image of a stranger can name other files of this machine as parts of it. What would then be in the copy, or be
sent with the job, are files of the person who types the command: such an image is refused.
"""

import os
import tempfile
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from itertools import chain, count
from typing import Any

from vmgahp.commands.files import open_regular
from vmgahp.commands.submit.machine import GuestDisk, simple_name
from vmgahp.commands.submit.summary import SubmitError, Summary
from vmgahp.images.formats import CONVERTIBLE, FORMATS, HEADER, looks_like, names_files, unfit

Locate = Callable[[str, str], str]
"""A function from the name of an image in a file, and the place there, to its full path. Raises `SubmitError`."""

CONVERT = 86_400.0
"""Seconds for a conversion, which may well take hours."""
_MOST_DESCRIPTION = 1 << 20
"""Bytes that QEMU reads of a VMDK that is a description and nothing else."""


def check(disk: GuestDisk, summary: Summary) -> str:
    """Look at an image that goes with the job, or is converted before: that it is of its format, and whole.

    Returns why no VM gets it as it is and it must be converted, empty for nothing. Raises `SubmitError`.
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
        return ""
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
        raise _refused(
            disk,
            f"it is an overlay of {backing}",
            "export the VM without snapshots; for a file of your own say --own --convert (libvirt-xml and vmx).",
        )
    if backing and "backing-filename-format" not in info and disk.format != "vmdk":
        raise _refused(
            disk,
            f"it does not say what format its backing file {backing} has",
            f"write it into the image: qemu-img rebase -u -b {backing} -F FORMAT {disk.path}",
        )
    if backing:
        summary.advise(f"{disk.path} is an overlay of {backing}, which the execute machine must have at that path.")
    if specific.get("create-type") == "streamOptimized":
        return "no guest can write to a compressed VMDK (streamOptimized)" if disk.writable else ""
    if disk.format not in FORMATS:
        return f"no VM has an image of the format {disk.format}"
    reason = unfit(disk.format, header)
    return f"it {reason}" if reason else ""


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


def convert(disk: GuestDisk, directory: str, others: Container[str], summary: Summary, *, force: bool) -> None:
    """Make a qcow2 image of the disk in `directory` and let the disk be that. Raises `SubmitError`.

    In the scratch directory it is beside files called as the `others` are.
    """
    from vmgahp.images import qemu_img

    stem = simple_name(os.path.splitext(os.path.basename(disk.path))[0], "disk")
    names = chain([f"{stem}.qcow2"], (f"{stem}-{number}.qcow2" for number in count(2)))
    target = os.path.join(directory, next(name for name in names if name not in others))
    free(target, summary, force=force)
    try:
        with _anew(target, summary) as path:
            qemu_img.convert(disk.path, _qemu(disk.format), path, "qcow2", seconds=CONVERT)
    except (OSError, qemu_img.Trouble) as error:
        raise _refused(disk, f"it cannot be converted: {error}", "see what qemu-img says of it.") from error
    disk.what = disk.what or f"{'floppy' if disk.boot_class == 'fd' else 'disk'} {disk.path}"
    disk.steps.append(f"converted to {target}")
    disk.path, disk.format, disk.name, disk.files = target, "qcow2", "", []


def create(disk: GuestDisk, size: int, directory: str, summary: Summary, *, force: bool) -> None:
    """Make an empty image for a disk that has none yet, and let the disk be that. Raises `SubmitError`."""
    from vmgahp.images import qemu_img

    target = os.path.join(directory, os.path.basename(disk.path))
    free(target, summary, force=force)
    try:
        with _anew(target, summary) as path:
            qemu_img.create_empty(path, _qemu(disk.format), size)
    except (OSError, qemu_img.Trouble) as error:
        raise _refused(disk, f"it cannot be made: {error}", "make it by qemu-img create.") from error
    disk.what = disk.what or f"disk {disk.path}"
    disk.steps.append(f"made as {target}, with {size / (1 << 30):g} GiB and nothing on it")
    disk.path = target


@contextmanager
def _anew(target: str, summary: Summary) -> Iterator[str]:
    """The path at which an image is made that then takes its place, whole. Nobody else can put a link there."""
    with tempfile.TemporaryDirectory(dir=os.path.dirname(target), prefix=".vmgahp-") as own:
        path = os.path.join(own, "disk")
        yield path
        os.replace(path, target)
    summary.made.append(target)


def free(target: str, summary: Summary, *, force: bool) -> None:
    """Make sure that nothing is overwritten by accident, and nothing that is read. Raises `SubmitError`."""
    if os.path.realpath(target) in summary.sources:
        raise SubmitError(f"{target} would be replaced, and is read.", "say --dir, --name or -o for another place.")
    if target in summary.made:
        raise SubmitError(f"Two files would be {target}.", "give one of them another name.")
    if os.path.lexists(target) and not force:
        raise SubmitError(f"{target} is there already.", "say --force to replace it, or --dir for another place.")


def _flat_files(disk: GuestDisk) -> list[str]:
    """The files of data that a plain VMDK descriptor names, all of them in its directory. Raises `SubmitError`."""
    directory = os.path.dirname(disk.path)
    files: list[str] = []
    for name in flat_names(disk.path):
        if not name or name in (".", "..") or set("/\\:") & set(name) or os.path.islink(f"{directory}/{name}"):
            raise _refused(disk, f"a part of it is {name!a}", "put all its files into one directory.")
        if name not in (os.path.basename(path) for path in files):
            files.append(os.path.join(directory, name))
    return files


def flat_names(path: str) -> list[str]:
    """The files of data that a VMDK names which is a description and nothing else, as it names them."""
    import re

    with open(path, "rb") as file:
        data = file.read(_MOST_DESCRIPTION)
    text = data.decode("utf-8", "replace") if data.startswith(b"#") else ""
    return re.findall(r'^\s*R[WD]\w*\s+[-+\d]+\s*[^\s"]*\s*"([^"\n]*)', text, re.MULTILINE)


def largest(disk: GuestDisk) -> int:
    """Bytes that an image can come to when its guest writes to it. Raises `SubmitError`."""
    size = os.path.getsize(disk.path)
    return max(size, int(_info(disk)["virtual-size"])) if disk.writable else size


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
    return CONVERTIBLE[form]


def _refused(disk: GuestDisk, problem: str, hint: str) -> SubmitError:
    return SubmitError(f"{disk.place or 'The disk'}: {disk.path}: {problem}.", hint)
