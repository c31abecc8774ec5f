"""The NICs that a job asks for, checked: the classic one of vm_networking, or a list of them.

``+VMPARAM_vm_NICs = "nat:52:54:00:12:34:56, bridge:e1000, user, nat:down"`` gives all NICs of the VM in their
order, each with its kind of network and, in any order, a MAC address, a model and whether its cable is in.
"""

import re
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.errors import JobFault
from vmgahp.job.ad import JobAd
from vmgahp.job.attributes import Options
from vmgahp.text import MAC, shown

MODELS = ("virtio", "e1000", "e1000e", "rtl8139")
"""The models that a job can choose. virtio is the fastest and the default; the others are for guests that have no
driver for it."""

MOST_NICS = 16
"""The most NICs of a VM; more would find no slot besides the disks on QEMU's pc machine."""

_NICS_HINT = (
    'write +VMPARAM_vm_NICs = "kind:option:option, kind, ...": the kinds are nat, bridge and user; the options '
    f"a MAC address, up or down, and a model of {', '.join(MODELS)}."
)


class Nic(NamedTuple):
    """One NIC to attach."""

    networking_type: str
    """The kind of network: ``nat``, ``bridge`` or ``user``."""
    mac: str = ""
    """The MAC address, ``xx:xx:xx:xx:xx:xx`` in lower case; empty if the hypervisor chooses it."""
    model: str = "virtio"
    link_up: bool = True
    """True if the link is up; a NIC without a link receives nothing."""
    address: str = ""
    """The guest's addresses there, from VM_MAC_HOOK: address/prefix, router, name server, separated by blanks."""

    def __str__(self) -> str:
        """Format the NIC as an entry of the list."""
        model = "" if self.model == MODELS[0] else self.model
        return ":".join(filter(None, (self.networking_type, self.mac, model, "" if self.link_up else "down")))


def nics(ad: JobAd, settings: Settings, options: Options, kinds: Sequence[str] | None = None) -> tuple[Nic, ...]:
    """Return all NICs of the VM; `kinds` are offered instead of the settings' networks. Raises `JobFault`."""
    text = options.string("NICs")
    if not text:
        return classic(ad, settings, kinds)
    offered = settings.networking_types() if kinds is None else kinds
    found = [_nic(entry.strip(), options, offered) for entry in text.split(",") if entry.strip()]
    if not found:
        raise options.refused("NICs", "it names no NIC", _NICS_HINT)
    if len(found) > MOST_NICS:
        problem = f"it names {len(found)} NICs, and a VM can have {MOST_NICS}"
        raise options.refused("NICs", problem, "ask for fewer NICs.")
    addresses = [nic.mac for nic in found if nic.mac]
    for address in addresses:
        if addresses.count(address) > 1:
            raise options.refused("NICs", f"two NICs have the address {address}", "give every NIC its own MAC address.")
    _agree_with_the_classic(ad, options, found[0])
    return tuple(found)


def classic(ad: JobAd, settings: Settings, kinds: Sequence[str] | None = None) -> tuple[Nic, ...]:
    """Return the NIC of vm_networking, none for a VM without a network. Raises `JobFault`."""
    kind = networking_type(ad, settings, kinds)
    return (Nic(kind, mac(ad)),) if kind else ()


def networking_type(ad: JobAd, settings: Settings, kinds: Sequence[str] | None = None) -> str:
    """Return the kind of network that the VM gets, empty for none.

    This is the job's own option, else VM_NETWORKING_DEFAULT_TYPE, else user, else nat, else the first on offer: each
    only if it is on offer (``VirshType::Config`` in HTCondor's ``xen_type.linux.cpp``).
    """
    if not ad.boolean("JobVMNetworking"):
        return ""
    offered = settings.networking_types() if kinds is None else kinds
    if not offered:
        problem = "JobVMNetworking = true, and this machine offers no network to VMs (VM_NETWORKING)."
        hint = "add VM_Networking to the job's requirements, or set vm_networking = false."
        raise JobFault(errors.MISMATCHED, problem, hint)
    wanted = ad.string("JobVMNetworkingType")
    if wanted is not None and wanted.strip():
        if wanted.strip().lower() not in offered:
            problem = f"JobVMNetworkingType = {shown(wanted)}, and this machine offers: {', '.join(offered)}."
            raise JobFault(errors.MISMATCHED, problem, "set vm_networking_type to one of these, or remove it.")
        return wanted.strip().lower()
    for kind in (settings.string("VM_NETWORKING_DEFAULT_TYPE").lower(), "user", "nat"):
        if kind in offered:
            return kind
    return offered[0]


def mac(ad: JobAd) -> str:
    """Return JobVM_MACADDR as ``xx:xx:xx:xx:xx:xx`` in lower case; empty if the hypervisor chooses it."""
    given = (ad.string("JobVM_MACADDR") or "").strip()
    if not given:
        return ""
    address, problem = _address(given)
    if problem:
        hint = "set vm_macaddr to six hexadecimal numbers such as 52:54:00:12:34:56, or remove it."
        raise JobFault(errors.MISMATCHED, f"JobVM_MACADDR = {shown(given)} {problem}.", hint)
    return address


def _address(text: str) -> tuple[str, str]:
    """Normalize a MAC address to libvirt's form; return it and a problem, empty for none."""
    octets = text.lower().split("-" if "-" in text else ":")
    address = ":".join(octet and octet.zfill(2) for octet in octets) if len(octets) == 6 else ""
    if re.fullmatch(MAC, address):
        return address, ""
    if address == "00:00:00:00:00:00":
        return "", "is zero"
    if re.fullmatch(MAC, f"{address[:1]}2{address[2:]}") and address[1:2] in "13579bdf":
        return "", "is a multicast address, which no NIC can have"
    return "", "is not a MAC address"


def _nic(entry: str, options: Options, offered: Sequence[str]) -> Nic:
    refused = partial(_refused, entry, options)
    kind, *words = (word.strip().lower() for word in entry.split(":"))
    if kind not in ("nat", "bridge", "user"):
        raise refused(f"{shown(kind)} is not a kind of network")
    if kind not in offered:
        problem = f"this machine offers {', '.join(offered) or 'no network to VMs (VM_NETWORKING)'}"
        raise refused(problem, "ask for a kind that VM_Networking_Types of the machine has, and require that of it.")
    said: dict[str, str] = {}

    def take(what: str, value: str) -> None:
        if said.setdefault(what, value) != value:
            raise refused(f"it says the {what} twice, {said[what]} and {value}")

    while words:
        word = words.pop(0)
        if word in MODELS:
            take("model", word)
        elif word in ("up", "down"):
            take("link", word)
        else:
            # A MAC address has colons of its own.
            while word.count(":") < 5 and "-" not in word and words and words[0] not in (*MODELS, "up", "down"):
                word += ":" + words.pop(0)
            address, problem = _address(word)
            if problem:
                raise refused(f"{shown(word)} {problem}")
            take("address", address)
    return Nic(kind, said.get("address", ""), said.get("model", "virtio"), said.get("link") != "down")


def _refused(entry: str, options: Options, problem: str, hint: str = _NICS_HINT) -> JobFault:
    return JobFault(errors.MISMATCHED, f"{options.attribute('NICs')}, entry {shown(entry)}: {problem}.", hint)


def _agree_with_the_classic(ad: JobAd, options: Options, first: Nic) -> None:
    """Make sure that the classic attributes, if the job has them, agree with the first NIC. Raises `JobFault`."""
    kind = (ad.string("JobVMNetworkingType") or "").strip().lower()
    if kind and kind != first.networking_type:
        problem = f"its first NIC is of the kind {first.networking_type}, and JobVMNetworkingType = {shown(kind)}"
        raise options.refused("NICs", problem, "remove vm_networking_type: the list says it of every NIC.")
    address = mac(ad)
    if address and address != first.mac:
        problem = f"its first NIC has {first.mac or 'no address of its own'}, and JobVM_MACADDR = {shown(address)}"
        raise options.refused("NICs", problem, "remove vm_macaddr: the list says it of every NIC.")
