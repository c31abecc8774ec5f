"""Front ends that write a submit file for a VM that exists in another form, such as libvirt's XML.

Each reads its file into a `machine.Guest` and reports its work through `report.Summary`; `images` checks the disks,
`conversion` writes and tests the result. docs/how-to/submitting.md is for users. Everything runs with the rights of
the caller, who is not root; but the files are untrusted.
"""

import argparse

from vmgahp.commands.arguments import add_json, add_type, cpus, memory, tell

FRONT_ENDS = (
    ("libvirt-xml", "libvirt_xml", "libvirt's domain XML, as virsh dumpxml --inactive writes it"),
    ("virt-install", "libvirt_xml", "the words of a virt-install command line, after --"),
    ("ovf", "ovf", "an OVF descriptor (.ovf) with its files beside it, or an archive of them (.ova)"),
    ("vmx", "vmx", "VMware's .vmx, with its disks beside it"),
    ("box", "box", "a Vagrant box: a .box file, or a directory such as ~/.vagrant.d/boxes has"),
    ("disk", "images", "disk images of any format, catalog:NAME for an image of the machines, or a URL"),
)
"""The word, the module, and the input of each front end."""

_EXAMPLES = {
    "libvirt-xml": [("virsh dumpxml --inactive web >web.xml; vmgahp submit libvirt-xml web.xml", "a VM of libvirt's")],
    "virt-install": [("vmgahp submit virt-install -- --memory 2048 --disk web.qcow2 --import", "as it has them")],
    "ovf": [("vmgahp submit ovf appliance.ova --memory 4G", "an appliance, with other memory than it says")],
    "vmx": [("vmgahp submit vmx vm/vm.vmx --type kvm --convert", "VMware's VM, to run on KVM")],
    "box": [("vmgahp submit box debian.box --memory 2G --cpus 2 --submit", "a Vagrant box, submitted at once")],
    "disk": [("vmgahp submit disk disk.qcow2 --memory 2G --network nat", "a disk that boots")],
}

_STATUSES = {
    0: "A submit file is written, in which the check of an execute machine finds nothing wrong.",
    1: "None is written; or condor_submit's own.",
}

_KEYS = {
    "kind": "what was read, such as ovf",
    "file": "its name, or names, or words",
    "submit_file": "the file that was written; empty where none was",
    "would_run": "whether a submit file was written",
    "problem": "why not, a sentence",
    "hint": "what to do about it",
    "entries[].place": "line and element, or the key, of what was read",
    "entries[].what": "what stands there",
    "entries[].became": "what it is in the submit file",
    "entries[].why": "the reason, where it is another thing",
    "entries[].outcome": "carried over, changed, not used, or left out",
    "notes": "what the machines must have, and what is good to know",
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Write a submit file for a VM that exists in another form, and say what of it is carried over, what is changed or
    left out, and where that stands."""
    kinds = command.add_subparsers(title="what to read", dest="kind", metavar="KIND", required=True)
    for word, module, what in FRONT_ENDS:
        kind = kinds.add_parser(word, help=what, description=f"Read {what}, and write a submit file.")
        several = {"disk": "IMAGE", "virt-install": "WORD"}.get(word)
        kind.add_argument("file", nargs="+" if several else None, metavar=several or "FILE", help=what)
        _common(kind)
        if word == "disk":
            kind.add_argument("--format", default="", help="the images' format, where name and content do not say it")
            kind.add_argument("--firmware", choices=("uefi", "uefi-secure"), default="", help="default: BIOS")
        elif word == "ovf":
            kind.add_argument("--system", default="", metavar="ID", help="which VM of a package with several")
            kind.add_argument("--configuration", default="", metavar="ID", help="which of the configurations on offer")
        elif word != "box":
            kind.add_argument("--as-is", action="store_true", help="let the file itself go with the job")
        if word in ("libvirt-xml", "vmx"):
            own = "the file is your own: its images may be in other directories than its own, and overlays"
            kind.add_argument("--own", action="store_true", help=own)
        tell(kind, examples=_EXAMPLES[word], statuses=_STATUSES, keys=_KEYS)
        kind.set_defaults(run=run, module=f"submit.{module}")


def _common(kind: argparse.ArgumentParser) -> None:
    add = kind.add_argument
    beside = "the submit file; - for standard output (default: the VM's name with .sub, here)"
    add("-o", "--output", default="", metavar="FILE", help=beside)
    add("--dir", default="", metavar="DIR", help="where images are written (default: beside the submit file)")
    add("--force", action="store_true", help="replace files that are there already")
    add("--name", default="", metavar="NAME", help="the job's name (default: the VM's)")
    add_type(kind, "", "the VM type of the machines: kvm, qemu, xen, vmware, ... (default: what fits, kvm mostly)")
    add("--memory", type=memory, default=0, metavar="MIB", help="memory in MiB, or as 4G")
    add("--cpus", type=cpus, default=0, metavar="N", help="the number of CPUs")
    networks = "the kind of network for all NICs; none: no NICs"
    add("--network", choices=("nat", "bridge", "user", "none"), default="", help=networks)
    add("--convert", action="store_true", help="convert all disks to qcow2")
    shared = "leave the disks where they are: the execute machines have them at the same path"
    add("--shared", action="store_true", help=shared)
    add("--lax", action="store_true", help="write the submit file even where things are left out")
    add_json(kind, "the report as one JSON object on standard output")
    line = "a line more for the submit file; may be given several times"
    add("--append", action="append", default=[], metavar="'COMMAND = VALUE'", help=line)
    add("--submit", action="store_true", help="run condor_submit with it")


def run(options: argparse.Namespace) -> int:
    """Read, check, write, report, and submit; return the exit status."""
    from vmgahp.commands.submit import conversion

    return conversion.run(options)
