"""Checks of the machine before a VM starts: its scratch directory, the bridge, the other VMs."""

import os
from xml.etree import ElementTree as etree

import libvirt

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.drivers.base import Logger
from vmgahp.drivers.libvirt import faults
from vmgahp.host.job_user import Identity

LEAST_FREE_BYTES = 1 << 20
"""Bytes that must be free in the scratch directory: for the console, the display and the reason of a
failure. What the guest writes it cannot know."""

IFF_UP = 1
"""Of an interface's flags (``linux/if.h``)."""

_A_NAME = ".vmgahp"
"""Need not be there: that it is not there can be found out only by who may look."""


def require_access(directory: str, identity: Identity) -> None:
    """Is the job's user still let into its scratch directory? Raises `errors.MachineFault`.

    Asked when a disk of the job cannot be opened, for then it is not the disk's fault.
    """
    try:
        os.close(identity.open_scratch(directory, _A_NAME, os.O_RDONLY))
    except FileNotFoundError as error:
        if os.path.isdir(directory):
            return
        reason = error.strerror
    except OSError as error:
        if os.path.lexists(os.path.join(directory, _A_NAME)):
            return  # the job has put something there that cannot be opened
        reason = error.strerror
    else:
        return
    raise errors.MachineFault(
        f"The scratch directory {directory} cannot be entered as uid {identity.uid}: {reason}.",
        "see who owns it and its parents (EXECUTE), their modes, and whether the file system is well.",
    )


def require_free_space(directory: str) -> None:
    """Is there any space in the scratch directory? Raises `errors.MachineFault`."""
    try:
        status = os.statvfs(directory)
    except OSError as error:
        raise errors.MachineFault(
            f"The scratch directory {directory} cannot be examined: {error.strerror}.",
            "see whether the file system of EXECUTE is well.",
        ) from error
    free = status.f_bavail * status.f_frsize
    if free < LEAST_FREE_BYTES:
        raise errors.MachineFault(
            f"There is no space in the scratch directory {directory}: {free >> 10} KiB are free.",
            "free space on the file system of EXECUTE.",
        )


def look_at_bridge(settings: Settings) -> str:
    """The bridge of VMs, as a sentence without its full stop. Raises `errors.MachineFault` where there is none."""
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
    connection: libvirt.virConnect, mac: str, log: Logger, started_before: int | None = None, origin: str = ""
) -> None:
    """Has no running VM the MAC address `mac`? libvirt does not mind, and neither VM would have a network.

    With the libvirt id of a domain only those that were started before it count: of two starts at once, each
    of which sees the other, just the later one is refused. Raises `errors.JobFault`, or `errors.MachineFault`
    where the address is not the job's but of a setting, the `origin`; and `libvirt.libvirtError`.
    """
    for domain in connection.listAllDomains(libvirt.VIR_CONNECT_LIST_DOMAINS_ACTIVE):
        try:
            number, text = domain.ID(), domain.XMLDesc()
        except libvirt.libvirtError as error:
            if faults.is_no_domain(error):
                continue  # it has ended since
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
