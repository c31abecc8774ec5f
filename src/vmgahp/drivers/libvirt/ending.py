"""The end of a domain, and the mark that tells a job's domain from an administrator's."""

import libvirt

from vmgahp.drivers.libvirt import faults

MARK = "urn:vmgahp:job"
"""The namespace of an element that marks a job's domain, which is persistent while it is made.

By it a domain that a server or a libvirtd left when it ended at that moment is told from one of the administrator's.
"""


def undefine(domain: libvirt.virDomain) -> None:
    """Make libvirt forget a domain when it stops, or at once if it does not run. Raises `libvirt.libvirtError`."""
    domain.undefineFlags(libvirt.VIR_DOMAIN_UNDEFINE_KEEP_NVRAM)  # `firmware.forget` removes that file by its name


def end(domain: libvirt.virDomain) -> None:
    """Destroy a job's domain and its definition. Raises `libvirt.libvirtError`."""
    was_defined = is_persistent(domain) and not is_strange(domain)
    if was_defined:
        try:
            undefine(domain)
        except libvirt.libvirtError:
            if is_persistent(domain):
                raise
    try:
        domain.destroy()
    except libvirt.libvirtError as error:
        if not (was_defined and faults.is_no_domain(error)):
            raise


def is_persistent(domain: libvirt.virDomain) -> bool:
    try:
        return bool(domain.isPersistent())
    except libvirt.libvirtError:
        return False  # the domain went away


def is_strange(domain: libvirt.virDomain) -> bool:
    if not is_persistent(domain):
        return False
    try:
        domain.metadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, MARK)
    except libvirt.libvirtError as error:
        return not faults.is_no_domain(error)
    return False
