"""What every job asks of its virtual machine, whichever hypervisor runs it."""

from collections.abc import Sequence

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.errors import JobFault, MachineFault
from vmgahp.job import travel
from vmgahp.job.ad import JobAd
from vmgahp.job.nics import Nic, classic
from vmgahp.job.own_xml import NOTHING, OwnXml
from vmgahp.job.slot import LEAST_MEMORY_MIB, Slot, asked
from vmgahp.text import shown

MOST_VCPUS = 255
"""What QEMU's pc machine can have; more would fail in the hypervisor, which is blamed on the machine."""


TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ClassVar, Self, dataclass_transform
else:

    def dataclass_transform(**_):
        return lambda made: made


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Record:
    """A frozen dataclass with fields by name, as far as it is wanted here: `dataclasses` itself costs a START 7 ms."""

    _fields: "ClassVar[tuple[str, ...]]" = ()

    def __init_subclass__(cls) -> None:
        cls._fields = (*cls._fields, *cls.__annotations__)

    def __init__(self, **values: "Any") -> None:
        for name in self._fields:
            vars(self)[name] = values.pop(name) if name in values else getattr(type(self), name)
        if values:
            raise TypeError(f"{type(self).__name__} has no {', '.join(values)}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} cannot be set to another value")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]  # it may hold what has none

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def _replace(self, **changes: "Any") -> "Self":
        """The same with other values in some fields, as a NamedTuple has it."""
        return type(self)(**(vars(self) | changes))


class VmSpec(Record):
    """A virtual machine as the job wants it and this machine grants it."""

    name: str
    """The VM's name with the hypervisor, `JobAd.vm_name`."""
    vm_type: str
    working_dir: str
    memory_mib: int
    vcpus: int
    nics: tuple[Nic, ...]
    checkpoint: bool
    no_output_vm: bool
    left_behind: tuple[str, ...] | None = None
    """What does not travel with a checkpoint; None where HTCondor sends by its own rule (`vmgahp.job.travel`)."""
    slot: Slot = Slot()
    """What the job has of its machine, as far as it is known without a look (`vmgahp.job.slot.settle`)."""

    @property
    def sent(self) -> tuple[bool, tuple[str, ...] | None]:
        """What of the scratch directory goes home: whether nothing, and what is left behind."""
        return self.no_output_vm, self.left_behind

    @property
    def networking(self) -> bool:
        """Whether the VM has a network."""
        return bool(self.nics)

    @property
    def networking_type(self) -> str:
        """The kind of network of the first NIC; empty for a VM without a network."""
        return self.nics[0].networking_type if self.nics else ""

    @property
    def mac(self) -> str:
        """The MAC address that the job has chosen for the first NIC; empty where it leaves that to the hypervisor."""
        return self.nics[0].mac if self.nics else ""


def parse(ad: JobAd, settings: Settings, kinds: Sequence[str] | None = None) -> VmSpec:
    """What a job asks for, of a VM type that has one NIC and makes nothing for its jobs; nothing is looked at.

    `kinds` are the kinds of network on offer, where those are not just what the settings say.

    Raises `JobFault` for what the job's owner must change, `ClientFault` for what the starter should have
    sent, `MachineFault` for settings that are missing or wrong.
    """
    from vmgahp.job import data_disks  # of no use to who makes them

    data_disks.refuse(ad)
    return with_nics(ad, settings, classic(ad, settings, kinds))


def with_nics(ad: JobAd, settings: Settings, nics: tuple[Nic, ...], own: OwnXml = NOTHING) -> VmSpec:
    """What a job asks for beside its NICs, which are read; `own` is what its own XML says. Raises as `parse`."""
    number = vcpus(ad, own.vcpus)
    return VmSpec(
        memory_mib=memory_mib(ad, settings, own.memory_mib),
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


def memory_mib(ad: JobAd, settings: Settings, own: int | None = None) -> int:
    """What the job's `own` XML says, else JobVMMemory, else RequestMemory, MiB.

    Too much is answered with the word for a missing value: the one that says "too much" takes the machine
    out of service.
    """
    limit = settings.integer("VM_MEMORY")
    if limit <= 0:
        raise MachineFault(
            "VM_MEMORY is not set: it says how much memory VMs may have on this machine.",
            "set VM_MEMORY to the memory in MiB that is for VMs.",
        )
    name = "JobVMMemory"
    memory = ad.integer(name) if own is None else own
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


def vcpus(ad: JobAd, own: int | None = None) -> int:
    """What the job's `own` XML says, else JobVM_VCPUS, else RequestCpus, else 1; and 1 for less, as the C++ daemon."""
    name = "JobVM_VCPUS"
    number = ad.integer(name) if own is None else own
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
