"""Jobs that bring libvirt XML of their own: ``+VMPARAM_Libvirt_XML``.

`allow_list` is the list of all that it may say, `host_made` what is dropped of it, `sanitize` refuses everything else,
`requests` says what it asks for
in the records of a job ad, which are checked like any job's, `boot_files` copies a kernel, and `merge` puts the
rest into the description that this package makes of every job. docs/reference/job-xml.md is for users.
"""

import os
from collections.abc import Callable, Mapping
from xml.etree import ElementTree as etree

from vmgahp.config import Settings
from vmgahp.errors import JobFault
from vmgahp.host.job_user import Identity
from vmgahp.host.light import NamedTuple
from vmgahp.job.ad import JobAd
from vmgahp.job.own_xml import OwnXml
from vmgahp.text import shown

ATTRIBUTE = "VMPARAM_Libvirt_XML"
"""The file with the job's XML. What reads it is loaded for the jobs that have one."""
ALLOWED = "VM_ALLOW_LIBVIRT_XML"


class JobXml(NamedTuple):
    """The XML of a job, sanitized, and what it asks for."""

    file_name: str
    domain: etree.Element
    asks: OwnXml
    boot_files: Mapping[str, str]
    """Element -> name in the scratch directory, of a kernel and an initrd."""
    dropped: tuple[str, ...]
    """What the file has of the machine that it was for, and which is dropped."""

    def describe(self, ours: str, directory: str, make_room: Callable[[], str] | None, identity: Identity) -> str:
        """Our domain XML with the job's in it; its kernel is copied from the scratch `directory`.

        Without `make_room` it is only to be shown, and nothing is copied. Raises `errors.Fault`.
        """
        from vmgahp.domain.job_xml import boot_files
        from vmgahp.domain.job_xml.merge import merge

        paths = {tag: f"(copy of {name})" for tag, name in self.boot_files.items()}
        if make_room is not None and self.boot_files:
            paths = boot_files.copy(self.boot_files, directory, identity, make_room, self.file_name)
        return merge(ours, self.domain, paths)

    def without(self) -> str:
        """What is dropped, as a sentence; empty where nothing is."""
        what = ", ".join(self.dropped)
        return what and f"{shown(self.file_name)} has these of another machine, and they are dropped: {what}."

    def explain(self, fault: JobFault) -> JobFault:
        """A fault of what the job asks for, some of which the XML says."""
        return JobFault(fault.code, f"{fault.problem} ({ATTRIBUTE} = {shown(self.file_name)} may say it.)", fault.hint)


def load(ad: JobAd, settings: Settings, identity: Identity) -> JobXml | None:
    """The XML of a job; None for a job without.

    Raises `JobFault` for XML that says more than it may, contradicts the ad, or is not wanted here.
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
    """The ad as the administrator's programs see it: with what the job's XML asks for, in the words of the ad."""
    return ad if xml is None else ad.changed(xml.asks.in_words())


__all__ = ["ALLOWED", "ATTRIBUTE", "JobXml", "ad_for_policy", "load"]
