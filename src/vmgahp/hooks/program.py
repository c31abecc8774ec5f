"""One program of the administrator's policy: how it is called, and what its end means."""

import os

from vmgahp.errors import MISMATCHED, JobFault, MachineFault
from vmgahp.host.run import AD_DESCRIPTOR, converse, environment
from vmgahp.text import escape, redact

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

LONGEST_OUTPUT = 4 << 20
"""Bytes that a program may print; libvirt itself takes 4 MiB in one message."""
LONGEST_REASON = 500
"""Characters of a rejection that are passed on."""

REJECTED = 1
"""The exit status for it."""

AD_VARIABLE, NAME_VARIABLE, DRY_VARIABLE = "VMGAHP_JOB_AD", "VMGAHP_VM_NAME", "VMGAHP_DRY_RUN"
AD_PATH = f"/proc/self/fd/{AD_DESCRIPTOR}"
"""A file in memory, which nobody else can open and which is gone with the program."""


def standing(dry: bool) -> dict[str, str]:
    """What the environment says of a dry run, in which a program must keep nothing for the job."""
    return {DRY_VARIABLE: "1"} if dry else {}


def run(
    label: str,
    argv: "Sequence[str]",
    stdin: bytes,
    deadline: float,
    log_line: "Callable[[str], None]",
    environ: "Mapping[str, str]",
    ad: bytes = b"",
) -> str:
    """Run a program as this server's own user and return what it printed.

    `label` names it and its setting. `deadline` is in seconds. `environ` is added to what programs of the
    administrator's get, `ad` is put where `AD_VARIABLE` says. Each line of stderr goes to `log_line`.

    Raises `JobFault` where it rejects the job, `MachineFault` for whatever else is not a success.
    """
    their_environ = environment(os.environ) | dict(environ)
    beside = -1
    try:
        if ad:
            beside = os.memfd_create("job ad")
            with open(beside, "wb", closefd=False) as file:
                file.write(ad)
            their_environ[AD_VARIABLE] = AD_PATH
        output, errors, status = converse(label, argv, stdin, deadline, their_environ, LONGEST_OUTPUT, beside)
    except OSError as error:
        raise MachineFault(f"{label} cannot be given the job ad: {error}.", "see what is scarce.") from error
    finally:
        if beside >= 0:
            os.close(beside)
    said = [line for line in errors.decode(errors="replace").splitlines() if line.strip()]
    for line in said:
        log_line(f"{label}: {redact(line)}")
    last = f" Its last words: {_clean(said[-1])[:200]}" if said else ""
    by_hand = "run it by hand (docs/how-to/policy.md says how), and see the server's log."
    if status is None:
        raise MachineFault(f"{label} did not end within {deadline:g} s.{last}", by_hand)
    if len(output) > LONGEST_OUTPUT:
        raise MachineFault(f"{label} printed more than {LONGEST_OUTPUT >> 20} MiB.{last}", by_hand)
    if status == REJECTED:
        reason = _clean(output.decode(errors="replace"))
        if reason and not reason.startswith("<"):
            raise _rejection(label, reason)
    if status != 0:
        how = f"exit status {status}" if status > 0 else f"signal {-status}"
        how += " and no reason on standard output" if status == REJECTED else ""
        raise MachineFault(f"{label} failed with {how}.{last}", by_hand)
    try:
        return output.decode()
    except UnicodeDecodeError as error:
        raise MachineFault(f"{label} printed what is not UTF-8: {error}.", by_hand) from error


def _rejection(label: str, reason: str) -> JobFault:
    if len(reason) > LONGEST_REASON:
        reason = reason[:LONGEST_REASON] + "..."
    return JobFault(
        MISMATCHED,
        f"The policy of this machine rejects the job: {reason}{'' if reason[-1] in '.!?' else '.'}",
        f"change the job, or ask the administrator of this machine about {label}.",
    )


def _clean(text: str) -> str:
    """One printable line, without the secrets that `vmgahp.log` knows."""
    return escape(redact(" ".join(text.split())))
