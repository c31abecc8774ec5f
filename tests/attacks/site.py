"""One attack: a job, its scratch directory and the daemon that serves it, and what all of it may not come to."""

import contextlib
import ctypes
import os
import pwd
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import libvirt

from tests import jobs
from tests.attacks.ground import MARK, SECRET, Ground
from tests.attacks.support import Attack, Mode, Must, process_of
from tests.conftest import JOB_UID
from tests.faults.daemon import Daemon
from tests.faults.host import URI, until
from tests.lab.guest import make_guest
from vmgahp import errors
from vmgahp.protocol.client import ProtocolError
from vmgahp.protocol.requests import Request

SECONDS = 60.0
"""In which everything is answered, on a machine that is busy."""
END = 60.0
"""Seconds in which nothing is left of a VM."""

PRIVATE = tuple(
    f'{name} = "<127.0.0.1:9618?addrs=127.0.0.1-9618>#1700000000#1#{SECRET}"'
    for name in ("ClaimId", "ClaimIds", "Capability", "TransferKey", "_condor_privSecret")
)
"""What a starter's ad has that no job may see."""

DISK = '"guest.img:hda:w:raw"'
MEMORY_MIB = 16
RENAME_EXCHANGE = 2
AT_FDCWD = -100

LOGS = ("/var/log/libvirt/qemu", "/run/libvirt/qemu", "/etc/libvirt/qemu")


class Site:
    """What an attacker may use, and what is found afterwards."""

    def __init__(self, ground: Ground, attack: Attack, mode: Mode) -> None:
        ground.number += 1
        self.ground, self.attack, self.mode = ground, attack, mode
        self.process = ground.number
        self.name = f"alice_lab_7.{self.process}"
        self.outer = ground.execute / str(ground.number)
        self.directory = self.outer / "dir_1"
        self.directory.mkdir(parents=True)
        os.chown(self.directory, JOB_UID, JOB_UID)
        self.breaches: list[str] = []
        self.told: list[str] = []
        self.settings: dict[str, object] = {}
        self.vm_type = "kvm"
        self.vm = ""
        self.answered: list[str] = []
        self.ours: Daemon | None = None
        self.transcript = ""
        self.foreign: set[str] = set()
        """Files that the attacker has left as another's, or as nothing that can be looked at."""
        ground.calls.clear()

    def breach(self, what: str) -> None:
        if what not in self.breaches:
            self.told.append(f"BREACH: {what}")
            self.breaches.append(what)

    # What the attacker has

    def path(self, name: str) -> Path:
        return self.directory / name

    def plant(self, name: str, content: bytes = b"", mode: int = 0o644) -> Path:
        """A file of the job's."""
        path = self.path(name)
        path.write_bytes(content)
        return self.own(path, mode)

    def node(self, name: str, make: Callable[[Path], object]) -> Path:
        """What a function such as `os.mkfifo` makes, as the job's."""
        make(self.path(name))
        return self.own(self.path(name))

    def link(self, name: str, target: str | Path) -> Path:
        """A symbolic link of the job's."""
        return self.node(name, lambda path: path.symlink_to(target))

    def own(self, path: Path, mode: int | None = None) -> Path:
        os.chown(path, JOB_UID, JOB_UID, follow_symlinks=False)
        if mode is not None:
            path.chmod(mode)
        return path

    def guest(self, name: str = "guest.img", **options: object) -> Path:
        """A disk of the job's that boots."""
        return self.own(make_guest(self.path(name), **({"seconds": None, "ticks": 4} | options)), 0o644)  # type: ignore[arg-type]

    def as_user(self, *command: str, **options: object) -> subprocess.CompletedProcess[str]:
        """Run a command of the job's user in the scratch directory."""
        return subprocess.run(
            command, cwd=self.directory, user=JOB_UID, group=JOB_UID, extra_groups=(), text=True, **options
        )  # type: ignore[call-overload,no-any-return]

    @contextlib.contextmanager
    def swapping(self, one: str, other: str, pause: float = 0.0005) -> Iterator[None]:
        """Two names of the scratch directory change places all the time, by a process of the job's user."""
        names = [os.fsencode(self.path(name)) for name in (one, other)]
        rename = ctypes.CDLL(None).renameat2

        def swap() -> None:
            while os.getppid() != 1:
                rename(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE)
                time.sleep(pause)

        with self.beside(swap):
            yield

    def beside(self, work: Callable[[], None], uid: int = JOB_UID) -> contextlib.AbstractContextManager[int]:
        """Have a process of the job's user, or of another, that does something until it is ended: its pid."""
        return process_of(uid, work)

    # What the client asks

    @property
    def daemon(self) -> Daemon:
        if self.ours is None:
            settings = {"VM_STOP_TIMEOUT": 0} | self.settings
            if self.mode is not Mode.NONE:
                settings = {"VM_RUN_AS_JOB_USER": self.mode is Mode.JOB} | settings
            self.ours = Daemon(self.directory, self.vm_type, **settings)
        return self.ours

    def ad(self, *more: str, private: bool = True, **changes: object) -> list[str]:
        """The job ad as a starter sends it; `changes` are expressions, None leaves an attribute out."""
        usual = {
            "JobVMType": f'"{self.vm_type}"', "JobVMMemory": MEMORY_MIB, "JobVM_VCPUS": 1, "VMPARAM_vm_Disk": DISK,
            "JobVMCheckpoint": "true", "ProcId": self.process,
        }  # fmt: skip
        made = jobs.lines(self.directory, **(usual | changes))
        dropped = tuple(f"{name} = " for name, text in changes.items() if text is None)
        made = [line for line in made if not line.startswith(dropped)] if dropped else made
        return [*made, *(PRIVATE if private else ()), *more]

    def ask_start(self, *more: str, **changes: object) -> Request:
        self.daemon.send_ad(*self.ad(*more, **changes))
        return self.daemon.begin("START", self.vm_type)

    def start(self, *more: str, **changes: object) -> list[str]:
        """START, and its answer, which may not take the machine out."""
        return self.started(self.ask_start(*more, **changes))

    def started(self, request: Request) -> list[str]:
        """The answer of a START."""
        return self.judged(self.answer(request))

    def judged(self, result: list[str]) -> list[str]:
        """What a START has answered, which may not take the machine out."""
        if result[:1] == ["0"]:
            self.vm = result[1]
            return result
        self.told.append(self.explanation())
        if result and result[1] not in errors.HOLD_CODES:
            self.breach(f"START takes the machine out of service: {result[1]} ({self.explanation()})")
        return result

    def ask(self, operation: str) -> list[str]:
        return self.answer(self.daemon.begin(operation, self.vm))

    def done(self, *operations: str) -> None:
        """What has to succeed."""
        for operation in operations:
            result = self.start() if operation == "START" else self.ask(operation)
            assert result[:1] == ["0"], f"{operation}: {result}\n{self.daemon.said()}"

    def stop(self) -> None:
        """End the guest of one try, where there is one."""
        if self.vm:
            self.ask("STOP")
            self.vm = ""

    @contextlib.contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """Say with the last breach of a block by what it was brought about."""
        before = len(self.breaches)
        yield
        if len(self.breaches) > before:
            self.breaches[-1] += f" [{what[:120]}]"

    def answer(self, request: Request) -> list[str]:
        began = time.monotonic()
        try:
            result = self.daemon.answer(request, SECONDS)
        except ProtocolError as error:
            self.told.append(str(error)[:2000])
            result = []
        self.told.append(
            f"{request.operation} -> {' '.join(result) or 'no answer'} in {time.monotonic() - began:.1f} s"
        )
        self.transcript += " ".join(result) + "\n"
        if not result:
            self.breach(f"{request.operation} is not answered in {SECONDS:g} s")
        self.answered = result
        return result

    def explanation(self) -> str:
        with contextlib.suppress(OSError):
            return self.path("vm_error.txt").read_text(errors="replace").strip()[:600]
        return ""

    def live(self) -> str:
        """The XML of the domain."""
        connection = libvirt.open(URI)
        try:
            return str(connection.lookupByName(self.name).XMLDesc())
        finally:
            connection.close()

    def console(self) -> str:
        with contextlib.suppress(OSError):
            return self.path("vm_console.log").read_text(errors="replace")
        return ""

    def restart(self) -> None:
        """End the daemon, as a starter does with a job that goes."""
        self.end()
        self.vm = ""

    # What must be so

    def require(self, must: Must) -> None:
        """See that the last answer is of this kind."""
        word = self.answered
        match must:
            case Must.HOLD if word[:1] != ["1"]:
                self.breach(f"the job is not held: {' '.join(word)}")
            case Must.RUN if word[:1] != ["0"]:
                self.breach(f"the job does not run: {' '.join(word)} ({self.explanation()})")

    def judge(self) -> None:
        """See after the attack that what the row says is so, and what every row says."""
        self.require(self.attack.must)
        if self.ours is not None:
            if not self.daemon.alive():
                self.breach(f"the daemon has died: {self.daemon.exit_status(0)}\n{self.daemon.said()}")
            else:
                try:
                    if not self.daemon.ask("VERSION", SECONDS).startswith("S "):
                        self.breach("the daemon no longer serves")
                except ProtocolError as error:
                    self.breach(f"the daemon no longer serves: {error}")
                self.stop()
            self.look_for_secrets()
            self.end()
        self.look_at_the_machine()

    def end(self) -> None:
        """QUIT, after which nothing is left."""
        if self.ours is None:
            return
        daemon, self.ours = self.ours, None
        daemon.send_quietly("QUIT")
        if daemon.exit_status(SECONDS) != 0:
            self.breach(f"the daemon does not end in order: {daemon.exit_status(0)}")
        said = daemon.log.read_text(errors="replace")
        if "Traceback" in said:
            self.breach(f"the daemon was surprised:\n{said[said.index('Traceback') :][:3000]}")
        if daemon.unasked:
            self.breach(f"answers that nobody asked for: {daemon.unasked}")
        if self.breaches:
            self.told.append(daemon.said())
        daemon.discard()
        if not until(lambda: not self.left(), END):
            self.breach(f"left behind: {'; '.join(self.left())}")

    def left(self) -> list[str]:
        """What of the VM is still there."""
        found = self.ground.leftovers(self.name)
        found += [path.name for path in Path("/run/vmgahp").glob("vmgahp-*")]
        found += [name for name in self.ground.domains() if name == self.name]
        found += [path.name for path in Path("/etc/libvirt/qemu").glob(f"{self.name}*")]
        return found

    def look_at_the_machine(self) -> None:
        for what in self.ground.touched():
            self.breach(f"a canary: {what}")
        if self.ground.calls:
            self.breach(f"a service of the machine was called: {self.ground.calls}")
        # Unlike Path.rglob it passes over what is taken away meanwhile.
        walk = os.walk(self.outer)
        for path in [Path(above, name) for above, inner, files in walk for name in (*inner, *files)]:
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue
            inside = path.parts[: len(self.directory.parts)] == self.directory.parts
            if inside and status.st_uid != JOB_UID and path.name not in self.foreign:
                what = pwd.getpwuid(status.st_uid).pw_name
                self.breach(f"{path.name} has become the property of {what}")

    def look_for_secrets(self) -> None:
        """Neither a private attribute nor a canary's content is anywhere where the job or a log has it."""
        places = [path for place in LOGS for path in Path(place).rglob("*")]
        places += list(self.outer.rglob("*"))
        places += list(Path("/proc").glob("[0-9]*/cmdline"))
        sought = (SECRET.encode(), MARK)
        for path in places:
            try:
                if not stat.S_ISREG(path.lstat().st_mode) or path.name in self.foreign:
                    continue
                with open(path, "rb") as file:
                    content = file.read(1 << 22)
            except OSError:
                continue
            for mark in sought:
                if mark in content:
                    self.breach(f"a secret is in {path}")
        if any(mark.decode() in self.transcript for mark in sought):
            self.breach("a secret is in an answer")

    def close(self) -> None:
        """Leave nothing of the attack on the machine."""
        if self.ours is not None:
            self.told.append(self.ours.said())
            self.ours.discard()
            self.ours = None
        self.ground.clean()
        with contextlib.suppress(OSError):
            self.directory.chmod(0o755)
        shutil.rmtree(self.outer, ignore_errors=True)
        if self.ground.touched():
            self.ground.plant()
