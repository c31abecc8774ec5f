"""Jobs with libvirt XML of their own, on the real libvirt and QEMU of this machine (TCG)."""

import os
import struct
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as etree

import libvirt
import pytest

from tests.drivers.libvirt.support import MAC
from tests.drivers.support import WHO, Emulated
from tests.lab.guest import make_guest
from vmgahp import errors, lifecycle
from vmgahp.config import Settings
from vmgahp.job.ad import JobAd
from vmgahp.testing.contract import goes_on, until

pytestmark = pytest.mark.libvirt

ROOT = os.getuid() == 0

PLAIN = """<domain type='kvm'><memory unit='MiB'>64</memory><vcpu>1</vcpu>{0}<devices>
<disk type='file' device='disk'><driver name='qemu' type='raw' cache='writeback'/><source file='/submit/guest.img'/>
  <target dev='vda' bus='virtio'/><boot order='1'/><serial>count</serial></disk>
<rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>
<watchdog model='i6300esb' action='reset'/>
<channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
<serial type='pty'><target port='0'/></serial>
<graphics type='vnc' port='-1' autoport='yes'/><video><model type='vga'/></video>{1}</devices></domain>"""


class WithXml(Emulated):
    """The guest that counts, described by the job itself."""

    def with_xml(self, rest: str = "", devices: str = "", **changes: str | None) -> JobAd:
        job = self.job()
        path = Path(job.working_dir(), "domain.xml")
        path.write_text(PLAIN.format(rest, devices))
        os.chown(path, WHO.uid, WHO.gid)
        return self.changed(job, VMPARAM_Libvirt_XML='"domain.xml"', **{"VMPARAM_vm_Disk": None} | changes)

    def live(self, job: JobAd, connection: "libvirt.virConnect") -> etree.Element:
        return etree.fromstring(connection.lookupByName(job.vm_name()).XMLDesc())


@pytest.fixture
def subject(scratch: Path) -> Iterator[WithXml]:
    with WithXml(scratch.parent, Settings({"VM_MEMORY": "1024", "VM_STOP_TIMEOUT": "1"}), WHO) as made:
        yield made


def test_it_runs_as_it_is_described(subject: WithXml, connection: "libvirt.virConnect") -> None:
    job = subject.with_xml("<os><type machine='q35'>hvm</type></os><clock offset='localtime'/>")
    as_job_user = Settings({"VM_MEMORY": "1024", "VM_STOP_TIMEOUT": "1", "VM_RUN_AS_JOB_USER": "true"})
    machine = subject.driver(as_job_user).start(job)
    goes_on(subject, job)
    live = subject.live(job, connection)
    assert "q35" in live.find("os/type").get("machine")
    assert live.find("clock").get("offset") == "localtime"
    assert live.findtext("description") == job.working_dir()
    assert live.find("devices/watchdog[@model='i6300esb']") is not None
    assert live.findtext("devices/disk/serial") == "count"
    assert live.find("devices/rng") is not None
    assert live.find("devices/graphics").get("listen") == "127.0.0.1"
    assert Path(job.working_dir(), "vm_vnc.json").exists()
    if ROOT:
        assert f"\t{WHO.uid}\t" in Path(f"/proc/{machine.pid()}/status").read_text()
    machine.soft_suspend()
    machine.resume(lifecycle.SOFT_SUSPENDED)
    goes_on(subject, job)
    machine.suspend()
    machine.resume(lifecycle.SUSPENDED)
    goes_on(subject, job)
    machine.destroy()
    assert not subject.exists(job)


USB2 = "".join(
    f"<controller type='usb' index='0' model='ich9-{model}'>{master}<address type='pci' domain='0' bus='0' slot='7'"
    f" function='{function}'/></controller>"
    for model, master, function in (
        ("uhci2", "<master startport='2'/>", 1), ("ehci1", "", 7), ("uhci3", "<master startport='4'/>", 2),
        ("uhci1", "<master startport='0'/>", 0),
    )
)  # fmt: skip
"""A USB 2 controller and its companions, in another order than libvirt's."""


def usb(live: etree.Element) -> list[tuple[str | None, ...]]:
    """Model, first port and place of each USB controller."""
    return sorted(
        (one.get("model"), None if master is None else master.get("startport"), one.find("address").get("function"))
        for one in live.iterfind("devices/controller[@type='usb']")
        for master in [one.find("master")]
    )


@pytest.mark.parametrize("devices", ["", USB2], ids=["plain", "usb2"])
def test_a_checkpoint_restarts(subject: WithXml, connection: "libvirt.virConnect", devices: str) -> None:
    job = subject.with_xml(devices=devices, JobVMCheckpoint="true")
    machine = subject.driver().start(job)
    until(lambda: subject.count(job) > 0, "the guest counts")
    before = subject.count(job)
    asked = etree.fromstring(f"<domain><devices>{devices}</devices></domain>")
    controllers = usb(subject.live(job, connection))
    assert [one[:2] for one in controllers] == [one[:2] for one in usb(asked)] or not devices
    machine.checkpoint()
    machine.stop()
    again = subject.driver().start(job)
    assert any("continues from its saved memory" in line for line in subject.log), "\n".join(subject.log)
    assert goes_on(subject, job) >= before
    assert subject.live(job, connection).find("devices/watchdog[@model='i6300esb']") is not None
    assert usb(subject.live(job, connection)) == controllers
    again.destroy()


def test_a_checkpoint_of_other_xml_is_kept_aside(subject: WithXml) -> None:
    job = subject.with_xml(JobVMCheckpoint="true")
    machine = subject.driver().start(job)
    until(lambda: subject.count(job) > 0, "the guest counts")
    machine.checkpoint()
    machine.stop()
    path = Path(job.working_dir(), "domain.xml")
    path.write_text(path.read_text().replace("<watchdog model='i6300esb' action='reset'/>", ""))
    assert subject.driver().start(job).status().state == lifecycle.RUNNING
    assert any("watchdog" in line and "boots afresh" in line for line in subject.log), "\n".join(subject.log)


OFFERS = {
    "VM_MEMORY": "1024", "VM_STOP_TIMEOUT": "1", "VM_ALLOW_EMULATION": "true", "VM_NETWORKING": "true",
    "VM_NETWORKING_TYPE": "user", "VM_ALLOW_HOST_LOOPBACK": "true",
}  # fmt: skip


def test_network_cards(scratch: Path, connection: "libvirt.virConnect") -> None:
    nics = (
        f"<interface type='user'><mac address='{MAC}'/><model type='rtl8139'/></interface>"
        "<interface type='user'><model type='e1000'/><link state='down'/></interface>"
    )
    with WithXml(scratch.parent, Settings(OFFERS), WHO) as subject:
        job = subject.with_xml(devices=nics)
        machine = subject.driver().start(job)
        one, two = subject.live(job, connection).findall("devices/interface")
        assert (one.find("mac").get("address"), one.find("model").get("type")) == (MAC, "rtl8139")
        assert (two.find("model").get("type"), two.find("link").get("state")) == ("e1000", "down")
        machine.destroy()


def test_its_own_kernel(subject: WithXml) -> None:
    job = subject.with_xml("<os><type>hvm</type><kernel>/submit/tiny.elf</kernel><cmdline>one two</cmdline></os>")
    kernel = Path(job.working_dir(), "tiny.elf")
    make_kernel(kernel, b"hello from a kernel")
    kernel.chmod(0o600)
    os.chown(kernel, WHO.uid, WHO.gid)
    before = kernel.stat()
    rooms = copies()
    machine = subject.driver().start(job)
    console = Path(job.working_dir(), "vm_console.log")
    until(lambda: b"hello from a kernel" in console.read_bytes(), "the kernel speaks")
    assert len(copies()) == len(rooms) + 1
    # QEMU reads it once more.
    machine.suspend()
    machine.resume(lifecycle.SUSPENDED)
    assert machine.status().state == lifecycle.RUNNING
    machine.destroy()
    assert copies() == rooms
    after = kernel.stat()
    assert (after.st_uid, after.st_gid, after.st_mode) == (before.st_uid, before.st_gid, before.st_mode)


def copies() -> list[Path]:
    """Of this process alone, whose number its directories have."""
    places = ["/run/vmgahp"] if ROOT else [os.environ.get("XDG_RUNTIME_DIR") or "/tmp", tempfile.gettempdir(), "/tmp"]
    return sorted({path for place in places for path in Path(place).glob(f"*-{os.getpid()}-*/kernel")})


def make_kernel(path: Path, text: bytes) -> None:
    """A multiboot kernel (its specification, version 0.6.96, chapter 3.1) that writes to the serial port."""
    base, flags, magic = 0x100000, 1 << 16, 0x1BADB002
    header = struct.pack("<8I", magic, flags, -(magic + flags) & 0xFFFFFFFF, base, base, 0, 0, base + 32)
    # mov esi, text; mov ecx, length; mov dx, 0x3f8; rep outsb; hlt; jmp to the hlt
    code = b"\xbe" + struct.pack("<I", base + 32 + 19) + b"\xb9" + struct.pack("<I", len(text))
    code += b"\x66\xba\xf8\x03" + b"\xf3\x6e" + b"\xf4\xeb\xfd"
    assert len(code) == 19
    path.write_bytes(header + code + text)


@pytest.mark.parametrize(
    ("rest", "devices"),
    [
        ("<os><type machine='pc-q35-99.9'>hvm</type></os>", ""),
        ("<cpu mode='custom' match='exact'><model fallback='forbid'>no-such-cpu</model></cpu>", ""),
        ("<cpu mode='host-passthrough'/>", ""),
        ("", "<controller type='ide' index='7'/>"),
        ("", "<input type='tablet' bus='virtio'><address type='pci' bus='0x00' slot='0x1f'/></input>" * 2),
    ],
)
def test_what_this_machine_has_not_is_the_jobs_fault(subject: WithXml, rest: str, devices: str) -> None:
    job = subject.with_xml(rest, devices)
    with pytest.raises(errors.JobFault) as caught:
        subject.driver().start(job)
    assert "VMPARAM_Libvirt_XML" in caught.value.problem
    assert caught.value.hint
    assert not subject.exists(job)
    assert subject.driver().start(subject.job(2)).status().state == lifecycle.RUNNING


def test_a_dry_run_copies_nothing(subject: WithXml) -> None:
    job = subject.with_xml("<os><kernel>guest.img</kernel></os>")
    rooms = copies()
    assert "(copy of guest.img)" in subject.driver().describe(job)
    assert copies() == rooms


def test_firmware_and_a_tpm(subject: WithXml, connection: "libvirt.virConnect") -> None:
    kinds = connection.getDomainCapabilities(None, os.uname().machine, None, "qemu")
    if "<value>efi</value>" not in kinds or "<value>emulator</value>" not in kinds:
        pytest.skip("this machine has no UEFI or no swtpm")
    tpm = "<tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm>"
    job = subject.with_xml("<os firmware='efi'><type machine='q35'>hvm</type></os>", tpm)
    machine = subject.driver().start(job)
    live = subject.live(job, connection)
    assert "OVMF" in (live.findtext("os/loader") or "")
    assert live.find("devices/tpm").get("model") == "tpm-crb"
    assert machine.status().state == lifecycle.RUNNING
    nvram = live.findtext("os/nvram")
    machine.destroy()
    assert nvram
    assert not Path(nvram).exists()


# Domains as libvirt prints them

PC = """<domain type='qemu'><name>{name}</name>
<metadata><x:x xmlns:x='urn:x'>a note</x:x></metadata>
<memory unit='MiB'>64</memory><vcpu>1</vcpu><resource><partition>/machine</partition></resource>
<os><type machine='pc'>hvm</type><bootmenu enable='no'/></os>
<features><acpi/><apic/><pae/></features>
<cpu mode='custom' match='exact'><model fallback='allow'>qemu64</model><feature policy='optional' name='vmx'/>
  <feature policy='disable' name='svm'/></cpu>
<clock offset='variable' adjustment='-3600' basis='utc'><timer name='rtc' tickpolicy='catchup'/></clock>
<pm><suspend-to-mem enabled='no'/></pm>
<devices>
<disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='{image}'/><target dev='vda' bus='virtio'/>
  <boot order='1'/></disk>
<disk type='file' device='cdrom'><target dev='hda' bus='ide'/><readonly/></disk>
<disk type='file' device='floppy'><target dev='fda' bus='fdc'/></disk>
<interface type='user'><model type='e1000'/></interface>
<serial type='pty'/><channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
<hub type='usb'><address type='usb' bus='0' port='1'/></hub>
<input type='tablet' bus='usb'><address type='usb' bus='0' port='1.2'/></input>
<graphics type='vnc' autoport='yes' keymap='en-us'/>
<video><model type='cirrus'/></video>
<controller type='usb' index='0' model='ich9-ehci1'/>
<controller type='usb' index='0' model='ich9-uhci1'><master startport='0'/></controller>
<controller type='usb' index='0' model='ich9-uhci2'><master startport='2'/></controller>
<controller type='usb' index='0' model='ich9-uhci3'><master startport='4'/></controller>
<sound model='ich6'/><memballoon model='virtio'/>
<rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>
</devices></domain>"""
"""What virt-manager makes of a guest of some years ago."""

Q35 = (
    """<domain type='qemu'><name>{name}</name><memory unit='MiB'>64</memory><vcpu>1</vcpu>
<os firmware='efi'><type machine='q35'>hvm</type><firmware><feature enabled='no' name='secure-boot'/></firmware></os>
<genid/><features><acpi/><apic/><vmport state='off'/></features><cpu mode='maximum'/>
<devices>
<disk type='file' device='disk'><driver name='qemu' type='raw' discard='unmap'/><source file='{image}'/>
  <target dev='vda' bus='virtio'/></disk>
<disk type='file' device='cdrom'><target dev='sda' bus='sata'/><readonly/></disk>
<interface type='user'><model type='virtio'/></interface>
<console type='pty'/><channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
<channel type='spicevmc'><target type='virtio' name='com.redhat.spice.0'/></channel>
<input type='tablet' bus='usb'/><graphics type='spice' autoport='yes'><image compression='off'/></graphics>
<video><model type='virtio'/></video><controller type='usb' model='qemu-xhci' ports='15'/>
<controller type='pci' model='pcie-root'/>
"""
    + "<controller type='pci' model='pcie-root-port'/>\n" * 10
    + """
<sound model='ich9'/><redirdev bus='usb' type='spicevmc'/><redirdev bus='usb' type='spicevmc'/>
<memballoon model='virtio'/><rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>
<tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm>
</devices></domain>"""
)
"""What virt-install makes of a guest of today."""

ARM = """<domain type='qemu'><name>{name}</name><memory unit='MiB'>64</memory><vcpu>1</vcpu>
<os firmware='efi'><type arch='aarch64' machine='virt'>hvm</type></os>
<features><acpi/><gic version='2'/></features><cpu mode='custom'><model>cortex-a57</model></cpu>
<devices>
<disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='{image}'/>
  <target dev='vda' bus='virtio'/></disk>
<disk type='file' device='cdrom'><target dev='sda' bus='scsi'/><readonly/></disk>
<interface type='user'><model type='virtio'/></interface>
<console type='pty'/><channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
<input type='tablet' bus='usb'/><input type='keyboard' bus='usb'/><graphics type='vnc' port='-1'/>
<video><model type='virtio'/></video><controller type='usb' model='qemu-xhci' ports='15'/>
<memballoon model='virtio'/><rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>
</devices></domain>"""
"""What virt-install makes of a guest of aarch64."""


def seen(domain: etree.Element) -> list[tuple[str | None, ...]]:
    """What the guest sees of its devices: kinds, models and places."""
    return sorted(
        (device.tag, *(device.get(name, "") for name in ("type", "index", "model", "bus")), *model, *sorted(place))
        for tag in ("controller", "hub", "input", "interface", "memballoon", "rng", "tpm", "video")
        for device in domain.iterfind(f"devices/{tag}")
        for model in [[each.get("type") or each.get("name") or "" for each in device.iterfind("model")]]
        for place in [[f"{name}={value}" for each in device.iterfind("address") for name, value in each.items()]]
    )


def printed(connection: "libvirt.virConnect", text: str, *, runs: bool) -> str:
    """What libvirt prints of a VM that is defined, and begun where it `runs`."""
    domain = connection.defineXML(text)
    try:
        if runs:
            domain.createWithFlags(libvirt.VIR_DOMAIN_START_PAUSED)
        return str(domain.XMLDesc())
    finally:
        if domain.isActive():
            domain.destroy()
        domain.undefineFlags(libvirt.VIR_DOMAIN_UNDEFINE_NVRAM | libvirt.VIR_DOMAIN_UNDEFINE_TPM)


@pytest.mark.parametrize("what", ["written", "defined", "running"])
@pytest.mark.parametrize("text", [PC, Q35, ARM], ids=["pc", "q35", "aarch64"])
def test_a_domain_as_libvirt_prints_it_runs_and_restarts(scratch, connection, text, what):
    arch, machine = ("aarch64", "virt") if text == ARM else ("x86_64", None)
    try:
        kinds = connection.getDomainCapabilities(None, arch, machine, "qemu")
    except libvirt.libvirtError as error:
        pytest.skip(f"this machine emulates no {arch}: {error}")
    for needed in {PC: (), Q35: ("efi", "emulator"), ARM: ("efi",)}[text]:
        if f"<value>{needed}</value>" not in kinds:
            pytest.skip(f"this machine has no {needed}")
    if "<value>spice</value>" not in kinds:
        text = "\n".join(line for line in text.splitlines() if "spice" not in line)
    image = scratch.parent / "theirs" / "guest.img"
    image.parent.mkdir()
    make_guest(image)
    text = text.format(name=f"vmgahp-printed-{os.getpid()}", image=image)
    own = etree.fromstring(text if what == "written" else printed(connection, text, runs=what == "running"))
    with WithXml(scratch.parent, Settings(OFFERS), WHO) as subject:
        job = subject.with_xml(JobVMCheckpoint="true")
        Path(job.working_dir(), "domain.xml").write_text(etree.tostring(own, encoding="unicode"))
        machine = subject.driver().start(job)
        assert machine.status().state == lifecycle.RUNNING
        live = subject.live(job, connection)
        told = next(line for line in subject.log if "they are dropped" in line)
        if what == "written":
            models = [[each.get("model") for each in of.iterfind("devices/controller")] for of in (own, live)]
            assert not Counter(models[0]) - Counter(models[1])
        else:
            assert "devices/emulator" in told
            assert seen(live) == seen(own)
            assert live.find("clock").attrib == own.find("clock").attrib
        assert live.find("devices/sound") is live.find("devices/redirdev") is live.find("genid") is None
        counts = "<os firmware" not in text  # its boot sector is for BIOS
        before = goes_on(subject, job) if counts else 0
        machine.checkpoint()
        machine.stop()
        machine = subject.driver().start(job)
        assert any("continues from its saved memory" in line for line in subject.log), "\n".join(subject.log)
        assert not counts or goes_on(subject, job) >= before
        assert seen(subject.live(job, connection)) == seen(live)
        machine.destroy()
