"""The fault rules of vSphere's errors.

The server says what went wrong by the type of a fault, and in words that depend on its language; so the type
decides. The rules go from the special to the general, for vSphere's faults inherit from one another.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from pyVmomi import vim, vmodl

from vmgahp import errors
from vmgahp.drivers.fault_rules import Rule, classify
from vmgahp.errors import ClientFault, HypervisorFault, JobFault, MachineFault

_VMX_HINT = "change the virtual hardware in the job's .vmx to what this server has."


def _machine(kind: str, hint: str) -> Rule:
    return Rule(kind, MachineFault, errors.CRITICAL, hint, kinds=(kind,))


def _hypervisor(kind: str, hint: str) -> Rule:
    return Rule(kind, HypervisorFault, errors.INTERNAL, hint, kinds=(kind,))


def _job(kind: str, code: str, hint: str) -> Rule:
    return Rule(kind, JobFault, code, hint, kinds=(kind,))


def _client(kind: str, code: str) -> Rule:
    return Rule(kind, ClientFault, code, kinds=(kind,))


# fmt: off
RULES = (
    _machine("vim.fault.InvalidLogin", "check VSPHERE_USER, and the password in VSPHERE_PASSWORD_FILE."),
    _hypervisor("vim.fault.NotAuthenticated", "find out what ends the sessions on the server."),
    _machine("vim.fault.NoPermission", "give the role of VSPHERE_USER the privilege that the message names."),
    _machine(
        "vim.fault.RestrictedVersion",
        "use a license that lets programs change something: a free ESXi can only be looked at.",
    ),
    _machine("vmodl.fault.NotEnoughLicenses", "check the licenses of the server."),
    _machine("vim.fault.NoDiskSpace", "free disk space on the datastore of VSPHERE_DATASTORE."),
    _machine(
        "vim.fault.InsufficientMemoryResourcesFault",
        "give the pool of VSPHERE_RESOURCE_POOL more memory, or VMs less (VM_MEMORY).",
    ),
    _machine(
        "vim.fault.InsufficientResourcesFault",
        "give the pool of VSPHERE_RESOURCE_POOL more, or run fewer VMs at once.",
    ),
    _machine("vim.fault.InvalidDatastore", "mount the datastore of VSPHERE_DATASTORE on all hosts that run VMs."),
    _job("vim.fault.InvalidDiskFormat", errors.BAD_IMAGE, "check the job's disks with qemu-img info."),
    _machine("vim.fault.UnsupportedVmxLocation", "name another VSPHERE_DATASTORE."),
    _hypervisor("vim.fault.CannotAccessVmComponent", "see that the hosts reach the datastore."),
    _job(
        "vim.fault.VirtualHardwareVersionNotSupported",
        errors.MISMATCHED,
        "lower virtualHW.version in the job's .vmx, or remove it.",
    ),
    _job("vim.fault.UnsupportedGuest", errors.MISMATCHED, "name another guestOS in the job's .vmx."),
    _job("vim.fault.MemorySizeNotSupported", errors.NO_MEMORY_PARAM, "ask for another vm_memory."),
    _job("vim.fault.VirtualHardwareCompatibilityIssue", errors.MISMATCHED, _VMX_HINT),
    _job("vim.fault.NumVirtualCpusIncompatible", errors.MISMATCHED, "ask for fewer CPUs (vm_vcpus)."),
    _job("vim.fault.TooManyDevices", errors.MISMATCHED, _VMX_HINT),
    _job("vim.fault.VmConfigFault", errors.MISMATCHED, _VMX_HINT),
    _hypervisor("vim.fault.FileLocked", "find out which host or program has the file open."),
    _hypervisor("vim.fault.FileFault", "check the datastore, and the server's log (hostd.log)."),
    _hypervisor("vmodl.fault.HostCommunication", "connect the host to its vCenter again, or take it out of the pool."),
    _client("vim.fault.ToolsUnavailable", errors.VM_INVALID_OPERATION),
    _client("vim.fault.InvalidPowerState", errors.VM_INVALID_OPERATION),
    _client("vmodl.fault.ManagedObjectNotFound", errors.VM_NOT_FOUND),
    _hypervisor(
        "vmodl.fault.InvalidArgument",
        "read the server's log (hostd.log, vpxd.log), and report a bug of the driver.",
    ),
    Rule("anything else", HypervisorFault, errors.INTERNAL, "read the server's log (hostd.log, vpxd.log)."),
)
# fmt: on

_KEYS_OF_THE_MACHINE = ("outofspace", "nospace", "memsched", "notenoughmem", "insufficient")
"""In the keys of the messages of a fault about a VM's configuration: the server's trouble after all."""

_DETAILS = ("privilegeId", "property", "invalidProperty", "file", "datastore", "name", "existingState")
"""Members of faults that name what they are about."""


class ServerLost(errors.HypervisorFault):
    """The server went away, or forgot a task, while something was being done: it may be done or not."""


def _kind(name: str) -> type:
    found: object = {"vim": vim, "vmodl": vmodl}[name.partition(".")[0]]
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    assert isinstance(found, type)
    return found


def from_vsphere(error: Exception, doing: str) -> errors.Fault:
    """The fault for an error of vSphere met while `doing` something ("starting alice_lab_7.0")."""
    problem = f"vSphere failed while {doing}: {describe(error)}."
    rule = classify(
        RULES, "", takes=lambda rule: not rule.kinds or any(isinstance(error, _kind(kind)) for kind in rule.kinds)
    )
    if rule.fault is JobFault and _is_the_machines(error):
        return MachineFault(problem, rule.hint)
    return rule.make(problem)


def describe(error: Exception) -> str:
    """A fault in one line: its type, what it is about, what the server says."""
    kind = type(error).__name__.rpartition(".")[2]
    told = [f"{name} {value!s}" for name in _DETAILS if (value := getattr(error, name, None))]
    said = str(getattr(error, "msg", "") or "").strip().rstrip(".")
    more = (getattr(message, "message", "") or "" for message in getattr(error, "faultMessage", None) or ())
    parts = [kind, *told, *([said] if said and said != kind else []), *(text.rstrip(".") for text in more if text)]
    return " ".join(", ".join(parts).split())[:1000]


def _is_the_machines(error: Exception) -> bool:
    keys = [getattr(message, "key", "") or "" for message in getattr(error, "faultMessage", None) or ()]
    return any(word in key.lower() for key in keys for word in _KEYS_OF_THE_MACHINE)


def unreachable(where: str, error: Exception) -> errors.MachineFault:
    """The server does not answer at all."""
    import ssl

    if isinstance(error, ssl.SSLCertVerificationError):
        reason = (error.verify_message if hasattr(error, "verify_message") else "") or error.strerror
        return errors.MachineFault(
            f"The certificate of the vSphere server {where} is not accepted: {reason}.",
            "save the server's own certificate as the file of VSPHERE_TLS_PIN, or install its authority's.",
        )
    return errors.MachineFault(
        f"The vSphere server {where} (VSPHERE_HOST) cannot be reached: {error or type(error).__name__}.",
        "see that it runs and that this machine gets through to it.",
    )


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turn what vSphere answers into the fault that it is."""
    try:
        yield
    except vmodl.MethodFault as error:
        raise from_vsphere(error, doing) from error
