"""The policy view of a job ad: the value of every attribute under all its names.

The administrator's policy reads it, so that a condition on one name also holds for a value that the job sets by
another name, and for defaults. It does not change what the job gets.
"""

from functools import cached_property

from vmgahp.config import Settings
from vmgahp.errors import JobFault, MachineFault
from vmgahp.job.ad import TYPES, JobAd, Plain
from vmgahp.job.attributes import ARCHES, ATTRIBUTES, GENERAL, OPTION_PREFIX, OPTIONS, Options
from vmgahp.job.disks import DISK, entries
from vmgahp.job.vm_spec import LEAST_MEMORY_MIB, first_integer, nics

_ANY_CASE = {OPTION_PREFIX + option for option in ("Arch", "Firmware", "NICs", "Share_Dirs", "Topology")}
_ANY_CASE |= {"JobVMNetworkingType", "JobVM_MACADDR"}
"""The attributes whose values are case-insensitive."""


class PolicyView:
    """The job ad as the administrator's policy reads it, made on first use."""

    def __init__(self, job: JobAd, settings: Settings) -> None:
        self.settings = settings
        self.job = job

    @cached_property
    def ad(self) -> JobAd:
        """The ad with the effective values, each of the table's kind, under all names. Raises `JobFault`."""
        ad = self.job
        vm_type = ad.vm_type()
        found: dict[str, Plain | None] = {}
        for row in ATTRIBUTES:
            names = _names(row.name.removeprefix(OPTION_PREFIX), vm_type) if row in OPTIONS else [row.name]
            if said := [name for name in names if ad.value(name) is not None]:
                value = _value(ad, said[-1], row.kind)
                if isinstance(value, str) and row.name in _ANY_CASE:
                    value = value.lower()
                found |= dict.fromkeys(names, value)
        # Memory and CPUs with their fallbacks; RequestMemory and RequestCpus are not changed.
        _, memory = first_integer(ad, "JobVMMemory", "RequestMemory")
        _, cpus = first_integer(ad, "JobVM_VCPUS", "RequestCpus")
        found["JobVMMemory"] = memory if memory is None or memory <= 0 else max(memory, LEAST_MEMORY_MIB)
        found["JobVM_VCPUS"] = max(cpus or 1, 1)
        found |= _words(ad, vm_type)
        try:
            granted = nics(ad, self.settings, Options(ad, others_know=True))
        except JobFault:
            granted = ()  # the job is refused later
        if granted or found.get(OPTION_PREFIX + "NICs"):
            found["JobVMNetworking"] = True
        if granted:
            found["JobVMNetworkingType"] = granted[0].networking_type
            found["JobVM_MACADDR"] = granted[0].mac or None
            found |= dict.fromkeys(_names("NICs", vm_type), ", ".join(map(str, granted)))
        return ad.changed(found)

    def meets(self, name: str) -> bool:
        """Return True if an expression is true, or a number but 0. Raises `MachineFault` for a syntax error only."""
        text = self.settings.string(name)
        try:
            value = self.ad.judge(text)
        except ValueError as error:
            problem = f"{name} = {text} ({self.settings.where(name)}) is not a ClassAd expression."
            raise MachineFault(problem, f"correct {name}; classad_eval tries an expression out.") from error
        return isinstance(value, int | float) and bool(value)


def _names(option: str, vm_type: str) -> list[str]:
    """Return all names of an option; the last one that the job sets counts, as in `options`."""
    of_type = [f"VM_{vm_type}_ATTR_{option}"] if vm_type.isascii() and vm_type.replace("_", "a").isalnum() else []
    return [OPTION_PREFIX + option, GENERAL + option, *of_type]


def _value(ad: JobAd, name: str, kind: str) -> Plain | None:
    if kind == "integer":
        return ad.integer(name)
    text = ad.string(name)
    if text is not None and kind != "bool":
        return text.strip()
    return ad.boolean(name) if "bool" in kind else None


def _words(ad: JobAd, vm_type: str) -> dict[str, Plain | None]:
    """Return the normalized form of values that can be written in several ways."""
    found: dict[str, Plain | None] = {"JobVMType": vm_type} if vm_type else {}
    if "," in vm_type:
        found[TYPES] = vm_type
    if (disks := ad.string(DISK)) is not None:
        found[DISK] = ",".join(":".join(entry.fields) for entry in entries(disks))
    names = _names("Arch", vm_type)
    for arch in filter(None, map(ad.string, names)):
        found |= dict.fromkeys(names, ARCHES.get(arch.strip().lower(), arch))
    kernel = (ad.string("VMPARAM_Xen_Kernel") or "").strip().lower()
    if kernel in ("vmx", "included"):
        found["VMPARAM_Xen_Kernel"] = kernel
    if kernel == "vmx":
        found["JobVMHardwareVT"] = True
    return found
