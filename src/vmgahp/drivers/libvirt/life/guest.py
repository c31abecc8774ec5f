"""One domain of libvirt: its look-up, queries, operations, start, and screenshot."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TypeVar

import libvirt

from vmgahp import errors
from vmgahp.drivers.base import Logger
from vmgahp.drivers.libvirt.link import domains, faults
from vmgahp.drivers.libvirt.link.connection import LibvirtConnection
from vmgahp.drivers.libvirt.start.disks import DiskFiles
from vmgahp.host import system_logs, wait
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
        self._domain = faults.find(connection, self.name, self.uuid)
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
                raise errors.ClientFault(
                    cannot, f"{self.name}: libvirt knows no {doing} of domains of type {self.type}."
                ) from error
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
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read(1 << 16)
        except OSError:
            return False
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
