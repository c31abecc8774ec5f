"""The capabilities of QEMU on this machine by libvirt, and what QEMU needs, regardless of the job."""

import os
from xml.etree import ElementTree as etree

import libvirt

from vmgahp.config import Settings
from vmgahp.drivers.libvirt import firmware, qemu_check
from vmgahp.host import kvm
from vmgahp.job.kinds import ARM, UEFI, UEFI_SECURE, X86

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
        secure = any(one.secure and ARM in one.arches for one in firmware.installed().values())
    else:
        secure = "yes" in _values(capabilities, "os/loader/enum[@name='secure']")
    return (UEFI, UEFI_SECURE) if secure else (UEFI,)


def _values(capabilities: etree.Element, enum: str) -> list[str | None]:
    return [value.text for value in capabilities.iterfind(f"{enum}/value")]


def arches(capabilities: str, *, emulates: bool) -> list[str]:
    """Return the architectures of guests that run here, the machine's own first, by libvirt's capabilities."""
    own = os.uname().machine
    found = [arch.get("name", "") for arch in etree.fromstring(capabilities).iterfind("guest/arch")]
    return [own, *(arch for arch in dict.fromkeys(found) if emulates and arch in EMULATED and arch != own)]


def has_passt(capabilities: etree.Element) -> bool:
    """Return True if user networking can use passt; QEMU's own, slirp, needs no other programs.

    libvirt lists the back ends that it was built with in its domain capabilities; one that lists none rejects the
    element.
    """
    kinds = _values(capabilities, "devices/interface/enum[@name='backendType']")
    return "passt" in kinds and qemu_check.passt() is not None


def cpu_mode(settings: Settings, domain_type: str) -> str:
    """Return libvirt's CPU mode for jobs of a domain type: the administrator's, or the best one."""
    default = {"kvm": "host-passthrough", "qemu": "maximum"}.get(domain_type, "")
    return settings.string("VM_CPU_MODE") or default


def groups_for_qemu(domain_type: str) -> set[int]:
    """Return the groups that QEMU needs to enter libvirt's directory and, for KVM, to open its device."""
    needed = [_group_to_enter(QEMU_DIRECTORY, 0o1)]
    if domain_type == "kvm":
        needed.append(_group_to_enter(kvm.DEVICE, 0o6))
    return {gid for gid in needed if gid is not None}


def _group_to_enter(path: str, bits: int) -> int | None:
    """Return the group that is needed to use `path`; None if everyone may, or if it does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return None if status.st_mode & bits == bits else status.st_gid
