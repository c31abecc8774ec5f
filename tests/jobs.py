"""Job ads for tests: what a starter would send, made in one place, and a user who sees the files that a test names."""

import errno
import os
from pathlib import Path

import pytest

from vmgahp.config import Settings
from vmgahp.host.job_user import Identity
from vmgahp.job.ad import JobAd

BASE = {
    "VM_WORKING_DIR": '"/scratch"', "JobVMType": '"kvm"', "JobVMMemory": "64", "User": '"alice@lab"', "ClusterId": "7",
    "ProcId": "0",
}  # fmt: skip
"""What every job has, as expressions."""
DISK = {"VMPARAM_vm_Disk": '"disk.img:vda:w"'}
GOOD = BASE | DISK | {"JobVMMemory": "512", "User": '"alice@example.org"', "ClusterId": "17"}
NETWORKS = {"VM_NETWORKING": "true", "VM_NETWORKING_TYPE": "nat, user", "VM_ALLOW_HOST_LOOPBACK": "true"}
MACHINE = Settings({"VM_MEMORY": "1024", **NETWORKS})


def ad(attributes: dict[str, str] = GOOD, scratch: object = None, **changes: str | None) -> JobAd:
    """A job ad; `changes` are expressions by name, None leaves an attribute out."""
    place = {} if scratch is None else {"VM_WORKING_DIR": f'"{scratch}"'}
    made = {**attributes, **place, **changes}
    return JobAd([(name, text) for name, text in made.items() if text is not None])


def of_lines(*lines: str) -> JobAd:
    """The job ad of lines ``Name = expression``."""
    return JobAd([pair for line in lines if (pair := JobAd.parse_line(line))])


def lines(scratch: object, *more: str, **changes: object) -> list[str]:
    """The lines of a job ad without disks, as they are sent; `changes` are expressions, `more` lines after them."""
    made = BASE | {"VM_WORKING_DIR": f'"{scratch}"'} | {name: str(text) for name, text in changes.items()}
    return [*(f"{name} = {text}" for name, text in made.items()), *more]


def owner(directory: Path) -> Identity:
    """The user whose directory it is."""
    status = directory.stat()
    return Identity(status.st_uid, status.st_gid)


def own(scratch: Path, *paths: Path) -> None:
    """Give files to the user whose scratch directory it is; by default all that is in it."""
    if os.getuid() == 0:
        status = scratch.stat()
        for path in paths or scratch.iterdir():
            os.chown(path, status.st_uid, status.st_gid)


class Files:
    """An identity whose user sees these files and no others; `bad` maps a file to why it does not open."""

    def __init__(
        self,
        scratch: tuple[str, ...] = ("disk.img",),
        shared: tuple[str, ...] | list[str] = (),
        bad: dict[str, int] | None = None,
    ) -> None:
        self.scratch, self.shared, self.bad = scratch, shared, bad or {}
        self.asked: list[tuple[object, ...]] = []

    def open_scratch(self, directory: str, name: str, flags: int, mode: int = 0o600) -> int:
        self.asked.append((directory, name, flags))
        if name in self.bad:
            raise OSError(self.bad[name], os.strerror(self.bad[name]))
        if name not in self.scratch:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return os.open("/dev/null", os.O_RDONLY)

    def read_scratch(self, directory: str, name: str, most: int) -> bytes:
        with open(self.open_scratch(directory, name, os.O_RDONLY), "rb") as file:
            return file.read(most)

    def check_access(self, path: str, write: bool) -> str | None:
        self.asked.append((path, write))
        return None if path in self.shared else "No such file or directory"


HURRIED_ENGINE = """\
import sys
from vmgahp.job import engine
engine.CPU_SECONDS = 1
sys.exit(engine.main(sys.argv[2:]))
"""


def hurry_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give HTCondor's engine one second of the processor: its limit is set in the process that evaluates."""
    monkeypatch.setattr("vmgahp.job.engine.RUN_MODULE", ("-I", "-c", HURRIED_ENGINE))
