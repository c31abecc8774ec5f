"""The part of a driver that surveys this machine for a VM type, or kills a VM."""

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
        """An object with the method `survey` of `vmgahp.drivers.base.Driver`."""

        def survey(self, end: float) -> "Survey":
            """Return what jobs get from this hypervisor on this machine."""

    class Killer(Protocol):
        """An object with the methods `kill` and `close` of `vmgahp.drivers.base.Driver`."""

        def kill(self, match: str, uuid: str = "") -> bool:
            """Destroy the VM that `match` names; return False if there is no such VM."""

        def close(self) -> None:
            """Close connections."""


Value = str | int | float | bool


class Survey(NamedTuple):
    """The result of a driver's survey of this machine."""

    findings: "Sequence[Finding]" = ()
    """The findings of all checks; one that is `vmgahp.findings.BAD` makes the machine unfit for any job."""
    attributes: dict[str, Value] = {}
    """The attributes published as ``VM_<VM type>_ATTR_<name>``, such as version, accel, max_vcpus, checkpoint."""
    machine_attributes: dict[str, Value] = {}
    """The attributes published under their own names, such as HasVirshDefaultNetwork."""
    networking: Sequence[str] = ()
    """The types of networking that jobs get: those in the settings that were seen to work."""
    hypervisors: Sequence[str] = ()
    """The hypervisors that run jobs here, such as kvm or qemu."""
    vm_types: Sequence[str] = ()
    """The values of vm_type that this driver was seen to serve here."""


def surveyor(vm_type: str, settings: Settings, identity: Identity, log: Callable[[str], None]) -> "Surveyor":
    """Return the surveyor of a VM type. The driver for QEMU loads five times as many modules, all of them for a
    start.

    Raises `vmgahp.errors.MachineFault` as `vmgahp.drivers.base.find` does.
    """
    make = load(vm_type) or _driver(vm_type)
    return make(vm_type, settings, identity, log)


def load(vm_type: str) -> "Callable[..., Surveyor] | None":
    """Return the class of a type that has a surveyor; None for any other, and if one of its dependencies is missing."""
    return _part(SURVEYORS, vm_type)


def killer(vm_type: str, settings: Settings, identity: Identity, log: Callable[[str], None]) -> "Killer":
    """Return the object that kills VMs of a type, found as in `surveyor`.

    Raises `vmgahp.errors.MachineFault` likewise.
    """
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
        return None  # the search for the driver explains it and gives a hint
    return found


def _driver(vm_type: str) -> "Callable[..., Any]":
    from vmgahp.drivers import base

    return base.find(vm_type)
