"""One run of ``vmgahp submit``: read, check the disks, write, rehearse, report, submit.

The machine of the rehearsal offers everything that a machine can. Its scratch directory has the names, the sizes and
the beginnings of the files that would be transferred. HTCondor need not be installed: its treatment of the lines that
are written is known.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from typing import NamedTuple

from vmgahp.commands.files import open_regular, write_anew
from vmgahp.commands.submit import images, vocabulary
from vmgahp.commands.submit.machine import (
    Guest,
    GuestNic,
    SubmitError,
    Summary,
    fit_buses,
    in_boot_order,
    name_devices,
    os_errors_as,
    printable,
)
from vmgahp.commands.submit.submit_file import commands_of, write
from vmgahp.config import Settings
from vmgahp.domain import job_xml
from vmgahp.domain.build import Host, build
from vmgahp.domain.xen import require
from vmgahp.drivers.vmrun import working_copy
from vmgahp.errors import Fault
from vmgahp.host.job_user import Identity
from vmgahp.job import slot, vm_spec, vmware
from vmgahp.job.ad import JobAd, quote
from vmgahp.job.attributes import ATTRIBUTES
from vmgahp.job.disks import Disk, DiskRequest
from vmgahp.job.engine import NoEngine
from vmgahp.job.kinds import ARM
from vmgahp.job.look import find
from vmgahp.job.slot import LEAST_MEMORY_MIB
from vmgahp.job.spec import JobSpec
from vmgahp.job.vm_spec import VmSpec
from vmgahp.job.xen import XenBoot
from vmgahp.vm_types import HTCONDORS, QEMU, VMRUN, VMWARE, XEN

MACHINE = {
    "VM_MEMORY": str(1 << 40),
    "VM_NETWORKING": "true",
    "VM_NETWORKING_TYPE": "nat, bridge, user",
    "VM_NETWORKING_BRIDGE_INTERFACE": "br0",
    "VM_ALLOW_HOST_LOOPBACK": "true",
    "VM_ALLOW_LIBVIRT_XML": "true",
    "VM_HARDWARE_VT": "true",
    "VM_SHARE_SCRATCH": "9p",
    "VM_SSH_PORTS": "22000-22999",
    "XEN_BOOTLOADER": "/bin/sh",
}
"""The settings of a machine that offers everything. The bootloader must be a program, and is not run."""

HEAD = 1 << 20
"""The bytes of a file that are copied; the rest is a hole."""

_TRUTHS = {"true": "true", "yes": "true", "t": "true", "1": "true"} | dict.fromkeys(("false", "no", "f", "0"), "false")


class Rehearsed(NamedTuple):
    """The job as the daemon understands it."""

    ad: JobAd
    spec: VmSpec
    description: str
    """The domain XML, if libvirt would run it under QEMU."""


def rehearse(text: str, summary: Summary) -> Rehearsed | None:
    """Read a submit file of `is_command` lines as the daemon does; None if only HTCondor could.

    Raises `SubmitError` with the reason for which the daemon would hold the job.
    """
    said = commands_of(text)
    if said.get("universe") != "vm":
        raise SubmitError(f"The universe is {said.get('universe')!a}.", "leave that to vmgahp: it is vm.")
    if said.get("vm_type", "").lower() == "vmware":
        raise SubmitError("condor_submit takes no jobs of the type vmware.", "use --type vmrun or --type vsphere.")
    try:
        with tempfile.TemporaryDirectory(prefix="vmgahp-") as directory:
            names = _fill(directory, said)
            ad = JobAd(_pairs(said, directory))
            return _read(ad, names)
    except OSError as error:
        raise SubmitError(f"What was written cannot be tried: {error}.", "make room in TMPDIR.") from error
    except Fault as fault:
        if isinstance(fault.__cause__, NoEngine):
            summary.advise("The job has expressions, and HTCondor is not here: whether it would run was not tried.")
            return None
        problem = fault.problem.replace(f"{directory}/", "")
        raise SubmitError(f"The execute machine would hold the job: {problem}", fault.hint) from fault


def _pairs(said: dict[str, str], directory: str) -> list[tuple[str, str]]:
    """Return the attributes that the daemon reads, as condor_submit and the starter make them.

    (``SetVMParams`` in HTCondor's ``src/condor_utils/submit_utils.cpp``.)
    """
    pairs = [("VM_WORKING_DIR", quote(directory)), ("User", '"rehearsal"'), ("ClusterId", "1"), ("ProcId", "0")]
    ignored = set() if said.get("vm_type", "").lower() in HTCONDORS else {"vm_disk"}
    if _TRUTHS.get(said.get("vm_networking", "").lower()) != "true":
        ignored.add("vm_networking_type")
    for row in ATTRIBUTES:
        value = said.get(row.command, "") if row.command not in ignored else ""
        if value and row.kind == "bool":
            pairs.append((row.name, _TRUTHS.get(value.lower(), value)))
        elif value:
            pairs.append((row.name, quote(value) if row.kind == "string" else value))
    return pairs + [(name[3:], value) for name, value in said.items() if name.startswith("MY.") and value]


def _fill(directory: str, said: dict[str, str]) -> dict[str, str]:
    """Put the files that would be transferred into the directory; return the source of each by its name."""
    if said.get("should_transfer_files", "yes").lower() == "no":
        return {}
    names: dict[str, str] = {}
    for path in _transferred(said.get("transfer_input_files", "")):
        name = re.split(r"[/:]", path)[-1]  # a URL of the transfer plugin ends in :NAME
        if names.setdefault(name, path) != path:
            raise SubmitError(
                f"{names[name]} and {path} would be one file in the job's scratch directory.",
                "give one of them another name; or say --convert, which does, for disks.",
            )
        if "://" not in path and os.path.isdir(path):
            os.mkdir(os.path.join(directory, name))
        else:
            _copy_head(path, os.path.join(directory, name))
    return names


def _transferred(text: str) -> Iterator[str]:
    """Yield the paths and URLs of a list of files; for a directory with a trailing slash, its content."""
    for path in dict.fromkeys(filter(None, map(str.strip, text.split(",")))):
        if path.endswith("/") and "://" not in path:
            yield from (os.path.join(path, name) for name in os.listdir(path))
        else:
            yield path


def _copy_head(path: str, target: str) -> None:
    # A URL, or a file that need not be here, has no head.
    with open(target, "xb") as copy, suppress(OSError, ValueError), open_regular(path) as file:
        copy.write(file.read(HEAD))
        copy.truncate(os.fstat(file.fileno()).st_size)


def _read(ad: JobAd, names: Sequence[str] | dict[str, str]) -> Rehearsed:
    """Parse the ad. Raises `Fault`."""
    settings, identity = Settings(MACHINE), Identity(os.geteuid(), os.getegid())
    vm_type = ad.vm_type()
    if vm_type in VMWARE:
        spec_there = vmware.look(vmware.VmwareSpec.parse(ad, settings), settings, identity)
        return Rehearsed(ad, _of_vmware(spec_there, settings), "")
    if vm_type not in (*QEMU, *XEN):
        return Rehearsed(ad, slot.settle(vm_spec.parse(ad, settings), settings, identity), "")
    xml = None
    if vm_type in QEMU:
        xml = job_xml.load(ad, settings, identity)
    spec = JobSpec.parse(xml.ad if xml else ad, settings)
    if vm_type in XEN:
        spec = spec._replace(xen=XenBoot.parse(ad, settings))
    elsewhere = [one for one in spec.requests if one.image or _is_elsewhere(one, names)]
    here = spec._replace(requests=tuple(one for one in spec.requests if one not in elsewhere))
    found = {disk.device: disk for disk in find(here, settings, identity).disks}
    found |= {one.device: _elsewhere(one) for one in elsewhere}
    spec = spec._replace(disks=tuple(found[one.device] for one in spec.requests))
    if spec.xen is not None:
        require(spec, spec.xen)
        return Rehearsed(ad, spec, "")
    arch = ARM if spec.devices.arch == ARM else ""
    host = Host("00000000-0000-4000-8000-000000000000", "kvm", "", bridge="br0", arch=arch)
    ours = build(spec, host)
    return Rehearsed(ad, spec, xml.describe(ours, spec.working_dir, None, identity) if xml else ours)


def _of_vmware(spec: vmware.VmwareSpec, settings: Settings) -> vmware.VmwareSpec:
    """Return the spec, if VMware could make a machine from it. Raises `Fault`."""
    identity = Identity(os.geteuid(), os.getegid())
    if spec.vm_type in VMRUN:
        working_copy.build(spec.vmx, spec, spec.working_dir, "", settings, identity)
        return spec
    try:
        from vmgahp.drivers.vsphere import hardware
    except ImportError:  # only machines that run VMware need pyVmomi
        return spec
    hardware.read_hardware(spec.vmx, spec.vmx_file)
    return spec


def _is_elsewhere(request: DiskRequest, names: Sequence[str] | dict[str, str]) -> bool:
    """Return True if the disk is a file that the execute machine has at that path."""
    return request.file.startswith("/") and not request.made and os.path.basename(request.file) not in names


def _elsewhere(request: DiskRequest) -> Disk:
    path = request.file or f"/catalog/{request.image}"
    form = request.format or "qcow2"
    return Disk(
        path, request.device, request.partition, request.writable, form, False, request.kind or "disk", request.shared
    )


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
        why = {"problem": problem.problem, "hint": problem.hint} if problem else {"problem": "", "hint": ""}
        made = {"submit_file": "" if problem else output, "would_run": problem is None}
        sys.stdout.write(summary.as_json(kind=options.kind, file=options.file, **made, **why) + "\n")
    elif summary.entries or summary.notes or not problem:
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
    if made.finish is None and not made.own_disks:
        vocabulary.tell_card_names(made, "; --as-is keeps it" if "as_is" in options else "")
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
    with os_errors_as(f"{output} cannot be written"):
        write_anew(output, text.encode())


def _submit(path: str, out: int | None) -> int:
    try:
        return subprocess.run(["condor_submit", path], timeout=SUBMIT_DEADLINE, check=False, stdout=out).returncode
    except FileNotFoundError as error:
        raise SubmitError("condor_submit is not here.", f"submit {path} where it is.") from error
    except subprocess.TimeoutExpired as error:
        raise SubmitError(f"condor_submit did not end within {SUBMIT_DEADLINE:g} s.") from error
