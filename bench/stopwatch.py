"""Measurements of vm-gahp servers from their client's side of the pipes; runs inside the namespace.

A task in JSON comes on standard input; each value goes to standard output as it is found, an object of
JSON a line: ``{"round": …, "server": …, "row": …, "value": …}``, times in milliseconds, memory in KiB.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from bench.watched import Server, family, median, memory, work

SETTLE = 0.3
"""Seconds from a greeting to the first steady round trip: whatever a server does at its start is done."""

PAUSE = 0.02
"""Seconds of silence before a request that comes alone, as condor_starter's always do."""

VERSIONS, LONE_VERSIONS, STATUSES, BLOCKS, LIVE_STATUSES = 100, 10, 50, 5, 10
"""How many of each make one value, which is their median."""

TURNS = 5
"""How many medians the best is of, where there is but one round."""

BOOTED = 60
"""Seconds for a guest to say that it has filled its memory."""

SECTOR = 512

MANY = (1, 10, 20)
"""How many daemons are weighed together."""
FIFTY = 50

QUIET, LISTENED = 8.0, 120.0
"""Seconds until a guest that says nothing has said its last, and for which its server is watched then."""

Value = tuple[str, float]


class Subject(NamedTuple):
    """One of the servers that are compared, as it is started."""

    name: str
    argv: list[str]
    environment: dict[str, str]
    task: Mapping[str, Any]

    def serve(self) -> Server:
        return Server([*self.argv, *self.task["serve"]], self.environment, self.task["errors"])

    def probe(self) -> float:
        """Measure a probe, in milliseconds."""
        with Server([*self.argv, *self.task["probe"]], self.environment, self.task["errors"]) as probe:
            probe.wait()
            return probe.since_start()

    def in_scratch(self, number: int) -> Subject:
        """Make the same in an empty directory of another job."""
        scratch = self.scratch.with_name(f"dir_{number}")
        subject = self._replace(environment={**self.environment, "VMGAHP_WORKING_DIR": str(scratch)})
        subject.new_scratch()
        return subject

    @property
    def scratch(self) -> Path:
        return Path(self.environment["VMGAHP_WORKING_DIR"])

    def new_scratch(self) -> None:
        """Make the job's directory anew, empty."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(parents=True)
        self._give(self.scratch)

    def image(self, kind: str, name: str = "guest.img") -> Path:
        """Make a disk of a guest in the job's directory."""
        path = self.scratch / name
        shutil.copyfile(self.task["images"][kind], path)
        self._give(path)
        return path

    def _give(self, path: Path) -> None:
        os.chown(path, int(self.environment["VMGAHP_USER_UID"]), int(self.environment["VMGAHP_USER_GID"]))

    def ad(self, **values: object) -> list[bytes]:
        """Return the lines of the job's ad, with values of its own."""
        values = {"VM_WORKING_DIR": str(self.scratch), **values}
        lines = [line for line in self.task["ad"] if line.partition(" = ")[0] not in values]
        lines += [f"{name} = {json.dumps(value)}" for name, value in values.items()]
        return [line.encode() for line in lines]

    def start(self, server: Server, **values: object) -> tuple[float, bytes]:
        """Start a VM: milliseconds from START to its result, and its id."""
        server.block(self.ad(**values), piecewise=True)
        taken, vm_id = server.result(b"CONDOR_VM_START", 1, b"kvm")
        return taken / 1e6, vm_id

    def weigh(self, *servers: Server) -> dict[str, int]:
        return memory(family(servers, self.task["helpers"].encode()))


def _as_a_starter(server: Server) -> None:
    """Say what condor_starter says before it has a job, in less time: it waits for a second after each line."""
    server.lines(1)
    server.write(b"ASYNC_MODE_ON\r\n")
    server.lines(1)
    time.sleep(SETTLE)


def without_vm(subject: Subject) -> Iterator[Value]:
    """Measure a server by itself: how it starts, how it answers, its memory."""
    with subject.serve() as server:
        server.lines(1)
        yield "greeting", server.since_start()
        yield "first VERSION", server.version() / 1e6
    with subject.serve() as server:
        server.write(b"VERSION\r\n")
        server.lines(2)
        yield "first reply", server.since_start()
    with subject.serve() as server:
        server.lines(1)
        time.sleep(SETTLE)
        server.version()
        yield "VERSION", median([server.version() for _ in range(VERSIONS)])
        yield "lone VERSION", median([server.version_after(PAUSE) for _ in range(LONE_VERSIONS)])
        yield "STATUS", server.statuses(STATUSES, b"99", b"Stopped")
        yield from ((f"idle {field}", kib) for field, kib in subject.weigh(server).items())
        ad = subject.ad()
        yield "CLASSAD", median([server.block(ad, piecewise=True) for _ in range(BLOCKS)])
        yield "CLASSAD at once", median([server.block(ad, piecewise=False) for _ in range(BLOCKS)])


def probe(subject: Subject) -> Iterator[Value]:
    """Measure the probe."""
    yield "probe", subject.probe()


def with_vm(subject: Subject) -> Iterator[Value]:
    """Measure a VM from its START to the end of its server."""
    subject.new_scratch()
    subject.image("counting")
    with subject.serve() as server:
        _as_a_starter(server)
        taken, vm_id = subject.start(server)
        yield "START", taken
        time.sleep(SETTLE)
        server.statuses(1, vm_id, b"Running")
        yield "live STATUS", server.statuses(LIVE_STATUSES, vm_id, b"Running")
        yield from ((f"live {field}", kib) for field, kib in subject.weigh(server).items())
        yield "QUIT", server.quit() / 1e6


def with_memory(subject: Subject, mib: int) -> Iterator[Value]:
    """Measure the ways of a guest's memory: half of it is random, and the rest was never touched."""
    subject.probe()
    subject.new_scratch()
    # Where the reference takes the disk of a VM that is to be kept.
    disk = subject.image(f"half of {mib}", "../kept.img")
    values = {
        "JobVMMemory": mib,
        "RequestMemory": mib,
        "JobVMCheckpoint": True,
        "VMPARAM_vm_Disk": f"{disk.resolve()}:hda:w:raw",
    }
    versions: list[int] = []
    with subject.serve() as server:
        _as_a_starter(server)
        server.block(subject.ad(**values), piecewise=True)
        _, vm_id, meanwhile = server.result_beside_versions(b"CONDOR_VM_START", 1, b"kvm")
        yield f"meanwhile START {mib}", _p99(meanwhile)
        _wait_for_count(disk)
        before = set(subject.scratch.rglob("*"))
        for number, command in enumerate(("SUSPEND", "RESUME", "CHECKPOINT"), start=2):
            taken, _, meanwhile = server.result_beside_versions(b"CONDOR_VM_" + command.encode(), number, vm_id)
            versions += meanwhile
            yield f"{command} {mib}", taken / 1e6
            found = [path.lstat() for path in subject.scratch.rglob("*") if path not in before]
            yield f"{command} {mib} bytes", sum(status.st_size for status in found) / 1024
            yield f"{command} {mib} on disk", sum(status.st_blocks for status in found) * SECTOR / 1024
        yield f"meanwhile {mib}", _p99(versions)
        server.quit()
    subject.new_scratch()


def _p99(nanoseconds: Sequence[int]) -> float:
    return sorted(nanoseconds)[len(nanoseconds) * 99 // 100] / 1e6


def _wait_for_count(disk: Path) -> None:
    deadline = time.monotonic() + BOOTED
    while disk.read_bytes()[SECTOR : SECTOR + 1] != b"1":
        if time.monotonic() > deadline:
            raise TimeoutError(f"the guest of {disk} does not say that it is ready")
        time.sleep(0.02)


def many(subject: Subject) -> Iterator[Value]:
    """Measure the memory of so many servers together, first without and then with a VM each."""
    for with_vms, row in ((False, "Pss"), (True, "live Pss")):
        with ExitStack() as stack:
            servers: list[Server] = []
            for number in range(1, max(MANY) + 1):
                own = subject.in_scratch(number)
                server = stack.enter_context(own.serve())
                servers.append(server)
                server.lines(1)
                server.version()
                if with_vms:
                    own.image("silent")
                    own.start(server, ProcId=number)
                if number in MANY:
                    time.sleep(SETTLE)
                    yield f"{row} {number}", subject.weigh(*servers)["Pss"]
            for server in servers:
                server.write(b"QUIT\r\n")
            for server in servers:
                server.wait()


def fifty(subject: Subject) -> Iterator[Value]:
    """Measure a server with one VM and then with fifty."""
    subject.probe()
    with subject.serve() as server:
        server.lines(1)
        for number in range(1, FIFTY + 1):
            own = subject.in_scratch(number)
            own.image("silent")
            _, vm_id = own.start(server, ProcId=number, JobVMMemory=32)
            if number == 1:
                time.sleep(SETTLE)
                alone = _answers(server, vm_id)
        time.sleep(QUIET)  # all guests have halted
        together = _answers(server, vm_id)
        for row, milliseconds in together.items():
            yield f"{row} of fifty", milliseconds
            yield f"{row} of fifty to one", milliseconds / alone[row]
    _end_domains()


def _answers(server: Server, vm_id: bytes) -> dict[str, float]:
    """Measure a VERSION and a STATUS, in milliseconds: the best of some medians, as there is but one round."""
    turns = [
        (median([server.version() for _ in range(VERSIONS)]), server.statuses(STATUSES, vm_id, b"Running"))
        for _ in range(TURNS)
    ]
    return dict(zip(("VERSION", "STATUS"), map(min, *turns), strict=True))


def _end_domains() -> None:
    """End all VMs, beside a guardian that may be about it too."""
    virsh = ["virsh", "-q", "-c", "qemu:///system"]
    while names := subprocess.run([*virsh, "list", "--name"], stdout=subprocess.PIPE, text=True).stdout.split():
        for name in names:
            subprocess.run([*virsh, "destroy", name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def silent(subjects: Sequence[Subject]) -> Iterator[tuple[Subject, Value]]:
    """Measure servers whose guests do nothing, all at the same time."""
    with ExitStack() as stack:
        watched = []
        for number, subject in enumerate(subjects, start=1):
            subject.probe()
            own = subject.in_scratch(number)
            own.image("silent")
            server = stack.enter_context(own.serve())
            server.lines(1)
            own.start(server, ProcId=number)
            helpers = subject.task["helpers"].encode() if number == 1 else b"\0"
            watched.append((subject, server, family([server], helpers)))
        time.sleep(QUIET)
        before = [work(pids) for _, _, pids in watched]
        time.sleep(LISTENED)
        for (subject, _, pids), (time_before, switches_before) in zip(watched, before, strict=True):
            nanoseconds, switches = work(pids)
            yield subject, ("silent CPU", (nanoseconds - time_before) / 1e6 * 3600 / LISTENED)
            yield subject, ("silent switches", (switches - switches_before) * 60 / LISTENED)
        for _, server, _ in watched:
            server.write(b"QUIT\r\n")
        for _, server, _ in watched:
            server.wait()


PARTS = {
    "without VM": without_vm,
    "probe": probe,
    "VM": with_vm,
    "256 MiB": lambda subject: with_memory(subject, 256),
    "1 GiB": lambda subject: with_memory(subject, 1024),
    "many": many,
    "fifty": fifty,
}
"""The measurements of one server after the other, in as many rounds as the task says; `silent` is of all at once."""


def found(turn: int, subject: Subject, value: Value) -> None:
    print(json.dumps({"round": turn, "server": subject.name, "row": value[0], "value": value[1]}), flush=True)


def main() -> None:
    task = json.load(sys.stdin)
    subjects = [
        Subject(name, server["argv"], {**task["environment"], **server["environment"]}, task)
        for name, server in task["servers"].items()
    ]
    rounds: Mapping[str, int] = task["rounds"]
    for turn in range(max(rounds.values())):
        for part, measure in PARTS.items():
            if turn < rounds.get(part, 0):
                # Each goes first in every other round, so that none gains by what another leaves behind.
                for subject in subjects[:: -1 if turn % 2 else 1]:
                    for value in measure(subject):
                        found(turn, subject, value)
    if rounds.get("silent"):
        for subject, value in silent(subjects):
            found(0, subject, value)
