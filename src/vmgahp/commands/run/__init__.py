"""``vmgahp run``: a program in a virtual machine as a job, with its files and its exit code.

It writes a submit file that a person could write as well; the rest is done where the job runs.
"""

import argparse
import re

from vmgahp.commands.arguments import UsageError, add_json, add_type, cpus, memory, tell, whole

EXAMPLE = "vmgahp run --image catalog:debian-12 --input fit.py -- python3 fit.py 17"

number = whole(999_999, "no number: write one")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Write a submit file for a program in a virtual machine. Its inputs are in the directory in which it is started
    there, its outputs come back as files, its standard output and error grow while it runs, and its exit code is the
    job's. The image needs cloud-init, or the agent."""
    command.add_argument("words", nargs="*", metavar="WORD", help="after --: the program and its arguments")
    add = command.add_argument
    add("--image", default="", metavar="IMAGE", help="catalog:NAME of the machines, a file, or a URL that they fetch")
    add("--memory", type=memory, default=0, metavar="MIB", help="memory in MiB, or as 1.5G (default: 1G)")
    add("--cpus", type=cpus, default=1, metavar="N", help="the number of CPUs (default: 1)")
    add("--input", action="append", default=[], metavar="PATH", help="a file, a directory or a URL; repeatable")
    text = "a file, a directory or a pattern to transfer back; repeatable, '' for none (default: all that is new)"
    add("--output", action="append", metavar="NAME", help=text)
    add("--env", action="append", default=[], metavar="NAME[=VALUE]", help="a variable, or this one's value here")
    add("--time-limit", type=seconds, default=0, metavar="TIME", help="how long the program may run, as 90, 30m, 2h")
    add("--boot-timeout", type=seconds, default=0, metavar="TIME", help="how long the guest may take until it begins")
    add("--retries", type=number, default=0, metavar="N", help="how often a program that fails is run again")
    add("--disk", type=disk_size, metavar="SIZE", help="the size of the guest's disk, such as 20G")
    add("--network", choices=("nat", "bridge", "user", "none"), default="none", help="the network (default: none)")
    add("--checkpoint", action="store_true", help="let the program go on elsewhere when the job has to leave a machine")
    add("--firmware", choices=("uefi", "uefi-secure"), default="", help="default: BIOS")
    add("--format", default="", help="the image's format, where name and content do not say it")
    add("--convert", action="store_true", help="convert the image to qcow2, an overlay with its backing files")
    add_type(command, "", "the VM type of the machines (default: kvm)")
    add("--as-root", action="store_true", help="run the program as the guest's root, and not as an ordinary user")
    add("--boot", choices=("cloud-init", "ready"), default="cloud-init", help="ready: the image has the agent")
    add("--user-data", default="", metavar="FILE", help="cloud-init's user data, which is done before the program")
    add("--queue", type=number, default=1, metavar="N", help="as so many jobs, each with a directory NAME.PROCESS here")
    add("--macros", action="store_true", help="let HTCondor replace $(Process) and its like in what is said here")
    add("--append", action="append", default=[], metavar="'COMMAND = VALUE'", help="a line more for the submit file")
    text = "the job's name (default: of a word that is an input, or of the program)"
    add("--name", default="", metavar="NAME", help=text)
    add("--submit-file", default="", metavar="FILE", help="the file that is written (default: NAME.sub, here)")
    add("--dir", default="", metavar="DIR", help="where an image is written that has to be unpacked (default: here)")
    add("--force", action="store_true", help="replace files, and submit also what no machine of the pool can run now")
    add("--dry-run", action="store_true", help="print the submit file, and write nothing")
    add("--verbose", action="store_true", help="with --dry-run: print cloud-init's user data, too")
    add("--submit", action="store_true", help="submit it, if a machine of the pool has its image and its memory")
    add_json(command, "print what came of it as one JSON object")
    command.set_defaults(run=run, module="run.job", shared=False)
    tell(
        command,
        examples=[
            (EXAMPLE, "write fit.sub"),
            ("vmgahp run --image debian.qcow2 --output results/ --submit -- make all", "run it; results come back"),
        ],
        keys={
            "submit_file": "the file that was written; empty where none was",
            "log": "HTCondor's log of the job",
            "job": "the id of the job that was submitted, or of the cluster of several",
            "text": "with --dry-run: the submit file",
            "notes": "what is good to know",
            "problem": "why it was not done, a sentence",
            "hint": "what to do about it",
        },
    )


def seconds(text: str) -> int:
    """Parse a time in seconds."""
    units = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
    found = re.fullmatch(r"([1-9][0-9]{0,8})([smhd]?)", text, re.ASCII)
    if not found:
        raise UsageError(f"{text!a} is no time: write seconds, or such as 90s, 30m, 2h, 7d")
    return int(found[1]) * units[found[2]]


def disk_size(text: str) -> str:
    """Parse the size of a disk, with a unit."""
    if not re.fullmatch(r"(?=[0-9.]*[1-9])[0-9]{1,9}(\.[0-9]{1,9})? ?[MGT]i?B?", text, re.ASCII | re.IGNORECASE):
        raise UsageError(f"{text!a} is not a valid disk size. Give one with a unit (20G)")
    return text if re.fullmatch(r"[1-9][0-9]*[MGT]", text) else f"{memory(text)}M"


def run(options: argparse.Namespace) -> int:
    """Write the submit file, or print it, and submit; return the exit status."""
    if not options.words or not options.image:
        missing = "a program after -- (WORD)" if options.image else "--image and a program after --"
        raise UsageError(f"name {missing}, such as: {EXAMPLE}")
    from vmgahp.commands.run import job

    return job.run(options)
