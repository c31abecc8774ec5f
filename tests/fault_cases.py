"""This daemon's own checks, each with whose fault it is when it fails; libvirt's errors are in `link.faults`.

The checks themselves are where they are made (`vmgahp.job.spec`, `vmgahp.images.formats`, `vmgahp.domain.build`, the
survey of the probe, the start); here it can be read, and tested, that none of them blames the wrong one. The page
docs/reference/faults.md is made of both tables.
"""

from typing import NamedTuple

from vmgahp import errors
from vmgahp.drivers.libvirt.link.faults import RULES
from vmgahp.errors import Fault, HypervisorFault, JobFault, MachineFault


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
_MEMORY, _NO_DISK, _IMAGE = errors.NO_MEMORY_PARAM, errors.NO_DISK_PARAM, errors.BAD_IMAGE
_CHECKPOINT = "JobVMCheckpoint = true"
_RUN = "VMPARAM_vm_Run"
_PROGRAM = f'{_RUN} = "true"'


def _job(name: str, wrong: str, *example: str, code: str = errors.MISMATCHED) -> Check:
    return Check(name, wrong, JobFault, code, example)


def _machine(name: str, wrong: str) -> Check:
    return Check(name, wrong, MachineFault, errors.CRITICAL)


def _disk(wrong: str, entry: str, *more: str, code: str = errors.INVALID_DISK_PARAM) -> Check:
    return _job(_DISK, wrong, f'{_DISK} = "{entry}"', *more, code=code)


OF_THE_JOB = (
    _job("JobVMMemory", "missing", "JobVMMemory = undefined", code=_MEMORY),
    _job("JobVMMemory", "zero or negative", "JobVMMemory = 0", code=_MEMORY),
    _job("JobVMMemory", "more than VM_MEMORY", "JobVMMemory = 1000000", code=_MEMORY),
    _job("JobVMMemory", "more than the slot has", "JobVMMemory = 64", "RequestMemory = 48", code=_MEMORY),
    _job("JobVM_VCPUS", "more than a VM can have", "JobVM_VCPUS = 256"),
    _job("JobVM_VCPUS", "more than the slot has", "JobVM_VCPUS = 2", "RequestCpus = 1"),
    _job("RequestDisk", "less than the VM's disks occupy"),
    _job("JobVMHardwareVT", "not offered here", "JobVMHardwareVT = true"),
    _job("JobVMNetworkingType", "not offered here", _NETWORK, 'JobVMNetworkingType = "bridge"'),
    _job("JobVM_MACADDR", "not an address", _NETWORK, 'JobVM_MACADDR = "52:54"'),
    _job("JobVM_MACADDR", "a multicast address", _NETWORK, 'JobVM_MACADDR = "01:00:5e:00:00:01"'),
    _job("JobVM_MACADDR", "in use by another VM of the machine"),
    _job("VMPARAM_vm_NICs", "not a list of NICs", 'VMPARAM_vm_NICs = "wifi"'),
    _job("VMPARAM_vm_NICs", "not offered here", 'VMPARAM_vm_NICs = "bridge"'),
    _job("VMPARAM_vm_Firmware", "not a known value", 'VMPARAM_vm_Firmware = "coreboot"'),
    _job("VMPARAM_vm_Firmware", "not installed here"),
    _job("VMPARAM_vm_Arch", "not a known value", 'VMPARAM_vm_Arch = "vax"'),
    _job("VMPARAM_vm_Arch", "not emulated here"),
    _job("VMPARAM_vm_Clock", "not a known value", 'VMPARAM_vm_Clock = "mine"'),
    _job("VMPARAM_vm_Topology", "not vm_vcpus", 'VMPARAM_vm_Topology = "cores=3"'),
    _job("VMPARAM_vm_TPM", "not a boolean", 'VMPARAM_vm_TPM = "yes"'),
    _job("VMPARAM_vm_TPM", "no swtpm, swtpm_setup or swtpm_ioctl here"),
    _job("VMPARAM_vm_Share", "not allowed here", "VMPARAM_vm_Share = true"),
    _job("VMPARAM_vm_Share_Dirs", "no directory of VM_SHARE_DIRS", 'VMPARAM_vm_Share_Dirs = "ref"'),
    _job("VMPARAM_vm_Share_Dirs", "not for this job (VM_SHARE_DIR_…_IF), or not for its user to read"),
    _job("VMPARAM_vm_SSH", "not allowed here", _NETWORK, "VMPARAM_vm_SSH = true"),
    _job("VMPARAM_vm_…", "an unknown attribute", 'VMPARAM_vm_Colour = "blue"'),
    _job(_RUN, "no program", f'{_RUN} = ""'),
    _job(_RUN, "an environment variable whose name a shell does not allow", _PROGRAM, 'Environment = "a.b=1"'),
    _job(_RUN, "output to another directory", _PROGRAM, 'Out = "logs/fit.out"'),
    _job("VMPARAM_vm_Run_Outputs", "a name that leads out of the directory", _PROGRAM, f'{_RUN}_Outputs = "../a"'),
    _job("VMPARAM_vm_Run_Boot", "not a known value", _PROGRAM, f'{_RUN}_Boot = "bios"'),
    _job("VMPARAM_vm_Run_…", "no VMPARAM_vm_Run beside it", f"{_RUN}_As_Root = true"),
    _job("VMPARAM_vm_Run_Inputs", "not transferred, below another, a disk of the VM, or a link that leads elsewhere"),
    _job("User", "not usable in a VM's name", 'User = "a/b@lab"'),
    _job(_DISK, "missing", f"{_DISK} = undefined", code=_NO_DISK),
    _disk("empty", " , ", code=_NO_DISK),
    _disk("not of the form file:device:permission", "guest.img:hda"),
    _disk("an invalid device name", "guest.img:hdz:w:raw"),
    _disk("a partition", "guest.img:sda2:w:raw"),
    _disk("two disks with one device name", "guest.img:vda:w,guest.img:vda:w"),
    _disk("an invalid permission", "guest.img:vda:x:raw"),
    _disk("an unsupported format", "guest.img:vda:w:tape"),
    _disk("two writers of another format than raw", "guest.img:vda:ws:qcow2"),
    _disk("a kind of drive that the machine type lacks", "guest.img:hda:w:raw", 'VMPARAM_vm_Firmware = "uefi"'),
    _disk("a read-only IDE disk", "guest.img:hda:r:raw"),
    _disk("a missing image", "missing.img:vda:w:raw"),
    _disk("an image that is a link", "link.img:vda:w:raw"),
    _disk("an image that the user may not read", "secret.img:vda:w:raw"),
    _disk("a missing backing file", "orphan.qcow2:vda:w:qcow2"),
    _disk("a backing file without a stated format", "vague.qcow2:vda:w:qcow2"),
    _disk("an image of another format", "guest.img:vda:w:qcow2", code=_IMAGE),
    _disk("a corrupt image", "corrupt.qcow2:vda:w:qcow2", code=_IMAGE),
    _disk("a format that QEMU cannot save, beside JobVMCheckpoint = true", "guest.img:vda:w:vmdk", _CHECKPOINT),
    _job("VM_POLICY_REQUIREMENTS", "the job does not meet them"),
    _job("VM_POLICY, VM_MAC_HOOK", "a stage or the hook rejects the job"),
    _job("LIBVIRT_XML_SCRIPT, VM_POLICY, VM_MAC_HOOK", "it fails for the job, but not for a plain one"),
    _job("LIBVIRT_XML_SCRIPT", "its XML contains markup from the job's values, or a link of the job's"),
    _job("VMPARAM_Libvirt_XML", "missing, or not XML"),
    _job("VMPARAM_Libvirt_XML", "an element or attribute that jobs may not use"),
    _job("VMPARAM_Libvirt_XML", "it contradicts the job ad"),
    _job("VMPARAM_Libvirt_XML", "not accepted here, or this machine cannot run it"),
    _job("the job ad", "expressions that take more than 10 s of CPU time, or 60 s, to evaluate"),
    _job("the scratch directory", "a directory with the name of a file to be made"),
    _job("the scratch directory", "closed by its user"),
    _job("the scratch directory", "full, as a file system of its own or by a quota"),
    _job("the checkpoint", "changed disks, or a manifest that cannot be read", code=errors.MISMATCHED_CHECKPOINT),
)
"""What the job's owner must correct: the job is held, and the machine stays."""

OF_THE_MACHINE = (
    _machine("settings", "missing or invalid"),
    _machine("hypervisor", "its driver cannot be loaded"),
    Check("probe", "a check did not end, or has a bug", HypervisorFault, errors.INTERNAL),
    _machine("libvirt", "it does not answer"),
    _machine("domain type", "libvirt has no QEMU for it"),
    _machine("VM_LIBVIRT_DOMAIN_TYPE", "libvirt has no domains of it"),
    _machine("VM_LIBVIRT_DOMAIN_TYPE", "containers, and no LIBVIRT_XML_SCRIPT"),
    _machine("kvm", "it does not work, and VM_ALLOW_EMULATION is False"),
    _machine("cpu", "QEMU does not start with the CPU of VM_CPU_MODE"),
    _machine("QEMU's user", "VM_RUN_AS_JOB_USER is on, and QEMU needs two groups"),
    _machine("share", "QEMU is built without 9p or virtiofs, or virtiofsd does not run"),
    _machine("tpm", "swtpm, swtpm_setup or swtpm_ioctl is not installed, or swtpm does not run"),
    _machine("save", "libvirtd cannot open a job's file: a container with pids of its own, or root_squash"),
    _machine("limits", "no control groups to limit VMs by"),
    _machine("memory", "VM_MEMORY is not set, or more than there is"),
    _machine("room", "the file system of EXECUTE is full"),
    _machine("network nat", "the network of VM_NAT_NETWORK is not active"),
    _machine("network bridge", "the bridge is missing, or down"),
    _machine("network user", "neither passt nor slirp works"),
    _machine("EXECUTE", "the job's user may not enter the scratch directory, or does not own it"),
    _machine("EXECUTE", "its file system is full, read-only, or fails"),
    _machine("this daemon", "no thread, process or open file is left for a request"),
    _machine("the domain's name", "a persistent domain has it"),
    _machine("qemu-img", "not installed"),
    _machine("VM_SHARE_SCRATCH", "neither none nor 9p nor virtiofs"),
    _machine("share dirs", "one of VM_SHARE_DIRS is missing, or its setting is invalid"),
    _machine("VM_SHARE_DIRS", "a directory cannot be served, or a condition is not a ClassAd expression"),
    _machine("VM_SSH_PORTS, VM_SSH_ADDRESS", "not a list of ports, or not an address"),
    _machine("LIBVIRT_XML_SCRIPT", "missing, writable by others, or without its interpreter"),
    _machine("LIBVIRT_XML_SCRIPT", "it fails, or prints no domain XML"),
    _machine("policy", "missing, or writable by others"),
    _machine("VM_POLICY_REQUIREMENTS", "not a ClassAd expression"),
    _machine("VM_POLICY", "a stage fails, or prints no domain XML"),
    _machine("VM_MAC_HOOK", "it fails, or gives an address in use"),
    _machine("the live VM", "it lacks what LIBVIRT_XML_SCRIPT or VM_POLICY asked for"),
    Check("the live VM", "it lacks what the job asks for", HypervisorFault, errors.INTERNAL),
    Check("this daemon", "a bug", HypervisorFault, errors.INTERNAL),
)
"""What the administrator must correct: no START succeeds, and the starter takes the machine out of service."""


def page() -> str:
    """Return both tables as the Markdown of docs/reference/faults.md, the causes of a code under one heading."""
    checks = (*OF_THE_JOB, *OF_THE_MACHINE)
    lines = []
    for fault, code in dict.fromkeys((check.fault, check.code) for check in checks):
        lines += [f"### {_blamed(fault, code)}", "", "| checked | wrong |", "|---|---|"]
        causes = [check for check in checks if (check.fault, check.code) == (fault, code)]
        for name in dict.fromkeys(check.name for check in causes):
            lines.append(f"| {name} | {'; '.join(check.wrong for check in causes if check.name == name)} |")
        lines.append("")
    lines += ["## What libvirt reports", ""]
    for fault, code in dict.fromkeys((rule.fault, rule.code) for rule in RULES):
        about = "; ".join(rule.name for rule in RULES if (rule.fault, rule.code) == (fault, code))
        lines.append(f"- {_blamed(fault, code)}: {about}")
    return "\n".join(lines) + "\n"


def _blamed(fault: type[Fault], code: str) -> str:
    return f"`{code.removeprefix(errors.PREFIX)}` ({fault.blames})"
