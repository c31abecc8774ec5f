"""A machine to torment: its libvirtd, its guests and the file systems of its jobs, inside of a namespace."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import libvirt

from tests.conftest import JOB_UID
from vmgahp.host import libvirt_daemons, wait

URI = "qemu:///system"
DAEMON = libvirt_daemons.of_qemu()
"""The daemon that is called libvirtd in the names of faults: virtqemud on a machine with modular daemons."""
SCRATCH_OPTIONS = f"size=72m,mode=755,uid={JOB_UID},gid={JOB_UID}"
FILLER = ".filler"
PATIENCE = 60.0
"""Seconds for what takes a few, on a machine that is busy."""


until = partial(wait.until, pause=0.05)
"""Waits for a condition of the outside world that sends no event; false where it has not come true in time."""


class Host:
    """All of it belongs to the one process that makes this: whatever it did not start itself is a leftover."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._log = open(directory / "libvirtd.log", "ab")  # noqa: SIM115 - as long as the host
        self._libvirtd: subprocess.Popen[bytes] | None = None
        self._is_away = False
        """libvirtd was ended on purpose, and is started again when that is over."""
        libvirt.registerErrorHandler(lambda _context, _error: None, None)
        # What is defined on the machine over which the namespace is belongs there.
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/etc/libvirt/qemu"], check=True)
        subprocess.run(["virtlogd", "-d"], check=True)
        self.start_libvirtd()
        self._ours = set(self.processes())

    # libvirtd

    def start_libvirtd(self) -> None:
        """Start it, and wait until it answers."""
        self._is_away = False
        self._libvirtd = subprocess.Popen([DAEMON], stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)
        threading.Thread(target=self._start_again, args=(self._libvirtd,), daemon=True).start()
        assert until(self._answers, PATIENCE), f"{DAEMON} does not answer"

    def _start_again(self, libvirtd: subprocess.Popen[bytes]) -> None:
        """What systemd does by libvirtd.service, `Restart=on-failure`.

        libvirtd 9.0 dies now and then by itself when it comes back after it hung: two of its threads close one
        connection with callbacks side by side (`remoteClientCloseFunc`, which has no lock there).
        """
        status = libvirtd.wait()
        if status != 0 and not self._is_away:
            print(f"{DAEMON} has died by itself (exit {status})", file=sys.stderr, flush=True)
            self.start_libvirtd()

    def end_libvirtd(self, number: signal.Signals) -> None:
        """End it by a signal, and wait for that."""
        self._is_away = True
        self._libvirtd.send_signal(number)
        self._libvirtd.wait(PATIENCE)

    def signal_libvirtd(self, number: signal.Signals) -> None:
        self._libvirtd.send_signal(number)

    def heal_libvirtd(self) -> None:
        """Have it run, whatever was done to it."""
        if self._is_away:
            self.start_libvirtd()
        else:
            self._libvirtd.send_signal(signal.SIGCONT)

    def domains(self) -> list[str]:
        """The names of all domains."""
        connection = libvirt.open(URI)
        try:
            return [domain.name() for domain in connection.listAllDomains()]
        finally:
            connection.close()

    def _answers(self) -> bool:
        try:
            libvirt.open(URI).close()
        except libvirt.libvirtError:
            return False
        return True

    # Processes

    @staticmethod
    def processes() -> dict[int, list[str]]:
        """What runs in the namespace: pid -> command line."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if words := (entry / "cmdline").read_bytes().rstrip(b"\0"):
                        found[int(entry.name)] = words.decode("utf-8", "replace").split("\0")
        return found

    def guests(self, name: str) -> list[int]:
        """The QEMU processes of a domain."""
        return [pid for pid, words in self.processes().items() if any(f"guest={name}," in word for word in words)]

    def leftovers(self, name: str) -> list[str]:
        """The processes that are there for a VM: its QEMU, its guardian, a kill mode."""
        return [
            " ".join(words[:1] + words[-4:])
            for words in self.processes().values()
            if any(word == name or f"guest={name}," in word for word in words)
        ]

    def clean(self) -> None:
        """End what a case has left, for the next one."""
        self.heal_libvirtd()
        for pid, words in self.processes().items():
            if pid not in self._ours and pid not in (os.getpid(), self._libvirtd.pid if self._libvirtd else 0):
                if words[0].endswith((DAEMON, "virtlogd")):
                    continue
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        assert until(lambda: not self.domains(), PATIENCE), f"domains are left: {self.domains()}"


class Scratch:
    """A scratch directory that is a small file system of its own, of the job's user."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bound = False
        path.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", SCRATCH_OPTIONS, "tmpfs", path], check=True)

    def fill(self) -> None:
        """Leave no room in it."""
        with open(self.path / FILLER, "wb", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(1 << 20))
        with open(self.path / FILLER, "ab", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(512))

    def make_read_only(self) -> None:
        """Whoever opens a file in it anew may only read."""

        def bind() -> bool:
            subprocess.run(["mount", "--bind", self.path, self.path], check=True)
            made = subprocess.run(["mount", "-o", "remount,bind,ro", self.path], check=False).returncode == 0
            if not made:  # somebody has opened a file to write to in between
                subprocess.run(["umount", "-l", self.path], check=True)
            return made

        assert until(bind, PATIENCE), f"{self.path} does not become read-only"
        self._bound = True

    def heal(self) -> None:
        """Have room in it, and leave to write."""
        if self._bound:
            subprocess.run(["umount", "-l", self.path], check=True)
            self._bound = False
        (self.path / FILLER).unlink(missing_ok=True)

    def close(self) -> None:
        self.heal()
        subprocess.run(["umount", "-l", self.path], check=True)
        self.path.rmdir()
