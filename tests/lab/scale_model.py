"""Reckons what a pool costs from the unit costs that `scale_measure` has found; the same every time, and in seconds.

A pool has access points (the machines of a condor_schedd), a central manager, a server of shared files and nodes with
VMs. What waits in HTCondor's queue for transfers, and what shares a line with others, is simulated event by event; the
rest are products.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

GIB = 1 << 30
GBIT = 1e9 / 8
"""Bytes a second of a line of 1 Gbit/s."""
PAYLOAD = 0.94
"""What TCP leaves of a line for the files: 1448 bytes in a frame of 1538 on an Ethernet with frames of 1500."""

# HTCondor's defaults (param_info.in, and the manual's pages on these settings).
MAX_JOBS_RUNNING = 10_000
SHADOW_MIB = 1
MAX_CONCURRENT = 100
PER_USER = MAX_CONCURRENT // 5
UPDATE_INTERVAL = 300
COLLECTOR_DESCRIPTORS = 10_240
SOCKETS_A_NODE = 2
"""Those of condor_master and condor_startd, which the collector keeps open."""
VACATE_SECONDS = 600


@dataclass(frozen=True)
class PoolSize:
    """What is assumed of a pool; each stands on the page."""

    nodes: int = 10_000
    vms: int = 4
    """On each node."""
    access_points: int = 4
    access_gbit: float = 10
    node_gbit: float = 1
    shared_gbit: float = 25
    """The line of the server of shared files."""
    image_gib: float = 4
    written_gib: float = 0.5
    """What a guest writes to its disk in its life, which its overlay then has."""
    boot_gib: float = 0.3
    """What a guest reads of its image until it works: see ``read_bytes`` in a job's vm_metrics.jsonl."""
    disk_mib: float = 500
    """What a node's disk writes in a second."""
    memory_gib: float = 2
    """Of a guest, half of it never touched."""
    hours: float = 8
    """How long a job runs."""
    autoclusters: int = 100
    """Kinds of idle jobs that the negotiator tells apart."""

    @property
    def all_vms(self) -> int:
        return self.nodes * self.vms

    @property
    def jobs_a_second(self) -> float:
        return self.all_vms / (self.hours * 3600)


class Transfer(NamedTuple):
    """One transfer that wants a place."""

    begins: float
    size: float


def line(gbit: float) -> float:
    """Bytes of files that a line moves in a second."""
    return gbit * GBIT * PAYLOAD


def shared(transfers: Iterable[Transfer], places: int, whole: float, each: float) -> list[float]:
    """When each transfer is over, where so many at most are under way, which share a line evenly.

    `whole` and `each` are the bytes a second of the line and of one transfer. Others wait, first come, first served.
    What all of them have been given since the beginning grows by one rate, so that each is over when it has grown by
    the transfer's size: one heap, and no transfer is looked at twice.
    """
    coming = deque(sorted((transfer, number) for number, transfer in enumerate(transfers)))
    over = [0.0] * len(coming)
    waiting: deque[tuple[float, int]] = deque()
    active: list[tuple[float, int]] = []
    now = given = 0.0
    while coming or active:
        rate = min(each, whole / len(active)) if active else 0.0
        ends = now + (active[0][0] - given) / rate if active else float("inf")
        if coming and coming[0][0].begins <= ends:
            transfer, number = coming.popleft()
            given += rate * (transfer.begins - now)
            now = transfer.begins
            waiting.append((transfer.size, number))
        else:
            given, number = heapq.heappop(active)
            now = over[number] = ends
        while waiting and len(active) < places:
            size, number = waiting.popleft()
            heapq.heappush(active, (given + size, number))
    return over


def peak(moments: Iterable[float]) -> int:
    """The most of them in one second."""
    return max(Counter(int(moment) for moment in moments).values(), default=0)


def part(values: Sequence[float], share: float) -> float:
    """The value that this share of them does not exceed."""
    found = sorted(values)
    return found[min(len(found) - 1, ceil(share * len(found)) - 1)]


# ---- what is asked of it -----------------------------------------------------------------------------


class Way(NamedTuple):
    """How a job comes by its disk."""

    name: str
    sent: float
    """Bytes from the access point."""
    back: float
    """Bytes to it."""
    read: float
    """Bytes that a node reads from the server of shared files, once for all guests of one image."""


def ways(pool: PoolSize, units: dict[str, Any]) -> list[Way]:
    """The ways of a job's disk; an overlay goes home with what the guest has written."""
    overlay = units["plugin"]["bytes"] + pool.written_gib * GIB
    image, boot = pool.image_gib * GIB, pool.boot_gib * GIB
    return [
        Way("an image that is transferred", image, image, 0),
        Way("the same, `vm_no_output_vm = True`", image, 0, 0),
        Way("an overlay by the plugin, base on the shared file system", 0, overlay, boot),
        Way("an overlay of a catalog image on each node", 0, overlay, 0),
        Way("the same, `vm_no_output_vm = True`", 0, 0, 0),
    ]


class Flow(NamedTuple):
    """What one way costs a pool in which jobs come and go."""

    way: Way
    gbit: float
    """Through all access points together."""
    access_points: int
    """How many of them that fills."""


def flows(pool: PoolSize, units: dict[str, Any]) -> list[Flow]:
    """All ways, with as many jobs as the pool ends in a second. A line carries both directions at once."""
    found = []
    for way in ways(pool, units):
        rate = pool.jobs_a_second * max(way.sent, way.back)
        found.append(Flow(way, rate / GBIT, ceil(rate / line(pool.access_gbit))))
    return found


class Filling(NamedTuple):
    """How long an empty pool takes to fill with jobs whose images are transferred."""

    what: str
    half: float
    last: float


def fillings(pool: PoolSize) -> list[Filling]:
    """All jobs are matched within a minute; those of one access point share its line and its queue."""
    draw = random.Random(1)
    number = ceil(pool.all_vms / pool.access_points)
    image = [Transfer(draw.uniform(0, 60), pool.image_gib * GIB) for _ in range(number)]
    faster = 10 * pool.access_gbit
    found = []
    for what, places, gbit in (
        (f"{MAX_CONCURRENT} at a time (`MAX_CONCURRENT_UPLOADS`)", MAX_CONCURRENT, pool.access_gbit),
        (f"one user, {PER_USER} at a time (`MAX_CONCURRENT_UPLOADS_PER_USER`)", PER_USER, pool.access_gbit),
        ("no limit", number, pool.access_gbit),
        (f"{MAX_CONCURRENT} at a time, a line of {faster:g} Gbit/s", MAX_CONCURRENT, faster),
        (f"one user, {PER_USER} at a time, a line of {faster:g} Gbit/s", PER_USER, faster),
    ):
        over = shared(image, places, line(gbit), line(pool.node_gbit))
        found.append(Filling(what, part(over, 0.5), max(over)))
    return found


class Storm(NamedTuple):
    """Probes of all nodes after a power cut."""

    spread: int
    """Seconds within which the startds start."""
    last: float
    updates: int
    """The most that come to the collector in a second."""
    collector: float
    """Which share of one of its processors that takes."""
    opened: int
    """The most images that are opened on a shared file system in a second."""


def storms(pool: PoolSize, units: dict[str, Any]) -> list[Storm]:
    """The nodes start evenly over some time; each runs its probe, and the startd then sends its ads."""
    draw = random.Random(2)
    probe, ads = units["probe"], units["ads"]
    found = []
    for spread in (1, 10, 60, UPDATE_INTERVAL):
        starts = [draw.uniform(0, spread) for _ in range(pool.nodes)]
        told = [begin + probe["first"]["seconds"] for begin in starts]
        most = peak(told)
        share = most * ads["collector seconds with"] / ads["number"]
        found.append(Storm(spread, max(told), most, share, peak(starts) * round(probe["image files opened"])))
    return found


class AdGrowth(NamedTuple):
    """What the attributes of the probe cost a central manager, without them and with them."""

    ads: int
    without_gib: float
    with_gib: float
    network_without: float
    network_with: float
    """Mbit/s of all updates."""
    updates: float
    """A second."""
    cycle_without: float
    cycle_with: float
    """Seconds of one negotiation in which every autocluster meets every node."""


def ad_growth(pool: PoolSize, units: dict[str, Any]) -> AdGrowth:
    """Every node has the ad of its partitionable slot and one for each VM, each with all attributes."""
    unit = units["ads"]
    ads = pool.nodes * (1 + pool.vms)
    updates = ads / UPDATE_INTERVAL
    matches = pool.nodes * pool.autoclusters
    kib = 1 << 20
    return AdGrowth(
        ads,
        ads * unit["collector KiB without"] / unit["number"] / kib,
        ads * unit["collector KiB with"] / unit["number"] / kib,
        updates * (unit["bytes"] - unit["added bytes"]) * 8 / 1e6,
        updates * unit["bytes"] * 8 / 1e6,
        updates,
        matches * unit["match"]["plain"] / 1e6,
        matches * unit["match"]["asking"] / 1e6,
    )


class Boot(NamedTuple):
    """Guests that boot at once from one shared image."""

    what: str
    bytes: float
    half: float
    last: float


def boots(pool: PoolSize, guests: int = 1000) -> list[Boot]:
    """Guests of one image that boot within ten seconds; those of one node read through its page cache."""
    draw = random.Random(3)
    nodes = ceil(guests / pool.vms)
    size = pool.boot_gib * GIB
    found = []
    for what, readers, gbit, each in (
        ("read through the page cache of each node", nodes, pool.shared_gbit, line(pool.node_gbit)),
        (f"the same, a server with {pool.access_gbit:g} Gbit/s", nodes, pool.access_gbit, line(pool.node_gbit)),
        ("read by each guest for itself (`cache=none`)", guests, pool.shared_gbit, line(pool.node_gbit) / pool.vms),
        ("the whole image copied for each guest", guests, pool.shared_gbit, line(pool.node_gbit) / pool.vms),
    ):
        of_each = pool.image_gib * GIB if "whole" in what else size
        over = shared([Transfer(draw.uniform(0, 10), of_each) for _ in range(readers)], readers, line(gbit), each)
        found.append(Boot(what, readers * of_each, part(over, 0.5), max(over)))
    return found


class Drain(NamedTuple):
    """A rack whose VMs are checkpointed and sent away at once."""

    vms: int
    """On each node."""
    bytes: float
    saved: float
    """Seconds until the last memory image is written."""
    last: float
    """Seconds until the last job is home."""
    lost: int
    """Jobs that are not home when HTCondor's patience ends."""


def drains(pool: PoolSize, units: dict[str, Any], nodes: int = 40) -> list[Drain]:
    """A node saves its VMs one after the other as far as its disk is concerned; then each job waits for a place."""
    unit = units["checkpoint"]
    memory = unit["bytes"] / unit["MiB"] * 1024 * pool.memory_gib
    size = memory + pool.written_gib * GIB
    save = max(unit["seconds"] / unit["MiB"] * 1024 * pool.memory_gib, memory / (pool.disk_mib * (1 << 20)))
    found = []
    for vms in (1, 4, 16, 64):
        jobs = [Transfer(save * (1 + number), size) for _ in range(nodes) for number in range(vms)]
        side_by_side = max(1.0, min(vms, MAX_CONCURRENT / nodes))  # of one node
        over = shared(jobs, MAX_CONCURRENT, line(pool.access_gbit), line(pool.node_gbit) / side_by_side)
        found.append(Drain(vms, len(jobs) * size, save * vms, max(over), sum(end > VACATE_SECONDS for end in over)))
    return found


class Limit(NamedTuple):
    """A limit of HTCondor's, and where a pool meets it."""

    setting: str
    default: str
    met: str
    turn: str


def limits(pool: PoolSize, units: dict[str, Any]) -> list[Limit]:
    """HTCondor's limits, those that are met first above."""
    image = pool.image_gib * GIB
    by_line = line(pool.access_gbit) / image
    vms_by_line = by_line * pool.hours * 3600
    sockets = SOCKETS_A_NODE * pool.nodes
    rack = drains(pool, units)
    fits = max((drain.vms for drain in rack if not drain.lost), default=0)
    too_many = next((drain.vms for drain in rack if drain.lost), 0)
    storm = storms(pool, units)[0]
    return [
        Limit(
            "the access point's line",
            f"{pool.access_gbit:g} Gbit/s",
            f"at {by_line * 3600:,.0f} transferred images an hour: {vms_by_line:,.0f} VMs an access point",
            "no setting: an overlay, or a catalog image",
        ),
        Limit(
            "`MAX_CONCURRENT_UPLOADS_PER_USER`",
            f"`MAX_CONCURRENT_UPLOADS` / 5 = {PER_USER}, since HTCondor 25",
            f"at a line of {PER_USER * pool.node_gbit:g} Gbit/s by a user alone: {PER_USER} nodes with "
            f"{pool.node_gbit:g} Gbit/s take no more",
            "0 where one user has the pool",
        ),
        Limit(
            "`MachineMaxVacateTime`",
            f"{VACATE_SECONDS} s",
            f"by a rack of 40 nodes with {too_many} VMs each ({fits} still fit)",
            "seconds by the table above, or fewer nodes at a time",
        ),
        Limit(
            "`COLLECTOR_MAX_FILE_DESCRIPTORS`",
            f"{COLLECTOR_DESCRIPTORS:,}",
            f"at {COLLECTOR_DESCRIPTORS // SOCKETS_A_NODE:,} nodes, whose master and startd keep a socket each: "
            f"{sockets:,} here, and more with CCB",
            f"{2 * sockets:,}",
        ),
        Limit(
            "`MAX_JOBS_RUNNING`",
            f"MiB of memory, at most {MAX_JOBS_RUNNING:,}",
            f"at {MAX_JOBS_RUNNING:,} VMs an access point, with {MAX_JOBS_RUNNING * SHADOW_MIB / 1024:.0f} GiB for "
            f"their shadows; {pool.all_vms:,} take {ceil(pool.all_vms / MAX_JOBS_RUNNING)} access points",
            "one more access point; with a higher limit the range of ports, 2.1 a job",
        ),
        Limit(
            "`NEGOTIATOR_INTERVAL`",
            "60 s",
            f"not yet: {ad_growth(pool, units).cycle_with:.0f} s for {pool.autoclusters} autoclusters where every node "
            "is idle; with five times as many",
            "fewer kinds of jobs; `NEGOTIATOR_CONSIDER_PREEMPTION = False` where nothing is preempted",
        ),
        Limit(
            "the collector's processor",
            "1",
            f"not by ads: {storm.collector:.0%} of it where all nodes come back within a second",
            "`UPDATE_OFFSET = $RANDOM_INTEGER(0,300)`",
        ),
    ]
