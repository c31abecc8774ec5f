"""Jobs that bring XML of their own, and whose fault it is when libvirt refuses it."""

from collections.abc import Callable

import libvirt

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.domain import verify
from vmgahp.domain.job_xml import JobAdWithXml
from vmgahp.drivers.libvirt import faults, host_checks
from vmgahp.errors import JobFault
from vmgahp.host.job_user import Identity
from vmgahp.job.ad import JobAd

ATTRIBUTE = "VMPARAM_Libvirt_XML"
"""As `vmgahp.domain.job_xml.ATTRIBUTE`, which is imported for jobs that have it alone."""


def load(job: JobAd, settings: Settings, identity: Identity) -> JobAd:
    """The job with what its XML says, or as it is where it brings none. Raises `errors.Fault`."""
    if job.expression(ATTRIBUTE) is None:
        return job
    from vmgahp.domain import job_xml

    try:
        return job_xml.load(job, settings, identity)
    except JobFault:
        host_checks.require_access(job.working_dir(), identity)
        raise


def describe(job: JobAd, ours: str, make_room: Callable[[], str] | None, identity: Identity) -> str:
    """Our domain XML with what the job's XML adds; copies of its kernel are made in the directory of `make_room`.

    Without that they are only named. Raises `errors.Fault`.
    """
    mine = _with_xml(job)
    return ours if mine is None else mine.describe(ours, make_room, identity)


def judge(job: JobAd, fault: errors.Fault) -> errors.Fault:
    """The fault of a start as it is for this job: that of the job's owner, where the job's own XML may be the cause."""
    mine = _with_xml(job)
    if mine is None:
        return fault
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


def _with_xml(job: JobAd) -> JobAdWithXml | None:
    if job.expression(ATTRIBUTE) is None:
        return None
    from vmgahp.domain.job_xml import JobAdWithXml

    return job if isinstance(job, JobAdWithXml) else None
