"""The devices of a job besides disks and NICs: firmware, CPU topology, TPM, share, port.

HTCondor has no such attributes; docs/how-to/devices.md and guests.md describe them. The driver finds out whether a
machine meets their needs (a UEFI firmware, another architecture's QEMU, swtpm).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import NamedTuple

from vmgahp.config import Settings
from vmgahp.config.table import CONDITION, SHARE_DIR, SHARE_DIRS
from vmgahp.errors import MISMATCHED, JobFault, MachineFault
from vmgahp.job.ad import JobAd
from vmgahp.job.attributes import (
    ARCH,
    ARCHES,
    ARM,
    BIOS,
    CLOCK,
    CLOCKS,
    EXIT_PORT,
    FIRMWARE,
    FIRMWARES,
    NINEP,
    NO_SHARE,
    SHARE,
    SHARES,
    SSH,
    TOPOLOGY,
    TPM,
    VIRTIOFS,
    X86,
    Options,
)
from vmgahp.job.attributes import SHARE_DIRS as OPTION
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


class Share(NamedTuple):
    """A directory that the guest can mount."""

    tag: str
    directory: str
    """The full path."""
    kind: str
    """The kind: 9p or virtiofs."""
    writable: bool = True
    setting: str = ""
    """The setting that defines it; empty for the job's own."""


def own_share(options: Options, settings: Settings, working_dir: str) -> tuple[Share, ...]:
    """Return the job's own share: true means the whole scratch directory, a name a directory in it."""
    name = options.string(SHARE) if options.is_text(SHARE) else ""
    if not name and not options.boolean(SHARE):
        return ()
    if name and not _DIRECTORY.fullmatch(name):
        raise options.refused(
            SHARE,
            "it is not a name of a directory in the scratch directory",
            'write +VMPARAM_vm_Share = true, or the plain name of a directory, such as "share".',
        )
    how = settings.string("VM_SHARE_SCRATCH").lower()
    if how not in SHARES:
        raise MachineFault(
            f"VM_SHARE_SCRATCH = {how} ({settings.where('VM_SHARE_SCRATCH')}) is not {' or '.join(SHARES)}.",
            f"set it to {NINEP} or {VIRTIOFS}, or to {NO_SHARE}.",
        )
    if how == NO_SHARE:
        raise options.refused(
            SHARE,
            "this machine shares no directory with VMs (VM_SHARE_SCRATCH)",
            "require a machine that does (VM_kvm_ATTR_share), or hand the files over on a disk.",
        )
    return (Share(OWN_TAG, os.path.join(working_dir, name) if name else working_dir, how),)


def machine_shares(options: Options, settings: Settings) -> tuple[Share, ...]:
    """Return the administrator's directories that the job asks for, each once."""
    asked = options.string(OPTION).replace(",", " ").split()
    offered = {share.tag.lower(): share for share in offered_shares(settings)} if asked else {}
    found: dict[str, Share] = {}
    for name in asked:
        share = offered.get(name.lower())
        if share is None:
            raise options.refused(
                OPTION,
                f"this machine has no directory {name[:100]!a} for VMs (VM_SHARE_DIRS)",
                f'require a machine that has it: stringListIMember("{name}", VM_kvm_ATTR_share_dirs).'
                if _TAG.fullmatch(name)
                else f"such names are of at most {LONGEST_NAME} letters, digits and _.",
            )
        found[share.tag] = share
    return tuple(found.values())


def offered_shares(settings: Settings) -> list[Share]:
    """Return all directories that the administrator defines. Raises `MachineFault` for an invalid one."""
    found: dict[str, Share] = {}
    for name in settings.strings(SHARE_DIRS):
        setting = f"{SHARE_DIR}{name.upper()}"
        upper = name.upper()
        if not _TAG.fullmatch(name) or upper.endswith(CONDITION) or name.lower() == OWN_TAG:
            raise MachineFault(
                f"{SHARE_DIRS} ({settings.where(SHARE_DIRS)}) names {name[:100]!a}, which cannot be the name of one.",
                f"use at most {LONGEST_NAME} letters, digits and _, not {OWN_TAG}, and no {CONDITION} at the end.",
            )
        path, _, said = settings.string(setting).partition(":")
        words = [word.strip().lower() for word in said.replace(",", ":").split(":")] if said else []
        if not path.startswith("/") or any(word not in _WORDS for word in words):
            raise MachineFault(
                f"{setting} = {settings.string(setting)} ({settings.where(setting)}) is not the full path of a "
                f"directory, which {SHARE_DIRS} names, with {', '.join(_WORDS)} after a colon.",
                f"write {setting} = /path, or /path:{_WRITABLE}, or take {name} out of {SHARE_DIRS}.",
            )
        kind = NINEP if NINEP in words and VIRTIOFS not in words else VIRTIOFS
        found[upper] = Share(name, path, kind, _WRITABLE in words and _READ_ONLY not in words, setting)
    return list(found.values())


def require_shares_allowed(view: PolicyView, shares: Iterable[Share]) -> None:
    """Make sure that the job may have its directories. Raises `JobFault`, and `MachineFault` for an invalid expression.

    As in VM_POLICY_REQUIREMENTS, names in an expression are the job's attributes, and the result must be true.
    """
    for share in shares:
        name = f"{share.setting}{CONDITION}"
        condition = view.settings.string(name) if share.setting else ""
        if condition and not view.meets(name):
            raise JobFault(
                MISMATCHED,
                f"This machine gives its directory {share.tag} to VM jobs only where {condition} ({name}).",
                "leave it out of VMPARAM_vm_Share_Dirs, or ask the administrator of this machine.",
            )


def inspect_shares(settings: Settings) -> list[Share]:
    """Return all directories that are defined, after parsing each condition once. Raises `MachineFault`."""
    found = offered_shares(settings)
    for share in found:
        try:
            require_shares_allowed(PolicyView(JobAd(()), settings), (share,))
        except JobFault:
            pass  # an empty ad need not meet the condition
    return found


_PARTS = ("sockets", "cores", "threads")
_SSH_PORT = 22
_MOST_PORTS = 8


class Topology(NamedTuple):
    """The arrangement of the VM's CPUs; the product is their number."""

    sockets: int
    cores: int
    """The cores of each socket."""
    threads: int
    """The threads of each core."""


class Devices(NamedTuple):
    """The devices that are neither disks nor NICs."""

    arch: str = ""
    """The architecture, ``x86_64`` or ``aarch64``; empty for the machine's own."""
    firmware: str = ""
    """The firmware, one of `FIRMWARES`; empty for the architecture's usual one: bios on x86_64, uefi on aarch64."""
    topology: Topology | None = None
    tpm: bool = False
    shares: tuple[Share, ...] = ()
    """The directories that the guest can mount."""
    exit_port: bool = False
    """True if the guest has a port to which it can write its exit code."""
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
    arch = _arch(options)
    return Devices(
        arch=arch,
        firmware=_firmware(options, arch),
        topology=_topology(options, vcpus),
        tpm=options.boolean(TPM),
        shares=(*own_share(options, settings, working_dir), *machine_shares(options, settings)),
        exit_port=options.boolean(EXIT_PORT),
        clock=_clock(options),
        ssh=_ssh(options, settings),
    )


def _arch(options: Options) -> str:
    wanted = options.string(ARCH).lower()
    if wanted and wanted not in ARCHES:
        raise options.refused(ARCH, "it is not an architecture of guests here", f"write {X86} or {ARM}.")
    return ARCHES.get(wanted, "")


def _firmware(options: Options, arch: str) -> str:
    wanted = options.string(FIRMWARE).lower()
    if wanted and wanted not in FIRMWARES:
        raise options.refused(FIRMWARE, "there is no such firmware", f"write one of {', '.join(FIRMWARES)}.")
    if arch == ARM and wanted == BIOS:
        raise options.refused(
            FIRMWARE,
            f"{options.shown(ARCH)} contradicts it, whose guests boot by UEFI",
            f"remove {options.attribute(FIRMWARE)}.",
        )
    return wanted


def _clock(options: Options) -> str:
    wanted = options.string(CLOCK).lower()
    if wanted and wanted not in CLOCKS:
        raise options.refused(CLOCK, "there is no such clock", f"write one of {', '.join(CLOCKS)}.")
    return wanted


def _topology(options: Options, vcpus: int) -> Topology | None:
    text = options.string(TOPOLOGY)
    if not text:
        return None
    hint = f'write +VMPARAM_vm_Topology = "sockets=1,cores={vcpus},threads=1"; what is left out is 1.'
    numbers: dict[str, int] = {}
    for entry in text.lower().split(","):
        name, _, value = (part.strip() for part in entry.partition("="))
        if name not in _PARTS or name in numbers or not re.fullmatch(r"[1-9][0-9]{0,3}", value, re.ASCII):
            raise options.refused(TOPOLOGY, f"{entry.strip()!a} says nothing about sockets, cores or threads", hint)
        numbers[name] = int(value)
    topology = Topology(*(numbers.get(name, 1) for name in _PARTS))
    product = topology.sockets * topology.cores * topology.threads
    if product != vcpus:
        raise options.refused(TOPOLOGY, f"that are {product} CPUs, and the job has {vcpus} (vm_vcpus)", hint)
    return topology


def _ssh(options: Options, settings: Settings) -> tuple[int, ...]:
    """Return the guest's ports to forward; true means the port of ssh."""
    if options.is_text(SSH):
        words = options.string(SSH).replace(",", " ").split()
        ports = tuple(dict.fromkeys(int(word) for word in words if re.fullmatch(r"[0-9]{1,5}", word, re.ASCII)))
        if not words or len(ports) < len(words) or not all(0 < port < 1 << 16 for port in ports):
            hint = 'write +VMPARAM_vm_SSH = true, or the ports in quotes, such as "22, 8080".'
            raise options.refused(SSH, "it is not a list of ports, each of them once", hint)
        if len(ports) > _MOST_PORTS:
            raise options.refused(SSH, f"it names {len(ports)} ports", f"name {_MOST_PORTS} at most.")
    elif options.boolean(SSH):
        ports = (_SSH_PORT,)
    else:
        return ()
    if not settings.string("VM_SSH_PORTS"):
        raise options.refused(
            SSH,
            "this machine opens no way into VMs (VM_SSH_PORTS)",
            "require a machine that does (VM_kvm_ATTR_ssh), or remove it.",
        )
    return ports
