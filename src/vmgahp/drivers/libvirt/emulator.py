"""What libvirt says of QEMU on this machine, and what QEMU needs, whatever the job."""

import os
from xml.etree import ElementTree as etree

from vmgahp.config import Settings
from vmgahp.drivers.libvirt import binding as libvirt
from vmgahp.drivers.libvirt import firmware
from vmgahp.host import kvm
from vmgahp.job.kinds import ARM, UEFI, UEFI_SECURE, X86

EMULATED = "x86_64", "aarch64"
"""Architectures that a guest may have beside that of the machine."""

MACHINES = {ARM: "virt", X86: "q35"}
"""The machine type whose firmwares are asked about, by architecture."""

QEMU_DIRECTORY = "/var/lib/libvirt/qemu"
"""Where libvirt keeps the monitor socket and the keys of each domain; QEMU must be able to enter it."""

TWO_GROUPS = f"QEMU needs two groups at once, for {QEMU_DIRECTORY} and for {kvm.DEVICE}, and libvirt gives it one"
"""Why it cannot run as the job's user (`groups_for_qemu`)."""
TWO_GROUPS_HINT = f"chmod o+x {QEMU_DIRECTORY} (or chmod 666 {kvm.DEVICE}), or set VM_RUN_AS_JOB_USER = False."


def domain_capabilities(connection: libvirt.virConnect, domain_type: str) -> etree.Element:
    """What libvirt says of this machine's usual VMs."""
    return etree.fromstring(connection.getDomainCapabilities(None, os.uname().machine, None, domain_type))


def of_machines(connection: libvirt.virConnect, arch: str, domain_type: str) -> etree.Element | None:
    """What libvirt says of the machines of an architecture; None where it has no QEMU for it."""
    try:
        text = connection.getDomainCapabilities(None, arch, MACHINES.get(arch), domain_type)
    except libvirt.libvirtError as error:
        if error.get_error_code() in (libvirt.VIR_ERR_INVALID_ARG, libvirt.VIR_ERR_CONFIG_UNSUPPORTED):
            return None
        raise
    return etree.fromstring(text)


def uefis(capabilities: etree.Element | None) -> tuple[str, ...]:
    """The kinds of UEFI that are installed, by `of_machines`."""
    if capabilities is None or "efi" not in _values(capabilities, "os/enum[@name='firmware']"):
        return ()
    if capabilities.findtext("arch") == ARM:  # of which libvirt does not say it, for it means x86's SMM
        secure = any(one.secure and ARM in one.arches for one in firmware.installed().values())
    else:
        secure = "yes" in _values(capabilities, "os/loader/enum[@name='secure']")
    return (UEFI, UEFI_SECURE) if secure else (UEFI,)


def _values(capabilities: etree.Element, enum: str) -> list[str | None]:
    return [value.text for value in capabilities.iterfind(f"{enum}/value")]


def arches(capabilities: str, *, emulates: bool) -> list[str]:
    """The architectures of guests that run here, the machine's own first, by libvirt's capabilities."""
    own = os.uname().machine
    found = [arch.get("name", "") for arch in etree.fromstring(capabilities).iterfind("guest/arch")]
    return [own, *(arch for arch in dict.fromkeys(found) if emulates and arch in EMULATED and arch != own)]


def has_passt(capabilities: etree.Element) -> bool:
    """Whether user networking can be passt's; QEMU's own, slirp, is there without further programs.

    libvirt names the back ends that it was built with in its domain capabilities; one that names none
    refuses the element.
    """
    from vmgahp.drivers.libvirt import qemu_check

    kinds = _values(capabilities, "devices/interface/enum[@name='backendType']")
    return "passt" in kinds and qemu_check.passt() is not None


def cpu_mode(settings: Settings, domain_type: str) -> str:
    """libvirt's CPU mode for jobs of a domain type: the administrator's, or the best there is."""
    default = {"kvm": "host-passthrough", "qemu": "maximum"}.get(domain_type, "")
    return settings.string("VM_CPU_MODE") or default


def groups_for_qemu(domain_type: str) -> set[int]:
    """The groups that QEMU must have to get into libvirt's directory and, for KVM, at its device."""
    needed = [_group_to_enter(QEMU_DIRECTORY, 0o1)]
    if domain_type == "kvm":
        needed.append(_group_to_enter(kvm.DEVICE, 0o6))
    return {gid for gid in needed if gid is not None}


def _group_to_enter(path: str, bits: int) -> int | None:
    """The group that must be had to use `path`, or None when everybody may or it is not there."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return None if status.st_mode & bits == bits else status.st_gid
