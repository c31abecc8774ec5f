"""libvirt's statistics of a domain's resource usage, by one query (virConnectGetAllDomainStats).

The query runs concurrently with other operations on the domain, and so with
``VIR_CONNECT_GET_ALL_DOMAINS_STATS_NOWAIT``: while libvirt saves a domain it reports what it knows without asking
QEMU, instead of waiting for the save. libvirt's documentation of that function has the names and the meaning of the
fields. For a driver of libvirt's that does not support it, such as Xen's, several queries are used.
"""

from time import time
from xml.etree import ElementTree as etree

import libvirt

from vmgahp import lifecycle
from vmgahp.drivers.libvirt import faults
from vmgahp.drivers.libvirt.connection import LibvirtConnection
from vmgahp.metrics import Metrics

Figures = dict[str, dict[str, int]]

STATES = {libvirt.VIR_DOMAIN_PAUSED: lifecycle.SOFT_SUSPENDED, libvirt.VIR_DOMAIN_PMSUSPENDED: lifecycle.SOFT_SUSPENDED}
"""The state of ours for libvirt's; every other state of a domain that uses resources is RUNNING."""

CPU_TIME = "cpu.time"

OVER = (libvirt.VIR_DOMAIN_SHUTOFF, libvirt.VIR_DOMAIN_CRASHED)

WANTED = (
    libvirt.VIR_DOMAIN_STATS_STATE
    | libvirt.VIR_DOMAIN_STATS_CPU_TOTAL
    | libvirt.VIR_DOMAIN_STATS_BALLOON
    | libvirt.VIR_DOMAIN_STATS_VCPU
    | libvirt.VIR_DOMAIN_STATS_INTERFACE
    | libvirt.VIR_DOMAIN_STATS_BLOCK
)

_BLOCK = {
    "rd.bytes": "read_bytes",
    "rd.reqs": "read_requests",
    "wr.bytes": "write_bytes",
    "wr.reqs": "write_requests",
    "errors": "errors",
    "allocation": "allocation",
    "capacity": "capacity",
}
_NETWORK = {
    f"{way}.{theirs}": f"{way}_{ours}"
    for way in ("rx", "tx")
    for theirs, ours in (("bytes", "bytes"), ("pkts", "packets"), ("errs", "errors"), ("drop", "drops"))
}
"""The names in vm_metrics.jsonl for libvirt's names."""

_BLOCK_STATS = ("read_requests", "read_bytes", "write_requests", "write_bytes", "errors")
_INTERFACE_STATS = tuple(f"{way}_{what}" for way in ("rx", "tx") for what in ("bytes", "packets", "errors", "drops"))
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
        self._known: set[tuple[str, ...]] = set()
        """The counters that libvirt has reported in this run."""

    def read(self) -> Metrics | None:
        """Return the domain's usage since it began; None if there is no such domain now. Raises `errors.Fault`."""
        try:
            return self._connection.call(self._read)
        except libvirt.libvirtError as error:
            if faults.is_no_domain(error):
                return None
            raise faults.from_libvirt(error, f"asking what {self._name} uses") from error

    def _read(self, connection: libvirt.virConnect) -> Metrics | None:
        domain = faults.find(connection, self._name, self._uuid)
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
        if CPU_TIME not in answers[0][1]:
            return self._piece_by_piece(domain)  # the driver does not support the query, or hardly
        found = from_stats(answers[0][1], str(self._run), self._cards)
        if found is None:
            return None
        figures = {key for key, _ in found.counters()}
        if not figures >= self._known:
            return None  # libvirt is busy with the domain, and has reported what it can without QEMU
        self._known = figures
        return found

    def _piece_by_piece(self, domain: libvirt.virDomain) -> Metrics | None:
        state, max_memory, memory, vcpus, nanoseconds = domain.info()
        seconds = cpu_seconds(nanoseconds)
        if state in OVER or seconds is None:
            return None
        block: Figures = {}
        network: Figures = {}
        for found, names, ask, order in (
            (block, {disk: disk for disk in self._disks}, domain.blockStats, _BLOCK_STATS),
            (network, self._cards, domain.interfaceStats, _INTERFACE_STATS),
        ):
            for theirs, ours in names.items():
                try:
                    answer = ask(theirs)
                except libvirt.libvirtError:
                    continue  # an empty drive, or a kind of interface without counters
                found[ours] = {what: value for what, value in zip(order, answer, strict=False) if value >= 0}
        return Metrics(
            STATES.get(state, lifecycle.RUNNING),
            time(),
            cpu_seconds=seconds,
            vcpus=vcpus,
            memory_kib=memory,
            max_memory_kib=max_memory,
            block=block,
            network=network,
            run=str(self._run),
        )


def cpu_seconds(nanoseconds: int) -> float | None:
    """Return the CPU time that libvirt has read, in seconds; None for 0, which is no reading.

    It reports 0 for a QEMU that has ended: for a domain in the state SHUTDOWN, and until it notices that one was
    killed.
    """
    return nanoseconds / 1e9 if nanoseconds else None


def from_stats(stats: dict[str, object], run: str, interfaces: dict[str, str]) -> Metrics | None:
    """Return the reading in libvirt's answer; `interfaces` are the MAC addresses of the host's network devices."""
    state = _number(stats, "state.state")
    seconds = cpu_seconds(_number(stats, CPU_TIME))
    if state in OVER or seconds is None:
        return None
    network = {}
    for interface, figures in _devices(stats, "net", _NETWORK):
        network[interfaces.get(interface, interface)] = figures
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
        block=dict(_devices(stats, "block", _BLOCK)),
        network=network,
        run=run,
    )


def devices(xml: str) -> tuple[list[str], dict[str, str]]:
    """Return the disks of a live domain, and the MAC address of each of its network devices on the host."""
    domain = etree.fromstring(xml)
    disks = [target.get("dev", "") for target in domain.iterfind("devices/disk/target")]
    interfaces = {}
    for card in domain.iterfind("devices/interface"):
        target, mac = card.find("target"), card.find("mac")
        if target is not None and mac is not None and target.get("dev"):
            interfaces[target.get("dev", "")] = mac.get("address", "").lower()
    return disks[:MOST_DEVICES], interfaces


def _devices(stats: dict[str, object], kind: str, names: dict[str, str]) -> list[tuple[str, dict[str, int]]]:
    found = []
    for number in range(min(_number(stats, f"{kind}.count"), MOST_DEVICES)):
        start = f"{kind}.{number}."
        name = stats.get(start + "name")
        if not isinstance(name, str):
            continue  # an interface that has no device on the host
        figures = {ours: _number(stats, start + theirs) for theirs, ours in names.items() if start + theirs in stats}
        if figures:
            found.append((name, figures))
    return found


def _number(stats: dict[str, object], name: str) -> int:
    value = stats.get(name)
    return value if isinstance(value, int) else 0
