"""The meaning of each error word of the protocol, in a sentence that says whose fault it is.

The words are HTCondor's (``src/condor_vm-gahp/vmgahp_error_codes.h``, and those of VMware from before HTCondor
10.2); some of them are sent by HTCondor's own server only. The words that hold a job are in `errors.HOLD_CODES`,
which decides what condor_starter does with the job and with the machine (`fate`).
"""

from vmgahp import errors

WORDS: dict[str, str] = {
    "JOBCLASSAD_NO_VM_MEMORY_PARAM": "The job does not say how much memory its VM gets, or says nothing that this "
    "machine gives to a VM (VM_MEMORY).",
    "JOBCLASSAD_XEN_NO_KERNEL_PARAM": "The job does not say which kernel its Xen guest boots (xen_kernel).",
    "JOBCLASSAD_MISMATCHED_HARDWARE_VT": "The job asks for something that this machine does not grant: hardware "
    "virtualization, a kind of network, a device.",
    "JOBCLASSAD_XEN_KERNEL_NOT_FOUND": "The kernel of the job's Xen guest is not there, or may not be read.",
    "JOBCLASSAD_XEN_INITRD_NOT_FOUND": "The initial RAM disk of the job's Xen guest is not there, or may not be read.",
    "JOBCLASSAD_XEN_NO_ROOT_DEVICE_PARAM": "The job brings a kernel and does not say which disk is its root "
    "(xen_root).",
    "JOBCLASSAD_XEN_NO_DISK_PARAM": "The job names no disk for its Xen guest (vm_disk).",
    "JOBCLASSAD_XEN_INVALID_DISK_PARAM": "The vm_disk of the job is not of the right form, or its image is not there.",
    "JOBCLASSAD_XEN_MISMATCHED_CHECKPOINT": "The files of the job's checkpoint do not belong together.",
    "JOBCLASSAD_KVM_NO_DISK_PARAM": "The job names no disk (vm_disk).",
    "JOBCLASSAD_KVM_INVALID_DISK_PARAM": "The vm_disk of the job is not of the right form, or an image of it is not "
    "there, may not be read, or is in use.",
    "JOBCLASSAD_KVM_MISMATCHED_CHECKPOINT": "The files of the job's checkpoint do not belong together.",
    "BAD_IMAGE": "A disk image is damaged, or of another format than was said.",
    "NO_JOBCLASSAD_INFO": "No job ad was sent before the START, or one without VM_WORKING_DIR, JobVMType or the "
    "attributes that name the VM.",
    "NO_SUPPORTED_VM_TYPE": "The type asked for is not the one that this server serves.",
    "VM_NOT_FOUND": "There is no VM with this id: it was never started, or it was stopped, or its guest is gone.",
    "VM_INVALID_OPERATION": "This is not possible in the state that the VM is in.",
    "VM_NO_SUPPORT_SUSPEND": "VMs of this kind cannot be suspended.",
    "VM_NO_SUPPORT_CHECKPOINT": "VMs of this kind cannot be checkpointed, or the job does not ask for checkpoints.",
    "INTERNAL": "The hypervisor, or the server itself, failed in a way that is nobody's doing.",
    "CRITICAL": "Something on this machine keeps VMs from running: settings, libvirt, QEMU, room, permissions.",
    "VM_NOT_ENOUGH_MEMORY": "The machine has not enough free memory for the VM.",
    "VM_CANNOT_CREATE_CKPT_FILES": "The files of a checkpoint could not be written.",
    "VM_INVALID_SUSPEND_FILE": "The file that a suspended VM was saved in is missing or of no use.",
    "XEN_INVALID_GUEST_KERNEL": "Xen does not take the guest's kernel.",
    "XEN_VBD_CONNECT_ERROR": "Xen could not connect a disk of the guest.",
    "XEN_CONFIG_FILE_ERROR": "Xen does not take the description of the guest.",
    "JOBCLASSAD_TOO_MUCH_MEMORY_REQUEST": "The job asks for more memory than this machine gives to VMs.",
    "JOBCLASSAD_MISMATCHED_NETWORKING": "The job wants a network, and this machine offers none (VM_NETWORKING).",
    "JOBCLASSAD_MISMATCHED_NETWORKING_TYPE": "The job wants a kind of network that this machine does not offer "
    "(VM_NETWORKING_TYPE).",
    "JOBCLASSAD_XEN_NO_CDROM_DEVICE": "The job wants a CD-ROM drive and no disk of it is one.",
    "JOBCLASSAD_KVM_NO_CDROM_DEVICE": "The job wants a CD-ROM drive and no disk of it is one.",
    "CANNOT_CREATE_ISO_FILE": "The CD-ROM image of the job's input could not be written.",
    "CANNOT_READ_CDROM_FILE": "The CD-ROM image of the job cannot be read.",
    "CANNOT_CREATE_ARG_FILE": "The file with the job's arguments could not be written.",
    "JOBCLASSAD_NO_VMWARE_DIR_PARAM": "The job does not say where its VMware files are (vmware_dir).",
    "JOBCLASSAD_NO_VMWARE_VMX_PARAM": "The job does not name its .vmx file.",
    "JOBCLASSAD_NO_VMWARE_VMDK_PARAM": "The job does not name its .vmdk files.",
    "JOBCLASSAD_VMWARE_VMX_NOT_FOUND": "The job's .vmx file is not there.",
    "JOBCLASSAD_VMWARE_VMX_ERROR": "The job's .vmx file cannot be read.",
}
"""The meaning of each word; the key has no ``VMGAHP_ERR_``."""

NOTHING = "NULL"
"""The word of a result without words. As the word of a failure it means that the server does not know the reason."""


def short(word: str) -> str:
    """Return a word without its prefix, in upper case: the key of `WORDS`."""
    return word.upper().removeprefix(errors.PREFIX)


def meaning(word: str) -> str:
    """Return the sentence for a word, with or without its prefix; empty for an unknown word."""
    if word == NOTHING:
        return "The server does not say why."
    return WORDS.get(short(word), "")


def holds(word: str) -> bool:
    """Return True if the word, as the answer to a START, holds the job instead of taking the machine out of service."""
    return errors.PREFIX + short(word) in errors.HOLD_CODES


def fate(word: str) -> str:
    """Describe what condor_starter does when a START is answered with the word."""
    if holds(word):
        return "As the answer to a START it puts the job on hold; the machine stays in service."
    return "As the answer to a START it takes the whole machine out of the VM universe until it is repaired."
