"""Images with which no VM would start: overlays of what is not there, encrypted ones, and files that are no disks."""

import gzip
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.commands.submit import samples
from tests.commands.submit.samples import changed, overlay
from tests.commands.support import absent
from vmgahp.commands.submit import images
from vmgahp.commands.submit.report import SubmitError, Summary

pytestmark = pytest.mark.qemu

MEMORY = ("--memory", "1G")
DOMAIN = """\
<domain type='kvm'><name>x</name><memory unit='GiB'>1</memory><vcpu>1</vcpu><os><type arch='x86_64'>hvm</type></os>
<devices><disk type='file' device='disk'><driver name='qemu' type='FORMAT'/><source file='FILE'/>
<target dev='vda' bus='virtio'/></disk></devices></domain>
"""


def qemu_img(*words):
    subprocess.run(["qemu-img", *words], check=True, capture_output=True)


@pytest.fixture
def domain(home):
    """Writes the XML of a VM with one disk; its name."""

    def write(file, form):
        (home / "x.xml").write_text(DOMAIN.replace("FILE", file).replace("FORMAT", form))
        return "x.xml"

    return write


# --- overlays


def test_an_overlay_that_names_its_base_by_a_relative_path_is_flattened_or_refused(home, submit, refused):
    """START would look for it in the scratch directory."""
    overlay("top.qcow2", "disk.qcow2")
    assert absent(refused("disk", "top.qcow2", *MEMORY), "its backing file is disk.qcow2", "say --convert") == []
    (home / "made").mkdir()
    read, said = submit("disk", "top.qcow2", *MEMORY, "--convert", "--dir", "made", lax=False)
    assert read["transfer_input_files"] == f"{home}/made/top.qcow2"
    about = subprocess.run(["qemu-img", "info", "made/top.qcow2"], check=True, capture_output=True).stdout
    assert b"backing file" not in about
    assert "it is an overlay of disk.qcow2" in changed(said)
    assert "must have" not in said


def test_no_image_is_replaced_that_a_disk_is_made_of_whatever_force_says(home, submit, domain):
    overlay("web.s1", "disk.qcow2")
    overlay("disk.s2", "web.s1")  # whose base has the name that the copy would have
    before = (home / "disk.qcow2").read_bytes()
    for words in (("disk", "disk.s2", "--format", "qcow2"), ("libvirt-xml", domain("disk.s2", "qcow2"), "--own")):
        read, _ = submit(*words, *MEMORY, "--convert", "--force")
        assert read["transfer_input_files"] == f"{home}/disk-2.qcow2"
        assert (home / "disk.qcow2").read_bytes() == before
        assert (home / "disk.s2").exists()
        (home / "disk-2.qcow2").unlink()


def test_an_image_that_has_to_be_made_anew_stays(home, submit, domain):
    shutil.copy("disk.qcow2", "web.qcow2")
    qemu_img("bitmap", "--add", "web.qcow2", "backup")
    read, said = submit("libvirt-xml", domain("web.qcow2", "qcow2"), *MEMORY, "--force")
    assert read["transfer_input_files"] == f"{home}/web-2.qcow2", said
    assert (home / "web.qcow2").exists()


@pytest.mark.parametrize(
    "backing",
    [
        'json:{"driver":"qcow2","file":{"driver":"file","filename":"disk.qcow2"}}',
        'json:{"driver":"nbd","host":"localhost"}',
        "nbd://localhost/x",
        "/dev/sdb",
    ],
)
@pytest.mark.parametrize("words", [(), ("--convert",)])
def test_an_overlay_of_what_is_no_file_is_refused(home, refused, backing, words):
    overlay("top.qcow2", backing, is_there=False)
    said = refused("disk", "top.qcow2", *MEMORY, *words)
    assert f"its backing file is {backing}, which is no plain file" in said


def test_an_overlay_of_what_only_the_execute_machine_has_is_written(home, submit):
    overlay("top.qcow2", "/machines/base.qcow2", is_there=False)
    assert "overlay of /machines/base.qcow2" in submit("disk", "top.qcow2", *MEMORY, lax=False)[1]


# --- what is no disk


def test_an_encrypted_image_is_refused(home, refused, domain):
    options = "encrypt.format=aes,encrypt.key-secret=s"  # luks measures the processor, and fails on a busy one
    qemu_img("create", "-q", "-f", "qcow2", "--object", "secret,id=s,data=x", "-o", options, "locked.qcow2", "1M")
    for words in (("disk", "locked.qcow2", *MEMORY), ("libvirt-xml", domain("locked.qcow2", "qcow2"))):
        assert "it is encrypted" in refused(*words)
        assert "it is encrypted" in refused(*words, "--convert", "--force")


@pytest.mark.parametrize(
    ("element", "why"),
    [
        ("<encryption format='luks'/>", "it is encrypted"),
        ("<slices><slice type='storage' offset='9' size='9'/></slices>", "it is a part of its file"),
    ],
)
def test_a_disk_that_only_libvirt_could_read_is_left_out(home, refused, domain, element, why):
    name = domain("disk.qcow2", "qcow2")
    text = (home / name).read_text()
    (home / name).write_text(text.replace("file='disk.qcow2'/>", f"file='disk.qcow2'>{element}</source>"))
    assert why in samples.lost(refused("libvirt-xml", name, lax=False))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (gzip.compress(b"x" * 99999, mtime=0) + bytes(600), "gzip"),
        (b"PK\3\4" + bytes(600), "a zip archive"),
        (bytes(257) + b"ustar" + bytes(600), "a tar archive"),
        (b"\x7fELF" + bytes(600), "a program"),
        (b"LUKS\xba\xbe" + bytes(4096), "an encrypted volume (LUKS)"),
        (b"\x04\x22\x4d\x18" + bytes(600), "lz4"),
        (b"\x3a\xff\x26\xed" + bytes(600), "a sparse image of Android's"),
        (b"MSWIM\0\0\0" + bytes(600), "an image of Windows files (WIM)"),
        (b"EVF\t\r\n\xff\0" + bytes(600), "a forensic image (E01)"),
        (b"<!DOCTYPE html>\n<title>Not found</title>\n" * 20, "a text"),
    ],
)
def test_what_begins_like_no_disk_is_none(home, submit, refused, domain, data, said):
    (home / "x.img").write_bytes(data)
    assert f"begins like {said}, and so is no disk" in refused("libvirt-xml", domain("x.img", "raw"))
    if said != "gzip":  # which is unpacked
        assert f"begins like {said}, and so is no disk" in refused("disk", "x.img", *MEMORY)
    assert submit("disk", "x.img", "--format", "raw", *MEMORY, lax=False)[0]["vm_disk"] == "x.img:vda:w:raw"


def test_an_image_whose_format_is_said_to_be_raw_and_is_not_is_refused(home, submit, refused, domain):
    assert "said to be raw, and begins like qcow2" in refused("libvirt-xml", domain("disk.qcow2", "raw"))
    assert "taken as raw" in submit("disk", "disk.qcow2", "--format", "raw", *MEMORY, lax=False)[1]


@pytest.mark.parametrize("line", ["\n", "RW 1", "RW 1 "])
def test_a_description_that_is_made_to_be_much_work_is_not(tmp_path: Path, line: str) -> None:
    (tmp_path / "x.vmdk").write_text("# Disk DescriptorFile\n" + line + line[-1] * (1 << 20))
    assert images.flat_names(f"{tmp_path}/x.vmdk") == []


@pytest.mark.parametrize("size", [0, 511])
def test_what_is_smaller_than_a_sector_is_no_disk(home, refused, size):
    (home / "x.img").write_bytes(bytes(size))
    assert f"it has {size} bytes" in refused("disk", "x.img", *MEMORY)


def test_a_file_that_was_there_before_an_unpacking_stays(tmp_path: Path) -> None:
    theirs = tmp_path / "disk.new"
    theirs.write_text("theirs")
    with pytest.raises(SubmitError, match="disk cannot be written"):
        images.write_unpacked([b"x"], str(tmp_path / "disk"), Summary(), force=False)
    assert theirs.read_text() == "theirs"
