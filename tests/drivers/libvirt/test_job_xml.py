"""Jobs with libvirt XML of their own, on the real libvirt and QEMU of this machine (TCG)."""

import os
import struct
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
        assert isinstance(made, WithXml)
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


def test_a_checkpoint_restarts(subject: WithXml, connection: "libvirt.virConnect") -> None:
    job = subject.with_xml(JobVMCheckpoint="true")
    machine = subject.driver().start(job)
    until(lambda: subject.count(job) > 0, "the guest counts")
    before = subject.count(job)
    machine.checkpoint()
    machine.stop()
    again = subject.driver().start(job)
    assert any("continues from its saved memory" in line for line in subject.log), subject.log
    assert goes_on(subject, job) >= before
    assert subject.live(job, connection).find("devices/watchdog[@model='i6300esb']") is not None
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
    assert any("watchdog" in line and "boots afresh" in line for line in subject.log), subject.log


def test_network_cards(scratch: Path, connection: "libvirt.virConnect") -> None:
    offers = {
        "VM_MEMORY": "1024",
        "VM_NETWORKING": "true",
        "VM_NETWORKING_TYPE": "user",
        "VM_ALLOW_HOST_LOOPBACK": "true",
    }
    nics = (
        f"<interface type='user'><mac address='{MAC}'/><model type='rtl8139'/></interface>"
        "<interface type='user'><model type='e1000'/><link state='down'/></interface>"
    )
    with WithXml(scratch.parent, Settings(offers), WHO) as subject:
        assert isinstance(subject, WithXml)
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
    return sorted(Path("/run/vmgahp").glob(f"*-{os.getpid()}-*/kernel"))


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


def test_the_machines_own_faults_stay_its_own(subject: WithXml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vmgahp.drivers.libvirt.connection.RECONNECT_DEADLINE", 1.0)
    with pytest.raises(errors.MachineFault):
        subject.driver(subject.unfit()).start(subject.with_xml())


def test_a_dry_run_copies_nothing(subject: WithXml) -> None:
    job = subject.with_xml("<os><kernel>guest.img</kernel></os>")
    rooms = copies()
    assert "(copy of guest.img)" in subject.driver().describe(job)
    assert copies() == rooms


def test_a_guest_that_ends_by_itself(subject: WithXml) -> None:
    job = subject.with_xml()
    make_guest(Path(job.working_dir(), "guest.img"), seconds=1)
    machine = subject.driver().start(job)
    until(lambda: machine.status().state == lifecycle.STOPPED, "it powers itself off")
    machine.release()
    assert not subject.exists(job)


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
