"""Command ``vmgahp top``: the VMs of this machine, live."""

import argparse

from vmgahp.commands.arguments import add_json, seconds, tell

VM = {
    "name": "the VM's name in the hypervisor",
    "source": "who told: libvirt, or metrics for a vm_metrics.jsonl",
    "scratch": "the job's scratch directory",
    "owner": "the job's user",
    "state": "the VM's state",
    "vcpus": "how many CPUs it has",
    "memory_kib": "KiB of memory that it has now",
    "max_memory_kib": "KiB of memory that it may have",
    "rss_kib": "KiB of this machine's memory that it occupies",
    "cpu_percent": "of all its CPUs, between two looks; null where nobody knows, as in all below",
    "read": "bytes per second from its disks",
    "written": "bytes per second to its disks",
    "received": "bytes per second from its networks",
    "sent": "bytes per second to its networks",
    "age": "seconds since its start on this machine",
}
"""The meaning of each key of a VM, as ``--json`` prints it."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Show the VMs of jobs on this machine and what they use: from libvirt, and for VMs that libvirt "
        "does not know from the vm_metrics.jsonl in their scratch directories, which only root may read for all. "
        "On a terminal it continues until q or Ctrl-C; elsewhere it prints one table."
    )
    add = command.add_argument
    add("--once", action="store_true", help="print one table")
    add_json(command, "print one look as one JSON object")
    text = "write the figures for node_exporter's textfile collector; - is standard output"
    add("--prometheus", default="", metavar="FILE", help=text)
    add("--interval", type=seconds, default=2.0, metavar="SECONDS", help="between two looks (default: 2)")
    add("--execute", default="", metavar="DIR", help="where the scratch directories are (default: EXECUTE)")
    command.set_defaults(run=_run)
    tell(
        command,
        examples=[("vmgahp top --once", "one table"), ("vmgahp top --json", "one look, for a program")],
        statuses={
            0: "It was looked at, whether there are VMs or not, until q or Control-C.",
            1: "Nothing could be looked at.",
            130: "",
        },
        keys={
            "time": "when it was looked, in seconds since 1970",
            **{f"vms[].{key}": text for key, text in VM.items()},
            "notes": "what could not be looked at",
        },
    )


def _run(options: argparse.Namespace) -> int:
    from vmgahp.commands.top import screen  # late: completions and man pages are made without rich

    return screen.run(options)
