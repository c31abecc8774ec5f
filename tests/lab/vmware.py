"""A machine with VMware on it, as far as tests need one: the stand-in for vmrun, and jobs for it."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests import jobs
from tests.lab.guest import make_guest, read_count

STAND_IN = Path(__file__).with_name("vmrun")
DEADLINE = 60.0


class VMware:
    """The stand-in, installed where the job's user can run it, with its state in `state`."""

    def __init__(self, directory: Path, product: str = "ws", seen_as: Path | None = None) -> None:
        """`seen_as` is where the jobs' machine has the directory, if that is another."""
        inside = seen_as or directory
        self.state = directory / "state"
        self.state.mkdir()
        script = directory / "stand-in"
        shutil.copyfile(STAND_IN, script)
        self.vmrun = directory / "vmrun"
        self.vmrun.write_text(
            f"#!/bin/sh\nVMRUN_STATE_DIR='{inside}/state' VMRUN_PRODUCT={product} "
            f"exec /usr/bin/env python3 '{inside}/stand-in' \"$@\"\n"
        )
        for path, mode in ((directory, 0o755), (script, 0o644), (self.vmrun, 0o755), (self.state, 0o1777)):
            path.chmod(mode)

    def misbehave(self, *modes: str) -> None:
        """Choose what goes wrong from now on, in the words of the stand-in's help; nothing without words."""
        (self.state / "modes").write_text(" ".join(modes))

    def calls(self) -> list[str]:
        """The commands so far, each with the uid that it ran as."""
        return [line for log in self.state.glob("*/calls") for line in log.read_text().splitlines()]

    def pids(self) -> dict[str, int]:
        """The VMs whose process is there: the path of the .vmx and the pid."""
        found = {}
        for path in self.state.glob("*/*.json"):
            record = json.loads(path.read_text())
            with contextlib.suppress(OSError):
                if record["vmx"].encode() in Path(f"/proc/{record['pid']}/cmdline").read_bytes().split(b"\0"):
                    found[record["vmx"]] = record["pid"]
        return found

    def kill_all(self) -> None:
        for pid in self.pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def vmware(product: str = "ws") -> Iterator[VMware]:
    with tempfile.TemporaryDirectory(prefix="vmgahp-vmware-", ignore_cleanup_errors=True) as directory:
        made = VMware(Path(directory), product)
        try:
            yield made
        finally:
            made.kill_all()


class VmwareJob:
    """A job with the boot-sector guest on a .vmdk, in a scratch directory of the job's user."""

    number = 0

    def __init__(self, scratch: Path, seconds: int | None = None, vmdk_type: str = "monolithicSparse") -> None:
        VmwareJob.number += 1
        self.cluster = os.getpid() * 100 + VmwareJob.number
        self.name = f"alice_lab_{self.cluster}.0"
        self.scratch = scratch
        self.vmx = scratch / "dos.vmx"
        self.working_vmx = scratch / "dos_condor.vmx"
        self.disk = scratch / "dos.vmdk"
        self.make_disk(self.disk, seconds, vmdk_type)
        self.write_vmx()

    def make_disk(self, path: Path, seconds: int | None, vmdk_type: str) -> None:
        convert(make_guest(path.with_suffix(".raw"), seconds=seconds), path, vmdk_type)
        self.own(*path.parent.glob(f"{path.stem}*.vmdk"))

    def write_vmx(self, *more: str) -> None:
        self.vmx.write_text(
            "\n".join(
                (
                    '.encoding = "UTF-8"', 'config.version = "8"', 'virtualHW.version = "10"', 'guestOS = "dos"',
                    'displayName = "what the job calls it"', 'memsize = "4096"', 'ide0:0.present = "TRUE"',
                    'ide0:0.fileName = "dos.vmdk"', 'serial0.present = "TRUE"', 'serial0.fileType = "file"',
                    'serial0.fileName = "serial.txt"', *more,
                )
            )
            + "\n"
        )  # fmt: skip
        self.own(self.vmx)

    def own(self, *paths: Path) -> None:
        jobs.own(self.scratch, *paths)

    def ad(self, *more: str) -> list[str]:
        vmdks = ",".join(sorted(path.name for path in self.scratch.glob("*.vmdk")))
        return jobs.lines(
            self.scratch, *more, JobVMType='"vmware"', JobVMMemory=32, VMPARAM_VMware_Dir='"/home/alice/vm"',
            VMPARAM_VMware_Transfer=True, VMPARAM_VMware_SnapshotDisk=True, VMPARAM_VMware_VMX_File='"dos.vmx"',
            VMPARAM_VMware_VMDK_Files=f'"{vmdks}"', ClusterId=self.cluster,
        )  # fmt: skip

    def console(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.scratch / "serial.txt").read_text()
        return ""


def convert(raw: Path, disk: Path, vmdk_type: str = "monolithicSparse") -> None:
    """Make a .vmdk of a raw disk, which goes away."""
    command = ["qemu-img", "convert", "-f", "raw", "-O", "vmdk", "-o", f"subformat={vmdk_type}"]
    subprocess.run([*command, raw, disk], check=True)
    raw.unlink()


def count_on(disk: Path) -> int:
    """The guest's last count on a .vmdk that no VM has open, or on the parents below it."""
    with tempfile.TemporaryDirectory() as directory:
        raw = Path(directory) / "disk.raw"
        subprocess.run(["qemu-img", "convert", "-f", "vmdk", "-O", "raw", disk, raw], check=True)
        return read_count(raw)
