"""The devices of this machine that HTCondor has assigned to a job, for its VM.

The starter says by its environment which ones the slot has (``Starter::PublishToEnv`` in HTCondor's
``src/condor_starter.V6.1/starter.cpp``); no job can change that. An identity is the PCI address or the mediated
device itself, or that of a GPU, whose address the startd knows (``DevicePciBusId`` of condor_gpu_discovery).
"""

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from vmgahp import errors, findings
from vmgahp.config import Settings, sources
from vmgahp.findings import OFF, Finding
from vmgahp.host import pci, starter
from vmgahp.host.run import run
from vmgahp.job.ad import JobAd

SETTING = "VM_DEVICES"
GPUS = "GPUs"
_ASSIGNED = "_CONDOR_ASSIGNED"
_ADDRESS_FILE = "STARTD_ADDRESS_FILE"
_BUS_ID = "DevicePciBusId"
_SECONDS = 20.0


def assigned(job: JobAd, settings: Settings) -> tuple[str, ...]:
    """Return the addresses of the devices for a job's VM, in the order of the settings; none if it requests none.

    Without a starter, as for a person's dry run, none is assigned. Raises `errors.JobFault` if it requests GPUs that
    no VM gets here, or devices beside checkpoints, and `errors.MachineFault` for a device that cannot be given.
    """
    names = settings.strings(SETTING)
    if (number := job.integer(f"Request{GPUS}")) and GPUS.lower() not in map(str.lower, names):
        problem = f"Request{GPUS} = {number}, and VMs get no GPUs on this machine ({SETTING})."
        hint = f"require a machine that gives them (VM_{job.vm_type()}_ATTR_gpu), or request none."
        raise errors.JobFault(errors.MISMATCHED, problem, hint)
    wanted = [name for name in names if (job.integer(f"Request{name}") or 0) > 0]
    if wanted and job.boolean("JobVMCheckpoint"):
        why = "QEMU saves no VM with a device of the machine"
        problem = f"JobVMCheckpoint = true contradicts Request{wanted[0]}: {why}."
        raise errors.JobFault(errors.MISMATCHED, problem, "set vm_checkpoint = false, or request no such device.")
    if not os.environ.get(starter.SLOT):
        return ()
    found = [pci.look(address) for name in wanted for address in _of_slot(name, os.environ)]
    for device in (whole := pci.whole(found)):
        pci.require_free(device)
    return tuple(device.address for device in whole)


def refused(
    devices: Collection[str], fault: errors.Fault, message: str, chosen: Collection[str]
) -> errors.MachineFault | None:
    """Return the machine's fault if an error of libvirt or QEMU is about a device of the machine; None for any other.

    The names that the job has `chosen` say nothing.
    """
    for name in chosen:
        message = message.replace(name, "")
    if not devices or not ("vfio" in message or any(address in message for address in devices)):
        return None
    return errors.HypervisorFault(fault.problem, f"see that {', '.join(devices)} can be passed through.")


def _of_slot(name: str, environ: Mapping[str, str]) -> list[str]:
    """Return the addresses of the devices of one resource that the slot has. Raises `errors.MachineFault`."""
    said = next((value for key, value in environ.items() if key.upper() == f"{_ASSIGNED}{name.upper()}"), "")
    identities = _words(said)
    if not identities:
        problem = f"The job has requested {name}, and its starter says of none that the slot has."
        raise errors.MachineFault(problem, f"see MACHINE_RESOURCE_{name} or GPU discovery: condor_status -long.")
    found = {identity: pci.address_of(identity) for identity in identities}
    if not all(found.values()):
        slot = _slot(environ)
        found |= {identity: _by_startd(slot, name, identity, identities) for identity in found if not found[identity]}
    for identity, address in found.items():
        if not address:
            problem = f"The startd does not say which PCI device {identity} of {name} is ({_BUS_ID})."
            raise errors.MachineFault(problem, "name PCI addresses in MACHINE_RESOURCE_…, or see condor_gpu_discovery.")
    return list(found.values())


def _by_startd(slot: Mapping[str, Any], name: str, identity: str, identities: list[str]) -> str:
    """Return the address of a GPU; properties that all devices of a slot have are in the slot's ad itself."""
    ending = re.sub(r"\W", "_", identity, flags=re.ASCII).lower()
    nested = [value for key, value in slot.items() if isinstance(value, dict) and key.lower().endswith(ending)]
    told = [ad.get(_BUS_ID) for ad in nested] + [slot.get(f"{name}_{_BUS_ID}")] * (len(identities) == 1)
    return next((address for each in told if isinstance(each, str) and (address := pci.address_of(each))), "")


def _slot(environ: Mapping[str, str]) -> Mapping[str, Any]:
    """Ask the startd of this machine for the slot's ad. Raises `errors.MachineFault`."""
    tool = os.path.join(os.path.dirname(sources.find_tool(environ)), "condor_status")
    slot = environ.get(starter.SLOT, "")
    values, _, _ = sources.read((_ADDRESS_FILE,), environ)
    try:
        with open(values.get(_ADDRESS_FILE, ""), encoding="ascii") as file:
            address = file.readline(8192).strip()
        constraint = f'stringListMember("{re.sub(r"[^A-Za-z0-9_]", "", slot)}", splitslotname(Name)[0])'
        said = run([tool, "-pool", address, "-json", "-constraint", constraint], deadline=_SECONDS, environ=environ)
        ads = json.loads(said.out or b"[]")
    except (OSError, ValueError) as error:
        raise errors.MachineFault(f"The startd does not tell about {slot}: {error}.", "see StartLog.") from error
    if said.status != 0 or len(ads) != 1:
        why = " ".join(said.complaints) or f"it knows {len(ads)} such slots"
        raise errors.MachineFault(f"The startd does not tell about {slot}: {why}.", "see StartLog.")
    return dict(ads[0])


def offered(settings: Settings, environ: Mapping[str, str]) -> Iterator[tuple[str, int, errors.MachineFault | None]]:
    """Yield each resource of VM_DEVICES: how many of its devices VMs can have, and if none the reason for it."""
    names = settings.strings(SETTING)
    values, _, _ = sources.read([f"MACHINE_RESOURCE_{name}" for name in names], environ)
    for name in names:
        said = _words(values.get(f"MACHINE_RESOURCE_{name}", ""))
        known = [address for word in said if (address := pci.address_of(word))]
        addresses = pci.displays() if name.lower() == GPUS.lower() and not known else known
        troubles = [_trouble(address) for address in addresses]
        nothing = errors.MachineFault(f"{SETTING} names {name}, by which no device of this machine is meant.", pci.HINT)
        good = troubles.count(None)
        yield name, good, None if good else next(iter(troubles), nothing)


def judge(outcome: object) -> tuple[dict[str, int], list[Finding]]:
    """Return how many devices of each resource VMs can have, and the findings of `offered` or of its own fault."""
    if isinstance(outcome, errors.Fault):
        return {}, [findings.judge("devices", SETTING, outcome, "", OFF)]
    numbers: dict[str, int] = {}
    found = []
    for name, number, trouble in outcome if isinstance(outcome, tuple) else ():
        good = f"VMs get those that HTCondor assigns; {number} can be given"
        found.append(findings.judge(f"devices {name}", SETTING, trouble, good, OFF))
        if number:
            numbers[name] = number
    return numbers, found


def _trouble(address: str) -> errors.MachineFault | None:
    try:
        for device in pci.whole([pci.look(address)]):
            pci.require_free(device)
    except errors.MachineFault as fault:
        return fault
    return None


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()
