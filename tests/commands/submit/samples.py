"""Files such as other programs write them, made small: what the tests of `vmgahp submit` read."""

from __future__ import annotations

import io
import re
import subprocess
import tarfile
from pathlib import Path

from vmgahp.commands.submit.report import Outcome

DOMAIN = """\
<domain type='kvm' id='4'>
  <name>web server</name>
  <uuid>5a4d1f5e-9f4a-4f6f-8f3b-0c6c1d2f3a4b</uuid>
  <metadata><app:os xmlns:app='http://example.org/'><app:x/></app:os></metadata>
  <memory unit='KiB'>1048576</memory>
  <currentMemory unit='KiB'>1048576</currentMemory>
  <vcpu placement='static'>4</vcpu>
  <os>
    <type arch='x86_64' machine='pc-q35-7.2'>hvm</type>
    <loader readonly='yes' type='pflash'>/usr/share/OVMF/OVMF_CODE_4M.fd</loader>
    <nvram>/var/lib/libvirt/qemu/nvram/web_VARS.fd</nvram>
    <boot dev='hd'/>
  </os>
  <features><acpi/><apic/><hyperv mode='custom'><relaxed state='on'/></hyperv></features>
  <cpu mode='host-passthrough'><topology sockets='1' dies='1' cores='2' threads='2'/></cpu>
  <on_crash>destroy</on_crash>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <disk type='file' device='disk'>
      <driver name='qemu' type='qcow2' cache='none'/><source file='DIR/disk.qcow2'/><target dev='vda' bus='virtio'/>
      <address type='pci' domain='0x0000' bus='0x04' slot='0x00' function='0x0'/>
    </disk>
    <disk type='file' device='cdrom'>
      <driver name='qemu' type='raw'/><source file='DIR/seed.iso'/><target dev='sda' bus='sata'/><readonly/>
    </disk>
    <disk type='block' device='disk'><source dev='/dev/vg/data'/><target dev='vdb' bus='virtio'/></disk>
    <interface type='network'>
      <mac address='52:54:00:AA:BB:01'/><source network='default'/><model type='virtio'/>
    </interface>
    <interface type='bridge'>
      <mac address='52:54:00:aa:bb:02'/><source bridge='br0'/><model type='e1000'/><link state='down'/>
    </interface>
    <interface type='direct'><source dev='eth0' mode='bridge'/></interface>
    <graphics type='vnc' port='5900' autoport='yes' listen='0.0.0.0'/>
    <sound model='ich9'/>
    <tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm>
    <hostdev mode='subsystem' type='usb'><source><vendor id='0x1'/><product id='0x2'/></source></hostdev>
  </devices>
</domain>
"""

VBOX = """\
<?xml version="1.0"?>
<Envelope ovf:version="1.0" xml:lang="en-US" xmlns="http://schemas.dmtf.org/ovf/envelope/1"
  xmlns:ovf="http://schemas.dmtf.org/ovf/envelope/1"
  xmlns:rasd="http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_ResourceAllocationSettingData"
  xmlns:vbox="http://www.virtualbox.org/ovf/machine">
  <References><File ovf:id="file1" ovf:href="box-disk001.vmdk"/></References>
  <DiskSection><Info>Disks</Info>
    <Disk ovf:capacity="1048576" ovf:diskId="vmdisk1" ovf:fileRef="file1"
      ovf:format="http://www.vmware.com/interfaces/specifications/vmdk.html#streamOptimized"/>
  </DiskSection>
  <NetworkSection><Info>Nets</Info><Network ovf:name="NAT"/></NetworkSection>
  <VirtualSystem ovf:id="box">
    <Info>A virtual machine</Info>
    <ProductSection><Info>About</Info><Product>Box</Product></ProductSection>
    <EulaSection><Info>Licence</Info><License>Read this.</License></EulaSection>
    <VirtualHardwareSection>
      <Info>Hardware</Info>
      <Item><rasd:Caption>2 virtual CPU</rasd:Caption><rasd:InstanceID>1</rasd:InstanceID>
        <rasd:ResourceType>3</rasd:ResourceType><rasd:VirtualQuantity>2</rasd:VirtualQuantity></Item>
      <Item><rasd:AllocationUnits>MegaBytes</rasd:AllocationUnits><rasd:InstanceID>2</rasd:InstanceID>
        <rasd:ResourceType>4</rasd:ResourceType><rasd:VirtualQuantity>768</rasd:VirtualQuantity></Item>
      <Item><rasd:Address>0</rasd:Address><rasd:Caption>ideController0</rasd:Caption>
        <rasd:InstanceID>3</rasd:InstanceID><rasd:ResourceSubType>PIIX4</rasd:ResourceSubType>
        <rasd:ResourceType>5</rasd:ResourceType></Item>
      <Item><rasd:AddressOnParent>0</rasd:AddressOnParent><rasd:HostResource>/disk/vmdisk1</rasd:HostResource>
        <rasd:InstanceID>5</rasd:InstanceID><rasd:Parent>3</rasd:Parent>
        <rasd:ResourceType>17</rasd:ResourceType></Item>
      <Item><rasd:Caption>Ethernet adapter on 'NAT'</rasd:Caption><rasd:Connection>NAT</rasd:Connection>
        <rasd:InstanceID>6</rasd:InstanceID><rasd:ResourceSubType>E1000</rasd:ResourceSubType>
        <rasd:ResourceType>10</rasd:ResourceType></Item>
      <Item><rasd:Caption>sound</rasd:Caption><rasd:InstanceID>7</rasd:InstanceID>
        <rasd:ResourceSubType>ensoniq1371</rasd:ResourceSubType><rasd:ResourceType>35</rasd:ResourceType></Item>
    </VirtualHardwareSection>
    <vbox:Machine ovf:required="false"><Hardware/></vbox:Machine>
  </VirtualSystem>
</Envelope>
"""

VMX = """\
.encoding = "UTF-8"
config.version = "8"
virtualHW.version = "19"
displayName = "my machine"
guestOS = "debian11-64"
memsize = "2048"
numvcpus = "4"
cpuid.coresPerSocket = "2"
firmware = "efi"
sata0.present = "TRUE"
sata0:0.present = "TRUE"
sata0:0.fileName = "machine.vmdk"
sata0:1.present = "TRUE"
sata0:1.deviceType = "cdrom-raw"
sata0:1.fileName = "auto detect"
ethernet0.present = "TRUE"
ethernet0.connectionType = "nat"
ethernet0.virtualDev = "e1000e"
ethernet0.addressType = "static"
ethernet0.address = "00:50:56:01:02:03"
ethernet1.present = "FALSE"
ethernet1.virtualDev = "vmxnet3"
sound.present = "TRUE"
sound.virtualDev = "hdaudio"
pciPassthru0.present = "TRUE"
serial0.present = "TRUE"
serial0.fileType = "pipe"
serial0.fileName = "/tmp/console"
"""

VAGRANTFILE = """\
# -*- mode: ruby -*-
Vagrant.configure("2") do |config|
  config.vm.provider :libvirt do |libvirt|
    libvirt.memory = 4 * 1024
  end
end
"""

SOURCES = (
    ("libvirt-xml", "domain.xml", "--lax"),
    ("ovf", "box.ova", "--convert", "--lax"),
    ("vmx", "machine.vmx", "--convert", "--lax"),
    ("box", "web.box", "--memory", "1G", "--cpus", "2"),
    ("disk", "disk.qcow2", "seed.iso", "--memory", "1G", "--network", "user", "--name", "plain"),
)
"""Command lines that work in a directory that `write_sources` filled."""


def image(path: Path, form: str, *options: str) -> None:
    """A small image; one of a form that is only written at once is converted from nothing."""
    if options:
        raw = path.with_suffix(".empty")
        raw.write_bytes(b"\1" * 65536 + bytes(1 << 20))
        command = ["convert", "-f", "raw", "-O", form, *options, str(raw), str(path)]
    else:
        command = ["create", "-q", "-f", form, str(path), "1M"]
    subprocess.run(["qemu-img", *command], check=True, capture_output=True)


def overlay(path: str, on: object, form: str = "qcow2", on_form: str = "qcow2", *, is_there: bool = True) -> None:
    """An image upon another one, which perhaps only the execute machine has."""
    command = ["qemu-img", "create", "-q", "-f", form, "-b", str(on), "-F", on_form]
    subprocess.run([*command, path] if is_there else [*command, "-u", path, "1M"], check=True)


def stream(path: Path) -> None:
    """A compressed VMDK, as exporters write it."""
    image(path, "vmdk", "-o", "subformat=streamOptimized")


def tar(path: Path, members: dict[str, bytes], *more: tarfile.TarInfo, form: int = tarfile.USTAR_FORMAT) -> None:
    """An archive of plain files, in this order, and behind them members with headers of one's own; a .box is packed."""
    with tarfile.open(path, "w:gz" if path.suffix == ".box" else "w", format=form) as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        for member in more:
            archive.addfile(member, io.BytesIO(bytes(member.size)))


def write_sources(directory: Path) -> None:
    """Everything that `SOURCES` names."""
    image(directory / "disk.qcow2", "qcow2")
    (directory / "seed.iso").write_bytes(bytes(4096))
    (directory / "domain.xml").write_text(DOMAIN.replace("DIR/", ""))
    stream(directory / "box-disk001.vmdk")
    data = (directory / "box-disk001.vmdk").read_bytes()
    packed = VBOX.replace("box-disk001", "appliance-disk001").encode()
    tar(directory / "box.ova", {"box.ovf": packed, "appliance-disk001.vmdk": data})
    (directory / "box.ovf").write_text(VBOX)
    metadata = b'{"provider": "libvirt", "format": "qcow2", "virtual_size": 1}'
    members = {"metadata.json": metadata, "Vagrantfile": VAGRANTFILE.encode()}
    tar(directory / "web.box", members | {"box.img": (directory / "disk.qcow2").read_bytes()})
    image(directory / "machine.vmdk", "vmdk")
    (directory / "machine.vmx").write_text(VMX)


def part(said: str, outcome: Outcome) -> str:
    """The lines of a report with this outcome, empty for none."""
    found = re.search(rf"^{outcome.value.capitalize()} \(\d+\):\n((?:  .*\n)*)", said, re.MULTILINE)
    return found[1] if found else ""


def lost(said: str) -> str:
    """What the command says is left out."""
    return part(said, Outcome.LOST)


def changed(said: str) -> str:
    """What it says is changed."""
    return part(said, Outcome.CHANGED)
