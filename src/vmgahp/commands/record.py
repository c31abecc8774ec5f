"""``vmgahp record``: runs a server and writes down its conversation with its client.

It can be VM_GAHP_SERVER itself, so it stands where the server would: bytes pass at once and unchanged, however
they are cut up, with the environment, the signals, the ends of the pipes and the exit status. Nothing that
happens to the transcript disturbs that.
"""

import argparse
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable
from typing import IO

from vmgahp import errors
from vmgahp.commands.arguments import tell
from vmgahp.protocol import transcript, transcript_file
from vmgahp.text import escape

READ_SIZE = 1 << 16
WRITE_SIZE = 4096
"""PIPE_BUF on Linux: when a pipe is reported writable, this much goes in without blocking."""

PASSED_ON = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2")

MOST_LEFT = 64
"""Reads that may be needed to take in what is left in a pipe."""

CANNOT_EXECUTE, NOT_FOUND = 126, 127
"""Exit statuses for a command that cannot be started, as of a shell."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of ``vmgahp record``."""
    command.description = (
        "Run COMMAND and pass everything between it and whoever started this: input, output, signals, "
        "exit status. The conversation is written into a new file, with the time, and without the secrets of the "
        "job ad."
    )
    command.add_argument(
        "-o",
        "--output",
        default=".",
        metavar="FILE|DIR",
        help="a new file, or a directory, where each conversation gets a file of its own (default: here)",
    )
    command.add_argument("--stderr", action="store_true", help="write down what goes to standard error too")
    command.add_argument("words", nargs="+", metavar="COMMAND", help="the server and its arguments, after --")
    command.set_defaults(run=lambda options: run(options.words, options.output, stderr=options.stderr))
    tell(
        command,
        examples=[
            ("vmgahp record -o talk.txt -- condor_vm-gahp -f -t -M 3", "what is typed, and what it answers"),
            (
                'exec vmgahp record -o /var/log/vmgahp -- /usr/sbin/condor_vm-gahp "$@"',
                "the end of a script that VM_GAHP_SERVER names: what HTCondor says",
            ),
        ],
        statuses={
            0: "The command's own: it is handed on, whatever it is.",
            CANNOT_EXECUTE: "The command cannot be executed.",
            NOT_FOUND: "There is no such command.",
        },
    )


def run(command: list[str], output: str, *, stderr: bool = False) -> int:
    """Run `command` and record it; the exit status. It ends by the signal that ended the command."""
    file: transcript_file.TranscriptFile | None = None
    try:
        descriptor, _ = transcript_file.create(output)
        file = transcript_file.TranscriptFile(descriptor, _say)
    except errors.MachineFault as fault:
        _say(fault.sentence)
    writer = transcript.Writer(file.write if file else lambda _: None)
    writer.comment(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()) + f" pid {os.getpid()}: {' '.join(command)}")
    for name, value in sorted(os.environ.items()):
        if name.startswith("VMGAHP_"):
            writer.comment(f"{name}={value}")
    signals = _Signals()
    try:
        try:
            status = _Relay(command, writer, signals, stderr=stderr).run()
        except OSError as error:
            _say(f"{command[0]} cannot be started: {error.strerror}")
            writer.comment(f"it cannot be started: {error.strerror}")
            return NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_EXECUTE
        writer.exit(status)
    finally:
        if file:
            file.close()
    if status < 0:
        _die_by(-status)
    return status if status >= 0 else 128 - status


def _say(text: str) -> None:
    try:
        os.write(2, f"vmgahp record: {escape(text)}\n".encode("utf-8", "backslashreplace"))
    except OSError:
        pass


def _die_by(number: int) -> None:
    """End as the command did, but without a core file of this process."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


class _Signals:
    """Signals as numbers in a pipe. One that was ignored when this began stays ignored, for the command too."""

    def __init__(self) -> None:
        self.descriptor, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (signal.Signals[name] for name in PASSED_ON):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda *_: None)

    def take(self) -> list[int]:
        try:
            return list(os.read(self.descriptor, READ_SIZE))
        except BlockingIOError:
            return []


class _Channel:
    """One way through: bytes from a descriptor to another, and a note of each line."""

    def __init__(self, mark: str, source: int, target: int, note: Callable[[str, bytes | int], None]) -> None:
        self.mark = mark
        self.source = source
        """-1 once it is at its end."""
        self.target = target
        """-1 once it is closed."""
        self._note = note
        self._waiting = bytearray()
        self._lines = transcript.Splitter(escapes=mark != transcript.STDERR)

    def wants(self) -> dict[int, int]:
        """What to poll for. Of a target that needs nothing, only that nobody reads it any more."""
        wanted = {}
        if self.target >= 0:
            wanted[self.target] = select.POLLOUT if self._waiting else 0
        if self.source >= 0 and not self._waiting:
            wanted[self.source] = select.POLLIN
        return wanted

    def turn(self, events: dict[int, int]) -> None:
        """Do what can be done without waiting."""
        happened = events.get(self.target, 0)
        if happened & (select.POLLERR | select.POLLHUP | select.POLLNVAL):
            self._nobody_reads()
        elif happened & select.POLLOUT:
            self._write()
        if self.source >= 0 and events.get(self.source, 0) and self.read():
            # Most targets have room: this saves a turn of the loop.
            poller = select.poll()
            poller.register(self.target, select.POLLOUT)
            if poller.poll(0):
                self._write()

    def read(self) -> bool:
        """Take in what is there; False where nothing is."""
        try:
            data = os.read(self.source, READ_SIZE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.end()
            return False
        self._waiting += data
        for line in self._lines.receive(data):
            self._note(self.mark, line)
        return True

    def _write(self) -> None:
        try:
            written = os.write(self.target, self._waiting[:WRITE_SIZE])
        except BlockingIOError:
            return
        except OSError:
            self._nobody_reads()
            return
        del self._waiting[:written]
        if not self._waiting and self.source < 0:
            self._close_target()

    def _nobody_reads(self) -> None:
        self._waiting.clear()
        self.end()

    def end(self) -> None:
        """Take nothing more; what waits is still written."""
        if self.source >= 0:
            _close(self.source)
            self.source = -1
            self._note(self.mark, self._lines.rest())
        if not self._waiting:
            self._close_target()

    def _close_target(self) -> None:
        if self.target >= 0:
            _close(self.target)
            self.target = -1


def _close(descriptor: int) -> None:
    """Close a descriptor for whoever has its other end; one of the first three stays taken."""
    if descriptor > 2:
        os.close(descriptor)
        return
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(nothing, descriptor)
    if nothing > 2:
        os.close(nothing)


def _detached(stream: IO[bytes] | None) -> int:
    """A descriptor of one's own for a pipe of `subprocess`, that never waits."""
    assert stream is not None
    descriptor = os.dup(stream.fileno())
    stream.close()
    os.set_blocking(descriptor, False)
    return descriptor


class _Relay:
    """Stands between the client at standard input and output, and a server. Raises OSError if it cannot start."""

    def __init__(self, command: list[str], writer: transcript.Writer, signals: _Signals, *, stderr: bool) -> None:
        self._signals = signals
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if stderr else None,
            bufsize=0,
            close_fds=False,
        )
        self._exited = os.pidfd_open(self._process.pid)
        self._channels = [
            _Channel(transcript.CLIENT, 0, _detached(self._process.stdin), writer.line),
            _Channel(transcript.SERVER, _detached(self._process.stdout), 1, writer.line),
        ]
        if stderr:
            self._channels.append(_Channel(transcript.STDERR, _detached(self._process.stderr), 2, writer.line))

    def run(self) -> int:
        """Until the server has exited and all that it said is passed on; its exit status, as of `subprocess`."""
        while self._process.poll() is None:
            self._wait(self._exited)
        self._channels.pop(0).end()
        for channel in self._channels:
            # Others may still have the server's pipes and write on and on.
            for _ in range(MOST_LEFT):
                if not channel.read():
                    break
            channel.end()
        while any(channel.target >= 0 for channel in self._channels):
            if self._wait():
                break  # it is the client's end that is wanted now, and it reads no more
        return self._process.returncode

    def _wait(self, *also: int) -> list[int]:
        """Wait for one thing to happen and deal with all that did; the signals that came."""
        poller = select.poll()
        for descriptor in (self._signals.descriptor, *also):
            poller.register(descriptor, select.POLLIN)
        for channel in self._channels:
            for descriptor, wanted in channel.wants().items():
                poller.register(descriptor, wanted)
        events = dict(poller.poll())
        for channel in self._channels:
            channel.turn(events)
        signals = self._signals.take()
        for number in signals:
            self._process.send_signal(number)
        return signals
