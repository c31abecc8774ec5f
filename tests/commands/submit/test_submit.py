"""`vmgahp submit`: the writer of submit files, the command line, and disk images."""

import io
import json
import os
import shutil
import subprocess
from contextlib import suppress

import htcondor2
import pytest

from tests.commands.submit import samples
from tests.commands.submit.samples import changed
from tests.commands.support import absent
from tests.lab.programs import a_program
from vmgahp.cli import main
from vmgahp.commands.submit import conversion, images
from vmgahp.commands.submit.machine import Guest, GuestDisk, GuestNic, name_devices
from vmgahp.commands.submit.report import Outcome, SubmitError, Summary
from vmgahp.job.ad import literal

pytestmark = [pytest.mark.qemu, pytest.mark.usefixtures("home")]


def written(machine, **options):
    return conversion.write(machine, "kvm", Summary(), **options)


def plain(**changes):
    return Guest("vm", 64, **{"disks": [GuestDisk("/images/disk.qcow2", "qcow2", "vda")]} | changes)


# --- the writer


def test_what_is_written_comes_back_as_it_was():
    """By HTCondor's own reader: no macro of the text is expanded, nothing is added."""
    hostile = "$(HOME) $ENV(PATH) #no comment $ = a"
    lines = (conversion.command_line("executable", hostile), conversion.attribute_line("Name", hostile), "queue\n")
    read = htcondor2.Submit("\n".join(lines))
    assert read.expand("executable") == hostile
    assert read.expand("MY.Name") == f'"{hostile}"'


@pytest.mark.parametrize("text", ['a "b" c', '"', "\\n", '\\"', "a\\b", '\\\\"'])
def test_a_text_with_quotes_and_backslashes_comes_back_as_it_was(text):
    """As HTCondor and the daemon read the ad, in which a backslash hides a quote and nothing else."""
    read = htcondor2.Submit(conversion.attribute_line("Name", text) + "\nqueue\n")
    assert literal(read.expand("MY.Name")) == text


@pytest.mark.parametrize("text", ["a\nqueue 1000", "a\\", " a", "", "a\rb", "a\u2028b", "$$(Memory)", "$(Dollar)"])
def test_what_cannot_be_written_is_refused(text):
    with pytest.raises(SubmitError):
        conversion.command_line("executable", text)
    if text.strip() == text != "":  # in its quotes an attribute has the blanks, too
        with pytest.raises(SubmitError):
            conversion.attribute_line("Name", text)


@pytest.mark.parametrize("name", ["a,b.img", "a:b.img", "a b.img", 'a".img', "$(HOME).img", "a\\b.img"])
def test_a_file_whose_name_would_be_read_as_several_is_refused(name):
    for transfer in (True, False):
        with pytest.raises(SubmitError, match="characters"):
            written(plain(disks=[GuestDisk(f"/images/{name}", "raw", "vda")]), transfer=transfer)
    with pytest.raises(SubmitError, match="characters"):
        written(plain(files=["/tmp/a, /etc/passwd"]))


def test_one_usual_nic_is_written_in_the_classic_way():
    read = htcondor2.Submit(written(plain(nics=[GuestNic("nat", "52:54:00:00:00:01")])))
    assert (read["vm_networking_type"], read["vm_macaddr"]) == ("nat", "52:54:00:00:00:01")
    assert "MY.VMPARAM_vm_NICs" not in read


@pytest.mark.parametrize(
    ("nics", "entries"),
    [
        ([GuestNic("nat", model="e1000")], "nat:e1000"),
        ([GuestNic("user", link_up=False)], "user:virtio:down"),
        ([GuestNic("nat", "52:54:00:00:00:01"), GuestNic("bridge")], "nat:52:54:00:00:00:01:virtio, bridge:virtio"),
        ([GuestNic("", model="e1000")], "nat:e1000"),
    ],
)
def test_other_nics_are_written_as_a_list(nics, entries):
    read = htcondor2.Submit(written(plain(nics=nics)))
    assert read["MY.VMPARAM_vm_NICs"] == f'"{entries}"'
    assert read["vm_networking_type"] == entries.partition(":")[0]


@pytest.mark.parametrize("address", ["01:00:5e:00:00:01", "52:54:00:00:00:01, user"])
def test_an_address_that_no_nic_can_have_is_refused(address):
    with pytest.raises(SubmitError, match="MAC address"):
        written(plain(nics=[GuestNic("nat", address)]))


@pytest.mark.parametrize(
    ("vm_type", "wanted"),
    [
        ("kvm", ["firmware", "arches", "TARGET.Arch", "Types", "_tpm"]),
        ("QEMU", ["arches", "TARGET.Arch", "Types", "_tpm"]),
        ("any", ["Types"]),
    ],
)
def test_no_more_is_required_than_machines_of_the_type_tell(vm_type, wanted):
    """A machine that the startd probes as its own user has no attribute of firmware, one of any type none at all."""
    machine = plain(options={"Firmware": "uefi", "Arch": "aarch64", "TPM": True})
    machine.nics = [GuestNic("nat"), GuestNic("user"), GuestNic("nat"), GuestNic("user")]
    summary = Summary()
    read = htcondor2.Submit(conversion.write(machine, vm_type, summary))
    parts = {
        "firmware": 'stringListMember("uefi", TARGET.VM_kvm_ATTR_firmware)',
        "arches": f'stringListMember("aarch64", TARGET.VM_{vm_type.lower()}_ATTR_arches)',
        "TARGET.Arch": "TARGET.Arch isnt undefined",
        "Types": 'stringListMember("user", TARGET.VM_Networking_Types)',
        "_tpm": f"TARGET.VM_{vm_type.lower()}_ATTR_tpm",
    }
    assert read["requirements"] == " && ".join(parts[name] for name in wanted)
    assert any("firmware uefi" in note for note in summary.notes) == (vm_type != "kvm")


def test_devices_are_named_where_they_have_no_name():
    disks = [
        *(GuestDisk("/a", "raw"), GuestDisk("/b", "raw", "vda"), GuestDisk("/c", "iso", bus="sata")),
        *(GuestDisk("/d", "raw", bus="floppy"), *(GuestDisk("/e", "raw", bus="ide") for _ in range(5))),
    ]
    name_devices(disks)
    assert [disk.device for disk in disks] == ["vdb", "vda", "sda", "fda", "hda", "hdb", "hdc", "hdd", "sdb"]


# --- the command line


def test_the_file_is_written_and_told_about(home, capsys):
    assert main(["vmgahp", "submit", "disk", "disk.qcow2", "--memory", "2G", "--cpus", "3"]) == 0
    read = htcondor2.Submit((home / "disk.sub").read_text())
    assert (read["vm_memory"], read["vm_vcpus"], read["vm_disk"]) == ("2048", "3", "disk.qcow2:vda:w:qcow2")
    assert (read["universe"], read["vm_networking"]) == ("vm", "false")
    assert "Written: disk.sub" in capsys.readouterr().err
    before = (home / "disk.sub").read_bytes()
    assert main(["vmgahp", "submit", "disk", "disk.qcow2", "--memory", "1G"]) == 1
    assert (home / "disk.sub").read_bytes() == before
    assert main(["vmgahp", "submit", "disk", "disk.qcow2", "--memory", "1G", "--force"]) == 0
    assert (home / "disk.sub").read_bytes() != before


def test_what_the_command_line_says_is_told_as_a_change(submit):
    words = ("--memory", "512", "--cpus", "3", "--network", "user")
    told = samples.changed(submit("libvirt-xml", "domain.xml", *words)[1])
    parts = ("--memory, in place of 1024 MiB", "--cpus, in place of 4", "--network, in place of nat", "Topology")
    assert absent(told, *parts) == []
    assert "NIC" not in samples.part(submit("libvirt-xml", "domain.xml", *words)[1], Outcome.CARRIED)
    told = samples.changed(submit("libvirt-xml", "domain.xml", "--network", "none")[1])
    assert told.count("no NIC; --network none") == 2


@pytest.mark.parametrize("words", [["--memory", "0"], ["--memory", "x"], ["--cpus", "0"], ["--network", "any"]])
def test_invalid_options_are_refused(words):
    with pytest.raises(SystemExit):
        main(["vmgahp", "submit", "disk", "disk.qcow2", *words])


def test_a_machine_without_memory_is_no_job(refused):
    assert "--memory" in refused("disk", "disk.qcow2")


def test_lines_can_be_added(submit, refused):
    read, _ = submit("disk", "disk.qcow2", "--memory", "1G", "--append", "request_disk = 10GB", "--append", "+X = 1")
    assert (read["request_disk"], read["MY.X"]) == ("10GB", "1")
    refused("disk", "disk.qcow2", "--memory", "1G", "--append", "queue 1000\nqueue")


def test_nothing_is_written_where_something_is_left_out(home, capsys):
    assert main(["vmgahp", "submit", "vmx", "machine.vmx"]) == 1
    said = capsys.readouterr().err
    assert "pciPassthru0" in samples.lost(said)
    last = said.splitlines()[-1]
    assert last.startswith("vmgahp submit: 1 thing is left out, so nothing is written")
    assert "--lax" in last
    assert not list(home.glob("*.sub"))
    assert main(["vmgahp", "submit", "vmx", "machine.vmx", "--lax"]) == 0
    assert (home / "my_machine.sub").exists()


def test_the_report_is_one_object_for_programs(home, capsys):
    assert main(["vmgahp", "submit", "vmx", "machine.vmx", "--json"]) == 1
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert (err, told["submit_file"], told["would_run"]) == ("", "", False)
    assert (told["kind"], told["file"]) == ("vmx", "machine.vmx")
    assert "--lax" in told["problem"]
    outcomes = {entry["place"]: entry["outcome"] for entry in told["entries"]}
    assert (outcomes["sata0:0.fileName"], outcomes["pciPassthru0.present"]) == ("carried over", "left out")
    assert (outcomes["memsize"], outcomes["guestOS"]) == ("carried over", "not used")
    assert main(["vmgahp", "submit", "vmx", "machine.vmx", "--json", "--lax"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["submit_file"], told["would_run"], told["problem"]) == ("my_machine.sub", True, "")
    disk = next(entry for entry in told["entries"] if entry["place"] == "sata0:0.fileName")
    assert disk["became"] == "sda (vmdk), goes with the job"


def test_a_report_has_a_line_an_entry_and_an_end():
    summary = Summary()
    summary.skip("line 3, /domain/devices/hostdev", "a \x1b[31mdevice", "no job has a device " * 500)
    out = io.StringIO()
    summary.show(out)
    title, line = out.getvalue().splitlines()
    assert title == "Not used (1):"
    assert line.startswith("  a ?[31mdevice: no job")
    assert line.endswith("... [line 3, /domain/devices/hostdev]")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shared", "--convert"], "--shared leaves"),
        (["--submit", "-o", "-"], "--submit needs a file"),
        (["--json", "-o", "-"], "--json needs a file"),
        (["--force", "-o", "disk.qcow2"], "would be replaced, and is read"),
        (["--force", "-o", "there/disk.qcow2"], "would be replaced, and is read"),
        (["--force", "-o", "link.sub"], "would be replaced, and is read"),
    ],
)
def test_options_that_make_no_sense_together_are_refused(home, capsys, words, said):
    (home / "there").symlink_to(home)
    (home / "link.sub").symlink_to("disk.qcow2")
    before = (home / "disk.qcow2").read_bytes()
    assert main(["vmgahp", "submit", "disk", "disk.qcow2", "--memory", "1G", *words]) == 1
    assert said in "".join(capsys.readouterr())
    assert (home / "disk.qcow2").read_bytes() == before


def test_submit_runs_condor_submit(home, monkeypatch):
    (home / "bin").mkdir()
    a_program(home / "bin/condor_submit", 'cp "$1" submitted\nexit 7')
    monkeypatch.setenv("PATH", f"{home}/bin:{os.environ['PATH']}")
    assert main(["vmgahp", "submit", "disk", "disk.qcow2", "--memory", "1G", "--submit"]) == 7
    assert (home / "submitted").read_text() == (home / "disk.sub").read_text()


# --- images


@pytest.mark.parametrize(
    ("url", "entry"),
    [
        ("nfs:///images/base.qcow2:disk.qcow2", "disk.qcow2:vda:w:qcow2"),
        ("http://images/base.qcow2", "base.qcow2:vda:w:qcow2"),
        ("http://images/seed.iso", "seed.iso:sda:r:iso"),
    ],
)
def test_a_url_of_a_plugin_is_a_disk_by_its_name(submit, url, entry):
    read, _ = submit("disk", url, "--memory", "1G")
    assert (read["vm_disk"], read["transfer_input_files"]) == (entry, url)


@pytest.mark.parametrize(
    "url",
    [f"http://images/{name}" for name in ("base", "base.qcow2?v=1", "a%20b.qcow2", "")] + ["nfs://images/a.qcow2"],
)
def test_a_url_without_the_name_of_an_image_is_refused(refused, url):
    refused("disk", url, "--memory", "1G")


def test_images_are_converted(home, submit, refused):
    read, said = submit("disk", "machine.vmdk", "--memory", "1G", "--convert")
    assert read["vm_disk"] == "machine.qcow2:vda:w:qcow2"
    assert subprocess.run(["qemu-img", "check", "-f", "qcow2", "machine.qcow2"], capture_output=True).returncode == 0
    assert "converted" in said
    refused("disk", "machine.vmdk", "--memory", "1G", "--convert")  # it is there already
    assert (home / "machine.qcow2").exists()


def test_nothing_is_converted_where_nothing_will_be_written(home, refused, monkeypatch):
    monkeypatch.setattr(images, "convert", lambda *_, **__: pytest.fail("it takes hours"))
    said = refused("vmx", "machine.vmx", "--convert", lax=False)
    assert "machine.vmdk" in samples.part(said, Outcome.CARRIED)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SubmitError("x"), RuntimeError])
def test_what_was_made_is_removed_however_it_ends(home, monkeypatch, error):
    made = []

    def ended(*_):
        made.extend(path.name for path in home.glob("machine.qcow2"))
        raise error

    monkeypatch.setattr(conversion, "written", ended)
    with suppress(KeyboardInterrupt, RuntimeError):
        main(["vmgahp", "submit", "vmx", "machine.vmx", "--convert", "--lax"])
    assert made == ["machine.qcow2"]
    assert not list(home.glob("machine.qcow2*"))


def test_a_compressed_vmdk_is_converted_and_told_of(home, submit, refused):
    assert "streamOptimized" in changed(submit("disk", "box-disk001.vmdk", "--memory", "1G", lax=False)[1])
    read, said = submit("disk", "box-disk001.vmdk", "--memory", "1G", "--convert", "--force")
    assert (read["vm_disk"], changed(said)) == ("box-disk001.qcow2:vda:w:qcow2", "")  # it was asked for
    shutil.copy("box-disk001.vmdk", "machine.vmdk")
    assert "streamOptimized" in refused("vmx", "machine.vmx", "--as-is")  # VMware can write to none, either


@pytest.mark.parametrize("part", ["../secret", "/etc/hostname", "link"])
def test_a_vmdk_with_parts_elsewhere_is_refused(home, refused, part):
    """A stranger's descriptor that would take files of whoever submits it into the job."""
    samples.image(home / "flat.vmdk", "vmdk", "-o", "subformat=monolithicFlat")
    (home / "link").symlink_to("/etc/hostname")
    (home / "flat.vmdk").write_text((home / "flat.vmdk").read_text().replace("flat-flat.vmdk", part))
    for more in ([], ["--convert"]):
        assert "a part of it is" in refused("disk", "flat.vmdk", "--memory", "1G", *more)
    assert not (home / "flat.qcow2").exists()


def test_what_qemu_finds_in_a_descriptor_counts(home, refused):
    """A part that is named far behind the beginning."""
    samples.image(home / "flat.vmdk", "vmdk", "-o", "subformat=monolithicFlat")
    (home / "other").mkdir()
    shutil.move("flat-flat.vmdk", "other/flat-flat.vmdk")
    text = (home / "flat.vmdk").read_text().replace("RW ", f"{'# padding' * 8000}\nRW ", 1)
    (home / "flat.vmdk").write_text(text.replace('"flat-flat.vmdk"', f'"{home}/other/flat-flat.vmdk"'))
    assert "a part of it is" in refused("disk", "flat.vmdk", "--memory", "1G", "--convert")


# --- images that a stranger's file names


XML = "<domain type='kvm'><name>x</name><memory unit='MiB'>64</memory><devices>{}</devices></domain>"
NAMES = {
    "libvirt-xml, a disk": XML.format("<disk type='file'><source file='{}'/><target dev='vda' bus='virtio'/></disk>"),
    "libvirt-xml, a CD-ROM": XML.format("<disk device='cdrom'><source file='{}'/><target dev='sda'/></disk>"),
    "vmx, a disk": 'memsize = "64"\nsata0:0.present = "TRUE"\nsata0:0.fileName = "{}"\n',
    "vmx, a floppy": 'memsize = "64"\nfloppy0.fileType = "file"\nfloppy0.fileName = "{}"\n',
}


@pytest.mark.parametrize("place", ["/etc/passwd", "../outside", "there/outside", "link", "aside/../../outside"])
@pytest.mark.parametrize("kind", NAMES)
def test_a_strangers_file_takes_no_file_of_mine_along(home, submit, kind, place):
    (home.parent / "outside").write_text("mine\n")
    (home / "link").symlink_to(home.parent / "outside")
    (home / "there").symlink_to(home.parent)
    (home / "aside").mkdir(exist_ok=True)
    word = kind.partition(",")[0]
    name = f"stranger.{word[-3:]}"
    (home / name).write_text(NAMES[kind].replace("{}", place))
    for more in ([], ["--shared"], ["--as-is"], ["--convert"]):
        read, said = submit(word, name, *more, status=1)
        assert read is None
        assert "and would go with the job" in said, said
    assert not list(home.glob("*.qcow2.new"))


@pytest.mark.parametrize(
    ("word", "source", "image"), [("libvirt-xml", "domain.xml", "disk.qcow2"), ("vmx", "machine.vmx", "machine.vmdk")]
)
def test_a_file_of_ones_own_says_where_its_images_are(home, submit, word, source, image):
    elsewhere = home.parent / f"elsewhere-{word}"
    elsewhere.mkdir()
    shutil.move(image, elsewhere)
    (home / source).write_text((home / source).read_text().replace(image, f"{elsewhere}/{image}"))
    assert f"{elsewhere}/{image}" in submit(word, source, "--own")[0]["transfer_input_files"]


def test_an_overlay_of_a_stranger_is_refused(home, submit, refused):
    """With --convert, its backing file would be in the copy."""
    samples.overlay("disk.qcow2", "/etc/hostname", on_form="raw")
    for more in ([], ["--convert"]):
        assert "it is an overlay of /etc/hostname" in refused("libvirt-xml", "domain.xml", *more)
    assert "overlay of /etc/hostname" in submit("libvirt-xml", "domain.xml", "--own")[1]


@pytest.mark.parametrize("name", ["web_server.sub", "web_server.xml", "disk.qcow2.new"])
def test_nothing_is_written_through_a_link(home, name):
    victim = home / "victim"
    victim.write_text("mine\n")
    (home / name).symlink_to(victim)
    word = "--convert" if name.endswith(".new") else "--as-is"
    if word == "--convert":
        samples.image(home / "disk.vmdk", "vmdk")
        text = (home / "domain.xml").read_text().replace("type='qcow2'", "type='vmdk'").replace("qcow2", "vmdk")
        (home / "domain.xml").write_text(text)
    main(["vmgahp", "submit", "libvirt-xml", "domain.xml", "--force", word])
    assert victim.read_text() == "mine\n"
