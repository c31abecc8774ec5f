"""A dry run of one job ad on this machine: its resources, and its domain XML."""

import os
import pwd
from contextlib import suppress
from dataclasses import dataclass, field

from vmgahp import errors
from vmgahp.commands.doctor.context import Check, Context
from vmgahp.commands.files import no_ad, parse_ad, read_ad_file
from vmgahp.config import Settings
from vmgahp.daemon.probe import Probe
from vmgahp.domain import job_xml
from vmgahp.drivers import base
from vmgahp.findings import BAD, OFF, OK, Finding
from vmgahp.hooks import policy
from vmgahp.host.job_user import Identity
from vmgahp.job import look
from vmgahp.job.ad import UNIVERSE, JobAd, quote, require_accepted
from vmgahp.job.engine import NOBODY
from vmgahp.job.policy_view import PolicyView
from vmgahp.job.spec import UNSAVEABLE, JobSpec, is_saved_by_qemu
from vmgahp.text import escape
from vmgahp.vm_types import HTCONDORS, LIBVIRT, SIMULATED

_LOOKED_AT = "what the job asks for, beside what the probe advertises"


@dataclass
class Trial:
    """The result of a dry run of one job ad."""

    path: str
    findings: list[Finding] = field(default_factory=list)
    description: str = ""
    """The description for the hypervisor; empty if the job could not be described."""
    policy: list[str] = field(default_factory=list)
    """The messages and changes of the administrator's policy, in lines."""


def read(path: str) -> JobAd:
    """Read the first ad of a file, whose directory is the scratch one if the ad names none. Raises `ClientFault`."""
    # The first VM_WORKING_DIR counts.
    beside = ("VM_WORKING_DIR", quote(os.path.dirname(os.path.realpath(os.path.expanduser(path)))))
    return JobAd([*parse_ad(read_ad_file(path)), beside])


def try_out(context: Context, path: str, probe: Probe) -> Trial:
    """Check a job ad as a START would, against the results of the probe; nothing is started."""
    trial = Trial(path)
    settings = context.settings
    check, dry = Check("job ad", f"the job ad in {path}"), Check("dry run", f"the {context.vm_type} driver")
    try:
        ad = read(path)
        identity, user = _user(context, ad)
        trial.findings += _type(context, ad, check)
        require_accepted(ad)
        if context.vm_type in (*LIBVIRT, SIMULATED):  # the others have attributes of their own
            xml = job_xml.load(ad, settings, identity)
            spec = JobSpec.parse(xml.ad if xml else ad, settings, diskless=bool(settings.xml_script()))
            trial.findings += _unmet(spec, probe)
            spec = look.find(spec, settings, identity)
            seen = f"{spec.vm.name} asks for nothing that is wrong in itself (looked at as {user})"
            trial.findings += [check.ok(seen), *_not_transferred(spec), *_not_saved(spec, settings)]
            if xml and (dropped := xml.without()):
                trial.findings.append(Finding("job XML", OK, "the XML that the job brings", escape(dropped)))

        def log(line: str) -> None:
            (trial.policy if line.startswith(("VM_POLICY", "VM_MAC_HOOK")) else context.notes).append(line)

        driver = base.find(context.vm_type)(context.vm_type, settings, identity, log)
        try:
            if not driver.evaluates_policy:
                policy.require(PolicyView(ad, settings))
            trial.description = driver.describe(ad)
        finally:
            driver.close()
        trial.findings.append(dry.ok("It can be described to the hypervisor, as shown below"))
    except errors.MachineFault as fault:
        judge = dry.unknown if "dry run" in fault.problem else dry.bad
        trial.findings.append(judge(escape(fault.problem), fault.hint))
    except errors.Fault as fault:
        fate = "It would be held" if isinstance(fault, errors.JobFault) else "It cannot be read as a job"
        trial.findings.append(check.bad(f"{fate}, with {fault.code}: {escape(fault.problem)}", fault.hint))
    return trial


def _user(context: Context, ad: JobAd) -> tuple[Identity, str]:
    """Return the user as whom the job's files are checked: its owner, else the owner of its directory, else nobody."""
    if not context.is_root:
        return Identity(os.geteuid(), os.getegid()), f"user id {os.geteuid()}"
    for name in (ad.string("OsUser"), ad.string("Owner")):
        with suppress(KeyError, ValueError):
            entry = pwd.getpwnam((name or "").partition("@")[0])
            if entry.pw_uid:
                return Identity(entry.pw_uid, entry.pw_gid), f"its owner {entry.pw_name}"
    with suppress(errors.Fault):
        if owner := Identity.of_owner(ad.working_dir()):
            return Identity(owner.uid, owner.gid or owner.uid), f"user id {owner.uid}, its directory's"
    return Identity(NOBODY, NOBODY), "nobody, for its owner has no account here"


def _type(context: Context, ad: JobAd, check: Check) -> list[Finding]:
    """Check that the job has the type that the startd offers."""
    wanted, universe = ad.vm_type(), ad.integer("JobUniverse")
    if universe not in (None, UNIVERSE):
        problem = f"JobUniverse = {universe}, and the VM universe is {UNIVERSE}"
        raise no_ad(problem, "write universe = vm in the submit file.")
    if not wanted:
        raise no_ad("The ad has no JobVMType", "set vm_type in the submit file.")
    if wanted == context.vm_type:
        return []
    seen = f"JobVMType is {escape(wanted)}, and this machine offers VM_Type {context.vm_type}: they do not match."
    hint = f"set vm_type = {context.vm_type} in the submit file, or let the job wait for another machine."
    return [check._replace(name="job type").bad(seen, hint)]


def _unmet(spec: JobSpec, probe: Probe) -> list[Finding]:
    """Compare the job's requests with what this machine offers, as probed; its files are not needed for that."""
    offered, found = probe.attributes, []

    def miss(check: str, seen: str, hint: str, verdict: str = BAD) -> None:
        found.append(Finding(check, verdict, _LOOKED_AT, seen, hint))

    memory = offered.get("VM_Memory")
    if isinstance(memory, int) and spec.vm.memory_mib > memory:
        seen = f"The job asks for {spec.vm.memory_mib} MiB, and VM_Memory is {memory} here."
        miss("job memory", seen, "lower vm_memory, or wait for another machine.")
    kinds = str(offered.get("VM_Networking_Types", "")).split(",")
    for kind in dict.fromkeys(nic.networking_type for nic in spec.vm.nics):
        if kind not in kinds and not probe.trouble:  # a hypervisor that fails has not reported its networks
            seen = f"The job asks for a network of type {kind}, which this machine does not offer now."
            miss("job network", seen, "fix that network (see above), or set another vm_networking_type.")
    prefix = f"VM_{probe.vm_type}_ATTR_"
    most = offered.get(prefix + "max_vcpus")
    if isinstance(most, int) and spec.vm.vcpus > most:
        seen = f"The job asks for {spec.vm.vcpus} CPUs, and a VM here has {most} at most."
        miss("job CPUs", seen, "lower vm_vcpus (or request_cpus).")
    if spec.vm.checkpoint and offered.get(prefix + "checkpoint") is False:
        seen = "The job asks for checkpoints (vm_checkpoint), and this machine makes none: evicted, it starts again."
        hint = "see disk space, above, and LIBVIRT_XML_SCRIPT; or set vm_checkpoint = false."
        miss("job checkpoint", seen, hint, OFF)
    return found


def _not_transferred(spec: JobSpec) -> list[Finding]:
    """Find a disk because of which a job that requests checkpoints cannot have any."""
    shared = [disk.path for disk in spec.disks if disk.writable and not disk.transferred]
    if not shared or not spec.vm.checkpoint or spec.vm.vm_type in HTCONDORS:
        return []
    seen = f"{escape(shared[0])} is not transferred with the job, so it has no checkpoints under this type."
    return [Finding("job checkpoint", OFF, _LOOKED_AT, seen, "transfer the disk, or use vm_type = kvm.")]


def _not_saved(spec: JobSpec, settings: Settings) -> list[Finding]:
    """Find a disk with which no machine suspends the VM to disk; with vm_checkpoint such a job is held."""
    disks = spec.disks if is_saved_by_qemu(spec.vm.vm_type, settings) else ()
    disk = next((disk for disk in disks if disk.format in UNSAVEABLE), None)
    if disk is None:
        return []
    seen = f"{escape(disk.path)} is a {disk.format} image, and QEMU cannot save a VM with one to suspend it."
    hint = f"convert it, where machines suspend jobs: qemu-img convert -f {disk.format} -O qcow2 OLD NEW."
    return [Finding("job suspend", OFF, _LOOKED_AT, seen, hint)]
