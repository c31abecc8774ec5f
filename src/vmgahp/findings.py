"""Findings about this machine: the check, its result, and a hint; and the registry of all checks.

The probe publishes them beside its attributes and the doctor shows them; neither knows about hypervisors.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic
from typing import NamedTuple

from vmgahp import errors
from vmgahp.host.wait import Task

OK = "ok"
OFF = "off"
"""The status of a feature that jobs do not get on this machine; jobs that do not use it can run."""
BAD = "bad"
"""The status of a failure with which no job can run."""
UNKNOWN = "unknown"
"""The status of a check that could not be made, and therefore proves nothing."""

VERDICTS = (OK, OFF, BAD, UNKNOWN)


class Finding(NamedTuple):
    """The result of one check."""

    check: str
    """A short name, such as ``kvm`` or ``network nat``."""
    verdict: str
    subject: str
    seen: str
    hint: str = ""
    """An instruction in the imperative, with the command to type; empty if the check passed."""
    because: str = ""
    """The name of the check that this one depends on, if that one failed."""


SETTINGS, USER, HYPERVISOR, KVM = "HTCondor's settings", "The user", "The hypervisor", "KVM"
SCRATCH, NETWORKS, IMAGES = "Scratch directories and QEMU's user", "Networks", "The catalog of images"
FIRMWARE, STARTD, FAILURES = "Firmware and the probe's time", "The startd", "The last failures"


class CheckRow(NamedTuple):
    """A row of `CHECKS`."""

    name: str
    """The name of a check, or the first word of several names."""
    section: str
    needs: tuple[str, ...] = ()
    """The checks that explain a failure of this one if they have failed too."""
    is_decisive: bool = False
    """True if without its result nothing says that a job could run."""


CHECKS = (
    CheckRow("HTCondor", SETTINGS),
    CheckRow("host name", SETTINGS),
    CheckRow("settings", SETTINGS, ("HTCondor", "host name")),
    CheckRow("VM_TYPE", SETTINGS, ("HTCondor",)),
    CheckRow("VM_GAHP_SERVER", SETTINGS, ("HTCondor",)),
    CheckRow("memory", SETTINGS, ("HTCondor",), is_decisive=True),
    CheckRow("slots", SETTINGS),
    CheckRow("VM_NETWORKING", SETTINGS),
    CheckRow("VM_GAHP_LOG", SETTINGS, ("HTCondor",)),
    CheckRow("script", SETTINGS),
    CheckRow("policy", SETTINGS),
    CheckRow("root", USER, is_decisive=True),
    CheckRow("hypervisor", HYPERVISOR, ("VM_TYPE",), is_decisive=True),
    CheckRow("libvirt", HYPERVISOR, is_decisive=True),
    CheckRow("memory images", HYPERVISOR),
    CheckRow("tpm", HYPERVISOR, ("libvirt",)),
    CheckRow("limits", HYPERVISOR, ("libvirt",)),
    CheckRow("kvm", KVM, ("libvirt",), is_decisive=True),
    CheckRow("kvm device", KVM),
    CheckRow("cpu", KVM, ("libvirt", "kvm"), is_decisive=True),
    CheckRow("QEMU's user", SCRATCH, ("HTCondor", "disk space")),
    CheckRow("SELinux", SCRATCH),
    CheckRow("disk", SCRATCH, ("HTCondor",)),
    CheckRow("save", SCRATCH, ("libvirt", "disk space")),
    CheckRow("network", NETWORKS, ("libvirt",)),
    CheckRow("images", IMAGES, ("libvirt",)),
    CheckRow("image", IMAGES, ("libvirt",)),
    CheckRow("firmware", FIRMWARE, ("libvirt", "hypervisor", "kvm")),
    CheckRow("clock", FIRMWARE),
    CheckRow("startd", STARTD, ("HTCondor",)),
    CheckRow("log", FAILURES, ("HTCondor", "VM_GAHP_LOG")),
)
"""The checks of the probe and of the doctor, in the order of their dependencies; a driver may have others."""

_ROWS = {row.name: row for row in CHECKS}


def row_of(check: str) -> CheckRow:
    """Return the row of a check by its name, else by the first word; that of the hypervisor for a driver's own."""
    return _ROWS.get(check) or _ROWS.get(check.partition(" ")[0]) or _ROWS["hypervisor"]


def explained(found: Sequence[Finding]) -> list[Finding]:
    """Sort findings by `CHECKS`, and set the check on which each failure ultimately depends."""
    order = {row: number for number, row in enumerate(CHECKS)}
    failed = [one for one in found if one.verdict != OK]

    def cause(finding: Finding, passed: frozenset[str] = frozenset()) -> str:
        passed |= {finding.check}  # those who are not root are told so by many checks, of which one is "root"
        named = [one for one in failed if one.check == finding.because and one.check not in passed]
        if not finding.because and finding.verdict != OK:
            needs = set(row_of(finding.check).needs) - passed
            causes = [one for one in failed if one.verdict == BAD or finding.verdict == UNKNOWN]
            named = [one for one in causes if one.check in needs]
        if named:
            return cause(named[0], passed) or named[0].check
        return finding.because if finding.because != finding.check else ""

    return [one._replace(because=cause(one)) for one in sorted(found, key=lambda one: order[row_of(one.check)])]


class Late(errors.MachineFault):
    """A check that has not ended by its deadline."""


def judge(check: str, subject: str, outcome: object, good: str | Callable[[], str], trouble: str = BAD) -> Finding:
    """Make the finding for the outcome of a check: `trouble` for a fault, `good` (or its return value) otherwise."""
    if isinstance(outcome, errors.Fault):
        return Finding(check, trouble, subject, outcome.problem, outcome.hint)
    return Finding(check, OK, subject, good if isinstance(good, str) else good())


def first_bad(findings: Iterable[Finding]) -> Finding | None:
    """Return the first finding that keeps every job from running."""
    return next((finding for finding in findings if finding.verdict == BAD), None)


class Checks:
    """Checks that run in parallel, each of which is waited for when its outcome is needed.

    One that has not ended at `end` (monotonic) runs on in its thread, and its outcome is `Late`: no startd waits.
    """

    def __init__(self, end: float) -> None:
        self._end = end
        self._begun: dict[str, Task[object]] = {}
        self._outcomes: dict[str, object] = {}

    def begin(self, name: str, check: Callable[[], object]) -> None:
        """Run a check in a thread of its own."""
        try:
            self._begun[name] = Task(f"check {name}", check)
        except errors.MachineFault as fault:
            self._outcomes[name] = fault

    def outcome(self, name: str, end: float | None = None) -> object:
        """Return a check's outcome or the `Fault` that it raised, by `end` at the latest; None if not started."""
        if name in self._outcomes or name not in self._begun:
            return self._outcomes.get(name)
        task = self._begun[name]
        if not task.wait((self._end if end is None else end) - monotonic()):
            took = monotonic() - task.began
            outcome: object = Late(f"The check of {name} had not ended after {took:.1f} s.", "see what it waits for.")
        elif task.error is None or isinstance(task.error, errors.Fault):
            outcome = task.error or task.result()
        else:  # a bug in one check must not hide what the others found
            outcome = errors.HypervisorFault(f"The check failed: {task.error!r}.", "report it as a bug.")
        self._outcomes[name] = outcome
        return outcome


def side_by_side(checks: Mapping[str, Callable[[], object]], end: float) -> dict[str, object]:
    """Run all checks at once, and return the outcome of each; see `Checks`."""
    running = Checks(end)
    for name, check in checks.items():
        running.begin(name, check)
    return {name: running.outcome(name) for name in checks}
