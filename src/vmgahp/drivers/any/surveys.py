"""The VM types of this machine: all surveys, side by side."""

from collections.abc import Callable, Mapping

from vmgahp import findings
from vmgahp.drivers import base
from vmgahp.drivers.base import Driver, Survey
from vmgahp.drivers.machine_types import SETTING
from vmgahp.findings import BAD, OFF, Finding

RESERVE = 0.2
"""Seconds that the surveys leave for putting together what they found."""


def surveys(types: tuple[str, ...], driver_for: Callable[[str], Driver], end: float) -> dict[str, Survey]:
    """What each type's driver finds, all of them at once; a driver that cannot be loaded is a finding too."""

    def look(vm_type: str) -> Callable[[], object]:
        return lambda: driver_for(vm_type).survey(end - RESERVE)

    outcomes = findings.side_by_side({vm_type: look(vm_type) for vm_type in types}, end)
    return {
        vm_type: outcome
        if isinstance(outcome, Survey)
        else Survey([findings.judge("driver", f"the driver of VM type {vm_type}", outcome, "")])
        for vm_type, outcome in outcomes.items()
    }


def why_not(survey: Survey) -> str:
    """Why no job can run by a type, as a sentence; empty for a type that is proved."""
    trouble = findings.first_bad(survey.findings)
    return trouble.seen if trouble else ""


def together(own: str, found: Mapping[str, Survey]) -> Survey:
    """One survey of all: what is wrong with one type is no more than a pity, where another works.

    `own` is the VM type for all of them.
    """
    proved = [vm_type for vm_type, survey in found.items() if not why_not(survey)]
    told: list[Finding] = []
    attributes: dict[str, base.Value] = {}
    machine_attributes: dict[str, base.Value] = {}
    for vm_type, survey in found.items():
        for finding in survey.findings:
            verdict = OFF if finding.verdict == BAD and proved else finding.verdict
            told.append(finding._replace(check=f"{vm_type}: {finding.check}", verdict=verdict))
        if vm_type in proved:
            machine_attributes |= survey.machine_attributes
            machine_attributes |= {f"VM_{vm_type}_ATTR_{name}": value for name, value in survey.attributes.items()}
    for name in ("suspend", "checkpoint"):
        attributes[name] = any(bool(found[vm_type].attributes.get(name)) for vm_type in proved)
    attributes["types"] = ",".join(proved)
    if not told:
        hint = f"set {SETTING} to the VM types that this machine has, such as kvm."
        told.append(Finding("types", BAD, SETTING, "This machine has no VM types.", hint))
    return Survey(
        told,
        attributes=attributes,
        machine_attributes=machine_attributes,
        # A job with a network that only one of the types has goes to that one.
        networking=list(dict.fromkeys(kind for vm_type in proved for kind in found[vm_type].networking)),
        hypervisors=list(dict.fromkeys(name for vm_type in proved for name in found[vm_type].hypervisors)),
        vm_types=[own, *proved] if proved else [],
    )
