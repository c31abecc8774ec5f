"""The capabilities of this machine and its libvirt, for the probe and for a start.

With VM_LIBVIRT_URI and VM_LIBVIRT_DOMAIN_TYPE the VM type libvirt is served by any hypervisor for which libvirt has a
driver: it starts and ends domains and reports their state. The features that depend on QEMU (the user's uid, the
console's socket, memory images) are not used with other hypervisors.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from typing import NamedTuple
from xml.etree import ElementTree as etree

import libvirt

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.drivers.libvirt.link.connection import LibvirtConnection
from vmgahp.drivers.surveyor import Logger
from vmgahp.host import kvm
from vmgahp.host.run import which
from vmgahp.job.attributes import ARM, UEFI, UEFI_SECURE, X86

# QEMU's capabilities


EMULATED = "x86_64", "aarch64"
"""The architectures that a guest may have beside that of the machine."""
MACHINES = {ARM: "virt", X86: "q35"}
"""The machine type, by architecture, for which the firmwares are queried."""
QEMU_DIRECTORY = "/var/lib/libvirt/qemu"
"""The directory of each domain's monitor socket and keys; QEMU must be able to enter it."""
TWO_GROUPS = f"QEMU needs two groups at once, for {QEMU_DIRECTORY} and for {kvm.DEVICE}, and libvirt gives it one"
"""The reason why QEMU cannot run as the job's user (`groups_for_qemu`)."""
TWO_GROUPS_HINT = f"chmod o+x {QEMU_DIRECTORY} (or chmod 666 {kvm.DEVICE}), or set VM_RUN_AS_JOB_USER = False."


def domain_capabilities(connection: libvirt.virConnect, domain_type: str) -> etree.Element:
    """Return libvirt's domain capabilities for VMs of this machine's architecture."""
    return etree.fromstring(connection.getDomainCapabilities(None, os.uname().machine, None, domain_type))


def of_machines(connection: libvirt.virConnect, arch: str, domain_type: str) -> etree.Element | None:
    """Return libvirt's domain capabilities for an architecture; None if it has no QEMU for it."""
    try:
        text = connection.getDomainCapabilities(None, arch, MACHINES.get(arch), domain_type)
    except libvirt.libvirtError as error:
        if error.get_error_code() in (libvirt.VIR_ERR_INVALID_ARG, libvirt.VIR_ERR_CONFIG_UNSUPPORTED):
            return None
        raise
    return etree.fromstring(text)


def uefis(capabilities: etree.Element | None) -> tuple[str, ...]:
    """Return the kinds of UEFI that are installed, by `of_machines`."""
    if capabilities is None or "efi" not in _values(capabilities, "os/enum[@name='firmware']"):
        return ()
    if capabilities.findtext("arch") == ARM:  # not in libvirt's answer, whose secure means x86's SMM
        secure = any(one.secure and ARM in one.arches for one in installed_firmwares().values())
    else:
        secure = "yes" in _values(capabilities, "os/loader/enum[@name='secure']")
    return (UEFI, UEFI_SECURE) if secure else (UEFI,)


def _values(capabilities: etree.Element, enum: str) -> list[str | None]:
    return [value.text for value in capabilities.iterfind(f"{enum}/value")]


def arches(capabilities: str, *, emulates: bool) -> list[str]:
    """Return the architectures of guests that run here, the machine's own first."""
    own = os.uname().machine
    found = [arch.get("name", "") for arch in etree.fromstring(capabilities).iterfind("guest/arch")]
    return [own, *(arch for arch in dict.fromkeys(found) if emulates and arch in EMULATED and arch != own)]


def has_passt(capabilities: etree.Element) -> bool:
    """Return True if user networking can use passt, with which libvirt was built; QEMU's own needs no program."""
    kinds = _values(capabilities, "devices/interface/enum[@name='backendType']")
    return "passt" in kinds and which("passt") is not None


def cpu_mode(settings: Settings, domain_type: str) -> str:
    """Return libvirt's CPU mode for jobs of a domain type: the administrator's, or the best one."""
    default = {"kvm": "host-passthrough", "qemu": "maximum"}.get(domain_type, "")
    return settings.string("VM_CPU_MODE") or default


def groups_for_qemu(domain_type: str) -> set[int]:
    """Return the groups that QEMU needs to enter libvirt's directory and, for KVM, to open its device."""
    needed = set()
    for path, bits in ((QEMU_DIRECTORY, 0o1), *([(kvm.DEVICE, 0o6)] if domain_type == "kvm" else ())):
        with suppress(OSError):  # it does not exist
            if (status := os.stat(path)).st_mode & bits != bits:
                needed.add(status.st_gid)
    return needed


# Other hypervisors


SETTING = "VM_LIBVIRT_DOMAIN_TYPE"


class Hypervisor(NamedTuple):
    """The self-description of a driver of libvirt."""

    name: str
    """The result of ``virConnectGetType``: LXC, Xen, TEST and so on."""
    version: int
    libvirt_version: int
    os_types: tuple[str, ...]
    """The OS types of its domains of the wanted type: ``hvm`` for machines, ``exe`` for containers; empty for none."""


def wanted_type(vm_type: str, settings: Settings) -> str:
    """Return the fixed domain type; empty for KVM or TCG. Raises `errors.MachineFault` if it is no word."""
    if vm_type == "qemu":
        return "qemu"
    kind = settings.string(SETTING).lower() if vm_type == "libvirt" else ""
    if kind and not re.fullmatch(r"[a-z]{1,20}", kind):
        problem = f"{SETTING} = {kind} ({settings.where(SETTING)}) is no domain type."
        hint = f"set {SETTING} to what virsh capabilities shows as <domain type=…>, such as lxc."
        raise errors.MachineFault(problem, hint)
    return kind


def ask_hypervisor(connection: LibvirtConnection, domain_type: str) -> Hypervisor:
    """Query the libvirt at VM_LIBVIRT_URI about a domain type. Raises `errors.MachineFault`."""

    def say(libvirtd: libvirt.virConnect) -> Hypervisor:
        guests = etree.fromstring(libvirtd.getCapabilities()).iterfind("guest")
        fitting = (each for each in guests if each.find(f"arch//domain[@type='{domain_type}']") is not None)
        kinds = dict.fromkeys(each.findtext("os_type") or "" for each in fitting)
        return Hypervisor(libvirtd.getType(), libvirtd.getVersion(), libvirtd.getLibVersion(), tuple(kinds))

    return connection.ask(say, "asking for its capabilities")


def require_hypervisor(connection: LibvirtConnection, domain_type: str, settings: Settings) -> Hypervisor:
    """Query the libvirt, and check that it takes descriptions of jobs. Raises `errors.MachineFault`."""
    found = ask_hypervisor(connection, domain_type)
    if not found.os_types:
        problem = f"{SETTING} = {domain_type}, and the libvirt at {connection.uri} has no domains of that type."
        hint = "set VM_LIBVIRT_URI to the connection that has them, such as lxc:///system (virsh -c URI capabilities)."
        raise errors.MachineFault(problem, hint)
    if "hvm" not in found.os_types and not settings.xml_script():
        kinds = ", ".join(found.os_types)
        problem = f"{SETTING} = {domain_type} has {kinds}, and the built-in description is of a machine."
        hint = "set LIBVIRT_XML_SCRIPT to a program of yours that describes the container of a job."
        raise errors.MachineFault(problem, hint)
    return found


def version(number: int) -> str:
    """Return libvirt's version number, 1,000,000 * major + 1,000 * minor + release, in the usual form."""
    return f"{number // 1000000}.{number // 1000 % 1000}.{number % 1000}"


# UEFI firmwares and the files of their variables


FIRMWARE_DESCRIPTORS = "/etc/qemu/firmware", "/usr/share/qemu/firmware"
"""The directories of the firmwares' descriptors, one JSON file each (QEMU's ``docs/interop/firmware.json``)."""
SUFFIXES = ("_VARS.fd", "_VARS.qcow2", "_VARS.raw")
"""The suffixes that libvirt appends to the domain's name (``qemuDomainNVRAMPathFormat``; with the format from 10.9)."""


def forget_firmware(name: str, uri: str, log: Logger) -> None:
    """Remove the firmware's variables of a job's domain that does not run. Raises nothing."""
    for suffix in SUFFIXES:
        path = os.path.join(firmware_directory(uri), name + suffix)
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            log(f"{path}, the memory of a firmware, cannot be removed: {error.strerror}")


def firmware_directory(uri: str) -> str:
    """Return the directory in which the libvirtd at `uri` keeps them."""
    if not uri.endswith("/session"):
        return f"{QEMU_DIRECTORY}/nvram"
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


def installed_firmwares() -> dict[str, Firmware]:
    """Return the firmwares of this machine that are in two files, by the path of the first, the code."""
    found: dict[str, Firmware] = {}
    for place in FIRMWARE_DESCRIPTORS:
        try:
            names = sorted(os.listdir(place))
        except OSError:
            continue
        for name in names:
            with suppress(OSError, ValueError, LookupError, TypeError):  # of another kind, or no descriptor at all
                with open(os.path.join(place, name), encoding="utf-8") as file:
                    descriptor = json.load(file)
                mapping = descriptor["mapping"]
                code, template = mapping["executable"], mapping["nvram-template"]["filename"]
                arches = tuple(target["architecture"] for target in descriptor["targets"])
                secure = "secure-boot" in descriptor["features"]
                found.setdefault(code["filename"], Firmware(template, code.get("format", "raw"), secure, arches))
    return found


def firmware_of_a_restore(ours: str, saved: str, uri: str) -> str:
    """Return our domain XML with the firmware of the saved domain, if it boots by one.

    The saved XML is not trusted: it only chooses among this machine's own firmwares. Raises LookupError otherwise.
    """
    domain = etree.fromstring(ours)
    system = domain.find("os[@firmware='efi']")
    if system is None:
        return ours
    path = (etree.fromstring(saved).findtext("os/loader") or "").strip()
    firmware = installed_firmwares().get(path)
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
    nvram.text = os.path.join(firmware_directory(uri), (domain.findtext("name") or "") + suffix)
    return etree.tostring(domain, encoding="unicode")
