"""Manifests of before all drivers had one format, as the daemon of then has written them, are still read."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.support import image
from tests.jobs import own, owner
from vmgahp.checkpoint import earlier
from vmgahp.checkpoint.files import FileRef, Unusable
from vmgahp.checkpoint.manifest import BACKING, DISK, CheckpointKind, Manifest
from vmgahp.checkpoint.store import MANIFEST_FILE, CheckpointStore
from vmgahp.drivers.libvirt.checkpoint import LIBVIRT, XEN
from vmgahp.drivers.script.checkpoint import KIND as SCRIPT
from vmgahp.drivers.vmrun.checkpoint import KIND as VMRUN

SAMPLES = Path(__file__).with_name("earlier")
UUID = "18b0b959-737e-4ba1-983e-ef517357615e"
NAME, MEMORY_MIB = "alice_lab_7.3", 64

CONTENTS = {
    "root.qcow2": b"root" * 50_000,
    "template.img": b"template" * 20_000,
    "data.img": b"data" * 30_000,
    "vm_checkpoint.mem": image(rest=bytes(64) + b"QEVM" + b"memory" * 300_000),
    "toy.state": b"toy" * 1000,
    "toy.disk": b"disk" * 1000,
} | {
    name: name.encode() * 1000
    for name in ("dos_condor.vmss", "dos_condor.vmem", "dos_condor.nvram", "dos-000001.vmdk", "dos-000001-s001.vmdk")
}
"""The files that the samples were made of."""

QEMU = [
    FileRef(DISK, "root.qcow2", "vda", True, "qcow2"),
    FileRef(BACKING, "template.img", "vda", False, "raw"),
    FileRef(DISK, "data.img", "sdb", False, "raw"),
]


class Earlier:
    """A scratch directory with what an earlier daemon has left of a checkpoint."""

    def __init__(self, scratch: Path, kind: CheckpointKind) -> None:
        self.scratch = scratch
        self.kind = kind
        self.file = earlier.FILES.get(kind.driver, MANIFEST_FILE)
        for name, content in CONTENTS.items():
            (scratch / name).write_bytes(content)
        (scratch / self.file).write_bytes((SAMPLES / f"{kind.driver}.json").read_bytes())
        own(scratch)
        self.store = CheckpointStore(kind, owner(scratch), str(scratch), lambda _line: None)

    def check(self, **changes: object) -> Manifest:
        found = self.store.load()
        assert found is not None
        now = found._replace(name=NAME, vm_type=found.vm_type or "any", memory_mib=MEMORY_MIB, vcpus=2)
        refs = QEMU if self.kind.memory else [FileRef.of(file) for file in found.files]
        self.store.check(found, now._replace(**changes), refs)  # type: ignore[arg-type]
        return found


@pytest.fixture
def place(scratch: Path, request: pytest.FixtureRequest) -> Earlier:
    return Earlier(scratch, request.param)


def vsphere() -> CheckpointKind:
    from vmgahp.drivers.vsphere.checkpoint import KIND

    return KIND


WITH_FILES = pytest.mark.parametrize(
    "place", [LIBVIRT, XEN, VMRUN, SCRIPT], indirect=True, ids=lambda kind: kind.driver
)


@WITH_FILES
def test_what_an_earlier_daemon_has_written_is_restored(place: Earlier) -> None:
    found = place.check()
    assert (found.driver, found.name, found.cpu_seconds) == (place.kind.driver, NAME, 12.5)
    assert found.facts.keys() == place.kind.facts.keys()
    if place.kind is LIBVIRT:
        os.close(place.store.open_memory(found, MEMORY_MIB))


@WITH_FILES
@pytest.mark.parametrize(("name", "why"), [("root.qcow2", "root"), ("dos-000001.vmdk", "dos"), ("toy.disk", "toy")])
def test_disks_that_have_changed_are_seen(place: Earlier, name: str, why: str) -> None:
    with open(place.scratch / name, "r+b") as file:
        file.write(b"other")
    about = {"libvirt": "root", "xen": "root", "vmrun": "dos", "script": "toy"}[place.kind.driver]
    if about != why:
        place.check()
        return
    with pytest.raises(Unusable, match=f"the content of '{name}' has changed") as raised:
        place.check()
    assert not raised.value.disks_intact


@WITH_FILES
def test_what_was_written_down_is_compared(place: Earlier) -> None:
    with pytest.raises(Unusable, match="it is the checkpoint of 'alice_lab"):
        place.check(name="bob_lab_1.0")


@WITH_FILES
@pytest.mark.parametrize("act", [CheckpointStore.begin_restart, CheckpointStore.set_aside, CheckpointStore.discard])
def test_one_that_is_used_or_refused_is_none(place: Earlier, act: Callable[[CheckpointStore], object]) -> None:
    act(place.store)
    assert place.store.load() is None


@WITH_FILES
def test_odd_ones_are_refused(place: Earlier) -> None:
    path = place.scratch / place.file
    good = json.loads(path.read_text())
    for name in good:
        if name == "format":
            continue
        for odd in ({}, [1], -1, "\x00", None):
            path.write_text(json.dumps(good | {name: odd}))
            with pytest.raises(Unusable) as raised:
                place.store.load()
            assert not raised.value.disks_intact
    path.write_text(json.dumps(good | {"more": 1}))
    with pytest.raises(Unusable, match="more"):
        place.store.load()


def test_files_elsewhere(scratch: Path) -> None:
    place = Earlier(scratch, VMRUN)
    path = scratch / place.file
    (scratch.parent / "shared.vmdk").write_bytes(CONTENTS["dos-000001.vmdk"])
    text = path.read_text()
    path.write_text(text.replace('"dos-000001.vmdk"', f'"{scratch.parent}/shared.vmdk"'))
    place.check()
    path.write_text(text.replace('"dos_condor.vmem"', f'"{scratch.parent}/shared.vmdk"'))
    with pytest.raises(Unusable, match="is not in the scratch directory"):
        place.check()


def test_vsphere(scratch: Path) -> None:
    place = Earlier(scratch, vsphere())
    found = place.check()
    assert found.facts == {"id": UUID, "snapshot": "vmgahp-" + "0123456789abcdef" * 2, "server": "vcenter.example.org"}
    (scratch / place.file).write_bytes((scratch / place.file).read_bytes() + b" " * (64 << 10))
    with pytest.raises(Unusable, match="too long"):
        place.store.load()


@WITH_FILES
def test_one_whose_guest_has_not_run_is_put_back(place: Earlier) -> None:
    place.store.begin_restart()
    place.store.put_back()
    assert (place.scratch / MANIFEST_FILE).exists()
    place.check()
