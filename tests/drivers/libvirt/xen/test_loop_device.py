"""Loop devices of files that somebody else has opened: what they read and write, who else may, and their end."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from vmgahp.drivers.libvirt.xen import dom0

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "disk.img"
    path.write_bytes(b"first sector".ljust(1 << 20, b"\0"))
    return path


@pytest.fixture
def devices() -> Iterator[list[int]]:
    held: list[int] = []
    yield held
    for descriptor in held:
        os.close(descriptor)


def attach(path: Path, held: list[int], *, writable: bool, shared: bool = False) -> tuple[str, int]:
    descriptor = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    try:
        name, device = dom0.attach(descriptor, writable=writable, shared=shared)
    finally:
        os.close(descriptor)
    held.append(device)
    return name, device


def test_it_is_the_file_whatever_becomes_of_its_name(image: Path, devices: list[int]) -> None:
    descriptor = os.open(image, os.O_RDWR)
    image.rename(image.with_name("moved"))
    image.symlink_to("/etc/passwd")
    _, device = dom0.attach(descriptor, writable=True)
    os.close(descriptor)
    devices.append(device)
    assert os.lseek(device, 0, os.SEEK_END) == 1 << 20
    assert os.pread(device, 12, 0) == b"first sector"
    os.pwrite(device, b"other".ljust(512, b"\0"), 0)
    os.fsync(device)
    assert image.with_name("moved").read_bytes()[:12] == b"other" + bytes(7)


def test_a_read_only_one_cannot_be_written(image: Path, devices: list[int]) -> None:
    name, _ = attach(image, devices, writable=False)
    # The descriptor would not let it be written either; what Xen's guests are told is this.
    assert (Path("/sys/block") / os.path.basename(name) / "ro").read_text().strip() == "1"
    again = os.open(name, os.O_RDWR)  # which Linux grants
    devices.append(again)
    with pytest.raises(PermissionError):
        os.pwrite(again, bytes(512), 0)


def test_it_goes_when_nobody_has_it_open(image: Path, devices: list[int]) -> None:
    name, _ = attach(image, devices, writable=True)
    state = Path("/sys/block") / os.path.basename(name) / "loop/backing_file"
    assert state.read_text().strip() == str(image)
    os.close(devices.pop())
    # The lock goes with it, which is what the next one waits for.
    attach(image, devices, writable=True)


def test_a_writer_is_alone(image: Path, devices: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dom0, "LOCK_WAIT", 0.0)
    attach(image, devices, writable=True)
    for writable in (True, False):
        with pytest.raises(OSError, match="in use by another VM"):
            attach(image, devices, writable=writable)
    attach(image, devices, writable=True, shared=True)  # the job says that it minds no other


def test_readers_are_not(image: Path, devices: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dom0, "LOCK_WAIT", 0.0)
    assert len({attach(image, devices, writable=False)[0] for _ in range(2)}) == 2
    with pytest.raises(OSError, match="in use by another VM"):
        attach(image, devices, writable=True)
