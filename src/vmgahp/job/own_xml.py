"""The requests of a job's own XML, in the same records as those of a job ad, not checked yet.

`vmgahp.domain.job_xml` reads it. A value of the XML overrides the ad's.
"""

from typing import NamedTuple

from vmgahp.job.ad import Plain
from vmgahp.job.attributes import OPTION_PREFIX as PREFIX
from vmgahp.job.disks import DISK, DiskEntry
from vmgahp.job.nics import Nic
from vmgahp.job.options import ARCH, FIRMWARE, NICS, TPM


class OwnXml(NamedTuple):
    """The part of an XML that other jobs set in their ads; empty values are not set in the XML."""

    memory_mib: int | None = None
    vcpus: int | None = None
    disks: tuple[DiskEntry, ...] = ()
    nics: tuple[Nic, ...] = ()
    vnc: bool = False
    tpm: bool = False
    firmware: str = ""
    arch: str = ""

    def in_words(self) -> dict[str, Plain]:
        """Return the values by the ad's attributes, for the administrator's policy, which sees jobs as ads."""
        texts = {
            DISK: ",".join(entry.text for entry in self.disks),
            PREFIX + NICS: ", ".join(map(str, self.nics)),
            PREFIX + FIRMWARE: self.firmware,
            PREFIX + ARCH: self.arch,
        }
        truths = {"JobVMNetworking": bool(self.nics), "JobVMVNCConsole": self.vnc, PREFIX + TPM: self.tpm}
        numbers = {"JobVMMemory": self.memory_mib, "JobVM_VCPUS": self.vcpus}
        words: dict[str, Plain] = {name: said for name, said in (texts | truths).items() if said}
        return words | {name: number for name, number in numbers.items() if number is not None}


NOTHING = OwnXml()
