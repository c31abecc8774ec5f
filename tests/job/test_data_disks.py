"""Disks that are made for a job, by real qemu-img in a scratch directory; what is there already, what goes wrong."""

import errno
import json
import os
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.domain.support import disk, spec
from tests.images.support import write
from tests.jobs import own, owner
from vmgahp import errors
from vmgahp.checkpoint import store
from vmgahp.checkpoint.manifest import CheckpointFile
from vmgahp.config import Settings
from vmgahp.drivers.libvirt.life.save import disk_refs
from vmgahp.drivers.libvirt.start.disks import RECORD, Provision
from vmgahp.errors import JobFault
from vmgahp.images.catalog import Image
from vmgahp.images.formats import BackingFile, backing_chain
from vmgahp.job.disks import Disk
from vmgahp.job.look import backing_files
from vmgahp.job.spec import JobSpec

pytestmark = pytest.mark.qemu

LAYER = "vda-a.qcow2"


class Place:
    """A scratch directory, and an image of the machine's beside it."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.who = owner(scratch)
        images = scratch.parent / "images"
        images.mkdir()
        images.chmod(0o755)
        self.base = write(images / "base.raw", b"x" * (1 << 20))
        self.image = Image("a", str(self.base), "raw")

    def with_disk(self, name: str, device: str, **more: object) -> JobSpec:
        return spec(working_dir=str(self.scratch), disks=(disk(str(self.scratch / name), device, **more),))

    def spec(self) -> JobSpec:
        return self.with_disk(LAYER, "vda", format="qcow2", image=self.image)

    def data(self, size: int, name: str = "data.qcow2", image_format: str = "qcow2") -> JobSpec:
        return self.with_disk(name, "vdb", format=image_format, size=size)

    def files(self, *names: str) -> JobSpec:
        return self.with_disk("vm_data_files.iso", "sda", kind="cdrom", writable=False, files=names)

    def backing(self, wanted: JobSpec) -> tuple[BackingFile, ...]:
        [only] = wanted.disks
        return backing_files(only, str(self.scratch), self.who)

    def make(self, wanted: JobSpec) -> Provision:
        made = Provision(str(self.scratch), Settings(), self.who)
        made.make(wanted)
        return made

    def refused(self, wanted: JobSpec) -> str:
        with pytest.raises(JobFault) as caught:
            self.make(wanted)
        assert caught.value.hint
        return caught.value.problem

    def names(self) -> set[str]:
        return {path.name for path in self.scratch.iterdir()}

    def change_the_image(self) -> None:
        content = bytearray(Path(self.image.path).read_bytes())
        content[5000] ^= 1
        Path(self.image.path).write_bytes(content)


@pytest.fixture
def place(scratch: Path) -> Place:
    return Place(scratch)


def qemu_img(*words: str | Path) -> bytes:
    return subprocess.run(["qemu-img", *map(str, words)], check=True, stdout=subprocess.PIPE).stdout


def test_an_overlay_and_its_record(place: Place) -> None:
    place.make(place.spec())
    assert place.names() == {LAYER, RECORD}
    [layer] = json.loads((place.scratch / RECORD).read_text())["layers"]
    assert (layer["file"], layer["image"], layer["size"]) == (LAYER, "a", 1 << 20)
    assert backing_chain(str(place.scratch / LAYER), "qcow2", place.who) == (BackingFile(str(place.base), "raw"),)
    assert {(place.scratch / name).stat().st_uid for name in place.names()} == {place.who.uid}


def test_backing_files_are_known_before_and_after(place: Place) -> None:
    wanted = (BackingFile(str(place.base), "raw", "catalog:a"),)
    assert place.backing(place.spec()) == wanted
    place.make(place.spec())
    assert place.backing(place.spec()) == wanted
    assert place.backing(place.data(1 << 20)) == ()
    place.make(place.data(1 << 20))
    assert place.backing(place.data(1 << 20)) == ()


def test_what_does_not_fit_or_is_undone_leaves_nothing(place: Place) -> None:
    assert "are free for this job" in place.refused(place.data(1 << 62))
    assert place.names() == set()
    place.make(place.spec()).undo()
    assert place.names() == set()
    place.make(place.spec())
    made = place.make(place.spec()._replace(disks=place.spec().disks + place.data(1 << 20).disks))
    assert "data.qcow2" in place.names()
    made.undo()
    assert place.names() == {LAYER, RECORD}
    place.make(place.data(1 << 20)).undo()
    assert place.names() == {LAYER, RECORD}


def test_an_overlay_is_kept_and_not_put_on_another_image(place: Place) -> None:
    place.make(place.spec())
    before = (place.scratch / LAYER).stat().st_ino
    place.make(place.spec())
    assert (place.scratch / LAYER).stat().st_ino == before
    place.change_the_image()
    assert "another image" in place.refused(place.spec())
    assert place.names() == {LAYER, RECORD}, "another machine may have the right one"


def test_an_overlay_under_the_name_of_another_image(place: Place) -> None:
    place.make(place.spec())
    text = (place.scratch / RECORD).read_text()
    own(place.scratch, write(place.scratch / RECORD, text.replace('"a"', '"b"')))
    assert "another image" in place.refused(place.spec())


def test_an_overlay_that_nobody_knows_is_not_used(place: Place) -> None:
    layer = place.scratch / LAYER
    qemu_img("create", "-q", "-f", "qcow2", "-b", "/etc/hostname", "-F", "raw", layer)
    own(place.scratch, layer)
    assert "does not say which image" in place.refused(place.spec())


@pytest.mark.parametrize("record", ["{", "[]", '{"format": 1, "layers": 3}', '{"format": 2, "layers": []}', ""])
def test_a_record_that_is_none(place: Place, record: str) -> None:
    place.make(place.spec())
    own(place.scratch, write(place.scratch / RECORD, record))
    assert "cannot be read" in place.refused(place.spec())


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_no_link_is_followed(place: Place) -> None:
    precious = write(place.base.parent / "precious", b"precious")
    (place.scratch / LAYER).symlink_to(precious)
    assert "cannot be opened" in place.refused(place.spec())
    (place.scratch / LAYER).unlink()
    (place.scratch / RECORD).symlink_to(precious)
    place.make(place.spec())
    assert precious.read_bytes() == b"precious"
    assert not (place.scratch / RECORD).is_symlink()


def test_an_overlay_that_keeps_its_data_elsewhere(place: Place) -> None:
    place.make(place.spec())
    layer, data = place.scratch / LAYER, place.scratch / "data"
    qemu_img("create", "-q", "-f", "qcow2", "-o", f"data_file={data}", layer, "1M")
    own(place.scratch, layer, data)
    assert "keeps its data in another file" in place.refused(place.spec())


def test_a_header_is_not_followed(place: Place) -> None:
    place.make(place.spec())
    qemu_img("rebase", "-u", "-f", "qcow2", "-b", "/etc/shadow", "-F", "raw", place.scratch / LAYER)
    place.make(place.spec())
    assert place.backing(place.spec()) == (BackingFile(str(place.base), "raw", "catalog:a"),)


def test_a_checkpoint_knows_an_image_by_its_name_and_content(place: Place) -> None:
    """Not by its path or its time, which are others on every machine."""
    place.make(place.spec())

    def state(wanted: JobSpec) -> list[CheckpointFile]:
        [only] = wanted.disks
        refs = disk_refs([only._replace(backing=place.backing(wanted))])
        return [store.describe(place.who, str(place.scratch), ref) for ref in refs]

    here = state(place.spec())
    assert here[1].path == "catalog:a"
    place.image = Image("a", str(place.base.rename(place.base.with_name("elsewhere.raw"))), "raw")
    os.utime(place.image.path, (1, 1))
    assert state(place.spec()) == here
    place.change_the_image()
    assert state(place.spec()) != here
    read_only = disk(place.image.path, "vdb", writable=False, transferred=False, image=place.image)
    [itself] = state(place.spec()._replace(disks=(read_only,)))
    assert (itself.path, itself.mtime_ns) == ("catalog:a", 0)


@pytest.mark.parametrize(("name", "image_format"), [("data.qcow2", "qcow2"), ("data.raw", "raw")])
def test_an_empty_disk(place: Place, name: str, image_format: str) -> None:
    place.make(place.data(100 << 20, name, image_format))
    made = place.scratch / name
    assert json.loads(qemu_img("info", "--output=json", "-f", image_format, made))["virtual-size"] == 100 << 20
    assert made.stat().st_blocks * 512 < 1 << 20
    assert made.stat().st_uid == place.who.uid
    inode = made.stat().st_ino
    place.make(place.data(200 << 20, name, image_format))
    assert made.stat().st_ino == inode, "what came back is kept"


def test_files_are_no_links_when_they_are_read(place: Place) -> None:
    """They were looked at when the job was read; now they are opened, and the job's user may have been busy."""
    own(place.scratch, write(place.scratch / "in.csv", b"a,b"))
    place.make(place.files("in.csv"))
    assert b"a,b" in (place.scratch / "vm_data_files.iso").read_bytes()
    (place.scratch / "in.csv").unlink()
    (place.scratch / "in.csv").symlink_to("/etc/hostname")
    with pytest.raises(JobFault, match=r"VMPARAM_vm_Data_Files: 'in\.csv' cannot be opened") as caught:
        place.make(place.files("in.csv"))
    assert caught.value.code == errors.MISMATCHED


def test_files_that_do_not_fit(place: Place) -> None:
    with (place.scratch / "huge").open("wb") as file:
        file.truncate(5 << 30)
    own(place.scratch, place.scratch / "huge")
    assert "VMPARAM_vm_Data_Files" in place.refused(place.files("huge"))
    assert place.names() == {"huge"}


def test_an_image_on_a_disk_that_cannot_be_read_is_the_machines_where_execute_fails(scratch, user, monkeypatch):
    (scratch / "guest.qcow2").write_bytes(b"nothing that qemu-img knows")
    own(scratch)
    disk = Disk(str(scratch / "guest.qcow2"), "vda", "", True, "qcow2", True, "disk")
    with pytest.raises(errors.JobFault):
        backing_files(disk, str(scratch), user)
    failing = Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    monkeypatch.setattr(os, "pread", failing)
    monkeypatch.setattr("vmgahp.host.job_user._try_execute", failing)
    with pytest.raises(errors.MachineFault, match="Input/output error"):
        backing_files(disk, str(scratch), user)
