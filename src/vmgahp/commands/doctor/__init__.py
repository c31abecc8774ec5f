"""``vmgahp doctor``: why ``condor_status -vm`` is empty, or a VM job stays idle.

The checks come in the order in which things depend on each other, and each is made whatever the ones before
it said. Nothing is changed: no setting, no file, no domain, no network; what a check cannot find out without
that, it does not find out.
"""

import argparse
import os
import sys
from collections.abc import Mapping

from vmgahp import errors, findings
from vmgahp.commands import page
from vmgahp.commands.arguments import FINDINGS, add_json, add_type, print_json, tell
from vmgahp.commands.doctor import access, condor, host, log_history, slots
from vmgahp.commands.doctor.context import NOBODY, Context
from vmgahp.commands.doctor.dry_run import Trial
from vmgahp.daemon import probe
from vmgahp.drivers import base
from vmgahp.findings import BAD, OFF, OK, UNKNOWN, Finding
from vmgahp.host import proof
from vmgahp.host.job_user import Identity
from vmgahp.job.ad import JobAd
from vmgahp.vm_types import QEMU

FIT, UNFIT, UNSURE = 0, 1, 3
"""The exit status: a job could run, none could, or what decides it could not be looked at. (2 is argparse's.)"""

DECISIVE = ("root", "hypervisor", "libvirt", "kvm", "cpu", "memory")
"""Checks without which nobody can say that a job could run."""


class Examination:
    """All that was found, in order."""

    def __init__(self, vm_type: str) -> None:
        self.vm_type = vm_type
        self.sections: list[tuple[str, list[Finding]]] = []
        self.trial: Trial | None = None

    @property
    def findings(self) -> list[Finding]:
        """Those about the machine."""
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
        """What it comes to, in one sentence or two."""
        machine = [finding for finding in self.findings if finding.verdict == BAD]
        job = [one for one in (self.trial.findings if self.trial else ()) if one.verdict == BAD]
        what = "This job" if self.trial else f"A VM job of type {self.vm_type}"
        if machine or job:
            names = ", ".join(dict.fromkeys(finding.check for finding in (*machine, *job)))
            first = (*machine, *job)[0].check
            also = f" (begin with {first})" if len(machine) + len(job) > 1 else ""
            return f"{what} cannot run here: {names}{also}."
        if self.status == UNSURE:
            names = ", ".join(f.check for f in self.findings if f.verdict == UNKNOWN)
            what = what[0].lower() + what[1:]
            return f"Nothing was found that keeps {what} from running, but not all could be looked at: {names}."
        left = [finding.check for finding in self.findings if finding.verdict == OFF]
        less = f" What is marked ! is missing or worth fixing: {', '.join(dict.fromkeys(left))}."
        return f"{what} could run here.{less if left else ''}"

    def document(self) -> dict[str, object]:
        """All of it for ``--json``."""
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
    """Look at everything, and at a job ad where `job` is the path of one.

    `root` is put before the paths of the system, for tests.
    """
    context = Context(environ, vm_type, root)
    done = Examination(context.vm_type)
    server = condor.server(context)
    on_libvirt = context.vm_type in QEMU
    known = access.capabilities(context) if on_libvirt else errors.MachineFault("It is no libvirt.")
    probed = _probe(context, isinstance(known, access.Capabilities))
    parts = _sorted(context, probed)

    def add(title: str, *found: Finding | None) -> None:
        done.sections.append((title, [finding for finding in found if finding is not None]))

    add(
        "HTCondor's settings",
        condor.installed(context),
        *condor.settings(context),
        condor.vm_type(context),
        *server,
        *parts["memory"],
        slots.slots(context, probed),
        condor.networking(context),
        condor.log_file(context),
        *parts["script"],
        *parts["policy"],
    )
    add("Who looks", host.root(context))
    add("The hypervisor", *parts["hypervisor"])
    device = access.kvm_device(context, known) if isinstance(known, access.Capabilities) else None
    add("KVM", *parts["kvm"], device, *parts["cpu"])
    accel = probed.attributes.get(f"VM_{context.vm_type}_ATTR_accel")
    if on_libvirt:
        scratch = access.scratch(context, "qemu" if accel == "tcg" else "kvm")
        add("QEMU's user and its confinement", scratch, access.confinement(context, known), *parts["disk"])
    else:
        add("The scratch directories", *parts["disk"])
    add("Networks", *parts["network"])
    add("The catalog of images", *parts["images"])
    clock = host.clock(context, probed, condor.is_ours(server))
    add("Firmware and the probe's clock", host.firmware(context, probed) if on_libvirt else None, clock)
    fit = findings.first_bad(done.findings) is None
    add("What the startd last saw", condor.startd(context, fit))
    add("The last failures", *log_history.failures(context))
    if job:
        from vmgahp.commands.doctor.dry_run import try_out

        with proof.LookAnew():
            done.trial = try_out(context, job, probed)
    return done


def _probe(context: Context, answers: bool) -> probe.Probe:
    """The startd's probe in this process, with a driver that writes no log, and nothing believed that others saw."""
    driver: base.Driver
    identity = None
    try:
        identity = Identity.from_environ(context.environ)
        if context.blind and context.vm_type in QEMU:
            driver = _StandIn(context, base.Survey(host.unseen(context, answers)))
        else:
            driver = base.find(context.vm_type)(context.vm_type, context.settings, identity, context.notes.append)
    except errors.Fault as fault:
        driver = _StandIn(context, fault)
    with proof.LookAnew():
        return probe.probe(context.vm_type, context.settings, driver, identity=identity)


class _StandIn(base.Driver):
    """Takes the place of a driver that cannot be used here, so that the other checks of the probe are made."""

    def __init__(self, context: Context, outcome: base.Survey | errors.Fault) -> None:
        super().__init__(context.vm_type, context.settings, Identity(NOBODY, NOBODY), context.notes.append)
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
    """The probe's findings by where they are shown, those that are bad with their causes."""
    parts: dict[str, list[Finding]] = {
        name: [] for name in ("memory", "policy", "script", "hypervisor", "kvm", "cpu", "network", "disk", "images")
    }
    for finding in probed.findings:
        name = finding.check.partition(" ")[0]
        if name == "memory" and (context.unread or "VM_MEMORY" in context.bad_names):
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
    """The arguments of ``vmgahp doctor``."""
    command.description = (
        "Look at everything that VM jobs need on this machine, from HTCondor's settings to the last "
        "failures, and say of each thing what was seen and what to type. Nothing is changed."
    )
    add_type(command, "")
    add_json(command, "print the findings as one JSON object")
    command.add_argument(
        "--job",
        default="",
        metavar="AD",
        help="check this job ad too (condor_q -l, or .job.ad), and print what the hypervisor would be told",
    )
    command.set_defaults(
        run=lambda options: run(os.environ, options.type.lower(), job=options.job, as_json=options.json)
    )
    tell(
        command,
        examples=[
            ("vmgahp doctor", "why no VM job comes to this machine"),
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


def run(environ: Mapping[str, str], vm_type: str = "", *, job: str = "", as_json: bool = False, root: str = "") -> int:
    """Examine and print; the exit status is `FIT` only where a job could run."""
    done = examine(environ, vm_type, job, root)
    if as_json:
        print_json(done.document())
        return done.status
    out = page.page_of_stdout(environ)
    sections: list[tuple[str, list[Finding]]] = list(done.sections)
    if done.trial:
        sections = [(title, [one for one in found if one.verdict != OK]) for title, found in sections]
        sections.append((f"The job in {done.trial.path}", done.trial.findings))
    text = page.render(out, sections)
    if done.trial and done.trial.policy:
        text += "\n" + "\n".join(out.text(line) for line in done.trial.policy) + "\n"
    if done.trial and done.trial.description:
        text += "\n" + "\n".join(out.text(line) for line in done.trial.description.splitlines()) + "\n"
    good = {FIT: True, UNFIT: False, UNSURE: None}[done.status]
    sys.stdout.write(text + "\n" + page.verdict(out, done.verdict(), good))
    return done.status


__all__ = ["FIT", "UNFIT", "UNSURE", "Examination", "examine", "run"]
