"""The directories that guests can mount on this machine, for the probe and the doctor."""

import os
from collections.abc import Callable

from vmgahp import errors, findings
from vmgahp.config import Settings
from vmgahp.config.table import SHARE_DIRS
from vmgahp.drivers.base import Value
from vmgahp.drivers.libvirt import qemu_check, virtiofs
from vmgahp.drivers.libvirt.emulator import TWO_GROUPS, TWO_GROUPS_HINT
from vmgahp.findings import OFF, OK, Checks, Finding
from vmgahp.host.job_user import Identity
from vmgahp.job import share_dirs
from vmgahp.job.kinds import NINEP, NO_SHARE, SHARES, VIRTIOFS
from vmgahp.job.share_dirs import Share

SCRATCH = "VM_SHARE_SCRATCH"


def begin(checks: Checks, settings: Settings, identity: Identity, seconds: Callable[[], float]) -> None:
    """Begin the checks that take time, or may hang with a file system."""
    has_directories = bool(settings.strings(SHARE_DIRS))
    if has_directories:
        checks.begin("share dirs", lambda: _there(settings))
    if has_directories or _kind(settings) == VIRTIOFS:
        checks.begin("virtiofs", lambda: virtiofs.trouble(identity, seconds()))


def judge(
    settings: Settings, checks: Checks, qemu: str, identity: Identity, end: float, *, as_job_user: bool
) -> tuple[dict[str, Value], list[Finding]]:
    """Return the attributes and findings by the results of `begin`; none makes the machine unfit for jobs.

    `as_job_user` says that QEMU can run as the job's user.
    """
    known: dict[str, errors.Fault | None] = {}

    def why_not(kind: str) -> errors.Fault | None:
        if kind not in known:
            known[kind] = _trouble(kind, checks.outcome("virtiofs"), qemu, identity, end, as_job_user=as_job_user)
        return known[kind]

    found: list[Finding] = []
    scratch = _kind(settings)
    if scratch != NO_SHARE:
        found.append(findings.judge("share", SCRATCH, why_not(scratch), f"QEMU shares directories by {scratch}", OFF))
        scratch = scratch if found[-1].verdict == OK else NO_SHARE
    there, names = checks.outcome("share dirs") or (), []
    if isinstance(there, errors.Fault):
        found.append(findings.judge("share dirs", SHARE_DIRS, there, "", OFF))
        there = ()
    assert isinstance(there, tuple)
    for share, missing in there:
        trouble = missing or why_not(share.kind)
        access = "to read and write" if share.writable else "to read"
        good = f"jobs can have {share.directory} as {share.tag}, {access}, by {share.kind}"
        found.append(findings.judge("share dirs", share.setting, trouble, good, OFF))
        if trouble is None:
            names.append(share.tag)
    offered: dict[str, Value] = {"share": scratch}
    return offered | ({"share_dirs": ",".join(names)} if names else {}), found


def _kind(settings: Settings) -> str:
    kind = settings.string(SCRATCH).lower()
    return kind if kind in SHARES else NO_SHARE


def _there(settings: Settings) -> tuple[tuple[Share, errors.Fault | None], ...]:
    """Return every directory, with its fault if it has one. Raises `errors.MachineFault` for invalid settings."""
    return tuple((share, _missing(share)) for share in share_dirs.inspect(settings))


def _missing(share: Share) -> errors.Fault | None:
    if os.path.isdir(share.directory):
        return None
    problem = f"{share.setting} = {share.directory}: there is no such directory."
    return errors.MachineFault(problem, f"make it, mount it, or correct {share.setting}.")


def _trouble(
    kind: str, virtiofsd: object, qemu: str, identity: Identity, end: float, *, as_job_user: bool
) -> errors.Fault | None:
    """Return the fault for which QEMU cannot share directories by `kind`; None if it can."""
    if kind == NINEP and not as_job_user:
        hint = TWO_GROUPS_HINT.replace("VM_RUN_AS_JOB_USER = False", f"{SCRATCH} = virtiofs")
        return errors.MachineFault(f"{TWO_GROUPS}.", hint)
    if kind == VIRTIOFS:
        if isinstance(virtiofsd, errors.Fault):
            return virtiofsd
        if virtiofsd:
            return errors.MachineFault(f"{virtiofsd}.", virtiofs.hint())
    try:
        qemu_check.require_share(kind, qemu, identity, end)
    except errors.Fault as fault:
        return fault
    return None
