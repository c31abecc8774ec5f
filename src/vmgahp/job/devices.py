"""The devices of a job besides disks and NICs: firmware, CPU topology, TPM, share, port.

HTCondor has no such attributes; docs/how-to/devices.md and guests.md describe them. The driver finds out whether a
machine meets their needs (a UEFI firmware, another architecture's QEMU, swtpm).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from vmgahp.config import Settings
from vmgahp.config.table import CONDITION, SHARE_DIR, SHARE_DIRS
from vmgahp.errors import MISMATCHED, JobFault, MachineFault
from vmgahp.job.ad import JobAd
from vmgahp.job.attributes import ARCHES, ARM, CLOCKS, FIRMWARES, NINEP, NO_SHARE, SHARES, VIRTIOFS, X86, Options, Share
from vmgahp.job.cloud_init import Seed
from vmgahp.job.policy_view import PolicyView
from vmgahp.job.run import Run

# The directories that a guest can mount: one of its job, and those of the administrator.
#
# The job must ask for each by name, since a VM with a shared directory can be neither saved nor checkpointed. The
# administrator decides by an expression over the job ad which jobs may have a directory.

OWN_TAG = "share"
"""The tag by which the guest mounts the job's own directory; the tag of an administrator's directory is its name."""

LONGEST_NAME = 31
"""The most bytes of a tag (9p's; virtiofs has 36)."""

_DIRECTORY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", re.ASCII)
_TAG = re.compile(rf"[A-Za-z0-9_]{{1,{LONGEST_NAME}}}", re.ASCII)
_READ_ONLY, _WRITABLE = "ro", "rw"
_WORDS = (_READ_ONLY, _WRITABLE, NINEP, VIRTIOFS)


def own_share(options: Options, settings: Settings, working_dir: str) -> tuple[Share, ...]:
    """Return the job's own share: true means the whole scratch directory, a name a directory in it."""
    name = options.string("Share") if options.is_text("Share") else ""
    if not name and not options.boolean("Share"):
        return ()
    if name and not _DIRECTORY.fullmatch(name):
        hint = 'write +VMPARAM_vm_Share = true, or the plain name of a directory, such as "share".'
        raise options.refused("Share", "it is not a name of a directory in the scratch directory", hint)
    how = settings.string("VM_SHARE_SCRATCH").lower()
    if how not in SHARES:
        problem = f"VM_SHARE_SCRATCH = {how} ({settings.where('VM_SHARE_SCRATCH')}) is not {' or '.join(SHARES)}."
        raise MachineFault(problem, f"set it to {NINEP} or {VIRTIOFS}, or to {NO_SHARE}.")
    if how == NO_SHARE:
        hint = "require a machine that does (VM_kvm_ATTR_share), or hand the files over on a disk."
        raise options.refused("Share", "this machine shares no directory with VMs (VM_SHARE_SCRATCH)", hint)
    return (Share(OWN_TAG, os.path.join(working_dir, name) if name else working_dir, how),)


def machine_shares(options: Options, settings: Settings) -> tuple[Share, ...]:
    """Return the administrator's directories that the job asks for, each once."""
    asked = options.string("Share_Dirs").replace(",", " ").split()
    offered = {share.tag.lower(): share for share in offered_shares(settings)} if asked else {}
    found: dict[str, Share] = {}
    for name in asked:
        share = offered.get(name.lower())
        if share is None:
            hint = f"such names are of at most {LONGEST_NAME} letters, digits and _."
            if _TAG.fullmatch(name):
                hint = f'require a machine that has it: stringListIMember("{name}", VM_kvm_ATTR_share_dirs).'
            problem = f"this machine has no directory {name[:100]!a} for VMs (VM_SHARE_DIRS)"
            raise options.refused("Share_Dirs", problem, hint)
        found[share.tag] = share
    return tuple(found.values())


def offered_shares(settings: Settings) -> list[Share]:
    """Return all directories that the administrator defines. Raises `MachineFault` for an invalid one."""
    found: dict[str, Share] = {}
    for name in settings.strings(SHARE_DIRS):
        setting = f"{SHARE_DIR}{name.upper()}"
        upper = name.upper()
        if not _TAG.fullmatch(name) or upper.endswith(CONDITION) or name.lower() == OWN_TAG:
            names = f"{SHARE_DIRS} ({settings.where(SHARE_DIRS)}) names {name[:100]!a}"
            hint = f"use at most {LONGEST_NAME} letters, digits and _, not {OWN_TAG}, and no {CONDITION} at the end."
            raise MachineFault(f"{names}, which cannot be the name of one.", hint)
        path, _, said = settings.string(setting).partition(":")
        words = [word.strip().lower() for word in said.replace(",", ":").split(":")] if said else []
        if not path.startswith("/") or any(word not in _WORDS for word in words):
            what = f"the full path of a directory, which {SHARE_DIRS} names, with {', '.join(_WORDS)} after a colon"
            problem = f"{setting} = {settings.string(setting)} ({settings.where(setting)}) is not {what}."
            hint = f"write {setting} = /path, or /path:{_WRITABLE}, or take {name} out of {SHARE_DIRS}."
            raise MachineFault(problem, hint)
        kind = NINEP if NINEP in words and VIRTIOFS not in words else VIRTIOFS
        found[upper] = Share(name, path, kind, _WRITABLE in words and _READ_ONLY not in words, setting)
    return list(found.values())


def require_shares_allowed(view: PolicyView, shares: Iterable[Share]) -> None:
    """Check each directory's condition as VM_POLICY_REQUIREMENTS. Raises `JobFault`, and `MachineFault` if invalid."""
    for share in shares:
        name = f"{share.setting}{CONDITION}"
        condition = view.settings.string(name) if share.setting else ""
        if condition and not view.meets(name):
            problem = f"This machine gives its directory {share.tag} to VM jobs only where {condition} ({name})."
            hint = "leave it out of VMPARAM_vm_Share_Dirs, or ask the administrator of this machine."
            raise JobFault(MISMATCHED, problem, hint)


def inspect_shares(settings: Settings) -> list[Share]:
    """Return all directories that are defined, after parsing each condition once. Raises `MachineFault`."""
    found = offered_shares(settings)
    for share in found:
        with suppress(JobFault):  # an empty ad need not meet the condition
            require_shares_allowed(PolicyView(JobAd(()), settings), (share,))
    return found


_MOST_PORTS = 8


class Topology(NamedTuple):
    """The arrangement of the VM's CPUs; the product is their number."""

    sockets: int = 1
    cores: int = 1
    threads: int = 1


class Devices(NamedTuple):
    """The devices that are neither disks nor NICs."""

    arch: str = ""
    """The architecture, ``x86_64`` or ``aarch64``; empty for the machine's own."""
    firmware: str = ""
    """The firmware, one of `FIRMWARES`; empty for the architecture's usual one: bios on x86_64, uefi on aarch64."""
    topology: Topology | None = None
    tpm: bool = False
    shares: tuple[Share, ...] = ()
    exit_port: bool = False
    user_data: Seed | None = None
    """The files for cloud-init; the drive with them is one of the job's disks."""
    run: Run | None = None
    """The program of the guest; the drive with it is one of the job's disks."""
    clock: str = ""
    """The time of the hardware clock, one of `CLOCKS`; empty for the default, UTC."""
    ssh: tuple[int, ...] = ()
    """The ports of the guest to which this machine forwards ports."""


def devices(options: Options, settings: Settings, vcpus: int, working_dir: str) -> Devices:
    """Read and check the devices. Raises `JobFault`, and `MachineFault` for an invalid setting."""
    wanted, firmware = options.string("Arch").lower(), options.string("Firmware").lower()
    clock = options.string("Clock").lower()
    if wanted and wanted not in ARCHES:
        raise options.refused("Arch", "it is not an architecture of guests here", f"write {X86} or {ARM}.")
    arch = ARCHES.get(wanted, "")
    if firmware and firmware not in FIRMWARES:
        raise options.refused("Firmware", "there is no such firmware", f"write one of {', '.join(FIRMWARES)}.")
    if arch == ARM and firmware == "bios":
        problem = f"{options.shown('Arch')} contradicts it, whose guests boot by UEFI"
        raise options.refused("Firmware", problem, f"remove {options.attribute('Firmware')}.")
    if clock and clock not in CLOCKS:
        raise options.refused("Clock", "there is no such clock", f"write one of {', '.join(CLOCKS)}.")
    return Devices(
        arch=arch,
        firmware=firmware,
        topology=_topology(options, vcpus),
        tpm=options.boolean("TPM"),
        shares=(*own_share(options, settings, working_dir), *machine_shares(options, settings)),
        exit_port=options.boolean("Exit_Port"),
        clock=clock,
        ssh=_ssh(options, settings),
    )


def _topology(options: Options, vcpus: int) -> Topology | None:
    text = options.string("Topology")
    if not text:
        return None
    hint = f'write +VMPARAM_vm_Topology = "sockets=1,cores={vcpus},threads=1"; what is left out is 1.'
    numbers: dict[str, int] = {}
    for entry in text.lower().split(","):
        name, _, value = (part.strip() for part in entry.partition("="))
        if name not in Topology._fields or name in numbers or not re.fullmatch(r"[1-9][0-9]{0,3}", value, re.ASCII):
            raise options.refused("Topology", f"{entry.strip()!a} says nothing about sockets, cores or threads", hint)
        numbers[name] = int(value)
    topology = Topology(**numbers)
    product = topology.sockets * topology.cores * topology.threads
    if product != vcpus:
        raise options.refused("Topology", f"that are {product} CPUs, and the job has {vcpus} (vm_vcpus)", hint)
    return topology


def _ssh(options: Options, settings: Settings) -> tuple[int, ...]:
    """Return the guest's ports to forward; true means the port of ssh."""
    if options.is_text("SSH"):
        words = options.string("SSH").replace(",", " ").split()
        ports = tuple(dict.fromkeys(int(word) for word in words if re.fullmatch(r"[0-9]{1,5}", word, re.ASCII)))
        if not words or len(ports) < len(words) or not all(0 < port < 1 << 16 for port in ports):
            hint = 'write +VMPARAM_vm_SSH = true, or the ports in quotes, such as "22, 8080".'
            raise options.refused("SSH", "it is not a list of ports, each of them once", hint)
        if len(ports) > _MOST_PORTS:
            raise options.refused("SSH", f"it names {len(ports)} ports", f"name {_MOST_PORTS} at most.")
    elif options.boolean("SSH"):
        ports = (22,)
    else:
        return ()
    if not settings.string("VM_SSH_PORTS"):
        problem = "this machine opens no way into VMs (VM_SSH_PORTS)"
        raise options.refused("SSH", problem, "require a machine that does (VM_kvm_ATTR_ssh), or remove it.")
    return ports
