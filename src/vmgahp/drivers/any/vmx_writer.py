"""A ``.vmx`` for a job that has described its VM by vm_disk, so that VMware can run it too.

It says no more than which disks there are and where the console goes: the drivers for VMware put memory, CPUs and
network into the working copy, as they do for every job.
"""

from collections.abc import Sequence

from vmgahp.drivers.any.disks import AnyDisk
from vmgahp.job.ad import Plain
from vmgahp.job.disks import bad_disk
from vmgahp.job.vmware import SNAPSHOT_DISK, TRANSFER, VMDK_FILES, VMX_FILE
from vmgahp.job.vmx import Vmx

FILE = "vm_choice.vmx"
CONSOLE = "vm_console.log"

_IDE = {"hda": "ide0:0", "hdb": "ide0:1", "hdc": "ide1:0", "hdd": "ide1:1"}
_SCSI = tuple(f"scsi0:{number}" for number in range(16) if number != 7)
"""Seven is the controller itself."""


def describe(disks: Sequence[AnyDisk]) -> Vmx:
    """The virtual machine with these disks, all of them in the scratch directory. Raises `errors.JobFault`."""
    vmx = Vmx({".encoding": "UTF-8", "config.version": "8", "virtualHW.version": "10", "guestOS": "other-64"})
    vmx["scsi0.present"] = "TRUE"
    vmx["scsi0.virtualDev"] = "lsilogic"
    free = list(_SCSI)
    for disk in disks:
        place = _IDE.get(disk.device.lower()) or (free.pop(0) if free else "")
        if not place or f"{place}.present" in vmx:
            raise bad_disk(
                disk.entry,
                "VMware's virtual machines have no more places for disks",
                f"use fewer disks, each with a device of its own; {len(_SCSI)} beside hda to hdd.",
            )
        vmx[f"{place}.present"] = "TRUE"
        vmx[f"{place}.fileName"] = disk.name
        if disk.is_cdrom:
            vmx[f"{place}.deviceType"] = "cdrom-image"
    vmx["serial0.present"] = "TRUE"
    vmx["serial0.fileType"] = "file"
    vmx["serial0.fileName"] = CONSOLE
    return vmx


def attributes(disks: Sequence[AnyDisk]) -> dict[str, Plain]:
    """What the job's ad says of it."""
    return {
        VMX_FILE: FILE,
        VMDK_FILES: ",".join(disk.name for disk in disks if not disk.is_cdrom),
        TRANSFER: True,
        SNAPSHOT_DISK: False,
    }
