"""The port forwarding to a guest: ports of this machine that lead to ports of the guest's.

The ports are chosen once for each start, and other VMs cannot get them until this one is gone: each is claimed by a
file of its name in a directory of the server's, which is valid as long as that lives. The network of the first NIC
determines the listener: passt for user networking, which libvirt configures from the XML, else a `Relay`. A failure
does not affect the guest: it runs without the forwarding, and its owner is told so.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from xml.etree import ElementTree as etree

from vmgahp import errors, findings
from vmgahp.config import Settings
from vmgahp.drivers.resources import PortForwards
from vmgahp.drivers.surveyor import Logger
from vmgahp.host import packages, run, runtime_dir, system_calls
from vmgahp.host.job_user import Identity
from vmgahp.host.run import which

ACCESS_FILE = "vm_access.json"
CLAIM = "port-"
"""The prefix of the name of a port's claim."""


def claim(settings: Settings, wanted: tuple[int, ...], means: str, log: Logger) -> PortForwards:
    """Choose a port of this machine for each of the guest's, as far as ports are left. Raises `errors.MachineFault`."""
    offered, address = ports_of(settings), address_of(settings)
    directory = runtime_dir.runtime_dir()
    found: list[tuple[int, int]] = []
    with runtime_dir.claiming(directory):
        taken = runtime_dir.claimed(CLAIM)
        free = (port for port in offered if f"{CLAIM}{port}" not in taken and is_free(address, port))
        for guests, ours in zip(wanted, free, strict=False):
            os.close(os.open(f"{directory}/{CLAIM}{ours}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            found.append((guests, ours))
    if len(found) < len(wanted):
        lacking = ", ".join(map(str, wanted[len(found) :]))
        log(f"all ports of VM_SSH_PORTS at {address} are in use: none leads to the guest's {lacking}")
    return PortForwards(means, address, tuple(found), directory)


def ports_of(settings: Settings) -> list[int]:
    """Return the ports of VM_SSH_PORTS. Raises `errors.MachineFault` if they are invalid."""
    found: list[int] = []
    for word in settings.strings("VM_SSH_PORTS"):
        matched = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", word)
        low, high = (int(matched[1]), int(matched[2] or matched[1])) if matched else (0, 0)
        if not 0 < low <= high < 1 << 16:
            said = f"{settings.string('VM_SSH_PORTS')} ({settings.where('VM_SSH_PORTS')})"
            hint = "give ports and ranges of them from 1 to 65535, such as 22000-22999."
            raise errors.MachineFault(f"VM_SSH_PORTS = {said} is not a list of ports.", hint)
        found += range(low, high + 1)
    return list(dict.fromkeys(found))


def address_of(settings: Settings) -> str:
    """Return VM_SSH_ADDRESS in its usual form. Raises `errors.MachineFault` if it is not an address."""
    address = settings.string("VM_SSH_ADDRESS")
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError, ValueError):
            return socket.inet_ntop(family, socket.inet_pton(family, address))
    problem = f"VM_SSH_ADDRESS = {address} ({settings.where('VM_SSH_ADDRESS')}) is not an IP address."
    hint = "give an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all that it has."
    raise errors.MachineFault(problem, hint)


def judge(settings: Settings, networks: Sequence[str], *, passt: bool) -> findings.Finding:
    """Return the finding about port forwarding, where it is set up. `passt` provides user networking."""
    subject = "VM_SSH_PORTS, VM_SSH_ADDRESS"
    try:
        ports, address = ports_of(settings), address_of(settings)
        if not is_free(address, 0):
            raise errors.MachineFault(f"{address} is not an address of this machine.", "correct VM_SSH_ADDRESS.")
        if not networks:
            raise errors.MachineFault("VMs have no network here, so no port can lead to one.", "see VM_NETWORKING.")
        if networks == ["user"] and not passt:
            problem = "The user networking of VMs is QEMU's own here, which forwards no ports."
            hint = "install passt, and a libvirt that has it (virsh domcapabilities), or offer nat or bridge."
            raise errors.MachineFault(problem, hint)
        if networks != ["user"] and which(SOCAT) is None:
            raise errors.MachineFault(f"{SOCAT} is not installed.", f"{packages.of_system(SOCAT)}.")
    except errors.MachineFault as fault:
        return findings.judge("ssh", subject, fault, "", findings.OFF)
    return findings.Finding("ssh", findings.OK, subject, f"{len(ports)} ports at {address} lead to those of guests")


def is_free(address: str, port: int) -> bool:
    """Return True if the address is one of this machine and the port is free."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore connections in TIME_WAIT
        try:
            trial.bind((address, port))
        except OSError:
            return False
    return True


def without_taken(xml: str, log: Logger) -> str:
    """Return the XML of a VM without the ports that were taken meanwhile; the same text if none was."""
    domain, given = etree.fromstring(xml), xml
    for interface in domain.iterfind("devices/interface"):
        for forward in interface.findall("portForward"):
            address = forward.get("address", "")
            taken = [each.get("start", "") for each in forward.findall("range")]
            taken = [port for port in taken if not port.isdigit() or not is_free(address, int(port))]
            if taken:
                log(f"{domain.findtext('name')}: port {taken[0]} leads to it no longer, another process listens there")
                interface.remove(forward)
                given = ""
    return given or etree.tostring(domain, encoding="unicode")


def as_free(access: PortForwards) -> PortForwards:
    """Return the port forwarding without the ports that are in use by others."""
    return access._replace(ports=tuple(pair for pair in access.ports if is_free(access.address, pair[1])))


def tell(access: PortForwards, name: str, working_dir: str, identity: Identity, log: Logger) -> None:
    """Write the forwarded ports to a file for the job's owner only. Raises nothing."""
    ways = [{"guest_port": guests, "address": access.address, "port": ours} for guests, ours in access.ports]
    try:
        identity.write_scratch(working_dir, ACCESS_FILE, (json.dumps({"ssh": ways}) + "\n").encode())
    except (errors.Fault, OSError) as error:
        log(f"{name}: could not write {ACCESS_FILE}: {error}")
    log(f"{name} is reached by {access.means}: {access.words or 'no port'}")


# The relay


SOCAT = "socat"
MOST_AT_ONCE = 64
"""The most connections to one port."""
_PATIENT = "connect-timeout=10,keepalive,keepidle=30,keepintvl=10,keepcnt=3"
"""The options by which a guest that has gone is noticed within a minute."""


class Relay:
    """The relays of one guest, a process for each port; no other user can listen there before or after them."""

    def __init__(
        self, identity: Identity, log: Logger, name: str, address: str, ports: Sequence[tuple[int, int]]
    ) -> None:
        self._identity = identity
        self._log = log
        self._name = name
        self._address = address
        self.ports: list[tuple[int, int]] = []
        """The ports that lead to the guest: a process of others' may have taken one since it was chosen."""
        self._reserved: list[int] = []
        for guests, ours in ports:
            try:
                self._reserved.append(identity.run(system_calls.reserve_port, address, ours))
                self.ports.append((guests, ours))
            except (OSError, errors.MachineFault) as error:
                log(f"{name}: port {ours} does not lead to the guest's {guests}: {error}")
        self._guest = ""
        self._failed = False
        self._running: list[subprocess.Popen[bytes]] = []

    def lead_to(self, guest: str) -> None:
        """Lead to the guest's current address; called with each STATUS. Raises nothing."""
        if self._guest == guest and (self._failed or all(relay.poll() is None for relay in self._running)):
            return
        self._stop()
        self._guest, self._failed = guest, False
        try:
            if why := self._why_not(guest):
                raise OSError(0, why)
            for guests, ours in self.ports:
                self._running.append(self._run(guests, ours))
        except OSError as error:
            self._failed = True  # until it has another address
            hint = packages.of_system(SOCAT)
            self._log(f"{self._name}: nothing leads to the guest at {guest}: {error.strerror} ({hint})")
            self._stop()

    def end(self) -> None:
        """End the relays and all their connections, and give the ports back. Raises nothing."""
        self._stop()
        for reserved in self._reserved:
            os.close(reserved)
        self._reserved.clear()

    def _stop(self) -> None:
        for relay in self._running:
            with suppress(OSError):  # it is gone
                os.killpg(relay.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # a tracer of the job's user can keep it from being reaped
                relay.wait(1.0)
        self._running.clear()

    @staticmethod
    def _why_not(guest: str) -> str:
        """Return the reason why the address must not be used; empty if it may. A guest may report another's address."""
        number = socket.inet_pton(socket.AF_INET6 if ":" in guest else socket.AF_INET, guest)
        first = number[0]
        if first in (0, 127) or first >= 224 or number[:2] in (b"\xa9\xfe", b"\xfe\x80"):
            return "that is no address of a guest"
        return "that is this machine itself" if is_free(guest, 0) else ""

    def _run(self, guests: int, ours: int) -> subprocess.Popen[bytes]:
        (tcp, here), (tcp_there, there) = (
            ("TCP6", f"[{each}]") if ":" in each else ("TCP4", each) for each in (self._address, self._guest)
        )
        listen = f"{tcp}-LISTEN:{ours},bind={here},reuseaddr,reuseport,fork,max-children={MOST_AT_ONCE},keepalive"
        return run.begin([SOCAT, listen, f"{tcp_there}:{there}:{guests},{_PATIENT}"], self._identity)
