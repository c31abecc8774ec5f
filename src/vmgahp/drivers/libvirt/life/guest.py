"""One domain of libvirt: its look-up, operations, start and screenshot; and its guest's agent."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton
from time import monotonic, time
from typing import Any, TypeVar

import libvirt

from vmgahp import errors
from vmgahp.drivers.libvirt.link import domains, faults
from vmgahp.drivers.libvirt.link.connection import LibvirtConnection
from vmgahp.drivers.libvirt.start.disks import DiskFiles
from vmgahp.drivers.surveyor import Logger
from vmgahp.host import proc, system_logs, wait
from vmgahp.host.job_user import Identity

Result = TypeVar("Result")

Make = Callable[[libvirt.virConnect], libvirt.virDomain]
Check = Callable[[libvirt.virConnect, libvirt.virDomain, str], None]
"""A function that checks a domain that was made and does not run yet, and its live XML."""
EVENT_WAIT = 2.0
"""Seconds to wait for a domain's event, which is missing if libvirtd was down then."""

NAMES = {"image/png": "vm_screenshot.png", "image/x-portable-pixmap": "vm_screenshot.ppm"}
"""The file in the scratch directory for each media type that virDomainScreenshot returns."""
MOST_BYTES = 32 << 20
DEADLINE = 5.0
"""Seconds by which a screenshot may delay the operation on the VM."""
_CHUNK = 256 << 10


class LibvirtGuest:
    """A domain, identified by its name and UUID."""

    def __init__(self, name: str, uuid: str, domain_type: str, connection: LibvirtConnection, log: Logger) -> None:
        self.name = name
        self.uuid = uuid
        self.type = domain_type
        self.files: DiskFiles | None = None  # the files of the job's disks that its QEMU gets
        self.connection = connection
        self.watch = connection.watch(uuid, name)
        self._log = log
        self._domain: libvirt.virDomain | None = None
        self._is_shot = False
        self.noted_pid = 0
        """The pid of its process when that was last looked up. To act on the process, use `known_pid`."""

    def call(self, function: Callable[[libvirt.virDomain], Result], seconds: float = 0) -> Result:
        return self.connection.call(lambda connection: function(self.find(connection)), seconds=seconds)

    def find(self, connection: libvirt.virConnect) -> libvirt.virDomain:
        self._domain = domains.find(connection, self.name, self.uuid)
        return self._domain

    def info(self, connection: libvirt.virConnect) -> list[int]:
        """Return virDomainGetInfo, without another look-up of the domain: a query about a wrong one does no harm."""
        domain = self._domain
        if domain is None or domain.connect() is not connection:
            domain = self.find(connection)
        figures: list[int] = domain.info()
        return figures

    def operate(
        self, doing: str, function: Callable[[libvirt.virDomain], Result], cannot: str = "", seconds: float = 0
    ) -> Result:
        """Operate on the domain. Raises ClientFault with the code `cannot` if its hypervisor does not support that."""
        self.watch.ours = True
        try:
            return self.call(function, seconds)
        except libvirt.libvirtError as error:
            if cannot and faults.is_unsupported(error):
                problem = f"{self.name}: libvirt knows no {doing} of domains of type {self.type}."
                raise errors.ClientFault(cannot, problem) from error
            raise faults.from_libvirt(error, f"{doing} {self.name}") from error
        finally:
            self.watch.ours = False

    # Starting

    def create(self, xml: str, connection: libvirt.virConnect) -> libvirt.virDomain:
        """Make the domain for `begin`: paused, if its libvirt driver can start it so."""
        with self.defined(connection, xml) as domain:
            if domain is not None:
                domain.createWithFlags(libvirt.VIR_DOMAIN_START_PAUSED)
                return domain
        try:
            return connection.createXML(xml, libvirt.VIR_DOMAIN_START_PAUSED)
        except libvirt.libvirtError as error:
            if not faults.is_unknown_flag(error):
                raise
        return connection.createXML(xml, 0)

    @contextmanager
    def defined(self, connection: libvirt.virConnect, xml: str) -> Iterator[libvirt.virDomain | None]:
        """Define the domain while it is made, since only such a one takes files; yields None if it gets no files."""
        if self.files is None:
            yield None
            return
        domain = connection.defineXML(xml)
        try:
            self.files.associate(domain)
            yield domain
        except BaseException:
            with suppress(libvirt.libvirtError):  # the first error says more
                domains.undefine(domain)
            raise
        domains.undefine(domain)

    def begin(self, make: Make, look: Check) -> None:
        """Make the domain, paused, and let it run after `look`. Raises `libvirt.libvirtError`, and those of `look`."""

        def begin(connection: libvirt.virConnect) -> None:
            with self.files.leased() if self.files else nullcontext(lambda: None) as require_still:
                domain = make(connection)
                if domains.is_qemu(self.type):
                    self.pid()  # needed for its last statistics
                look(connection, domain, domain.XMLDesc())
                require_still()
                self._let_begin(domain)

        self.watch.gone.clear()
        self.watch.resumed.clear()
        self.watch.was_saved = False
        self.watch.ours = True
        try:
            self.connection.once(begin)
            # The events come later than the answers; while `ours` is set they are not logged as others' doing.
            self.watch.resumed.wait(EVENT_WAIT)
        finally:
            self.watch.ours = False

    def _let_begin(self, domain: libvirt.virDomain) -> None:
        if domain.info()[0] != libvirt.VIR_DOMAIN_PAUSED and not domains.is_qemu(self.type):
            self.watch.resumed.set()
            return
        try:
            domain.resume()
        except libvirt.libvirtError as error:
            if not faults.is_connection_loss(error):
                raise
            self._log(f"{self.name} was told to run, and libvirtd went away: {error}")
            with suppress(libvirt.libvirtError, errors.Fault):  # it may have gone before it has told QEMU
                self.call(let_run)

    # Its process

    def pid(self) -> int:
        """Return the pid of the process that runs the guest, or 0 if there is none on this machine."""
        if not self.known_pid():
            self.noted_pid = next(filter(self.is_ours, self._pids()), 0)
        return self.noted_pid

    def known_pid(self) -> int:
        """Return the pid of the process found by the last look-up, if it still runs the guest; else 0."""
        return self.noted_pid if self.is_ours(self.noted_pid) else 0

    def _pids(self) -> Iterator[int]:
        if self.type != "lxc":
            yield from domains.noted(self.name)
            return
        with suppress(libvirt.libvirtError, errors.Fault):
            yield int(self.call(lambda domain: domain.ID()))  # of the ancestor of all processes of the container

    def why_killed(self) -> tuple[str, bool]:
        """Return the reason why the kernel killed its process, or empty, and True if that was for the VM's limit."""
        killed = system_logs.killed(self.noted_pid) if self.noted_pid and domains.is_qemu(self.type) else None
        if killed is None:
            return "", False
        if not any(name in killed.group for name in ("/qemu-", "/machine-qemu")):  # as libvirt calls a domain's
            whole = f"the control group {killed.group}" if killed.group else "the machine"
            return f"out of memory: {whole} had none left, and the kernel has ended this VM's QEMU for it", False
        return f"out of memory: the VM's limit was {killed.limit_kib >> 10} MiB for QEMU and its guest", True

    def is_ours(self, pid: int) -> bool:
        """Return True if the process is this domain's: QEMU's command line has its UUID, libvirt_lxc's its name."""
        if pid <= 0:
            return False
        words = proc.command_line(pid)
        if self.type == "lxc":
            return b"libvirt_lxc" in words and self.name.encode() in words.split(b"\0")
        return self.uuid.encode() in words

    # Its display

    def take_screenshot(self, directory: str, identity: Identity) -> None:
        """Take a screenshot, once, and keep it, within the deadline. Raises nothing: a failure is logged."""
        if self._is_shot:
            return
        self._is_shot = True
        try:
            task = wait.Task(f"the screenshot of {self.name}", partial(self._shoot, directory, identity))
            if not task.wait(DEADLINE):
                self._log(f"{self.name}: its screenshot could not be taken within {DEADLINE:.0f} s")
        except errors.MachineFault as fault:
            self._log(fault.problem)

    def _shoot(self, directory: str, identity: Identity) -> None:
        try:
            kind, picture = self.connection.once(self._get_picture)
            identity.write_scratch(directory, NAMES[kind], picture)
            self._log(f"{self.name}: its screenshot is in {NAMES[kind]}")
        except (libvirt.libvirtError, errors.Fault, OSError, ValueError, KeyError) as error:
            self._log(f"{self.name}: its screenshot cannot be taken: {error}")

    def _get_picture(self, connection: libvirt.virConnect) -> tuple[str, bytes]:
        """Return the media type and the picture. Raises `libvirt.libvirtError`, and ValueError if it is too large."""
        domain = connection.lookupByUUIDString(self.uuid)
        stream = connection.newStream()
        kind = str(domain.screenshot(stream, 0))
        picture = bytearray()
        while chunk := stream.recv(_CHUNK):
            picture += chunk
            if len(picture) > MOST_BYTES:
                stream.abort()
                raise ValueError(f"it has more than {MOST_BYTES} bytes")
        stream.finish()
        return kind, bytes(picture)


def let_run(domain: libvirt.virDomain) -> None:
    """Resume a domain whose CPUs are paused."""
    if domain.info()[0] == libvirt.VIR_DOMAIN_PAUSED:
        domain.resume()


# Its guest's agent, with its addresses, clock and power-off
#
# The agent may be as hostile as its guest. It may answer never, at length, or with nonsense, and each query occupies
# one of libvirtd's workers until it is answered or given up. So no other thread waits for it: a separate thread makes
# one query at a time, with a timeout of `ANSWER_SECONDS`, and an agent that does not answer is asked more and more
# rarely. Of its answers only valid addresses are accepted, and only a limited number of them.


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

        def ask(domain: libvirt.virDomain) -> None:
            # libvirt waits a minute for the guest to be off, not for an answer: agents send none.
            self._limit(domain)
            domain.shutdownFlags(libvirt.VIR_DOMAIN_SHUTDOWN_GUEST_AGENT)

        try:
            asked = wait.Task("power off by the guest agent", lambda: self._guest.call(ask))
        except errors.MachineFault:
            return False
        obeys = asked.wait(min(seconds, POWER_OFF_SECONDS)) and asked.error is None
        return obeys or self._guest.watch.gone.is_set()

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
        self._asking = threading.Lock()  # held while libvirt is asked: a query that hangs occupies one of its workers
        self._due = 0.0  # the time from which it may be asked again, by the monotonic clock

    def find(self, call: Call) -> tuple[str, ...]:
        """Return the addresses; empty while unknown. `call` may hang, in a thread for which this waits `PATIENCE`."""
        if self.found or monotonic() < self._due or not self._asking.acquire(False):
            return self.found

        def ask() -> None:
            try:
                for source in _SOURCES:
                    with suppress(libvirt.libvirtError, errors.Fault):  # not every network has both
                        found = call(lambda domain: domain.interfaceAddresses(source, 0))  # noqa: B023 - called here
                        self.found = self.found or believed(found)
            finally:
                self._asking.release()

        try:
            if not wait.Task("the guest's address", ask).wait(PATIENCE):
                self._due = monotonic() + PAUSE
        except errors.MachineFault:
            self._asking.release()  # the next STATUS tries again
        return self.found
