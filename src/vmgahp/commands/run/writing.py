"""One run of ``vmgahp run``: make the job, write or print it, submit it, and say how to follow it."""

import argparse
import os
import sys
from collections.abc import Iterator

from vmgahp.commands.files import open_regular
from vmgahp.commands.submit import conversion, images
from vmgahp.commands.submit.machine import Guest
from vmgahp.commands.submit.summary import SubmitError, Summary, printable
from vmgahp.job.run import CLOUD_INIT, guest_file

LARGEST_USER_DATA = 1 << 20
"""The maximum number of bytes of user data that are shown, and that a job may have."""


def run(options: argparse.Namespace) -> int:
    """Write the submit file, or print it, and submit; return the exit status."""
    summary = Summary()
    try:
        made, text = _made(options, summary)
        if options.dry_run:
            sys.stdout.write(text + "".join(f"{line}\n" for line in _user_data(options)))
            return 0
        output = _written(options, made, text, summary)
        for note in summary.notes:
            sys.stderr.write(f"Note: {printable(note)}\n")
        sys.stderr.write(f"Written: {printable(output)}\n")
        if not options.submit:
            sys.stderr.write(f"Submit it by: condor_submit {printable(output)}\n")
            return 0
        return _submit(made, text, output)
    except BaseException as error:
        for path in summary.made:
            if os.path.exists(path):
                os.unlink(path)
        if not isinstance(error, SubmitError):
            raise
        sys.stderr.write(f"vmgahp run: {printable(error.problem)}\n")
        if error.hint:
            sys.stderr.write(f"Hint: {printable(error.hint)}\n")
        return 1


def _made(options: argparse.Namespace, summary: Summary) -> tuple[Guest, str]:
    options.dir = os.path.abspath(options.dir or ".")
    made = conversion.read(options, summary)
    if not options.dry_run:
        conversion.bring_images(options, made, summary)
    text, _ = conversion.written(options, made, summary)
    return made, text


def _user_data(options: argparse.Namespace) -> Iterator[str]:
    """Yield the guest's cloud-init data, as comments after the submit file."""
    parts = []
    if options.user_data:
        with open_regular(options.user_data) as file:
            parts.append((f"cloud-init's user data: {options.user_data}", file.read(LARGEST_USER_DATA)))
    if options.boot == CLOUD_INIT:
        then = "cloud-init's user data" if not parts else "behind them, in one message"
        parts.append((f"{then}: what begins the program", guest_file("agent")))
    for what, data in parts:
        yield from ("", f"# {printable(what)}", "#")
        yield from (f"# {printable(line)}".rstrip() for line in data.decode("utf-8", "replace").splitlines())


def _written(options: argparse.Namespace, made: Guest, text: str, summary: Summary) -> str:
    output: str = options.submit_file or f"{made.name}.sub"
    summary.sources |= {os.path.realpath(path) for path in (*made.files, *made.inputs, *(d.path for d in made.disks))}
    images.free(output, summary, force=options.force)
    for process in range(made.number if made.number > 1 else 0):
        try:
            os.makedirs(f"{made.name}.{process}", exist_ok=True)
        except OSError as error:
            problem = f"--queue {made.number}: the directory {made.name}.{process} cannot be made ({error.strerror})."
            raise SubmitError(problem, "say --name for another one.") from error
    conversion.write_out(text, output)
    summary.made.clear()  # from now on the submit file refers to these files
    return output


def _submit(made: Guest, text: str, output: str) -> int:
    """Submit through HTCondor's own bindings. Raises `SubmitError`."""
    hint = f"see condor_q; or, where HTCondor is: condor_submit {output}"
    try:
        import htcondor2
    except ImportError as error:
        raise SubmitError(f"HTCondor's Python bindings are not here ({error}).", hint) from error
    try:
        cluster = htcondor2.Schedd().submit(htcondor2.Submit(text)).cluster()
    except Exception as error:  # theirs, of any kind
        raise SubmitError(f"HTCondor does not take the job: {' '.join(str(error).split())}", hint) from error
    job = str(cluster) if made.number > 1 else f"{cluster}.0"
    sys.stdout.write(f"{job}\n")
    first = f"{cluster}.0"
    sys.stderr.write(
        f"condor_tail -f {first}    what the program prints\n"
        f"condor_wait {made.name}.log    until it has ended\n"
        f"condor_history {job} -af ExitCode    its exit code then\n"
    )
    return 0
