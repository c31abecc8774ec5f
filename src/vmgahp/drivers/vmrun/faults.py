"""Whose fault an error of vmrun is.

vmrun has no error codes, only sentences. The job's side is asked last: unlike libvirt's, these sentences name
few files, and those are cut out first. One that nothing here knows is the hypervisor's.
"""

import re
from collections.abc import Iterable

from vmgahp import errors
from vmgahp.drivers.vmrun.tool import HANGING_HINT, Hanging, VmrunError

_NOT_RUNNING = re.compile(
    r"virtual machine is not powered on|virtual machine needs to be powered on"
    r"|Cannot open VM: .*virtual machine cannot be found|is not running"
)
_NOT_SUPPORTED = re.compile(r"operation is not supported")

_MACHINE: tuple[tuple[str, str], ...] = (
    (
        r"specified version was not found|service provider was not found|is not installed",
        "set VMWARE_PRODUCT to ws, player or fusion, whichever is installed.",
    ),
    (
        r"disk is full|[Nn]o space left|[Ii]nsufficient disk space|There is not enough space",
        "make room on the file system of EXECUTE.",
    ),
    (
        r"[Nn]ot enough (physical )?memory|[Oo]ut of memory|[Cc]annot allocate memory|[Mm]emory allocation",
        "give VMs less memory (VM_MEMORY), or the machine more.",
    ),
    (
        r"/dev/vmmon|vmmon|vmnet|[Kk]ernel modules?",
        "build and load VMware's kernel modules: vmware-modconfig --console --install-all.",
    ),
    (
        r"[Ll]icen[sc]e|evaluation (period|version)|expired",
        "see to the licence of the VMware product.",
    ),
    (
        r"VT-x|AMD-V|[Vv]irtualized Intel|does not support (long mode|64-bit|hardware virtualization)",
        "switch hardware virtualisation on in this machine's firmware.",
    ),
)

_JOB: tuple[tuple[str, str, str], ...] = (
    (
        r"[Cc]annot open (one of )?the disks?|depends on|parent (virtual )?disk|not a virtual disk"
        r"|[Dd]isk (is )?(corrupt|invalid)|content ID|[Ff]ailed to open disk|is of an unsupported version",
        errors.BAD_IMAGE,
        "open the virtual machine in VMware, mend it, and send all of its files.",
    ),
    (
        r"[Cc]annot read the virtual machine configuration|[Cc]onfiguration file|[Dd]ictionary problem"
        r"|[Hh]ardware version|virtualHW|[Ii]nvalid (value|configuration)|[Cc]onfigured .* guest",
        errors.BAD_IMAGE,
        "open the virtual machine in VMware, mend it, and send the .vmx that it writes.",
    ),
    (
        r"file is already in use|already (in use|locked)|write-protected|access rights|[Ii]nsufficient permission"
        r"|[Pp]ermission denied|file was not found|file access error|No such file",
        errors.INVALID_DISK_PARAM,
        "see that all files of the disks are there, that the job's user may use them, and that no VM runs on them.",
    ),
    (r"MAC address", errors.MISMATCHED, "leave vm_macaddr out."),
    (r"[Vv]irtual (CPU|processor)s?|numvcpus", errors.MISMATCHED, "ask for fewer CPUs (vm_vcpus)."),
)


def is_not_running(error: VmrunError) -> bool:
    """Whether the VM does not run (any more)."""
    return _NOT_RUNNING.search(error.message) is not None


def is_not_supported(error: VmrunError) -> bool:
    """Whether this product does not have the command, as Player has no snapshots."""
    return _NOT_SUPPORTED.search(error.message) is not None


def from_vmrun(error: VmrunError, doing: str, job_values: Iterable[str] = ()) -> errors.Fault:
    """The fault for an error of vmrun met while `doing` something ("starting alice_lab_7.0").

    `job_values` are texts that the job chose, its paths above all: they are cut out before the message is
    judged, or a disk called "license" would take the machine out of service.
    """
    problem = f"vmrun failed while {doing}: {error.message.rstrip('.')}."
    message = error.message
    for value in sorted(filter(None, job_values), key=len, reverse=True):
        message = message.replace(value, "*")
    if isinstance(error, Hanging):
        return errors.MachineFault(
            f"vmrun does not answer while {doing} ({error.message}).",
            HANGING_HINT,
        )
    if is_not_running(error):
        return errors.ClientFault(errors.VM_NOT_FOUND, problem)
    for pattern, hint in _MACHINE:
        if re.search(pattern, message):
            return errors.MachineFault(problem, hint)
    for pattern, word, hint in _JOB:
        if re.search(pattern, message):
            return errors.JobFault(word, problem, hint)
    return errors.HypervisorFault(problem, "look into vmware.log in the job's scratch directory.")
