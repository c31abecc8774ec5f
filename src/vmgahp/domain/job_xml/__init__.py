"""Libvirt XML of a job's own: ``+VMPARAM_Libvirt_XML``.

`allow_list` lists everything that it may contain, `host_made` the parts that are dropped, and `sanitize` refuses the
rest. `requests` converts its requests to the records of a job ad, which are checked like any job's, `boot_files` copies
a kernel, and `merge` puts the remainder into the description that this package makes of every job.
docs/reference/job-xml.md is for users.
"""

import os
from collections.abc import Callable, Mapping
from typing import NamedTuple
from xml.etree import ElementTree as etree

from vmgahp.config import Settings
from vmgahp.errors import JobFault
from vmgahp.host.job_user import Identity
from vmgahp.job.ad import JobAd
from vmgahp.job.own_xml import OwnXml
from vmgahp.text import shown

ATTRIBUTE = "VMPARAM_Libvirt_XML"
"""The attribute that names the file with the job's XML. Its reader is imported only for jobs that have one."""
ALLOWED = "VM_ALLOW_LIBVIRT_XML"


class JobXml(NamedTuple):
    """The XML of a job, sanitized, with its requests."""

    file_name: str
    domain: etree.Element
    asks: OwnXml
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

    def explain(self, fault: JobFault) -> JobFault:
        """Add to a fault that the job's request may come from its XML."""
        return JobFault(fault.code, f"{fault.problem} ({ATTRIBUTE} = {shown(self.file_name)} may say it.)", fault.hint)


def load(ad: JobAd, settings: Settings, identity: Identity) -> JobXml | None:
    """Load the XML of a job; None for a job without.

    Raises `JobFault` for XML that has forbidden content, contradicts the ad, or is not allowed on this machine.
    """
    if (ad.expression(ATTRIBUTE) or "undefined").lower() == "undefined":
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
    asks = requests.of(domain, ad, settings, name)
    return JobXml(name, domain, asks, boot_files.names(domain, name, directory, identity), dropped)


def ad_for_policy(ad: JobAd, xml: JobXml | None) -> JobAd:
    """Return the ad as the administrator's programs see it: with the requests of the job's XML as attributes."""
    return ad if xml is None else ad.changed(xml.asks.in_words())


__all__ = ["ALLOWED", "ATTRIBUTE", "JobXml", "ad_for_policy", "load"]
