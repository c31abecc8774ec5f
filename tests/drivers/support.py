"""Subjects for the contract suite: what each driver needs to run a job."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import JOB_UID
from tests.lab.guest import counts, make_guest
from tests.lab.libvirtd_watch import URI
from tests.peer import DEADLINE, Peer
from vmgahp.config import Settings
from vmgahp.host.job_user import Identity
from vmgahp.job.ad import JobAd
from vmgahp.testing.contract import Subject

TEST_URI = "test:///default"
ANY = {
    "VM_MEMORY": "1024", "VM_STOP_TIMEOUT": "1", "VM_LIBVIRT_URI": TEST_URI, "VM_LIBVIRT_DOMAIN_TYPE": "test",
    "VM_NETWORKING": "true", "VM_NETWORKING_TYPE": "nat, user", "VM_ALLOW_HOST_LOOPBACK": "true",
}  # fmt: skip
WHO = Identity(JOB_UID, JOB_UID) if os.getuid() == 0 else Identity(os.getuid(), os.getgid())


needs_qemu = pytest.mark.skipif(
    any(shutil.which(name) is None for name in ("qemu-system-x86_64", "qemu-nbd", "qemu-img")),
    reason="needs QEMU and its tools",
)


def counted(job: JobAd, console: str = "vm_console.log") -> int:
    """How far the guest that counts has come, by its console."""
    path = Path(job.working_dir(), console)
    return max(counts(path.read_bytes()), default=0) if path.exists() else 0


def content_of(image: Path, image_format: str) -> bytes:
    """The content of a disk, by qemu-img."""
    raw = image.parent.parent / f"{image.name}.raw"
    command = ["qemu-img", "convert", "-f", image_format, "-O", "raw", image, raw]
    subprocess.run(command, check=True, timeout=DEADLINE)
    content = raw.read_bytes()
    raw.unlink()
    return content


def does(peer: Peer, *commands: str) -> None:
    """These commands succeed, one after the other."""
    for command in commands:
        assert peer.run(command, 1) == ["0", "NULL"], command


def status(peer: Peer) -> dict[str, str]:
    """Return the words of a STATUS, which succeeds."""
    result = peer.run("STATUS", 1)
    assert result[0] == "0", result
    return dict(word.split("=", 1) for word in result[1:])


def only(*names: str) -> Callable[[type], type]:
    """Leave of the contract what differs from that of a sibling with the same code."""

    def leave(contract: type) -> type:
        tests = {name for name in dir(contract) if name.startswith("test_")}
        assert set(names) <= tests, f"the contract has no {', '.join(set(names) - tests)}"
        for name in tests.difference(names):
            setattr(contract, name, None)
        return contract

    return leave


class Emulated(Subject):
    """libvirt with QEMU, and the guest of a boot sector that counts."""

    vm_type = "qemu"
    uri = URI

    def prepare(self, scratch: Path, number: int, ends: bool) -> dict[str, str]:
        disk = scratch / "guest.img"
        make_guest(disk, seconds=1 if ends else None)
        for path in (scratch, disk):
            os.chown(path, WHO.uid, WHO.gid)
        (scratch / "vm_console.log").unlink(missing_ok=True)
        return {"VMPARAM_vm_Disk": '"guest.img:vda:w:raw"'}

    def exists(self, job: JobAd) -> bool:
        import libvirt

        with contextlib.closing(libvirt.open(self.uri)) as connection:
            return job.vm_name() in [domain.name() for domain in connection.listAllDomains()]

    def bad_jobs(self) -> dict[str, JobAd]:
        job = self.job(2)
        return {
            what: self.changed(job, VMPARAM_vm_Disk=f'"{disk}"')
            for what, disk in {
                "a disk that is not there": "nothing.img:vda:w:raw",
                "another format": "guest.img:vda:w:qcow2",
                "no device": "guest.img:nothing:w:raw",
            }.items()
        }

    def unfit(self) -> Settings:
        nowhere = "qemu+unix:///system?socket=/nonexistent/libvirt-sock"
        return Settings({"VM_MEMORY": "1024", "VM_LIBVIRT_URI": nowhere})

    def count(self, job: JobAd) -> int:
        return counted(job)


class AnyHypervisor(Emulated):
    """libvirt's own test hypervisor, which is in this process: for any that VM_LIBVIRT_DOMAIN_TYPE can name."""

    vm_type = "libvirt"
    uri = TEST_URI
    suspend = False
    checkpoint = False
    has_guest = False

    def prepare(self, scratch: Path, number: int, ends: bool) -> dict[str, str]:
        disk = scratch / "guest.img"
        disk.write_bytes(bytes(1 << 16))
        for path in (scratch, disk):
            os.chown(path, WHO.uid, WHO.gid)
        return {"VMPARAM_vm_Disk": '"guest.img:vda:w:raw"'}

    def unfit(self) -> Settings:
        return Settings(ANY | {"VM_LIBVIRT_DOMAIN_TYPE": "lxc"})

    def power_off(self, job: JobAd) -> None:
        import libvirt

        with contextlib.closing(libvirt.open(self.uri)) as connection:
            connection.lookupByName(job.vm_name()).shutdown()


@contextlib.contextmanager
def any_hypervisor(scratch: Path) -> Iterator[AnyHypervisor]:
    """The subject, with a connection: the domains of the test hypervisor live as long as one does."""
    import libvirt

    with contextlib.closing(libvirt.open(TEST_URI)), AnyHypervisor(scratch.parent, Settings(ANY), WHO) as subject:
        yield subject
