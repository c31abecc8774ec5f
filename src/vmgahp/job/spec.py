"""What a job asks of its virtual machine, checked against the settings; no file is looked at.

A refusal is a `JobFault`, which holds the job and leaves the machine in service, and names the attribute,
its value and the hint: the person who reads it sees nothing else. Disks, NICs and the rarer devices
are read in `disks`, `nics` and `devices`; here they become one `JobSpec`, whose files `look` finds.
"""

from collections.abc import Sequence
from typing import NamedTuple

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.errors import JobFault, MachineFault
from vmgahp.images.backing import BackingFile
from vmgahp.job.ad import JobAd
from vmgahp.job.devices import Devices, Topology, devices, require_saveable
from vmgahp.job.disks import DISK, Disk, DiskRequest, requests
from vmgahp.job.nics import Nic, mac, networking_type, nics
from vmgahp.job.options import DATA_DISK, DATA_FILES, EXIT_PORT, META_DATA, NETWORK_CONFIG, USER_DATA, Options
from vmgahp.text import shown

TYPE_CHECKING = False  # what follows is loaded for the jobs that need it
if TYPE_CHECKING:
    from vmgahp.job.xen import XenBoot

__all__ = ["Devices", "Disk", "JobAd", "JobSpec", "Nic", "Topology", "mac", "networking_type"]

LEAST_MEMORY_MIB = 32
"""A smaller VM gets this much, as from the C++ daemon (``KVMType::CreateConfigFile``)."""
MOST_VCPUS = 255
"""What QEMU's pc machine can have; more would fail in the hypervisor, which is blamed on the machine."""


class JobSpec(NamedTuple):
    """A virtual machine as the job wants it and this machine grants it."""

    name: str
    """The VM's name with the hypervisor, `JobAd.vm_name`."""
    vm_type: str
    working_dir: str
    memory_mib: int
    vcpus: int
    disks: tuple[Disk, ...]
    """What the requests were found to be; none before they were looked for (`vmgahp.job.look`)."""
    nics: tuple[Nic, ...]
    vnc: bool
    checkpoint: bool
    no_output_vm: bool
    hardware_vt: bool
    devices: Devices = Devices()
    ignored: tuple[str, ...] = ()
    """Unknown attributes about devices, of a job that ignores them."""
    xen: "XenBoot | None" = None
    """How it boots, where it is a job for Xen."""
    requests: tuple[DiskRequest, ...] = ()
    """The disks as the job asks for them."""

    @property
    def networking(self) -> bool:
        """Whether the VM has a network."""
        return bool(self.nics)

    @property
    def networking_type(self) -> str:
        """The kind of network of the first NIC; empty for a VM without a network."""
        return self.nics[0].networking_type if self.nics else ""

    @property
    def macs(self) -> tuple[str, ...]:
        """The MAC addresses that the job has chosen."""
        return tuple(nic.mac for nic in self.nics if nic.mac)

    @property
    def chains(self) -> dict[str, tuple[BackingFile, ...]]:
        """The backing files of each disk, by its path."""
        return {disk.path: disk.backing for disk in self.disks}

    @classmethod
    def parse(
        cls, ad: JobAd, settings: Settings, *, diskless: bool = False, networks: Sequence[str] | None = None
    ) -> "JobSpec":
        """Read and check what the job says. A job that may be `diskless` need not name a disk.

        `networks` are the kinds of network on offer, where those are not just what the settings say.

        Raises `JobFault` for what the job's owner must change, `ClientFault` for what the starter should have
        sent, `MachineFault` for settings that are missing or wrong.
        """
        options = Options(ad, others_know=bool(settings.xml_script()))
        number = vcpus(ad)
        memory = memory_mib(ad, settings)
        made = cls(
            name=ad.vm_name(),
            vm_type=ad.vm_type(),
            working_dir=ad.working_dir(),
            memory_mib=memory,
            vcpus=number,
            disks=(),
            requests=_requests(ad, options, diskless=diskless),
            nics=nics(ad, settings, options, networks),
            vnc=bool(ad.boolean("JobVMVNCConsole")),
            checkpoint=bool(ad.boolean("JobVMCheckpoint")),
            no_output_vm=bool(ad.boolean("VMPARAM_No_Output_VM")),
            hardware_vt=_hardware_vt(ad, settings),
            devices=devices(options, settings, number, ad.working_dir()),
            ignored=options.ignored,
        )
        made = _with_seed(made, ad, options)
        if made.checkpoint:
            require_saveable(made.devices, options)
        _require_our_description(settings, options)
        return made


def _with_seed(made: JobSpec, ad: JobAd, options: Options) -> JobSpec:
    """The same with what cloud-init is told, if the job says anything about that."""
    if not any(options.has(option) for option in (USER_DATA, META_DATA, NETWORK_CONFIG)):
        return made
    from vmgahp.job import cloud_init

    seed = cloud_init.wanted(options, ad)
    if seed is None:
        return made
    requests = (*made.requests, cloud_init.drive(made.requests))
    return made._replace(devices=made.devices._replace(user_data=seed), requests=requests)


def _require_our_description(settings: Settings, options: Options) -> None:
    """A script that describes VMs knows nothing of drives and sockets that this daemon makes for one start."""
    for option in (USER_DATA, EXIT_PORT):
        if settings.xml_script() and options.has(option):
            raise options.refused(
                option,
                "VMs of this machine are described by a script of its administrator's (LIBVIRT_XML_SCRIPT), in whose "
                "description there is none",
                "remove it, or run the job on another machine.",
            )


def _requests(ad: JobAd, options: Options, *, diskless: bool) -> tuple[DiskRequest, ...]:
    """The disks of vm_disk, then those that are made for the job."""
    found = () if diskless and ad.string(DISK) is None else requests(ad)
    if options.has(DATA_DISK) or options.has(DATA_FILES):
        from vmgahp.job import data_disks

        found += data_disks.requests(options, found)
    return found


def memory_mib(ad: JobAd, settings: Settings) -> int:
    """JobVMMemory, else RequestMemory, MiB.

    Too much is answered with the word for a missing value: the one that says "too much" takes the machine
    out of service.
    """
    limit = settings.integer("VM_MEMORY")
    if limit <= 0:
        raise MachineFault(
            "VM_MEMORY is not set: it says how much memory VMs may have on this machine.",
            "set VM_MEMORY to the memory in MiB that is for VMs.",
        )
    name = "JobVMMemory"
    memory = ad.integer(name)
    if memory is None:
        name = "RequestMemory"
        memory = ad.integer(name)
    if memory is None:
        raise JobFault(
            errors.NO_MEMORY_PARAM,
            f"JobVMMemory = {shown(ad.expression('JobVMMemory'))} and RequestMemory = "
            f"{shown(ad.expression('RequestMemory'))}: neither says how much memory the VM gets.",
            "set vm_memory, in MiB, in the submit file.",
        )
    if not 0 < memory <= limit:
        raise JobFault(
            errors.NO_MEMORY_PARAM,
            f"{name} = {memory} MiB, and a VM on this machine may have from 1 to {limit} MiB (VM_MEMORY).",
            "lower vm_memory in the submit file, or require VM_Memory of the machine.",
        )
    return max(memory, LEAST_MEMORY_MIB)


def vcpus(ad: JobAd) -> int:
    """JobVM_VCPUS, else RequestCpus, else 1; less than 1 is 1, as from the C++ daemon."""
    name = "JobVM_VCPUS"
    number = ad.integer(name)
    if number is None:
        name = "RequestCpus"
        number = ad.integer(name)
    if number is not None and number > MOST_VCPUS:
        raise JobFault(
            errors.MISMATCHED,
            f"{name} = {number}, and a VM can have {MOST_VCPUS} CPUs at most.",
            "lower vm_vcpus (or request_cpus) in the submit file.",
        )
    return max(number or 1, 1)


def _hardware_vt(ad: JobAd, settings: Settings) -> bool:
    wanted = bool(ad.boolean("JobVMHardwareVT"))
    if wanted and not settings.boolean("VM_HARDWARE_VT"):
        raise JobFault(
            errors.MISMATCHED,
            "JobVMHardwareVT = true, and this machine offers no hardware virtualization (VM_HARDWARE_VT).",
            "add VM_HardwareVT to the job's requirements.",
        )
    return wanted
