"""The end of a domain, of which nothing is left then, and what tells a job's from an administrator's."""

from vmgahp.drivers.libvirt import binding as libvirt
from vmgahp.drivers.libvirt import faults

MARK = "urn:vmgahp:job"
"""The namespace of an element by which a job's domain is known where it is defined, which it is while it is made: what
a server or a libvirtd leaves that ended at that moment is told from what an administrator has defined."""


def undefine(domain: libvirt.virDomain) -> None:
    """Have libvirt forget a domain when it stops, or at once where it does not run. Raises `libvirt.libvirtError`."""
    domain.undefineFlags(libvirt.VIR_DOMAIN_UNDEFINE_KEEP_NVRAM)  # which is removed by its name


def end(domain: libvirt.virDomain) -> None:
    """Destroy a job's domain, of which nothing is left then. Raises `libvirt.libvirtError`."""
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
        return False  # it went away


def is_strange(domain: libvirt.virDomain) -> bool:
    if not is_persistent(domain):
        return False
    try:
        domain.metadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, MARK)
    except libvirt.libvirtError as error:
        return not faults.is_no_domain(error)
    return False
