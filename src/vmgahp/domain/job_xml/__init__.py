"""Libvirt XML of a job's own: ``+VMPARAM_Libvirt_XML``.

`sanitize` rebuilds it from what the rows of `vmgahp.domain.model` let jobs have, drops the parts that are `host_made`,
and refuses the rest. `requests` adds its requests to the job ad, which is then read like any job's, `boot_files` copies
a kernel, and `merge` puts the remainder into the description that this package makes of every job.
docs/reference/job-xml.md is for users.
"""

import os
from collections.abc import Callable, Mapping
from typing import NamedTuple
from xml.etree import ElementTree as etree

from vmgahp.config import Settings
from vmgahp.host.job_user import Identity
from vmgahp.job.ad import JobAd
from vmgahp.job.attributes import LIBVIRT_XML as ATTRIBUTE
from vmgahp.text import shown

ALLOWED = "VM_ALLOW_LIBVIRT_XML"


class JobXml(NamedTuple):
    """The XML of a job, sanitized, with its requests."""

    file_name: str
    domain: etree.Element
    ad: JobAd
    """The job ad, with the requests of the XML as attributes."""
    boot_files: Mapping[str, str]
    """The names in the scratch directory of a kernel and an initrd, by element."""
    dropped: tuple[str, ...]
    """The parts of the file about the machine that it was made for, which are dropped."""

    def describe(self, ours: str, directory: str, make_room: Callable[[], str] | None, identity: Identity) -> str:
        """Merge the job's XML into our domain XML; its kernel is copied from the scratch `directory`.

        Without `make_room` the result is only for display, and nothing is copied. Raises `errors.Fault`.
        """
        from vmgahp.domain.job_xml import boot_files
        from vmgahp.domain.job_xml.merge import merge

        paths = {tag: f"(copy of {name})" for tag, name in self.boot_files.items()}
        if make_room is not None and self.boot_files:
            paths = boot_files.copy(self.boot_files, directory, identity, make_room, self.file_name)
        return merge(ours, self.domain, paths)

    def without(self) -> str:
        """List the dropped parts in a sentence; empty if there are none."""
        what = ", ".join(self.dropped)
        return what and f"{shown(self.file_name)} has these of another machine, and they are dropped: {what}."


def load(ad: JobAd, settings: Settings, identity: Identity) -> JobXml | None:
    """Load the XML of a job; None for a job without.

    Raises `JobFault` for XML that has forbidden content, contradicts the ad, or is not allowed on this machine.
    """
    if ad.value(ATTRIBUTE) is None:
        return None
    from vmgahp.domain.job_xml import boot_files, requests
    from vmgahp.domain.job_xml.sanitize import read, refused, sanitized

    name = (ad.string(ATTRIBUTE) or "").strip()
    if not name or os.path.basename(name) in ("", ".", ".."):
        raise refused(ad.expression(ATTRIBUTE) or "", "it names no file", f'write +{ATTRIBUTE} = "domain.xml".')
    for setting, forbidden in ((ALLOWED, not settings.boolean(ALLOWED)), ("LIBVIRT_XML_SCRIPT", settings.xml_script())):
        if forbidden:
            raise refused(
                name,
                f"this machine takes no XML from jobs ({setting})",
                f"leave {ATTRIBUTE} out, or submit to a pool whose machines take it.",
            )
    directory = ad.working_dir()
    domain, dropped = sanitized(read(name, directory, identity), name)
    whole = requests.completed(ad, domain, settings, name)
    return JobXml(name, domain, whole, boot_files.names(domain, name, directory, identity), dropped)


__all__ = ["ALLOWED", "ATTRIBUTE", "JobXml", "load"]
