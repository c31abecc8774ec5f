"""``vmgahp doctor``: why ``condor_status -vm`` is empty, or a VM job stays idle.

The checks run in the order of their dependencies, and each is made whatever the result of those before. Nothing is
changed: no setting, no file, no domain, no network; a check that would need a change reports an unknown result.
"""

import argparse
import os
from collections.abc import Mapping

from vmgahp import errors, findings
from vmgahp.commands.apart import apart
from vmgahp.commands.arguments import FINDINGS, add_json, add_type, print_json, tell
from vmgahp.commands.doctor import condor, host
from vmgahp.commands.doctor.context import AS_ROOT, NOBODY, Context, in_time, look
from vmgahp.commands.doctor.dry_run import Trial
from vmgahp.config import check as settings_check
from vmgahp.daemon import probe
from vmgahp.drivers import base
from vmgahp.findings import BAD, OFF, OK, UNKNOWN, Finding, NotKnown
from vmgahp.host import proof
from vmgahp.host.job_user import Identity
from vmgahp.job.ad import JobAd
from vmgahp.text import escape
from vmgahp.vm_types import QEMU

FIT, UNFIT, UNSURE = 0, 1, 3
"""The exit statuses: a job could run, no job could, or a decisive check could not be made. (2 is argparse's.)"""

COLORS = {FIT: "bold green", UNFIT: "bold red", UNSURE: "bold cyan"}
"""The styles of the verdict."""

DECISIVE = ("root", "hypervisor", "libvirt", "kvm", "cpu", "memory")
"""The checks that decide whether a job could run."""


class Examination:
    """All findings, in order."""

    def __init__(self, vm_type: str) -> None:
        self.vm_type = vm_type
        self.sections: list[tuple[str, list[Finding]]] = []
        self.trial: Trial | None = None

    @property
    def findings(self) -> list[Finding]:
        """The findings about the machine."""
        return [finding for _, found in self.sections for finding in found]

    @property
    def status(self) -> int:
        """The exit status of the process."""
        found = self.findings + (self.trial.findings if self.trial else [])
        if findings.first_bad(found):
            return UNFIT
        unsure = any(one.verdict == UNKNOWN and one.check in (*DECISIVE, "dry run") for one in found)
        return UNSURE if unsure else FIT

    def verdict(self) -> str:
        """Return the conclusion, in one sentence or two."""
        machine = [finding for finding in self.findings if finding.verdict == BAD and not finding.because]
        job = [one for one in (self.trial.findings if self.trial else ()) if one.verdict == BAD]
        what = "This job" if self.trial else f"A VM job of type {self.vm_type}"
        if machine or job:
            names = ", ".join(dict.fromkeys(finding.check for finding in (*machine, *job)))
            first = (*machine, *job)[0].check
            also = f" (begin with {first})" if len(machine) + len(job) > 1 else ""
            return f"{what} cannot run here: {names}{also}."
        if self.status == UNSURE:
            names = ", ".join(f.check for f in self.findings if f.verdict == UNKNOWN and not f.because)
            what = what[0].lower() + what[1:]
            return f"Nothing was found that keeps {what} from running, but not all could be looked at: {names}."
        left = [finding.check for finding in self.findings if finding.verdict == OFF]
        less = f" What is marked ! is missing or worth fixing: {', '.join(dict.fromkeys(left))}."
        return f"{what} could run here.{less if left else ''}"

    def document(self) -> dict[str, object]:
        """Return all findings as an object for ``--json``."""
        document: dict[str, object] = {
            "vm_type": self.vm_type,
            "could_run": self.status == FIT,
            "verdict": self.verdict(),
            "findings": [
                {"section": title, **finding._asdict()} for title, found in self.sections for finding in found
            ],
        }
        if self.trial:
            document["job"] = {
                "ad": self.trial.path,
                "findings": [finding._asdict() for finding in self.trial.findings],
                "policy": self.trial.policy,
                "description": self.trial.description,
            }
        return document


def examine(environ: Mapping[str, str], vm_type: str = "", job: str = "", root: str = "") -> Examination:
    """Run all checks, also on the job ad at the path `job`, if given.

    `root` is put before the paths of the system, for tests.
    """
    resolver = probe.Resolver()
    context = in_time("settings", lambda: Context(environ, vm_type, root))
    if not isinstance(context, Context):
        assert isinstance(context, errors.Fault)
        done = Examination(vm_type or "kvm")
        hint = "see which file system of PATH, HOME or VMGAHP_CONFIG hangs, or who tells accounts (getent passwd root)."
        found = Finding("settings", BAD, settings_check.LOOKED_AT, context.problem, hint)
        done.sections.append(("HTCondor's settings", [found]))
        return done
    done = Examination(context.vm_type)
    on_libvirt = context.vm_type in QEMU
    server = look("VM_GAHP_SERVER", "VM_GAHP_SERVER", condor.server, context)
    known, probed = _seen(context, on_libvirt)
    parts = _sorted(context, probed)

    def add(title: str, *found: list[Finding]) -> None:
        done.sections.append((title, [finding for some in found for finding in some]))

    add(
        "HTCondor's settings",
        look("HTCondor", "condor_config_val", condor.installed, context),
        look("host name", "the resolver", host.host_name, resolver, context),
        look("settings", settings_check.LOOKED_AT, condor.settings, context),
        look("VM_TYPE", "VM_TYPE", condor.vm_type, context),
        server,
        parts["memory"],
        look("slots", "VM_MEMORY, NUM_CPUS and VM_MAX_NUMBER", condor.slots, context, probed),
        look("VM_NETWORKING", "VM_NETWORKING", condor.networking, context),
        look("VM_GAHP_LOG", "VM_GAHP_LOG", condor.log_file, context),
        parts["script"],
        parts["policy"],
    )
    add("Who looks", [host.root(context)])
    add("The hypervisor", parts["hypervisor"])
    device: list[Finding] = []
    if isinstance(known, host.Capabilities):
        device = look("kvm device", "/dev/kvm", host.kvm_device, context, known)
    add("KVM", parts["kvm"], device, parts["cpu"])
    accel = probed.attributes.get(f"VM_{context.vm_type}_ATTR_accel")
    if on_libvirt:
        scratch = look("QEMU's user", "EXECUTE", host.scratch, context, "qemu" if accel == "tcg" else "kvm")
        confined = look("confinement", "AppArmor and SELinux", host.confinement, context, known)
        add("QEMU's user and its confinement", scratch, confined, parts["disk"])
    else:
        add("The scratch directories", parts["disk"])
    add("Networks", parts["network"])
    add("The catalog of images", parts["images"])
    firmware = look("firmware", "libvirt", host.firmware, context, probed) if on_libvirt else []
    ours = condor.is_ours(server)
    add("Firmware and the probe's clock", firmware, look("clock", "the probe", host.clock, context, probed, ours))
    cause = findings.first_bad(done.findings)
    sure = done.status != UNSURE
    startd = look("startd", "the startd's own ad", condor.startd, context, cause.check if cause else "", sure)
    add("What the startd last saw", startd)
    add("The last failures", look("log", "VM_GAHP_LOG", condor.failures, context))
    done.sections = [(title, [_standing(one, done.findings) for one in found]) for title, found in done.sections]
    if job:
        from vmgahp.commands.doctor.dry_run import try_out

        def tried() -> Trial:
            try:
                with proof.LookAnew():
                    return try_out(context, job, probed)
            except NotKnown as unknown:
                return Trial(job, [Finding("dry run", UNKNOWN, f"the job ad in {job}", str(unknown))])

        trial = in_time(f"the job in {job}", tried)
        if isinstance(trial, errors.Fault):
            trial = Trial(job, [Finding("dry run", UNKNOWN, f"the job ad in {job}", trial.problem, trial.hint)])
        assert isinstance(trial, Trial)
        done.trial = trial
    return done


_STAND_ON = {
    "HTCondor": (
        "settings",
        "VM_TYPE",
        "VM_GAHP_SERVER",
        "memory",
        "VM_GAHP_LOG",
        "QEMU's user",
        "disk",
        "startd",
        "log",
    ),
    "host name": ("settings",),
    "VM_TYPE": ("hypervisor",),
    "libvirt": ("kvm", "cpu", "network", "tpm", "firmware", "limits", "image"),
    "hypervisor": ("firmware",),
    "disk space": ("QEMU's user",),
    "kvm": ("cpu", "firmware"),
    "VM_GAHP_LOG": ("log",),
}
"""Check -> the first words of the checks that fail if it does."""


def _standing(finding: Finding, found: list[Finding]) -> Finding:
    """Set the check on which a finding ultimately depends, if that check has failed."""
    if finding.verdict == OK:
        return finding
    if finding.because:
        causes = [one for one in found if one.check == finding.because and one.verdict != OK]
        return finding._replace(because=(causes and _standing(causes[0], found).because) or finding.because)
    if finding.verdict == UNKNOWN and finding.hint == AS_ROOT and finding.check != "root":
        return finding._replace(because="root")
    names = (finding.check, finding.check.partition(" ")[0])
    for cause in found:
        follows = any(name in _STAND_ON.get(cause.check, ()) for name in names)
        if follows and (cause.verdict == BAD or (cause.verdict != OK and finding.verdict == UNKNOWN)):
            return finding._replace(because=_standing(cause, found).because or cause.check)
    return finding


def _seen(context: Context, on_libvirt: bool) -> tuple[host.Capabilities | errors.Fault, probe.Probe]:
    """Return the capabilities from libvirt, and the result of the probe."""
    try:
        known = host.capabilities(context) if on_libvirt else errors.MachineFault("It is no libvirt.")
        return known, _probe(context, isinstance(known, host.Capabilities))
    except NotKnown as unknown:
        probed = probe.Probe(context.vm_type)
        for name, looked_at in (
            ("memory", "VM_MEMORY, and the memory of this machine"),
            ("hypervisor", f"the driver of VM type {context.vm_type}"),
            (probe.DISK_SPACE, "the free disk space in EXECUTE"),
        ):
            probed.findings.append(Finding(name, UNKNOWN, looked_at, str(unknown), because=unknown.because))
        return errors.MachineFault(str(unknown)), probed


def _probe(context: Context, answers: bool) -> probe.Probe:
    """Run the startd's probe in this process, with a driver that writes no log, and without cached results."""
    driver: base.Driver
    identity, settings = None, context.usable
    try:
        identity = Identity.from_environ(context.environ)
        if context.blind and context.vm_type in QEMU:
            driver = _StandIn(context, base.Survey(host.unseen(context, answers)))
        else:
            driver = base.find(context.vm_type)(context.vm_type, settings, identity, context.notes.append)
    except errors.Fault as fault:
        driver = _StandIn(context, fault)
    with proof.LookAnew():
        return probe.probe(context.vm_type, settings, driver, identity=identity)


class _StandIn(base.Driver):
    """A replacement for a driver that cannot be used here, so that the other checks of the probe are made."""

    def __init__(self, context: Context, outcome: base.Survey | errors.Fault) -> None:
        super().__init__(context.vm_type, context.usable, Identity(NOBODY, NOBODY), context.notes.append)
        self.outcome = outcome

    def start(self, job: JobAd) -> base.Machine:
        raise NotImplementedError

    def kill(self, match: str, uuid: str = "") -> bool:
        raise NotImplementedError

    def survey(self, end: float) -> base.Survey:
        if isinstance(self.outcome, errors.Fault):
            raise self.outcome
        return self.outcome


def _sorted(context: Context, probed: probe.Probe) -> dict[str, list[Finding]]:
    """Group the probe's findings by the section that shows them, bad ones with their causes."""
    parts: dict[str, list[Finding]] = {
        name: [] for name in ("memory", "policy", "script", "hypervisor", "kvm", "cpu", "network", "disk", "images")
    }
    for finding in probed.findings:
        name = finding.check.partition(" ")[0]
        if name == "memory" and "VM_MEMORY" in context.bad_names:
            continue  # it is among the settings already
        if finding.check == "libvirt" and finding.verdict == BAD and context.vm_type in QEMU:
            finding = host.explain_libvirt(context, finding)
        if finding.check == "kvm" and finding.verdict in (BAD, OFF):
            finding = host.explain_kvm(context, finding)
        if finding.check == "kvm" and finding.verdict != UNKNOWN:
            finding = host.compare_with_kept(finding)
        if name == "image":
            name = "images"
        parts[name if name in parts else "hypervisor"].append(finding)
    return parts


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vmgahp doctor``."""
    command.description = (
        "Look at everything that VM jobs need on this machine, from HTCondor's settings to the last "
        "failures, and say of each thing what was seen and what to type. Nothing is changed."
    )
    add_type(command, "")
    add_json(command, "print all findings as one JSON object")
    command.add_argument(
        "--verbose", action="store_true", help="show what is as it should be too, and where each thing was looked at"
    )
    command.add_argument(
        "--job",
        default="",
        metavar="AD",
        help="check this job ad too (condor_q -l, or .job.ad), and print what the hypervisor would be told",
    )
    command.set_defaults(
        run=lambda options: apart(
            lambda: run(
                os.environ, options.type.lower(), job=options.job, as_json=options.json, verbose=options.verbose
            )
        )
    )
    tell(
        command,
        examples=[
            ("vmgahp doctor", "why no VM job comes to this machine"),
            ("vmgahp doctor --verbose", "all that was looked at, and what was seen there"),
            ("vmgahp doctor --job job.ad", "whether this job could run here, of condor_q -l 12.0 >job.ad"),
            ("vmgahp doctor --json >doctor.json", "everything, for a report of an error"),
        ],
        statuses={
            FIT: "A job could run.",
            UNFIT: "None could.",
            UNSURE: "That could not be found out; as root it often can.",
        },
        keys={
            "vm_type": "the VM type",
            "could_run": "whether a job could run",
            "verdict": "what it comes to, in a sentence or two",
            "findings[].section": "the heading that it stands under",
            **FINDINGS,
            "job.ad": "with --job: the file of the ad",
            "job.findings": "with --job: what keeps that job from running, in the form of findings",
            "job.policy": "with --job: what the administrator's policy says of it, by lines",
            "job.description": "with --job: what the hypervisor would be told",
        },
    )


def run(
    environ: Mapping[str, str], vm_type: str = "", *, job: str = "", as_json: bool = False, verbose: bool = False
) -> int:
    """Run all checks and print the findings; the exit status is `FIT` only if a job could run."""
    done = examine(environ, vm_type, job)
    if as_json:
        print_json(done.document())
        return done.status
    from vmgahp.commands.page import Page  # late: completions and man pages are made without rich

    page = Page()
    sections: list[tuple[str, list[Finding]]] = list(done.sections)
    if not verbose:
        sections = [("", [one for one in done.findings if one.verdict != OK])]
    if done.trial:
        sections.append((f"The job in {done.trial.path}", done.trial.findings))
    text = page.findings(sections, brief=not verbose)
    verdict = done.verdict()
    for lines in (done.trial.policy, done.trial.description.splitlines()) if done.trial else ():
        if lines:
            text.append("\n" + "".join(f"{escape(line)}\n" for line in lines))
    if text:
        text.append("\n")
    elif not verbose:
        looked_at = ", ".join(dict.fromkeys(finding.check for finding in done.findings))
        verdict += f" Looked at: {looked_at} (--verbose says more)."
    page.say(text + page.paragraph(verdict, COLORS[done.status]))
    return done.status


__all__ = ["FIT", "UNFIT", "UNSURE", "Examination", "examine", "run"]
