"""A job's own libvirt XML: the list of what it may say, the attacks that it keeps out, and what becomes of the rest."""

import os
import re
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from xml.etree import ElementTree as etree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import jobs
from tests.conftest import examples
from tests.domain.support import assert_of_libvirts_schema
from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.domain import build as domain_xml
from vmgahp.domain import job_xml, model, sanitize
from vmgahp.host import runtime_dir
from vmgahp.host.job_user import Identity
from vmgahp.job.ad import JobAd
from vmgahp.job.look import look
from vmgahp.job.spec import JobSpec

WHO = Identity(os.getuid(), os.getgid())
FILE = "domain.xml"
MACHINE = {"VM_MEMORY": "1024", **jobs.NETWORKS}

DISK = "<disk type='file'><driver type='raw'/><source file='guest.img'/><target dev='vda' bus='virtio'/></disk>"
WHOLE = """<domain type='kvm'>
  <name>anything</name><uuid>c7a5fdbd-edaf-9455-926a-d65c16db1809</uuid>
  <memory unit='MiB'>64</memory><currentMemory unit='KiB'>65536</currentMemory><vcpu placement='static'>2</vcpu>
  <iothreads>1</iothreads>
  <os><type arch='x86_64' machine='q35'>hvm</type><bootmenu enable='no'/></os>
  <features><acpi/><apic eoi='on'/><hyperv mode='custom'><relaxed state='on'/>
    <tlbflush state='on'/></hyperv></features>
  <cpu mode='custom' match='exact'><model fallback='forbid'>qemu64</model>
    <topology sockets='1' cores='2' threads='1'/><feature policy='disable' name='svm'/></cpu>
  <clock offset='localtime'><timer name='rtc' tickpolicy='catchup'/></clock>
  <on_poweroff>destroy</on_poweroff><on_reboot>destroy</on_reboot><on_crash>destroy</on_crash>
  <pm><suspend-to-mem enabled='no'/></pm>
  <devices>
    <disk type='file' device='disk'><driver name='qemu' type='raw' cache='writeback' iothread='1'/>
      <source file='/home/alice/guest.img'/><target dev='vda' bus='virtio'/><boot order='2'/><serial>one</serial></disk>
    <disk type='file' device='cdrom'><source file='seed.iso'/><target dev='sda' bus='sata'/><readonly/></disk>
    <interface type='network'><mac address='52:54:00:12:34:56'/><source network='default'/><model type='e1000'/>
      <link state='down'/></interface>
    <controller type='scsi' index='0' model='virtio-scsi'/>
    <input type='tablet' bus='usb'/>
    <serial type='pty'><target port='0'/></serial><console type='pty'/>
    <channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
    <graphics type='vnc' port='-1' autoport='yes' listen='127.0.0.1'>
      <listen type='address' address='127.0.0.1'/></graphics>
    <video><model type='virtio' heads='1'/></video>
    <rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>
    <watchdog model='i6300esb' action='reset'/>
    <memballoon model='virtio'/>
    <panic model='isa'/>
  </devices>
</domain>"""


@pytest.fixture
def job(tmp_path: Path) -> "Job":
    return Job(tmp_path)


class Job:
    """A scratch directory with images, and the XML in it."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        for name in ("guest.img", "seed.iso", "vmlinuz", "initrd.img"):
            (scratch / name).write_bytes(bytes(512))

    def ad(self, text: str | bytes, **attributes: str) -> JobAd:
        path = self.scratch / FILE
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        ad = jobs.BASE | {"JobVM_VCPUS": "2", "VMPARAM_Libvirt_XML": f'"{FILE}"'}
        return jobs.ad(ad, self.scratch, **attributes)

    def domain(
        self, text: str | bytes, machine: dict[str, str] | None = None, arch: str = "", **attributes: str
    ) -> etree.Element:
        """Return what libvirt would be given."""
        settings = Settings(machine or MACHINE)
        xml = job_xml.load(self.ad(text, **attributes), settings, WHO)
        spec = look(JobSpec.parse(xml.ad, settings), settings, WHO)
        host = domain_xml.Host(
            *("00000000-0000-0000-0000-000000000001", "qemu", "maximum", "+1:+1", "/run/c"),
            panic="isa",
            agent=True,
            arch=arch,
        )
        return etree.fromstring(xml.describe(domain_xml.build(spec, host), str(self.scratch), None, WHO))

    def refused(self, text: str | bytes, **attributes: str) -> str:
        with pytest.raises(errors.JobFault) as caught:
            self.domain(text, **attributes)
        assert caught.value.code in errors.HOLD_CODES
        assert caught.value.hint
        return caught.value.problem


def a_domain(devices: str = DISK, rest: str = "") -> str:
    return f"<domain type='kvm'><memory unit='MiB'>64</memory>{rest}<devices>{devices}</devices></domain>"


def test_a_cpu_with_which_no_vm_is_saved_holds_a_job_with_checkpoints(job: Job) -> None:
    text = a_domain(rest="<cpu mode='host-passthrough'><feature policy='require' name='invtsc'/></cpu>")
    assert job.domain(text).find("cpu/feature") is not None
    assert "JobVMCheckpoint = true contradicts it" in job.refused(text, JobVMCheckpoint="true")


# What it may say


def test_what_it_says_is_there_and_the_frame_is_ours(job: Job) -> None:
    made = job.domain(WHOLE)
    assert made.get("type") == "qemu"
    texts = {
        "name": "alice_lab_7.0", "uuid": "00000000-0000-0000-0000-000000000001", "description": str(job.scratch),
        "seclabel/label": "+1:+1", "vcpu": "2", "cpu/model": "qemu64", "on_reboot": "destroy",
    }  # fmt: skip
    assert {place: made.findtext(place) for place in texts} == texts
    assert made.find("os/type").attrib == {"arch": "x86_64", "machine": "q35"}
    assert [element.tag for element in made.find("features")] == ["acpi", "apic", "hyperv"]
    assert made.find("clock").get("offset") == "localtime"
    disk, cdrom = made.findall("devices/disk")
    assert disk.find("source").get("file") == f"{job.scratch}/guest.img"
    assert disk.find("backingStore") is not None
    assert disk.find("driver").attrib == {"name": "qemu", "type": "raw", "cache": "writeback", "iothread": "1"}
    assert disk.findtext("serial") == "one"
    assert [element.get("order") for element in made.iterfind("devices/*/boot")] == ["2"]
    assert cdrom.get("device") == "cdrom"
    assert cdrom.find("readonly") is not None
    [nic] = made.findall("devices/interface")
    assert nic.find("source").attrib == {"network": "default"}
    found = [nic.find(tag).get(name) for tag, name in (("mac", "address"), ("model", "type"), ("link", "state"))]
    assert found == ["52:54:00:12:34:56", "e1000", "down"]
    [serial] = made.findall("devices/serial")
    assert serial.find("source").get("path") == "/run/c"
    assert made.find("devices/console") is None
    [display] = made.findall("devices/graphics")
    assert display.get("listen") == "127.0.0.1"
    for tag in ("controller", "input", "channel", "video", "rng", "watchdog", "memballoon", "panic"):
        assert made.find(f"devices/{tag}") is not None, tag


@pytest.mark.parametrize(
    ("own", "models"), [("", ["isa"]), ("<panic model='isa'/>", ["isa"]), ("<panic model='hyperv'/>", ["hyperv"])]
)
def test_a_panic_device_of_its_own_stands_for_ours(job: Job, own: str, models: list[str]) -> None:
    made = job.domain(a_domain(DISK + own))
    assert [panic.get("model") for panic in made.iterfind("devices/panic")] == models


def test_ports_and_controllers_of_its_own_stand_for_ours(job: Job) -> None:
    own = "<channel type='unix'><target type='virtio' name='{}'/></channel>"
    for name, names in (("org.qemu.guest_agent.0", []), ("org.example.port", ["org.qemu.guest_agent.0"])):
        made = job.domain(a_domain(DISK + own.format(name)))
        assert [port.get("name") for port in made.iterfind("devices/channel/target")] == [*names, name]
    scsi = DISK.replace("vda", "sda").replace("virtio", "scsi").replace("<target", "<readonly/><target")
    own = "<controller type='scsi' index='0' model='lsilogic'/>"
    made = job.domain(a_domain(DISK.replace("vda", "vdb") + scsi.replace("guest.img", "seed.iso") + own))
    assert [each.get("model") for each in made.iterfind("devices/controller[@type='scsi']")] == ["lsilogic"]
    made = job.domain(a_domain(DISK + USB2))
    controllers = made.findall("devices/controller[@type='usb']")
    assert [each.get("model") for each in controllers] == ["ich9-ehci1", "ich9-uhci1", "ich9-uhci2", "ich9-uhci3"]
    assert [each.find("address").get("function") for each in controllers] == ["7", "0", "1", "2"]
    assert [each.find("master").get("startport") for each in controllers[1:]] == ["0", "2", "4"]
    # libvirt counts them; virt-install writes the ports of a q35 so.
    ports = "<controller type='pci' model='pcie-root'/>" + "<controller type='pci' model='pcie-root-port'/>" * 3
    made = job.domain(a_domain(DISK + ports))
    models = [each.get("model") for each in made.iterfind("devices/controller[@type='pci']")]
    assert models == ["pcie-root", *["pcie-root-port"] * 3]


USB2 = """<controller type='usb' index='0' model='ich9-ehci1'><address type='pci' domain='0' bus='0' slot='7'
    function='7'/></controller>""" + "".join(
    f"""<controller type='usb' index='0' model='ich9-uhci{number}'><master startport='{2 * number - 2}'/>
    <address type='pci' domain='0' bus='0' slot='7' function='{number - 1}'/></controller>"""
    for number in (1, 2, 3)
)
"""USB 2 as virt-manager wrote it for years: one controller with three companions, which share its index."""


_ARM = "<os firmware='efi'><type arch='aarch64' machine='virt'>hvm</type></os>"


@pytest.mark.parametrize(
    ("own", "videos", "inputs"),
    [
        ("", ["virtio"], ["keyboard", "tablet"]),
        ("<video><model type='ramfb'/></video>", ["ramfb"], ["keyboard", "tablet"]),
        ("<input type='mouse' bus='usb'/>", ["virtio"], ["mouse"]),
        ("<controller type='usb' model='none'/>", ["virtio"], []),
    ],
)
def test_a_display_of_its_own_stands_for_ours(job: Job, own: str, videos: list[str], inputs: list[str]) -> None:
    """The machine virt has none by itself, so that this package gives it one with VNC."""
    made = job.domain(a_domain(DISK + "<graphics type='vnc'/>" + own, _ARM), arch="aarch64")
    assert [video.find("model").get("type") for video in made.iterfind("devices/video")] == videos
    assert [each.get("type") for each in made.iterfind("devices/input")] == inputs
    assert len(made.findall("devices/controller[@type='usb']")) == 1


def test_a_job_without_xml_or_rights_to_it(job: Job) -> None:
    assert job_xml.load(job.ad("", VMPARAM_Libvirt_XML="undefined"), Settings(MACHINE), WHO) is None
    for setting in ({"VM_ALLOW_LIBVIRT_XML": "false"}, {"LIBVIRT_XML_SCRIPT": "/usr/local/bin/make-xml"}):
        with pytest.raises(errors.JobFault, match=next(iter(setting))):
            job.domain(a_domain(), machine=MACHINE | setting)


ALONE = {"JobVMMemory": 64, "VMPARAM_vm_Disk": "guest.img:vda:w:raw"}


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        (a_domain(), ALONE),
        (
            WHOLE,
            {
                "JobVMMemory": 64, "JobVM_VCPUS": 2,
                "VMPARAM_vm_Disk": "/home/alice/guest.img:vda:w:raw,seed.iso:sda:r:iso", "JobVMNetworking": True,
                "VMPARAM_vm_NICs": "nat:52:54:00:12:34:56:e1000:down", "JobVMVNCConsole": True,
            },
        ),
        (
            a_domain(DISK + "<interface type='user'/><tpm model='tpm-crb'><backend type='emulator'/></tpm>"),
            ALONE | {"JobVMNetworking": True, "VMPARAM_vm_NICs": "user", "VMPARAM_vm_TPM": True},
        ),
        (
            a_domain(rest="<os firmware='efi'><type arch='aarch64'>hvm</type></os><vcpu>1</vcpu>"),
            ALONE | {"JobVM_VCPUS": 1, "VMPARAM_vm_Firmware": "uefi", "VMPARAM_vm_Arch": "aarch64"},
        ),
    ],
)  # fmt: skip
def test_what_the_xml_asks_for_is_in_the_ad(job: Job, text: str, asked: dict[str, object]) -> None:
    """So the administrator's policy sees it as that of any job."""
    ad = job.ad(text, JobVMMemory="96")
    xml = job_xml.load(ad, Settings(MACHINE), WHO)
    changed = {name: xml.ad.value(name) for name in xml.ad.names() if xml.ad.value(name) != ad.value(name)}
    assert changed | {name: xml.ad.value(name) for name in asked} == asked
    assert xml.ad.string("VMPARAM_Libvirt_XML") == FILE


def test_disks_come_from_the_xml_or_agree_with_vm_disk(job: Job) -> None:
    agreed = '"guest.img:vda:w:raw"'
    assert len(job.domain(a_domain(), VMPARAM_vm_Disk=agreed).findall("devices/disk")) == 1
    both = '"guest.img:vda:w:raw,seed.iso:sda:r:iso"'
    assert len(job.domain(a_domain(), VMPARAM_vm_Disk=both).findall("devices/disk")) == 2
    for other in ["seed.iso:vda:w:raw", "guest.img:vdb:w:raw", "guest.img:vda:r:raw", "guest.img:vda:w:qcow2"]:
        assert "VMPARAM_vm_Disk" in job.refused(a_domain(), VMPARAM_vm_Disk=f'"{other}"')
    shared = a_domain(DISK.replace("<target", "<shareable/><target"))
    assert job.domain(shared).find("devices/disk/shareable") is not None
    job.refused(shared, VMPARAM_vm_Disk='"guest.img:vda:w:raw"')


def test_an_image_elsewhere_is_for_its_user_to_open(job: Job, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("shared") / "other.img"
    assert "cannot be opened" in job.refused(a_domain(DISK.replace("guest.img", str(elsewhere))))
    elsewhere.write_bytes(bytes(512))
    made = job.domain(a_domain(DISK.replace("guest.img", str(elsewhere))))
    assert made.find("devices/disk/source").get("file") == str(elsewhere)
    for path in ("/etc/nothing", "/proc/self/mem", "../guest2.img", "/dev/sda"):
        job.refused(a_domain(DISK.replace("guest.img", path)))


def test_memory_and_cpus_are_the_ads_or_less(job: Job) -> None:
    assert job.domain(a_domain(), JobVMMemory="128").findtext("memory") == "64"
    assert "64 MiB, and the job has 32" in job.refused(a_domain(), JobVMMemory="32")
    for memory in ("<memory unit='GiB'>1</memory>", "<memory>65537</memory>", "<memory unit='MB'>68</memory>"):
        job.refused(f"<domain>{memory}<devices>{DISK}</devices></domain>")
    assert job.domain(a_domain(rest="<vcpu>1</vcpu>")).findtext("vcpu") == "1"
    assert "/domain/vcpu is 3" in job.refused(a_domain(rest="<vcpu>3</vcpu>"))
    for number in ("-1", "0", "1e3", "+1", "99999", " ", "0x1", "1 2"):
        job.refused(a_domain(rest=f"<vcpu>{number}</vcpu>"))
    topology = "<cpu><topology sockets='1' cores='4' threads='1'/></cpu>"
    assert "has 4 CPUs" in job.refused(a_domain(rest=topology))
    job.refused(a_domain(rest="<currentMemory unit='GiB'>2</currentMemory>"))
    cpu, wanted = "<cpu mode='maximum'/>", '"cores=2"'
    assert job.domain(a_domain(rest=cpu), VMPARAM_vm_Topology=wanted).find("cpu/topology").get("cores") == "2"
    both = "<cpu><topology sockets='2' cores='1' threads='1'/></cpu>"
    assert "VMPARAM_vm_Topology" in job.refused(a_domain(rest=both), VMPARAM_vm_Topology=wanted)


def test_networks_are_those_on_offer(job: Job) -> None:
    for nic in (
        "<interface type='bridge'/>",
        "<interface type='network'><source network='other'/></interface>",
        "<interface type='network'><source bridge='br0'/></interface>",
        "<interface type='user'><source network='default'/></interface>",
        "<interface/>",
        "<interface type='network'><mac address='01:00:5e:00:00:01'/></interface>",
        "<interface type='network'><mac address='52:54:00'/></interface>",
    ):
        job.refused(a_domain(DISK + nic))
    nic = "<interface type='network'/>"
    assert "declines" in job.refused(a_domain(DISK + nic), JobVMNetworking="false")
    job.refused(a_domain(DISK + nic), JobVMNetworking="true", JobVMNetworkingType='"user"')
    assert job.domain(a_domain(DISK + nic)).find("devices/interface/source").get("network") == "default"
    with pytest.raises(errors.JobFault, match="offers no network"):
        job.domain(a_domain(DISK + nic), machine={"VM_MEMORY": "1024"})
    two = a_domain(DISK + "<interface type='network'><model type='e1000'/></interface><interface type='user'/>")
    assert len(job.domain(two, VMPARAM_vm_NICs='"nat:E1000, user:virtio:up"').findall("devices/interface")) == 2
    for other in ('"nat, user"', '"user, nat:e1000"', '"nat:e1000"', '"nat:e1000, user, user"'):
        assert "nat:e1000, user" in job.refused(two, VMPARAM_vm_NICs=other)
    two = "<interface type='network'><mac address='52:54:00:00:00:01'/></interface><interface type='user'/>"
    made = job.domain(a_domain(DISK + two))
    assert [nic.get("type") for nic in made.iterfind("devices/interface")] == ["network", "user"]


def test_a_kernel_comes_from_the_scratch_directory_by_a_copy(job: Job, tmp_path: Path) -> None:
    boot = "<os><type>hvm</type><kernel>/boot/vmlinuz</kernel><initrd>initrd.img</initrd><cmdline>a, b</cmdline></os>"
    made = job.domain(a_domain(rest=boot))
    assert made.findtext("os/kernel") == "(copy of vmlinuz)"
    assert made.findtext("os/cmdline") == "a, b"
    assert "/domain/os/cmdline" in job.refused(
        a_domain(rest=boot.replace("a, b", "a\n2026-01-01T00:00:00Z qemu: passt"))
    )
    assert "cannot be opened" in job.refused(a_domain(rest="<os><kernel>/etc/passwd</kernel></os>"))
    (job.scratch / "link").symlink_to("/etc/passwd")
    assert "cannot be opened" in job.refused(a_domain(rest="<os><kernel>link</kernel></os>"))
    assert "no kernel" in job.refused(a_domain(rest="<os><initrd>initrd.img</initrd></os>"))
    with (job.scratch / "vmlinuz").open("r+b") as file:
        file.truncate(job_xml.LARGEST_BOOT_FILES + 1)
    assert "MiB can be booted" in job.refused(a_domain(rest="<os><kernel>vmlinuz</kernel></os>"))
    room = tmp_path / "room"
    room.mkdir()
    (job.scratch / "vmlinuz").write_bytes(b"kernel")
    (job.scratch / "vmlinuz").chmod(0o600)
    files = {"kernel": "vmlinuz"}
    paths = job_xml.copy_boot_files(files, str(job.scratch), WHO, lambda: str(room), FILE)
    assert paths == {"kernel": str(room / "kernel")}
    assert (room / "kernel").read_bytes() == b"kernel"
    assert (room / "kernel").stat().st_mode & 0o777 == 0o400
    runtime_dir.remove(str(room))
    assert not room.exists()
    with pytest.raises(errors.MachineFault):
        job_xml.copy_boot_files(files, str(job.scratch), WHO, lambda: str(room), FILE)


def test_kernels_leave_room_where_they_are_to_others(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (job.scratch / "vmlinuz").write_bytes(bytes(5000))
    for blocks, free, fits in ((400, 99, False), (400, 100, True), (400_000, 32767, False), (400_000, 32768, True)):
        status = os.statvfs_result((4096, 4096, blocks, blocks, free, 9, 9, 9, 0, 255))
        monkeypatch.setattr(job_xml.os, "statvfs", lambda _, status=status: status)
        (room := tmp_path / str(free)).mkdir()
        with nullcontext() if fits else pytest.raises(errors.JobFault, match="nearly full"):
            job_xml.copy_boot_files({"kernel": "vmlinuz"}, str(job.scratch), WHO, lambda room=room: str(room), FILE)
        assert room.exists() is fits


@pytest.mark.parametrize("then", ["nothing", "a link", "a FIFO", "a directory"])
def test_a_kernel_that_was_exchanged_before_the_copy_holds_the_job(job: Job, tmp_path: Path, then: str) -> None:
    room = tmp_path / "room"
    room.mkdir()
    kernel = job.scratch / "vmlinuz"
    domain = etree.fromstring("<domain><os><kernel>vmlinuz</kernel></os></domain>")
    files = job_xml.boot_file_names(domain, FILE, str(job.scratch), WHO)
    kernel.unlink()
    match then:
        case "a link":
            kernel.symlink_to("/etc/shadow")
        case "a FIFO":
            os.mkfifo(kernel)
        case "a directory":
            kernel.mkdir()
    with pytest.raises(errors.JobFault, match="vmlinuz"):
        job_xml.copy_boot_files(files, str(job.scratch), WHO, lambda: str(room), FILE)
    assert not room.exists()


def test_firmware_and_tpm_are_those_of_the_ad(job: Job) -> None:
    efi = "<os firmware='efi'><type>hvm</type><firmware><feature enabled='yes' name='secure-boot'/></firmware></os>"
    tpm = "<tpm model='tpm-tis'><backend type='emulator' version='2.0'/></tpm>"
    made = job.domain(a_domain(DISK + tpm, efi))
    assert made.find("os").get("firmware") == "efi"
    assert len(made.findall("os/firmware/feature[@name='secure-boot']")) == 1
    [device] = made.findall("devices/tpm")
    assert device.get("model") == "tpm-tis"
    assert device.find("backend").get("type") == "external"
    job.refused(a_domain(DISK + tpm.replace("2.0", "1.2")))
    assert "uefi" in job.refused(a_domain(rest=efi), VMPARAM_vm_Firmware='"bios"')
    assert "VMPARAM_vm_TPM" in job.refused(a_domain(DISK + tpm), VMPARAM_vm_TPM="false")
    assert "VM_ATTR_TPM" in job.refused(a_domain(DISK + tpm), VM_ATTR_TPM="false")
    assert "VM_kvm_ATTR_Firmware" in job.refused(a_domain(rest=efi), VM_kvm_ATTR_Firmware='"bios"')
    job.refused(a_domain(rest="<os><firmware><feature enabled='yes' name='secure-boot'/></firmware></os>"))


@pytest.mark.parametrize(
    ("keys", "secure", "wanted"),
    [("", "yes", "yes"), ("yes", "yes", "yes"), ("no", "yes", "no"), ("no", "no", "no"), ("", "", "no")],
)
@pytest.mark.parametrize("smm", ["", "<smm state='on'/>", "<smm state='off'/>"])
def test_secure_boot_without_keys_is_plain_uefi(job: Job, keys: str, secure: str, wanted: str, smm: str) -> None:
    """Such a firmware starts any system, and the one with Microsoft's keys does not."""
    said = {"enrolled-keys": keys, "secure-boot": secure}
    features = "".join(f"<feature enabled='{each}' name='{name}'/>" for name, each in said.items() if each)
    system = f"<os firmware='efi'><type machine='q35'>hvm</type><firmware>{features}</firmware></os>"
    made = job.domain(a_domain(rest=f"{system}<features><acpi/>{smm}</features>"))
    found = {each.get("name"): each.get("enabled") for each in made.iterfind("os/firmware/feature")}
    assert found == {"enrolled-keys": wanted, "secure-boot": wanted}
    assert [each.get("state") for each in made.iterfind("features/smm")] == (["on"] if wanted == "yes" else [])


def test_libvirts_schema_knows_what_comes_out(job: Job) -> None:
    assert_of_libvirts_schema(etree.tostring(job.domain(WHOLE), encoding="unicode"))


# The file


def test_the_file_itself(job: Job) -> None:
    for name in ('""', '"/"', '".."', "7"):
        job.refused(a_domain(), VMPARAM_Libvirt_XML=name)
    assert "No such file" in job.refused(a_domain(), VMPARAM_Libvirt_XML='"missing.xml"')
    (job.scratch / "link.xml").symlink_to(FILE)
    job.refused(a_domain(), VMPARAM_Libvirt_XML='"link.xml"')
    os.mkfifo(job.scratch / "fifo.xml")
    job.refused(a_domain(), VMPARAM_Libvirt_XML='"fifo.xml"')
    assert "KiB" in job.refused("<!--" + "x" * sanitize.LARGEST + "-->" + a_domain())
    assert "UTF-8" in job.refused(a_domain().encode("utf-16"))
    assert job.domain("\ufeff<?xml version='1.0' encoding='UTF-8'?>\n<!-- mine -->" + a_domain()) is not None


@pytest.mark.parametrize(
    "text",
    [
        *("", "no XML", "<domain>", "<network/>", "<domain/><domain/>", "<domain xmlns='http://example.org/'/>"),
        *("<a>" * 80_000, "<domain>" * 20_000 + "</domain>" * 20_000),
        '<!DOCTYPE domain [<!ENTITY e SYSTEM "file:///etc/passwd">]><domain><name>&e;</name></domain>',
        '<!DOCTYPE domain [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;">]><domain><name>&b;</name></domain>',
        "<!doctype domain SYSTEM 'http://example.org/d.dtd'><domain/>",
        "<?xml version='1.0'?><?xml-stylesheet href='file:///etc/passwd'?><domain/>",
        "<domain><?php x ?></domain>",
        "<domain xmlns:xi='http://www.w3.org/2001/XInclude'><xi:include href='/etc/passwd'/></domain>",
        *("<domain>&undefined;</domain>", "<domain><name>\udc80</name></domain>", "<domain>text</domain>"),
        "<domain><memory>64</memory><memory>128</memory></domain>",
    ],
)
def test_files_that_are_no_description(job: Job, text: str) -> None:
    job.refused(text)


def test_a_refusal_names_the_place_and_the_reason(job: Job) -> None:
    problem = job.refused(a_domain(DISK + DISK.replace("vda", "vdb").replace("img'", "img' startupPolicy='optional'")))
    assert "/domain/devices/disk[2]/source/@startupPolicy = 'optional'" in problem
    assert "/domain/devices/hostdev is not for jobs to say" in job.refused(a_domain("<hostdev/>"))
    assert "@type = 'direct' is not among the values that a job may give (network, bridge, user)" in job.refused(
        a_domain("<interface type='direct'/>")
    )
    entity = '<!DOCTYPE domain [<!ENTITY image "guest.img">]>' + a_domain(DISK.replace("guest.img", "&image;"))
    assert "<!DOCTYPE" in job.refused(entity)
    assert "<?" in job.refused("<?xml-stylesheet href='x'?>" + a_domain())
    assert "<?" in job.refused(a_domain(DISK + "<?x?>"))


# The attacks

_IN_DEVICES = {
    "hostdev": "<hostdev mode='subsystem' type='pci'><source><address domain='0' bus='0' slot='2'/></source></hostdev>",
    "filesystem": "<filesystem type='mount'><source dir='/'/><target dir='root'/></filesystem>",
    "shmem": "<shmem name='x'><model type='ivshmem-plain'/></shmem>",
    "emulator": "<emulator run='yes'>/bin/sh</emulator>",
    "redirdev": "<redirdev bus='usb' type='tcp'/>",
    "smartcard": "<smartcard mode='host'/>",
    "sound": "<sound model='usb'><source dev='/dev/snd/pcmC0D0p'/></sound>",
    "audio": "<audio id='1' type='file' path='/etc/passwd'/>",
    "parallel": "<parallel type='file'><source path='/etc/passwd'/></parallel>",
    "serial to a file": "<serial type='file'><source path='/etc/cron.d/x'/></serial>",
    "serial of a device": "<serial type='dev'><source path='/dev/sda'/></serial>",
    "serial with a source": "<serial type='pty'><source path='/dev/sda'/></serial>",
    "serial with a log": "<serial type='pty'><log file='/etc/cron.d/x'/></serial>",
    "two serials": "<serial type='pty'/><serial type='pty'/>",
    "console by network": "<console type='tcp'/>",
    "channel with a path": "<channel type='unix'><source mode='bind' path='/x'/><target type='virtio'/></channel>",
    "channel's name": "<channel type='unix'><target type='virtio' name='..'/></channel>",
    "channel by TCP": "<channel type='tcp'><target type='virtio' name='a'/></channel>",
    "VNC for all": "<graphics type='vnc' listen='0.0.0.0'/>",
    "VNC for all, inside": "<graphics type='vnc'><listen type='address' address='::'/></graphics>",
    "VNC with a password": "<graphics type='vnc' passwd='x'/>",
    "VNC at a port": "<graphics type='vnc' port='5900'/>",
    "VNC at a socket": "<graphics type='vnc' socket='/run/x'/>",
    "spice at a port": "<graphics type='spice' port='5901'/>",
    "spice for all": "<graphics type='spice' autoport='yes' listen='0.0.0.0'/>",
    "spice with a password": "<graphics type='spice' autoport='yes' passwd='x'/>",
    "spice with rendering": "<graphics type='spice'><gl enable='yes' rendernode='/dev/dri/renderD128'/></graphics>",
    "spice at a socket": "<graphics type='spice'><listen type='socket' socket='/run/x'/></graphics>",
    "rendering": "<graphics type='egl-headless'/>",
    "video memory": "<video><model type='qxl' vram='999999999'/></video>",
    "acceleration": "<video><model type='virtio'><acceleration accel3d='yes'/></model></video>",
    "entropy of a file": "<rng model='virtio'><backend model='random'>/etc/shadow</backend></rng>",
    "entropy by network": "<rng model='virtio'><backend model='egd' type='tcp'/></rng>",
    "watchdog's dump": "<watchdog model='i6300esb' action='dump'/>",
    "host's TPM": "<tpm model='tpm-tis'><backend type='passthrough'><device path='/dev/tpm0'/></backend></tpm>",
    "TPM's secret": "<tpm model='tpm-tis'><backend type='emulator'><encryption secret='x'/></backend></tpm>",
    "input of the host": "<input type='evdev'><source dev='/dev/input/event1'/></input>",
    "input passed on": "<input type='passthrough' bus='virtio'/>",
    "direct": "<interface type='direct'><source dev='eth0' mode='bridge'/></interface>",
    "ethernet": "<interface type='ethernet'><script path='/bin/sh'/></interface>",
    "vhost-user": "<interface type='vhostuser'><source type='unix' path='/x' mode='client'/></interface>",
    "script": "<interface type='user'><script path='/tmp/x'/></interface>",
    "virtualport": "<interface type='network'><virtualport type='openvswitch'/></interface>",
    "filterref": "<interface type='network'><filterref filter='x'/></interface>",
    "backend": "<interface type='user'><backend type='passt' logFile='/etc/x'/></interface>",
    "tap's name": "<interface type='network'><target dev='eth0'/></interface>",
    "port forward": "<interface type='user'><portForward proto='tcp'/></interface>",
    "boot ROM": "<interface type='user'><rom file='/etc/passwd'/></interface>",
    "controller's driver": "<controller type='scsi'><driver iommu='on'/></controller>",
}


@pytest.mark.parametrize("what", _IN_DEVICES)
def test_devices_of_the_host(job: Job, what: str) -> None:
    assert "/domain/devices/" in job.refused(a_domain(DISK + _IN_DEVICES[what]))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *(("type='file'", f"type='{kind}'") for kind in ("block", "dir", "network", "nvme", "volume", "vhostuser")),
        ("<disk type='file'>", "<disk type='file' device='lun'>"),
        ("<disk type='file'>", "<disk type='file' rawio='yes'>"),
        ("<disk type='file'>", "<disk type='file' sgio='unfiltered'>"),
        ("file='guest.img'/>", "file='guest.img' startupPolicy='optional'/>"),
        ("file='guest.img'/>", "file='guest.img' dev='/dev/sda'/>"),
        ("file='guest.img'/>", "file='guest.img'><slices><slice type='storage' size='1'/></slices></source>"),
        ("file='guest.img'/>", "file='guest.img'><encryption format='luks'/></source>"),
        ("file='guest.img'/>", "file='guest.img'><seclabel model='dac' relabel='yes'/></source>"),
        ("file='guest.img'/>", "file='guest.img'><auth username='x'/></source>"),
        ("file='guest.img'/>", "file='guest.img' fdgroup='disk0'/>"),
        ("file='guest.img'/>", "file='json:{&quot;driver&quot;:&quot;host_device&quot;}'/>"),
        ("file='guest.img'/>", "file='nbd://127.0.0.1/x'/>"),
        ("file='guest.img'/>", "file='a,b'/>"),
        ("file='guest.img'/>", "file=''/>"),
        ("<target", "<backingStore type='file'><source file='/etc/passwd'/></backingStore><target"),
        ("<target", "<mirror type='file'/><target"),
        ("<target", "<iotune/><target"),
        ("<target", "<transient/><target"),
        ("<driver type='raw'/>", "<driver type='raw' name='tap2'/>"),
        ("dev='vda'", "dev='../vda'"),
        ("dev='vda'", "dev='vda1'"),
        ("bus='virtio'", "bus='sd'"),
    ],
)
def test_disks_of_the_host(job: Job, old: str, new: str) -> None:
    assert old in DISK
    job.refused(a_domain(DISK.replace(old, new)))


@pytest.mark.parametrize(
    "text",
    [
        "<qemu:commandline xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'><qemu:arg/></qemu:commandline>",
        "<commandline xmlns='http://libvirt.org/schemas/domain/qemu/1.0'><arg value='-x'/></commandline>",
        "<q:override xmlns:q='http://libvirt.org/schemas/domain/qemu/1.0'/>",
        "<os><loader readonly='yes' type='pflash'>/etc/passwd</loader></os>",
        "<os><nvram template='/etc/shadow'>/etc/cron.d/x</nvram></os>",
        "<os><type>exe</type><init>/bin/sh</init></os>",
        "<os><dtb>/etc/passwd</dtb></os>",
        "<os><acpi><table type='slic'>/etc/passwd</table></acpi></os>",
        "<os><smbios mode='host'/></os>",
        "<os><type machine='x,accel=kvm'>hvm</type></os>",
        "<sysinfo type='fwcfg'><entry name='opt/x' file='/etc/passwd'/></sysinfo>",
        *("<launchSecurity type='sev'/>", "<memoryBacking><source type='file'/></memoryBacking>"),
        *("<memoryBacking><hugepages/></memoryBacking>", "<memtune><hard_limit>1</hard_limit></memtune>"),
        *("<maxMemory slots='16' unit='TiB'>1</maxMemory>", "<resource><partition>/system</partition></resource>"),
        "<resource><fibrechannel appid='x'/></resource>",
        "<numatune><memory mode='strict' nodeset='0'/></numatune>",
        "<cputune><vcpupin vcpu='0' cpuset='0'/></cputune>",
        *("<blkiotune/>", "<keywrap/>", "<idmap/>", "<perf/>"),
        *("<bootloader>/bin/sh</bootloader>", "<vcpu cpuset='0-3'>1</vcpu>", "<vcpu current='9'>1</vcpu>"),
        *("<iothreads>17</iothreads>", "<cpu mode='custom'><model>a,b</model></cpu>"),
        "<cpu><numa><cell id='0' memory='1'/></numa></cpu>",
        "<features><hyperv><vendor_id state='on' value='a,b'/></hyperv></features>",
        *("<on_poweroff>preserve</on_poweroff>", "<on_poweroff>restart</on_poweroff>"),
        *("<on_crash>coredump-restart</on_crash>", "<on_lockfailure>ignore</on_lockfailure>"),
        *("<clock offset='absolute' start='0'/>", "<name lang='x'>y</name>", "<devices/>"),
    ],
)
def test_what_else_is_of_the_host(job: Job, text: str) -> None:
    assert "/domain/" in job.refused(a_domain(rest=text))


@pytest.mark.parametrize("index", ["256", "999", "999999999"])
def test_a_controller_that_would_have_libvirt_make_millions_below_it_is_refused(job: Job, index: str) -> None:
    """One of pci and 999999999 has ended libvirtd, and with it every START of the machine."""
    controller = "<controller type='pci' index='{}' model='pci-bridge'/>"
    assert f"controller[1]/@index = '{index}'" in job.refused(a_domain(DISK + controller.format(index)))
    job.domain(a_domain(DISK + controller.format(255)))


# Whatever it brings

_TAGS = sorted(
    {
        *("domain", "devices", "disk", "source", "driver", "target", "interface", "os", "kernel", "serial"),
        *("rng", "backend", *model.DOMAIN.children, *model.DEVICES),
        *("redirdev", "smartcard", "loader", "nvram", "backingStore", "script", "seclabel", "maxMemory"),
    }
)
_NAMES = ["type", "file", "dev", "path", "bus", "device", "name", "model", "mode", "network", "unit", "listen", "dir"]
_VALUES = [
    *("file", "block", "disk", "hvm", "64", "vda", "guest.img", "/etc/passwd", "/dev/urandom", "/dev/sda"),
    *("raw", "qemu", "network", "user", "pty", "unix", "vnc", "virtio", "random", "destroy", "-1", "default"),
    *("127.0.0.1", "yes", "../x", "http://x", "<&'\"", ""),
]
_ATTRIBUTES = st.dictionaries(st.sampled_from(_NAMES), st.sampled_from(_VALUES), max_size=3)


def _element(tag: str, attributes: dict[str, str], text: str, children: list[etree.Element]) -> etree.Element:
    made = etree.Element(tag, attributes)
    made.text = text
    made.extend(children)
    return made


def _fitting(name: str, row: model.Element, depth: int = 0) -> st.SearchStrategy[etree.Element]:
    """Elements that are mostly of the list: what gets past it has to be looked at, too."""
    attributes = st.fixed_dictionaries(
        {}, optional={key: st.from_regex(form, fullmatch=True) for key in row.attributes if (form := row.form(key))}
    )
    text = st.just("") if row.text is None else st.from_regex(row.text, fullmatch=True) | st.sampled_from(_VALUES)
    below = [_fitting(tag, child, depth + 1) for tag in row.children if (child := row.child(tag))]
    children = st.lists(st.one_of(below), max_size=4 if depth else 8) if below else st.just([])
    return st.builds(_element, st.just(name), attributes, text, children)


_WILD = st.recursive(
    st.builds(_element, st.sampled_from(_TAGS), _ATTRIBUTES, st.sampled_from(_VALUES), st.just([])),
    lambda below: st.builds(_element, st.sampled_from(_TAGS), _ATTRIBUTES, st.just(""), st.lists(below, max_size=4)),
    max_leaves=12,
)


@st.composite
def _changed(draw: st.DrawFn) -> etree.Element:
    """A good description, a few steps away: what slips through the list is most likely near it."""
    domain = etree.fromstring(WHOLE)
    for _ in range(draw(st.integers(1, 3))):
        element = draw(st.sampled_from(list(domain.iter())))
        step = draw(st.sampled_from(("attribute", "value", "text", "child", "again")))
        if step == "attribute":
            element.set(draw(st.sampled_from(_NAMES)), draw(st.sampled_from(_VALUES)))
        elif step == "value" and element.attrib:
            element.set(draw(st.sampled_from(sorted(element.attrib))), draw(st.sampled_from(_VALUES)))
        elif step == "text":
            element.text = draw(st.sampled_from(_VALUES))
        elif step == "child":
            element.append(draw(_WILD))
        elif step == "again" and len(element):
            element.append(deepcopy(draw(st.sampled_from(list(element)))))
    return domain


def _assert_listed(element: etree.Element, row: model.Element) -> None:
    for name, value in element.items():
        assert re.fullmatch(row.attributes[name].job, value, re.ASCII)
    assert row.text is not None or not (element.text or "").strip()
    for child in element:
        _assert_listed(child, row.children[child.tag])


def _assert_harmless(domain: etree.Element, scratch: Path) -> None:
    for element in domain.iter():
        assert element.tag not in ("hostdev", "filesystem", "emulator", "shmem", "loader", "nvram", "script")
        for value in (element.text or "", *element.attrib.values()):
            if value.strip().startswith("/") and element.tag not in ("title", "cmdline"):
                assert value.startswith(str(scratch)) or value in ("/run/c", "/dev/urandom", "/dev/random")
    for disk in domain.iterfind("devices/disk"):
        assert disk.get("type") == "file"
    for nic in domain.iterfind("devices/interface"):
        assert nic.get("type") in ("network", "user")
    for port in (*domain.iterfind("devices/serial"), *domain.iterfind("devices/console")):
        assert port.find("source").get("path") == "/run/c"
    for display in domain.iterfind("devices/graphics"):
        assert display.get("listen") == "127.0.0.1"


@settings(max_examples=examples(300), suppress_health_check=list(HealthCheck))
@given(st.one_of(_WILD, _fitting("domain", model.DOMAIN), _changed(), _changed()), st.booleans())
def test_whatever_it_brings_only_what_is_listed_comes_out(tmp_path_factory, brought, with_disk):
    job = Job(tmp_path_factory.mktemp("scratch", numbered=True))
    brought.tag = "domain"
    if with_disk:
        for old in brought.findall("devices"):
            brought.remove(old)
        brought.append(etree.fromstring(f"<devices>{DISK}</devices>"))
    text = etree.tostring(brought, encoding="unicode")
    try:
        _assert_listed(sanitize.sanitized(text, FILE).domain, model.DOMAIN)
        domain = job.domain(text)
    except errors.JobFault:
        return
    _assert_harmless(domain, job.scratch)
    assert domain.findtext("name") == "alice_lab_7.0"
    assert domain.findtext("description") == str(job.scratch)
