"""`vmgahp submit virt-install`: a command line of virt-install's as a job."""

import json
import shutil
import subprocess

import pytest

from tests.commands.submit.samples import overlay
from tests.commands.support import absent
from tests.lab.programs import a_program
from vmgahp.commands.submit import libvirt_xml
from vmgahp.commands.submit.report import SubmitError

pytestmark = pytest.mark.qemu

DOMAIN = """\
<domain type="kvm">
  <name>made</name>
  <memory>2097152</memory>
  <vcpu>2</vcpu>
  <os>
    <type arch="x86_64" machine="q35">hvm</type>
    BOOT
  </os>
  <devices>
    DISKS
    <interface type="network">
      <source network="default"/>
      <mac address="52:54:00:12:34:56"/>
      <model type="virtio"/>
    </interface>
  </devices>
</domain>
"""
DISK = """<disk type="file" device="disk"><driver name="qemu" type="qcow2" discard="unmap"/>
  <source file="{}"/><target dev="{}" bus="virtio"/></disk>"""
CD = """<disk type="file" device="cdrom"><driver name="qemu" type="raw"/>
  <source file="{}/seed.iso"/><target dev="sda" bus="sata"/><readonly/></disk>"""


@pytest.fixture
def program(home, monkeypatch):
    """A virt-install that prints what it is told to, and writes down with which words it was called."""
    (home / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{home}/bin", prepend=":")

    def stand_in(*domains, text=""):
        (home / "printed").write_text("".join(domains))
        prints = f'for word; do echo "$word"; done > {home}/words\nexec cat {home}/printed'
        a_program(home / "bin/virt-install", text or prints)

    stand_in(domain(DISK.format(home / "disk.qcow2", "vda")))
    return stand_in


def domain(disks, boot="<boot dev='hd'/>"):
    return DOMAIN.replace("DISKS", disks).replace("BOOT", boot)


@pytest.fixture
def install(program, submit):
    """Runs the command with words for virt-install: the submit file (None for none) and what was said."""
    return lambda *words, options=(), status=0: submit("virt-install", *options, "--", *words, status=status, lax=False)


def test_no_two_jobs_of_one_line_have_one_address(home, install):
    for options in ((), ("--as-is",)):
        read, _ = install("--import", "--disk", "disk.qcow2", options=options)
        assert "52:54:00:12:34:56" not in str(read)
    assert "52:54:00:12:34:56" not in (home / "made.xml").read_text()


def test_virt_install_is_asked_what_the_words_mean(home, install):
    words = ["--name", "made", "--import", "--disk", "disk.qcow2", "--description", "$(touch x); a b"]
    read, _ = install(*words)
    assert (home / "words").read_text().splitlines() == [*words, "--print-xml", "--dry-run"]
    assert (read["vm_memory"], read["vm_vcpus"], read["vm_disk"]) == ("2048", "2", "disk.qcow2:vda:w:qcow2")
    assert "request_disk" not in read
    assert not (home / "x").exists()


@pytest.mark.parametrize(("word", "mac"), [("network=default", ""), ("mac=52:54:00:12:34:56", "52:54:00:12:34:56")])
def test_a_mac_address_that_is_made_up_is_not_that_of_many_jobs(install, word, mac):
    assert install("--network", word)[0].get("vm_macaddr", "") == mac


@pytest.mark.parametrize(
    "disk",
    [
        ["--disk", "size=0.5"], ["--dis", "size=0.5"], ["--disk=path=new.qcow2,size=0.5"],
        ["--disk", "new.qcow2,size=0.5"],
    ],
)  # fmt: skip
def test_a_disk_that_is_to_be_made_is_made_empty(home, program, install, disk):
    there, new = DISK.format(home / "disk.qcow2", "vda"), DISK.format("/nonexistent/new.qcow2", "vdb")
    program(domain(there + new))
    read, said = install("--disk", "disk.qcow2,size=7", *disk)
    assert read["vm_disk"] == "disk.qcow2:vda:w:qcow2,new.qcow2:vdb:w:qcow2"
    assert (home / "new.qcow2").read_bytes()[24:32] == (1 << 29).to_bytes(8)
    assert "0.5 GiB" in said
    assert (1 << 19) < int(read["request_disk"]) < 1.01 * (1 << 19), "for both: what is said bounds them all"


@pytest.mark.parametrize(("size", "mib"), [("0.5", 512), ("0.001", 2)])
def test_a_disk_that_begins_with_an_image_is_a_copy_of_it(home, program, install, size, mib):
    """virt-install prints nothing of it."""
    (home / "base.raw").write_bytes(b"\1" * (2 << 20))
    subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", "base.raw", "base.qcow2"], check=True)
    program(domain(DISK.format(home / "new.qcow2", "vda")))
    words = f"path=new.qcow2,size={size},backing_store=base.qcow2,backing_format=qcow2"
    read, said = install("--import", "--disk", words)
    assert read["vm_disk"] == "new.qcow2:vda:w:qcow2"
    command = ["qemu-img", "info", "--output=json", "new.qcow2"]
    about = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert (about["virtual-size"], "backing-filename" in about) == (mib << 20, False)
    subprocess.run(["qemu-img", "convert", "-f", "qcow2", "-O", "raw", "new.qcow2", "new.raw"], check=True)
    with open("new.raw", "rb") as copy:
        assert copy.read(2 << 20) == (home / "base.raw").read_bytes()
    assert f"a copy of {home}/base.qcow2" in said


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("backing_store=gone.qcow2", "cannot be opened"),
        ("backing_store=base.img", "begins like a text, and so is no disk"),
        ("backing_store=disk.qcow2,backing_format=luks", "backing_format=luks is none of"),
        ("backing_store=disk.qcow2,backing_format=vdi", "qemu-img cannot read it"),
        ("backing_store=top.qcow2", "which is no plain file"),
    ],
)
def test_a_disk_that_cannot_begin_with_an_image_is_not_made(home, program, install, words, problem):
    (home / "base.img").write_text("no disk\n" * 512)
    overlay("top.qcow2", "nbd://localhost/x", on_form="raw", is_there=False)
    program(domain(DISK.format("/nonexistent/new.qcow2", "vda")))
    assert problem in install("--disk", f"new.qcow2,size=1,{words}", status=1)[1]
    assert not (home / "new.qcow2").exists()


def test_a_disk_of_which_nobody_says_the_size_or_that_cannot_be_seen_is_not_made(home, program, install):
    program(domain(DISK.format("/nonexistent/new.qcow2", "vda")))
    read, said = install("--disk", "new.qcow2", status=1)
    assert (read, absent(said, "is not there", "qemu-img create")) == (None, [])
    assert "is not there" in install("--disk", "new.qcow2,size=1", options=["--shared"], status=1)[1]
    program(domain(DISK.format(home / "seed.iso" / "new.qcow2", "vda")))  # as in a directory that is closed
    assert "cannot be opened" in install("--disk", "new.qcow2,size=1", status=1)[1]
    assert not (home / "new.qcow2").exists()


@pytest.mark.parametrize(("word", "disk"), [("size=1", "/nonexistent/new.qcow2"), ("disk.qcow2", "disk.qcow2")])
def test_an_installation_boots_the_disk_if_that_is_empty_and_else_the_cd(home, program, install, word, disk):
    disks = DISK.format(home / disk, "vda") + CD.format(home)
    program(domain(disks, "<boot dev='cdrom'/><boot dev='hd'/>"), domain(disks))
    read, said = install("--cdrom", "seed.iso", "--disk", word)
    empty = word == "size=1"
    assert [disk.split(":")[1] for disk in read["vm_disk"].split(",")] == (["vda", "sda"] if empty else ["sda", "vda"])
    assert not empty or absent(said, "while the disk is empty", "powers off") == []


def test_cloud_init_gets_the_files_of_the_job_by_an_abbreviated_option_too(home, install):
    (home / "ud").write_text("#cloud-config\n{}\n")
    (home / "md").write_text("instance-id: x\n")
    read, _ = install("--import", "--disk", "disk.qcow2", "--cloud-init", "user-data=ud,meta-data=md")
    assert (read["MY.VMPARAM_vm_User_Data"], read["MY.VMPARAM_vm_Meta_Data"]) == ('"ud"', '"md"')
    assert absent(read["transfer_input_files"], f"{home}/ud", f"{home}/md") == []
    assert "cloud" not in (home / "words").read_text()
    read, _ = install("--impo", "--disk", "disk.qcow2", "--cloud", "user-data=ud")
    assert read["MY.VMPARAM_vm_User_Data"] == '"ud"'


@pytest.mark.parametrize("value", ["", "root-password-generate=on", "user-data=nowhere", "ssh-key=ud", "meta-data=ud"])
def test_cloud_init_gets_nothing_else(home, install, value):
    (home / "ud").write_text("#cloud-config\n{}\n")
    assert "cloud-init" in install("--disk", "disk.qcow2", "--cloud-init", value, status=1)[1]


@pytest.mark.parametrize(
    "word",
    [
        *("--location", "-l", "--location=http://example.org/", "--install", "--unattended"),
        *("--loca", "-lhttp://example.org/", "--unatt=profile=desktop"),
    ],
)
def test_what_would_be_fetched_is_not(home, install, word):
    assert "--import" in install("--name", "x", word, status=1)[1]
    assert not (home / "words").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("#!/bin/sh\necho 'ERROR    --os-variant is required' >&2\nexit 1\n", ["--os-variant is required"]),
        ("#!/bin/sh\nprintf 'x\\n\\nERROR    \\nno\\nOS\\n\\nThis is fatal.\\n' >&2\nexit 1\n", ["says: no OS. Hint:"]),
        ("#!/bin/sh\nexit 3\n", ["says: nothing, and ends with 3"]),
        ("#!/bin/sh\necho hello\n", ["not XML"]),
        ("#!/bin/sh\necho '<network/>'\n", ["no domain"]),
        ("#!/nonexistent\n", ["virt-install"]),
    ],
)
def test_what_virt_install_complains_of_is_said(program, install, text, words):
    program(text=text)
    said = install("--name", "x", status=1)[1]
    assert absent(said, *words) == [], said


def test_virt_install_that_is_not_there_is_told(home, install, monkeypatch):
    (home / "bin/virt-install").unlink()
    monkeypatch.setenv("PATH", f"{home}/bin")
    assert "virtinst" in install("--name", "x", status=1)[1]


def test_virt_install_does_not_hang(program, install, monkeypatch):
    monkeypatch.setattr(libvirt_xml, "DEADLINE", 0.3)
    program(text="#!/bin/sh\nsleep 60\n")
    assert "had not ended" in install("--name", "x", status=1)[1]


# --- virt-install itself, whose libvirt here has nothing but memory


@pytest.fixture
def real(home, monkeypatch):
    """Asks virt-install itself, which keeps a log."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setenv("HOME", str(home))
    if shutil.which("virt-install") is None:
        pytest.skip("needs virt-install")
    common = ["--connect", "test:///default", "--name", "x", "--memory", "512", "--osinfo", "generic"]
    return lambda *words: libvirt_xml._printed([*common, *words])


def test_virt_install_prints_a_domain_and_two_for_an_installation_and_makes_nothing(real, home):
    root, installs = real("--import", "--disk", "disk.qcow2", "--vcpus", "3")
    assert (root.findtext("name"), root.findtext("vcpu"), installs) == ("x", "3", False)
    assert root.xpath("string(devices/disk/source/@file)") == str(home / "disk.qcow2")
    root, installs = real("--cdrom", "seed.iso", "--disk", f"{home}/new.qcow2,size=1")
    assert ([boot.get("dev") for boot in root.iterfind("os/boot")], installs) == (["cdrom", "hd"], True)
    assert not (home / "new.qcow2").exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--surprise"], "unrecognized arguments: --surprise"),
        (["--osinfo", "surprise"], "surprise"),
        (["--osinfo", "require=on,detect=off"], "OS name is required"),
    ],
)
def test_virt_install_says_what_is_wrong(real, words, problem):
    with pytest.raises(SubmitError, match=problem):
        real("--import", "--disk", "disk.qcow2", *words)
