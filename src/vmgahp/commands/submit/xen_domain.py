"""A Xen domain as a job of the type xen: how it boots, and the features that Xen's guests lack."""

import argparse
import os
import re

from lxml import etree

from vmgahp.commands.files import open_regular
from vmgahp.commands.submit.images import require_beside
from vmgahp.commands.submit.machine import Guest
from vmgahp.commands.submit.summary import SubmitError, Summary
from vmgahp.commands.submit.xml_input import Account, child, text
from vmgahp.job.xen import HARDWARE, INCLUDED

_DEVICE = re.compile(r"(?:xvd|sd|hd)[a-z]{1,2}[0-9]{0,2}", re.ASCII)


def is_device(name: str) -> bool:
    """Return True if a Xen guest can have a disk, or a partition that is a disk by itself, of that name."""
    return _DEVICE.fullmatch(name) is not None


def boot(
    system: etree._Element | None, account: Account, made: Guest, summary: Summary, options: argparse.Namespace
) -> None:
    """Read the settings for HTCondor's xen commands. Raises `SubmitError`."""
    made.vm_type = "xen"
    kind = child(system, "type") if system is not None else None
    if options.as_is:
        raise SubmitError("--as-is is for QEMU's VMs.", "leave it out: the job becomes one of the type xen.")
    if text(kind) not in ("", "hvm", "linux", "xen"):
        raise SubmitError(f"Its operating system is of the type {text(kind)[:40]!a}, which jobs cannot have.")
    kernel = None if system is None else child(system, "kernel")
    if text(kind) in ("", "hvm") or kernel is None or system is None:
        way = HARDWARE if text(kind) == "hvm" else INCLUDED
        if system is not None and (loader := child(system, "loader")) is not None:
            account.take_all(loader)  # hvmloader, Xen's own firmware
        made.commands["xen_kernel"] = way
        summary.carry(account.place(system) if system is not None else "", "how it boots", f"xen_kernel = {way}")
        return
    for tag in ("kernel", "initrd"):
        if (element := child(system, tag)) is not None and text(element):
            account.take(element)
            made.commands[f"xen_{tag}"] = _file(element, account, made, options)
            summary.carry(account.place(element), f"{tag} {text(element)}", f"xen_{tag}")
    line = child(system, "cmdline")
    words = text(line).split()
    roots = [word.removeprefix("root=") for word in words if word.startswith("root=")]
    if line is None or not roots:
        raise SubmitError(f"{account.place(system)}: its kernel is told no root=.", "add it to the cmdline.")
    account.take(line)
    made.commands["xen_root"] = roots[-1]
    if others := [word for word in words if not word.startswith("root=")]:
        made.commands["xen_kernel_params"] = " ".join(others)
    summary.carry(account.place(line), f"cmdline {text(line)}", "xen_root and xen_kernel_params")


def _file(element: etree._Element, account: Account, made: Guest, options: argparse.Namespace) -> str:
    """Return the job's name of a kernel or an initrd, which is transferred. Raises `SubmitError`."""
    path = os.path.join(os.path.dirname(os.path.abspath(options.file)), text(element))
    if options.shared:
        return path
    place = account.place(element)
    if not options.own:
        require_beside(path, place, options.file)
    try:
        open_regular(path).close()
    except OSError as error:
        raise SubmitError(f"{place}: {path} cannot be opened ({error.strerror}).", "bring it here.") from error
    made.files.append(path)
    return os.path.basename(path)


def fit(made: Guest, summary: Summary) -> None:
    """Report the other features that Xen's guests cannot have, and remove them."""
    for name in made.options:
        summary.lose(made.places.get(name, ""), name, "jobs of Xen's cannot have it")
    made.options.clear()
    if made.vnc:
        made.vnc = False
        summary.skip(made.places.get("vnc", ""), "graphics", "jobs of Xen's have a text console, vm_console.log")
    for nic in made.nics:
        nic.model, nic.changed = "virtio", ["Xen's own NIC"]
    if made.boot and made.boot[0] != "hd":
        summary.lose("", f"boot from {made.boot[0]}", "Xen's VMs boot from their first hard disk")
    for disk in made.disks:
        if disk.format == "iso":
            disk.changed.append("a disk that is read only, and no drive")
