"""A .vmx as libvirt's own VMware driver reads it, and the job's domain that we make of it: the same machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.commands.submit import oracle, samples
from tests.commands.submit.oracle import Seen
from tests.conftest import examples
from tests.drivers.libvirt.support import URI
from vmgahp.cli import main
from vmgahp.job.vmx import Vmx

if TYPE_CHECKING:
    import libvirt

pytestmark = pytest.mark.libvirt

PRODUCT = "#!/bin/sh\necho 'VMware Player 17.0.0 build-1'\n"
"""All that the driver asks of VMware when it is opened: its version."""


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Seen]]:
    """What libvirt makes of the text of a .vmx."""
    import libvirt

    programs = tmp_path_factory.mktemp("vmware")
    for name in ("vmplayer", "vmware", "vmrun"):
        (programs / name).write_text(PRODUCT)
        (programs / name).chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        patch.setenv("HOME", str(programs))
        libvirt.registerErrorHandler(lambda _context, _error: None, None)
        try:
            libvirt.open(URI).close()  # which the daemon asks what a domain can be
            connection: libvirt.virConnect = libvirt.open("vmwareplayer:///session")
        except libvirt.libvirtError as error:
            pytest.skip(f"no libvirtd at {URI}, or no VMware driver in it: {error}")
    yield lambda text: oracle.seen(connection.domainXMLFromNative("vmware-vmx", text, 0))
    connection.close()


def drive(place: str, file: str, **more: str) -> dict[str, str]:
    return {f"{place}.{name}": value for name, value in {"present": "true", "fileName": file, **more}.items()}


HEAD = {
    ".encoding": "UTF-8",
    "config.version": "8",
    "virtualHW.version": "13",
    "displayName": "m",
    "guestOS": "other-64",
}
DISKS = ("scsi0:0", "scsi0:2", "scsi0:10", "scsi1:3", "sata0:0", "ide0:0")
CDROMS = ("ide1:0", "sata0:4")
CONTROLLERS = {"scsi0": "lsilogic", "scsi1": "pvscsi", "sata0": ""}


@st.composite
def machines(draw: st.DrawFn) -> dict[str, str]:
    """A VM that a job can be, in the words of a .vmx."""
    entries = HEAD | {"memsize": str(4 * draw(st.integers(16, 256))), "numvcpus": str(draw(st.sampled_from([1, 2, 4])))}
    disks = draw(st.sets(st.sampled_from(DISKS), min_size=1))
    for number, place in enumerate(draw(st.permutations(sorted(disks)))):
        entries |= drive(place, f"{number}.vmdk", deviceType="ata-hardDisk" if place[:3] == "ide" else "scsi-hardDisk")
    for number, place in enumerate(draw(st.sets(st.sampled_from(CDROMS)))):
        entries |= drive(place, f"{number}.iso", deviceType="cdrom-image")
    for name, model in CONTROLLERS.items():
        entries |= {f"{name}.present": "true"} | ({f"{name}.virtualDev": model} if model else {})
    entries["floppy0.present"] = "false"
    if draw(st.booleans()):
        entries |= drive("floppy0", "boot.flp", fileType="file")
    for number in range(draw(st.integers(0, 2))):
        nic = {"present": "true", "connectionType": draw(st.sampled_from(["nat", "bridged"]))}
        nic |= {
            "addressType": "static",
            "address": f"00:50:56:00:00:{number:02x}",
            "virtualDev": "e1000",
            "networkName": "Lab",
        }
        entries |= {f"ethernet{number}.{name}": value for name, value in nic.items()}
    if draw(st.booleans()):
        entries["firmware"] = "efi"
    if draw(st.booleans()):
        entries["cpuid.coresPerSocket"] = "2" if entries["numvcpus"] != "1" else "1"
    return entries


@pytest.fixture
def images(home: Path) -> Path:
    for number in range(len(DISKS)):
        samples.image(home / f"{number}.vmdk", "vmdk")
    for name in ("0.iso", "1.iso", "boot.flp"):
        (home / name).write_bytes(bytes(4096))
    return home


@given(entries=machines())
@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_libvirt_sees_the_same_machine(
    entries: dict[str, str], images: Path, tmp_path_factory: pytest.TempPathFactory, reader: Callable[[str], Seen]
) -> None:
    (images / "m.vmx").write_bytes(Vmx(entries).encode())
    assert main(["vmgahp", "submit", "vmx", "m.vmx", "-o", "m.sub", "--force"]) == 0
    scratch = tmp_path_factory.mktemp("scratch")
    text = (images / "m.sub").read_text()
    oracle.bring(text, scratch)
    driver = oracle.driver_at(scratch)
    try:
        ours = oracle.seen(driver.describe(oracle.ad_of(text, scratch)))
    finally:
        driver.close()
    theirs = reader((images / "m.vmx").read_text())
    assert (ours.memory_mib, ours.vcpus, ours.firmware) == (theirs.memory_mib, theirs.vcpus, theirs.firmware)
    assert ours.topology in (theirs.topology, (int(entries["numvcpus"]), 1, 1), ())
    assert sorted(one[:2] for one in ours.drives) == sorted(one[:2] for one in theirs.drives)
    assert [(one.model, one.mac) for one in ours.cards] == [(one.model, one.mac) for one in theirs.cards]
    kinds = [one.kind for one in ours.drives]
    assert kinds == sorted(kinds, key=["disk", "cdrom", "floppy"].index), "it boots from a hard disk first"
