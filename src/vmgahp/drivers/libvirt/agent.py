"""QEMU's guest agent, where one runs in a guest: its addresses, its clock, and how it powers off.

The agent is as hostile as its guest may be. It may answer never, at length, or nonsense, and each question occupies
one of libvirtd's workers until it is answered or given up. So nobody waits for it: one question at a time is asked,
by a thread of its own, with a limit of `ANSWER_SECONDS`, and who has given no answer is asked ever more rarely. Of
what it says nothing is believed but addresses that are addresses, and of them not many.
"""

from _collections_abc import Iterable
from _socket import AF_INET, AF_INET6, inet_ntop, inet_pton
from time import monotonic, time

from vmgahp import errors
from vmgahp.drivers.base import Logger
from vmgahp.drivers.libvirt import binding as libvirt
from vmgahp.drivers.libvirt.guest import LibvirtGuest
from vmgahp.host import threads
from vmgahp.host.job_user import Identity
from vmgahp.host.light import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from vmgahp.drivers.libvirt.running import RunningMachine

ANSWER_SECONDS = 2
"""For each answer of an agent; libvirt asks it twice, first whether it is there."""

POWER_OFF_SECONDS = 3.0
"""For a guest to power off by its agent, before it is asked by ACPI as well."""

ASK_INTERVAL, RAREST = 30.0, 960.0
"""Seconds between two questions to an agent that answers, and at most to one that does not."""

_REFUSED = "unable to execute QEMU agent command"
"""What libvirt says of an agent that answers that it will not, such as one without hwclock."""

MOST_ADDRESSES = 16
"""What is kept of them."""
MOST_SAID = 256
"""Interfaces, and addresses of one, of an agent that is believed: libvirt passes on four million."""


class GuestAgent:
    """The agent of one guest, which may not be there."""

    def __init__(self, guest: LibvirtGuest, macs: Iterable[str], log: Logger) -> None:
        self.addresses: tuple[str, ...] = ()
        """Of the guest's NICs, as it has last said."""
        self._guest = guest
        self._macs = frozenset(macs)
        self._log = log
        self._lock = threads.Lock()
        self._is_asked = False
        self._run = 0
        """The run of the guest, by libvirt's number of its domain, of which an answer is limited."""
        self._is_late = False
        """Whether the guest's clock has stood still."""
        self._due = 0.0
        """When it is to be asked again, by the monotonic clock."""
        self._wait = ASK_INTERVAL
        self._is_mute = False
        """Whether it has not answered the last question."""

    def look(self) -> None:
        """Have it asked where it is time to; nothing is waited for. Called by libvirt's event thread too."""
        with self._lock:
            if self._is_asked or not self._guest.watch.has_agent or monotonic() < self._due:
                return
            self._is_asked = True
        try:
            threads.start("the guest agent", self._ask)
        except errors.MachineFault:
            self._is_asked = False  # the next STATUS tries again

    def resumed(self) -> None:
        """The guest goes on after it has stood still."""
        self._is_late = True
        if not self._is_mute:
            self._due = 0.0
        self.look()

    def power_off(self, seconds: float) -> bool:
        """Have it power its guest off; whether it does. Waits so long at most."""
        if not self._guest.watch.has_agent or self._is_mute:
            return False
        taken = threads.Flag()
        obeys: list[bool] = []

        def ask() -> None:
            with suppress(libvirt.libvirtError, errors.Fault):
                self._guest.call(self._power_off)
                obeys.append(True)
            taken.set()

        try:
            threads.start("power off by the guest agent", ask)
        except errors.MachineFault:
            return False
        taken.wait(min(seconds, POWER_OFF_SECONDS))
        return bool(obeys) or self._guest.watch.gone.is_set()

    def _power_off(self, domain: libvirt.virDomain) -> None:
        # libvirt waits for a minute until the guest is off, and not for the guest's answer: there is none.
        self._limit(domain)
        domain.shutdownFlags(libvirt.VIR_DOMAIN_SHUTDOWN_GUEST_AGENT)

    def _ask(self) -> None:
        is_mute = True
        try:
            self._guest.call(self._hear)
            is_mute = False
        except (libvirt.libvirtError, errors.Fault) as error:
            if "not connected" in str(error):
                self._guest.watch.has_agent = is_mute = False  # there is none, after events were missed
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
            self.addresses = believed(
                domain.interfaceAddresses(libvirt.VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_AGENT), self._macs
            )

    def _limit(self, domain: libvirt.virDomain) -> None:
        """Without a limit libvirt waits for ever; it forgets the limit with the run."""
        if (run := domain.ID()) != self._run:
            domain.agentSetResponseTimeout(ANSWER_SECONDS)
            self._run = run


def accompany(_identity: Identity, log: Logger, machine: "RunningMachine", is_late: int, *macs: str) -> None:
    """Have the agent of a guest that runs; `is_late` says that its clock has stood still."""
    machine.agent = agent = GuestAgent(machine.guest, macs, log)
    machine.guest.watch.agent_came = agent.look
    if is_late:
        agent.resumed()
    agent.look()  # it may have come before


def believed(found: "dict[str, Any]", macs: Iterable[str] = ()) -> tuple[str, ...]:
    """The addresses among what was said of a guest's interfaces: those by which it may be reached, IPv4 first.

    Where `macs` are given, only those of interfaces that have one of them.
    """
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
    """An address in its usual form; empty for none, and for one that means nothing outside the guest."""
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
