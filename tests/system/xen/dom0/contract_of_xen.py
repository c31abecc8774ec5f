"""The contract of drivers for Xen's guests: run in dom0, where test_xen_contract.py puts it."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import libvirt
import pytest

from vmgahp.config import Settings
from vmgahp.drivers.base import Machine
from vmgahp.host.job_user import Identity
from vmgahp.job.ad import JobAd, quote
from vmgahp.testing import contract
from vmgahp.testing.contract import DriverContract, Subject

contract.DEADLINE = 240.0  # of a guest in an emulated machine

UID, HOME = 1201, "/home/alice"
DISK, CONSOLE = "disk.img", "vm_console.log"
SETTINGS = {"VM_MEMORY": "512", "VM_STOP_TIMEOUT": "60"}


class ParavirtualGuests(Subject):
    """The lab's guest, which counts on its disk and its console."""

    vm_type = "xen"
    saves_at_once = False

    def prepare(self, scratch: Path, number: int, ends: bool) -> dict[str, str]:
        with open(scratch / DISK, "wb") as disk:
            disk.truncate(1 << 20)
        (scratch / CONSOLE).unlink(missing_ok=True)
        for path in (scratch, scratch / DISK):
            os.chown(path, UID, UID)
        words = "console=hvc0 quiet loglevel=0" + (" seconds=1" if ends else "")
        return {
            "JobVMMemory": "128", "VMPARAM_vm_Disk": quote(f"{DISK}:xvda:w"),
            "VMPARAM_Xen_Kernel": quote("/lab/guest/vmlinux"), "VMPARAM_Xen_Initrd": quote("/lab/guest/initrd"),
            "VMPARAM_Xen_Root": quote("/dev/xvda"), "VMPARAM_Xen_Kernel_Params": quote(words),
        }  # fmt: skip

    def exists(self, job: JobAd) -> bool:
        with contextlib.closing(libvirt.open("xen:///system")) as connection:
            return job.vm_name() in [domain.name() for domain in connection.listAllDomains()]

    def bad_jobs(self) -> dict[str, JobAd]:
        job = self.job(2)
        return {
            "a disk that is not there": self.changed(job, VMPARAM_vm_Disk=quote("nothing.img:xvda:w")),
            "a kernel that is not there": self.changed(job, VMPARAM_Xen_Kernel=quote("/lab/guest/nothing")),
            "no kernel": self.changed(job, VMPARAM_Xen_Kernel=None),
        }

    def unfit(self) -> Settings:
        nowhere = "xen+unix:///system?socket=/nonexistent/libvirt-sock"
        return Settings(SETTINGS | {"VM_LIBVIRT_URI": nowhere})

    def server_dies(self, machine: Machine) -> None:
        """Its locks on the job's disks go."""
        while machine.resources.at_end:
            machine.resources.at_end.pop(0)()

    def count(self, job: JobAd) -> int:
        console = Path(job.working_dir(), CONSOLE)
        lines = console.read_bytes().split() if console.exists() else []
        return max((int(word) for word in lines if word.isdigit()), default=0)


class TestXen(DriverContract):
    @pytest.fixture
    def subject(self) -> Iterator[Subject]:
        place = tempfile.mkdtemp(prefix="contract-", dir=HOME)
        os.chmod(place, 0o755)
        try:
            with ParavirtualGuests(Path(place), Settings(SETTINGS), Identity(UID, UID)) as made:
                yield made
        finally:
            shutil.rmtree(place)
