"""The image that ``vmgahp image build`` made, booted both ways, with and without a network."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.lab import cloud_image

pytestmark = [
    pytest.mark.qemu,
    pytest.mark.timeout(cloud_image.BOOT + 60),
    pytest.mark.skipif(bool(cloud_image.why_none()), reason=cloud_image.why_none()),
]

SCRIPT = """\
#!/bin/sh
tell() { echo "seen: $*" >/dev/ttyS0; }
tell "cards $(ls -d /sys/class/net/*/device | wc -l)"
tell "address $(ip -4 -br address show scope global | awk '{ print $3 }')"
tell "name $(hostname)"
tell "firmware $([ -d /sys/firmware/efi ] && echo uefi || echo bios)"
tell "room $(($(df --output=size / | tail -n 1) >> 20)) GiB"
tell "failed $(systemctl list-units --failed --no-legend --plain | wc -l)"
tell "passwords $(grep -c '^[^:]*:[$]' /etc/shadow)"
tell "own $(stat -c %U /root /usr /etc/fstab | sort -u)"
systemctl poweroff
"""
FIRMWARE = Path("/usr/share/OVMF")


def boot(directory: Path, *words: str) -> dict[str, str]:
    """Boot an overlay of 5 GiB, and return what the user data's script saw."""
    disk, seed, console = directory / "disk.qcow2", directory / "seed", directory / "console.log"
    make = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", cloud_image.IMAGE, disk, "5G"]
    subprocess.run(make, check=True, timeout=60)
    with seed.open("xb") as file:
        file.truncate(1 << 20)
    subprocess.run(["mformat", "-i", seed, "-v", "CIDATA", "::"], check=True, timeout=60)
    for name, text in (("user-data", SCRIPT), ("meta-data", "instance-id: one\nlocal-hostname: guest-of-a-test\n")):
        (directory / name).write_text(text)
        subprocess.run(["mcopy", "-i", seed, directory / name, f"::/{name}"], check=True, timeout=60)
    subprocess.run(
        [
            *("qemu-system-x86_64", "-accel", "tcg", "-m", str(cloud_image.MEMORY_MIB)),
            *("-display", "none", "-no-reboot", "-serial", f"file:{console}"),
            *("-drive", f"file={disk},if=virtio,format=qcow2"),
            *("-drive", f"file={seed},if=virtio,format=raw,readonly=on", *words),
        ],
        check=True,
        timeout=cloud_image.BOOT,
    )
    lines = console.read_text(errors="replace").splitlines()
    seen = [line.partition("seen: ")[2] for line in lines if "seen: " in line]
    return dict(line.strip().split(" ", 1) if " " in line.strip() else (line.strip(), "") for line in seen)


COMMON = {"name": "guest-of-a-test", "room": "4 GiB", "failed": "0", "passwords": "0", "own": "root"}


def test_it_boots_by_bios_without_a_network(tmp_path: Path) -> None:
    assert boot(tmp_path, "-nic", "none") == COMMON | {"firmware": "bios", "cards": "0", "address": ""}


def test_it_boots_by_uefi_with_a_network(tmp_path: Path) -> None:
    variables = shutil.copy(FIRMWARE / "OVMF_VARS_4M.fd", tmp_path)
    code = FIRMWARE / "OVMF_CODE_4M.fd"
    firmware = ["-machine", "q35", "-drive", f"if=pflash,format=raw,readonly=on,file={code}"]
    firmware += ["-drive", f"if=pflash,format=raw,file={variables}"]
    seen = boot(tmp_path, *firmware, "-nic", "user,model=virtio-net-pci")
    assert seen == COMMON | {"firmware": "uefi", "cards": "1", "address": "10.0.2.15/24"}
