"""A check that HTCondor's slots and VM_MEMORY do not promise VMs more than the machine has."""

import os

from vmgahp.commands.doctor.context import Check, Context, ask
from vmgahp.daemon.probe import Probe
from vmgahp.findings import Finding, NotKnown

TOOL_DEADLINE = 10.0
_ASKED = ("NUM_CPUS", "VM_MAX_NUMBER")


def slots(context: Context, probed: Probe) -> Finding | None:
    """Check the promised resources; None without HTCondor, VM_MEMORY, or a known memory overhead of QEMU."""
    memory = context.settings.integer("VM_MEMORY")
    need = probed.attributes.get(f"VM_{context.vm_type}_ATTR_overhead")
    if not context.tool or memory <= 0 or not isinstance(need, int):
        return None
    check = Check("slots", "VM_MEMORY, what QEMU needs for each VM, NUM_CPUS, VM_MAX_NUMBER, and what there is")
    cpus, whole = os.cpu_count() or 1, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    offered, most = (_number(context, name) for name in _ASKED)
    if offered > cpus:
        seen = f"NUM_CPUS = {offered}, and this machine has {cpus} CPUs: VMs and other jobs share what there is."
        return check.off(seen, f"take NUM_CPUS out, or set it to {cpus} at most.")
    vms = min(number for number in (offered or cpus, most) if number)
    if memory + vms * need > whole:
        seen = (
            f"VM_MEMORY = {memory} MiB is for guests, and the QEMU of each of {vms} VMs may need {need} MiB beside: "
            f"together {memory + vms * need} MiB of the {whole} MiB of this machine."
        )
        hint = f"set VM_MEMORY to {max(whole - vms * need, 0)} at most, or VM_MAX_NUMBER to fewer VMs."
        return check.off(seen, hint)
    return check.ok(f"{vms} VMs with all of VM_MEMORY need {memory + vms * need} of {whole} MiB")


def _number(context: Context, name: str) -> int:
    """Return a setting of HTCondor's own; 0 if it is unset or not a number. Raises `NotKnown`."""
    said = ask([context.tool, "-subsystem", "VM_GAHP", name], TOOL_DEADLINE, context.environ)
    if said.status is None:
        raise NotKnown("settings", f"{context.tool} did not say {name} within {TOOL_DEADLINE:g} s.")
    text = said.out.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
