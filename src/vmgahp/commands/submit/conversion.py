"""One run of ``vmgahp submit``: read, check the disks, write, report, submit."""

import argparse
import os
import subprocess
import sys
from importlib import import_module

from vmgahp.commands.files import write_anew
from vmgahp.commands.submit import images
from vmgahp.commands.submit.machine import Guest, GuestNic, fit_buses, in_boot_order, name_devices
from vmgahp.commands.submit.rehearsal import Rehearsed, rehearse
from vmgahp.commands.submit.submit_file import write
from vmgahp.commands.submit.summary import SubmitError, Summary, printable
from vmgahp.job.slot import LEAST_MEMORY_MIB

SUBMIT_DEADLINE = 600.0
"""The deadline in seconds for condor_submit, which may have to spool the disks."""


def run(options: argparse.Namespace) -> int:
    """Read, check, write, report, and submit; return the exit status."""
    summary = Summary(*([options.file] if isinstance(options.file, str) else options.file))
    output, problem = "", None
    try:
        text, output = _made(options, summary)
        write_out(text, output)
    except BaseException as error:  # an interrupt cleans up as well
        for path in summary.made:
            if os.path.exists(path):
                os.unlink(path)
        if not isinstance(error, SubmitError):
            raise
        problem = error
    if options.json:
        sys.stdout.write(_as_json(options, summary, "" if problem else output, problem))
    elif summary.entries or not problem:
        summary.show(sys.stderr)
    if problem is None and output != "-" and not options.json:
        sys.stderr.write(f"Written: {printable(output)}\n")
    if problem is None and options.submit:
        try:
            return _submit(output, 2 if options.json else None)  # --json has standard output to itself
        except SubmitError as error:
            problem = error
    elif options.json:
        return 1 if problem else 0
    if problem is None:
        return 0
    sys.stderr.write(f"vmgahp submit: {printable(problem.problem)}\n")
    if problem.hint:
        sys.stderr.write(f"Hint: {printable(problem.hint)}\n")
    return 1


def _as_json(options: argparse.Namespace, summary: Summary, output: str, problem: SubmitError | None) -> str:
    said = summary.as_json(
        kind=options.kind,
        file=options.file,
        submit_file=output,
        would_run=problem is None,
        problem=problem.problem if problem else "",
        hint=problem.hint if problem else "",
    )
    return f"{said}\n"


def _made(options: argparse.Namespace, summary: Summary) -> tuple[str, str]:
    """Return the submit file's text, and its name. Raises `SubmitError`."""
    _require_sense(options)
    beside = os.path.dirname(options.output) if options.output not in ("", "-") else "."
    options.dir = os.path.abspath(options.dir or beside or ".")
    if not os.path.isdir(options.dir):
        raise SubmitError(f"{options.dir} is no directory.", "make it first.")
    made = read(options, summary)
    in_vain = summary.losses and not options.lax  # converting images may take hours
    if not (options.shared or made.own_disks or in_vain):
        bring_images(options, made, summary)
    text, _ = written(options, made, summary)
    if summary.losses and not options.lax:
        one = summary.losses == 1
        things, them = ("1 thing is", "it") if one else (f"{summary.losses} things are", "them")
        raise SubmitError(f"{things} left out, so nothing is written; --lax writes the submit file without {them}.")
    output = options.output or f"{made.name}.sub"
    if output != "-":
        summary.sources |= {os.path.realpath(path) for path in (*made.files, *(disk.path for disk in made.disks))}
        images.free(output, summary, force=options.force)
    return text, output


def read(options: argparse.Namespace, summary: Summary) -> Guest:
    """Read the VM, with the path in the guest for every disk. Raises `SubmitError`."""
    made: Guest = import_module(f"vmgahp.commands.{options.module}").machine(options, summary)
    _as_asked(options, made, summary)
    if not made.own_disks:
        fit_buses(made, summary)
    name_devices(made.disks)
    made.disks = in_boot_order(made.disks, made.boot)
    return made


def written(options: argparse.Namespace, made: Guest, summary: Summary) -> tuple[str, Rehearsed | None]:
    """Return the submit file's text, and the daemon's reading of it, as far as that is known. Raises `SubmitError`."""
    if made.finish is not None:
        made.finish()
    text = write(made, options.type or made.vm_type, summary, transfer=not options.shared, appended=options.append)
    return text, rehearse(text, summary)


def _require_sense(options: argparse.Namespace) -> None:
    """Refuse options that contradict each other. Raises `SubmitError`."""
    if options.shared and options.convert:
        raise SubmitError("--shared leaves the disks as they are, and --convert does not.", "keep one of them.")
    if options.output == "-" and (options.submit or options.json):
        raise SubmitError(f"{'--submit' if options.submit else '--json'} needs a file.", "say -o FILE.")


def _as_asked(options: argparse.Namespace, made: Guest, summary: Summary) -> None:
    """Override the amounts and networks by those of the command line."""
    if options.memory:
        if made.memory_mib not in (0, options.memory):
            made.changed["memory"] = f"--memory, in place of {made.memory_mib} MiB"
        made.memory_mib = options.memory
    if 0 < made.memory_mib < LEAST_MEMORY_MIB:
        made.changed["memory"] = f"no VM has less, in place of {made.memory_mib} MiB"
        made.memory_mib = LEAST_MEMORY_MIB
    if options.cpus and options.cpus != made.vcpus:
        if "vcpus" in made.places:
            made.changed["vcpus"] = f"--cpus, in place of {made.vcpus}"
        made.vcpus = options.cpus
        if made.options.pop("Topology", None):
            summary.change(made.places.get("Topology", ""), "Topology", "one socket a CPU", "--cpus")
    if options.network == "none":
        for nic in made.nics:
            summary.change(nic.place, nic.what or "NIC", "no NIC", "--network none")
        made.nics = []
    elif options.network:
        made.nics = made.nics or [GuestNic(options.network)]
        for nic in made.nics:
            if nic.kind not in ("", options.network):
                nic.changed.append(f"--network, in place of {nic.kind}")
            nic.kind = options.network


def bring_images(options: argparse.Namespace, made: Guest, summary: Summary) -> None:
    """Check the disks that go with the job, and convert them. Raises `SubmitError`."""
    for disk in made.disks:
        if disk.url or disk.image:
            continue
        asked = options.convert and disk.format not in ("qcow2", "iso") and disk.bus != "floppy"
        reason = images.check(disk, summary, flatten=options.convert)
        if reason or asked:
            before = [disk.path, *disk.files]
            disk.changed += [] if asked else [reason]
            others = {os.path.basename(other.path) for other in made.disks if other is not disk}
            images.convert(disk, options.dir, others, summary, force=options.force)
            for path in before:
                if path in summary.made:  # it was extracted from an archive only for this
                    os.unlink(path)
        made.files += disk.files


def write_out(text: str, output: str) -> None:
    """Write the submit file, or print it. Raises `SubmitError`."""
    if output == "-":
        sys.stdout.write(text)
        return
    try:
        write_anew(output, text.encode())
    except OSError as error:
        raise SubmitError(f"{output} cannot be written ({error.strerror}).") from error


def _submit(path: str, out: int | None) -> int:
    try:
        return subprocess.run(["condor_submit", path], timeout=SUBMIT_DEADLINE, check=False, stdout=out).returncode
    except FileNotFoundError as error:
        raise SubmitError("condor_submit is not here.", f"submit {path} where it is.") from error
    except subprocess.TimeoutExpired as error:
        raise SubmitError(f"condor_submit did not end within {SUBMIT_DEADLINE:g} s.") from error
