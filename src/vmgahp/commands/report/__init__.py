"""Command ``vmgahp report``: one page about a VM's life, from its ``vm_metrics.jsonl``."""

import argparse
import sys

from vmgahp.commands.arguments import tell
from vmgahp.commands.files import write_anew
from vmgahp.commands.report.story import Unreadable, log_lines, read
from vmgahp.text import escape


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vmgahp report``."""
    command.description = (
        "Make one HTML page, or one SVG picture, of the vm_metrics.jsonl that comes back with a job: "
        "the VM's states over time, its CPU, memory, disks and network, its checkpoints, and what happened when. "
        "The page needs nothing but itself."
    )
    command.add_argument(
        "place",
        nargs="?",
        default=".",
        metavar="DIR",
        help="the directory with vm_metrics.jsonl, or that file (default: here)",
    )
    command.add_argument(
        "--log",
        action="append",
        default=[],
        metavar="FILE",
        help="the daemon's log, VM_GAHP_LOG, whose lines about the VM are put beside the events; may be given "
        "again, for the one before it",
    )
    command.add_argument("--svg", action="store_true", help="make only the picture, as SVG")
    command.add_argument(
        "-o",
        "--output",
        default="",
        metavar="FILE",
        help="where to (default: report.html or report.svg here; - for standard output)",
    )
    command.set_defaults(run=lambda options: run(options.place, options.log, options.output, svg=options.svg))
    tell(
        command,
        examples=[
            ("vmgahp report", "report.html, of the vm_metrics.jsonl that is here"),
            ("vmgahp report job-12 --svg -o - >life.svg", "the picture alone"),
        ],
        statuses={
            1: "There is no such file, or it cannot be read or written.",
            2: "It has no line of a VM's metrics in it.",
        },
    )


def run(place: str, logs: list[str], output: str, *, svg: bool) -> int:
    """Make the report and return the exit status."""
    try:
        story = read(place)
        lines = [line for log in logs for line in log_lines(log, story)]
    except Unreadable as error:
        sys.stderr.write(f"vmgahp report: {escape(str(error))}\n")
        return error.status
    from vmgahp.commands.report import page  # late: completions and man pages are made without lxml

    made = page.render_picture(story) if svg else page.render(story, lines)
    if output == "-":
        sys.stdout.buffer.write(made)
        return 0
    output = output or ("report.svg" if svg else "report.html")
    try:
        write_anew(output, made)
    except OSError as error:
        sys.stderr.write(f"vmgahp report: {escape(output)} cannot be written: {error.strerror}\n")
        return 1
    sys.stdout.write(output + "\n")
    return 0
