"""``vmgahp console``: a conversation with a daemon, by hand.

`commands` is the table of what can be typed, `session` what it becomes, `conversation` the wire, `show` what answers
mean, `ad` and `launch` the world outside, `terminal` and `prompt` the loops. docs/how-to/console.md is for users.
"""

import errno
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

    from vmgahp.commands.console.launch import Place
    from vmgahp.commands.console.terminal import Console, Screen
    from vmgahp.protocol.client import Client

LOST, REFUSED, STRICT = 1, 2, 1
"""Exit statuses: the server could not be started or did not last; a wrong command line; an error with --strict."""

HINT = (
    "For completion and history install the Python package prompt_toolkit (pip install 'vmgahp[front-ends]')."
)


def add_arguments(command: "argparse.ArgumentParser") -> None:
    """The arguments of ``vmgahp console``."""
    command.description = (
        "Start the daemon, or any other server of the protocol, as condor_starter would, and talk to it: "
        "start a VM from a job ad, suspend it, ask for its status. help lists the commands. Lines can also come from "
        "a pipe. The exit status is 1 where the server did not last, or with --strict where anything failed."
    )
    command.add_argument(
        "--type", "--vmtype", default="kvm", metavar="VM_TYPE", help="the server's (default: kvm)"
    )
    command.add_argument(
        "--dir",
        "--working-dir",
        default="",
        help="the scratch directory (default: a new one, removed at the end)",
    )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting for the server, such as VM_ALLOW_EMULATION=True; may be given several times",
    )
    command.add_argument(
        "--record", default="", metavar="FILE", help="write the conversation into a new file"
    )
    command.add_argument(
        "--strict", action="store_true", help="exit with 1 if anything failed, or was refused by the server"
    )
    command.add_argument(
        "--plain", action="store_true", help="lines only: no editing, completion and history"
    )
    command.add_argument(
        "server",
        nargs="*",
        metavar="COMMAND",
        help="after --: another server, such as /usr/sbin/condor_vm-gahp -f -t -M 3",
    )
    command.set_defaults(run=run)


def run(options: "argparse.Namespace") -> int:
    """The command; returns the exit status."""
    from vmgahp import errors
    from vmgahp.commands.console import launch, terminal
    from vmgahp.commands.console.render import BAD, NOTE, Line

    screen = terminal.Screen(sys.stdout, os.environ)
    try:
        settings = [launch.checked_setting(text) for text in options.set]
    except errors.ClientFault as fault:
        screen.show(Line(BAD, f"{fault.sentence}."))
        return REFUSED
    try:
        place = launch.Place(options.type, options.dir)
    except OSError as error:
        screen.show(Line(BAD, f"There is no working directory: {error}"))
        return LOST
    try:
        recording = _Recording(options.record) if options.record else None
    except errors.MachineFault as fault:
        place.close()
        screen.show(Line(BAD, fault.sentence))
        return LOST
    try:
        return _converse(options, place, place.environment(os.environ, settings), screen, recording)
    finally:
        left = place.close()
        if recording is not None:
            recording.close()
            screen.show(Line(NOTE, f"The conversation is in {recording.path}."))
        if left:
            screen.show(Line(BAD, f"{left} could not be removed."))


class _Recording:
    """The conversation in a new file, in the format of ``vmgahp record``. Raises `errors.MachineFault`."""

    def __init__(self, target: str) -> None:
        from vmgahp.protocol import transcript, transcript_file

        descriptor, self.path = transcript_file.create(target)
        self._file = transcript_file.TranscriptFile(descriptor)
        self.writer = transcript.Writer(self._file.write)

    def close(self) -> None:
        self._file.close()


def _converse(
    options: "argparse.Namespace",
    place: "Place",
    environ: dict[str, str],
    screen: "Screen",
    recording: _Recording | None,
) -> int:
    import signal
    from time import monotonic

    from vmgahp.commands.console import launch, terminal
    from vmgahp.commands.console.render import BAD, NOTE, Line
    from vmgahp.commands.console.repl import Session
    from vmgahp.protocol import client as clients

    person = sys.stdin.isatty()
    edits = not options.plain and terminal.can_edit(os.environ)
    if edits and not _has_toolkit():
        screen.show(Line(NOTE, HINT))
        edits = False
    session = Session(place, monotonic(), serves=place.vm_type, asks=person, patient=not person)
    command = launch.resolved(options.server) if options.server else launch.own_command()
    console: terminal.Console | None = None

    if recording is not None:
        recording.writer.comment(f"vmgahp console: {' '.join(command)}")

    def heard(mark: str, line: str) -> None:
        if recording is not None and mark != "!":
            recording.writer.text(mark, line)
        if console is not None:
            console.heard(mark, line)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupted)
    try:
        client = clients.Client(command, environ, place.path, heard=heard)
    except OSError as error:
        screen.show(Line(BAD, f"{command[0]} cannot be started: {error.strerror or error}"))
        return LOST
    with client:
        console = terminal.Console(session, client, screen)
        if person:
            what = (
                "a new working directory, removed at the end" if place.is_fresh else "the working directory"
            )
            screen.show(Line(NOTE, f"{place.path} is {what}. help lists what can be typed."))
        try:
            if edits:
                _edit(console)
            else:
                terminal.plain(console, sys.stdin.fileno(), person)
            good = console.finish()
        except KeyboardInterrupt:
            _end(client)
            raise
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            # Whoever read our output is gone, or the terminal; Python would say so once more at its exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            _end(client)
            return LOST
        finally:
            status = client.process.poll()
            if recording is not None and status is not None:
                recording.writer.exit(status)
    if not good:
        return LOST
    return STRICT if options.strict and session.conversation.failures else 0


def _end(client: "Client") -> None:
    """Let the server destroy its VMs and end."""
    from vmgahp.commands.console.terminal import END_DEADLINE
    from vmgahp.protocol.client import ProtocolError

    try:
        client.finish(END_DEADLINE)
    except ProtocolError:
        pass  # it has been killed, and its guardians destroy its VMs


def _interrupted(_number: int, _frame: object) -> None:
    """A signal that ends us: the way of Control-C, which leaves neither VMs nor a directory behind."""
    raise KeyboardInterrupt


def _has_toolkit() -> bool:
    from importlib.util import find_spec

    return find_spec("prompt_toolkit") is not None


def _edit(console: "Console") -> None:
    from vmgahp.commands.console import history, prompt

    kept = history.History(history.path(os.environ))
    try:
        prompt.run(console, kept, colour=not os.environ.get("NO_COLOR"))
    finally:
        kept.close()
