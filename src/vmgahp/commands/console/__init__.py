"""``vmgahp console``: a conversation with a daemon, by hand.

`commands` is the table of what can be typed, `repl` makes lines for the server of it, `conversation` follows the
protocol, `render` says what answers mean, `job_ad` and `launch` are the world outside, `prompt` is the loop on a
terminal. docs/how-to/console.md is for users.
"""

import argparse
import errno
import os
import sys

from vmgahp.commands.arguments import UsageError, add_type, tell
from vmgahp.commands.console.launch import Place
from vmgahp.commands.console.render import Screen
from vmgahp.commands.console.repl import Console
from vmgahp.protocol.transcript import Writer

LOST = 1
"""The exit status where the server could not be started or did not last."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of ``vmgahp console``."""
    command.description = (
        "Start the daemon, or any other server of the protocol, as condor_starter would, and send it requests: "
        "start a VM from a job ad, suspend it, ask for its status. help lists the commands. Lines can also come from "
        "a pipe."
    )
    add_type(command)
    command.add_argument(
        "--dir", default="", metavar="DIR", help="the scratch directory (default: a new one, removed at the end)"
    )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting for the server, such as VM_ALLOW_EMULATION=True; may be given several times",
    )
    command.add_argument("--record", default="", metavar="FILE", help="write the conversation into a new file")
    command.add_argument("--plain", action="store_true", help="lines only: no editing, completion and history")
    command.add_argument(
        "server",
        nargs="*",
        metavar="COMMAND",
        help="after --: another server, such as /usr/sbin/condor_vm-gahp -f -t -M 3",
    )
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
    """The command; returns the exit status."""
    from vmgahp import errors
    from vmgahp.commands.console import launch
    from vmgahp.commands.console.render import BAD, NOTE, Screen, Shown
    from vmgahp.protocol import transcript, transcript_file
    from vmgahp.text import escape

    screen = Screen(sys.stdout, dict(os.environ))

    def refuse(why: str) -> int:
        sys.stderr.write(f"vmgahp console: {escape(why)}\n")
        return LOST

    try:
        settings = [launch.checked_setting(text) for text in options.set]
        place = launch.Place(options.type, options.dir)
    except errors.ClientFault as fault:
        raise UsageError(f"{fault.sentence}.") from fault
    except OSError as error:
        return refuse(f"There is no working directory: {error}.")
    file: transcript_file.TranscriptFile | None = None
    try:
        if options.record:
            descriptor, path = transcript_file.create(options.record)
            file = transcript_file.TranscriptFile(descriptor)
        writer = transcript.Writer(file.write if file else lambda _: None)
        return _converse(options, place, place.environment(os.environ, settings), screen, writer)
    except errors.MachineFault as fault:
        return refuse(fault.sentence)
    finally:
        left = place.close()
        if file is not None:
            file.close()
            screen.show(Shown(NOTE, f"The conversation is in {path}."))
        if left:
            screen.show(Shown(BAD, f"{left} could not be removed."))


def _converse(
    options: argparse.Namespace, place: Place, environ: dict[str, str], screen: Screen, writer: Writer
) -> int:
    import signal
    from time import monotonic

    from vmgahp.commands.console import launch, repl
    from vmgahp.commands.console.render import BAD, NOTE, Shown
    from vmgahp.protocol.client import Client, ProtocolError

    person = sys.stdin.isatty()
    interpreter = repl.Interpreter(place, monotonic(), asks=person, patient=not person)
    command = launch.resolved(options.server) if options.server else launch.own_command()
    writer.comment(f"vmgahp console: {' '.join(command)}")

    def heard(mark: str, line: str) -> None:
        if mark == "!":
            interpreter.conversation.logged(line)
        else:
            writer.text(mark, line)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupted)
    try:
        client = Client(command, environ, place.path, heard=heard)
    except OSError as error:
        screen.show(Shown(BAD, f"{command[0]} cannot be started: {error.strerror or error}"))
        return LOST

    def end() -> None:
        """Let the server destroy its VMs and end."""
        try:
            client.finish(repl.END_DEADLINE)
        except ProtocolError:
            pass  # it has been killed, and its guardians destroy its VMs

    with client:
        console = repl.Console(interpreter, client, screen)
        try:
            if person:
                fresh = "a new working directory, removed at the end"
                what = fresh if place.is_fresh else "the working directory"
                screen.show(Shown(NOTE, f"{place.path} is {what}. help lists what can be typed."))
                _edit(console, plain=options.plain)
            else:
                repl.pipe(console, sys.stdin.fileno())
            good = console.finish()
        except KeyboardInterrupt:
            end()
            raise
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            # Whoever read our output is gone, or the terminal; Python would say so once more at its exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            end()
            return LOST
        finally:
            status = client.process.poll()
            if status is not None:
                writer.exit(status)
    if not good:
        return LOST
    return interpreter.conversation.status


def _interrupted(_number: int, _frame: object) -> None:
    """A signal that ends us: the way of Control-C, which leaves neither VMs nor a directory behind."""
    raise KeyboardInterrupt


def _edit(console: Console, *, plain: bool) -> None:
    """The loop on a terminal; where no line can be edited, prompt_toolkit's for a dumb one."""
    environ = dict(os.environ)
    if plain or not sys.stdout.isatty() or environ.get("TERM", "") in ("", "unknown"):
        os.environ["TERM"] = "dumb"
    from vmgahp.commands.console import prompt

    prompt.run(console, environ)
