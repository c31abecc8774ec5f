"""The job attributes that are read, in one table, and the options about the VM among them.

The table in the documents is made from the rows. Attributes without
a submit command are written into a submit file with a plus sign.

``VMPARAM_vm_<Name>`` is the usual form of an option. ``VM_ATTR_<name>`` is the same for any hypervisor, and
``VM_<type>_ATTR_<name>`` is for jobs that run as this VM type: it overrides the other two, and is ignored for
jobs of another type. An unknown name of these three forms is refused, for a job that misspells an option would
otherwise run without it; ``VMPARAM_vm_Ignore_Unknown = true`` makes it run.
"""

from __future__ import annotations

from typing import NamedTuple

from vmgahp.errors import MISMATCHED, JobFault
from vmgahp.job.ad import JobAd
from vmgahp.text import shown
from vmgahp.vm_types import LIBVIRT, QEMU, VMWARE, XEN


class JobAttribute(NamedTuple):
    """A row of `ATTRIBUTES`."""

    name: str
    command: str
    """The submit command that sets it, empty for one that is written with a plus sign."""
    kind: str
    """The kind: string, integer or bool."""
    default: str
    meaning: str
    types: tuple[str, ...] = ()
    """The VM types that take it, empty for all."""


OPTION_PREFIX = "VMPARAM_vm_"
LIBVIRT_XML = "VMPARAM_Libvirt_XML"
"""The attribute that names the file with the job's own XML (`vmgahp.domain.job_xml`)."""


def _option(name: str, kind: str, default: str, meaning: str) -> JobAttribute:
    return JobAttribute(OPTION_PREFIX + name, "", kind, default, meaning, QEMU)


# fmt: off
OPTIONS = (
    _option("Arch", "string", "the machine's own", "The architecture of the guest: x86_64 or aarch64."),
    _option("Clock", "string", "utc",
        "The time of the guest's hardware clock: utc, or localtime (the machine's time zone), as Windows expects it."),
    _option("Data_Disk", "string", "none",
        "Empty disks for the job's data, each as device:size[:file], such as vdb:20G, separated by commas."),
    _option("Data_Files", "string", "none",
        "Transferred files and directories to put on a CD-ROM with the label JOBDATA."),
    _option("Disk_Size", "string", "that of the image",
        "The size of the first disk, such as 20G: its image is enlarged at the start."),
    _option("Exit_Port", "bool", "false",
        "True to add a virtio port org.vmgahp.exit, to which the guest can write its exit code."),
    _option("Firmware", "string", "bios; uefi on aarch64", "The firmware: bios, uefi or uefi-secure."),
    _option("Ignore_Unknown", "bool", "false", "True to ignore options that this daemon does not know."),
    _option("Meta_Data", "string", "made", "cloud-init's meta-data, a transferred file."),
    _option("Network_Config", "string", "none", "cloud-init's network-config, a transferred file."),
    _option("NICs", "string", "the one NIC of vm_networking", "All NICs, each as kind:option…, separated by commas."),
    _option("Run", "string", "none",
        "A command line for the guest's shell; the guest then powers off, and the job ends with its exit code."),
    _option("Run_As_Root", "bool", "false", "True to run it as the guest's root instead of an ordinary user."),
    _option("Run_Boot", "string", "cloud-init",
        "The starter of the program in the guest: cloud-init, or ready for an agent in the image."),
    _option("Run_Boot_Timeout", "integer", "VM_RUN_BOOT_TIMEOUT",
        "The timeout in seconds for the guest to get ready, and again for the program to start."),
    _option("Run_Inputs", "string", "all that was transferred",
        "Files and directories of the scratch directory to put into the program's working directory, separated by "
        "commas."),
    _option("Run_Outputs", "string", "what is new or has changed",
        "Names and patterns of the files in the program's working directory to transfer back, separated by commas. A "
        "name that begins with a dot must be named."),
    _option("Run_Time_Limit", "integer", "none", "The time limit of the program in seconds."),
    _option("Share", "bool or string", "false",
        "A directory of the job for the guest to mount: true for the scratch directory, or a name in it."),
    _option("Share_Dirs", "string", "none",
        "Directories of the machine for the guest to mount, by their names in VM_SHARE_DIRS, separated by commas."),
    _option("SSH", "bool or string", "false",
        "The guest's ports to forward from the machine: true for 22, or a list such as \"22, 8080\"."),
    _option("Topology", "string", "one socket a CPU", "The CPU topology: sockets=1,cores=2,threads=1."),
    _option("TPM", "bool", "false", "True to add a TPM 2.0."),
    _option("User_Data", "string", "none", "cloud-init's user-data, a transferred file."),
    _option("User_Data_Format", "string", "cloud-init",
        "The reader of the user-data: cloud-init, whose first lines are checked, or any for another program."),
)
# fmt: on
"""The options about devices, which may also be written ``VM_ATTR_<name>`` and ``VM_<type>_ATTR_<name>``."""

# fmt: off
ATTRIBUTES = (
    JobAttribute("JobVMType", "vm_type", "string", "must be there", "The VM type, which must be that of the machine."),
    JobAttribute("VMPARAM_vm_Types", "", "string", "any that the machine has",
        "For vm_type = any: the acceptable VM types, separated by commas."),
    JobAttribute("JobVMMemory", "vm_memory", "integer", "RequestMemory",
        "The memory of the VM in MiB, at most VM_MEMORY, and at most that of the job's slot unless VM_OVERCOMMIT is "
        "true."),
    JobAttribute("RequestMemory", "request_memory", "integer", "none",
        "The memory of the slot in MiB; the default of JobVMMemory."),
    JobAttribute("JobVM_VCPUS", "vm_vcpus", "integer", "RequestCpus, else 1",
        "The number of CPUs, at most 255, and at most those of the job's slot unless VM_OVERCOMMIT is true."),
    JobAttribute("RequestCpus", "request_cpus", "integer", "1", "The CPUs of the slot; the default of JobVM_VCPUS."),
    JobAttribute("VMPARAM_vm_Disk", "vm_disk", "string", "must be there",
        "The disks, each as file:device:permission[:format], or catalog:name:device:permission for a catalog "
        "image, separated by commas.", types=LIBVIRT),
    JobAttribute("JobVMNetworking", "vm_networking", "bool", "false", "True to give the VM a NIC."),
    JobAttribute("JobVMNetworkingType", "vm_networking_type", "string", "VM_NETWORKING_DEFAULT_TYPE",
        "The kind of network, one that the machine offers: nat, bridge or user."),
    JobAttribute("JobVM_MACADDR", "vm_macaddr", "string", "the hypervisor's choice",
        "The MAC address of the first NIC."),
    JobAttribute("JobVMVNCConsole", "vm_vnc", "bool", "false",
        "True to add a display, by VNC on the machine's loopback address (see vm_vnc.json).", types=QEMU),
    JobAttribute("JobVMCheckpoint", "vm_checkpoint", "bool", "false",
        "True to checkpoint the VM when the job is evicted, and to restart it from there."),
    JobAttribute("VMPARAM_No_Output_VM", "vm_no_output_vm", "bool", "false",
        "True to transfer no file of the scratch directory back."),
    JobAttribute("JobVMHardwareVT", "", "bool", "false", "True to require hardware virtualization (VM_HARDWARE_VT)."),
    JobAttribute(LIBVIRT_XML, "", "string", "none",
        "A transferred file with libvirt XML of the job's own.", types=QEMU),
    JobAttribute("VMPARAM_Xen_Kernel", "xen_kernel", "string", "must be there",
        "The kernel to boot: included, vmx, or a kernel image.", types=XEN),
    JobAttribute("VMPARAM_Xen_Initrd", "xen_initrd", "string", "none", "The initrd of that kernel image.", types=XEN),
    JobAttribute("VMPARAM_Xen_Root", "xen_root", "string", "must be there with a kernel image",
        "The root device.", types=XEN),
    JobAttribute("VMPARAM_Xen_Kernel_Params", "xen_kernel_params", "string", "none",
        "Further kernel parameters.", types=XEN),
    JobAttribute("VMPARAM_VMware_VMX_File", "", "string", "must be there",
        "The .vmx file, a transferred file.", types=VMWARE),
    JobAttribute("VMPARAM_VMware_VMDK_Files", "", "string", "those that the .vmx names",
        "The .vmdk files and their extents, separated by commas.", types=VMWARE),
    JobAttribute("VMPARAM_VMware_Transfer", "vmware_should_transfer_files", "bool", "true",
        "True to transfer the disks; otherwise they are in VMPARAM_VMware_Dir.", types=VMWARE),
    JobAttribute("VMPARAM_VMware_Dir", "vmware_dir", "string", "none",
        "The full path of the directory of disks that are not transferred, on a shared file system.", types=VMWARE),
    JobAttribute("VMPARAM_VMware_SnapshotDisk", "vmware_snapshot_disk", "bool", "true",
        "True to let the guest write to a snapshot's disks and leave the job's own unchanged.", types=VMWARE),
    *OPTIONS,
)
# fmt: on

BIOS, UEFI, UEFI_SECURE = "bios", "uefi", "uefi-secure"
FIRMWARES = (BIOS, UEFI, UEFI_SECURE)

X86, ARM = "x86_64", "aarch64"
ARCHES = {X86: X86, "amd64": X86, ARM: ARM, "arm64": ARM}

UTC, LOCAL_TIME = "utc", "localtime"
CLOCKS = (UTC, LOCAL_TIME)

NO_SHARE, NINEP, VIRTIOFS = "none", "9p", "virtiofs"
SHARES = (NO_SHARE, NINEP, VIRTIOFS)


class Share(NamedTuple):
    """A directory that the guest can mount."""

    tag: str
    directory: str
    kind: str
    writable: bool = True
    setting: str = ""
    """The setting that defines it; empty for the job's own."""


GENERAL = "VM_ATTR_"

DATA_DISK, DATA_FILES, DISK_SIZE = "Data_Disk", "Data_Files", "Disk_Size"
META_DATA, NETWORK_CONFIG, USER_DATA = "Meta_Data", "Network_Config", "User_Data"
RUN, RUN_INPUTS = "Run", "Run_Inputs"

NAMES = tuple(row.name.removeprefix(OPTION_PREFIX) for row in OPTIONS)
"""The options that can be written in all three forms: the rows of the table in `attributes`."""

OTHERS = ("disk", "name", "types")
"""The other names with ``VMPARAM_vm_``: vm_disk, the list of VM types, and the name that this daemon gives."""


class Options:
    """The options of one job. The constructor raises `JobFault` for an unknown name, or two that contradict each other.

    With `others_know` unknown names are accepted, since LIBVIRT_XML_SCRIPT describes the VM and may know them.
    """

    def __init__(self, ad: JobAd, *, others_know: bool = False) -> None:
        self._ad = ad
        self._attributes: dict[str, str] = {}
        """The effective attribute of each option, by the option's name in lower case."""
        self.ignored: tuple[str, ...] = ()
        """The unknown attributes, in a job that ignores them."""
        own = f"VM_{ad.vm_type()}_ATTR_"
        known = {name.lower(): name for name in NAMES}
        unknown = []
        for prefix in (OPTION_PREFIX, GENERAL, own):  # the last one counts
            for attribute in ad.names(prefix):
                option = attribute[len(prefix) :].lower()
                if option in known:
                    self._take(option, attribute, overrides=prefix == own)
                elif prefix != OPTION_PREFIX or option not in OTHERS:
                    unknown.append(attribute)
        if unknown and not others_know and not self.boolean("Ignore_Unknown"):
            problem = f"{unknown[0]} = {shown(ad.expression(unknown[0]))}: there is no such option."
            listed = ", ".join(OPTION_PREFIX + name for name in NAMES)
            hint = f"write one of {listed}, or set VMPARAM_vm_Ignore_Unknown = true to run without it."
            raise JobFault(MISMATCHED, problem, hint)
        self.ignored = () if others_know else tuple(unknown)

    def attribute(self, option: str) -> str:
        """Return the attribute that sets the option, for messages; the usual one if the job does not set it."""
        return self._attributes.get(option.lower(), OPTION_PREFIX + option)

    def shown(self, option: str) -> str:
        """Format the option as ``Attribute = value``, for messages."""
        name = self.attribute(option)
        value = self._ad.string(name)
        return f"{name} = {shown(self._ad.expression(name) if value is None else value)}"

    def has(self, option: str) -> bool:
        """Return True if the job sets the option."""
        return option.lower() in self._attributes

    def string(self, option: str) -> str:
        """Return a string without surrounding blanks, empty if unset. Raises `JobFault` if it is not a string."""
        if option.lower() not in self._attributes:
            return ""
        value = self._ad.string(self.attribute(option))
        if value is None:
            raise self.refused(option, "it is not a string", f'write it in quotes, +{OPTION_PREFIX}{option} = "…".')
        return value.strip()

    def boolean(self, option: str) -> bool:
        """Return true or false, false if unset. Raises `JobFault` for any other value."""
        if option.lower() not in self._attributes:
            return False
        value = self._ad.boolean(self.attribute(option))
        if value is None:
            hint = f"write +{OPTION_PREFIX}{option} = true, or false."
            raise self.refused(option, "it is neither true nor false", hint)
        return value

    def integer(self, option: str, most: int) -> int:
        """Return an integer from 1 to `most`, 0 if unset. Raises `JobFault` for anything else."""
        if option.lower() not in self._attributes:
            return 0
        value = self._ad.value(self.attribute(option))
        if type(value) is not int or not 0 < value <= most:
            problem = f"it is not a whole number from 1 to {most}"
            raise self.refused(option, problem, f"write +{OPTION_PREFIX}{option} = 600, without quotes, or remove it.")
        return value

    def is_text(self, option: str) -> bool:
        """Return True if the job sets the option to a string."""
        return option.lower() in self._attributes and self._ad.string(self.attribute(option)) is not None

    def refused(self, option: str, problem: str, hint: str) -> JobFault:
        """Make the fault for an invalid option; `problem` and `hint` are sentences, the first without its end."""
        return refusal(self.shown(option), problem, hint)

    def _take(self, option: str, attribute: str, *, overrides: bool) -> None:
        expression = self._ad.expression(attribute) or ""
        if expression.lower() == "undefined":
            return
        other = self._attributes.get(option)
        if other is not None and not overrides and self._ad.expression(other) != expression:
            both = f"{other} = {shown(self._ad.expression(other))} and {attribute} = {shown(expression)}"
            raise JobFault(MISMATCHED, f"{both} contradict each other.", f"keep one of {other} and {attribute}.")
        self._attributes[option] = attribute


def refusal(said: str, problem: str, hint: str) -> JobFault:
    """Make the fault for what the job asks for by `said`, ``Attribute = value``; `problem` has no full stop."""
    return JobFault(MISMATCHED, f"{said}: {problem}.", hint)
