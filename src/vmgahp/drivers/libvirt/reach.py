"""The way into a guest: ports of this machine that lead to ports of the guest's.

Which they are is decided once for each start, and nobody else's VM gets them until this one is gone: a file of their
name lies in a directory of the server's, which counts for as long as that lives. Who listens depends on the network of
the first NIC: passt, which libvirt tells by the XML; QEMU's slirp, which is told by its monitor whenever its guest was
made or restored; else a relay (`vmgahp.drivers.libvirt.relay`). A guest is never worse off for it: where there is no
way it runs without, and its owner reads so.
"""

import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from time import monotonic, sleep
from xml.etree import ElementTree as etree

from vmgahp import errors, findings
from vmgahp.config import Settings
from vmgahp.drivers.base import Logger
from vmgahp.drivers.libvirt import binding as libvirt
from vmgahp.drivers.libvirt import relay
from vmgahp.drivers.resources import WayIn
from vmgahp.host import packages, runtime_dir
from vmgahp.host.job_user import Identity
from vmgahp.host.run import which

ACCESS_FILE = "vm_access.json"

CLAIM = "port-"
"""What the name of a port's claim begins with."""

LOCK_SECONDS = 2.0
"""To wait for others that choose a port; where a stranger holds up whoever has no directory of root's, none waits."""

_SLIRPS = "hostnet0"
"""QEMU's name for the first NIC's end on the host (``qemuAssignDeviceNetAlias`` in libvirt's sources)."""


def claim(settings: Settings, wanted: tuple[int, ...], means: str, log: Logger) -> WayIn:
    """Choose a port of this machine for each of the guest's, as far as there are any. Raises `errors.MachineFault`."""
    offered, address = ports_of(settings), address_of(settings)
    room = runtime_dir.runtime_dir()
    found: list[tuple[int, int]] = []
    with _alone(os.path.dirname(room)):
        taken = runtime_dir.claimed(CLAIM)
        free = (port for port in offered if f"{CLAIM}{port}" not in taken and is_free(address, port))
        for guests, ours in zip(wanted, free, strict=False):
            os.close(os.open(f"{room}/{CLAIM}{ours}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            found.append((guests, ours))
    if len(found) < len(wanted):
        lacking = ", ".join(map(str, wanted[len(found) :]))
        log(f"no port is left in VM_SSH_PORTS at {address}: none leads to the guest's {lacking}")
    return WayIn(means, address, tuple(found), room)


def release(_identity: Identity, _log: Logger, room: str) -> None:
    """The VM is gone: others may have its ports."""
    runtime_dir.remove(room)


def ports_of(settings: Settings) -> list[int]:
    """The ports of VM_SSH_PORTS. Raises `errors.MachineFault`."""
    found: list[int] = []
    for word in settings.strings("VM_SSH_PORTS"):
        first, dash, last = word.partition("-")
        numbers = (first, last) if dash else (first, first)
        if not all(number.isascii() and number.isdigit() and len(number) < 6 for number in numbers):
            raise _bad_ports(settings)
        low, high = map(int, numbers)
        if not 0 < low <= high < 1 << 16:
            raise _bad_ports(settings)
        found += range(low, high + 1)
    return list(dict.fromkeys(found))


def _bad_ports(settings: Settings) -> errors.MachineFault:
    return errors.MachineFault(
        f"VM_SSH_PORTS = {settings.string('VM_SSH_PORTS')} ({settings.where('VM_SSH_PORTS')}) is no list of ports.",
        "write ports and ranges of them from 1 to 65535, such as 22000-22999.",
    )


def address_of(settings: Settings) -> str:
    """VM_SSH_ADDRESS. Raises `errors.MachineFault` for what is no address."""
    address = settings.string("VM_SSH_ADDRESS")
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError, ValueError):
            return socket.inet_ntop(family, socket.inet_pton(family, address))
    raise errors.MachineFault(
        f"VM_SSH_ADDRESS = {address} ({settings.where('VM_SSH_ADDRESS')}) is no IP address.",
        "write an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all that it has.",
    )


def judge(settings: Settings, networks: Sequence[str]) -> findings.Finding | None:
    """Whether jobs of this machine can have a way in; None where the administrator wants none."""
    if not settings.string("VM_SSH_PORTS"):
        return None
    looked_at = "VM_SSH_PORTS, VM_SSH_ADDRESS"
    try:
        ports, address = ports_of(settings), address_of(settings)
        if not is_free(address, 0):
            raise errors.MachineFault(f"{address} is no address of this machine.", "correct VM_SSH_ADDRESS.")
        if not networks:
            raise errors.MachineFault("VMs have no network here, by which they are reached.", "see VM_NETWORKING.")
        if networks != ["user"] and which(relay.PROGRAM) is None:
            raise errors.MachineFault(f"{relay.PROGRAM} is not installed.", f"{packages.of_system(relay.PROGRAM)}.")
    except errors.MachineFault as fault:
        return findings.judge("ssh", looked_at, fault, "", findings.OFF)
    return findings.Finding("ssh", findings.OK, looked_at, f"{len(ports)} ports at {address} lead to those of guests")


def is_free(address: str, port: int) -> bool:
    """Whether nobody listens there, and it is an address of this machine."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended are no hindrance
        try:
            trial.bind((address, port))
        except OSError:
            return False
    return True


@contextmanager
def _alone(base: str) -> Iterator[None]:
    """Nobody else chooses a port meanwhile, where that can be had."""
    from fcntl import LOCK_EX, LOCK_NB, flock

    descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    end = monotonic() + LOCK_SECONDS
    try:
        while monotonic() < end:
            try:
                flock(descriptor, LOCK_EX | LOCK_NB)
                break
            except BlockingIOError:
                sleep(0.01)
        yield
    finally:
        os.close(descriptor)


# A guest that was made or restored


def open_slirp(domain: libvirt.virDomain, access: WayIn, log: Logger) -> WayIn:
    """Have QEMU listen for a guest whose first NIC is on slirp, which forgets it with its process; the ways that there
    are then. Raises nothing.
    """
    opened = []
    for guests, ours in access.ports:
        try:
            said = domain.monitor(f"hostfwd_add {_SLIRPS} tcp:{access.address}:{ours}-:{guests}").strip()
        except (libvirt.libvirtError, ImportError) as error:
            said = str(error)
        if said:
            log(f"{domain.name()}: no way leads from port {ours} to the guest's {guests}: {said[:300]}")
        else:
            opened.append((guests, ours))
    return access._replace(ports=tuple(opened))


def without_taken(xml: str, log: Logger) -> str:
    """The XML of a VM without the ports that somebody has taken meanwhile; the very text where nobody has."""
    domain, given = etree.fromstring(xml), xml
    for interface in domain.iterfind("devices/interface"):
        for forward in interface.findall("portForward"):
            address = forward.get("address", "")
            taken = [each.get("start", "") for each in forward.findall("range")]
            taken = [port for port in taken if not port.isdigit() or not is_free(address, int(port))]
            if taken:
                log(f"{domain.findtext('name')}: somebody else listens at port {taken[0]}, by which it was reached")
                interface.remove(forward)
                given = ""
    return given or etree.tostring(domain, encoding="unicode")


def as_free(access: WayIn) -> WayIn:
    """The ways in without the ports at which somebody listens."""
    return access._replace(ports=tuple(pair for pair in access.ports if is_free(access.address, pair[1])))


# Who is to know


def tell(access: WayIn, name: str, working_dir: str, identity: Identity, log: Logger) -> None:
    """Tell the job's owner, and nobody else, where the way in is. Raises nothing."""
    ways = [{"guest_port": guests, "address": access.address, "port": ours} for guests, ours in access.ports]
    try:
        identity.write_scratch(working_dir, ACCESS_FILE, (json.dumps({"ssh": ways}) + "\n").encode())
    except (errors.Fault, OSError) as error:
        log(f"{name}: could not write {ACCESS_FILE}: {error}")
    log(f"{name} is reached by {access.means}: {access.words or 'no port'}")
