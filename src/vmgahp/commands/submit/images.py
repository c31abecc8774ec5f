"""Disk images, as a job alone or for other front ends: unpacked, checked, converted if asked for.

An untrusted image can name other files of this machine as parts of it. The copy, or the job, would then contain files
of the caller: such an image is refused.
"""

import argparse
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, count
from typing import IO, BinaryIO, TypeVar

from vmgahp import config
from vmgahp.commands.files import open_regular
from vmgahp.commands.submit.machine import Guest, GuestDisk, GuestNic
from vmgahp.commands.submit.report import PLAIN_NAME, SubmitError, Summary, os_errors_as, simple_name
from vmgahp.daemon.transfer_plugin import METHODS, TransferError, parse_url
from vmgahp.errors import Fault
from vmgahp.images import CATALOG, catalog, qemu_img
from vmgahp.images.formats import CONVERTIBLE, FORMATS, HEADER, looks_like, named_format, names_files, not_a_disk, unfit
from vmgahp.job.attributes import ARM, OPTION_PREFIX

T = TypeVar("T")

CHUNK = 1 << 20
LARGEST = 4 << 40
"""The maximum number of bytes of a decompressed file: a few MiB can expand to any number of zeros."""

ENDINGS = {".gz": "gzip", ".xz": "xz", ".bz2": "bzip2", ".zst": "zstd"}
"""Suffix of a compressed file -> the program that decompresses it."""
MEMORY_LIMITS = {"xz": "--memlimit-decompress=256MiB", "zstd": "--memory=256MB"}
"""The limits for a decompressor whose memory a header chooses; output of ``xz -9`` needs 65 MiB."""


def compression_of(header: bytes) -> str:
    """Return the compression of a file by its first bytes; empty for none."""
    kind = not_a_disk(header)
    return kind if kind in ENDINGS.values() else ""


def unpacked_content(file: IO[bytes], program: str, name: str) -> Iterator[bytes]:
    """Decompress a file from its beginning (`compression_of`). Raises `SubmitError`."""
    command = [program, "-dc", *filter(None, [MEMORY_LIMITS.get(program)])]
    os.lseek(file.fileno(), 0, os.SEEK_SET)  # the program must get the bytes that were read ahead
    hint = f"install {program}, or unpack the file elsewhere."
    with os_errors_as(f"{program} is not installed, or cannot be run", hint):
        run = subprocess.Popen(command, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with run:
        assert run.stdout is not None
        assert run.stderr is not None
        try:
            # A signal ends each read. It writes at most one line of error, which fits into the pipe.
            while chunk := os.read(run.stdout.fileno(), CHUNK):
                yield chunk
            said = " ".join(run.stderr.read(4096).decode("utf-8", "replace").split())
            if run.wait():
                raise SubmitError(f"{name} cannot be unpacked by {program} ({said}).", "get it again.")
        finally:
            run.kill()


def write_unpacked(chunks: Iterable[bytes], target: str, summary: Summary, *, force: bool) -> None:
    """Write the chunks to a file, with holes; an existing file is replaced only with `force`. Raises `SubmitError`."""
    free(target, summary, force=force)
    temporary, size = f"{target}.new", 0
    with os_errors_as(f"{target} cannot be written", "name a larger or another place with --dir."):
        with open(temporary, "xb") as file:
            try:
                for chunk in chunks:
                    size += len(chunk)
                    if size > LARGEST:
                        raise SubmitError(f"{target} would have more than {LARGEST >> 40} TiB.", "see what it is.")
                    if chunk.count(0) == len(chunk):
                        file.seek(size)
                    else:
                        file.write(chunk)
                file.truncate(size)
                os.replace(temporary, target)
            except BaseException:
                os.unlink(temporary)
                raise
        summary.made.append(target)


Locate = Callable[[str, str], str]
"""A function that converts the name of an image in a file, and the place there, to a full path. Raises
`SubmitError`."""

CONVERT = 86_400.0
"""The deadline in seconds for a conversion, which may well take hours."""
_MOST_DESCRIPTION = 1 << 20
"""The bytes that QEMU reads of a VMDK that is only a descriptor."""
_ISO_MARK, _ISO_AT = b"CD001", 32769
_VHD_FOOTER, _DMG_FOOTER = b"conectix", b"koly"
"""The magic bytes in the last 512 bytes: of a VHD, which has them only there if its size is fixed, and of a DMG."""


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
    other = not_a_disk(header)
    seen = "ends like a DMG of macOS" if footer.startswith(_DMG_FOOTER) else other and f"begins like {other}"
    if not content and seen:
        hint = "unpack it (an .ova is read by vmgahp submit ovf), or say --format raw if it is a disk all the same."
        raise SubmitError(f"{disk.path} {seen}, and so is no disk.", hint)
    content = content or ("iso" if is_iso and not by_name else "")
    if content not in ("", "iso") and by_name in ("raw", "iso"):
        hint = f"say --format {content}, or --format {by_name} if a guest wrote that beginning."
        raise SubmitError(f"{disk.path}: its name says {by_name}, and it begins like {content}.", hint)
    if not content and by_name not in ("", "raw", "iso"):
        hint = "say --format raw if it is; the data of a VMDK in two files (-flat) go with its descriptor."
        problem = f"{disk.path}: its name says {by_name}, and it begins like no format that has a header."
        raise SubmitError(problem, hint)
    disk.format = content or by_name or "raw"
    if content and content != by_name:
        disk.hostile = True
        disk.steps.append(f"{content} by its content")


def check(disk: GuestDisk, summary: Summary, *, flatten: bool = False, by_qemu: bool = True) -> str:
    """Check that an image that goes with the job, or is to be converted, is complete and of its format.

    With `flatten` its backing files will be written into it; `by_qemu` is True if START opens it with QEMU. Returns the
    reason why it must be converted, empty if it need not be. Raises `SubmitError`.
    """
    with opened(disk.path, disk.place) as file:
        header = file.read(HEADER)
        size = os.fstat(file.fileno()).st_size
    if disk.format in ("raw", "iso"):
        if size < 512:  # one sector
            raise _refused(disk, f"it has {size} bytes, and so is no disk", "see whether it is the right file.")
        if not disk.is_sure and (other := not_a_disk(header)):
            hint = "unpack it; or, where a guest wrote that beginning, give it to vmgahp submit disk --format raw."
            raise _refused(disk, f"it begins like {other}, and so is no disk", hint)
        if (likeness := looks_like(header)) and disk.format == "raw":
            if not disk.is_sure:
                hint = "correct the format there; or, where a guest wrote that, give it to submit disk --format raw."
                raise _refused(disk, f"it is said to be raw, and begins like {likeness}", hint)
            summary.advise(f"{disk.path} is taken as raw, though it begins like {likeness}.")
        return ""
    if disk.format == "vmdk" and header.startswith(b"#"):
        disk.files = _flat_files(disk)
    if names_files(disk.format, header) and not disk.files:
        raise _refused(disk, "it keeps its data in another file", "convert it with qemu-img.")
    info = _asked(disk, qemu_img.info)
    if info.get("encrypted"):
        raise _refused(disk, "it is encrypted, and a job has no key", "write it decrypted, by qemu-img convert.")
    specific = (info.get("format-specific") or {}).get("data") or {}
    whole = {os.path.realpath(disk.path), *map(os.path.realpath, disk.files)}
    for extent in specific.get("extents") or []:
        if os.path.realpath(extent.get("filename", "")) not in whole:
            raise _refused(disk, f"parts of it are in {extent.get('filename')}", "see whether you trust who made it.")
    if backing := info.get("backing-filename"):
        _require_usable(disk, backing, has_format="backing-filename-format" in info or disk.format == "vmdk")
        if flatten:
            return f"it is an overlay of {backing}"
        if not backing.startswith("/"):
            problem = f"its backing file is {backing}, by a path that leads to nothing where the job runs"
            say = "say" if by_qemu else "leave --as-is out, and say"
            raise _refused(disk, problem, f"{say} --convert, which writes both into one image.")
        summary.advise(f"{disk.path} is an overlay of {backing}, which the execute machine must have at that path.")
    if specific.get("create-type") == "streamOptimized":
        return "no guest can write to a compressed VMDK (streamOptimized)" if disk.writable else ""
    reason = unfit(disk.format, header)
    # An overlay is opened with its backing files, which need not be here.
    if not (reason or backing) and (damage := _asked(disk, qemu_img.check, leaks=False)):
        hint = "bring it here again, if it may have been cut off; else see what qemu-img check says of it."
        raise _refused(disk, f"it {damage}", hint)
    if disk.format not in FORMATS:
        return f"no VM has an image of the format {disk.format}"
    return f"it {reason}" if reason else ""


def _require_usable(disk: GuestDisk, backing: str, *, has_format: bool) -> None:
    """Refuse a backing file of an untrusted image, and one that is not a regular file. Raises `SubmitError`."""
    if disk.hostile:
        hint = "export the VM without snapshots; for a file of your own say --own --convert (libvirt-xml and vmx)."
        raise _refused(disk, f"it is an overlay of {backing}", hint)
    if re.match(r"[^/]*:|/dev/(?!shm/)", backing):  # json:…, nbd://…
        problem = f"its backing file is {backing}, which is no plain file"
        raise _refused(disk, problem, "write both into one image, by qemu-img convert.")
    if not has_format:
        hint = f"write it into the image: qemu-img rebase -u -b {backing} -F FORMAT {disk.path}"
        raise _refused(disk, f"it does not say what format its backing file {backing} has", hint)


def require_beside(path: str, place: str, described: str) -> None:
    """Require an image beside the untrusted file naming it: another may be the caller's own. Raises `SubmitError`."""
    directory = os.path.realpath(os.path.dirname(os.path.abspath(described)))
    if not os.path.realpath(path).startswith(f"{directory.rstrip('/')}/"):
        problem = f"{place}: {path} is not in {directory}, the directory of {os.path.basename(described)}"
        hint = "put it there; or say --own, where the file is your own (libvirt-xml and vmx)."
        raise SubmitError(f"{problem}, and would go with the job although a stranger may have named it.", hint)


def beside(options: argparse.Namespace, name: str, place: str) -> str:
    """Return the full path of a file that another one names, which must be beside it. Raises `SubmitError`."""
    full = os.path.join(os.path.dirname(os.path.abspath(options.file)), name)
    if not options.own:
        require_beside(full, place, options.file)
    return full


def convert(disk: GuestDisk, directory: str, others: Container[str], summary: Summary, *, force: bool) -> None:
    """Use a qcow2 image of the disk, made in `directory` under no name of the `others`. Raises `SubmitError`.

    No image that it is made of is replaced, whatever `force` says.
    """
    stem = simple_name(os.path.splitext(os.path.basename(disk.path))[0], "disk")
    names = chain([f"{stem}.qcow2"], (f"{stem}-{number}.qcow2" for number in count(2)))
    taken = {*_layers(disk), *summary.sources, *map(os.path.realpath, summary.made)}
    paths = (os.path.join(directory, name) for name in names if name not in others)
    target = next(path for path in paths if os.path.realpath(path) not in taken)
    with _anew(disk, target, summary, force=force) as path:
        qemu_img.convert(disk.path, CONVERTIBLE[disk.format], path, "qcow2", seconds=CONVERT)
    disk.what = disk.what or f"{'floppy' if disk.boot_class == 'fd' else 'disk'} {disk.path}"
    disk.steps.append(f"converted to {target}")
    disk.path, disk.format, disk.name, disk.files = target, "qcow2", "", []


def _layers(disk: GuestDisk) -> set[str]:
    """Return the real paths of an image, of its parts and of its backing files."""
    path, form, found = disk.path, CONVERTIBLE[disk.format], set(map(os.path.realpath, disk.files))
    with suppress(qemu_img.Trouble):  # the conversion fails, too
        while path and (real := os.path.realpath(path)) not in found:
            found.add(real)
            info = qemu_img.info(path, form)
            path, form = info.get("full-backing-filename", ""), info.get("backing-filename-format", form)
    return found


def create(
    disk: GuestDisk, size: int, directory: str, summary: Summary, *, force: bool, base: GuestDisk | None = None
) -> None:
    """Make the image of a disk, empty or a copy of `base`, of at least `size` bytes. Raises `SubmitError`."""
    target = os.path.join(directory, os.path.basename(disk.path))
    form, content = CONVERTIBLE[disk.format], f"a copy of {base.path}" if base else "with nothing on it"
    with _anew(disk, target, summary, force=force) as path:
        if base is None:
            qemu_img.create_empty(path, form, size)
        else:
            qemu_img.convert(base.path, CONVERTIBLE[base.format], path, form, seconds=CONVERT)
            least = int(qemu_img.info(path, form)["virtual-size"])
            if size > least:
                qemu_img.enlarge(path, form, size)
            size = max(size, least)
    disk.what = disk.what or f"disk {disk.path}"
    disk.steps.append(f"made as {target}, {content}, of {size / (1 << 30):g} GiB")
    disk.path = target


@contextmanager
def _anew(disk: GuestDisk, target: str, summary: Summary, *, force: bool) -> Iterator[str]:
    """Yield a temporary path for an image, in a directory of its own without links; then move it to the target."""
    free(target, summary, force=force)
    try:
        with tempfile.TemporaryDirectory(dir=os.path.dirname(target), prefix=".vmgahp-") as own:
            yield (path := os.path.join(own, "disk"))
            os.replace(path, target)
    except (OSError, qemu_img.Trouble) as error:
        raise _refused(disk, f"{target} cannot be made of it: {error}", "see what qemu-img says of it.") from error
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
    directory, names = os.path.dirname(disk.path), list(dict.fromkeys(flat_names(disk.path)))
    for name in names:
        if not name or name in (".", "..") or set("/\\:") & set(name) or os.path.islink(f"{directory}/{name}"):
            raise _refused(disk, f"a part of it is {name!a}", "put all its files into one directory.")
    return [os.path.join(directory, name) for name in names]


def flat_names(path: str) -> list[str]:
    """List the data files of a VMDK that is only a descriptor, as it names them."""
    with open(path, "rb") as file:
        data = file.read(_MOST_DESCRIPTION)
    text = data.decode("utf-8", "replace") if data.startswith(b"#") else ""
    # Possessive, and with no line end before the word: a megabyte of digits, or of empty lines, would take hours.
    return re.findall(r'^[^\S\n]*+R[WD]\w*+\s++[-+\d]++\s*+[^\s"]*+\s*+"([^"\n]*+)', text, re.MULTILINE)


def largest(disk: GuestDisk) -> int:
    """Return the bytes to which an image can grow when its guest writes to it. Raises `SubmitError`."""
    size = os.path.getsize(disk.path)
    return max(size, int(_asked(disk, qemu_img.info)["virtual-size"])) if disk.writable else size


def _asked(disk: GuestDisk, ask: Callable[..., T], **how: bool) -> T:
    """Return the answer of a function of `qemu_img` about the disk. Raises `SubmitError`."""
    try:
        return ask(disk.path, CONVERTIBLE[disk.format], **how)
    except qemu_img.NotInstalled as error:
        raise SubmitError(f"{error.program} is not installed.", "install qemu-utils and util-linux.") from error
    except qemu_img.Trouble as error:
        raise _refused(disk, f"qemu-img cannot read it: {error}", f"see whether it is {disk.format}.") from error


def _refused(disk: GuestDisk, problem: str, hint: str) -> SubmitError:
    return SubmitError(f"{disk.place or 'The disk'}: {disk.path}: {problem}.", hint)


# The front end for images alone

_OF_OTHERS = re.compile(r"(?<![a-z])(aarch64|arm64|armhf|ppc64(?:le|el)?|s390x|riscv64)(?![a-z0-9])", re.IGNORECASE)
"""An architecture other than x86_64 in the name of an image, as those for clouds have it."""
_ARCH = f"{OPTION_PREFIX}Arch"


def machine(options: argparse.Namespace, summary: Summary) -> Guest:
    """Make a VM of images, URLs of transfer plugins, and images of the machines' catalog. Raises `SubmitError`."""
    disks = [_disk(path, options, summary) for path in options.file]
    for number, disk in enumerate(disks, start=1):
        disk.boot = number
    stem = disks[0].image or os.path.splitext(os.path.basename(disks[0].name or disks[0].path))[0]
    nics = [GuestNic(options.network)] if options.network not in ("", "none") else []
    made = Guest(name=simple_name(options.name, stem, "vm"), disks=disks, nics=nics)
    if options.firmware:
        made.options["Firmware"] = options.firmware
    return made


def _disk(path: str, options: argparse.Namespace, summary: Summary) -> GuestDisk:
    if path.lower().startswith(f"{CATALOG}:") and not os.path.lexists(path):
        disk = _of_catalog(path.partition(":")[2], options, summary)
    elif "://" in path:
        disk = _of_url(path)
    else:
        disk = _of_file(path, options, summary)
    if disk.format == "iso":
        disk.bus, disk.writable = "sata", False
    if (found := _OF_OTHERS.search(os.path.basename(path))) and not any(_ARCH in line for line in options.append):
        also = f"; --append '+{_ARCH} = \"{ARM}\"' asks for it" if found[1].lower() in (ARM, "arm64") else ""
        summary.advise(f"{path} is called like an image of {found[1]}, and the job has x86_64{also}.")
    return disk


def _of_file(path: str, options: argparse.Namespace, summary: Summary) -> GuestDisk:
    said = options.format.lower()
    if said and said not in CONVERTIBLE:
        raise SubmitError(f"{options.format!a} is none of the formats {', '.join(CONVERTIBLE)}.", "name one of them.")
    full = os.path.abspath(path)
    disk = GuestDisk(full, said, what=f"disk {path}", is_sure=bool(said))
    if options.shared:
        disk.format = said or named_format(full)
        if not disk.format:
            raise SubmitError(f"{path}: its name does not say what format it has.", "say --format.")
        return disk
    disk.path = _unpacked(full, options, summary)
    if disk.path != full:
        disk.steps.append(f"unpacked to {disk.path}")
    if not said:
        find_format(disk)
    return disk


def _of_catalog(name: str, options: argparse.Namespace, summary: Summary) -> GuestDisk:
    """Use an image of the machines' catalog, with the facts from this machine's catalog if it has one."""
    if not catalog.is_name(name):
        raise SubmitError(f"{name!a} cannot be the name of an image of a catalog.", "say catalog:NAME.")
    disk = GuestDisk("", "", image=name, what=f"{CATALOG}:{name}")
    here = None
    with suppress(Fault):  # it may be valid where the job runs
        here = catalog.read(config.load(os.environ))
    if here is None:
        return disk
    if (entry := here.entries.get(name)) is None:
        summary.advise(f"The catalog of this machine, {here.path}, has no {name}; the job waits for one that has.")
        return disk
    disk.format = "iso" if entry.kind == "cdrom" else ""
    options.memory = options.memory or entry.min_memory
    if options.memory < entry.min_memory:
        problem = f"The image {name} needs {entry.min_memory} MiB of memory, by the catalog of this machine."
        raise SubmitError(problem, f"say --memory {entry.min_memory}.")
    return disk


def _of_url(path: str) -> GuestDisk:
    if path.partition("://")[0].lower() not in METHODS:  # HTCondor's own plugins transfer a file unchanged
        form = named_format(name := os.path.basename(path))
        if not PLAIN_NAME.fullmatch(name) or not form:
            problem = f"{path!a} does not end with the name of an image, such as image.qcow2."
            raise SubmitError(problem, "fetch the image first.")
        return GuestDisk("", form, url=path, name=name)
    try:
        wanted = parse_url(path)
    except TransferError as error:
        raise SubmitError(str(error)) from error
    return GuestDisk("", "qcow2", url=path, name=wanted.name)


def _unpacked(path: str, options: argparse.Namespace, summary: Summary) -> str:
    """Decompress an image if it is compressed, as downloads are; return the image's path. Raises `SubmitError`."""
    stem, ending = os.path.splitext(os.path.basename(path))
    with opened(path) as file:
        kind = compression_of(file.read(HEADER))
        # A guest may have written those first bytes, too: an image declared as such is one, whatever they are.
        if not kind or (options.format and ending.lower() not in ENDINGS):
            return path
        if stem.lower().endswith(".tar") or ending.lower() == ".tgz":
            raise SubmitError(f"{path} is a compressed archive.", "unpack it, and name the image in it.")
        name = stem if ending.lower() in ENDINGS else f"{stem}.img"
        target = os.path.join(options.dir, simple_name(name, "disk.img"))
        write_unpacked(unpacked_content(file, kind, path), target, summary, force=options.force)
        return target
