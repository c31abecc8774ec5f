"""A sysfs of devices that this machine does not have."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from vmgahp.host import pci

GPU, GPU_SOUND, LONE = "0000:3b:00.0", "0000:3b:00.1", "0000:5e:00.0"
NETWORK, DISK = "0000:06:00.0", "0000:07:00.0"
VGPU, PARTS = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001", "mdev_type"


class Sysfs:
    """The directories that `vmgahp.host.pci` reads, below a temporary one."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.dev = root / "sys", root / "dev"
        self.dev.mkdir()
        self.busy: set[Path] = set()
        for place in ("bus/pci/devices", "class/net", "class/block", "kernel/iommu_groups"):
            (self.root / place).mkdir(parents=True)
        for name, path in (("SYSFS", self.root), ("DEV", self.dev)):
            monkeypatch.setattr(pci, name, str(path))
        opened = os.open

        def open_(path: str, flags: int, *more: int, **options: int) -> int:
            if Path(path) in self.busy and flags & os.O_EXCL:
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
            return opened(path, flags, *more, **options)

        monkeypatch.setattr(pci.os, "open", open_)

    def write(self, name: str, text: str) -> Path:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
        return file

    def add(
        self, address: str, kind: str, group: Sequence[str] | None, driver: str = "", boot_vga: str | None = None
    ) -> None:
        """Add a PCI device of a class, with the members of its IOMMU group; None for no group."""
        place = f"devices/pci0000:00/{address}"
        self.write(f"{place}/class", kind)
        if boot_vga is not None:
            self.write(f"{place}/boot_vga", boot_vga)
        if driver:
            (self.root / place / "driver").symlink_to(f"../../../bus/pci/drivers/{driver}")
        for member in group or ():
            self.write(f"{place}/iommu_group/devices/{member}", "")
        (self.root / "bus/pci/devices" / address).symlink_to(self.root / place)

    def interface(self, address: str, name: str, flags: str) -> None:
        self._attach("net", address, name, "flags", flags)

    def disk(self, address: str, name: str) -> Path:
        """Attach a disk; its file in /dev is busy once it is in `busy`."""
        self._attach("block", address, name, "ro", "0")
        file = self.dev / name
        file.touch()
        return file

    def _attach(self, kind: str, address: str, name: str, file: str, text: str) -> None:
        made = self.write(f"devices/pci0000:00/{address}/{kind}/{name}/{file}", text).parent
        link = self.root / "class" / kind / name
        if not link.is_symlink():
            link.symlink_to(made)
