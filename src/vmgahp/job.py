"""What a job asks of its virtual machine, checked against the settings and the files.

A refusal is a `JobFault`, which holds the job and leaves the machine in service, and names the attribute,
its value and the cure: the person who reads it sees nothing else. The disks are opened as the job's user
to see that they can be, for a disk that the hypervisor cannot open would be blamed on the machine.
"""

import errno
import os
import re
from typing import NamedTuple

from vmgahp import errors
from vmgahp.errors import JobFault, MachineFault
from vmgahp.job_ad import JobAd, has_control, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vmgahp.config import Settings
    from vmgahp.identity import Identity

__all__ = ["Disk", "JobAd", "JobSpec"]

LEAST_MEMORY_MIB = 32
"""A smaller VM gets this much, as from the C++ daemon (``KVMType::CreateConfigFile``)."""
MOST_VCPUS = 255
"""What QEMU's pc machine can have; more would fail in the hypervisor, which is blamed on the machine."""

FORMATS = {
    "raw": "raw",
    "iso": "raw",
    "qcow2": "qcow2",
    "qcow": "qcow",
    "qed": "qed",
    "vmdk": "vmdk",
    "vdi": "vdi",
    "vpc": "vpc",
    "vhd": "vpc",
}
"""Image formats of vm_disk, each with its name for libvirt and QEMU (``storageFormat`` of libvirt's
storagecommon.rng, which has no vhdx)."""

DISK = "VMPARAM_vm_Disk"
DISK_CURE = (
    "write vm_disk = file:device:permission[:format], such as disk.img:vda:w:qcow2, several with commas."
)

_DEVICE = re.compile(r"((?:vd|sd|hd|xvd)[a-z]{1,2}|fd[ab])([0-9]{0,2})", re.ASCII)
_MAC = re.compile(r"[0-9a-f]{1,2}(?:(?::[0-9a-f]{1,2}){5}|(?:-[0-9a-f]{1,2}){5})", re.ASCII)


class Disk(NamedTuple):
    """One entry of vm_disk, as it is to be attached."""

    path: str
    """The full path of the image; of a transferred one, in the scratch directory."""
    device: str
    """The whole device as the guest is to see it, such as ``vda``; without the digits of a partition."""
    partition: str
    """The digits of ``sda2``, mostly none. Only Xen guests know disks that are a partition."""
    writable: bool
    format: str
    """As libvirt names it; ``raw`` where the job gave none: an image is never looked into to find out."""
    transferred: bool
    """Whether the image came, or goes home, with the job: it is in the scratch directory."""
    kind: str
    """``disk``, ``cdrom`` (the format iso, or a name that ends in ``.iso``) or ``floppy`` (fda, fdb)."""


class JobSpec(NamedTuple):
    """A virtual machine as the job wants it and this machine grants it."""

    name: str
    """The VM's name with the hypervisor, `JobAd.vm_name`."""
    vm_type: str
    working_dir: str
    memory_mib: int
    vcpus: int
    disks: tuple[Disk, ...]
    networking_type: str
    """``nat``, ``bridge`` or ``user``; empty for a VM without a network."""
    mac: str
    """``xx:xx:xx:xx:xx:xx`` in lower case; empty where the job leaves it to the hypervisor."""
    vnc: bool
    checkpoint: bool
    no_output_vm: bool
    hardware_vt: bool

    @property
    def networking(self) -> bool:
        """Whether the VM has a network."""
        return bool(self.networking_type)

    @classmethod
    def from_ad(cls, ad: JobAd, settings: "Settings", identity: "Identity") -> "JobSpec":
        """Read and check everything.

        Raises `JobFault` for what the job's owner must change, `ClientFault` for what the starter should have
        sent, `MachineFault` for settings that are missing or wrong.
        """
        networking_type = _networking_type(ad, settings)
        return cls(
            name=ad.vm_name(),
            vm_type=ad.vm_type(),
            working_dir=ad.working_dir(),
            memory_mib=_memory_mib(ad, settings),
            vcpus=_vcpus(ad),
            disks=_disks(ad, identity),
            networking_type=networking_type,
            mac=_mac(ad) if networking_type else "",
            vnc=bool(ad.boolean("JobVMVNCConsole")),
            checkpoint=bool(ad.boolean("JobVMCheckpoint")),
            no_output_vm=bool(ad.boolean("VMPARAM_No_Output_VM")),
            hardware_vt=_hardware_vt(ad, settings),
        )


def _memory_mib(ad: JobAd, settings: "Settings") -> int:
    """JobVMMemory, else RequestMemory, MiB.

    Too much is answered with the word for a missing value: the one that says "too much" takes the machine
    out of service.
    """
    limit = settings.integer("VM_MEMORY")
    if limit <= 0:
        raise MachineFault(
            "VM_MEMORY is not set: nobody knows how much memory VMs may have on this machine.",
            "set VM_MEMORY to the memory in MiB that is for VMs.",
        )
    name = "JobVMMemory"
    memory = ad.integer(name)
    if memory is None:
        name = "RequestMemory"
        memory = ad.integer(name)
    if memory is None:
        raise JobFault(
            errors.NO_MEMORY_PARAM,
            f"JobVMMemory = {shown(ad.expression('JobVMMemory'))} and RequestMemory = "
            f"{shown(ad.expression('RequestMemory'))}: neither says how much memory the VM gets.",
            "set vm_memory, in MiB, in the submit file.",
        )
    if not 0 < memory <= limit:
        raise JobFault(
            errors.NO_MEMORY_PARAM,
            f"{name} = {memory} MiB, and a VM on this machine may have from 1 to {limit} MiB (VM_MEMORY).",
            "lower vm_memory in the submit file, or require VM_Memory of the machine.",
        )
    return max(memory, LEAST_MEMORY_MIB)


def _vcpus(ad: JobAd) -> int:
    """JobVM_VCPUS, else RequestCpus, else 1; less than 1 is 1, as from the C++ daemon."""
    name = "JobVM_VCPUS"
    vcpus = ad.integer(name)
    if vcpus is None:
        name = "RequestCpus"
        vcpus = ad.integer(name)
    if vcpus is not None and vcpus > MOST_VCPUS:
        raise JobFault(
            errors.MISMATCHED,
            f"{name} = {vcpus}, and a VM can have {MOST_VCPUS} CPUs at most.",
            "lower vm_vcpus (or request_cpus) in the submit file.",
        )
    return max(vcpus or 1, 1)


def _hardware_vt(ad: JobAd, settings: "Settings") -> bool:
    wanted = bool(ad.boolean("JobVMHardwareVT"))
    if wanted and not settings.boolean("VM_HARDWARE_VT"):
        raise JobFault(
            errors.MISMATCHED,
            "JobVMHardwareVT = true, and this machine offers no hardware virtualisation (VM_HARDWARE_VT).",
            "add VM_HardwareVT to the job's requirements.",
        )
    return wanted


def _networking_type(ad: JobAd, settings: "Settings") -> str:
    """The kind of network the VM gets, empty for none.

    The job's own wish, else VM_NETWORKING_DEFAULT_TYPE, else user, else nat, else what there is: each only
    if it is on offer (``VirshType::Config`` in HTCondor's ``xen_type.linux.cpp``).
    """
    if not ad.boolean("JobVMNetworking"):
        return ""
    offered = settings.networking_types()
    if not offered:
        raise JobFault(
            errors.MISMATCHED,
            "JobVMNetworking = true, and this machine offers no network to VMs (VM_NETWORKING).",
            "add VM_Networking to the job's requirements, or set vm_networking = false.",
        )
    wanted = ad.string("JobVMNetworkingType")
    if wanted is not None and wanted.strip():
        if wanted.strip().lower() not in offered:
            raise JobFault(
                errors.MISMATCHED,
                f"JobVMNetworkingType = {shown(wanted)}, and this machine offers: {', '.join(offered)}.",
                "set vm_networking_type to one of these, or leave it out.",
            )
        return wanted.strip().lower()
    for kind in (settings.string("VM_NETWORKING_DEFAULT_TYPE").lower(), "user", "nat"):
        if kind in offered:
            return kind
    return offered[0]


def _mac(ad: JobAd) -> str:
    given = (ad.string("JobVM_MACADDR") or "").strip()
    if not given:
        return ""
    octets = given.lower().replace("-", ":").split(":")
    if _MAC.fullmatch(given.lower()) is None:
        problem = "is not a MAC address"
    elif int(octets[0], 16) & 1:
        problem = "is a multicast address, which no network card can have"
    elif not any(int(octet, 16) for octet in octets):
        problem = "is zero"
    else:
        return ":".join(octet.zfill(2) for octet in octets)
    raise JobFault(
        errors.MISMATCHED,
        f"JobVM_MACADDR = {shown(given)} {problem}.",
        "set vm_macaddr to six hexadecimal numbers such as 52:54:00:12:34:56, or leave it out.",
    )


def _disks(ad: JobAd, identity: "Identity") -> tuple[Disk, ...]:
    text = ad.string(DISK)
    if text is None:
        raise JobFault(
            errors.NO_DISK_PARAM,
            f"{DISK} = {shown(ad.expression(DISK))}: the job gives its VM no disk.",
            DISK_CURE,
        )
    disks: dict[str, Disk] = {}
    for entry in text.split(","):
        if not entry.strip():
            continue
        disk = _disk(entry.strip(), ad.working_dir(), identity)
        if disk.device in disks:
            raise _bad_disk(entry, f"{disk.device} is used twice", "give every disk its own device.")
        disks[disk.device] = disk
    if not disks:
        raise JobFault(errors.NO_DISK_PARAM, f"{DISK} = {shown(text)} names no disk.", DISK_CURE)
    return tuple(disks.values())


def _disk(entry: str, working_dir: str, identity: "Identity") -> Disk:
    """Read and check one ``file:device:permission[:format]`` (``parseXenDiskParam``)."""
    fields = [field.strip() for field in entry.split(":")]
    if len(fields) == 4 and not fields[3]:
        del fields[3]
    if has_control(entry):
        raise _bad_disk(entry, "has a control character")
    if not 3 <= len(fields) <= 4 or not all(fields):
        raise _bad_disk(entry, "is not of the form file:device:permission[:format]")
    file, device, permission, image_format = (*fields, "raw")[:4]
    found = _DEVICE.fullmatch(device.lower())
    if found is None or (found[1].startswith("hd") and found[1] not in ("hda", "hdb", "hdc", "hdd")):
        cure = "use a device such as vda, sda, xvda, hda to hdd, fda or fdb."
        raise _bad_disk(entry, f"{shown(device)} is no device that a VM can have", cure)
    if permission.lower() not in ("r", "w", "rw"):
        raise _bad_disk(entry, f"{shown(permission)} is not a permission", "use r, w or rw.")
    image_format = image_format.lower()
    if image_format not in FORMATS:
        cure = f"convert the image with qemu-img, or name one of: {', '.join(FORMATS)}."
        raise _bad_disk(entry, f"{shown(image_format)} is no image format that can be used here", cure)
    if found[1].startswith("fd"):
        kind = "floppy"
    elif image_format == "iso" or file.lower().endswith(".iso"):
        kind = "cdrom"
    else:
        kind = "disk"
    writable = permission.lower() != "r" and kind != "cdrom"
    path, transferred = _find_image(entry, file, working_dir, identity, writable)
    return Disk(path, found[1], found[2], writable, FORMATS[image_format], transferred, kind)


def _find_image(
    entry: str, file: str, working_dir: str, identity: "Identity", writable: bool
) -> tuple[str, bool]:
    """Where the image is, and whether it came with the job; that its user may open it is made sure of.

    As with the C++ daemon, what has the same base name as a file of the scratch directory *is* that file,
    for condor_submit leaves the path of the submit machine in vm_disk.
    """
    name = os.path.basename(file)
    flags = os.O_RDWR if writable else os.O_RDONLY
    try:
        os.close(identity.open_scratch(working_dir, name, flags))
        return os.path.join(working_dir, name), True
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EISDIR, errno.EINVAL):
            raise _bad_disk(
                entry,
                f"{shown(name)} in the job's scratch directory cannot be opened: {error.strerror}",
                "transfer a regular file, no link, that its owner may read, and write if the permission is w.",
            ) from error
    if not file.startswith("/"):
        raise _bad_disk(
            entry,
            f"{shown(file)} is not in the job's scratch directory and is not a full path",
            "add the image to transfer_input_files, or give its full path on a shared file system.",
        )
    reason = identity.check_access(file, writable)
    if reason is not None:
        raise _bad_disk(
            entry,
            f"{shown(file)} cannot be opened on this machine ({reason})",
            "transfer the image, or make it accessible to the job's user on this machine.",
        )
    return file, False


def _bad_disk(entry: str, problem: str, cure: str = DISK_CURE) -> JobFault:
    return JobFault(errors.INVALID_DISK_PARAM, f"{DISK}, entry {shown(entry)}: {problem}.", cure)
