"""`vmgahp submit disk`: images of any format alone, compressed ones, and those of the machines' catalog."""

import gzip
import lzma
import os
import shutil
import signal
import subprocess

import pytest

from tests.commands.submit import samples
from tests.commands.submit.samples import changed, part
from tests.commands.support import absent
from tests.lab.programs import a_program
from tests.peer import VMGAHP
from vmgahp.commands.submit.report import Outcome

pytestmark = pytest.mark.qemu

MEMORY = ("--memory", "1G")
CONTENT = b"\1" * 65536 + bytes(1 << 20)
"""What the images have that `samples.image` makes with options."""


@pytest.fixture
def disk(submit):
    """Runs the command with images, of which nothing may be left out: the value of vm_disk, and what was said."""

    def run(*words, memory=MEMORY):
        read, said = submit("disk", *words, *memory, lax=False)
        return read["vm_disk"], said

    return run


@pytest.mark.parametrize(
    ("form", "options", "taken"),
    [
        ("qcow2", ["compat=1.1"], "qcow2"), ("qcow2", ["compat=0.10"], "qcow2"), ("qcow", [], "qcow"),
        ("qed", [], "qed"), ("vdi", [], "vdi"), ("vpc", ["subformat=dynamic"], "vpc"),
        ("vpc", ["subformat=fixed"], "vpc"), ("vmdk", ["subformat=monolithicSparse"], "vmdk"),
        ("vmdk", ["subformat=streamOptimized"], ""), ("vmdk", ["subformat=monolithicFlat"], ""),
        ("vmdk", ["subformat=twoGbMaxExtentSparse"], ""), ("vhdx", [], ""), ("parallels", [], ""),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else value,
)  # fmt: skip
@pytest.mark.parametrize("name", ["image.img", "image", "image.vmdk"])
def test_a_format_is_seen_in_the_content(home, disk, form, options, taken, name):
    """Whatever the name says; what the daemon does not take is converted, and told of."""
    samples.image(home / name, form, "-o", ",".join(options) or "size=1114112")
    entry, said = disk(name)
    if taken:
        assert entry == f"{name}:vda:w:{taken}"
    else:
        assert entry == "image.qcow2:vda:w:qcow2"
        assert name in changed(said)
        compare = ["qemu-img", "compare", "-f", "raw", "-F", "qcow2", "image.empty", "image.qcow2"]
        assert subprocess.run(compare, capture_output=True, check=False).returncode == 0


def test_no_submit_file_takes_the_place_of_an_image_that_is_converted(home, refused):
    samples.image(home / "image.vdi", "vdi", "-o", "size=1114112")
    before = (home / "image.vdi").read_bytes()
    assert "is read" in refused("disk", "image.vdi", *MEMORY, "--convert", "--force", "-o", "image.vdi")
    assert (home / "image.vdi").read_bytes() == before


def test_a_cdrom_is_seen_in_its_name_or_content(home, disk):
    (home / "cd.img").write_bytes(bytes(32769) + b"CD001" + bytes(4096))
    entry, said = disk("disk.qcow2", "cd.img", "seed.iso")
    assert entry == "disk.qcow2:vda:w:qcow2,cd.img:sda:r:iso,seed.iso:sdb:r:iso"
    assert "iso by its content" in part(said, Outcome.CARRIED)


@pytest.mark.parametrize("name", ["image.raw", "image.iso"])
def test_a_name_that_says_raw_of_what_begins_otherwise_is_asked_about(home, disk, refused, name):
    shutil.copy("disk.qcow2", name)
    assert "--format qcow2" in refused("disk", name, *MEMORY)
    assert disk(name, "--format", "qcow2")[0].endswith(":qcow2")
    entry, said = disk(name, "--format", "raw")
    assert (entry, "begins like qcow2" in said) == (f"{name}:vda:w:raw", True)


def test_what_only_its_content_calls_qcow2_names_no_other_file(home, disk, refused):
    """A guest may have written it into a raw image."""
    for name in ("top.img", "top.qcow2"):
        samples.overlay(name, home / "disk.qcow2")
    assert "overlay of" in refused("disk", "top.img", *MEMORY)
    assert disk("top.img", "--format", "qcow2")[0] == disk("top.qcow2")[0].replace("top.qcow2", "top.img")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_of_one_that_is_interrupted(home, number):
    os.mkfifo(home / "ready")
    (home / "bin").mkdir()
    xz = a_program(home / "bin/xz", f"head -c 3000000 /dev/zero; echo > {home}/ready; exec sleep 600")
    (home / "x.img.xz").write_bytes(lzma.compress(CONTENT))
    command = [*VMGAHP, "submit", "disk", "x.img.xz", *MEMORY]
    running = subprocess.Popen(command, env=os.environ | {"PATH": f"{xz.parent}:{os.environ['PATH']}"})
    (home / "ready").read_text()
    assert list(home.glob("*.new"))
    running.send_signal(number)
    assert running.wait(60) == 130
    assert not list(home.glob("*.new"))


@pytest.mark.parametrize(("ending", "program"), [(".gz", "gzip"), (".xz", "xz"), (".bz2", "bzip2"), (".zst", "zstd")])
@pytest.mark.parametrize("name", ["image.qcow2", "image.raw", "image.img"])
def test_a_compressed_download_is_unpacked(home, disk, refused, monkeypatch, ending, program, name):
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")
    data = (home / "disk.qcow2").read_bytes() if name != "image.raw" else os.urandom(1 << 20)
    halves = (data[:5000], data[5000:])
    parts = [subprocess.run([program, "-c"], input=half, capture_output=True).stdout for half in halves]
    (home / f"{name}{ending}").write_bytes(b"".join(parts))  # as parallel programs write it
    entry, said = disk(f"{name}{ending}")
    assert entry == f"{name}:vda:w:{'raw' if name == 'image.raw' else 'qcow2'}"
    assert (home / name).read_bytes() == data
    assert f"unpacked to {home}/{name}" in said
    (home / name).unlink()
    (home / f"{name}{ending}").write_bytes(b"".join(parts)[:-4])
    assert f"cannot be unpacked by {program}" in refused("disk", f"{name}{ending}", *MEMORY)
    assert not list(home.glob(name)) + list(home.glob("*.new"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert f"install {program}" in refused("disk", f"{name}{ending}", *MEMORY)


def test_what_begins_like_a_compressed_file_and_is_said_to_be_raw_stays(home, disk):
    """Its guest may have written that."""
    (home / "image.img").write_bytes(gzip.compress(b"x") + CONTENT)
    assert disk("image.img", "--format", "raw")[0] == "image.img:vda:w:raw"


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("x.ova", bytes(257) + b"ustar" + bytes(600), "vmgahp submit ovf"),
        ("x.tar.gz", gzip.compress(b"x", mtime=0), "is a compressed archive"),
        ("x.img.gz", gzip.compress(b"x" * 9000, mtime=0)[:-9], "x.img.gz"),
        ("x.qcow2", CONTENT, "begins like no format"),
        ("x.dmg", CONTENT + b"koly" + bytes(508), "ends like a DMG of macOS"),
    ],
)
def test_what_is_no_image_is_refused(home, refused, name, data, said):
    (home / name).write_bytes(data)
    before = sorted(home.iterdir())
    assert said in refused("disk", name, *MEMORY)
    assert sorted(home.iterdir()) == before


@pytest.mark.parametrize("kept", [70_000, 200_000])
def test_an_image_whose_download_was_cut_off_is_refused(home, refused, kept):
    samples.image(home / "cut.qcow2", "qcow2")
    subprocess.run(["qemu-io", "-f", "qcow2", "-c", "write -q 0 1M", "cut.qcow2"], check=True, capture_output=True)
    os.truncate(home / "cut.qcow2", kept)
    for words in ((), ("--convert",)):
        said = refused("disk", "cut.qcow2", *words, *MEMORY)
        assert absent(said, "it is damaged", "cut off") == []


@pytest.mark.parametrize(
    ("name", "asks"), [("a-arm64.qcow2", True), ("a_aarch64.qcow2", True), ("s390x-a.qcow2", False)]
)
def test_a_name_of_another_architecture_is_told_of(home, disk, name, asks):
    samples.image(home / name, "qcow2")
    said = disk(name)[1]
    assert (f"{name} is called like an image of" in said, "VMPARAM_vm_Arch" in said) == (True, asks)
    assert "is called" not in disk(name, "--append", '+VMPARAM_vm_Arch = "aarch64"')[1]
    samples.image(home / "swarm64.qcow2", "qcow2")
    assert "is called" not in disk("swarm64.qcow2")[1]


def test_a_decompressor_takes_no_memory_that_a_stranger_asks_for(home, refused, monkeypatch):
    limits = {"xz": "--memlimit-decompress=1MiB"}  # its usual preset wants nine
    monkeypatch.setattr("vmgahp.commands.submit.images.MEMORY_LIMITS", limits)
    (home / "x.img.xz").write_bytes(lzma.compress(CONTENT))
    assert "Memory usage limit" in refused("disk", "x.img.xz", *MEMORY)
    assert not (home / "x.img").exists()


def test_what_is_unpacked_has_a_limit_and_its_zeros_take_no_room(home, disk, refused, monkeypatch):
    (home / "x.img.gz").write_bytes(gzip.compress(CONTENT + bytes(64 << 20)))
    assert disk("x.img.gz")[0] == "x.img:vda:w:raw"
    made = (home / "x.img").stat()
    assert (made.st_size > 64 << 20, made.st_blocks * 512 < 8 << 20) == (True, True)
    (home / "x.img").unlink()
    monkeypatch.setattr("vmgahp.commands.submit.images.LARGEST", 1 << 20)
    assert "would have more than" in refused("disk", "x.img.gz", *MEMORY)
    assert not list(home.glob("x.img")) + list(home.glob("*.new"))


def test_nothing_is_written_over_by_unpacking(home, refused):
    (home / "seed.iso.gz").write_bytes(gzip.compress(b"x"))
    assert "is there already" in refused("disk", "seed.iso.gz", *MEMORY)
    os.mkfifo("fifo.img")
    assert "cannot be opened" in refused("disk", "fifo.img", *MEMORY)


def test_an_image_that_is_elsewhere_is_shared(home, disk, refused):
    assert "say --shared" in refused("disk", "far.qcow2", *MEMORY)
    assert disk("far.qcow2", "--shared")[0] == f"{home}/far.qcow2:vda:w:qcow2"
    assert "--format" in refused("disk", "far.img", "--shared", *MEMORY)


# --- the machines' catalog


def test_an_image_of_the_catalog(home, submit, refused):
    read, said = submit("disk", "catalog:debian-12", "disk.qcow2", *MEMORY, lax=False)
    assert read["vm_disk"] == "catalog:debian-12:vda:w,disk.qcow2:vdb:w:qcow2"
    assert read["executable"] == "debian-12"
    assert read["transfer_input_files"] == f"{home}/disk.qcow2"
    assert read["requirements"] == 'stringListMember("debian-12", TARGET.VM_Images)'
    assert "an overlay of the machine's image" in part(said, Outcome.CARRIED)
    assert "cannot be the name" in refused("disk", "catalog:../x", *MEMORY)
    read, _ = submit("disk", "catalog:debian-12", "catalog:debian-12", *MEMORY, lax=False)
    assert read["vm_disk"] == "catalog:debian-12:vda:w,catalog:debian-12:vdb:w"


def test_what_the_catalog_of_this_machine_says(home, submit, refused, monkeypatch):
    """It may be one of those where the job runs."""
    catalog = home / "catalog.toml"
    catalog.write_text('[debian]\npath="d.qcow2"\nformat="qcow2"\nmin_memory = 512\n[tools]\npath="t"\nformat="iso"\n')
    monkeypatch.setenv("VMGAHP_CONFIG", str(home / "vmgahp.conf"))
    (home / "vmgahp.conf").write_text(f"VM_CATALOG = {catalog}\n")
    monkeypatch.setattr("vmgahp.images.catalog.require_trustworthy", lambda *_, **__: None)
    read, said = submit("disk", "catalog:debian", "catalog:tools", "catalog:other", lax=False)
    assert read["vm_memory"] == "512"
    assert read["vm_disk"] == "catalog:debian:vda:w,catalog:tools:sda:r,catalog:other:vdb:w"
    assert "has no other" in said
    assert "--memory 512" in refused("disk", "catalog:debian", "--memory", "256")
