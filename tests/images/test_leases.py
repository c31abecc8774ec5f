"""Images that stand still, with the kernel's own leases and another process that writes to them."""

import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import JOB_UID
from tests.images.support import AS_ROOT
from vmgahp import errors
from vmgahp.host import wait
from vmgahp.images import leases
from vmgahp.images.formats import HEADER
from vmgahp.images.leases import OpenImage, file_system, head, leased

QCOW2 = struct.pack(">4sIQIIQ", b"QFI\xfb", 3, 0, 0, 16, 1 << 20).ljust(512, b"\0")
WITH_DATA_FILE = QCOW2[:72] + struct.pack(">Q", 4) + QCOW2[80:]
DIRTY = QCOW2[:72] + struct.pack(">Q", 1) + QCOW2[80:]
VMDK = struct.pack("<4sIIQ", b"KDMV", 1, 3, 2048).ljust(512, b"\0")
WITH_EXTENTS = b'# Disk DescriptorFile\ncreateType="monolithicFlat"\nRW 1 FLAT "/etc/passwd" 0\n'
Opened = Callable[..., OpenImage]
INSIDE = struct.pack("<4sIIQ", b"KDMV", 1, 3, 0).ljust(512, b"\0")


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "PATIENCE", 0.3)
    monkeypatch.setattr(leases, "INTERVAL", 0.02)


@pytest.fixture
def image(scratch: Path) -> Path:
    path = scratch / "disk"
    path.write_bytes(QCOW2)
    path.chmod(0o666)
    return path


@pytest.fixture
def opened(image: Path) -> Iterator[Opened]:
    descriptors: list[int] = []

    def open_it(flags: int = os.O_RDWR, image_format: str = "qcow2") -> OpenImage:
        descriptors.append(os.open(image, flags))
        return OpenImage(str(image), image_format, descriptors[-1])

    yield open_it
    for descriptor in descriptors:
        os.close(descriptor)


def can_open(path: Path, flags: int = os.O_RDWR) -> bool:
    """Whether another process can, at once."""
    code = "import os, sys; os.open(sys.argv[1], int(sys.argv[2]))"
    words = [sys.executable, "-ISc", code, path, str(flags | os.O_NONBLOCK)]
    return subprocess.run(words, stderr=subprocess.DEVNULL).returncode == 0


def refused(said: str, *images: OpenImage, needed: bool = True) -> errors.JobFault:
    with pytest.raises(errors.JobFault, match=said) as caught, leased(list(images), needed=needed):
        pytest.fail("they are held")
    return caught.value


def test_nobody_else_opens_it_while_it_is_held(image: Path, opened: Opened) -> None:
    with leased([opened()], needed=True) as require:
        require()
        assert not can_open(image)
        assert not can_open(image, os.O_RDONLY), "QEMU writes to it: a reader could hold up a later lease"
        require()  # who tries has to wait, and this process was not ended by the signal that says so
    assert can_open(image)


def test_a_header_is_read_past_the_page_cache_too(image: Path, opened: Opened) -> None:
    plain = opened()
    try:
        past_cache = opened(os.O_RDWR | os.O_DIRECT)
    except OSError:
        pytest.skip("needs O_DIRECT")
    assert head(past_cache) == head(plain) == image.read_bytes()[:HEADER]


def test_one_that_is_only_read_is_open_to_readers(image: Path, opened: Opened) -> None:
    with leased([opened(os.O_RDONLY), opened(os.O_RDONLY)], needed=True) as require:
        assert can_open(image, os.O_RDONLY)
        assert not can_open(image)
        require()
    assert can_open(image)


def test_truncating_by_name_waits_too(image: Path, opened: Opened) -> None:
    over = threading.Event()

    def truncate() -> None:
        os.truncate(image, 0)
        over.set()

    thread = threading.Thread(target=truncate)
    with leased([opened()], needed=True) as require:
        thread.start()
        assert not over.wait(0.2)
        require()
        assert image.stat().st_size == 512
    assert over.wait(10)
    thread.join()


@pytest.mark.parametrize("needed", [False, True])
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR])
def test_one_that_a_process_can_write_to_is_refused(image: Path, opened: Opened, flags: int, needed: bool) -> None:
    ours = opened(flags)
    with image.open("r+b"):
        assert refused("open in another process", ours, needed=needed).code == errors.INVALID_DISK_PARAM
    with leased([ours], needed=needed) as require:
        require()


def test_a_process_that_maps_it_counts(image: Path, opened: Opened) -> None:
    import mmap

    with image.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    with mapped:
        refused("open in another process", opened())


def test_one_that_is_let_go_is_waited_for(image: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    other = image.open("r+b")
    monkeypatch.setattr(wait, "sleep", lambda _: other.close())
    with leased([opened()], needed=True) as require:
        require()


def test_all_images_of_a_vm_are_waited_for_together(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that lets go of one after the other must not have a START take longer than it may."""
    clock, waiting, images = [100.0], [], []
    for number in range(10):
        path = scratch / f"disk{number}"
        path.write_bytes(QCOW2)
        path.chmod(0o666)
        waiting.append(path.open("r+b"))
        images.append(OpenImage(str(path), "qcow2", os.open(path, os.O_RDWR)))
    others = list(waiting)

    def sleep(_: float) -> None:
        clock[0] += 0.2
        others.pop(0).close()

    monkeypatch.setattr(wait, "sleep", sleep)
    for module in (leases, wait):
        monkeypatch.setattr(module, "monotonic", lambda: clock[0])
    refused("open in another process", *images)
    assert clock[0] < 100 + 2 * leases.PATIENCE
    for file in waiting:
        file.close()
    for image in images:
        os.close(image.descriptor)


def test_one_that_waited_too_long_may_write(image: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    with leased([opened()], needed=True) as require:
        assert not can_open(image)
        monkeypatch.setattr(leases, "_break_time", lambda: 1e-9)
        with pytest.raises(errors.JobFault, match="was opened by another process"):
            require()
    assert can_open(image)


@pytest.mark.parametrize(
    ("image_format", "header"),
    [
        *(("qcow2", text) for text in (DIRTY, WITH_DATA_FILE)),
        *(("vmdk", text) for text in (WITH_EXTENTS, INSIDE, b"", QCOW2)),
    ],
)
def test_a_header_that_was_changed_is_refused(image: Path, opened: Opened, image_format: str, header: bytes) -> None:
    image.write_bytes(header)
    refused("since it was looked at", opened(image_format=image_format))
    assert can_open(image), "nothing is held after a refusal"


@pytest.mark.parametrize(("image_format", "header"), [("qcow2", QCOW2), ("vmdk", VMDK), ("vmdk", b"COWD" * 128)])
def test_a_header_of_one_file_is_held(image: Path, opened: Opened, image_format: str, header: bytes) -> None:
    image.write_bytes(header)
    with leased([opened(image_format=image_format)], needed=True) as require:
        require()


@pytest.mark.parametrize("image_format", ["raw", "qcow", "vdi", "vpc"])
def test_formats_that_name_no_files_may_be_open_elsewhere(image: Path, opened: Opened, image_format: str) -> None:
    with image.open("r+b"), leased([opened(image_format=image_format)], needed=True) as require:
        require()


@pytest.mark.parametrize("kind", ["nfs", "fuse.sshfs", "cifs", "9p", ""])
def test_no_far_file_system_holds_it(image: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(leases, "file_system", lambda _: kind)
    assert "VM_RUN_AS_JOB_USER" in refused("file system", opened()).hint
    with leased([opened()], needed=False) as require:
        require()
        assert can_open(image)


def test_a_file_system_has_leases(image: Path, opened: Opened, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = subprocess.run(["stat", "-f", "-c", "%T", "/dev/shm"], capture_output=True, text=True, check=True)
    descriptor = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
    assert file_system(descriptor) == found.stdout.strip()
    os.close(descriptor)
    assert file_system(opened().descriptor) in leases.LOCAL
    assert leases.why_no_lease(str(scratch), os.getuid()) == ""
    monkeypatch.setattr(leases, "file_system", lambda _: "fuse.sshfs")
    assert "fuse.sshfs" in leases.why_no_lease(str(scratch), os.getuid())
    assert list(scratch.iterdir()) == [image]


@AS_ROOT
def test_without_the_right_to_leases_a_directory_has_none(scratch: Path) -> None:
    code = f"from vmgahp.images.leases import why_no_lease; print(why_no_lease({str(scratch)!r}, {JOB_UID}))"
    words = ["setpriv", "--bounding-set=-lease", "--inh-caps=-lease", sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "the kernel gives no lease (Permission denied)\n"


@AS_ROOT
def test_one_that_only_root_can_write_to_needs_no_lease(image: Path, opened: Opened) -> None:
    image.chmod(0o644)
    with leased([opened(os.O_RDONLY)], needed=True) as require:
        require()
        assert can_open(image)


TRIES = 40
WRITER = """
import os, sys
path, one, other = sys.argv[1], bytes.fromhex(sys.argv[2]), bytes.fromhex(sys.argv[3])
print(flush=True)
while True:
    for header in (one, other):
        try:
            opened = os.open(path, os.O_RDWR)
        except OSError:
            continue
        os.pwrite(opened, header, 0)
        os.close(opened)
"""


def test_a_process_that_rewrites_the_header_never_does_so_meanwhile(image: Path, opened: Opened) -> None:
    words = [sys.executable, "-ISc", WRITER, image, QCOW2.hex(), WITH_DATA_FILE.hex()]
    held = refused = 0
    disk = opened()
    with subprocess.Popen(words, stdout=subprocess.PIPE) as writer:
        writer.stdout.readline()
        try:
            for _ in range(TRIES):
                try:
                    with leased([disk], needed=True) as require:
                        for _ in range(200):
                            assert os.pread(disk.descriptor, 512, 0) == QCOW2
                        require()
                        held += 1
                except errors.JobFault:
                    refused += 1
        finally:
            writer.kill()
    assert held + refused == TRIES
    image.write_bytes(QCOW2)
    with leased([disk], needed=True) as require:
        require()
