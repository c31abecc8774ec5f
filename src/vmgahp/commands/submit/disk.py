"""Disk images as a job: the VM is described by the command line.

The format of an image is the one given by the user, or the one on which name and content agree. If only the content
tells the format, a guest may have written it: the image is treated as untrusted, and may name no other file.
"""

import argparse
import os

from vmgahp import config
from vmgahp.commands.submit.images import ENDINGS, compression_of, find_format, opened, unpacked_content, write_unpacked
from vmgahp.commands.submit.machine import PLAIN_NAME, Guest, GuestDisk, GuestNic, SubmitError, Summary, simple_name
from vmgahp.daemon.transfer_plugin import METHODS, TransferError, parse_url
from vmgahp.errors import Fault
from vmgahp.images import CATALOG, catalog
from vmgahp.images.formats import CONVERTIBLE, HEADER, named_format


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
        find_format(disk)
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
    stem, ending = os.path.splitext(os.path.basename(path))
    with opened(path) as file:
        kind = compression_of(file.read(HEADER))
        file.seek(0)
        # A guest may have written those first bytes, too: an image declared as such is one, whatever they are.
        if not kind or (options.format and ending.lower() not in ENDINGS):
            return path
        name = stem if ending.lower() in ENDINGS else f"{stem}.img"
        if name.lower().endswith((".tar", ".tgz")) or ending.lower() == ".tgz":
            raise SubmitError(f"{path} is a compressed archive.", "unpack it, and name the image in it.")
        target = os.path.join(options.dir, simple_name(name, "disk.img"))
        write_unpacked(unpacked_content(file, kind, path), target, summary, force=options.force)
        return target
