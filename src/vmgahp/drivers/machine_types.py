"""The VM types that this machine has, and the choice of the one for a job."""

import os
import shutil

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.job.ad import JobAd, driver_type, is_choice

SETTING = "VM_ANY_TYPES"

XEN = "/proc/xen/privcmd"
"""The file that exists on a machine that runs under Xen, as dom0."""


def machine_types(settings: Settings) -> tuple[str, ...]:
    """Return the VM types of this machine in the administrator's order.

    These are those in VM_ANY_TYPES; else the one that the machine offers; else all whose requirements are met, as far
    as the settings and a quick look can tell. Raises `MachineFault` for an invalid list.
    """
    listed = tuple(dict.fromkeys(word.lower() for word in settings.strings(SETTING)))
    if listed:
        for word in listed:
            if is_choice(word):
                problem = f"{SETTING} has {word} ({settings.where(SETTING)}), which is not a hypervisor."
                raise errors.MachineFault(problem, "name VM types such as kvm, xen, vmrun, vsphere, script.")
        return listed
    own = settings.string("VM_TYPE").lower()
    if own and not is_choice(own):
        return (own,)

    needs = {
        "kvm": True,
        "xen": os.path.exists(XEN),
        "vmrun": bool(settings.string("VMWARE_VMRUN") or shutil.which("vmrun")),
        "vsphere": bool(settings.string("VSPHERE_HOST")),
        "script": bool(settings.string("VM_SCRIPT")),
    }
    return tuple(vm_type for vm_type, here in needs.items() if here)


def type_for(job: JobAd, asked: str, settings: Settings) -> str:
    """Return the type whose driver runs a job, by VM_TYPE and the type `asked` for. Raises `errors.Fault`."""
    machine = settings.string("VM_TYPE").lower() or asked.strip()
    types = machine_types(settings) if is_choice(machine) else (machine,)
    return driver_type(job, asked, machine, types)
