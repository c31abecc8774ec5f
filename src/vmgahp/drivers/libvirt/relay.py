"""The relay of connections from ports of this machine to a guest that only this machine reaches.

socat does it, as the job's user in a session of its own: it can reach what any job of that user can. It starts when
the address is known, restarts if the address changes, and ends with the server at the latest; its connections end
when the guest no longer answers.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from vmgahp.drivers.base import Logger
from vmgahp.host import packages, run
from vmgahp.host.job_user import Identity

PROGRAM = "socat"

MOST_AT_ONCE = 64
"""The most connections to one port."""

_PATIENT = "connect-timeout=10,keepalive,keepidle=30,keepintvl=10,keepcnt=3"
"""The options by which a guest that has gone is noticed within a minute."""


class Relay:
    """The relays of one guest, a process for each port."""

    def __init__(
        self, identity: Identity, log: Logger, name: str, address: str, ports: Sequence[tuple[int, int]]
    ) -> None:
        self._identity = identity
        self._log = log
        self._name = name
        self._address = address
        self._ports = ports
        self._guest = ""
        self._failed = False
        self._running: list[subprocess.Popen[bytes]] = []

    def lead_to(self, guest: str) -> None:
        """Lead to the guest's current address; called with each STATUS. Raises nothing."""
        if self._guest == guest and (self._failed or self._all_run()):
            return
        self.end()
        self._guest, self._failed = guest, False
        try:
            if why := self._why_not(guest):
                raise OSError(0, why)
            for guests, ours in self._ports:
                self._running.append(self._run(guests, ours))
        except OSError as error:
            self._failed = True  # until it has another address
            self._log(
                f"{self._name}: nothing leads to the guest at {guest}: {error.strerror} ({packages.of_system(PROGRAM)})"
            )
            self.end()

    def end(self) -> None:
        """End the relays and all their connections. Raises nothing."""
        for relay in self._running:
            with suppress(OSError):  # it is gone
                os.killpg(relay.pid, signal.SIGKILL)
            relay.wait()
        self._running.clear()

    def _all_run(self) -> bool:
        return all(relay.poll() is None for relay in self._running)

    @staticmethod
    def _why_not(guest: str) -> str:
        """Return the reason why the address must not be used; empty if it may. A guest may report another's address."""
        family = socket.AF_INET6 if ":" in guest else socket.AF_INET
        number = socket.inet_pton(family, guest)
        first = number[0]
        if first in (0, 127) or first >= 224 or number[:2] in (b"\xa9\xfe", b"\xfe\x80"):
            return "that is no address of a guest"
        trial = socket.socket(family, socket.SOCK_STREAM)
        try:
            trial.bind((guest, 0))
        except OSError:
            return ""
        finally:
            trial.close()
        return "that is this machine itself"

    def _run(self, guests: int, ours: int) -> subprocess.Popen[bytes]:
        here, there = (f"[{each}]" if ":" in each else each for each in (self._address, self._guest))
        listen = f"TCP{_version(here)}-LISTEN:{ours},bind={here},reuseaddr,fork,max-children={MOST_AT_ONCE},keepalive"
        connect = f"TCP{_version(there)}:{there}:{guests},{_PATIENT}"
        return run.begin([PROGRAM, listen, connect], self._identity)


def _version(address: str) -> int:
    return 6 if address.startswith("[") else 4
