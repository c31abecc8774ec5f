"""What a VM may use of its machine, set on the domain that libvirt has made and that does not run yet.

Set so it counts at a start, a restart and a resume alike, and what libvirtd or the kernel of this machine does not
honor is a line in the log and no fault. Who writes domain XML for the administrator may say any of it: his word stays.
"""

from collections.abc import Callable, Iterator, Sequence
from xml.etree import ElementTree as etree

from vmgahp.config import Settings
from vmgahp.domain import tuning
from vmgahp.drivers.base import Logger
from vmgahp.drivers.libvirt import binding as libvirt
from vmgahp.drivers.libvirt import faults, qemu_process
from vmgahp.drivers.libvirt.uri import SESSION_URI
from vmgahp.host import cgroups
from vmgahp.host.light import NamedTuple
from vmgahp.job.spec import JobSpec

WEIGHT = {1: 1024, 2: 100}
"""The weight of one CPU: what the kernel gives by itself, and in version 2 what HTCondor gives to a job's."""
LARGEST_WEIGHT = {1: 262144, 2: 10000}
TAGS = CPUS, MEMORY, DISKS, NETWORKS = "cputune", "memtune", "iotune", "bandwidth"
"""The elements of a domain, and of each of its disks, that say as much."""
GROUP = "vmgahp"
"""All disks of a VM share what they have."""
PERIOD = 100_000
"""Microseconds of the quota."""
LARGEST_QUOTA = (1 << 44) - 1
"""What libvirt takes at most (``VIR_CGROUP_CPU_QUOTA_MAX``)."""

Setter = Callable[[libvirt.virDomain], object]
Limit = tuple[str, Setter]
"""What is limited, in a few words, and what sets it."""


class Limits(NamedTuple):
    """What is to be set; plain data, for another process resumes the VM."""

    cpus: int | None = None
    """Of the job's slot; None where nobody says."""
    cores: tuple[int, ...] = ()
    """Those that the VM is kept to; empty for any."""
    quota: bool = False
    """Whether the VM gets no more time than its slot's CPUs have, although others are idle."""
    memory: bool = False
    """Whether QEMU's memory is limited."""
    said: tuple[str, ...] = ()
    """What was in the description: the administrator's, and left as it is."""
    disks: int = 0
    """Bytes that all disks together may read and write in a second; 0 for any."""
    networks: int = 0
    """Bytes that each NIC may receive in a second, and as many that it may send; 0 for any."""

    def __bool__(self) -> bool:
        return bool(self.cpus or self.cores or self.memory or self.disks or self.networks)

    def of(self, domain: etree.Element, pid: int) -> Iterator[Limit]:
        """All that is to be set for a live domain and its process."""
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
    """The limits of a job's VM here, which is described by `xml`.

    A user's own libvirtd has no control groups, and can still place a VM.
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
    """The description of a live domain without what was set here: a domain that begins with it may not start."""
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
    """Set them on a domain that does not run yet. Raises `libvirt.libvirtError` where libvirtd has gone away."""
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
