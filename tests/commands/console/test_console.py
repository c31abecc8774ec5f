"""The console as a process: in a pipe, on a terminal that can do little, and on a real one; with real servers."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from tests.commands.support import absent
from tests.conftest import simulated_ad
from tests.lab.guest import make_guest
from tests.peer import DEADLINE, VMGAHP, environment
from vmgahp.commands.console import conversation
from vmgahp.protocol import requests
from vmgahp.protocol.client import ProtocolError

CONSOLE = [*VMGAHP, "console"]
PATIENCE = 5.0
"""Seconds after which a key that brought nothing about is typed again."""


@pytest.fixture
def ad(scratch: Path) -> Path:
    """A job ad for the simulated hypervisor, beside the scratch directory."""
    file = scratch.parent / "job.ad"
    file.write_text("\n".join(simulated_ad(scratch)) + "\n")
    return file


@pytest.fixture
def environ(scratch: Path) -> dict[str, str]:
    """No HTCondor, no settings of this machine, and a terminal without colors."""
    made = environment("simulated", scratch)
    for name in [name for name in made if name.startswith("VMGAHP_") and name != "VMGAHP_CONFIG"]:
        del made[name]
    return made | {"TERM": "dumb", "NO_COLOR": ""}


def piped(
    environ: dict[str, str], typed: str, *words: str, vm_type: str = "simulated"
) -> "subprocess.CompletedProcess[str]":
    command = [*CONSOLE, "--type", vm_type, *words]
    return subprocess.run(command, input=typed, env=environ, capture_output=True, text=True, timeout=DEADLINE * 3)


# ---- a pipe


def test_a_pipe_waits_for_each_result(environ: dict[str, str], ad: Path, scratch: Path) -> None:
    ended = piped(environ, f"start {ad}\nstatus\nsuspend\nstatus\nresume\nstop\nvms\n", "--dir", str(scratch))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = re.sub(r"CPUUTILIZATION=[\d.]+", "CPUUTILIZATION=n", ended.stdout).splitlines()
    assert [line.partition("   (")[0] for line in said if line.startswith("#")] == [
        "#1 START: VM 1 runs",
        "#2 STATUS of VM 1: Running CPUUTILIZATION=n CPUTIME=0.500000 MEMORY=65536 MAXMEMORY=65536",
        "#3 SUSPEND of VM 1: done",
        "#4 STATUS of VM 1: Suspended",
        "#5 RESUME of VM 1: done",
        "#6 STOP of VM 1: done",
    ]
    assert "\x1b" not in ended.stdout
    assert ended.stderr == ""


def test_the_end_of_a_pipe_waits_for_what_is_still_to_come(environ: dict[str, str], scratch: Path) -> None:
    lines = ["CLASSAD", *simulated_ad(scratch), "CLASSAD_END", "CONDOR_VM_START 9 simulated"]
    ended = piped(environ, "\n".join(lines), "--dir", str(scratch))
    said = ended.stdout
    assert ended.returncode == 0
    assert said.index("#9 START: VM 1 runs") < said.index("VM 1 will be destroyed") < said.index("> QUIT")


def test_the_exit_status_is_that_of_the_last_failure(environ: dict[str, str]) -> None:
    """What counts as one: test_conversation.py."""
    assert piped(environ, "BOGUS\n").returncode == 1
    assert piped(environ, "BOGUS\nstatsu\nVERSION\n").returncode == 2
    assert piped(environ, "statsu\nBOGUS\nVERSION\n").returncode == 1
    assert piped(environ, "VERSION\nhelp\nhelp BAD_IMAGE\n\n").returncode == 0


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("CONDOR_VM_START 1 simulated\n", "#1 START failed: no job ad was sent"),
        ("start {ad}\nCONDOR_VM_RESUME 0 1\n", "CONDOR_VM_RESUME was refused: it takes a fresh request id"),
    ],
)
def test_what_fails_is_told_in_the_daemons_own_words(environ, ad, scratch, typed, said):
    ended = piped(environ, typed.format(ad=ad), "--dir", str(scratch))
    assert said in ended.stdout
    assert ended.returncode == 1


def test_a_reader_who_leaves_ends_it(environ: dict[str, str]) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [*CONSOLE, "--type", "simulated"]
    ended = subprocess.run(
        command, input=b"help\n", stdout=write, stderr=subprocess.PIPE, env=environ, timeout=DEADLINE, check=False
    )
    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, b"")


# ---- other servers, and bad ones


def test_any_command_can_be_the_server(environ: dict[str, str], tmp_path: Path) -> None:
    """It is started as by a starter: in the scratch directory, with its environment."""
    script = tmp_path / "server"
    script.write_text(
        "#!/bin/sh\necho '$VMGahpVersion 7 $'\nread line\necho E\nread line\n"
        'printf \'S \\033[2Jhere:%s:%s\\n\' "$VMGAHP_VMTYPE" "$PWD"\nread line\necho S\n'
    )
    script.chmod(0o755)
    ended = piped(environ, "BOGUS\nVERSION\n", "--dir", str(tmp_path), "--", os.path.relpath(script), "1")
    assert ended.returncode == 1, ended
    assert f"here:simulated:{tmp_path}" in ended.stdout
    assert "\x1b" not in ended.stdout
    assert "\\x1b[2J" in ended.stdout
    assert script.exists(), "a directory that was given stays"


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["sh", "-c", "echo oops >&2; exit 3"], "| oops\nThe server is lost: the server ended its output (exit 3)."),
        (["sh", "-c", "echo '$VMGahpVersion 1'; read line; echo one >&2; echo two >&2"], "| one\n| two\nThe server is"),
    ],
)
def test_a_server_that_does_not_last(environ: dict[str, str], command: list[str], why: str) -> None:
    ended = piped(environ, "VERSION\n" if "read" in command[-1] else "quit\n", "--", *command)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert why in ended.stdout


@pytest.mark.parametrize("script", ["echo hello; exec sleep 1000", "echo '$VMGahpVersion 1'; exec sleep 1000"])
def test_a_server_that_never_answers_is_given_up(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "GREETING_DEADLINE", 0.3)
    monkeypatch.setattr(requests, "REPLY_DEADLINE", 0.3)
    monkeypatch.setattr("vmgahp.commands.console.conversation.LOST_DEADLINE", 0.3)
    shown: list[str] = []
    environ = {**os.environ, "VMGAHP_VMTYPE": "kvm", "VMGAHP_WORKING_DIR": str(tmp_path)}
    talk = conversation.Conversation(
        ["sh", "-c", script], environ, person=False, show=lambda _, text: shown.append(text)
    )

    def ask() -> None:
        talk.greet()
        talk.typed("VERSION")

    with talk.client:
        with pytest.raises(ProtocolError) as lost:
            ask()
        assert not talk.finish(str(lost.value))
        assert talk.client.process.returncode == -signal.SIGKILL
    assert re.fullmatch(r"The server is lost: no line from the server in 0\.\d+ s \(exit -9\)\.", shown[-1])


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("--set", "nonsense"), 2, "--set: 'nonsense' is not NAME=VALUE.\nHint: see vmgahp console --help"),
        (("--dir", "/nonexistent"), 1, "/nonexistent: No such file or directory."),
        (("--", "/nonexistent/server"), 1, "/nonexistent/server: No such file or directory."),
    ],
)
def test_wrong_command_lines(environ: dict[str, str], words: tuple[str, ...], status: int, said: str) -> None:
    ended = piped(environ, "", *words)
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, "", f"vmgahp console: {said}\n")


# ---- terminals


class Terminal:
    """A console in a pseudo-terminal."""

    def __init__(self, environ: dict[str, str], *words: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            try:
                os.execve(sys.executable, [*CONSOLE, *words], environ)  # noqa: S606 - at a terminal
            finally:
                os._exit(127)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        self.raw = ""
        """All that it has written."""
        self._seen = 0
        self.status: int | None = None

    def type(self, text: str, *patterns: str) -> None:
        """Type it, and wait until what is shown then has these patterns, one after the other."""
        os.write(self.fd, text.encode())
        for pattern in patterns:
            self.see(pattern)

    @property
    def text(self) -> str:
        """What was shown since the last `see`, without what moves the cursor and changes colors."""
        return re.sub(r"\x1b(\[[0-9;?]*([a-zA-Z]|$)|[=>]|$)", "", self.raw)[self._seen :]

    def see(self, pattern: str) -> str:
        """Wait until what was shown since the last call has `pattern`; what was shown up to its end."""
        found = self._wait(pattern, DEADLINE)
        assert found, f"no {pattern!r} in {self.text!r}"
        seen = self.text[: found.end()]
        self._seen += found.end()
        return seen

    def insist(self, key: str, pattern: str) -> None:
        """Type a key until what it brings about is seen.

        While something is shown above the line, and between two lines, the terminal is not the console's, and takes
        Ctrl-D for its own.
        """
        end = time.monotonic() + DEADLINE
        while not self._wait(pattern, 0.0):
            assert time.monotonic() < end, f"no {pattern!r} in {self.text!r}"
            self.type(key)
            self._wait(pattern, PATIENCE)
        self.see(pattern)

    def _wait(self, pattern: str, seconds: float) -> re.Match[str] | None:
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.text)) and (left := end - time.monotonic()) > 0:
            if select.select([self.fd], [], [], left)[0]:
                assert self._read(), f"it ended without {pattern!r}: {self.text!r}"
        return found

    def _read(self) -> bool:
        try:
            data = os.read(self.fd, 65536)
        except OSError:  # the other side is closed
            data = b""
        self.raw += data.decode("utf-8", "replace")
        for _ in range(data.count(b"\x1b[6n")):  # where is the cursor?
            os.write(self.fd, b"\x1b[1;1R")
        return bool(data)

    def end(self, key: str = "", send: Callable[[], object] | None = None) -> int:
        """Read to the end, for which a key may be typed, or something sent, until it comes: the exit status."""
        send = send or (lambda: self.type(key))
        end = time.monotonic() + DEADLINE
        again = time.monotonic()
        reading = True
        while reading:
            assert time.monotonic() < end, self.text
            if time.monotonic() >= again:
                with suppress(OSError):  # it has just ended
                    send()
                again += PATIENCE
            if select.select([self.fd], [], [], 1)[0]:
                reading = self._read()
        self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status

    def close(self) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)


@pytest.fixture
def console(environ: dict[str, str]) -> Iterator[Callable[..., Terminal]]:
    """Opens a console in a terminal, with changes to its environment."""
    with ExitStack() as made:

        def begun(*words: str, **changes: str) -> Terminal:
            return made.enter_context(closing(Terminal(environ | changes, *words)))

        yield begun


def test_a_dumb_terminal(console: Callable[..., Terminal], ad: Path, scratch: Path) -> None:
    shown = console("--type", "simulated", "--dir", str(scratch))
    assert f"The working directory is {scratch}. help lists" in shown.see("vmgahp> ")
    for line in (f"start {ad}", "wait", "status", "wait"):
        shown.type(f"{line}\n", "vmgahp> ")
    shown.type("half a li", "half a li")
    # One that comes between the prompt and the read is only seen with the next.
    shown.insist("\x03", "vmgahp> ")
    shown.type("\x04", r"VM 1 would be destroyed.*\r\nvmgahp> ")
    shown.type("quit\n")
    assert shown.end() == 0
    assert absent(shown.raw, "#1 START: VM 1 runs", "#2 STATUS of VM 1: Running", "The VMs are gone") == []
    assert "\x1b" not in shown.raw


def test_a_terminal_that_can_be_edited_on(console: Callable[..., Terminal], ad: Path, scratch: Path) -> None:
    gate = scratch.parent / "gate"
    ad.write_text(ad.read_text() + f'Simulated_SUSPEND_Gate = "{gate}"\n')
    shown = console("--type", "simulated", "--dir", str(scratch), TERM="xterm")
    shown.see("vmgahp>")
    shown.type("CLASSAD\r", "classad>")
    # Until it has gone, the line is not empty, and Ctrl-D is no end.
    shown.type('ClaimId = "topsecret"\r', "> ClaimId = <hidden>", "classad>")
    shown.insist("\x04", "vmgahp>")
    shown.type("sus\t", "sus", "pend")  # where the line is drawn anew in between, not side by side
    shown.type(f"\x15start {ad}\r", r"> CONDOR_VM_START 1 simulated", "#1 START: VM 1 runs")
    shown.type("suspend\r", "> CONDOR_VM_SUSPEND 2 1", "vmgahp>")
    shown.type("statsu\r", "There is no command statsu; did you mean status\\?", "vmgahp>")
    # The result comes while a line is half typed, and that line is still there afterwards.
    shown.type("stat", "stat")
    gate.touch()
    shown.see("#2 SUSPEND of VM 1: done")
    shown.see("vmgahp> ?stat")
    shown.type("us\r", "#3 STATUS of VM 1: Suspended", "vmgahp>")
    shown.type("abc\x03", "vmgahp>")
    shown.insist("\x04", "VM 1 would be destroyed")
    assert shown.end("\x04") == 2, "the last failure was statsu"
    assert "The VMs are gone" in shown.text


def test_a_server_that_dies_ends_the_editing(console: Callable[..., Terminal]) -> None:
    script = "echo '$VMGahpVersion 1'; read line; echo last words >&2; exit 6"
    shown = console("--", "sh", "-c", script, TERM="xterm")
    shown.see("vmgahp>")
    shown.type("VERSION\r")
    assert shown.end() == 1
    assert "The server is lost: the server ended its output (exit 6)." in shown.text
    assert "last words" in shown.text


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_signal_ends_the_editing(console: Callable[..., Terminal], tmp_path: Path, term: str) -> None:
    """At any time, and leaves nothing behind: it is no Control-C of the person's."""
    shown = console("--type", "simulated", TERM=term, TMPDIR=str(tmp_path))
    shown.see("vmgahp>")
    assert list(tmp_path.iterdir())
    # One that comes between the prompt and the read is only seen with the next.
    assert shown.end(send=lambda: os.kill(shown.pid, signal.SIGTERM)) == 130
    assert not list(tmp_path.iterdir())


def test_colors_are_for_terminals_that_want_them(console: Callable[..., Terminal]) -> None:
    for no_color, wanted in (("", True), ("1", False)):
        shown = console("--type", "simulated", TERM="xterm", NO_COLOR=no_color)
        shown.type("VERSION\r", "> VERSION")
        assert shown.end("\x04") == 0
        assert bool(re.search(r"\x1b\[(\d+;)*3\d(;\d+)*m", shown.raw)) == wanted


# ---- a real guest


@pytest.mark.libvirt
def test_a_real_guest(environ: dict[str, str], scratch: Path) -> None:
    import libvirt

    make_guest(scratch / "guest.img", seconds=None)
    if os.getuid() == 0:
        os.chown(scratch / "guest.img", scratch.stat().st_uid, scratch.stat().st_gid)
    ad = scratch.parent / "guest.ad"
    lines = [line.replace('"simulated"', '"kvm"') for line in simulated_ad(scratch)]
    ad.write_text("\n".join([*lines, 'VMPARAM_vm_Disk = "guest.img:hda:w:raw"', ""]))
    settings = ["VM_ALLOW_EMULATION=True", "VM_STOP_TIMEOUT=1", "VM_MEMORY=1024", "VM_REPORT_PID=True"]
    words = [word for setting in settings for word in ("--set", setting)]
    typed = f"start {ad}\nstatus\npid\nsuspend\nstatus\nresume\nsoft-suspend\nresume\nstatus\nstop\nstart {ad}\n"
    ended = piped(environ, typed, "--dir", str(scratch), *words, vm_type="kvm")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = ended.stdout
    lines = ["#1 START: VM 1 runs", "#2 STATUS of VM 1: Running CPU", "#3 GETPID of VM 1: process "]
    lines += ["#4 SUSPEND of VM 1: done", "#5 STATUS of VM 1: Suspended", "#9 STATUS of VM 1: Running"]
    lines += ["#10 STOP of VM 1: done", "#11 START: VM 2 runs", "VM 2 will be destroyed"]
    assert absent(said, *lines) == []
    name = re.search(r"attributes of (alice_lab_\d+)\.0\)", said)
    assert name
    left = libvirt.open("qemu:///system" if os.getuid() == 0 else "qemu:///session")
    try:
        assert not [domain.name() for domain in left.listAllDomains() if domain.name().startswith(name[1])]
    finally:
        left.close()
