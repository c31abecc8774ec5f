"""A survey of this machine by a driver, and how the surveyor of a VM type is found.

The probe needs no more of a driver than this: each module that it imports costs some of the startd's five seconds.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.findings import Finding
from vmgahp.host import packages
from vmgahp.host.job_user import Identity
from vmgahp.vm_types import SURVEYORS

Logger = Callable[[str], None]
Value = str | int | float | bool


class Survey(NamedTuple):
    """The result of a driver's survey of this machine."""

    findings: Sequence[Finding] = ()
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


class Surveyor(ABC):
    """The survey of one kind of hypervisor on this machine, for one VM type."""

    def __init__(self, vm_type: str, settings: Settings, identity: Identity, log: Logger) -> None:
        self.vm_type = vm_type
        self.settings = settings
        self.identity = identity
        self.log = log

    @abstractmethod
    def survey(self, end: float) -> Survey:
        """Check whether this hypervisor works here, and what jobs get from it.

        Every check must end before the monotonic clock shows `end`: one that has not ended by then counts as failed
        (`vmgahp.findings.side_by_side`). A defect of the machine is a finding in the survey and not raised.
        """


_PACKAGES = {"pyVmomi": ("pyvmomi", "8.0"), "libvirt": ("libvirt-python", "9.0"), "lxml": ("lxml", "4.9")}
"""The optional modules, each with its Python package and the oldest version of it."""


def find_surveyor(vm_type: str) -> type[Surveyor]:
    """Return the class that surveys this machine for a VM type, most often its driver; raises what `base.find` does."""
    if place := SURVEYORS.get(vm_type):
        found: type[Surveyor] = load(vm_type, place)
        return found
    from vmgahp.drivers import base  # with all of a VM, for which most probes have no time

    return base.find(vm_type)


def load(vm_type: str, place: str) -> Any:
    """Return the class at ``module:class``. Raises `MachineFault`."""
    module_name, _, class_name = place.partition(":")
    try:
        __import__(module_name)
        return getattr(sys.modules[module_name], class_name)
    except ImportError as error:
        known = _PACKAGES.get(getattr(error, "name", "") or "")
        hint = f"{packages.of_python(*known)}." if known else "install the Python packages that the driver needs."
        raise errors.MachineFault(f"The driver for VM_TYPE = {vm_type} cannot be loaded: {error}.", hint) from error
