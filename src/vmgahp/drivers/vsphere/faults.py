"""The faults for vSphere's errors.

The server says what went wrong by the type of a fault, and in words that depend on its language; so the type decides.
"""

import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pyVmomi import vim, vmodl

from vmgahp import errors
from vmgahp.errors import ClientFault, Fault, HypervisorFault, JobFault, MachineFault

Maker = Callable[[str], Fault]
"""A function that makes the fault for a problem."""


def _machine(hint: str) -> Maker:
    return lambda problem: MachineFault(problem, hint)


def _hypervisor(hint: str) -> Maker:
    return lambda problem: HypervisorFault(problem, hint)


def _job(hint: str, code: str = errors.MISMATCHED) -> Maker:
    return lambda problem: JobFault(code, problem, hint)


def _client(code: str) -> Maker:
    return lambda problem: ClientFault(code, problem)


RULES: dict[type, Maker] = {
    vim.fault.InvalidLogin: _machine("check VSPHERE_USER, and the password in VSPHERE_PASSWORD_FILE."),
    vim.fault.NotAuthenticated: _hypervisor("find out what ends the sessions on the server."),
    vim.fault.NoPermission: _machine("give the role of VSPHERE_USER the privilege that the message names."),
    vim.fault.RestrictedVersion: _machine("use a license that lets programs change something; a free ESXi has none."),
    vmodl.fault.NotEnoughLicenses: _machine("check the licenses of the server."),
    vim.fault.NoDiskSpace: _machine("free disk space on the datastore of VSPHERE_DATASTORE."),
    vim.fault.InsufficientResourcesFault: _machine(
        "give the pool of VSPHERE_RESOURCE_POOL more memory and CPUs, or run fewer or smaller VMs (VM_MEMORY)."
    ),
    vim.fault.InvalidDatastore: _machine("mount the datastore of VSPHERE_DATASTORE on all hosts that run VMs."),
    vim.fault.InvalidDiskFormat: _job("check the job's disks with qemu-img info.", errors.BAD_IMAGE),
    vim.fault.UnsupportedVmxLocation: _machine("name another VSPHERE_DATASTORE."),
    vim.fault.CannotAccessVmComponent: _hypervisor("see that the hosts reach the datastore."),
    vim.fault.UnsupportedGuest: _job("name another guestOS in the job's .vmx."),
    vim.fault.MemorySizeNotSupported: _job("ask for another vm_memory.", errors.NO_MEMORY_PARAM),
    vim.fault.NumVirtualCpusIncompatible: _job("ask for fewer CPUs (vm_vcpus)."),
    vim.fault.VmConfigFault: _job("change virtualHW.version or the devices in the job's .vmx to what this server has."),
    vim.fault.FileFault: _hypervisor("check the datastore, what has the file open, and the server's log (hostd.log)."),
    vmodl.fault.HostCommunication: _hypervisor("connect the host to its vCenter again, or take it out of the pool."),
    vim.fault.ToolsUnavailable: _client(errors.VM_INVALID_OPERATION),
    vim.fault.InvalidPowerState: _client(errors.VM_INVALID_OPERATION),
    vmodl.fault.ManagedObjectNotFound: _client(errors.VM_NOT_FOUND),
    vmodl.MethodFault: _hypervisor("read the server's log (hostd.log, vpxd.log)."),
}
"""The fault for each type of error; the first row that matches applies, as vSphere's types inherit from one another."""

_KEYS_OF_THE_MACHINE = ("outofspace", "nospace", "memsched", "notenoughmem", "insufficient")
"""The parts of messages' keys by which a fault about a VM's configuration is an error of the server after all."""

_DETAILS = ("privilegeId", "property", "invalidProperty", "file", "datastore", "name", "existingState")
"""The members of faults that name their subject."""


class ServerLost(HypervisorFault):
    """A loss of the server, or of a task, during an operation whose outcome is unknown."""


class Gone(ClientFault):
    """The error for an object that does not exist (any more)."""

    def __init__(self, what: object) -> None:
        name = str(what).strip("'")
        super().__init__(errors.VM_NOT_FOUND, f"vSphere knows no {name}.")


def from_vsphere(error: Exception, doing: str) -> Fault:
    """Return the fault for an error of vSphere met while `doing` something ("starting alice_lab_7.0")."""
    fault = next(make for kind, make in RULES.items() if isinstance(error, kind))(
        f"vSphere failed while {doing}: {describe(error)}."
    )
    keys = [getattr(message, "key", "") or "" for message in getattr(error, "faultMessage", None) or ()]
    if isinstance(fault, JobFault) and any(word in key.lower() for key in keys for word in _KEYS_OF_THE_MACHINE):
        return MachineFault(fault.problem, fault.hint)
    return fault


def describe(error: Exception) -> str:
    """Describe a fault in one line: its type, its subject, the server's message."""
    kind = type(error).__name__.rpartition(".")[2]
    told = [f"{name} {value!s}" for name in _DETAILS if (value := getattr(error, name, None))]
    said = str(getattr(error, "msg", "") or "").strip().rstrip(".")
    more = (getattr(message, "message", "") or "" for message in getattr(error, "faultMessage", None) or ())
    parts = [kind, *told, *([said] if said and said != kind else []), *(text.rstrip(".") for text in more if text)]
    return " ".join(", ".join(parts).split())[:1000]


def unreachable(where: str, error: Exception) -> MachineFault:
    """Return the fault for a server that does not answer."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return MachineFault(
            f"The certificate of the vSphere server {where} is not accepted: {error.verify_message or error}.",
            "save the server's own certificate as the file of VSPHERE_TLS_PIN, or install its authority's.",
        )
    return MachineFault(
        f"The vSphere server {where} (VSPHERE_HOST) cannot be reached: {error or type(error).__name__}.",
        "see that it runs and that this machine gets through to it.",
    )


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turn an error of vSphere into its fault."""
    try:
        yield
    except vmodl.MethodFault as error:
        raise from_vsphere(error, doing) from error
