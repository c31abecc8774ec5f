"""Whose fault an error of vSphere is.

The server says what went wrong by the type of a fault, and in words that depend on its language; so the type
decides. The table goes from the special to the general, for vSphere's faults inherit from one another. A
fault that nothing here knows is the hypervisor's: it holds no job and says what it was.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from pyVmomi import vim, vmodl

from vmgahp import errors

JOB, MACHINE, HYPERVISOR, CLIENT = "job", "machine", "hypervisor", "client"

_VMX_HINT = "change the virtual hardware in the job's .vmx to what this server has."

# fmt: off
TABLE: tuple[tuple[str, str, str, str], ...] = (
    ("vim.fault.InvalidLogin", MACHINE, "", "see VSPHERE_USER, and the password in VSPHERE_PASSWORD_FILE."),
    ("vim.fault.NotAuthenticated", HYPERVISOR, "", "see what ends the sessions on the server."),
    ("vim.fault.NoPermission", MACHINE, "",
        "give the role of VSPHERE_USER the privilege that the message names."),
    ("vim.fault.RestrictedVersion", MACHINE, "",
        "use a license that lets programs change something: a free ESXi can only be looked at."),
    ("vmodl.fault.NotEnoughLicenses", MACHINE, "", "see the licenses of the server."),
    ("vim.fault.NoDiskSpace", MACHINE, "", "make room on the datastore of VSPHERE_DATASTORE."),
    ("vim.fault.InsufficientMemoryResourcesFault", MACHINE, "",
        "give the pool of VSPHERE_RESOURCE_POOL more memory, or VMs less (VM_MEMORY)."),
    ("vim.fault.InsufficientResourcesFault", MACHINE, "",
        "give the pool of VSPHERE_RESOURCE_POOL more, or run fewer VMs at once."),
    ("vim.fault.InvalidDatastore", MACHINE, "",
        "see that the datastore of VSPHERE_DATASTORE is mounted where VMs run."),
    ("vim.fault.InvalidDiskFormat", JOB, errors.BAD_IMAGE,
        "see what qemu-img info says about the job's disks."),
    ("vim.fault.UnsupportedVmxLocation", MACHINE, "", "name another VSPHERE_DATASTORE."),
    ("vim.fault.CannotAccessVmComponent", HYPERVISOR, "", "see that the hosts reach the datastore."),
    ("vim.fault.VirtualHardwareVersionNotSupported", JOB, errors.MISMATCHED,
        "lower virtualHW.version in the job's .vmx, or leave it out."),
    ("vim.fault.UnsupportedGuest", JOB, errors.MISMATCHED, "name another guestOS in the job's .vmx."),
    ("vim.fault.MemorySizeNotSupported", JOB, errors.NO_MEMORY_PARAM, "ask for another vm_memory."),
    ("vim.fault.VirtualHardwareCompatibilityIssue", JOB, errors.MISMATCHED, _VMX_HINT),
    ("vim.fault.NumVirtualCpusIncompatible", JOB, errors.MISMATCHED, "ask for fewer CPUs (vm_vcpus)."),
    ("vim.fault.TooManyDevices", JOB, errors.MISMATCHED, _VMX_HINT),
    ("vim.fault.VmConfigFault", JOB, errors.MISMATCHED, _VMX_HINT),
    ("vim.fault.FileLocked", HYPERVISOR, "", "see which host or program has the file open."),
    ("vim.fault.FileFault", HYPERVISOR, "", "look at the datastore, and into the server's log (hostd.log)."),
    ("vmodl.fault.HostCommunication", HYPERVISOR, "",
        "connect the host to its vCenter again, or take it out of the pool."),
    ("vim.fault.ToolsUnavailable", CLIENT, errors.VM_INVALID_OPERATION, ""),
    ("vim.fault.InvalidPowerState", CLIENT, errors.VM_INVALID_OPERATION, ""),
    ("vmodl.fault.ManagedObjectNotFound", CLIENT, errors.VM_NOT_FOUND, ""),
    ("vmodl.fault.InvalidArgument", HYPERVISOR, "",
        "look into the server's log (hostd.log, vpxd.log), and report it as a defect of the driver."),
)
# fmt: on
"""Type of the fault, who is to blame, the word where that is not the class's own, the hint."""

_KEYS_OF_THE_MACHINE = ("outofspace", "nospace", "memsched", "notenoughmem", "insufficient")
"""In the keys of the messages of a fault about a VM's configuration: the server's trouble after all."""

_DETAILS = ("privilegeId", "property", "invalidProperty", "file", "datastore", "name", "existingState")
"""Members of faults that name what they are about."""


class Lost(errors.HypervisorFault):
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
    for name, blamed, word, hint in TABLE:
        if not isinstance(error, _kind(name)):
            continue
        if blamed == JOB and not _is_the_machines(error):
            return errors.JobFault(word, problem, hint)
        if blamed in (JOB, MACHINE):
            return errors.MachineFault(problem, hint)
        if blamed == CLIENT:
            return errors.ClientFault(word, problem)
        return errors.HypervisorFault(problem, hint)
    return errors.HypervisorFault(problem, "look into the server's log (hostd.log, vpxd.log).")


def describe(error: Exception) -> str:
    """A fault in one line: its type, what it is about, what the server says."""
    kind = type(error).__name__.rpartition(".")[2]
    told = [f"{name} {value!s}" for name in _DETAILS if (value := getattr(error, name, None))]
    said = str(getattr(error, "msg", "") or "").strip().rstrip(".")
    more = (getattr(message, "message", "") or "" for message in getattr(error, "faultMessage", None) or ())
    parts = [
        kind,
        *told,
        *([said] if said and said != kind else []),
        *(text.rstrip(".") for text in more if text),
    ]
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
