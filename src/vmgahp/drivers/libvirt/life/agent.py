"""A guest's agent, with its addresses, clock and power-off; and the addresses that the host knows.

The agent may be as hostile as its guest. It may answer never, at length, or with nonsense, and each query occupies
one of libvirtd's workers until it is answered or given up. So no other thread waits for it: a separate thread makes one
query at a time, with a timeout of `ANSWER_SECONDS`, and an agent that does not answer is asked more and more rarely.
Of its answers only valid addresses are accepted, and only a limited number of them.
"""

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton
from time import monotonic, time
from typing import Any

import libvirt

from vmgahp import errors
from vmgahp.drivers.base import Logger
from vmgahp.drivers.libvirt.life.guest import LibvirtGuest
from vmgahp.host import wait

ANSWER_SECONDS = 2
"""Seconds for each answer of an agent; libvirt asks it twice, first whether it is there."""
POWER_OFF_SECONDS = 3.0
"""Seconds for a guest to power off by its agent, before it is asked by ACPI as well."""
ASK_INTERVAL, RAREST = 30.0, 960.0
"""Seconds between two queries to an agent that answers, and the most to one that does not."""
_REFUSED = "unable to execute QEMU agent command"
"""The message of libvirt for an agent that refuses a command, such as one without hwclock."""
MOST_ADDRESSES = 16
"""The number of addresses that are kept."""
MOST_SAID = 256
"""The number of interfaces, and of addresses of one, that is accepted of an agent: libvirt passes on four million."""


class GuestAgent:
    """The agent of one guest, which may be missing."""

    def __init__(self, guest: LibvirtGuest, macs: Iterable[str], log: Logger) -> None:
        self.addresses: tuple[str, ...] = ()  # the addresses of the guest's NICs in its last answer
        self._guest = guest
        self._macs = frozenset(macs)
        self._log = log
        self._lock = threading.Lock()
        self._is_asked = False
        self._run = 0  # the ID of the domain, which changes with each run of the guest, whose agent has the timeout set
        self._is_late = False  # True if the guest's clock has stood still
        self._due = 0.0  # the time of the next query, by the monotonic clock
        self._wait = ASK_INTERVAL
        self._is_mute = False  # True if it has not answered the last query

    def look(self) -> None:
        """Start a query if one is due, without waiting for it. Called from libvirt's event thread too."""
        with self._lock:
            if self._is_asked or not self._guest.watch.has_agent or monotonic() < self._due:
                return
            self._is_asked = True
        try:
            wait.start_thread("the guest agent", self._ask)
        except errors.MachineFault:
            self._is_asked = False  # the next STATUS tries again

    def resumed(self) -> None:
        """Note that the guest continues after it has stood still."""
        self._is_late = True
        if not self._is_mute:
            self._due = 0.0
        self.look()

    def power_off(self, seconds: float) -> bool:
        """Make the agent power off its guest; return True if it does. Waits for `seconds` at most."""
        if not self._guest.watch.has_agent or self._is_mute:
            return False

        def ask() -> bool:
            with suppress(libvirt.libvirtError, errors.Fault):
                self._guest.call(self._power_off)
                return True
            return False

        try:
            asked = wait.Task("power off by the guest agent", ask)
        except errors.MachineFault:
            return False
        obeys = asked.wait(min(seconds, POWER_OFF_SECONDS)) and asked.result()
        return obeys or self._guest.watch.gone.is_set()

    def _power_off(self, domain: libvirt.virDomain) -> None:
        # libvirt waits a minute for the guest to be off, not for an answer: agents send none.
        self._limit(domain)
        domain.shutdownFlags(libvirt.VIR_DOMAIN_SHUTDOWN_GUEST_AGENT)

    def _ask(self) -> None:
        is_mute = True
        try:
            self._guest.call(self._hear)
            is_mute = False
        except (libvirt.libvirtError, errors.Fault) as error:
            if "not connected" in str(error):
                self._guest.watch.has_agent = is_mute = False  # events were missed: the agent is gone
            elif not self._is_mute and not self._guest.watch.gone.is_set():
                self._log(f"{self._guest.name}: its guest agent does not answer: {error}")
        finally:
            self._is_mute = is_mute
            self._wait = min(2 * self._wait, RAREST) if is_mute else ASK_INTERVAL
            self._due = monotonic() + self._wait
            self._is_asked = False

    def _hear(self, domain: libvirt.virDomain) -> None:
        self._limit(domain)
        if self._is_late:
            now = time()
            try:
                domain.setTime({"seconds": int(now), "nseconds": int(now % 1 * 1e9)})
            except libvirt.libvirtError as error:
                if _REFUSED not in str(error):
                    raise
                self._log(f"{self._guest.name}: its guest agent does not set its clock: {error}")
            self._is_late = False
        if self._macs:
            source = libvirt.VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_AGENT
            self.addresses = believed(domain.interfaceAddresses(source), self._macs)

    def _limit(self, domain: libvirt.virDomain) -> None:
        """Set the timeout, without which libvirt waits for ever; libvirt forgets it with the run."""
        if (run := domain.ID()) != self._run:
            domain.agentSetResponseTimeout(ANSWER_SECONDS)
            self._run = run


def believed(found: dict[str, Any], macs: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the usable addresses in an agent's answer, IPv4 first: those of the interfaces with `macs`, if given."""
    if len(found) > MOST_SAID:
        return ()
    kept: dict[str, None] = {}
    for interface in found.values():
        said = interface.get("addrs") or ()
        if len(said) > MOST_SAID or (macs and str(interface.get("hwaddr")).lower() not in macs):
            continue
        kept |= dict.fromkeys(filter(None, (_address(str(each.get("addr"))) for each in said)))
    return tuple(sorted(kept, key=lambda address: ":" in address)[:MOST_ADDRESSES])


def _address(said: str) -> str:
    """Return an address in its usual form; empty if it is invalid, or means nothing outside the guest."""
    family = AF_INET6 if ":" in said else AF_INET
    try:
        packed = inet_pton(family, said)
    except (OSError, ValueError):
        return ""
    if family == AF_INET:
        nowhere = packed[0] in (0, 127) or packed[:2] == b"\xa9\xfe" or packed[0] >= 224
    else:
        nowhere = not any(packed[:15]) or packed[0] == 0xFF or (packed[0] == 0xFE and packed[1] & 0xC0 == 0x80)
    return "" if nowhere else inet_ntop(family, packed)


# Addresses that libvirt or this host knows


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
        self._due = 0.0  # the time from which it may be asked again, by the monotonic clock

    def find(self, call: Call) -> tuple[str, ...]:
        """Return the addresses; empty while unknown. `call` may hang, in a thread for which this waits `PATIENCE`."""
        if self.found or monotonic() < self._due or not self._asking.acquire(False):
            return self.found

        def ask() -> None:
            try:
                for source in _SOURCES:
                    self.found = self.found or _from(call, source)
            finally:
                self._asking.release()

        try:
            if not wait.Task("the guest's address", ask).wait(PATIENCE):
                self._due = monotonic() + PAUSE
        except errors.MachineFault:
            self._asking.release()  # the next STATUS tries again
        return self.found


def _from(call: Call, source: int) -> tuple[str, ...]:
    try:
        return believed(call(lambda domain: domain.interfaceAddresses(source, 0)))
    except (libvirt.libvirtError, errors.Fault):
        return ()  # not every network has both, and no status depends on them
