"""A namespace: the pool's root with a throw-away layer over it, in namespaces of its own.

Services of a whole machine run in it (libvirtd, HTCondor) next to the host's own without a clash: it has
its own mounts, processes, loopback and host name. When its first process ends, the kernel ends every other
process in it and drops its mounts and files; and that one ends when its standard input closes, so nothing
is left even where the test run was killed. Only the exchange directory (``/lab`` inside) is shared.
"""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import pytest

T = TypeVar("T")

REPOSITORY = Path(__file__).resolve().parents[2]
INIT = Path(__file__).with_name("namespace-init")

DAEMONS = ("virtqemud", "virtnetworkd", "virtstoraged")
"""The modular daemons of libvirt that scripts/modular-libvirt builds."""
LAB = "/lab"
"""The exchange directory as it is seen inside."""
OUR_SERVER = "/opt/vmgahp/bin/condor_vm-gahp"
VMGAHP = "/opt/vmgahp/bin/vmgahp"
REFERENCE_SERVER = "/usr/sbin/condor_vm-gahp"


class LabError(Exception):
    """The lab could not do what a test asked of it; the text says what was seen."""


def default_root() -> Path:
    """Where scripts/pool-root builds the root."""
    named = os.environ.get("VMGAHP_POOL_ROOT")
    return Path(named) if named else Path(os.environ.get("VMGAHP_LAB", "/var/cache/vmgahp-lab")) / "pool-trixie"


def newer_root() -> Path:
    """Where scripts/pool-root builds the one with the newest HTCondor, libvirt and QEMU."""
    return default_root().with_name("pool-sid")


def why_not(*, pool: bool = True, newer: bool = False) -> str:
    """Why no namespace can be made here, over a root of the `pool` or over this system's own; empty where it can."""
    if os.geteuid() != 0:
        return "needs root"
    root, option = (newer_root(), " --suite sid") if newer else (default_root(), "")
    if pool and not (root / "etc/vmgahp-pool-root").exists():
        return f"there is no pool root in {root} (scripts/pool-root{option} builds it)"
    missing = [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]
    return f"missing on this machine: {', '.join(missing)}" if missing else ""


def require_namespace(*, pool: bool = True, newer: bool = False) -> None:
    """Skip the test where `why_not` has a reason."""
    if reason := why_not(pool=pool, newer=newer):
        pytest.skip(reason)


PATIENCE = 4
"""How many times the seconds that are ample on a machine with nothing else to do are waited on one that is busy: eight
pools begin at once. Who does not fail does not wait that long."""


def wait_until(what: str, condition: Callable[[], T | None], timeout: float, interval: float = 0.5) -> T:
    """Ask `condition` until its answer is true and return that; `LabError` when `PATIENCE` times that time is up."""
    deadline = time.monotonic() + PATIENCE * timeout
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise LabError(f"waited {PATIENCE * timeout:.0f} s in vain for {what}")
        time.sleep(interval)


class Opened:
    """A machine that a ``with`` opens and closes."""

    def open(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """Nothing of the caller's environment: neither its settings nor its Python."""
        return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/root"}

    def __enter__(self) -> Self:
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Namespace(Opened):
    """One namespace, to be used in a ``with``; `exchange` is the directory that it shares with the host."""

    def __init__(self, exchange: str | Path, root: str | Path | None = None) -> None:
        self.exchange = Path(exchange)
        self.root = Path(root) if root else default_root()
        self._holder: subprocess.Popen[str] | None = None
        self._init = 0

    def open(self) -> None:
        """Make the namespaces and wait until the first process stands in the new root."""
        self.exchange.mkdir(parents=True, exist_ok=True)
        self.exchange.chmod(0o755)  # others than root work in there, too
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--net", "--uts", "--ipc"]
        command += ["bash", str(INIT), str(self.root), str(self.exchange), str(REPOSITORY)]
        self._holder = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._holder.stdout
        assert self._holder.stderr
        if self._holder.stdout.readline() != "ready\n":
            raise LabError(f"the namespace does not start: {self._holder.stderr.read().strip()}")
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()
        self._init = int(children[0])

    def close(self) -> None:
        """End every process in it; its files go with it."""
        if self._holder is None:
            return
        assert self._holder.stdin
        self._holder.stdin.close()
        try:
            self._holder.wait(30)
        except subprocess.TimeoutExpired:
            self._holder.kill()
            self._holder.wait()
        for stream in filter(None, (self._holder.stdout, self._holder.stderr)):
            stream.close()
        self._holder, self._init = None, 0
        with_mounts = self.exchange / ".namespace"
        if with_mounts.is_dir():
            with_mounts.rmdir()

    # ---- processes ------------------------------------------------------------------------------

    def assert_stands(self) -> None:
        """Raise `LabError` where the first process is gone, for then nothing in it can be waited for."""
        if self._holder is None:
            raise LabError("the namespace is not open")
        if (status := self._holder.poll()) is not None:
            raise LabError(f"the first process of the namespace is gone (exit status {status}), and all others with it")

    def command(self, argv: Sequence[str], user: str | None = None, cwd: str = "/") -> list[str]:
        """The host's command line that runs `argv` in the namespace."""
        self.assert_stands()
        entered = ["nsenter", f"--target={self._init}", "--mount", "--pid", "--net", "--uts", "--ipc"]
        entered += ["--root", "env", "--chdir", cwd]
        if user:
            entered += ["runuser", "-u", user, "--"]
        return [*entered, *argv]

    def run(
        self, *argv: str, user: str | None = None, cwd: str = "/", check: bool = True, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the namespace to its end; `LabError` with its output when it fails or does not end."""
        try:
            done = subprocess.run(
                self.command(argv, user, cwd),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=PATIENCE * timeout,
                env=self.environment(),
            )
        except subprocess.TimeoutExpired:
            raise LabError(f"{' '.join(argv)} in the namespace: no end within {PATIENCE * timeout:.0f} s") from None
        if check and done.returncode:
            output = (done.stdout + done.stderr).rstrip()
            raise LabError(f"{' '.join(argv)} in the namespace: exit {done.returncode}\n{output}")
        return done

    def popen(self, *argv: str, **options: Any) -> subprocess.Popen[str]:
        """Start a command in the namespace, with pipes or files as the caller wants them."""
        environ = self.environment()
        return subprocess.Popen(self.command(argv), env=environ, text=True, errors="replace", **options)

    def path(self, inside: str) -> Path:
        """The host's name of a file in the namespace, while it stands."""
        return Path(f"/proc/{self._init}/root") / inside.lstrip("/")

    def processes(self) -> dict[int, str]:
        """The processes in it besides the first: pid as seen inside -> command line."""
        self.assert_stands()
        found = {}
        for entry in self.path("/proc").iterdir():
            if entry.name.isdigit() and entry.name != "1":
                try:
                    words = (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                except OSError:  # it ended while we looked
                    continue
                if words != [b""]:  # a zombie has no command line
                    found[int(entry.name)] = b" ".join(words).decode("utf-8", "replace")
        return found

    def kill(self, pid: int, signal: str) -> None:
        """Send a signal to a process by its pid as seen inside."""
        self.run("sh", "-c", f"kill -{signal} {pid}")

    # ---- services -------------------------------------------------------------------------------

    def configure_libvirt(self) -> None:
        """What libvirtd and its QEMUs need to run in a namespace."""
        # Inside a container sudo's own limit for core files is final, and libvirt, which allows them to QEMU by
        # default, could start none.
        with open(self.path("/etc/libvirt/qemu.conf"), "a") as settings:
            settings.write("max_core = 0\n")
            # The /dev that libvirt makes for each QEMU stays empty in a chroot, and without a /dev/null QEMU
            # believes that files cannot be locked: two VMs could then write to one image.
            settings.write("namespaces = [ ]\n")
        # A startd asks as its own user about VM types that it does not know. Elsewhere polkit lets everybody ask;
        # it is reached by D-Bus, which a namespace has not.
        for daemon in self.libvirt():
            with open(self.path(f"/etc/libvirt/{daemon}.conf"), "a") as settings:
                settings.write('auth_unix_ro = "none"\n')

    def libvirt(self) -> tuple[str, ...]:
        """Name libvirt's daemons here: libvirtd, or the modular ones."""
        return DAEMONS if self.path(f"/usr/sbin/{DAEMONS[0]}").exists() else ("libvirtd",)

    def start_libvirt(self) -> None:
        """virtlogd and libvirtd, or the modular daemons, as on a machine without systemd."""
        self.configure_libvirt()
        for daemon in ("virtlogd", *self.libvirt()):
            self.run(daemon, "-d")
        self.wait_for_libvirt("qemu:///system")

    def wait_for_libvirt(self, uri: str) -> None:
        """Wait until it answers."""
        command = ("virsh", "-q", "-c", uri, "version")
        wait_until("libvirtd in the namespace", lambda: not self.run(*command, check=False).returncode, timeout=60)

    def virsh(self, *argv: str) -> str:
        return self.run("virsh", "-q", "-c", "qemu:///system", *argv).stdout

    def domains(self) -> list[str]:
        """The names of all domains, running or not."""
        return self.virsh("list", "--all", "--name").split()

    def install(self, wheel: Path) -> None:
        """Put our package into the namespace's /opt/vmgahp, over Debian's own modules of the rest."""
        shutil.copy(wheel, self.exchange / wheel.name)
        self.run(
            "/opt/vmgahp/bin/pip",
            *("install", "--quiet", "--no-index", "--no-deps", "--force-reinstall", f"{LAB}/{wheel.name}"),
            timeout=120,
        )


def build_wheel(directory: str | Path) -> Path:
    """Build our package's wheel from the clone, into `directory`; the sdist that it is built from is beside it."""
    # As the scripts that build packages date it.
    dated = ["git", "-c", "safe.directory=*", "-C", str(REPOSITORY), "log", "-1", "--format=%ct"]
    date = subprocess.run(dated, capture_output=True, text=True, check=False).stdout.strip()
    environ = os.environ | ({"SOURCE_DATE_EPOCH": date} if date else {})
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(directory), str(REPOSITORY)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    if done.returncode:
        raise LabError(f"the wheel cannot be built:\n{done.stdout}{done.stderr}")
    [wheel] = Path(directory).glob("vmgahp-*.whl")
    return wheel


@contextlib.contextmanager
def shared_by_workers(factory: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    """A directory for all workers of pytest-xdist, and for one of them at a time."""
    directory = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent
    directory /= name
    directory.mkdir(exist_ok=True)
    with open(directory.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield directory


def wheel_of(factory: pytest.TempPathFactory) -> Path:
    """The wheel for all tests of a run: built once, whichever of the workers wants it first."""
    with shared_by_workers(factory, "wheel") as directory:
        built = list(directory.glob("vmgahp-*.whl"))
        return built[0] if built else build_wheel(directory)
