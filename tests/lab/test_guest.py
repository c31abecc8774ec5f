"""The lab's own guest, run by QEMU without libvirt: what every real test builds on."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.lab import guest

is_missing = pytest.mark.skipif(shutil.which("qemu-system-x86_64") is None, reason="needs qemu-system-x86_64")

IDE = "-drive if=ide,format={format},file={disk}"
VIRTIO = "-drive if=virtio,format={format},file={disk}"
SATA = "-drive if=none,id=d0,format={format},file={disk} -device ich9-ahci -device ide-hd,drive=d0"


def boot(disk: Path, machine: str = "pc", drive: str = IDE, format: str = "raw", extra: str = "") -> str:
    """Run the guest to its end, by its own power-off, and return its console."""
    console = disk.with_name("console")
    command = f"qemu-system-x86_64 -accel tcg -machine {machine} -m 16 -nodefaults -display none -no-reboot"
    command += f" -serial file:{console} " + drive.format(disk=disk, format=format) + extra
    subprocess.run(command.split(), check=True, timeout=60, stdin=subprocess.DEVNULL)
    return console.read_bytes().decode("ascii")


@pytest.mark.qemu
@is_missing
@pytest.mark.parametrize(
    ("machine", "drive", "format"),
    [("pc", IDE, "raw"), ("q35", VIRTIO, "raw"), ("q35", SATA, "raw"), ("pc", VIRTIO, "qcow2")],
    ids=["pc-ide", "q35-virtio", "q35-sata", "qcow2"],
)
def test_it_counts_on_console_and_disk_and_powers_off(tmp_path: Path, machine: str, drive: str, format: str) -> None:
    disk = guest.make_guest(tmp_path / "guest.img", seconds=2, format=format)
    assert guest.read_count(disk) == 0
    console = boot(disk, machine, drive, format)
    assert console == f"{guest.BANNER}\r\n1\r\n2\r\n{guest.DONE}\r\n"
    assert guest.counts(console) == [1, 2]
    assert guest.read_count(disk) == 2


@pytest.mark.qemu
@is_missing
def test_it_says_when_its_disk_cannot_be_written(tmp_path: Path) -> None:
    disk = guest.make_guest(tmp_path / "guest.img", seconds=1)
    assert guest.WRITE_FAILED in boot(disk, drive=VIRTIO, extra=",readonly=on")
    assert guest.read_count(disk) == 0


@pytest.mark.parametrize("seconds", [0, 65536])
def test_a_count_that_does_not_fit_is_refused(seconds: int) -> None:
    with pytest.raises(ValueError, match="16 bits"):
        guest.boot_sector(seconds)


def test_counts_takes_whole_lines_only() -> None:
    assert guest.counts(b"vmgahp guest up\r\n1\r\n2\r\n3") == [1, 2]
