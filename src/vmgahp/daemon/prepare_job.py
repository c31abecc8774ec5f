"""The HOOK_PREPARE_JOB that holds a job, with a sentence, that its START would hold with a word.

The starter takes no chirp while it waits for a START. This looks at the same job ad and files before, as the job's
user; whatever else is wrong is left to the START. ``vmgahp setup`` installs a shell script that runs it.
"""

import os
import sys

from vmgahp import config, errors
from vmgahp.config import sources
from vmgahp.domain import job_xml
from vmgahp.hooks import policy
from vmgahp.host.job_user import Identity
from vmgahp.job import look
from vmgahp.job.ad import UNIVERSE, JobAd, quote, require_accepted
from vmgahp.job.policy_view import PolicyView
from vmgahp.job.spec import JobSpec
from vmgahp.vm_types import QEMU


def main() -> None:
    """Read the job ad from standard input, and print HTCondor's answer if the job is to be held."""
    lines = sys.stdin.buffer.read().decode("utf-8", "surrogateescape").split("\n")
    ad = JobAd([("VM_WORKING_DIR", quote(os.getcwd())), *filter(None, map(JobAd.parse_line, lines))])
    identity = Identity(os.geteuid(), os.getegid())
    try:
        settings = config.load(os.environ)
        if ad.integer("JobUniverse") != UNIVERSE or settings.string("VM_TYPE").lower() not in QEMU:
            return
        # HTCondor's tools may pass over a file of settings silently if the job's user cannot read it.
        places = sources.directories(os.environ)
        if not all(os.access(f"{place}/{name}", os.R_OK) for place in places for name in os.listdir(place)):
            return
        ad.evaluate_as(identity)
        require_accepted(ad)
        xml = job_xml.load(ad, settings, identity)
        ad = xml.ad if xml else ad
        policy.require(PolicyView(ad, settings))
        look.look(JobSpec.parse(ad, settings, diskless=bool(settings.xml_script())), settings, identity)
    except errors.JobFault as fault:
        if isinstance(fault.__cause__, errors.MachineFault):  # such as a catalog that root alone may read
            return
        said = quote(" ".join(f"{fault.problem} Hint: {fault.hint}".split()))
        sys.stdout.buffer.write(f"HookStatusCode = 1\nHookStatusMessage = {said}\n".encode(errors="replace"))
    except Exception as error:  # noqa: BLE001 - of the machine's: the START says so; to fail would hold the job
        sys.stderr.write(f"not looked at: {error!a}\n")


if __name__ == "__main__":
    main()
