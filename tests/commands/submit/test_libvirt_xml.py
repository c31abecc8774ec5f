"""`vmgahp submit libvirt-xml`: as attributes of the job, and as the job's own XML."""

import json
import re
import time
from pathlib import Path

import pytest

from tests.commands.submit import samples
from tests.commands.submit.samples import lost, part
from tests.commands.support import absent
from vmgahp.cli import main
from vmgahp.commands.submit.report import Outcome
from vmgahp.domain.sanitize import sanitized

pytestmark = pytest.mark.qemu

NOT_USED = "not used"


@pytest.fixture
def convert(submit):
    """Runs the command with a file of this text."""

    def run(text, *words, status=0):
        with open("other.xml", "w") as file:
            file.write(text.replace("DIR/", ""))
        return submit("libvirt-xml", "other.xml", *words, "--force", status=status)

    return run


def test_what_the_ad_has_words_for_is_carried_over(convert):
    read, said = convert(samples.DOMAIN)
    assert (read["executable"], read["vm_memory"], read["vm_vcpus"]) == ("web_server", "1024", "4")
    assert read["vm_disk"] == "disk.qcow2:vda:w:qcow2,seed.iso:sda:r:iso"
    assert read["MY.VMPARAM_vm_NICs"] == '"nat:52:54:00:aa:bb:01:virtio, bridge:52:54:00:aa:bb:02:e1000:down"'
    assert read["MY.VMPARAM_vm_Topology"] == '"sockets=1,cores=2,threads=2"'
    assert read["MY.VMPARAM_vm_Firmware"] == '"uefi"'
    assert (read["MY.VMPARAM_vm_TPM"], read["vm_vnc"]) == ("true", "true")
    assert absent(lost(said), "on a block", "type direct", "hostdev") == []
    assert "nvram: new UEFI variables; its boot entries stay behind" in part(said, Outcome.CHANGED)
    unsaid = ["emulator /usr/bin/qemu", "uuid", "metadata", "sound model=ich9", "driver cache=none", "hyperv"]
    assert (absent(part(said, Outcome.NOT_USED), *unsaid), absent(lost(said), *unsaid)) == ([], unsaid)


@pytest.mark.parametrize(
    "place", ["</domain>", "</devices>", "</os>", "</features>", "</cpu>", "</disk>", "</interface>", "</tpm>"]
)
def test_everything_is_told_of(convert, place):
    said = convert(samples.DOMAIN.replace(place, f"<surprise/>{place}", 1))[1]
    assert "surprise" in part(said, Outcome.NOT_USED)
    attribute = samples.DOMAIN.replace("<source file=", "<source surprise='1' file=", 1)
    assert "@surprise" in part(convert(attribute)[1], Outcome.NOT_USED)


@pytest.mark.parametrize(
    ("memory", "mib"),
    [
        ("<memory unit='KiB'>1048576</memory>", "1024"),
        ("<memory>1048577</memory>", "1025"),
        ("<memory unit='MB'>512</memory>", "489"),
    ],
)
def test_memory_in_libvirts_units(convert, memory, mib):
    assert convert(samples.DOMAIN.replace("<memory unit='KiB'>1048576</memory>", memory))[0]["vm_memory"] == mib


SECURE = "<loader type='pflash' secure='yes'>/x</loader>"
BY_KEYS = "<firmware><feature enabled='yes' name='secure-boot'/>{}</firmware>"
NO_KEYS = "<feature enabled='no' name='enrolled-keys'/>"
VARIABLES = "<nvram template='/usr/share/OVMF/OVMF_VARS_4M{}.fd'/>"


@pytest.mark.parametrize(
    ("attribute", "system", "firmware"),
    [
        ("", "<type>hvm</type>", None),
        (" firmware='efi'", "<type>hvm</type>", '"uefi"'),
        (" firmware='efi'", f"<type>hvm</type>{BY_KEYS.format('')}", '"uefi-secure"'),
        (" firmware='efi'", "<type arch='aarch64'>hvm</type>", None),
        ("", "<type>hvm</type><loader type='rom'>/usr/share/ovmf/OVMF.fd</loader>", '"uefi"'),
        ("", f"<type>hvm</type>{SECURE}", '"uefi-secure"'),
        (" firmware='efi'", f"<type>hvm</type>{BY_KEYS.format(NO_KEYS)}", '"uefi"'),
        ("", f"<type>hvm</type>{SECURE}{VARIABLES.format('')}", '"uefi"'),
        ("", f"<type>hvm</type>{SECURE}{VARIABLES.format('.ms')}", '"uefi-secure"'),
    ],
)
@pytest.mark.parametrize("more", [[], ["--as-is"]])
def test_firmware(convert, attribute, system, firmware, more):
    text = re.sub("<os>.*</os>", f"<os{attribute}>{system}</os>", samples.DOMAIN, flags=re.DOTALL)
    read, said = convert(text, *more)
    assert read.get("MY.VMPARAM_vm_Firmware") == firmware
    without_keys = "secure" in system and firmware == '"uefi"'
    assert ("its Secure Boot has no keys" in part(said, Outcome.CHANGED)) == without_keys
    assert ("MY.VMPARAM_vm_Arch" in read) == ("aarch64" in system)


@pytest.mark.parametrize(
    ("controllers", "more", "device"),
    [
        ("<controller type='scsi' model='virtio-scsi'/>", [], "vda"),
        ("<controller type='scsi' model='virtio-scsi'/>", ["--as-is"], "sdb"),
        ("<controller type='scsi' model='lsilogic'/>", [], "sdb"),
        ("<controller type='usb' model='qemu-xhci'/>", [], "sdb"),
    ],
)
def test_a_guest_that_boots_by_virtio_scsi_has_no_need_of_satas_driver(convert, controllers, more, device):
    text = samples.DOMAIN.replace("dev='vda' bus='virtio'", "dev='sdb' bus='scsi'")
    read, said = convert(text.replace("</devices>", f"{controllers}</devices>"), *more)
    assert read["vm_disk"].startswith(f"disk.qcow2:{device}:w")
    assert ("virtio-scsi" in said) == (device == "vda")


def test_a_device_on_a_bus_that_jobs_have_not_is_told_of(convert):
    read, said = convert(samples.DOMAIN.replace("dev='vda' bus='virtio'", "dev='sdb' bus='usb'"))
    assert read["vm_disk"].startswith("disk.qcow2:sdb:w")
    assert "jobs have no controller usb" in part(said, Outcome.CHANGED)
    read, _ = convert(samples.DOMAIN.replace("dev='vda' bus='virtio'", "dev='hda' bus='virtio'"))
    assert read["vm_disk"].startswith("disk.qcow2:vda:w")


@pytest.mark.parametrize(
    "text",
    [
        "<network/>",
        "not XML",
        samples.DOMAIN.replace("<memory unit='KiB'>1048576", "<memory unit='lots'>1048576"),
        samples.DOMAIN.replace(">4</vcpu>", ">many</vcpu>"),
        samples.DOMAIN.replace(">4</vcpu>", ">\N{SUPERSCRIPT FOUR}</vcpu>"),
        samples.DOMAIN.replace("type='qcow2'", "type='nbd'"),
        "<!DOCTYPE domain SYSTEM 'file:///etc/passwd'>" + samples.DOMAIN,
    ],
)
def test_what_makes_no_sense_is_refused(convert, text):
    read, said = convert(text, status=1)
    assert read is None
    assert "\nvmgahp submit: " in f"\n{said}"
    assert "<string>" not in said


# --- what becomes of each device


@pytest.fixture
def outcome(home, capsys):
    """What became of a device of a domain, by the report for programs."""

    def run(text, device):
        Path("other.xml").write_text(text.replace("DIR/", ""))
        main(["vmgahp", "submit", "libvirt-xml", "other.xml", "--json", "--lax", "--force", "-o", "other.sub"])
        entries = json.loads(capsys.readouterr().out)["entries"]
        told = [entry for entry in entries if re.search(rf"/{device}(?:$|/)", entry["place"])]
        assert told, entries
        return {entry["outcome"] for entry in told}

    return run


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("<sound model='ich9'/>", NOT_USED),
        ("<disk type='file' device='cdrom'><target dev='sdz' bus='sata'/></disk>", NOT_USED),
        ("<surprise/>", NOT_USED),
        ("<hostdev mode='subsystem' type='usb'/>", "left out"),
        ("<filesystem type='mount'><source dir='/srv'/><target dir='x'/></filesystem>", "left out"),
        ("<tpm model='tpm-tis'><backend type='passthrough'/></tpm>", "left out"),
        ("<disk type='network' device='disk'><source protocol='rbd'/><target dev='vdz'/></disk>", "left out"),
        ("<disk type='file' device='lun'><source file='disk.qcow2'/><target dev='vdz'/></disk>", "left out"),
        ("<interface type='direct'><source dev='eth0'/></interface>", "left out"),
    ],
)
def test_the_report_says_of_each_device_what_became_of_it(outcome, device, expected):
    text = booting().replace("<devices>", f"<devices>{device}")
    tag = re.match(r"<(\w+)", device)[1]
    assert outcome(text, rf"devices/{tag}(?:\[1\])?") == {expected}


SMBIOS = "<sysinfo type='smbios'><system><entry name='serial'>{}</entry></system></sysinfo><on_crash>"


@pytest.mark.parametrize(
    ("old", "new", "device", "expected"),
    [
        ("dev='vda' bus='virtio'", "dev='sdb' bus='scsi'", "disk.1.", "changed"),
        ("<model type='e1000'/>", "<model type='vmxnet3'/>", "interface.2.", "changed"),
        ("arch='x86_64'", "arch='i686'", "type", "changed"),
        ("machine='pc-q35-7.2'", "machine='microvm'", "@machine", NOT_USED),
        ("machine='pc-q35-7.2'", "machine='pc-q35-9.1'", "@machine", NOT_USED),
        ("<on_crash>", "<clock offset='utc'><timer name='hpet' present='no'/></clock><on_crash>", "clock", NOT_USED),
        ("<on_crash>", "<clock offset='variable' adjustment='0' basis='utc'/><on_crash>", "clock", NOT_USED),
        ("<on_crash>", "<clock offset='localtime'/><on_crash>", "clock", "carried over"),
        ("<on_crash>", "<clock offset='variable' basis='localtime'/><on_crash>", "clock", "carried over"),
        ("<on_crash>", "<clock offset='timezone' timezone='Asia/Tokyo'/><on_crash>", "clock", "changed"),
        ("<on_crash>", "<clock offset='variable' adjustment='-7200'/><on_crash>", "clock", "left out"),
        ("<on_crash>", "<clock offset='absolute' start='1'/><on_crash>", "clock", "left out"),
        ("<on_crash>", "<launchSecurity type='sev'/><on_crash>", "launchSecurity", "left out"),
        ("<boot dev='hd'/>", "<kernel>/vmlinuz</kernel>", "kernel", "left out"),
        ("<on_crash>", "<sysinfo type='fwcfg'><entry name='a' file='b'/></sysinfo><on_crash>", "sysinfo", "left out"),
        ("<on_crash>", SMBIOS.format("ds=nocloud;s=http://x/"), "sysinfo", "left out"),
        ("<on_crash>", SMBIOS.format("1234"), "sysinfo", NOT_USED),
    ],
)
def test_the_report_says_of_the_rest_what_became_of_it(outcome, old, new, device, expected):
    assert expected in outcome(samples.DOMAIN.replace(old, new, 1), device)


CARD = """\
<domain type='kvm'><name>x</name><memory>1048576</memory><os{firmware}><type machine='{machine}'>hvm</type></os>
<devices>
<disk type='file'><driver type='qcow2'/><source file='disk.qcow2'/><target dev='vda'/></disk>
<interface type='network'><source network='default'/><model type='virtio'/>{address}</interface>{more}</devices>
</domain>
"""
SECOND = "<interface type='user'><model type='e1000'/></interface>"


@pytest.mark.parametrize(
    ("machine", "firmware", "address", "more", "names"),
    [
        ("pc-q35-9.1", "", ("0x01", "0x00"), "", ("enp1s0", "ens2")),
        ("pc-q35-9.1", "", ("0x01", "0x00"), "<graphics type='vnc'/>", ("enp1s0", "ens3")),
        ("q35", "", None, "", ("enp1s0", "ens2")),
        ("pc-i440fx-9.1", " firmware='efi'", ("0x00", "0x03"), "", ("ens3", "enp1s0")),
        ("pc", "", ("0x00", "0x03"), "<graphics type='spice'/>", ("ens3", "ens2")),
        ("pc", "", ("0x00", "0x03"), "<graphics type='vnc'/>", None),
        ("q35", " firmware='efi'", ("0x01", "0x00"), "", None),
        ("q35", " firmware='efi'", ("0x02", "0x00"), "", ("enp2s0", "enp1s0")),
        ("q35", " firmware='efi'", ("2", "0"), "", ("enp2s0", "enp1s0")),
        ("q35", " firmware='efi'", ("0x02", "0x00"), SECOND, ("enp2s0", "otherwise")),
    ],
)
def test_another_place_of_a_nic_is_told_with_both_names(convert, machine, firmware, address, more, names):
    """A fixed network configuration of the guest names them."""
    at = "<address type='pci' domain='0x0000' bus='{}' slot='{}' function='0x0'/>".format(*address) if address else ""
    text = CARD.format(machine=machine, firmware=firmware, address=at, more=more)
    changed = part(convert(text)[1], Outcome.CHANGED)
    assert ("Linux may call it" in changed) == bool(names)
    if names:
        assert f"Linux may call it {names[1]}, in place of {names[0]}; --as-is keeps it" in changed
    assert "Linux may call it" not in convert(text, "--as-is")[1]


def test_another_chipset_is_told_as_a_change(convert):
    text = samples.DOMAIN.replace("pc-q35-7.2", "pc-i440fx-9.1")
    _, said = convert(text)
    assert "machine pc-i440fx-9.1: q35; jobs with UEFI have it" in part(said, Outcome.CHANGED)
    assert "machine pc-i440fx-9.1" not in convert(text, "--as-is")[1]


def test_a_disk_whose_changes_were_discarded_is_told_as_a_change(convert):
    text = CARD.format(machine="pc", firmware="", address="", more="").replace("</disk>", "<transient/></disk>")
    assert "not transient, what the guest writes stays" in part(convert(text)[1], Outcome.CHANGED)


@pytest.mark.parametrize(("policy", "gone"), [("optional", True), ("mandatory", False)])
def test_an_image_that_may_be_missing_is_not_asked_for(convert, policy, gone):
    source = f"<source file='gone.iso' startupPolicy='{policy}'/>"
    more = f"<disk type='file' device='cdrom'>{source}<target dev='sda' bus='sata'/></disk>"
    _, said = convert(CARD.format(machine="pc", firmware="", address="", more=more), status=0 if gone else 1)
    assert ("cdrom gone.iso: it is not here" in part(said, Outcome.NOT_USED)) == gone


def test_firmware_of_ones_own_is_left_out(outcome):
    assert outcome(booting(boot="<loader type='rom'>/srv/own.bin</loader>"), "loader") == {"left out"}


@pytest.mark.parametrize(
    ("boot", "expected"),
    [("<boot dev='hd'/><boot dev='network'/>", NOT_USED), ("<boot dev='network'/><boot dev='hd'/>", "left out")],
)
def test_a_vm_that_boots_from_the_network_first_is_another_one(outcome, boot, expected):
    assert outcome(booting(boot=boot), r"boot\[\d\]") == {"carried over", expected}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("arch='x86_64'", "arch='ppc64le'", "ppc64le"), ("arch='x86_64'", "arch='s390x'", "s390x"),
        ("arch='x86_64'", "arch='riscv64'", "riscv64"), ("type='kvm'", "type='vbox'", "submit ovf or vmx"),
        ("type='kvm'", "type='lxc'", "'lxc'"), (">hvm<", ">linux<", "linux"), (">hvm<", ">exe<", "exe"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("more", [[], ["--as-is"]])
def test_what_no_machine_of_a_pool_can_be_is_refused(convert, old, new, words, more):
    read, said = convert(samples.DOMAIN.replace(old, new, 1), *more, status=1)
    assert (read, words in said) == (None, True), said


# --- domains of Xen's

XEN = """\
<domain type='xen'>
  <name>pv</name>
  <memory unit='MiB'>512</memory>
  BOOTLOADER
  <os>
    <type arch='x86_64' machine='xenpv'>linux</type>
    BOOT
  </os>
  <devices>
    <disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='seed.iso'/>
      <target dev='xvda1' bus='xen'/></disk>
    <interface type='bridge'><source bridge='xenbr0'/><script path='vif-bridge'/></interface>
    <console type='pty'><target type='xen' port='0'/></console>
    <graphics type='vnc'/>
  </devices>
</domain>
"""
RAW = "type='raw'/><source file='seed.iso'/>"
KERNEL = "<kernel>vmlinuz</kernel><initrd>initrd.img</initrd>"
LINE = "<cmdline>console=hvc0 root=/dev/xvda1 ro</cmdline>"


@pytest.fixture
def of_xen(home, convert):
    """Converts a domain of Xen's, of which one thing is another."""
    (home / "vmlinuz").write_bytes(b"kernel")
    (home / "initrd.img").write_bytes(b"initrd")

    def run(boot, old="BOOT", new="", **more):
        bootloader = "" if boot else "<bootloader>/usr/bin/pygrub</bootloader>"
        text = XEN.replace(old, new or old, 1).replace("BOOTLOADER", bootloader).replace("BOOT", boot)
        return convert(text, *more.pop("words", []), **more)

    return run


def test_a_kernel_of_a_xen_guest_goes_with_the_job(home, of_xen):
    read, said = of_xen(KERNEL + LINE)
    assert (read["vm_type"], read["vm_disk"]) == ("xen", "seed.iso:xvda1:w:raw")
    assert (read["xen_kernel"], read["xen_initrd"]) == ("vmlinuz", "initrd.img")
    assert (read["xen_root"], read["xen_kernel_params"]) == ("/dev/xvda1", "console=hvc0 ro")
    assert absent(read["transfer_input_files"], f"{home}/vmlinuz", f"{home}/initrd.img") == []
    assert (read["vm_networking_type"], read.get("vm_vnc"), "Left out" in said) == ("bridge", None, False)


def test_a_xen_guest_boots_a_kernel_in_its_image_by_the_bootloader_or_as_a_whole_machine(of_xen):
    read, _ = of_xen("")
    assert (read["xen_kernel"], read["requirements"]) == ("included", "TARGET.VM_xen_ATTR_bootloader")
    read, said = of_xen("<loader>/usr/lib/xen/boot/hvmloader</loader>", "'xenpv'>linux", "'xenfv'>hvm")
    assert (read["xen_kernel"], read["requirements"]) == ("vmx", "TARGET.VM_xen_ATTR_hvm")
    assert "Left out" not in said


@pytest.mark.parametrize(
    ("boot", "old", "new", "words", "problem"),
    [
        (KERNEL, "", "", [], "no root="),
        (KERNEL + LINE, RAW, RAW.replace("raw", "qcow2").replace("seed.iso", "disk.qcow2"), [], "raw images only"),
        (KERNEL + LINE, "xvda1", "fda", [], "no such disks"),
        (KERNEL + LINE, ">linux<", ">xenpvh<", [], "xenpvh"),
        (KERNEL + LINE, "", "", ["--as-is"], "--as-is"),
        ("<kernel>gone</kernel>" + LINE, "", "", [], "cannot be opened"),
        ("<kernel>/etc/passwd</kernel>" + LINE, "", "", [], "--own"),
    ],
)
def test_what_no_xen_job_can_be_is_refused(of_xen, boot, old, new, words, problem):
    assert problem in of_xen(boot, old or "BOOT", new, words=words, status=1)[1]


# --- the order in which it boots

BOOTING = """\
<domain type='kvm'>
  <name>order</name>
  <memory unit='MiB'>512</memory>
  <os><type arch='x86_64'>hvm</type>BOOT</os>
  <devices>
    <disk type='file' device='floppy'><source file='boot.img'/><target dev='fda' bus='fdc'/></disk>
    <disk type='file' device='cdrom'><source file='seed.iso'/><target dev='hdc' bus='ide'/>CD</disk>
    <disk type='file' device='disk'><driver name='qemu' type='qcow2'/><source file='second.qcow2'/>
      <target dev='vdb' bus='virtio'/>SECOND</disk>
    <disk type='file' device='disk'><driver name='qemu' type='qcow2'/><source file='disk.qcow2'/>
      <target dev='vda' bus='virtio'/>FIRST</disk>
    <interface type='network'><source network='default'/><model type='virtio'/>NIC</interface>
  </devices>
</domain>
"""
"""With places for what says the order: the disks are in another one on purpose."""


def booting(**places):
    text = BOOTING
    for place in ("BOOT", "CD", "SECOND", "FIRST", "NIC"):
        text = text.replace(place, places.get(place.lower(), ""))
    return text


def order(number):
    return f"<boot order='{number}'/>"


@pytest.mark.parametrize(
    ("places", "devices"),
    [
        ({}, ["vda", "vdb", "hdc", "fda"]),
        ({"boot": "<boot dev='cdrom'/><boot dev='hd'/>"}, ["hdc", "vda", "vdb", "fda"]),
        ({"boot": "<boot dev='fd'/><boot dev='cdrom'/>"}, ["fda", "hdc", "vda", "vdb"]),
        ({"second": order(2), "cd": order(1), "first": order(3)}, ["hdc", "vdb", "vda", "fda"]),
        ({"second": order(10), "first": order(9)}, ["vda", "vdb", "hdc", "fda"]),
        ({"second": order(2), "nic": order(3)}, ["vdb", "vda", "hdc", "fda"]),
    ],
)
def test_the_order_of_the_disks_is_that_of_booting(home, convert, places, devices):
    """libvirt boots from the first disk of a class, and sorts the disks of a bus by their names."""
    samples.image(home / "second.qcow2", "qcow2")
    samples.image(home / "boot.img", "raw")
    read, _ = convert(booting(**places))
    assert [disk.split(":")[1] for disk in read["vm_disk"].split(",")] == devices
    assert "disk.qcow2:vda:w" in read["vm_disk"]


# --- the job's own XML


def test_as_it_is_the_execute_machine_takes_it(home, convert):
    """By its own reader."""
    read, said = convert(samples.DOMAIN, "--as-is")
    assert read["MY.VMPARAM_Libvirt_XML"] == '"web_server.xml"'
    assert f"{home}/web_server.xml" in read["transfer_input_files"]
    domain = sanitized((home / "web_server.xml").read_text(), "web_server.xml").domain
    assert domain.find("devices/interface[2]/mac").get("address").lower() == "52:54:00:aa:bb:02"
    assert absent(lost(said), "hostdev", "on a block") == []
    assert absent(part(said, Outcome.NOT_USED), "sound", "nvram") == []
    assert lost(said).count("/domain/devices/disk[3]") == 1
    # What jobs may say and the ad has no words for is still there.
    assert domain.find("features/hyperv") is not None
    assert domain.find("devices/disk/driver").get("cache") == "none"


@pytest.mark.parametrize(("model", "told"), [("ne2k_pci", "e1000"), ("virtio-transitional", "virtio"), ("", "rtl8139")])
def test_as_it_is_a_nic_is_of_the_model_that_is_told(home, convert, model, told):
    text = samples.DOMAIN.replace(
        "<source network='default'/><model type='virtio'/>", f"<model type='{model}'/>" if model else ""
    )
    _, said = convert(text, "--as-is")
    assert f"nat, {told}, 52:54:00:aa:bb:01" in said
    domain = sanitized((home / "web_server.xml").read_text(), "web_server.xml").domain
    assert domain.find("devices/interface/model").get("type") == told


def test_as_it_is_a_nic_of_arm_without_a_model_is_libvirts_own_choice(home, convert):
    text = samples.DOMAIN.replace("<source network='default'/><model type='virtio'/>", "")
    _, said = convert(text.replace("arch='x86_64' machine='pc-q35-7.2'", "arch='aarch64' machine='virt'"), "--as-is")
    assert "nat, virtio, 52:54:00:aa:bb:01" in said


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
    _, said = convert(samples.DOMAIN.replace("</devices>", f"{device}</devices>"), "--as-is")
    assert device[1:].partition(" ")[0].strip("/>") in said
    made = (home / "web_server.xml").read_text()
    never = ["spicevmc", "filesystem", "egd", "surprise", "sdz"]
    assert absent(made, *never) == never
    sanitized(made, "web_server.xml")


WIDE = {
    "elements": "<domain>" + "<a/>" * 49_000 + "</domain>",
    "NICs": "<domain><memory>1</memory><devices>" + "<interface type='user'/>" * 49_000 + "</devices></domain>",
    "disks": "<domain><devices>" + "<disk><source file='x.img'/></disk>" * 16_000 + "</devices></domain>",
    "floppies": "<domain><os><type arch='aarch64'>hvm</type></os><devices>"
    + "".join(f"<disk{word}><source file='x'/></disk>" * 12_000 for word in ("", " device='floppy'"))
    + "</devices></domain>",
    "attributes of many": "<domain><memory>1</memory><devices>"
    + ("<interface type='user'><mac " + " ".join(f"a{number}=''" for number in range(450)) + "/></interface>") * 1000
    + "</devices></domain>",
    "attributes": "<domain " + " ".join(f"a{number}=''" for number in range(200_000)) + "/>",
}


@pytest.mark.parametrize("words", [[], ["--as-is"]])
@pytest.mark.parametrize("kind", WIDE)
def test_a_file_that_is_made_to_be_much_work_is_not(convert, kind, words):
    """They took from half a minute of the processor to many."""
    began = time.process_time()
    assert convert(WIDE[kind], *words, status=1)[0] is None
    assert time.process_time() - began < 25
