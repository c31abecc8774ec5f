"""UEFI firmwares: the one that a guest has, and the file of its variables.

libvirt leaves that file behind when a domain ends. It stays where libvirt puts it, in a directory that is
libvirt's own. In the scratch directory it would be no safer: libvirtd makes the file as root, by its name. It
need not travel with a checkpoint, for QEMU carries its content in the memory image and writes all of it into
the new file.

libvirt chooses the firmware of a domain that starts, but not of one that is restored (9.0): the XML must name it then.
"""

from __future__ import annotations

import json
import os
from typing import NamedTuple
from xml.etree import ElementTree as etree

from vmgahp.drivers.base import Logger
from vmgahp.job.kinds import ARM

SYSTEM_DIRECTORY = "/var/lib/libvirt/qemu/nvram"

DESCRIPTORS = "/etc/qemu/firmware", "/usr/share/qemu/firmware"
"""The directories of the firmwares' descriptors, one JSON file each (QEMU's ``docs/interop/firmware.json``)."""

SUFFIXES = ("_VARS.fd", "_VARS.qcow2", "_VARS.raw")
"""The suffixes that libvirt appends to the domain's name (``qemuDomainNVRAMPathFormat``; with the format since 10.9).
"""


def forget(name: str, uri: str, log: Logger) -> None:
    """Remove the firmware's variables of a job's domain that does not run. Raises nothing."""
    for suffix in SUFFIXES:
        path = os.path.join(directory(uri), name + suffix)
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            log(f"{path}, the memory of a firmware, cannot be removed: {error.strerror}")


def directory(uri: str) -> str:
    """Return the directory in which the libvirtd at `uri` keeps them."""
    if not uri.endswith("/session"):
        return SYSTEM_DIRECTORY
    configuration = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return os.path.join(configuration, "libvirt/qemu/nvram")


class Firmware(NamedTuple):
    """A firmware of this machine, as its descriptor has it."""

    template: str
    """The template of a guest's own variables."""
    format: str
    secure: bool
    """True if it boots signed systems only, once it has keys."""
    arches: tuple[str, ...] = ()
    """The architectures of the guests that boot by it."""


def installed() -> dict[str, Firmware]:
    """Return the firmwares of this machine that are in two files, by the path of the first, the code."""
    found: dict[str, Firmware] = {}
    for place in DESCRIPTORS:
        try:
            names = sorted(os.listdir(place))
        except OSError:
            continue
        for name in names:
            try:
                with open(os.path.join(place, name), encoding="utf-8") as file:
                    descriptor = json.load(file)
                mapping = descriptor["mapping"]
                found.setdefault(
                    mapping["executable"]["filename"],
                    Firmware(
                        mapping["nvram-template"]["filename"],
                        mapping["executable"].get("format", "raw"),
                        "secure-boot" in descriptor["features"],
                        tuple(target["architecture"] for target in descriptor["targets"]),
                    ),
                )
            except (OSError, ValueError, LookupError, TypeError):
                continue  # of another kind, or no descriptor at all
    return found


def of_a_restore(ours: str, saved: str, uri: str) -> str:
    """Return our domain XML with the firmware of the saved domain, if it boots by one.

    The saved XML is not trusted: only the choice among this machine's own firmwares is taken from it. Raises
    LookupError, with a sentence, if this machine does not have that firmware.
    """
    domain = etree.fromstring(ours)
    system = domain.find("os[@firmware='efi']")
    if system is None:
        return ours
    path = (etree.fromstring(saved).findtext("os/loader") or "").strip()
    firmware = installed().get(path)
    wants_secure = system.find("firmware/feature[@name='secure-boot'][@enabled='yes']") is not None
    if firmware is None or firmware.secure != wants_secure:
        raise LookupError(f"the firmware that it was saved with, {path[:200]!a}, is not one that the job gets here")
    del system.attrib["firmware"]
    for part in (*system.findall("firmware"), *system.findall("nvram")):
        system.remove(part)
    loader = etree.SubElement(system, "loader", readonly="yes", type="pflash")
    loader.text = path
    nvram = etree.SubElement(system, "nvram", template=firmware.template)
    suffix = SUFFIXES[0]
    if firmware.format != "raw":
        loader.set("format", firmware.format)
        nvram.set("format", firmware.format)
        suffix = f"_VARS.{firmware.format}"
    if wants_secure and system.find(f"type[@arch='{ARM}']") is None:
        loader.set("secure", "yes")  # implemented by SMM, which only x86 has
    nvram.text = os.path.join(directory(uri), (domain.findtext("name") or "") + suffix)
    return etree.tostring(domain, encoding="unicode")
