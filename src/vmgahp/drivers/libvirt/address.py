"""The IP addresses of a guest, as libvirt or this host knows them."""

from _collections_abc import Callable

from vmgahp import errors
from vmgahp.drivers.libvirt import binding as libvirt
from vmgahp.drivers.libvirt.agent import believed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Call = Callable[[Callable[[libvirt.virDomain], dict[str, Any]]], dict[str, Any]]

_SOURCES = (libvirt.VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_LEASE, libvirt.VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_ARP)


class GuestAddress:
    """One guest's addresses: by the DHCP leases of its libvirt network, or by the host's ARP table."""

    def __init__(self) -> None:
        self.found: tuple[str, ...] = ()

    def find(self, call: "Call") -> tuple[str, ...]:
        """The addresses, none while it has none; `call` calls libvirt with the domain."""
        for source in _SOURCES:
            self.found = self.found or _from(call, source)
        return self.found


def _from(call: "Call", source: int) -> tuple[str, ...]:
    try:
        return believed(call(lambda domain: domain.interfaceAddresses(source, 0)))
    except (libvirt.libvirtError, errors.Fault):
        return ()  # not every network has both, and no status depends on them
