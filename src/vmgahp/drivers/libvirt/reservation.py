"""IP addresses that VM_MAC_HOOK gives: reserved for the guest, and given back even after a crash.

Each address has a note in a directory of root's, from before it is reserved until the hook was told that it is free
again: at the end of the VM, or, if the server has died, by the next START or kill mode.
"""

from __future__ import annotations

import os
from fcntl import LOCK_EX, LOCK_NB, flock
from ipaddress import ip_address, ip_interface
from time import monotonic
from xml.etree import ElementTree as etree

import libvirt

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.drivers.base import Logger
from vmgahp.drivers.libvirt import faults
from vmgahp.drivers.libvirt.connection import LibvirtConnection
from vmgahp.host import runtime_dir
from vmgahp.host.job_user import Identity
from vmgahp.job import cloud_init
from vmgahp.job.spec import JobSpec, Nic

SECONDS = 20.0
"""Seconds for libvirtd and the hook to take the addresses of a VM back."""
HOOK_SECONDS = 9.0
"""Seconds for the hook to take one back, however long it may take to give one."""
HOOK = "VM_MAC_HOOK"
NAT = "nat"


# A VM that is to be started


def note(settings: Settings, uri: str, name: str, number: int, nic: Nic) -> str:
    """Write a note of an address of the hook's, for `give_back`, and return its path.

    Raises OSError and `errors.MachineFault`.
    """
    path = f"{_notes()}/{runtime_dir.owner()}-{os.urandom(8).hex()}"
    network = settings.string("VM_NAT_NETWORK") if _is_reserved(nic) else ""
    deadline = settings.call_timeout()
    lines = (name, number, nic.mac, _ip(nic), network, uri, settings.string(HOOK), deadline)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write("\n".join(map(str, lines)))
    return path


def hand_out(connection: LibvirtConnection, settings: Settings, spec: JobSpec, identity: Identity, log: Logger) -> None:
    """Configure the guest's addresses by its network's DHCP, or by cloud-init. Raises `errors.Fault`."""
    left = []
    for nic in spec.nics:
        if nic.address and _is_reserved(nic):
            _reserve(connection, settings, nic)
        elif nic.address:
            left.append(nic)
    if not left:
        return
    seed = spec.devices.user_data
    if seed is not None and not seed.network_config and all("/" in nic.address.split()[0] for nic in left):
        cloud_init.write(seed, spec.working_dir, identity, network=cloud_init.network_config(spec.nics))
        return
    for nic in left:
        why = f"its network is {nic.networking_type}, and the job has no user data for cloud-init, or a network-config"
        log(f"{spec.name}: nothing tells the guest the address {nic.address}: {why} of its own, or it has no prefix")


def _reserve(connection: LibvirtConnection, settings: Settings, nic: Nic) -> None:
    name, ip = settings.string("VM_NAT_NETWORK"), _ip(nic)

    def wrong(problem: str) -> errors.MachineFault:
        return errors.MachineFault(
            f"{HOOK} = {settings.string(HOOK)} gives {nic.mac} the address {ip}, and {problem}.",
            f"let it give each VM a free address of the network {name} (VM_NAT_NETWORK), best outside its DHCP range.",
        )

    def add(opened: libvirt.virConnect) -> None:
        network = opened.networkLookupByName(name)
        if not _is_in(network.XMLDesc(), ip):
            raise wrong("the network has no DHCP for it")
        _update(network, libvirt.VIR_NETWORK_UPDATE_COMMAND_ADD_LAST, nic.mac, ip)

    try:
        connection.call(add)
    except libvirt.libvirtError as error:
        if error.get_error_code() == libvirt.VIR_ERR_OPERATION_INVALID:
            raise wrong(f"libvirt says: {faults.message_of(error)}") from error
        raise faults.from_libvirt(error, f"reserving {ip}") from error


def _is_in(network: str, ip: str) -> bool:
    for element in etree.fromstring(network).iterfind("ip"):
        if element.find("dhcp") is None or element.get("family", "ipv4") != "ipv4":
            continue
        own = ip_interface(f"{element.get('address')}/{element.get('netmask') or element.get('prefix')}")
        outside = own.ip, own.network.network_address, own.network.broadcast_address
        if ip_address(ip) in own.network and ip_address(ip) not in outside:
            return True
    return False


def _is_reserved(nic: Nic) -> bool:
    return nic.networking_type == NAT and ":" not in _ip(nic)


def _ip(nic: Nic) -> str:
    return nic.address.split()[0].partition("/")[0]


def _update(network: libvirt.virNetwork, command: int, mac: str, ip: str) -> None:
    """Change the hosts of a network's DHCP, for as long as it is active. Raises `libvirt.libvirtError`."""
    host, live = f"<host mac='{mac}' ip='{ip}'/>", libvirt.VIR_NETWORK_UPDATE_AFFECT_LIVE
    network.update(command, libvirt.VIR_NETWORK_SECTION_IP_DHCP_HOST, -1, host, live)


def _notes() -> str:
    """Return the directory of the notes; without root it is this server's own, which is removed with it."""
    if os.geteuid() != 0:
        return runtime_dir.runtime_dir()
    runtime_dir.make_root_base()
    try:
        os.mkdir(runtime_dir.GIVEN, 0o700)
    except FileExistsError:
        pass
    return runtime_dir.GIVEN


# A VM that is gone


def sweep(log: Logger) -> None:
    """Give back the addresses that servers have left that have died. Raises nothing."""
    try:
        left = [f"{runtime_dir.GIVEN}/{name}" for name in _names() if not runtime_dir.is_alive(name)]
    except OSError as error:
        log(f"giving back addresses of {HOOK}: {error}")
    else:
        give_back(log, *left[:50])


def _names() -> list[str]:
    try:
        return os.listdir(runtime_dir.GIVEN) if os.geteuid() == 0 else []
    except FileNotFoundError:
        return []


def give_back(log: Logger, *paths: str) -> None:
    """Give back the addresses of these notes; each is locked, so that only one process handles it. Raises nothing.

    After `SECONDS` the rest is left to the next `sweep`.
    """
    end = monotonic() + SECONDS
    for path in paths:
        if (left := end - monotonic()) <= 0:
            log(f"addresses of {HOOK} are not given back yet: the others took more than {SECONDS:g} s")
            return
        try:
            with open(path) as file:
                flock(file, LOCK_EX | LOCK_NB)
                if os.fstat(file.fileno()).st_nlink:
                    _give_back(file.read().split("\n"), left, log)
                    os.unlink(path)
        except ValueError:  # the note of a server that died before it reserved anything
            os.unlink(path)
        except OSError as error:
            log(f"{path}: {error}")


def _give_back(words: list[str], seconds: float, log: Logger) -> None:
    from vmgahp.hooks.policy import release_mac  # only where a hook gave an address

    name, number, address, ip, network, uri, hook, deadline = words
    if network:
        connection = LibvirtConnection(uri, log)

        def delete(opened: libvirt.virConnect) -> None:
            _update(opened.networkLookupByName(network), libvirt.VIR_NETWORK_UPDATE_COMMAND_DELETE, address, ip)

        try:
            connection.call(delete, seconds=seconds)
        except (libvirt.libvirtError, errors.Fault) as error:
            log(f"the reservation of {ip} for {name}: {error}")
        finally:
            connection.close()
    try:
        release_mac(hook, name, int(number), address, min(float(deadline), HOOK_SECONDS), log)
        log(f"{ip} is given back, which {name} had")
    except errors.Fault as fault:
        log(f"giving back {ip}, which {name} had: {fault.problem}")
