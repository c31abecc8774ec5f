"""Front ends that write a submit file from libvirt's XML, OVF, a .vmx or a disk image.

Each reads its file into a `machine.Guest` and tells what it did by `summary`; `images` looks at the disks, and
`submit_file` writes. docs/how-to/submitting.md is for users. Nothing here runs as root, or for anybody else than
who types the command; but the files come from strangers.
"""

import argparse
import os
import sys

FRONT_ENDS = (
    ("libvirt-xml", "libvirt_xml", "libvirt's domain XML, as virsh dumpxml --inactive writes it"),
    ("ovf", "ovf", "an OVF descriptor (.ovf) with its files beside it, or an archive of them (.ova)"),
    ("vmx", "vmx", "VMware's .vmx, with its disks beside it"),
    ("disk", "disk", "one or more disk images, or URLs of the file transfer plugin (nfs:///dir/base.qcow2:disk.qcow2)"),
)
"""Word, module, and what it reads."""

SUBMIT_DEADLINE = 600.0
"""Seconds for condor_submit, which may have to spool the disks."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of ``vmgahp submit``."""
    command.description = (
        "Write a submit file for a VM that exists in another form, and say what of it is carried over, "
        "what is not, and where that stands. The exit status is 0 for a file that was written, 1 for none."
    )
    kinds = command.add_subparsers(title="what to read", dest="kind", metavar="KIND", required=True)
    for word, module, what in FRONT_ENDS:
        kind = kinds.add_parser(word, help=what, description=f"Read {what}, and write a submit file.")
        if word == "disk":
            kind.add_argument("file", nargs="+", metavar="IMAGE", help=what)
        else:
            kind.add_argument("file", metavar="FILE", help=what)
        _common(kind)
        if word == "disk":
            kind.add_argument("--format", default="", help="the images' format, where their names do not say it")
            kind.add_argument("--firmware", choices=("uefi", "uefi-secure"), default="", help="default: BIOS")
        elif word == "ovf":
            kind.add_argument("--system", default="", metavar="ID", help="which VM of a package with several")
            kind.add_argument("--configuration", default="", metavar="ID", help="which of the configurations on offer")
        else:
            kind.add_argument("--as-is", action="store_true", help="let the file itself go with the job")
            kind.add_argument(
                "--own",
                action="store_true",
                help="the file is your own: its images may be in other directories than its own, and overlays",
            )
        kind.set_defaults(run=run, module=module)


def _common(kind: argparse.ArgumentParser) -> None:
    kind.add_argument(
        "-o",
        "--output",
        default="",
        metavar="FILE",
        help="the submit file; - for standard output (default: the VM's name with .sub, here)",
    )
    kind.add_argument("--dir", default="", help="where images are written (default: beside the submit file)")
    kind.add_argument("--force", action="store_true", help="replace files that are there already")
    kind.add_argument("--name", default="", help="the job's name (default: the VM's)")
    kind.add_argument("--type", default="", metavar="VM_TYPE", help="the machines' VM type (default: kvm)")
    kind.add_argument("--memory", type=_memory, default=0, metavar="MIB", help="memory in MiB, or as 4G")
    kind.add_argument("--cpus", type=_cpus, default=0, metavar="N", help="the number of CPUs")
    kind.add_argument(
        "--network",
        choices=("nat", "bridge", "user", "none"),
        default="",
        help="the kind of network for all NICs; none: no NICs",
    )
    kind.add_argument("--convert", action="store_true", help="convert all disks to qcow2")
    kind.add_argument(
        "--shared",
        action="store_true",
        help="leave the disks where they are: the execute machines have them at the same path",
    )
    kind.add_argument("--strict", action="store_true", help="write nothing unless everything can be carried over")
    kind.add_argument(
        "--append",
        action="append",
        default=[],
        metavar="'COMMAND = VALUE'",
        help="a line more for the submit file; may be given several times",
    )
    kind.add_argument("--submit", action="store_true", help="run condor_submit with it")


def _memory(text: str) -> int:
    units = {"": 1, "m": 1, "g": 1024, "t": 1024**2}
    digits = text.rstrip("mMgGtTiIbB")
    unit = text[len(digits) :].lower().removesuffix("b").removesuffix("i")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 9 or unit not in units or int(digits) == 0:
        raise ValueError(text)
    return int(digits) * units[unit]


def _cpus(text: str) -> int:
    number = int(text)
    if not 0 < number <= 255:
        raise ValueError(text)
    return number


def run(options: argparse.Namespace) -> int:
    """Read, look, write, tell, and submit; the exit status."""
    from vmgahp.commands.submit.summary import SubmitError, Summary, printable

    summary = Summary()
    try:
        return _run(options, summary)
    except SubmitError as error:
        if summary.lost:
            summary.show(sys.stderr)
        for path in summary.made:
            if os.path.exists(path):
                os.unlink(path)
        sys.stderr.write(f"vmgahp submit: {printable(str(error))}\n")
        if error.hint:
            sys.stderr.write(f"Hint: {printable(error.hint)}\n")
        return 1


def _run(options: argparse.Namespace, summary: object) -> int:
    from importlib import import_module

    from vmgahp.commands.files import write_anew
    from vmgahp.commands.submit import images
    from vmgahp.commands.submit.machine import GuestNic, name_devices
    from vmgahp.commands.submit.submit_file import write
    from vmgahp.commands.submit.summary import SubmitError, Summary

    assert isinstance(summary, Summary)
    beside = os.path.dirname(options.output) if options.output not in ("", "-") else "."
    options.dir = os.path.abspath(options.dir or beside or ".")
    if not os.path.isdir(options.dir):
        raise SubmitError(f"{options.dir} is no directory.", "make it first.")
    made = import_module(f"vmgahp.commands.submit.{options.module}").machine(options, summary)
    made.memory_mib = options.memory or made.memory_mib
    if options.cpus and options.cpus != made.vcpus:
        made.vcpus = options.cpus
        made.options.pop("Topology", None)
    if options.network == "none":
        made.nics = []
    elif options.network:
        made.nics = made.nics or [GuestNic(options.network)]
        for nic in made.nics:
            nic.kind = options.network
    name_devices(made.disks)
    for disk in [] if options.shared or made.own_disks else made.disks:
        if disk.url:
            continue
        convert = options.convert and disk.format not in ("qcow2", "iso") and disk.bus != "floppy"
        images.check(disk, summary, converting=convert)
        if convert:
            before = disk.path
            images.convert(disk, options.dir, summary, force=options.force)
            if before in summary.made:  # it was taken out of an archive, for this alone
                os.unlink(before)
        made.files += disk.files
    text = write(made, options.type or made.vm_type, summary, transfer=not options.shared, appended=options.append)
    if options.strict and summary.lost:
        raise SubmitError(
            f"{len(summary.lost)} thing(s) cannot be carried over (--strict).",
            "leave --strict out to continue without.",
        )
    summary.show(sys.stderr)
    if options.output == "-":
        sys.stdout.write(text)
        if options.submit:
            raise SubmitError("--submit needs a file.", "say -o FILE.")
        return 0
    output = options.output or f"{made.name}.sub"
    images.free(output, options.force)
    try:
        write_anew(output, text.encode())
    except OSError as error:
        raise SubmitError(f"{output} cannot be written ({error.strerror}).") from error
    sys.stderr.write(f"Written: {output}\n")
    return _submit(output) if options.submit else 0


def _submit(path: str) -> int:
    import subprocess

    from vmgahp.commands.submit.summary import SubmitError

    try:
        return subprocess.run(["condor_submit", path], timeout=SUBMIT_DEADLINE, check=False).returncode
    except FileNotFoundError as error:
        raise SubmitError("condor_submit is not here.", f"submit {path} where it is.") from error
    except subprocess.TimeoutExpired as error:
        raise SubmitError(f"condor_submit did not end within {SUBMIT_DEADLINE:g} s.") from error
