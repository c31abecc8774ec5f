"""A whole machine under QEMU's emulation, and commands that run in it.

Commands run there as root through one SSH connection, from a port of this host's loopback. So a program in the machine
has the pipes of an ``ssh`` process here, and whatever talks to a local process can talk to it. The machine ends with
the process that started it.
"""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from tests.lab.namespace import LabError, Opened, wait_until
from tests.lab.ports import free_port
from tests.lab.systems import System, release_of, seen_by

T = TypeVar("T")

QEMU = ["qemu-system-x86_64", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]
QEMU += ["-accel", "tcg,thread=multi"]
TOOLS = (QEMU[0], "ssh", "ssh-keygen", "setpriv")
"""The programs of this host that it takes."""


class EmulatedMachine(Opened):
    """One machine, in a ``with``; `directory` keeps what it says on its serial console."""

    called = "the machine"
    """Its name, in errors."""
    logs: Sequence[str] = ()
    """Files of the machine whose ends tell why something failed there."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.serial = self.directory / "serial.log"
        self._machine: subprocess.Popen[bytes] | None = None
        self._private: tempfile.TemporaryDirectory[str] | None = None
        self._ssh: list[str] = []

    def open(self) -> None:
        """Start it, and wait until commands run there."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.serial.write_bytes(b"")
        # The socket's name must be short, and the key is nobody else's business.
        self._private = tempfile.TemporaryDirectory(prefix="vmgahp-lab-")
        private = Path(self._private.name)
        port = free_port()
        key = self.key(private)
        self._machine = self._start(port, private)
        self.wait_for_boot()
        # The machine's own key is made anew, or everybody's, and nothing that is sent is worth an impostor's while.
        options = {"StrictHostKeyChecking": "no", "UserKnownHostsFile": "/dev/null", "LogLevel": "ERROR"}
        options |= {"BatchMode": "yes", "ConnectTimeout": "20", "IdentitiesOnly": "yes"}
        options |= {"ControlPath": str(private / "ssh"), "IdentityFile": str(key)}
        self._ssh = ["ssh", "-F", "none", "-p", str(port)]
        for name, value in options.items():
            self._ssh += ["-o", f"{name}={value}"]
        self._wait(f"the SSH server in {self.called}", self._connect, 120)

    def close(self) -> None:
        """End the machine at once, and with it all that runs or was written there."""
        if self._machine:
            self._machine.kill()
            self._machine.wait()
            self._machine = None
        if self._private:
            self.disconnect()
            self._private.cleanup()
            self._private, self._ssh = None, []

    def disconnect(self) -> None:
        """End the connection that all commands share."""
        if self._ssh:
            subprocess.run([*self._ssh, "-O", "exit", self.called], capture_output=True, timeout=30)

    # ---- for each kind of machine ---------------------------------------------------------------

    def key(self, private: Path) -> Path:
        """The private key that the machine lets in; `private` is a directory that goes with the machine."""
        raise NotImplementedError

    def qemu(self, private: Path) -> list[str]:
        """QEMU's command line, but for the network and the serial console. The network's device is to be on ``net``."""
        raise NotImplementedError

    def wait_for_boot(self) -> None:
        """Wait for what comes long before an SSH server does."""

    def traits(self) -> dict[str, str]:
        """Name what tells it from another machine with the same packages."""
        return {}

    @functools.cached_property
    def system(self) -> System:
        """Name it for the record of a run."""
        release = release_of(self.read("/usr/lib/os-release").decode())
        return seen_by(lambda command: self.run(*command, check=False).stdout, release, **self.traits())

    # ---- processes ------------------------------------------------------------------------------

    def command(
        self, argv: Sequence[str], user: str | None = None, cwd: str = "/", env: Mapping[str, str] | None = None
    ) -> list[str]:
        """The host's command line that runs `argv` in the machine, with a pipe for each of its standard streams.

        As root, or as `user`; of the environment it has what `environment` gives, and `env` over that. When the
        process here is killed, the one in the machine sees the end of its input and continues.
        """
        entered = ["exec", "env", "-i", "--chdir", cwd]
        entered += [f"{name}={value}" for name, value in (self.environment() | dict(env or {})).items()]
        if user:
            entered += ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--"]
        return [*self._ssh, "root@127.0.0.1", shlex.join([*entered, *argv])]

    def run(
        self,
        *argv: str,
        user: str | None = None,
        cwd: str = "/",
        env: Mapping[str, str] | None = None,
        input: str | None = None,
        check: bool = True,
        timeout: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the machine to its end; `LabError` with its output when it fails."""
        streams = {"input": input or "", "capture_output": True, "text": True, "errors": "replace"}
        done = subprocess.run(self.command(argv, user, cwd, env), timeout=timeout, **streams)
        if check and done.returncode:
            output = (done.stdout + done.stderr).rstrip()
            said = f"{' '.join(argv)} in {self.called}: exit {done.returncode}"
            raise LabError(f"{said}\n{output}\n{self.diagnosis()}")
        return done

    def shell(self) -> int:
        """A shell there for a person; its exit status."""
        return subprocess.run([*self._ssh, "-t", "root@127.0.0.1"]).returncode

    # ---- files ----------------------------------------------------------------------------------

    def write(self, inside: str, data: bytes, owner: str = "root", mode: int = 0o644) -> None:
        """Make a file of the machine, in a directory that is there, or replace it."""
        script = 'umask 077; cat > "$1" && chown "$2" "$1" && chmod "$3" "$1"'
        command = self.command(["sh", "-c", script, "sh", inside, owner, f"{mode:o}"])
        done = subprocess.run(command, input=data, capture_output=True, timeout=300)
        if done.returncode:
            raise LabError(f"{inside} cannot be written in {self.called}: {done.stderr.decode(errors='replace')}")

    def read(self, inside: str) -> bytes:
        """What is in a file of the machine; `FileNotFoundError` where there is none."""
        script = 'if [ -e "$1" ]; then exec cat "$1"; else exit 44; fi'
        done = subprocess.run(
            self.command(["sh", "-c", script, "sh", inside]), stdin=subprocess.DEVNULL, capture_output=True, timeout=300
        )
        if done.returncode == 44:
            raise FileNotFoundError(inside)
        if done.returncode:
            raise LabError(f"{inside} cannot be read in {self.called}: {done.stderr.decode(errors='replace')}")
        return done.stdout

    def put(self, local: Path, inside: str, owner: str = "root", mode: int = 0o644) -> None:
        """Copy a file into the machine."""
        self.write(inside, local.read_bytes(), owner, mode)

    def get(self, inside: str, local: Path) -> Path:
        """Copy a file out of the machine."""
        local.write_bytes(self.read(inside))
        return local

    # ---- waiting --------------------------------------------------------------------------------

    def wait_until(self, what: str, condition: Callable[[], T | None], timeout: float) -> T:
        """As `namespace.wait_until`, with the machine's logs in the error."""
        return self._wait(what, condition, timeout, interval=1)

    def diagnosis(self, lines: int = 30) -> str:
        """The ends of the logs that tell most, for a test that failed."""
        tail = self.serial.read_text(errors="replace").splitlines()[-lines:]
        shown = [f"---- the end of {self.serial} ----", *tail]
        if self._ssh and self._machine and self._machine.poll() is None:
            script = f"tail -n {lines} {' '.join(self.logs)}"
            try:
                done = subprocess.run(
                    [*self._ssh, "root@127.0.0.1", script], stdin=subprocess.DEVNULL, capture_output=True, timeout=30
                )
                shown.append(done.stdout.decode(errors="replace"))
            except subprocess.TimeoutExpired:
                shown.append(f"{self.called} does not answer")
        return "\n".join(shown)

    def _start(self, port: int, private: Path) -> subprocess.Popen[bytes]:
        # The kernel ends the machine when this process ends, however that happens.
        command = ["setpriv", "--pdeathsig", "KILL", *self.qemu(private)]
        command += ["-serial", f"file:{self.serial}"]
        # Nothing in there reaches any network; this one port of loopback leads in.
        command += ["-netdev", f"user,id=net,restrict=on,hostfwd=tcp:127.0.0.1:{port}-:22"]
        with open(self.directory / "qemu.log", "wb") as log:
            # In TMPDIR QEMU keeps what is written to the disk: a file without a name.
            environ = os.environ | {"TMPDIR": str(self.directory)}
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ)

    def _connect(self) -> bool:
        """Open the connection that all commands share. It ends with the machine."""
        command = [*self._ssh, "-f", "-N", "-o", "ControlMaster=yes", "root@127.0.0.1"]
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.run(command, timeout=60, **streams).returncode == 0  # type: ignore[call-overload,no-any-return]

    def _wait(self, what: str, condition: Callable[[], T | None], timeout: float, interval: float = 0.3) -> T:
        def or_dead() -> T | None:
            if self._machine is None or self._machine.poll() is not None:
                said = (self.directory / "qemu.log").read_text(errors="replace")
                raise LabError(f"QEMU ended while waiting for {what}: {said}\n{self.diagnosis()}")
            return condition()

        try:
            return wait_until(what, or_dead, timeout, interval)
        except LabError as error:
            if "---- the end of" in str(error):
                raise
            raise LabError(f"{error}\n{self.diagnosis()}") from None
