"""Disk images for the front ends: decompressed within limits, checked, converted if asked for.

An untrusted image can name other files of this machine as parts of it. The copy, or the job, would then contain files
of the caller: such an image is refused.
"""

import bz2
import gzip
import io
import lzma
import os
import re
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, count
from typing import IO, Any, BinaryIO

from vmgahp.commands.files import open_regular
from vmgahp.commands.submit.machine import GuestDisk, SubmitError, Summary, os_errors_as, simple_name
from vmgahp.errors import Fault
from vmgahp.host.job_user import Identity
from vmgahp.images import qemu_img
from vmgahp.images.formats import (
    CONVERTIBLE,
    FORMATS,
    HEADER,
    backing_chain,
    looks_like,
    named_format,
    names_files,
    not_a_disk,
    unfit,
)

CHUNK = 1 << 20
LARGEST = 4 << 40
"""The maximum number of bytes of a decompressed file: a few MiB can expand to any number of zeros."""
_MEMORY = 256 << 20
"""The memory limit of a decompressor in bytes; output of ``xz -9`` needs 65 MiB."""
_PIECE = 64 << 10
"""The bytes of an xz file that are read at once: data after a stream is copied, and a stream may have 32 bytes."""

ENDINGS = {".gz": "gzip", ".xz": "xz", ".bz2": "bzip2", ".zst": "zstd"}
"""The suffixes of compressed files."""


def compression_of(header: bytes) -> str:
    """Return the compression of a file by its first bytes; empty for none."""
    kind = not_a_disk(header)
    return kind if kind in ENDINGS.values() else ""


def unpacked_content(file: IO[bytes], kind: str, name: str) -> Iterator[bytes]:
    """Decompress a file with the given compression (`compression_of`). Raises `SubmitError`."""
    try:
        if kind == "zstd":
            yield from _zstd(file)
        elif kind == "xz":
            yield from _xz(file)
        else:
            opened: Any = gzip.GzipFile(fileobj=file) if kind == "gzip" else bz2.BZ2File(file)
            yield from _chunks(opened)
    except EOFError as error:
        raise SubmitError(f"{name} ends in the middle.", "get it again.") from error
    except (OSError, lzma.LZMAError, zlib.error) as error:
        raise SubmitError(f"{name} cannot be unpacked with {kind} ({error}).", "get it again.") from error


class Chunks(io.RawIOBase):
    """A readable file over an iterator of chunks."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._left = self._left or next(self._chunks, b"")
        part, self._left = self._left[: len(buffer)], self._left[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    """Read the rest of a file."""
    while chunk := file.read(CHUNK):
        yield chunk


def _xz(file: IO[bytes]) -> Iterator[bytes]:
    """Decompress xz within `_MEMORY`, which `lzma.open` cannot limit: a header can request gigabytes."""
    data = file.read(_PIECE)
    while data:
        stream = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MEMORY)
        while not stream.eof:
            yield stream.decompress(data, CHUNK)
            data = b""
            if stream.needs_input and not (data := file.read(_PIECE)):
                raise EOFError
        # Another stream may follow, with zeros as padding in between.
        data = stream.unused_data.lstrip(b"\0")
        while not data and (more := file.read(_PIECE)):
            data = more.lstrip(b"\0")


def _zstd(file: IO[bytes]) -> Iterator[bytes]:
    """Decompress with the program zstd, because Python has no module for it. Raises OSError, `SubmitError`."""
    command = ["zstd", "-dcq", f"--memory={_MEMORY >> 20}MB"]
    os.lseek(file.fileno(), file.tell(), os.SEEK_SET)  # zstd must get the bytes that were read ahead
    try:
        run = subprocess.Popen(command, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except FileNotFoundError as error:
        raise SubmitError("zstd is not installed.", "install zstd, or unpack the file elsewhere.") from error
    assert run.stdout is not None
    assert run.stderr is not None
    try:
        yield from _chunks(run.stdout)  # it writes at most one line of error, which fits into the pipe
        said = run.stderr.read(4096).decode("utf-8", "replace").strip()
        if run.wait():
            raise OSError(said)
    finally:
        run.kill()
        run.wait()
        run.stdout.close()
        run.stderr.close()


def write_unpacked(chunks: Iterable[bytes], target: str, summary: Summary, *, force: bool) -> None:
    """Write the chunks to a file, with holes; an existing file is replaced only with `force`. Raises `SubmitError`."""
    free(target, summary, force=force)
    room = os.statvfs(os.path.dirname(target))
    most = room.f_bavail * room.f_frsize
    temporary, size, used = f"{target}.new", 0, 0
    try:
        with os_errors_as(f"{target} cannot be written", "name another place with --dir."):
            with open(temporary, "xb") as file:
                for chunk in chunks:
                    size += len(chunk)
                    if chunk.count(0) == len(chunk):
                        file.seek(size)
                    else:
                        used += len(chunk)
                        require_room(used, most, target)
                        file.write(chunk)
                    if size > LARGEST:
                        raise SubmitError(f"{target} would have more than {LARGEST >> 40} TiB.", "see what it is.")
                file.truncate(size)
            os.replace(temporary, target)
        summary.made.append(target)
    finally:
        if os.path.lexists(temporary):
            os.unlink(temporary)


def require_room(size: int, room: int, target: str) -> None:
    """Raise `SubmitError` if the size exceeds the free space."""
    if size > room:
        raise SubmitError(
            f"{target} needs more than the {room} bytes that are free there.", "name a larger place with --dir."
        )


Locate = Callable[[str, str], str]
"""A function that converts the name of an image in a file, and the place there, to a full path. Raises
`SubmitError`."""

CONVERT = 86_400.0
"""The deadline in seconds for a conversion, which may well take hours."""
_LEAST = 512
"""The minimum size of a disk in bytes: one sector."""
_MOST_DESCRIPTION = 1 << 20
"""The bytes that QEMU reads of a VMDK that is only a descriptor."""


_ISO_MARK, _ISO_AT = b"CD001", 32769
_VHD_FOOTER = b"conectix"
"""The magic bytes of a VHD, in its last 512 bytes; a VHD of fixed size has them only there."""


@contextmanager
def opened(path: str, place: str = "") -> Iterator[BinaryIO]:
    """Open an image. Raises `SubmitError`."""
    hint = "bring the image here; or, where the execute machines have it at this path, say --shared."
    with os_errors_as(f"{place}{': ' if place else ''}{path} cannot be opened", hint), open_regular(path) as file:
        yield file


def find_format(disk: GuestDisk) -> None:
    """Set the format of an image: the one on which name and content agree, or else that of the content.

    A guest may have written the content, so such an image may name no other file. Raises `SubmitError`.
    """
    with opened(disk.path, disk.place) as file:
        header = file.read(HEADER)
        file.seek(_ISO_AT)
        is_iso = file.read(len(_ISO_MARK)) == _ISO_MARK
        file.seek(max(0, file.seek(0, os.SEEK_END) - 512))
        footer = file.read(len(_VHD_FOOTER))
    by_name = named_format(disk.path)
    content = looks_like(header) or ("vpc" if footer == _VHD_FOOTER else "")
    if content == "qcow2" and header[4:8] == b"\0\0\0\1":
        content = "qcow"
    if not content and (other := not_a_disk(header)):
        hint = "unpack it (an .ova is read by vmgahp submit ovf), or say --format raw if it is a disk all the same."
        raise SubmitError(f"{disk.path} begins like {other}, and so is no disk.", hint)
    if content and by_name in ("raw", "iso"):
        raise SubmitError(
            f"{disk.path}: its name says {by_name}, and it begins like {content}.",
            f"say --format {content}, or --format {by_name} if a guest wrote that beginning.",
        )
    if by_name in ("raw", "iso") or content == by_name:
        disk.format = by_name or ("iso" if is_iso else "raw")
        if not by_name and is_iso:
            disk.steps.append("iso by its content")
    elif content:
        disk.format, disk.hostile = content, True
        disk.steps.append(f"{content} by its content")
    else:
        raise SubmitError(
            f"{disk.path}: its name says {by_name}, and it begins like no format that has a header.",
            "say --format raw if it is; the data of a VMDK in two files (-flat) go with its descriptor.",
        )


def check(disk: GuestDisk, summary: Summary, *, flatten: bool = False, by_qemu: bool = True) -> str:
    """Check that an image that goes with the job, or is to be converted, is complete and of its format.

    With `flatten` its backing files will be written into it; `by_qemu` is True if START opens it with QEMU. Returns the
    reason why it must be converted, empty if it need not be. Raises `SubmitError`.
    """
    with opened(disk.path, disk.place) as file:
        header = file.read(HEADER)
        size = os.fstat(file.fileno()).st_size
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
