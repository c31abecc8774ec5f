"""The IP addresses of a guest, as libvirt or this host knows them.

libvirt's daemon for QEMU asks the daemon for networks, and hangs if that hangs. So no STATUS depends on the answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

import libvirt

from vmgahp import errors
from vmgahp.drivers.libvirt.agent import believed
from vmgahp.host import threads

Call = Callable[[Callable[[libvirt.virDomain], dict[str, Any]]], dict[str, Any]]

_SOURCES = (libvirt.VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_LEASE, libvirt.VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_ARP)


PATIENCE = 0.5
"""Seconds that a STATUS waits for an answer, which comes within milliseconds."""

PAUSE = 60.0
"""Seconds without a query after one that was not answered in time."""


class GuestAddress:
    """One guest's addresses: by the DHCP leases of its libvirt network, or by the host's ARP table."""

    def __init__(self) -> None:
        self.found: tuple[str, ...] = ()
        self._asking = threading.Lock()
        """A lock that is held while libvirt is asked: each query that hangs occupies one of its workers."""
        self._due = 0.0
        """The time from which it may be asked again, by the monotonic clock."""

    def find(self, call: Call) -> tuple[str, ...]:
        """Return the addresses; empty while they are unknown.

        `call` calls libvirt with the domain. It is called in a thread of its own, for which this waits `PATIENCE` at
        most.
        """
        if self.found or monotonic() < self._due or not self._asking.acquire(False):
            return self.found
        answered = threading.Event()

        def ask() -> None:
            try:
                for source in _SOURCES:
                    self.found = self.found or _from(call, source)
            finally:
                self._asking.release()
                answered.set()

        try:
            threads.start("the guest's address", ask)
        except errors.MachineFault:
            self._asking.release()  # the next STATUS tries again
            return ()
        if not answered.wait(PATIENCE):
            self._due = monotonic() + PAUSE
        return self.found


def _from(call: Call, source: int) -> tuple[str, ...]:
    try:
        return believed(call(lambda domain: domain.interfaceAddresses(source, 0)))
    except (libvirt.libvirtError, errors.Fault):
        return ()  # not every network has both, and no status depends on them
