"""The part of a job's request for a VM that is common to all hypervisors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.errors import JobFault, MachineFault
from vmgahp.job import data_disks, travel
from vmgahp.job.ad import JobAd
from vmgahp.job.nics import Nic, classic
from vmgahp.job.slot import LEAST_MEMORY_MIB, Slot, asked
from vmgahp.text import shown

MOST_VCPUS = 255
"""The most CPUs of QEMU's pc machine; more would fail in the hypervisor, and be blamed on the machine."""


@dataclass(frozen=True, kw_only=True)
class VmSpec:
    """A virtual machine as the job requests it and this machine grants it."""

    name: str
    """The VM's name in the hypervisor, from `JobAd.vm_name`."""
    vm_type: str
    working_dir: str
    memory_mib: int
    vcpus: int
    nics: tuple[Nic, ...]
    checkpoint: bool
    no_output_vm: bool
    left_behind: tuple[str, ...] | None = None
    """The files that a checkpoint omits; None if HTCondor transfers by its own rule (`vmgahp.job.travel`)."""
    slot: Slot = field(default_factory=Slot)
    """The job's slot, as known without reading files (`vmgahp.job.slot.settle`)."""

    _replace = replace

    @property
    def sent(self) -> tuple[bool, tuple[str, ...] | None]:
        """Return whether no file of the scratch directory is transferred back, and the files that are omitted."""
        return self.no_output_vm, self.left_behind

    @property
    def networking(self) -> bool:
        """Return True if the VM has a network."""
        return bool(self.nics)

    @property
    def networking_type(self) -> str:
        """Return the kind of network of the first NIC; empty for a VM without a network."""
        return self.nics[0].networking_type if self.nics else ""

    @property
    def mac(self) -> str:
        """Return the MAC address that the job has chosen for the first NIC; empty if it has not."""
        return self.nics[0].mac if self.nics else ""


def parse(ad: JobAd, settings: Settings, kinds: Sequence[str] | None = None) -> VmSpec:
    """Parse the job ad for a VM type with one NIC and no generated disks, without access to files.

    `kinds` are the kinds of network on offer, if they are not those of the settings.

    Raises `JobFault` for a mistake of the job's owner, `ClientFault` for an attribute that the starter should have
    sent, `MachineFault` for missing or invalid settings.
    """
    data_disks.refuse(ad)
    return with_nics(ad, settings, classic(ad, settings, kinds))


def with_nics(ad: JobAd, settings: Settings, nics: tuple[Nic, ...]) -> VmSpec:
    """Parse the job ad, except for its NICs. Raises as `parse`."""
    number = vcpus(ad)
    return VmSpec(
        memory_mib=memory_mib(ad, settings),
        name=ad.vm_name(),
        vm_type=ad.vm_type(),
        working_dir=ad.working_dir(),
        vcpus=number,
        nics=nics,
        checkpoint=bool(ad.boolean("JobVMCheckpoint")),
        no_output_vm=bool(ad.boolean("VMPARAM_No_Output_VM")),
        left_behind=travel.left_behind(ad),
        slot=asked(ad),
    )


def memory_mib(ad: JobAd, settings: Settings) -> int:
    """Return the memory in MiB: JobVMMemory, else RequestMemory.

    Too large a value is answered with the error word for a missing one, because the word for "too much" takes the
    machine out of service.
    """
    limit = settings.integer("VM_MEMORY")
    if limit <= 0:
        raise MachineFault(
            "VM_MEMORY is not set: it says how much memory VMs may have on this machine.",
            "set VM_MEMORY to the memory in MiB that is for VMs.",
        )
    name = "JobVMMemory"
    memory = ad.integer(name)
    if memory is None:
        name = "RequestMemory"
        memory = ad.integer(name)
    if memory is None:
        raise JobFault(
            errors.NO_MEMORY_PARAM,
            f"JobVMMemory = {shown(ad.expression('JobVMMemory'))} and RequestMemory = "
            f"{shown(ad.expression('RequestMemory'))}: neither says how much memory the VM gets.",
            "set vm_memory, in MiB, in the submit file.",
        )
    if not 0 < memory <= limit:
        raise JobFault(
            errors.NO_MEMORY_PARAM,
            f"{name} = {memory} MiB, and a VM on this machine may have from 1 to {limit} MiB (VM_MEMORY).",
            "lower vm_memory in the submit file, or require VM_Memory of the machine.",
        )
    return max(memory, LEAST_MEMORY_MIB)


def vcpus(ad: JobAd) -> int:
    """Return the CPUs: JobVM_VCPUS, else RequestCpus; at least 1, as the C++ daemon."""
    name = "JobVM_VCPUS"
    number = ad.integer(name)
    if number is None:
        name = "RequestCpus"
        number = ad.integer(name)
    if number is not None and number > MOST_VCPUS:
        raise JobFault(
            errors.MISMATCHED,
            f"{name} = {number}, and a VM can have {MOST_VCPUS} CPUs at most.",
            "lower vm_vcpus (or request_cpus) in the submit file.",
        )
    return max(number or 1, 1)
