"""Disk images as a job: the VM is described by the command line.

The format of an image is the one given by the user, or the one on which name and content agree. If only the content
tells the format, a guest may have written it: the image is treated as untrusted, and may name no other file.
"""

import argparse
import os

from vmgahp import config
from vmgahp.commands.files import open_regular
from vmgahp.commands.submit.images import ENDINGS, compression_of, unpacked_content, write_unpacked
from vmgahp.commands.submit.machine import PLAIN_NAME, Guest, GuestDisk, GuestNic, SubmitError, Summary, simple_name
from vmgahp.daemon.transfer_plugin import METHODS, TransferError, parse_url
from vmgahp.errors import Fault
from vmgahp.images import CATALOG, catalog
from vmgahp.images.formats import CONVERTIBLE, HEADER, looks_like, named_format, not_a_disk

_ISO_MARK, _ISO_AT = b"CD001", 32769
_VHD_FOOTER = b"conectix"
"""The magic bytes of a VHD, in its last 512 bytes; a VHD of fixed size has them only there."""
_LUKS = b"LUKS\xba\xbe"


def machine(options: argparse.Namespace, summary: Summary) -> Guest:
    """Make a VM with the given disks: images, URLs of transfer plugins, images of the machines' catalog.

    Raises `SubmitError`.
    """
    disks = [_disk(path, options, summary) for path in options.file]
    for number, disk in enumerate(disks, start=1):
        disk.boot = number
    stem = disks[0].image or os.path.splitext(os.path.basename(disks[0].name or disks[0].path))[0]
    nics = [GuestNic(options.network)] if options.network not in ("", "none") else []
    made = Guest(name=simple_name(options.name or stem, "vm"), disks=disks, nics=nics)
    if options.firmware:
        made.options["Firmware"] = options.firmware
    return made


def _disk(path: str, options: argparse.Namespace, summary: Summary) -> GuestDisk:
    word, colon, name = path.partition(":")
    if colon and word.lower() == CATALOG and not os.path.lexists(path):
        disk = _of_catalog(name, options, summary)
    elif "://" in path:
        return _of_url(path)
    else:
        disk = _of_file(path, options, summary)
    if disk.format == "iso":
        disk.bus, disk.writable = "sata", False
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
        _look(disk)
    return disk


def _of_catalog(name: str, options: argparse.Namespace, summary: Summary) -> GuestDisk:
    """Use an image of the machines' catalog, with the facts from this machine's catalog if it has one."""
    if not catalog.is_name(name):
        raise SubmitError(f"{name!a} cannot be the name of an image of a catalog.", "say catalog:NAME.")
    disk = GuestDisk("", "", image=name, what=f"{CATALOG}:{name}")
    try:
        here = catalog.read(config.load(os.environ))
    except Fault:
        return disk  # it may be valid where the job runs
    entry = here.entries.get(name) if here else None
    if here and entry is None:
        summary.advise(f"The catalog of this machine, {here.path}, has no {name}; the job waits for one that has.")
    elif entry is not None and entry.kind == "cdrom":
        disk.format = "iso"
    if entry is not None and options.memory and options.memory < entry.min_memory:
        problem = f"The image {name} needs {entry.min_memory} MiB of memory, by the catalog of this machine."
        raise SubmitError(problem, f"say --memory {entry.min_memory}.")
    options.memory = options.memory or (entry.min_memory if entry is not None else 0)
    return disk


def _of_url(path: str) -> GuestDisk:
    if path.partition("://")[0].lower() not in METHODS:  # HTCondor's own plugins transfer a file unchanged
        name = os.path.basename(path)
        form = named_format(name)
        if not PLAIN_NAME.fullmatch(name) or not form:
            raise SubmitError(
                f"{path!a} does not end with the name of an image, such as image.qcow2.", "fetch the image first."
            )
        return GuestDisk("", form, url=path, name=name)
    try:
        wanted = parse_url(path)
    except TransferError as error:
        raise SubmitError(str(error)) from error
    return GuestDisk("", "qcow2", url=path, name=wanted.name)


def _unpacked(path: str, options: argparse.Namespace, summary: Summary) -> str:
    """Decompress an image if it is compressed, as downloads are; return the image's path. Raises `SubmitError`."""
    try:
        with open_regular(path) as file:
            header = file.read(HEADER)
            file.seek(0)
            kind = compression_of(header)
            stem, ending = os.path.splitext(os.path.basename(path))
            # A guest may have written those first bytes, too: an image declared as such is one, whatever they are.
            if not kind or (options.format and ending.lower() not in ENDINGS):
                return path
            name = stem if ending.lower() in ENDINGS else f"{stem}.img"
            if name.lower().endswith((".tar", ".tgz")) or ending.lower() == ".tgz":
                raise SubmitError(f"{path} is a compressed archive.", "unpack it, and name the image in it.")
            target = os.path.join(options.dir, simple_name(name, "disk.img"))
            write_unpacked(unpacked_content(file, kind, path), target, summary, force=options.force)
            return target
    except OSError as error:
        raise _closed(path, error) from error


def _closed(path: str, error: OSError) -> SubmitError:
    hint = "bring the image here; or, where the execute machines have it at this path, say --shared."
    return SubmitError(f"{path} cannot be opened ({error.strerror}).", hint)


def _look(disk: GuestDisk) -> None:
    """Detect the format of an image. Raises `SubmitError`."""
    try:
        with open_regular(disk.path) as file:
            header = file.read(HEADER)
            file.seek(_ISO_AT)
            is_iso = file.read(len(_ISO_MARK)) == _ISO_MARK
            file.seek(max(0, file.seek(0, os.SEEK_END) - 512))
            footer = file.read(len(_VHD_FOOTER))
    except OSError as error:
        raise _closed(disk.path, error) from error
    by_name = named_format(disk.path)
    content = looks_like(header) or ("vpc" if footer == _VHD_FOOTER else "")
    if content == "qcow2" and header[4:8] == b"\0\0\0\1":
        content = "qcow"
    if not content and (other := not_a_disk(header)):
        hint = "unpack it (an .ova is read by vmgahp submit ovf), or say --format raw if it is a disk all the same."
        raise SubmitError(f"{disk.path} begins like {other}, and so is no disk.", hint)
    if header.startswith(_LUKS):
        problem = f"{disk.path} is encrypted (LUKS), and no VM starts from it."
        raise SubmitError(problem, "say --format raw if the guest itself has the key, or write it decrypted.")
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
