"""The VM types that a job accepts: one, any, or the first proved of a list.

A job that does not mind says so by ``vm_type = any``, and by ``+VMPARAM_vm_Types = "kvm, vmware"`` that only some
would do; or by a list in vm_type itself, with requirements that match machines of each. docs/how-to/any-hypervisor.md
has both.
"""

from _collections_abc import Sequence

from vmgahp import errors
from vmgahp.errors import JobFault
from vmgahp.job.ad import JobAd
from vmgahp.text import shown
from vmgahp.vm_types import ANY, VMWARE

TYPES = "VMPARAM_vm_Types"

STANDS_FOR = {"vmware": VMWARE}
"""A job's word -> the VM types of machines that it means, where those are more than itself."""

_MOST = 20
_LONGEST = 64
_FIRST = frozenset("abcdefghijklmnopqrstuvwxyz0123456789")
_LETTERS = _FIRST | set("_.+-")
_HINT = f'write vm_type = any and +{TYPES} = "kvm, vmware", with the types that would do.'


def is_choice(vm_type: str) -> bool:
    """Whether a job of this vm_type, in lower case, leaves open by which hypervisor it runs."""
    return vm_type == ANY or "," in vm_type


def wanted(ad: JobAd) -> tuple[str, ...]:
    """The types that the job takes, in its order; empty where it takes any. Raises `JobFault`."""
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
    """The type whose driver runs the job on a machine that offers `machine`. Raises `JobFault` where it does not fit.

    `asked` is the type that the starter made of the ad and has asked for; `types` are those that the machine has behind
    a type that leaves it open. A job cannot reach another driver than these.
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
    """Whether a machine's `vm_type` is one of what `wanted` returns."""
    return not accepted or any(vm_type in STANDS_FOR.get(word, (word,)) for word in accepted)


def require(ad: JobAd) -> None:
    """Make sure that a job of one type is of a type that it takes. Raises `JobFault`."""
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
    # "any" in a list takes whatever there is.
    return () if ANY in words else words
