"""Jobs that bring XML of their own, and the fault if it cannot be read."""

from vmgahp.config import Settings
from vmgahp.domain import job_xml
from vmgahp.domain.job_xml import JobXml
from vmgahp.errors import JobFault
from vmgahp.host import execute
from vmgahp.host.job_user import Identity
from vmgahp.job.ad import JobAd


def load(job: JobAd, settings: Settings, identity: Identity) -> JobXml | None:
    """Load the XML of a job; return None if it brings none. Raises `errors.Fault`."""
    try:
        return job_xml.load(job, settings, identity)
    except JobFault:
        execute.require_entry(job.working_dir(), identity)
        raise
