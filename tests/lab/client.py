"""The other side of the protocol: what condor_starter says to its vm-gahp, for the demo and for tests.

It keeps to what the real client does: lines end with CR LF, every request waits for its one reply line, an
``R`` may come between any two lines, and results are fetched with RESULTS and split at unescaped spaces.
"""

from __future__ import annotations

import re
import select
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO


class ProtocolError(Exception):
    """The server said something that the real client would not take, or nothing in time."""


def words(line: str) -> list[str]:
    """The words of a reply line: split at unescaped spaces, escapes removed."""
    return [re.sub(r"\\(.)", r"\1", word) for word in re.findall(r"(?:[^\\ ]|\\.)+", line)]


class Client:
    """A server process and the conversation with it.

    `heard` is called with ``>`` or ``<`` and the line, as lines go by; `idle` whenever there is nothing to
    read for a moment.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: Path,
        log: IO[str],
        heard: Callable[[str, str], None] = lambda direction, line: None,
        idle: Callable[[], None] = lambda: None,
    ) -> None:
        self.heard = heard
        self.idle = idle
        self.results: dict[int, list[str]] = {}
        self.ready = False
        self._buffer = b""
        self._next_request = 0
        self.process = subprocess.Popen(
            argv, env=env, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0
        )

    # ---- lines ----------------------------------------------------------------------------------

    def read_line(self, timeout: float = 20) -> str:
        """The next line, whatever it is."""
        assert self.process.stdout
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            self.idle()
            if select.select([self.process.stdout], [], [], 0.1)[0]:
                chunk = self.process.stdout.read(65536)
                if not chunk:
                    raise ProtocolError(f"the server ended its output (exit {self.process.wait(10)})")
                self._buffer += chunk
            elif time.monotonic() > deadline:
                raise ProtocolError(f"no line from the server in {timeout:.0f} s")
        raw, self._buffer = self._buffer.split(b"\n", 1)
        line = raw.rstrip(b"\r").decode("utf-8", "replace")
        self.heard("<", line)
        return line

    def write_line(self, line: str) -> None:
        assert self.process.stdin
        self.heard(">", line)
        self.process.stdin.write(line.encode() + b"\r\n")

    def greeting(self) -> str:
        line = self.read_line()
        if not line.startswith("$VMGahpVersion "):
            raise ProtocolError(f"this is no greeting: {line!r}")
        return line

    def say(self, line: str) -> list[str]:
        """A request: the words after the `S` of its reply."""
        self.write_line(line)
        reply = self.read_line()
        while reply == "R":
            self.ready = True
            reply = self.read_line()
        if words(reply)[:1] != ["S"]:
            raise ProtocolError(f"{line!r} was answered {reply!r}")
        return words(reply)[1:]

    # ---- requests -------------------------------------------------------------------------------

    def send_ad(self, lines: Sequence[str]) -> None:
        """The CLASSAD block: only its ends are answered."""
        self.say("CLASSAD")
        for line in lines:
            self.write_line(line)
        self.say("CLASSAD_END")

    def request(self, command: str, *arguments: str, timeout: float = 60) -> str:
        """A request with an id, up to its result: the result's words, `ProtocolError` for a failure."""
        self._next_request += 1
        number = self._next_request
        self.say(" ".join([command, str(number), *arguments]))
        deadline = time.monotonic() + timeout
        while number not in self.results:
            if not self.ready:
                if self.read_line(max(0.1, deadline - time.monotonic())) != "R":
                    raise ProtocolError("the server spoke without being asked, and it was no R")
                self.ready = True
            self.fetch()
        outcome, *payload = self.results.pop(number)
        if outcome != "0":
            raise ProtocolError(f"{command} failed: {' '.join(payload)}")
        return " ".join(payload)

    def fetch(self) -> None:
        """RESULTS, which also re-arms the `R`."""
        [count] = self.say("RESULTS")
        self.ready = False
        for _ in range(int(count)):
            number, *rest = words(self.read_line())
            self.results[int(number)] = rest

    def quit(self, timeout: float = 30) -> int:
        """QUIT, and the server's exit status."""
        self.say("QUIT")
        return self.close(timeout)

    def close(self, timeout: float = 30) -> int:
        """End of input, which makes any server destroy its machines and exit; its exit status."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise ProtocolError(f"the server did not exit in {timeout:.0f} s") from None
        finally:
            self.process.stdout.close()
