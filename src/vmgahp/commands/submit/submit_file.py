"""The writer of submit files: a `machine.Guest` as lines for condor_submit.

In a submit file a line is a command up to its end, ``$`` begins a macro anywhere, a backslash at the end joins lines,
and an attribute (``+Name = "text"``) is a ClassAd expression; lists of files are split at commas, and some at blanks.
What cannot be written so that it comes back as it was is refused and never bent.
"""

import os
import re
from collections.abc import Sequence

from vmgahp.commands.submit.machine import PLAIN_NAME, Guest, GuestDisk, GuestNic
from vmgahp.commands.submit.summary import SubmitError, Summary
from vmgahp.job.nics import MOST_NICS
from vmgahp.text import MAC

PREFIX = "VMPARAM_vm_"

_FILE = re.compile(r"[^\s,:;\"'\\$<>|*?]+")
"""A path that is the same in all lists of HTCondor's, in vm_disk too."""


def command(name: str, text: str) -> str:
    """``name = text`` as one line, such that condor_submit has exactly `text`. Raises `SubmitError`."""
    # These two are expanded once more however they are written, $$ when the job meets its machine.
    unwritable = "$$" in text or "$(dollar)" in text.lower()
    if unwritable or text != text.strip() or not text or text.endswith("\\") or not text.isprintable():
        raise SubmitError(f"{name}: {text!a} cannot be written into a submit file.", "give it another name.")
    return f"{name} = {text.replace('$', '$(DOLLAR)')}"


def attribute(name: str, value: str | bool | int) -> str:
    """``+name = value`` as one line, a text in quotes. Raises `SubmitError`."""
    if isinstance(value, bool):
        return f"+{name} = {str(value).lower()}"
    if isinstance(value, int):
        return f"+{name} = {value}"
    if '"' in value or "\\" in value:
        raise SubmitError(f"{name}: {value!a} has a quote or a backslash.", "give it another name.")
    return command(f"+{name}", f'"{value}"')


def write(
    machine: Guest, vm_type: str, summary: Summary, *, transfer: bool = True, appended: Sequence[str] = ()
) -> str:
    """The submit file's text; what is in it goes to the summary. Raises `SubmitError`."""
    if machine.memory_mib <= 0:
        raise SubmitError("Nobody says how much memory the VM gets.", "give it with --memory, in MiB.")
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
    summary.carry(f"memory {machine.memory_mib} MiB, {machine.vcpus} CPU{'s' * (machine.vcpus > 1)}")
    inputs = [*machine.files]
    if not machine.own_disks:
        lines.append(command("vm_disk", ",".join(_disk(disk, transfer) for disk in machine.disks)))
        for disk in machine.disks:
            moved = disk.url or (disk.path if transfer else "")
            if moved:
                inputs.append(moved)
            where = f"made of {disk.url}" if disk.url else "goes with the job" if transfer else "stays where it is"
            summary.carry(f"disk {disk.device}: {disk.name or disk.path} ({disk.format}), {where}")
    lines += _network(machine.nics, summary)
    if machine.vnc:
        lines.append(command("vm_vnc", "true"))
        summary.carry("a VNC console")
    for name, value in machine.options.items():
        lines.append(attribute(PREFIX + name, value))
        summary.carry(f"{PREFIX}{name} = {str(value).lower() if isinstance(value, bool) else value}")
    for name, value in machine.attributes.items():
        lines.append(attribute(name, value))
        summary.carry(f"{name} = {value}")
    lines += _requirements(machine, vm_type)
    lines.append(command("should_transfer_files", "YES"))
    if inputs:
        lines.append(command("transfer_input_files", ", ".join(_input(path) for path in inputs)))
    lines += [
        command("when_to_transfer_output", "ON_EXIT"),
        # Where the daemon was killed HTCondor takes its signal for the job's own, and is to run the job again.
        command("on_exit_remove", "ExitBySignal == False"),
        command("log", f"{machine.name}.log"),
    ]
    for line in appended:
        if not line.isprintable() or "=" not in line:
            raise SubmitError(f"--append {line!a} is not of the form command = value.")
        lines.append(line)
    return "\n".join([*lines, "queue", ""])


def _disk(disk: GuestDisk, transfer: bool) -> str:
    # In the scratch directory there are no directories of this machine.
    file = disk.name or (os.path.basename(disk.path) if transfer else disk.path)
    if not _FILE.fullmatch(file):
        raise SubmitError(
            f"{disk.place or 'The disk'}: the name of {file!a} has characters that vm_disk cannot have.",
            "rename the file, or have it copied to a plain name by --convert.",
        )
    permission = ("w" if disk.writable else "r") + "s" * disk.shared
    return f"{file}:{disk.device}:{permission}:{disk.format}"


def _input(path: str) -> str:
    """A path or URL for transfer_input_files."""
    if "://" in path:
        if re.search(r"[\s,\"'\\$]", path):
            raise SubmitError(f"{path!a} cannot be in a list of files.", "write %20 for a blank and its like.")
    elif not _FILE.fullmatch(path):
        raise SubmitError(
            f"{path!a} has characters that a list of HTCondor's cannot have.",
            "move the file to a directory with a plain name, or have it copied by --convert with --dir.",
        )
    return path


def _network(nics: Sequence[GuestNic], summary: Summary) -> list[str]:
    """The classic commands for what they can say, the list of NICs for the rest."""
    if not nics:
        return [command("vm_networking", "false")]
    plain = len(nics) == 1 and nics[0].model == "virtio" and nics[0].link_up
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
        summary.carry("NIC: " + ", ".join(filter(None, words)))
    first = nics[0]
    lines = [command("vm_networking", "true")]
    if first.kind:
        lines.append(command("vm_networking_type", first.kind))
    if plain:
        return [*lines, command("vm_macaddr", first.mac)] if first.mac else lines
    entries = [":".join(filter(None, (nic.kind, nic.mac, nic.model, "" if nic.link_up else "down"))) for nic in nics]
    return [*lines, attribute(PREFIX + "NICs", ", ".join(entries))]


def _requirements(machine: Guest, vm_type: str) -> list[str]:
    """That the machine has what the job's options need; condor_submit adds all that it knows itself."""
    wanted = []
    firmware = machine.options.get("Firmware")
    if isinstance(firmware, str) and PLAIN_NAME.fullmatch(vm_type):
        wanted.append(f'stringListMember("{firmware}", TARGET.VM_{vm_type}_ATTR_firmware)')
    if machine.options.get("TPM"):
        wanted.append(f"TARGET.VM_{vm_type}_ATTR_tpm")
    return [command("requirements", " && ".join(wanted))] if wanted else []
