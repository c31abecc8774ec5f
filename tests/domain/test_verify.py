"""The domain that libvirt made against the one that was asked for: every kind of difference, and real domains."""

import re
from copy import deepcopy
from xml.etree import ElementTree as etree

import pytest

from tests.domain.support import SCRIPTED, disk, host, spec, with_value
from vmgahp.domain import build as domain_xml
from vmgahp.domain import verify
from vmgahp.images.formats import BackingFile
from vmgahp.job.spec import JobSpec, Nic

BACKING = (BackingFile("/shared/base.qcow2", "qcow2"), BackingFile("/shared/old.img", "raw"))
SPEC = spec(
    vcpus=2,
    vnc=True,
    nics=(Nic("nat", "52:54:00:12:34:56"),),
    disks=(
        disk("/scratch/root.qcow2", "vda", format="qcow2", backing=BACKING),
        disk("/shared/data.img", "sdb", writable=False, transferred=False),
        disk("/scratch/install.iso", "sde", kind="cdrom"),
    ),
)
HOST = host(dac_label="+54321:+107", console_socket="/run/vmgahp/x/console", vnc_password="secret12")
ASKED = domain_xml.build(SPEC, HOST)

ADDED = """<devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <controller type='usb' index='0' model='piix3-uhci'><alias name='usb'/></controller>
    <controller type='pci' index='0' model='pci-root'/><controller type='sata' index='0'/>
    <input type='mouse' bus='ps2'/><input type='keyboard' bus='ps2'/>
    <audio id='1' type='none'/><watchdog model='itco' action='reset'/>
    <memballoon model='virtio'><alias name='balloon0'/></memballoon>{}
</devices>"""
"""The devices that libvirt adds to any VM, on either chip set."""
SHOWN = """<video><model type='cirrus' vram='16384' heads='1' primary='yes'/></video>
    <console type='unix'><source mode='connect' path='/run/vmgahp/x/console'/><target type='serial' port='0'/></console>
"""
"""And to one with a display and a serial port."""


def live(asked: str = ASKED, added: str = SHOWN) -> etree.Element:
    """Make of a description what libvirt makes: KiB, indices, ports, and devices of its own."""
    domain = etree.fromstring(asked)
    memory = domain.find("memory")
    memory.text, memory.attrib["unit"] = str(int(memory.text or 0) << 10), "KiB"
    for number, source in enumerate(domain.iterfind("devices/disk//source")):
        source.set("index", str(number))
    for source in domain.iterfind("devices/interface/source[@network]"):
        source.attrib |= {"portid": "c7a5fdbd", "bridge": "virbr0"}
    for graphics in domain.iterfind("devices/graphics"):
        graphics.set("port", "5900")
        graphics.attrib.pop("passwd", None)
    domain.find("devices").extend(etree.fromstring(ADDED.format(added)))
    return domain


def compare(domain: etree.Element, asked: str = ASKED, job: JobSpec = SPEC) -> None:
    verify.against_job(etree.tostring(domain, encoding="unicode"), asked, job)


def differences(domain: etree.Element) -> tuple[str, ...]:
    with pytest.raises(verify.Mismatch) as caught:
        compare(domain)
    return caught.value.differences


def test_what_libvirt_makes_is_what_was_asked_for_or_all_differences_are_named() -> None:
    compare(live())
    assert len(differences(with_value(with_value(live(), "memory", "1"), "vcpu", "1"))) == 2


@pytest.mark.parametrize("kind", ["direct", "bridge"])
def test_a_card_on_a_network_may_show_what_the_network_is(kind: str) -> None:
    compare(with_value(live(), "devices/interface@type", kind))


CHANGES = {
    "more memory": ("memory", "131072", "memory (KiB) is 131072, and the job asks for 65536"),
    "more CPUs": ("vcpu", "4", "number of CPUs is 4, and the job asks for 2"),
    "another file": ("devices/disk/source@file", "/etc/shadow", "file of its disk vda is '/etc/shadow'"),
    "another format": ("devices/disk/driver@type", "raw", "format of its disk vda is 'raw'"),
    "another device": ("devices/disk/target@dev", "vdb", "a disk vdb (/scratch/root.qcow2)"),
    "another backing file": ("devices/disk/backingStore/source@file", "/etc/shadow", "backing of its disk vda"),
    "a backing file's format": ("devices/disk/backingStore/format@type", "raw", "backing of its disk vda"),
    "another network": ("devices/interface/source@network", "dmz", "was not asked for, interface network dmz"),
    "another kind of nic": ("devices/interface@type", "user", "of the type user, and not network"),
    "another MAC": ("devices/interface/mac@address", "52:54:00:00:00:01", "MAC address is 52:54:00:00:00:01"),
    "another console": ("devices/serial/source@path", "/run/docker.sock", "serial unix /run/docker.sock"),
    "another listener": ("devices/graphics@listen", "0.0.0.0", "was not asked for, graphics vnc"),
    "another address": ("devices/graphics/listen@address", "0.0.0.0", "was not asked for, graphics vnc"),
    "another user": ("seclabel/label", "+0:+0", "QEMU runs as +0:+0, and not as +54321:+107"),
    "another type": (".@type", "qemu", "it is of the type qemu, and kvm was asked for"),
    "a balloon that is none": ("devices/memballoon@model", "xen", "was not asked for, memballoon xen"),
    "a watchdog that dumps": ("devices/watchdog@action", "dump", "was not asked for, watchdog itco"),
    "the host's sound": ("devices/audio@type", "pulseaudio", "was not asked for, audio pulseaudio"),
    "the host's mouse": ("devices/input@type", "evdev", "was not asked for, input evdev"),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_a_difference_is_named(change: str) -> None:
    place, value, expected = CHANGES[change]
    assert expected in "; ".join(differences(with_value(live(), place, value)))


@pytest.mark.parametrize("group", [None, "disk1"])
def test_what_is_to_be_handed_over_is_not_opened_by_its_name(group: str | None) -> None:
    asked, made = etree.fromstring(ASKED), live()
    for domain, said in ((asked, "disk0"), (made, group)):
        if said:
            domain.find("devices/disk/source").set("fdgroup", said)
    with pytest.raises(verify.Mismatch, match=r"QEMU is to open /scratch/root\.qcow2 by its name"):
        compare(made, etree.tostring(asked, encoding="unicode"))
    with pytest.raises(verify.Mismatch, match="by its name"):
        verify.against_script(etree.tostring(made, encoding="unicode"), etree.tostring(asked, encoding="unicode"), SPEC)


DEVICES = {
    "hostdev": "<hostdev mode='subsystem' type='pci'><source><address bus='1'/></source></hostdev>",
    "redirdev": "<redirdev bus='usb' type='spicevmc'/>",
    "filesystem": "<filesystem type='mount'><source dir='/'/><target dir='root'/></filesystem>",
    "shmem": "<shmem name='other'/>",
    "channel": "<channel type='unix'><source mode='bind' path='/run/x'/><target type='virtio' name='x'/></channel>",
    "disk": "<disk type='file' device='disk'><source file='/etc/shadow'/><target dev='vdx' bus='virtio'/></disk>",
    "a disk once more": "<disk type='file'><source file='/x'/><target dev='vda' bus='virtio'/></disk>",
    "interface": "<interface type='user'/>",
    "serial": "<serial type='pty'><target type='isa-serial' port='1'/></serial>",
    "console": "<console type='pty'><target type='virtio' port='1'/></console>",
    "parallel": "<parallel type='dev'><source path='/dev/lp0'/></parallel>",
    "graphics": "<graphics type='spice' port='5901'/>",
    "tpm": "<tpm model='tpm-tis'><backend type='passthrough'><device path='/dev/tpm0'/></backend></tpm>",
    "rng": "<rng model='virtio'><backend model='random'>/dev/random</backend></rng>",
    "vsock": "<vsock model='virtio'><cid auto='yes'/></vsock>",
    "smartcard": "<smartcard mode='host'/>",
    "sound": "<sound model='ich6'/>",
    "what nobody knows yet": "<teleporter/>",
}


@pytest.mark.parametrize("device", list(DEVICES))
def test_a_device_that_nobody_asked_for_is_refused(device: str) -> None:
    domain = live()
    domain.find("devices").append(etree.fromstring(DEVICES[device]))
    said = ("was not asked for", "does not ask for", "interfaces")
    assert any(words in each for each in differences(domain) for words in said)


@pytest.mark.parametrize("tag", ["disk", "interface", "serial", "graphics"])
def test_a_device_that_is_missing_is_named(tag: str) -> None:
    domain = live()
    devices = domain.find("devices")
    devices.remove(devices.find(tag))
    said = " ".join(differences(domain))
    assert tag in said or "interfaces" in said


def test_what_else_differs_is_named() -> None:
    domain = live()
    for each in domain.findall("devices/disk[readonly]"):
        each.remove(each.find("readonly"))
    assert differences(domain) == ("read-only of its disk sdb is False, and the job's is True",)
    domain = live()
    end = next(store for store in domain.iter("backingStore") if store.find("source") is None)
    etree.SubElement(end, "format", type="raw")
    etree.SubElement(end, "source", file="/etc/shadow")
    assert "/etc/shadow" in " ".join(differences(domain))
    domain = live()
    domain.append(etree.Element("{http://libvirt.org/schemas/domain/qemu/1.0}commandline"))
    assert "QEMU's own" in " ".join(differences(domain))
    devices = (domain := live()).find("devices")
    devices.append(deepcopy(devices.find("console")))
    assert "was not asked for, console unix" in " ".join(differences(domain))


def test_an_adapter_or_a_card_that_the_job_does_not_ask_for() -> None:
    plain, asked = spec(), domain_xml.build(spec(), host(console_socket="/run/vmgahp/x/console"))
    with pytest.raises(verify.Mismatch, match="was not asked for, video"):
        compare(live(asked), asked, plain)
    asked = ASKED.replace("</devices>", "<interface type='user'/></devices>")
    with pytest.raises(verify.Mismatch, match="2 interfaces, and the job asks for 1"):
        compare(live(asked), asked)


# A description that the administrator's script wrote


def scripted(memory: int = 64, vcpus: int = 1, devices: str = "", live_devices: str | None = None) -> str:
    asked = SCRIPTED.format(memory=memory, vcpus=vcpus, devices=devices)
    made = SCRIPTED.format(memory=memory, vcpus=vcpus, devices=devices if live_devices is None else live_devices)
    return verify.against_script(etree.tostring(live(made, ""), encoding="unicode"), asked, spec())


def test_a_scripts_vm_may_have_less_and_a_display_adapter() -> None:
    assert "memory (KiB) is 32768" in scripted(memory=32)
    asked = SCRIPTED.format(memory=64, vcpus=1, devices="")
    made = etree.tostring(live(asked, "<video><model type='vga'/></video>"), encoding="unicode")
    assert verify.against_script(made, asked, spec()) == ""
    with pytest.raises(verify.Mismatch, match="was not asked for, video"):
        verify.against_xen(made, asked, spec())


@pytest.mark.parametrize(("memory", "vcpus"), [(65, 1), (64, 2), (1024, 8)])
def test_a_script_may_not_give_more(memory: int, vcpus: int) -> None:
    with pytest.raises(verify.Mismatch, match="and the job asks for"):
        scripted(memory, vcpus)


@pytest.mark.parametrize(("now", "named"), [("<memory unit='KiB'>49152<", "memory"), ("<vcpu>1<", "CPUs")])
def test_less_than_a_script_asked_for_is_not_what_it_asked_for(now: str, named: str) -> None:
    asked = SCRIPTED.format(memory=64, vcpus=2, devices="")
    made = etree.tostring(live(asked, ""), encoding="unicode")
    old = re.search(now.replace("49152", "65536").replace(">1<", ">2<").replace("'", "[\"']"), made)
    with pytest.raises(verify.Mismatch, match=f"{named}.* was asked for"):
        verify.against_script(made.replace(old[0], now), asked, spec(vcpus=2))


@pytest.mark.parametrize(
    "asked",
    ["<memory>65536<", "<memory unit='KiB'>65000<", "<memory unit='b'>67108864<", "<memory unit='M'>64<",
     "<memory unit='MB'>67<", "<cpu><numa/></cpu><memory>1<"],
)  # fmt: skip
def test_a_scripts_memory_in_any_unit_is_what_it_comes_to(asked: str) -> None:
    text = SCRIPTED.format(memory=64, vcpus=1, devices="")
    script = text.replace("<memory unit='MiB'>64<", asked)
    assert verify.against_script(etree.tostring(live(text, ""), encoding="unicode"), script, spec()) == ""


AGENT = "<channel type='unix'><source mode='bind'{}/><target type='virtio' name='agent'/></channel>"
OWN = " path='/run/libvirt/qemu/channel/1-alice/agent'"
SERIAL = "<serial type='pty'><source path='/dev/pts/3'/><target type='isa-serial' port='0'/></serial>"
VIRTIO = "<console type='pty'><target type='virtio' port='0'/></console>"
SPICE = "<graphics type='spice' port='5901'/>"
ISCSI = "<disk type='network'><source protocol='iscsi' name='iqn.2026-01.org.site{}'/><target dev='vdx'/></disk>"
RAM = "<filesystem type='ram'><source usage='{}'/><target dir='/tmp'/></filesystem>"

FILLED_IN = {
    "a terminal": ("<console type='pty'><source path='/dev/ptmx'/></console>", SERIAL + "<console type='pty'/>"),
    "a port and a console": (SERIAL.replace("pts/3", "ptmx") + VIRTIO, SERIAL + "<console type='pty'/>" + VIRTIO),
    "a socket": (AGENT.format(""), AGENT.format(OWN)),
    "a socket of an earlier run": (AGENT.format(OWN.replace("/1-", "/7-")), AGENT.format(OWN)),
    "no socket before the start": (AGENT.format(OWN), AGENT.format("")),
    "a display's sound": (SPICE, SPICE + "<audio id='1' type='spice'/>"),
    "the sound of a VM without a display": ("", "<audio id='1' type='alsa'/>"),
    "a display adapter": ("", "<video><model type='vga'/></video>"),
    "a display's address": ("<graphics type='vnc'><listen type='network' network='x'/></graphics>",
        "<graphics type='vnc'><listen type='network' network='x' address='192.0.2.1'/></graphics>"),
    "a display's socket": ("<graphics type='vnc' socket='/run/x'><listen type='address' address='::1'/></graphics>",
        "<graphics type='vnc' socket='/run/x'><listen type='socket' socket='/run/x'/></graphics>"),
    "a display's address and socket": (
        "<graphics type='vnc' listen='::1'><listen type='none'/><listen type='address' address='::1'/></graphics>",
        "<graphics type='vnc'><listen type='none'/><listen type='address' address='::1'/></graphics>"),
    "a drive of a network without a medium": (
        "<disk type='network' device='cdrom'><source protocol='rbd'/><target dev='hdd'/></disk>",
        "<disk type='file' device='cdrom'><target dev='hdd'/></disk>"),
    "a drive without a medium, with libvirt 12": (
        "<disk type='file' device='cdrom'><target dev='hdd'/></disk>",
        "<disk type='file' device='cdrom'><driver type='raw'/><source index='1'/><target dev='hdd'/></disk>"),
    "a unit": (ISCSI.format(""), ISCSI.format("/0")),
    "an amount": (RAM.format("1024' units='KiB"), RAM.format("1048576")),
    "a port of a network": ("<interface type='network'><source network='x' portid='1'/></interface>",
        "<interface type='network'><source network='x' bridge='virbr0'/></interface>"),
    "a card of the host's": ("<interface type='network'><source network='x'/></interface>",
        "<interface type='hostdev'><source network='x'><address type='pci' bus='1'/></source></interface>"),
}  # fmt: skip
"""Requests of a script, each with what libvirt makes of it."""


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        (AGENT.format(OWN), AGENT.format(" path='/run/docker.sock'")),
        (AGENT.format(""), AGENT.format(OWN) * 2),
        ("<console type='pty'/>", "<console type='pty'><source path='/dev/tty1'/></console>"),
        ("<console type='pty'/>", "<console type='file'><source path='/etc/passwd'/></console>"),
        (DEVICES["disk"], DEVICES["disk"].replace("/etc/shadow", "/var/lib/libvirt/qemu/save/other.save")),
        (DEVICES["disk"].replace("<source file='/etc/shadow'/>", ""), DEVICES["disk"]),
        (ISCSI.format(""), ISCSI.format("/1")),
        ("", "<audio id='1' type='file'/>"),
        ("", "<input type='evdev'><source dev='/dev/input/event1'/></input>"),
        ("", "<input type='passthrough' bus='virtio'><source evdev='/dev/input/event1'/></input>"),
        ("<graphics type='vnc' listen='127.0.0.1'/>", "<graphics type='vnc' listen='0.0.0.0'/>"),
        ("<graphics type='vnc'/>", "<graphics type='vnc'><listen type='socket' socket='/run/docker.sock'/></graphics>"),
        *(("", text) for name, text in DEVICES.items() if name != "graphics"),
        (DEVICES["disk"], DEVICES["disk"].replace("/etc/shadow", "/etc/passwd")),
        (DEVICES["disk"].replace("<target", "<readonly/><target"), DEVICES["disk"]),
        (DEVICES["filesystem"], DEVICES["filesystem"].replace("'/'", "'/home'")),
        (DEVICES["hostdev"], DEVICES["hostdev"].replace("'1'", "'2'")),
        (DEVICES["channel"], DEVICES["channel"].replace("/run/x", "/run/y")),
        ("<emulator>/usr/bin/kvm</emulator>", "<emulator>/bin/sh</emulator>"),
        (DEVICES["hostdev"], ""),
        (DEVICES["rng"], DEVICES["rng"] * 2),
    ],
)
def test_a_script_gets_what_it_asked_for_and_nothing_else(asked: str, made: str) -> None:
    with pytest.raises(verify.Mismatch):
        scripted(devices=asked, live_devices=made)


MAC = "<interface type='user'><mac address='52:54:00:ab:cd:ef'/></interface>"


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        (DEVICES["hostdev"], DEVICES["hostdev"].replace("'1'", "'0x01'")),
        (DEVICES["filesystem"].replace("'/'", "'/srv//data/'"), DEVICES["filesystem"].replace("'/'", "'/srv/data'")),
        ("<console type='pty'/>", "<serial type='pty'><source path='/dev/pts/1'/></serial><console type='pty'/>"),
        (MAC.replace("ab:cd:ef", "AB:CD:EF"), MAC),
        *FILLED_IN.values(),
        *((text, text) for name, text in DEVICES.items() if name != "a disk once more"),
    ],
)
def test_a_script_may_write_things_as_libvirt_does_and_otherwise(asked: str, made: str) -> None:
    assert scripted(devices=asked, live_devices=made) == ""


@pytest.mark.parametrize(
    "wrong", ["<vcpu>-1</vcpu>", "<vcpu current='-1'>2</vcpu>", "<memory>-5</memory>", "<memory>lots</memory>"]
)
def test_numbers_that_libvirtd_would_not_survive_are_not_shown_to_it(wrong: str) -> None:
    with pytest.raises(verify.Mismatch, match="is no number"):
        verify.before_libvirt(f"<domain>{wrong}</domain>")
    verify.before_libvirt("<domain><vcpu placement='static' current='1'> 2 </vcpu><memory>65536</memory></domain>")
