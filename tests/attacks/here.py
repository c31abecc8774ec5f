"""Attacks that need no guest: a job's directory and its user's processes, around a part of the server."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, TypeVar

from tests import jobs
from tests.attacks.others import By, again_and_again
from tests.attacks.support import process_of
from tests.faults.host import until
from tests.job.support import entry, tar
from vmgahp.config import Settings
from vmgahp.daemon.job_ad_file import JobAdFile
from vmgahp.drivers.libvirt.program import drive
from vmgahp.drivers.libvirt.start.disks import Provision
from vmgahp.errors import Fault, JobFault
from vmgahp.host import job_user, proc
from vmgahp.host.budget import Budget
from vmgahp.host.job_user import Identity
from vmgahp.job import archive, look
from vmgahp.job.spec import JobSpec

T = TypeVar("T")
TRIES = 30
"""Runs of a part until the attacker has met one of its processes."""

MACHINE = Settings({"VM_MEMORY": "1024"})


class Brief(Budget):
    """A START whose operations have this short deadline each, and together all the time."""

    def left(self, most: float) -> float:
        return min(most, self._seconds)


class Here:
    """A job in an EXECUTE, and what came of the attacks on its start."""

    def __init__(self, execute: Path, uid: int) -> None:
        self.execute, self.directory = execute, execute / "dir_1"
        self.directory.mkdir()
        self.user = Identity(uid, uid)
        self.breaches: list[str] = []
        self.told: list[str] = []
        self.outcome = ""
        self._hits = mmap.mmap(-1, 1)
        self.plant("disk.img", bytes(1 << 16))

    def plant(self, name: str, content: bytes = b"") -> Path:
        path = self.directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        for each in (path.parent, path):
            os.chown(each, self.user.uid, self.user.gid)
        return path

    def plant_for(self, part: Part) -> None:
        for name, content in part.files().items():
            self.plant(name, content)

    def breach(self, what: str) -> None:
        self.told.append(f"BREACH: {what}")
        self.breaches.append(what)

    def start(self, what: str, part: Part) -> None:
        """Do a part of a START. It is done, or the job is held, and the machine is at no fault."""
        try:
            part.do(self)
            self.outcome = "done"
        except (JobFault, *part.harmless) as fault:
            self.outcome = "held"
            self.told.append(f"{what}: {fault}"[:500])
        except Exception as error:  # noqa: BLE001 - each is a finding
            self.outcome = "out of service"
            said = error.render() if isinstance(error, Fault) else "".join(traceback.format_exception(error)[-6:])
            self.breach(f"{what}: {said}")

    def judge(self) -> None:
        if self.outcome != "done":
            self.breach(f"without an attack it is {self.outcome}")

    # The job's other processes

    @contextlib.contextmanager
    def attacked(self, by: By) -> Iterator[None]:
        """Have a process of the job's user that calls `by` again and again, with what notes a hit."""

        def hit() -> None:
            self._hits[0] = 1

        with process_of(self.user.uid, again_and_again(by, hit)):
            yield

    def attack_all(self, part: Part, attacks: Mapping[str, tuple[AbstractContextManager[object], bool | None]]) -> None:
        """Do a part of a START under each attack, and at last alone.

        With true beside it, an attack is tried until it has met a process of the part; with false it may meet none.
        """
        began = time.monotonic()
        self.start("at first", part)
        self.judge()
        slow = 4 * (time.monotonic() - began)
        until(lambda: not self.processes(), 20)  # of a part before this one
        for what, (attack, is_met) in attacks.items():
            before = len(self.breaches)
            self._hits[0] = 0
            with attack:
                for _ in range({None: 1, False: 3, True: TRIES}[is_met]):
                    with Brief(max(2.0, slow) if is_met else 2.0):
                        self.start(what, part)
                    if len(self.breaches) > before or (is_met and self._hits[0]):
                        break
            if is_met is (not self._hits[0]) and len(self.breaches) == before:
                self.breach(f"{what}: its process was {'not ' * is_met}met")
            if is_met is not None and not until(lambda: not self.processes(), 20):
                self.breach(f"{what}: processes are left: {self.processes()}")
        self.start("at last", part)

    # Parts of a START

    def spec(self, **options: str) -> JobSpec:
        named = {f"VMPARAM_vm_{name}": text for name, text in options.items()}
        return JobSpec.parse(jobs.ad(scratch=self.directory, **named), MACHINE)

    def provide(self, **options: str) -> None:
        """Look at a job's files, and make its disks and drives anew."""
        made = Provision(str(self.directory), MACHINE, self.user)
        try:
            wanted = look.look(self.spec(**options), MACHINE, self.user)
            made.make(wanted)
            if wanted.devices.run:
                drive.make(wanted, wanted.devices.run, 1 << 30, self.user)
        finally:
            made.undo()

    def write(self, act: Callable[[], T]) -> T:
        """Do something to a file of the server's, whose errors its callers blame on somebody."""
        try:
            return act()
        except OSError as error:
            raise job_user.unwritable("it", error, str(self.directory), self.user) from error

    def unpack(self, name: str = "vm_outputs.tar") -> archive.Unpacked:
        opened = self.write(lambda: self.user.open_scratch(str(self.directory), name, os.O_RDONLY))
        try:
            allowed = archive.Allowed(("*",), 1 << 30, 1 << 20)
            return archive.unpack(opened, str(self.directory), ".vm_outputs", allowed, self.user)
        finally:
            os.close(opened)

    def keep_the_job_ad(self) -> None:
        file = JobAdFile(str(self.directory), self.user)
        file.restore()
        file.release()

    def processes(self) -> list[str]:
        """Return the processes of the job's user, with their programs."""
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [f"{pid} {proc.name(pid)}" for pid in pids if proc.uid(pid) == self.user.uid and proc.birth(pid)]

    def close(self) -> None:
        shutil.rmtree(self.execute, ignore_errors=True)


def image() -> bytes:
    """Return a qcow2 image."""
    with tempfile.NamedTemporaryFile() as file:
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", file.name, "1M"], check=True)
        return file.read()


def cloud_init() -> dict[str, bytes]:
    return {"user-data": b"#cloud-config\n", "meta-data": b"instance-id: a\nx: [" + b"1, " * 150_000 + b"1]\n"}


class Part(NamedTuple):
    """A part of a START."""

    do: Callable[[Here], object]
    files: Callable[[], dict[str, bytes]] = dict
    """The job's files for it."""
    harmless: tuple[type[Exception], ...] = ()
    """Exceptions for which its callers hold the job."""


PARTS: dict[str, Part] = {
    "an-image": Part(lambda here: here.provide(Disk='"disk.qcow2:vda:w:qcow2"'), lambda: {"disk.qcow2": image()}),
    "a-data-disk": Part(lambda here: here.provide(Data_Disk='"vdb:1M"')),
    "a-drive": Part(lambda here: here.provide(Data_Files='"data"'),
                    lambda: {f"data/{n}": os.urandom(1 << 17) for n in range(60)}),
    "cloud-init": Part(lambda here: here.provide(User_Data='"user-data"', Meta_Data='"meta-data"'), cloud_init),
    "inputs": Part(lambda here: here.provide(Run='"true"', Run_Boot='"ready"'),
                   lambda: {f"input/{n}": bytes(1 << 16) for n in range(60)}),
    "outputs": Part(Here.unpack, lambda: {"vm_outputs.tar": tar(*(entry(f"{n}") for n in range(3000)))}),
    "the-job-ad": Part(Here.keep_the_job_ad, lambda: {".job.ad": b"x"}),
}  # fmt: skip
"""Those that are attacked in both ways."""
