"""Command ``vmgahp record``: runs a server and records its conversation with its client.

It can be VM_GAHP_SERVER itself, so it takes the place of the server: bytes are passed on at once and unchanged, as are
the environment, the signals, the ends of the pipes and the exit status. The transcript never disturbs that.
"""

import argparse
import os
import resource
import select
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, Thread
from typing import IO

from vmgahp import errors
from vmgahp.commands.arguments import tell
from vmgahp.protocol import transcript
from vmgahp.protocol.transcript import TranscriptFile, create_file
from vmgahp.text import escape

READ_SIZE = 1 << 16
MOST_LEFT = 64
"""The maximum number of reads of the rest of a pipe after the server's exit; another process may keep writing to it."""
LAST_INPUT = 1.0
"""Seconds that the end waits for the client's last lines to be recorded."""

PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

CANNOT_EXECUTE, NOT_FOUND = 126, 127
"""The exit statuses for a command that cannot be started, as of a shell."""

Note = Callable[[str, bytes | int], None]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vmgahp record``."""
    command.description = (
        "Run COMMAND and pass everything between it and whoever started this: input, output, signals, "
        "exit status. The conversation is written into a new file, with the time, and without the secrets of the "
        "job ad."
    )
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
    while os.open(os.devnull, os.O_RDWR) <= 2:
        pass  # a closed standard descriptor must not be reused for the transcript
    file: TranscriptFile | None = None
    try:
        descriptor, _ = create_file(output)
        file = TranscriptFile(descriptor, _say)
    except errors.MachineFault as fault:
        _say(fault.sentence)
    writer = transcript.Writer(file.write if file else lambda _: None)
    writer.comment(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()) + f" pid {os.getpid()}: {' '.join(command)}")
    for name, value in sorted(os.environ.items()):
        if name.startswith("VMGAHP_"):
            writer.comment(f"{name}={value}")
    try:
        status = _relay(command, writer, stderr=stderr)
        writer.exit(status)
    except OSError as error:
        _say(f"{command[0]} cannot be started: {error.strerror}")
        writer.comment(f"it cannot be started: {error.strerror}")
        return NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_EXECUTE
    finally:
        if file:
            file.close()
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
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe if stderr else None, bufsize=0, close_fds=False
    )
    handled = [number for number in PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]
    for number in handled:
        signal.signal(number, lambda number, _: process.send_signal(number))
    exited = os.pidfd_open(process.pid)
    lock = Lock()

    def note(mark: str, line: bytes | int) -> None:
        with lock:
            writer.line(mark, line)

    ways = [(transcript.CLIENT, 0, _own(process.stdin)), (transcript.SERVER, _own(process.stdout), 1)]
    if stderr:
        ways.append((transcript.STDERR, _own(process.stderr), 2))
    threads = [Thread(target=_pass, args=(*way, exited, note), daemon=True) for way in ways]
    for thread in threads:
        thread.start()
    status = process.wait()
    for number in handled:
        signal.signal(number, signal.SIG_DFL)  # a client that no longer reads blocks the rest, and may end this process
    threads[0].join(LAST_INPUT)
    for thread in threads[1:]:
        thread.join()
    return status


def _pass(mark: str, source: int, target: int, exited: int, note: Note) -> None:
    """Pass bytes on and record their lines, until the source ends, the target is closed, or the server exits."""
    lines = transcript.Splitter(escapes=mark != transcript.STDERR)
    poller = select.poll()
    for descriptor, wanted in ((source, select.POLLIN), (target, 0), (exited, select.POLLIN)):
        poller.register(descriptor, wanted)
    left = MOST_LEFT
    with suppress(OSError):  # the reader is gone, or a terminal was closed
        while left:
            events = dict(poller.poll())
            if target in events or source not in events or (exited in events and mark == transcript.CLIENT):
                break
            left -= exited in events
            data = os.read(source, READ_SIZE)
            if not data:
                break
            for line in lines.receive(data):
                note(mark, line)
            while data:
                data = data[os.write(target, data) :]
    note(mark, lines.rest())
    for descriptor in (source, target):
        _close(descriptor)


def _close(descriptor: int) -> None:
    """Close a descriptor so that its other end notices; one of the first three stays occupied."""
    if descriptor > 2:
        os.close(descriptor)
    else:
        with open(os.devnull, "r+b", buffering=0) as nothing:
            os.dup2(nothing.fileno(), descriptor)


def _own(stream: IO[bytes] | None) -> int:
    """Return a duplicate of the descriptor of a pipe of `subprocess`."""
    assert stream is not None
    descriptor = os.dup(stream.fileno())
    stream.close()
    return descriptor
