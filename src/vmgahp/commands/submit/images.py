"""Disk images for the front ends: checked, and converted to qcow2 on request.

An untrusted image can name other files of this machine as parts of it. The copy, or the job, would then contain files
of the caller: such an image is refused.
"""

import os
import re
import tempfile
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from itertools import chain, count
from typing import Any

from vmgahp.commands.files import open_regular
from vmgahp.commands.submit.machine import GuestDisk, simple_name
from vmgahp.commands.submit.summary import SubmitError, Summary
from vmgahp.errors import Fault
from vmgahp.host.job_user import Identity
from vmgahp.images import qemu_img
from vmgahp.images.backing import backing_chain
from vmgahp.images.formats import CONVERTIBLE, FORMATS, HEADER, looks_like, names_files, not_a_disk, unfit

Locate = Callable[[str, str], str]
"""A function that converts the name of an image in a file, and the place there, to a full path. Raises
`SubmitError`."""

CONVERT = 86_400.0
"""The deadline in seconds for a conversion, which may well take hours."""
_LEAST = 512
"""The minimum size of a disk in bytes: one sector."""
_MOST_DESCRIPTION = 1 << 20
"""The bytes that QEMU reads of a VMDK that is only a descriptor."""


def check(disk: GuestDisk, summary: Summary, *, flatten: bool = False, by_qemu: bool = True) -> str:
    """Check that an image that goes with the job, or is to be converted, is complete and of its format.

    With `flatten` its backing files will be written into it; `by_qemu` is True if START opens it with QEMU. Returns the
    reason why it must be converted, empty if it need not be. Raises `SubmitError`.
    """
    try:
        with open_regular(disk.path) as file:
            header = file.read(HEADER)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise SubmitError(
            f"{disk.place or 'The disk'}: {disk.path} cannot be opened ({error.strerror}).",
            "bring the image here; or, where the execute machines have it at this path, say --shared.",
        ) from error
    if disk.format in ("raw", "iso"):
        if size < _LEAST:
            raise _refused(disk, f"it has {size} bytes, and so is no disk", "see whether it is the right file.")
        if not disk.is_sure and (other := not_a_disk(header)):
            hint = "unpack it; or, where a guest wrote that beginning, give it to vmgahp submit disk --format raw."
            raise _refused(disk, f"it begins like {other}, and so is no disk", hint)
        if (likeness := looks_like(header)) and disk.format == "raw":
            summary.advise(f"{disk.path} is taken as raw, though it begins like {likeness}.")
        return ""
    if disk.format == "vmdk" and header.startswith(b"#"):
        disk.files = _flat_files(disk)
    if names_files(disk.format, header) and not disk.files:
        raise _refused(disk, "it keeps its data in another file", "convert it with qemu-img.")
    info = _info(disk)
    if info.get("encrypted"):
        raise _refused(disk, "it is encrypted, and a job has no key", "write it decrypted, by qemu-img convert.")
    specific = (info.get("format-specific") or {}).get("data") or {}
    whole = {os.path.realpath(disk.path), *map(os.path.realpath, disk.files)}
    for extent in specific.get("extents") or []:
        if os.path.realpath(extent.get("filename", "")) not in whole:
            raise _refused(disk, f"parts of it are in {extent.get('filename')}", "see whether you trust who made it.")
    if backing := info.get("backing-filename"):
        _require_plain(disk, backing, "backing-filename-format" in info or disk.format == "vmdk")
        if flatten:
            return f"it is an overlay of {backing}"
        _require_found(disk, backing, by_qemu=by_qemu)
        summary.advise(f"{disk.path} is an overlay of {backing}, which the execute machine must have at that path.")
    if specific.get("create-type") == "streamOptimized":
        return "no guest can write to a compressed VMDK (streamOptimized)" if disk.writable else ""
    if disk.format not in FORMATS:
        return f"no VM has an image of the format {disk.format}"
    reason = unfit(disk.format, header)
    return f"it {reason}" if reason else ""


def _require_plain(disk: GuestDisk, backing: str, has_format: bool) -> None:
    """Refuse a backing file of an untrusted image, and one that is not a regular file. Raises `SubmitError`."""
    if disk.hostile:
        raise _refused(
            disk,
            f"it is an overlay of {backing}",
            "export the VM without snapshots; for a file of your own say --own --convert (libvirt-xml and vmx).",
        )
    if re.match(r"[^/]*:", backing):  # json:…, nbd://…
        problem = f"its backing file is {backing}, which is no plain file"
        raise _refused(disk, problem, "write both into one image, by qemu-img convert.")
    if not has_format:
        raise _refused(
            disk,
            f"it does not say what format its backing file {backing} has",
            f"write it into the image: qemu-img rebase -u -b {backing} -F FORMAT {disk.path}",
        )


def _require_found(disk: GuestDisk, backing: str, *, by_qemu: bool) -> None:
    """Refuse an overlay whose backing files START would not find or accept. Raises `SubmitError`."""
    if not backing.startswith("/"):
        problem = f"its backing file is {backing}, by a path that leads to nothing where the job runs"
        say = "say" if by_qemu else "leave --as-is out, and say"
        raise _refused(disk, problem, f"{say} --convert, which writes both into one image.")
    if by_qemu and os.path.exists(backing):
        try:
            backing_chain(disk.path, _qemu(disk.format), Identity(os.geteuid(), os.getegid()), parts=bool(disk.files))
        except Fault as fault:
            raise SubmitError(f"The execute machine would hold the job: {fault.problem}", fault.hint) from fault


def require_beside(path: str, place: str, described: str) -> None:
    """Make sure that an image is in the directory of the untrusted file that names it.

    Elsewhere it may be any file of the caller. Raises `SubmitError`.
    """
    directory = os.path.realpath(os.path.dirname(os.path.abspath(described)))
    if not os.path.realpath(path).startswith(f"{directory.rstrip('/')}/"):
        raise SubmitError(
            f"{place}: {path} is not in {directory}, the directory of {os.path.basename(described)}, and "
            "would go with the job although a stranger may have named it.",
            "put it there; or say --own, where the file is your own (libvirt-xml and vmx).",
        )


def convert(disk: GuestDisk, directory: str, others: Container[str], summary: Summary, *, force: bool) -> None:
    """Make a qcow2 image of the disk in `directory` and use it instead. Raises `SubmitError`.

    In the scratch directory its name must differ from those of the `others`.
    """
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


def create(
    disk: GuestDisk, size: int, directory: str, summary: Summary, *, force: bool, base: GuestDisk | None = None
) -> None:
    """Make an image for a disk that has none yet, empty or with the content of `base`, and use it.

    It has `size` bytes, or the size of `base` if that is larger. Raises `SubmitError`.
    """
    target = os.path.join(directory, os.path.basename(disk.path))
    free(target, summary, force=force)
    form, content = _qemu(disk.format), "with nothing on it"
    try:
        with _anew(target, summary) as path:
            if base is None:
                qemu_img.create_empty(path, form, size)
            else:
                qemu_img.convert(base.path, _qemu(base.format), path, form, seconds=CONVERT)
                content, least = f"a copy of {base.path}", int(qemu_img.info(path, form)["virtual-size"])
                if size > least:
                    qemu_img.enlarge(path, form, size)
                size = max(size, least)
    except (OSError, qemu_img.Trouble) as error:
        raise _refused(disk, f"it cannot be made: {error}", "make it by qemu-img create.") from error
    disk.what = disk.what or f"disk {disk.path}"
    disk.steps.append(f"made as {target}, {content}, of {size / (1 << 30):g} GiB")
    disk.path = target


@contextmanager
def _anew(target: str, summary: Summary) -> Iterator[str]:
    """Yield a temporary path for an image, in a directory of its own without links; then move it to the target."""
    with tempfile.TemporaryDirectory(dir=os.path.dirname(target), prefix=".vmgahp-") as own:
        path = os.path.join(own, "disk")
        yield path
        os.replace(path, target)
    summary.made.append(target)


def free(target: str, summary: Summary, *, force: bool) -> None:
    """Make sure that no file is overwritten by accident, and never one that is read. Raises `SubmitError`."""
    if os.path.realpath(target) in summary.sources:
        raise SubmitError(f"{target} would be replaced, and is read.", "say --dir, --name or -o for another place.")
    if target in summary.made:
        raise SubmitError(f"Two files would be {target}.", "give one of them another name.")
    if os.path.lexists(target) and not force:
        raise SubmitError(f"{target} is there already.", "say --force to replace it, or --dir for another place.")


def _flat_files(disk: GuestDisk) -> list[str]:
    """List the data files that a VMDK descriptor names, which must be in its directory. Raises `SubmitError`."""
    directory = os.path.dirname(disk.path)
    files: list[str] = []
    for name in flat_names(disk.path):
        if not name or name in (".", "..") or set("/\\:") & set(name) or os.path.islink(f"{directory}/{name}"):
            raise _refused(disk, f"a part of it is {name!a}", "put all its files into one directory.")
        if name not in (os.path.basename(path) for path in files):
            files.append(os.path.join(directory, name))
    return files


def flat_names(path: str) -> list[str]:
    """List the data files of a VMDK that is only a descriptor, as it names them."""
    with open(path, "rb") as file:
        data = file.read(_MOST_DESCRIPTION)
    text = data.decode("utf-8", "replace") if data.startswith(b"#") else ""
    return re.findall(r'^\s*R[WD]\w*\s+[-+\d]+\s*[^\s"]*\s*"([^"\n]*)', text, re.MULTILINE)


def largest(disk: GuestDisk) -> int:
    """Return the bytes to which an image can grow when its guest writes to it. Raises `SubmitError`."""
    size = os.path.getsize(disk.path)
    return max(size, int(_info(disk)["virtual-size"])) if disk.writable else size


def _info(disk: GuestDisk) -> dict[str, Any]:
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
