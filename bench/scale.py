"""Many servers with a VM each, at once: their memory, how they answer, how they start, and how they die.

It runs inside the namespace, after `stopwatch`, and needs the standard library and libvirt's module. Each column of the
table goes to standard output as an object of JSON, in the units of the table's rows.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import statistics
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from bench.stopwatch import Subject
from bench.watched import DEADLINE, Server, family, memory

TITLE = "scale: many servers at once"
"""The name that ``--only`` knows it by."""
SETTLE = 3.0
"""Seconds of silence before memory and processor time are looked at."""
STATUSES = 200
"""Requests, one after the other, over all servers."""
LOOK = 0.05
"""Seconds between two looks at the rest of what dies."""
PATIENCE = 120.0
"""Seconds for the last guardian to end."""


class Column(NamedTuple):
    """One measurement: so many servers, on a hypervisor, and whether libvirtd is killed with them."""

    servers: int
    title: str
    uri: str
    vm_type: str
    with_libvirtd: bool = False

    @property
    def settings(self) -> dict[str, str]:
        """The settings of its servers, as HTCondor reads them in an environment."""
        if self.vm_type == "kvm":
            return {"VMGAHP_VMTYPE": "kvm"}
        settings = {"VM_TYPE": self.vm_type, "VM_LIBVIRT_URI": self.uri, "VM_LIBVIRT_DOMAIN_TYPE": "test"}
        return {"VMGAHP_VMTYPE": self.vm_type, **{f"_CONDOR_{name}": value for name, value in settings.items()}}


# libvirt's test driver behind a libvirtd has the clients, workers and domains that QEMU's driver has, and no guests.
TEST, QEMU = ("test+unix:///default", "libvirt"), ("qemu:///system", "kvm")
COLUMNS = (
    *(Column(number, "libvirt's test driver", *TEST) for number in (1, 20, 200)),
    *(Column(number, "QEMU, emulated", *QEMU) for number in (1, 20)),
    Column(20, "QEMU, and libvirtd is killed as well", *QEMU, with_libvirtd=True),
)
"""In this order: no libvirtd is there after the last."""


def all_at_once(servers: Sequence[Server], request: bytes, count: int) -> tuple[list[float], list[list[bytes]]]:
    """Write the same to all of them: the seconds until each has answered so many lines, in order, and the answers."""
    signal.alarm(DEADLINE)
    taken = []
    with selectors.DefaultSelector() as selector:
        for server in servers:
            selector.register(server.output, selectors.EVENT_READ, server)
        began = time.monotonic()
        for server in servers:
            server.write(request)
        while selector.get_map():
            for key, _ in selector.select():
                if key.data.hear() >= count:
                    taken.append(time.monotonic() - began)
                    selector.unregister(key.fileobj)
    return taken, [server.lines(count) for server in servers]


def start_all(servers: Sequence[Server], vm_type: str) -> list[float]:
    """Start the VMs of all servers, whose ads are there: the seconds that each took. Raises `ValueError`."""
    taken, _ = all_at_once(servers, b"CONDOR_VM_START 1 %s\r\n" % vm_type.encode(), 2)
    _, answers = all_at_once(servers, b"RESULTS\r\n", 2)
    if refused := [result for _, result in answers if result != b"1 0 1"]:
        raise ValueError(f"{len(refused)} of {len(servers)} VMs have not started: {refused[0]!r}")
    return taken


def on_processor(servers: Iterable[Server]) -> float:
    """Add up the seconds on a processor of servers and of their helpers that have ended."""
    fields = (Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split() for server in servers)
    return sum(sum(map(int, words[11:15])) for words in fields) / os.sysconf("SC_CLK_TCK")


def processes() -> dict[int, bytes]:
    """Find all processes but zombies, with their command lines."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if words := (entry / "cmdline").read_bytes():
                found[int(entry.name)] = words
        except OSError:  # it is gone
            continue
    return found


def own_kib(pids: Iterable[int]) -> int:
    """Add up the memory that processes share with no other, by /proc/PID/status, which is read faster than smaps."""
    total = 0
    for pid in pids:
        try:
            words = Path(f"/proc/{pid}/status").read_text().split()
        except OSError:
            continue
        total += int(words[words.index("RssAnon:") + 1]) if "RssAnon:" in words else 0
    return total


def entries(servers: Sequence[Server], directory: str) -> float:
    """Count the entries of ``/proc/PID/fd`` or ``task`` for a server."""
    return sum(len(os.listdir(f"/proc/{server.pid}/{directory}")) for server in servers) / len(servers)


def measure(subject: Subject, column: Column, libvirtd: Any) -> dict[str, float]:
    """Measure a column, from the start of the servers to the end of the last guardian, after which nothing is left.

    Raises `ValueError` where a VM does not start or something stays.
    """
    helpers = subject.task["helpers"].encode()
    there, domains = set(processes()), libvirtd.numOfDomains()
    found: dict[str, float] = {}
    number = column.servers
    with ExitStack() as stack:
        servers = []
        for turn in range(1, number + 1):
            own = subject.in_scratch(turn)
            own.image("counting")
            servers.append(server := stack.enter_context(own.serve()))
            server.lines(1)
            server.block(own.ad(ClusterId=turn, JobVMType=column.vm_type), piecewise=False)
        all_at_once(servers, b"ASYNC_MODE_ON\r\n", 1)
        time.sleep(SETTLE)

        used = on_processor(servers)
        taken = start_all(servers, column.vm_type)
        found["START, half"], found["START, last"] = statistics.median(taken), taken[-1]
        time.sleep(SETTLE)
        found["START, CPU"] = (on_processor(servers) - used) / number
        if (started := libvirtd.numOfDomains() - domains) != number:
            raise ValueError(f"there are {started} VMs of {number} servers")

        guardians = family([], helpers)
        live = memory(family(servers, b"\0"))
        daemons = {pid for pid, words in processes().items() if words.startswith(b"libvirtd\0")}
        found["own memory"], found["PSS"] = live["Anonymous"] / number, live["Pss"] / number
        found["guardian"] = memory(guardians)["Pss"] / number
        found["libvirtd"] = memory(daemons)["Anonymous"]
        found["threads"], found["descriptors"] = entries(servers, "task"), entries(servers, "fd")

        asked = []
        for turn in range(STATUSES):
            nanoseconds, words = servers[turn % number].result(b"CONDOR_VM_STATUS", 8, b"1")
            if b"STATUS=Running" not in words:
                raise ValueError(f"a VM should run, but: {words!r}")
            asked.append(nanoseconds / 1e9)
        found["STATUS, median"], found["STATUS, 95 %"] = statistics.median(asked), sorted(asked)[STATUSES * 95 // 100]
        taken, _ = all_at_once(servers, b"CONDOR_VM_STATUS 9 1\r\n", 2)
        found["STATUS of all"] = taken[-1]

        found |= death(servers, daemons if column.with_libvirtd else (), helpers, libvirtd, domains)
    if left := [words for pid, words in processes().items() if pid not in there]:
        raise ValueError(f"processes are left: {left}")
    if directories := [path.name for path in Path("/run/vmgahp").glob("*") if path.is_dir()]:
        raise ValueError(f"directories are left in /run/vmgahp: {directories}")
    return found


def death(
    servers: Sequence[Server], daemons: Collection[int], helpers: bytes, libvirtd: Any, domains: int
) -> dict[str, float]:
    """Kill all servers at once, and `daemons` with them: how long VMs and guardians live, and the memory that takes."""
    before = set(processes())
    signal.alarm(0)
    began = time.monotonic()
    for pid in [*daemons, *(server.pid for server in servers)]:
        os.kill(pid, signal.SIGKILL)
    found: dict[str, float] = {"death, memory": 0}
    while "death, guardian" not in found:
        taken = time.monotonic() - began
        if taken > PATIENCE:
            raise ValueError(f"after {PATIENCE:.0f} s there are guardians: {family([], helpers)}, and VMs: {found}")
        running = processes()
        found["death, memory"] = max(found["death, memory"], own_kib(running.keys() - before))
        is_over = not any(words.startswith(b"/usr/bin/qemu-system") for words in running.values())
        if is_over and (daemons or libvirtd.numOfDomains() <= domains):
            found.setdefault("death, VM", taken)
            if not family([], helpers):
                found["death, guardian"] = taken
        time.sleep(LOOK)
    return found


def main() -> None:
    import libvirt

    libvirt.registerErrorHandler(lambda _context, _error: None, None)
    task: Mapping[str, Any] = json.load(sys.stdin)
    of_server = task["servers"]["this"]
    for column in COLUMNS:
        environment = {**task["environment"], **of_server["environment"], **column.settings}
        subject = Subject("this", of_server["argv"], environment, task)
        # libvirt's test driver keeps its domains as long as somebody is connected.
        libvirtd = libvirt.open(column.uri)
        print(json.dumps(measure(subject, column, libvirtd)), flush=True)


# ---- the table --------------------------------------------------------------------------------------

ROWS = {
    "own memory": "a server's own memory, MiB",
    "PSS": "its PSS, MiB",
    "guardian": "a guardian's PSS, MiB",
    "libvirtd": "libvirtd's own memory, MiB",
    "threads": "threads of a server",
    "descriptors": "its descriptors",
    "STATUS, median": "STATUS, one after the other: median",
    "STATUS, 95 %": "95 %",
    "STATUS of all": "STATUS of all at once: the last",
    "START, half": "START of all at once: half",
    "START, last": "the last",
    "START, CPU": "a processor's time for each",
    "death, VM": "SIGKILL to all at once: the last VM is gone",
    "death, guardian": "the last guardian",
    "death, memory": "memory for it, MiB",
}
KIB = {"own memory", "PSS", "guardian", "libvirtd", "death, memory"}
PLAIN = {"threads", "descriptors"}


def table(found: Sequence[Mapping[str, float]]) -> str:
    """Make a table of Markdown, a column for each number of servers."""
    lines = [["", *(f"{column.servers}: {column.title}" for column in COLUMNS)], ["---"] * (len(COLUMNS) + 1)]
    lines += [[title, *(figure(key, column[key]) for column in found)] for key, title in ROWS.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def figure(key: str, value: float) -> str:
    """Word a value of a row: memory in MiB, times with two digits that mean something."""
    if key in KIB:
        return f"{value / 1024:.1f}"
    if key in PLAIN:
        return f"{value:.0f}"
    if value < 1:
        return f"{value * 1e6:.0f} µs" if value < 0.001 else f"{value * 1e3:.{1 if value < 0.01 else 0}f} ms"
    return f"{value:.{1 if value < 10 else 0}f} s"
