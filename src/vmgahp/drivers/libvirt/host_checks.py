"""Checks of the machine before a VM starts: the bridge, the other VMs."""

import os
from collections.abc import Callable
from xml.etree import ElementTree as etree

import libvirt

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.drivers.libvirt import faults

IFF_UP = 1
"""The flag of an interface that is up (``linux/if.h``)."""


def look_at_bridge(settings: Settings) -> str:
    """Return the state of the bridge, as a sentence without its full stop.

    Raises `errors.MachineFault` without a bridge.
    """
    name = settings.string("VM_NETWORKING_BRIDGE_INTERFACE")
    setting = f"VM_NETWORKING_BRIDGE_INTERFACE = {name}"
    place = f"/sys/class/net/{os.path.basename(name)}"
    if not os.path.isdir(place):
        raise errors.MachineFault(f"{setting}, and there is no such interface.", "make the bridge, or name another.")
    if not os.path.isdir(f"{place}/bridge"):
        raise errors.MachineFault(f"{setting}, and that is no bridge.", "name a bridge.")
    with open(f"{place}/flags") as file:
        if not int(file.read(), 16) & IFF_UP:
            raise errors.MachineFault(f"{setting}, and that bridge is down.", f"ip link set {name} up")
    return f"the bridge {name} is up"


def require_free_mac(
    connection: libvirt.virConnect,
    mac: str,
    log: Callable[[str], None],
    started_before: int | None = None,
    origin: str = "",
) -> None:
    """Check that no running VM has the MAC address `mac`. libvirt accepts duplicates, which break both VMs' network.

    With the libvirt id of a domain, `started_before`, only domains started before it count: of two simultaneous
    starts, which see each other, just the later one is refused. Raises `errors.JobFault`, or `errors.MachineFault` if
    the address comes from a setting, the `origin`; and `libvirt.libvirtError`.
    """
    for domain in connection.listAllDomains(libvirt.VIR_CONNECT_LIST_DOMAINS_ACTIVE):
        try:
            number, text = domain.ID(), domain.XMLDesc()
        except libvirt.libvirtError as error:
            if faults.is_no_domain(error):
                continue  # it has ended meanwhile
            raise
        if number < 0 or (started_before is not None and number >= started_before) or mac not in text.lower():
            continue
        macs = etree.fromstring(text).iterfind("devices/interface/mac")
        if any(element.get("address", "").lower() == mac for element in macs):
            log(f"{mac} is the MAC address of {domain.name()}")
            if origin:
                raise errors.MachineFault(
                    f"{mac}, which is of {origin}, is the address of another VM that runs on this machine.",
                    "let it give each VM an address of its own.",
                )
            raise errors.JobFault(
                errors.MISMATCHED,
                f"JobVM_MACADDR = {mac} is the address of another VM that runs on this machine.",
                "leave vm_macaddr out, or give each job an address of its own.",
            )
