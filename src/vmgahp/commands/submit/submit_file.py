"""The writer of submit files: a `machine.Guest` as lines for condor_submit.

`vmgahp.commands.submit.lines` writes each line; lists of files are split at commas, and some at blanks. Text that would
not be read back unchanged is refused and never altered.
"""

import os
import re
from collections.abc import Sequence

from vmgahp.commands.submit.lines import attribute, command, is_command
from vmgahp.commands.submit.machine import Guest, GuestDisk, GuestNic
from vmgahp.commands.submit.summary import SubmitError, Summary
from vmgahp.images import CATALOG
from vmgahp.job.nics import MOST_NICS
from vmgahp.text import MAC
from vmgahp.vm_types import HTCONDORS, QEMU

PREFIX = "VMPARAM_vm_"

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
    lines = [
        command("universe", "vm"),
        command("executable", machine.name),
        command("vm_type", vm_type),
        command("vm_memory", str(machine.memory_mib)),
        command("vm_vcpus", str(machine.vcpus)),
        command("request_cpus", str(machine.vcpus)),
    ]
    _tell(machine, "memory", "memory", f"{machine.memory_mib} MiB", summary)
    _tell(machine, "vcpus", "CPUs", str(machine.vcpus), summary)
    inputs = [*machine.files]
    if not machine.own_disks:
        disks = ",".join(_disk(disk, transfer) for disk in machine.disks)
        # For jobs of other types condor_submit ignores the command.
        lines.append(command("vm_disk", disks) if vm_type in HTCONDORS else attribute(PREFIX + "Disk", disks))
        _require_own_images(machine.disks)
        for disk in machine.disks:
            moved = disk.url or (disk.path if transfer else "")
            if moved:
                inputs.append(moved)
            _tell_disk(disk, transfer, summary)
    lines += _network(machine.nics, summary, own=machine.own_nics)
    if machine.vnc:
        lines.append(command("vm_vnc", "true"))
        _tell(machine, "vnc", "a VNC console", "vm_vnc = true", summary)
    lines += [command(name, value) for name, value in machine.commands.items()]
    for name, value in machine.options.items():
        lines.append(attribute(PREFIX + name, value))
        said = str(value).lower() if isinstance(value, bool) else value
        _tell(machine, name, name, f"{PREFIX}{name} = {said}", summary)
    for name, value in machine.attributes.items():
        lines.append(attribute(name, value))
        summary.carry("", name, str(value))
    wanted, appended = _requirements(machine, vm_type, summary, appended)
    lines += wanted
    lines.append(command("should_transfer_files", "YES"))
    listed = [*map(_input, dict.fromkeys(inputs)), *machine.inputs]
    if listed:
        lines.append(command("transfer_input_files", ", ".join(listed), macros=True))
    usual = [
        command("when_to_transfer_output", "ON_EXIT"),
        # If the daemon was killed, HTCondor takes that signal for the job's own, and must run the job again.
        command("on_exit_remove", "ExitBySignal == False"),
        # For HTCondor a VM that was ended by a fault that only its owner can repair is done.
        command("on_exit_hold", "ChirpVMHoldReason isnt undefined"),
        command("on_exit_hold_reason", "ChirpVMHoldReason"),
        command("log", f"{machine.name}.log"),
    ]
    own = {_name(line) for line in machine.lines}
    lines += [*(line for line in usual if _name(line) not in own), *machine.lines]
    for line in appended:
        if not is_command(line):
            raise SubmitError(f"--append {line!a} is not of the form command = value.")
        lines.append(line)
    return "\n".join([*lines, "queue" if machine.number == 1 else f"queue {machine.number}", ""])


def _name(line: str) -> str:
    return line.partition("=")[0].strip().lower()


def _tell_disk(disk: GuestDisk, transfer: bool, summary: Summary) -> None:
    if disk.image:
        where = "an overlay of the machine's image" if disk.writable else "the machine's image itself"
    else:
        where = f"made of {disk.url}" if disk.url else "goes with the job" if transfer else "stays where it is"
    form = f" ({disk.format})" if disk.format else ""
    became = ", ".join([f"{disk.device}{form}", *disk.steps, where])
    what = disk.what or f"{_KINDS[disk.boot_class]} {disk.name or disk.path}"
    _outcome(disk.place, what, became, disk.changed, summary)


def _tell(machine: Guest, key: str, what: str, became: str, summary: Summary) -> None:
    """Report a property of the machine that belongs to no device."""
    why = machine.changed.get(key)
    _outcome(machine.places.get(key, ""), what, became, [why] if why else [], summary)


def _outcome(place: str, what: str, became: str, changed: Sequence[str], summary: Summary) -> None:
    if changed:
        summary.change(place, what, became, "; ".join(changed))
    else:
        summary.carry(place, what, became)


def _require_own_images(disks: Sequence[GuestDisk]) -> None:
    """Refuse two drives with one image if one of them is writable: QEMU locks it. Raises `SubmitError`."""
    disks = [disk for disk in disks if not disk.image]  # for these each drive has an overlay of its own
    for number, disk in enumerate(disks):
        for other in disks[:number]:
            one = disk.path == other.path and disk.url == other.url
            if one and (disk.writable or other.writable) and not (disk.shared and other.shared):
                problem = f"{disk.path or disk.url} is the image of two disks, of which one writes"
                raise SubmitError(f"{disk.place or 'The disk'}: {problem}.", "give every disk an image of its own.")


def _disk(disk: GuestDisk, transfer: bool) -> str:
    if disk.image:
        return f"{CATALOG}:{disk.image}:{disk.device}:{'w' if disk.writable else 'r'}"
    # The scratch directory has no directories of this machine.
    file = disk.name or (os.path.basename(disk.path) if transfer else disk.path)
    if not _FILE.fullmatch(file):
        raise SubmitError(
            f"{disk.place or 'The disk'}: the name of {file!a} has characters that vm_disk cannot have.",
            "rename the file, or have it copied to a plain name by --convert.",
        )
    permission = ("w" if disk.writable else "r") + "s" * disk.shared
    return f"{file}:{disk.device}:{permission}:{disk.format}"


def _input(path: str) -> str:
    """Return a path or URL for transfer_input_files. Raises `SubmitError`."""
    if "://" in path:
        if re.search(r"[\s,\"'\\$]", path):
            raise SubmitError(f"{path!a} cannot be in a list of files.", "write %20 for a blank and its like.")
    elif not _FILE.fullmatch(path):
        raise SubmitError(
            f"{path!a} has characters that a list of HTCondor's cannot have.",
            "move the file to a directory with a plain name, or have it copied by --convert with --dir.",
        )
    return path


def _network(nics: Sequence[GuestNic], summary: Summary, *, own: bool) -> list[str]:
    """Return the classic commands as far as they go, and a list of NICs for the rest, unless the XML has it (`own`)."""
    if not nics:
        return [command("vm_networking", "false")]
    plain = len(nics) == 1 and nics[0].model in ("", "virtio") and nics[0].link_up
    addresses = [nic.mac for nic in nics if nic.mac]
    if len(nics) > MOST_NICS:
        raise SubmitError(f"The VM has {len(nics)} NICs.", f"jobs have {MOST_NICS} at most.")
    for nic in nics:
        if nic.mac and (not re.fullmatch(MAC, nic.mac) or addresses.count(nic.mac) > 1):
            raise SubmitError(
                f"{nic.mac!a} is not a MAC address that one NIC can have, or two NICs have it.",
                "correct it in the file.",
            )
        if not nic.kind and not plain:
            nic.kind = "nat"
            summary.advise("A network that has no counterpart here is taken to be nat; --network says otherwise.")
        words = [nic.kind or "the machine's usual network", nic.model, nic.mac, "" if nic.link_up else "cable out"]
        _outcome(nic.place, nic.what or "NIC", ", ".join(filter(None, words)), nic.changed, summary)
    first = nics[0]
    lines = [command("vm_networking", "true")]
    if first.kind:
        lines.append(command("vm_networking_type", first.kind))
    if own:
        return lines
    if plain:
        return [*lines, command("vm_macaddr", first.mac)] if first.mac else lines
    entries = [":".join(filter(None, (nic.kind, nic.mac, nic.model, "" if nic.link_up else "down"))) for nic in nics]
    return [*lines, attribute(PREFIX + "NICs", ", ".join(entries))]


def _requirements(
    machine: Guest, vm_type: str, summary: Summary, appended: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the requirements for the job's options; condor_submit adds those that it knows itself.

    Requirements among the appended lines are merged into them; the other lines are returned unchanged.
    """
    wanted = []
    tells = vm_type in QEMU  # machines of any type, and other hypervisors, lack such attributes
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
    boots = {"included": "bootloader", "vmx": "hvm"}.get(machine.commands.get("xen_kernel", ""))
    if boots:
        wanted.append(f"TARGET.VM_{vm_type}_ATTR_{boots}")
    mine = [command("requirements", " && ".join(wanted))] if wanted else []
    others = []
    for line in appended:
        name, _, value = line.partition("=")
        if mine and name.strip().lower() == "requirements":
            mine = [f"{mine[0]} && ({value.strip()})"]
        else:
            others.append(line)
    return mine, others
