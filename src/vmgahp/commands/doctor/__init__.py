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
from itertools import groupby

from vmgahp import errors, findings
from vmgahp.commands.arguments import FINDINGS, add_json, add_type, print_json, tell
from vmgahp.commands.by_hand import apart
from vmgahp.commands.doctor import condor, host
from vmgahp.commands.doctor.context import Body, Context, in_time, look
from vmgahp.commands.doctor.dry_run import Trial, try_out
from vmgahp.config import check as settings_check
from vmgahp.findings import BAD, OFF, OK, UNKNOWN, Finding
from vmgahp.text import escape

FIT, UNFIT, UNSURE = 0, 1, 3
"""The exit statuses: a job could run, no job could, or a decisive check could not be made. (2 is argparse's.)"""

COLORS = {FIT: "bold green", UNFIT: "bold red", UNSURE: "bold cyan"}
"""The styles of the verdict."""

LOOKS: tuple[tuple[str, str, Body], ...] = (
    ("HTCondor", "condor_config_val", condor.installed),
    ("host name", "the resolver", host.host_name),
    ("settings", settings_check.LOOKED_AT, condor.settings),
    ("VM_TYPE", "VM_TYPE", condor.vm_type),
    ("VM_GAHP_SERVER", "VM_GAHP_SERVER", condor.server),
    ("hypervisor", "the probe", host.probed),
    ("slots", "VM_MEMORY, NUM_CPUS and VM_MAX_NUMBER", condor.slots),
    ("VM_NETWORKING", "VM_NETWORKING", condor.networking),
    ("VM_GAHP_LOG", "VM_GAHP_LOG", condor.log_file),
    ("root", "the user", host.root),
    ("kvm device", "/dev/kvm", host.kvm_device),
    ("QEMU's user", "EXECUTE", host.scratch),
    ("SELinux", "/sys/fs/selinux", host.confinement),
    ("firmware", "libvirt", host.firmware),
    ("clock", "the probe", host.clock),
    ("startd", "the startd's own ad", condor.startd),
    ("log", "VM_GAHP_LOG", condor.failures),
)
"""The doctor's checks, in the order in which they are made: name, place, function. Those of the probe are one."""

WITHOUT_SETTINGS = LOOKS[:3]
"""The checks of a machine whose settings cannot be read, or that nobody has configured for VMs."""


class Examination:
    """All findings, in order."""

    def __init__(self, vm_type: str, found: list[Finding]) -> None:
        self.vm_type = vm_type
        self.findings = found
        """The findings about the machine."""
        self.trial: Trial | None = None

    @property
    def sections(self) -> list[tuple[str, list[Finding]]]:
        """The findings by their sections."""
        return [
            (title, list(found))
            for title, found in groupby(self.findings, lambda one: findings.row_of(one.check).section)
        ]

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
        of_job = self.trial.findings if self.trial else []
        bad = [one.check for one in (*self.findings, *of_job) if one.verdict == BAD and not one.because]
        what = "This job" if self.trial else f"A VM job of type {self.vm_type}"
        if bad:
            also = f" (begin with {bad[0]})" if len(bad) > 1 else ""
            return f"{what} cannot run here: {_names(bad)}{also}."
        if self.status == UNSURE:
            unknown = [one.check for one in self.findings if one.verdict == UNKNOWN and not one.because]
            what = what[0].lower() + what[1:]
            return (
                f"Nothing was found that keeps {what} from running, but not all could be looked at: {_names(unknown)}."
            )
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
        if self.trial:
            document["job"] = {
                "ad": self.trial.path,
                "findings": [finding._asdict() for finding in self.trial.findings],
                "policy": self.trial.policy,
                "description": self.trial.description,
            }
        return document


def _names(checks: list[str]) -> str:
    return ", ".join(dict.fromkeys(checks))


def examine(environ: Mapping[str, str], vm_type: str = "", job: str = "", root: str = "") -> Examination:
    """Run all checks, also on the job ad at the path `job`, if given.

    `root` is put before the paths of the system, for tests.
    """
    context = in_time("settings", lambda: Context(environ, vm_type, root))
    if not isinstance(context, Context):
        assert isinstance(context, errors.Fault)
        hint = "see which file system of PATH, HOME or VMGAHP_CONFIG hangs, or who tells accounts (getent passwd root)."
        return Examination(
            vm_type or "kvm", [Finding("settings", BAD, settings_check.LOOKED_AT, context.problem, hint)]
        )
    is_new = condor.is_not_configured(context) and not vm_type
    if is_new:
        context.found.append(condor.not_configured())
    is_short = is_new or context.fault is not None
    for name, looked_at, body in WITHOUT_SETTINGS if is_short else LOOKS:
        if name not in context.bad_names:  # else it is among the findings about the settings
            context.found += look(name, looked_at, body, context)
    done = Examination(context.vm_type, findings.explained(context.found))
    if job and not is_short:
        trial = in_time(f"the job in {job}", lambda: try_out(context, job, context.probe))
        if isinstance(trial, errors.Fault):
            trial = Trial(job, [Finding("dry run", UNKNOWN, f"the job ad in {job}", trial.problem, trial.hint)])
        assert isinstance(trial, Trial)
        done.trial = trial
    return done


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vmgahp doctor``."""
    command.description = (
        "Look at everything that VM jobs need on this machine, from HTCondor's settings to the last "
        "failures, and say of each thing what was seen and what to type. Only --recover changes anything."
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
    text = "where all is well again, have the startd offer VMs that it has ceased to offer after a failure; jobs go on"
    command.add_argument("--recover", action="store_true", help=text)
    command.set_defaults(
        run=lambda given: apart(
            lambda: run(
                os.environ,
                given.type.lower(),
                job=given.job,
                as_json=given.json,
                verbose=given.verbose,
                recover=given.recover,
            )
        )
    )
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


def run(
    environ: Mapping[str, str],
    vm_type: str = "",
    *,
    job: str = "",
    as_json: bool = False,
    verbose: bool = False,
    recover: bool = False,
) -> int:
    """Run all checks and print the findings; the exit status is `FIT` only if a job could run."""
    done = examine(environ, vm_type, job)
    if recover and condor.may_recover(done.findings):
        if trouble := condor.recover(environ):
            sys.stderr.write(f"vmgahp doctor: {trouble}\n")
        done = examine(environ, vm_type, job)
    if as_json:
        print_json(done.document())
        return done.status
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
    page.say(text + page.paragraph(verdict, COLORS[done.status]))
    return done.status


__all__ = ["FIT", "UNFIT", "UNSURE", "Examination", "examine", "run"]
