"""``vmgahp doctor``: why ``condor_status -vm`` is empty, or a VM job stays idle.

The checks run in the order of their dependencies (`vmgahp.findings.CHECKS`), and each is made whatever the result of
those before, unless the settings cannot be read or nobody has configured this machine for VMs. Without ``--recover``
nothing is changed: no setting, no file, no domain, no network; a check that would need a change reports an unknown
result.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from vmgahp import errors, findings
from vmgahp.commands.arguments import FINDINGS, add_json, add_type, print_json, tell
from vmgahp.commands.by_hand import apart
from vmgahp.commands.doctor import condor, host
from vmgahp.commands.doctor.context import Body, Context, in_time, look
from vmgahp.commands.doctor.dry_run import Trial, try_out
from vmgahp.commands.files import update_ad
from vmgahp.config import check as settings_check
from vmgahp.findings import BAD, OFF, OK, UNKNOWN, Finding
from vmgahp.text import escape

FIT, UNFIT, UNSURE = 0, 1, 3
"""The exit statuses: a job could run, no job could, or a decisive check could not be made. (2 is argparse's.)"""

LOOKS: dict[str, Body] = {
    "HTCondor": condor.installed,
    "host name": host.host_name,
    "settings": condor.settings,
    "VM_TYPE": condor.vm_type,
    "VM_GAHP_SERVER": condor.server,
    "hypervisor": host.probed,
    "slots": condor.slots,
    "VM_NETWORKING": condor.networking,
    "VM_GAHP_LOG": condor.log_file,
    "root": host.root,
    "kvm device": host.kvm_device,
    "QEMU's user": host.scratch,
    "SELinux": host.confinement,
    "firmware": host.firmware,
    "clock": host.clock,
    "startd": condor.startd,
    "log": condor.failures,
}
"""The functions that make the checks of `findings.CHECKS`, in their order; the probe makes the rest."""


@dataclass
class Examination:
    """All findings, in order."""

    vm_type: str
    findings: list[Finding]
    """The findings about the machine."""
    trial: Trial | None = None

    @property
    def sections(self) -> list[tuple[str, list[Finding]]]:
        grouped = groupby(self.findings, lambda one: findings.row_of(one.check).section)
        return [(title, list(found)) for title, found in grouped]

    @property
    def status(self) -> int:
        """The exit status of the process."""
        found = self.findings + (self.trial.findings if self.trial else [])
        if findings.first_bad(found):
            return UNFIT
        unknown = [one.check for one in found if one.verdict == UNKNOWN]
        return UNSURE if any(name == "dry run" or findings.row_of(name).is_decisive for name in unknown) else FIT

    def verdict(self) -> str:
        """Return the conclusion, in one sentence or two."""
        found = [one for one in self.findings if not one.because]
        of_job = self.trial.findings if self.trial else []
        bad = [one.check for one in (*found, *of_job) if one.verdict == BAD and not one.because]
        what = "This job" if self.trial else f"A VM job of type {self.vm_type}"
        if bad:
            also = f" (begin with {bad[0]})" if len(bad) > 1 else ""
            return f"{what} cannot run here: {_names(bad)}{also}."
        if self.status == UNSURE:
            missing = _names([one.check for one in found if one.verdict == UNKNOWN])
            what = what[0].lower() + what[1:]
            return f"Nothing was found that keeps {what} from running, but not all could be looked at: {missing}."
        less = _names([one.check for one in self.findings if one.verdict == OFF])
        return f"{what} could run here." + (f" What is marked ! is missing or worth fixing: {less}." if less else "")

    def document(self) -> dict[str, object]:
        """Return all findings as an object for ``--json``."""
        document: dict[str, object] = {
            "vm_type": self.vm_type,
            "could_run": self.status == FIT,
            "verdict": self.verdict(),
            "findings": [{"section": title, **one._asdict()} for title, found in self.sections for one in found],
        }
        if trial := self.trial:
            job = {"ad": trial.path, "findings": [finding._asdict() for finding in trial.findings]}
            document["job"] = job | {"policy": trial.policy, "description": trial.description}
        return document


def _names(checks: list[str]) -> str:
    return ", ".join(dict.fromkeys(checks))


def examine(environ: Mapping[str, str], vm_type: str = "", job: str = "", *, recover: bool = False) -> Examination:
    """Run all checks, also on the job ad at the path `job`; with `recover` have the startd offer VMs if all is well."""
    context = in_time("settings", lambda: Context(environ, vm_type))
    if isinstance(context, errors.Fault):
        hint = "see which file system of PATH, HOME or VMGAHP_CONFIG hangs, or who tells accounts (getent passwd root)."
        late = Finding("settings", BAD, settings_check.LOOKED_AT, context.problem, hint)
        return Examination(vm_type or "kvm", [late])
    new = None if vm_type else condor.not_configured(context)
    context.found += [new] if new else []
    is_short = new is not None or context.fault is not None
    for name in ("HTCondor", "host name", "settings") if is_short else LOOKS:
        if name not in context.bad_names:  # else it is among the findings about the settings
            context.found += look(name, LOOKS[name], context)
    done = Examination(context.vm_type, findings.explained(context.found))
    if job and not is_short:
        trial = in_time(f"the job in {job}", lambda: try_out(context, job, context.probe))
        if isinstance(trial, errors.Fault):
            trial = Trial(job, [Finding("dry run", UNKNOWN, f"the job ad in {job}", trial.problem, trial.hint)])
        done.trial = trial
    if recover and condor.may_recover(done.findings):
        if trouble := update_ad(environ, "HasVM = True"):
            sys.stderr.write(f"vmgahp doctor: {trouble}\n")
        return examine(environ, vm_type, job)
    return done


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Look at everything that VM jobs need on this machine, from HTCondor's settings to the last failures, and say of
    each thing what was seen and what to type. Only --recover changes anything."""
    add_type(command, "")
    add_json(command, "print all findings as one JSON object")
    add = command.add_argument
    add("--verbose", action="store_true", help="show what is as it should be too, and where each thing was looked at")
    text = "check this job ad too (condor_q -l, or .job.ad), and print what the hypervisor would be told"
    add("--job", default="", metavar="AD", help=text)
    text = "where all is well again, have the startd offer VMs that it has ceased to offer after a failure; jobs go on"
    add("--recover", action="store_true", help=text)
    command.set_defaults(run=lambda given: apart(lambda: _run(given)))
    tell(
        command,
        examples=[
            ("vmgahp doctor", "why no VM job comes to this machine"),
            ("vmgahp doctor --verbose", "all that was looked at, and what was seen there"),
            ("vmgahp doctor --recover", "bring the machine back after a failure, without restarting anything"),
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


def _run(given: argparse.Namespace) -> int:
    done = examine(os.environ, given.type.lower(), given.job, recover=given.recover)
    if not given.json:
        return show(done, verbose=given.verbose)
    print_json(done.document())
    return done.status


def show(done: Examination, *, verbose: bool = False) -> int:
    """Print the findings; return the exit status, which is `FIT` only if a job could run."""
    from vmgahp.commands.page import Page  # late: completions and man pages are made without rich

    page = Page()
    sections = done.sections if verbose else [("", [one for one in done.findings if one.verdict != OK])]
    trial = done.trial
    if trial:
        sections.append((f"The job in {trial.path}", trial.findings))
    text = page.findings(sections, brief=not verbose)
    for lines in (trial.policy, trial.description.splitlines()) if trial else ():
        if lines:
            text.append("\n" + "".join(f"{escape(line)}\n" for line in lines))
    verdict = done.verdict()
    if text:
        text.append("\n")
    elif not verbose:
        verdict += f" Looked at: {_names([one.check for one in done.findings])} (--verbose says more)."
    style = {FIT: "bold green", UNFIT: "bold red", UNSURE: "bold cyan"}[done.status]
    page.say(text + page.paragraph(verdict, style))
    return done.status
