"""The resource limits of a VM, set on the domain that libvirt has made and that does not run yet.

So they apply to a start, a restart and a resume alike, and a limit that libvirtd or the kernel of this machine does
not support is logged and no fault. Limits in administrator-supplied XML are left unchanged.
"""

from collections.abc import Callable, Iterator, Sequence
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

Setter = Callable[[libvirt.virDomain], object]
Limit = tuple[str, Setter]
"""A limit: a short description, and the function that sets it."""


class Limits(NamedTuple):
    """The limits to set; plain data, as another process may resume the VM."""

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
            yield f"memory limit of {limit} MiB", _memory(limit)
        disks = [disk for disk in domain.iterfind("devices/disk") if disk.find("source") is not None]
        if self.disks and disks and DISKS not in self.said:
            yield f"disk bandwidth of {self.disks >> 10} KiB/s", _throttle(self.disks, disks)
        macs = [mac.get("address", "") for mac in domain.iterfind("devices/interface/mac")]
        if self.networks and macs and NETWORKS not in self.said:
            yield f"network bandwidth of {self.networks >> 10} KiB/s", _narrow(max(self.networks >> 10, 1), macs)

    def _of_cpus(self, domain: etree.Element, pid: int) -> Iterator[Limit]:
        version = cgroups.version("cpu", pid or "self") or 2
        if self.cpus and self.cpus > 0:
            weight = min(self.cpus * WEIGHT[version], LARGEST_WEIGHT[version])
            yield f"CPU weight of {weight}", _scheduler(cpu_shares=weight)
        if self.quota and self.cpus and self.cpus > 0:
            quota = min(PERIOD * self.cpus, LARGEST_QUOTA)
            yield f"CPU quota of {self.cpus}", _scheduler(global_period=PERIOD, global_quota=quota)
        if self.cores:
            vcpus = int(domain.findtext("vcpu") or 1)
            yield f"place on the cores {', '.join(map(str, self.cores))}", _pin(self.cores, vcpus)


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
    for what, limit in limits.of(etree.fromstring(live), pid):
        try:
            limit(domain)
            done.append(what)
        except libvirt.libvirtError as error:
            if faults.is_connection_loss(error):
                raise
            refused.append(f"no {what} ({error})")
    if done or refused:
        log(f"{domain.name()} has {'; '.join([*done, *refused])}")


def _scheduler(**figures: int) -> Setter:
    return lambda domain: domain.setSchedulerParametersFlags(dict(figures), libvirt.VIR_DOMAIN_AFFECT_LIVE)


def _memory(mib: int) -> Setter:
    return lambda domain: domain.setMemoryParameters({"hard_limit": mib << 10}, libvirt.VIR_DOMAIN_AFFECT_LIVE)


def _throttle(most: int, disks: Sequence[etree.Element]) -> Setter:
    names = [target.get("dev", "") for disk in disks if (target := disk.find("target")) is not None]

    def throttle(domain: libvirt.virDomain) -> None:
        for name in names:
            domain.setBlockIoTune(name, {"total_bytes_sec": most, "group_name": GROUP}, libvirt.VIR_DOMAIN_AFFECT_LIVE)

    return throttle


def _narrow(kib: int, macs: Sequence[str]) -> Setter:
    figures = {"inbound.average": kib, "outbound.average": kib}

    def narrow(domain: libvirt.virDomain) -> None:
        for mac in macs:
            domain.setInterfaceParameters(mac, figures, libvirt.VIR_DOMAIN_AFFECT_LIVE)

    return narrow


def _pin(cores: tuple[int, ...], vcpus: int) -> Setter:
    places = tuple(core in cores for core in range(max(cores) + 1))

    def pin(domain: libvirt.virDomain) -> None:
        domain.pinEmulator(places, libvirt.VIR_DOMAIN_AFFECT_LIVE)
        for vcpu in range(vcpus):
            domain.pinVcpuFlags(vcpu, places, libvirt.VIR_DOMAIN_AFFECT_LIVE)

    return pin
