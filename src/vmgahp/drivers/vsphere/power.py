"""Powering VMs on and off and removing them: jobs, leftovers and kills alike.

A server that went away in the middle of an operation may have carried it out. So the outcome is looked at
before anything is done twice.
"""

from collections.abc import Callable

from pyVmomi import vim, vmodl

from vmgahp import errors
from vmgahp.drivers.vsphere import faults
from vmgahp.drivers.vsphere.connection import Gone, VsphereConnection

ON, OFF, SUSPENDED = "poweredOn", "poweredOff", "suspended"
"""Values of runtime.powerState."""


def state(connection: VsphereConnection, ref: "vim.VirtualMachine") -> str:
    """The power state of a VM. Raises `Gone`, and `errors.Fault`."""
    with faults.explained("asking for the state of a VM"):
        return str(connection.properties(ref, "runtime.powerState").get("runtime.powerState", ""))


def settle(
    connection: VsphereConnection, ref: "vim.VirtualMachine", begin: "Callable[[], vim.Task]", doing: str, wanted: str
) -> None:
    """Carry out a task after which the power state is `wanted`; it being so already is success.

    Raises `Gone`, and `errors.Fault`.
    """
    try:
        connection.retried_task(
            lambda _content: begin(), doing, lambda: True if state(connection, ref) == wanted else None
        )
    except errors.Fault as fault:
        if isinstance(fault.__cause__, vmodl.fault.ManagedObjectNotFound):
            raise Gone(f"VM {ref}") from fault
        if not isinstance(fault.__cause__, vim.fault.InvalidPowerState) or state(connection, ref) != wanted:
            raise


def on(connection: VsphereConnection, ref: "vim.VirtualMachine", doing: str) -> None:
    """Power a VM on, or resume it where it is suspended."""
    settle(connection, ref, ref.PowerOnVM_Task, doing, ON)


def off(connection: VsphereConnection, ref: "vim.VirtualMachine", doing: str) -> None:
    """Power a VM off at once, which throws the memory of a suspended one away."""
    if state(connection, ref) != OFF:
        settle(connection, ref, ref.PowerOffVM_Task, doing, OFF)


def suspend(connection: VsphereConnection, ref: "vim.VirtualMachine", doing: str) -> None:
    """Save a VM's memory on its datastore."""
    settle(connection, ref, ref.SuspendVM_Task, doing, SUSPENDED)


def ask_to_shut_down(connection: VsphereConnection, ref: "vim.VirtualMachine") -> bool:
    """Ask the guest to shut down, if VMware Tools run in it to hear that; whether they do. Raises `errors.Fault`."""
    path = "guest.toolsRunningStatus"
    with faults.explained("asking for VMware Tools"):
        seen = connection.properties(ref, path, "runtime.powerState")
    if str(seen.get("runtime.powerState")) != ON or seen.get(path) != "guestToolsRunning":
        return False
    with faults.explained("asking the guest to shut down"):
        connection.once(lambda _content: ref.ShutdownGuest(), "asking the guest to shut down")
    return True


def destroy(connection: VsphereConnection, ref: "vim.VirtualMachine", datacenter: "vim.Datacenter") -> bool:
    """Power a VM off and remove it with all files in its directory; False when it is gone already."""
    try:
        with faults.explained("looking at a VM"):
            seen = connection.properties(ref, "config.files.vmPathName")
        off(connection, ref, "powering a VM off")
        _remove(connection, ref)
    except Gone:
        return False
    # What was uploaded and not yet attached is no file of the VM's to the server.
    directory = directory_of(str(seen.get("config.files.vmPathName", "")))
    if directory:
        try:
            connection.retried_task(
                lambda content: content.fileManager.DeleteDatastoreFile_Task(directory, datacenter),
                f"removing {directory}",
            )
        except errors.Fault as fault:
            if not isinstance(fault.__cause__, vim.fault.FileNotFound):
                raise
    return True


def directory_of(path: str) -> str:
    """``[datastore] directory`` of ``[datastore] directory/name.vmx``; empty where there is no directory."""
    directory, slash, name = path.rpartition("/")
    return directory if slash and name.endswith(".vmx") and not directory.endswith("] ") else ""


def _remove(connection: VsphereConnection, ref: "vim.VirtualMachine") -> None:
    def still_there() -> None:
        state(connection, ref)  # which raises Gone where it was done

    try:
        connection.retried_task(lambda _content: ref.Destroy_Task(), "removing a VM", still_there)
    except errors.Fault as fault:
        if isinstance(fault.__cause__, vmodl.fault.ManagedObjectNotFound):
            raise Gone(f"VM {ref}") from fault
        raise
