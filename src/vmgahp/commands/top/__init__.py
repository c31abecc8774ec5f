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
JOB = {
    "job": ("JobId", "the id of a job that runs in a VM"),
    "owner": ("RemoteOwner", "who submitted it"),
    "slot": ("Name", "the slot that it runs in"),
    "activity": ("Activity", "the slot's activity: Busy, Suspended, or Retiring before it is evicted"),
    "type": ("VM_Type", "the VM type of the machine"),
    "cpus": ("Cpus", "the CPUs of the slot"),
    "memory_mib": ("Memory", "MiB of memory of the slot"),
    "age": ("JobStart", "seconds since its start there"),
}
MACHINE = {
    "machine": ("Machine", "a machine that offers VMs"),
    "type": ("VM_Type", "their type"),
    "memory_mib": ("VM_Memory", "MiB of memory that are free for VMs"),
    "images": ("VM_Images", "its catalog"),
    "warm": ("VM_Images_Warm", "the images that start without a boot"),
    "version": ("VM_VMGAHP_VERSION", "the version of its server"),
}
"""The meaning of each key of a job and of a machine with ``--pool``, behind HTCondor's attribute."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Show the VMs of jobs on this machine and what they use: from libvirt, and for VMs that libvirt does not know from
    the vm_metrics.jsonl in their scratch directories, which only root may read for all. On a terminal it continues
    until q or Ctrl-C; elsewhere it prints one table."""
    add = command.add_argument
    add("--once", action="store_true", help="print one table")
    add_json(command, "print one look as one JSON object")
    text = "write the figures for node_exporter's textfile collector; - is standard output"
    add("--prometheus", default="", metavar="FILE", help=text)
    text = "show the VM jobs of all machines, as the collector has them (default: that of COLLECTOR_HOST)"
    add("--pool", nargs="?", const="", metavar="HOST", help=text)
    add("--interval", type=seconds, default=2.0, metavar="SECONDS", help="between two looks (default: 2)")
    add("--execute", default="", metavar="DIR", help="where the scratch directories are (default: EXECUTE)")
    command.set_defaults(run=_run)
    tell(
        command,
        examples=[
            ("vmgahp top --once", "one table"),
            ("vmgahp top --json", "one look, for a program"),
            ("vmgahp top --pool", "the VM jobs of the pool, and the machines"),
        ],
        statuses={
            0: "It was looked at, whether there are VMs or not, until q or Control-C.",
            1: "Nothing could be looked at.",
            130: "",
        },
        keys={
            "time": "when it was looked, in seconds since 1970",
            **{f"vms[].{key}": text for key, text in VM.items()},
            "notes": "what could not be looked at",
            **{f"jobs[].{key}": f"with --pool: {text}" for key, (_, text) in JOB.items()},
            **{f"machines[].{key}": f"with --pool: {text}" for key, (_, text) in MACHINE.items()},
        },
    )


def _run(options: argparse.Namespace) -> int:
    from vmgahp.commands.top import screen  # late: completions and man pages are made without rich

    return screen.run(options)
