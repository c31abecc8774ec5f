"""The IP address of a guest, as libvirt or this host knows it."""

from _collections_abc import Callable

from vmgahp import errors
from vmgahp.drivers.libvirt import binding as libvirt

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Call = Callable[[Callable[[libvirt.virDomain], dict[str, Any]]], dict[str, Any]]

_SOURCES = (libvirt.VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_LEASE, libvirt.VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_ARP)


class GuestAddress:
    """One guest's address: by the DHCP lease of its libvirt network, or by the host's ARP table."""

    def __init__(self) -> None:
        self._found = ""

    def find(self, call: "Call") -> str:
        """The address, or empty while it has none; `call` calls libvirt with the domain."""
        for source in _SOURCES:
            self._found = self._found or _from(call, source)
        return self._found


def _from(call: "Call", source: int) -> str:
    try:
        found = call(lambda domain: domain.interfaceAddresses(source, 0))
    except (libvirt.libvirtError, errors.Fault):
        return ""  # not every network has both, and no status depends on them
    for interface in found.values():
        for address in interface.get("addrs") or ():
            return str(address["addr"])
    return ""
