"""Measures vm-gahp servers from their client's side of the pipes; runs inside the namespace, for `bench`.

It needs nothing but the standard library, because the namespace has no tests in it, and does nothing beside
the system calls that a client makes: a pipe is written, a pipe is read, a clock is read before and after.
A task in JSON comes on standard input; each value goes to standard output as it is found, an object of
JSON a line: ``{"round": …, "server": …, "row": …, "value": …}``, times in milliseconds, memory in KiB.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

DEADLINE = 60
"""Seconds that one conversation may take; then the alarm ends the measurement."""

SETTLE = 0.3
"""Seconds from a greeting to the first steady round trip: whatever a server does at its start is done."""

PAUSE = 0.02
"""Seconds of silence before a request that comes alone, as condor_starter's always do."""

VERSIONS, LONE_VERSIONS, STATUSES, BLOCKS, LIVE_STATUSES = 100, 10, 50, 5, 10
"""How many of each make one value, which is their median."""

Value = tuple[str, float]


def median(values: Sequence[int]) -> float:
    """The upper median, from nanoseconds to milliseconds."""
    return sorted(values)[len(values) // 2] / 1e6


class Server:
    """A server process with the client's ends of its pipes."""

    def __init__(self, argv: list[str], environment: Mapping[str, str], errors: str) -> None:
        signal.alarm(DEADLINE)
        theirs_in, self._to = os.pipe2(os.O_CLOEXEC)
        self._from, theirs_out = os.pipe2(os.O_CLOEXEC)
        self._left = b""
        actions: list[tuple[Any, ...]] = [
            (os.POSIX_SPAWN_DUP2, theirs_in, 0),
            (os.POSIX_SPAWN_DUP2, theirs_out, 1),
            (os.POSIX_SPAWN_OPEN, 2, errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
        ]
        self.began = time.perf_counter_ns()
        self.pid = os.posix_spawn(argv[0], argv, environment, file_actions=actions)
        os.close(theirs_in)
        os.close(theirs_out)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """End it at once where it has not ended by itself; by now it has no VM."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._to)
        os.close(self._from)
        signal.alarm(0)

    def write(self, *pieces: bytes) -> None:
        for piece in pieces:
            os.write(self._to, piece)

    def lines(self, count: int) -> list[bytes]:
        """The next lines of output; what comes after them is kept."""
        data = self._left
        while data.count(b"\n") < count:
            chunk = os.read(self._from, 65536)
            if not chunk:
                raise EOFError(f"the server ended its output after {data!r}")
            data += chunk
        *found, self._left = data.split(b"\n", count)
        return found

    def since_start(self) -> float:
        """Milliseconds since the process was started."""
        return (time.perf_counter_ns() - self.began) / 1e6

    def version(self) -> int:
        """Nanoseconds for a VERSION."""
        began = time.perf_counter_ns()
        self.write(b"VERSION\r\n")
        self.lines(1)
        return time.perf_counter_ns() - began

    def lone_version(self) -> int:
        """The same after a pause, when the processor has forgotten the server."""
        time.sleep(PAUSE)
        return self.version()

    def result(self, command: bytes, number: int, argument: bytes) -> tuple[int, bytes]:
        """Nanoseconds for a request, the ``R`` and the way of its result; and the result."""
        began = time.perf_counter_ns()
        self.write(b"%s %d %s\r\n" % (command, number, argument))
        accepted = self.lines(2)
        self.write(b"RESULTS\r\n")
        counted, result = self.lines(2)
        taken = time.perf_counter_ns() - began
        if (*accepted, counted) != (b"S", b"R", b"S 1") or not result.startswith(b"%d 0 " % number):
            raise ValueError(f"{command!r} was answered {accepted}, {counted!r}, {result!r}")
        return taken, result.split(b" ", 2)[2]

    def statuses(self, count: int, vm_id: bytes, state: bytes) -> float:
        """The median of so many round trips of a STATUS."""
        taken = []
        for number in range(100, 100 + count):
            nanoseconds, words = self.result(b"CONDOR_VM_STATUS", number, vm_id)
            if b"STATUS=" + state not in words.split(b" "):
                raise ValueError(f"the VM should be {state!r}, but: {words!r}")
            taken.append(nanoseconds)
        return median(taken)

    def block(self, ad: Sequence[bytes], *, piecewise: bool) -> int:
        """Nanoseconds for a job ad; `piecewise` as condor_starter writes it, a line and then its end."""
        began = time.perf_counter_ns()
        self.write(b"CLASSAD\r\n")
        self.lines(1)
        if piecewise:
            for line in (*ad, b"CLASSAD_END"):
                self.write(line, b"\r\n")
        else:
            self.write(b"\r\n".join([*ad, b"CLASSAD_END", b""]))
        self.lines(1)
        return time.perf_counter_ns() - began

    def quit(self) -> int:
        """Nanoseconds from QUIT to the end of the process."""
        began = time.perf_counter_ns()
        self.write(b"QUIT\r\n")
        self.wait()
        return time.perf_counter_ns() - began

    def wait(self) -> None:
        """Read to the end of the output and wait for that of the process, which stays a zombie."""
        while os.read(self._from, 65536):
            pass
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def memory(self, helpers: bytes) -> Iterator[Value]:
        """Memory of the server and of what else has the word `helpers` on its command line."""
        total = {"Rss": 0, "Pss": 0, "Anonymous": 0}
        others = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
        for pid in (self.pid, *(pid for pid in others if pid != self.pid and _is_called(pid, helpers))):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
                field, kib, _ = line.split()
                if field.rstrip(":") in total:
                    total[field.rstrip(":")] += int(kib)
        yield from total.items()


def _is_called(pid: int, word: bytes) -> bool:
    try:
        return word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:  # it is gone
        return False


def without_vm(task: Mapping[str, Any], argv: Sequence[str], environment: Mapping[str, str]) -> Iterator[Value]:
    """What a server does by itself: how it starts, how it answers, what it weighs; and the probe."""
    errors: str = task["errors"]
    ad = [line.encode() for line in task["ad"]]
    with Server([*argv, *task["serve"]], environment, errors) as server:
        server.lines(1)
        yield "greeting", server.since_start()
    with Server([*argv, *task["serve"]], environment, errors) as server:
        server.write(b"VERSION\r\n")
        server.lines(2)
        yield "first reply", server.since_start()
    with Server([*argv, *task["serve"]], environment, errors) as server:
        server.lines(1)
        time.sleep(SETTLE)
        server.version()
        yield "VERSION", median([server.version() for _ in range(VERSIONS)])
        yield "lone VERSION", median([server.lone_version() for _ in range(LONE_VERSIONS)])
        yield "STATUS", server.statuses(STATUSES, b"99", b"Stopped")
        yield "CLASSAD", median([server.block(ad, piecewise=True) for _ in range(BLOCKS)])
        yield "CLASSAD at once", median([server.block(ad, piecewise=False) for _ in range(BLOCKS)])
        yield from ((f"idle {field}", kib) for field, kib in server.memory(task["helpers"].encode()))
    with Server([*argv, *task["probe"]], environment, errors) as probe:
        probe.wait()
        yield "probe", probe.since_start()


def with_vm(task: Mapping[str, Any], argv: Sequence[str], environment: Mapping[str, str]) -> Iterator[Value]:
    """A VM from its START to the end of its server."""
    image = Path(environment["VMGAHP_WORKING_DIR"]) / "guest.img"
    image.unlink(missing_ok=True)
    shutil.copyfile(task["image"], image)
    os.chown(image, int(environment["VMGAHP_USER_UID"]), int(environment["VMGAHP_USER_GID"]))
    with Server([*argv, *task["serve"]], environment, task["errors"]) as server:
        server.lines(1)
        time.sleep(SETTLE)
        server.block([line.encode() for line in task["ad"]], piecewise=True)
        started, vm_id = server.result(b"CONDOR_VM_START", 1, b"kvm")
        yield "START", started / 1e6
        time.sleep(SETTLE)
        server.statuses(1, vm_id, b"Running")
        yield "live STATUS", server.statuses(LIVE_STATUSES, vm_id, b"Running")
        yield from ((f"live {field}", kib) for field, kib in server.memory(task["helpers"].encode()))
        yield "QUIT", server.quit() / 1e6


def main() -> None:
    task = json.load(sys.stdin)
    for turn in range(max(task["rounds"], task["vm_rounds"])):
        kinds = [(without_vm, task["rounds"]), (with_vm, task["vm_rounds"])]
        for measure in (kind for kind, rounds in kinds if turn < rounds):
            # Each goes first in every other round, so that neither gains by what the other leaves behind.
            for name, server in sorted(task["servers"].items(), reverse=turn % 2 == 1):
                environment = {**task["environment"], **server["environment"]}
                for row, value in measure(task, server["argv"], environment):
                    print(json.dumps({"round": turn, "server": name, "row": row, "value": value}), flush=True)


if __name__ == "__main__":
    main()
