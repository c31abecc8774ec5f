"""The VM types that a job accepts: one, any, or the first working one of a list.

A job accepts any type by ``vm_type = any``, and only some of them with ``+VMPARAM_vm_Types = "kvm, vmware"``, or with
a list in vm_type itself and requirements that match machines of each. docs/how-to/any-hypervisor.md describes both.
"""

from collections.abc import Sequence

from vmgahp import errors
from vmgahp.errors import JobFault
from vmgahp.job.ad import JobAd
from vmgahp.text import shown
from vmgahp.vm_types import ANY, VMWARE

TYPES = "VMPARAM_vm_Types"

STANDS_FOR = {"vmware": VMWARE}
"""The machines' VM types for each word of a job that means several."""

_MOST = 20
_LONGEST = 64
_FIRST = frozenset("abcdefghijklmnopqrstuvwxyz0123456789")
_LETTERS = _FIRST | set("_.+-")
_HINT = f'write vm_type = any and +{TYPES} = "kvm, vmware", with the types that would do.'


def is_choice(vm_type: str) -> bool:
    """Return True if a job of this vm_type, in lower case, leaves the hypervisor open."""
    return vm_type == ANY or "," in vm_type


def wanted(ad: JobAd) -> tuple[str, ...]:
    """Return the types that the job accepts, in its order; empty if it accepts any. Raises `JobFault`."""
    vm_type = ad.vm_type()
    listed = "," in vm_type
    if ad.expression(TYPES) is None or (ad.expression(TYPES) or "").lower() == "undefined":
        return _words("JobVMType", vm_type) if listed else ()
    if listed:
        raise JobFault(
            errors.MISMATCHED,
            f"JobVMType = {shown(vm_type)} and {TYPES} = {shown(ad.expression(TYPES))}: both are lists of VM types.",
            f"keep one of them; {_HINT}",
        )
    text = ad.string(TYPES)
    if text is None:
        raise JobFault(errors.MISMATCHED, f"{TYPES} = {shown(ad.expression(TYPES))}: it is not a string.", _HINT)
    return _words(TYPES, text)


def driver_type(ad: JobAd, asked: str, machine: str, types: Sequence[str]) -> str:
    """Return the type of the driver that runs the job on a machine of type `machine`. Raises `JobFault` if none fits.

    `asked` is the type in the starter's request; `types` are the types of a machine whose own type is any. A job cannot
    reach any other driver.
    """
    require(ad)
    vm_type = ad.vm_type()
    if not vm_type or vm_type != asked.strip().lower():
        raise JobFault(
            errors.MISMATCHED,
            f"JobVMType = {shown(ad.expression('JobVMType'))}, and a VM of the type {shown(asked)} was asked for.",
            "let vm_type be one plain word.",
        )
    if is_choice(machine):
        fits = is_choice(vm_type) or any(takes((vm_type,), one) for one in types)
        found = ANY if is_choice(vm_type) else vm_type
    else:
        fits = vm_type != ANY and takes(_words("JobVMType", vm_type), machine)
        found = ANY if is_choice(vm_type) else machine
    if not fits:
        raise JobFault(
            errors.MISMATCHED,
            f"JobVMType = {shown(vm_type)}, and this machine has {', '.join(types)} (VM_TYPE = {machine}).",
            f"set vm_type = {types[0] if types else machine}, or require a machine whose VM_Type is the job's.",
        )
    return found


def takes(accepted: Sequence[str], vm_type: str) -> bool:
    """Return True if a machine's `vm_type` is among the `accepted` ones, a result of `wanted`."""
    return not accepted or any(vm_type in STANDS_FOR.get(word, (word,)) for word in accepted)


def require(ad: JobAd) -> None:
    """Make sure that a job's single type is among those that it accepts. Raises `JobFault`."""
    vm_type = ad.vm_type()
    if ad.expression(TYPES) is not None and not is_choice(vm_type) and not takes(wanted(ad), vm_type):
        raise JobFault(
            errors.MISMATCHED,
            f"{TYPES} = {shown(ad.string(TYPES))} contradicts JobVMType = {shown(vm_type)}, which is not one of them.",
            f"write vm_type = any, or remove {TYPES}.",
        )


def _words(attribute: str, text: str) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(word.strip().lower() for word in text.split(",") if word.strip()))
    odd = [word for word in words if word[0] not in _FIRST or len(word) > _LONGEST or not _LETTERS.issuperset(word)]
    if odd or not words or len(words) > _MOST:
        what = f"{shown(odd[0])} is not a VM type" if odd else "it is not a list of VM types"
        raise JobFault(errors.MISMATCHED, f"{attribute} = {shown(text)}: {what}.", _HINT)
    # "any" in a list accepts every type.
    return () if ANY in words else words
