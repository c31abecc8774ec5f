"""Jobs that bring XML of their own, and whose fault it is when libvirt refuses it."""

import libvirt

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.domain import job_xml, verify
from vmgahp.domain.job_xml import ATTRIBUTE, JobXml
from vmgahp.drivers.libvirt import faults
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


def judge(mine: JobXml, fault: errors.Fault) -> errors.Fault:
    """The fault of a start of a job with XML: that of the job's owner, where the XML may be the cause."""
    if isinstance(fault, JobFault):
        return mine.explain(fault)
    cause = fault.__cause__
    may_cause = isinstance(cause, verify.Mismatch) or (
        isinstance(cause, libvirt.libvirtError) and faults.classify(cause).job_xml_may_cause
    )
    if not (isinstance(fault, errors.MachineFault) and may_cause):
        return fault
    return JobFault(
        errors.MISMATCHED,
        f"This machine cannot run what {ATTRIBUTE} = {mine.file_name!a} describes: {fault.problem}",
        "take what the message is about out of the file, or require a machine that has it.",
    )
