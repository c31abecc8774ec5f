"""What a front end writes is read as the daemon reads it, before anybody gets it."""

from unittest.mock import Mock
from xml.etree import ElementTree as etree

import htcondor2
import pytest

from tests.commands.submit import oracle, samples
from vmgahp.cli import main
from vmgahp.commands.submit.conversion import commands_of, rehearse, write
from vmgahp.commands.submit.machine import Guest, GuestDisk, fit_buses, name_devices
from vmgahp.commands.submit.report import Outcome, Summary
from vmgahp.job.ad import JobAd
from vmgahp.job.engine import NoEngine

DISK = ("disk", "disk.qcow2", "--memory", "1G")

pytestmark = pytest.mark.qemu

ODD = """\
universe = vm
Name = $(DOLLAR)(HOME) x
a = $(Name)-$(b:two words)-$(ClusterId).$(ProcId)-$(nothing)
A.b = 1
+Text = "a = b, $(DOLLAR)"
MY.Text2 = "$(a)"
my.text = "again"
a_list = x,$(Name) , y
NAME = last
queue
"""


def test_lines_are_read_as_htcondor_reads_them(home):
    """Each command of all that the front ends write, and macros."""
    texts = [ODD]
    for number, words in enumerate(samples.SOURCES):
        assert main(["vmgahp", "submit", *words, "--force", "-o", f"{number}.sub"]) == 0
        texts.append((home / f"{number}.sub").read_text())
    for text in texts:
        theirs = htcondor2.Submit(text)
        mine = commands_of(text)
        assert {name.lower(): theirs.expand(name) for name in theirs} == {name.lower(): mine[name] for name in mine}
        assert {name[3:] for name in mine if name[:3] == "MY."} == {name[3:] for name in theirs if name[:3] == "MY."}


@pytest.mark.parametrize("vm_type", ["kvm", "qemu"])
@pytest.mark.parametrize("words", samples.SOURCES, ids=lambda words: words[0])
def test_the_ad_is_the_one_that_condor_submit_makes(home, words, vm_type):
    """By HTCondor's reader of the lines, and by what its source makes of the commands."""
    assert main(["vmgahp", "submit", *words, "--type", vm_type, "-o", "job.sub"]) == 0
    text = (home / "job.sub").read_text()
    ours = rehearse(text, Summary()).ad.values()
    theirs = JobAd(oracle.attributes(text).items()).values()
    assert {name: ours.get(name) for name in theirs} == theirs
    assert set(ours) - set(theirs) == {"VM_WORKING_DIR", "User", "ClusterId", "ProcId"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        *((line, "--append") for line in ("queue 3", "x = 1\\", "queue a in (b=c)", "a\n=b")),
        *((line, "--append") for line in ("include : a=b", "x @=end", "use x : a=b")),
        ("vm_disk = disk.qcow2:vda:x:qcow2", "is not a permission"),
        ("transfer_input_files = seed.iso", "is not in the job's scratch directory"),
        ("should_transfer_files = NO", "is not in the job's scratch directory"),
        ('+VMPARAM_vm_Topolgy = "cores=2"', "there is no such option"),
        ('+vmparam_VM_Topology = "cores=3"', "vmparam_VM_Topology = 'cores=3': that are 3 CPUs"),
        ("universe = vanilla", "The universe is"),
        ("vm_type = vmware", "condor_submit takes no jobs of the type vmware"),
        ("vm_type = xen", "VMPARAM_Xen_Kernel"),
        ('+VMPARAM_Libvirt_XML = "seed.iso"', "seed.iso"),
        ('+VMPARAM_vm_User_Data = "cloud.yaml"', "cloud.yaml"),
    ],
)
def test_lines_that_do_more_than_set_a_command_or_would_hold_the_job_are_refused(home, capsys, line, said):
    assert main(["vmgahp", "submit", *DISK, "--append", line]) == 1
    problem = capsys.readouterr().err
    assert said in problem
    assert "vmgahp-" not in problem  # no directory that is gone
    assert not (home / "disk.sub").exists()


@pytest.mark.parametrize(
    "line",
    [
        '+VMPARAM_vm_User_Data = "cloud.yaml"', "xen_kernel = included",
        "requirements = TARGET.Memory > $(DOLLAR)(x:1)", "request_disk = 10GB", '+VMPARAM_vm_Data_Disk = "vdb:2G"',
        "vm_checkpoint = True",
    ],
)  # fmt: skip
def test_lines_with_which_the_job_would_run_are_added(home, line):
    (home / "seeds").mkdir()
    (home / "seeds" / "cloud.yaml").write_text("#cloud-config\n")
    more = "transfer_input_files = disk.qcow2, seeds/"
    assert main(["vmgahp", "submit", *DISK, "--append", line, "--append", more]) == 0


@pytest.mark.parametrize("files", ["disk.qcow2, ..", "disk.qcow2, .", "disk.qcow2, gone/"])
def test_a_list_of_files_that_makes_no_sense_is_refused(home, capsys, files):
    assert main(["vmgahp", "submit", *DISK, "--append", f"transfer_input_files = {files}"]) == 1
    assert "cannot be tried" in capsys.readouterr().err


def test_a_rehearsal_without_room_is_no_traceback(home, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(home / "nowhere"))
    assert main(["vmgahp", "submit", *DISK]) == 1
    assert "TMPDIR" in capsys.readouterr().err


def test_requirements_of_ones_own_are_added_to_those_of_the_vm(home, submit):
    read, _ = submit(*DISK, "--firmware", "uefi", "--append", "Requirements = TARGET.Fast || TARGET.Near")
    ours = 'stringListMember("uefi", TARGET.VM_kvm_ATTR_firmware)'
    assert read["requirements"] == f"{ours} && (TARGET.Fast || TARGET.Near)"


def test_without_htcondor_an_expression_is_told_and_not_tried(home, monkeypatch, capsys):
    monkeypatch.setattr("vmgahp.job.engine._ask", Mock(side_effect=NoEngine("it is not here")))
    assert main(["vmgahp", "submit", *DISK, "--append", "+VMPARAM_vm_TPM = MY.Wanted =?= 1"]) == 0
    assert "whether it would run was not tried" in capsys.readouterr().err


def test_disks_of_one_name_are_refused_or_converted_to_two(home, submit, refused):
    for name in ("one", "two"):
        (home / name).mkdir()
        samples.image(home / name / "disk.vmdk", "vmdk")
        samples.image(home / name / "disk.qcow2", "qcow2")
    said = refused("disk", "one/disk.vmdk", "two/disk.vmdk", "--memory", "1G")
    assert "would be one file in the job's scratch directory" in said
    read, _ = submit("disk", "one/disk.vmdk", "two/disk.vmdk", "one/disk.qcow2", "--memory", "1G", "--convert")
    assert read["vm_disk"] == "disk-2.qcow2:vda:w:qcow2,disk-3.qcow2:vdb:w:qcow2,disk.qcow2:vdc:w:qcow2"


def test_an_image_of_two_disks_is_transferred_once_and_written_by_none(submit, refused):
    read, _ = submit("disk", "seed.iso", "disk.qcow2", "seed.iso", "--memory", "1G")
    assert read["transfer_input_files"].count("seed.iso") == 1
    assert "is the image of two disks" in refused("disk", "disk.qcow2", "seed.iso", "disk.qcow2", "--memory", "1G")


# --- the buses of firmware and architecture


@pytest.mark.parametrize(
    ("options", "disk", "device", "why"),
    [
        ({}, {"device": "hda"}, "hda", ""),
        ({}, {"bus": "ide"}, "hda", ""),
        ({"Firmware": "uefi"}, {"device": "hdb"}, "sda", "UEFI"),
        ({"Firmware": "uefi-secure"}, {"bus": "ide"}, "sda", "UEFI"),
        ({"Firmware": "uefi"}, {"bus": "ide", "format": "iso", "writable": False}, "sda", "UEFI"),
        ({"Arch": "aarch64"}, {"device": "hda"}, "sda", "aarch64"),
        ({}, {"device": "hda", "writable": False}, "sda", "written"),
        ({}, {"device": "hda", "writable": False, "format": "iso"}, "hda", ""),
        ({}, {"device": "hda", "shared": True}, "sda", "one VM"),
        ({"Firmware": "uefi"}, {"device": "vda"}, "vda", ""),
        ({"Firmware": "uefi"}, {"device": "fda", "writable": False}, "fda", ""),
    ],
)
def test_a_disk_is_on_a_bus_that_its_machine_has(home, options, disk, device, why):
    """The daemon itself describes what comes of it, and would hold what was asked for where that is changed."""
    made = Guest("vm", 64, disks=[GuestDisk(f"{home}/a.img", **{"format": "raw"} | disk)], options=options)
    summary = Summary()
    fit_buses(made, summary)
    name_devices(made.disks)
    assert [one.device for one in made.disks] == [device]
    assert why in "".join(made.disks[0].changed)
    assert bool(why) == bool(made.disks[0].changed)
    assert f'dev="{device}"' in rehearse(write(made, "kvm", summary), summary).description


def test_a_floppy_of_a_machine_without_one_is_left_out(home):
    made = Guest("vm", 64, disks=[GuestDisk(f"{home}/a.img", "raw", "fda")], options={"Arch": "aarch64"})
    summary = Summary()
    fit_buses(made, summary)
    assert (made.disks, summary.losses) == ([], 1)


# --- the job's own XML


@pytest.fixture
def own(home):
    """Lets an XML of this text go with the job: what the daemon makes of it, and the lines."""

    def run(text, *words):
        (home / "own.xml").write_text(text)
        submit = ["vmgahp", "submit", "libvirt-xml", "own.xml", "--as-is"]
        assert main([*submit, *words, "--lax", "-o", "job.sub", "--force"]) == 0
        lines = (home / "job.sub").read_text()
        return etree.fromstring(rehearse(lines, Summary()).description), commands_of(lines)

    return run


SMALL = """\
<domain type='kvm'><name>small</name><memory unit='MiB'>256</memory><os{}><type>hvm</type>{}</os><devices>
<disk type='file' device='disk'><driver name='qemu' type='qcow2'/><source file='disk.qcow2'/>{}</disk>
<controller type='ide' index='0'/></devices></domain>
"""


def test_a_kernel_and_its_initrd_go_with_the_job(home, own):
    for name in ("linux", "ramdisk"):
        (home / name).write_text("x")
    boot = "<kernel>linux</kernel><initrd>ramdisk</initrd><cmdline>root=/dev/vda</cmdline>"
    domain, said = own(SMALL.format("", boot, "<target dev='vda' bus='virtio'/>"))
    assert domain.findtext("os/kernel") == "(copy of linux)"
    assert {f"{home}/linux", f"{home}/ramdisk"} <= set(said["transfer_input_files"].split(", "))


@pytest.mark.parametrize(("path", "said"), [("/etc/hostname", "a stranger may have"), ("gone", "cannot be opened")])
def test_a_kernel_that_a_stranger_names_is_beside_his_file(home, refused, path, said):
    (home / "own.xml").write_text(SMALL.format("", f"<kernel>{path}</kernel>", "<target dev='vda'/>"))
    assert said in refused("libvirt-xml", "own.xml", "--as-is")


@pytest.mark.parametrize(
    ("target", "device"),
    [("", "vda"), ("<target dev='nvme0n1' bus='nvme'/>", "sda"), ("<target dev='a b' bus='virtio'/>", "vda")],
)
def test_a_disk_without_a_device_that_jobs_have_gets_one(own, target, device):
    domain, said = own(SMALL.format("", "", target))
    assert said["vm_disk"] == f"disk.qcow2:{device}:w:qcow2"
    assert [one.get("dev") for one in domain.findall("devices/disk/target")] == [device]


def test_a_disk_of_a_bus_that_its_machine_lacks_moves_in_the_xml_too(own):
    target = "<target dev='hda' bus='ide'/><address type='drive' controller='0' bus='0' target='0' unit='0'/>"
    domain, said = own(SMALL.format(" firmware='efi'", "", target))
    assert said["vm_disk"] == "disk.qcow2:sda:w:qcow2"
    assert domain.find("devices/disk/target").attrib == {"dev": "sda", "bus": "sata"}
    assert domain.find("devices/disk/address") is None
    assert domain.find("devices/controller[@type='ide']") is None


def test_an_image_that_is_converted_is_so_in_the_xml_too(home, own):
    (home / "made").mkdir()
    samples.image(home / "disk.vmdk", "vmdk")
    text = SMALL.format("", "", "<target dev='vda' bus='virtio'/>").replace("qcow2", "vmdk")
    domain, said = own(text, "--convert", "--dir", str(home / "made"))
    assert said["vm_disk"] == "disk.qcow2:vda:w:qcow2"
    assert domain.find("devices/disk/driver").get("type") == "qcow2"


def test_nics_of_one_address_are_refused(home, refused):
    nic = "<interface type='user'><mac address='52:54:00:00:00:01'/></interface>"
    text = SMALL.format("", "", "<target dev='vda'/>").replace("</devices>", f"{nic}{nic}</devices>")
    (home / "own.xml").write_text(text)
    for words in ([], ["--as-is"]):
        assert "52:54:00:00:00:01" in refused("libvirt-xml", "own.xml", *words)


@pytest.mark.parametrize("clock", ["offset='absolute' start='253402300799'", "offset='timezone' timezone='Asia/Tokyo'"])
def test_a_clock_that_no_job_may_set_is_left_out_whole(own, capsys, clock):
    """libvirt takes no clock without the half of it that was left."""
    text = SMALL.format("", "", TARGET).replace("<devices>", f"<clock {clock}><timer name='rtc'/></clock><devices>")
    domain, _ = own(text)
    assert domain.find("clock") is None
    assert "clock" in samples.lost(capsys.readouterr().err)


NICS = """<interface type='user'><mac address='52:54:00:00:00:01'/><model type='e1000'/></interface>
<interface type='network'><source network='x'/><mac address='52:54:00:00:00:02'/></interface>"""
TARGET = "<target dev='vda' bus='virtio'/>"


@pytest.mark.parametrize(
    ("words", "kinds"), [([], "user network"), (["--network", "bridge"], "bridge bridge"), (["--network", "none"], "")]
)
def test_networks_of_the_xml_are_told_of_and_are_as_one_asks(own, capsys, words, kinds):
    domain, _ = own(SMALL.format("", "", TARGET).replace("</devices>", f"{NICS}</devices>"), *words)
    assert " ".join(nic.get("type") for nic in domain.findall("devices/interface")) == kinds
    said = capsys.readouterr().err
    told = samples.part(said, Outcome.CARRIED) + samples.changed(said)
    assert told.count("NIC: ") == 2
    assert ("e1000, 52:54:00:00:00:01" in told) == bool(kinds)


@pytest.mark.parametrize(
    ("vcpu", "words", "memory", "cpus"),
    [
        ("<vcpu current='2'>4</vcpu>", [], "256", "2"),
        ("<vcpu>4</vcpu>", ["--cpus", "2", "--memory", "128"], "128", "2"),
        ("<vcpu>4</vcpu>", ["--memory", "1G"], "1024", "4"),
    ],
)
def test_amounts_of_the_xml_are_those_of_the_job(own, vcpu, words, memory, cpus):
    topology = "<topology sockets='4' cores='1' threads='1'/>"
    more = f"</memory><currentMemory unit='KiB'>262144</currentMemory>{vcpu}<cpu>{topology}</cpu>"
    domain, _ = own(SMALL.format("", "", TARGET).replace("</memory>", more), *words)
    assert (domain.findtext("memory"), domain.findtext("vcpu")) == (memory, cpus)
    assert (domain.find("cpu/topology") is None) == (cpus != "4")
