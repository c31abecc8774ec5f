"""Jobs that bring libvirt XML of their own: ``+VMPARAM_Libvirt_XML``.

`allowed` is the list of all that it may say, `reading` refuses everything else, `meaning` says what it asks for in
the attributes of the job ad, where it is checked like any job's, `boot_files` copies a kernel, and `merge` puts the
rest into the description that this package makes of every job. docs/reference/job-xml.md is for users.
"""

import os
from collections.abc import Callable
from xml.etree import ElementTree as etree

from vmgahp.config import Settings
from vmgahp.domain.job_xml import boot_files, to_attributes
from vmgahp.domain.job_xml.merge import merge
from vmgahp.domain.job_xml.sanitize import ATTRIBUTE, read, refused, sanitized
from vmgahp.errors import JobFault
from vmgahp.host.job_user import Identity
from vmgahp.job.ad import JobAd
from vmgahp.text import shown

ALLOWED = "VM_ALLOW_LIBVIRT_XML"


class JobAdWithXml(JobAd):
    """The ad of a job with all that its XML adds to it, and the XML itself, sanitized."""

    def __init__(self, ad: JobAd, name: str, domain: etree.Element, added: dict[str, str]) -> None:
        super().__init__((*ad.pairs(), *added.items()))
        self.file_name = name
        self.domain = domain
        self.boot_files: dict[str, str] = {}
        """Element -> name in the scratch directory, of a kernel and an initrd."""

    def describe(self, ours: str, make_room: Callable[[], str] | None, identity: Identity) -> str:
        """Our domain XML with the job's in it. Without `make_room` it is only to be shown, and nothing is copied.

        Raises `errors.Fault`.
        """
        paths = {tag: f"(copy of {name})" for tag, name in self.boot_files.items()}
        if make_room is not None and self.boot_files:
            paths = boot_files.copy(self.boot_files, self.working_dir(), identity, make_room, self.file_name)
        return merge(ours, self.domain, paths)

    def explain(self, fault: JobFault) -> JobFault:
        """A fault of the ad's attributes, some of which come from the XML."""
        return JobFault(fault.code, f"{fault.problem} ({ATTRIBUTE} = {shown(self.file_name)} may say it.)", fault.hint)


def load(ad: JobAd, settings: Settings, identity: Identity) -> JobAd:
    """The ad as it is for a job without XML of its own; else with what the XML says.

    Raises `JobFault` for XML that says more than it may, contradicts the ad, or is not wanted here.
    """
    if isinstance(ad, JobAdWithXml) or (ad.expression(ATTRIBUTE) or "undefined").lower() == "undefined":
        return ad
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
    domain = sanitized(read(name, directory, identity), name)
    made = JobAdWithXml(ad, name, domain, to_attributes.attributes(domain, ad, settings, name))
    made.boot_files = boot_files.names(domain, name, directory, identity)
    return made


__all__ = ["ALLOWED", "ATTRIBUTE", "JobAdWithXml", "load"]
