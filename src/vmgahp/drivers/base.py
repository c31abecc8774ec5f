"""The contract between the server and a hypervisor, and how a driver is found.

Drivers are plain synchronous objects. The server calls a `Machine` from one worker thread of its own, so
the calls of one VM come one after another and those of different VMs side by side; a driver that shares
something between its machines (a connection) must cope with that.

Every method raises `vmgahp.errors.Fault` and nothing else when it fails: `JobFault` where the job's owner
must act, `MachineFault` or `HypervisorFault` where the machine is unfit. Any other exception is a bug in
the driver and is answered as ``VMGAHP_ERR_INTERNAL``.
"""

import os
import sys
from _collections_abc import Callable, Sequence
from abc import ABC, abstractmethod

from vmgahp import errors, lifecycle
from vmgahp.config import Settings
from vmgahp.drivers.resources import Later, Resources, empty, unclaim
from vmgahp.drivers.surveyor import Survey, Value
from vmgahp.host import packages
from vmgahp.host.guardian import Guardian
from vmgahp.host.job_user import Identity
from vmgahp.host.light import NamedTuple
from vmgahp.job.ad import JobAd
from vmgahp.job.published import News
from vmgahp.metrics import Metrics, Status
from vmgahp.vm_types import ANY, DRIVERS, SERVED, SIMULATED, SIMULATED_SWITCH

Logger = Callable[[str], None]

LEAST_LONG_SECONDS = 30

Sent = tuple[bool, tuple[str, ...] | None]
"""What of a scratch directory is sent back (`vmgahp.job.vm_spec.VmSpec.sent`)."""


class Deadlines(NamedTuple):
    """How long the calls of a VM may take, in seconds."""

    usual: float
    memory: float
    """For what writes or reads the guest's memory: all that the client waits."""
    stop: float
    """For a guest that was asked to power off (VM_STOP_TIMEOUT)."""


class Machine(ABC):
    """One virtual machine that a driver has started."""

    name: str
    """The VM's name with the hypervisor: ``<User with @ as _>_<ClusterId>.<ProcId>``."""

    found: tuple[float, Status] | None = None
    """What the last STATUS found, and when, in seconds since 1970; the server keeps it for `metrics`."""

    _news: News | None = None

    @property
    def news(self) -> News:
        """What the pool is to be told of the VM (`vmgahp.job.published`); there for as long as the machine is."""
        if self._news is None:
            self._news = News()
        return self._news

    @abstractmethod
    def status(self) -> Status:
        """How the VM is. A VM that no longer exists is reported as STOPPED, not raised."""

    @abstractmethod
    def pid(self) -> int:
        """The process that runs the guest, or 0 where there is none on this machine."""

    def addresses(self) -> Sequence[str]:
        """The guest's IP addresses as far as they are known by now, IPv4 first; nobody is asked for them."""
        return ()

    @abstractmethod
    def stop(self) -> None:
        """Ask the guest to power off, wait for the settable deadline, then destroy it.

        When this returns the guest is gone and everything of the VM that is not the job's is tidied up. Unlike other
        operations this may come while another has taken longer than the client waits, which it overrules.
        """

    @abstractmethod
    def destroy(self) -> None:
        """End the guest at once, without asking it, and tidy up. A VM that is already gone is success."""

    def release(self) -> None:  # noqa: B027 - nothing to tidy up is a good default
        """The guest was found gone by itself: tidy up what belonged to it, such as its console's capture."""

    def exit_status(self) -> int:
        """What the server is to leave with after `release`: HTCondor takes it for the job's exit code."""
        return 0

    def metrics(self) -> Metrics | None:
        """What the VM has used, for ``vm_metrics.jsonl``; None while it uses nothing, saved or gone.

        Unlike all else here this is called beside whatever is done to the VM, from a thread of its own: it
        changes nothing, and waits for nothing that a request waits for too. By default it is what the last
        STATUS found, which costs nothing; a driver that knows more, or can look by itself, says so.
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
        """The process of this machine that runs the guest, or 0, as far as is known without asking anybody."""
        return 0

    def saved_bytes(self) -> int:
        """Bytes of what the last suspend or checkpoint has written, 0 where nobody knows."""
        return 0

    def soft_suspend(self) -> None:
        """Stop the guest's CPUs and keep its memory in RAM."""
        raise errors.ClientFault(errors.VM_NO_SUPPORT_SUSPEND, f"{self.name} cannot be paused by its driver.")

    def suspend(self) -> None:
        """Save the guest's memory to a file in the scratch directory and free the machine of it."""
        raise errors.ClientFault(errors.VM_NO_SUPPORT_SUSPEND, f"{self.name} cannot be saved by its driver.")

    def resume(self, state: str) -> None:
        """Resume from `state`: `lifecycle.SOFT_SUSPENDED` or `lifecycle.SUSPENDED`."""
        raise errors.ClientFault(errors.VM_INVALID_OPERATION, f"{self.name} cannot be resumed by its driver.")

    def checkpoint(self) -> None:
        """Leave everything in the scratch directory that a restart elsewhere needs; the VM ends saved."""
        raise errors.ClientFault(errors.VM_NO_SUPPORT_CHECKPOINT, f"{self.name} cannot be checkpointed by its driver.")


class Driver(ABC):
    """One kind of hypervisor on this machine, for one VM type."""

    def __init__(self, vm_type: str, settings: Settings, identity: Identity, log: Logger) -> None:
        self.vm_type = vm_type
        self.settings = settings
        self.identity = identity
        self.log = log

    def get_ready(self) -> None:  # noqa: B027 - most have nothing that takes long
        """A client has come who is about to start a VM: begin with what takes time. May be called while one starts."""

    @abstractmethod
    def start(self, job: JobAd) -> Machine:
        """Start the job's VM; when it returns the guest runs.

        A leftover VM of the same job's name is cleared first. On a fault nothing is left behind.
        """

    def describe(self, job: JobAd) -> str:
        """What the hypervisor would be told of the job, such as its domain XML, with nothing made or changed.

        Raises `errors.Fault` as `start` would, and `MachineFault` for a driver that cannot say.
        """
        raise errors.MachineFault(
            f"The driver for VM type {self.vm_type} has no dry run.",
            "submit the job, or start it by hand with vmgahp serve.",
        )

    @abstractmethod
    def kill(self, match: str, uuid: str = "") -> bool:
        """Destroy the VM that `match` names; False when there was none, which is not an error.

        For kvm and xen `match` is the VM's name, for every other type the job's scratch directory. With
        `uuid` only that very VM is destroyed, so that a late clean-up cannot hit the next VM of the same name.
        """

    @abstractmethod
    def survey(self, end: float) -> Survey:
        """Look whether this hypervisor works here, and what jobs get from it.

        Everything must be known when the monotonic clock shows `end`: a check that has not ended by then
        counts as one that failed (`vmgahp.findings.side_by_side`). What is wrong with the machine is a
        finding in the survey and not raised.
        """

    # What drivers share

    def post_guardian(self, match: str, uuid: str) -> Guardian:
        """Let a guardian run the kill mode for this VM when the server is killed. Raises OSError."""
        kill = (sys.executable, "-I", "-m", "vmgahp", "-f", "-M", "4")
        return Guardian.post([*kill, "vmtype", self.vm_type, "match", match, "uuid", uuid], os.environ)

    def claim(self, resources: Resources, match: str, uuid: str) -> None:
        """Let no other server take the VM for what a dead one has left, and post its guardian. Raises OSError."""
        from vmgahp.host import runtime_dir

        runtime_dir.sweep()
        try:
            claimed = runtime_dir.claim(uuid)
        except (errors.MachineFault, OSError) as error:
            self.log(f"another job of the same name would end this VM: {error}")
        else:
            resources.at_end.append(Later(unclaim, self.identity, self.log, claimed))
        resources.guardian = self.post_guardian(match, uuid)

    def record_end(
        self, resources: Resources, name: str, directory: str, cpu_seconds: Callable[[], float], sent: Sent
    ) -> None:
        """From now on the VM runs: write down its end, and see to what is sent back. Raises `errors.Fault`."""
        from vmgahp.drivers.exit_record import ExitRecord

        resources.exit = ExitRecord(name, directory, cpu_seconds, resources.news, self.identity, self.log)
        nothing, left_behind = sent
        if left_behind is not None:
            from vmgahp.job.travel import Luggage

            resources.luggage = Luggage(directory, left_behind, self.identity, self.log)
            resources.when_over.append(resources.luggage.at_end)
        if nothing:
            resources.when_over.append(Later(empty, self.identity, self.log, directory))

    def deadlines(self, usual: float) -> Deadlines:
        """How long the calls of a VM may take, the `usual` ones so many seconds."""
        memory = max(LEAST_LONG_SECONDS, self.settings.integer("VM_GAHP_REQ_TIMEOUT"))
        return Deadlines(usual, memory, self.settings.integer("VM_STOP_TIMEOUT"))

    def interrupt(self) -> Sequence[Machine]:
        """The server ends: a START that is under way, in another thread, is to fail as soon as it can.

        What is returned is destroyed, whether it has started or not. A START that runs to its end is ended then.
        """
        return ()

    def close(self) -> None:  # noqa: B027 - nor any connection to let go of
        """Let go of connections; called once, when the server ends."""


_PACKAGES = {"pyVmomi": ("pyvmomi", "8.0"), "libvirtmod": ("libvirt-python", "9.0"), "lxml": ("lxml", "4.9")}
"""Modules, and the packages that have them."""


def find(vm_type: str, *, to_serve: bool = False) -> type[Driver]:
    """The driver class for a VM type: built in, or an entry point of the group ``vmgahp.drivers``.

    `to_serve` asks for that of a server, whose memory counts for as long as its VM lives.

    Raises `MachineFault` when there is none, or when what it needs is not installed.
    """

    # A list of types is a choice as "any" is; no driver's name has a comma. The table comes first, because to scan
    # the installed packages for entry points costs more than all else that a server imports.
    place = DRIVERS.get(ANY if "," in vm_type else vm_type)
    if to_serve:
        place = SERVED.get(vm_type, place)
    if vm_type == SIMULATED and os.environ.get(SIMULATED_SWITCH):
        place = "vmgahp.drivers.simulated:SimulatedDriver"
    if place is None:
        from importlib.metadata import entry_points

        for point in entry_points(group="vmgahp.drivers", name=vm_type):
            place = point.value
            break
        else:
            from difflib import get_close_matches

            near = get_close_matches(vm_type, DRIVERS, 1)
            hint = f"did you mean {near[0]}? Else " if near else ""
            raise errors.MachineFault(
                f"No driver is installed for VM_TYPE = {vm_type}.",
                hint + f"set VM_TYPE to one of {', '.join(sorted(DRIVERS))}, or install the package of the driver.",
                errors.NO_SUPPORTED_VM_TYPE,
            )
    module_name, _, class_name = place.partition(":")
    try:
        __import__(module_name)
        found = getattr(sys.modules[module_name], class_name)
    except ImportError as error:
        raise errors.MachineFault(
            f"The driver for VM_TYPE = {vm_type} cannot be loaded: {error}.",
            f"{packages.of_python(*_PACKAGES[absent])}."
            if (absent := getattr(error, "name", "")) in _PACKAGES
            else "install the Python packages that the driver needs.",
        ) from error
    if not (isinstance(found, type) and issubclass(found, Driver)):
        raise errors.MachineFault(f"{place}, the driver for VM_TYPE = {vm_type}, is not a Driver.")
    return found


__all__ = ["Driver", "Machine", "Metrics", "Status", "Survey", "Value", "find"]
