"""The parts of a job's XML about the machine or the screen that it was for, and wishes that look like them.

`pytest --update-golden` writes the table of the page anew.
"""

import re
from xml.etree import ElementTree as etree

import pytest

from tests import REPOSITORY
from vmgahp.domain import sanitize
from vmgahp.errors import JobFault

FILE = "domain.xml"
PAGE = REPOSITORY / "docs/reference/job-xml.md"
BEGIN, END = "<!-- dropped -->\n", "<!-- end of dropped -->"
SECRET = "/etc/shadow"
"""A path that a job may write where a machine had written one of its own; it is never handed on."""

CHAIN = (
    f"<backingStore type='file' index='2'><format type='qcow2'/><source file='{SECRET}' index='1'/>{{}}</backingStore>"
)
WITH_EFI = "<os firmware='efi'>{}</os>"

DROPPED = {
    "/domain/@id": "<domain type='kvm' id='7'/>",
    "/domain/metadata": "<metadata><osinfo:osinfo xmlns:osinfo='http://libosinfo.org/xmlns/libvirt/domain/1.0'>"
    "<osinfo:os id='http://debian.org/debian/12'/></osinfo:osinfo></metadata>",
    "/domain/genid": "<genid>43dc0cf8-809b-4adb-9bea-a9abb5f3d90e</genid>",
    "/domain/resource": "<resource><partition>/machine</partition></resource>",
    "/domain/vcpus": "<vcpus><vcpu id='0' enabled='yes' hotpluggable='no' order='1'/></vcpus>",
    "/domain/seclabel": "<seclabel type='dynamic' model='dac' relabel='yes'><label>+0:+0</label>"
    "<imagelabel>+0:+0</imagelabel></seclabel>",
    "/domain/os/type/@arch": "<os><type arch='i686'>hvm</type></os>",
    "/domain/os/smbios": "<os><smbios mode='emulate'/></os>",
    "/domain/os/loader": WITH_EFI.format(f"<loader readonly='yes' secure='no' type='pflash'>{SECRET}</loader>"),
    "/domain/os/nvram": WITH_EFI.format(f"<nvram template='{SECRET}' templateFormat='raw'>{SECRET}</nvram>"),
    "/domain/os/varstore": WITH_EFI.format(f"<varstore template='{SECRET}' path='{SECRET}'/>"),
    "/domain/redirfilter": "<redirfilter><usbdev allow='no'/></redirfilter>",
    "/domain/devices/emulator": f"<devices><emulator>{SECRET}</emulator></devices>",
    "/domain/devices/*/alias": "<devices><rng model='virtio'><alias name='rng0'/></rng></devices>",
    "/domain/devices/disk": "<devices><disk type='file' device='cdrom'><driver name='qemu' type='raw'/>"
    "<source index='2'/><target dev='sda' bus='sata' tray='open'/><readonly/><alias name='sata0-0-0'/>"
    "<address type='drive' controller='0' bus='0' target='0' unit='0'/></disk></devices>",
    "/domain/devices/disk/backingStore": "<devices>"
    f"<disk>{CHAIN.format(CHAIN.format('<backingStore/>'))}</disk></devices>",
    "/domain/devices/disk/source/@index": "<devices><disk><source file='a' index='3'/></disk></devices>",
    "/domain/devices/disk/target/@tray": "<devices><disk><target dev='sda' tray='closed'/><source/></disk></devices>",
    "/domain/devices/interface/target": "<devices><interface type='user'><target dev='vnet4'/></interface></devices>",
    "/domain/devices/interface/source/@portid": "<devices><interface type='network'>"
    "<source network='default' portid='0a9a2cb7-5f4b-4b0b-a4b3-8d2e64a0c5d1'/></interface></devices>",
    "/domain/devices/interface/source/@bridge": "<devices><interface type='network'>"
    "<source network='default' bridge='virbr0'/></interface></devices>",
    "/domain/devices/interface/backend": "<devices>"
    "<interface type='user'><backend type='passt'/></interface></devices>",
    "/domain/devices/serial/source": "<devices><serial type='pty'><source path='/dev/pts/3'/></serial></devices>",
    "/domain/devices/console/source": "<devices><console type='pty'><source path='/dev/pts/3'/></console></devices>",
    "/domain/devices/console/@tty": "<devices><console type='pty' tty='/dev/pts/3'/></devices>",
    "/domain/devices/channel/source": "<devices><channel type='unix'><source mode='bind' "
    "path='/var/lib/libvirt/qemu/channel/target/domain-1-a/org.qemu.guest_agent.0'/></channel></devices>",
    "/domain/devices/channel/target/@state": "<devices><channel type='unix'>"
    "<target type='virtio' state='disconnected'/></channel></devices>",
    "/domain/devices/channel": "<devices><channel type='spicevmc'><target type='virtio' name='com.redhat.spice.0' "
    "state='disconnected'/><alias name='channel0'/></channel></devices>",
    "/domain/devices/graphics": "<devices><graphics type='spice' port='5900' autoport='yes' listen='127.0.0.1'>"
    "<listen type='address' address='127.0.0.1'/><image compression='off'/></graphics></devices>",
    "/domain/devices/graphics/@port": "<devices><graphics type='vnc' port='5900' autoport='yes'/></devices>",
    "/domain/devices/graphics/@keymap": "<devices><graphics type='vnc' keymap='en-us'/></devices>",
    "/domain/devices/graphics/audio": "<devices><graphics type='vnc'><audio id='1'/></graphics></devices>",
    "/domain/devices/redirdev": "<devices>"
    "<redirdev bus='usb' type='spicevmc'><alias name='redir0'/></redirdev></devices>",
    "/domain/devices/redirfilter": "<devices><redirfilter><usbdev allow='yes'/></redirfilter></devices>",
    "/domain/devices/smartcard": "<devices><smartcard mode='passthrough' type='spicevmc'/></devices>",
    "/domain/devices/sound": "<devices><sound model='ich9'><codec type='duplex'/><audio id='1'/></sound></devices>",
    "/domain/devices/audio": "<devices><audio id='1' type='spice'/></devices>",
    "/domain/devices/video/model/@device": "<devices><video><model device='virtio-vga'/></video></devices>",
    "/domain/devices/video/model/acceleration": "<devices><video><model type='virtio'>"
    "<acceleration accel3d='no'/></model></video></devices>",
    "/domain/devices/tpm/backend/profile": "<devices><tpm model='tpm-crb'><backend type='emulator'>"
    "<profile name='default-v1'/></backend></tpm></devices>",
}
"""A sample for each row, by its place."""

REFUSED = [
    *("<seclabel type='none'/>", "<seclabel type='static' model='dac'><label>+0:+0</label></seclabel>", "<seclabel/>"),
    "<seclabel type='dynamic' model='selinux'><baselabel>system_u:system_r:x_t:s0</baselabel></seclabel>",
    "<seclabel type='dynamic' model='dac' relabel='no'/>",
    "<seclabel model='dac' relabel='yes'/>",
    "<resource><partition>/machine/../system</partition></resource>",
    "<vcpus><vcpu id='0' enabled='no'/></vcpus>",
    WITH_EFI.format(f"<loader secure='yes' type='pflash'>{SECRET}</loader>"),
    WITH_EFI.format(f"<loader stateless='yes' type='pflash'>{SECRET}</loader>"),
    WITH_EFI.format("<nvram type='network'><source protocol='nbd' name='x'/></nvram>"),
    WITH_EFI.format("<nvram type='block'><source dev='/dev/sda'/></nvram>"),
    "<os><type arch='ppc64'>hvm</type></os>",
    "<os><type machine='pseries-7.2'>hvm</type></os>",
    "<os><type machine='s390-ccw-virtio'>hvm</type></os>",
    "<emulator>/usr/bin/qemu-system-x86_64</emulator>",
    *(f"<devices>{device}</devices>" for device in (
        "<emulator><x/></emulator>",
        "<rng model='virtio'><alias>x</alias></rng>",
        f"<disk><backingStore type='file'><source file='{SECRET}'/></backingStore></disk>",
        "<disk><backingStore type='block'><format type='raw'/><source dev='/dev/sda'/></backingStore></disk>",
        "<disk><backingStore type='network'><format type='raw'/><source protocol='nbd'/></backingStore></disk>",
        f"<disk>{CHAIN.format('<mirror/>')}</disk>",
        f"<disk>{'<backingStore>' * 4000}{'</backingStore>' * 4000}</disk>",
        "<disk><source file='a' index='x'/></disk>",
        "<disk type='block' device='cdrom'><source dev='/dev/sr0'/><target dev='sda' bus='sata'/></disk>",
        "<disk type='block' device='lun'><target dev='sda' bus='scsi'/></disk>",
        "<disk type='network' device='cdrom'><target dev='sda' bus='sata'/></disk>",
        "<interface type='network'><backend type='passt'/></interface>",
        "<serial type='pty'><source path='/dev/pts/../sda'/></serial>",
        "<serial type='dev'><source path='/dev/pts/3'/></serial>",
        "<channel type='unix'><source mode='bind' path='/var/lib/libvirt/qemu/channel/target/../x'/></channel>",
        "<channel type='unix'><source mode='connect' path='/run/libvirt/qemu/channel/1-a/x'/></channel>",
        "<graphics type='vnc' port='5900' autoport='no'/>",
        "<graphics type='vnc' port='5900' autoport='yes' listen='0.0.0.0'/>",
        "<graphics type='spice' tlsPort='5901'/>",
        "<graphics type='spice' port='5901' autoport='no'/>",
        "<graphics type='spice' autoport='yes'><listen type='address' address='::'/></graphics>",
        "<redirdev bus='usb'/>",
        "<audio id='1' type='pulseaudio'/>",
        "<tpm model='tpm-crb'><backend type='emulator'><profile source='local:x' name='x'/></backend></tpm>",
        "<tpm model='tpm-crb'><backend type='emulator'><source type='dir' path='/var/lib/x'/></backend></tpm>",
    )),
]  # fmt: skip
"""Wishes that look like what is dropped."""


def whole(text: str) -> str:
    return text if text.startswith("<domain") else f"<domain>{text}</domain>"


def there(domain: etree.Element, place: str) -> bool:
    """Return True if the domain has an element, or an attribute, at a place."""
    path, _, name = place.removeprefix("/domain").lstrip("/").partition("@")
    found = domain.findall(path.rstrip("/")) if path else [domain]
    return any(not name or name in element.attrib for element in found)


def test_the_page_has_what_is_dropped_and_every_row_a_sample(request: pytest.FixtureRequest) -> None:
    places: dict[str, list[str]] = {}
    for place, row in sanitize.ROWS.items():
        places.setdefault(row.why, []).append(f"`{place.removeprefix('/domain/')}`")
    lines = [f"| {', '.join(named)} | {why} |\n" for why, named in places.items()]
    table = "".join(["| what is dropped | what it is, or why |\n|---|---|\n", *lines])
    head, _, rest = PAGE.read_text().partition(BEGIN)
    shown, _, tail = rest.partition(END)
    if request.config.getoption("--update-golden"):
        PAGE.write_text(head + BEGIN + table + END + tail)
        shown = table
    assert shown == table
    assert DROPPED.keys() == sanitize.ROWS.keys()


@pytest.mark.parametrize("place", DROPPED)
def test_what_is_of_another_machine_is_dropped_and_told(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.uname", lambda: type("X", (), {"machine": "x86_64"}))
    text = whole(DROPPED[place])
    assert there(etree.fromstring(text), place)
    domain, dropped = sanitize.sanitized(text, FILE)
    assert not there(domain, place)
    assert SECRET not in etree.tostring(domain, encoding="unicode")
    assert any(re.fullmatch(place.removeprefix("/domain/").replace("*", "[a-z]+"), what) for what in dropped)


@pytest.mark.parametrize("text", REFUSED)
def test_a_wish_that_looks_like_it_is_refused(text: str) -> None:
    with pytest.raises(JobFault):
        sanitize.sanitized(whole(text), FILE)


def test_what_is_dropped_is_counted_and_has_its_limit() -> None:
    aliases = "<rng model='virtio'><alias name='a'/></rng>" * 2
    assert sanitize.sanitized(whole(f"<devices>{aliases}</devices>"), FILE).dropped == ("devices/rng/alias (2 times)",)
    for text in ("<channel/>", "<graphics/>", "<disk/>"):
        assert sanitize.sanitized(whole(f"<devices>{text}</devices>"), FILE).dropped == ()
    for text in (WITH_EFI.format("<loader/>" * 20_000), f"<devices>{'<sound/>' * 20_000}</devices>"):
        with pytest.raises(JobFault):
            sanitize.sanitized(whole(text), FILE)
    # In the directory that it has where nobody is logged in.
    path = "/home/alice/.cache/libvirt/qemu/run/channel/1-a/org.qemu.guest_agent.0"
    channel = f"<channel type='unix'><source mode='bind' path='{path}'/></channel>"
    assert sanitize.sanitized(whole(f"<devices>{channel}</devices>"), "job.xml").dropped == ("devices/channel/source",)


def test_a_machine_of_another_architecture_runs_no_i686(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.uname", lambda: type("X", (), {"machine": "aarch64"}))
    with pytest.raises(JobFault, match="i686"):
        sanitize.sanitized(whole(DROPPED["/domain/os/type/@arch"]), FILE)


UEFI = "<loader readonly='yes' type='pflash'>/usr/share/OVMF/OVMF_CODE.fd</loader>"
VARIABLES = f"<nvram template='{SECRET}'>{SECRET}</nvram>"


def test_a_running_vm_with_files_of_uefi_boots_by_uefi() -> None:
    domain, dropped = sanitize.sanitized(whole(f"<os><type>hvm</type>{UEFI}{VARIABLES}</os>"), FILE)
    assert domain.find("os").attrib == {"firmware": "efi"}
    assert dropped == ("os/loader", "os/nvram")
    secure = "<firmware><feature enabled='yes' name='secure-boot'/></firmware>"
    text = WITH_EFI.format(f"{secure}<loader readonly='yes' secure='yes' type='pflash'>{SECRET}</loader>")
    domain, dropped = sanitize.sanitized(whole(text), FILE)
    assert domain.find("os/firmware/feature") is not None
    assert dropped == ("os/loader",)


@pytest.mark.parametrize(
    "files",
    [
        *(UEFI, VARIABLES, UEFI + "<nvram type='block'><source dev='/dev/sda'/></nvram>"),
        *(UEFI.replace(a, b) + VARIABLES for a, b in [("pflash", "rom"), ("'yes'", "'no'"), ("type", "secure")]),
        UEFI.replace("type", "secure='yes' type") + VARIABLES,
    ],
)
def test_other_files_of_firmware_are_refused(files: str) -> None:
    with pytest.raises(JobFault, match="firmware is chosen by"):
        sanitize.sanitized(whole(f"<os>{files}</os>"), FILE)
