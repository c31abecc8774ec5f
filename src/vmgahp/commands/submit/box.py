"""A Vagrant box as a job: of the libvirt, VMware or VirtualBox provider, as a .box file or unpacked.

A box is an untrusted archive. It is read as a package is (`ovf`), and only files named in the box's metadata, XML,
.vmx or .ovf are extracted. Its Vagrantfile is a program in Ruby, which is neither run nor parsed: the report has its
lines unchanged.
"""

import argparse
import json
import os
import tempfile
from typing import Any

from vmgahp.commands.submit import libvirt_xml, ovf, vmx
from vmgahp.commands.submit.images import compression_of, find_format, flat_names, unpacked_content, write_unpacked
from vmgahp.commands.submit.machine import Guest, GuestDisk, GuestNic
from vmgahp.commands.submit.ovf import Package
from vmgahp.commands.submit.report import SubmitError, Summary, os_errors_as, simple_name
from vmgahp.images.formats import FORMATS, HEADER

METADATA = "metadata.json"
VAGRANTFILE = "Vagrantfile"
_DOMAIN = "box.xml"
_OVF = "box.ovf"
_DEEPEST = 4
"""The number of directories of Vagrant's own above a box: its name, version and architecture, then its provider."""
_SLASH = "-VAGRANTSLASH-"
"""The text that stands for the slash in the name of a box's directory."""
_OF_VMWARE = ("vmware_desktop", "vmware_fusion", "vmware_workstation", "vmware")
_READ = ("provider", "format", "disks", "architecture")


def machine(options: argparse.Namespace, summary: Summary) -> Guest:
    """Read a box. Raises `SubmitError`."""
    read_so = argparse.Namespace(**vars(options) | {"own": False, "as_is": False, "system": "", "configuration": ""})
    if os.path.isdir(options.file):
        return _of(Package(_directory(options.file), summary, called=options.file), read_so, summary)
    with tempfile.TemporaryDirectory(dir=options.dir, prefix=".vmgahp-") as own:
        package = Package(_archive(options, own, summary), summary, called=options.file)
        if not package.is_archive:
            problem = f"{options.file} is no Vagrant box: neither an archive nor a directory."
            raise SubmitError(problem, "see whether it is the file.")
        return _of(package, read_so, summary)


def _directory(path: str) -> str:
    """Find the directory of an unpacked box, which may be several levels below, as Vagrant keeps boxes."""
    found = []
    for directory, names, files in os.walk(path):
        if METADATA in files or _OVF in files:
            found.append(directory)
            names.clear()
        if directory[len(path) :].count(os.sep) >= _DEEPEST:
            names.clear()
    if len(found) != 1:
        said = ", ".join(os.path.relpath(one, path) for one in sorted(found)[:20])
        raise SubmitError(f"{path} has {len(found)} boxes.", f"name one of them: {said or METADATA + ' is missing'}.")
    return found[0]


def _archive(options: argparse.Namespace, own: str, summary: Summary) -> str:
    """Decompress the archive, if it is compressed; return the path of the tar file."""
    with os_errors_as(f"{options.file} cannot be read"), open(options.file, "rb") as file:
        kind = compression_of(file.read(HEADER))
        if not kind:
            return str(options.file)
        target = os.path.join(own, f"{os.path.basename(options.file)}.tar")
        write_unpacked(unpacked_content(file, kind, options.file), target, summary, force=False)
        summary.made.remove(target)  # it is removed with its directory
        return target


def _of(package: Package, options: argparse.Namespace, summary: Summary) -> Guest:
    about: object = {"provider": "virtualbox"}
    if METADATA in package.names():
        try:
            about = json.loads(package.text(METADATA))
        except (ValueError, RecursionError) as error:
            raise SubmitError(f"{METADATA} is not JSON: {str(error)[:80]}.", "get the box again.") from error
    else:
        summary.advise(f"The box has no {METADATA}: it is taken for one of Vagrant 1, which are VirtualBox's.")
    if not isinstance(about, dict):
        raise SubmitError(f"{METADATA} does not describe a box.", "get the box again.")
    _list_unused(package, about, summary)
    provider = about.get("provider")
    if provider in ("libvirt", "kvm"):
        made = _libvirt(package, about, options, summary)
    elif provider in _OF_VMWARE:
        made = _vmware(package, options, summary)
    elif provider == "virtualbox":
        made = ovf.PackageReader(package, options, summary).read()
    else:
        problem = f"The box is one of the provider {str(provider)[:40]!a}."
        raise SubmitError(problem, "take one of libvirt, vmware_desktop or virtualbox.")
    # Vagrant keeps a box in a directory of its name.
    parts = os.path.abspath(options.file).split(os.sep)
    kept = next((part for part in reversed(parts) if _SLASH in part), "").replace(_SLASH, "-")
    stem = kept or os.path.basename(options.file.rstrip("/")).removesuffix(".box")
    made.name = simple_name(options.name, stem, "vm")
    made.set_architecture(str(about.get("architecture") or "").lower(), f"{METADATA}: architecture", summary)
    if made.options.get("Arch"):
        made.options.setdefault("Firmware", "uefi")
    return made


def _list_unused(package: Package, about: dict[str, Any], summary: Summary) -> None:
    """Report the rest of the metadata, and the Vagrantfile line by line."""
    for name, value in about.items():
        if name not in _READ:
            summary.skip(METADATA, f"{name} = {json.dumps(value)[:80]}")
    text = package.text(VAGRANTFILE).decode("utf-8", "replace") if VAGRANTFILE in package.names() else ""
    for number, line in enumerate(text.splitlines(), start=1):
        if (said := line.strip()) and not said.startswith("#"):
            summary.skip(f"{VAGRANTFILE} line {number}", said[:100])


def _libvirt(package: Package, about: dict[str, Any], options: argparse.Namespace, summary: Summary) -> Guest:
    """Read the XML of a domain, or the disks of the metadata; without these the disk is box.img."""
    if _DOMAIN in package.names():
        root = libvirt_xml.domain_of(package.text(_DOMAIN), _DOMAIN)

        def locate(file: str, _place: str) -> str:
            return package.file(os.path.basename(file), options.dir, force=options.force)

        return libvirt_xml.DomainReader(root, options, summary, locate).read()
    if not (options.memory and options.cpus):  # checked before an image of gigabytes is extracted
        problem = "The box does not say what memory and how many CPUs its VM has."
        raise SubmitError(problem, "give --memory and --cpus, as its Vagrantfile or its page names them.")
    made = Guest("", nics=[GuestNic("nat", place=METADATA, what="Vagrant's own network")])
    listed = about.get("disks", [{"path": "box.img"}])
    if not isinstance(listed, list) or not listed or len(listed) > 26:
        raise SubmitError(f"{METADATA}: disks is not a list of disks.", "get the box again.")
    for number, entry in enumerate(listed):
        name = entry.get("path") if isinstance(entry, dict) else None
        if not isinstance(name, str):
            raise SubmitError(f"{METADATA}: disks[{number}] has no path.", "get the box again.")
        said = str(entry.get("format") or about.get("format") or "").lower()
        if said and said not in FORMATS:
            raise SubmitError(f"{METADATA}: the format {said[:40]!a} is none of {', '.join(FORMATS)}.")
        path = package.file(name, options.dir, force=options.force)
        place = f"{METADATA}: disks[{number}]" if "disks" in about else name
        disk = GuestDisk(path, said, place=place, what=name)
        if not said:  # as Vagrant does
            find_format(disk)
        disk.hostile = True
        made.disks.append(disk)
    return made


def _vmware(package: Package, options: argparse.Namespace, summary: Summary) -> Guest:
    """Read a .vmx; the parts of a split disk are extracted under their own names."""
    name = package.one(".vmx")
    place_of = os.path.dirname(name)

    def bring(file: str) -> str:
        inside = os.path.join(place_of, file.replace("\\", "/").rpartition("/")[2])
        return package.file(inside, options.dir, force=options.force)

    def locate(file: str, _place: str) -> str:
        path = bring(file)
        if not package.is_archive:
            return path  # `images.check` finds its parts beside it
        for part in flat_names(path):
            if os.path.basename(bring(part)) != part:
                raise SubmitError(f"{file!a} has a part called {part!a}.", "unpack the box, and name its directory.")
        return path

    return vmx.read(package.text(name), name, locate, options, summary)[0]
