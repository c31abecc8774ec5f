"""VMware's own vSphere simulator as the tests use it: built once, started on a free port, killed in the middle.

It is govmomi's, from Debian's packages golang-go and golang-github-vmware-govmomi-dev, with `main.go` around
it. The inventory is in memory and dies with the process; the files of its datastores lie below `directory`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import queue
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

DEADLINE = 60.0
"""Seconds that anything may take before the test fails."""

BUILD_DEADLINE = 600.0

SOURCE = Path(__file__).parent / "main.go"
GOVMOMI = Path("/usr/share/gocode/src/github.com/vmware/govmomi")
USER = "condor@vsphere.local"
PASSWORD = "pass word & <secret>"


class Missing(Exception):
    """What the simulator is built from is not installed."""


def cache() -> Path:
    """Where the built simulator is kept: outside of the clone, and for root and others apart."""
    default = "/var/cache/vmgahp-lab" if os.getuid() == 0 else "~/.cache/vmgahp-lab"
    return Path(os.environ.get("VMGAHP_LAB") or default).expanduser()


def build() -> Path:
    """The simulator's program, built where it is not there yet; a quarter of a minute. Raises `Missing`."""
    go = shutil.which("go")
    if go is None or not GOVMOMI.is_dir():
        raise Missing("apt-get install golang-go golang-github-vmware-govmomi-dev")
    release = subprocess.run([go, "version"], capture_output=True, check=True, timeout=DEADLINE).stdout
    packages = subprocess.run(
        ["dpkg-query", "-W", "golang-github-vmware-govmomi-dev"], capture_output=True, check=False
    ).stdout
    key = hashlib.sha256(SOURCE.read_bytes() + release + packages).hexdigest()[:16]
    place = cache() / "vcsim"
    place.mkdir(parents=True, exist_ok=True)
    program = place / f"vcsim-{key}"
    with open(place / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            environ = os.environ | {"GO111MODULE": "off", "GOFLAGS": "", "GOCACHE": str(place / "go-build")}
            environ["GOPATH"] = f"{place / 'go'}:/usr/share/gocode"
            command = [go, "build", "-o", f"{program}.new", "."]
            subprocess.run(command, cwd=SOURCE.parent, env=environ, check=True, timeout=BUILD_DEADLINE)
            os.rename(f"{program}.new", program)
    return program


class Vcsim:
    """One running simulator; `model` is esx (one host) or vpx (a vCenter with a cluster and a host of its own)."""

    def __init__(self, directory: Path, model: str = "esx", port: int = 0) -> None:
        self.directory = directory
        self.model = model
        directory.mkdir(exist_ok=True)
        self.certificate = directory / "server.pem"
        self._lines: queue.Queue[str] = queue.Queue()
        self._reached: queue.Queue[str] = queue.Queue()
        program = [str(build()), "-model", model, "-listen", f"127.0.0.1:{port}"]
        with open(directory / "vcsim.log", "ab") as log:
            self.process = subprocess.Popen(
                [*program, "-certificate", str(self.certificate)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"TMPDIR": str(directory), "VCSIM_USER": USER, "VCSIM_PASSWORD": PASSWORD},
                text=True,
            )
        threading.Thread(target=self._read, name="vcsim", daemon=True).start()
        word, _, address = self._lines.get(timeout=DEADLINE).partition(" ")
        assert word == "listening", word
        self.port = int(address.rpartition(":")[2])

    def __enter__(self) -> Vcsim:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def tell(self, command: str) -> None:
        """Carry a command of `main.go` out."""
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        assert self._lines.get(timeout=DEADLINE) == "ok"

    def reached(self, method: str) -> None:
        """Wait until the call that something was to happen to has come."""
        assert self._reached.get(timeout=DEADLINE) == method

    def kill(self) -> None:
        """End it as kill -9 does: nothing is answered any more, and the inventory is gone."""
        self.process.kill()
        self.process.wait(DEADLINE)

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """A while in which it answers nothing, from the moment at which all of its threads stand still."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            end = time.monotonic() + DEADLINE
            while not all(_stands_still(task) for task in Path(f"/proc/{self.process.pid}/task").iterdir()):
                assert time.monotonic() < end, "the simulator does not stop"
                time.sleep(0.01)
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def again(self) -> Vcsim:
        """A new one on the port of this one, which was killed, and with its certificate."""
        return Vcsim(self.directory, self.model, self.port)

    def stop(self) -> None:
        """End it in order, by the end of its input; its datastores go with it.

        Not by SIGINT, which is lost where that is ignored and it has only just begun to listen.
        """
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            self.kill()

    def datastore(self) -> Path:
        """The directory that is the datastore LocalDS_0 of the simulator that was started last."""
        return max(self.directory.glob("govcsim-*LocalDS_0*"), key=lambda path: path.stat().st_ctime_ns)

    def _read(self) -> None:
        for line in self.process.stdout:
            word, _, rest = line.rstrip("\n").partition(" ")
            if word == "reached":
                self._reached.put(rest)
            else:
                self._lines.put(line.rstrip("\n"))


def _stands_still(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
    except FileNotFoundError:  # the thread has ended
        return True
