"""``vmgahp console``: a conversation with a daemon, by hand or by a script.

`conversation` has the commands, prepares job ads and follows the protocol, and `terminal` reads and shows; this module
has the command's arguments and the server's environment. docs/how-to/console.md is for users.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from vmgahp.commands.arguments import NotDone, UsageError, add_type, tell
from vmgahp.commands.console.conversation import Conversation
from vmgahp.protocol.client import ProtocolError
from vmgahp.protocol.transcript import Writer, create_file

LOST = 1
"""The exit status if the server could not be started or ended unexpectedly."""

NOBODY = 65534


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vmgahp console``."""
    command.description = (
        "Start the daemon, or any other server of the protocol, as condor_starter would, and send it requests: "
        "start a VM from a job ad, suspend it, ask for its status. help lists the commands. Lines can also come from "
        "a pipe."
    )
    add_type(command)
    add = command.add_argument
    add("--dir", default="", metavar="DIR", help="the scratch directory (default: a new one, removed at the end)")
    text = "a setting for the server, such as VM_ALLOW_EMULATION=True; may be given several times"
    add("--set", action="append", default=[], metavar="NAME=VALUE", help=text)
    add("--record", default="", metavar="FILE", help="write the conversation into a new file")
    text = "after --: another server, such as /usr/sbin/condor_vm-gahp -f -t -M 3"
    add("server", nargs="*", metavar="COMMAND", help=text)
    command.set_defaults(run=run)
    tell(
        command,
        examples=[
            ("vmgahp console", "the server of this package, in a scratch directory of its own"),
            ("vmgahp console -- /usr/sbin/condor_vm-gahp -f -t -M 3", "HTCondor's server"),
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

    settings = dict(map(_setting, options.set))
    command = _server(options.server)
    terminal = Terminal()
    with ExitStack() as opened:
        try:
            working_dir = opened.enter_context(_working_directory(options.dir))
            descriptor, path = create_file(options.record) if options.record else (os.open(os.devnull, os.O_WRONLY), "")
        except OSError as error:
            why = f"{error.filename} cannot be used as the scratch directory: {error.strerror}"
            hint = f"mkdir {error.filename}, or leave --dir out for a temporary one."
            raise NotDone(f"{why}. Hint: {hint}") from error
        if path:
            opened.callback(lambda: sys.stdout.write(f"The conversation is in {path}.\n"))
        writer = Writer(descriptor)
        writer.comment(f"vmgahp console: {' '.join(command)}")
        environ = _environment(options.type, working_dir, settings)
        try:
            talk = Conversation(command, environ, person=terminal.is_person, show=terminal.show, writer=writer)
        except OSError as error:
            raise NotDone(f"{command[0]} cannot be started: {error.strerror or error}") from error
        opened.enter_context(talk.client)
        lost = ""
        try:
            terminal.run(talk)
        except ProtocolError as error:
            lost = str(error)
        finally:
            is_good = talk.finish(lost)
    return talk.status if is_good else LOST


# The server's environment


def _server(command: Sequence[str]) -> list[str]:
    """Find the command of the server, by default the daemon of this package with its log on standard error.

    A relative path is resolved here, not in the working directory, which belongs to the job's user.
    """
    if not command:
        return [sys.executable, "-I", "-m", "vmgahp", "-f", "-t", "-M", "3"]
    return [os.path.abspath(command[0]) if "/" in command[0] else command[0], *command[1:]]


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not name.replace("_", "a").replace(".", "a").isalnum():
        raise UsageError(f"--set {text}: it is not a setting; write NAME=VALUE.")
    return f"_CONDOR_{name}", value


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
    owner = os.stat(directory)
    if owner.st_uid:
        return owner.st_uid, owner.st_gid or owner.st_uid
    uid, gid = os.environ.get("SUDO_UID", ""), os.environ.get("SUDO_GID", "")
    return (int(uid), int(gid)) if uid.isdigit() and gid.isdigit() and int(uid) and int(gid) else (NOBODY, NOBODY)


def _environment(vm_type: str, working_dir: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Make the environment that a starter would give to the server."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("VMGAHP_USER_")}
    found |= {"VMGAHP_VMTYPE": vm_type, "_CONDOR_VM_TYPE": vm_type, "VMGAHP_WORKING_DIR": working_dir, **settings}
    if os.geteuid() == 0:
        uid, gid = job_user(working_dir)
        found |= {"VMGAHP_USER_UID": str(uid), "VMGAHP_USER_GID": str(gid)}
    return found
