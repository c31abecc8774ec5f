"""The resource limits of a VM, set on the domain that libvirt has made and that does not run yet.

So they apply to a start, a restart and a resume alike, and a limit that libvirtd or the kernel of this machine does
not support is logged; as an element of the XML it would fail the start. Limits in administrator-supplied XML are left
unchanged.
"""

from collections.abc import Iterator
from typing import NamedTuple
from xml.etree import ElementTree as etree

import libvirt

from vmgahp.config import Settings
from vmgahp.domain import tuning
from vmgahp.drivers.base import Logger
from vmgahp.drivers.libvirt import faults, qemu_process
from vmgahp.drivers.libvirt.uri import SESSION_URI
from vmgahp.host import cgroups
from vmgahp.job.spec import JobSpec

WEIGHT = {1: 1024, 2: 100}
"""The weight of one CPU: the kernel's default, and in version 2 HTCondor's weight for a job."""
LARGEST_WEIGHT = {1: 262144, 2: 10000}
TAGS = CPUS, MEMORY, DISKS, NETWORKS = "cputune", "memtune", "iotune", "bandwidth"
"""The elements of a domain, and of each of its disks, that set such limits."""
GROUP = "vmgahp"
"""The throttling group that all disks of a VM share."""
PERIOD = 100_000
"""The period of the quota in microseconds."""
LARGEST_QUOTA = (1 << 44) - 1
"""The largest quota that libvirt accepts (``VIR_CGROUP_CPU_QUOTA_MAX``)."""

Limit = tuple[str, list[tuple[object, ...]]]
"""A limit: a short description, and the calls that set it, each a method of virDomain and its arguments but the flags.
"""


class Limits(NamedTuple):
    """The limits to set."""

    cpus: int | None = None
    """The CPUs of the job's slot; None if unknown."""
    cores: tuple[int, ...] = ()
    """The cores that the VM is pinned to; empty for any."""
    quota: bool = False
    """True if the VM's CPU time is limited to its slot's CPUs, even if others are idle."""
    memory: bool = False
    """True if QEMU's memory is limited."""
    said: tuple[str, ...] = ()
    """The limits in the description, which are the administrator's and left unchanged."""
    disks: int = 0
    """Bytes per second that all disks together may read and write; 0 for any."""
    networks: int = 0
    """Bytes per second that each NIC may receive, and the same that it may send; 0 for any."""

    def __bool__(self) -> bool:
        return bool(self.cpus or self.cores or self.memory or self.disks or self.networks)

    def of(self, domain: etree.Element, pid: int) -> Iterator[Limit]:
        """Yield the limits to set for a live domain and its process."""
        if CPUS not in self.said:
            yield from self._of_cpus(domain, pid)
        limit = tuning.limit_mib(domain) if self.memory and MEMORY not in self.said else 0
        if limit:
            yield f"memory limit of {limit} MiB", [("setMemoryParameters", {"hard_limit": limit << 10})]
        disks = [disk for disk in domain.iterfind("devices/disk") if disk.find("source") is not None]
        if self.disks and disks and DISKS not in self.said:
            names = [target.get("dev", "") for disk in disks for target in disk.iterfind("target")]
            figures = {"total_bytes_sec": self.disks, "group_name": GROUP}
            yield f"disk bandwidth of {self.disks >> 10} KiB/s", [("setBlockIoTune", name, figures) for name in names]
        macs = [mac.get("address", "") for mac in domain.iterfind("devices/interface/mac")]
        if self.networks and macs and NETWORKS not in self.said:
            kib = max(self.networks >> 10, 1)
            both = {"inbound.average": kib, "outbound.average": kib}
            yield f"network bandwidth of {kib} KiB/s", [("setInterfaceParameters", mac, both) for mac in macs]

    def _of_cpus(self, domain: etree.Element, pid: int) -> Iterator[Limit]:
        version = cgroups.version("cpu", pid or "self") or 2
        if self.cpus and self.cpus > 0:
            weight = min(self.cpus * WEIGHT[version], LARGEST_WEIGHT[version])
            yield f"CPU weight of {weight}", [("setSchedulerParametersFlags", {"cpu_shares": weight})]
        if self.quota and self.cpus and self.cpus > 0:
            figures = {"global_period": PERIOD, "global_quota": min(PERIOD * self.cpus, LARGEST_QUOTA)}
            yield f"CPU quota of {self.cpus}", [("setSchedulerParametersFlags", figures)]
        if self.cores:
            places = tuple(core in self.cores for core in range(max(self.cores) + 1))
            vcpus = [("pinVcpuFlags", vcpu, places) for vcpu in range(int(domain.findtext("vcpu") or 1))]
            yield f"place on the cores {', '.join(map(str, self.cores))}", [("pinEmulator", places), *vcpus]


def wanted(spec: JobSpec, settings: Settings, domain_type: str, uri: str, xml: str) -> Limits:
    """Return the limits of a job's VM here, which is described by `xml`.

    A user's own libvirtd has no control groups, but can pin a VM to cores.
    """
    if not qemu_process.is_qemu(domain_type):
        return Limits()
    domain = etree.fromstring(xml)
    said = tuple(tag for tag in TAGS if next(domain.iter(tag), None) is not None)
    disks, networks = settings.size("VM_DISK_BANDWIDTH"), settings.size("VM_NETWORK_BANDWIDTH")
    cores = spec.slot.cores if settings.boolean("VM_CPU_AFFINITY") else ()
    if uri == SESSION_URI:
        return Limits(cores=cores, said=said, disks=disks, networks=networks)
    quota, memory = settings.boolean("VM_CPU_QUOTA"), settings.boolean("VM_MEMORY_LIMIT")
    return Limits(spec.slot.cpus, cores, quota, memory, said, disks, networks)


def without(limits: Limits, xml: str) -> str:
    """Return the description of a live domain without the limits set here: a domain that starts with them may fail."""
    if not limits:
        return xml
    domain = etree.fromstring(xml)
    ours = [
        (parent, element)
        for parent in (domain, *domain.iterfind("devices/disk"), *domain.iterfind("devices/interface"))
        for element in parent
        if element.tag in TAGS and element.tag not in limits.said
    ]
    for parent, element in ours:
        parent.remove(element)
    return etree.tostring(domain, encoding="unicode") if ours else xml


def apply(limits: Limits, domain: libvirt.virDomain, live: str, pid: int, log: Logger) -> None:
    """Set the limits on a domain that does not run yet. Raises `libvirt.libvirtError` if libvirtd has gone away."""
    if not limits:
        return
    done, refused = [], []
    for what, calls in limits.of(etree.fromstring(live), pid):
        try:
            for method, *arguments in calls:
                getattr(domain, str(method))(*arguments, libvirt.VIR_DOMAIN_AFFECT_LIVE)
            done.append(what)
        except libvirt.libvirtError as error:
            if faults.is_connection_loss(error):
                raise
            refused.append(f"no {what} ({error})")
    if done or refused:
        log(f"{domain.name()} has {'; '.join([*done, *refused])}")
