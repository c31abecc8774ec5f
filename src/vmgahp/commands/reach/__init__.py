"""``vmgahp ssh``, ``view`` and ``attach``: into the guest of a job, from where it was submitted."""

import argparse
import sys
from collections.abc import Callable


def add_ssh(command: argparse.ArgumentParser) -> None:
    """The arguments of ``vmgahp ssh``."""
    command.description = (
        "Run ssh to the guest of a job that has +VMPARAM_vm_SSH, by the port that its machine has opened for it. Where "
        "only who is on that machine reaches the port, condor_ssh_to_job leads there."
    )
    _add_job(command)
    command.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND", help="what to run there; none: a shell")
    command.add_argument("-l", "--login", default="", metavar="USER", help="the user of the guest (default: ssh's)")
    command.add_argument("-p", "--port", type=int, default=22, help="the guest's port (default: 22)")
    command.add_argument(
        "--by-node", action="store_true", help="go by condor_ssh_to_job, also where the port can be reached from here"
    )
    command.set_defaults(run=lambda options: _run("ssh", lambda: _ssh(options)))


def add_view(command: argparse.ArgumentParser) -> None:
    """The arguments of ``vmgahp view``."""
    command.description = (
        "Show the display of a job with vm_vnc = true: condor_ssh_to_job leads to it, and remote-viewer or vncviewer "
        "shows it. The password is the one of vm_vnc.json."
    )
    _add_job(command)
    command.set_defaults(run=lambda options: _run("view", lambda: _view(options)))


def add_attach(command: argparse.ArgumentParser) -> None:
    """The arguments of ``vmgahp attach``."""
    command.description = (
        "Show what the guest of a job has written to its serial console, and what it goes on writing, by "
        "condor_ssh_to_job. Nothing that is typed gets to the guest."
    )
    _add_job(command)
    command.set_defaults(run=lambda options: _run("attach", lambda: _attach(options)))


def _add_job(command: argparse.ArgumentParser) -> None:
    command.add_argument("job", metavar="JOB", help="the job's id, such as 12.0")


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
