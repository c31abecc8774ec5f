"""Backing chains, looked at with real qemu-img as the job's user."""

import selectors
import socket
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import jobs
from tests.images.support import AS_ROOT
from vmgahp import errors
from vmgahp.host.job_user import Identity
from vmgahp.images.formats import MOST_LAYERS, BackingFile, backing_chain, require_whole

pytestmark = pytest.mark.libvirt


def create(path: Path, *options: str, image_format: str = "qcow2") -> Path:
    command = ["qemu-img", "create", "-q", "-f", image_format, *options, str(path)]
    subprocess.run([*command, "1M"] if "-u" in options or "-b" not in options else command, check=True)
    jobs.own(path.parent, path)
    return path


def refused(path: Path, user: Identity) -> errors.JobFault:
    with pytest.raises(errors.JobFault) as raised:
        backing_chain(str(path), "qcow2", user)
    return raised.value


def test_the_nearest_layer_comes_first(scratch: Path, user: Identity) -> None:
    assert backing_chain("/nowhere", "raw", user) == ()
    assert backing_chain(str(create(scratch / "a")), "qcow2", user) == ()
    base = create(scratch / "base", image_format="raw")
    middle = create(scratch / "middle", "-b", str(base), "-F", "raw")
    top = create(scratch / "top", "-b", "middle", "-F", "qcow2")
    assert backing_chain(str(top), "qcow2", user) == (BackingFile(str(middle), "qcow2"), BackingFile(str(base), "raw"))


def test_an_encrypted_image_is_the_jobs_fault(scratch: Path, user: Identity) -> None:
    """Or libvirt would say that QEMU cannot open it, and somebody else would be blamed."""
    options = "encrypt.format=aes,encrypt.key-secret=s"  # luks measures the processor, and fails on a busy one
    fault = refused(create(scratch / "a", "--object", "secret,id=s,data=x", "-o", options), user)
    assert (fault.code, "is encrypted" in fault.problem) == (errors.INVALID_DISK_PARAM, True)


@AS_ROOT
def test_a_file_of_the_hosts_is_not_a_backing_file(scratch: Path, user: Identity) -> None:
    fault = refused(create(scratch / "top", "-u", "-b", "/etc/shadow", "-F", "raw"), user)
    assert fault.code == errors.INVALID_DISK_PARAM
    assert "Permission denied" in fault.problem


class Listener:
    """A server on this machine that nobody may come to: of TCP on the loopback, and of a Unix socket."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "server"
        self._tcp = socket.create_server(("127.0.0.1", 0))
        self._unix = socket.socket(socket.AF_UNIX)
        self._unix.bind(str(self.path))
        self._unix.listen()
        self.path.chmod(0o666)
        self.port = self._tcp.getsockname()[1]

    def visitors(self) -> int:
        """How many have come: a connection that was made is in the queue, also after the other end has gone."""
        with selectors.DefaultSelector() as waiting:
            for server in (self._tcp, self._unix):
                waiting.register(server, selectors.EVENT_READ)
            return len(waiting.select(0))

    def close(self) -> None:
        self._tcp.close()
        self._unix.close()


@pytest.fixture
def listener(scratch: Path) -> Iterator[Listener]:
    made = Listener(scratch)
    yield made
    made.close()


NO_FILES = [
    *("nbd://127.0.0.1:PORT/x", "nbd:127.0.0.1:PORT:exportname=x", "nbd+tcp://127.0.0.1:PORT/x"),
    *("nbd+unix:///x?socket=SOCKET", "nbd:unix:SOCKET", 'json:{"driver":"nbd","host":"127.0.0.1","port":"PORT"}'),
    'json:{"driver":"raw","file":{"driver":"nbd","server":{"type":"unix","path":"SOCKET"}}}',
    *('json:{"driver":"file","filename":"/etc/passwd"}', 'json:{"driver":"null-co"}', "http://127.0.0.1:PORT/x"),
    *("ssh://127.0.0.1:PORT/x", "iscsi://127.0.0.1:PORT/x/1", "blkdebug::nbd://127.0.0.1:PORT/x", "null-co://"),
    *("fat:/", "fat:rw:/", "file:/etc/passwd", "host_device:/dev/zero", "/dev/zero", "/dev/fdset/0", "/proc/self/fd/0"),
    *("/proc/self/mem", "SCRATCH", "SOCKET"),
]
"""Names of what is no plain file of this machine."""


def naming(backing: str, listener: Listener) -> str:
    words = {"PORT": str(listener.port), "SOCKET": str(listener.path), "SCRATCH": str(listener.path.parent)}
    for word, value in words.items():
        backing = backing.replace(word, value)
    return backing


@pytest.mark.parametrize(
    ("backing", "backing_format", "depth"),
    [
        *((backing, "raw", 1) for backing in NO_FILES),
        *((NO_FILES[0], backing_format, depth) for depth in (1, 3) for backing_format in ("qcow2", "nbd")),
        ("/dev/zero", "raw", 3),
    ],
)
def test_a_backing_file_that_is_no_file_is_refused_and_nobody_goes_there(
    scratch: Path, user: Identity, listener: Listener, backing: str, backing_format: str, depth: int
) -> None:
    below, below_format = naming(backing, listener), "raw"
    for number in range(depth):
        made = create(scratch / f"layer{number}", "-u", "-b", below, "-F", below_format)
        if not number:
            patch_backing_format(made, backing_format)
        below, below_format = str(made), "qcow2"
    assert refused(Path(below), user).code == errors.INVALID_DISK_PARAM
    assert not listener.visitors()


def patch_backing_format(image: Path, name: str) -> None:
    """Write another name over the format ``raw`` of the header, which qemu-img would refuse to write."""
    data = image.read_bytes()
    old = struct.pack(">II8s", 0xE2792ACA, 3, b"raw")
    assert data.count(old) == 1
    image.write_bytes(data.replace(old, struct.pack(">II8s", 0xE2792ACA, len(name), name.encode())))


@pytest.mark.parametrize("name", ["-x", "a:b", "nbd:a:1", "a,b", "json:{}", "ä b", "a%b", "a'b"])
def test_a_file_with_a_strange_name_is_a_file(scratch: Path, user: Identity, name: str) -> None:
    base = create(scratch / name)
    top = create(scratch / "top", "-b", str(base), "-F", "qcow2")
    assert backing_chain(str(top), "qcow2", user) == (BackingFile(str(base), "qcow2"),)
    require_whole(str(base), "qcow2", user)


@pytest.mark.parametrize("name", ["a\nb", "a\x01b", "a\x7fb", "a\ufffeb", "a\u2028b"])
def test_a_file_whose_name_libvirt_could_not_be_told_is_refused(scratch: Path, user: Identity, name: str) -> None:
    fault = refused(create(scratch / "top", "-b", str(create(scratch / name)), "-F", "qcow2"), user)
    assert fault.code == errors.INVALID_DISK_PARAM
    assert fault.problem.isprintable()


def test_a_circle_and_a_chain_without_end_are_refused(scratch: Path, user: Identity) -> None:
    one = create(scratch / "one", "-u", "-b", str(scratch / "two"), "-F", "qcow2")
    create(scratch / "two", "-u", "-b", str(one), "-F", "qcow2")
    assert f"more than {MOST_LAYERS}" in refused(one, user).problem
    itself = create(scratch / "itself", "-u", "-b", "itsel/", "-F", "qcow2")
    itself.write_bytes(itself.read_bytes().replace(b"itsel/", b"itself"))
    assert f"more than {MOST_LAYERS}" in refused(itself, user).problem


@pytest.mark.parametrize("said", ["nonsense", "vhdx", "luks", "file", "nbd", "raw\nraw"])
def test_a_backing_file_of_a_format_that_cannot_be_used_is_refused(scratch: Path, user: Identity, said: str) -> None:
    top = create(scratch / "top", "-b", str(create(scratch / "base", image_format="raw")), "-F", "raw")
    patch_backing_format(top, said)
    assert refused(top, user).code == errors.INVALID_DISK_PARAM


@pytest.mark.parametrize("layer", ["top", "base"])
@pytest.mark.parametrize("data", ["SCRATCH/data", "nbd://127.0.0.1:PORT/x", "nbd+unix:///x?socket=SOCKET", "/dev/zero"])
def test_data_elsewhere_are_refused(scratch: Path, user: Identity, listener: Listener, layer: str, data: str) -> None:
    image = create(scratch / layer, "-o", f"data_file={scratch}/data,data_file_raw=on")
    jobs.own(scratch, scratch / "data")
    name = naming(data, listener).encode()
    old = struct.pack(">II", 0x44415441, len(str(scratch)) + 5)
    header = image.read_bytes()
    at = header.index(old)
    renamed = struct.pack(">II", 0x44415441, len(name)) + name.ljust(-len(name) % 8 + len(name), b"\0") + bytes(8)
    image.write_bytes(header[:at] + renamed + header[at + len(renamed) :])
    top = image if layer == "top" else create(scratch / "over", "-u", "-b", str(image), "-F", "qcow2")
    assert "another file" in refused(top, user).problem
    with pytest.raises(errors.JobFault, match="another file"):
        require_whole(str(image), "qcow2", user)
    assert not listener.visitors()


EXTENT = '# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\ncreateType="%s"\nRW 2048 FLAT "%s" 0\n'


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("layer", ["top", "base"])
@pytest.mark.parametrize("data", ["data", "SCRATCH/data", "nbd://127.0.0.1:PORT/x", "nbd:unix:SOCKET", "/dev/zero"])
def test_extents_of_a_vmdk_are_refused(scratch, user, listener, data, layer, inside):
    (scratch / "data").write_bytes(bytes(1 << 20))
    text = (EXTENT % ("monolithicFlat", naming(data, listener))).encode()
    if inside:  # in the image itself, which has no capacity of its own
        text = struct.pack("<4sIIQQQQ", b"KDMV", 1, 3, 0, 128, 1, 20).ljust(512, b"\0") + text.ljust(20 * 512, b"\0")
    image = scratch / "disk.vmdk"
    image.write_bytes(text)
    jobs.own(scratch, image)
    top = image if layer == "top" else create(scratch / "over", "-u", "-b", str(image), "-F", "vmdk")
    with pytest.raises(errors.JobFault, match="another file"):
        backing_chain(str(top), "vmdk" if layer == "top" else "qcow2", user)
    assert not listener.visitors()


@pytest.mark.parametrize("subformat", ["monolithicSparse", "streamOptimized"])
def test_a_vmdk_of_one_file_is_one(scratch: Path, user: Identity, subformat: str) -> None:
    image = create(scratch / "disk.vmdk", "-o", f"subformat={subformat}", image_format="vmdk")
    assert backing_chain(str(image), "vmdk", user) == ()


def test_a_damaged_image_and_one_of_another_format_are_bad_images(scratch: Path, user: Identity) -> None:
    damaged = create(scratch / "damaged")
    damaged.write_bytes(b"QFI\xfb" + bytes(100))
    for bad in (damaged, create(scratch / "raw", image_format="raw")):
        assert refused(bad, user).code == errors.BAD_IMAGE


def test_one_that_says_too_much_is_the_jobs(scratch: Path, user: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one with tens of thousands of snapshots, each with a name of a thousand bytes."""
    monkeypatch.setattr("vmgahp.images.qemu_img.MOST_OUTPUT", 100)
    assert refused(create(scratch / "a"), user).code == errors.BAD_IMAGE
