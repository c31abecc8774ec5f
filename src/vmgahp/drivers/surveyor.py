"""Who looks at this machine for a VM type: its driver, or what of its driver does that alone."""

from collections.abc import Callable, Sequence

from vmgahp.config import Settings
from vmgahp.host.job_user import Identity
from vmgahp.host.light import NamedTuple
from vmgahp.vm_types import SURVEYORS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from vmgahp.findings import Finding

    class Surveyor(Protocol):
        """As `vmgahp.drivers.base.Driver.survey` says."""

        def survey(self, end: float) -> "Survey":
            """What jobs get from this hypervisor on this machine."""


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
    if make := load(vm_type):
        return make(vm_type, settings, identity, log)
    from vmgahp.drivers import base

    return base.find(vm_type)(vm_type, settings, identity, log)


def load(vm_type: str) -> "Callable[..., Surveyor] | None":
    """The class of a type that has a surveyor; None for any other, and where something that it needs is missing."""
    if vm_type not in SURVEYORS:
        return None
    from importlib import import_module

    module, _, name = SURVEYORS[vm_type].partition(":")
    try:
        found: Callable[..., Surveyor] = getattr(import_module(module), name)
    except ImportError:
        return None  # what it is, and what to do about it, says whoever looks for the driver
    return found
