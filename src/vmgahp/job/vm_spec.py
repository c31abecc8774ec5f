"""The part of a job's request that all hypervisors have in common, with its NICs, and its slot.

HTCondor makes the slot as large as the job asks, or larger. The job's request is in its ad; the actual size is in the
machine ad, a file next to the job ad, which counts only if no input file of the job can have replaced it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.errors import Fault, JobFault, MachineFault
from vmgahp.host import starter
from vmgahp.host.job_user import Identity
from vmgahp.job import scratch_files
from vmgahp.job.ad import JobAd
from vmgahp.job.attributes import Options
from vmgahp.job.disks import refuse_made
from vmgahp.job.engine import NoEngine
from vmgahp.text import MAC, shown

LEAST_MEMORY_MIB = 32
"""The least memory of a VM, which smaller ones get too, as from the C++ daemon (``KVMType::CreateConfigFile``)."""

MACHINE_AD = ".machine.ad"
LARGEST_MACHINE_AD = 1 << 20
"""The most bytes of the machine ad; it has some thousands."""
THREADS = "OMP_NUM_THREADS"
"""The variable in which the starter puts the slot's CPUs, for programs (STARTER_NUM_THREADS_ENV_VARS)."""
CORES = "_CONDOR_STARTD_ASSIGNED_AFFINITY"
"""The variable in which the startd puts the slot's cores (ASSIGN_CPU_AFFINITY)."""
MOST_CORES = 4096


class Slot(NamedTuple):
    """The resources of a job on its machine; None if unknown."""

    cpus: int | None = None
    memory_mib: int | None = None
    disk_kib: int | None = None
    disk_is_asked: bool = False
    """True if the job's owner has set request_disk, and HTCondor has not derived it from the input files."""
    cores: tuple[int, ...] = ()
    """The cores that the startd has assigned to the slot; empty if it has not assigned any."""
    is_doubtful: bool = False
    """True if the machine ad in the scratch directory may not be the one that the starter has written."""


def asked_slot(ad: JobAd, environ: Mapping[str, str] = os.environ) -> Slot:
    """Return the job's request for a slot, and the starter's values from its environment, without reading files."""
    text = environ.get(THREADS, "") if starter.SLOT in environ else ""
    threads = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
    cpus = [number for number in (_integer(ad, "RequestCpus"), threads or None) if number is not None]
    disk = _integer(ad, "RequestDisk")  # a number in either case, as the starter sends it
    return Slot(
        max(cpus) if cpus else None,
        _integer(ad, "RequestMemory"),
        disk,
        disk is not None and disk != _integer(ad, "DiskUsage"),
        assigned_cores(environ),
        _can_be_replaced(ad),
    )


def assigned_cores(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Return the cores that the startd has assigned to the slot, in order; empty for none, or an invalid list."""
    words = environ.get(CORES, "").replace(",", " ").split()
    if not all(word.isascii() and word.isdecimal() and len(word) < 6 and int(word) < MOST_CORES for word in words):
        return ()
    return tuple(sorted(set(map(int, words))))


def settle_slot(spec: VmSpec, settings: Settings, identity: Identity) -> VmSpec:
    """Complete the slot from the machine ad if that is needed. Raises `JobFault` if the VM is larger than the slot."""
    slot = spec.slot
    if (slot.cpus or 0) < spec.vcpus or (slot.memory_mib or 0) < spec.memory_mib:
        slot = larger_slot(slot, spec.working_dir, identity)
    if settings.boolean("VM_OVERCOMMIT"):
        return spec._replace(slot=slot)
    if slot.cpus is not None and spec.vcpus > max(slot.cpus, 1):
        problem = f"The VM is to have {spec.vcpus} CPUs, and the job's slot has {slot.cpus} (RequestCpus)."
        hint = f"set request_cpus = {spec.vcpus} in the submit file, or lower vm_vcpus."
        raise JobFault(errors.MISMATCHED, problem, hint)
    if slot.memory_mib is not None and spec.memory_mib > max(slot.memory_mib, LEAST_MEMORY_MIB):
        has = f"the job's slot has {slot.memory_mib} MiB (RequestMemory)"
        hint = f"set request_memory = {spec.memory_mib} in the submit file, or leave it out, or lower vm_memory."
        problem = f"The VM is to have {spec.memory_mib} MiB of memory, and {has}."
        raise JobFault(errors.NO_MEMORY_PARAM, problem, hint)
    return spec._replace(slot=slot)


def larger_slot(slot: Slot, directory: str, identity: Identity) -> Slot:
    """Return the slot with the values of the machine ad, if they are larger and the ad can be trusted."""
    if slot.is_doubtful:
        return slot
    above, name = os.path.split(starter.places(directory).machine_ad)
    try:
        if above == os.path.normpath(directory):
            text = identity.read_scratch(directory, name, LARGEST_MACHINE_AD)
        else:
            text = identity.read_named(os.path.join(above, name), LARGEST_MACHINE_AD)
    except (OSError, Fault):
        return slot
    found = JobAd(pair for line in text.decode("utf-8", "replace").splitlines() if (pair := JobAd.parse_line(line)))

    def more(number: int | None, name: str) -> int | None:
        said = None if found.is_expression(name) else found.integer(name)
        return said if said and said > (number or 0) else number

    return slot._replace(cpus=more(slot.cpus, "Cpus"), memory_mib=more(slot.memory_mib, "Memory"))


def _integer(ad: JobAd, name: str) -> int | None:
    """Return a number of the ad; None also for an expression on a machine without the ClassAd engine."""
    try:
        return ad.integer(name)
    except JobFault as fault:
        if isinstance(fault.__cause__, NoEngine):
            return None
        raise


def _can_be_replaced(ad: JobAd) -> bool:
    """Return True if an input file of the job may have the machine ad's name, or its name is not known yet."""
    for name in filter(ad.has, _SENT):
        files = ad.string(name)
        if ad.is_expression(name) or files is None:
            return True
        last = {entry.rpartition("/")[2] for entry in files.replace(",", " ").split()}
        if MACHINE_AD in files or "://" in files or last & {"", ".", ".."}:
            return True
    return False


_SENT = ("transferinput", "x509userproxy", "publicinputfiles", "transferinputremaps", "cmd", "in")
"""The attributes that name files for the scratch directory."""


# The NICs: the classic one of vm_networking, or a list of them.
#
# ``+VMPARAM_vm_NICs = "nat:52:54:00:12:34:56, bridge:e1000, user, nat:down"`` gives all NICs of the VM in their order,
# each with its kind of network and, in any order, a MAC address, a model and whether its cable is in.


MODELS = ("virtio", "e1000", "e1000e", "rtl8139")
"""The models to choose from. virtio, the fastest, is the default; the others are for guests without its driver."""

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
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    if not entries:
        raise options.refused("NICs", "it names no NIC", _NICS_HINT)
    if len(entries) > MOST_NICS:
        problem = f"it names {len(entries)} NICs, and a VM can have {MOST_NICS}"
        raise options.refused("NICs", problem, "ask for fewer NICs.")
    found = [_nic(entry, options, offered) for entry in entries]
    addresses = [nic.mac for nic in found if nic.mac]
    if twice := next((address for address in addresses if addresses.count(address) > 1), ""):
        raise options.refused("NICs", f"two NICs have the address {twice}", "give every NIC its own MAC address.")
    _agree_with_the_classic(ad, options, found[0])
    return tuple(found)


def classic(ad: JobAd, settings: Settings, kinds: Sequence[str] | None = None) -> tuple[Nic, ...]:
    """Return the NIC of vm_networking, none for a VM without a network. Raises `JobFault`.

    Its kind is the job's own option, else VM_NETWORKING_DEFAULT_TYPE, else user, else nat, else the first on offer:
    each only if it is on offer (``VirshType::Config`` in HTCondor's ``xen_type.linux.cpp``).
    """
    if not ad.boolean("JobVMNetworking"):
        return ()
    offered = settings.networking_types() if kinds is None else kinds
    if not offered:
        problem = "JobVMNetworking = true, and this machine offers no network to VMs (VM_NETWORKING)."
        hint = "add VM_Networking to the job's requirements, or set vm_networking = false."
        raise JobFault(errors.MISMATCHED, problem, hint)
    wanted = ad.string("JobVMNetworkingType") or ""
    usual = (settings.string("VM_NETWORKING_DEFAULT_TYPE").lower(), "user", "nat")
    kind = wanted.strip().lower() or next((kind for kind in usual if kind in offered), offered[0])
    if kind not in offered:
        problem = f"JobVMNetworkingType = {shown(wanted)}, and this machine offers: {', '.join(offered)}."
        raise JobFault(errors.MISMATCHED, problem, "set vm_networking_type to one of these, or remove it.")
    return (Nic(kind, mac(ad)),)


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

    words.reverse()  # an expression may make millions of them, and to take the first of a list moves all others
    while words:
        word = words.pop()
        if word in MODELS:
            take("model", word)
        elif word in ("up", "down"):
            take("link", word)
        else:
            # A MAC address has colons of its own.
            while word.count(":") < 5 and "-" not in word and words and words[-1] not in (*MODELS, "up", "down"):
                word += ":" + words.pop()
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


# The request


MOST_VCPUS = 255
"""The most CPUs of QEMU's pc machine; more would fail in the hypervisor, and be blamed on the machine."""


class VmSpec(NamedTuple):
    """A virtual machine as the job requests it and this machine grants it."""

    name: str
    vm_type: str
    working_dir: str
    memory_mib: int
    vcpus: int
    nics: tuple[Nic, ...]
    checkpoint: bool
    no_output_vm: bool
    left_behind: tuple[str, ...] | None = None
    """The files that a checkpoint omits; None if HTCondor transfers by its own rule (`vmgahp.job.scratch_files`)."""
    slot: Slot = Slot()
    """The job's slot, as known without reading files (`settle_slot` completes it)."""

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
    """Parse the job ad for a VM type with one NIC and no generated disks. Raises `errors.Fault`."""
    refuse_made(ad)
    return with_nics(ad, settings, classic(ad, settings, kinds))


def with_nics(ad: JobAd, settings: Settings, nics: tuple[Nic, ...]) -> VmSpec:
    """Parse the job ad, except for its NICs. Raises as `parse`."""
    return VmSpec(
        vcpus=vcpus(ad),
        memory_mib=memory_mib(ad, settings),
        name=ad.vm_name(),
        vm_type=ad.vm_type(),
        working_dir=ad.working_dir(),
        nics=nics,
        checkpoint=bool(ad.boolean("JobVMCheckpoint")),
        no_output_vm=bool(ad.boolean("VMPARAM_No_Output_VM")),
        left_behind=scratch_files.left_behind(ad),
        slot=asked_slot(ad),
    )


def first_integer(ad: JobAd, *names: str) -> tuple[str, int | None]:
    """Return the first of the attributes that is a number, and its value; None if none is."""
    return next(((name, found) for name in names if (found := ad.integer(name)) is not None), (names[-1], None))


def memory_mib(ad: JobAd, settings: Settings) -> int:
    """Return the memory in MiB: JobVMMemory, else RequestMemory.

    Too large a value gets the word for a missing one: that for "too much" takes the machine out of service.
    """
    limit = settings.integer("VM_MEMORY")
    if limit <= 0:
        problem = "VM_MEMORY is not set: it says how much memory VMs may have on this machine."
        raise MachineFault(problem, "set VM_MEMORY to the memory in MiB that is for VMs.")
    name, memory = first_integer(ad, "JobVMMemory", "RequestMemory")
    if memory is None:
        both = " and ".join(f"{name} = {shown(ad.expression(name))}" for name in ("JobVMMemory", "RequestMemory"))
        problem = f"{both}: neither says how much memory the VM gets."
        raise JobFault(errors.NO_MEMORY_PARAM, problem, "set vm_memory, in MiB, in the submit file.")
    if not 0 < memory <= limit:
        problem = f"{name} = {memory} MiB, and a VM on this machine may have from 1 to {limit} MiB (VM_MEMORY)."
        hint = "lower vm_memory in the submit file, or require VM_Memory of the machine."
        raise JobFault(errors.NO_MEMORY_PARAM, problem, hint)
    return max(memory, LEAST_MEMORY_MIB)


def vcpus(ad: JobAd) -> int:
    """Return the CPUs: JobVM_VCPUS, else RequestCpus; at least 1, as the C++ daemon."""
    name, number = first_integer(ad, "JobVM_VCPUS", "RequestCpus")
    if number is not None and number > MOST_VCPUS:
        problem = f"{name} = {number}, and a VM can have {MOST_VCPUS} CPUs at most."
        raise JobFault(errors.MISMATCHED, problem, "lower vm_vcpus (or request_cpus) in the submit file.")
    return max(number or 1, 1)
