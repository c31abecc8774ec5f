"""The kill of a job's domain, with or without libvirtd: everything that the kill mode needs.

A node whose servers have all been killed runs it for each of their VMs at once.
"""

import os
from collections.abc import Callable

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.drivers.libvirt import binding as libvirt
from vmgahp.drivers.libvirt import ending, faults, firmware, names, qemu_process
from vmgahp.drivers.libvirt.connection import LibvirtConnection
from vmgahp.drivers.libvirt.uri import connection_for
from vmgahp.host.job_user import Identity
from vmgahp.host.runtime_dir import GIVEN, sweep

KILL_SECONDS = 20.0
"""Seconds for libvirt's answer; it takes 15 s to destroy a domain that does not end."""


class LibvirtKiller:
    """The killer for QEMU's VM types."""

    def __init__(self, _vm_type: str, settings: Settings, identity: Identity, log: Callable[[str], None]) -> None:
        self._connection = connection_for(settings, log)
        self._identity = identity
        self._log = log

    def kill(self, match: str, uuid: str = "") -> bool:
        """Destroy a VM as `vmgahp.drivers.base.Driver.kill` does."""
        try:
            return kill(self._connection, match, uuid, self._log)
        finally:
            if os.path.isdir(GIVEN):
                from vmgahp.drivers.libvirt import reservation  # needed only if there are reservations

                reservation.sweep(self._identity, self._log)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def kill(connection: LibvirtConnection, match: str, uuid: str, log: Callable[[str], None]) -> bool:
    """Destroy the domain that `match` names, or its QEMU if libvirtd does not; return False if there is none.

    Raises `errors.Fault`.
    """

    def destroy(libvirtd: libvirt.virConnect) -> bool:
        try:
            domain = names.matching(libvirtd, match, uuid)
            if domain is None:
                return False
            name = domain.name()
            ending.end(domain)
            firmware.forget(name, connection.uri, log)
        except libvirt.libvirtError as error:
            if faults.is_no_domain(error):
                return False
            raise
        return True

    sweep()  # removes the console's socket of a server that was killed
    try:
        return connection.call(destroy, seconds=KILL_SECONDS)
    except libvirt.libvirtError as error:
        fault = faults.from_libvirt(error, f"destroying {match}")
    except errors.MachineFault as away:
        fault = away
    if not (uuid and qemu_process.kill(match, uuid)):
        raise fault
    log(f"{match}: {fault.problem} Its QEMU was killed")  # libvirtd forgets the domain when it is back
    firmware.forget(match, connection.uri, log)
    return True
