"""Other hypervisors of libvirt than QEMU: the features that work with any, and those limited to QEMU.

With VM_LIBVIRT_URI and VM_LIBVIRT_DOMAIN_TYPE the VM type libvirt is served by any hypervisor for which libvirt has a
driver. Such a driver starts and ends domains and reports their state. The features that depend on QEMU (the user's
uid, the console's socket, memory images) are not used with other hypervisors, each of which has its own.
"""

import re
from collections.abc import Sequence
from time import monotonic
from typing import NamedTuple
from xml.etree import ElementTree as etree

import libvirt

from vmgahp import errors, findings
from vmgahp.config import Settings
from vmgahp.drivers.base import Survey, Value
from vmgahp.drivers.libvirt import faults, qemu_process
from vmgahp.drivers.libvirt.connection import LibvirtConnection
from vmgahp.drivers.libvirt.host_checks import look_at_bridge
from vmgahp.findings import BAD, OFF, OK, Finding
from vmgahp.host import libvirt_daemons

SETTING = "VM_LIBVIRT_DOMAIN_TYPE"
CONNECTING = 1.5
"""Seconds to retry a refused connection, as while libvirtd is being restarted."""

TELLING = 0.3
"""Seconds before the end of all checks at which a libvirt that has not answered is given up.

This gives a better reason than the end of all checks.
"""


class Hypervisor(NamedTuple):
    """The self-description of a driver of libvirt."""

    name: str
    """The result of ``virConnectGetType``: LXC, Xen, TEST and so on."""
    version: int
    libvirt_version: int
    os_types: tuple[str, ...]
    """The OS types of its domains of the wanted type: ``hvm`` for machines, ``exe`` for containers; empty for none."""

    def attributes(self, networking: list[str], *, suspend: bool = False, checkpoint: bool = False) -> dict[str, Value]:
        """Return the attributes to publish."""
        return {
            "version": version(self.version),
            "libvirt_version": version(self.libvirt_version),
            "suspend": suspend,
            "checkpoint": checkpoint,
            "snapshot": False,
            "networking": ",".join(networking),
            "gpu": False,
        }


def wanted_type(vm_type: str, settings: Settings) -> str:
    """Return the domain type that settings and VM type determine; empty for KVM or, if allowed, TCG.

    Raises `errors.MachineFault` for a setting that is not a word.
    """
    if vm_type == "qemu":
        return "qemu"
    kind = settings.string(SETTING).lower() if vm_type == "libvirt" else ""
    if kind and not re.fullmatch(r"[a-z]{1,20}", kind):
        raise errors.MachineFault(
            f"{SETTING} = {kind} ({settings.where(SETTING)}) is no domain type.",
            f"set {SETTING} to what virsh capabilities shows as <domain type=…>, such as lxc.",
        )
    return kind


def ask(connection: LibvirtConnection, domain_type: str) -> Hypervisor:
    """Query the libvirt at VM_LIBVIRT_URI about a domain type. Raises `errors.MachineFault`."""

    def say(libvirtd: libvirt.virConnect) -> Hypervisor:
        guests = etree.fromstring(libvirtd.getCapabilities()).iterfind("guest")
        return Hypervisor(
            libvirtd.getType(),
            libvirtd.getVersion(),
            libvirtd.getLibVersion(),
            tuple(
                dict.fromkeys(
                    guest.findtext("os_type") or ""
                    for guest in guests
                    if guest.find(f"arch//domain[@type='{domain_type}']") is not None
                )
            ),
        )

    try:
        return connection.call(say)
    except libvirt.libvirtError as error:
        raise faults.from_libvirt(error, "asking for its capabilities") from error


def require(connection: LibvirtConnection, domain_type: str, settings: Settings) -> Hypervisor:
    """Query the libvirt as `ask` does, and check that jobs can be described to it.

    At a start libvirt would report a missing driver as an invalid argument, the same as a job's error. Raises
    `errors.MachineFault`.
    """
    found = ask(connection, domain_type)
    if not found.os_types:
        raise errors.MachineFault(
            f"{SETTING} = {domain_type}, and the libvirt at {connection.uri} has no domains of that type.",
            "set VM_LIBVIRT_URI to the connection that has them, such as lxc:///system, and see virsh -c URI "
            "capabilities.",
        )
    if "hvm" not in found.os_types and not settings.xml_script():
        raise errors.MachineFault(
            f"{SETTING} = {domain_type} has no machines but {', '.join(found.os_types)}, which the built-in "
            "description of a VM is not for.",
            "set LIBVIRT_XML_SCRIPT to a program of yours that describes the container of a job.",
        )
    return found


def require_fit(vm_type: str, connection: LibvirtConnection, settings: Settings) -> None:
    """Check the hypervisor of the VM type as `require` does, unless it is QEMU.

    Called when a job is refused: if the machine's hypervisor cannot run any job, this one is not to blame.
    """
    domain_type = wanted_type(vm_type, settings)
    if not qemu_process.is_qemu(domain_type):
        require(connection, domain_type, settings)


def may_be_diskless(vm_type: str, settings: Settings) -> bool:
    """Return True if jobs need no disk: a container gets its root from the administrator's script."""
    return not qemu_process.is_qemu(wanted_type(vm_type, settings)) and bool(settings.xml_script())


def no_saving(domain_type: str) -> str:
    """Return the reason why a VM's memory cannot be saved to a file; empty if it can."""
    if qemu_process.is_qemu(domain_type):
        return ""
    return f"the form in which libvirt saves domains of type {domain_type} is not known to this daemon"


def survey(settings: Settings, connection: LibvirtConnection, domain_type: str, end: float) -> Survey:
    """Survey the machine as `vmgahp.drivers.base.Driver.survey` does, for any hypervisor."""
    wanted, checks = settings.networking_types(), findings.Checks(end)
    let_answer_until(connection, end)
    checks.begin("type", lambda: require(connection, domain_type, settings))
    begin_networks(checks, connection, settings, wanted, end)
    host = checks.outcome("type")
    looked_at = f"domains of type {domain_type} at {connection.uri}"
    if not isinstance(host, Hypervisor):
        return Survey([findings.judge("libvirt", looked_at, host, "", BAD)])
    seen = f"libvirt {version(host.libvirt_version)} has them, with {host.name} {version(host.version)}"
    found = [Finding("libvirt", OK, looked_at, seen)]
    active = active_network(checks, wanted)
    networks = [_network(kind, host, checks, active, settings) for kind in wanted]
    networking = [kind for kind, finding in zip(wanted, networks, strict=True) if finding.verdict == OK]
    return Survey(
        [*found, *networks],
        attributes=host.attributes(networking),
        machine_attributes=published(active),
        networking=networking,
        hypervisors=[domain_type],
        vm_types=["libvirt"],
    )


def version(number: int) -> str:
    """Return libvirt's version number, 1,000,000 * major + 1,000 * minor + release, in the usual form."""
    return f"{number // 1000000}.{number // 1000 % 1000}.{number % 1000}"


def seconds_left(end: float, telling: float = TELLING) -> float:
    """Return the timeout of a call to libvirt, which ends `telling` seconds before all checks do."""
    return round(max(TELLING, end - monotonic() - telling), 1)


def let_answer_until(connection: LibvirtConnection, end: float) -> None:
    """Give libvirt nearly all of the time that is left for the checks."""
    connection.deadline = seconds_left(end)
    connection.refused_deadline = CONNECTING


def _network(kind: str, host: Hypervisor, checks: findings.Checks, active: object, settings: Settings) -> Finding:
    if kind == "bridge":
        return judge_bridge(checks.outcome("bridge"))
    if kind == "user":
        seen = f"{host.name} has none: it is QEMU's."
        return Finding("network user", OFF, "user networking", seen, "leave user out of VM_NETWORKING_TYPE.")
    return judge_nat(settings.string("VM_NAT_NETWORK"), active)


def judge_bridge(outcome: object) -> Finding:
    """Return the finding about the bridge of the settings, by the result or the fault of `look_at_bridge`."""
    looked_at = "the bridge of VM_NETWORKING_BRIDGE_INTERFACE"
    return findings.judge("network bridge", looked_at, outcome, str(outcome), OFF)


def begin_networks(
    checks: findings.Checks, connection: LibvirtConnection, settings: Settings, wanted: Sequence[str], end: float
) -> None:
    """Begin the checks of the bridge and, in parallel, of the network VM_NAT_NETWORK, which another daemon may have."""
    if "bridge" in wanted:
        checks.begin("bridge", lambda: look_at_bridge(settings))
    checks.begin("nat", lambda: is_active(connection, settings.string("VM_NAT_NETWORK"), seconds_left(end)))


def active_network(checks: findings.Checks, wanted: Sequence[str]) -> object:
    """Return True if the network of VM_NAT_NETWORK is active, False if not, or a fault.

    If the settings do not offer this network, a daemon that hangs is not waited for.
    """
    return checks.outcome("nat", None if "nat" in wanted else monotonic() + TELLING)


def published(active: object) -> dict[str, Value]:
    """Return the attribute about the network of VM_NAT_NETWORK, where it is known."""
    return {"HasVirshDefaultNetwork": active} if isinstance(active, bool) else {}


def judge_nat(network: str, active: object) -> Finding:
    """Judge the network of VM_NAT_NETWORK by `active_network`."""
    looked_at = f"the libvirt network {network} (VM_NAT_NETWORK)"
    if active is False:
        active = errors.MachineFault(
            f"{network} is not active, or not defined.", f"virsh net-start {network}; virsh net-autostart {network}"
        )
    return findings.judge("network nat", looked_at, active, f"{network} is active", OFF)


def is_active(connection: LibvirtConnection, network: str, seconds: float) -> bool:
    """Tell whether libvirt has a network of this name and it is up. Raises `errors.MachineFault` if it cannot say."""
    daemon = libvirt_daemons.of_networks()
    try:
        return bool(connection.call(lambda opened: opened.networkLookupByName(network).isActive(), seconds=seconds))
    except libvirt.libvirtError as error:
        if not faults.is_of_another_daemon(error):
            return False  # no such network, or the hypervisor's driver has no networks
        raise errors.MachineFault(
            f"{daemon} does not run: {faults.message_of(error)}.", f"systemctl enable --now {daemon}.socket"
        ) from error
    except errors.MachineFault as fault:
        raise errors.MachineFault(
            f"{daemon} has not said whether {network} is active: {fault.problem}",
            f"see what {daemon} hangs on, or restart {daemon}; guests survive that.",
        ) from fault
