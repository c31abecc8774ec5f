"""A Vagrant box as a job: of the libvirt, VMware or VirtualBox provider, as a .box file or unpacked.

A box is a stranger's archive. It is read as a package is (`package`), and only what the box's metadata, .vmx or .ovf
names is taken out of it. Its Vagrantfile is a program in Ruby and never run: plain assignments of numbers and words
are read, and every other line is told.
"""

import argparse
import json
import os
import re
import tempfile
from typing import Any

from vmgahp.commands.submit import ovf, vmx
from vmgahp.commands.submit.images import flat_names
from vmgahp.commands.submit.machine import Guest, GuestDisk, GuestNic, simple_name
from vmgahp.commands.submit.package import Package, Reference
from vmgahp.commands.submit.summary import SubmitError, Summary
from vmgahp.commands.submit.unpack import compression_of, content, write
from vmgahp.images.formats import FORMATS, HEADER, looks_like

METADATA = "metadata.json"
VAGRANTFILE = "Vagrantfile"
USUAL_MEMORY = 512
"""MiB that vagrant-libvirt gives a VM of which nobody says it."""
_DEEPEST = 4
"""Directories of Vagrant's own above a box: its name, version and architecture, then its provider."""
_SLASH = "-VAGRANTSLASH-"
"""What stands for the slash in the name of a box's directory."""
_ARCHITECTURES = {"amd64": "", "x86_64": "", "arm64": "aarch64", "aarch64": "aarch64", "unknown": ""}
_SETTING = re.compile(
    r"""\w+\.(?:vmx\[['"](?P<entry>\w+)['"]\]|(?P<name>[a-z_]+))\s*=\s*['"]?(?P<value>[\w./:-]*)['"]?\s*(?:\#.*)?""",
    re.ASCII,
)
_CUSTOMIZED = re.compile(
    r"""\w+\.customize[ (]\s*\[\s*['"]modifyvm['"],\s*:id,\s*['"]--(?P<name>memory|cpus)['"],\s*"""
    r"""['"]?(?P<value>\d+)['"]?\s*\]\)?""",
    re.ASCII,
)
_BLOCK = re.compile(r"(?:end|Vagrant\.configure\b.*|\w+\.vm\.(?:provider|define)\b.*\bdo\b.*|require\b.*|#.*)?")
_LONGEST_LINE = 500
_MISSED = re.compile(r"\w+\.(?:vm\.)?(?:provision|disk|storage|customize|vmx\b)")
_BUSES = {"virtio": "", "sata": "sata", "ide": "ide", "scsi": "sata"}


def machine(options: argparse.Namespace, summary: Summary) -> Guest:
    """Read a box. Raises `SubmitError`."""
    read_so = argparse.Namespace(
        **vars(options) | {"own": False, "as_is": False, "system": "", "configuration": "", "property": []}
    )
    if os.path.isdir(options.file):
        return _of(_directory(options.file), read_so, summary)
    with tempfile.TemporaryDirectory(dir=options.dir, prefix=".vmgahp-") as own:
        return _of(_archive(options, own, summary), read_so, summary)


def _directory(path: str) -> str:
    """Find the directory of an unpacked box, which may be some directories below, as Vagrant keeps boxes."""
    found = []
    for directory, names, files in os.walk(path):
        if METADATA in files:
            found.append(directory)
            names.clear()
        if directory[len(path) :].count(os.sep) >= _DEEPEST:
            names.clear()
    if len(found) != 1:
        said = ", ".join(os.path.relpath(one, path) for one in sorted(found)[:20])
        raise SubmitError(f"{path} has {len(found)} boxes.", f"name one of them: {said or METADATA + ' is missing'}.")
    return found[0]


def _archive(options: argparse.Namespace, own: str, summary: Summary) -> str:
    """The archive without its compression, where it has one."""
    try:
        with open(options.file, "rb") as file:
            kind = compression_of(file.read(HEADER))
            file.seek(0)
            if not kind:
                return str(options.file)
            target = os.path.join(own, f"{os.path.basename(options.file)}.tar")
            write(content(file, kind, options.file), target, summary, force=False)
            summary.made.remove(target)  # it goes with its directory
            return target
    except OSError as error:
        raise SubmitError(f"{options.file} cannot be read ({error.strerror}).") from error


def _of(path: str, options: argparse.Namespace, summary: Summary) -> Guest:
    package = Package(path, summary, called=options.file)
    if not package.is_archive and not os.path.isdir(path):
        raise SubmitError(
            f"{options.file} is no Vagrant box: neither an archive nor a directory.", "see whether it is the file."
        )
    about = _metadata(package.text(METADATA))
    provider = about.get("provider")
    usual = _name(options.file)
    if provider == "libvirt":
        made = _libvirt(package, about, options, summary)
    elif provider in ("vmware_desktop", "vmware_fusion", "vmware_workstation", "vmware", "vmware_ovf"):
        made = _vmware(package, options, summary)
    elif provider == "virtualbox":
        made = ovf.of_package(package, options, summary)
    else:
        raise SubmitError(
            f"The box is one of the provider {str(provider)[:40]!a}.",
            "take one of libvirt, vmware_desktop or virtualbox.",
        )
    made.name = simple_name(options.name or usual, "vm")
    _architecture(about, made)
    for name, value in about.items():
        if name not in ("provider", "format", "disks", "architecture"):
            said = f"{name} = {json.dumps(value)[:80]}"
            summary.settle(
                f"{METADATA}: {name}", said, "the image says it" if name == "virtual_size" else "Vagrant's own"
            )
    if VAGRANTFILE in package.names():
        _vagrantfile(package.text(VAGRANTFILE), made, summary)
    if not made.memory_mib:
        made.memory_mib = USUAL_MEMORY
        made.changed["memory"] = "the box does not say it, and Vagrant gives as much"
    return made


def _name(path: str) -> str:
    """The box's name, of its file or of Vagrant's directory for it."""
    parts = os.path.abspath(path).split(os.sep)
    kept = next((part for part in reversed(parts) if _SLASH in part), "")
    return kept.replace(_SLASH, "-") or os.path.basename(path.rstrip("/")).removesuffix(".box")


def _metadata(data: bytes) -> dict[str, Any]:
    try:
        about = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SubmitError(f"{METADATA} is not JSON: {str(error)[:80]}.", "get the box again.") from error
    if not isinstance(about, dict):
        raise SubmitError(f"{METADATA} does not describe a box.", "get the box again.")
    return about


def _architecture(about: dict[str, Any], made: Guest) -> None:
    said = str(about.get("architecture", "amd64")).lower()
    if said not in _ARCHITECTURES:
        raise SubmitError(f"The box is for the architecture {said[:40]!a}.", "jobs have x86_64 and aarch64.")
    if _ARCHITECTURES[said]:
        made.options["Arch"] = _ARCHITECTURES[said]
        made.options.setdefault("Firmware", "uefi")
        made.places["Arch"] = f"{METADATA}: architecture"


def _libvirt(package: Package, about: dict[str, Any], options: argparse.Namespace, summary: Summary) -> Guest:
    """The disks are in the metadata, or one is box.img; vagrant-libvirt has the rest."""
    listed = about.get("disks", [{"path": "box.img"}])
    if not isinstance(listed, list) or not listed or len(listed) > 26:
        raise SubmitError(f"{METADATA}: disks is not a list of disks.", "get the box again.")
    made = Guest("", nics=[GuestNic("nat", place=METADATA, what="Vagrant's own network")])
    for number, entry in enumerate(listed):
        name = entry.get("path") if isinstance(entry, dict) else None
        if not isinstance(name, str):
            raise SubmitError(f"{METADATA}: disks[{number}] has no path.", "get the box again.")
        path = package.file(Reference(name), options.dir, force=options.force)
        place = f"{METADATA}: disks[{number}]" if "disks" in about else name
        disk = GuestDisk(path, _format(path, entry.get("format", about.get("format"))), place=place, what=name)
        disk.hostile = True
        made.disks.append(disk)
    return made


def _format(path: str, said: object) -> str:
    """What the metadata says, and otherwise what the image looks like, as Vagrant does it."""
    if said is not None:
        if not isinstance(said, str) or said.lower() not in FORMATS:
            raise SubmitError(f"{METADATA}: the format {str(said)[:40]!a} is none of {', '.join(FORMATS)}.")
        return said.lower()
    with open(path, "rb") as file:
        return looks_like(file.read(HEADER)) or "raw"


def _vmware(package: Package, options: argparse.Namespace, summary: Summary) -> Guest:
    """A .vmx and its disks; the parts of a split disk come along under their own names."""
    name = package.one(".vmx")
    place_of = os.path.dirname(name)

    def bring(file: str) -> str:
        inside = os.path.join(place_of, file.replace("\\", "/").rpartition("/")[2])
        return package.file(Reference(inside), options.dir, force=options.force)

    def locate(file: str, _place: str) -> str:
        path = bring(file)
        if not package.is_archive:
            return path  # `images.check` finds its parts beside it
        for part in flat_names(path):
            if os.path.basename(bring(part)) != part:
                raise SubmitError(f"{file!a} has a part called {part!a}.", "unpack the box, and name its directory.")
        return path

    return vmx.read(package.text(name), name, locate, options, summary)[0]


def _vagrantfile(data: bytes, made: Guest, summary: Summary) -> None:
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        place, line = f"{VAGRANTFILE} line {number}", line.strip()[:_LONGEST_LINE]
        if _BLOCK.fullmatch(line):
            continue
        found = _SETTING.fullmatch(line) or _CUSTOMIZED.fullmatch(line)
        if found and _set(found.groupdict().get("entry") or found["name"], found["value"], made, place):
            continue
        said = line[:100]
        if _MISSED.match(said):
            summary.lose(place, said, "Vagrant does it with a VM that it makes, and no job does")
        else:
            summary.settle(place, said, "Vagrant's own, for a VM that it makes")


def _set(name: str, value: str, made: Guest, place: str) -> bool:
    """Take over an assignment of a Vagrantfile; whether it is one that a job knows."""
    number = int(value) if value.isascii() and value.isdigit() and len(value) < 9 else 0
    if name in ("memory", "memsize") and number:
        made.memory_mib, made.places["memory"] = number, place
    elif name in ("cpus", "numvcpus") and 0 < number < 256:
        made.vcpus, made.places["vcpus"] = number, place
        made.options.pop("Topology", None)
    elif name == "disk_bus" and value in _BUSES:
        for disk in made.disks:
            disk.bus = _BUSES[value]
            if value == "scsi":
                disk.changed.append("jobs have no SCSI controller, the disk is on SATA")
    elif name == "nic_model_type" and value in ("virtio", "e1000", "e1000e", "rtl8139"):
        for nic in made.nics:
            nic.model = value
    elif name in ("loader", "firmware") and re.search(r"ovmf|aavmf|efi", value, re.IGNORECASE):
        made.options["Firmware"], made.places["Firmware"] = "uefi", place
    elif name == "tpm_version" and value:
        made.options["TPM"], made.places["TPM"] = True, place
    else:
        return False
    return True
