"""`vmgahp submit ovf`: descriptors of three exporters, archives, and what strangers may have put into them."""

import gzip
import hashlib
import io
import os
import subprocess
import tarfile
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from tests.commands.submit import samples
from tests.commands.submit.samples import changed, lost, part
from tests.commands.support import absent
from vmgahp.commands.submit import xml_input
from vmgahp.commands.submit.machine import Outcome, SubmitError
from vmgahp.commands.submit.ovf import local

pytestmark = pytest.mark.qemu

OVIRT = """\
<ovf:Envelope xmlns:ovf="http://schemas.dmtf.org/ovf/envelope/1/" ovf:version="0.9"
  xmlns:rasd="http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_ResourceAllocationSettingData"
  xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance">
  <References><File ovf:href="image/volume" ovf:id="volume" ovf:size="1"/></References>
  <Section xsi:type="ovf:NetworkSection_Type"><Info/><Network ovf:name="default"/></Section>
  <Section xsi:type="ovf:DiskSection_Type"><Info/>
    <Disk ovf:diskId="volume" ovf:fileRef="image/volume" ovf:parentRef="" ovf:volume-format="COW"
      ovf:format="http://www.vmware.com/specifications/vmdk.html#sparse" ovf:boot="True"/>
  </Section>
  <Content ovf:id="out" xsi:type="ovf:VirtualSystem_Type">
    <Name>guest</Name><Description>x</Description><BiosType>4</BiosType><IsStateless>True</IsStateless>
    <Section xsi:type="ovf:VirtualHardwareSection_Type"><Info/>
      <Item><rasd:InstanceId>1</rasd:InstanceId><rasd:ResourceType>3</rasd:ResourceType>
        <rasd:num_of_sockets>2</rasd:num_of_sockets><rasd:cpu_per_socket>3</rasd:cpu_per_socket></Item>
      <Item><rasd:InstanceId>2</rasd:InstanceId><rasd:ResourceType>4</rasd:ResourceType>
        <rasd:AllocationUnits>MegaBytes</rasd:AllocationUnits><rasd:VirtualQuantity>512</rasd:VirtualQuantity></Item>
      <Item><rasd:InstanceId>volume</rasd:InstanceId><rasd:ResourceType>17</rasd:ResourceType>
        <Type>disk</Type><rasd:HostResource>image/volume</rasd:HostResource></Item>
      <Item><rasd:InstanceId>n</rasd:InstanceId><rasd:ResourceType>10</rasd:ResourceType>
        <rasd:ResourceSubType>3</rasd:ResourceSubType><rasd:Connection>default</rasd:Connection>
        <rasd:MACAddress>00:1A:4A:00:00:01</rasd:MACAddress></Item>
      <Item><rasd:InstanceId>v</rasd:InstanceId><rasd:ResourceType>20</rasd:ResourceType>
        <Type>video</Type><Device>vga</Device></Item>
    </Section>
  </Content>
</ovf:Envelope>
"""


def edited(text, *changes):
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


def memory(configuration, gigabytes):
    return (
        f'<Item ovf:configuration="{configuration}"><rasd:AllocationUnits>byte * 2^30</rasd:AllocationUnits>'
        "<rasd:InstanceID>2</rasd:InstanceID><rasd:ResourceType>4</rasd:ResourceType>"
        f"<rasd:VirtualQuantity>{gigabytes}</rasd:VirtualQuantity></Item>"
    )


OPTIONS = (
    '<DeploymentOptionSection><Info/><Configuration ovf:id="large"><Label>L</Label></Configuration>'
    '<Configuration ovf:id="small" ovf:default="true"/></DeploymentOptionSection>'
)
EFI = (
    '<vmw:Config xmlns:vmw="http://www.vmware.com/schema/ovf" ovf:required="false" vmw:key="firmware" vmw:value="efi"/>'
)
VMWARE = edited(
    samples.VBOX,
    ("MegaBytes", "byte * 2^20"),
    ("<Item><rasd:Address>0", f"{memory('small', 2)}{memory('large', 8)}<Item><rasd:Address>0"),
    ("<rasd:ResourceType>5<", "<rasd:ResourceType>6<"),
    ("E1000", "VmxNet3"),
    ("<rasd:Connection>NAT", "<rasd:Connection>VM Network"),
    ("/disk/vmdisk1<", "ovf:/disk/vmdisk1<"),
    ("<VirtualSystem ", OPTIONS + "<VirtualSystem "),
    ("</VirtualHardwareSection>", EFI + "</VirtualHardwareSection>"),
)


@pytest.fixture
def home(home):
    """With nothing but a package's disk in it."""
    for path in home.iterdir():
        if path.name != "box-disk001.vmdk":
            path.unlink()
    return home


@pytest.fixture
def convert(submit):
    """Runs the command with a package."""
    return lambda *words: submit("ovf", *words)


@pytest.fixture
def disk(home):
    return (home / "box-disk001.vmdk").read_bytes()


def ova(home, members, ovf=samples.VBOX, name="box.ova"):
    samples.tar(home / name, {"box.ovf": ovf.encode(), **members})
    (home / "box-disk001.vmdk").unlink(missing_ok=True)


# --- descriptors


def test_virtualbox(home, convert):
    (home / "box.ovf").write_text(samples.VBOX)
    read, said = convert("box.ovf", "--convert")
    assert (read["executable"], read["vm_memory"], read["vm_vcpus"]) == ("box", "768", "2")
    assert read["vm_disk"] == "box-disk001.qcow2:hda:w:qcow2"
    assert read["MY.VMPARAM_vm_NICs"] == '"nat:e1000"'
    left = part(said, Outcome.NOT_USED)
    assert absent(left, "sound", "ProductSection", "EulaSection", "Machine") == []
    assert lost(said) == ""
    line = next(line for line in left.splitlines() if "sound" in line)
    assert "sound" in samples.VBOX.splitlines()[int(line.rpartition("[line ")[2].partition(",")[0]) - 1]


def test_vmware(home, convert, refused):
    (home / "box.ovf").write_text(VMWARE)
    read, said = convert("box.ovf", "--convert")
    assert read["vm_memory"] == "2048"  # the configuration by default
    assert read["vm_disk"] == "box-disk001.qcow2:sda:w:qcow2"
    assert read["MY.VMPARAM_vm_Firmware"] == '"uefi"'
    assert read["MY.VMPARAM_vm_NICs"] == '"nat:e1000"'
    assert (
        absent(
            changed(said),
            "jobs have no controller scsi, the disk is on SATA",
            "jobs have no vmxnet3",
            "network VM Network",
        )
        == []
    )
    read, _ = convert("box.ovf", "--convert", "--configuration", "large", "--force", "--network", "bridge")
    assert (read["vm_memory"], read["MY.VMPARAM_vm_NICs"]) == ("8192", '"bridge:e1000"')
    refused("ovf", "box.ovf", "--configuration", "huge")


def test_ovirt(home, convert):
    (home / "image").mkdir()
    samples.image(home / "image" / "volume", "qcow2")
    (home / "guest.ovf").write_text(OVIRT)
    read, said = convert("guest.ovf")
    assert (read["executable"], read["vm_memory"], read["vm_vcpus"]) == ("guest", "512", "6")
    assert (read["vm_disk"], read["vm_macaddr"]) == ("volume:vda:w:qcow2", "00:1a:4a:00:00:01")
    assert read["MY.VMPARAM_vm_Topology"] == '"sockets=2,cores=3,threads=1"'
    assert read["MY.VMPARAM_vm_Firmware"] == '"uefi-secure"'
    assert "IsStateless True" in part(said, Outcome.NOT_USED)


def test_ordinary_exports_lose_nothing(home, submit):
    for text in (samples.VBOX, VMWARE):
        (home / "box.ovf").write_text(text)
        read, said = submit("ovf", "box.ovf", "--force", lax=False)
        assert (read["vm_disk"].rpartition(":")[2], lost(said)) == ("qcow2", "")
        assert "no guest can write to a compressed VMDK" in changed(said)  # converted without being asked


VBOX_MACHINE = """\
<vbox:Machine ovf:required="false" version="1.19-linux" name="box" OSType="Debian_64"><Hardware>
  <CPU count="9"/><Memory RAMSize="9"/><Firmware type="EFI"/>
  <TrustedPlatformModule type="v2_0" location=""/>
  <Boot><Order position="2" device="HardDisk"/><Order position="1" device="DVD"/><Order position="3" device="None"/>
    <Order position="4" device="Network"/></Boot>
  <Network><Adapter slot="0" enabled="true" cable="false" MACAddress="080027010203" type="82540EM"><NAT/></Adapter>
    <Adapter slot="1" enabled="false"/></Network>
</Hardware></vbox:Machine>
"""
CD = """\
<Item><rasd:ElementName>cd</rasd:ElementName><rasd:HostResource>/file/file2</rasd:HostResource>
  <rasd:InstanceID>9</rasd:InstanceID><rasd:Parent>3</rasd:Parent><rasd:AddressOnParent>1</rasd:AddressOnParent>
  <rasd:ResourceType>15</rasd:ResourceType></Item>
"""
WITH_CD = edited(
    samples.VBOX,
    ("</References>", '<File ovf:id="file2" ovf:href="seed.iso"/></References>'),
    ("</VirtualHardwareSection>", f"{CD}</VirtualHardwareSection>"),
)


@pytest.fixture
def with_cd(home):
    """A package with a disk and a CD, edited: what the command makes of it is asked for next."""
    (home / "seed.iso").write_bytes(bytes(4096))
    return lambda *changes: (home / "box.ovf").write_text(edited(WITH_CD, *changes))


def test_what_virtualbox_alone_says(with_cd, submit):
    machine = '<vbox:Machine ovf:required="false"><Hardware/></vbox:Machine>'
    with_cd((machine, VBOX_MACHINE), ("<rasd:ResourceSubType>E1000</rasd:ResourceSubType>", ""))
    read, said = submit("ovf", "box.ovf", lax=False)
    assert (read["vm_memory"], read["vm_vcpus"]) == ("768", "2")  # of the items
    assert (read["MY.VMPARAM_vm_Firmware"], read["MY.VMPARAM_vm_TPM"]) == ('"uefi"', "true")
    assert read["vm_disk"] == "seed.iso:sdb:r:iso,box-disk001.qcow2:sda:w:qcow2"  # the CD first, and no IDE with UEFI
    assert read["MY.VMPARAM_vm_NICs"] == '"nat:e1000:down"'
    assert "a new one" in changed(said)
    assert "boot from Network" in part(said, Outcome.NOT_USED)
    assert "in place of enp0s3" in changed(said)


@pytest.mark.parametrize(
    "said", ['version="1.20-macosx" OSType="Ubuntu_arm64"', 'x="y"><Platform architecture="ARM"/><a']
)
def test_virtualbox_on_arm(with_cd, submit, said):
    closing = "</a></vbox:Machine>" if "Platform" in said else "</vbox:Machine>"
    with_cd(('<vbox:Machine ovf:required="false"><Hardware/></vbox:Machine>', f"<vbox:Machine {said}>{closing}"))
    read, _ = submit("ovf", "box.ovf", lax=False)
    assert read["MY.VMPARAM_vm_Arch"] == '"aarch64"'


@pytest.mark.parametrize(
    ("sections", "first", "is_lost"),
    [
        ([(9, "cdrom"), (5, "disk")], "seed.iso", False),
        ([("", "cdrom")], "seed.iso", False),
        ([(5, "disk"), (6, "net")], "box-disk001.qcow2", False),
        ([(6, "net"), (9, "cdrom")], "seed.iso", True),
        ([], "box-disk001.qcow2", False),
    ],
)
def test_vmwares_boot_order(with_cd, convert, sections, first, is_lost):
    text = "".join(
        f'<vmw:BootOrderSection xmlns:vmw="v" vmw:instanceId="{instance}" vmw:type="{kind}"/>'
        for instance, kind in sections
    )
    with_cd(
        ("</VirtualSystem>", f"{text}</VirtualSystem>"),
        ('<vbox:Machine ovf:required="false"><Hardware/></vbox:Machine>', ""),
    )
    read, said = convert("box.ovf")
    assert read["vm_disk"].startswith(first)
    assert ("boot from net" in lost(said)) is is_lost


@pytest.mark.parametrize(
    ("said", "asked"), [('<RTC localOrUTC="local"/>', '"localtime"'), ('<RTC localOrUTC="UTC"/>', None)]
)
def test_a_clock_of_virtualbox_in_local_time_is_asked_for(with_cd, convert, said, asked):
    with_cd(("<Hardware/>", f"<Hardware>{said}</Hardware>"))
    assert convert("box.ovf")[0].get("MY.VMPARAM_vm_Clock") == asked


def test_a_time_zone_of_ovirts_is_told(home, convert):
    (home / "image").mkdir()
    samples.image(home / "image" / "volume", "qcow2")
    zone = "<TimeZone>Tokyo Standard Time</TimeZone>"
    (home / "guest.ovf").write_text(OVIRT.replace("<IsStateless>", f"{zone}<IsStateless>"))
    read, said = convert("guest.ovf")
    assert read["MY.VMPARAM_vm_Clock"] == '"localtime"'
    assert "in place of Tokyo Standard Time" in changed(said)


@pytest.mark.parametrize("controller", ["VirtioSCSI", "virtio-scsi"])
def test_a_disk_behind_virtio_scsi_is_a_virtio_disk(home, convert, controller):
    """Its guest may have no driver for SATA."""
    (home / "box.ovf").write_text(edited(samples.VBOX, ("PIIX4", controller), ("ResourceType>5<", "ResourceType>20<")))
    read, said = convert("box.ovf")
    assert read["vm_disk"] == "box-disk001.qcow2:vda:w:qcow2"
    assert "virtio, not behind virtio-scsi" in changed(said)


def test_the_files_order_of_a_controllers_disks_is_not_theirs(home, convert):
    samples.image(home / "b.vmdk", "vmdk")
    second = '<Disk ovf:capacity="1" ovf:diskId="b" ovf:fileRef="b" ovf:format="vmdk"/>'
    item = (
        "<Item><rasd:HostResource>/disk/b</rasd:HostResource><rasd:InstanceID>4</rasd:InstanceID>"
        "<rasd:AddressOnParent>1</rasd:AddressOnParent><rasd:Parent>3</rasd:Parent>"
        "<rasd:ResourceType>17</rasd:ResourceType></Item><Item><rasd:AddressOnParent>0<"
    )
    text = edited(
        samples.VBOX,
        ("</References>", '<File ovf:id="b" ovf:href="b.vmdk"/></References>'),
        ("</DiskSection>", f"{second}</DiskSection>"),
        ("<Item><rasd:AddressOnParent>0<", item),
    )
    (home / "box.ovf").write_text(text)
    read, _ = convert("box.ovf")
    assert read["vm_disk"] == "box-disk001.qcow2:hda:w:qcow2,b.vmdk:hdb:w:vmdk"


@pytest.mark.parametrize("form", ["qcow2", "vdi", "vhdx"])
def test_where_nobody_says_the_format_the_content_does(home, submit, form):
    samples.image(home / "volume", form)
    text = edited(
        samples.VBOX,
        ("box-disk001.vmdk", "volume"),
        ("http://www.vmware.com/interfaces/specifications/vmdk.html#streamOptimized", ""),
    )
    (home / "box.ovf").write_text(text)
    taken = "volume.qcow2:hda:w:qcow2" if form == "vhdx" else f"volume:hda:w:{form}"
    assert submit("ovf", "box.ovf", lax=False)[0]["vm_disk"] == taken


def test_a_directory_with_one_descriptor_is_a_package(home, submit, refused):
    (home / "box").mkdir()
    (home / "box" / "box.ovf").write_text(samples.VBOX)
    (home / "box-disk001.vmdk").rename(home / "box" / "box-disk001.vmdk")
    assert submit("ovf", "box", lax=False)[0]["executable"] == "box"
    (home / "box" / "other.ovf").write_text(samples.VBOX)
    assert "has 2 files .ovf" in refused("ovf", "box")


def test_the_second_version_of_the_standard(home, submit):
    """Its items are of three kinds."""
    text = samples.VBOX.replace("envelope/1", "envelope/2").replace('ovf:version="1.0"', 'ovf:version="2.0"')
    text = text.replace("xmlns:vbox=", 'xmlns:sasd="s" xmlns:epasd="e" xmlns:vbox=')
    first, *others = text.split("<Item>")
    kinds = ("Item", "Item", "Item", "StorageItem", "EthernetPortItem", "Item")
    for kind, item in zip(kinds, others, strict=True):
        item = item.replace("</Item>", f"</{kind}>")
        prefix = {"StorageItem": "sasd:", "EthernetPortItem": "epasd:"}.get(kind, "rasd:")
        first += f"<{kind}>{item.replace('rasd:', prefix)}"
    (home / "box.ovf").write_text(first)
    read, said = submit("ovf", "box.ovf", lax=False)
    assert (read["vm_memory"], read["vm_disk"]) == ("768", "box-disk001.qcow2:hda:w:qcow2")
    assert (read["MY.VMPARAM_vm_NICs"], lost(said)) == ('"nat:e1000"', "")


@pytest.mark.parametrize("kind", [19, 31])
def test_others_call_a_disk_otherwise(home, submit, kind):
    (home / "box.ovf").write_text(edited(samples.VBOX, ("<rasd:ResourceType>17<", f"<rasd:ResourceType>{kind}<")))
    assert submit("ovf", "box.ovf", lax=False)[0]["vm_disk"] == "box-disk001.qcow2:hda:w:qcow2"


def test_a_tpm_of_vmwares(home, submit):
    item = (
        '<Item ovf:required="false"><rasd:InstanceID>13</rasd:InstanceID>'
        "<rasd:ResourceSubType>vmware.vtpm</rasd:ResourceSubType><rasd:ResourceType>1</rasd:ResourceType></Item>"
    )
    (home / "box.ovf").write_text(edited(VMWARE, ("</VirtualHardwareSection>", f"{item}</VirtualHardwareSection>")))
    assert submit("ovf", "box.ovf", lax=False)[0]["MY.VMPARAM_vm_TPM"] == "true"


@pytest.mark.parametrize(
    ("unit", "quantity", "mib", "why"),
    [
        ("", 768, 768, "MiB, as VirtualBox and VMware do"),
        ("", 805306368, 768, "bytes"),
        ("byte * 1024 * 1024", 768, 768, ""),
        ("byte*2^20", 768, 768, ""),
        ("GigaBytes", 2, 2048, ""),
    ],
)
def test_units_of_memory(home, convert, unit, quantity, mib, why):
    element = f"<rasd:AllocationUnits>{unit}</rasd:AllocationUnits>" if unit else ""
    text = edited(
        samples.VBOX, ("<rasd:AllocationUnits>MegaBytes</rasd:AllocationUnits>", element), (">768<", f">{quantity}<")
    )
    (home / "box.ovf").write_text(text)
    read, said = convert("box.ovf")
    assert read["vm_memory"] == str(mib)
    assert why in changed(said)


def test_memory_says_what_the_package_does_not(home, convert, refused):
    """The option that is named helps."""
    (home / "box.ovf").write_text(samples.VBOX.replace("MegaBytes", "heaps"))
    assert "--memory" in refused("ovf", "box.ovf")
    assert convert("box.ovf", "--memory", "1G")[0]["vm_memory"] == "1024"


@pytest.mark.parametrize(
    ("capacity", "more"),
    [
        ('ovf:capacity="20" ovf:capacityAllocationUnits="byte * 2^30"', ""),
        ('ovf:capacity="21474836480"', ""),
        (
            'ovf:capacity="${size}" ovf:capacityAllocationUnits="byte * 2^30"',
            '<Property ovf:key="size" ovf:type="string" ovf:value="20"/>',
        ),
    ],
)
def test_an_empty_disk_is_made_where_the_job_runs(home, submit, capacity, more):
    item = (
        "<Item><rasd:HostResource>/disk/empty</rasd:HostResource><rasd:InstanceID>8</rasd:InstanceID>"
        "<rasd:AddressOnParent>1</rasd:AddressOnParent><rasd:Parent>3</rasd:Parent>"
        "<rasd:ResourceType>17</rasd:ResourceType></Item>"
    )
    text = edited(
        samples.VBOX,
        ("</DiskSection>", f'<Disk {capacity} ovf:diskId="empty"/></DiskSection>'),
        ("</VirtualHardwareSection>", f"{item}</VirtualHardwareSection>"),
        ("<Product>", f"{more}<Product>"),
    )
    (home / "box.ovf").write_text(text)
    read, said = submit("ovf", "box.ovf", lax=False)
    assert read["vm_disk"] == "box-disk001.qcow2:hda:w:qcow2"
    assert read["MY.VMPARAM_vm_Data_Disk"] == '"hdb:20480M"'
    assert "an empty disk of 20480 MiB" in said


SETTINGS = (
    '<ProductSection ovf:class="com.example" ovf:instance="1"><Info/><Property ovf:key="password" ovf:type="string"/>'
    '<Property ovf:key="size" ovf:type="string" ovf:value="s &amp; m"><Value ovf:value="xl" ovf:configuration="large"/>'
    "</Property></ProductSection>"
)


def settings_by(*ways):
    return edited(
        VMWARE, ("<VirtualHardwareSection>", f'{SETTINGS}<VirtualHardwareSection ovf:transport="{" ".join(ways)}">')
    )


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ([], {"password": "", "size": "s & m"}),
        (["--configuration", "large", "--property", "com.example.password.1=a=b"], {"password": "a=b", "size": "xl"}),
    ],
)
def test_settings_reach_the_guest_on_a_cdrom(home, submit, words, values):
    (home / "box.ovf").write_text(settings_by("com.vmware.guestInfo", "iso"))
    read, said = submit("ovf", "box.ovf", *words, lax=False)
    assert read["MY.VMPARAM_vm_Data_Files"] == '"ovf-env.xml"'
    assert f"{home}/ovf-env.xml" in read["transfer_input_files"].split(", ")
    oe = "{http://schemas.dmtf.org/ovf/environment/1}"
    found = ElementTree.parse(home / "ovf-env.xml").getroot().iter(f"{oe}Property")
    named = {f"com.example.{key}.1": value for key, value in values.items()}
    assert {each.attrib[f"{oe}key"]: each.attrib[f"{oe}value"] for each in found} == named
    assert ("--property com.example.password.1=VALUE" in said) is not bool(words)


def test_settings_that_never_reach_the_guest_are_left_out(home, refused):
    (home / "box.ovf").write_text(settings_by("com.vmware.guestInfo"))
    assert "jobs have them on a CD-ROM only" in lost(refused("ovf", "box.ovf", lax=False))
    (home / "box.ovf").write_text(settings_by("iso"))
    assert "com.example.size.1" in refused("ovf", "box.ovf", "--property", "nothing=1")
    assert "cannot be written" in refused("ovf", "box.ovf", "--property", "com.example.size.1=\1")
    assert not (home / "ovf-env.xml").exists()
    (home / "ovf-env.xml").write_text("mine")
    assert "is there already" in refused("ovf", "box.ovf")


def test_everything_is_told_of(home, convert):
    """An element that nobody expects shows up, wherever it is."""
    for place in ("</Envelope>", "</VirtualSystem>", "</VirtualHardwareSection>", "</Item>", "</DiskSection>"):
        (home / "box.ovf").write_text(samples.VBOX.replace(place, f"<Surprise>secret</Surprise>{place}", 1))
        _, said = convert("box.ovf", "--convert", "--force")
        assert "Surprise secret" in part(said, Outcome.NOT_USED), place


@pytest.mark.parametrize(
    ("kind", "model"), [("VmxNet3 virtio", "virtio"), ("VmxNet3,E1000", "e1000"), ("e1000e", "e1000e")]
)
def test_of_several_kinds_of_nic_one_is_taken(home, convert, kind, model):
    (home / "box.ovf").write_text(samples.VBOX.replace("E1000", kind))
    read, said = convert("box.ovf", "--convert")
    assert read.get("MY.VMPARAM_vm_NICs", '"nat:virtio"') == f'"nat:{model}"'
    assert "NIC" not in lost(said)


def test_one_of_several_systems(home, convert, refused):
    second = samples.VBOX[samples.VBOX.index("<VirtualSystem") : samples.VBOX.index("</Envelope>")]
    second = second.replace('"box"', '"other"')
    (home / "box.ovf").write_text(samples.VBOX.replace("</Envelope>", f"{second}</Envelope>"))
    assert "box, other" in refused("ovf", "box.ovf", "--convert")
    read, _ = convert("box.ovf", "--convert", "--system", "other")
    assert read["executable"] == "other"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('ovf:href="box-disk001.vmdk"', 'ovf:href="../secret.vmdk"', "not a regular file in"),
        ('ovf:href="box-disk001.vmdk"', 'ovf:href="/etc/hostname"', "not a regular file in"),
        ('ovf:href="box-disk001.vmdk"', 'ovf:href="file:///etc/hostname"', "not a regular file in"),
        ('ovf:href="box-disk001.vmdk"', 'ovf:href="link.vmdk"', "and would go with the job"),
        ('ovf:href="box-disk001.vmdk"', 'ovf:href="box-disk001.vmdk" ovf:compression="gzip"', "cannot be unpacked"),
        ('ovf:href="box-disk001.vmdk"', 'ovf:href="box-disk001.vmdk" ovf:compression="lzip"', "is compressed with"),
        ('ovf:href="box-disk001.vmdk"', 'ovf:href="box-disk001.vmdk" ovf:chunkSize="1"', "pieces"),
        ("MegaBytes", "byte * 2^99999", "no unit"),
        ("MegaBytes", "byte * 2^\N{SUPERSCRIPT TWO}", "no unit"),
        ("vmdk.html#streamOptimized", "qcow2", "not in qcow2 format"),
        ("</Envelope>", "", "not XML"),
        ("<Envelope", "<!DOCTYPE x SYSTEM 'file:///etc/hostname'><Envelope", "document type"),
        ("<Envelope", "<!DOCTYPE x [<!ENTITY a 'b'>]><Envelope", "document type"),
    ],
)
def test_hostile_descriptors_are_refused(home, refused, old, new, said):
    (home.parent / "secret.vmdk").write_bytes(b"x")
    (home / "link.vmdk").symlink_to("/etc/hostname")
    assert old in samples.VBOX
    (home / "box.ovf").write_text(samples.VBOX.replace(old, new, 1))
    assert said in refused("ovf", "box.ovf", "--convert")
    assert not list(home.glob("*.qcow2*"))


def test_a_snapshot_of_a_stranger_is_refused(home, refused):
    """The backing file of a stranger's image would be a file of the person who submits it."""
    (home / "secret.raw").write_bytes(bytes(1 << 20))
    made = ["qemu-img", "create", "-q", "-f", "qcow2", "-b", home / "secret.raw", "-F", "raw", "box-disk001.vmdk"]
    subprocess.run(made, check=True)
    (home / "box.ovf").write_text(samples.VBOX.replace("vmdk.html#streamOptimized", "qcow2"))
    for more in ([], ["--convert"]):
        assert "overlay of" in refused("ovf", "box.ovf", *more)
    assert not list(home.glob("*.qcow2*"))


# --- XML


def test_a_value_that_any_number_of_disks_name_is_looked_up_once(home, submit, monkeypatch):
    """Each look takes the whole of the descriptor."""
    looks = []
    found = local
    monkeypatch.setattr("vmgahp.commands.submit.ovf.local", lambda name: looks.append(name) or found(name))

    def cost(number):
        disks = "".join(f'<Disk ovf:diskId="d{each}" ovf:capacity="${{key{each}}}"/>' for each in range(number))
        (home / "box.ovf").write_text(edited(samples.VBOX, ("</DiskSection>", f"{disks}</DiskSection>")))
        looks.clear()
        submit("ovf", "box.ovf", "--force")
        return len(looks)

    assert cost(400) < 5 * cost(100)


def test_xml_is_read_within_limits():
    with pytest.raises(SubmitError, match="MiB"):
        xml_input.read(b"<a>" + b" " * xml_input.LARGEST + b"</a>", "x")
    with pytest.raises(SubmitError, match="too large"):
        xml_input.read(b"<a>" + b"<b/>" * xml_input.MOST + b"</a>", "x")
    with pytest.raises(SubmitError, match="deeply"):
        xml_input.read(b"<a>" * 120 + b"</a>" * 120, "x")
    with pytest.raises(SubmitError, match="document type"):
        xml_input.read("\ufeff<!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;</a>".encode("utf-16-le"), "x")


# --- archives


@pytest.mark.parametrize("others", [{}, {"other.vmdk": b"x", ".profile": b"x"}], ids=["none", "some"])
def test_of_an_archive_only_what_the_descriptor_names_is_written(home, disk, convert, others):
    ova(home, {"box-disk001.vmdk": disk, **others})
    read, _ = convert("box.ova", "--convert")
    assert read["transfer_input_files"] == f"{home}/box-disk001.qcow2"
    assert sorted(path.name for path in home.iterdir()) == ["box-disk001.qcow2", "box.ova"]
    assert (home / "box-disk001.qcow2").read_bytes()[:4] == b"QFI\xfb"


def test_a_file_that_two_disks_name_is_taken_out_for_neither(home, disk, refused):
    item = "<Item><rasd:HostResource>/disk/vmdisk1</rasd:HostResource><rasd:ResourceType>17</rasd:ResourceType></Item>"
    ova(
        home,
        {"box-disk001.vmdk": disk},
        edited(samples.VBOX, ("</VirtualHardwareSection>", f"{item}</VirtualHardwareSection>")),
    )
    said = refused("ovf", "box.ova")
    assert "is the image of two disks" in said
    assert [path.name for path in home.iterdir()] == ["box.ova"]


@pytest.mark.parametrize("algorithm", ["SHA1", "SHA256"])
def test_the_manifest_is_checked(home, disk, convert, algorithm, refused):
    manifest = f"{algorithm}(box-disk001.vmdk)= {hashlib.new(algorithm, disk).hexdigest()}\n".encode()
    ova(home, {"box-disk001.vmdk": disk, "box.mf": manifest})
    convert("box.ova", "--convert")
    os.unlink("box-disk001.qcow2")
    bad = {"box.ovf": samples.VBOX.encode(), "box.mf": manifest, "box-disk001.vmdk": disk[:-1] + b"x"}
    samples.tar(home / "box.ova", bad)
    assert "manifest" in refused("ovf", "box.ova", "--convert")
    assert [path.name for path in home.iterdir()] == ["box.ova"]


PACKED = edited(
    samples.VBOX, ('ovf:href="box-disk001.vmdk"', 'ovf:href="box.vmdk.gz" ovf:compression="gzip" ovf:chunkSize="9"')
)


@pytest.mark.parametrize("in_archive", [False, True], ids=["beside", "archive"])
@pytest.mark.parametrize(
    ("text", "cut"),
    [(PACKED.replace(' ovf:chunkSize="9"', ""), None), (PACKED, 9000)],
    ids=["compressed", "compressed and in pieces"],
)
def test_compressed_files_are_unpacked_and_pieces_joined(home, disk, convert, in_archive, text, cut):
    data = gzip.compress(disk[:1000]) + gzip.compress(disk[1000:])  # as parallel programs write it
    names = (
        {"box.vmdk.gz": data}
        if cut is None
        else {"box.vmdk.gz.000000000": data[:cut], "box.vmdk.gz.000000001": data[cut:]}
    )
    names = {name: piece for name, piece in names.items() if piece}
    if in_archive:
        ova(home, names, text)
    else:
        (home / "box.ovf").write_text(text)
        for name, piece in names.items():
            (home / name).write_bytes(piece)
    before = sorted(path.name for path in home.iterdir())
    read, _ = convert("box.ova" if in_archive else "box.ovf")
    assert read["vm_disk"] == "box.qcow2:hda:w:qcow2"
    assert sorted(path.name for path in home.iterdir()) == sorted([*before, "box.qcow2"])
    made = subprocess.run(["qemu-img", "compare", "box-disk001.vmdk", "box.qcow2"], check=False, capture_output=True)
    assert in_archive or made.returncode == 0


@pytest.mark.parametrize("damage", ["cut", "garbage", "larger than allowed", "larger than the disk space"])
def test_what_cannot_be_unpacked_leaves_nothing(home, disk, refused, monkeypatch, damage):
    data = gzip.compress(bytes(3 << 20) if damage.startswith("larger") else disk)
    if damage == "cut":
        data = data[:-20]
    elif damage == "garbage":
        data = b"\x1f\x8b" + data[:100]
    elif damage == "larger than allowed":
        monkeypatch.setattr("vmgahp.commands.submit.images.LARGEST", 1 << 20)
    else:
        data = gzip.compress(os.urandom(4096) * 500)
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=100, f_frsize=1024))
    (home / "box.ovf").write_text(PACKED.replace(' ovf:chunkSize="9"', ""))
    (home / "box.vmdk.gz").write_bytes(data)
    before = sorted(home.iterdir())
    refused("ovf", "box.ovf")
    assert sorted(home.iterdir()) == before


def test_zeros_take_no_room(home, disk, convert):
    (home / "box.ovf").write_text(
        edited(PACKED, (' ovf:chunkSize="9"', ""), ("vmdk.html#streamOptimized", "raw.qcow2"))
    )
    samples.image(home / "whole", "qcow2")
    (home / "box.vmdk.gz").write_bytes(gzip.compress((home / "whole").read_bytes() + bytes(64 << 20)))
    convert("box.ovf")
    made = (home / "box.vmdk").stat()
    assert (made.st_size > 64 << 20, made.st_blocks * 512 < 8 << 20) == (True, True)


def members(home, *infos):
    """An archive with headers of one's own, the descriptor first."""
    with tarfile.open(home / "box.ova", "w", format=tarfile.USTAR_FORMAT) as archive:
        descriptor = tarfile.TarInfo("box.ovf")
        descriptor.size = len(samples.VBOX)
        archive.addfile(descriptor, io.BytesIO(samples.VBOX.encode()))
        for info in infos:
            archive.addfile(info, io.BytesIO(bytes(max(info.size, 0))))
    os.unlink(home / "box-disk001.vmdk")


def entry(name="box-disk001.vmdk", kind=tarfile.REGTYPE, link="", size=0):
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, size
    return info


@pytest.mark.parametrize(
    "info",
    [
        entry(kind=tarfile.SYMTYPE, link="/etc/passwd"),
        entry(kind=tarfile.LNKTYPE, link="/etc/passwd"),
        entry(kind=tarfile.FIFOTYPE),
        entry(kind=tarfile.CHRTYPE),
        entry(name="../box-disk001.vmdk"),
        entry(name="/tmp/box-disk001.vmdk"),
        entry(name="a\nb.vmdk"),
        entry(kind=tarfile.GNUTYPE_SPARSE),
    ],
    ids=lambda info: f"{info.name!a}-{info.type}",
)
def test_members_that_are_no_plain_files_are_refused(home, refused, info):
    members(home, info)
    said = refused("ovf", "box.ova", "--convert")
    assert "regular file" in said or "has a file" in said
    assert [path.name for path in home.iterdir()] == ["box.ova"]


def test_an_archive_that_promises_more_than_it_has_is_refused(home, disk, refused):
    ova(home, {"box-disk001.vmdk": disk})
    data = (home / "box.ova").read_bytes()
    (home / "box.ova").write_bytes(data[: len(data) // 2])
    assert "ends in the middle" in refused("ovf", "box.ova", "--convert")


def test_a_huge_header_is_not_read(home, refused):
    members(home, entry(name="././@LongLink", kind=tarfile.GNUTYPE_LONGNAME, size=1 << 20), entry())
    assert "headers are too long" in refused("ovf", "box.ova", "--convert")


def test_too_many_members_are_refused(home, refused):
    members(home, *(entry(name=f"{number}.txt") for number in range(1200)))
    assert "more than 1000" in refused("ovf", "box.ova", "--convert")


def test_a_disk_larger_than_the_disk_space_is_refused(home, disk, refused, monkeypatch):
    ova(home, {"box-disk001.vmdk": disk})

    class Full:
        f_bavail, f_frsize = 1, 1024

    monkeypatch.setattr(os, "statvfs", lambda _: Full)
    assert "--dir" in refused("ovf", "box.ova", "--convert")
    assert [path.name for path in home.iterdir()] == ["box.ova"]


def test_what_an_archive_left_is_removed_where_nothing_comes_of_it(home, disk, refused):
    ova(home, {"box-disk001.vmdk": disk})
    refused("ovf", "box.ova", "--append", "nonsense")
    shared = "<Hardware><SharedFolder name='x'/></Hardware>"
    ova(home, {"box-disk001.vmdk": disk}, edited(samples.VBOX, ("<Hardware/>", shared)))
    refused("ovf", "box.ova", lax=False)
    assert [path.name for path in home.iterdir()] == ["box.ova"]


def test_a_long_name_is_read(home, disk, convert):
    """By both ways in which tar files have it."""
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        name = "n" * 150 + ".vmdk"
        ovf = samples.VBOX.replace("box-disk001.vmdk", name).encode()
        with tarfile.open(home / "box.ova", "w", format=form) as archive:
            for path, data in (("box.ovf", ovf), (name, disk)):
                info = tarfile.TarInfo(path)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        convert("box.ova", "--convert", "--force")


def test_a_gzipped_archive_is_no_archive(home, refused):
    (home / "box.ova").write_bytes(gzip.compress(b"x" * 1000))
    assert "unpack it first" in refused("ovf", "box.ova")
