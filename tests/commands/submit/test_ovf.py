"""`vmgahp submit ovf`: descriptors of two exporters, archives, and what strangers may have put into them."""

import gzip
import hashlib
import os
import subprocess
import tarfile

import pytest

from tests.commands.submit import samples
from tests.commands.submit.samples import changed, lost, part
from tests.commands.support import absent
from vmgahp.commands.submit import ovf, xml_input
from vmgahp.commands.submit.report import Outcome, SubmitError

pytestmark = pytest.mark.qemu


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
    samples.VBOX, ("MegaBytes", "byte * 2^20"),
    ("<Item><rasd:Address>0", f"{memory('small', 2)}{memory('large', 8)}<Item><rasd:Address>0"),
    ("<rasd:ResourceType>5<", "<rasd:ResourceType>6<"), ("PIIX4", "lsilogic"), ("E1000", "VmxNet3"),
    ("<rasd:Connection>NAT", "<rasd:Connection>VM Network"), ("/disk/vmdisk1<", "ovf:/disk/vmdisk1<"),
    ("<VirtualSystem ", OPTIONS + "<VirtualSystem "), ("</VirtualHardwareSection>", EFI + "</VirtualHardwareSection>"),
)  # fmt: skip


@pytest.fixture
def home(home):
    """With nothing but a package's disk in it."""
    for path in home.iterdir():
        if path.name != "box-disk001.vmdk":
            path.unlink()
    return home


@pytest.fixture
def convert(home, submit):
    """Runs the command with a descriptor of this text."""

    def run(text, *words, **how):
        (home / "box.ovf").write_text(text)
        return submit("ovf", "box.ovf", *words, **how)

    return run


@pytest.fixture
def disk(home):
    return (home / "box-disk001.vmdk").read_bytes()


def ova(home, members, *more, ovf=samples.VBOX):
    samples.tar(home / "box.ova", {"box.ovf": ovf.encode(), **members}, *more)
    (home / "box-disk001.vmdk").unlink(missing_ok=True)


# --- descriptors


def test_virtualbox(convert):
    read, said = convert(samples.VBOX, "--convert")
    assert (read["executable"], read["vm_memory"], read["vm_vcpus"]) == ("box", "768", "2")
    assert read["vm_disk"] == "box-disk001.qcow2:hda:w:qcow2"
    assert read["MY.VMPARAM_vm_NICs"] == '"nat:e1000"'
    left = part(said, Outcome.NOT_USED)
    assert absent(left, "sound", "ProductSection", "EulaSection", "Machine") == []
    assert lost(said) == ""
    line = next(line for line in left.splitlines() if "sound" in line)
    assert "sound" in samples.VBOX.splitlines()[int(line.rpartition("[line ")[2].partition(",")[0]) - 1]


def test_vmware(convert):
    read, said = convert(VMWARE, "--convert")
    assert read["vm_memory"] == "2048"  # the configuration by default
    assert read["vm_disk"] == "box-disk001.qcow2:sda:w:qcow2"
    assert read["MY.VMPARAM_vm_Firmware"] == '"uefi"'
    assert read["MY.VMPARAM_vm_NICs"] == '"nat:e1000"'
    wanted = ("jobs have no controller lsilogic, the disk is on SATA", "e1000, not vmxnet3", "network VM Network")
    assert absent(changed(said), *wanted) == []
    read, _ = convert(VMWARE, "--convert", "--configuration", "large", "--force", "--network", "bridge")
    assert (read["vm_memory"], read["MY.VMPARAM_vm_NICs"]) == ("8192", '"bridge:e1000"')
    convert(VMWARE, "--configuration", "huge", status=1)


VBOX_MACHINE = """\
<vbox:Machine ovf:required="false" version="1.19-linux" name="box" OSType="Debian_64"><Hardware>
  <CPU count="9"/><Memory RAMSize="9"/><Firmware type="EFI"/>
  <TrustedPlatformModule type="v2_0" location=""/>
  <Boot><Order position="1" device="DVD"/></Boot>
  <Network><Adapter slot="1" enabled="true"/><Adapter slot="0" enabled="false"/></Network>
</Hardware></vbox:Machine>
"""
CD = """\
<Item><rasd:ElementName>cd</rasd:ElementName><rasd:HostResource>/file/file2</rasd:HostResource>
  <rasd:InstanceID>9</rasd:InstanceID><rasd:Parent>3</rasd:Parent><rasd:AddressOnParent>1</rasd:AddressOnParent>
  <rasd:ResourceType>15</rasd:ResourceType></Item>
"""


def test_what_virtualbox_alone_says(home, convert):
    (home / "seed.iso").write_bytes(bytes(4096))
    text = edited(
        samples.VBOX,
        ("</References>", '<File ovf:id="file2" ovf:href="seed.iso"/></References>'),
        ("</VirtualHardwareSection>", f"{CD}</VirtualHardwareSection>"),
        ('<vbox:Machine ovf:required="false"><Hardware/></vbox:Machine>', VBOX_MACHINE),
        ("<rasd:ResourceSubType>E1000</rasd:ResourceSubType>", ""),
    )
    read, said = convert(text, lax=False)
    assert (read["vm_memory"], read["vm_vcpus"]) == ("768", "2")  # of the items
    assert (read["MY.VMPARAM_vm_Firmware"], read["MY.VMPARAM_vm_TPM"]) == ('"uefi"', "true")
    assert read["vm_disk"] == "box-disk001.qcow2:sda:w:qcow2,seed.iso:sdb:r:iso"  # no IDE with UEFI
    assert read["MY.VMPARAM_vm_NICs"] == '"nat:e1000"'
    assert "a new one" in changed(said)
    assert "with Order" in part(said, Outcome.NOT_USED)
    assert "Linux may call it otherwise, in place of enp0s8" in changed(said)
    assert "--as-is" not in said


@pytest.mark.parametrize(
    ("old", "new", "name", "asked"),
    [
        ("<vbox:Machine ", '<vbox:Machine OSType="Ubuntu_arm64" ', "Arch", '"aarch64"'),
        ("<Hardware/>", '<Hardware><RTC localOrUTC="local"/></Hardware>', "Clock", '"localtime"'),
        ("<Hardware/>", '<Hardware><RTC localOrUTC="UTC"/></Hardware>', "Clock", None),
    ],
)
def test_an_architecture_and_a_clock_of_virtualbox_are_asked_for(convert, old, new, name, asked):
    assert convert(edited(samples.VBOX, (old, new)), lax=False)[0].get(f"MY.VMPARAM_vm_{name}") == asked


@pytest.mark.parametrize("controller", ["VirtioSCSI", "virtio-scsi"])
def test_a_disk_behind_virtio_scsi_is_a_virtio_disk(convert, controller):
    """Its guest may have no driver for SATA."""
    read, said = convert(edited(samples.VBOX, ("PIIX4", controller), ("ResourceType>5<", "ResourceType>20<")))
    assert read["vm_disk"] == "box-disk001.qcow2:vda:w:qcow2"
    assert "virtio, not behind virtio-scsi" in changed(said)


@pytest.mark.parametrize("form", ["qcow2", "vdi", "vhdx"])
def test_where_nobody_says_the_format_the_content_does(home, convert, form):
    samples.image(home / "volume", form)
    text = edited(
        samples.VBOX,
        ("box-disk001.vmdk", "volume"),
        ("http://www.vmware.com/interfaces/specifications/vmdk.html#streamOptimized", ""),
    )
    taken = "volume.qcow2:hda:w:qcow2" if form == "vhdx" else f"volume:hda:w:{form}"
    assert convert(text, lax=False)[0]["vm_disk"] == taken


def test_a_directory_with_one_descriptor_is_a_package(home, submit, refused):
    (home / "box").mkdir()
    (home / "box" / "box.ovf").write_text(samples.VBOX)
    (home / "box-disk001.vmdk").rename(home / "box" / "box-disk001.vmdk")
    assert submit("ovf", "box", lax=False)[0]["executable"] == "box"
    (home / "box" / "other.ovf").write_text(samples.VBOX)
    assert "has 2 files .ovf" in refused("ovf", "box")


def test_the_second_version_of_the_standard(convert):
    """Its items are of three kinds."""
    text = samples.VBOX.replace("envelope/1", "envelope/2").replace('ovf:version="1.0"', 'ovf:version="2.0"')
    text = text.replace("xmlns:vbox=", 'xmlns:sasd="s" xmlns:epasd="e" xmlns:vbox=')
    first, *others = text.split("<Item>")
    kinds = ("Item", "Item", "Item", "StorageItem", "EthernetPortItem", "Item")
    for kind, item in zip(kinds, others, strict=True):
        item = item.replace("</Item>", f"</{kind}>")
        prefix = {"StorageItem": "sasd:", "EthernetPortItem": "epasd:"}.get(kind, "rasd:")
        first += f"<{kind}>{item.replace('rasd:', prefix)}"
    read, said = convert(first, lax=False)
    assert (read["vm_memory"], read["vm_disk"]) == ("768", "box-disk001.qcow2:hda:w:qcow2")
    assert (read["MY.VMPARAM_vm_NICs"], lost(said)) == ('"nat:e1000"', "")


VMW = 'xmlns:vmw="http://www.vmware.com/schema/ovf"'


@pytest.mark.parametrize(
    ("system", "more", "asked"),
    [
        ("windows9_64Guest", "", True),
        ("windows9_64Guest", f'<vmw:ExtraConfig {VMW} vmw:key="rtc.diffFromUTC" vmw:value="0"/>', False),
        ("debian11_64Guest", "", False),
    ],
)
def test_a_clock_of_windows_on_vmware_is_in_local_time(convert, system, more, asked):
    """As in a .vmx of the same machine."""
    section = f'<OperatingSystemSection {VMW} vmw:osType="{system}"><Info/></OperatingSystemSection>'
    text = VMWARE.replace("<VirtualHardwareSection>", f"{section}<VirtualHardwareSection>")
    text = text.replace("</VirtualHardwareSection>", f"{more}</VirtualHardwareSection>")
    assert ("MY.VMPARAM_vm_Clock" in convert(text, lax=False)[0]) == asked


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("</VirtualHardwareSection>", '<vmw:ExtraConfig {VMW} vmw:key="{key}" vmw:value="{value}"/>{old}'),
        ("<Product>Box</Product>", '{old}<Property ovf:key="{key}" ovf:type="string" ovf:value="{value}"/>'),
    ],
)
@pytest.mark.parametrize("key", ["guestinfo.userdata", "guestinfo.ignition.config.data"])
def test_what_a_first_boot_reads_of_vmware_is_left_out(convert, old, new, key):
    for value in ("", "e30="):
        part_ = new.format(VMW=VMW, key=key, value=value, old=old)
        assert (key in lost(convert(edited(VMWARE, (old, part_)), "--force")[1])) == bool(value)


def test_a_file_is_named_by_a_uri(home, convert):
    os.rename(home / "box-disk001.vmdk", home / "box disk.vmdk")
    text = edited(samples.VBOX, ('"box-disk001.vmdk"', '"box%20disk.vmdk"'))
    assert convert(text, lax=False)[0]["vm_disk"] == "box_disk.qcow2:hda:w:qcow2"


def test_a_disk_in_chunks_is_refused_with_the_cure(home, refused):
    os.rename(home / "box-disk001.vmdk", home / "box-disk001.vmdk.000000000")
    (home / "box.ovf").write_text(samples.VBOX)
    assert "are joined by: cat box-disk001.vmdk.0* >box-disk001.vmdk" in refused("ovf", "box.ovf")


def test_a_nic_of_vmwares_has_another_name_in_the_guest(convert):
    """As that of a .vmx."""
    slot = f'<vmw:Config {VMW} ovf:required="false" vmw:key="slotInfo.pciSlotNumber" vmw:value="160"/></Item>'
    part_ = "<rasd:ResourceType>10</rasd:ResourceType></Item>"
    assert "in place of ens160" in changed(convert(edited(VMWARE, (part_, part_.replace("</Item>", slot))))[1])


def test_a_tpm_of_vmwares(convert):
    item = (
        '<Item ovf:required="false"><rasd:InstanceID>13</rasd:InstanceID>'
        "<rasd:ResourceSubType>vmware.vtpm</rasd:ResourceSubType><rasd:ResourceType>1</rasd:ResourceType></Item>"
    )
    text = edited(VMWARE, ("</VirtualHardwareSection>", f"{item}</VirtualHardwareSection>"))
    assert convert(text, lax=False)[0]["MY.VMPARAM_vm_TPM"] == "true"


@pytest.mark.parametrize(
    ("unit", "quantity", "mib", "why"),
    [
        ("", 768, 768, "is taken for MiB"), ("byte * 1024 * 1024", 768, 768, ""), ("byte*2^20", 768, 768, ""),
        ("GigaBytes", 2, 2048, ""),
    ],
)  # fmt: skip
def test_units_of_memory(convert, unit, quantity, mib, why):
    element = f"<rasd:AllocationUnits>{unit}</rasd:AllocationUnits>" if unit else ""
    megabytes = "<rasd:AllocationUnits>MegaBytes</rasd:AllocationUnits>"
    read, said = convert(edited(samples.VBOX, (megabytes, element), (">768<", f">{quantity}<")))
    assert read["vm_memory"] == str(mib)
    assert why in changed(said)


def test_memory_says_what_the_package_does_not(convert):
    """The option that is named helps."""
    text = edited(samples.VBOX, ("MegaBytes", "heaps"))
    assert "--memory" in convert(text, status=1)[1]
    assert convert(text, "--memory", "1G")[0]["vm_memory"] == "1024"


@pytest.mark.parametrize(
    "capacity", ['ovf:capacity="20" ovf:capacityAllocationUnits="byte * 2^30"', 'ovf:capacity="21474836480"']
)
def test_an_empty_disk_is_made_where_the_job_runs(convert, capacity):
    item = (
        "<Item><rasd:HostResource>/disk/empty</rasd:HostResource><rasd:InstanceID>8</rasd:InstanceID>"
        "<rasd:AddressOnParent>1</rasd:AddressOnParent><rasd:Parent>3</rasd:Parent>"
        "<rasd:ResourceType>17</rasd:ResourceType></Item>"
    )
    text = edited(
        samples.VBOX,
        ("</DiskSection>", f'<Disk {capacity} ovf:diskId="empty"/></DiskSection>'),
        ("</VirtualHardwareSection>", f"{item}</VirtualHardwareSection>"),
    )
    read, said = convert(text, lax=False)
    assert read["vm_disk"] == "box-disk001.qcow2:hda:w:qcow2"
    assert read["MY.VMPARAM_vm_Data_Disk"] == '"hdb:20480M"'
    assert "an empty disk of 20480 MiB" in said


def test_everything_is_told_of(convert):
    """An element that nobody expects shows up, wherever it is."""
    for place in ("</Envelope>", "</VirtualSystem>", "</VirtualHardwareSection>", "</Item>", "</DiskSection>"):
        text = samples.VBOX.replace(place, f"<Surprise>secret</Surprise>{place}", 1)
        _, said = convert(text, "--convert", "--force")
        assert "Surprise secret" in part(said, Outcome.NOT_USED), place


@pytest.mark.parametrize(
    ("kind", "model"), [("VmxNet3 virtio", "virtio"), ("VmxNet3,E1000", "e1000"), ("e1000e", "e1000e")]
)
def test_of_several_kinds_of_nic_one_is_taken(convert, kind, model):
    read, said = convert(samples.VBOX.replace("E1000", kind), "--convert")
    assert read.get("MY.VMPARAM_vm_NICs", '"nat:virtio"') == f'"nat:{model}"'
    assert "NIC" not in lost(said)


def test_one_of_several_systems(convert):
    second = samples.VBOX[samples.VBOX.index("<VirtualSystem") : samples.VBOX.index("</Envelope>")]
    second = second.replace('"box"', '"other"')
    text = samples.VBOX.replace("</Envelope>", f"{second}</Envelope>")
    assert "box, other" in convert(text, "--convert", status=1)[1]
    assert convert(text, "--convert", "--system", "other")[0]["executable"] == "other"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('ovf:href="box-disk001.vmdk"', 'ovf:href="../secret.vmdk"', "not a regular file in"),
        ('ovf:href="box-disk001.vmdk"', 'ovf:href="/etc/hostname"', "not a regular file in"),
        ('ovf:href="box-disk001.vmdk"', 'ovf:href="file:///etc/hostname"', "not a regular file in"),
        ('ovf:href="box-disk001.vmdk"', 'ovf:href="link.vmdk"', "and would go with the job"),
        ('ovf:href="box-disk001.vmdk"', 'ovf:href="box.vmdk.gz" ovf:compression="gzip"', "begins like gzip"),
        ("MegaBytes", "byte * 2^99999", "no unit"),
        ("MegaBytes", "byte * 2^\N{SUPERSCRIPT TWO}", "no unit"),
        ("</Envelope>", "", "not XML"),
        ("<Envelope", "<!DOCTYPE x SYSTEM 'file:///etc/hostname'><Envelope", "document type"),
        ("<Envelope", "<!DOCTYPE x [<!ENTITY a 'b'>]><Envelope", "document type"),
    ],
)
def test_hostile_descriptors_are_refused(home, convert, old, new, said):
    (home.parent / "secret.vmdk").write_bytes(b"x")
    (home / "link.vmdk").symlink_to("/etc/hostname")
    (home / "box.vmdk.gz").write_bytes(gzip.compress(b"x" * 9000))
    assert old in samples.VBOX
    assert said in convert(samples.VBOX.replace(old, new, 1), "--convert", status=1)[1]
    assert not list(home.glob("*.qcow2*"))


def test_a_snapshot_of_a_stranger_is_refused(home, convert):
    """The backing file of a stranger's image would be a file of the person who submits it."""
    (home / "secret.raw").write_bytes(bytes(1 << 20))
    samples.overlay("box-disk001.vmdk", home / "secret.raw", on_form="raw")
    for more in ([], ["--convert"]):
        assert "overlay of" in convert(samples.VBOX.replace("vmdk.html#streamOptimized", "qcow2"), *more, status=1)[1]
    assert not list(home.glob("*.qcow2*"))


# --- XML


def test_xml_is_read_within_limits():
    with pytest.raises(SubmitError, match="MiB"):
        xml_input.read(b"<a>" + b" " * xml_input.LARGEST + b"</a>", "x")
    with pytest.raises(SubmitError, match="too large"):
        xml_input.read(b"<a>" + b"<b/>" * xml_input.MOST + b"</a>", "x")
    with pytest.raises(SubmitError, match="depth"):
        xml_input.read(b"<a>" * 300 + b"</a>" * 300, "x")
    with pytest.raises(SubmitError, match="document type"):
        xml_input.read("\ufeff<!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;</a>".encode("utf-16-le"), "x")


# --- archives


@pytest.mark.parametrize("others", [{}, {"other.vmdk": b"x", ".profile": b"x"}], ids=["none", "some"])
def test_of_an_archive_only_what_the_descriptor_names_is_written(home, disk, submit, others):
    ova(home, {"box-disk001.vmdk": disk, **others})
    read, _ = submit("ovf", "box.ova", "--convert")
    assert read["transfer_input_files"] == f"{home}/box-disk001.qcow2"
    assert sorted(path.name for path in home.iterdir()) == ["box-disk001.qcow2", "box.ova"]
    assert (home / "box-disk001.qcow2").read_bytes()[:4] == b"QFI\xfb"


def test_a_file_that_two_disks_name_is_taken_out_for_neither(home, disk, refused):
    item = "<Item><rasd:HostResource>/disk/vmdisk1</rasd:HostResource><rasd:ResourceType>17</rasd:ResourceType></Item>"
    text = edited(samples.VBOX, ("</VirtualHardwareSection>", f"{item}</VirtualHardwareSection>"))
    ova(home, {"box-disk001.vmdk": disk}, ovf=text)
    assert "is the image of two disks" in refused("ovf", "box.ova")
    assert [path.name for path in home.iterdir()] == ["box.ova"]


@pytest.mark.parametrize("algorithm", ["SHA1", "SHA256"])
def test_the_manifest_is_checked(home, disk, submit, algorithm, refused):
    manifest = f"{algorithm}(box-disk001.vmdk)= {hashlib.new(algorithm, disk).hexdigest()}\n".encode()
    ova(home, {"box-disk001.vmdk": disk, "box.mf": manifest})
    submit("ovf", "box.ova", "--convert")
    os.unlink("box-disk001.qcow2")
    ova(home, {"box.mf": manifest, "box-disk001.vmdk": disk[:-1] + b"x"})
    assert "manifest" in refused("ovf", "box.ova", "--convert")
    assert [path.name for path in home.iterdir()] == ["box.ova"]


def entry(name="box-disk001.vmdk", kind=tarfile.REGTYPE, link="", size=0):
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, size
    return info


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([entry(kind=tarfile.SYMTYPE, link="/etc/passwd")], "regular file"),
        ([entry(kind=tarfile.LNKTYPE, link="/etc/passwd")], "regular file"),
        ([entry(kind=tarfile.FIFOTYPE)], "regular file"),
        ([entry(kind=tarfile.CHRTYPE)], "regular file"),
        ([entry(name="../box-disk001.vmdk")], "has a file"),
        ([entry(name="/tmp/box-disk001.vmdk")], "has a file"),
        ([entry(name="a\nb.vmdk")], "has a file"),
        ([entry(name="././@LongLink", kind=tarfile.GNUTYPE_LONGNAME, size=1 << 20), entry()], "headers are too long"),
        ([entry(name=f"{number}.txt") for number in range(1200)], "more than 1000"),
    ],
    ids=["symlink", "link", "fifo", "device", "above", "absolute", "two lines", "huge header", "many"],
)
def test_hostile_members_are_refused(home, refused, more, said):
    ova(home, {}, *more)
    assert said in refused("ovf", "box.ova", "--convert")
    assert [path.name for path in home.iterdir()] == ["box.ova"]


@pytest.mark.parametrize("form", ["gnu", "posix"])
def test_an_archive_without_the_holes_of_its_disk_is_read(home, submit, form):
    """As vagrant-libvirt once made its boxes."""
    with open(home / "disk.img", "wb") as file:
        for place, content in ((3 << 20, b"a" * 70_000), (9 << 20, b"b" * 4096)):
            file.seek(place)
            file.write(content)
        file.truncate(20 << 20)
    whole = (home / "disk.img").read_bytes()
    (home / "box.ovf").write_text(samples.VBOX.replace("box-disk001.vmdk", "disk.img"))
    subprocess.run(["tar", f"--format={form}", "-Scf", "box.ova", "box.ovf", "disk.img"], check=True)
    assert (home / "box.ova").stat().st_size < 1 << 20
    os.rename(home / "disk.img", home / "original")
    assert submit("ovf", "box.ova", lax=False)[0]["vm_disk"] == "disk.img:hda:w:raw"
    assert (home / "disk.img").read_bytes() == whole


@pytest.mark.parametrize("pieces", [[(0, 600)], [(300, 100), (200, 100)], [(-1, 5)], [(0, -1)], [(1 << 60, 1)]])
def test_holes_that_make_no_sense_are_refused(pieces):
    member = entry(size=512)
    member.sparse = pieces
    with pytest.raises(ValueError, match="holes"):
        ovf._stored(member)


def test_an_archive_that_promises_more_than_it_has_is_refused(home, disk, refused):
    ova(home, {"box-disk001.vmdk": disk})
    data = (home / "box.ova").read_bytes()
    (home / "box.ova").write_bytes(data[: len(data) // 2])
    assert "ends in the middle" in refused("ovf", "box.ova", "--convert")


def test_what_an_archive_left_is_removed_where_nothing_comes_of_it(home, disk, refused):
    ova(home, {"box-disk001.vmdk": disk})
    refused("ovf", "box.ova", "--append", "nonsense")
    shared = "<Hardware><SharedFolder name='x'/></Hardware>"
    ova(home, {"box-disk001.vmdk": disk}, ovf=edited(samples.VBOX, ("<Hardware/>", shared)))
    refused("ovf", "box.ova", lax=False)
    assert [path.name for path in home.iterdir()] == ["box.ova"]


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT], ids=["GNU", "pax"])
def test_a_long_name_is_read(home, disk, submit, form):
    """By both ways in which tar files have it."""
    name = "n" * 150 + ".vmdk"
    members = {"box.ovf": samples.VBOX.replace("box-disk001.vmdk", name).encode(), name: disk}
    samples.tar(home / "box.ova", members, form=form)
    submit("ovf", "box.ova", "--convert")


def test_a_gzipped_archive_is_no_archive(home, refused):
    (home / "box.ova").write_bytes(gzip.compress(b"x" * 1000))
    assert "unpack it first" in refused("ovf", "box.ova")
