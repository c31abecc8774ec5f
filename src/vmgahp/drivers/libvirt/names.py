"""The owner of a domain of some name: the job, a dead server, or another job that runs.

A VM has the name that the startd knows, of its user, cluster and process. Two schedds may give one user the same; the
later one's VM then gets a name derived from it, and does not end the first one's guest.
"""

from __future__ import annotations

import os
from typing import NamedTuple
from xml.etree import ElementTree as etree

import libvirt

from vmgahp import errors
from vmgahp.drivers.base import Logger
from vmgahp.drivers.libvirt import faults
from vmgahp.drivers.libvirt.connection import LibvirtConnection
from vmgahp.drivers.libvirt.ending import MARK, end, is_strange
from vmgahp.host.runtime_dir import is_claimed
from vmgahp.host.starter import is_one_job

OWN_HEX = 8
"""The number of digits appended to the name of a VM whose own is taken."""


class NamedDomain(NamedTuple):
    """A domain that already exists in libvirt."""

    name: str
    uuid: str
    directory: str
    """The scratch directory of its job; empty if it has none."""
    is_strange: bool
    """True if it is defined, and not by this package."""

    def is_left_over(self, working_dir: str) -> bool:
        """Return True if it belongs to the job of that directory, or to a server that is gone."""
        return os.path.normpath(self.directory) == os.path.normpath(working_dir) or not is_claimed(self.uuid)


def new_uuid() -> str:
    """Return a random UUID from the kernel."""
    with open("/proc/sys/kernel/random/uuid") as file:
        return file.read().strip()


def free_name(connection: LibvirtConnection, name: str, working_dir: str, log: Logger) -> str:
    """Return `name`, or one derived from it if the VM of another directory has that and its server lives.

    Raises `errors.Fault`.
    """
    taken = [each for each in _called(connection, name) if each.name == name and not each.is_left_over(working_dir)]
    if not taken:
        return name
    own = f"{name}_{new_uuid()[:OWN_HEX]}"
    log(f"a VM of another job is called {name}, and runs: this one is {own}")
    return own


def clear(connection: LibvirtConnection, name: str, working_dir: str, log: Logger) -> None:
    """Destroy the domains that an earlier server has left of the job, or whose server is gone.

    Raises `errors.Fault`.
    """
    for left in _called(connection, name):
        if not left.is_left_over(working_dir):
            continue
        if left.is_strange:
            raise errors.MachineFault(
                f"A domain called {left.name} is defined in libvirt, and jobs' domains never are.",
                f"see whose it is; then virsh undefine {left.name}.",
            )
        log(f"{left.name} still runs from an earlier start: destroying it")
        try:
            connection.call(lambda opened: end(faults.find(opened, left.name, left.uuid)))  # noqa: B023 - called here
        except libvirt.libvirtError as error:
            if not faults.is_no_domain(error):
                raise faults.from_libvirt(error, f"clearing a leftover {left.name}") from error


def sweep(connection: LibvirtConnection, log: Logger) -> None:
    """Remove the persistent domains of jobs whose directory and server are both gone. Raises nothing."""

    def look(opened: libvirt.virConnect) -> None:
        for domain in opened.listAllDomains(libvirt.VIR_CONNECT_LIST_DOMAINS_PERSISTENT):
            if not (is_strange(domain) or is_claimed(domain.UUIDString()) or os.path.isdir(_directory(domain))):
                log(f"{domain.name()} was left defined: removing it")
                end(domain)

    try:
        connection.call(look)
    except libvirt.libvirtError as error:
        log(f"clearing what others have left: {error}")


def mark(domain: etree.Element) -> None:
    """Mark the XML of a domain as that of a job."""
    metadata = domain.find("metadata")
    if metadata is None:
        metadata = etree.SubElement(domain, "metadata")
    if metadata.find(f"{{{MARK}}}job") is None:
        etree.SubElement(metadata, f"{{{MARK}}}job")


def matching(connection: libvirt.virConnect, match: str, uuid: str) -> libvirt.virDomain | None:
    """Return the domain to kill: by its name, or by the scratch directory of its job.

    The startd names that directory for every VM type but kvm and xen, or the directory in which the starter has made
    it (``VMUniverseMgr::killVM`` in HTCondor's ``src/condor_startd.V6/vmuniverse_mgr.cpp``). Raises
    `libvirt.libvirtError`.
    """
    found = [faults.find(connection, match, uuid)] if uuid else connection.listAllDomains()
    if match.startswith("/") and not uuid:
        found = [each for each in found if is_one_job(_directory(each), match)]
    elif not uuid:
        # The startd cannot tell two VMs of one name apart; a server that lives ends its own.
        found = [each for each in found if _is_called(each.name(), match)]
        if len(found) > 1:
            found = [each for each in found if not is_claimed(each.UUIDString())]
    return next((each for each in found if not is_strange(each)), None)


def _called(connection: LibvirtConnection, name: str) -> list[NamedDomain]:
    def look(opened: libvirt.virConnect) -> list[NamedDomain]:
        named = [domain for domain in opened.listAllDomains() if _is_called(domain.name(), name)]
        return [NamedDomain(each.name(), each.UUIDString(), _directory(each), is_strange(each)) for each in named]

    try:
        return connection.call(look)
    except libvirt.libvirtError as error:
        raise faults.from_libvirt(error, f"looking for a leftover {name}") from error


def _directory(domain: libvirt.virDomain) -> str:
    """Return the scratch directory; empty if the domain has none, or went away."""
    try:
        return str(domain.metadata(libvirt.VIR_DOMAIN_METADATA_DESCRIPTION, None))
    except libvirt.libvirtError:
        return ""


def _is_called(name: str, match: str) -> bool:
    """Return True if a domain has this name, or one derived from it."""
    own = name.removeprefix(f"{match}_")
    return name == match or (own != name and len(own) == OWN_HEX and set(own) <= set("0123456789abcdef"))
