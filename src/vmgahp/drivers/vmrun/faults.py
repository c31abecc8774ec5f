"""Fault rules for vmrun, which has no error codes, only sentences.

The job's rules come last: unlike libvirt's, these sentences name few files, and those are cut out first.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from vmgahp import errors
from vmgahp.drivers.fault_rules import Rule, classify
from vmgahp.drivers.vmrun.tool import VmrunError
from vmgahp.errors import ClientFault, HypervisorFault, JobFault, MachineFault

_NOT_RUNNING = (
    r"virtual machine is not powered on|virtual machine needs to be powered on"
    r"|Cannot open VM: .*virtual machine cannot be found|is not running"
)
_NOT_SUPPORTED = r"operation is not supported"


def _machine(name: str, hint: str, message: str) -> Rule:
    return Rule(name, MachineFault, errors.CRITICAL, hint, message)


def _job(name: str, code: str, hint: str, message: str) -> Rule:
    return Rule(name, JobFault, code, hint, message)


# fmt: off
RULES = (
    Rule("VM is off", ClientFault, errors.VM_NOT_FOUND, message=_NOT_RUNNING),
    _machine("product", "set VMWARE_PRODUCT to ws, player or fusion, whichever is installed.",
        r"specified version was not found|service provider was not found|is not installed"),
    _machine("disk space", "free disk space on the file system of EXECUTE.",
        r"disk is full|[Nn]o space left|[Ii]nsufficient disk space|There is not enough space"),
    _machine("memory", "give VMs less memory (VM_MEMORY), or the machine more.",
        r"[Nn]ot enough (physical )?memory|[Oo]ut of memory|[Cc]annot allocate memory|[Mm]emory allocation"),
    _machine("kernel modules",
        "build and load VMware's kernel modules: vmware-modconfig --console --install-all.",
        r"/dev/vmmon|vmmon|vmnet|[Kk]ernel modules?"),
    _machine("license", "renew the license of the VMware product.",
        r"[Ll]icen[sc]e|evaluation (period|version)|expired"),
    _machine("virtualization", "turn hardware virtualization on in this machine's firmware.",
        r"VT-x|AMD-V|[Vv]irtualized Intel|does not support (long mode|64-bit|hardware virtualization)"),
    _job("disk format", errors.BAD_IMAGE,
        "open the virtual machine in VMware, repair it, and send all of its files.",
        r"[Cc]annot open (one of )?the disks?|depends on|parent (virtual )?disk|not a virtual disk"
        r"|[Dd]isk (is )?(corrupt|invalid)|content ID|[Ff]ailed to open disk|is of an unsupported version"),
    _job("configuration", errors.BAD_IMAGE,
        "open the virtual machine in VMware, repair it, and send the .vmx that it writes.",
        r"[Cc]annot read the virtual machine configuration|[Cc]onfiguration file|[Dd]ictionary problem"
        r"|[Hh]ardware version|virtualHW|[Ii]nvalid (value|configuration)|[Cc]onfigured .* guest"),
    _job("disk access", errors.INVALID_DISK_PARAM,
        "send all files of the disks, let the job's user read and write them, and end other VMs that use them.",
        r"file is already in use|already (in use|locked)|write-protected|access rights|[Ii]nsufficient permission"
        r"|[Pp]ermission denied|file was not found|file access error|No such file"),
    _job("MAC address", errors.MISMATCHED, "remove vm_macaddr.", "MAC address"),
    _job("CPUs", errors.MISMATCHED, "ask for fewer CPUs (vm_vcpus).",
        "[Vv]irtual (CPU|processor)s?|numvcpus"),
    Rule("anything else", HypervisorFault, errors.INTERNAL,
        "read vmware.log in the job's scratch directory."),
)
# fmt: on
"""The rules in their order; an error that matches none of them is the hypervisor's."""


def is_not_running(error: VmrunError) -> bool:
    """Tell if the VM does not run (any more)."""
    return re.search(_NOT_RUNNING, error.message) is not None


def is_not_supported(error: VmrunError) -> bool:
    """Tell if this product does not have the command, as Player has no snapshots."""
    return re.search(_NOT_SUPPORTED, error.message) is not None


def from_vmrun(error: VmrunError, doing: str, job_values: Iterable[str] = ()) -> errors.Fault:
    """Return the fault for an error of vmrun met while `doing` something ("starting alice_lab_7.0").

    `job_values` are texts that the job chose, its paths above all; see `vmgahp.drivers.fault_rules.classify`.
    """
    problem = f"vmrun failed while {doing}: {error.message.rstrip('.')}."
    if error.hint:
        return MachineFault(problem, error.hint)
    if is_not_running(error):  # regardless of the job's values
        return RULES[0].make(problem)
    return classify(RULES, error.message, job_values).make(problem)


@contextmanager
def explained(doing: str, job_values: Iterable[str] = ()) -> Iterator[None]:
    """Turn errors of vmrun into faults, as `from_vmrun` does."""
    try:
        yield
    except VmrunError as error:
        raise from_vmrun(error, doing, job_values) from error
