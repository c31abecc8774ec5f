"""The devices of a job besides disks and NICs: firmware, CPU topology, TPM, share, port.

HTCondor has no such attributes; docs/how-to/devices.md and guests.md describe them. The driver finds out whether a
machine meets their needs (a UEFI firmware, another architecture's QEMU, swtpm).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from vmgahp.config import Settings
from vmgahp.job import share_dirs
from vmgahp.job.cloud_init import Seed
from vmgahp.job.kinds import ARCHES, ARM, BIOS, CLOCKS, FIRMWARES, X86
from vmgahp.job.options import ARCH, CLOCK, EXIT_PORT, FIRMWARE, SSH, TOPOLOGY, TPM, Options
from vmgahp.job.run import Run
from vmgahp.job.share_dirs import Share

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
        shares=(*share_dirs.own(options, settings, working_dir), *share_dirs.of_machine(options, settings)),
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
