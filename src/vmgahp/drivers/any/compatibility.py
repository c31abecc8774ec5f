"""The compatibility of a job with each VM type: as it is, with other images, or not at all."""

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vmgahp.drivers.any.images import AnyDisk
from vmgahp.host.job_user import Identity
from vmgahp.images import vmdk
from vmgahp.job.ad import JobAd
from vmgahp.job.attributes import ATTRIBUTES, OPTION_PREFIX
from vmgahp.job.disks import DISK
from vmgahp.job.options import GENERAL, IGNORE_UNKNOWN
from vmgahp.job.vmware import VMX_FILE
from vmgahp.text import shown
from vmgahp.vm_types import HTCONDORS, LIBVIRT, QEMU, VMWARE, XEN

XEN_KERNEL = "VMPARAM_Xen_Kernel"
LIBVIRT_XML = "VMPARAM_Libvirt_XML"

_BOOTS_ITSELF = ("included", "vmx")
"""The values of xen_kernel for a disk that any hypervisor could boot."""

_EACH_ITS_OWN = ("VMPARAM_Xen_", "VMPARAM_VMware_", DISK, OPTION_PREFIX + IGNORE_UNKNOWN)
"""The attributes that describe the VM to one hypervisor, and mean nothing to the others."""

_STREAM = "streamoptimized"
"""The kind of VMDK of an OVA, to which no guest can write."""

_CANNOT_BE_SAVED = ("vmdk", "vdi", "vpc", "qcow")
"""The formats with which QEMU saves no VM (it calls that a migration blocker: ``block/vmdk.c`` and so on)."""


class Compatibility(NamedTuple):
    """The compatibility of a job with a type."""

    reason: str = ""
    """The reason why the type cannot run the job, as a sentence without its end; empty if it can."""
    conversions: tuple[tuple[AnyDisk, str], ...] = ()
    """The disks that it needs in another format, each with QEMU's name of that."""


def fit(vm_type: str, ad: JobAd, disks: Sequence[AnyDisk], identity: Identity) -> Compatibility:
    """Find out if the type can run the job, and what has to be converted for that."""
    reason = next(_not_granted(vm_type, ad), "") or _no_description(vm_type, ad, disks)
    if reason:
        return Compatibility(reason)
    needed: list[tuple[AnyDisk, str]] = []
    for disk in disks:
        entry = shown(disk.entry)
        stays = disk.path and disk.writable and not disk.transferred
        if stays and vm_type in HTCONDORS and ad.boolean("JobVMCheckpoint"):
            # The starter takes periodic checkpoints of vm_type any, after which the guest is resumed.
            return Compatibility(f"{entry} is not transferred, and would move on after a periodic checkpoint")
        target = _needs(vm_type, ad, disk, identity)
        if target and disk.shared:
            return Compatibility(f"{entry} would have to be converted, and other VMs use it too")
        if target and stays:
            return Compatibility(f"{entry} would have to be converted, and what the guest writes is to be in it")
        if target:
            needed.append((disk, target))
    return Compatibility("", tuple(needed))


def _not_granted(vm_type: str, ad: JobAd) -> Iterator[str]:
    """Yield the features that the job asks for and the type does not have."""
    if vm_type not in LIBVIRT + VMWARE:  # its driver reports it at the start of the job
        return
    kernel = ad.string(XEN_KERNEL)
    if kernel is not None and kernel.strip().lower() not in _BOOTS_ITSELF and vm_type not in XEN:
        yield f"{XEN_KERNEL} = {shown(kernel)} is for Xen alone"
    for row in ATTRIBUTES:
        if not row.types or vm_type in row.types or row.name.startswith(_EACH_ITS_OWN):
            continue
        names = [row.name]
        if row.name.startswith(OPTION_PREFIX):
            option = row.name.removeprefix(OPTION_PREFIX)
            names += [f"{GENERAL}{option}", f"VM_{vm_type}_ATTR_{option}"]
        for name in names:
            if (ad.expression(name) or "").lower() not in ("", "undefined", "false"):
                yield f"it does not have {name}"


def _no_description(vm_type: str, ad: JobAd, disks: Sequence[AnyDisk]) -> str:
    """Return the reason why the type cannot identify the job's VM; empty if it can."""
    has_vmx = ad.expression(VMX_FILE) is not None
    has_disks = ad.expression(DISK) is not None or ad.expression(LIBVIRT_XML) is not None
    if vm_type in QEMU and has_vmx and not has_disks:
        return f"the job has {VMX_FILE} and no {DISK}"
    if vm_type in XEN and ad.expression(XEN_KERNEL) is None:
        return f"the job does not say how it boots under Xen ({XEN_KERNEL})"
    if vm_type in VMWARE and not has_vmx:
        if not disks:
            return f"the job has neither {VMX_FILE} nor {DISK}"
        for disk in disks:
            if not disk.path or not disk.transferred:
                return f"{shown(disk.entry)} is not an image in the scratch directory"
            if disk.device.lower().startswith("fd") or disk.shared:
                return f"{shown(disk.entry)} is neither a disk nor a CD-ROM of this VM alone"
    return ""


def _needs(vm_type: str, ad: JobAd, disk: AnyDisk, identity: Identity) -> str:
    """Return the format that the type needs the disk in; empty if it can use it as it is."""
    if not disk.path or disk.format == "iso":
        return ""
    if vm_type in XEN:
        return "" if disk.format == "raw" else "raw"
    kind = _vmdk_kind(disk, identity)
    if vm_type in VMWARE:
        if ad.expression(VMX_FILE) is not None or disk.is_cdrom or kind == "monolithicsparse":
            return ""
        # The driver for vSphere unpacks them all.
        return "" if kind == _STREAM and vm_type == "vsphere" else "vmdk"
    saved = bool(ad.boolean("JobVMCheckpoint")) and disk.format in _CANNOT_BE_SAVED
    if vm_type in QEMU and (disk.format == "vhdx" or saved or (disk.writable and kind == _STREAM)):
        return "qcow2"
    return ""


def _vmdk_kind(disk: AnyDisk, identity: Identity) -> str:
    """Return VMware's word for the kind of a VMDK, in lower case; empty if it is not one, or cannot be used."""
    if disk.format != "vmdk":
        return ""
    try:
        with os.fdopen(identity.open_named(disk.path, os.O_RDONLY), "rb") as file:
            return vmdk.read(file.fileno()).kind
    except (OSError, vmdk.VmdkError):
        return ""  # the driver reports the error
