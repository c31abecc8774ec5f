"""What a job asks of a VM that a script manages, as far as this daemon can judge it."""

from typing import NamedTuple

from vmgahp.config import Settings
from vmgahp.job import data_disks, nics
from vmgahp.job import spec as job
from vmgahp.job.ad import JobAd


class ScriptSpec(NamedTuple):
    """The part of a job that is the same for every hypervisor; the script reads the rest in the ad."""

    name: str
    directory: str
    memory_mib: int
    vcpus: int
    networking: str
    """The kind of network; empty for none."""
    mac: str
    checkpoint: bool
    no_output_vm: bool

    @property
    def vm_type(self) -> str:
        return "script"

    @classmethod
    def from_ad(cls, ad: JobAd, settings: Settings) -> "ScriptSpec":
        """Raises `JobFault`, `ClientFault` and `MachineFault` as all drivers do for these attributes."""
        data_disks.refuse(ad)
        networking = nics.networking_type(ad, settings)
        return cls(
            name=ad.vm_name(),
            directory=ad.working_dir(),
            memory_mib=job.memory_mib(ad, settings),
            vcpus=job.vcpus(ad),
            networking=networking,
            mac=nics.mac(ad) if networking else "",
            checkpoint=bool(ad.boolean("JobVMCheckpoint")),
            no_output_vm=bool(ad.boolean("VMPARAM_No_Output_VM")),
        )
