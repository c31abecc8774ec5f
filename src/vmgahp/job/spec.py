"""A job's request for a VM of libvirt, checked against the settings, without access to files.

A refusal is a `JobFault`, which holds the job and leaves the machine in service. It names the attribute,
its value and a hint, since its reader sees nothing else. Disks, NICs and the rarer devices are parsed in
`disks`, `nics` and `devices`; here they become one `JobSpec`, whose files `look` finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.errors import JobFault
from vmgahp.job import cloud_init, data_disks, run, saving
from vmgahp.job.ad import JobAd
from vmgahp.job.attributes import LIBVIRT_XML
from vmgahp.job.devices import Devices, Topology, devices
from vmgahp.job.disks import DISK, Disk, DiskRequest, made_drive, requests
from vmgahp.job.nics import Nic, nics
from vmgahp.job.options import (
    DATA_DISK,
    DATA_FILES,
    DISK_SIZE,
    EXIT_PORT,
    META_DATA,
    NETWORK_CONFIG,
    RUN,
    SHARE_DIRS,
    SSH,
    USER_DATA,
    Options,
)
from vmgahp.job.vm_spec import VmSpec, with_nics
from vmgahp.job.xen import XenBoot

__all__ = ["Devices", "Disk", "JobSpec", "Nic", "Topology"]


@dataclass(frozen=True, kw_only=True)
class JobSpec(VmSpec):
    """A virtual machine of libvirt."""

    disks: tuple[Disk, ...]
    """The disks found for the requests; empty before `vmgahp.job.look` finds them."""
    vnc: bool
    hardware_vt: bool
    devices: Devices = field(default_factory=Devices)
    ignored: tuple[str, ...] = ()
    """The unknown attributes about devices, of a job that ignores them."""
    xen: XenBoot | None = None
    """The way in which a Xen job boots; None for other jobs."""
    requests: tuple[DiskRequest, ...] = ()
    """The job's requests for disks."""

    @property
    def macs(self) -> tuple[str, ...]:
        """Return the MAC addresses that the job has chosen."""
        return tuple(nic.mac for nic in self.nics if nic.mac)

    @classmethod
    def parse(
        cls, ad: JobAd, settings: Settings, *, diskless: bool = False, networks: Sequence[str] | None = None
    ) -> JobSpec:
        """Read and check the job ad. A job that may be `diskless` need not name a disk.

        `networks` are the kinds of network on offer, if they are not those of the settings.

        Raises `JobFault` for a mistake of the job's owner, `ClientFault` for an attribute that the starter should have
        sent, `MachineFault` for missing or invalid settings.
        """
        options = Options(ad, others_know=bool(settings.xml_script()))
        common = with_nics(ad, settings, nics(ad, settings, options, networks))
        made = cls(
            **vars(common),
            disks=(),
            requests=_requests(ad, options, diskless=diskless, any_word=bool(settings.xml_script())),
            vnc=bool(ad.boolean("JobVMVNCConsole")),
            hardware_vt=_hardware_vt(ad, settings),
            devices=devices(options, settings, common.vcpus, common.working_dir),
            ignored=options.ignored,
        )
        if made.devices.ssh and not made.nics:
            raise options.refused(SSH, "the VM has no network by which it is reached", "set vm_networking = true.")
        made = _with_run(made, ad, settings, options)
        made = _with_seed(made, ad, options)
        if made.checkpoint:
            judged = made.requests if saving.by_qemu(made.vm_type, settings) else ()
            saving.require(made.devices, judged, options)
        _require_our_description(settings, options)
        return made


def _with_run(made: JobSpec, ad: JobAd, settings: Settings, options: Options) -> JobSpec:
    """Add the program that the guest runs, if the job has options about one."""
    if not options.about(RUN):
        return made

    if not options.has(RUN):
        run.require_run(options)
    if ad.value(LIBVIRT_XML) is not None:
        raise options.refused(
            RUN,
            "the job brings XML of its own, and only into our own description the program's ports are put",
            f"leave {LIBVIRT_XML} out, or the program.",
        )
    wanted = run.wanted(options, ad, settings)
    return made._replace(devices=made.devices._replace(run=wanted), requests=(*made.requests, run.drive(made.requests)))


def _with_seed(made: JobSpec, ad: JobAd, options: Options) -> JobSpec:
    """Add the files for cloud-init, if the job has options about them."""
    begins = made.devices.run is not None and made.devices.run.by_cloud_init
    if not begins and not any(options.has(option) for option in (USER_DATA, META_DATA, NETWORK_CONFIG)):
        return made

    seed = cloud_init.wanted(options, ad, begins)
    if seed is None:
        return made
    requests = (*made.requests, made_drive(made.requests, cloud_init.SEED_FILE, f"VMPARAM_vm_{USER_DATA}"))
    return made._replace(devices=made.devices._replace(user_data=seed), requests=requests)


def _require_our_description(settings: Settings, options: Options) -> None:
    """Refuse options about drives, sockets and ports of this daemon, which a script that describes VMs cannot use."""
    for option in (USER_DATA, RUN, DISK_SIZE, EXIT_PORT, SHARE_DIRS, SSH):
        if settings.xml_script() and options.has(option):
            raise options.refused(
                option,
                "VMs of this machine are described by a script of its administrator's (LIBVIRT_XML_SCRIPT), in whose "
                "description there is none",
                "remove it, or run the job on another machine.",
            )


def _requests(ad: JobAd, options: Options, *, diskless: bool, any_word: bool) -> tuple[DiskRequest, ...]:
    """Return requests for the disks of vm_disk, and for those that are made for the job."""
    found = () if diskless and ad.string(DISK) is None else requests(ad, any_word=any_word)
    if any(options.has(option) for option in (DATA_DISK, DATA_FILES, DISK_SIZE)):
        if found and options.has(DISK_SIZE):
            found = (data_disks.enlarged(options, found[0]), *found[1:])
        found += data_disks.requests(options, found)
    return found


def _hardware_vt(ad: JobAd, settings: Settings) -> bool:
    wanted = bool(ad.boolean("JobVMHardwareVT"))
    if wanted and not settings.boolean("VM_HARDWARE_VT"):
        raise JobFault(
            errors.MISMATCHED,
            "JobVMHardwareVT = true, and this machine offers no hardware virtualization (VM_HARDWARE_VT).",
            "add VM_HardwareVT to the job's requirements.",
        )
    return wanted
