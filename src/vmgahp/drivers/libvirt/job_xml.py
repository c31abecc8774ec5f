"""Jobs that bring XML of their own, and whose fault it is when libvirt refuses it."""

from vmgahp.config import Settings
from vmgahp.domain import job_xml
from vmgahp.domain.job_xml import JobXml
from vmgahp.errors import JobFault
from vmgahp.host import execute
from vmgahp.host.job_user import Identity
from vmgahp.job.ad import JobAd


def load(job: JobAd, settings: Settings, identity: Identity) -> JobXml | None:
    """The XML of a job; None where it brings none. Raises `errors.Fault`."""
    try:
        return job_xml.load(job, settings, identity)
    except JobFault:
        execute.require_entry(job.working_dir(), identity)
        raise
