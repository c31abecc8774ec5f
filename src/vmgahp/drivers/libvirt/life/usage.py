"""A VM's use of its machine: statistics, limits, and huge pages.

Statistics are one query (virConnectGetAllDomainStats). It runs concurrently with other operations on the domain, and
so with ``VIR_CONNECT_GET_ALL_DOMAINS_STATS_NOWAIT``: while libvirt saves a domain it reports what it knows without
asking QEMU. libvirt's documentation of that function has the names and the meaning of the fields. For a driver of
libvirt's that does not support it, such as Xen's, several queries are used.

Limits are set on the domain that libvirt has made and that does not run yet. So they apply to a start, a restart and a
resume alike, and a limit that libvirtd or the kernel of this machine does not support is logged; as an element of the
XML it would fail the start. Limits in administrator-supplied XML are left unchanged.

Huge pages are used if the administrator has reserved some (VM_HUGEPAGES) and enough are free: no VM waits for them.
"""

from collections.abc import Iterator
from contextlib import suppress
from time import time
from typing import NamedTuple
from xml.etree import ElementTree as etree

import libvirt

from vmgahp import lifecycle
from vmgahp.config import Settings
from vmgahp.domain import build, model
from vmgahp.drivers.libvirt.link import domains, faults
from vmgahp.drivers.libvirt.link.connection import SESSION_URI, LibvirtConnection
from vmgahp.drivers.surveyor import Logger
from vmgahp.host import proc
from vmgahp.job.spec import JobSpec
from vmgahp.metrics import Metrics

STATES = {libvirt.VIR_DOMAIN_PAUSED: lifecycle.SOFT_SUSPENDED, libvirt.VIR_DOMAIN_PMSUSPENDED: lifecycle.SOFT_SUSPENDED}
"""The state of ours for libvirt's; every other state of a domain that uses resources is RUNNING."""
CPU_TIME = "cpu.time"
OVER = (libvirt.VIR_DOMAIN_SHUTOFF, libvirt.VIR_DOMAIN_CRASHED)

_KINDS = ("STATE", "CPU_TOTAL", "BALLOON", "VCPU", "INTERFACE", "BLOCK")
WANTED = sum(getattr(libvirt, f"VIR_DOMAIN_STATS_{kind}") for kind in _KINDS)
"""The kinds of statistics, which are bits."""
_BLOCK = {"rd.bytes": "read_bytes", "wr.bytes": "write_bytes", "rd.reqs": "read_requests", "wr.reqs": "write_requests"}
_BLOCK |= {name: name for name in ("errors", "allocation", "capacity")}
_COUNTS = (("bytes", "bytes"), ("pkts", "packets"), ("errs", "errors"), ("drop", "drops"))
_NETWORK = {f"{way}.{theirs}": f"{way}_{ours}" for way in ("rx", "tx") for theirs, ours in _COUNTS}
"""The names in vm_metrics.jsonl for libvirt's names."""
_BLOCK_STATS = ("rd.reqs", "rd.bytes", "wr.reqs", "wr.bytes", "errors")
_INTERFACE_STATS = tuple(_NETWORK)
"""The order of the values of virDomainBlockStats and virDomainInterfaceStats; -1 stands for unknown."""
MOST_DEVICES = 64
"""The most disks, interfaces and vCPUs that are kept of one domain."""


class Meter:
    """The meter of one domain, for all its runs."""

    def __init__(self, connection: LibvirtConnection, name: str, uuid: str) -> None:
        self._connection = connection
        self._name = name
        self._uuid = uuid
        self._run = -1
        self._disks: list[str] = []
        self._cards: dict[str, str] = {}
        self._known: set[tuple[str, ...]] = set()  # the counters that libvirt has reported in this run

    def read(self) -> Metrics | None:
        """Return the domain's usage since it began; None if there is no such domain now. Raises `errors.Fault`."""
        try:
            return self._connection.call(self._read)
        except libvirt.libvirtError as error:
            if faults.is_no_domain(error):
                return None
            raise faults.from_libvirt(error, f"asking what {self._name} uses") from error

    def _read(self, connection: libvirt.virConnect) -> Metrics | None:
        domain = domains.find(connection, self._name, self._uuid)
        if domain.ID() != self._run:
            self._disks, self._cards = devices(domain.XMLDesc())
            self._known = set()
            self._run = domain.ID()
        try:
            nowait = libvirt.VIR_CONNECT_GET_ALL_DOMAINS_STATS_NOWAIT
            answers = connection.domainListGetStats([domain], WANTED, nowait)
        except libvirt.libvirtError as error:
            if not faults.is_unsupported(error):
                raise
            answers = [(domain, {})]
        if not answers:
            return None
        if CPU_TIME not in answers[0][1]:  # the driver does not support the query, or hardly
            return from_stats(self._one_by_one(domain), str(self._run), self._cards)
        found = from_stats(answers[0][1], str(self._run), self._cards)
        if found is None:
            return None
        figures = {key for key, _ in found.counters()}
        if not figures >= self._known:
            return None  # libvirt is busy with the domain, and has reported what it can without QEMU
        self._known = figures
        return found

    def _one_by_one(self, domain: libvirt.virDomain) -> dict[str, object]:
        """Return statistics under the names of the query, asked for one by one."""
        state, most, memory, vcpus, nanoseconds = domain.info()
        stats: dict[str, object] = {"state.state": state, CPU_TIME: nanoseconds, "vcpu.current": vcpus}
        stats |= {"balloon.current": memory, "balloon.maximum": most}
        for kind, names, ask, order in (
            ("block", self._disks, domain.blockStats, _BLOCK_STATS),
            ("net", list(self._cards), domain.interfaceStats, _INTERFACE_STATS),
        ):
            stats[f"{kind}.count"] = len(names)
            for number, name in enumerate(names):
                with suppress(libvirt.libvirtError):  # an empty drive, or a kind of interface without counters
                    answer = zip(order, ask(name), strict=False)
                    stats |= {f"{kind}.{number}.{what}": value for what, value in answer if value >= 0}
                    stats[f"{kind}.{number}.name"] = name
        return stats


def cpu_seconds(nanoseconds: int) -> float | None:
    """Return the CPU time in seconds; None for 0, which libvirt reports for a QEMU that has ended."""
    return nanoseconds / 1e9 if nanoseconds else None


def from_stats(stats: dict[str, object], run: str, interfaces: dict[str, str]) -> Metrics | None:
    """Return the reading in libvirt's answer; `interfaces` are the MAC addresses of the host's network devices."""
    state = _number(stats, "state.state")
    seconds = cpu_seconds(_number(stats, CPU_TIME))
    if state in OVER or seconds is None:
        return None
    return Metrics(
        STATES.get(state, lifecycle.RUNNING),
        time(),
        cpu_seconds=seconds,
        vcpus=_number(stats, "vcpu.current") or 1,
        vcpu_seconds={
            str(number): _number(stats, f"vcpu.{number}.time") / 1e9
            for number in range(min(_number(stats, "vcpu.maximum"), MOST_DEVICES))
            if f"vcpu.{number}.time" in stats
        },
        memory_kib=_number(stats, "balloon.current"),
        max_memory_kib=_number(stats, "balloon.maximum"),
        rss_kib=_number(stats, "balloon.rss"),
        block=dict(_numbered(stats, "block", _BLOCK)),
        network={interfaces.get(name, name): figures for name, figures in _numbered(stats, "net", _NETWORK)},
        run=run,
    )


def devices(xml: str) -> tuple[list[str], dict[str, str]]:
    """Return the disks of a live domain, and the MAC address of each of its network devices on the host."""
    domain = etree.fromstring(xml)
    disks = [target.get("dev", "") for target in domain.iterfind("devices/disk/target")]
    interfaces = {}
    for card in domain.iterfind("devices/interface[mac]"):
        if name := model.value(card, "target", "dev"):
            interfaces[name] = model.value(card, "mac", "address").lower()
    return disks[:MOST_DEVICES], interfaces


def _numbered(stats: dict[str, object], kind: str, names: dict[str, str]) -> Iterator[tuple[str, dict[str, int]]]:
    for number in range(min(_number(stats, f"{kind}.count"), MOST_DEVICES)):
        start = f"{kind}.{number}."
        name = stats.get(start + "name")
        if not isinstance(name, str):
            continue  # an interface that has no device on the host
        figures = {ours: _number(stats, start + theirs) for theirs, ours in names.items() if start + theirs in stats}
        if figures:
            yield name, figures


def _number(stats: dict[str, object], name: str) -> int:
    value = stats.get(name)
    return value if isinstance(value, int) else 0


# Limits


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
"""A limit: a short description, and the calls that set it: methods of virDomain with all arguments but flags."""


class Limits(NamedTuple):
    """The limits to set."""

    cpus: int | None = None  # the CPUs of the job's slot; None if unknown
    cores: tuple[int, ...] = ()  # the cores that the VM is pinned to; empty for any
    quota: bool = False  # True if the VM's CPU time is limited to its slot's CPUs, even if others are idle
    memory: bool = False  # True if QEMU's memory is limited
    said: tuple[str, ...] = ()  # the limits in the description, which are the administrator's and left unchanged
    disks: int = 0  # bytes per second that all disks together may read and write; 0 for any
    networks: int = 0  # bytes per second that each NIC may receive, and the same that it may send; 0 for any

    def __bool__(self) -> bool:
        return bool(self.cpus or self.cores or self.memory or self.disks or self.networks)

    def of(self, domain: etree.Element, pid: int) -> Iterator[Limit]:
        """Yield the limits to set for a live domain and its process."""
        if CPUS not in self.said:
            yield from self._of_cpus(domain, pid)
        limit = build.limit_mib(domain) if self.memory and MEMORY not in self.said else 0
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
        version = proc.cgroup_version("cpu", pid or "self") or 2
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


def limits_of(spec: JobSpec, settings: Settings, domain_type: str, uri: str, xml: str) -> Limits:
    """Return the limits of a VM described by `xml`; a user's own libvirtd has no control groups, but pins to cores."""
    if not domains.is_qemu(domain_type):
        return Limits()
    domain = etree.fromstring(xml)
    said = tuple(tag for tag in TAGS if next(domain.iter(tag), None) is not None)
    disks, networks = settings.size("VM_DISK_BANDWIDTH"), settings.size("VM_NETWORK_BANDWIDTH")
    cores = spec.vm.slot.cores if settings.boolean("VM_CPU_AFFINITY") else ()
    if uri == SESSION_URI:
        return Limits(cores=cores, said=said, disks=disks, networks=networks)
    quota, memory = settings.boolean("VM_CPU_QUOTA"), settings.boolean("VM_MEMORY_LIMIT")
    return Limits(spec.vm.slot.cpus, cores, quota, memory, said, disks, networks)


def without_limits(limits: Limits, xml: str) -> str:
    """Return the description of a live domain without the limits set here: a domain that starts with them may fail."""
    if not limits:
        return xml
    domain = etree.fromstring(xml)
    tags = [tag for tag in TAGS if tag not in limits.said]
    parents = (domain, *domain.iterfind("devices/disk"), *domain.iterfind("devices/interface"))
    ours = [(parent, element) for parent in parents for element in parent if element.tag in tags]
    for parent, element in ours:
        parent.remove(element)
    return etree.tostring(domain, encoding="unicode") if ours else xml


def apply_limits(limits: Limits, domain: libvirt.virDomain, live: str, pid: int, log: Logger) -> None:
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


# Huge pages


def with_huge_pages(xml: str) -> str:
    """Return the description with huge pages; unchanged if too few are free, or if it has a setting for them itself."""
    domain = etree.fromstring(xml)
    is_said = domain.find("memoryBacking/hugepages") is not None
    if is_said or not domains.is_qemu(domain.get("type", "")) or not _has_free_pages(domain):
        return xml
    backing = domain.find("memoryBacking")
    if backing is None:
        backing = etree.Element("memoryBacking")
        domain.insert(list(domain).index(domain.find("memory")) + 1, backing)  # type: ignore[arg-type]
    backing.insert(0, etree.Element("hugepages"))
    return etree.tostring(domain, encoding="unicode")


def without_taken_pages(xml: str) -> str:
    """Return the description of a saved VM, without huge pages if others have taken them meanwhile."""
    domain = etree.fromstring(xml)
    backing = domain.find("memoryBacking[hugepages]")
    if backing is None or _has_free_pages(domain):
        return xml
    backing.remove(backing.find("hugepages"))  # type: ignore[arg-type]
    return etree.tostring(domain, encoding="unicode")


def _has_free_pages(domain: etree.Element) -> bool:
    """Return True if enough pages are free for the guest's memory, which must be a multiple of a page."""
    free, promised, kib = proc.meminfo("HugePages_Free", "HugePages_Rsvd", "Hugepagesize")
    memory = model.memory(domain.find("memory")) >> 10
    return kib > 0 and memory % kib == 0 and 0 < memory <= (free - promised) * kib
