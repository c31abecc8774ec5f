"""Command ``vmgahp record``: runs a server and records its conversation with its client.

It can be VM_GAHP_SERVER itself, so it takes the place of the server: bytes are passed on at once and unchanged, as are
the environment, the signals, the ends of the pipes and the exit status. The transcript never disturbs that.
"""

import argparse
import os
import resource
import select
import signal
import time
from contextlib import suppress
from subprocess import PIPE, Popen
from threading import Thread
from typing import IO

from vmgahp import errors
from vmgahp.commands.arguments import tell
from vmgahp.protocol import transcript, wire
from vmgahp.text import escape

MOST_LEFT = 64
"""The maximum number of reads of the rest of a pipe after the server's exit; another process may keep writing to it."""
LAST_INPUT = 1.0
"""Seconds that the end waits for the client's last lines to be recorded."""

PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

CANNOT_EXECUTE, NOT_FOUND = 126, 127
"""The exit statuses for a command that cannot be started, as of a shell."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Run COMMAND and pass everything between it and whoever started this: input, output, signals, exit status. The
    conversation is written into a new file, with the time, and without the secrets of the job ad."""
    text = "a new file, or a directory, where each conversation gets a file of its own (default: here)"
    command.add_argument("-o", "--output", default=".", metavar="FILE|DIR", help=text)
    command.add_argument("--stderr", action="store_true", help="write down what goes to standard error too")
    command.add_argument("words", nargs="+", metavar="COMMAND", help="the server and its arguments, after --")
    command.set_defaults(run=lambda options: run(options.words, options.output, stderr=options.stderr))
    tell(
        command,
        examples=[
            ("vmgahp record -o talk.txt -- condor_vm-gahp -f -t -M 3", "what is typed, and what it answers"),
            ('exec vmgahp record -o /var/log/vmgahp -- /usr/sbin/condor_vm-gahp "$@"', "for VM_GAHP_SERVER"),
        ],
        statuses={
            0: "The command's own: it is handed on, whatever it is.",
            CANNOT_EXECUTE: "The command cannot be executed.",
            NOT_FOUND: "There is no such command.",
        },
    )


def run(command: list[str], output: str, *, stderr: bool = False) -> int:
    """Run `command` and record it; return its exit status, or end by the signal that ended it."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # a closed standard descriptor must not be reused for the transcript
    try:
        descriptor = transcript.create_file(output)
    except errors.MachineFault as fault:
        _say(fault.sentence)
    writer = transcript.Writer(descriptor, _say)
    writer.comment(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()) + f" pid {os.getpid()}: {' '.join(command)}")
    for name, value in sorted(os.environ.items()):
        if name.startswith("VMGAHP_"):
            writer.comment(f"{name}={value}")
    try:
        status = _relay(command, writer, stderr=stderr)
    except OSError as error:
        _say(f"{command[0]} cannot be started: {error.strerror}")
        writer.comment(f"it cannot be started: {error.strerror}")
        return NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_EXECUTE
    writer.exit(status)
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command may have dumped core, and this process does not
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status if status >= 0 else 128 - status


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"vmgahp record: {escape(text)}\n".encode("utf-8", "backslashreplace"))


def _relay(command: list[str], writer: transcript.Writer, *, stderr: bool) -> int:
    """Relay between the client at standard input and output and a server, until that has exited and all is passed on.

    Returns the server's exit status as `subprocess` has it. Raises OSError if the server cannot be started.
    """
    process = Popen(command, bufsize=0, stdin=PIPE, stdout=PIPE, stderr=PIPE if stderr else None, close_fds=False)
    handled = [number for number in PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]
    for number in handled:
        signal.signal(number, lambda number, _: process.send_signal(number))
    exited = os.pidfd_open(process.pid)
    ways = [(transcript.CLIENT, _moved(0), process.stdin), (transcript.SERVER, process.stdout, _moved(1))]
    if stderr:
        ways.append((transcript.STDERR, process.stderr, open(2, "wb", 0, closefd=False)))  # noqa: SIM115
    threads = [Thread(target=_pass, args=(*way, exited, writer), daemon=True) for way in ways]
    for thread in threads:
        thread.start()
    status = process.wait()
    for number in handled:
        signal.signal(number, signal.SIG_DFL)  # a client that no longer reads blocks the rest, and may end this process
    threads[0].join(LAST_INPUT)
    for thread in threads[1:]:
        thread.join()
    return status


def _moved(descriptor: int) -> IO[bytes]:
    """Move a standard descriptor to another number, so that closing it is noticed; /dev/null takes its place."""
    with open(os.devnull, "r+b", buffering=0) as nothing:
        stream = open(os.dup(descriptor), "rb" if descriptor == 0 else "wb", 0)  # noqa: SIM115 - `_pass` closes it
        os.dup2(nothing.fileno(), descriptor)
    return stream


def _pass(mark: str, source: IO[bytes], target: IO[bytes], exited: int, writer: transcript.Writer) -> None:
    """Pass bytes on and record their lines, until the source ends, the target is closed, or the server exits."""
    lines = wire.LineReader()
    poller = select.poll()
    for descriptor, wanted in ((source, select.POLLIN), (target, 0), (exited, select.POLLIN)):
        poller.register(descriptor, wanted)
    left = MOST_LEFT
    with source, target, suppress(OSError):  # the reader is gone, or a terminal was closed
        while left:
            events = dict(poller.poll())
            gone = exited in events
            if target.fileno() in events or source.fileno() not in events or (gone and mark == transcript.CLIENT):
                break
            left -= gone
            if not (data := os.read(source.fileno(), 1 << 16)):
                break
            lines.receive(data)
            while (line := lines.next_raw()) is not None:
                writer.line(mark, line)
            while data:
                data = data[os.write(target.fileno(), data) :]
    writer.line(mark, lines.rest())
