"""The submit file: its lines, written and parsed, and its writer for a `machine.Guest`.

A line is one command, ``$`` begins a macro anywhere, a backslash at the end joins lines, and an attribute (``+Name =
"text"``) is a ClassAd expression.

Lists of files are split at commas, and some at blanks. Text that would
not be read back unchanged is refused and never altered.
"""

import os
import re
from collections.abc import Sequence

from vmgahp.commands.submit.machine import Guest, GuestDisk, GuestNic, SubmitError, Summary
from vmgahp.images import CATALOG
from vmgahp.job.nics import MOST_NICS
from vmgahp.text import MAC
from vmgahp.vm_types import HTCONDORS, QEMU

_COMMAND = re.compile(r"[A-Za-z_+][\w.+-]*\s*=", re.ASCII)
_MACRO = re.compile(r"\$\(([^()]*)\)")
_DOLLAR = re.compile(r"\$")
_NO_MACRO = re.compile(r"\$(?!\([A-Za-z][A-Za-z0-9_.]*\))")

_LONGEST = 1 << 20
"""The maximum number of characters of an expanded value: macros can grow without limit."""


def command_line(name: str, text: str, *, macros: bool = False) -> str:
    """Write ``name = text`` as one line, from which condor_submit reads exactly `text`. Raises `SubmitError`.

    With `macros`, ``$(Process)`` and the like are left as macros.
    """
    # These two are always expanded once more, $$ when the job is matched with a machine.
    unwritable = "$$" in text or "$(dollar)" in text.lower()
    if unwritable or text != text.strip() or not text or text.endswith("\\") or not text.isprintable():
        raise SubmitError(f"{name}: {text!a} cannot be written into a submit file.", "give it another name.")
    return f"{name} = {(_NO_MACRO if macros else _DOLLAR).sub('$(DOLLAR)', text)}"


def attribute_line(name: str, value: str | bool | int, *, macros: bool = False) -> str:
    """Write ``+name = value`` as one line, a string in quotes. Raises `SubmitError`."""
    if isinstance(value, bool):
        return f"+{name} = {str(value).lower()}"
    if isinstance(value, int):
        return f"+{name} = {value}"
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
        command_line("universe", "vm"),
        command_line("executable", machine.name),
        command_line("vm_type", vm_type),
        command_line("vm_memory", str(machine.memory_mib)),
        command_line("vm_vcpus", str(machine.vcpus)),
        command_line("request_cpus", str(machine.vcpus)),
    ]
    _tell(machine, "memory", "memory", f"{machine.memory_mib} MiB", summary)
    _tell(machine, "vcpus", "CPUs", str(machine.vcpus), summary)
    inputs = [*machine.files]
    if not machine.own_disks:
        disks = ",".join(_disk(disk, transfer) for disk in machine.disks)
        # For jobs of other types condor_submit ignores the command.
        lines.append(command_line("vm_disk", disks) if vm_type in HTCONDORS else attribute_line(PREFIX + "Disk", disks))
        _require_own_images(machine.disks)
        for disk in machine.disks:
            moved = disk.url or (disk.path if transfer else "")
            if moved:
                inputs.append(moved)
            _tell_disk(disk, transfer, summary)
    lines += _network(machine.nics, summary, own=machine.own_nics)
    if machine.vnc:
        lines.append(command_line("vm_vnc", "true"))
        _tell(machine, "vnc", "a VNC console", "vm_vnc = true", summary)
    lines += [command_line(name, value) for name, value in machine.commands.items()]
    for name, value in machine.options.items():
        lines.append(attribute_line(PREFIX + name, value))
        said = str(value).lower() if isinstance(value, bool) else value
        _tell(machine, name, name, f"{PREFIX}{name} = {said}", summary)
    for name, value in machine.attributes.items():
        lines.append(attribute_line(name, value))
        summary.carry("", name, str(value))
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
    what = disk.what or f"{_KINDS[disk.boot_class]} {disk.name or disk.path}"
    summary.change(disk.place, what, ", ".join([f"{disk.device}{form}", *disk.steps, where]), *disk.changed)


def _tell(machine: Guest, key: str, what: str, became: str, summary: Summary) -> None:
    """Report a property of the machine that belongs to no device."""
    reasons = [machine.changed[key]] if key in machine.changed else []
    summary.change(machine.places.get(key, ""), what, became, *reasons)


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
        return [command_line("vm_networking", "false")]
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
        summary.change(nic.place, nic.what or "NIC", ", ".join(filter(None, words)), *nic.changed)
    first = nics[0]
    lines = [command_line("vm_networking", "true")]
    if first.kind:
        lines.append(command_line("vm_networking_type", first.kind))
    if own:
        return lines
    if plain:
        return [*lines, command_line("vm_macaddr", first.mac)] if first.mac else lines
    entries = [":".join(filter(None, (nic.kind, nic.mac, nic.model, "" if nic.link_up else "down"))) for nic in nics]
    return [*lines, attribute_line(PREFIX + "NICs", ", ".join(entries))]


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
    mine = [command_line("requirements", " && ".join(wanted))] if wanted else []
    others = []
    for line in appended:
        name, _, value = line.partition("=")
        if mine and name.strip().lower() == "requirements":
            mine = [f"{mine[0]} && ({value.strip()})"]
        else:
            others.append(line)
    return mine, others
