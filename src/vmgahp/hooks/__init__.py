"""The administrator's programs: scripts, policies, stylesheets, MAC addresses."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from vmgahp.errors import MISMATCHED, JobFault, MachineFault
from vmgahp.host.job_user import Identity
from vmgahp.host.run import condor_environment, run
from vmgahp.host.system_calls import unnamed
from vmgahp.text import escape, redact

Made = TypeVar("Made")

LONGEST_OUTPUT = 4 << 20
"""The maximum number of bytes that a program may print; libvirt itself accepts 4 MiB in one message."""
LONGEST_REASON = 500
"""The maximum number of characters of a rejection that are passed on."""

REJECTED = 1
"""The exit status that rejects a job."""

AD_VARIABLE, NAME_VARIABLE, DRY_VARIABLE = "VMGAHP_JOB_AD", "VMGAHP_VM_NAME", "VMGAHP_DRY_RUN"


def standing(dry: bool) -> dict[str, str]:
    """Return the environment variable that marks a dry run, in which a program must keep nothing for the job."""
    return {DRY_VARIABLE: "1"} if dry else {}


def converse(
    label: str,
    argv: Sequence[str],
    *,
    deadline: float,
    log_line: Callable[[str], None],
    hint: str,
    stdin: bytes = b"",
    environ: Mapping[str, str],
    given: tuple[str, bytes] | None = None,
    longest: int = LONGEST_OUTPUT,
    user: Identity | None = None,
    limits: Sequence[str] = (),
    log_label: str = "",
) -> tuple[bytes, int, str]:
    """Run a program to its end; return its output, its exit status, and its last words as a sentence, if any.

    `given` is the name of an environment variable and the content of the file that it names, which is in memory and
    vanishes with the program. Each line of stderr goes to `log_line`, without secrets. Raises `MachineFault`, which
    begins with `label`, if it cannot be run, does not end in time or prints more than `longest` bytes.
    """
    beside = -1
    try:
        if given:
            variable, content = given
            beside = unnamed(content)
            environ = {**environ, variable: f"/proc/self/fd/{beside}"}
        done = run(
            argv,
            deadline=deadline,
            stdin=stdin,
            environ=environ,
            user=user,
            limits=limits,
            longest=longest,
            pass_fds=[beside] if given else [],
        )
    except OSError as error:
        problem = f"{label} cannot be started: {error.strerror}."
        raise MachineFault(problem, "look at the limits on processes, memory and open files.") from error
    finally:
        if beside >= 0:
            os.close(beside)
    for line in done.complaints:
        log_line(f"{log_label or label}: {redact(line)}")
    last = f" Its last words: {clean(done.complaints[-1])[:200]}" if done.complaints else ""
    if done.status is None:
        raise MachineFault(f"{label} did not end within {deadline:g} s.{last}", hint)
    if len(done.out) > longest:
        size = f"{longest >> 20} MiB" if longest >> 20 else f"{longest >> 10} KiB"
        raise MachineFault(f"{label} printed more than {size}.{last}", hint)
    return done.out, done.status, last


def for_job(label: str, made: Callable[[], Made], plain: Callable[[], object]) -> Made:
    """Run a program for the job by `made`, once more if that fails and `plain`, a run for a plain job, works.

    The program reads text of the job, and a job must not be able to take the machine out of service by that; nor must a
    machine that was busy at that moment hold it. Raises `JobFault` and `MachineFault`.
    """
    try:
        return made()
    except MachineFault as fault:
        with suppress(JobFault):  # to reject is to work
            try:
                plain()
            except MachineFault:
                raise fault from None
    try:
        return made()
    except MachineFault as fault:
        hint = f"use plain names and values, or ask the administrator of this machine about {label}."
        problem = f"{fault.problem} It works for a plain job, and not for this one."
        raise JobFault(MISMATCHED, problem, hint) from fault


def text_of(label: str, output: bytes, status: int, last: str, hint: str, why: str = "") -> str:
    """Decode the output of a successful program. Raises `MachineFault` for one that has failed."""
    if status != 0:
        how = f"exit status {status}" if status > 0 else f"signal {-status}"
        raise MachineFault(f"{label} failed with {how}{why}.{last}", hint)
    try:
        return output.decode()
    except UnicodeDecodeError as error:
        raise MachineFault(f"{label} printed what is not UTF-8: {error}.", hint) from error


def call(
    label: str,
    argv: Sequence[str],
    stdin: bytes,
    deadline: float,
    log_line: Callable[[str], None],
    environ: Mapping[str, str],
    ad: bytes = b"",
) -> str:
    """Run a program of the policy as this server's own user and return its output.

    `label` names it and its setting. `deadline` is in seconds. `environ` is added to the usual environment of the
    administrator's programs, `ad` is put into the file that `AD_VARIABLE` names. Each line of stderr goes to
    `log_line`. Raises `JobFault` if it rejects the job, `MachineFault` for every other failure.
    """
    hint = "run it by hand (docs/how-to/policy.md says how), and see the server's log."
    output, status, last = converse(
        label,
        argv,
        deadline=deadline,
        log_line=log_line,
        hint=hint,
        stdin=stdin,
        environ=condor_environment(os.environ) | dict(environ),
        given=(AD_VARIABLE, ad) if ad else None,
    )
    why = ""
    if status == REJECTED:
        reason = clean(output.decode(errors="replace"))
        if reason and not reason.startswith("<"):
            if len(reason) > LONGEST_REASON:
                reason = reason[:LONGEST_REASON] + "..."
            problem = f"The policy of this machine rejects the job: {reason}{'' if reason[-1] in '.!?' else '.'}"
            hint = f"change the job, or ask the administrator of this machine about {label}."
            raise JobFault(MISMATCHED, problem, hint)
        why = " and no reason on standard output"
    return text_of(label, output, status, last, hint, why)


def clean(text: str) -> str:
    """Make one printable line of a text, without the secrets that `vmgahp.log` knows."""
    return escape(redact(" ".join(text.split())))
