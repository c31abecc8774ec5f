"""The picture of the console in the documents: a real session in a real terminal, with a real guest.

    python -m tests.lab.console_picture     with libvirtd and tmux; half a minute

writes docs/images/console.svg. It is looked at, not compared: times and process ids change.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.lab.demo import job_user
from tests.lab.guest import make_guest
from tests.lab.namespace import LabError, wait_until
from tests.lab.pictures import IMAGES, as_svg

WIDTH, HEIGHT = 100, 46

JOB = """\
ClusterId = 12
ProcId = 0
User = "alice@example.org"
JobVMType = "kvm"
JobVMMemory = 64
VMPARAM_vm_Disk = "{disk}:hda:w:raw"
"""

SETTINGS = ("VM_ALLOW_EMULATION=True", "VM_MEMORY=1024", "VM_STOP_TIMEOUT=1")

SESSION = (
    ("start job.ad", "#1 START: .*"),
    ("status", "#2 STATUS of VM 1: .*"),
    ("suspend", "#3 SUSPEND of VM 1: .*"),
    ("resume", "#4 RESUME of VM 1: .*"),
    ("stop", "#5 STOP of VM 1: .*"),
    ("start broken.ad", "#6 START failed(?s:.*)VMGAHP_ERR_(?s:.*)on hold"),
    ("start job.ad", "#7 START: .*"),
)
"""What is typed, and what is waited for after it."""


class Tmux:
    """A tmux of our own, with one window."""

    def __init__(self, command: str, directory: Path) -> None:
        self._socket = str(directory / "tmux")
        size = ["-x", str(WIDTH), "-y", str(HEIGHT)]
        self.run("-f", "/dev/null", "new-session", "-d", *size, f"cd {directory} && TERM=xterm-256color {command}")

    def run(self, *words: str) -> str:
        done = subprocess.run(["tmux", "-S", self._socket, *words], capture_output=True, text=True, check=True)
        return done.stdout

    def see(self, pattern: str) -> str:
        """Wait until the window shows something: all that it shows, with its colors."""

        def shown() -> str | None:
            text = self.run("capture-pane", "-e", "-N", "-p", "-S", "-200")
            return text if re.search(pattern, re.sub(r"\x1b\[[0-9;]*m", "", text)) else None

        try:
            return wait_until(f"{pattern} in the terminal", shown, 60)
        except LabError as error:
            raise LabError(f"{error}; it shows:\n{self.run('capture-pane', '-p')}") from error

    def type(self, text: str, *keys: str) -> None:
        self.run("send-keys", "-l", text)
        for key in keys:
            self.run("send-keys", key)


@contextmanager
def terminal(command: str, directory: Path) -> Iterator[Tmux]:
    tmux = Tmux(command, directory)
    try:
        yield tmux
    finally:
        tmux.run("kill-server")


def converse(directory: Path) -> str:
    """The session; what the terminal shows of it in the end."""
    scratch = directory / "scratch"
    scratch.mkdir()
    disk = make_guest(scratch / "guest.img", seconds=None)
    for path in (scratch, disk):
        if user := job_user():
            os.chown(path, *user)
    (directory / "job.ad").write_text(JOB.format(disk="guest.img"))
    (directory / "broken.ad").write_text(JOB.format(disk="gues.img"))
    vmgahp = Path(sys.prefix) / "bin/vmgahp"
    settings = " ".join(f"--set {setting}" for setting in SETTINGS)
    typed = f"{shlex.quote(str(vmgahp))} console --dir scratch {settings}"
    environ = f"XDG_STATE_HOME={directory}"
    with terminal(f"env {environ} {typed}; sleep 600", directory) as tmux:
        tmux.see("vmgahp>")
        for line, answer in SESSION:
            tmux.type(line, "Enter")
            tmux.see(answer)
        tmux.type("s", "Tab")
        text = tmux.see("soft-suspend")
        tmux.type("", "C-u", "C-d")
        tmux.see("would be destroyed")
        tmux.type("quit", "Enter")
        tmux.see("The VMs are gone")
    return text.replace(str(directory), "/home/alice/vm")


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="vmgahp-console-picture-") as directory:
        Path(directory).chmod(0o755)
        text = converse(Path(directory))
    (IMAGES / "console.svg").write_text(as_svg(text.rstrip() + "\n", WIDTH, "console"))
    sys.stderr.write(f"Written: {IMAGES}/console.svg\n")


if __name__ == "__main__":
    main()
