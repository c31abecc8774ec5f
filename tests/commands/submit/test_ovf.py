"""`vmgahp submit ovf`: descriptors of three exporters, archives, and what strangers may have put into them."""

import gzip
import hashlib
import io
import os
import subprocess
import tarfile

import pytest

from tests.commands.submit import samples
from tests.commands.submit.samples import lost
from tests.commands.support import absent
from vmgahp.commands.submit import xml_input
from vmgahp.commands.submit.summary import SubmitError

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
    <Name>guest</Name><Description>x</Description><BiosType>4</BiosType><IsStateless>False</IsStateless>
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


def changed(text, *changes):
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
VMWARE = changed(
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
    os.unlink(home / "box-disk001.vmdk")


# --- descriptors


def test_virtualbox(home, convert):
    (home / "box.ovf").write_text(samples.VBOX)
    read, said = convert("box.ovf", "--convert")
    assert (read["executable"], read["vm_memory"], read["vm_vcpus"]) == ("box", "768", "2")
    assert read["vm_disk"] == "box-disk001.qcow2:hda:w:qcow2"
    assert read["MY.VMPARAM_vm_NICs"] == '"nat:e1000"'
    assert absent(lost(said), "sound", "ProductSection", "EulaSection", "Machine") == []
    line = next(line for line in lost(said).splitlines() if "sound" in line)
    assert "sound" in samples.VBOX.splitlines()[int(line.split()[1].rstrip(",")) - 1]


def test_vmware(home, convert, refused):
    (home / "box.ovf").write_text(VMWARE)
    read, said = convert("box.ovf", "--convert")
    assert read["vm_memory"] == "2048"  # the configuration by default
    assert read["vm_disk"] == "box-disk001.qcow2:sda:w:qcow2"
    assert read["MY.VMPARAM_vm_Firmware"] == '"uefi"'
    assert read["MY.VMPARAM_vm_NICs"] == '"nat:e1000"'
    assert absent(lost(said), "its disks are on SATA", "vmxnet3", "VM Network") == []
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
    assert "IsStateless" in lost(said)


def test_everything_is_told_of(home, convert):
    """An element that nobody expects shows up, wherever it is."""
    for place in ("</Envelope>", "</VirtualSystem>", "</VirtualHardwareSection>", "</Item>", "</DiskSection>"):
        (home / "box.ovf").write_text(samples.VBOX.replace(place, f"<Surprise>secret</Surprise>{place}", 1))
        _, said = convert("box.ovf", "--convert", "--force")
        assert "Surprise" in lost(said), place


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
        ('ovf:href="box-disk001.vmdk"', 'ovf:href="../secret.vmdk"', "not a file in the directory of"),
        ('ovf:href="box-disk001.vmdk"', 'ovf:href="/etc/hostname"', "not a file in the directory of"),
        ('ovf:href="box-disk001.vmdk"', 'ovf:href="file:///etc/hostname"', "not a file in the directory of"),
        ('ovf:href="box-disk001.vmdk"', 'ovf:href="link.vmdk"', "and would go with the job"),
        ('ovf:href="box-disk001.vmdk"', 'ovf:href="box-disk001.vmdk" ovf:compression="gzip"', "compressed"),
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
    assert "a header has" in refused("ovf", "box.ova", "--convert")


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
    refused("ovf", "box.ova")  # compressed, and no --convert
    refused("ovf", "box.ova", "--convert", "--strict")
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
    refused("ovf", "box.ova")
