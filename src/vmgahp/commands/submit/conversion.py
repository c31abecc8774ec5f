"""One run of ``vmgahp submit``: read, check the disks, write a submit file, rehearse, report, submit.

A line of a submit file is one command, ``$`` begins a macro anywhere, a backslash at the end joins lines, and an
attribute (``+Name = "text"``) is a ClassAd expression. Lists of files are split at commas, and some at blanks. Text
that would not be read back unchanged is refused and never altered.

HTCondor need not be installed for the rehearsal: its treatment of the lines that are written is known.
"""

import argparse
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import NamedTuple

from vmgahp.commands.arguments import print_json
from vmgahp.commands.files import open_regular, write_anew
from vmgahp.commands.submit import images
from vmgahp.commands.submit.machine import BOOT_CLASSES, Guest, GuestDisk, GuestNic, fit_buses, name_devices
from vmgahp.commands.submit.report import SubmitError, Summary, os_errors_as, printable
from vmgahp.config import Settings
from vmgahp.domain import job_xml
from vmgahp.domain.build import Host, build, require_xen
from vmgahp.drivers.vmrun import working_copy
from vmgahp.errors import Fault
from vmgahp.host.job_user import Identity
from vmgahp.images import CATALOG
from vmgahp.job import vm_spec, vmware
from vmgahp.job.ad import JobAd, quote
from vmgahp.job.attributes import ARM, ATTRIBUTES, OPTION_PREFIX
from vmgahp.job.disks import DISK, Disk
from vmgahp.job.engine import NoEngine
from vmgahp.job.look import find
from vmgahp.job.spec import JobSpec
from vmgahp.job.vm_spec import LEAST_MEMORY_MIB, VmSpec
from vmgahp.job.xen import XenBoot
from vmgahp.text import MAC
from vmgahp.vm_types import HTCONDORS, QEMU, VMRUN, VMWARE, XEN

_COMMAND = re.compile(r"[A-Za-z_+][\w.+-]*\s*=", re.ASCII)
_MACRO = re.compile(r"\$\(([^()]*)\)")
_NO_MACRO = r"\$(?!\([A-Za-z][A-Za-z0-9_.]*\))"

_LONGEST = 1 << 20
"""The maximum number of characters of an expanded value: macros can grow without limit."""


def command_line(name: str, text: str, *, macros: bool = False) -> str:
    """Write ``name = text``, read as exactly `text` by condor_submit; `macros` are kept. Raises `SubmitError`."""
    # These two are always expanded once more, $$ when the job is matched with a machine.
    unwritable = "$$" in text or "$(dollar)" in text.lower()
    if unwritable or text != text.strip() or not text or text.endswith("\\") or not text.isprintable():
        raise SubmitError(f"{name}: {text!a} cannot be written into a submit file.", "give it another name.")
    return f"{name} = {re.sub(_NO_MACRO if macros else '[$]', '$(DOLLAR)', text)}"


def attribute_line(name: str, value: str | bool | int, *, macros: bool = False) -> str:
    """Write ``+name = value`` as one line, a string in quotes. Raises `SubmitError`."""
    if not isinstance(value, str):
        return f"+{name} = {str(value).lower()}"
    if value.endswith("\\"):
        raise SubmitError(f"{name}: {value!a} ends with a backslash.", "give it another name.")
    # In this syntax a backslash escapes a quote except for the last one, and is literal before anything else.
    quoted = value.replace('"', '\\"')
    return command_line(f"+{name}", f'"{quoted}"', macros=macros)


def is_command(line: str) -> bool:
    """Return True if a line sets one command or attribute, and does nothing else."""
    return bool(_COMMAND.match(line)) and line.isprintable() and not line.endswith("\\")


def commands_of(text: str) -> dict[str, str]:
    """Parse the value that each line sets; of several lines with one name the last counts, as in condor_submit.

    A command is in lower case, and an attribute is ``MY.`` and its name as it was first written.
    """
    known: dict[str, str] = {}
    attributes: dict[str, str] = {}
    for line in text.splitlines():
        if is_command(line):
            name, _, value = line.partition("=")
            name = re.sub(r"\A(\+|my\.)", "MY.", name.strip(), flags=re.IGNORECASE)
            if name.startswith("MY."):
                attributes.setdefault(name.lower(), name)
            known[name.lower()] = value.strip()
    return {attributes.get(name, name): _expanded(value, known) for name, value in known.items()}


def _expanded(value: str, known: dict[str, str]) -> str:
    """Replace the macros of a value by the values of the file itself."""

    def one(found: re.Match[str]) -> str:
        name, _, otherwise = found[1].partition(":")
        name = name.strip().lower()
        numbers = {"dollar": "\0", "cluster": "1", "clusterid": "1", "process": "0", "procid": "0"}
        return numbers.get(name) or known.get(name, otherwise)

    for _ in range(10):  # a macro may contain another one, or itself
        value, number = _MACRO.subn(one, value)
        if not number or len(value) > _LONGEST:
            break
    return value.replace("\0", "$")


_KINDS = {"hd": "disk", "cdrom": "CD-ROM", "fd": "floppy"}

_FILE = re.compile(r"[^\s,:;\"'\\$<>|*?]+")
"""The form of a path that needs no quoting in any list of HTCondor's, also in vm_disk."""


def write(
    machine: Guest, vm_type: str, summary: Summary, *, transfer: bool = True, appended: Sequence[str] = ()
) -> str:
    """Return the submit file's text, and report its content to the summary. Raises `SubmitError`."""
    vm_type = vm_type.lower()
    if machine.memory_mib <= 0:
        raise SubmitError("How much memory the VM has is not stated.", "give --memory, in MiB (2048) or as 4G.")
    if machine.vcpus <= 0:
        raise SubmitError("How many CPUs the VM has is not stated.", "give --cpus.")
    if not machine.disks and not machine.own_disks:
        raise SubmitError("The VM has no disk that can be used.", "see above what was left out, and why.")
    first = {"universe": "vm", "executable": machine.name, "vm_type": vm_type, "vm_memory": str(machine.memory_mib)}
    first |= dict.fromkeys(("vm_vcpus", "request_cpus"), str(machine.vcpus))
    lines = [command_line(name, value) for name, value in first.items()]
    _tell(machine, "memory", "memory", f"{machine.memory_mib} MiB", summary)
    _tell(machine, "vcpus", "CPUs", str(machine.vcpus), summary)
    inputs = [*machine.files]
    if not machine.own_disks:
        disks = ",".join(_disk(disk, transfer) for disk in machine.disks)
        # For jobs of other types condor_submit ignores the command.
        lines.append(command_line("vm_disk", disks) if vm_type in HTCONDORS else attribute_line(DISK, disks))
        _require_own_images(machine.disks)
        for disk in machine.disks:
            inputs += filter(None, [disk.url or (disk.path if transfer else "")])
            _tell_disk(disk, transfer, summary)
    lines += _network(machine.nics, summary, own=machine.own_nics)
    if machine.vnc:
        lines.append(command_line("vm_vnc", "true"))
        _tell(machine, "vnc", "a VNC console", "vm_vnc = true", summary)
    lines += [command_line(name, value) for name, value in machine.commands.items()]
    for name, value in machine.options.items():
        lines.append(attribute_line(OPTION_PREFIX + name, value))
        said = str(value).lower() if isinstance(value, bool) else value
        _tell(machine, name, name, f"{OPTION_PREFIX}{name} = {said}", summary)
    for name, value in machine.attributes.items():
        lines.append(attribute_line(name, value))
        summary.keep("", name, str(value))
    wanted, appended = _requirements(machine, vm_type, summary, appended)
    lines += wanted
    lines.append(command_line("should_transfer_files", "YES"))
    listed = [*map(_input, dict.fromkeys(inputs)), *machine.inputs]
    if listed:
        lines.append(command_line("transfer_input_files", ", ".join(listed), macros=True))
    usual = [
        command_line("when_to_transfer_output", "ON_EXIT"),
        # If the daemon was killed, HTCondor takes that signal for the job's own, and must run the job again.
        command_line("on_exit_remove", "ExitBySignal == False"),
        # For HTCondor a VM that was ended by a fault that only its owner can repair is done.
        command_line("on_exit_hold", "ChirpVMHoldReason isnt undefined"),
        command_line("on_exit_hold_reason", "ChirpVMHoldReason"),
        command_line("log", f"{machine.name}.log"),
    ]
    own = commands_of("\n".join(machine.lines))
    lines += [*(line for line in usual if line.partition(" =")[0] not in own), *machine.lines]
    for line in appended:
        if not is_command(line):
            raise SubmitError(f"--append {line!a} is not of the form command = value.")
        lines.append(line)
    return "\n".join([*lines, "queue" if machine.number == 1 else f"queue {machine.number}", ""])


def _tell_disk(disk: GuestDisk, transfer: bool, summary: Summary) -> None:
    where = f"made of {disk.url}" if disk.url else "goes with the job" if transfer else "stays where it is"
    if disk.image:
        where = "an overlay of the machine's image" if disk.writable else "the machine's image itself"
    form = f" ({disk.format})" if disk.format else ""
    what = disk.what or f"{_KINDS[disk.boot_class]} {disk.name or disk.path}"
    summary.keep(disk.place, what, ", ".join([f"{disk.device}{form}", *disk.steps, where]), *disk.changed)


def _tell(machine: Guest, key: str, what: str, became: str, summary: Summary) -> None:
    """Report a property of the machine that belongs to no device."""
    reasons = [machine.changed[key]] if key in machine.changed else []
    summary.keep(machine.places.get(key, ""), what, became, *reasons)


def _require_own_images(disks: Sequence[GuestDisk]) -> None:
    """Refuse two drives with one image if one of them is writable: QEMU locks it. Raises `SubmitError`."""
    known: dict[tuple[str, str], GuestDisk] = {}
    for disk in disks:
        other = known.setdefault((disk.path, disk.url), disk)
        one = other is not disk and not disk.image  # of the catalog each drive has an overlay of its own
        if one and (disk.writable or other.writable) and not (disk.shared and other.shared):
            problem = f"{disk.path or disk.url} is the image of two disks, of which one writes"
            raise SubmitError(f"{disk.place or 'The disk'}: {problem}.", "give every disk an image of its own.")


def _disk(disk: GuestDisk, transfer: bool) -> str:
    if disk.image:
        return f"{CATALOG}:{disk.image}:{disk.device}:{'w' if disk.writable else 'r'}"
    # The scratch directory has no directories of this machine.
    file = disk.name or (os.path.basename(disk.path) if transfer else disk.path)
    if not _FILE.fullmatch(file):
        problem = f"{disk.place or 'The disk'}: the name of {file!a} has characters that vm_disk cannot have."
        raise SubmitError(problem, "rename the file, or have it copied to a plain name by --convert.")
    permission = ("w" if disk.writable else "r") + "s" * disk.shared
    return f"{file}:{disk.device}:{permission}:{disk.format}"


def _input(path: str) -> str:
    """Return a path or URL for transfer_input_files. Raises `SubmitError`."""
    if "://" in path:
        if re.search(r"[\s,\"'\\$]", path):
            raise SubmitError(f"{path!a} cannot be in a list of files.", "write %20 for a blank and its like.")
    elif not _FILE.fullmatch(path):
        hint = "move the file to a directory with a plain name, or have it copied by --convert with --dir."
        raise SubmitError(f"{path!a} has characters that a list of HTCondor's cannot have.", hint)
    return path


def _network(nics: Sequence[GuestNic], summary: Summary, *, own: bool) -> list[str]:
    """Return the classic commands as far as they go, and a list of NICs for the rest, unless the XML has it (`own`)."""
    if not nics:
        return [command_line("vm_networking", "false")]
    plain = len(nics) == 1 and nics[0].model in ("", "virtio") and nics[0].link_up
    for nic in nics:
        if nic.mac and not re.fullmatch(MAC, nic.mac):
            raise SubmitError(f"{nic.mac!a} is not a MAC address that a NIC can have.", "correct it in the file.")
        if not nic.kind and not plain:
            nic.kind = "nat"
            summary.advise("A network that has no counterpart here is taken to be nat; --network says otherwise.")
        words = [nic.kind or "the machine's usual network", nic.model, nic.mac, "" if nic.link_up else "cable out"]
        summary.keep(nic.place, nic.what or "NIC", ", ".join(filter(None, words)), *nic.changed)
    lines, first = [command_line("vm_networking", "true")], nics[0]
    if first.kind:
        lines.append(command_line("vm_networking_type", first.kind))
    if own or (plain and not first.mac):
        return lines
    if plain:
        return [*lines, command_line("vm_macaddr", first.mac)]
    entries = [":".join(filter(None, (nic.kind, nic.mac, nic.model, "" if nic.link_up else "down"))) for nic in nics]
    return [*lines, attribute_line(f"{OPTION_PREFIX}NICs", ", ".join(entries))]


def _requirements(
    machine: Guest, vm_type: str, summary: Summary, appended: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the requirements for the job's options; condor_submit adds those that it knows itself.

    Requirements among the appended lines are merged into them; the other lines are returned unchanged.
    """
    wanted = []
    tells = vm_type in QEMU  # machines of other types lack such attributes
    firmware, arch = machine.options.get("Firmware"), machine.options.get("Arch")
    if firmware and tells and vm_type in HTCONDORS:
        wanted.append(f'stringListMember("{firmware}", TARGET.VM_{vm_type}_ATTR_firmware)')
    elif firmware:
        summary.advise(f"The machine must have the firmware {firmware}, which machines of type {vm_type} do not tell.")
    if arch and tells:
        # If a job does not mention Arch, condor_submit requires that of the submit machine.
        wanted.append(f'stringListMember("{arch}", TARGET.VM_{vm_type}_ATTR_arches) && TARGET.Arch isnt undefined')
    for kind in dict.fromkeys(nic.kind for nic in machine.nics[1:] if nic.kind != machine.nics[0].kind):
        wanted.append(f'stringListMember("{kind}", TARGET.VM_Networking_Types)')
    for image in dict.fromkeys(disk.image for disk in machine.disks if disk.image):
        wanted.append(f'stringListMember("{image}", TARGET.VM_Images)')
    if machine.options.get("TPM") and tells:
        wanted.append(f"TARGET.VM_{vm_type}_ATTR_tpm")
    if boots := {"included": "bootloader", "vmx": "hvm"}.get(machine.commands.get("xen_kernel", "")):
        wanted.append(f"TARGET.VM_{vm_type}_ATTR_{boots}")
    mine = [command_line("requirements", " && ".join(wanted))] if wanted else []
    others = []
    for line in appended:
        name, _, value = line.partition("=")
        if mine and name.strip().lower() == "requirements":
            mine = [f"{mine[0]} && ({value.strip()})"]
        else:
            others.append(line)
    return mine, others


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
    spec: VmSpec | JobSpec | vmware.VmwareSpec
    description: str
    """The domain XML, if libvirt would run it under QEMU."""


def rehearse(text: str, summary: Summary) -> Rehearsed | None:
    """Read a submit file of `is_command` lines as the daemon does, None if HTCondor is needed. Raises `SubmitError`."""
    said = commands_of(text)
    if said.get("universe") != "vm":
        raise SubmitError(f"The universe is {said.get('universe')!a}.", "leave that to vmgahp: it is vm.")
    if said.get("vm_type", "").lower() == "vmware":
        raise SubmitError("condor_submit takes no jobs of the type vmware.", "use --type vmrun or --type vsphere.")
    try:
        with tempfile.TemporaryDirectory(prefix="vmgahp-") as directory:
            names = _fill(directory, said)
            return _read(JobAd(_pairs(said, directory)), names)
    except OSError as error:
        raise SubmitError(f"What was written cannot be tried: {error}.", "make room in TMPDIR.") from error
    except Fault as fault:
        if isinstance(fault.__cause__, NoEngine):
            summary.advise("The job has expressions, and HTCondor is not here: whether it would run was not tried.")
            return None
        problem = fault.problem.replace(f"{directory}/", "")
        raise SubmitError(f"The execute machine would hold the job: {problem}", fault.hint) from fault


def _pairs(said: dict[str, str], directory: str) -> list[tuple[str, str]]:
    """Return the attributes that the daemon reads, as the starter and condor_submit make them (``SetVMParams`` in
    HTCondor's ``src/condor_utils/submit_utils.cpp``)."""
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
    paths: list[str] = []
    for path in filter(None, map(str.strip, said.get("transfer_input_files", "").split(","))):
        # With a slash at its end, a directory stands for its content.
        is_content = path.endswith("/") and "://" not in path
        paths += [os.path.join(path, name) for name in os.listdir(path)] if is_content else [path]
    names: dict[str, str] = {}
    for path in dict.fromkeys(paths):
        name = re.split(r"[/:]", path)[-1]  # a URL of the transfer plugin ends in :NAME
        if names.setdefault(name, path) != path:
            problem = f"{names[name]} and {path} would be one file in the job's scratch directory."
            raise SubmitError(problem, "give one of them another name; or say --convert, which does, for disks.")
        target = os.path.join(directory, name)
        if "://" not in path and os.path.isdir(path):
            os.mkdir(target)
            continue
        # A URL, or a file that need not be here, has no head.
        with open(target, "xb") as copy, suppress(OSError, ValueError), open_regular(path) as file:
            copy.write(file.read(HEAD))
            copy.truncate(os.fstat(file.fileno()).st_size)
    return names


def _read(ad: JobAd, names: dict[str, str]) -> Rehearsed:
    """Parse the ad. Raises `Fault`."""
    settings, identity = Settings(MACHINE), Identity(os.geteuid(), os.getegid())
    vm_type = ad.vm_type()
    if vm_type in VMWARE:
        there = vmware.look(vmware.VmwareSpec.parse(ad, settings), settings, identity)
        if vm_type in VMRUN:
            working_copy.build(there.vmx, there, there.vm.working_dir, "", settings, identity)
        else:
            with suppress(ImportError):  # only machines that run VMware need pyVmomi
                from vmgahp.drivers.vsphere import hardware

                hardware.read_hardware(there.vmx, there.vmx_file)
        return Rehearsed(ad, there, "")
    if vm_type not in (*QEMU, *XEN):
        return Rehearsed(ad, vm_spec.settle_slot(vm_spec.parse(ad, settings), settings, identity), "")
    xml = job_xml.load(ad, settings, identity) if vm_type in QEMU else None
    spec = JobSpec.parse(xml.ad if xml else ad, settings)
    if vm_type in XEN:
        spec = spec._replace(xen=XenBoot.parse(ad, settings))
    absent = [one for one in spec.requests if one.file.startswith("/") and os.path.basename(one.file) not in names]
    elsewhere = [one for one in spec.requests if one.image or (one in absent and not one.made)]
    here = spec._replace(requests=tuple(one for one in spec.requests if one not in elsewhere))
    found = {disk.device: disk for disk in find(here, settings, identity).disks}
    for one in elsewhere:
        path, form, kind = one.file or f"/catalog/{one.image}", one.format or "qcow2", one.kind or "disk"
        found[one.device] = Disk(path, one.device, one.partition, one.writable, form, False, kind, one.shared)
    spec = spec._replace(disks=tuple(found[one.device] for one in spec.requests))
    if spec.xen is not None:
        require_xen(spec, spec.xen)
        return Rehearsed(ad, spec, "")
    arch = ARM if spec.devices.arch == ARM else ""
    host = Host("00000000-0000-4000-8000-000000000000", "kvm", "", bridge="br0", arch=arch)
    ours = build(spec, host)
    return Rehearsed(ad, spec, xml.describe(ours, spec.vm.working_dir, None, identity) if xml else ours)


SUBMIT_DEADLINE = 600.0
"""The deadline in seconds for condor_submit, which may have to spool the disks."""


def run(options: argparse.Namespace) -> int:
    """Read, check, write, report, and submit; return the exit status. Raises `SubmitError`."""
    summary = Summary(*([options.file] if isinstance(options.file, str) else options.file))
    output, problem = "", None
    try:
        text, output = _made(options, summary)
        write_out(text, output)
    except BaseException as error:  # an interrupt cleans up as well
        summary.unmake()
        if not isinstance(error, SubmitError):
            raise
        problem = error
    if options.json:
        made = {"submit_file": "" if problem else output, "would_run": problem is None}
        why = {key: getattr(problem, key, "") for key in ("problem", "hint")}
        print_json(summary.document(kind=options.kind, file=options.file, **made, **why))
    else:
        summary.show(sys.stderr)
    if problem is not None:
        if options.json:
            return 1
        raise problem
    if output != "-" and not options.json:
        sys.stderr.write(f"Written: {printable(output)}\n")
    return _submit(output, 2 if options.json else None) if options.submit else 0  # --json has standard output to itself


def _made(options: argparse.Namespace, summary: Summary) -> tuple[str, str]:
    """Return the submit file's text, and its name. Raises `SubmitError`."""
    if options.shared and options.convert:
        raise SubmitError("--shared leaves the disks as they are, and --convert does not.", "keep one of them.")
    if options.output == "-" and (options.submit or options.json):
        raise SubmitError(f"{'--submit' if options.submit else '--json'} needs a file.", "say -o FILE.")
    options.dir = os.path.abspath(options.dir or os.path.dirname(options.output) or ".")
    if not os.path.isdir(options.dir):
        raise SubmitError(f"{options.dir} is no directory.", "make it first.")
    made = read(options, summary)
    if made.own_disks and options.convert:
        raise SubmitError("--as-is leaves the disks as they are, and --convert does not.", "keep one of them.")
    _claim_output(
        options, made, summary
    )  # before images are converted, which then take the place of those that are read
    in_vain = summary.losses and not options.lax  # converting images may take hours
    if not (options.shared or made.own_disks or in_vain):
        bring_images(options, made, summary)
    text = written(options, made, summary)
    if (lost := summary.losses) and not options.lax:
        things = "1 thing is" if lost == 1 else f"{lost} things are"
        raise SubmitError(f"{things} left out, so nothing is written; --lax writes the submit file all the same.")
    return text, _claim_output(options, made, summary)


def _claim_output(options: argparse.Namespace, made: Guest, summary: Summary) -> str:
    """Return the name of the submit file, which replaces nothing that is read. Raises `SubmitError`."""
    output: str = options.output or f"{made.name}.sub"
    if output != "-":
        summary.sources |= {os.path.realpath(path) for path in (*made.files, *(disk.path for disk in made.disks))}
        images.free(output, summary, force=options.force)
    return output


def read(options: argparse.Namespace, summary: Summary) -> Guest:
    """Read the VM, with the path in the guest for every disk. Raises `SubmitError`."""
    made: Guest = import_module(f"vmgahp.commands.{options.module}").machine(options, summary)
    _as_asked(options, made, summary)
    if not made.own_disks:
        fit_buses(made, summary)
    if made.finish is None and not made.own_disks:
        advice = "; --as-is keeps it" if "as_is" in options else ""
        for nic, now in zip(made.nics, made.card_names(made.chipset(), has_display=made.vnc), strict=True):
            if nic.card not in ("", now):
                nic.changed.append(f"Linux may call it {now or 'otherwise'}, in place of {nic.card}{advice}")
    name_devices(made.disks)
    # The order of vm_disk is the boot order. Devices were named in the order of the machine's controllers, before.
    made.disks.sort(key=lambda disk: (disk.boot or math.inf, BOOT_CLASSES.index(disk.boot_class)))
    return made


def written(options: argparse.Namespace, made: Guest, summary: Summary) -> str:
    """Return the submit file's text, once the daemon has read it as far as that is known. Raises `SubmitError`."""
    if made.finish is not None:
        made.finish()
    text = write(made, options.type or made.vm_type, summary, transfer=not options.shared, appended=options.append)
    rehearse(text, summary)
    return text


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
            summary.keep(made.places.get("Topology", ""), "Topology", "one socket a CPU", "--cpus")
    if options.network == "none":
        for nic in made.nics:
            summary.keep(nic.place, nic.what or "NIC", "no NIC", "--network none")
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
        is_good = disk.format == "iso" or (disk.format == "qcow2" and bool(_FILE.fullmatch(disk.path)))
        asked = options.convert and not is_good and disk.bus != "floppy"
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
