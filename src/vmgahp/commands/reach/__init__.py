"""``vmgahp ssh``, ``view`` and ``attach``: access to the guest of a job from the submit machine."""

import argparse
import sys
from collections.abc import Callable

from vmgahp.commands.arguments import tell

_OF_OTHERS = {0: "The program that was run says so.", 1: "There is no way to the guest; or that program's own."}


def add_ssh(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vmgahp ssh``."""
    command.description = (
        "Run ssh to the guest of a job that has +VMPARAM_vm_SSH, by the port that its machine has opened for it. Where "
        "only who is on that machine reaches the port, condor_ssh_to_job leads there."
    )
    tell(
        command,
        examples=[
            ("vmgahp ssh 12.0", "a shell in the guest of that job"),
            ("vmgahp ssh -l root 12.0 uptime", "one command there, as root"),
        ],
        statuses=_OF_OTHERS,
    )
    _add_job(command)
    words = command.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="COMMAND", help="what to run there; none: a shell"
    )
    words.required = False  # otherwise argparse reports it as missing if JOB is
    command.add_argument("-l", "--login", default="", metavar="USER", help="the user of the guest (default: ssh's)")
    command.add_argument("-p", "--port", type=port, default=22, metavar="PORT", help="the guest's port (default: 22)")
    command.add_argument(
        "--by-node", action="store_true", help="go by condor_ssh_to_job, also where the port can be reached from here"
    )
    command.set_defaults(run=lambda options: _run("ssh", lambda: _ssh(options)))


def add_view(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vmgahp view``."""
    command.description = (
        "Show the display of a job with vm_vnc = true: condor_ssh_to_job leads to it, and remote-viewer or vncviewer "
        "shows it. The password is the one of vm_vnc.json."
    )
    _add_job(command)
    tell(command, examples=[("vmgahp view 12.0", "the display of that job")], statuses=_OF_OTHERS)
    command.set_defaults(run=lambda options: _run("view", lambda: _view(options)))


def add_attach(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vmgahp attach``."""
    command.description = (
        "Show what the guest of a job has written to its serial console, and what it goes on writing, by "
        "condor_ssh_to_job. Nothing that is typed gets to the guest."
    )
    _add_job(command)
    tell(command, examples=[("vmgahp attach 12.0", "its console, until Control-C")], statuses=_OF_OTHERS)
    command.set_defaults(run=lambda options: _run("attach", lambda: _attach(options)))


def _add_job(command: argparse.ArgumentParser) -> None:
    command.add_argument("job", type=job, metavar="JOB", help="the job's id, such as 12.0")


def job(text: str) -> str:
    """Parse the id of a job."""
    from vmgahp.commands.queue import job_id
    from vmgahp.errors import ClientFault

    try:
        return job_id(text)
    except ClientFault as fault:
        raise argparse.ArgumentTypeError(f"{text!a} is no job id: write it as 12.0") from fault


def port(text: str) -> int:
    """Parse the number of a port."""
    if not text.isascii() or not text.isdigit() or not 0 < int(text[:6]) < 65536:
        raise argparse.ArgumentTypeError(f"{text!a} is no port: write a number from 1 to 65535")
    return int(text)


def _ssh(options: argparse.Namespace) -> int:
    from vmgahp.commands.reach import ways

    way = ways.of_job(options.job, options.port)
    return ways.become(ways.ssh(way, options.job, options.login, options.words, by_node=options.by_node))


def _view(options: argparse.Namespace) -> int:
    from vmgahp.commands.reach import display

    return display.show(options.job)


def _attach(options: argparse.Namespace) -> int:
    from vmgahp.commands.reach import ways

    return ways.become(ways.on_node(options.job, "tail", "-n", "+1", "-F", "vm_console.log"))


def _run(command: str, do: Callable[[], int]) -> int:
    from vmgahp.errors import Fault
    from vmgahp.text import escape

    try:
        return do()
    except Fault as fault:
        sys.stderr.write(f"vmgahp {command}: {escape(fault.problem)}\nHint: {escape(fault.hint)}\n")
        return 1
