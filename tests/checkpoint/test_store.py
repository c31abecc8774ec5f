"""Checkpoints: what was written is found again, and everything that does not fit is refused with a reason."""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoint.support import image
from tests.jobs import owner
from vmgahp.checkpoint import files, manifest
from vmgahp.checkpoint import store as checkpoint
from vmgahp.checkpoint.files import Unusable
from vmgahp.checkpoint.manifest import Manifest
from vmgahp.checkpoint.store import MANIFEST_FILE, MEMORY_FILE
from vmgahp.images.backing import BackingFile
from vmgahp.job.spec import Disk

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can have files that the user may not read")

UUID = "18b0b959-737e-4ba1-983e-ef517357615e"
HERE = {
    "name": "alice_lab_7.3",
    "vm_type": "kvm",
    "domain_type": "kvm",
    "host_cpu": "GenuineIntel 6/85/7",
    "qemu_version": 7_002_022,
}
"""What a checkpoint says of its job and machine, and a restart there finds again."""


class Job:
    """A job with a transferred overlay over a shared template, a shared disk, and a memory image."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.shared = scratch.parent / "shared"
        self.shared.mkdir()
        self.user = owner(scratch)
        self.template = self.put(self.shared / "template.img", os.urandom(100_000))
        self.overlay = self.put(scratch / "root.qcow2", os.urandom(200_000))
        self.data = self.put(self.shared / "data.img", os.urandom(300_000))
        self.memory = self.put(scratch / MEMORY_FILE, image(rest=os.urandom(3_000_000)))
        self.disks = [self.disk(self.overlay, "vda", format="qcow2"), self.disk(self.data, "sdb")]
        self.chains = {str(self.overlay): (BackingFile(str(self.template), "raw"),)}

    def put(self, path: Path, content: bytes) -> Path:
        path.write_bytes(content)
        if os.geteuid() == 0:
            os.chown(path, self.user.uid, self.user.gid)
        return path

    def disk(self, path: Path, device: str, **changes: object) -> Disk:
        plain = Disk(
            *(str(path), device, ""), writable=True, format="raw", transferred=path.parent == self.scratch, kind="disk"
        )
        return plain._replace(**changes)  # type: ignore[arg-type]

    def manifest(self, **changes: object) -> Manifest:
        directory = str(self.scratch)
        plain = Manifest(
            **HERE,  # type: ignore[arg-type]
            uuid=UUID,
            libvirt_version=9_000_000,
            machine_type="pc-i440fx-7.2",
            architecture="x86_64",
            xml="<domain>\n\t<name>a</name></domain>",
            cpu_seconds=12.5,
            time=1_700_000_000.25,
            disks=checkpoint.describe_disks(self.user, directory, self.disks, self.chains),
            memory=checkpoint.describe_memory(self.user, directory),
        )
        return plain._replace(**changes)

    @functools.cached_property
    def good(self) -> bytes:
        """The file of a good manifest; to read disks for each example of a property takes half a minute."""
        return manifest.dump(self.manifest())

    def save(self, **changes: object) -> Manifest:
        made = self.manifest(**changes)
        checkpoint.write(self.user, str(self.scratch), made)
        return made

    def load(self) -> Manifest | None:
        return checkpoint.load(self.user, str(self.scratch))

    def check(self, **changes: object) -> None:
        """Check what is in the scratch directory, as a restart does."""
        found = self.load()
        assert found is not None
        here = {**HERE, "memory_mib": 64, "disks": self.disks, "chains": self.chains, **changes}
        descriptor = checkpoint.check(self.user, str(self.scratch), found, **here)  # type: ignore[arg-type]
        assert os.read(descriptor, 16) == b"LibvirtQemudSave"
        os.close(descriptor)

    def refused(self, intact: bool, **changes: object) -> str:
        with pytest.raises(Unusable) as raised:
            self.check(**changes)
        assert raised.value.disks_intact is intact, raised.value.reason
        assert len(os.listdir("/proc/self/fd")) < 100
        return raised.value.reason

    def unreadable(self) -> str:
        with pytest.raises(Unusable) as raised:
            self.load()
        assert raised.value.disks_intact is False
        return raised.value.reason


@pytest.fixture
def job(scratch: Path) -> Job:
    return Job(scratch)


# There and back


def test_what_was_written_is_found(job: Job) -> None:
    made = job.save()
    assert job.load() == made
    status = (job.scratch / MANIFEST_FILE).stat()
    assert (status.st_mode & 0o777, status.st_uid) == (0o600, job.user.uid)
    job.check()


def test_no_checkpoint(job: Job) -> None:
    assert job.load() is None  # a memory image alone is none


def test_the_vnc_password_is_left_out(job: Job) -> None:
    job.save(xml="<graphics type='vnc' passwd='geheim' port='1'/><graphics passwd=\"geheim\"/>")
    found = job.load()
    assert found is not None
    assert found.xml == "<graphics type='vnc' port='1'/><graphics/>"


def test_files_of_the_scratch_directory_are_known_from_there_on(job: Job) -> None:
    root, data = job.manifest().disks
    assert (root.image.path, root.image.transferred) == ("root.qcow2", True)
    assert [(file.path, file.transferred) for file in root.backing] == [(str(job.template), False)]
    assert (data.image.path, data.image.transferred) == (str(job.data), False)


def test_another_machine_with_another_scratch_directory(job: Job) -> None:
    job.save()
    there = job.scratch.parent / "dir_2"
    job.scratch.rename(there)
    os.utime(there / "root.qcow2", (1, 1))  # a transfer gives the files new times
    job.scratch = there
    job.disks[0] = job.disk(there / "root.qcow2", "vda", format="qcow2")
    job.chains = {str(there / "root.qcow2"): (BackingFile(str(job.template), "raw"),)}
    job.check()


def test_a_manifest_that_could_not_be_read_again_is_not_written(job: Job) -> None:
    with pytest.raises(Unusable, match="uuid"):
        job.save(uuid="none")
    assert not (job.scratch / MANIFEST_FILE).exists()


def test_discard(job: Job) -> None:
    job.save()
    checkpoint.discard(job.user, str(job.scratch))
    checkpoint.discard(job.user, str(job.scratch))
    assert [path.name for path in job.scratch.iterdir()] == ["root.qcow2"]


def test_set_aside_overwrites_nothing(job: Job) -> None:
    job.save()
    mine = job.put(job.scratch / f"{MEMORY_FILE}.refused-1", b"the job's own")
    first = checkpoint.set_aside(job.user, str(job.scratch))
    assert first == [f"{MANIFEST_FILE}.refused-1", f"{MEMORY_FILE}.refused-2"]
    assert checkpoint.set_aside(job.user, str(job.scratch)) == []
    assert mine.read_bytes() == b"the job's own"
    assert job.load() is None


def test_set_aside_takes_what_is_in_the_place_of_the_files(job: Job) -> None:
    job.memory.unlink()
    (job.scratch / MEMORY_FILE).symlink_to("/etc/passwd")
    (job.scratch / MANIFEST_FILE).mkdir()
    before = Path("/etc/passwd").stat()
    assert len(checkpoint.set_aside(job.user, str(job.scratch))) == 2
    assert (job.scratch / f"{MEMORY_FILE}.refused-1").is_symlink()
    assert Path("/etc/passwd").stat() == before


# What does not fit


@pytest.mark.parametrize(
    ("here", "said"),
    [
        ({"name": "bob_lab_1.0"}, "checkpoint of 'alice_lab_7.3'"),
        ({"vm_type": "qemu"}, "VM type"),
        ({"domain_type": "qemu"}, r"made under KVM, and VMs here run under emulation"),
        ({"host_cpu": "AuthenticAMD 25/1/1"}, "another CPU"),
        ({"qemu_version": 6_002_000}, "QEMU 7.2.22, and here is 6.2.0"),
    ],
)
def test_a_checkpoint_of_another_job_or_machine(job: Job, here: dict[str, object], said: str) -> None:
    job.save()
    assert said in job.refused(True, **here)


@pytest.mark.parametrize(
    "here", [{"host_cpu": ""}, {"qemu_version": 10_000_000}, {"qemu_version": 7_002_001}, {"memory_mib": 4}]
)
def test_differences_that_do_not_matter(job: Job, here: dict[str, object]) -> None:
    job.save()
    job.check(**here)


def test_all_reasons_are_given(job: Job) -> None:
    job.save()
    job.data.unlink()
    reason = job.refused(False, vm_type="qemu", domain_type="qemu")
    assert reason.count(";") == 2


def grown(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(bytes(512))


def overwritten(path: Path, offset: int, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(content)


def written(path: Path) -> None:
    """Other content, with size and time as they were."""
    status = path.stat()
    overwritten(path, 0, b"other")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def petabyte(path: Path) -> None:
    os.truncate(path, 1 << 43)
    content = json.loads(path.with_name(MANIFEST_FILE).read_text())
    content["memory"]["size"] = 1 << 43
    path.with_name(MANIFEST_FILE).write_text(json.dumps(content))


def touched(path: Path) -> None:
    os.utime(path)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def roots(path: Path) -> None:
    os.chown(path, 0, 0)
    path.chmod(0o600)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (Path.unlink, "No such file"),
        pytest.param(lambda path: os.truncate(path, 2_000_000), "has 2000000 bytes, and had", id="shorter"),
        pytest.param(lambda path: overwritten(path, 1_500_000, b"damage"), "checksum", id="damaged"),
        pytest.param(lambda path: overwritten(path, 0, b"LibvirtQemudPart"), "never completed", id="unfinished"),
        (petabyte, "larger than"),
        (fifo, "not a regular file"),
        (link, "cannot be opened"),
        pytest.param(roots, "Permission denied", marks=as_root),
    ],
)
def test_memory_images(job: Job, harm: Callable[[Path], None], said: str) -> None:
    job.save()
    harm(job.memory)
    assert said in job.refused(True)


@pytest.mark.parametrize("which", ["overlay", "template", "data"])
@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (grown, "bytes and has"),
        (written, "content"),
        (touched, "written to since"),
        (Path.unlink, "cannot be opened"),
        (fifo, "not a regular file"),
        pytest.param(roots, "Permission denied", marks=as_root),
    ],
)
def test_disks_that_are_other_than_they_were(job: Job, which: str, harm: Callable[[Path], None], said: str) -> None:
    job.save()
    harm(getattr(job, which))
    if (which, harm) == ("overlay", touched):
        job.check()
        return
    reason = job.refused(False)
    assert said in reason
    assert getattr(job, which).name in reason


def test_other_disks(job: Job) -> None:
    job.save()
    root, data = job.disks
    assert "were vda, sdb and are vda" in job.refused(False, disks=[root])
    assert "are vda, vdb" in job.refused(False, disks=[root, data._replace(device="vdb")])
    assert "format" in job.refused(False, disks=[root, data._replace(format="qcow2")])
    assert "read-only" in job.refused(False, disks=[root, data._replace(writable=False)])
    other = job.put(job.shared / "other.img", job.data.read_bytes())
    assert "other.img" in job.refused(False, disks=[root, job.disk(other, "sdb")])
    assert "1 backing files and has 0" in job.refused(False, chains={})
    moved = job.put(job.scratch / "data.img", job.data.read_bytes())
    assert "data.img" in job.refused(False, disks=[root, job.disk(moved, "sdb")])


# Samples


def test_a_sample_costs_the_same_for_any_size(job: Job) -> None:
    path = job.put(job.scratch / "huge.img", b"")
    os.truncate(path, 1 << 43)
    [state] = checkpoint.describe_disks(job.user, str(job.scratch), [job.disk(path, "vda")], {})
    assert state.image.size == 1 << 43


@given(st.integers(0, 1 << 50))
def test_samples_are_beneath_the_size(size: int) -> None:
    pieces = files._pieces(size)
    assert sum(length for _, length in pieces) <= 4 << 20
    assert all(offset >= 0 and length > 0 and offset + length <= size for offset, length in pieces)
    assert not pieces or (pieces[0][0], sum(pieces[-1])) == (0, size)
    if size <= 4 << 20:
        assert sum(length for _, length in pieces) == size


# Manifests that are none


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "JSON"),
        (b"\xff", "JSON"),
        (b"[" * 1_000_000, "JSON"),
        (b'{"a":' * 100_000, "JSON"),
        (b"null", "not an object"),
        (b"{}", "missing"),
        (b'{"format": 2}', "format 2"),
        (b'{"format": true}', "missing"),
        (b'{"format": 1, "format": 1}', "twice"),
        (b'{"format": ' + b"9" * 5000 + b"}", "JSON"),
        (b'{"format": NaN}', "not a number"),
        (b" " * (manifest.LARGEST + 1), "too long"),
    ],
)
def test_manifests_that_are_none(job: Job, content: bytes, said: str) -> None:
    job.put(job.scratch / MANIFEST_FILE, content)
    assert said in job.unreadable()


BAD = {
    "format": [0, "1", 1.0],
    "name": ["", "a\nb", "\ud800", 7, "x" * 301],
    "vm_type": ["", "k v m", None],
    "domain_type": ["kvm'/>", "x" * 65],
    "uuid": [UUID.upper(), UUID + "0", ""],
    "libvirt_version": [-1, True, 1.5, 10**11],
    "qemu_version": ["7", None],
    "host_cpu": ["x" * 501, 1],
    "machine_type": ["pc,accel=x"],
    "architecture": [""],
    "xml": ["x" * (manifest.LARGEST_XML + 1), "\0", []],
    "cpu_seconds": [-1, 1e300, "1", True],
    "time": [None, -0.1],
    "disks": [{}, [1], [None] * 1025, [{}]],
    "memory": [[], {}, {"size": -1, "sha256": "0" * 64}, {"size": 1, "sha256": "A" * 64}],
}


@pytest.mark.parametrize("field", BAD)
def test_every_field_is_checked(job: Job, field: str) -> None:
    assert set(BAD) == {"format", *Manifest._fields}
    job.save()
    path = job.scratch / MANIFEST_FILE
    good = json.loads(path.read_text())
    for value in BAD[field]:  # type: ignore[attr-defined]
        job.put(path, json.dumps(good | {field: value}).encode())
        assert job.unreadable()
    job.put(path, json.dumps({name: value for name, value in good.items() if name != field}).encode())
    assert "missing" in job.unreadable()
    job.put(path, json.dumps(good | {"more": 1}).encode())
    assert "more" in job.unreadable()


def test_every_field_of_a_disk_is_checked(job: Job) -> None:
    job.save()
    path = job.scratch / MANIFEST_FILE
    good = path.read_text()
    for old, new in (
        ('"vda"', '"vd a"'),
        ('"writable": true', '"writable": 1'),
        ('"transferred": true', '"transferred": null'),
        ('"root.qcow2"', '"root\\u0000"'),
        ('"root.qcow2"', '""'),
        ('"qcow2"', '"../qcow2"'),
        ('"size": 200000', '"size": 200000.0'),
        ('"mtime_ns": ', '"mtime_ns": 9999999999999999999'),
        ('"sample": "', '"sample": "g'),
        ('"backing": [', '"backing": [1, '),
    ):
        assert old in good
        job.put(path, good.replace(old, new).encode())
        assert job.unreadable()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=100), st.integers(0, 3000), st.integers(0, 200))
def test_damaged_manifests(job: Job, junk: bytes, at: int, cut: int) -> None:
    for content in (junk, job.good[:at] + junk + job.good[at + cut :]):
        job.put(job.scratch / MANIFEST_FILE, content)
        try:
            found = job.load()
        except Unusable:
            continue
        assert found is not None
        assert manifest.parse(manifest.dump(found)) == found


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_odd_values_anywhere_in_a_manifest(job: Job, data: st.DataObject) -> None:
    content = json.loads(job.good)
    place = content
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(json_values)
    job.put(job.scratch / MANIFEST_FILE, json.dumps(content).encode())
    try:
        job.check()
    except Unusable as unusable:
        assert unusable.reason.isprintable()  # noqa: PT017 - either is right


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (link, "cannot be opened"),
        (dangling_link, "cannot be opened"),
        (fifo, "cannot be opened"),
        pytest.param(roots, "Permission denied", marks=as_root),
    ],
)
def test_what_is_in_the_place_of_the_manifest(job: Job, harm: Callable[[Path], None], said: str) -> None:
    job.save()
    harm(job.scratch / MANIFEST_FILE)
    assert said in job.unreadable()
    checkpoint.write(job.user, str(job.scratch), job.manifest())
    job.check()
