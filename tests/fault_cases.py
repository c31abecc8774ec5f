"""This daemon's own checks, each with whose fault it is when it fails; what libvirt says is in `rules`.

The checks themselves are where they are made (`vmgahp.job.spec`, `vmgahp.images.backing`, `vmgahp.domain.build`, the
survey of the probe, the start); here it can be read, and tested, that none of them blames the wrong one. The page
docs/reference/faults.md is made of both tables.
"""

from typing import NamedTuple

from vmgahp import errors
from vmgahp.drivers.libvirt.fault_table import RULES
from vmgahp.errors import Fault, HypervisorFault, JobFault, MachineFault

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


class Check(NamedTuple):
    """One row."""

    name: str
    """What is looked at: an attribute of the job, or the name of a finding of the probe."""
    wrong: str
    """What is wrong with it, in a few words."""
    fault: type[Fault]
    code: str
    example: tuple[str, ...] = ()
    """Lines of a job ad that fail it."""


_NETWORK = "JobVMNetworking = true"
_DISK = "VMPARAM_vm_Disk"
_MEMORY, _NO_DISK, _BAD_DISK = errors.NO_MEMORY_PARAM, errors.NO_DISK_PARAM, errors.INVALID_DISK_PARAM
_IMAGE, _MISMATCHED, _CHECKPOINT = errors.BAD_IMAGE, errors.MISMATCHED, errors.MISMATCHED_CHECKPOINT


def _disk(entry: str) -> tuple[str, ...]:
    return (f'{_DISK} = "{entry}"',)


OF_THE_JOB = (
    Check("JobVMMemory", "missing", JobFault, _MEMORY, ("JobVMMemory = undefined",)),
    Check("JobVMMemory", "nothing, or less", JobFault, _MEMORY, ("JobVMMemory = 0",)),
    Check("JobVMMemory", "more than VM_MEMORY", JobFault, _MEMORY, ("JobVMMemory = 1000000",)),
    Check("JobVM_VCPUS", "more than a VM can have", JobFault, _MISMATCHED, ("JobVM_VCPUS = 256",)),
    Check("JobVMHardwareVT", "not offered here", JobFault, _MISMATCHED, ("JobVMHardwareVT = true",)),
    Check(
        "JobVMNetworkingType",
        "not offered here",
        JobFault,
        _MISMATCHED,
        (_NETWORK, 'JobVMNetworkingType = "bridge"'),
    ),
    Check("JobVM_MACADDR", "not an address", JobFault, _MISMATCHED, (_NETWORK, 'JobVM_MACADDR = "52:54"')),
    Check(
        "JobVM_MACADDR",
        "of a group of cards",
        JobFault,
        _MISMATCHED,
        (_NETWORK, 'JobVM_MACADDR = "01:00:5e:00:00:01"'),
    ),
    Check("JobVM_MACADDR", "in use by another VM of the machine", JobFault, _MISMATCHED),
    Check("VMPARAM_vm_NICs", "not a list of cards", JobFault, _MISMATCHED, ('VMPARAM_vm_NICs = "wifi"',)),
    Check("VMPARAM_vm_NICs", "not offered here", JobFault, _MISMATCHED, ('VMPARAM_vm_NICs = "bridge"',)),
    Check(
        "VMPARAM_vm_Firmware", "not one of ours", JobFault, _MISMATCHED, ('VMPARAM_vm_Firmware = "coreboot"',)
    ),
    Check("VMPARAM_vm_Firmware", "not installed here", JobFault, _MISMATCHED),
    Check("VMPARAM_vm_Arch", "not one of ours", JobFault, _MISMATCHED, ('VMPARAM_vm_Arch = "vax"',)),
    Check("VMPARAM_vm_Arch", "not emulated here", JobFault, _MISMATCHED),
    Check("VMPARAM_vm_Topology", "not vm_vcpus", JobFault, _MISMATCHED, ('VMPARAM_vm_Topology = "cores=3"',)),
    Check("VMPARAM_vm_TPM", "neither true nor false", JobFault, _MISMATCHED, ('VMPARAM_vm_TPM = "yes"',)),
    Check("VMPARAM_vm_TPM", "no swtpm here", JobFault, _MISMATCHED),
    Check("VMPARAM_vm_Share", "not allowed here", JobFault, _MISMATCHED, ("VMPARAM_vm_Share = true",)),
    Check("VMPARAM_vm_…", "a wish that nobody knows", JobFault, _MISMATCHED, ('VMPARAM_vm_Colour = "blue"',)),
    Check("User", "makes no name for a VM", JobFault, _MISMATCHED, ('User = "a/b@lab"',)),
    Check(_DISK, "missing", JobFault, _NO_DISK, (f"{_DISK} = undefined",)),
    Check(_DISK, "empty", JobFault, _NO_DISK, _disk(" , ")),
    Check(_DISK, "not of the form file:device:permission", JobFault, _BAD_DISK, _disk("guest.img:hda")),
    Check(_DISK, "a device that there is not", JobFault, _BAD_DISK, _disk("guest.img:hdz:w:raw")),
    Check(_DISK, "a partition", JobFault, _BAD_DISK, _disk("guest.img:sda2:w:raw")),
    Check(_DISK, "two disks of one name", JobFault, _BAD_DISK, _disk("guest.img:vda:w,guest.img:vda:w")),
    Check(_DISK, "a permission that there is not", JobFault, _BAD_DISK, _disk("guest.img:vda:x:raw")),
    Check(_DISK, "a format that is not served", JobFault, _BAD_DISK, _disk("guest.img:vda:w:tape")),
    Check(
        _DISK, "two writers of another format than raw", JobFault, _BAD_DISK, _disk("guest.img:vda:ws:qcow2")
    ),
    Check(
        _DISK,
        "a drive that the machine lacks",
        JobFault,
        _BAD_DISK,
        (*_disk("guest.img:hda:w:raw"), 'VMPARAM_vm_Firmware = "uefi"'),
    ),
    Check(_DISK, "a read-only IDE disk", JobFault, _BAD_DISK, _disk("guest.img:hda:r:raw")),
    Check(_DISK, "an image that is not there", JobFault, _BAD_DISK, _disk("missing.img:vda:w:raw")),
    Check(_DISK, "an image that is a link", JobFault, _BAD_DISK, _disk("link.img:vda:w:raw")),
    Check(_DISK, "an image that the user may not read", JobFault, _BAD_DISK, _disk("secret.img:vda:w:raw")),
    Check(_DISK, "a backing file that is missing", JobFault, _BAD_DISK, _disk("orphan.qcow2:vda:w:qcow2")),
    Check(
        _DISK,
        "a backing file of no stated format",
        JobFault,
        _BAD_DISK,
        _disk("vague.qcow2:vda:w:qcow2"),
    ),
    Check(_DISK, "an image of another format", JobFault, _IMAGE, _disk("guest.img:vda:w:qcow2")),
    Check(_DISK, "a corrupt image", JobFault, _IMAGE, _disk("corrupt.qcow2:vda:w:qcow2")),
    Check("VM_POLICY_REQUIREMENTS", "the job does not meet them", JobFault, _MISMATCHED),
    Check("VM_POLICY, VM_MAC_HOOK", "a stage or the hook rejects the job", JobFault, _MISMATCHED),
    Check("VMPARAM_Libvirt_XML", "missing, or no XML", JobFault, _MISMATCHED),
    Check("VMPARAM_Libvirt_XML", "it says what is not for jobs to say", JobFault, _MISMATCHED),
    Check("VMPARAM_Libvirt_XML", "it contradicts the job ad", JobFault, _MISMATCHED),
    Check("VMPARAM_Libvirt_XML", "this machine does not take it, or cannot run it", JobFault, _MISMATCHED),
    Check("the checkpoint", "its disks have moved on", JobFault, _CHECKPOINT),
)
"""What the job's owner must mend: the job is held, and the machine stays."""

OF_THE_MACHINE = (
    Check("settings", "missing or senseless", MachineFault, errors.CRITICAL),
    Check("hypervisor", "its driver cannot be loaded", MachineFault, errors.CRITICAL),
    Check("probe", "a check did not end, or has a defect", HypervisorFault, errors.INTERNAL),
    Check("libvirt", "it does not answer", MachineFault, errors.CRITICAL),
    Check("domain type", "libvirt has no QEMU for it", MachineFault, errors.CRITICAL),
    Check("VM_LIBVIRT_DOMAIN_TYPE", "libvirt has no domains of it", MachineFault, errors.CRITICAL),
    Check("VM_LIBVIRT_DOMAIN_TYPE", "containers, and no LIBVIRT_XML_SCRIPT", MachineFault, errors.CRITICAL),
    Check("kvm", "it does not work, and VM_ALLOW_EMULATION is False", MachineFault, errors.CRITICAL),
    Check("cpu", "QEMU does not start with the CPU of VM_CPU_MODE", MachineFault, errors.CRITICAL),
    Check("memory", "VM_MEMORY is not set, or more than there is", MachineFault, errors.CRITICAL),
    Check("room", "none on the file system of EXECUTE", MachineFault, errors.CRITICAL),
    Check("network nat", "the network of VM_NAT_NETWORK is not active", MachineFault, errors.CRITICAL),
    Check("network bridge", "the bridge is not there, or down", MachineFault, errors.CRITICAL),
    Check("network user", "neither passt nor slirp works", MachineFault, errors.CRITICAL),
    Check("the scratch directory", "the job's user may not enter or write it", MachineFault, errors.CRITICAL),
    Check("the domain's name", "somebody has defined a domain of it", MachineFault, errors.CRITICAL),
    Check("qemu-img", "not installed", MachineFault, errors.CRITICAL),
    Check("VM_SHARE_SCRATCH", "neither none nor 9p", MachineFault, errors.CRITICAL),
    Check("LIBVIRT_XML_SCRIPT", "it fails, or prints no description", MachineFault, errors.CRITICAL),
    Check("policy", "the probe finds it missing, or others can write it", MachineFault, errors.CRITICAL),
    Check("VM_POLICY_REQUIREMENTS", "no ClassAd expression", MachineFault, errors.CRITICAL),
    Check("VM_POLICY", "a stage fails, or makes no description", MachineFault, errors.CRITICAL),
    Check("VM_MAC_HOOK", "it fails, or gives an address that is taken", MachineFault, errors.CRITICAL),
    Check(
        "the live VM",
        "it has not what LIBVIRT_XML_SCRIPT or VM_POLICY asked for",
        MachineFault,
        errors.CRITICAL,
    ),
    Check("the live VM", "it has not what the job asks for", HypervisorFault, errors.INTERNAL),
    Check("this daemon", "a defect", HypervisorFault, errors.INTERNAL),
)
"""What the machine's keeper must mend: no START succeeds, and the starter takes the machine out of service."""


def page() -> str:
    """Both tables as the Markdown of docs/reference/faults.md."""
    checks = [*OF_THE_JOB, *OF_THE_MACHINE]
    rows = [(check.name, check.wrong, check.fault, check.code) for check in checks]
    text = "\n".join(_markdown(("Looked at", "What is wrong", "Who must act", "Word"), rows))
    rules = [
        (rule.name, _quoted(rule.example[2]) if rule.example[2] else "", rule.fault, rule.code)
        for rule in RULES
    ]
    text += "\n\n## What libvirt says\n\n"
    return text + "\n".join(_markdown(("About", "For example", "Who must act", "Word"), rules)) + "\n"


def _markdown(head: tuple[str, ...], rows: "Iterable[tuple[str, str, type[Fault], str]]") -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, wrong, fault, word in rows:
        lines.append(f"| {name} | {wrong} | {fault.blames} | `{word.removeprefix(errors.PREFIX)}` |")
    return lines


def _quoted(text: str) -> str:
    return "`" + text.replace("|", r"\|").replace("`", "'") + "`"
