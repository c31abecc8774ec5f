"""The features with which a hypervisor saves no VM; QEMU calls its own migration blockers.

A job that asks for checkpoints and for such a feature is held at START, before it loses any work. The front ends and
the VM type any ask here too.
"""

from collections.abc import Iterable, Sequence
from xml.etree import ElementTree as etree

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.errors import JobFault
from vmgahp.job.devices import Devices
from vmgahp.job.disks import DISK, Disk, DiskRequest, bad_disk
from vmgahp.job.options import SHARE, SHARE_DIRS, Options
from vmgahp.text import shown
from vmgahp.vm_types import QEMU

UNSAVEABLE = ("qcow", "vdi", "vhdx", "vmdk", "vpc")
"""The image formats with a migration blocker, even for a disk that is only read, and for a backing file.

(``migrate_add_blocker`` in QEMU's ``block/vmdk.c`` and so on. Internal snapshots of a qcow2 image block no save to a
file: libvirt refuses only a migration to another machine with them.)
"""

_DEVICES = (
    ("devices/filesystem", "its guest can mount a directory of the machine (VMPARAM_vm_Share, VMPARAM_vm_Share_Dirs)"),
    ("devices/hostdev[@type!='usb']", "a device of the machine is passed through to it (hostdev)"),
    ("devices/interface[@type='hostdev']", "a device of the machine is passed through to it (hostdev)"),
    ("devices/video/model/acceleration[@accel3d='yes']", "its display has 3D acceleration (virgl)"),
    ("launchSecurity", "its memory is encrypted (launchSecurity)"),
)
"""The elements of libvirt's XML, and what they say about the VM. Only XML of the administrator's has most of them."""


def by_qemu(vm_type: str, settings: Settings) -> bool:
    """Tell if VMs of the type are saved by QEMU, so that its blockers count."""
    return vm_type in QEMU and settings.string("VM_LIBVIRT_DOMAIN_TYPE") in ("", "kvm", "qemu")


def require(devices: Devices, requests: Iterable[DiskRequest], options: Options) -> None:
    """Make sure that nothing that the job asks for rules out its checkpoints. Raises `JobFault`."""
    if devices.shares:
        raise options.refused(
            SHARE_DIRS if options.has(SHARE_DIRS) else SHARE,
            "JobVMCheckpoint = true contradicts it, for a VM that shares a directory cannot be saved",
            "set vm_checkpoint = false, or hand the files over on a disk.",
        )
    for request in requests:
        if request.format in UNSAVEABLE:
            raise bad_disk(request.entry, _contradiction(request.format), _cure(request.format, request.file))


def require_disks(disks: Iterable[Disk]) -> None:
    """Make sure that no image that was found, or its backing file, rules out checkpoints. Raises `JobFault`."""
    for disk in disks:
        images = ((disk.path, disk.format), *((image.path, image.format) for image in disk.backing))
        for path, image_format in images:
            if image_format in UNSAVEABLE:
                problem = f"{DISK}, image {shown(path)} of {disk.device}: {_contradiction(image_format)}."
                raise JobFault(errors.INVALID_DISK_PARAM, problem, _cure(image_format, path))


def require_snapshot(where: str, independent: Sequence[str]) -> None:
    """Make sure that vSphere can take a snapshot with memory, which a checkpoint is there. Raises `JobFault`.

    It takes none of a VM with `independent` disks, by their places (``MemorySnapshotOnIndependentDisk`` of its API).
    """
    if independent:
        problem = (
            f"{where}, {independent[0]}.mode: JobVMCheckpoint = true contradicts it, for vSphere takes no snapshot"
        )
        hint = f"remove {independent[0]}.mode from the .vmx, or set vm_checkpoint = false."
        raise JobFault(errors.MISMATCHED, f"{problem} with memory of a VM with an independent disk.", hint)


def _contradiction(image_format: str) -> str:
    return f"JobVMCheckpoint = true contradicts it, for QEMU cannot save a VM with a {image_format} image"


def _cure(image_format: str, path: str) -> str:
    return (
        f"convert it (qemu-img convert -f {image_format} -O qcow2 {path} NEW.qcow2) and name the new image, "
        "or set vm_checkpoint = false."
    )


def blocker(xml: str) -> str:
    """Return the reason for which QEMU cannot save the VM of this domain XML, as half a sentence; empty for none."""
    try:
        domain = etree.fromstring(xml)  # noqa: S314 - from libvirt and this daemon, which has checked that of a job
    except etree.ParseError:
        return ""  # libvirt refuses it
    for disk in domain.iterfind("devices/disk"):
        name = next((target.get("dev", "") for target in disk.iterfind("target")), "")
        above = {driver.get("type") for driver in disk.iterfind("driver")}
        below = {form.get("type") for form in disk.iterfind(".//backingStore/format")}
        for found, place in ((above, "is"), (below, "is on")):
            if image_format := next((each for each in UNSAVEABLE if each in found), ""):
                return f"its disk {name} {place} a {image_format} image, which QEMU cannot save; convert it to qcow2"
        if disk.get("type") == "dir" and disk.find("readonly") is None:
            return f"its disk {name} is a directory that it can write to (vvfat)"
    for device in domain.iterfind("devices/shmem"):
        if device.get("role") != "master":
            return "it shares memory with others and is not their master (ivshmem)"
    return next((reason for path, reason in _DEVICES if domain.find(path) is not None), "")
