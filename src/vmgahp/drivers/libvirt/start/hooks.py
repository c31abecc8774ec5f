"""The effect of the administrator's own programs on a job's domain, and the faults that are theirs.

These are LIBVIRT_XML_SCRIPT, VM_POLICY and VM_MAC_HOOK. If one of them has written the XML that libvirt gets, a fault
in it is not the job's.

An IP address that VM_MAC_HOOK gives is reserved for the guest, and given back even after a crash: it has a note in a
directory of root's, from before it is reserved until the hook was told that it is free again, at the end of the VM,
or, if the server has died, by the next START or kill mode.
"""

from __future__ import annotations

import os
from fcntl import LOCK_EX, LOCK_NB, flock
from ipaddress import ip_address, ip_interface
from time import monotonic
from typing import NamedTuple
from xml.etree import ElementTree as etree

import libvirt

from vmgahp import errors, log
from vmgahp.config import Settings
from vmgahp.domain.restore import macs
from vmgahp.drivers.base import Machine
from vmgahp.drivers.libvirt.link import faults
from vmgahp.drivers.libvirt.link.connection import LibvirtConnection
from vmgahp.drivers.libvirt.link.faults import DESCRIPTION
from vmgahp.drivers.surveyor import Logger
from vmgahp.host import runtime_dir
from vmgahp.host.job_user import Identity
from vmgahp.job import cloud_init, published
from vmgahp.job.policy_view import PolicyView
from vmgahp.job.spec import JobSpec, Nic

POLICY_FILE = "vm_policy.txt"
"""The file in the scratch directory that tells the owner what VM_POLICY has changed in the job's machine."""
LONGEST_POLICY_FILE = 64 << 10


class Described(NamedTuple):
    """A domain XML, and its authors beside this package."""

    xml: str
    authors: str = ""
    """The settings that have changed it, each with its value; empty for unchanged XML of our own."""
    macs: tuple[tuple[str, str], ...] = ()
    """The requested MAC addresses, in lower case, each with the setting that requested it; empty for the job."""
    before_policy: str = ""
    """The XML of our own before VM_POLICY changed it; empty if it did not."""
    changes: tuple[str, ...] = ()
    """The changes by VM_POLICY, as the lines of a diff without secrets."""


def described(view: PolicyView, log_line: Logger, spec: JobSpec, written: str, *, dry: bool) -> Described:
    """Apply VM_POLICY to a domain XML that was `written` by us or by the script. Raises `errors.Fault`."""
    settings = view.settings
    xml, script, policy = written, settings.xml_script(), settings.string("VM_POLICY")
    changes: tuple[str, ...] = ()
    authors = [f"LIBVIRT_XML_SCRIPT = {script}"] if script else []
    if policy:
        from vmgahp.hooks.policy import Policy  # a server without a policy does without the module

        flags = settings.string("VM_GAHP_DEBUG") or settings.string("DEFAULT_DEBUG")
        wordy = dry or log.wants_debug(f"{settings.string('ALL_DEBUG')} {flags}")
        xml, changes = Policy(view, log_line, log_line if wordy else lambda _: None, dry=dry).apply(written)
        if changes:
            authors.append(f"VM_POLICY = {policy}")
    from_job = {nic.mac for nic in spec.vm.nics if type(nic.mac) is str}  # the hook's are of `policy.ChosenMac`
    if not authors and from_job.issuperset(spec.macs):
        return Described(xml, macs=tuple((mac, "") for mac in spec.macs))
    hook = f"VM_MAC_HOOK = {settings.string('VM_MAC_HOOK')}"
    origins = dict.fromkeys(spec.macs, hook) | dict.fromkeys(from_job, "")
    macs = tuple((mac, origins.get(mac, " and ".join(authors))) for mac in macs_of(xml))
    ours = written if authors and not script else ""
    return Described(xml, " and ".join(authors), macs, ours, changes)


def tell_owner(machine: Machine, changes: tuple[str, ...], directory: str, identity: Identity, log: Logger) -> None:
    """Tell the owner what VM_POLICY has changed: in a file, and in the job's log. Errors are logged."""
    changed = sum(line[:1] in ("+", "-") for line in changes)
    text = "\n".join(("What the administrator of the machine (VM_POLICY) has changed in the VM:", *changes, ""))
    try:
        identity.write_scratch(directory, POLICY_FILE, text.encode(errors="replace")[:LONGEST_POLICY_FILE])
    except (OSError, errors.Fault) as error:
        log(f"{machine.name}: {POLICY_FILE} cannot be written: {error}")
    told = f"The machine's administrator has changed the VM ({changed} lines, {POLICY_FILE})"
    machine.updates.publish(published.POLICY, told)


def with_macs(view: PolicyView, log_line: Logger, spec: JobSpec, saved: str = "", *, dry: bool) -> JobSpec:
    """Return the job with VM_MAC_HOOK's addresses; `saved` is its checkpoint's XML. Raises `errors.Fault`."""
    settings = view.settings
    if not spec.vm.nics or not settings.string("VM_MAC_HOOK"):
        return spec
    from vmgahp.hooks.policy import choose_mac, take_back_mac

    found = macs(saved) if saved else []
    nics: list[Nic] = []
    try:
        for number, nic in enumerate(spec.vm.nics):
            had = found[number] if number < len(found) else ""
            mac, address = choose_mac(view, spec.vm.name, nic.mac, had, log_line, dry=dry, nic=number)
            nics.append(nic._replace(mac=mac, address=address))
        chosen = [nic.mac for nic in nics if nic.mac]
        if len(set(chosen)) < len(chosen):
            problem = f"VM_MAC_HOOK = {settings.string('VM_MAC_HOOK')} gave two NICs of {spec.vm.name} one MAC address."
            hint = "let it give each NIC, whose number is its first argument, an address of its own."
            raise errors.MachineFault(problem, hint)
    except errors.Fault:
        for number, nic in enumerate(nics):
            if nic.address and not dry:
                take_back_mac(settings, spec.vm.name, number, nic.mac, log_line)
        raise
    return spec._replace(vm=spec.vm._replace(nics=tuple(nics)))


def require(view: PolicyView) -> None:
    """Check that the job meets VM_POLICY_REQUIREMENTS. Raises `errors.Fault`."""
    if view.settings.string("VM_POLICY_REQUIREMENTS"):
        from vmgahp.hooks import policy

        policy.require(view)


def mismatch_fault(name: str, authors: str, mismatch: Exception) -> errors.Fault:
    """Return the fault for a VM that differs from its description: the author's of that, or libvirt's."""
    problem = f"{name} is not the VM that was asked for: {mismatch}. It was destroyed before it ran."
    if authors:
        return errors.MachineFault(f"{authors}: {problem}", f"correct {authors}, or unset it.")
    return errors.HypervisorFault(problem, "see what libvirt's hooks or its version change; report it.")


def hooks_are_to_blame(made: Described, connection: LibvirtConnection) -> bool:
    """Return True if libvirt rejected XML of the administrator's programs, and not what the job asks for.

    libvirt parses our XML before VM_POLICY once more: a part that the policy has not changed is the job's fault.
    """
    if not made.authors or not made.before_policy:
        return bool(made.authors)

    def look(opened: libvirt.virConnect) -> None:
        form = "xen-xl" if opened.getType() == "Xen" else "qemu-argv"
        opened.domainXMLToNative(form, made.before_policy, 0)

    try:
        connection.call(look)
    except libvirt.libvirtError as error:
        return faults.classify(error) is not DESCRIPTION
    return True


def refused(problem: str, authors: str) -> errors.MachineFault:
    """Return the fault for a description by others that libvirt rejects."""
    return errors.MachineFault(f"{problem} The description of the VM was written by {authors}.", f"correct {authors}.")


def macs_of(xml: str) -> list[str]:
    """Return the MAC addresses of a domain, in lower case."""
    found = etree.fromstring(xml).iterfind("devices/interface/mac")
    return [mac.get("address", "").lower() for mac in found if mac.get("address")]


# Addresses of VM_MAC_HOOK


SECONDS = 20.0
"""Seconds for libvirtd and the hook to take the addresses of a VM back."""
HOOK_SECONDS = 9.0
"""Seconds for the hook to take one back, however long it may take to give one."""
HOOK = "VM_MAC_HOOK"


def note_address(settings: Settings, uri: str, name: str, number: int, nic: Nic) -> str:
    """Write a note of a hook's address, and return its path. Raises OSError and `errors.MachineFault`.

    Without root its directory is this server's own, which is removed with it.
    """
    if os.geteuid() == 0:
        runtime_dir.make_root_base()
        os.makedirs(notes := runtime_dir.GIVEN, 0o700, exist_ok=True)
    else:
        notes = runtime_dir.runtime_dir()
    path = f"{notes}/{runtime_dir.owner()}-{os.urandom(8).hex()}"
    network = settings.string("VM_NAT_NETWORK") if _is_reserved(nic) else ""
    deadline = settings.call_timeout()
    lines = (name, number, nic.mac, _ip(nic), network, uri, settings.string(HOOK), deadline)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write("\n".join(map(str, lines)))
    return path


def hand_out(connection: LibvirtConnection, settings: Settings, spec: JobSpec, identity: Identity, log: Logger) -> None:
    """Configure the guest's addresses by its network's DHCP, or by cloud-init. Raises `errors.Fault`."""
    left = []
    for nic in spec.vm.nics:
        if nic.address and _is_reserved(nic):
            _reserve(connection, settings, nic)
        elif nic.address:
            left.append(nic)
    if not left:
        return
    seed = spec.devices.user_data
    if seed is not None and not seed.network_config and all("/" in nic.address.split()[0] for nic in left):
        cloud_init.write(seed, spec.vm.working_dir, identity, network=cloud_init.network_config(spec.vm.nics))
        return
    for nic in left:
        why = f"its network is {nic.networking_type}, and the job has no user data for cloud-init, or a network-config"
        log(f"{spec.vm.name}: nothing tells the guest the address {nic.address}: {why} of its own, or it has no prefix")


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
    return nic.networking_type == "nat" and ":" not in _ip(nic)


def _ip(nic: Nic) -> str:
    return nic.address.split()[0].partition("/")[0]


def _update(network: libvirt.virNetwork, command: int, mac: str, ip: str) -> None:
    """Change the hosts of a network's DHCP, for as long as it is active. Raises `libvirt.libvirtError`."""
    host, live = f"<host mac='{mac}' ip='{ip}'/>", libvirt.VIR_NETWORK_UPDATE_AFFECT_LIVE
    network.update(command, libvirt.VIR_NETWORK_SECTION_IP_DHCP_HOST, -1, host, live)


def sweep_addresses(log: Logger) -> None:
    """Give back the addresses that servers have left that have died. Raises nothing."""
    try:
        names = os.listdir(runtime_dir.GIVEN) if os.geteuid() == 0 else []
        left = [f"{runtime_dir.GIVEN}/{name}" for name in names if not runtime_dir.is_alive(name)]
        give_back(log, *left[:50])
    except FileNotFoundError:
        pass  # no hook has given an address yet
    except OSError as error:
        log(f"giving back addresses of {HOOK}: {error}")


def give_back(log: Logger, *paths: str) -> None:
    """Give back the addresses of these notes, or what `SECONDS` allow, one process at a time. Raises nothing."""
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
