"""The words of a virt-install command line as a job: virt-install itself converts them to a domain.

It runs as the caller, and only prints (``--print-xml``). Its other work, such as making an image or a drive for
cloud-init, is done here, in the job's own way, or refused.
"""

import argparse
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from lxml import etree

from vmgahp.commands.submit import images, libvirt_xml
from vmgahp.commands.submit.machine import Guest, GuestDisk, SubmitError, Summary, os_errors_as
from vmgahp.commands.submit.xml_input import child, children, local, read
from vmgahp.host.run import run
from vmgahp.images.formats import CONVERTIBLE
from vmgahp.job.options import META_DATA, NETWORK_CONFIG, USER_DATA

PROGRAM = "virt-install"
DEADLINE = 120.0
"""The deadline in seconds for virt-install, whose libvirt may first have to query a dozen QEMUs."""

_REFUSED = {
    **dict.fromkeys(("--location", "-l", "--install"), "fetches a kernel and runs an installer of the network"),
    "--unattended": "makes files for an installer",
    "--initrd-inject": "makes files for an installer",
}
"""The options after which the printed domain only has names of temporary files."""
_OWN = ("--autostart", "--transient", "--destroy-on-exit", "--noreboot", "--wait", "--autoconsole", "--noautoconsole")
"""The options about how virt-install runs the VM."""
_DEALT_WITH = (*_REFUSED, *_OWN, "--cloud-init", "--disk")
_CLOUD_INIT = {"user-data": USER_DATA, "meta-data": META_DATA, "network-config": NETWORK_CONFIG}


def machine(options: argparse.Namespace, summary: Summary) -> Guest:
    """Have virt-install read the words. Raises `SubmitError`."""
    words = _taken(options.file, made := Guest(""), summary)
    domain, installs = _printed(words)
    read_so = argparse.Namespace(**vars(options) | {"file": PROGRAM, "own": True})
    to_make = [*_to_make(words)]
    if installs:
        _boot_what_is_installed(domain, summary)
    guest = libvirt_xml.of_domain(domain, read_so, summary)
    guest.options |= made.options
    guest.files += made.files
    if not any("mac=" in word for word in words):
        for nic in guest.nics:
            nic.mac = nic.card = ""  # generated for one VM, and the file may be used for many
    for disk in guest.disks:
        if _is_missing(disk.path):
            new = next((one for one in to_make if one.name in ("", os.path.basename(disk.path))), None)
            if new is None or options.shared:
                raise SubmitError(f"{disk.path} is not there.", "make it by qemu-img create, or bring it here.")
            to_make.remove(new)
            images.create(disk, new.size, options.dir, summary, force=options.force, base=_base(new, summary))
    if any(disk.path in summary.made for disk in guest.disks):
        # The largest sizes of all disks; by default HTCondor requests space only for the transferred bytes.
        room = sum(map(images.largest, guest.disks))
        guest.commands["request_disk"] = str(-(-room >> 10))
        summary.carry("", "room for what is written to new disks", f"request_disk = {guest.commands['request_disk']}")
    return guest


def _taken(words: Sequence[str], made: Guest, summary: Summary) -> list[str]:
    """Return the words for virt-install, without those that are handled here. Raises `SubmitError`."""
    kept: list[str] = []
    given = iter(words)
    for word in given:
        name, (_, equals, value) = _option(word), word.partition("=")
        if name in _REFUSED:
            raise SubmitError(
                f"{name} {_REFUSED[name]}, which is no job.",
                "start from an image that is installed (--import), or from an installer on a CD (--cdrom).",
            )
        if name == "--cloud-init":
            _cloud_init(value if equals else next(given, ""), made, summary)
            kept += [] if "--import" in words else ["--import"]
            continue
        if name in _OWN:
            summary.skip(name, word, "HTCondor starts the VM, and waits for its end")
        kept.append(word)
    return kept


def _option(word: str) -> str:
    """Return the full name of an option that is handled here; virt-install accepts abbreviations."""
    name = word.partition("=")[0]
    if name in _DEALT_WITH or not name.startswith("--"):
        return "-l" if name.startswith("-l") else name
    return next((option for option in _DEALT_WITH if option.startswith(name)), name)


def _cloud_init(value: str, made: Guest, summary: Summary) -> None:
    """Use the given files for cloud-init. Raises `SubmitError`."""
    for part in filter(None, value.split(",")):
        name, _, path = part.partition("=")
        if name == "disable":
            summary.skip("--cloud-init", part, "the drive is there at every start")
            continue
        if name not in _CLOUD_INIT or not os.path.isfile(path):
            raise SubmitError(
                f"--cloud-init {part}: {'there is no such file' if name in _CLOUD_INIT else 'it is for installing'}.",
                "write what is wanted into a file for cloud-init, and say --cloud-init user-data=FILE.",
            )
        made.options[_CLOUD_INIT[name]] = os.path.basename(path)
        made.files.append(os.path.abspath(path))
    if USER_DATA not in made.options:
        raise SubmitError("--cloud-init without user data makes a password of its own.", "add user-data=FILE.")


def _printed(words: Sequence[str]) -> tuple[etree._Element, bool]:
    """Return the domain that virt-install would start first, and True if it would start another one after it."""
    argv = [PROGRAM, *words, "--print-xml", "--dry-run"]
    with os_errors_as(f"{PROGRAM} cannot be run", "install the package virtinst."):
        done = run(argv, deadline=DEADLINE, environ={**os.environ, "LC_ALL": "C.UTF-8"}, directory=os.getcwd())
    if done.status is None:
        raise SubmitError(f"{PROGRAM} had not ended after {DEADLINE:g} s.", "try it with --print-xml --dry-run.")
    if done.status != 0:
        said = done.err.decode(errors="replace").rpartition("ERROR")[2].strip().partition("\n\n")[0]
        problem = " ".join(said.split()) or f"nothing, and ends with {done.status}"
        raise SubmitError(f"{PROGRAM} says: {problem}", "see virt-install --help.")
    first, end, rest = done.out.partition(b"</domain>")
    root = read(first + end, f"what {PROGRAM} prints")
    if local(root.tag) != "domain":
        raise SubmitError(f"{PROGRAM} prints no domain.", "leave out what makes it print something else.")
    return root, bool(rest.strip())


def _boot_what_is_installed(domain: etree._Element, summary: Summary) -> None:
    """Boot from the new disk of an installation once it is bootable."""
    system, devices = child(domain, "os"), child(domain, "devices")
    disks = [] if devices is None else list(children(devices, "disk"))
    files = [str(disk.xpath("string(source/@file)")) for disk in disks if disk.get("device", "disk") == "disk"]
    summary.advise("The job ends when the guest powers off, not when it reboots: let the installer power it off.")
    if system is None or not files or not all(map(_is_missing, files)):
        return
    for boot in list(children(system, "boot")):
        system.remove(boot)
    summary.change("", "boot from the CD", "boot from the CD while the disk is empty", "reboots run what is installed")


class _New(NamedTuple):
    """A disk that virt-install would make."""

    name: str
    """The name of its file; empty if virt-install chooses one."""
    size: int
    """The size in bytes."""
    backing: str
    """The path of the image with whose content it begins; empty for none."""
    backing_format: str


def _to_make(words: Sequence[str]) -> Iterator[_New]:
    """Yield the disks that do not exist and must be made, in the order of the words."""
    for word, value in pairwise([*words, ""]):
        if _option(word) != "--disk":
            continue
        parts = _parts(word.partition("=")[2] if "=" in word else value)
        path, size = parts["path"], parts.get("size", "")
        if re.fullmatch(r"\d{1,6}(?:\.\d{1,3})?", size) and (not path or _is_missing(path)):
            backing = parts.get("backing_store", ""), parts.get("backing_format", "")
            yield _New(os.path.basename(path), int(float(size) * (1 << 30)), *backing)


def _parts(value: str) -> dict[str, str]:
    """Split the value of --disk as virt-install does, by commas, with shell quoting; a path may have no name."""
    splitter = shlex.shlex(value, posix=True)
    splitter.commenters, splitter.whitespace, splitter.whitespace_split = "", ",", True
    try:
        words = list(splitter)
    except ValueError as error:
        raise SubmitError(f"--disk {value}: {error}.", "close the quote.") from error
    first = words[0] if words and "=" not in words[0] else ""
    return {"path": first} | dict(word.split("=", 1) for word in words if "=" in word)


def _base(new: _New, summary: Summary) -> GuestDisk | None:
    """Check the image with whose content a new disk begins, None for an empty disk. Raises `SubmitError`.

    The disk becomes a copy, because an overlay only works on a machine that has its backing file at the same path.
    """
    if not new.backing:
        return None
    base = GuestDisk(os.path.abspath(new.backing), new.backing_format, place=f"backing_store={new.backing}")
    base.is_sure = bool(new.backing_format)
    if base.format and base.format not in CONVERTIBLE:
        raise SubmitError(f"backing_format={base.format} is none of {', '.join(CONVERTIBLE)}.", "name one of them.")
    if not base.format:
        images.find_format(base)
    images.check(base, summary, flatten=True)
    return base


def _is_missing(path: str) -> bool:
    """Return True if a file certainly does not exist: in an inaccessible directory it may exist."""
    try:
        os.lstat(path)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False
