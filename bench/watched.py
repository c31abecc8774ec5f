"""A server under the bench's watch: its client's ends of the pipes, its memory and its time.

It runs inside the namespace and needs nothing but the standard library. It does nothing beside the system calls that a
client makes: a pipe is written, a pipe is read, a clock is read before and after.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

DEADLINE = 150
"""Seconds that a conversation may take without a sign; then the alarm ends the measurement."""

EVERY = 0.005
"""Seconds between two VERSIONs that are sent while an operation is under way."""

KINDS = ("Rss", "Pss", "Anonymous")
OF_FILES = "of files"
"""Pages that began as those of a file and were written to: the data of programs and libraries."""


def median(values: Sequence[int]) -> float:
    """Return the upper median, from nanoseconds to milliseconds."""
    return statistics.median_high(values) / 1e6


def _give_up(*_: object) -> None:
    raise TimeoutError(f"a server has given no sign for {DEADLINE} s")


class Server:
    """A server process with the client's ends of its pipes."""

    def __init__(self, argv: list[str], environment: Mapping[str, str], errors: str) -> None:
        signal.signal(signal.SIGALRM, _give_up)
        signal.alarm(DEADLINE)
        theirs_in, self._to = os.pipe2(os.O_CLOEXEC)
        self.output, theirs_out = os.pipe2(os.O_CLOEXEC)
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
        """End it at once where it has not ended by itself."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._to)
        os.close(self.output)
        signal.alarm(0)

    def write(self, *pieces: bytes) -> None:
        for piece in pieces:
            os.write(self._to, piece)

    def hear(self) -> int:
        """Read once, and return how many whole lines there are."""
        chunk = os.read(self.output, 65536)
        if not chunk:
            raise EOFError(f"the server ended its output after {self._left!r}")
        self._left += chunk
        return self._left.count(b"\n")

    def lines(self, count: int) -> list[bytes]:
        """Return the next lines of output; the bytes after them are kept."""
        while self._left.count(b"\n") < count:
            self.hear()
        *found, self._left = self._left.split(b"\n", count)
        return found

    def since_start(self) -> float:
        """Return the milliseconds since the process was started."""
        return (time.perf_counter_ns() - self.began) / 1e6

    def version(self) -> int:
        """Measure a VERSION, in nanoseconds."""
        began = time.perf_counter_ns()
        self.write(b"VERSION\r\n")
        self.lines(1)
        return time.perf_counter_ns() - began

    def version_after(self, pause: float) -> int:
        """Measure one after a pause, when the processor has forgotten the server."""
        time.sleep(pause)
        return self.version()

    def result(self, command: bytes, number: int, argument: bytes) -> tuple[int, bytes]:
        """Measure a request, the ``R`` and the way of its result, in nanoseconds; and return the result."""
        began = time.perf_counter_ns()
        self.write(b"%s %d %s\r\n" % (command, number, argument))
        accepted = self.lines(2)
        words = self._fetch(command, number, accepted)
        return time.perf_counter_ns() - began, words

    def _fetch(self, command: bytes, number: int, accepted: list[bytes]) -> bytes:
        self.write(b"RESULTS\r\n")
        counted, result = self.lines(2)
        if (*accepted, counted) != (b"S", b"R", b"S 1") or not result.startswith(b"%d 0 " % number):
            raise ValueError(f"{command!r} was answered {accepted}, {counted!r}, {result!r}")
        return result.split(b" ", 2)[2]

    def result_beside_versions(self, command: bytes, number: int, argument: bytes) -> tuple[int, bytes, list[int]]:
        """Measure an operation in nanoseconds: with its result, and the nanoseconds of each VERSION sent meanwhile.

        One is sent every so often, whether or not the one before was answered: a server that answers none while it
        is at work makes all of them wait, and that is what is measured.
        """
        signal.alarm(DEADLINE)
        sent: list[int] = []
        taken: list[int] = []
        accepted: list[bytes] = []
        ended = 0
        with selectors.DefaultSelector() as selector:
            selector.register(self.output, selectors.EVENT_READ)
            began = time.perf_counter_ns()
            self.write(b"%s %d %s\r\n" % (command, number, argument))
            due = began
            while not ended or len(taken) < len(sent):
                now = time.perf_counter_ns()
                if not ended and now >= due:
                    sent.append(now)
                    self.write(b"VERSION\r\n")
                    due = now + int(EVERY * 1e9)
                if b"\n" not in self._left and not selector.select(None if ended else max(0, due - now) / 1e9):
                    continue
                [line] = self.lines(1)
                now = time.perf_counter_ns()
                if line.startswith(b"S $"):
                    taken.append(now - sent[len(taken)])
                else:
                    accepted.append(line)
                    ended = now if line == b"R" else ended
        return ended - began, self._fetch(command, number, accepted), taken

    def statuses(self, count: int, vm_id: bytes, state: bytes) -> float:
        """Return the median of so many round trips of a STATUS, in milliseconds."""
        taken = []
        for number in range(100, 100 + count):
            nanoseconds, words = self.result(b"CONDOR_VM_STATUS", number, vm_id)
            if b"STATUS=" + state not in words.split(b" "):
                raise ValueError(f"the VM should be {state!r}, but: {words!r}")
            taken.append(nanoseconds)
        return median(taken)

    def block(self, ad: Sequence[bytes], *, piecewise: bool) -> int:
        """Measure a job ad, in nanoseconds; `piecewise` as condor_starter writes it, a line and then its end."""
        signal.alarm(DEADLINE)
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
        """Measure the time from QUIT to the end of the process, in nanoseconds."""
        began = time.perf_counter_ns()
        self.write(b"QUIT\r\n")
        self.wait()
        return time.perf_counter_ns() - began

    def wait(self) -> None:
        """Read to the end of the output and wait for that of the process, which stays a zombie."""
        while os.read(self.output, 65536):
            pass
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)


# ---- what it costs ----------------------------------------------------------------------------------


def family(servers: Iterable[Server], helpers: bytes) -> set[int]:
    """Find the processes of servers: they, their descendants, and all that have the word `helpers` as an argument."""
    parents = {}
    found = {server.pid for server in servers}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if helpers in (entry / "cmdline").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
            except OSError:  # it is gone
                continue
    grown = True
    while grown:
        children = {pid for pid, parent in parents.items() if parent in found} - found
        found |= children
        grown = bool(children)
    return found


def memory(pids: Iterable[int]) -> dict[str, int]:
    """Add up their memory by kind, in KiB."""
    total = dict.fromkeys((*KINDS, OF_FILES), 0)
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
        except OSError:  # it has ended, or is about to
            continue
        of_file = False
        for line in lines:
            field, *words = line.split()
            kind = field.rstrip(":")
            if kind == field:  # the addresses of a mapping, and last its file
                of_file = words[-1].startswith("/")
            elif kind in KINDS:
                total[kind] += int(words[0])
                if of_file and kind == "Anonymous":
                    total[OF_FILES] += int(words[0])
    return total


def work(pids: Iterable[int]) -> tuple[int, int]:
    """Add up their nanoseconds on a processor, those of ended threads included, and their context switches."""
    nanoseconds = switches = 0
    for pid in pids:
        try:
            # clock_getcpuclockid(3): the complement of the pid, and the clock of the scheduler.
            nanoseconds += time.clock_gettime_ns((~pid << 3) | 2)
            for status in Path(f"/proc/{pid}/task").glob("*/status"):
                switches += sum(map(int, re.findall(r"ctxt_switches:\s*(\d+)", status.read_text())))
        except OSError:  # it is gone
            continue
    return nanoseconds, switches
