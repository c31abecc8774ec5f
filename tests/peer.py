"""A client at the other end of a real server's pipes, in step with it and never waiting without an end."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from vmgahp.cli import KILL, PROBE, SERVE

DEADLINE = 60.0
"""Seconds that anything may take before the test fails."""

DAEMON = (sys.executable, "-P", "-m", "vmgahp")


def environment(vm_type: str, scratch: Path, **settings: object) -> dict[str, str]:
    """What condor_starter sets, without any HTCondor or settings of this machine."""
    environ = {name: value for name, value in os.environ.items() if not name.upper().startswith("_CONDOR_")}
    empty = scratch.parent / f"{scratch.name}.conf"
    empty.touch()
    environ |= {
        "VMGAHP_CONFIG": str(empty),
        "VMGAHP_VMTYPE": vm_type,
        "VMGAHP_WORKING_DIR": str(scratch),
        "VMGAHP_USER_UID": str(scratch.stat().st_uid or 54321),
        "VMGAHP_USER_GID": str(scratch.stat().st_gid or 54321),
        "_CONDOR_VM_MEMORY": "1024",
    }
    return environ | {f"_CONDOR_{name}": str(value) for name, value in settings.items()}


class Peer:
    """Starts a server and talks to it as condor_starter does."""

    def __init__(self, environ: Mapping[str, str], *, cwd: Path | None = None) -> None:
        self.process = subprocess.Popen(
            [*DAEMON, "-f", "-t", "-M", str(SERVE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environ),
            cwd=cwd or environ["VMGAHP_WORKING_DIR"],
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._to, self._from = self.process.stdin.fileno(), self.process.stdout.fileno()
        self._buffer = b""
        self._request_id = 0
        self.saw_r = False

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.finish()

    def send(self, line: str | bytes) -> None:
        os.write(self._to, (line.encode() if isinstance(line, str) else line) + b"\r\n")

    def line(self, deadline: float = DEADLINE) -> str:
        """The next line of the server; an ``R`` is noted in `saw_r` and skipped."""
        end = time.monotonic() + deadline
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                if line != b"R":
                    return line.decode()
                self.saw_r = True
                continue
            self._read(end)

    def wait_for_r(self, deadline: float = DEADLINE) -> None:
        end = time.monotonic() + deadline
        while not self.saw_r:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline and line == b"R":
                self._buffer, self.saw_r = rest, True
            else:
                assert not newline, f"unexpected line {line!r}"
                self._read(end)

    def _read(self, end: float) -> None:
        left = end - time.monotonic()
        ready = left > 0 and select.select([self._from], [], [], left)[0]
        data = os.read(self._from, 65536) if ready else b""
        if not data:
            why = "said nothing in time" if not ready else "closed its output"
            self.process.kill()
            raise AssertionError(f"the server {why}; its log:\n{self.finish()}")
        self._buffer += data

    def ask(self, line: str) -> str:
        self.send(line)
        return self.line()

    def results(self) -> list[str]:
        self.send("RESULTS")
        first = self.line()
        self.saw_r = False
        assert first.startswith("S "), first
        return [self.line() for _ in range(int(first[2:]))]

    def send_ad(self, *lines: str) -> None:
        assert self.ask("CLASSAD") == "S"
        for line in lines:
            self.send(line)
        assert self.ask("CLASSAD_END") == "S"

    def request(self, command: str, argument: object) -> int:
        """Send a request that is accepted; its id."""
        self._request_id += 1
        assert self.ask(f"CONDOR_VM_{command} {self._request_id} {argument}") == "S"
        return self._request_id

    def run(self, command: str, argument: object, deadline: float = DEADLINE) -> list[str]:
        """Send one request and wait for its result: the words after the request id."""
        request_id = self.request(command, argument)
        self.wait_for_r(deadline)
        (result,) = self.results()
        words = result.split(" ")
        assert words[0] == str(request_id)
        return words[1:]

    def quit(self) -> str:
        """QUIT, the server's end, and its log."""
        self.send("QUIT")
        assert self.line() == "S"
        log = self.finish()
        assert self.process.returncode == 0, log
        return log

    def end_by(self, number: signal.Signals) -> str:
        """End the server by a signal; its log."""
        self.process.send_signal(number)
        self.process.wait(DEADLINE)
        return self.finish()

    def finish(self) -> str:
        """Wait for the server's end; its log."""
        if self.process.stdin and not self.process.stdin.closed:
            self.process.stdin.close()
        try:
            log = b""
            if self.process.stderr and not self.process.stderr.closed:
                log = self.process.stderr.read()
                self.process.stderr.close()
            self.process.wait(DEADLINE)
        finally:
            if self.process.stdout and not self.process.stdout.closed:
                self.process.stdout.close()
        return log.decode("utf-8", "replace")


def daemon(environ: Mapping[str, str], mode: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the daemon in one of the modes that end by themselves."""
    assert mode in (PROBE, KILL)
    return subprocess.run(
        [*DAEMON, "-f", "-t", "-M", str(mode), *words],
        env=dict(environ),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
        cwd=environ["VMGAHP_WORKING_DIR"],
    )
