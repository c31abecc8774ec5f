"""`vmgahp submit libvirt-xml`: as attributes of the job, and as the job's own XML."""

import pytest

from tests.commands.submit import samples
from tests.commands.submit.samples import lost
from tests.commands.support import absent
from vmgahp.cli import main
from vmgahp.config import Settings
from vmgahp.domain.job_xml import requests
from vmgahp.domain.job_xml.sanitize import sanitized
from vmgahp.job.ad import JobAd, quote

pytestmark = pytest.mark.qemu


@pytest.fixture
def convert(submit):
    """Runs the command with a file of this text."""

    def run(text, *words, status=0):
        with open("other.xml", "w") as file:
            file.write(text.replace("DIR/", ""))
        return submit("libvirt-xml", "other.xml", *words, "--force", status=status)

    return run


def with_device(xml):
    return samples.DOMAIN.replace("</devices>", f"{xml}</devices>")


def test_what_the_ad_has_words_for_is_carried_over(convert):
    read, said = convert(samples.DOMAIN)
    assert (read["executable"], read["vm_memory"], read["vm_vcpus"]) == ("web_server", "1024", "4")
    assert read["vm_disk"] == "disk.qcow2:vda:w:qcow2,seed.iso:sda:r:iso"
    assert read["MY.VMPARAM_vm_NICs"] == '"nat:52:54:00:aa:bb:01:virtio, bridge:52:54:00:aa:bb:02:e1000:down"'
    assert read["MY.VMPARAM_vm_Topology"] == '"sockets=1,cores=2,threads=2"'
    assert read["MY.VMPARAM_vm_Firmware"] == '"uefi"'
    assert (read["MY.VMPARAM_vm_TPM"], read["vm_vnc"]) == ("true", "true")
    assert absent(lost(said), "on a block", "type direct", "nvram", "hyperv", "cache = none", "sound", "hostdev") == []
    unsaid = ["emulator", "uuid", "metadata"]
    assert (absent(said, *unsaid), absent(lost(said), *unsaid)) == ([], unsaid)


@pytest.mark.parametrize(
    "place", ["</domain>", "</devices>", "</os>", "</features>", "</cpu>", "</disk>", "</interface>", "</tpm>"]
)
def test_everything_is_told_of(convert, place):
    assert "surprise" in lost(convert(samples.DOMAIN.replace(place, f"<surprise/>{place}", 1))[1])
    attribute = samples.DOMAIN.replace("<source file=", "<source surprise='1' file=", 1)
    assert "@surprise" in lost(convert(attribute)[1])


@pytest.mark.parametrize(
    ("memory", "mib"),
    [
        ("<memory unit='KiB'>1048576</memory>", "1024"),
        ("<memory>1048577</memory>", "1025"),
        ("<memory unit='GiB'>2</memory>", "2048"),
        ("<memory unit='MB'>512</memory>", "489"),
        ("<memory unit='b'>1073741824</memory>", "1024"),
    ],
)
def test_memory_in_libvirts_units(convert, memory, mib):
    assert convert(samples.DOMAIN.replace("<memory unit='KiB'>1048576</memory>", memory))[0]["vm_memory"] == mib


@pytest.mark.parametrize(
    ("system", "firmware"),
    [
        ("<os><type>hvm</type></os>", None),
        ("<os firmware='efi'><type>hvm</type></os>", '"uefi"'),
        ("<os firmware='bios'><type>hvm</type></os>", None),
        ("<os><type>hvm</type><loader type='pflash' secure='yes'>/x</loader></os>", '"uefi-secure"'),
        (
            "<os firmware='efi'><type>hvm</type><firmware><feature enabled='yes' name='secure-boot'/></firmware></os>",
            '"uefi-secure"',
        ),
        ("<os firmware='efi'><type arch='aarch64'>hvm</type></os>", None),
    ],
)
def test_firmware(convert, system, firmware):
    begin, end = samples.DOMAIN.index("<os>"), samples.DOMAIN.index("</os>") + 5
    read, _ = convert(samples.DOMAIN[:begin] + system + samples.DOMAIN[end:])
    assert read.get("MY.VMPARAM_vm_Firmware") == firmware
    assert ("MY.VMPARAM_vm_Arch" in read) == ("aarch64" in system)


def test_a_device_on_a_bus_that_jobs_have_not_is_told_of(convert):
    read, said = convert(samples.DOMAIN.replace("dev='vda' bus='virtio'", "dev='sdb' bus='usb'"))
    assert read["vm_disk"].startswith("disk.qcow2:sdb:w")
    assert "bus = usb" in lost(said)
    read, _ = convert(samples.DOMAIN.replace("dev='vda' bus='virtio'", "dev='hda' bus='virtio'"))
    assert read["vm_disk"].startswith("disk.qcow2:vda:w")


@pytest.mark.parametrize(
    "text",
    [
        "<network/>",
        "not XML",
        samples.DOMAIN.replace("<memory unit='KiB'>1048576", "<memory unit='lots'>1048576"),
        samples.DOMAIN.replace("<memory unit='KiB'>1048576", "<memory unit='KiB'>\N{SUPERSCRIPT TWO}"),
        samples.DOMAIN.replace(">4</vcpu>", ">many</vcpu>"),
        samples.DOMAIN.replace(">4</vcpu>", ">\N{SUPERSCRIPT FOUR}</vcpu>"),
        samples.DOMAIN.replace("type='qcow2'", "type='nbd'"),
        "<!DOCTYPE domain SYSTEM 'file:///etc/passwd'>" + samples.DOMAIN,
    ],
)
def test_what_makes_no_sense_is_refused(convert, text):
    read, said = convert(text, status=1)
    assert read is None
    assert said.startswith(("vmgahp submit:", "Carried over"))


# --- the job's own XML


def test_as_it_is_the_execute_machine_takes_it(home, convert):
    """Its own reader, and its comparison with the ad that condor_submit makes of the submit file."""
    read, said = convert(samples.DOMAIN, "--as-is")
    assert read["MY.VMPARAM_Libvirt_XML"] == '"web_server.xml"'
    assert f"{home}/web_server.xml" in read["transfer_input_files"]
    domain = sanitized((home / "web_server.xml").read_text(), "web_server.xml")
    ad = JobAd(
        [
            ("JobVMMemory", read["vm_memory"]),
            ("JobVM_VCPUS", read["vm_vcpus"]),
            ("VMPARAM_vm_Disk", quote(read["vm_disk"])),
            ("JobVMNetworking", read["vm_networking"]),
            ("JobVMNetworkingType", quote(read["vm_networking_type"])),
            ("JobVMVNCConsole", read.get("vm_vnc") or "false"),
            *((name[3:], read[name]) for name in read if name.startswith("MY.")),
        ]
    )
    asks = requests.of(domain, ad, Settings({"VM_NETWORKING": "true"}), "web_server.xml")
    assert "52:54:00:aa:bb:02" in [nic.mac for nic in asks.nics]
    assert absent(lost(said), "hostdev", "sound", "on a block", "loader") == []
    assert lost(said).count("/domain/devices/disk[3]") == 1
    # What jobs may say and the ad has no words for is still there.
    assert domain.find("features/hyperv") is not None
    assert domain.find("devices/disk/driver").get("cache") == "none"


@pytest.mark.parametrize(
    "device",
    [
        "<channel type='spicevmc'><target type='virtio' name='com.redhat.spice.0'/></channel>",
        "<filesystem type='mount'><source dir='/'/><target dir='x'/></filesystem>",
        "<rng model='virtio'><backend model='egd' type='tcp'/></rng>",
        "<surprise/>",
        "<disk type='file' device='cdrom'><target dev='sdz' bus='sata'/></disk>",
    ],
)
def test_as_it_is_less_what_no_job_may_say(home, convert, device):
    _, said = convert(with_device(device), "--as-is")
    assert device[1:].partition(" ")[0].strip("/>") in said
    made = (home / "web_server.xml").read_text()
    never = ["spicevmc", "filesystem", "egd", "surprise", "sdz"]
    assert absent(made, *never) == never
    sanitized(made, "web_server.xml")


def test_an_own_xml_overwrites_nothing(home, capsys):
    (home / "web_server.xml").write_text("mine")
    assert main(["vmgahp", "submit", "libvirt-xml", "domain.xml", "--as-is"]) == 1
    assert (home / "web_server.xml").read_text() == "mine"
    assert "--force" in capsys.readouterr().err


WIDE = {
    "elements": "<domain>" + "<a/>" * 49_000 + "</domain>",
    "NICs": "<domain><memory>1</memory><devices>" + "<interface type='user'/>" * 49_000 + "</devices></domain>",
    "disks": "<domain><devices>" + "<disk><source file='x.img'/></disk>" * 16_000 + "</devices></domain>",
    "attributes": "<domain " + " ".join(f"a{number}=''" for number in range(200_000)) + "/>",
}


@pytest.mark.timeout(40)
@pytest.mark.parametrize("words", [[], ["--as-is"]])
@pytest.mark.parametrize("kind", WIDE)
def test_a_file_that_is_made_to_be_much_work_is_not(convert, kind, words):
    """They took from half a minute to many."""
    assert convert(WIDE[kind], *words, status=1)[0] is None
