"""The table of all job attributes that are read: name, command, kind, default, meaning.

`vmgahp.job.options` takes the options about devices from it, so an option that is not here is refused by name; the
table in the documents is made from it. Attributes without a submit command are written into a submit file with a
plus sign.
"""

from __future__ import annotations

from typing import NamedTuple

from vmgahp.vm_types import LIBVIRT, QEMU, VMWARE, XEN


class JobAttribute(NamedTuple):
    """A row of `ATTRIBUTES`."""

    name: str
    command: str
    """The submit command that sets it, empty for one that is written with a plus sign."""
    kind: str
    """The kind: string, integer or bool."""
    default: str
    """The default, in words."""
    meaning: str
    types: tuple[str, ...] = ()
    """The VM types that take it, empty for all."""


OPTION_PREFIX = "VMPARAM_vm_"


def _option(name: str, kind: str, default: str, meaning: str) -> JobAttribute:
    return JobAttribute(OPTION_PREFIX + name, "", kind, default, meaning, QEMU)


# fmt: off
OPTIONS = (
    _option("Arch", "string", "the machine's own", "The architecture of the guest: x86_64 or aarch64."),
    _option("Clock", "string", "utc",
        "The time of the guest's hardware clock: utc, or localtime (the machine's time zone), as Windows expects it."),
    _option("Data_Disk", "string", "none",
        "Empty disks for the job's data, each as device:size[:file], such as vdb:20G, with commas between "
        "them."),
    _option("Data_Files", "string", "none",
        "Transferred files, or directories of them, that the guest finds on a CD-ROM with the label "
        "JOBDATA."),
    _option("Disk_Size", "string", "that of the image",
        "The size of the first disk as the guest sees it, such as 20G: its image is enlarged at the start."),
    _option("Exit_Port", "bool", "false",
        "Whether the guest has a virtio port org.vmgahp.exit, to which it can write its exit code."),
    _option("Firmware", "string", "bios; uefi on aarch64",
        "What boots the guest: bios, uefi or uefi-secure."),
    _option("Ignore_Unknown", "bool", "false",
        "Whether the job runs all the same without options that this daemon does not know."),
    _option("Meta_Data", "string", "made", "cloud-init's meta-data, a transferred file."),
    _option("Network_Config", "string", "none", "cloud-init's network-config, a transferred file."),
    _option("NICs", "string", "the one NIC of vm_networking",
        "All NICs, each as kind:option…, with commas between them."),
    _option("Run", "string", "none",
        "A command line that the guest's shell runs; then the guest powers off, and the job ends with its exit code."),
    _option("Run_As_Root", "bool", "false",
        "Whether the guest's root runs it, and not an ordinary user."),
    _option("Run_Boot", "string", "cloud-init",
        "Who begins it in the guest: cloud-init, or ready for an agent that the image has."),
    _option("Run_Boot_Timeout", "integer", "VM_RUN_BOOT_TIMEOUT",
        "How many seconds the guest may run until it is ready for the program, and as many until that has started."),
    _option("Run_Inputs", "string", "all that was transferred",
        "Files and directories of the scratch directory that the program finds in its working directory, with commas "
        "between them."),
    _option("Run_Outputs", "string", "what is new or has changed",
        "Names and patterns in the program's working directory of what comes back, with commas between them."),
    _option("Run_Time_Limit", "integer", "none",
        "How many seconds the program may run."),
    _option("Share", "bool or string", "false",
        "A directory of the job's that the guest can mount: true for the scratch directory, or a name in "
        "it."),
    _option("Share_Dirs", "string", "none",
        "Directories of the machine's that the guest can mount, by the names in VM_SHARE_DIRS, with commas between "
        "them."),
    _option("SSH", "bool or string", "false",
        "The ports of the guest to which ports of the machine lead: true for 22, or a list such as \"22, 8080\"."),
    _option("Topology", "string", "one socket a CPU",
        "How the CPUs are arranged: sockets=1,cores=2,threads=1."),
    _option("TPM", "bool", "false", "Whether the guest has a TPM 2.0."),
    _option("User_Data", "string", "none",
        "cloud-init's user-data, a transferred file that the guest finds on a drive of its own."),
    _option("User_Data_Format", "string", "cloud-init",
        "The reader of the user-data: cloud-init, whose first lines are checked, or any for another program."),
)
# fmt: on
"""The options about devices, which may also be written ``VM_ATTR_<name>`` and ``VM_<type>_ATTR_<name>``."""

# fmt: off
ATTRIBUTES = (
    JobAttribute("JobVMType", "vm_type", "string", "must be there",
        "The VM type, which is that of the machine."),
    JobAttribute("VMPARAM_vm_Types", "", "string", "any that the machine has",
        "Of a job with vm_type = any: the VM types that would do, with commas between them."),
    JobAttribute("JobVMMemory", "vm_memory", "integer", "RequestMemory",
        "Memory of the VM in MiB, at most VM_MEMORY, and what the job's slot has unless VM_OVERCOMMIT is true."),
    JobAttribute("RequestMemory", "request_memory", "integer", "none",
        "The memory of the slot in MiB; stands in for JobVMMemory."),
    JobAttribute("JobVM_VCPUS", "vm_vcpus", "integer", "RequestCpus, else 1",
        "The number of CPUs, at most 255, and as many as the job's slot has unless VM_OVERCOMMIT is true."),
    JobAttribute("RequestCpus", "request_cpus", "integer", "1", "The CPUs of the slot; stands in for JobVM_VCPUS."),
    JobAttribute("VMPARAM_vm_Disk", "vm_disk", "string", "must be there",
        "The disks, each as file:device:permission[:format], or as catalog:name:device:permission for an "
        "image of the machine's, with commas between them.", types=LIBVIRT),
    JobAttribute("JobVMNetworking", "vm_networking", "bool", "false", "Whether the VM has a NIC."),
    JobAttribute("JobVMNetworkingType", "vm_networking_type", "string", "VM_NETWORKING_DEFAULT_TYPE",
        "The kind of network: nat, bridge or user, of those that the machine offers."),
    JobAttribute("JobVM_MACADDR", "vm_macaddr", "string", "the hypervisor's choice",
        "The MAC address of the (first) NIC."),
    JobAttribute("JobVMVNCConsole", "vm_vnc", "bool", "false",
        "Whether the VM has a display, by VNC on the machine's loopback address (vm_vnc.json says where).",
        types=QEMU),
    JobAttribute("JobVMCheckpoint", "vm_checkpoint", "bool", "false",
        "Whether the VM is checkpointed when the job is evicted, and restarts from there."),
    JobAttribute("VMPARAM_No_Output_VM", "vm_no_output_vm", "bool", "false",
        "Whether no file of the scratch directory is transferred back, the VM's disks least of all."),
    JobAttribute("JobVMHardwareVT", "", "bool", "false",
        "Whether the job needs hardware virtualization, which the machine offers by VM_HARDWARE_VT."),
    JobAttribute("VMPARAM_Libvirt_XML", "", "string", "none",
        "The file with the job's own libvirt XML, in the scratch directory.", types=QEMU),
    JobAttribute("VMPARAM_Xen_Kernel", "xen_kernel", "string", "must be there",
        "What boots: included, vmx, or a kernel image.", types=XEN),
    JobAttribute("VMPARAM_Xen_Initrd", "xen_initrd", "string", "none",
        "The initrd of that kernel image.", types=XEN),
    JobAttribute("VMPARAM_Xen_Root", "xen_root", "string", "must be there with a kernel image",
        "The root device.", types=XEN),
    JobAttribute("VMPARAM_Xen_Kernel_Params", "xen_kernel_params", "string", "none",
        "More words for the kernel.", types=XEN),
    JobAttribute("VMPARAM_VMware_VMX_File", "", "string", "must be there",
        "The .vmx file, which is transferred.", types=VMWARE),
    JobAttribute("VMPARAM_VMware_VMDK_Files", "", "string", "those that the .vmx names",
        "The .vmdk files, with their extents, with commas between them.", types=VMWARE),
    JobAttribute("VMPARAM_VMware_Transfer", "vmware_should_transfer_files", "bool", "true",
        "Whether the disks are transferred; otherwise they are in VMPARAM_VMware_Dir.", types=VMWARE),
    JobAttribute("VMPARAM_VMware_Dir", "vmware_dir", "string", "none",
        "The directory of disks that are not transferred, a full path on a shared file system.",
        types=VMWARE),
    JobAttribute("VMPARAM_VMware_SnapshotDisk", "vmware_snapshot_disk", "bool", "true",
        "Whether the guest writes to a snapshot's disks and leaves the job's own as they are.", types=VMWARE),
    *OPTIONS,
)
# fmt: on
