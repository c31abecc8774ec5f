"""Checkpoints: what was written is found again, and everything that does not fit is refused with a reason."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.checkpoint.support import image
from tests.conftest import as_root
from tests.jobs import own, owner
from vmgahp.checkpoint import manifest, store
from vmgahp.checkpoint.manifest import MEMORY, CheckpointFile, Manifest
from vmgahp.checkpoint.store import MANIFEST_FILE, MEMORY_FILE, RESTARTING, CheckpointStore, FileRef, Unusable
from vmgahp.drivers.libvirt.life.save import LIBVIRT, disk_refs
from vmgahp.errors import JobFault, MachineFault
from vmgahp.host import job_user
from vmgahp.host.job_user import Identity
from vmgahp.images.formats import BackingFile
from vmgahp.job.spec import Disk

UUID = "18b0b959-737e-4ba1-983e-ef517357615e"
FACTS = {
    "domain_type": "kvm", "uuid": UUID, "libvirt_version": 9_000_000, "qemu_version": 7_002_022,
    "host_cpu": "GenuineIntel 6/85/7", "machine_type": "pc-i440fx-7.2", "architecture": "x86_64",
    "xml": "<domain>\n\t<name>a</name></domain>",
}  # fmt: skip
HERE = Manifest("libvirt", "alice_lab_7.3", "kvm", 64, 1, 12.5, 1_700_000_000.25, FACTS)
"""What a checkpoint says of its job and machine, and a restart there finds again."""


def changed(made: Manifest, changes: dict[str, object]) -> Manifest:
    """The manifest with other values of its fields and facts."""
    of_facts = {name: value for name, value in changes.items() if name in FACTS}
    others = {name: value for name, value in changes.items() if name not in FACTS}
    return made._replace(facts={**made.facts, **of_facts}, **others)  # type: ignore[arg-type]


class Job:
    """A job with a transferred overlay over a shared template, a shared disk, and a memory image."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.shared = scratch.parent / "shared"
        self.shared.mkdir()
        self.user = owner(scratch)
        self.logged: list[str] = []
        self.template = self.put(self.shared / "template.img", os.urandom(100_000))
        self.overlay = self.put(scratch / "root.qcow2", os.urandom(200_000))
        self.data = self.put(self.shared / "data.img", os.urandom(300_000))
        self.memory = self.put(scratch / MEMORY_FILE, image(rest=bytes(64) + b"QEVM" + os.urandom(300_000)))
        self.disks = [self.root(self.overlay), self.disk(self.data, "sdb")]

    def put(self, path: Path, content: bytes) -> Path:
        path.write_bytes(content)
        own(self.scratch, path)
        return path

    def disk(self, path: Path, device: str, **changes: object) -> Disk:
        plain = Disk(str(path), device, "", True, "raw", path.parent == self.scratch, "disk")
        return plain._replace(**changes)  # type: ignore[arg-type]

    def root(self, path: Path) -> Disk:
        return self.disk(path, "vda", format="qcow2", backing=(BackingFile(str(self.template), "raw"),))

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore(LIBVIRT, self.user, str(self.scratch), self.logged.append)

    @property
    def refs(self) -> list[FileRef]:
        return [FileRef(MEMORY, MEMORY_FILE), *disk_refs(self.disks)]

    def files(self) -> list[CheckpointFile]:
        return [store.describe(self.user, str(self.scratch), ref) for ref in self.refs]

    def save(self, **changes: object) -> None:
        self.store.write(changed(HERE, changes), self.refs)

    def names(self) -> set[str]:
        return {path.name for path in self.scratch.iterdir()}

    def load(self) -> Manifest | None:
        return self.store.load()

    def check(self, disks: list[Disk] | None = None, **changes: object) -> None:
        """Check what is in the scratch directory, as a restart does."""
        found = self.load()
        now = changed(HERE, changes)
        refs = disk_refs(self.disks if disks is None else disks)
        self.store.check(found, now, refs)
        descriptor = self.store.open_memory(found, now.memory_mib)
        assert os.read(descriptor, 16) == b"LibvirtQemudSave"
        os.close(descriptor)

    def refused(self, intact: bool, **changes: object) -> str:
        with pytest.raises(Unusable) as raised:
            self.check(**changes)  # type: ignore[arg-type]
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


def test_another_machine_with_another_scratch_directory(job: Job) -> None:
    job.save()
    there = job.scratch.parent / "dir_2"
    job.scratch.rename(there)
    os.utime(there / "root.qcow2", (1, 1))  # a transfer gives the files new times
    job.scratch = there
    job.disks[0] = job.root(there / "root.qcow2")
    job.check()


def test_what_can_be_read_again_is_written_and_found_of_files_and_without_passwords(job: Job) -> None:
    with pytest.raises(MachineFault, match="uuid"):
        job.save(uuid="none")
    assert not (job.scratch / MANIFEST_FILE).exists()
    assert job.load() is None  # a memory image alone is none
    job.save()
    assert job.load() == HERE._replace(files=tuple(job.files()))
    status = (job.scratch / MANIFEST_FILE).stat()
    assert (status.st_mode & 0o777, status.st_uid) == (0o600, job.user.uid)
    job.check()
    _, root, template, data = job.files()
    assert (root.path, root.transferred) == ("root.qcow2", True)
    assert (template.role, template.path, template.transferred) == ("backing", str(job.template), False)
    assert (data.path, data.transferred) == (str(job.data), False)
    job.save(xml="<graphics type='vnc' passwd='geheim' port='1'/><graphics passwd=\"geheim\"/>")
    assert job.load().facts["xml"] == "<graphics type='vnc' port='1'/><graphics/>"


def test_discard(job: Job) -> None:
    job.save()
    job.store.discard()
    job.store.discard()
    assert [path.name for path in job.scratch.iterdir()] == ["root.qcow2"]


def test_set_aside_overwrites_nothing(job: Job) -> None:
    job.save()
    mine = job.put(job.scratch / f"{MEMORY_FILE}.refused-1", b"the job's own")
    assert job.store.set_aside() == [f"{MANIFEST_FILE}.refused-1", f"{MEMORY_FILE}.refused-2"]
    assert job.store.set_aside() == []
    assert mine.read_bytes() == b"the job's own"
    assert job.load() is None


def test_set_aside_takes_what_is_in_the_place_of_the_files(job: Job) -> None:
    job.memory.unlink()
    (job.scratch / MEMORY_FILE).symlink_to("/etc/passwd")
    (job.scratch / MANIFEST_FILE).mkdir()
    before = Path("/etc/passwd").stat()
    assert len(job.store.set_aside()) == 2
    assert (job.scratch / f"{MEMORY_FILE}.refused-1").is_symlink()
    assert Path("/etc/passwd").stat() == before


# What does not fit


@pytest.mark.parametrize(
    ("here", "said"),
    [
        ({"name": "bob_lab_1.0"}, "checkpoint of 'alice_lab_7.3'"),
        ({"vm_type": "qemu"}, "VM type"),
        ({"memory_mib": 32}, "had 64 MiB and 1 CPUs, and is to have 32"),
        ({"vcpus": 2}, "and 2 now"),
        ({"domain_type": "qemu"}, r"made under KVM, and VMs here run under emulation"),
        ({"host_cpu": "AuthenticAMD 25/1/1"}, "another CPU"),
        ({"qemu_version": 6_002_000}, "QEMU 7.2.22, and here is 6.2.0"),
    ],
)
def test_a_checkpoint_of_another_job_or_machine(job: Job, here: dict[str, object], said: str) -> None:
    job.save()
    assert said in job.refused(True, **here)


@pytest.mark.parametrize(
    ("then", "here"),
    [
        ({}, {"host_cpu": ""}), ({}, {"qemu_version": 10_000_000}), ({}, {"qemu_version": 7_002_001}),
        ({"memory_mib": 4}, {"memory_mib": 4}),
    ],
)  # fmt: skip
def test_differences_that_do_not_matter(job: Job, then: dict[str, object], here: dict[str, object]) -> None:
    job.save(**then)
    job.check(**here)  # type: ignore[arg-type]


def test_all_reasons_are_given(job: Job) -> None:
    job.save()
    job.data.unlink()
    assert job.refused(False, vm_type="qemu", domain_type="qemu").count(";") == 2


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
    content["files"][0]["size"] = 1 << 43
    path.with_name(MANIFEST_FILE).write_text(json.dumps(content))


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
        pytest.param(lambda path: overwritten(path, 150_000, b"damage"), "damaged", id="damaged"),
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
        *((grown, "bytes and has"), (written, "content"), (os.utime, "written to since")),
        *((Path.unlink, "cannot be opened"), (fifo, "not a regular file")),
        pytest.param(roots, "Permission denied", marks=as_root),
    ],
)
def test_disks_that_are_other_than_they_were(job: Job, which: str, harm: Callable[[Path], None], said: str) -> None:
    job.save()
    harm(getattr(job, which))
    if (which, harm) == ("overlay", os.utime):
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
    assert "1 backing files and has 0" in job.refused(False, disks=[root._replace(backing=()), data])
    moved = job.put(job.scratch / "data.img", job.data.read_bytes())
    assert "data.img" in job.refused(False, disks=[root, job.disk(moved, "sdb")])


# Samples


def test_a_sample_costs_the_same_for_any_size(job: Job) -> None:
    path = job.put(job.scratch / "huge.img", b"")
    os.truncate(path, 1 << 43)
    assert store.describe(job.user, str(job.scratch), FileRef("disk", str(path))).size == 1 << 43


# Manifests that are none


@pytest.mark.parametrize(
    ("content", "said"),
    [
        *((b"", "JSON"), (b"\xff", "JSON"), (b"[" * 1_000_000, "JSON"), (b'{"a":' * 100_000, "JSON")),
        *((b"null", "not an object"), (b"{}", "missing"), (b'{"format": 1}', "format 1")),
        *((b'{"format": 3}', "format 3"), (b'{"format": true}', "missing"), (b'{"format": 2, "format": 2}', "twice")),
        (b'{"format": ' + b"9" * 5000 + b"}", "JSON"),
        (b'{"format": NaN}', "not a number"),
        (b'{"format": 1e400}', ""),
        (b'{"format": 2, "name": "\xff\xfe"}', ""),
        (b"\xff\xfe" + '{"format": 2}'.encode("utf-16"), ""),
        (b"\xef\xbb\xbf{}", ""),
        (b"\0" * 100, ""),
        (b" " * (manifest.LARGEST + 1), "too long"),
    ],
)
def test_manifests_that_are_none(job: Job, content: bytes, said: str) -> None:
    job.put(job.scratch / MANIFEST_FILE, content)
    assert said in job.unreadable()


BAD = {
    "format": [0, "1", 1.0], "driver": ["", "vmrun", "xen", None], "name": ["", "a\nb", "\ud800", 7, "x" * 301],
    "vm_type": ["", "k\nvm", "k" * 101, None], "memory_mib": [0, "64", 64.0, True, 10**10], "vcpus": [0, None, 10**7],
    "facts": [[], {}, None, "kvm"], "domain_type": ["kvm'/>", "x" * 65], "uuid": [UUID.upper(), UUID + "0", ""],
    "libvirt_version": [-1, True, 1.5, 10**11], "qemu_version": ["7", None], "host_cpu": ["x" * 501, 1],
    "machine_type": ["pc,accel=x"], "architecture": [""], "xml": ["x" * (manifest.LARGEST_XML + 1), "\0", []],
    "cpu_seconds": [-1, 1e300, "1", True], "time": [None, -0.1], "files": [{}, [1], [None] * 5001, [{}]],
}  # fmt: skip


@pytest.mark.parametrize("field", BAD)
def test_every_field_is_checked(job: Job, field: str) -> None:
    assert set(BAD) == {"format", *Manifest._fields, *FACTS}
    job.save()
    path = job.scratch / MANIFEST_FILE
    good = json.loads(path.read_text())
    plain = good["facts"] if field in FACTS else good

    def put(content: dict[str, object]) -> str:
        whole = good | {"facts": content} if field in FACTS else content
        job.put(path, json.dumps(whole).encode())
        return job.unreadable()

    for value in BAD[field]:  # type: ignore[attr-defined]
        assert put(plain | {field: value})
    assert "missing" in put({name: value for name, value in plain.items() if name != field})
    assert "more" in put(plain | {"more": 1})


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (link, "cannot be opened"), (dangling_link, "cannot be opened"), (fifo, "cannot be opened"),
        pytest.param(roots, "Permission denied", marks=as_root),
    ],
)  # fmt: skip
def test_what_is_in_the_place_of_the_manifest(job: Job, harm: Callable[[Path], None], said: str) -> None:
    job.save()
    harm(job.scratch / MANIFEST_FILE)
    assert said in job.unreadable()
    job.save()
    job.check()


# What the machine is to blame for


def fails(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    """The user cannot open the file `name`, for this reason."""
    plain = Identity.run

    def run(self: Identity, operation: Callable[..., int], directory: bytes, *more: object) -> int:
        if name.encode() in (directory, *(more[0] if isinstance(more[0], list) else ())):
            raise OSError(number, os.strerror(number))
        return plain(self, operation, directory, *more)

    monkeypatch.setattr(Identity, "run", run)


@pytest.mark.parametrize("fault", [MachineFault, JobFault])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ESTALE, errno.EROFS], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", [MANIFEST_FILE, MEMORY_FILE, "root.qcow2"])
def test_an_unreadable_stays(job: Job, monkeypatch: pytest.MonkeyPatch, name: str, number: int, fault: type) -> None:
    """It is the machine's where EXECUTE fails as well."""
    job.save()
    before = job.names()
    fails(monkeypatch, name, number)
    if fault is MachineFault:
        monkeypatch.setattr(job_user, "_try_execute", Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(fault, match=os.strerror(number)):
        job.check()
    assert job.names() == before
    monkeypatch.undo()
    job.check()


def test_a_file_system_that_the_job_has_named_is_not_the_machines(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.save()
    fails(monkeypatch, str(job.data), errno.ESTALE)
    assert "data.img' cannot be opened (Stale file handle)" in job.refused(False)


# One whose guest is about to run


def test_a_checkpoint_is_none_once_its_guest_runs(job: Job) -> None:
    job.save()
    job.store.begin_restart()
    assert MANIFEST_FILE not in job.names()
    job.store.discard()
    assert job.names() == {"root.qcow2"}


def test_a_guest_that_was_cut_off_boots_from_its_disks(job: Job) -> None:
    """Its disks have moved on, so a check would find them changed and hold the job."""
    job.save()
    job.store.begin_restart()
    grown(job.overlay)
    assert job.load() is None
    job.store.forget_interrupted()
    assert job.names() == {"root.qcow2"}
    assert "as after a power cut" in job.logged[0]


def test_a_checkpoint_is_put_back_unless_its_guest_has_run_after_all(job: Job) -> None:
    job.save()
    job.store.begin_restart()
    job.store.put_back()
    assert RESTARTING not in job.names()
    job.check()
    job.store.put_back()  # there is none that is set aside
    job.check()
    assert job.logged == []
    # As when the hypervisor lets it run and fails to say so; what it wrote need not be where a sample is taken.
    job.store.begin_restart()
    later = (job.scratch / RESTARTING).stat().st_ctime_ns + 1
    os.utime(job.overlay, ns=(later, later))
    job.store.put_back()
    assert job.load() is None
    assert "was written to" in job.logged[0]


def test_a_later_checkpoint_counts_and_no_guest_runs_while_its_checkpoint_looks_good(job: Job) -> None:
    job.save()
    job.store.begin_restart()
    job.save()
    job.store.forget_interrupted()
    assert RESTARTING not in job.names()
    job.check()
    (job.scratch / RESTARTING).mkdir()
    with pytest.raises(JobFault, match=RESTARTING):
        job.store.begin_restart()
    job.check()


# One that cannot be used


@pytest.mark.parametrize(("intact", "fresh_disks"), [(True, False), (False, True)])
def test_a_refused_checkpoint_is_kept_and_the_guest_boots_afresh(job: Job, intact: bool, fresh_disks: bool) -> None:
    job.save()
    job.store.refuse("a", Unusable("it is odd.", intact), fresh_disks=fresh_disks)
    assert job.names() == {"root.qcow2", f"{MANIFEST_FILE}.refused-1", f"{MEMORY_FILE}.refused-1"}
    assert "it is odd" in job.logged[0]


def test_a_refused_checkpoint_whose_disks_are_unknown_holds_the_job(job: Job) -> None:
    job.save()
    job.put(job.scratch / "more", b"")
    with pytest.raises(JobFault, match="it is odd"):
        job.store.refuse("a", Unusable("it is odd.", False), ["more", "not there"])
    assert f"{MANIFEST_FILE}.refused-1" in job.names()
    assert "more.refused-1" in job.names()
