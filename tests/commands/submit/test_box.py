"""`vmgahp submit box`: Vagrant's boxes of three providers, packed and unpacked, and boxes of people who mean harm."""

import gzip
import json
import os
import tarfile
from pathlib import Path

import pytest

from tests.commands.submit import samples
from tests.commands.submit.samples import changed
from tests.commands.support import absent
from vmgahp.commands.submit.report import Outcome

pytestmark = [pytest.mark.qemu, pytest.mark.usefixtures("home")]

AMOUNTS = ("--memory", "2G", "--cpus", "3")

VMX = """\
.encoding = "UTF-8"
memsize = "512"
displayName = "packer-vm"
scsi0.present = "TRUE"
scsi0:0.present = "TRUE"
scsi0:0.fileName = "disk.vmdk"
ethernet0.present = "TRUE"
ethernet0.connectionType = "nat"
ethernet0.virtualDev = "e1000"
floppy0.present = "FALSE"
"""


@pytest.fixture
def place(home: Path) -> Path:
    """Where the images of the boxes go."""
    (home / "images").mkdir()
    return home / "images"


def pack(path: Path, members: dict[str, bytes], *links: tarfile.TarInfo, packed: bool = True) -> None:
    """A .box as Vagrant makes it: tar, gzip, names with a dot before them; or unpacked, a directory."""
    if not packed:
        path.mkdir()
        for name, data in members.items():
            (path / name).write_bytes(data)
        return
    dotted = {f"./{name}": data for name, data in members.items()}
    samples.tar(path, dotted, *links, form=tarfile.GNU_FORMAT)


def about(**more: object) -> bytes:
    return json.dumps({"provider": "libvirt", **more}).encode()


@pytest.fixture
def disk(home: Path) -> bytes:
    return (home / "disk.qcow2").read_bytes()


def test_a_box_of_libvirts(home, submit, place, disk):
    pack(home / "debian.box", {"metadata.json": about(format="qcow2", virtual_size=1), "box.img": disk})
    read, said = submit("box", "debian.box", "--dir", str(place), *AMOUNTS, lax=False)
    assert (read["executable"], read["vm_memory"], read["vm_vcpus"]) == ("debian", "2048", "3")
    assert (read["vm_disk"], read["vm_networking_type"]) == ("box.img:vda:w:qcow2", "nat")
    assert (place / "box.img").read_bytes() == disk
    assert os.listdir(place) == ["box.img"]
    assert "virtual_size = 1 [metadata.json]" in samples.part(said, Outcome.NOT_USED)


@pytest.mark.parametrize("words", [(), AMOUNTS[:2], AMOUNTS[2:]])
def test_memory_and_cpus_that_a_box_does_not_state_are_asked_for(home, refused, place, disk, words):
    """Its Vagrantfile is Ruby, and listed as it stands."""
    members = {"metadata.json": about(), "Vagrantfile": samples.VAGRANTFILE.encode(), "box.img": disk}
    pack(home / "old.box", members)
    said = refused("box", "old.box", "--dir", str(place), *words)
    assert absent(said, "--memory", "--cpus") == []
    assert "libvirt.memory = 4 * 1024 [Vagrantfile line 4]" in samples.part(said, Outcome.NOT_USED)
    assert os.listdir(place) == []


@pytest.mark.parametrize("provider", ["libvirt", "kvm"])
def test_a_box_with_the_xml_of_a_domain(home, submit, place, disk, provider):
    text = "<domain type='kvm'><memory unit='MiB'>768</memory><vcpu>2</vcpu><devices><disk type='file'>"
    text += "<driver name='qemu' type='qcow2'/><source file='/home/maker/box-disk1.img'/>"
    text += "<target dev='sda' bus='sata'/></disk></devices></domain>"
    members = {"metadata.json": about(provider=provider), "box.xml": text.encode(), "box-disk1.img": disk}
    pack(home / "old.box", members)
    read, _ = submit("box", "old.box", "--dir", str(place), lax=False)
    assert (read["vm_memory"], read["vm_vcpus"]) == ("768", "2")
    assert (read["vm_disk"], read["executable"]) == ("box-disk1.img:sda:w:qcow2", "old")


def test_a_box_with_several_disks(home, submit, place, disk):
    disks = [{"path": "root.img"}, {"path": "sub/data.img", "name": "second", "format": "raw"}]
    pack(home / "two.box", {"metadata.json": about(disks=disks), "root.img": disk, "sub/data.img": bytes(4096)})
    read, _ = submit("box", "two.box", "--dir", str(place), *AMOUNTS, lax=False)
    assert read["vm_disk"] == "root.img:vda:w:qcow2,data.img:vdb:w:raw"


@pytest.mark.parametrize("above", ["", "7.1/libvirt", "7.1/amd64/libvirt"])
def test_a_directory_as_vagrant_keeps_it(home, submit, disk, above):
    box = home / "boxes" / "generic-VAGRANTSLASH-alma9"
    inside = box / above
    inside.mkdir(parents=True)
    (inside / "metadata.json").write_bytes(about(format="qcow2", architecture="amd64"))
    (inside / "box.img").write_bytes(disk)
    (box / "metadata_url").write_text("nothing\n")
    read, _ = submit("box", str(box), *AMOUNTS, lax=False)
    assert (read["executable"], read["transfer_input_files"]) == ("generic-alma9", f"{inside}/box.img")


def test_several_boxes_in_a_directory_are_named(home, refused):
    for version in ("1", "2"):
        (home / "boxes" / version).mkdir(parents=True)
        (home / "boxes" / version / "metadata.json").write_bytes(about())
    said = refused("box", "boxes")
    assert "has 2 boxes" in said
    assert "name one of them: 1, 2" in said
    (home / "empty").mkdir()
    assert "metadata.json is missing" in refused("box", "empty")


@pytest.mark.parametrize("provider", ["vmware_desktop", "vmware_fusion"])
@pytest.mark.parametrize("packed", [True, False])
def test_a_box_of_vmwares(home, submit, place, provider, packed):
    samples.image(home / "disk.vmdk", "vmdk", "-o", "subformat=twoGbMaxExtentSparse")
    names = ("disk.vmdk", "disk-s001.vmdk")
    members = {"metadata.json": about(provider=provider), "box.vmx": VMX.encode()}
    members |= {name: (home / name).read_bytes() for name in names}
    members["Vagrantfile"] = b'  v.vmx["memsize"] = "768"\n'
    pack(home / "vmware.box", members, packed=packed)
    read, said = submit("box", "vmware.box", "--dir", str(place), lax=False)
    assert (read["vm_memory"], read["vm_disk"]) == ("512", "disk.qcow2:sda:w:qcow2")
    assert read["transfer_input_files"] == f"{place}/disk.qcow2"
    assert os.listdir(place) == ["disk.qcow2"]
    assert 'v.vmx["memsize"] = "768"' in samples.part(said, Outcome.NOT_USED)


@pytest.mark.parametrize("is_old", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_a_box_of_virtualboxs(home, submit, place, packed, is_old):
    """One of Vagrant 1 has no metadata."""
    members = {} if is_old else {"metadata.json": about(provider="virtualbox")}
    members["box.ovf"] = samples.VBOX.encode()
    members["box-disk001.vmdk"] = (home / "box-disk001.vmdk").read_bytes()
    pack(home / "vb.box", members, packed=packed)
    read, said = submit("box", "vb.box", "--dir", str(place), "--convert", lax=False)
    assert (read["executable"], read["vm_memory"], read["vm_vcpus"]) == ("vb", "768", "2")
    assert read["vm_disk"].endswith(":qcow2")
    assert ("no metadata.json" in said) == is_old
    assert [path.suffix for path in place.iterdir()] == [".qcow2"]


def test_a_box_for_another_machine(home, submit, refused, place, disk):
    pack(home / "arm.box", {"metadata.json": about(architecture="arm64"), "box.img": disk})
    read, _ = submit("box", "arm.box", "--dir", str(place), *AMOUNTS)
    assert (read["MY.VMPARAM_vm_Arch"], read["MY.VMPARAM_vm_Firmware"]) == ('"aarch64"', '"uefi"')
    pack(home / "old.box", {"metadata.json": about(architecture="i386"), "box.img": disk})
    read, said = submit("box", "old.box", "--dir", str(place), "--force", *AMOUNTS, lax=False)
    assert ("MY.VMPARAM_vm_Arch" in read, "i386: x86_64" in changed(said)) == (False, True)
    pack(home / "ppc.box", {"metadata.json": about(architecture="ppc64le"), "box.img": disk})
    assert "'ppc64le'" in refused("box", "ppc.box", "--dir", str(place), "--force", *AMOUNTS)


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"metadata.json": b"{"}, "not JSON"),
        ({"metadata.json": b"[" * 100_000}, "not JSON"),
        ({"metadata.json": b"[]"}, "does not describe a box"),
        ({"metadata.json": about(provider="hyperv")}, "'hyperv'"),
        ({"metadata.json": about()}, "'box.img' is not in"),
        ({"metadata.json": about(disks=[])}, "not a list of disks"),
        ({"metadata.json": about(disks=[{}])}, "disks[0] has no path"),
        ({"metadata.json": about(disks=[{"path": "/etc/passwd"}])}, "is not in"),
        ({"metadata.json": about(disks=[{"path": "../../etc/passwd"}])}, "is not in"),
        ({"metadata.json": about(format="luks"), "box.img": b"x" * 512}, "'luks'"),
        ({"metadata.json": about(format=["qcow2"]), "box.img": b"x" * 512}, "is none of"),
        ({"metadata.json": about(provider="vmware_desktop")}, "0 files .vmx"),
        ({"box.img": b"x"}, "bad.box has 0 files .ovf"),
        ({"metadata.json": about(), "../box.img": b"x"}, "has a file"),
    ],
)
def test_what_is_no_good(home, refused, place, members, said):
    pack(home / "bad.box", members)
    assert said in refused("box", "bad.box", "--dir", str(place), *AMOUNTS)
    assert os.listdir(place) == []


def test_a_link_in_a_box_is_refused(home, refused, place):
    link = tarfile.TarInfo("box.img")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    pack(home / "bad.box", {"metadata.json": about()}, link)
    assert "is not a regular file" in refused("box", "bad.box", "--dir", str(place), *AMOUNTS)
    assert os.listdir(place) == []


def test_an_overlay_in_a_box_is_refused(home, refused, place):
    samples.overlay("overlay.img", "/etc/hostname", on_form="raw")
    pack(home / "over.box", {"metadata.json": about(), "box.img": (home / "overlay.img").read_bytes()})
    assert "it is an overlay of /etc/hostname" in refused("box", "over.box", "--dir", str(place), *AMOUNTS)
    assert os.listdir(place) == []


def test_a_part_that_is_not_in_the_box_is_no_file_of_mine(home, refused, place):
    (home / "secret").write_bytes(bytes(1 << 20))
    text = '# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\ncreateType="monolithicFlat"\n'
    for part in ("/etc/passwd", "../secret", "gone-flat.vmdk"):
        data = f'{text}RW 2048 FLAT "{part}" 0\n'.encode()
        members = {"metadata.json": about(provider="vmware_desktop"), "box.vmx": VMX.encode(), "disk.vmdk": data}
        pack(home / "part.box", members)
        refused("box", "part.box", "--dir", str(place))
        assert os.listdir(place) == []


@pytest.mark.parametrize(("provider", "name"), [("libvirt", "metadata.json"), ("virtualbox", "box.ovf")])
def test_nothing_waits_for_a_pipe_in_a_directory(home, refused, place, provider, name):
    (home / "box").mkdir()
    (home / "box/metadata.json").write_bytes(about(provider=provider))
    (home / "box" / name).unlink(missing_ok=True)
    os.mkfifo(home / "box" / name)
    assert "not a regular file" in refused("box", "box", "--dir", str(place))


def test_a_box_that_is_cut_off_or_none_at_all(home, refused, place, disk):
    pack(home / "whole.box", {"metadata.json": about(), "box.img": disk})
    (home / "cut.box").write_bytes((home / "whole.box").read_bytes()[:-200])
    (home / "zip.box").write_bytes(b"PK\3\4" + bytes(600))
    (home / "tail.box").write_bytes(gzip.compress(b"no tar at all"))
    for name, said in (
        ("cut.box", "cut.box cannot be unpacked"),
        ("zip.box", "zip.box is no Vagrant box"),
        ("tail.box", "tail.box is no Vagrant box"),
        ("gone.box", "gone.box cannot be read"),
    ):
        assert said in refused("box", name, "--dir", str(place))
        assert os.listdir(place) == []
