"""The resources of the job's slot, and a check that the VM fits into it.

HTCondor makes the slot as large as the job asks, or larger. The job's request is in its ad; the actual size is in the
machine ad, a file next to the job ad, which counts only if no input file of the job can have replaced it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.errors import Fault, JobFault
from vmgahp.host import starter
from vmgahp.host.job_user import Identity
from vmgahp.job.ad import JobAd
from vmgahp.job.engine import NoEngine

if TYPE_CHECKING:
    from vmgahp.job.vm_spec import VmSpec

    AnySpec = TypeVar("AnySpec", bound=VmSpec)


LEAST_MEMORY_MIB = 32
"""The least memory of a VM, which smaller ones get too, as from the C++ daemon (``KVMType::CreateConfigFile``)."""

MACHINE_AD = ".machine.ad"
LARGEST = 1 << 20
"""The most bytes of the machine ad; it has some thousands."""
THREADS = "OMP_NUM_THREADS"
"""The variable in which the starter puts the slot's CPUs, for programs (STARTER_NUM_THREADS_ENV_VARS)."""
OF_A_STARTER = "_CONDOR_SLOT"
"""A variable that only a starter sets: a shell may have set the one for CPUs itself."""
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


def asked(ad: JobAd, environ: Mapping[str, str] = os.environ) -> Slot:
    """Return the job's request for a slot, and the starter's values from its environment, without reading files."""
    threads = _number(environ.get(THREADS, "")) if OF_A_STARTER in environ else 0
    cpus = [number for number in (_integer(ad, "RequestCpus"), threads or None) if number is not None]
    disk = _integer(ad, "RequestDisk")  # a number in either case, as the starter sends it
    return Slot(
        max(cpus) if cpus else None,
        _integer(ad, "RequestMemory"),
        disk,
        disk is not None and disk != _integer(ad, "DiskUsage"),
        cores(environ),
        _can_be_replaced(ad),
    )


def cores(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Return the cores that the startd has assigned to the slot, in order; empty for none, or an invalid list."""
    words = environ.get(CORES, "").replace(",", " ").split()
    if not all(word.isascii() and word.isdecimal() and len(word) < 6 and int(word) < MOST_CORES for word in words):
        return ()
    return tuple(sorted(set(map(int, words))))


def settle(spec: AnySpec, settings: Settings, identity: Identity) -> AnySpec:
    """Complete the slot from the machine ad if that is needed. Raises `JobFault` if the VM is larger than the slot."""
    slot = spec.slot
    if _lacks(slot.cpus, spec.vcpus) or _lacks(slot.memory_mib, spec.memory_mib):
        slot = larger(slot, spec.working_dir, identity)
    if not settings.boolean("VM_OVERCOMMIT"):
        _require(spec, slot)
    return spec._replace(slot=slot)


def larger(slot: Slot, directory: str, identity: Identity) -> Slot:
    """Return the slot with the values of the machine ad, if they are larger and the ad can be trusted."""
    if slot.is_doubtful:
        return slot
    above, name = os.path.split(starter.places(directory).machine_ad)
    try:
        is_there = above == os.path.normpath(directory)
        text = (
            identity.read_scratch(directory, name, LARGEST)
            if is_there
            else identity.read_named(os.path.join(above, name), LARGEST)
        )
    except (OSError, Fault):
        return slot
    lines = text.decode("utf-8", "replace").splitlines()
    found = JobAd(pair for line in lines if (pair := JobAd.parse_line(line)))

    def more(number: int | None, name: str) -> int | None:
        said = None if found.is_expression(name) else found.integer(name)
        return said if said and said > (number or 0) else number

    return slot._replace(cpus=more(slot.cpus, "Cpus"), memory_mib=more(slot.memory_mib, "Memory"))


def _lacks(number: int | None, wanted: int) -> bool:
    return number is None or number < wanted


def _require(spec: VmSpec, slot: Slot) -> None:
    """Make sure that the VM fits into the slot. Raises `JobFault`."""
    if slot.cpus is not None and spec.vcpus > max(slot.cpus, 1):
        raise JobFault(
            errors.MISMATCHED,
            f"The VM is to have {spec.vcpus} CPUs, and the job's slot has {slot.cpus} (RequestCpus).",
            f"set request_cpus = {spec.vcpus} in the submit file, or lower vm_vcpus.",
        )
    if slot.memory_mib is not None and spec.memory_mib > max(slot.memory_mib, LEAST_MEMORY_MIB):
        raise JobFault(
            errors.NO_MEMORY_PARAM,
            f"The VM is to have {spec.memory_mib} MiB of memory, and the job's slot has {slot.memory_mib} MiB "
            "(RequestMemory).",
            f"set request_memory = {spec.memory_mib} in the submit file, or leave it out, or lower vm_memory.",
        )


def _integer(ad: JobAd, name: str) -> int | None:
    """Return a number of the ad; None also for an expression on a machine without the ClassAd engine."""
    try:
        return ad.integer(name)
    except JobFault as fault:
        if isinstance(fault.__cause__, NoEngine):
            return None
        raise


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def _can_be_replaced(ad: JobAd) -> bool:
    """Return True if an input file of the job may have the machine ad's name.

    The result of a directory with a trailing slash, of a URL, or of an expression is not known in advance.
    """
    for name in ad.names():
        if name.lower() not in _SENT:
            continue
        files = ad.string(name)
        if ad.is_expression(name) or files is None:
            return True
        last = {entry.rpartition("/")[2] for entry in files.replace(",", " ").split()}
        if MACHINE_AD in files or "://" in files or last & {"", ".", ".."}:
            return True
    return False


_SENT = ("transferinput", "x509userproxy", "publicinputfiles", "transferinputremaps", "cmd", "in")
"""The attributes that name files for the scratch directory."""
