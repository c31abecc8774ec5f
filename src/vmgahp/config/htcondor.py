"""HTCondor's settings for VMs that this daemon does not read, and the retired ones.

From ``src/condor_utils/param_info.in`` of HTCondor, and the code of its startd and starter that reads them.
"""

from functools import partial

from vmgahp.config.table import STARTD, STARTER, Setting

_startd, _starter = (partial(Setting, ours=False, readers=(reader,)) for reader in (STARTD, STARTER))

# fmt: off
ELSEWHERE = (
    Setting("VM_GAHP_SERVER", "path", "$(SBIN)/condor_vm-gahp",
        "The program that runs VMs: this daemon's condor_vm-gahp, by its full path.",
        ours=False, readers=(STARTD, STARTER)),
    _startd("VM_MAX_NUMBER", "integer", "", "How many VMs may run at once; empty: as many as there are."),
    _startd("VM_RECHECK_INTERVAL", "integer", "600",
        "After how long the startd looks again at a machine that could run no VM.", unit="seconds"),
    _startd("VM_KILLING_TIMEOUT", "integer", "60",
        "How long the startd waits for the kill mode of VM_GAHP_SERVER, which clears away what a job left.",
        unit="seconds"),
    _starter("VM_STATUS_INTERVAL", "integer", "60",
        "How often the starter asks for a VM's state; less than 30 counts as 30.", unit="seconds", least=30),
    _starter("VM_STATUS_MAX_ERROR", "integer", "5",
        "How many of these questions may fail one after the other before the starter gives the VM up."),
    _starter("VM_GAHP_SEND_ALL_CLASSAD", "bool", "true",
        "Whether the starter hands on the whole job ad. Where it does not, VM_POLICY_REQUIREMENTS and "
        "LIBVIRT_XML_SCRIPT see a few of its attributes only."),
    _starter("MEMORY_USAGE_METRIC_VM", "expression", "((ImageSize+1023)/1024)",
        "How MemoryUsage of a VM job is worked out."),
)
# fmt: on

RETIRED = {
    "VM_GAHP_CONFIG": "Settings of the VM universe are in the configuration itself since HTCondor 7.4.",
    "VM_MAX_MEMORY": "VM_MEMORY says how much memory VMs may have.",
    "VM_VERSION": "",
    "VM_BRIDGE_SCRIPT": "libvirt makes the network; VM_NETWORKING_BRIDGE_INTERFACE names the bridge.",
    "VM_NETWORKING_MAC_PREFIX": "VM_MAC_HOOK gives VMs their MAC addresses.",
    "VM_UNIV_NOBODY_USER": "VM_RUN_AS_JOB_USER says as whom VMs run.",
    "ALWAYS_VM_UNIV_USE_NOBODY": "VM_RUN_AS_JOB_USER says as whom VMs run.",
    "VMWARE_PERL": "VMWARE_VMRUN names VMware's own program.",
    "VMWARE_SCRIPT": "VMWARE_VMRUN names VMware's own program.",
    "XEN_SCRIPT": "Xen's VMs are run by libvirt.",
    "XEN_BRIDGE_SCRIPT": "libvirt makes the network; VM_NETWORKING_BRIDGE_INTERFACE names the bridge.",
    "XEN_CONTROLLER": "Xen's VMs are run by libvirt.",
    "XEN_DEFAULT_KERNEL": "The job names its kernel (xen_kernel), or its disk has one (XEN_BOOTLOADER).",
    "XEN_DEFAULT_INITRD": "The job names its own (xen_initrd).",
    "XEN_VIF_PARAMETER": "libvirt makes the network; VM_NETWORKING_BRIDGE_INTERFACE names the bridge.",
    "XEN_NAT_VIF_PARAMETER": "libvirt makes the network; VM_NAT_NETWORK names it.",
    "XEN_BRIDGE_VIF_PARAMETER": "libvirt makes the network; VM_NETWORKING_BRIDGE_INTERFACE names the bridge.",
    "XEN_IMAGE_IO_TYPE": "libvirt chooses how disks are read.",
    "XEN_LOCAL_SETTINGS_FILE": "VM_POLICY changes what libvirt is told.",
}
"""The settings that HTCondor has retired, with their replacements: neither it nor this daemon reads them."""

BY_NAME = {setting.name: setting for setting in ELSEWHERE}

INTERNAL = frozenset(("USE_SCRIPT_TO_CREATE_CONFIG", "VMU_TESTING"))
"""The settings of HTCondor's own tests, which are never reported."""
