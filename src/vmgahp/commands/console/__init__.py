"""``vmgahp console``: a conversation with a daemon, by hand or by a script."""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from vmgahp.commands.arguments import add_type, assignment, tell
from vmgahp.commands.console.conversation import Conversation
from vmgahp.host.job_user import Identity
from vmgahp.job.engine import NOBODY
from vmgahp.protocol.client import ProtocolError


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Start the daemon, or any other server of the protocol, as condor_starter would, and send it requests: start a VM
    from a job ad, suspend it, ask for its status. help lists the commands. Lines can also come from a pipe."""
    add_type(command)
    add = command.add_argument
    add("--dir", default="", metavar="DIR", help="the scratch directory (default: a new one, removed at the end)")
    text = "a setting for the server, such as VM_ALLOW_EMULATION=True; may be given several times"
    add("--set", action="append", type=assignment, default=[], metavar="NAME=VALUE", help=text)
    text = "after --: another server, such as /usr/sbin/condor_vm-gahp -f -t -M 3"
    add("server", nargs="*", metavar="COMMAND", help=text)
    command.set_defaults(run=run)
    recorded = "vmgahp console -- vmgahp record -o /root/talk.txt -- condor_vm-gahp -f -t -M 3"
    tell(
        command,
        examples=[
            ("vmgahp console", "the server of this package, in a scratch directory of its own"),
            ("vmgahp console -- /usr/sbin/condor_vm-gahp -f -t -M 3", "HTCondor's server"),
            (recorded, "write the conversation down"),
        ],
        statuses={
            0: "Nothing failed.",
            1: "The last failure, whatever succeeded after it, was a request; or the server did not last.",
            2: "Wrong arguments, or the last failure was a line that is no command.",
        },
    )


def run(options: argparse.Namespace) -> int:
    """Converse with a server and return the exit status."""
    # Late: completions and man pages are made without prompt_toolkit.
    from vmgahp.commands.console.terminal import Terminal

    command = options.server or [sys.executable, "-I", "-m", "vmgahp", "-f", "-t", "-M", "3"]
    if "/" in command[0]:  # relative to here, and not to the working directory, which belongs to the job's user
        command[0] = os.path.abspath(command[0])
    terminal = Terminal()
    with _working_directory(options.dir) as working_dir:
        environ = _environment(options.type, working_dir, dict(options.set))
        talk = Conversation(command, environ, person=terminal.is_person, show=terminal.show)
        with talk.client:
            lost = ""
            try:
                terminal.run(talk)
            except ProtocolError as error:
                lost = str(error)
            finally:
                is_good = talk.finish(lost)
    return talk.status if is_good else 1  # the server could not be started, or ended unexpectedly


# The server's environment


@contextmanager
def _working_directory(path: str) -> Iterator[str]:
    """Use a directory, or make one that is removed at the end. Raises OSError."""
    if path:
        os.scandir(path).close()
        yield os.path.realpath(path)
        return
    with tempfile.TemporaryDirectory(prefix="vmgahp-console-", ignore_cleanup_errors=True) as outer:
        # QEMU runs as a user of its own and must be able to reach the disks.
        os.chmod(outer, 0o755)  # noqa: S103 - only to pass through
        scratch = os.path.join(outer, "scratch")
        os.mkdir(scratch, 0o755)
        if os.geteuid() == 0:
            os.chown(scratch, *job_user(scratch))
        yield scratch


def job_user(directory: str) -> tuple[int, int]:
    """Find the job's user for a server of root's: the directory's owner, the user of sudo, or nobody."""
    if owner := Identity.of_owner(directory):
        return owner.uid, owner.gid or owner.uid
    uid, gid = os.environ.get("SUDO_UID", ""), os.environ.get("SUDO_GID", "")
    return (int(uid), int(gid)) if uid.isdigit() and gid.isdigit() and int(uid) and int(gid) else (NOBODY, NOBODY)


def _environment(vm_type: str, working_dir: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Make the environment that a starter would give to the server."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("VMGAHP_USER_")}
    found |= {"VMGAHP_VMTYPE": vm_type, "_CONDOR_VM_TYPE": vm_type, "VMGAHP_WORKING_DIR": working_dir}
    found |= {f"_CONDOR_{name}": value for name, value in settings.items()}
    if os.geteuid() == 0:
        uid, gid = job_user(working_dir)
        found |= {"VMGAHP_USER_UID": str(uid), "VMGAHP_USER_GID": str(gid)}
    return found
