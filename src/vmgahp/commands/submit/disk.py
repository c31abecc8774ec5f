"""Disk images as a job: the VM is what the command line says."""

import argparse
import os

from vmgahp.commands.submit.machine import Guest, GuestDisk, GuestNic, simple_name
from vmgahp.commands.submit.summary import SubmitError, Summary
from vmgahp.images.formats import FORMATS, UnclearFormat, image_format


def machine(options: argparse.Namespace, _summary: Summary) -> Guest:
    """A VM with the disks that were named: images, or URLs of the file transfer plugin. Raises `SubmitError`."""
    disks = [_disk(path, options) for path in options.file]
    stem = os.path.splitext(os.path.basename(disks[0].name or disks[0].path))[0]
    nics = [GuestNic(options.network)] if options.network not in ("", "none") else []
    made = Guest(name=simple_name(options.name or stem, "vm"), disks=disks, nics=nics)
    if options.firmware:
        made.options["Firmware"] = options.firmware
    return made


def _disk(path: str, options: argparse.Namespace) -> GuestDisk:
    from vmgahp.daemon.transfer_plugin import METHODS, TransferError, parse_url

    scheme, colon, _ = path.partition("://")
    if colon:
        if scheme.lower() not in METHODS:
            raise SubmitError(f"{path!a} is no URL of {' or '.join(METHODS)}.", "fetch the image first.")
        try:
            wanted = parse_url(path)
        except TransferError as error:
            raise SubmitError(str(error)) from error
        return GuestDisk("", "qcow2", url=path, name=wanted.name)
    full = os.path.abspath(path)
    form = options.format
    if not form and full.lower().endswith(".iso"):
        form = "iso"
    try:
        if not form or form not in FORMATS:
            with open(os.devnull if options.shared else full, "rb") as file:
                form = image_format(full, form, file)
    except UnclearFormat as error:
        raise SubmitError(f"{path}: {error}.", "say --format.") from error
    except OSError as error:
        raise SubmitError(f"{path} cannot be opened ({error.strerror}).") from error
    disk = GuestDisk(full, form)
    if form == "iso":
        disk.bus, disk.writable = "sata", False
    return disk
