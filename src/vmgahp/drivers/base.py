"""The contract between the server and a hypervisor, and how the driver for a job is found.

Drivers are plain synchronous objects. The server calls a `Machine` from one worker thread of its own, so
the calls of one VM come one after another and those of different VMs side by side; a driver that shares
something between its machines (a connection) must cope with that.

Every method raises `vmgahp.errors.Fault` and nothing else when it fails: `JobFault` where the job's owner
must act, `MachineFault` or `HypervisorFault` where the machine is unfit. Any other exception is a bug in
the driver and is answered as ``VMGAHP_ERR_INTERNAL``.
"""

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property

from vmgahp import errors, lifecycle
from vmgahp.config import Settings
from vmgahp.drivers.surveyor import Logger, Survey, Surveyor, Value, load
from vmgahp.job.ad import JobAd, driver_type, is_choice
from vmgahp.job.published import JobUpdates
from vmgahp.metrics import Metrics, Status
from vmgahp.text import nearest
from vmgahp.vm_types import ANY, DRIVERS, SIMULATED, SIMULATED_SWITCH


def progress(what: str, log: Logger) -> Callable[[float], None]:
    """Return a function that logs the progress of a long operation, given in per cent, at each tenth."""
    told = 0

    def tell(per_cent: float) -> None:
        nonlocal told
        if per_cent >= told + 10:
            told = int(per_cent) // 10 * 10
            log(f"{what}: {told} %")

    return tell


class Machine(ABC):
    """One virtual machine that a driver has started."""

    name: str
    """The VM's name with the hypervisor: ``<User with @ as _>_<ClusterId>.<ProcId>``."""

    found: tuple[float, Status] | None = None
    """The time of the last STATUS, in seconds since 1970, and its result; the server keeps it for `metrics`."""

    @cached_property
    def updates(self) -> JobUpdates:
        """Return the updates of the VM for the pool (`vmgahp.job.published`), which last as long as the machine."""
        return JobUpdates()

    @abstractmethod
    def status(self) -> Status:
        """Return the state of the VM. A VM that no longer exists is reported as STOPPED, not raised."""

    @abstractmethod
    def pid(self) -> int:
        """Return the pid of the process that runs the guest, or 0 if it does not run on this machine."""

    def addresses(self) -> Sequence[str]:
        """Return the guest's IP addresses that are known by now, IPv4 first; this makes no query."""
        return ()

    @abstractmethod
    def stop(self) -> None:
        """Ask the guest to power off, wait for VM_STOP_TIMEOUT, then destroy it.

        When this returns the guest is gone and everything of the VM that is not the job's is cleaned up. Unlike other
        operations, this may be called while another one has exceeded the client's timeout; it overrules that one.
        """

    @abstractmethod
    def destroy(self) -> None:
        """End the guest at once, without asking it, and clean up. A VM that is already gone is success."""

    def release(self) -> None:  # noqa: B027 - by default there is nothing to clean up
        """Clean up after a guest that ended on its own, for example the capture of its console."""

    def exit_status(self) -> int:
        """Return the exit status of the server after `release`; HTCondor takes it for the job's exit code."""
        return 0

    def metrics(self) -> Metrics | None:
        """Return the resource usage of the VM for ``vm_metrics.jsonl``; None while it uses nothing, saved or gone.

        Unlike the other methods this is called concurrently with operations on the VM, from its own thread: it
        changes nothing, and waits for nothing that a request waits for too. The default returns the result of the
        last STATUS, at no cost; a driver that knows more, or can query the VM itself, overrides it.
        """
        if self.found is None or self.found[1].state not in (lifecycle.RUNNING, lifecycle.SOFT_SUSPENDED):
            return None
        when, report = self.found
        return Metrics(
            report.state,
            when,
            cpu_seconds=report.cpu_seconds,
            vcpus=report.vcpus,
            memory_kib=report.memory_kib,
            max_memory_kib=report.max_memory_kib,
        )

    def process(self) -> int:
        """Return the pid of the process that runs the guest, or 0 if it is not known without a query."""
        return 0

    def saved_bytes(self) -> int:
        """Return the size in bytes of the last suspend or checkpoint; 0 if unknown."""
        return 0

    def soft_suspend(self) -> None:
        """Stop the guest's CPUs and keep its memory in RAM."""
        raise errors.ClientFault(errors.VM_NO_SUPPORT_SUSPEND, f"{self.name} cannot be paused by its driver.")

    def suspend(self) -> None:
        """Save the guest's memory to a file in the scratch directory and free the machine's memory."""
        raise errors.ClientFault(errors.VM_NO_SUPPORT_SUSPEND, f"{self.name} cannot be saved by its driver.")

    def resume(self, state: str) -> None:
        """Resume from `state`: `lifecycle.SOFT_SUSPENDED` or `lifecycle.SUSPENDED`."""
        raise errors.ClientFault(errors.VM_INVALID_OPERATION, f"{self.name} cannot be resumed by its driver.")

    def checkpoint(self) -> None:
        """Write everything that a restart elsewhere needs to the scratch directory; the VM ends saved."""
        raise errors.ClientFault(errors.VM_NO_SUPPORT_CHECKPOINT, f"{self.name} cannot be checkpointed by its driver.")


class Driver(Surveyor):
    """One kind of hypervisor on this machine, for one VM type."""

    evaluates_policy = False
    """True if the driver evaluates VM_POLICY_REQUIREMENTS itself, over an ad to which it adds; else the caller does."""

    def get_ready(self) -> None:
        """Start slow preparations, since a client is about to start a VM. May be called during a START."""

    @abstractmethod
    def start(self, job: JobAd) -> Machine:
        """Start the job's VM, after clearing leftovers, and return when its guest runs; a fault leaves nothing."""

    def describe(self, job: JobAd) -> str:
        """Return the description for the hypervisor, changing nothing. Raises as `start`, and `MachineFault`."""
        problem = f"The driver for VM type {self.vm_type} has no dry run."
        raise errors.MachineFault(problem, "submit the job, or start it by hand with vmgahp serve.")

    @abstractmethod
    def kill(self, match: str, uuid: str = "") -> bool:
        """Destroy the VM that `match` names; return False if there is no such VM, which is not an error.

        For kvm and xen `match` is the VM's name, for every other type the job's scratch directory. With `uuid` only
        the VM with that UUID is destroyed, so that a late clean-up cannot hit the next VM of the same name.
        """

    def interrupt(self) -> Sequence[Machine]:
        """Make a START that is under way in another thread fail as soon as it can, because the server ends.

        Returns the machines to destroy, whether started or not. A START that runs to its end is ended then.
        """
        return ()

    def close(self) -> None:
        """Close connections; called once, when the server ends."""


def find(vm_type: str) -> type[Driver]:
    """Return the driver class for a VM type: built in, or of the group ``vmgahp.drivers``. Raises `MachineFault`."""
    # A list of types is a choice as "any" is; no driver's name has a comma. The table comes first, because to scan
    # the installed packages for entry points costs more than all else that a server imports.
    place = DRIVERS.get(ANY if "," in vm_type else vm_type)
    if vm_type == SIMULATED and os.environ.get(SIMULATED_SWITCH):
        place = "vmgahp.drivers.simulated:SimulatedDriver"
    if place is None:
        from importlib.metadata import entry_points

        place = next((point.value for point in entry_points(group="vmgahp.drivers", name=vm_type)), None)
        if place is None:
            near = nearest(vm_type, DRIVERS)
            hint = f"did you mean {near}? Else " if near else ""
            problem = f"No driver is installed for VM_TYPE = {vm_type}."
            hint += f"set VM_TYPE to one of {', '.join(sorted(DRIVERS))}, or install the package of the driver."
            raise errors.MachineFault(problem, hint, errors.NO_SUPPORTED_VM_TYPE)
    found = load(vm_type, place)
    if not (isinstance(found, type) and issubclass(found, Driver)):
        raise errors.MachineFault(f"{place}, the driver for VM_TYPE = {vm_type}, is not a Driver.")
    return found


# The VM types that this machine has, and the choice of the one for a job


ANY_TYPES = "VM_ANY_TYPES"

XEN = "/proc/xen/privcmd"
"""The file that exists on a machine that runs under Xen, as dom0."""


def machine_types(settings: Settings) -> tuple[str, ...]:
    """Return the VM types of this machine in the administrator's order.

    These are those in VM_ANY_TYPES; else the one that the machine offers; else all whose requirements are met, as far
    as the settings and a quick look can tell. Raises `MachineFault` for an invalid list.
    """
    listed = tuple(dict.fromkeys(word.lower() for word in settings.strings(ANY_TYPES)))
    if wrong := next(filter(is_choice, listed), ""):
        problem = f"{ANY_TYPES} has {wrong} ({settings.where(ANY_TYPES)}), which is not a hypervisor."
        raise errors.MachineFault(problem, "name VM types such as kvm, xen, vmrun, vsphere, script.")
    if listed:
        return listed
    own = settings.string("VM_TYPE").lower()
    if own and not is_choice(own):
        return (own,)
    needs = {
        "kvm": True,
        "xen": os.path.exists(XEN),
        "vmrun": bool(settings.string("VMWARE_VMRUN") or shutil.which("vmrun")),
        "vsphere": bool(settings.string("VSPHERE_HOST")),
        "script": bool(settings.string("VM_SCRIPT")),
    }
    return tuple(vm_type for vm_type, here in needs.items() if here)


def type_for(job: JobAd, asked: str, settings: Settings) -> str:
    """Return the type whose driver runs a job, by VM_TYPE and the type `asked` for. Raises `errors.Fault`."""
    machine = settings.string("VM_TYPE").lower() or asked.strip()
    types = machine_types(settings) if is_choice(machine) else (machine,)
    return driver_type(job, asked, machine, types)


__all__ = ["Driver", "Machine", "Metrics", "Status", "Survey", "Surveyor", "Value", "find"]
