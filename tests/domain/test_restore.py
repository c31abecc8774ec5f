"""The XML of a restore: ours, with the saved hardware, and nothing else of what the image says."""

import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lxml import etree

from tests.domain import support
from tests.domain.support import disk
from vmgahp.domain import build as domain_xml
from vmgahp.domain.restore import LARGEST, MOST_DEVICES, SavedMismatch, reconcile, reconcile_xen
from vmgahp.images.formats import BackingFile
from vmgahp.job.spec import JobSpec, Nic

UUID = "18b0b959-737e-4ba1-983e-ef517357615e"

SAVED = f"""\
<domain type='kvm'>
  <name>alice_lab_7.3</name>
  <uuid>{UUID}</uuid>
  <memory unit='KiB'>65536</memory>
  <currentMemory unit='KiB'>65536</currentMemory>
  <vcpu placement='static'>2</vcpu>
  <resource><partition>/machine</partition></resource>
  <os><type arch='x86_64' machine='pc-i440fx-7.2'>hvm</type></os>
  <features><acpi/><apic/><pae/></features>
  <cpu mode='host-passthrough' check='none' migratable='on'/>
  <clock offset='utc'/>
  <on_poweroff>destroy</on_poweroff>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <disk type='file' device='disk'><driver name='qemu' type='qcow2'/>
      <source file='/old/root.qcow2'><seclabel model='dac' relabel='no'/></source><backingStore type='file'>
      <format type='raw'/><source file='/old/base.img'/><backingStore/></backingStore><target dev='vda' bus='virtio'/>
      <boot order='1'/><address type='pci' domain='0x0000' bus='0x00' slot='0x05' function='0x0'/></disk>
    <disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='/old/data.img'/><backingStore/>
      <target dev='sdb' bus='scsi'/><readonly/><address type='drive' controller='0' bus='0' target='0' unit='1'/>
      </disk>
    <controller type='scsi' index='0' model='virtio-scsi'>
      <address type='pci' domain='0x0000' bus='0x00' slot='0x04' function='0x0'/></controller>
    <controller type='usb' index='0' model='piix3-uhci'>
      <address type='pci' domain='0x0000' bus='0x00' slot='0x01' function='0x2'/></controller>
    <controller type='pci' index='0' model='pci-root'/>
    <interface type='user'><mac address='52:54:00:53:d3:f5'/><model type='virtio'/>
      <address type='pci' domain='0x0000' bus='0x00' slot='0x03' function='0x0'/></interface>
    <serial type='unix'><source mode='connect' path='/old/console'/>
      <target type='isa-serial' port='0'><model name='isa-serial'/></target></serial>
    <console type='unix'><source mode='connect' path='/old/console'/><target type='serial' port='0'/></console>
    <input type='mouse' bus='ps2'/>
    <input type='keyboard' bus='ps2'/>
    <graphics type='vnc' port='5900' autoport='yes' listen='0.0.0.0' passwd='oldsecret'>
      <listen type='address' address='0.0.0.0'/></graphics>
    <audio id='1' type='none'/>
    <video><model type='cirrus' vram='16384' heads='1' primary='yes'/>
      <address type='pci' domain='0x0000' bus='0x00' slot='0x02' function='0x0'/></video>
    <memballoon model='virtio'><address type='pci' domain='0x0000' bus='0x00' slot='0x06' function='0x0'/>
      </memballoon>
  </devices>
  <seclabel type='static' model='dac' relabel='yes'><label>+0:+0</label></seclabel>
</domain>
"""

DISKS = (
    disk("/scratch/root.qcow2", format="qcow2", backing=(BackingFile("/shared/base.img", "raw"),)),
    disk("/shared/data.img", "sdb", writable=False, transferred=False),
)


def spec(**changes: object) -> JobSpec:
    ours = {"vcpus": 2, "disks": DISKS, "nics": (Nic("user"),), "vnc": True, "checkpoint": True}
    return support.spec(**ours | changes)


def host(**changes: object) -> domain_xml.Host:
    ours = {"uuid": UUID, "dac_label": "+54321:+54321", "console_socket": "/run/vmgahp/new/console"}
    return support.host(**ours | {"vnc_password": "newsecre"} | changes)


OURS = domain_xml.build(spec(), host()).replace(" />", "/>")


@pytest.fixture(autouse=True)
def on_x86(monkeypatch: pytest.MonkeyPatch) -> None:
    """The saved VM is one of x86_64, wherever the tests run."""
    monkeypatch.setattr("vmgahp.domain.restore.os.uname", lambda: SimpleNamespace(machine="x86_64"))


def result(saved: str = SAVED, ours: str = OURS) -> etree._Element:
    return etree.fromstring(reconcile(saved, ours))


def refused(saved: str, ours: str = OURS) -> str:
    with pytest.raises(SavedMismatch) as raised:
        reconcile(saved, ours)
    return str(raised.value)


def with_device(xml: str) -> str:
    return SAVED.replace("<input type='mouse'", f"{xml}<input type='mouse'")


def changed(old: str, new: str, text: str = SAVED) -> str:
    assert old in text
    return text.replace(old, new)


# What is taken over


def test_the_hardware_is_the_saved_one_and_all_of_the_host_ours() -> None:
    domain = result()
    assert domain.findtext("uuid") == UUID
    assert dict(domain.find("os/type").attrib) == {"arch": "x86_64", "machine": "pc-i440fx-7.2"}
    assert dict(domain.find("cpu").attrib) == {"mode": "host-passthrough", "check": "none", "migratable": "on"}
    assert domain.find("devices/interface/mac").get("address") == "52:54:00:53:d3:f5"
    slots = {
        (device.tag, device.get("type")): device.find("address").get("slot")
        for device in domain.find("devices")
        if device.find("address") is not None and device.find("address").get("type") == "pci"
    }
    assert slots == {
        ("disk", "file"): "0x05", ("controller", "scsi"): "0x04", ("controller", "usb"): "0x01",
        ("interface", "user"): "0x03", ("video", None): "0x02", ("memballoon", None): "0x06",
    }  # fmt: skip
    assert domain.find("devices/disk[2]/address").get("unit") == "1"
    assert domain.find("devices/video/model").get("vram") == "16384"
    text = reconcile(SAVED, OURS)
    for theirs in ("/old", "oldsecret", "0.0.0.0", "emulator", "+0:+0", "5900", "/machine"):
        assert theirs not in text
    domain = etree.fromstring(text)
    assert [source.get("file") for source in domain.iterfind("devices/disk//source")] == [
        "/scratch/root.qcow2",
        "/shared/base.img",
        "/shared/data.img",
    ]
    assert domain.find("devices/serial/source").get("path") == "/run/vmgahp/new/console"
    assert domain.find("devices/graphics").get("passwd") == "newsecre"
    assert domain.findtext("seclabel/label") == "+54321:+54321"


def test_the_uuid_and_the_order_are_the_saved_ones_each_time() -> None:
    assert result(SAVED, OURS.replace(f"<uuid>{UUID}</uuid>", "")).findtext("uuid") == UUID
    assert [device.tag for device in result().find("devices")] == [
        *("disk", "disk", "controller", "controller", "controller", "interface", "serial"),
        *("input", "input", "graphics", "video", "memballoon"),
    ]
    once = reconcile(SAVED, OURS)
    assert reconcile(once, OURS) == once


@pytest.mark.parametrize("saved", ["", "<panic model='isa'><address type='isa' iobase='0x505'/></panic>"])
def test_a_vm_that_was_saved_without_a_panic_device_goes_on_without(saved: str) -> None:
    ours = domain_xml.build(spec(), host(panic="isa"))
    assert len(result(with_device(saved), ours).findall("devices/panic/address")) == bool(saved)
    assert len(result(with_device(saved), ours).findall("devices/panic")) == bool(saved)


AGENT = "<channel type='unix'><source mode='bind' path='/old'/><target type='virtio' name='org.qemu.guest_agent.0'/>{}"
SAVED_AGENT = AGENT.format("<address type='virtio-serial' controller='0' bus='0' port='1'/></channel>")
PORTS = "<controller type='virtio-serial' index='0'><address type='pci' bus='0' slot='0x7'/></controller>"


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("saved", ["", PORTS + SAVED_AGENT])
def test_a_vm_has_a_port_for_an_agent_if_it_was_saved_with_one(saved: str, ours: bool) -> None:
    """Whatever VM_GUEST_AGENT says on this machine."""
    made = result(with_device(saved), domain_xml.build(spec(), host(agent=ours)))
    ports = made.findall("devices/channel")
    assert len(ports) == len(made.findall("devices/channel/address")) == bool(saved)
    assert all(port.get("type") == "unix" and port.find("source") is None for port in ports)


@pytest.mark.parametrize("name", ["org.qemu.guest_agent.1", "org_qemu_guest_agent_0", "com.redhat.spice.0"])
def test_no_other_port_of_a_saved_vm_is_taken_over(name: str) -> None:
    assert name in refused(with_device(PORTS + SAVED_AGENT.replace("org.qemu.guest_agent.0", name)))


def test_a_saved_vm_has_one_port_for_an_agent() -> None:
    assert "second channel" in refused(with_device(PORTS + SAVED_AGENT * 2))


def test_the_cpu_that_host_model_was_resolved_to_is_taken_over() -> None:
    resolved = """<cpu mode='custom' match='exact' check='full'>
      <model fallback='forbid'>EPYC</model><vendor>AMD</vendor>
      <feature policy='require' name='x2apic'/><feature policy='disable' name='svm'/>
      <numa><cell memory='1'/></numa></cpu>"""
    saved = changed("<cpu mode='host-passthrough' check='none' migratable='on'/>", resolved)
    for mode in ("host-model", ""):
        cpu = result(saved, domain_xml.build(spec(), host(cpu_mode=mode))).find("cpu")
        assert [part.tag for part in cpu] == ["model", "vendor", "feature", "feature"]
        assert cpu.findtext("model") == "EPYC"
    assert "CPU mode" in refused(saved)
    saved = changed("<cpu mode='host-passthrough' check='none' migratable='on'/>", "")
    assert result(saved, domain_xml.build(spec(), host(cpu_mode=""))).find("cpu") is None
    assert "default CPU" in refused(saved)


_LIBVIRTS_CPU = """<cpu mode='custom' match='exact' check='full'><model fallback='forbid'>qemu64</model>
    <feature policy='require' name='hypervisor'/><feature policy='disable' name='vmx'/></cpu>"""


@pytest.mark.parametrize(
    ("part", "is_same"),
    [
        ("<model fallback='allow'>qemu64</model><feature policy='optional' name='vmx'/>", True),
        ("<model>qemu64</model><feature policy='disable' name='vmx'/>", True),
        ("<model fallback='allow'>qemu32</model>", False),
        ("<model>qemu64</model><feature policy='require' name='vmx'/>", False),
        ("<model>qemu64</model><feature policy='optional' name='svm'/>", False),
        ("<model>qemu64</model><vendor>AMD</vendor>", False),
    ],
)
def test_what_libvirt_decides_of_a_cpu_is_no_other_cpu(part: str, is_same: bool) -> None:
    saved = re.sub("<cpu [^>]*/>", _LIBVIRTS_CPU, SAVED)
    ours = re.sub("<cpu [^>]*/>", f"<cpu mode='custom' match='exact'>{part}</cpu>", OURS)
    if is_same:
        assert result(saved, ours).find("cpu/model").get("fallback") == "forbid"
    else:
        refused(saved, ours)


def test_q35_brings_root_ports_and_a_watchdog() -> None:
    saved = changed("pc-i440fx-7.2", "pc-q35-7.2")
    saved = changed(
        "<controller type='pci' index='0' model='pci-root'/>",
        """<controller type='pci' index='0' model='pcie-root'/>
        <controller type='pci' index='1' model='pcie-root-port'>
          <model name='pcie-root-port'/><target chassis='1' port='0x10'/><alias name='evil'/>
          <address type='pci' domain='0x0000' bus='0x00' slot='0x02' function='0x0' multifunction='on'/>
        </controller><watchdog model='itco' action='reset'/>""",
        saved,
    )
    devices = result(saved).find("devices")
    port = devices.find("controller[@index='1']")
    assert port.find("model").get("name") == "pcie-root-port"
    assert port.find("target").get("port") == "0x10"
    assert port.find("alias") is None
    assert devices.find("watchdog").get("action") == "reset"
    # It prints the watchdog of a VM, also for a job to give, and does not save it.
    ours = OURS.replace("</devices>", "<watchdog model='itco' action='reset'/></devices>")
    assert result(SAVED, ours).find("devices/watchdog") is not None
    assert "watchdog" in refused(SAVED, ours.replace("itco", "ib700"))


@pytest.mark.parametrize(
    ("wanted", "machine", "fits"),
    [
        *(("pc", "pc-i440fx-7.2", True), ("q35", "pc-i440fx-7.2", False), ("pc-i440fx-7.2", "pc-i440fx-7.2", True)),
        *(("pc-i440fx-7.1", "pc-i440fx-7.2", False), ("", "virt-9.2", True), ("", "isapc", False)),
        *(("q35", "pc-q35-rhel9.4.0", True), ("", "pc-i440fx-7.2,accel=kvm", False)),
    ],
)
def test_machine_types(wanted: str, machine: str, fits: bool) -> None:
    ours = OURS.replace("<type>hvm", f'<type machine="{wanted}">hvm') if wanted else OURS
    saved = changed("pc-i440fx-7.2", machine)
    if fits:
        assert result(saved, ours).find("os/type").get("machine") == machine
    else:
        assert "machine type" in refused(saved, ours)


# What does not fit


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("<domain type='kvm'>", "<domain type='qemu'>", "domain type"),
        ("<name>alice_lab_7.3", "<name>bob_lab_7.3", "bob_lab_7.3"),
        (">65536</memory>", ">65537</memory>", "memory"),
        (">65536</memory>", ">1e9</memory>", "memory"),
        ("<memory unit='KiB'>", "<memory unit='XiB'>", "unit"),
        (">2</vcpu>", ">4</vcpu>", "number of CPUs"),
        (">hvm<", ">exe<", "operating system type"),
        ("arch='x86_64'", "arch='aarch64'", "architecture"),
        ("mode='host-passthrough'", "mode='maximum'", "CPU mode"),
        ("<target dev='vda' bus='virtio'/>", "<target dev='vdb' bus='virtio'/>", "disk vdb"),
        ("<target dev='vda' bus='virtio'/>", "<target dev='vda' bus='sata'/>", "disk vda"),
        ("device='disk'", "device='cdrom'", "disk vda cdrom"),
        ("type='qcow2'", "type='raw'", "format"),
        ("<readonly/>", "", "read-only"),
        ("<interface type='user'>", "<interface type='direct'>", "interface direct"),
        ("<model type='virtio'/>", "<model type='e1000'/>", "e1000"),
        ("model='virtio-scsi'", "model='lsilogic'", "lsilogic"),
        ("<graphics type='vnc'", "<graphics type='spice'", "graphics spice"),
        ("<audio id='1' type='none'/>", "<audio id='1' type='file' path='/etc/passwd'/>", "audio file"),
        ("type='cirrus'", "type='virtio' blob='on;'", "blob"),
        ("model='piix3-uhci'", "model='../x'", "model of controller usb"),
        ("<memballoon model='virtio'>", "<memballoon model='virtio'/><memballoon model='virtio'>", "second"),
        (UUID, "not-a-uuid", "UUID"),
        (UUID, "c7a5fdbd-edaf-9455-926a-d65c16db1809", "UUID"),
        ("check='none'", "check='perhaps'", "check of CPU"),
        ("</os>", "<loader>/etc/shadow</loader></os>", "loader"),
        ("</os>", "<nvram>/x</nvram></os>", "nvram"),
        ("</os>", "<kernel>/x</kernel></os>", "kernel"),
    ],
)
def test_what_is_not_the_jobs_is_named(old: str, new: str, said: str) -> None:
    assert said in refused(changed(old, new))


@pytest.mark.parametrize(
    "device",
    [
        "<hostdev mode='subsystem' type='pci'><source><address bus='0x01'/></source></hostdev>",
        "<filesystem type='mount'><source dir='/'/><target dir='host'/></filesystem>",
        "<disk type='file' device='disk'><source file='/etc/shadow'/><target dev='vdz' bus='virtio'/></disk>",
        "<disk type='block' device='disk'><source dev='/dev/sda'/><target dev='vda' bus='virtio'/></disk>",
        "<serial type='file'><source path='/etc/cron.d/x'/><target port='1'/></serial>",
        "<serial type='dev'><source path='/dev/mem'/><target port='0'/></serial>",
        "<parallel type='file'><source path='/root/x'/><target port='0'/></parallel>",
        "<channel type='unix'><source mode='bind' path='/x'/><target type='virtio' name='a'/></channel>",
        "<console type='file'><source path='/x'/><target type='virtio' port='1'/></console>",
        "<interface type='bridge'><source bridge='br0'/></interface>",
        "<interface type='user'><mac address='52:54:00:00:00:01'/><model type='virtio'/></interface>",
        "<redirdev bus='usb' type='tcp'><source mode='connect' host='localhost' service='1'/></redirdev>",
        "<rng model='virtio'><backend model='random'>/dev/sda</backend></rng>",
        "<tpm model='tpm-tis'><backend type='passthrough'><device path='/dev/tpm0'/></backend></tpm>",
        "<shmem name='other'><model type='ivshmem-plain'/></shmem>",
        "<memory model='nvdimm'><source><path>/etc/shadow</path></source></memory>",
        "<input type='passthrough' bus='virtio'><source evdev='/dev/input/event0'/></input>",
        "<input type='evdev'><source dev='/dev/input/event0'/></input>",
        "<watchdog model='i6300esb' action='inject-nmi'/>",
        "<watchdog model='itco' action='dump'/>",
        "<crypto model='virtio' type='qemu'><backend model='lkcf'/></crypto>",
        *("<controller type='xenbus' index='9'/>", "<controller type='usb' index='0' model='piix3-uhci'/>"),
        *("<video><model type='virtio'/></video>", "<x:input xmlns:x='urn:x' type='mouse' bus='ps2'/>"),
        *("<hub type='usb'/>", "<nothing-yet-known/>"),
    ],
)
def test_no_device_comes_in(device: str) -> None:
    assert refused(with_device(device))


def test_a_display_adapter_needs_a_display_or_the_job_to_ask_for_it() -> None:
    saved = changed("<graphics type='vnc'", "<audio type='none'/><graphics type='vnc'")
    saved = saved[: saved.index("<graphics")] + saved[saved.index("<audio id") :]
    assert "video" in refused(saved, domain_xml.build(spec(vnc=False), host()))
    saved = changed("<model type='cirrus' vram='16384' heads='1' primary='yes'/>", "<model type='ramfb'/>")
    assert "'ramfb'" in refused(saved)
    ours = OURS.replace("</devices>", '<video><model type="ramfb"/></video></devices>')
    assert result(saved, ours).find("devices/video/model").get("type") == "ramfb"
    more = (*DISKS, disk("/scratch/new.img", "vdc"))
    assert "no disk vdc" in refused(SAVED, domain_xml.build(spec(disks=more), host()))


@pytest.mark.parametrize(
    ("device", "goes_without"),
    [
        ("<controller type='pci' index='0' model='pci-root'/>", True),
        ("<controller type='usb' index='0' model='piix3-uhci'/>", True),
        ("<input type='keyboard' bus='ps2'/>", True),
        ("<controller type='pci' index='1' model='pci-bridge'/>", False),
        ("<controller type='usb' index='0' model='qemu-xhci'/>", False),
        ("<controller type='usb' index='1' model='piix3-uhci'/>", False),
        ("<input type='tablet' bus='usb'/>", False),
    ],
)
def test_what_libvirt_leaves_out_of_a_saved_vm_the_job_may_ask_for(device: str, goes_without: bool) -> None:
    bare = SAVED
    for kind in ("controller type='(?:usb|pci)'", "input"):
        bare = re.sub(f"<({kind})[^>]*(/>|>.*?</(controller|input)>)", "", bare, flags=re.DOTALL)
    ours = OURS.replace("</devices>", device + "</devices>")
    if goes_without:
        tag = etree.fromstring(device)
        assert dict(result(bare, ours).find(f"devices/{tag.tag}[@type='{tag.get('type')}']").attrib) == dict(tag.attrib)
    else:
        assert "the job gives it one now" in refused(bare, ours)


def test_a_mac_address_that_the_job_has_chosen() -> None:
    ours = domain_xml.build(spec(nics=(Nic("user", "52:54:00:00:00:01"),)), host())
    assert "interface user" in refused(SAVED, ours)
    same = OURS.replace('<model type="virtio"/>', '<mac address="52:54:00:53:D3:F5"/><model type="virtio"/>')
    assert result(SAVED, same).find("devices/interface/mac") is not None
    for bad in ("01:00:5e:00:00:01", "00:00:00:00:00:00", "52:54:00:53:d3", "52:54:00:53:d3:f5 onerror"):
        assert refused(changed("52:54:00:53:d3:f5", bad))


@pytest.mark.parametrize(
    "extra",
    [
        "<qemu:commandline xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>"
        "<qemu:arg value='-drive file=/etc/shadow'/></qemu:commandline>",
        "<sysinfo type='fwcfg'><entry name='x' file='/etc/shadow'/></sysinfo>",
        "<memoryBacking><hugepages/></memoryBacking>",
        "<metadata><x:x xmlns:x='urn:x'>/etc/shadow</x:x></metadata>",
        "<seclabel type='none' model='apparmor'/>",
        "<launchSecurity type='sev'/>",
        "<iothreads>99</iothreads>",
        "<on_crash>coredump-restart</on_crash>",
        "<devices><hostdev mode='subsystem' type='usb'/></devices>",
    ],
)
def test_nothing_else_comes_in(extra: str) -> None:
    saved = changed("<clock", f"{extra}<clock")
    try:
        assert reconcile(saved, OURS) == reconcile(SAVED, OURS)
    except SavedMismatch as mismatch:
        assert "hostdev" in str(mismatch)  # noqa: PT017 - either answer is right


@pytest.mark.parametrize(
    "text",
    [
        *("", "<domain", "<network/>", "<domain/>", "\0", "\ud800"),
        '<?xml version="1.0" encoding="utf-16"?><domain/>',
        "<!DOCTYPE domain [<!ENTITY a SYSTEM 'file:///etc/shadow'>]><domain>&a;</domain>",
        "<!DOCTYPE d [<!ENTITY a 'ha'><!ENTITY b '&a;&a;&a;&a;'>]>" + SAVED.replace("mouse", "&b;"),
        SAVED.replace("<clock", " " * LARGEST + "<clock"),
        "<domain>" * 1000 + "</domain>" * 1000,
        with_device("<input type='mouse' bus='ps2'/>" * (MOST_DEVICES + 1)),
        with_device("&undefined;"),
        # libvirtd makes every controller up to the one that an address names, and a table of PCI buses of that length.
        changed("controller='0' bus='0'", "controller='99999999' bus='0'"),
        changed("controller='0' bus='0'", "controller='0x5f5e0ff' bus='0'"),
        changed("controller='0' bus='0'", "controller='0' bus='0xffffffff'"),
        changed("type='pci' index='0'", "type='pci' index='999999999'"),
        changed("type='scsi' index='0'", "type='scsi' index='256'"),
    ],
)
def test_what_is_no_xml_of_a_domain_or_has_numbers_for_which_libvirtd_runs_out_of_memory(text: str) -> None:
    refused(text)


def test_comments_are_dropped_and_addresses_written_anew() -> None:
    assert reconcile(with_device("<!-- <hostdev/> --><?php hostdev ?>"), OURS) == reconcile(SAVED, OURS)
    saved = changed("function='0x2'/>", "function='0x2' path='/etc'><zpci uid='1'/></address>")
    address = result(saved).find("devices/controller[@type='usb']/address")
    assert set(address.attrib) == {"type", "domain", "bus", "slot", "function"}
    assert len(address) == 0
    assert "address" in refused(changed("slot='0x05'", "slot='0x05/'"))
    assert "type 'mdev'" in refused(changed("<address type='drive'", "<address type='mdev'"))


# XML of the administrator's own


SCRIPTED = OURS.replace(
    '<controller type="scsi" index="0" model="virtio-scsi"/>',
    '<emulator>/opt/qemu</emulator><controller type="scsi" model="virtio-scsi"/>'
    '<hostdev mode="subsystem" type="pci" managed="yes"><source><address domain="0" bus="1" slot="0" function="0"/>'
    '</source></hostdev><rng model="virtio"><backend model="random">/dev/urandom</backend></rng>'
    '<input type="tablet"/>',
)


def test_devices_of_the_administrators_xml_keep_their_place() -> None:
    saved = with_device(
        "<hostdev mode='subsystem' type='pci' managed='yes'><source><address bus='0x09'/></source>"
        "<address type='pci' domain='0x0000' bus='0x00' slot='0x08' function='0x0'/></hostdev>"
        "<rng model='virtio'><backend model='random'>/dev/sda</backend>"
        "<address type='pci' domain='0x0000' bus='0x00' slot='0x09' function='0x0'/></rng>"
        "<input type='tablet' bus='usb'><address type='usb' bus='0' port='1'/></input>"
    )
    devices = result(saved, SCRIPTED).find("devices")
    assert devices.findtext("emulator") == "/opt/qemu"
    assert devices.find("hostdev/source/address").get("bus") == "1"
    assert devices.find("hostdev/address").get("slot") == "0x08"
    assert devices.findtext("rng/backend") == "/dev/urandom"
    assert devices.find("input[@type='tablet']/address").get("port") == "1"
    assert "no hostdev pci" in refused(SAVED, SCRIPTED)
    ours = etree.fromstring(OURS)
    ours.find("devices/serial").tag = "console"
    devices = result(SAVED, etree.tostring(ours, encoding="unicode")).find("devices")
    assert devices.find("serial") is None
    assert devices.find("console/source").get("path") == "/run/vmgahp/new/console"


def test_a_cpu_feature_that_the_settings_forbid_stays_forbidden() -> None:
    ours = OURS.replace(
        '<cpu mode="host-passthrough"/>',
        '<cpu mode="host-passthrough"><feature policy="disable" name="vmx"/><numa/></cpu>',
    )
    assert "vmx" in refused(SAVED, ours)
    cpu = "<cpu mode='host-passthrough' check='none' migratable='on'"
    assert "vmx" in refused(changed(cpu + "/>", cpu + "><feature policy='force' name='vmx'/></cpu>"), ours)
    kept = result(changed(cpu + "/>", cpu + "><feature policy='disable' name='vmx'/></cpu>"), ours)
    assert [part.tag for part in kept.find("cpu")] == ["feature", "numa"]


# Anything at all


def values(domain: etree._Element) -> set[str]:
    return {value for element in domain.iter() for value in (*element.attrib.values(), element.text or "")}


HARMLESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+:-]{0,63}", re.ASCII)

PLACES = [
    (number, name)
    for number, element in enumerate(etree.fromstring(SAVED).iter())
    for name in (*element.attrib, *([""] if (element.text or "").strip() else []))
]
"""Every attribute and text of the saved XML, by the number of its element."""

HOSTILE = st.one_of(
    st.sampled_from(["/etc/shadow", "../../x", "a b", "'/><hostdev/>", "file:///x", "x,path=/y", "0x0/", "$(x)"]),
    st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="\ufffe\uffff"), min_size=1),
)


@given(st.sampled_from(PLACES), HOSTILE)
def test_no_text_of_the_saved_xml_reaches_the_host(place: tuple[int, str], text: str) -> None:
    domain = etree.fromstring(SAVED)
    element = list(domain.iter())[place[0]]
    if place[1]:
        element.set(place[1], text)
    else:
        element.text = text
    try:
        made = result(etree.tostring(domain, encoding="unicode"))
    except SavedMismatch:
        return
    plain = result()
    for path in ["//source", "//backingStore", "//emulator", "//graphics", "//listen", "//seclabel", "//driver"]:
        assert [dict(found.attrib) for found in made.xpath(path)] == [dict(found.attrib) for found in plain.xpath(path)]
    assert {found.tag for found in made.iter()} <= {found.tag for found in plain.iter()}
    assert all(HARMLESS.fullmatch(value) for value in values(made) - values(plain))


def test_a_saved_vm_of_a_million_parts_is_refused_at_once_and_in_few_words() -> None:
    many = MOST_DEVICES + 1
    assert f"{many} parts of a CPU" in refused(SAVED.replace("<devices>", f"<cpu>{'<cache/>' * many}</cpu><devices>"))
    xen = [
        f"<domain type='xen'><uuid>{UUID}</uuid><devices>{disks}</devices></domain>" for disks in ("<disk/>" * many, "")
    ]
    with pytest.raises(SavedMismatch, match=f"{many} devices"):
        reconcile_xen(*xen)
