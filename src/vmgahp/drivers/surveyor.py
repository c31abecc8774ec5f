"""Who looks at this machine for a VM type, or kills a VM: a driver, or a part of one."""

from _collections_abc import Callable, Sequence

from vmgahp.config import Settings
from vmgahp.host.job_user import Identity
from vmgahp.host.light import NamedTuple
from vmgahp.vm_types import KILLERS, SURVEYORS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

    from vmgahp.findings import Finding

    class Surveyor(Protocol):
        """As `vmgahp.drivers.base.Driver.survey` says."""

        def survey(self, end: float) -> "Survey":
            """What jobs get from this hypervisor on this machine."""

    class Killer(Protocol):
        """As `vmgahp.drivers.base.Driver` says."""

        def kill(self, match: str, uuid: str = "") -> bool:
            """Destroy the VM that `match` names; False where there is none."""

        def close(self) -> None:
            """Let go of connections."""


Value = str | int | float | bool


class Survey(NamedTuple):
    """What a driver found out about this machine."""

    findings: "Sequence[Finding]" = ()
    """All that was looked at; one that is `vmgahp.findings.BAD` makes the machine unfit for any job."""
    attributes: dict[str, Value] = {}
    """Published as ``VM_<VM type>_ATTR_<name>``, such as version, accel, max_vcpus, checkpoint."""
    machine_attributes: dict[str, Value] = {}
    """Published under names of their own, such as HasVirshDefaultNetwork."""
    networking: Sequence[str] = ()
    """The types of networking that jobs get: those of the settings that were seen to work."""
    hypervisors: Sequence[str] = ()
    """Those that run jobs here, such as kvm or qemu."""
    vm_types: Sequence[str] = ()
    """The values of vm_type that this driver was seen to serve here."""


def surveyor(vm_type: str, settings: Settings, identity: Identity, log: Callable[[str], None]) -> "Surveyor":
    """The surveyor of a VM type. The driver of QEMU's types loads five times as much, all of it for a start.

    Raises `vmgahp.errors.MachineFault` as `vmgahp.drivers.base.find` does.
    """
    make = load(vm_type) or _driver(vm_type)
    return make(vm_type, settings, identity, log)


def load(vm_type: str) -> "Callable[..., Surveyor] | None":
    """The class of a type that has a surveyor; None for any other, and where something that it needs is missing."""
    return _part(SURVEYORS, vm_type)


def killer(vm_type: str, settings: Settings, identity: Identity, log: Callable[[str], None]) -> "Killer":
    """Who kills VMs of a type, found as `surveyor` finds. Raises `vmgahp.errors.MachineFault` as that does."""
    make: Callable[..., Killer] = _part(KILLERS, vm_type) or _driver(vm_type)
    return make(vm_type, settings, identity, log)


def _part(places: dict[str, str], vm_type: str) -> "Callable[..., Any] | None":
    if vm_type not in places:
        return None
    from importlib import import_module

    module, _, name = places[vm_type].partition(":")
    try:
        found: Callable[..., Any] = getattr(import_module(module), name)
    except ImportError:
        return None  # what it is, and what to do about it, says whoever looks for the driver
    return found


def _driver(vm_type: str) -> "Callable[..., Any]":
    from vmgahp.drivers import base

    return base.find(vm_type)
