"""The directories that a guest can mount: one of its job, and those of the administrator.

The job must ask for each by name, since a VM with a shared directory can be neither saved nor checkpointed. The
administrator decides by an expression over the job ad which jobs may have a directory.
"""

import os
import re
from collections.abc import Iterable
from typing import NamedTuple

from vmgahp.config import Settings
from vmgahp.config.table import CONDITION, SHARE_DIR, SHARE_DIRS
from vmgahp.errors import MISMATCHED, JobFault, MachineFault
from vmgahp.job.ad import JobAd
from vmgahp.job.kinds import NINEP, NO_SHARE, SHARES, VIRTIOFS
from vmgahp.job.options import SHARE, Options
from vmgahp.job.options import SHARE_DIRS as OPTION
from vmgahp.job.policy_view import PolicyView

OWN_TAG = "share"
"""The tag by which the guest mounts the job's own directory; the tag of an administrator's directory is its name."""

LONGEST_NAME = 31
"""The most bytes of a tag (9p's; virtiofs has 36)."""

_DIRECTORY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", re.ASCII)
_NAME = re.compile(rf"[A-Za-z0-9_]{{1,{LONGEST_NAME}}}", re.ASCII)
_READ_ONLY, _WRITABLE = "ro", "rw"
_WORDS = (_READ_ONLY, _WRITABLE, NINEP, VIRTIOFS)


class Share(NamedTuple):
    """A directory that the guest can mount."""

    tag: str
    directory: str
    """The full path."""
    kind: str
    """The kind: 9p or virtiofs."""
    writable: bool = True
    setting: str = ""
    """The setting that defines it; empty for the job's own."""


def own(options: Options, settings: Settings, working_dir: str) -> tuple[Share, ...]:
    """Return the job's own share: true means the whole scratch directory, a name a directory in it."""
    name = options.string(SHARE) if options.is_text(SHARE) else ""
    if not name and not options.boolean(SHARE):
        return ()
    if name and not _DIRECTORY.fullmatch(name):
        raise options.refused(
            SHARE,
            "it is not a name of a directory in the scratch directory",
            'write +VMPARAM_vm_Share = true, or the plain name of a directory, such as "share".',
        )
    how = settings.string("VM_SHARE_SCRATCH").lower()
    if how not in SHARES:
        raise MachineFault(
            f"VM_SHARE_SCRATCH = {how} ({settings.where('VM_SHARE_SCRATCH')}) is not {' or '.join(SHARES)}.",
            f"set it to {NINEP} or {VIRTIOFS}, or to {NO_SHARE}.",
        )
    if how == NO_SHARE:
        raise options.refused(
            SHARE,
            "this machine shares no directory with VMs (VM_SHARE_SCRATCH)",
            "require a machine that does (VM_kvm_ATTR_share), or hand the files over on a disk.",
        )
    return (Share(OWN_TAG, os.path.join(working_dir, name) if name else working_dir, how),)


def of_machine(options: Options, settings: Settings) -> tuple[Share, ...]:
    """Return the administrator's directories that the job asks for, each once."""
    asked = options.string(OPTION).replace(",", " ").split()
    offered = {share.tag.lower(): share for share in named(settings)} if asked else {}
    found: dict[str, Share] = {}
    for name in asked:
        share = offered.get(name.lower())
        if share is None:
            raise options.refused(
                OPTION,
                f"this machine has no directory {name[:100]!a} for VMs (VM_SHARE_DIRS)",
                f'require a machine that has it: stringListIMember("{name}", VM_kvm_ATTR_share_dirs).'
                if _NAME.fullmatch(name)
                else f"such names are of at most {LONGEST_NAME} letters, digits and _.",
            )
        found[share.tag] = share
    return tuple(found.values())


def named(settings: Settings) -> list[Share]:
    """Return all directories that the administrator defines. Raises `MachineFault` for an invalid one."""
    found: dict[str, Share] = {}
    for name in settings.strings(SHARE_DIRS):
        setting = f"{SHARE_DIR}{name.upper()}"
        upper = name.upper()
        if not _NAME.fullmatch(name) or upper.endswith(CONDITION) or name.lower() == OWN_TAG:
            raise MachineFault(
                f"{SHARE_DIRS} ({settings.where(SHARE_DIRS)}) names {name[:100]!a}, which cannot be the name of one.",
                f"use at most {LONGEST_NAME} letters, digits and _, not {OWN_TAG}, and no {CONDITION} at the end.",
            )
        path, _, said = settings.string(setting).partition(":")
        words = [word.strip().lower() for word in said.replace(",", ":").split(":")] if said else []
        if not path.startswith("/") or any(word not in _WORDS for word in words):
            raise MachineFault(
                f"{setting} = {settings.string(setting)} ({settings.where(setting)}) is not the full path of a "
                f"directory, which {SHARE_DIRS} names, with {', '.join(_WORDS)} after a colon.",
                f"write {setting} = /path, or /path:{_WRITABLE}, or take {name} out of {SHARE_DIRS}.",
            )
        kind = NINEP if NINEP in words and VIRTIOFS not in words else VIRTIOFS
        found[upper] = Share(name, path, kind, _WRITABLE in words and _READ_ONLY not in words, setting)
    return list(found.values())


def require_allowed(view: PolicyView, shares: Iterable[Share]) -> None:
    """Make sure that the job may have its directories. Raises `JobFault`, and `MachineFault` for an invalid expression.

    As in VM_POLICY_REQUIREMENTS, names in an expression are the job's attributes, and the result must be true.
    """
    for share in shares:
        name = f"{share.setting}{CONDITION}"
        condition = view.settings.string(name) if share.setting else ""
        if condition and not view.meets(name):
            raise JobFault(
                MISMATCHED,
                f"This machine gives its directory {share.tag} to VM jobs only where {condition} ({name}).",
                "leave it out of VMPARAM_vm_Share_Dirs, or ask the administrator of this machine.",
            )


def inspect(settings: Settings) -> list[Share]:
    """Return all directories that are defined, after parsing each condition once. Raises `MachineFault`."""
    found = named(settings)
    for share in found:
        try:
            require_allowed(PolicyView(JobAd(()), settings), (share,))
        except JobFault:
            pass  # an empty ad need not meet the condition
    return found
