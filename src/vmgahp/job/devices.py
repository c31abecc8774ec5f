"""The devices of a job beside disks and NICs: firmware, CPU topology, TPM, share, port.

None of these attributes is HTCondor's own; docs/how-to/devices.md and guests.md describe them. Whether a machine
has what they take (a UEFI firmware, another architecture's QEMU, swtpm) is the driver's to find out.
"""

import os
import re

from vmgahp.config import Settings
from vmgahp.errors import MachineFault
from vmgahp.host.light import NamedTuple
from vmgahp.job.options import ARCH, EXIT_PORT, FIRMWARE, SHARE, TOPOLOGY, TPM, Options
from vmgahp.job.own_xml import NOTHING, OwnXml

TYPE_CHECKING = False  # loaded for the jobs that have user data
if TYPE_CHECKING:
    from vmgahp.job.cloud_init import Seed

BIOS, UEFI, UEFI_SECURE = "bios", "uefi", "uefi-secure"
FIRMWARES = (BIOS, UEFI, UEFI_SECURE)

X86, ARM = "x86_64", "aarch64"
ARCHES = {X86: X86, "amd64": X86, ARM: ARM, "arm64": ARM}
"""The architectures of guests, by all their names."""

SHARES = ("none", "9p")
"""The values of VM_SHARE_SCRATCH."""

_DIRECTORY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", re.ASCII)
_PARTS = ("sockets", "cores", "threads")


class Topology(NamedTuple):
    """How the VM's CPUs are arranged; the product is their number."""

    sockets: int
    cores: int
    """Of each socket."""
    threads: int
    """Of each core."""


class Devices(NamedTuple):
    """What is neither a disk nor a NIC."""

    arch: str = ""
    """``x86_64`` or ``aarch64``; empty where the job leaves it to the machine."""
    firmware: str = ""
    """One of `FIRMWARES`; empty for the architecture's usual one: bios on x86_64, uefi on aarch64."""
    topology: Topology | None = None
    tpm: bool = False
    share: str = ""
    """The full path of the directory of the job's that the guest can mount, or empty."""
    exit_port: bool = False
    """Whether the guest has a port to which it can write its exit code."""
    user_data: "Seed | None" = None
    """What its cloud-init is told; the drive with it is one of the job's disks."""


def devices(options: Options, settings: Settings, vcpus: int, working_dir: str, own: OwnXml = NOTHING) -> Devices:
    """Read and check. Raises `JobFault`, and `MachineFault` for a setting that is wrong."""
    arch = _arch(options) or own.arch
    return Devices(
        arch=arch,
        firmware=_firmware(options, arch, own.firmware),
        topology=_topology(options, vcpus),
        tpm=options.boolean(TPM) or own.tpm,
        share=_share(options, settings, working_dir),
        exit_port=options.boolean(EXIT_PORT),
    )


def require_saveable(found: Devices, options: Options) -> None:
    """Make sure that no device makes the checkpoint useless that the job asks for too. Raises `JobFault`."""
    if found.share:
        raise options.refused(
            SHARE,
            "JobVMCheckpoint = true contradicts it, for a VM that shares a directory cannot be saved",
            "set vm_checkpoint = false, or hand the files over on a disk.",
        )


def _arch(options: Options) -> str:
    wanted = options.string(ARCH).lower()
    if wanted and wanted not in ARCHES:
        raise options.refused(ARCH, "it is not an architecture of guests here", f"write {X86} or {ARM}.")
    return ARCHES.get(wanted, "")


def _firmware(options: Options, arch: str, own: str) -> str:
    wanted = options.string(FIRMWARE).lower() or own
    if wanted and wanted not in FIRMWARES:
        raise options.refused(FIRMWARE, "there is no such firmware", f"write one of {', '.join(FIRMWARES)}.")
    if arch == ARM and wanted in (BIOS, UEFI_SECURE):
        raise options.refused(
            FIRMWARE,
            f"{options.shown(ARCH)} contradicts it, whose firmware is uefi",
            f"remove {options.attribute(FIRMWARE)}.",
        )
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


def _share(options: Options, settings: Settings, working_dir: str) -> str:
    """The directory to share: true means all of the scratch directory, a name a directory in it."""
    name = options.string(SHARE) if options.is_text(SHARE) else ""
    if not name and not options.boolean(SHARE):
        return ""
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
            "set it to 9p; virtiofs is not served, for its daemon works as root on the job's files.",
        )
    if how == "none":
        raise options.refused(
            SHARE,
            "this machine shares no directory with VMs (VM_SHARE_SCRATCH)",
            "require a machine that does (VM_kvm_ATTR_share), or hand the files over on a disk.",
        )
    return os.path.join(working_dir, name) if name else working_dir
