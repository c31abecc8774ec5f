"""IP addresses that VM_MAC_HOOK gives: reserved for the guest, and given back even after a crash.

Each address has a note in a directory of root's, from before it is reserved until the hook was told that it is free
again: at the end of the VM, or, if the server has died, by the next START or kill mode. A separate process gives
addresses back, with a timeout.
"""

import os
import sys

from vmgahp.host import helper, own_code, run, runtime_dir

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vmgahp.config import Settings
    from vmgahp.drivers.base import Logger
    from vmgahp.drivers.libvirt import binding as libvirt
    from vmgahp.drivers.libvirt.connection import LibvirtConnection
    from vmgahp.host.job_user import Identity
    from vmgahp.job.spec import JobSpec, Nic

SECONDS = 20.0
"""Seconds for libvirtd and the hook to take the addresses of a VM back."""
HOOK_SECONDS = 9.0
"""Seconds for the hook to take one back, however long it may take to give one."""
HOOK = "VM_MAC_HOOK"
NAT = "nat"


# A VM that is to be started


def note(settings: "Settings", uri: str, name: str, number: int, nic: "Nic") -> str:
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


def hand_out(
    connection: "LibvirtConnection", settings: "Settings", spec: "JobSpec", identity: "Identity", log: "Logger"
) -> None:
    """Configure the guest's addresses by its network's DHCP, or by cloud-init. Raises `errors.Fault`."""
    left = []
    for nic in spec.nics:
        if nic.address and _is_reserved(nic):
            _reserve(connection, settings, nic)
        elif nic.address:
            left.append(nic)
    if not left:
        return
    from vmgahp.job import cloud_init

    seed = spec.devices.user_data
    if seed is not None and not seed.network_config and all("/" in nic.address.split()[0] for nic in left):
        cloud_init.write(seed, spec.working_dir, identity, network=cloud_init.network_config(spec.nics))
        return
    for nic in left:
        why = f"its network is {nic.networking_type}, and the job has no user data for cloud-init, or a network-config"
        log(f"{spec.name}: nothing tells the guest the address {nic.address}: {why} of its own, or it has no prefix")


def _reserve(connection: "LibvirtConnection", settings: "Settings", nic: "Nic") -> None:
    from vmgahp import errors
    from vmgahp.drivers.libvirt import binding as libvirt
    from vmgahp.drivers.libvirt import faults

    name, ip = settings.string("VM_NAT_NETWORK"), _ip(nic)

    def wrong(problem: str) -> errors.MachineFault:
        return errors.MachineFault(
            f"{HOOK} = {settings.string(HOOK)} gives {nic.mac} the address {ip}, and {problem}.",
            f"let it give each VM a free address of the network {name} (VM_NAT_NETWORK), best outside its DHCP range.",
        )

    def add(opened: "libvirt.virConnect") -> None:
        network = opened.networkLookupByName(name)
        if not _is_in(network.XMLDesc(), ip):
            raise wrong("the network has no DHCP for it")
        network.update(libvirt.VIR_NETWORK_UPDATE_COMMAND_ADD_LAST, _host(nic.mac, ip))

    try:
        connection.call(add)
    except libvirt.libvirtError as error:
        if error.get_error_code() == libvirt.CODES["OPERATION_INVALID"]:
            raise wrong(f"libvirt says: {faults.message_of(error)}") from error
        raise faults.from_libvirt(error, f"reserving {ip}") from error


def _is_in(network: str, ip: str) -> bool:
    from ipaddress import ip_address, ip_interface
    from xml.etree import ElementTree as etree

    for element in etree.fromstring(network).iterfind("ip"):
        if element.find("dhcp") is None or element.get("family", "ipv4") != "ipv4":
            continue
        own = ip_interface(f"{element.get('address')}/{element.get('netmask') or element.get('prefix')}")
        outside = own.ip, own.network.network_address, own.network.broadcast_address
        if ip_address(ip) in own.network and ip_address(ip) not in outside:
            return True
    return False


def _is_reserved(nic: "Nic") -> bool:
    return nic.networking_type == NAT and ":" not in _ip(nic)


def _ip(nic: "Nic") -> str:
    return nic.address.split()[0].partition("/")[0]


def _host(mac: str, ip: str) -> str:
    return f"<host mac='{mac}' ip='{ip}'/>"


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


def give_back(_identity: "Identity", log: "Logger", *paths: str) -> None:
    """Give back the addresses of these notes. Raises OSError."""
    environ = run.condor_environment(os.environ)
    done = run.run([*(helper.COMMAND or own_code.interpreter()), __name__, *paths], deadline=SECONDS, environ=environ)
    for line in done.out.decode("utf-8", "replace").splitlines():
        log(line)
    if done.status != 0:
        last = f": {done.complaints[-1]}" if done.complaints else ""
        log(f"addresses of {HOOK} could not be given back, status {done.status}{last}")


def sweep(identity: "Identity", log: "Logger") -> None:
    """Give back the addresses that servers have left that have died. Raises nothing."""
    try:
        if left := [f"{runtime_dir.GIVEN}/{name}" for name in _names() if not runtime_dir.is_alive(name)]:
            give_back(identity, log, *left[:50])
    except OSError as error:
        log(f"giving back addresses of {HOOK}: {error}")


def _names() -> list[str]:
    try:
        return os.listdir(runtime_dir.GIVEN) if os.geteuid() == 0 else []
    except FileNotFoundError:
        return []


def main(paths: "list[str]") -> None:
    """Give back the addresses of these notes; each is locked, so that only one process handles it."""
    from fcntl import LOCK_EX, LOCK_NB, flock

    for path in paths:
        try:
            with open(path) as file:
                flock(file, LOCK_EX | LOCK_NB)
                if os.fstat(file.fileno()).st_nlink:
                    _give_back(file.read().split("\n"))
                    os.unlink(path)
        except ValueError:  # the note of a server that died before it reserved anything
            os.unlink(path)
        except OSError as error:
            sys.stdout.write(f"{path}: {error}\n")


def _give_back(words: "list[str]") -> None:
    from vmgahp import errors
    from vmgahp.drivers.libvirt import binding as libvirt
    from vmgahp.hooks.policy import release_mac

    name, number, address, ip, network, uri, hook, deadline = words

    def say(line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    if network:
        libvirt.registerErrorHandler(lambda _context, _error: None, None)
        try:
            opened = libvirt.open(uri).networkLookupByName(network)
            opened.update(libvirt.VIR_NETWORK_UPDATE_COMMAND_DELETE, _host(address, ip))
        except libvirt.libvirtError as error:
            say(f"the reservation of {ip} for {name}: {error}")
    try:
        release_mac(hook, name, int(number), address, min(float(deadline), HOOK_SECONDS), say)
        say(f"{ip} is given back, which {name} had")
    except errors.Fault as fault:
        say(f"giving back {ip}, which {name} had: {fault.problem}")


if __name__ == "__main__":
    main(sys.argv[1:])
